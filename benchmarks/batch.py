"""What a batch of `serve --files-dir` takes from a chat beside it, and how fast it is.

    python -m benchmarks.batch                                       the default model, 200 lines
    python -m benchmarks.batch model.gguf --lines 2000 --serve-args '--max-batch 128'

`output`: output tokens a second of a batch, and of as many requests of clients at once: `ratio` is the part that the
batch has of it. `gap_p95` and `first_token`: a chat alone, and beside a batch whose lines are longer than it; `ratio`
and `later` compare them. Samples are in pairs, the first in half of them the other way round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from llm_worker_bench.commands import common
from llm_worker_bench.commands.options import ResultFlags
from llm_worker_bench.http_client import Answer, Client, Target, api_address, run_event_loop
from llm_worker_bench.results import Recorder, Run, describe_model
from llm_worker_bench.server_process import ServerProcess, worker_server
from llm_worker_bench.workload import Job, Lengths, Workload
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.progress import StepProgress, step_progress

ENDPOINT = "/v1/completions"
PROMPT, ANSWER = 128, 64
CHAT_PROMPT, CHAT_ANSWER, LONG_ANSWER = 64, 160, 1024
SETTLE_S, POLL_S = 1.0, 0.05
FORM = "form-of-the-benchmark"
MAX_TOKEN = 20_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and how often."""

    lines: int
    pairs: int
    chats: int
    serve: Sequence[str]


def call(server: ServerProcess, path: str, body: Any = None, kind: str = "application/json") -> Any:
    """Return the reply of a route."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": kind})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def submit(server: ServerProcess, jobs: Sequence[Job], answer: int) -> str:
    """Begin a batch of these prompts; return its id."""
    bodies = [{"prompt": job.prompt.ids, "max_tokens": answer, "temperature": 0, "ignore_eos": True} for job in jobs]
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": ENDPOINT, "body": body})
        for i, body in enumerate(bodies)
    ]
    part = f"--{FORM}\r\nContent-Disposition: form-data; name="
    form = f'{part}"purpose"\r\n\r\nbatch\r\n{part}"file"; filename="in"\r\n\r\n' + "\n".join(lines) + f"\r\n--{FORM}--"
    file = call(server, "/v1/files", form.encode(), f"multipart/form-data; boundary={FORM}")
    batch = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    return str(call(server, "/v1/batches", batch)["id"])


def wait(server: ServerProcess, batch: str, *statuses: str) -> Any:
    """Wait until a batch has one of these states."""
    while (state := call(server, f"/v1/batches/{batch}"))["status"] not in statuses:
        time.sleep(POLL_S)
    return state


def jobs_of(count: int, prompt: int, answer: int, seed: int) -> list[Job]:
    """Return the requests of a workload."""
    lengths = Lengths(prompt, prompt), Lengths(answer, answer)
    return list(Workload(count, *lengths, seed=seed, vocab_size=MAX_TOKEN).jobs())


def batch_rate(server: ServerProcess, jobs: Sequence[Job]) -> float:
    """Return the output tokens a second of a batch."""
    start = time.perf_counter()
    counts = wait(server, submit(server, jobs, ANSWER), "completed", "failed")["request_counts"]
    if counts["completed"] != len(jobs):
        raise WorkerError(f"lines of the batch failed: {counts}")
    return len(jobs) * ANSWER / (time.perf_counter() - start)


def client_rate(server: ServerProcess, jobs: Sequence[Job]) -> float:
    """Return the output tokens a second of the same requests of clients at once."""
    start, answers = time.perf_counter(), [Answer() for _ in jobs]

    async def send(target: Target) -> None:
        await asyncio.gather(*map(target.request, jobs, answers))

    _with_target(server, send)
    return len(jobs) * ANSWER / (time.perf_counter() - start)


def _with_target(server: ServerProcess, act: Any) -> None:
    with closing(Client(api_address(server.url))) as client:
        run_event_loop(act(Target(client, "model", "completions", ignore_eos=True)))


def chat(server: ServerProcess, job: Job) -> tuple[float, float]:
    """Return the 95th percentile of the gaps of an answer, and the time to its first token."""
    answer, start = Answer(), time.perf_counter()

    async def send(target: Target) -> None:
        await target.request(job, answer)

    _with_target(server, send)
    gaps = sorted(b - a for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False))
    return gaps[int(0.95 * len(gaps))], answer.arrivals[0] - start


def chat_beside(server: ServerProcess, job: Job, lines: Sequence[Job]) -> tuple[float, float]:
    """Return the same beside a batch."""
    batch = submit(server, lines, LONG_ANSWER)
    wait(server, batch, "in_progress")
    time.sleep(SETTLE_S)
    try:
        return chat(server, job)
    finally:
        call(server, f"/v1/batches/{batch}/cancel", {})
        wait(server, batch, "cancelled", "completed")


def run(recorder: Recorder, progress: StepProgress, plan: Plan, server: ServerProcess) -> None:
    """Measure what the plan has."""
    for i in range(plan.pairs):
        progress("a batch and clients", i, plan.pairs)
        sides = {"batch": batch_rate, "clients": client_rate}
        order = list(sides) if i % 2 else list(sides)[::-1]
        rates = {
            side: sides[side](server, jobs_of(plan.lines, PROMPT, ANSWER, 2 * i + k)) for k, side in enumerate(order)
        }
        for side, rate in rates.items():
            recorder.add_sample(f"output/{side}", "tok/s", rate, "higher")
        recorder.add_sample("output/ratio", "", rates["batch"] / rates["clients"], "higher")
    for i in range(plan.chats):
        progress("a chat beside a batch", i, plan.chats)
        job = jobs_of(1, CHAT_PROMPT, CHAT_ANSWER, 1000 + i)[0]
        lines = jobs_of(min(plan.lines, 80), PROMPT, LONG_ANSWER, 2000 + i)
        times: dict[str, tuple[float, float]] = {}
        for side in ("alone", "beside") if i % 2 else ("beside", "alone"):
            times[side] = chat(server, job) if side == "alone" else chat_beside(server, job, lines)
        _record_chat(recorder, times)


def _record_chat(recorder: Recorder, times: Mapping[str, tuple[float, float]]) -> None:
    for side, (gap, first) in times.items():
        recorder.add_sample(f"gap_p95/{side}", "s", gap, "lower")
        recorder.add_sample(f"first_token/{side}", "s", first, "lower")
    recorder.add_sample("gap_p95/ratio", "", times["beside"][0] / times["alone"][0], "lower")
    recorder.add_sample("first_token/later", "s", times["beside"][1] - times["alone"][1], "lower")


def show(run: Run) -> None:
    """Print the results."""
    rows = [["", "RESULT", "95% INTERVAL", "SAMPLES"]]
    for result in run.results:
        value = common.quantity(result.estimate, result.unit)
        rows.append([result.name, value, common.interval(result), str(len(result.samples))])
    common.print_table(rows, right=[1, 3])


def main(words: Sequence[str]) -> int:
    """Measure, show and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a file, a folder or a name; the default without")
    parser.add_argument("--lines", metavar="N", type=int, default=200, help="of a batch (%(default)s)")
    parser.add_argument("--pairs", metavar="N", type=int, default=4, help="batches (%(default)s)")
    parser.add_argument("--chats", metavar="N", type=int, default=20, help="pairs of chats (%(default)s)")
    parser.add_argument("--serve-args", metavar="'...'", default="", help="more options of `serve`, quoted")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the run to a file")
    options = parser.parse_args(words)
    plan = Plan(lines=options.lines, pairs=options.pairs, chats=options.chats, serve=shlex.split(options.serve_args))
    try:
        _measure(plan, common.find_source(options.model, None), ResultFlags(save=options.save), words)
    except (WorkerError, typer.BadParameter, ValueError) as error:
        sys.exit(f"error: {error}")
    return 0


def _measure(plan: Plan, source: Any, results: ResultFlags, words: Sequence[str]) -> None:
    with common.recording("batch", results, show, **asdict(plan)) as recorder, step_progress() as progress:
        command = shlex.split(common.repeatable_command(words))[1:]
        recorder.command = shlex.join(["python", "-m", "benchmarks.batch", *command])
        with common.model_file(source, progress) as path, tempfile.TemporaryDirectory() as folder:
            recorder.model = describe_model(path, progress)
            args = ["--model", str(path), "--served-model-name", "model", "--files-dir", f"{folder}/files", *plan.serve]
            with worker_server(args) as server:
                run(recorder, progress, plan, server)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
