"""Program that starts the worker once, timed from the inside, in a fresh process: run by `bench load`.

Arguments: the monotonic time at which the process was started, and a JSON object (model, options, prompt, warm_up). It
prints one JSON object: the seconds of each phase, bytes of memory, counts of kernels and graphs. With `warm_up` it
starts as the engine of `serve` does, otherwise as `LLM`. It is run by its path, because as a module of the package it
would import NumPy before the clock of the import starts.
"""

import json
import os
import sys
import time

ENTERED = time.monotonic()

from llm_worker_rbee.llm import LLM  # noqa: E402

IMPORTED = time.monotonic()

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from llm_worker_bench import processes  # noqa: E402
from llm_worker_bench.backends import peak_device_memory  # noqa: E402
from llm_worker_rbee.config import LoadOptions  # noqa: E402
from llm_worker_rbee.engine.engine import Engine  # noqa: E402
from llm_worker_rbee.engine.request import Request  # noqa: E402
from llm_worker_rbee.load import LoadPhases  # noqa: E402
from llm_worker_rbee.sampling_params import SamplingParams  # noqa: E402
from llm_worker_rbee.token_engine.launch import load_engine, warm_up  # noqa: E402
from llm_worker_rbee.token_engine.protocol import ModelInfo  # noqa: E402
from llm_worker_rbee.weights import open_checkpoint  # noqa: E402

BATCH_SIZES = (1, 3, 7, 16, 30, 64)  # that decode after the start: memory grows with what they use
PROMPT_LENGTHS = (5, 40, 130, 300)
FIRST_ID, NUM_IDS = 3, 200  # of prompts: every vocabulary has them


def main() -> None:
    """Load, generate one token, print; whatever libraries print goes to standard error."""
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    started, request = float(sys.argv[1]), json.loads(sys.argv[2])
    output: dict[str, Any] = {"counts": {}}
    seconds = {"interpreter": ENTERED - started, "import": IMPORTED - ENTERED}
    sizes = {"import": processes.resident_memory()}
    if request["warm_up"]:
        engine, info = start_engine(request, started, seconds, output["counts"])
        sizes["load"], loaded = processes.resident_memory(), time.monotonic()
        complete(engine, [make_prompt(0, PROMPT_LENGTHS[0])])
    else:
        llm = LLM(request["model"], **request["options"])
        seconds |= llm.phases
        engine, info = llm.engine, llm.info
        sizes["load"], loaded = processes.resident_memory(), time.monotonic()
        llm.generate(request["prompt"], max_tokens=1, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    ended = time.monotonic()
    seconds |= {"first_token": ended - loaded, "total": ended - started}
    sizes["peak"] = processes.peak_memory()
    if engine.model.ops.has_device_memory:
        sizes |= device_memory(engine, info)
        decode_many_sizes(engine)
        sizes |= {f"{name}_after_batches": size for name, size in device_memory(engine, info).items()}
    print(json.dumps({"seconds": seconds, "bytes": sizes, **output}), file=reply, flush=True)


def start_engine(
    request: dict[str, Any], started: float, seconds: dict[str, float], counts: dict[str, int]
) -> tuple[Engine, ModelInfo]:
    """Load and warm up an engine as `serve` does; `seconds` gets the phases, what the warm-up reports, and `ready`."""
    reports: dict[str, tuple[float, float]] = {}  # of each kind of work: the times of its first and last report

    def progress(what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        reports[what] = reports.get(what, (now, now))[0], now

    phases = LoadPhases(progress=progress)
    options = LoadOptions.from_arguments({**request["options"], "model": request["model"]})
    engine, info = load_engine(options, phases)
    reports.clear()
    done = warm_up(engine, phases)
    seconds |= phases.seconds
    seconds |= {f"warm-up: {what.partition(',')[0]}": last - first for what, (first, last) in reports.items()}
    seconds["ready"] = time.monotonic() - started
    counts |= {"kernels_compiled": done.compiled, "kernels_loaded": done.kernels}
    graphs = getattr(engine.model.fused, "graphs", None)
    counts["graphs_captured"] = 0 if graphs is None else graphs.num_captures
    return engine, info


def device_memory(engine: Engine, info: ModelInfo) -> dict[str, int]:
    """Return bytes on the GPU; `device_spare` is the driver's figure for the process less weights and KV cache."""
    ops, fused = engine.model.ops, engine.model.fused
    weights, peak = ops.weight_bytes(open_checkpoint(Path(info.path))), peak_device_memory(ops)
    graphs = 0 if fused is None else fused.graph_bytes
    sizes = {"weights": weights, "kv_cache": info.kv_cache_bytes, "graphs": graphs, **peak}
    sizes["spare"] = peak["process"] - weights - info.kv_cache_bytes
    return {f"device_{name}": size for name, size in sizes.items()}


def decode_many_sizes(engine: Engine) -> None:
    """Decode with each batch size twice; prompts are prefilled while other requests decode."""
    for batch in BATCH_SIZES:
        for _ in range(2):
            prompts = [make_prompt(i, PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)]) for i in range(batch)]
            complete(engine, prompts, [4 + i % 13 for i in range(batch)])


def make_prompt(start: int, length: int) -> list[int]:
    """Return some ids."""
    return [FIRST_ID + (start + i) % NUM_IDS for i in range(length)]


def complete(engine: Engine, prompts: list[list[int]], max_tokens: list[int] | None = None) -> None:
    """Generate greedily until all requests have finished: `max_tokens` of each, by default 1."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.0, ignore_eos=True).resolve()
    for i, prompt in enumerate(prompts):
        engine.add(Request(prompt, params, 1 if max_tokens is None else max_tokens[i], 0, frozenset()))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error


if __name__ == "__main__":
    main()
