"""`llm-worker-rbee serve`: a model over HTTP, for OpenAI clients and for an orchestrator."""

import os
import re
import shlex
import ssl
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from ..config import LoadOptions, SchedulerLimits, parse_duration, parse_size
from ..engine.engine import Engine
from ..errors import InvalidRequestError, WorkerError, counted
from ..models.vision import NO_PROJECTOR
from ..progress import OnStage
from ..server import log
from ..server.lora_names import NAME
from ..server.middleware import host_name, require_key
from ..server.model_source import (
    POOLING_WORKSPACE_BYTES,
    PoolOptions,
    fixed_front,
    open_ahead,
    open_text,
    pool_front,
    pooling_service,
    use_defaults,
)
from ..server.orchestrator import require_url
from ..server.pooling import Kind
from ..server.serve import Signals, base_url, bind
from ..server.serve import serve as run_server
from ..server.settings import Key, ServerSettings, find_key, model_name
from ..server.worker import Front
from ..text_model import TextModel, check_chat_template
from ..token_engine.launch import replace_with_dummy, warm_up
from ..token_engine.protocol import Load, ModelInfo
from ..token_engine.replicas import ReplicaSet
from ..token_engine.supervisor import SupervisedEngine
from ..token_engine.threaded import ThreadedEngine
from ..tokenizer.chat.template import start_ahead
from ..weights.hub import DEFAULT_MODEL, find_model
from .commands import ENGINES, SWITCH, MeasuringFlags, PoolingServeFlags, ProcessFlags, ServeCommand, WireFlags
from .loading import LoadingOutput, load_model, load_options, option_names_in_errors, set_up, with_option_names
from .options import check_usage
from .terminal import Status, discard_output, note, read_template, style, visible

DEFAULT_MAX_LORAS = 8  # with --lora-dir
SWITCH_S = 0.0002  # streams wait so long for a thread that opens the tokenizer of another model; Python's own is 0.005
MIN_MODELS = 3  # that may be loaded at the same time, unless --max-models says otherwise
MAX_PEM_BYTES = 1 << 20
ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+|\*")


def _tls(wire: WireFlags) -> dict[str, str]:
    """Return the TLS arguments of the HTTP server; fail at once for files that cannot be used."""
    if wire.ssl_certfile is None:
        if wire.ssl_keyfile is not None:
            raise typer.BadParameter("--ssl-keyfile goes with --ssl-certfile")
        return {}
    files = {"ssl_certfile": str(wire.ssl_certfile)}
    if wire.ssl_keyfile is not None:
        files["ssl_keyfile"] = str(wire.ssl_keyfile)
    _check_tls_files(wire.ssl_certfile, wire.ssl_keyfile)
    return files


def _check_tls_files(certificate: Path, key: Path | None) -> None:
    """Raise with the reason if the HTTP server could not use the files; OpenSSL's own is "PEM lib" for most."""
    key_option = f"--ssl-certfile {certificate}" if key is None else f"--ssl-keyfile {key}"
    for option, path, kind in (
        (f"--ssl-certfile {certificate}", certificate, "CERTIFICATE"),
        (key_option, key or certificate, "PRIVATE KEY"),
    ):
        try:
            with path.open("rb") as file:
                text = file.read(MAX_PEM_BYTES)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise InvalidRequestError(f"{option}: {getattr(error, 'strerror', None) or error}") from None
        if f"{kind}-----".encode() not in text:
            remedy = "; give it with --ssl-keyfile" if key is None and kind == "PRIVATE KEY" else ""
            raise InvalidRequestError(
                f"{option} holds no {kind.lower()} in PEM format (-----BEGIN {kind}-----){remedy}"
            )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, lambda: b"")
    except (OSError, ValueError) as error:
        why = f"{error.reason} (OpenSSL)" if isinstance(error, ssl.SSLError) and error.reason else str(error)
        if b"ENCRYPTED" in text:
            why = "the key is encrypted: decrypt it with `openssl pkey -in FILE -out NEW`"
        elif why.startswith("KEY_VALUES_MISMATCH"):
            why = f"it does not belong to the certificate {certificate}"
        raise InvalidRequestError(f"{key_option} cannot be used: {why}") from None


def pooling_references(pooling: PoolingServeFlags, engine_process: str) -> dict[Kind, str]:
    """Validate the options and return the models by kind."""
    models: dict[Kind, str | None] = {"embedding": pooling.embedding_model, "rerank": pooling.rerank_model}
    references = {kind: reference for kind, reference in models.items() if reference is not None}
    if references and engine_process == "off":  # no process leaves memory for them
        raise typer.BadParameter("--embedding-model and --rerank-model need --engine-process on")
    if len(set(references.values())) < len(references):
        raise typer.BadParameter("--embedding-model and --rerank-model are the same: a model does one of both")
    return references


def _engine_devices(process: ProcessFlags, device: str) -> list[str]:
    """Validate the options and return the device of each engine; `device` may list several."""
    if process.engine_process not in SWITCH:
        raise typer.BadParameter(f"--engine-process {process.engine_process!r}: use {' or '.join(SWITCH)}")
    listed = [name.strip() for name in device.split(",")]
    count = len(listed) if process.replicas is None else process.replicas
    if count % len(listed):
        raise typer.BadParameter(f"--replicas {count} cannot be spread evenly over {len(listed)} devices")
    if count > 1 and process.engine_process == "off":
        raise typer.BadParameter("several engines need --engine-process on")
    return [listed[i % len(listed)] for i in range(count)]


def _is_null_engine(measuring: MeasuringFlags) -> bool:
    """Validate the options and return whether the null engine is used."""
    if measuring.engine not in ENGINES:
        raise typer.BadParameter(f"--engine {measuring.engine!r}: use {' or '.join(ENGINES)}")
    if measuring.null_step_ms is not None and measuring.engine != "null":
        raise typer.BadParameter("--null-step-ms goes with --engine null")
    return measuring.engine == "null"


def serve(options: ServeCommand) -> None:
    """Start the engines, and serve until a signal."""
    wire, process = options.wire, options.process
    load = load_options(options.model.first, options.computing, options.sharing)
    if options.lora_dir is not None and load.max_loras is None:
        load = replace(load, max_loras=max(DEFAULT_MAX_LORAS, len(load.loras)))
    has_pool = _has_pool(options)
    devices = _engine_devices(process, options.computing.device)
    references = pooling_references(options.pooling, process.engine_process)
    is_null = _is_null_engine(options.measuring)
    tls = _tls(wire)
    options = replace(options, computing=replace(options.computing, device=devices[0]))
    set_up(options.computing)
    key = find_key(wire.api_key_file, os.environ)
    require_key(key, wire.host)
    settings = server_settings(options, key, load, has_pool=has_pool)
    log.set_up(os.environ)
    sock = bind(wire.host, wire.port)
    signals = Signals()
    url = base_url(wire.host, sock.getsockname()[1], "https" if tls else "http")
    name = "several models" if has_pool else settings.names[0]
    _print_line(f"{style(name, 'bold')} at {style(url, 'bold')}, loading")
    if key is None:
        _say_that_no_key_is_needed(settings)
    if is_null:
        _print_line("the null engine: replies are a fixed text")

    dummy_step_s = (options.measuring.null_step_ms or 0.0) / 1000 if is_null else None
    with LoadingOutput() as shown, option_names_in_errors():
        if has_pool:
            sys.setswitchinterval(SWITCH_S)
            others = {"dummy_step_s": dummy_step_s, "progress": shown.progress}
            worker = pool_front(_pool_options(settings, options, load, references, **others))
        elif process.engine_process == "off":
            worker = _one_process(settings, options, load, dummy_step_s)
        else:
            chat = replace(load, reserved_memory=reserved_bytes(references))
            engines = [replace(chat, device=name, num_sharing=devices.count(name)) for name in devices]
            loads = [Load(options=engine, dummy_step_s=dummy_step_s) for engine in engines]
            worker = with_children(settings, options, loads, references, shown)
        ready = partial(shown.close, partial(_print_ready, worker, url, key))
        run_server(worker, sock, settings.advertise_url or url, ready, signals, **tls)


def _say_that_no_key_is_needed(settings: ServerSettings) -> None:
    _print_line("no API key: anyone on this machine may use it")
    if "*" in settings.cors_origins:
        log.logger.warning(
            "--cors-origin '*' without an API key: any web page that is opened on this machine may "
            "use the worker; name the origin, or give a key with --api-key-file"
        )


def _one_process(
    settings: ServerSettings, options: ServeCommand, chosen: LoadOptions, dummy_step_s: float | None
) -> Front:
    """Return a worker whose engine runs in a thread."""
    loaded: list[TextModel] = []

    def load(on_stage: OnStage) -> tuple[Engine, ModelInfo]:
        flags = options.model.first, options.computing, Status(), options.sharing
        llm = load_model(*flags, on_stage, lambda llm: warm_up(llm.engine, llm.loading), chosen)
        if dummy_step_s is not None:
            replace_with_dummy(llm.engine, llm.tokenizer, dummy_step_s)
        loaded.append(llm)
        return llm.engine, llm.info

    def open_model(info: ModelInfo) -> TextModel:
        use_defaults(loaded[0], Path(info.path))
        return _check_template(loaded[0], options.model.chat_template)

    return fixed_front(settings, ThreadedEngine(load), open_model)


def with_children(
    settings: ServerSettings,
    options: ServeCommand,
    loads: list[Load],
    references: dict[Kind, str],
    shown: LoadingOutput,
) -> Front:
    """Return a worker whose engines run in child processes, as do the pooling models at `references`."""
    shown.status(f"loading {options.model.first.model or 'the default model'} ...")
    start_ahead()
    open_text = partial(_open_text, template_path=options.model.chat_template)
    on_located, opened = open_ahead(open_text, options.model.first.model)

    def open_model(info: ModelInfo) -> TextModel:
        text_model = opened()
        text_model.max_context = info.max_context
        return text_model

    supervision = _supervision(settings, options)
    watching = {**supervision, "restart_on_stall": options.process.restart_on_stall}
    watching |= {"progress": shown.progress, "on_located": on_located}
    engine = SupervisedEngine(loads[0], **watching) if len(loads) == 1 else ReplicaSet(loads, **watching)
    compute = loads[0].compute
    pooling = {
        reference: pooling_service(model_name(reference), kind, reference, compute, supervision)
        for kind, reference in references.items()
    }
    return fixed_front(settings, engine, open_model, pooling)


def _has_pool(options: ServeCommand) -> bool:
    """Return whether models are loaded by request; raise for options that belong to a single one."""
    flags, models = options.pool, options.model.models or []
    values = (flags.models_dir, flags.max_models, flags.model_memory, flags.sleep_after)
    if len(models) < 2 and all(value is None for value in values):
        return False
    single: dict[str, bool] = {
        "--served-model-name": options.wire.served_model_name is not None,
        "--chat-template": options.model.chat_template is not None,
        "--mmproj with a file": options.sharing.mmproj not in (None, NO_PROJECTOR),
        "--draft-model": options.sharing.draft_model is not None,
        "--lora": bool(options.sharing.lora) or options.lora_dir is not None,
        "--replicas": (options.process.replicas or 1) > 1,
        "--device with several devices": "," in options.computing.device,
        "--engine-process off": options.process.engine_process == "off",
    }
    for name, is_given in single.items():
        if is_given:
            raise typer.BadParameter(f"{name} is for a single model: serve it without a pool of models")
    if flags.models_dir is not None:
        with suppress(OSError):  # it is there
            flags.models_dir.mkdir()
    if flags.models_dir is not None and not flags.models_dir.is_dir():
        raise typer.BadParameter(f"--models-dir {flags.models_dir} is not a folder")
    if len(set(models)) < len(models):
        raise typer.BadParameter("--model names the same model twice")
    return True


def _pool_options(
    settings: ServerSettings, options: ServeCommand, load: LoadOptions, references: dict[Kind, str], **others: Any
) -> PoolOptions:
    """Return the options of a pool of models."""
    flags, sleep_after = options.pool, options.pool.sleep_after
    named = [(name, None) for name in options.model.models or ()]
    models: list[tuple[str, str | None]] = [*named, *((name, kind) for kind, name in references.items())]
    if not models and flags.models_dir is None:
        models.append((DEFAULT_MODEL, None))
    return PoolOptions(
        settings=settings,
        load=load,
        supervision=_supervision(settings, options),
        restart_on_stall=options.process.restart_on_stall,
        models=models,
        max_models=flags.max_models or max(MIN_MODELS, len(models)),
        max_bytes=None if flags.model_memory is None else check_usage(parse_size, flags.model_memory, "model_memory"),
        sleep_after_s=None if sleep_after is None else check_usage(parse_duration, sleep_after, "sleep_after"),
        load_timeout_s=flags.load_timeout,
        folder=flags.models_dir,
        max_pull=check_usage(parse_size, flags.max_pull, "max_pull"),
        **others,
    )


def _supervision(settings: ServerSettings, options: ServeCommand) -> dict[str, Any]:
    return {"max_restarts": options.process.engine_restarts, "stall_timeout_s": settings.stall_timeout_s}


def reserved_bytes(references: dict[Kind, str]) -> int:
    """Return the memory that the KV cache of the chat model leaves to pooling models that are on this machine."""
    total = POOLING_WORKSPACE_BYTES * len(references)
    for reference in references.values():
        with suppress(WorkerError, OSError):
            total += find_model(reference, pull=False).bytes
    return total


def _open_text(path: Path, template_path: Path | None) -> TextModel:
    """Open the text side of the model, with the chat template of the option."""
    template = None if template_path is None else read_template(template_path)
    return open_text(path, template, _origin(template_path))


def _check_template(model: TextModel, path: Path | None) -> TextModel:
    check_chat_template(model, _origin(path))
    return model


def _origin(template_path: Path | None) -> str | None:
    return None if template_path is None else f"--chat-template {template_path}"


def server_settings(
    options: ServeCommand, key: Key | None, load: LoadOptions, *, has_pool: bool = False
) -> ServerSettings:
    """Return the settings of the server; raise for options that are not valid."""
    wire, lora_dir = options.wire, options.lora_dir
    if lora_dir is not None and not lora_dir.is_dir():
        raise typer.BadParameter(f"--lora-dir {lora_dir} is not a folder")
    for spec in load.loras:
        _validate_name(spec.name, "--lora")
    for origin in wire.cors_origin or ():
        if not ORIGIN.fullmatch(origin):
            raise typer.BadParameter(
                f"--cors-origin {origin!r} is not an origin such as https://host or http://host:port"
            )
    for host in wire.allowed_host or ():
        if host != "*" and host_name(host) is None:
            raise typer.BadParameter(f"--allowed-host {host!r} is not a name such as worker.example, an address or *")
    for host in wire.allow_image_urls or ():
        if host_name(host.removeprefix("*.")) != host.removeprefix("*.").lower():
            raise typer.BadParameter(f"--allow-image-urls {host!r} is not the name of a host, nor *.domain")
    worker_id: dict[str, Any] = (
        {} if wire.worker_id is None else {"worker_id": _validate_name(wire.worker_id, "--worker-id")}
    )
    served = wire.served_model_name
    return ServerSettings(
        model_ref=options.model.first.model or DEFAULT_MODEL,
        has_pool=has_pool,
        served_name=None if served is None else _validate_name(served, "--served-model-name"),
        embedding_model=options.pooling.embedding_model,
        rerank_model=options.pooling.rerank_model,
        api_key=None if key is None else key.value,
        cors_origins=tuple(wire.cors_origin or ()),
        allowed_hosts=tuple(wire.allowed_host or ()),
        image_hosts=tuple(map(str.lower, wire.allow_image_urls or ())),
        callback_url=require_url(wire.callback_url, "--callback-url"),
        heartbeat_url=require_url(wire.heartbeat_url, "--heartbeat-url"),
        advertise_url=require_url(wire.advertise_url, "--advertise-url"),
        loras=load.loras,
        lora_dir=lora_dir,
        files_dir=options.files.files_dir,
        files_bytes=check_usage(parse_size, options.files.files_size, "files_size"),
        files_age_s=check_usage(parse_duration, options.files.files_age, "files_age"),
        **vars(options.limits),
        **worker_id,
    )


def _validate_name(name: str, option: str) -> str:
    if not NAME.fullmatch(name):
        raise typer.BadParameter(f"{option} {name!r}: use up to 128 letters, digits and . _ : / @ + -")
    return name


def _print_ready(worker: Front, url: str, key: Key | None) -> None:
    if (chat := worker.chat) is None:
        models = counted(len(worker.pool.members), "model")
        _print_line(f"ready with {models}; open {url} in a browser, or see {url}/v1/models")
        return
    info = chat.engine.info
    if not isinstance(chat.engine, ThreadedEngine):  # which printed them as it loaded
        for text in info.notes:
            note(with_option_names(text))
    limits = SchedulerLimits(info.engine.max_batch, info.engine.max_step_tokens)
    each = f" in each of {info.num_replicas} engines" if info.num_replicas > 1 else ""
    _print_line(f"ready after {sum(info.phases.values()):.1f} s, {limits}{each}; open {url} in a browser, or try:")
    _print_line("  " + _curl(chat.model.has_chat_template, url, key))


def _curl(has_template: bool, url: str, key: Key | None) -> str:
    """Return a command line that works when pasted; the key itself is not in it."""
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
    except OSError as error:  # standard output is closed, or its disk is full: serve all the same
        discard_output()
        if not isinstance(error, BrokenPipeError):
            log.logger.warning("cannot write to standard output: %s", error.strerror)
