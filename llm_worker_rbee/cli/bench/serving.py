"""`llm-worker-rbee bench serving`: HTTP load against any OpenAI-compatible server."""

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InvalidRequestError, WorkerError
from ..common import gather
from ..terminal import cell, columns, note, style
from .common import ResultOptions, quantity, recording, steps

if TYPE_CHECKING:
    from ...bench.results import Result, Run
    from ...bench.serving import Limits
    from ...bench.serving.openai_client import Target
    from ...bench.serving.workload import Workload

SERVER_PANEL, LOAD_PANEL, PROMPTS_PANEL = "Server", "Load", "Prompts"
DEFAULT_REQUESTS = 100
ENOUGH_FOR_P99 = 300  # so many hold a value above the true one, in 19 cases of 20
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between pieces",
    "e2e": "whole answer",
    "queue_delay": "wait before sending",
    "ttft_from_arrival": "first token, from arrival",
    "e2e_from_arrival": "whole answer, from arrival",
}


def _option(panel: str) -> Any:
    def option(*names: str, help: str, **more: Any) -> Any:
        return typer.Option(*names, help=help, rich_help_panel=panel, **more)

    return option


_server, _load, _prompts = map(_option, (SERVER_PANEL, LOAD_PANEL, PROMPTS_PANEL))


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Which server, and how it is asked."""

    endpoint: Annotated[str, _server("--endpoint", metavar="chat|completions", help="Which of the two.")] = "chat"
    model: Annotated[
        str | None, _server("--model", "-m", metavar="NAME", show_default="the first it lists", help="Whom to ask.")
    ] = None
    api_key: Annotated[
        str | None,
        _server("--api-key", metavar="KEY", envvar="LLM_WORKER_RBEE_API_KEY", help="Sent as a bearer token."),
    ] = None
    header: Annotated[
        list[str] | None, _server("--header", metavar="'NAME: VALUE'", help="A header more. Repeatable.")
    ] = None
    timeout: Annotated[
        float, _server("--timeout", metavar="S", min=0.001, max=86400, help="Give up on a request after this.")
    ] = 600.0
    temperature: Annotated[float, _server("--temperature", metavar="X", min=0, max=100, help="Sent along.")] = 0.0
    ignore_eos: Annotated[
        bool, _server("--ignore-eos", help="Ask for answers of full length (not every server knows the field).")
    ] = False
    no_usage: Annotated[
        bool, _server("--no-usage", help="Do not ask the server for token counts: count pieces of text.")
    ] = False

    def target(self, url: str, model: str) -> "Target":
        """The server with a client of its own."""
        from ...bench.serving import openai_client
        from ...bench.serving.http_client import Client, checked_header

        if self.endpoint not in openai_client.PATHS:
            raise InvalidRequestError(f"--endpoint is {self.endpoint!r}: chat or completions", "endpoint")
        headers = dict(map(checked_header, self.header or ()))
        if self.api_key:
            headers["Authorization"] = checked_header(f"Authorization: Bearer {self.api_key}")[1]
        return openai_client.Target(
            Client(openai_client.address(url), headers),
            model,
            self.endpoint,  # type: ignore[arg-type]
            self.temperature,
            self.ignore_eos,
            not self.no_usage,
        )


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How many requests, when, and what is asked."""

    requests: Annotated[
        int | None,
        _load("--requests", "-n", metavar="N", min=1, max=1_000_000, show_default="100, or all of --prompts",
              help="How many requests."),
    ] = None  # fmt: skip
    rate: Annotated[float, _load("--rate", "-r", metavar="R", help="Requests a second; inf: as soon as may be.")] = (
        math.inf
    )
    burstiness: Annotated[
        float,
        _load("--burstiness", metavar="X", min=0.001, max=1e6, help="1: Poisson arrivals; below bursts, above a beat."),
    ] = 1.0
    concurrency: Annotated[
        int | None, _load("--concurrency", "-c", metavar="N", min=1, max=4096, show_default="4096",
                          help="The most in flight."),
    ] = None  # fmt: skip
    duration: Annotated[
        float | None, _load("--duration", metavar="S", min=0.001, help="Send nothing new after so many seconds.")
    ] = None
    warm_up: Annotated[
        int, _load("--warm-up", metavar="N", min=0, max=1000, help="Requests before the run, not measured.")
    ] = 1
    input_len: Annotated[
        str, _prompts("--input-len", metavar="LEN", help="Words a prompt: N, LOW-HIGH or normal:MEAN,SD.")
    ] = "128"
    output_len: Annotated[
        str, _prompts("--output-len", metavar="LEN", help="Tokens an answer, at most; written alike.")
    ] = "64"
    prompts: Annotated[
        Path | None,
        _prompts("--prompts", metavar="FILE.jsonl", help='Lines of {"prompt": ...} or {"messages": [...]}.'),
    ] = None
    shared_prefix: Annotated[
        int, _prompts("--shared-prefix", metavar="N", min=0, max=1_000_000, help="The same N words before each prompt.")
    ] = 0
    prefix_groups: Annotated[
        int, _prompts("--prefix-groups", metavar="K", min=1, max=1_000_000, help="K such beginnings, in turn.")
    ] = 1
    seed: Annotated[int, _prompts("--seed", metavar="N", min=0, help="The same seed asks the same.")] = 0

    def workload(self, endpoint: str) -> "Workload":
        """The requests; what cannot be is wrong usage."""
        from ...bench.prompts import read_prompts
        from ...bench.serving.workload import MOST_REQUESTS, Lengths, Workload

        if not self.rate > 0:
            raise InvalidRequestError(f"--rate is {self.rate}: it must be above 0, or inf", "rate")
        if self.prompts is not None and self.shared_prefix:
            raise InvalidRequestError("--shared-prefix is for made prompts: --prompts brings its own", "shared_prefix")
        prompts = [] if self.prompts is None else read_prompts(self.prompts)
        if endpoint == "completions" and any(prompt.text is None for prompt in prompts):
            raise InvalidRequestError(f'{self.prompts} holds "messages": use --endpoint chat', "endpoint")
        fallback = MOST_REQUESTS if self.duration is not None else len(prompts) or DEFAULT_REQUESTS
        return Workload(
            self.requests or min(fallback, MOST_REQUESTS),
            Lengths.parse(self.input_len, "--input-len"),
            Lengths.parse(self.output_len, "--output-len"),
            self.rate,
            self.burstiness,
            self.seed,
            self.shared_prefix,
            self.prefix_groups,
            prompts,
        )

    def limits(self, timeout: float) -> "Limits":
        """How much at once, and for how long."""
        from ...bench.serving import MOST_IN_FLIGHT, Limits

        duration = math.inf if self.duration is None else self.duration
        return Limits(self.concurrency or MOST_IN_FLIGHT, timeout, duration, self.warm_up)


@gather(server=ServerOptions, load=LoadOptions, results=ResultOptions)
def serving(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server: http://host:port, with its path if not /v1.")],
    server: ServerOptions,
    load: LoadOptions,
    results: ResultOptions,
) -> None:
    """Put load on any OpenAI-compatible server; measure what its users would see.

    With --rate, arrivals are fixed beforehand: a slow server cannot hold them
    back. Without it, --concurrency says how many requests are under way.

    Failed requests are counted by kind and in no latency. Prompts are plain
    English words, about a token each.

    \b
    Examples:
      llm-worker-rbee bench serving localhost:8080 -n 50 -c 4
      llm-worker-rbee bench serving localhost:8080 --rate 2 --duration 60
      llm-worker-rbee bench serving localhost:8080 --prompts mine.jsonl
      llm-worker-rbee bench serving localhost:8080 --shared-prefix 1000
    """
    from ...bench import serving as room

    try:
        workload, limits = load.workload(server.endpoint), load.limits(server.timeout)
        server.target(url, "")  # what is wrong with it is said before anything is sent
    except InvalidRequestError as error:
        if error.field is None:
            raise
        raise typer.BadParameter(str(error)) from None
    target = room.reach(partial(server.target, url), server.model, server.timeout)
    with recording("serving", results, _show, url=url, **_settings(server, load)) as recorder, steps() as progress:
        room.run(recorder, progress, target, workload, limits)
    found = {result.name: result.estimate for result in recorder.results()}
    if not found.get("completed"):
        first = next((told for told in recorder.details.get("errors", {}).values()), ["no request was sent"])[0]
        raise WorkerError(f"no request was answered: {first}")


def _settings(server: ServerOptions, load: LoadOptions) -> dict[str, Any]:
    """What a saved run tells; keys and the values of headers stay out."""
    known = asdict(server) | asdict(load)
    known.pop("api_key")
    known["header"] = [text.partition(":")[0] for text in server.header or ()]
    known["prompts"] = None if load.prompts is None else load.prompts.name
    return {name: str(value) if value == math.inf else value for name, value in known.items()}


def _show(run: "Run") -> None:
    found = {result.name: result for result in run.results}
    _show_counts(run, found)
    head = ["", "MEAN", "MEDIAN", "P95", "P99", "95% INTERVAL OF P95"]
    rows = [[title, *_latency(found, name)] for name, title in TITLES.items() if f"{name}/mean" in found]
    if rows:
        lines = columns([head, *rows], right=[1, 2, 3, 4])
        print("\n" + style(lines[0], "bold"))
        print("\n".join(lines[1:]))
    if rows and found["completed"].estimate < ENOUGH_FOR_P99:
        note(f"P99 of fewer than {ENOUGH_FOR_P99} requests says little more than their largest does")
    if run.details.get("counted_by") in ("chunks", "both"):
        note("the server did not count all tokens: pieces of text were counted, and words of the prompt")


def _show_counts(run: "Run", found: dict[str, "Result"]) -> None:
    print(style(f"{cell(str(run.settings['url']))}: {cell(str((run.model or {}).get('name')))}\n", "dim"))
    rows = []
    for name, title in (
        ("request_throughput", "requests"),
        ("output_throughput", "output tokens"),
        ("total_token_throughput", "tokens in and out"),
    ):
        if name in found:
            rows.append([title, quantity(found[name].estimate, found[name].unit), _interval(found[name])])
    if "completed" in found:
        rows.append(["completed", f"{found['completed'].estimate:,.0f}", f"in {run.details['duration_s']:.2f} s"])
    print("\n".join(columns(rows, right=[1])))
    if "unsent" in found and found["unsent"].estimate:
        text = f"unsent     {found['unsent'].estimate:,.0f} had arrived, but found no room: see --concurrency"
        print(style(text, "yellow"))
    for kind, count in (found["errors"].fields["by_kind"] if "errors" in found else {}).items():
        told = "; ".join(run.details["errors"].get(kind, ()))
        print(style(f"failed     {count:,} {cell(kind)}: {cell(told)}", "red"))


def _latency(found: dict[str, "Result"], name: str) -> list[str]:
    shown = [quantity(found[f"{name}/{which}"].estimate, "s") for which in ("mean", "median", "p95", "p99")]
    return [*shown, _interval(found[f"{name}/p95"])]


def _interval(result: "Result") -> str:
    return f"{quantity(result.low, result.unit)} .. {quantity(result.high, result.unit)}"
