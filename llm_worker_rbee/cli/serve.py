"""`llm-worker-rbee serve`: a model over HTTP, for OpenAI clients and for an orchestrator."""

import os
import re
import shlex
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import ServerSettings
from ..engine.dummy_model import DummyModel
from ..engine.request import SchedulerStats
from ..errors import InvalidRequestError, WorkerError
from ..llm import LLM
from ..load import OnStage
from ..server import log
from ..server.auth import Key, find_key, require_key
from ..server.orchestrator import require_url
from ..server.serve import Signals, base_url, bind
from ..server.serve import serve as run_server
from ..server.worker import Worker
from ..weights.hub import DEFAULT_MODEL
from .options import EngineOptions, LoadOptions, ModelOptions, gather, load_model, options_in
from .terminal import Status, discard_output, style, visible

ENGINES = ("model", "null")
NULL_TEXT = " what a server does besides: it takes a request, hands it on, and sends each token as soon as it exists"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+|\*")
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(ServerSettings)}

_wire, _limit, _measuring = map(options_in, ("On the wire", "Limits", "Measuring the server itself"))


@dataclass(frozen=True, kw_only=True)
class WireOptions:
    """Address, keys, names, orchestrator, TLS."""

    host: Annotated[
        str, _wire("--host", metavar="ADDRESS", help="Address to listen on; any but this machine's own needs a key.")
    ] = "127.0.0.1"
    port: Annotated[int, _wire("--port", metavar="N", min=0, max=65535, help="Port; 0 takes a free one.")] = 8080
    served_model_name: Annotated[
        str | None, _wire("--served-model-name", metavar="NAME", help="Name of the model for clients.")
    ] = None
    api_key_file: Annotated[
        Path | None,
        _wire("--api-key-file", metavar="FILE", help="File with the key that clients send. Or LLM_WORKER_API_KEY."),
    ] = None
    worker_id: Annotated[
        str | None, _wire("--worker-id", metavar="ID", show_default="random", help="Its name for the orchestrator.")
    ] = None
    callback_url: Annotated[
        str | None, _wire("--callback-url", metavar="URL", help="POST to it once the model is ready.")
    ] = None
    heartbeat_url: Annotated[
        str | None, _wire("--heartbeat-url", metavar="URL", help="POST to it every 30 seconds.")
    ] = None
    advertise_url: Annotated[
        str | None, _wire("--advertise-url", metavar="URL", help="Address of this worker in the callback.")
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        _wire("--cors-origin", metavar="ORIGIN", help="Allow pages from this origin, as https://host. Repeatable."),
    ] = None
    ssl_certfile: Annotated[Path | None, _wire("--ssl-certfile", metavar="FILE", help="Serve HTTPS.")] = None
    ssl_keyfile: Annotated[Path | None, _wire("--ssl-keyfile", metavar="FILE", help="Its private key.")] = None

    def tls(self) -> dict[str, str]:
        """Return the TLS arguments of the HTTP server; fail at once for files that cannot be used."""
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
    """Sizes and times."""

    max_queue: Annotated[
        int, _limit("--max-queue", metavar="N", min=0, help="Requests that may wait beside those being computed.")
    ] = DEFAULTS["max_queue"]
    max_queued_tokens: Annotated[
        int, _limit("--max-queued-tokens", metavar="N", min=1, help="Prompt tokens that may wait.")
    ] = DEFAULTS["max_queued_tokens"]
    max_body: Annotated[
        int, _limit("--max-body", metavar="BYTES", min=1, help="Largest request body.")
    ] = DEFAULTS["max_body"]  # fmt: skip
    job_ttl: Annotated[
        float, _limit("--job-ttl", metavar="S", min=0, help="Keep the events of a job S seconds after its end.")
    ] = DEFAULTS["job_ttl_s"]
    shutdown_timeout: Annotated[
        float, _limit("--shutdown-timeout", metavar="S", min=0, help="At the end, wait S seconds for running requests.")
    ] = DEFAULTS["shutdown_timeout_s"]
    stall_timeout: Annotated[
        float, _limit("--stall-timeout", metavar="S", min=0.1, help="Health is stalled after S seconds without a step.")
    ] = DEFAULTS["stall_timeout_s"]
    ignore_unknown_fields: Annotated[
        bool, _limit("--ignore-unknown-fields", help="List unknown fields in a header instead of a 400.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """The cost of the server without the model."""

    engine: Annotated[
        str, _measuring("--engine", metavar="|".join(ENGINES),
                        help="null: answer with a fixed text, computing nothing, to measure the server."),
    ] = ENGINES[0]  # fmt: skip
    null_step_ms: Annotated[
        float | None, _measuring("--null-step-ms", metavar="X", min=0, show_default="0",
                                 help="A step of the null engine takes X milliseconds."),
    ] = None  # fmt: skip

    def is_null_engine(self) -> bool:
        """Validate the options and return whether the null engine is used."""
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

    The key is that of --api-key-file, LLM_WORKER_API_KEY or LLORCH_API_TOKEN. The log goes to standard error, as JSON
    with LLORCH_LOG_FORMAT=json. Ctrl-C or SIGTERM lets running requests finish.

    \b
    Examples:
      llm-worker-rbee serve
      llm-worker-rbee serve -m model.gguf --port 0 --served-model-name mine
      llm-worker-rbee serve --host 0.0.0.0 --api-key-file key.txt
    """
    sharing.arguments()
    is_null = measuring.is_null_engine()
    tls = wire.tls()
    computing.set_up()
    key = find_key(wire.api_key_file, os.environ)
    require_key(key, wire.host)
    settings = _settings(wire, limits, model, key)
    log.set_up(os.environ)
    sock = bind(wire.host, wire.port)
    signals = Signals()
    url = base_url(wire.host, sock.getsockname()[1], "https" if tls else "http")
    _print_line(f"{style(settings.names[0], 'bold')} at {style(url, 'bold')}, loading")
    if key is None:
        _print_line("no API key: anyone on this machine may use it")
    if is_null:
        _print_line("the null engine: replies are a fixed text")

    def load(on_stage: OnStage) -> LLM:
        llm = _warm_up(load_model(model, computing, Status(), sharing, on_stage))
        if is_null:
            _remove_model(llm, measuring.null_step_ms or 0.0)
        return llm

    worker = Worker(settings, load)
    run_server(worker, sock, settings.advertise_url or url, _banner(worker, url, key), signals, **tls)


def _settings(wire: WireOptions, limits: LimitOptions, model: ModelOptions, key: Key | None) -> ServerSettings:
    more: dict[str, Any] = (
        {} if wire.worker_id is None else {"worker_id": _validate_name(wire.worker_id, "--worker-id")}
    )
    for origin in wire.cors_origin or ():
        if not ORIGIN.fullmatch(origin):
            raise typer.BadParameter(
                f"--cors-origin {origin!r} is not an origin such as https://host or http://host:port"
            )
    served = wire.served_model_name
    return ServerSettings(
        model_ref=model.model or DEFAULT_MODEL,
        served_name=None if served is None else _validate_name(served, "--served-model-name"),
        api_key=None if key is None else key.value,
        max_queue=limits.max_queue,
        max_queued_tokens=limits.max_queued_tokens,
        max_body=limits.max_body,
        job_ttl_s=limits.job_ttl,
        shutdown_timeout_s=limits.shutdown_timeout,
        stall_timeout_s=limits.stall_timeout,
        ignore_unknown_fields=limits.ignore_unknown_fields,
        cors_origins=tuple(wire.cors_origin or ()),
        callback_url=require_url(wire.callback_url, "--callback-url"),
        heartbeat_url=require_url(wire.heartbeat_url, "--heartbeat-url"),
        advertise_url=require_url(wire.advertise_url, "--advertise-url"),
        **more,
    )


def _warm_up(llm: LLM) -> LLM:
    """Compute a token and render a template, so that the first request does not wait for one-time work."""
    with llm.loading.timed("warm-up"):
        llm.generate([0], max_tokens=1)
        if llm.has_chat_template:
            with suppress(WorkerError):  # a template that rejects this message
                llm.tokenize_chat([{"role": "user", "content": "Hello!"}])
    llm.engine.scheduler.stats = SchedulerStats()  # this request does not count
    return llm


def _remove_model(llm: LLM, step_ms: float) -> None:
    """Replace the model in the engine: what remains is the server's own cost."""
    words = [token for token in llm.tokenize(NULL_TEXT, add_special=False) if llm.detokenize([token])]
    llm.engine.replace_model(DummyModel(words, step_ms / 1000))


def _validate_name(name: str, option: str) -> str:
    if not NAME.fullmatch(name):
        raise typer.BadParameter(f"{option} {name!r}: use up to 128 letters, digits and . _ : / @ + -")
    return name


def _banner(worker: Worker, url: str, key: Key | None) -> Callable[[], None]:
    def ready() -> None:
        _print_line(f"ready after {sum(worker.llm.phases.values()):.1f} s; try:")
        _print_line("  " + _curl(worker, url, key))

    return ready


def _curl(worker: Worker, url: str, key: Key | None) -> str:
    """Return a command line that works when pasted; the key itself is not in it."""
    has_template = worker.llm.has_chat_template
    path = "/v1/chat/completions" if has_template else "/v1/completions"
    body = '"messages":[{"role":"user","content":"Hello!"}]' if has_template else '"prompt":"Once upon a time"'
    parts = ["curl", *(["-k"] if url.startswith("https") else []), shlex.quote(url + path)]
    parts += ["-H 'Content-Type: application/json'"]
    if key is not None:
        parts.append(f'-H "Authorization: Bearer {key.shell}"')
    return " ".join([*parts, f"-d '{{{body},\"max_tokens\":64}}'"])


def _print_line(text: str) -> None:
    try:
        print(text if "\x1b" in text else visible(text), file=sys.stdout, flush=True)
    except BrokenPipeError:  # standard output is closed: serve all the same
        discard_output()
