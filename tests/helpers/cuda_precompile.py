"""Record and compile kernel variants for a Hopper GPU without one: `python -m tests.helpers.cuda_precompile MODE`.

It runs in a process of its own, because the tests' process runs kernels under the interpreter. `FakeDriver` tells
Triton of a GPU that can launch nothing. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from llm_worker_rbee.backends.cuda import CudaBackend, device, linear, precompile
from llm_worker_rbee.backends.cuda import launch as launcher
from llm_worker_rbee.backends.cuda.kernels.elementwise import launch_convert
from llm_worker_rbee.backends.cuda.kernels.sampling import argmax_rows
from llm_worker_rbee.backends.cuda.packed_weight import Activations
from llm_worker_rbee.backends.ops import SampleRow, StepLimits
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.models.kv_cache import KVCache
from tests.helpers import cuda_models
from tests.helpers.synthetic import Shape

LIMITS = StepLimits(max_batch=300, max_tokens=1500, max_logits=300, max_context=512)
NUM_STEPS = 60
GROUPED = Shape(1, 512, 8, 2, 1536, 1000, 512, head_dim=64)
MODELS = {  # shape, mix, type of the KV cache, deterministic
    "Q4_K_M": (GROUPED._replace(layers=3), "Q4_K_M", "bfloat16", False),
    "Q8_0, deterministic": (GROUPED, "Q8_0", "float16", True),
    "BF16, float8": (GROUPED._replace(kv_heads=8), "BF16", "float8", False),
    "Q4_K_M, op by op": (GROUPED, "Q4_K_M", "bfloat16", False),
}


class FakeDriver:
    """What Triton asks a driver for before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Fatal:
    """A constant that ends the compiling process, as the system does where memory runs out."""

    def __str__(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


def launch(tokens: int) -> None:
    """Launch kernels with arguments whose values and divisibility change with the number of tokens."""
    x, out = torch.zeros(tokens, 64), torch.zeros(tokens, 64)
    launch_convert(x, Activations(out))
    tokens_out = torch.zeros(tokens, dtype=torch.int32)
    argmax_rows[(tokens,)](x, 64, tokens_out, tokens_out, 0, tokens_out, 64, BLOCK=64, num_warps=1)


def record() -> tuple[list[precompile.KernelVariant], list[str]]:
    """Return the variants to compile of several steps, and the names of those found in the cache."""
    with precompile.count_compilations() as counted, precompile.recording() as found:
        for tokens in (1, 5, 16):
            launch(tokens)
    assert not counted.loaded
    return found, sorted(counted.compiled)


def files() -> list[str]:
    return sorted(path.name for path in Path(triton.knobs.cache.dir).glob("*/*.cubin"))


def compile_some() -> dict[str, Any]:
    """Compile two variants, one that is wrong and one that kills its process."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda line: lines.append(line.getMessage())  # type: ignore[method-assign]
    precompile.logger.addHandler(handler)
    precompile.start_compiler()
    found, cached = record()
    before = files()
    argmax = next(variant for variant in found if variant.name == "argmax_rows")
    wrong = replace(argmax, constants=dict.fromkeys(argmax.constants, 48))  # not a power of two
    fatal = replace(argmax, constants=dict.fromkeys(argmax.constants, Fatal()))
    reports: list[Any] = []
    count = precompile.compile_variants([*found, wrong, fatal], lambda *report: reports.append(report))
    again, loaded = record()
    return {
        "recorded": sorted(variant.name for variant in found), "cached": cached, "before": before, "compiled": count,
        "warnings": sorted(lines), "reports": reports, "after": files(), "again": len(again), "loaded": loaded,
    }  # fmt: skip


def look_up() -> dict[str, Any]:
    """Record what another process has compiled, and ask a compiler process that has ended for more."""
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    found, loaded = record()
    variant = precompile.KernelVariant(__name__, "unknown", {}, {}, {}, {}, ("cuda", 90, 32))
    compiler = precompile.CompilerProcess()
    os.kill(compiler.pid, signal.SIGKILL)
    reasons = [reason for _, reason in compiler.compile([variant, variant], 2)]
    compiler.close()
    return {"recorded": len(found), "loaded": loaded, "hits": hits, "reasons": reasons}


def compare_steps(seed: int) -> dict[str, Any]:
    """Record the warm-up of models, then random steps; return how many variants the warm-up has, and new ones."""
    random, found = np.random.default_rng(seed), {}
    device.open_device = lambda index: torch.device("cpu")  # kernels do not run: any memory will do
    launcher.has_pdl = lambda device: True
    linear._cublas = empty_product
    for name, (shape, mix, kv_type, is_deterministic) in MODELS.items():
        backend = CudaBackend(deterministic=is_deterministic)
        made = cuda_models.random_checkpoint(shape, mix)
        model = load_model(made, backend, read_model_config(made))
        if name.endswith("op by op"):
            model = replace(model, fused=None)
        requests = cuda_models.Requests(model, LIMITS.max_batch, kv_type, LIMITS.max_context // 16, 16)
        warm = record_warm_up(model, requests.cache)
        with precompile.recording() as later:
            for _ in range(NUM_STEPS):
                run_random_step(model, requests, random)
        found[name] = len(warm), [variant.name for variant in later if variant not in warm]
    return found


class RecordedError(Exception):
    """Ends a warm-up once it knows what to compile."""


def record_warm_up(model: Transformer, cache: KVCache) -> list[precompile.KernelVariant]:
    """Return the variants that the warm-up of a model compiles."""

    def stop(variants: list[precompile.KernelVariant], progress: Any) -> int:
        raise RecordedError(variants)

    precompile.compile_variants = stop
    try:
        model.ops.warm_up(partial(model.forward, cache=cache), model.fused, cache.layers, LIMITS, lambda *report: None)
    except RecordedError as recorded:
        return list(recorded.args[0])
    raise AssertionError("the warm-up compiles nothing")


def empty_product(
    x: torch.Tensor, w: torch.Tensor, factor: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what cuBLAS would write to."""
    return (
        out
        if out is not None
        else torch.empty(len(x), len(w), dtype=torch.float32 if x.dtype == torch.float16 else x.dtype)
    )


def run_random_step(model: Any, requests: cuda_models.Requests, random: np.random.Generator) -> None:
    """Run a step of decoding requests and prompts, in any proportion, and sample."""
    count = int(random.integers(1, LIMITS.max_batch + 1))
    decoding = int(random.choice([count, 0, random.integers(0, count + 1)]))
    left = LIMITS.max_tokens - decoding
    prompts = np.minimum(random.integers(1, 300, count - decoding), 1 + left // (count - decoding + 1))
    counts = [1] * decoding + prompts.tolist()
    requests.done[:] = random.integers(0, LIMITS.max_context - 300, LIMITS.max_batch)
    chosen = random.permutation(LIMITS.max_batch)[:count].tolist()
    is_scored = sum(counts) <= LIMITS.max_logits and bool(random.integers(2))
    batch = requests.step(chosen, counts, np.zeros(sum(counts), np.int64), logits_of_all=is_scored)
    logits = model.forward(batch, requests.cache)[:count]
    rows = [SampleRow(temperature=random.choice([0.0, 1.0]), logprobs=random.choice([None, 3])) for _ in range(count)]
    for row in rows[: int(random.integers(0, count + 1))]:
        row.mask = np.full(-(-logits.shape[1] // 32), -1, np.int32)
    model.ops.sample_async(logits, rows)


if __name__ == "__main__":
    triton.runtime.driver.set_active(FakeDriver())
    Fatal.__module__ = "tests.helpers.cuda_precompile"  # where the compiler process finds it
    sys.modules[Fatal.__module__] = sys.modules["__main__"]
    modes = {"compile": compile_some, "look-up": look_up, "steps": lambda: compare_steps(int(sys.argv[2]))}
    print(json.dumps(modes[sys.argv[1]]()))
