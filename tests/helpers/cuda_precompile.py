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
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from llm_worker_rbee.backends.cuda import precompile
from llm_worker_rbee.backends.cuda.elementwise import launch_convert
from llm_worker_rbee.backends.cuda.packed_weight import Activations
from llm_worker_rbee.backends.cuda.sampling_kernels import argmax_rows


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
    argmax_rows[(tokens,)](x, 64, torch.zeros(tokens, dtype=torch.int32), 64, BLOCK=64, num_warps=1)


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
    os.kill(compiler._process.pid, signal.SIGKILL)
    reasons = [reason for _, reason in compiler.compile([variant, variant], 2)]
    compiler.close()
    return {"recorded": len(found), "loaded": loaded, "hits": hits, "reasons": reasons}


if __name__ == "__main__":
    triton.runtime.driver.set_active(FakeDriver())
    Fatal.__module__ = "tests.helpers.cuda_precompile"  # where the compiler process finds it
    sys.modules[Fatal.__module__] = sys.modules["__main__"]
    print(json.dumps({"compile": compile_some, "look-up": look_up}[sys.argv[1]]()))
