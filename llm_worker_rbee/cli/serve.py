"""`llm-worker-rbee serve`: a model on the wire, for OpenAI clients and for an orchestrator."""

import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidRequestError, WorkerError
from .options import EngineOptions, LoadOptions, ModelOptions, gather, load
from .terminal import Status, discard_output, style, visible

if TYPE_CHECKING:
    from ..llm import LLM
    from ..load import OnStage
    from ..server.auth import Key
    from ..server.config import Settings
    from ..server.worker import Worker

WIRE_PANEL, LIMITS_PANEL = "On the wire", "Limits"
MEASURING_PANEL, ENGINES = "Measuring the server itself", ("model", "null")
NULL_TEXT = " what a server does besides: it takes a request, hands it on, and sends each token as soon as it exists"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+|\*")
# Here for --help, which imports nothing heavy; a test holds them against server.config.
MAX_QUEUE, MAX_QUEUED_TOKENS, MAX_BODY, JOB_TTL, SHUTDOWN_TIMEOUT, STALL_TIMEOUT = 256, 262_144, 4 << 20, 300, 30, 30


def _wire(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=WIRE_PANEL, **more)


def _limit(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=LIMITS_PANEL, **more)


@dataclass(frozen=True, kw_only=True)
class WireOptions:
    """Where it is reached, by whom, and whom it tells."""

    host: Annotated[
        str, _wire("--host", metavar="ADDRESS", help="Listen here; others than this machine need a key.")
    ] = "127.0.0.1"
    port: Annotated[int, _wire("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8080
    served_model_name: Annotated[
        str | None, _wire("--served-model-name", metavar="NAME", help="What clients call the model.")
    ] = None
    api_key_file: Annotated[
        Path | None,
        _wire("--api-key-file", metavar="FILE", help="Holds the key that clients send. Or LLM_WORKER_API_KEY."),
    ] = None
    worker_id: Annotated[
        str | None, _wire("--worker-id", metavar="ID", show_default="drawn", help="What the orchestrator calls it.")
    ] = None
    callback_url: Annotated[
        str | None, _wire("--callback-url", metavar="URL", help="Posted to once the model is ready.")
    ] = None
    heartbeat_url: Annotated[
        str | None, _wire("--heartbeat-url", metavar="URL", help="Posted to every 30 seconds.")
    ] = None
    advertise_url: Annotated[
        str | None, _wire("--advertise-url", metavar="URL", help="Where the callback says the worker is reached.")
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        _wire("--cors-origin", metavar="ORIGIN", help="Pages from there may ask, as https://host. Repeatable."),
    ] = None
    ssl_certfile: Annotated[Path | None, _wire("--ssl-certfile", metavar="FILE", help="Serve https.")] = None
    ssl_keyfile: Annotated[Path | None, _wire("--ssl-keyfile", metavar="FILE", help="The key to that.")] = None

    def tls(self) -> dict[str, str]:
        """What the HTTP server is told; files that are not what they should be are found before anything else."""
        import ssl

        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise typer.BadParameter("--ssl-keyfile goes with --ssl-certfile")
            return {}
        files = {"ssl_certfile": str(self.ssl_certfile)}
        if self.ssl_keyfile is not None:
            files["ssl_keyfile"] = str(self.ssl_keyfile)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: b"")
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"--ssl-certfile {self.ssl_certfile} cannot be used: {error}") from None
        return files


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """What it takes, and for how long."""

    max_queue: Annotated[
        int, _limit("--max-queue", metavar="N", min=0, help="Requests that may wait besides those being computed.")
    ] = MAX_QUEUE
    max_queued_tokens: Annotated[
        int, _limit("--max-queued-tokens", metavar="N", min=1, help="Tokens of the prompts that may wait.")
    ] = MAX_QUEUED_TOKENS
    max_body: Annotated[int, _limit("--max-body", metavar="BYTES", min=1, help="The longest body of a request.")] = (
        MAX_BODY
    )
    job_ttl: Annotated[
        float, _limit("--job-ttl", metavar="S", min=0, help="Keep the events of a job so long after its end.")
    ] = JOB_TTL
    shutdown_timeout: Annotated[
        float, _limit("--shutdown-timeout", metavar="S", min=0, help="Running requests have so long to finish.")
    ] = SHUTDOWN_TIMEOUT
    stall_timeout: Annotated[
        float, _limit("--stall-timeout", metavar="S", min=0.1, help="Without a step for so long, health is stalled.")
    ] = STALL_TIMEOUT
    ignore_unknown_fields: Annotated[
        bool, _limit("--ignore-unknown-fields", help="Name fields that are not known in a header, in place of a 400.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """What the server costs without the model."""

    engine: Annotated[
        str, typer.Option("--engine", metavar="|".join(ENGINES), rich_help_panel=MEASURING_PANEL,
                          help="null: answer with a fixed text, computing nothing, to see what the server costs."),
    ] = ENGINES[0]  # fmt: skip
    null_step_ms: Annotated[
        float | None, typer.Option("--null-step-ms", metavar="X", min=0, rich_help_panel=MEASURING_PANEL,
                                   show_default="0", help="A step of the null engine takes X milliseconds."),
    ] = None  # fmt: skip

    def checked(self) -> bool:
        """Whether it is the null engine."""
        if self.engine not in ENGINES:
            raise typer.BadParameter(f"--engine {self.engine!r}: use {' or '.join(ENGINES)}")
        if self.null_step_ms is not None and self.engine != "null":
            raise typer.BadParameter("--null-step-ms goes with --engine null")
        return self.engine == "null"


@gather(
    wire=WireOptions, limits=LimitOptions, model=ModelOptions, computing=LoadOptions, sharing=EngineOptions,
    measuring=MeasuringOptions,
)  # fmt: skip
def serve(
    wire: WireOptions, limits: LimitOptions, model: ModelOptions, computing: LoadOptions, sharing: EngineOptions,
    measuring: MeasuringOptions,
) -> None:  # fmt: skip
    """Serve a model over HTTP: the OpenAI API, and jobs for an orchestrator.

    The key is that of --api-key-file, LLM_WORKER_API_KEY or LLORCH_API_TOKEN. Lines on standard error tell what
    happens; LLORCH_LOG_FORMAT=json makes them objects. Ctrl-C or SIGTERM lets running requests finish.

    \b
    Examples:
      llm-worker-rbee serve
      llm-worker-rbee serve -m model.gguf --port 0 --served-model-name mine
      llm-worker-rbee serve --host 0.0.0.0 --api-key-file key.txt
    """
    sharing.arguments()
    is_null = measuring.checked()
    tls = wire.tls()
    computing.set_up()
    from ..server import log
    from ..server.auth import find_key, require_key
    from ..server.serve import Signals, bind, url_of
    from ..server.serve import serve as serve_until_told
    from ..server.worker import Worker

    key = find_key(wire.api_key_file, os.environ)
    require_key(key, wire.host)
    settings = _settings(wire, limits, model, key)
    log.set_up(os.environ)
    sock = bind(wire.host, wire.port)
    signals = Signals()
    url = url_of(wire.host, sock.getsockname()[1], "https" if tls else "http")
    _say(f"{style(settings.names[0], 'bold')} at {style(url, 'bold')}, loading")
    if key is None:
        _say("no key is asked for: anyone on this machine may use it")
    if is_null:
        _say("the null engine: answers mean nothing")

    def loaded(on_stage: "OnStage") -> "LLM":
        llm = _warm(load(model, computing, Status(), sharing, on_stage))
        if is_null:
            _empty(llm, measuring.null_step_ms or 0.0)
        return llm

    worker = Worker(settings, loaded)
    serve_until_told(worker, sock, settings.advertise_url or url, _banner(worker, url, key), signals, **tls)


def _settings(wire: WireOptions, limits: LimitOptions, model: ModelOptions, key: "Key | None") -> "Settings":
    from ..server.config import Settings
    from ..server.orchestrator import checked_url
    from ..weights.hub import DEFAULT_MODEL

    more: dict[str, Any] = {} if wire.worker_id is None else {"worker_id": _name(wire.worker_id, "--worker-id")}
    for origin in wire.cors_origin or ():
        if not ORIGIN.fullmatch(origin):
            raise typer.BadParameter(
                f"--cors-origin {origin!r} is not an origin such as https://host or http://host:port"
            )
    served = wire.served_model_name
    return Settings(
        model_ref=model.model or DEFAULT_MODEL,
        served_name=None if served is None else _name(served, "--served-model-name"),
        api_key=None if key is None else key.value,
        max_queue=limits.max_queue,
        max_queued_tokens=limits.max_queued_tokens,
        max_body=limits.max_body,
        job_ttl_s=limits.job_ttl,
        shutdown_timeout_s=limits.shutdown_timeout,
        stall_timeout_s=limits.stall_timeout,
        ignore_unknown_fields=limits.ignore_unknown_fields,
        cors_origins=tuple(wire.cors_origin or ()),
        callback_url=checked_url(wire.callback_url, "--callback-url"),
        heartbeat_url=checked_url(wire.heartbeat_url, "--heartbeat-url"),
        advertise_url=checked_url(wire.advertise_url, "--advertise-url"),
        **more,
    )


def _warm(llm: "LLM") -> "LLM":
    """Compute a token and fill a template, so that the first request does not wait for what is done once."""
    from ..engine.request import SchedulerStats

    with llm.loading.timed("warm-up"):
        llm.generate([0], max_tokens=1)
        if llm.has_chat_template:
            with suppress(WorkerError):  # one that has wishes of its own
                llm.tokenize_chat([{"role": "user", "content": "Hello!"}])
    llm.engine.scheduler.stats = SchedulerStats()  # nobody asked for that
    return llm


def _empty(llm: "LLM", step_ms: float) -> None:
    """Take the model out of the engine: what is left is the server's own cost."""
    from ..engine.dummy_model import DummyModel

    words = [token for token in llm.tokenize(NULL_TEXT, add_special=False) if llm.detokenize([token])]
    llm.engine.compute = DummyModel(words, step_ms / 1000)


def _name(given: str, option: str) -> str:
    if not NAME.fullmatch(given):
        raise typer.BadParameter(f"{option} {given!r}: use up to 128 letters, digits and . _ : / @ + -")
    return given


def _banner(worker: "Worker", url: str, key: "Key | None") -> Callable[[], None]:
    def ready() -> None:
        _say(f"ready after {sum(worker.llm.phases.values()):.1f} s; try:")
        _say("  " + _curl(worker, url, key))

    return ready


def _curl(worker: "Worker", url: str, key: "Key | None") -> str:
    """A line that works when pasted; the key itself is not in it."""
    has_template = worker.llm.has_chat_template
    path = "/v1/chat/completions" if has_template else "/v1/completions"
    asked = '"messages":[{"role":"user","content":"Hello!"}]' if has_template else '"prompt":"Once upon a time"'
    parts = ["curl", *(["-k"] if url.startswith("https") else []), shlex.quote(url + path)]
    parts += ["-H 'Content-Type: application/json'"]
    if key is not None:
        parts.append(f'-H "Authorization: Bearer {key.shell}"')
    return " ".join([*parts, f"-d '{{{asked},\"max_tokens\":64}}'"])


def _say(text: str) -> None:
    try:
        print(text if "\x1b" in text else visible(text), file=sys.stdout, flush=True)
    except BrokenPipeError:  # nobody reads it: that is no reason not to serve
        discard_output()
