"""What it takes to switch between the models of one `serve`, over HTTP.

    python -m benchmarks.model_switch SMALL LARGE
    python -m benchmarks.model_switch smollm2 qwen.gguf third.gguf --switches 100 --cycles 50 --save models.json.gz

`switch/large`, `switch/small`: from a request of 16 words to its first token, while the other model has the only place;
`loaded/...`: the same once it is loaded. `wake`: the first token of a long conversation with a model that sleeps, its
blocks kept on disk. `gap@p95/alone`, `/loading` and `/ratio`: between two tokens of the small model while nothing else
happens, and while the large one is loaded. `switches`: how many clients' requests for all in turn were answered
without an error. `left`: the memory of all processes after a model was unloaded, as a part of that while it was loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from llm_worker_bench.commands import common
from llm_worker_bench.commands.options import ResultFlags
from llm_worker_bench.http_client import (
    Address,
    Answer,
    Client,
    RequestFailedError,
    Target,
    api_address,
    run_event_loop,
)
from llm_worker_bench.processes import children_of
from llm_worker_bench.results import Recorder, describe_model
from llm_worker_bench.server_process import ServerProcess, worker_server
from llm_worker_bench.workload import Job, Lengths, Workload
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.progress import StepProgress, step_progress
from llm_worker_rbee.server.settings import model_name
from llm_worker_rbee.weights.hub import locate_model

from .batch import show

PROMPT, ANSWER, LONG_ANSWER = 16, 8, 256
ALONE_S, QUANTILE = 5.0, 0.95
WRITTEN_S = 1.0  # for the blocks of a conversation to be on disk
ONE_PLACE = ("--max-models", "1")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and how often."""

    small: str
    large: str
    others: Sequence[str]  # for the switches of clients
    repetitions: int
    tokens: int  # words of the conversation of a model that sleeps
    switches: int
    clients: int
    cycles: int
    serve: Sequence[str]  # more arguments


class Models:
    """A server with both models."""

    def __init__(self, plan: Plan, server: ServerProcess, client: Client) -> None:
        self.plan, self.server, self.client = plan, server, client
        self.verbs = Client(Address.parse(server.url))
        self.all = [model_name(name) for name in (plan.small, plan.large, *plan.others)]
        self.small, self.large = self.all[:2]
        self._seed = 0

    def job(self, words: int = PROMPT, tokens: int = ANSWER) -> Job:
        """Return a request with a prompt that no other has."""
        self._seed += 1
        return next(iter(Workload(1, Lengths(words, words), Lengths(tokens, tokens), seed=self._seed).jobs()))

    async def ask(self, name: str, job: Job | None = None) -> tuple[float, list[float]]:
        """Return the seconds to the first token, and when each came."""
        answer, start = Answer(), time.perf_counter()
        await Target(self.client, name, ignore_eos=True).request(job or self.job(), answer)
        return answer.arrivals[0] - start, answer.arrivals

    async def post(self, path: str, **body: Any) -> None:
        async with self.verbs.request("POST", path, json.dumps(body).encode()) as response:
            await response.text(1 << 16)
            if response.status != 200:
                raise WorkerError(f"{path} answers with status {response.status}")

    def memory(self) -> int:
        """Return the proportional memory of all processes of the server."""
        pids = [self.server.pid]
        for pid in pids:
            pids += children_of(pid)
        total = 0
        for pid in pids:
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
        return total


def run(recorder: Recorder, progress: StepProgress, plan: Plan) -> None:
    """Measure what the plan has."""
    _serve(plan, ONE_PLACE, _measure_switches, recorder, progress)
    with tempfile.TemporaryDirectory(prefix="llm-worker-rbee-") as folder:
        _serve(plan, (*ONE_PLACE, "--kv-dir", folder), _measure_waking, recorder, progress)
    _serve(plan, (), _measure_gaps, recorder, progress)
    if plan.switches:
        _serve(plan, ONE_PLACE, _measure_clients, recorder, progress)
    if plan.cycles:
        _serve(plan, ONE_PLACE, _measure_memory, recorder, progress)


def _serve(
    plan: Plan, args: Sequence[str], act: Callable[..., Coroutine[Any, Any, None]], recorder: Recorder, progress: Any
) -> None:
    named = [f"--model={name}" for name in (plan.small, plan.large, *plan.others)]
    with worker_server([*named, *plan.serve, *args]) as server, closing(Client(api_address(server.url))) as client:
        models = Models(plan, server, client)
        with closing(models.verbs):
            run_event_loop(act(models, recorder, progress))


async def _measure_switches(models: Models, recorder: Recorder, progress: StepProgress) -> None:
    for i in range(models.plan.repetitions):
        progress("switching", i, models.plan.repetitions)
        for size, name in (("large", models.large), ("small", models.small)):
            for state in ("switch", "loaded"):
                recorder.add_sample(f"{state}/{size}", "s", (await models.ask(name))[0], "lower")


async def _measure_waking(models: Models, recorder: Recorder, progress: StepProgress) -> None:
    for i in range(models.plan.repetitions):
        progress("waking", i, models.plan.repetitions)
        job = models.job(models.plan.tokens)
        await models.ask(models.large, job)
        await asyncio.sleep(WRITTEN_S)
        await models.post("/sleep")
        recorder.add_sample("wake", "s", (await models.ask(models.large, job))[0], "lower")


async def _measure_gaps(models: Models, recorder: Recorder, progress: StepProgress) -> None:
    """Load the large model beside answers of the small one."""
    for i in range(models.plan.repetitions):
        progress("gaps", i, models.plan.repetitions)
        await models.post("/models/unload", model=models.large)
        await models.ask(models.small)
        alone = await _gaps_until(models, asyncio.ensure_future(asyncio.sleep(ALONE_S)))
        loading = await _gaps_until(models, asyncio.ensure_future(models.ask(models.large)))
        for side, gap in (("alone", alone), ("loading", loading)):
            recorder.add_sample(f"gap@p95/{side}", "s", gap, "lower")
        recorder.add_sample("gap@p95/ratio", "", loading / alone, "lower")


async def _gaps_until(models: Models, end: asyncio.Future[Any]) -> float:
    """Return a quantile of the gaps in answers of the small model until something has ended."""
    gaps: list[float] = []
    while not end.done():
        _, arrivals = await models.ask(models.small, models.job(tokens=LONG_ANSWER))
        gaps += [after - before for before, after in pairwise(arrivals)]
    await end
    return sorted(gaps)[int(QUANTILE * len(gaps))]


async def _measure_clients(models: Models, recorder: Recorder, progress: StepProgress) -> None:
    """Let clients ask for all models in turn: with one place, nearly each request is a switch."""
    count, failed, start = models.plan.switches // models.plan.clients, 0, time.perf_counter()

    async def work(client: int) -> None:
        nonlocal failed
        for i in range(count):
            try:
                await models.ask(models.all[(client + i) % len(models.all)])
            except RequestFailedError:
                failed += 1

    progress("clients", 0, 0)
    await asyncio.gather(*(work(client) for client in range(models.plan.clients)))
    total = count * models.plan.clients
    recorder.add_sample("switches", "of 1", 1 - failed / total, "higher", requests=total, failed=failed)
    recorder.add_sample("switches/seconds", "s", time.perf_counter() - start, "lower")


async def _measure_memory(models: Models, recorder: Recorder, progress: StepProgress) -> None:
    for i in range(models.plan.cycles):
        progress("loads and unloads", i, models.plan.cycles)
        await models.ask(models.large)
        loaded = models.memory()
        await models.post("/models/unload", model=models.large)
        left = models.memory()
        recorder.add_sample("left", "of 1", left / loaded, "lower", bytes=left, loaded_bytes=loaded)


def main(words: Sequence[str]) -> int:
    """Measure, show and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", metavar="SMALL", help="a file, a folder or a name")
    parser.add_argument("large", metavar="LARGE", help="another one")
    parser.add_argument("others", metavar="OTHER", nargs="*", help="more models, for the requests of clients")
    parser.add_argument("--tokens", metavar="N", type=int, default=4000, help="words of a conversation (%(default)s)")
    parser.add_argument("--switches", metavar="N", type=int, default=100, help="requests of clients (%(default)s)")
    parser.add_argument("--clients", metavar="N", type=int, default=8, help="at the same time (%(default)s)")
    parser.add_argument("--cycles", metavar="N", type=int, default=50, help="loads and unloads (%(default)s)")
    parser.add_argument("--repetitions", metavar="N", type=int, default=5, help="of all else (%(default)s)")
    parser.add_argument("--serve-args", metavar="'...'", default="", help="more options of `serve`, quoted")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the run to a file")
    given = parser.parse_args(words)
    counts = {name: getattr(given, name) for name in ("tokens", "switches", "clients", "cycles", "repetitions")}
    try:
        paths = [str(locate_model(name)) for name in (given.small, given.large, *given.others)]
        plan = Plan(small=paths[0], large=paths[1], others=paths[2:], serve=shlex.split(given.serve_args), **counts)
        settings = {**counts, "small": model_name(plan.small), "large": model_name(plan.large), "serve": plan.serve}
        settings["others"] = [model_name(name) for name in plan.others]
        with (
            common.recording("models", ResultFlags(save=given.save), show, **settings) as recorder,
            step_progress() as progress,
        ):
            command = shlex.split(common.repeatable_command(words))[1:]
            recorder.command = shlex.join(["python", "-m", "benchmarks.model_switch", *command])
            recorder.model = describe_model(Path(plan.large), progress)
            run(recorder, progress, plan)
    except (WorkerError, typer.BadParameter, ValueError) as error:
        sys.exit(f"error: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
