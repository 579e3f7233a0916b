# ruff: noqa: E402  the package is found from here
"""How fast an NVIDIA GPU answers, and whether it computes what it should: random weights of a real shape, through the
engine and its sampler.

    python benchmarks/gpu.py [--quick] [--shape llama2-7b] [--only Q4_0,Q8_0 | --only start] [--layers N]

Nothing is downloaded. GPU_MODEL=path compares greedy answers of a real file with the reference's. Without --only each
mix has a process of its own, so that a crash in one does not spoil the others. Ends in tables and one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
START = time.perf_counter()

import numpy as np
import torch
import triton
from gpu_apart import START_ONLY, apart
from gpu_model import file_figures, model_errors, model_of
from gpu_report import driver_version, tables
from gpu_start import start_figures

from llm_worker_rbee.backends.cuda import CudaBackend
from llm_worker_rbee.backends.cuda.decoder import DECODE_SIZES
from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.request import Request, SamplingParams
from llm_worker_rbee.models import Transformer

RESULT: dict[str, Any] = {}
USUAL_BOUND, BOUNDS = 3e-2, {"FP8": 0.15}  # of the errors of logits
PREFERRED = 0.5  # log-probability by which the reference may prefer its own token where answers part
PROFILE = "--profile" in sys.argv


def say(*what: object) -> None:
    """Print with the time since the start."""
    print(f"[{time.perf_counter() - START:6.1f}]", *what, flush=True)


def note(name: str, value: Any) -> None:
    """Keep a figure, and print it."""
    RESULT[name] = value
    say(f"{name}: {value}")


def requests(count: int, prompt: int, answer: int, vocabulary: int, seed: int = 0) -> list[Request]:
    """Random prompts that are answered greedily to the end."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    return [Request(rng.integers(3, vocabulary, prompt).tolist(), params, answer, 0, frozenset()) for _ in range(count)]


def engine_of(
    model: Transformer, tokens: int, max_batch: int, step_tokens: int = 512, kv_type: str = "bfloat16"
) -> Engine:
    """An engine with room for so many tokens, when the last one's is free: a decoder keeps it until its next step."""
    decoder: Any = model.fused
    decoder.graphs.forget()
    decoder._cache = None
    gc.collect()
    torch.cuda.empty_cache()
    config = EngineConfig(
        max_context=4096, n_blocks=tokens // 16 + max_batch, max_batch=max_batch, max_step_tokens=step_tokens,
        prefix_cache=False, target_itl_ms=1000.0,
    )  # fmt: skip
    return Engine(model, config, kv_type)


def steps(engine: Engine) -> Iterator[tuple[int, float]]:
    """(answers of the step, seconds) until all are done."""
    while engine.has_work:
        start = time.perf_counter()
        made = engine.step()
        yield len(made), time.perf_counter() - start


def decode_time(model: Transformer, batch: int, prompt: int, answer: int) -> tuple[float, float]:
    """Median seconds of a step in which `batch` requests answer; those of one on the device alone."""
    engine = engine_of(model, batch * (prompt + answer + 16), batch)
    for request in requests(batch, prompt, answer, model.config.vocab_size):
        engine.add(request)
    size = next(size for size in DECODE_SIZES if size >= batch)
    found, alone = [], 0.0
    for made, seconds in steps(engine):
        if made == batch:
            found.append(seconds)
        if len(found) == 8 and not alone:  # now: later steps leave other numbers where the graph reads
            alone = device_time(model, size)
            if PROFILE:
                say(f"   batch {batch}, prompts of {prompt}:")
                profile(lambda: model.fused.graphs._made[size][0].replay())  # type: ignore[union-attr]
    return median(found[4:]), alone


def device_time(model: Transformer, size: int, n: int = 20) -> float:
    """Seconds of a replay of the graph that is there for a batch size."""
    graph = model.fused.graphs._made[size][0]  # type: ignore[union-attr]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(n):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / n / 1e3


def prompt_time(model: Transformer, prompt: int, n: int = 5) -> float:
    """Median seconds from a prompt to its first token."""
    engine = engine_of(model, prompt + 64, 1)
    found = []
    for i in range(n + 2):
        engine.add(requests(1, prompt, 1, model.config.vocab_size, i)[0])
        found.append(sum(seconds for _, seconds in steps(engine)))
    return median(found[2:])


def serve_time(
    model: Transformer, count: int, prompt: int, answer: int, kv_type: str = "bfloat16"
) -> tuple[float, float]:
    """Seconds until all requests are answered, and of a step in which all of them answer."""
    engine = engine_of(model, count * (prompt + answer + 16), count, 4096, kv_type)
    for request in requests(count, prompt, answer, model.config.vocab_size):
        engine.add(request)
    start = time.perf_counter()
    found = list(steps(engine))
    answering = [seconds for made, seconds in found[len(found) // 2 :] if made == count]
    return time.perf_counter() - start, median(answering or [0.0])


def profile(work: Callable[[], Any], rows: int = 14) -> None:
    """Where the time of the device goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    events = [(e.self_device_time_total, e.count, e.key) for e in found.key_averages() if e.self_device_time_total]
    total = sum(us for us, _, _ in events)
    for us, count, key in sorted(events, reverse=True)[:rows]:
        say(f"      {us / 1e3:8.2f} ms {us / total:5.1%} {count:6} x {us / count:7.1f} us  {key[:70]}")


def measure(mix: str, shape: str, layers: int, quick: bool) -> None:
    """All figures of one mix of types."""
    start = time.perf_counter()
    model = model_of(shape, mix, layers)
    torch.cuda.synchronize()
    weights = time.perf_counter() - start
    one, alone = decode_time(model, 1, 8, 128)
    note(
        f"{mix} weights made, s / all compiled and measured, s",
        [round(weights, 1), round(time.perf_counter() - start, 1)],
    )
    note(f"{mix} tg128 tok/s", round(1 / one))
    note(f"{mix} step ms: whole, device, host", [round(1e3 * x, 3) for x in (one, alone, one - alone)])
    pp = prompt_time(model, 512)
    note(f"{mix} pp512 tok/s", round(512 / pp))
    many, alone = decode_time(model, 64, 32, 64)
    note(f"{mix} batch 64 tok/s", round(64 / many))
    note(f"{mix} batch 64 step ms: whole, device, host", [round(1e3 * x, 3) for x in (many, alone, many - alone)])
    if PROFILE:
        say("   pp512:")
        profile(lambda: prompt_time(model, 512, 1))
    deep, _ = decode_time(model, 1, 2048, 32)
    note(f"{mix} depth 2048 step ms, tok/s", [round(1e3 * deep, 3), round(1 / deep)])
    if not quick:
        for size in (2, 4, 8, 16, 32, 128):
            note(f"{mix} batch {size} tok/s", round(size / decode_time(model, size, 16, 16)[0]))
    if mix == "BF16":
        serve_time(model, 256, 128, 8)
        seconds, step = serve_time(model, 256, 128, 128)
        note(f"{mix} 256 requests of 128 in, 128 out: output tok/s", round(256 * 128 / seconds))
        note(f"{mix} 256 requests: s in all, ms of a step where all answer", [round(seconds, 3), round(1e3 * step, 2)])
        serve_time(model, 256, 128, 8, "float8")
        seconds, _ = serve_time(model, 256, 128, 128, "float8")
        note(f"{mix} 256 requests, keys and values in float8: output tok/s", round(256 * 128 / seconds))
    if mix in ("Q4_K_M", "BF16"):
        measure_deterministic(mix, model)
    note(f"{mix} device memory, GB", round(torch.cuda.max_memory_allocated() / 1e9, 2))


def measure_deterministic(mix: str, model: Transformer) -> None:
    """What the mode costs that gives the same bits in any company: the same weights."""
    ops: Any = CudaBackend(0, deterministic=True)
    model = replace(model, ops=ops, fused=ops.fuse(model.parts()))
    note(f"{mix} deterministic: tg128 tok/s", round(1 / decode_time(model, 1, 8, 64)[0]))
    note(f"{mix} deterministic: batch 64 tok/s", round(64 / decode_time(model, 64, 32, 32)[0]))
    note(f"{mix} deterministic: pp512 tok/s", round(512 / prompt_time(model, 512)))


def guarded(name: str, work: Callable[[], None]) -> None:
    """What fails is named in the result; the rest goes on."""
    try:
        work()
    except Exception:
        traceback.print_exc()
        RESULT.setdefault("failed", []).append(name)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def check(mix: str, shape: str, sizes: tuple[int, ...]) -> None:
    """Errors of the logits; too large ones fail."""
    errors = model_errors(mix, shape, sizes)
    note(f"check {mix}", errors)
    if not max(errors.values()) < BOUNDS.get(mix, USUAL_BOUND):
        raise AssertionError(f"{mix}: the logits are off by {max(errors.values())} of their deviation")


def check_start(shape: str, layers: int) -> None:
    """How long a start takes, and the memory of a worker."""
    for name, value in start_figures(shape, "Q4_K_M", layers).items():
        note(name, value)


def check_file(path: str) -> None:
    """A real file against the reference; answers may part only where it hardly prefers its own."""
    figures = file_figures(path)
    for name, value in figures.items():
        note(name, value)
    gaps = figures["file: log-probability by which the reference prefers its own there"]
    if not all(gap < PREFERRED for gap in gaps):
        raise AssertionError(f"{path}: answers part where the reference is sure: {gaps}")


def here(options: argparse.Namespace) -> None:
    """Check and measure in this process."""
    if options.only == START_ONLY:  # before this process takes anything of the GPU
        return guarded(START_ONLY, lambda: check_start(options.shape, options.layers))
    torch.backends.cuda.matmul.allow_tf32 = False
    note("versions", {"gpu": torch.cuda.get_device_name(), "driver": driver_version(), "cuda": torch.version.cuda,
                      "torch": torch.__version__, "triton": triton.__version__,
                      "python": sys.version.split()[0]})  # fmt: skip
    mixes = [mix for mix in options.only.split(",") if mix]
    checked = mixes if options.checks is None else [mix for mix in options.checks.split(",") if mix not in ("", "none")]
    sizes = (1, 2, 16, 64) if options.quick else (1, 2, 4, 8, 16, 24, 64, 128)
    for mix in checked:
        guarded(f"check {mix}", partial(check, mix, options.shape, sizes))
    for mix in mixes:
        guarded(f"measure {mix}", partial(measure, mix, options.shape, options.layers, options.quick))
    if os.environ.get("GPU_MODEL"):
        guarded("check_file", lambda: check_file(os.environ["GPU_MODEL"]))


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--shape", default="llama2-7b")
    parser.add_argument("--only", help="mixes, in this process; none is ''")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--checks", help="mixes that are checked, or none; default those that are measured")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is None:
        apart(sys.argv[1:], RESULT)
    else:
        here(options)
    if not options.part:
        print(tables(RESULT))
    print(json.dumps(RESULT), flush=True)
    sys.exit(1 if RESULT.get("failed") else 0)


if __name__ == "__main__":
    main()
