"""The pool of models of `serve`: its options, its memory, and the models that it names at the start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import typer

from ..backends.ops import CAPTURING, COMPILING
from ..backends.select import has_driver, missing_packages
from ..config import LoadOptions, parse_duration, parse_size
from ..engine.memory_plan import HOST_MEMORY_FRACTION, free_memory
from ..errors import InvalidRequestError
from ..models.vision import NO_PROJECTOR
from ..progress import transfer_progress
from ..server.model_pool import Member, ModelPool
from ..server.model_source import ModelsFolder, PoolOptions, make_source
from ..server.offload import OffloadPool
from ..server.pool_worker import PoolWorker
from ..server.pooling import Kind
from ..server.settings import ServerSettings, model_name
from ..weights.hub import DEFAULT_MODEL, Progress, find_model
from .commands import ServeCommand
from .options import check_usage
from .terminal import OutputThread, Status

SWITCH_S = 0.0002  # streams wait so long for a thread that opens the tokenizer of another model; Python's own is 0.005
MIN_MODELS = 3  # that may be loaded at the same time, unless --max-models says otherwise
KV_SHARE = 0.8  # of the memory, for the KV caches of as many models as may be loaded


def has_pool(options: ServeCommand) -> bool:
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
        "--lora": bool(options.sharing.lora) or options.adapters.lora_dir is not None,
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
    device = options.computing.device
    is_automatic = device == "auto" and options.computing.backend == "auto" and options.computing.threads is None
    if device.startswith("cuda") or (is_automatic and has_driver() and not missing_packages()):
        raise typer.BadParameter("a pool of models computes on a CPU: use --device cpu")
    return True


def make_worker(
    settings: ServerSettings,
    options: ServeCommand,
    load: LoadOptions,
    references: dict[Kind, str],
    dummy_step_s: float | None,
    shown: ExitStack,
    output: OutputThread,
) -> PoolWorker:
    """Return the worker; the models that are named are fetched when it starts, with their progress shown until then."""
    sys.setswitchinterval(SWITCH_S)
    flags, named = options.pool, [(name, None) for name in options.model.models or ()]
    models: list[tuple[str, str | None]] = [*named, *((name, kind) for kind, name in references.items())]
    if not models and flags.models_dir is None:
        models.append((DEFAULT_MODEL, None))
    max_models = flags.max_models or max(MIN_MODELS, len(models))
    limit = free_memory() if flags.model_memory is None else check_usage(parse_size, flags.model_memory, "model_memory")
    sleep_after = None if flags.sleep_after is None else check_usage(parse_duration, flags.sleep_after, "sleep_after")
    pool = ModelPool(
        max_models=max_models,
        max_bytes=limit,
        keep_alive_s=sleep_after,
        load_timeout_s=flags.load_timeout,
        **({} if settings.max_queue is None else {"max_waiting": settings.max_queue}),
    )
    process = options.process
    supervision = {"max_restarts": process.engine_restarts, "stall_timeout_s": settings.stall_timeout_s}
    offload = OffloadPool()
    shared = PoolOptions(
        settings=settings,
        load=load,
        supervision=supervision,
        restart_on_stall=process.restart_on_stall,
        offload=offload,
        max_bytes=limit,
        kv_fraction=min(HOST_MEMORY_FRACTION, KV_SHARE / max_models),
        dummy_step_s=dummy_step_s,
    )
    folder = None if flags.models_dir is None else ModelsFolder(flags.models_dir.expanduser(), shared)
    add = partial(_add_models, pool, models, shared, _shown_progress(shown, output))
    return PoolWorker(settings, pool, add, folder, offload, check_usage(parse_size, flags.max_pull, "max_pull"))


def _shown_progress(shown: ExitStack, output: OutputThread) -> Progress:
    """Return a function that shows the progress of fetching models."""
    status = Status()
    shown.callback(status.clear)
    bar = shown.enter_context(transfer_progress(COMPILING, CAPTURING))
    return lambda what, done, total: output.call(partial(bar, what, done, total))


async def _add_models(
    pool: ModelPool, models: list[tuple[str, str | None]], shared: PoolOptions, progress: Progress
) -> list[Member]:
    """Fetch the models that are not on this machine, and add all to the pool."""
    members: list[Member] = []
    for reference, kind in models:
        located = await asyncio.to_thread(find_model, reference, progress=progress)
        name = model_name(reference)
        if (other := pool.named(name)) is not None:
            raise InvalidRequestError(f"two models have the name {name!r}: {reference} and {other.source.names[-1]}")
        make: Callable[[], Any] = partial(make_source, name, located.path, shared, reference, kind=kind)
        members.append(pool.add(await asyncio.to_thread(make)))
    return members
