"""`llm-worker-rbee bench serving`: HTTP load on any OpenAI-compatible server."""

import math
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from llm_worker_rbee.cli.options import gather, option_fields
from llm_worker_rbee.cli.terminal import cell, columns, note, style
from llm_worker_rbee.config import MAX_VOCABULARY
from llm_worker_rbee.errors import InvalidRequestError, WorkerError
from llm_worker_rbee.progress import step_progress

from .. import serving as bench_serving
from ..http_client import PATHS, Address, Client, Target, api_address, parse_header
from ..results import Result, Run
from ..server_process import ServerMonitor, ServerProcess, worker_server
from ..serving import MAX_IN_FLIGHT, Limits, Load
from ..synthetic import Spec, parse
from ..workload import MAX_REQUESTS, Lengths, Workload, read_prompts
from .common import SYNTHETIC_HELP, ResultFlags, model_file, print_table, quantity, recording

DEFAULT_REQUESTS = 100
ENOUGH_FOR_P99 = 300  # so many hold a value above the true one, in 19 cases of 20
THROUGHPUTS = {
    "request_throughput": "requests",
    "output_throughput": "output tokens",
    "total_token_throughput": "tokens in and out",
}
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between pieces",
    "e2e": "whole answer",
    "queue_delay": "wait before sending",
    "ttft_from_arrival": "first token, from arrival",
    "e2e_from_arrival": "whole answer, from arrival",
}
OBSERVATIONS = {
    "server_start": "server's start, to ready",
    "event_throughput": "events",
    "server_processor": "server's processor time",
    "client_processor": "client's processor time",
    "server_peak_memory": "server's memory, at most",
    "health/median": "/health, median",
    "health/p99": "/health, P99",
    "health/max": "/health, slowest",
    "health/failed": "/health, not healthy",
    "server/requests": "requests, as it counts",
    "server/preemptions": "preempted",
    "server/running": "still running",
    "server/kv_cache_in_use": "KV cache still in use",
}

_server, _own, _load, _prompts = map(option_fields, ("Server", "Server to start", "Load", "Prompts"))


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """The server and the fields of its requests."""

    endpoint: str | None = _server(
        None, "chat|completions", "Route to measure.", show_default="chat; completions with --token-prompts"
    )
    model: str | None = _server(None, "NAME", "Name of the model.", "-m", show_default="the first it lists")
    api_key: str | None = _server(None, "KEY", "Sent as a bearer token.", envvar="LLM_WORKER_RBEE_API_KEY")
    header: list[str] | None = _server(None, "'NAME: VALUE'", "Additional header. Repeatable.")
    timeout: float = _server(600.0, "S", "Timeout of a request, in seconds.", min=0.001, max=86400)
    temperature: float = _server(0.0, "X", "Sampling temperature of the requests.", min=0, max=100)
    ignore_eos: bool = _server(
        False, None, "Ask for answers of full length (not every server knows the field).", "--ignore-eos"
    )
    no_usage: bool = _server(False, None, "Do not ask the server for token counts: count pieces of text.", "--no-usage")

    def route(self, *, sends_ids: bool) -> str:
        """Return the key of the route; raise if it does not exist or takes no token ids."""
        if self.endpoint is None:
            return "completions" if sends_ids else "chat"
        if self.endpoint not in PATHS:
            raise InvalidRequestError(f"--endpoint is {self.endpoint!r}: chat or completions", "endpoint")
        if sends_ids and self.endpoint == "chat":
            raise InvalidRequestError("the chat route takes no token ids: use --endpoint completions", "endpoint")
        return self.endpoint

    def target(self, endpoint: str, url: str, model: str) -> Target:
        """Return the server with a client of its own."""
        headers = dict(map(parse_header, self.header or ()))
        if self.api_key:
            headers["Authorization"] = parse_header(f"Authorization: Bearer {self.api_key}")[1]
        client = Client(api_address(url), headers)
        return Target(client, model, endpoint, self.temperature, self.ignore_eos, not self.no_usage)


@dataclass(frozen=True, kw_only=True)
class OwnFlags:
    """A server started for the length of the load."""

    spawn: bool = _own(False, None, "Start `serve` with the model of -m and measure it; give no URL.", "--spawn")
    synthetic: str | None = _own(None, "SHAPE:TYPES", SYNTHETIC_HELP)
    engine: str | None = _own(None, "model|null", "null: compute nothing, to measure the server alone.")
    serve_args: str | None = _own(None, "'...'", "More options of `serve`, quoted as in a shell.")
    health: bool = _own(False, None, "Poll /health during the run; always with --spawn.", "--health")

    def arguments(self, url: str | None, model: str | None) -> list[str]:
        """Return the arguments of `serve`, without a synthetic model; raise on options that exclude each other."""
        if self.spawn == (url is not None):
            raise typer.BadParameter("give the URL of a server, or --spawn to start one" + " (not both)" * self.spawn)
        if not self.spawn and (self.engine is not None or self.serve_args is not None):
            raise typer.BadParameter("--engine and --serve-args go with --spawn")
        if self.synthetic is not None and (not self.spawn or model is not None):
            raise typer.BadParameter("--synthetic goes with --spawn, and without --model")
        try:
            extra = shlex.split(self.serve_args or "")
        except ValueError as error:
            raise typer.BadParameter(f"--serve-args cannot be parsed: {error}") from None
        named = {"--model": model, "--engine": self.engine}
        return [part for name, value in named.items() if value is not None for part in (name, value)] + extra


@dataclass(frozen=True, kw_only=True)
class TrafficFlags:
    """How many requests, when, and with which prompts."""

    requests: int | None = _load(
        None, "N", "How many requests.", "-n", min=1, max=1_000_000, show_default="100, or all of --prompts"
    )
    rate: float = _load(math.inf, "R", "Requests per second; inf: all at once.", "-r")
    burstiness: float = _load(1.0, "X", "1: Poisson arrivals; less: bursts; more: regular.", min=0.001, max=1e6)
    concurrency: int | None = _load(
        None, "N", "Maximum number of requests in flight.", "-c", min=1, max=4096, show_default="4096"
    )
    duration: float | None = _load(None, "S", "Send no request after S seconds.", min=0.001)
    warm_up: int = _load(1, "N", "Requests before the run, not measured.", min=0, max=1000)
    input_len: str = _prompts("128", "LEN", "Words (or token ids) per prompt: N, LOW-HIGH or normal:MEAN,SD.")
    output_len: str = _prompts("64", "LEN", "Maximum tokens per answer, in the same form.")
    prompts: Path | None = _prompts(None, "FILE.jsonl", 'Lines of {"prompt": ...} or {"messages": [...]}.')
    token_prompts: int = _prompts(
        0,
        "VOCABULARY",
        "Send random token ids below VOCABULARY, not words; always with --synthetic.",
        min=0,
        max=MAX_VOCABULARY,
        show_default="words",
    )
    shared_prefix: int = _prompts(0, "N", "Begin each prompt with the same N words or ids.", min=0, max=1_000_000)
    prefix_groups: int = _prompts(1, "K", "Number of different shared prefixes.", min=1, max=1_000_000)
    seed: int = _prompts(0, "N", "Seed of the prompts.", min=0)

    def workload(self, endpoint: str, vocab_size: int) -> Workload:
        """Return the workload, of token ids if there is a vocabulary; raise on invalid options."""
        if not self.rate > 0:
            raise InvalidRequestError(f"--rate is {self.rate}: it must be above 0, or inf", "rate")
        if self.prompts is not None and self.shared_prefix:
            raise InvalidRequestError("--shared-prefix is for made prompts: --prompts brings its own", "shared_prefix")
        if self.prompts is not None and self.token_prompts:
            raise InvalidRequestError("both --prompts and --token-prompts are given: choose one", "token_prompts")
        prompts = [] if self.prompts is None else read_prompts(self.prompts)
        if endpoint == "completions" and any(prompt.text is None for prompt in prompts):
            raise InvalidRequestError(f'{self.prompts} holds "messages": use --endpoint chat', "endpoint")
        fallback = MAX_REQUESTS if self.duration is not None else len(prompts) or DEFAULT_REQUESTS
        return Workload(
            self.requests or min(fallback, MAX_REQUESTS),
            Lengths.parse(self.input_len, "--input-len"),
            Lengths.parse(self.output_len, "--output-len"),
            self.rate,
            self.burstiness,
            self.seed,
            self.shared_prefix,
            self.prefix_groups,
            prompts,
            vocab_size,
        )

    def limits(self, timeout: float) -> Limits:
        """Return concurrency, timeout and duration."""
        duration = math.inf if self.duration is None else self.duration
        return Limits(self.concurrency or MAX_IN_FLIGHT, timeout, duration, self.warm_up)


@gather(server=ServerFlags, own=OwnFlags, load=TrafficFlags, results=ResultFlags)
def serving(
    server: ServerFlags,
    own: OwnFlags,
    load: TrafficFlags,
    results: ResultFlags,
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="The server: http://host:port, with its path if not /v1. Or --spawn."),
    ] = None,
) -> None:
    """Put load on any OpenAI-compatible server; measure what its users would see.

    With --rate, arrivals are fixed beforehand: a slow server cannot hold them
    back. Without it, --concurrency says how many requests are under way.

    Failed requests are counted by kind and in no latency. Prompts are plain
    English words, about a token each. With --token-prompts they are token ids:
    --input-len is then exact, and so is --output-len with --ignore-eos.

    \b
    Examples:
      llm-worker-rbee bench serving localhost:8080 -n 50 -c 4
      llm-worker-rbee bench serving localhost:8080 --rate 2 --duration 60
      llm-worker-rbee bench serving localhost:8080 --prompts mine.jsonl
      llm-worker-rbee bench serving localhost:8080 --shared-prefix 1000
      llm-worker-rbee bench serving --spawn -c 16
      llm-worker-rbee bench serving --spawn --engine null -c 64 --output-len 256
      llm-worker-rbee bench serving --spawn --synthetic smollm2-135m:Q8_0 --input-len 27
    """
    args = own.arguments(url, server.model)
    try:
        spec = None if own.synthetic is None else parse(own.synthetic)
        vocab_size = load.token_prompts or (0 if spec is None or load.prompts else spec.shape.vocabulary)
        endpoint = server.route(sends_ids=vocab_size > 0)
        workload, limits = load.workload(endpoint, vocab_size), load.limits(server.timeout)
        server.target(endpoint, url or "localhost", "")  # raise before anything is sent
    except InvalidRequestError as error:
        if error.field is None:
            raise
        raise typer.BadParameter(str(error)) from None
    settings = _settings(server, own, load) | {"endpoint": endpoint}
    with _run_server(own, spec, args, server) as spawned:
        address = url or (spawned.url if spawned else "")
        name = None if own.spawn else server.model
        target = bench_serving.connect(partial(server.target, endpoint, address), name, server.timeout)
        monitor = None
        if own.spawn or own.health:
            monitor = ServerMonitor(Address.parse(address).authority, spawned.pid if spawned else None)
        with recording("serving", results, _show, url=address, **settings) as recorder, step_progress() as progress:
            if spawned:
                recorder.add_result(Result.exact("server_start", "s", spawned.start_s))
            bench_serving.run(recorder, Load(target, workload, limits, progress, monitor))
        if spawned:
            spawned.require_alive()
    if not any(result.name == "completed" and result.estimate for result in recorder.results()):
        examples = next(iter(recorder.details.get("errors", {}).values()), ["no request was sent"])
        raise WorkerError(f"no request was answered: {examples[0]}")


@contextmanager
def _run_server(
    own: OwnFlags, spec: Spec | None, args: list[str], server: ServerFlags
) -> Iterator[ServerProcess | None]:
    """Run a server of our own for the length of the block, with `--spawn`; a synthetic model is written first."""
    with ExitStack() as opened:
        if spec is not None:
            with step_progress() as progress:
                args = ["--model", str(opened.enter_context(model_file(spec, progress))), *args]
            args += ["--quantize", spec.quantize] if spec.quantize else []
        if not own.spawn:
            yield None
            return
        note("starting the server ...")
        yield opened.enter_context(worker_server(args, server.api_key, server.timeout))


def _settings(server: ServerFlags, own: OwnFlags, load: TrafficFlags) -> dict[str, Any]:
    """Return the settings of a saved run, without keys and values of headers."""
    settings = asdict(server) | asdict(own) | asdict(load)
    settings.pop("api_key")
    settings["header"] = [text.partition(":")[0] for text in server.header or ()]
    settings["prompts"] = None if load.prompts is None else load.prompts.name
    return {name: str(value) if value == math.inf else value for name, value in settings.items()}


def _show(run: Run) -> None:
    results = {result.name: result for result in run.results}
    _show_counts(run, results)
    rows = []
    for name, title in LATENCIES.items():
        if f"{name}/mean" in results:
            shown = [quantity(results[f"{name}/{which}"].estimate, "s") for which in ("mean", "median", "p95", "p99")]
            rows.append([title, *shown, _interval(results[f"{name}/p95"])])
    if rows:
        print()
        print_table([["", "MEAN", "MEDIAN", "P95", "P99", "95% INTERVAL OF P95"], *rows], right=[1, 2, 3, 4])
    if rows and results["completed"].estimate < ENOUGH_FOR_P99:
        note(f"P99 of fewer than {ENOUGH_FOR_P99} requests says little more than their largest does")
    if any(name.startswith(("health/", "server")) for name in results):
        print("\n" + "\n".join(columns(_observations(results), right=[1])))
    if run.details.get("counted_by") in ("chunks", "both"):
        note("the server did not count all tokens: deltas were counted, and words of the prompt")


def _show_counts(run: Run, results: dict[str, Result]) -> None:
    print(style(f"{cell(str(run.settings['url']))}: {cell(str((run.model or {}).get('name')))}\n", "dim"))
    shown = {title: results[name] for name, title in THROUGHPUTS.items() if name in results}
    rows = [[title, quantity(result.estimate, result.unit), _interval(result)] for title, result in shown.items()]
    if "completed" in results:
        rows.append(["completed", f"{results['completed'].estimate:,.0f}", f"in {run.details['duration_s']:.2f} s"])
    print("\n".join(columns(rows, right=[1])))
    if "unsent" in results and results["unsent"].estimate:
        text = f"unsent     {results['unsent'].estimate:,.0f} had arrived, but --concurrency did not allow them"
        print(style(text, "yellow"))
    for kind, count in (results["errors"].fields["by_kind"] if "errors" in results else {}).items():
        examples = "; ".join(run.details["errors"].get(kind, ()))
        print(style(f"failed     {count:,} {cell(kind)}: {cell(examples)}", "red"))


def _interval(result: Result) -> str:
    return f"{quantity(result.low, result.unit)} .. {quantity(result.high, result.unit)}"


def _observations(results: dict[str, Result]) -> Iterator[list[str]]:
    over = results["itl/p99"].fields.get("over_median") if "itl/p99" in results else None
    if over is not None:
        yield ["gap, P99 over median", f"{over:.2f} x", ""]
    for name, title in OBSERVATIONS.items():
        if name in results:
            share = results[name].fields.get("of_a_core")
            shown = "" if share is None else f"{share:.0%} of a core"
            yield [title, quantity(results[name].estimate, results[name].unit), shown]
