"""`llm-worker-rbee bench serving`: HTTP load against any OpenAI-compatible server."""

import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ...errors import InvalidRequestError, WorkerError
from ...progress import step_progress
from ..options import gather
from ..terminal import note
from .common import ResultOptions, recording
from .serving_table import show

if TYPE_CHECKING:
    from ...bench.results import Recorder
    from ...bench.serving import Limits
    from ...bench.serving.openai_client import Target
    from ...bench.serving.server_process import Spawned, Watch
    from ...bench.workload import Workload

SERVER_PANEL, OWN_PANEL, LOAD_PANEL, PROMPTS_PANEL = "Server", "Server of ours", "Load", "Prompts"
DEFAULT_REQUESTS = 100


def _option(panel: str) -> Any:
    def option(*names: str, help: str, **more: Any) -> Any:
        return typer.Option(*names, help=help, rich_help_panel=panel, **more)

    return option


_server, _own, _load, _prompts = map(_option, (SERVER_PANEL, OWN_PANEL, LOAD_PANEL, PROMPTS_PANEL))


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
        from ...bench.http_client import Client, checked_header
        from ...bench.serving import openai_client

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
class OwnOptions:
    """A server of ours for the time of the load."""

    spawn: Annotated[
        bool, _own("--spawn", help="Start a server of ours, measure it, end it; -m is its model. No URL then.")
    ] = False
    engine: Annotated[
        str | None, _own("--engine", metavar="model|null", help="null: it computes nothing; what is left is its own.")
    ] = None
    serve_args: Annotated[
        str | None, _own("--serve-args", metavar="'...'", help="More options for `serve`, as in a shell.")
    ] = None
    health: Annotated[bool, _own("--health", help="Ask for /health meanwhile. With --spawn, always.")] = False

    def arguments(self, url: str | None, model: str | None) -> list[str]:
        """Those of `serve`; what does not go together is wrong usage."""
        if self.spawn == (url is not None):
            raise typer.BadParameter("give the URL of a server, or --spawn to start one" + " (not both)" * self.spawn)
        if not self.spawn and (self.engine is not None or self.serve_args is not None):
            raise typer.BadParameter("--engine and --serve-args go with --spawn")
        try:
            more = shlex.split(self.serve_args or "")
        except ValueError as error:
            raise typer.BadParameter(f"--serve-args cannot be taken apart: {error}") from None
        named = {"--model": model, "--engine": self.engine}
        return [part for name, value in named.items() if value is not None for part in (name, value)] + more

    @contextmanager
    def server(self, url: str | None, args: list[str], api_key: str | None, timeout: float) -> Iterator["Reached"]:
        """Where the server is, for as long as it is needed."""
        from ...bench.serving.server_process import Spawned

        if url is not None:
            yield Reached(url)
            return
        note("starting the server ...")
        with Spawned(args, api_key, timeout) as spawned:
            yield Reached(spawned.url, spawned)


class Reached(NamedTuple):
    """A server; `own` where it is ours."""

    url: str
    own: "Spawned | None" = None

    def watch(self) -> "Watch":
        """Someone who looks at it."""
        from ...bench.http_client import Address
        from ...bench.serving.server_process import Watch

        return Watch(Address.parse(self.url).authority, None if self.own is None else self.own.pid)


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
        from ...bench.workload import MOST_REQUESTS, Lengths, Workload, read_prompts

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


@gather(server=ServerOptions, own=OwnOptions, load=LoadOptions, results=ResultOptions)
def serving(
    server: ServerOptions,
    own: OwnOptions,
    load: LoadOptions,
    results: ResultOptions,
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="The server: http://host:port, with its path if not /v1. Or --spawn."),
    ] = None,
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
      llm-worker-rbee bench serving --spawn -c 16
      llm-worker-rbee bench serving --spawn --engine null -c 64 --output-len 256
    """
    from ...bench import serving as room

    args = own.arguments(url, server.model)
    try:
        workload, limits = load.workload(server.endpoint), load.limits(server.timeout)
        server.target(url or "localhost", "")  # what is wrong with it is said before anything is sent
    except InvalidRequestError as error:
        if error.field is None:
            raise
        raise typer.BadParameter(str(error)) from None
    settings = _settings(server, own, load)
    with own.server(url, args, server.api_key, server.timeout) as found:
        target = room.reach(partial(server.target, found.url), None if own.spawn else server.model, server.timeout)
        watch = found.watch() if own.spawn or own.health else None
        with recording("serving", results, show, url=found.url, **settings) as recorder, step_progress() as progress:
            room.run(recorder, progress, target, workload, limits, watch)
        if found.own is not None:
            found.own.require_alive()
    _require_answers(recorder)


def _require_answers(recorder: "Recorder") -> None:
    found = {result.name: result.estimate for result in recorder.results()}
    if not found.get("completed"):
        first = next((told for told in recorder.details.get("errors", {}).values()), ["no request was sent"])[0]
        raise WorkerError(f"no request was answered: {first}")


def _settings(server: ServerOptions, own: OwnOptions, load: LoadOptions) -> dict[str, Any]:
    """What a saved run tells; keys and the values of headers stay out."""
    known = asdict(server) | asdict(own) | asdict(load)
    known.pop("api_key")
    known["header"] = [text.partition(":")[0] for text in server.header or ()]
    known["prompts"] = None if load.prompts is None else load.prompts.name
    return {name: str(value) if value == math.inf else value for name, value in known.items()}
