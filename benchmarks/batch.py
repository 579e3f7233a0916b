"""How fast a batch of `serve --files-dir` is, and what a chat beside it feels.

    python -m benchmarks.batch                                       the default model, 256 lines
    python -m benchmarks.batch model.gguf --lines 2000 --serve-args '--max-batch 128'
    python -m benchmarks.batch --save docs/results/x86_64-2/batch.json.gz

`output`: output tokens a second of a batch, from its creation to its last result on disk, and of `bench e2e` of the
same work (prompts and answers of the same lengths, as many at a time, no server); `ratio` is the part that the batch
has of it. `gap_p95` and `first_token`: of a chat alone, and of one beside a batch whose lines are longer than it, in
pairs that follow each other, every other one the other way round; `ratio` and `later` compare the two of a pair. No
pair is begun after `--minutes`: with the defaults it ends within eight. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
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
MIN_PAIRS, WARM_UP_LINES = 2, 16


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and how often."""

    path: Path
    lines: int
    pairs: int
    chats: int
    seconds: float
    serve: Sequence[str]
    engine: Sequence[str]


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


def batch_rate(plan: Plan, seed: int) -> float:
    """Return the output tokens a second of a batch, after a short one; no other process has the machine meanwhile."""
    with _served(plan) as server:
        for count in (WARM_UP_LINES, plan.lines):
            jobs, start = jobs_of(count, PROMPT, ANSWER, 2 * seed + (count == plan.lines)), time.perf_counter()
            counts = wait(server, submit(server, jobs, ANSWER), "completed", "failed")["request_counts"]
            if counts["completed"] != count:
                raise WorkerError(f"lines of the batch failed: {counts}")
        return plan.lines * ANSWER / (time.perf_counter() - start)


def engine_rate(plan: Plan, max_batch: int) -> float:
    """Return the output tokens a second of the same work in an engine without a server, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json.gz"
        work = ["--pg", f"{PROMPT},{ANSWER}", "--batch", str(min(max_batch, plan.lines)), "--requests", str(plan.lines)]
        words = [
            "bench",
            "e2e",
            str(plan.path),
            "--pp",
            "0",
            "--tg",
            "0",
            *work,
            "-r",
            "1",
            *plan.engine,
            "--save",
            str(path),
        ]
        done = subprocess.run([sys.executable, "-m", "llm_worker_rbee", *words], capture_output=True, text=True)
        if done.returncode:
            raise WorkerError(f"bench e2e failed: {done.stderr.strip()[-300:]}")
        return next(result.estimate for result in Run.load(path).results if result.name.startswith("pp"))


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


def run(recorder: Recorder, progress: StepProgress, plan: Plan) -> None:
    """Measure what the plan has, the chats in half of the time."""
    start = time.monotonic()
    with _served(plan) as server:
        max_batch = call(server, "/info")["limits"]["max_batch"]
        chat(server, jobs_of(1, CHAT_PROMPT, CHAT_ANSWER, 999)[0])  # warms up
        for i in range(plan.chats):
            if i >= MIN_PAIRS and time.monotonic() > start + plan.seconds / 2:
                break
            progress("a chat beside a batch", i, plan.chats)
            job = jobs_of(1, CHAT_PROMPT, CHAT_ANSWER, 1000 + i)[0]
            lines = jobs_of(max_batch, PROMPT, LONG_ANSWER, 2000 + i)
            times: dict[str, tuple[float, float]] = {}
            for side in ("alone", "beside") if i % 2 else ("beside", "alone"):
                times[side] = chat(server, job) if side == "alone" else chat_beside(server, job, lines)
            _record_chat(recorder, times)
    for i in range(plan.pairs):
        if i >= MIN_PAIRS and time.monotonic() > start + plan.seconds:
            break
        progress("a batch, and an engine alone", i, plan.pairs)
        rates = dict[str, float]()
        for side in ("batch", "engine") if i % 2 else ("engine", "batch"):
            rates[side] = batch_rate(plan, i) if side == "batch" else engine_rate(plan, max_batch)
            recorder.add_sample(f"output/{side}", "tok/s", rates[side], "higher", lines=plan.lines)
        recorder.add_sample("output/ratio", "", rates["batch"] / rates["engine"], "higher")


@contextmanager
def _served(plan: Plan) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory() as folder:
        files = ["--files-dir", f"{folder}/files"]
        with worker_server(["--model", str(plan.path), "--served-model-name", "model", *files, *plan.serve]) as server:
            yield server


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
    parser.add_argument("--lines", metavar="N", type=int, default=256, help="of a batch (%(default)s)")
    parser.add_argument("--pairs", metavar="N", type=int, default=4, help="batches (%(default)s)")
    parser.add_argument("--minutes", metavar="M", type=float, default=5, help="no pair begins later (%(default)s)")
    parser.add_argument("--chats", metavar="N", type=int, default=20, help="pairs of chats (%(default)s)")
    parser.add_argument("--serve-args", metavar="'...'", default="", help="more options of `serve`, quoted")
    parser.add_argument("--e2e-args", metavar="'...'", default="", help="more options of `bench e2e`, quoted")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the run to a file")
    options = parser.parse_args(words)
    try:
        _measure(options, words)
    except (WorkerError, typer.BadParameter, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    return 0


def _measure(options: argparse.Namespace, words: Sequence[str]) -> None:
    counts: dict[str, Any] = {name: getattr(options, name) for name in ("lines", "pairs", "chats")}
    more: dict[str, Any] = {"serve": shlex.split(options.serve_args), "engine": shlex.split(options.e2e_args)}
    source, results = common.find_source(options.model, None), ResultFlags(save=options.save)
    settings = {**counts, **more, "minutes": options.minutes}
    with common.recording("batch", results, show, **settings) as recorder, step_progress() as progress:
        command = shlex.split(common.repeatable_command(words))[1:]
        recorder.command = shlex.join(["python", "-m", "benchmarks.batch", *command])
        with common.model_file(source, progress) as path:
            recorder.model = describe_model(path, progress)
            run(recorder, progress, Plan(path=path, seconds=60 * options.minutes, **counts, **more))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
