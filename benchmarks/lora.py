"""What LoRA adapters cost: requests with an adapter against the same requests without, and loading one beside streams.

    python -m benchmarks.lora                                  the default model, 8 adapters of rank 16
    python -m benchmarks.lora model.gguf --save FILE
    python -m benchmarks.lora --synthetic llama2-7b:Q4_K_M --requests 64 --streams 64 --serve-args '--device cuda'

`one`: output tokens a second of a request; `many`: of requests at once, spread over the adapters; `ratio` is the part
that they have with adapters. Adapters are random, for all matrices of the layers but experts. `load`: seconds until an
adapter is loaded while streams run, and the 99th percentile of the gaps between their tokens before and meanwhile.
Samples are interleaved, every other time the other way round.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import typer

from llm_worker_bench.commands import common
from llm_worker_bench.commands.options import ResultFlags
from llm_worker_bench.http_client import Answer, Client, Target, api_address, run_event_loop
from llm_worker_bench.results import Recorder, describe_model
from llm_worker_bench.server_process import ServerProcess, worker_server
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.progress import StepProgress, step_progress
from llm_worker_rbee.weights import Checkpoint, open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf

from .batch import call, jobs_of, show

PROMPT, WARM_UP_TOKENS = 32, 8
ALONE_S, AFTER_S = 2.0, 0.5  # of streams, before an adapter is loaded and after it
QUANTILE = 0.99
RATE_OF_STREAM = 500  # tokens a second: a bound, so that streams last
BASE = "model"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and how often."""

    rank: int
    adapters: int
    requests: int
    streams: int
    tokens: int
    repetitions: int
    serve: Sequence[str]


def write_adapter(base: Checkpoint, path: Path, rank: int, seed: int) -> None:
    """Write an adapter with random pairs, small enough to leave the text alone."""
    random, tensors = np.random.default_rng(seed), dict[str, Any]()
    for name, tensor in base.tensors.items():
        if name.startswith("blk.") and name.endswith(".weight") and len(tensor.shape) == 2 and "norm" not in name:
            rows, columns = tensor.shape
            tensors[f"{name}.lora_a"] = random.standard_normal((rank, columns), np.float32) / np.float32(columns)
            tensors[f"{name}.lora_b"] = random.standard_normal((rows, rank), np.float32) / np.float32(rank)
    metadata = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": float(rank)}
    write_gguf(path, {**metadata, "general.architecture": base.architecture}, tensors)


async def rate(client: Client, names: Sequence[str], tokens: int, seed: int) -> float:
    """Return the output tokens a second of a request to each of these models, all at once."""
    jobs, answers = jobs_of(len(names), PROMPT, tokens, seed), [Answer() for _ in names]
    start = time.perf_counter()
    targets = [Target(client, name, "completions", ignore_eos=True) for name in names]
    await asyncio.gather(*(t.request(job, answer) for t, job, answer in zip(targets, jobs, answers, strict=True)))
    if len(names) == 1:  # without the prompt
        return (tokens - 1) / (answers[0].ended - answers[0].arrivals[0])
    return len(names) * tokens / (time.perf_counter() - start)


async def load_beside(server: ServerProcess, client: Client, names: Sequence[str], seed: int) -> tuple[float, ...]:
    """Return the seconds in which an adapter is loaded beside a stream of each model, and a quantile of the gaps
    between tokens before it and meanwhile."""
    jobs = jobs_of(len(names), PROMPT, int((2 * ALONE_S + AFTER_S) * RATE_OF_STREAM), seed)
    answers = [Answer() for _ in names]
    targets = [Target(client, name, "completions", ignore_eos=True) for name in names]
    streams = [
        asyncio.ensure_future(target.request(job, answer))
        for target, job, answer in zip(targets, jobs, answers, strict=True)
    ]
    while not all(answer.arrivals for answer in answers):
        await asyncio.sleep(0.01)
    begin = time.perf_counter()
    await asyncio.sleep(ALONE_S)
    start = time.perf_counter()
    await asyncio.to_thread(call, server, "/v1/load_lora_adapter", {"lora_name": "late", "lora_path": "late.gguf"})
    end = time.perf_counter()
    await asyncio.sleep(AFTER_S)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await asyncio.to_thread(call, server, "/v1/unload_lora_adapter", {"lora_name": "late"})
    return end - start, gap(answers, begin, start), gap(answers, start, end)


def gap(answers: Sequence[Answer], begin: float, end: float) -> float:
    """Return a quantile of the gaps that lie, at least in part, in a span of time."""
    pairs = (pair for answer in answers for pair in pairwise(answer.arrivals))
    gaps = sorted(after - before for before, after in pairs if after > begin and before < end)
    if not gaps:
        raise WorkerError("the streams ended before an adapter was loaded: use a model with a longer context")
    return gaps[int(QUANTILE * len(gaps))]


async def measure(
    recorder: Recorder, progress: StepProgress, plan: Plan, server: ServerProcess, client: Client
) -> None:
    """Measure what the plan has."""
    named = [f"adapter{i % plan.adapters}" for i in range(max(plan.requests, plan.streams))]
    await rate(client, [BASE, *named[: plan.adapters]], WARM_UP_TOKENS, 0)
    for i in range(plan.repetitions):
        for row, count in (("one", 1), ("many", plan.requests)):
            progress(f"{row}: with and without adapters", i, plan.repetitions)
            rates: dict[str, float] = {}
            for side in ("with", "without") if i % 2 else ("without", "with"):
                names = named[:count] if side == "with" else [BASE] * count
                rates[side] = await rate(client, names, plan.tokens, 10 * i + count)
                recorder.add_sample(f"{row}/{side}", "tok/s", rates[side], "higher")
            recorder.add_sample(f"{row}/ratio", "", rates["with"] / rates["without"], "higher")
    for i in range(plan.repetitions):
        progress("loading beside streams", i, plan.repetitions)
        seconds, before, meanwhile = await load_beside(server, client, named[: plan.streams], 1000 + i)
        recorder.add_sample("load", "s", seconds, "lower")
        for side, value in (("before", before), ("meanwhile", meanwhile)):
            recorder.add_sample(f"gap@p99/{side}", "s", value, "lower")
        recorder.add_sample("gap@p99/ratio", "", meanwhile / before, "lower")


def main(words: Sequence[str]) -> int:
    """Measure, show and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a file, a folder or a name; the default without")
    parser.add_argument("--synthetic", metavar="SHAPE:TYPE", help="a model of random weights instead")
    parser.add_argument("--rank", metavar="R", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--adapters", metavar="N", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--requests", metavar="N", type=int, default=16, help="at once (%(default)s)")
    parser.add_argument("--streams", metavar="N", type=int, default=8, help="while one is loaded (%(default)s)")
    parser.add_argument("--tokens", metavar="N", type=int, default=128, help="of an answer (%(default)s)")
    parser.add_argument("-r", "--repetitions", metavar="N", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--serve-args", metavar="'...'", default="", help="more options of `serve`, quoted")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the run to a file")
    given = parser.parse_args(words)
    counts = ("rank", "adapters", "requests", "streams", "tokens", "repetitions")
    plan = Plan(serve=shlex.split(given.serve_args), **{name: getattr(given, name) for name in counts})
    try:
        _measure(plan, common.find_source(given.model, given.synthetic), ResultFlags(save=given.save), words)
    except (WorkerError, typer.BadParameter, ValueError) as error:
        sys.exit(f"error: {error}")
    return 0


def _measure(plan: Plan, source: Any, results: ResultFlags, words: Sequence[str]) -> None:
    with common.recording("lora", results, show, **asdict(plan)) as recorder, step_progress() as progress:
        command = shlex.split(common.repeatable_command(words))[1:]
        recorder.command = shlex.join(["python", "-m", "benchmarks.lora", *command])
        with common.model_file(source, progress) as path, tempfile.TemporaryDirectory() as folder:
            recorder.model = describe_model(path, progress)
            names = [*(f"adapter{i}" for i in range(plan.adapters)), "late"]
            for seed, name in enumerate(names):
                progress("writing adapters", seed, len(names))
                write_adapter(open_checkpoint(path), Path(folder, f"{name}.gguf"), plan.rank, seed)
            loras = [word for name in names[:-1] for word in ("--lora", f"{name}={folder}/{name}.gguf")]
            limits = ["--max-loras", str(len(names)), "--max-lora-rank", str(plan.rank), "--lora-dir", folder]
            args = ["--model", str(path), "--served-model-name", BASE, *loras, *limits, *plan.serve]
            with worker_server(args) as server, closing(Client(api_address(server.url))) as client:
                run_event_loop(measure(recorder, progress, plan, server, client))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
