"""`llm-worker-rbee bench serving`: HTTP load on any OpenAI-compatible server."""

import math
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import typer

from llm_worker_rbee.cli.terminal import cell, columns, note, style
from llm_worker_rbee.errors import InvalidRequestError, WorkerError
from llm_worker_rbee.progress import step_progress

from .. import serving as bench_serving
from ..http_client import PATHS, Address, Client, Target, api_address, parse_header
from ..results import Result, Run
from ..server_process import ServerMonitor, ServerProcess, worker_server
from ..serving import MAX_IN_FLIGHT, Limits, Load
from ..synthetic import Spec, parse
from ..workload import MAX_REQUESTS, Lengths, Workload, read_prompts
from .common import model_file, print_table, quantity, recording
from .options import OwnFlags, ServerFlags, ServingCommand, TrafficFlags

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


def _route(server: ServerFlags, *, sends_ids: bool) -> str:
    """Return the key of the route; raise if it does not exist or takes no token ids."""
    if server.endpoint is None:
        return "completions" if sends_ids else "chat"
    if server.endpoint not in PATHS:
        raise InvalidRequestError(f"--endpoint is {server.endpoint!r}: chat or completions", "endpoint")
    if sends_ids and server.endpoint == "chat":
        raise InvalidRequestError("the chat route takes no token ids: use --endpoint completions", "endpoint")
    return server.endpoint


def _target(server: ServerFlags, endpoint: str, url: str, model: str) -> Target:
    """Return the server with a client of its own."""
    headers = dict(map(parse_header, server.header or ()))
    if server.api_key:
        headers["Authorization"] = parse_header(f"Authorization: Bearer {server.api_key}")[1]
    client = Client(api_address(url), headers)
    return Target(client, model, endpoint, server.temperature, server.ignore_eos, not server.no_usage)


def _arguments(own: OwnFlags, url: str | None, model: str | None) -> list[str]:
    """Return the arguments of `serve`, without a synthetic model; raise on options that exclude each other."""
    if own.spawn == (url is not None):
        raise typer.BadParameter("give the URL of a server, or --spawn to start one" + " (not both)" * own.spawn)
    if not own.spawn and (own.engine is not None or own.serve_args is not None):
        raise typer.BadParameter("--engine and --serve-args go with --spawn")
    if own.synthetic is not None and (not own.spawn or model is not None):
        raise typer.BadParameter("--synthetic goes with --spawn, and without --model")
    try:
        extra = shlex.split(own.serve_args or "")
    except ValueError as error:
        raise typer.BadParameter(f"--serve-args cannot be parsed: {error}") from None
    named = {"--model": model, "--engine": own.engine}
    return [part for name, value in named.items() if value is not None for part in (name, value)] + extra


def _workload(load: TrafficFlags, endpoint: str, vocab_size: int) -> Workload:
    """Return the workload, of token ids if there is a vocabulary; raise on invalid options."""
    if not load.rate > 0:
        raise InvalidRequestError(f"--rate is {load.rate}: it must be above 0, or inf", "rate")
    if load.prompts is not None and load.shared_prefix:
        raise InvalidRequestError("--shared-prefix is for made prompts: --prompts brings its own", "shared_prefix")
    if load.prompts is not None and load.token_prompts:
        raise InvalidRequestError("both --prompts and --token-prompts are given: choose one", "token_prompts")
    prompts = [] if load.prompts is None else read_prompts(load.prompts)
    if endpoint == "completions" and any(prompt.text is None for prompt in prompts):
        raise InvalidRequestError(f'{load.prompts} holds "messages": use --endpoint chat', "endpoint")
    fallback = MAX_REQUESTS if load.duration is not None else len(prompts) or DEFAULT_REQUESTS
    return Workload(
        load.requests or min(fallback, MAX_REQUESTS),
        Lengths.parse(load.input_len, "--input-len"),
        Lengths.parse(load.output_len, "--output-len"),
        load.rate,
        load.burstiness,
        load.seed,
        load.shared_prefix,
        load.prefix_groups,
        prompts,
        vocab_size,
    )


def _limits(load: TrafficFlags, timeout: float) -> Limits:
    """Return concurrency, timeout and duration."""
    duration = math.inf if load.duration is None else load.duration
    return Limits(load.concurrency or MAX_IN_FLIGHT, timeout, duration, load.warm_up)


def serving(options: ServingCommand) -> None:
    """Put the load on the server."""
    server, own, load, url = options.server, options.own, options.load, options.url
    args = _arguments(own, url, server.model)
    try:
        spec = None if own.synthetic is None else parse(own.synthetic)
        vocab_size = load.token_prompts or (0 if spec is None or load.prompts else spec.shape.vocabulary)
        endpoint = _route(server, sends_ids=vocab_size > 0)
        workload, limits = _workload(load, endpoint, vocab_size), _limits(load, server.timeout)
        _target(server, endpoint, url or "localhost", "")  # raise before anything is sent
    except InvalidRequestError as error:
        if error.field is None:
            raise
        raise typer.BadParameter(str(error)) from None
    settings = _settings(server, own, load) | {"endpoint": endpoint}
    with _run_server(own, spec, args, server) as spawned:
        address = url or (spawned.url if spawned else "")
        name = None if own.spawn else server.model
        target = bench_serving.connect(partial(_target, server, endpoint, address), name, server.timeout)
        monitor = None
        if own.spawn or own.health:
            monitor = ServerMonitor(Address.parse(address).authority, spawned.pid if spawned else None)
        with (
            recording("serving", options.results, _show, url=address, **settings) as recorder,
            step_progress() as progress,
        ):
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
