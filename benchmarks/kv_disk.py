"""What `serve --kv-dir` gives after a kill, and what it costs, over HTTP.

    python -m benchmarks.kv_disk                                       the default model, 4,000 words
    python -m benchmarks.kv_disk model.gguf --tokens 8000 --batch 4 --streams 0
    python -m benchmarks.kv_disk --synthetic llama3-8b:Q4_K_M --tokens 32000 --serve-args '--device cuda --max-batch 64'
    python -m benchmarks.kv_disk ... --batch 0 --streams 0 --ram 16GiB --serve-args '--device cuda --kv-memory 5GiB'

Each sample is a server of its own, with the folder and without in turn. `first_token`: a conversation is continued
after `kill -9` of worker and engine, from the request to a ready server to the first token. `decode@bN`: N requests
decode while the blocks of their prompts are written. `pause`: from `kill -9` of the engine until all streams go on.
`evicted`, with --ram: a conversation is continued after another one that leaves no room for it on the GPU.
`ratio` is how many times shorter a time is with the folder, or which part of a rate is left with it. The folder is a
temporary one: TMPDIR says where.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import typer

from llm_worker_bench.commands import common
from llm_worker_bench.commands.options import ResultFlags
from llm_worker_bench.http_client import Answer, BlockingClient, Client, Target, api_address, run_event_loop
from llm_worker_bench.processes import children_of
from llm_worker_bench.results import Recorder, Run, describe_model
from llm_worker_bench.server_process import ServerProcess, parse_metrics, worker_server
from llm_worker_bench.synthetic import Spec
from llm_worker_bench.workload import Job, Lengths, Prompt, Workload
from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.progress import StepProgress, step_progress

ANSWER, MESSAGE = 32, 24  # tokens of a turn's answer, words of the last message
DECODE_PROMPT, DECODE = 512, 256
STREAM_PROMPT, STREAM = 2000, 4096
SETTLE_S = 2.0  # after all streams have begun, before the kill
IN_FLIGHT_S = 0.2  # what comes so soon after the kill was computed before it
POLL_S, WRITE_LIMIT_S = 0.01, 600.0
SIDES, RAM_SIDES = ("kv_dir", "without"), ("kv_ram", "without")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and how often."""

    tokens: int
    batch: Sequence[int]
    streams: int
    pairs: int
    repetitions: int
    serve: Sequence[str]  # more arguments
    ram: str | None = None  # of --kv-ram
    vocab_size: int = 0  # above 0: prompts are token ids


class Turn(NamedTuple):
    """A request and its answer."""

    first_token_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int


def run(recorder: Recorder, progress: StepProgress, plan: Plan) -> None:
    """Measure what the plan has."""
    if plan.ram is None:
        _measure_first_tokens(recorder, progress, plan)
    for batch in plan.batch:
        for i in range(plan.pairs):
            progress(f"decode, batch {batch}", i, plan.pairs)
            rates = _measure_pair(plan, i, _decode_rate, _jobs(plan, batch, DECODE_PROMPT, DECODE, i))
            _record(recorder, f"decode@b{batch}", "tok/s", rates)
    for i in range(plan.repetitions if plan.streams else 0):
        progress("pause of a killed engine", i, plan.repetitions)
        pauses = _measure_pair(plan, i, _pause, _jobs(plan, plan.streams, STREAM_PROMPT, STREAM, i))
        _record(recorder, "pause", "s", pauses)
    for i in range(plan.repetitions if plan.ram else 0):
        progress("an evicted conversation", i, plan.repetitions)
        jobs = _jobs(plan, 2, plan.tokens, ANSWER, i)
        (last,) = _jobs(plan, 1, MESSAGE, ANSWER, i + 1)
        turns = _measure_sides(plan, i, _return_to, [*jobs, last], {"kv_ram": ["--kv-ram", plan.ram], "without": []})
        _record_turns(recorder, "evicted", turns, RAM_SIDES)


def _measure_pair(plan: Plan, i: int, act: Any, work: Any, folder: str | None = None) -> dict[str, Any]:
    """Measure with a folder and without."""
    with tempfile.TemporaryDirectory(prefix="llm-worker-rbee-") as empty:
        return _measure_sides(plan, i, act, work, {"kv_dir": ["--kv-dir", folder or empty], "without": []})


def _measure_sides(plan: Plan, i: int, act: Any, work: Any, sides: Mapping[str, Any]) -> dict[str, Any]:
    """Measure with the arguments of each side, which is the first in half of the pairs."""
    return {side: _serve(plan, sides[side], act, work) for side in (list(sides) if i % 2 == 0 else list(sides)[::-1])}


def _record(
    recorder: Recorder, name: str, unit: str, values: Mapping[str, float], sides: Sequence[str] = SIDES, **fields: Any
) -> None:
    for side in sides:
        more = fields if side == sides[0] else {}
        recorder.add_sample(f"{name}/{side}", unit, values[side], "lower" if unit == "s" else "higher", **more)
    ratio = values[sides[0]] / values["without"]
    recorder.add_sample(f"{name}/ratio", "", 1 / ratio if unit == "s" else ratio, "higher")


def _jobs(plan: Plan, count: int, prompt: int, answer: int, seed: int) -> list[Job]:
    lengths = Lengths(prompt, prompt), Lengths(answer, answer)
    return list(Workload(count, *lengths, seed=seed, vocab_size=plan.vocab_size).jobs())


def _serve(plan: Plan, args: Sequence[str], act: Callable[..., Coroutine[Any, Any, Any]], work: Any) -> Any:
    """Run `act` with a server, which is killed afterwards, and return its result."""
    args = ["--served-model-name", "model", *plan.serve, *args]
    endpoint = "completions" if plan.vocab_size else "chat"
    with worker_server(args) as server, closing(Client(api_address(server.url))) as client:
        try:
            return run_event_loop(act(server, Target(client, "model", endpoint, ignore_eos=True), work))
        finally:
            _kill(*children_of(server.pid), server.pid)


def _kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _measure_first_tokens(recorder: Recorder, progress: StepProgress, plan: Plan) -> None:
    """Continue a conversation again and again, each time after a kill."""
    (first,), num_same = _jobs(plan, 1, plan.tokens, ANSWER, 0), 0
    with tempfile.TemporaryDirectory(prefix="llm-worker-rbee-") as folder:
        progress("the conversation", 0, 0)
        begun = _serve(plan, ["--kv-dir", folder], _write_turn, first)
        for i, last in enumerate(_jobs(plan, plan.repetitions, MESSAGE, ANSWER, 1)):
            progress("first token after a kill", i, plan.repetitions)
            job = replace(last, prompt=_continue(first.prompt, begun.text, last.prompt))
            turns = _measure_pair(plan, i, _take_turn, job, folder)
            read = turns["kv_dir"]
            if 2 * read.cached_tokens < begun.prompt_tokens:
                raise WorkerError(f"the conversation was computed again, not read: {read}")
            num_same += read.text == turns["without"].text
            _record_turns(recorder, "first_token", turns, SIDES, same_answers=num_same / (i + 1))


def _record_turns(
    recorder: Recorder, name: str, turns: Mapping[str, Turn], sides: Sequence[str], **fields: Any
) -> None:
    seconds, read = {side: turn.first_token_s for side, turn in turns.items()}, turns[sides[0]]
    counts = {"prompt_tokens": read.prompt_tokens, "cached_tokens": read.cached_tokens}
    _record(recorder, name, "s", seconds, sides, **counts, **fields)


def _continue(first: Prompt, answer: str, last: Prompt) -> Prompt:
    """Return the conversation with its answer and another message; of token ids, without the answer."""
    if first.ids is not None:
        return Prompt(ids=first.ids + (last.ids or []))
    turns = (("user", first.text), ("assistant", answer), ("user", last.text))
    return Prompt(messages=[{"role": role, "content": text} for role, text in turns])


async def _take_turn(_: ServerProcess, target: Target, job: Job) -> Turn:
    answer, start = Answer(data=[]), time.perf_counter()
    await target.request(job, answer)
    chunks = [json.loads(text) for text in answer.data or () if text != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    usage = chunks[-1]["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(answer.arrivals[0] - start, text, usage["prompt_tokens"], cached)


async def _return_to(server: ServerProcess, target: Target, jobs: Sequence[Job]) -> Turn:
    """Continue the first of two conversations after the second."""
    first, other, last = jobs
    begun = await _take_turn(server, target, first)
    await _take_turn(server, target, other)
    return await _take_turn(server, target, replace(last, prompt=_continue(first.prompt, begun.text, last.prompt)))


async def _write_turn(server: ServerProcess, target: Target, job: Job) -> Turn:
    """Take a turn, and wait until its blocks are on disk."""
    turn, end = await _take_turn(server, target, job), time.monotonic() + WRITE_LIMIT_S
    num_blocks = turn.prompt_tokens // EngineConfig.block_size
    with closing(BlockingClient(target.client.address.authority)) as client:
        while time.monotonic() < end:
            metrics = parse_metrics((client.get("/metrics") or (0, b""))[1].decode())
            if metrics["kv_disk_written_blocks_total"] >= num_blocks and not metrics["kv_disk_waiting_blocks"]:
                return turn
            await asyncio.sleep(POLL_S)
    raise WorkerError(f"the blocks of the conversation were not written within {WRITE_LIMIT_S:.0f} s")


async def _decode_rate(_: ServerProcess, target: Target, jobs: Sequence[Job]) -> float:
    """Return the tokens a second of all requests while all of them decode."""
    answers = [Answer() for _ in jobs]
    await asyncio.gather(*map(target.request, jobs, answers))
    begin, end = max(a.arrivals[0] for a in answers), min(a.arrivals[-1] for a in answers)
    if begin >= end:
        raise WorkerError(f"{len(jobs)} requests never decoded at once: take a smaller --batch")
    return sum(begin < moment <= end for a in answers for moment in a.arrivals) / (end - begin)


async def _pause(server: ServerProcess, target: Target, jobs: Sequence[Job]) -> float:
    """Return the seconds from the kill of the engine until all streams go on."""
    answers = [Answer() for _ in jobs]
    streams = [asyncio.ensure_future(target.request(*pair)) for pair in zip(jobs, answers, strict=True)]

    async def all_after(moment: float) -> None:
        while not all(a.arrivals and a.arrivals[-1] > moment for a in answers):
            if ended := [stream for stream in streams if stream.done()]:
                await asyncio.gather(*ended)
                raise WorkerError("an answer ended before all streams had gone on: its context is too short for this")
            await asyncio.sleep(POLL_S)

    try:
        await all_after(0.0)
        await asyncio.sleep(SETTLE_S)
        _kill(*children_of(server.pid))
        killed = time.perf_counter()
        await all_after(killed + IN_FLIGHT_S)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return max(next(m for m in a.arrivals if m > killed + IN_FLIGHT_S) for a in answers) - killed


def show(run: Run) -> None:
    """Print the results."""
    rows = [["", "RESULT", "95% INTERVAL", "SAMPLES", "BESIDE"]]
    for result in run.results:
        shown, fields = "", result.fields
        if "cached_tokens" in fields:
            shown = "{cached_tokens:,} of {prompt_tokens:,} prompt tokens cached".format(**fields)
        if "same_answers" in fields:
            shown += ", {same_answers:.0%} same answers".format(**fields)
        value = common.quantity(result.estimate, result.unit)
        rows.append([result.name, value, common.interval(result), str(len(result.samples)), shown])
    common.print_table(rows, right=[1, 3])


def main(words: Sequence[str]) -> int:
    """Measure, show and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a file, a folder or a name; the default model without"
    )
    parser.add_argument("--synthetic", metavar="SHAPE:TYPES", help="random weights of a known shape")
    parser.add_argument("--tokens", metavar="N", type=int, default=4000, help="words of the conversation (%(default)s)")
    parser.add_argument("--batch", metavar="N,...", default="1,8", help="requests that decode; 0: none (%(default)s)")
    parser.add_argument(
        "--streams", metavar="N", type=int, default=16, help="of a killed engine; 0: none (%(default)s)"
    )
    parser.add_argument("--pairs", metavar="N", type=int, default=8, help="of servers that decode (%(default)s)")
    parser.add_argument("--repetitions", metavar="N", type=int, default=3, help="of all else (%(default)s)")
    parser.add_argument("--ram", metavar="SIZE", help="--kv-ram of a GPU, to measure an evicted conversation")
    parser.add_argument("--serve-args", metavar="'...'", default="", help="more options of `serve`, quoted")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the run to a file")
    given = parser.parse_args(words)
    counts = {"tokens": given.tokens, "streams": given.streams, "pairs": given.pairs, "repetitions": given.repetitions}
    try:
        batch = [n for n in common.parse_counts(given.batch, "--batch") if n]
        plan = Plan(batch=batch, ram=given.ram, serve=shlex.split(given.serve_args), **counts)
        _measure(plan, common.find_source(given.model, given.synthetic), ResultFlags(save=given.save), words)
    except (WorkerError, typer.BadParameter, ValueError) as error:
        sys.exit(f"error: {error}")
    return 0


def _measure(plan: Plan, source: Path | Spec, results: ResultFlags, words: Sequence[str]) -> None:
    with common.recording("kv", results, show, **asdict(plan)) as recorder, step_progress() as progress:
        command = shlex.split(common.repeatable_command(words))[1:]
        recorder.command = shlex.join(["python", "-m", "benchmarks.kv_disk", *command])
        with common.model_file(source, progress) as path:
            recorder.model = describe_model(path, progress)
            serve, vocab_size = ["--model", str(path), *plan.serve], 0
            if isinstance(source, Spec):
                serve += ["--quantize", source.quantize] if source.quantize else []
                vocab_size = source.shape.vocabulary
            run(recorder, progress, replace(plan, serve=serve, vocab_size=vocab_size))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
