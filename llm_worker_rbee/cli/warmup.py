"""`llm-worker-rbee warmup`: compile the kernels ahead of time."""

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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
from .options import EngineFlags, LoadFlags, ModelFlags, gather, load_options, option_fields, option_names_in_errors
from .terminal import note, print_json

_device = option_fields("Computing")


@dataclass(frozen=True, kw_only=True)
class WarmupFlags(LoadFlags):
    """The device of the kernels; by default the CPU."""

    device: str = _device("cpu", "NAME", "The hardware: cpu, cuda, cuda:N or auto.")


class Warmed(NamedTuple):
    """The result of a warm-up."""

    kernels: int
    compiled: int
    folder: Path
    target: dict[str, str]  # what they were compiled for, by the name of its field


@gather(computing=WarmupFlags, sharing=EngineFlags)
def warmup(
    computing: WarmupFlags,
    sharing: EngineFlags,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Compile the kernels of this model. Default: the default model of run."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Compile all kernels of the CPU, for any model.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object: kernels, compiled, seconds, folder, and instruction_set or (of a GPU) device.",
        ),
    ] = False,
) -> None:
    """Compile the kernels ahead of time, so that no answer waits for it.

    This happens once for each version, machine and instruction set, otherwise with the first answer. The default model
    is not fetched for this: where it is missing, every kernel is compiled.

    For other types of KV cache (--kv-type) and weights (--quantize) than the model's own: --all.

    With --device cuda the model is loaded, and what `serve` with the same options launches is compiled; otherwise
    `serve` does it before it is ready.

    Kernels are kept in the folder that LLM_WORKER_KERNEL_CACHE names, or in the user's cache.

    \b
    Examples:
      llm-worker-rbee warmup
      llm-worker-rbee warmup model.gguf
      llm-worker-rbee warmup --device cuda model.gguf --max-batch 256
      LLM_WORKER_KERNEL_CACHE=/opt/kernels llm-worker-rbee warmup --all
    """
    if all_ and model is not None:
        raise typer.BadParameter("both a MODEL and --all are given: choose one")
    computing.set_up()
    start = time.perf_counter()
    with transfer_progress(COMPILING, CAPTURING) as progress:
        backend = select_backend(computing.device, computing.backend)
        if backend.has_device_memory:
            if all_:
                raise typer.BadParameter("--all is for the CPU: name a MODEL whose kernels a GPU needs")
            done = _warm_up_gpu(backend, model, computing, sharing, progress)
        else:
            done = _warm_up_cpu(model, all_, computing, sharing, progress)
    _print(done, time.perf_counter() - start, as_json)


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
    if replace(computing, threads=None) != usual or sharing != EngineFlags():
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
