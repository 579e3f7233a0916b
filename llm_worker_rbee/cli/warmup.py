"""`llm-worker-rbee warmup`: compile the kernels ahead of time."""

import importlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import typer

from ..backends import cpu_info, kernel_folder, kernel_library, select_backend
from ..backends.ops import CAPTURING, COMPILING, Backend
from ..config import KV_DEFAULT
from ..errors import InvalidRequestError, counted
from ..load import LoadPhases
from ..load_pooling import WORKSPACE_TYPES
from ..models import read_model_config
from ..models.pooling_config import is_pooling_model
from ..progress import TransferProgress, transfer_progress
from ..token_engine.launch import load_engine, warm_up
from ..weights import hub, open_checkpoint
from .commands import WarmupCommand, WarmupFlags
from .loading import load_options, option_names_in_errors, set_up
from .options import EngineFlags, LoadFlags, ModelFlags
from .terminal import note, print_json


class Warmed(NamedTuple):
    """The result of a warm-up."""

    kernels: int
    compiled: int
    folder: Path
    target: dict[str, str]  # what they were compiled for, by the name of its field


def warmup(options: WarmupCommand) -> None:
    """Compile the kernels of the device."""
    model, computing, sharing = options.model, options.computing, options.sharing
    if options.all_ and model is not None:
        raise typer.BadParameter("both a MODEL and --all are given: choose one")
    set_up(computing)
    start = time.perf_counter()
    with transfer_progress(COMPILING, CAPTURING) as progress:
        backend = select_backend(computing.device, computing.backend)
        if backend.has_device_memory:
            if options.all_:
                raise typer.BadParameter("--all is for the CPU: name a MODEL whose kernels a GPU needs")
            done = _warm_up_gpu(backend, model, computing, sharing, progress)
        else:
            done = _warm_up_cpu(model, options.all_, computing, sharing, progress)
    _print(done, time.perf_counter() - start, options.as_json)


def _print(done: Warmed, seconds: float, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "kernels": done.kernels,
                "compiled": done.compiled,
                "seconds": seconds,
                "folder": str(done.folder),
                **done.target,
            }
        )
        return
    (target,) = done.target.values()
    if done.compiled:
        note(f"compiled {counted(done.compiled, 'kernel')} of {done.kernels} in {seconds:.1f} s, for {target}")
    else:
        note(f"nothing to compile: {counted(done.kernels, 'kernel')} for {target} were there")
    print(done.folder)


def _warm_up_gpu(
    backend: Backend, model: str | None, computing: LoadFlags, sharing: EngineFlags, progress: TransferProgress
) -> Warmed:
    """Load the model as `serve` does, and compile its kernels."""
    folder = _require_kept(backend.kernel_dir)
    options = load_options(ModelFlags(model=model), computing, sharing)
    phases = LoadPhases(progress=progress)
    with option_names_in_errors():
        engine, _ = load_engine(options, phases)
        done = warm_up(engine, phases)
    return Warmed(*done, folder, {"device": engine.model.ops.device})


def _warm_up_cpu(
    model: str | None, all_: bool, computing: LoadFlags, sharing: EngineFlags, progress: TransferProgress
) -> Warmed:
    """Compile the kernels of a model, or all."""
    usual = WarmupFlags(device=computing.device, backend=computing.backend, cpu_isa=computing.cpu_isa)
    if vars(replace(computing, threads=None)) != vars(usual) or vars(sharing) != vars(EngineFlags()):
        raise typer.BadParameter("options of memory, batches and types are for a GPU: on a CPU use --all")
    select_backend("cpu", "cpu")
    kernels, folder = _select_kernels(model, all_, progress)
    compiled = _precompile().load_kernels(kernels, progress, defers_some=False)
    return Warmed(len(kernels), compiled, folder, {"instruction_set": cpu_info.current_isa()})


def _require_kept(folder: Path | None) -> Path:
    """Return the folder in which compiled kernels stay after this process; raise if there is none."""
    if folder is None:
        above = kernel_folder.cache_root()
        where = "there is no home folder" if above is None else f"{above} cannot be written to"
        raise InvalidRequestError(f"kernels cannot be kept: {where}, set LLM_WORKER_KERNEL_CACHE to another folder")
    return folder


def _select_kernels(model: str | None, all_: bool, progress: TransferProgress) -> tuple[Sequence[Any], Path]:
    """Return the kernels to compile, and the folder of the JIT cache."""
    if cpu_info.prebuilt_isas():
        return [], kernel_library.FOLDER
    folder = importlib.import_module("llm_worker_rbee.backends.cpu.kernel_cache").cache_dir()
    is_temporary = folder is None or folder.parent != kernel_folder.cache_root()
    folder = _require_kept(None if is_temporary else folder)
    if all_ or (model is None and not hub.BUILTIN[hub.DEFAULT_MODEL].is_present):
        return _precompile().all_kernels(), folder
    checkpoint = open_checkpoint(hub.locate_model(model, progress=progress))
    config = read_model_config(checkpoint)
    kv_type = WORKSPACE_TYPES.get("cpu", "float32") if is_pooling_model(checkpoint, config) else KV_DEFAULT
    return _precompile().model_kernels(checkpoint, config, kv_type), folder


def _precompile() -> Any:
    return importlib.import_module("llm_worker_rbee.backends.cpu.precompile")
