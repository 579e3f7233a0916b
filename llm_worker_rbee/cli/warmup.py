"""`llm-worker-rbee warmup`: compile the kernels ahead of time."""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..backends import cpu_info, select_backend
from ..backends.ops import COMPILING
from ..errors import InvalidRequestError, counted
from ..models import read_model_config
from ..progress import TransferProgress, transfer_progress
from ..weights import hub, open_checkpoint
from .options import ComputeOptions
from .terminal import note, print_json


def warmup(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Compile the kernels of this model. Default: the built-in model."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Compile all kernels, for any model.")] = False,
    cpu_isa: Annotated[
        str | None,
        typer.Option("--cpu-isa", metavar="NAME", show_default="the best", help="Instruction set: see doctor."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: kernels, compiled, seconds, folder, instruction_set.")
    ] = False,
) -> None:
    """Compile the kernels ahead of time, so that no answer waits for it.

    This happens once for each version, machine and instruction set, otherwise with the first answer. The built-in model
    is not fetched for this: where it is missing, every kernel is compiled.

    For other types of KV cache (--kv-type) and weights (--quantize) than the model's own: --all.

    Kernels are kept in the folder that LLM_WORKER_KERNEL_CACHE names, or in the user's cache.

    \b
    Examples:
      llm-worker-rbee warmup
      llm-worker-rbee warmup model.gguf
      LLM_WORKER_KERNEL_CACHE=/opt/kernels llm-worker-rbee warmup --all
    """
    if all_ and model is not None:
        raise typer.BadParameter("both a MODEL and --all are given: choose one")
    ComputeOptions(cpu_isa=cpu_isa).set_up()
    select_backend("cpu", "cpu")
    start = time.perf_counter()
    with transfer_progress(COMPILING) as progress:
        kernels, folder = _select_kernels(model, all_, progress)
        compiled = _precompile().load_kernels(kernels, progress)
    seconds = time.perf_counter() - start
    if as_json:
        print_json({"kernels": len(kernels), "compiled": compiled, "seconds": seconds,
                    "folder": None if folder is None else str(folder),
                    "instruction_set": cpu_info.current_isa()})  # fmt: skip
        return
    isa = cpu_info.current_isa()
    if compiled:
        note(f"compiled {counted(compiled, 'kernel')} of {len(kernels)} in {seconds:.1f} s, for {isa}")
    else:
        note(f"nothing to compile: {counted(len(kernels), 'kernel')} for {isa} were there")
    print(folder)


def _select_kernels(model: str | None, all_: bool, progress: TransferProgress) -> tuple[Sequence[Any], Path | None]:
    """Return the kernels to compile, and the folder of the JIT cache."""
    jit = importlib.import_module("llm_worker_rbee.backends.cpu.jit")
    above, folder = jit.cache_root(), jit.cache_dir()
    if above is None or folder is None or folder.parent != above:
        where = "there is no home folder" if above is None else f"{above} cannot be written to"
        raise InvalidRequestError(f"kernels cannot be kept: {where}, set LLM_WORKER_KERNEL_CACHE to another folder")
    if all_ or (model is None and not hub.BUILTIN[hub.DEFAULT_MODEL].is_present):
        return _precompile().all_kernels(), folder
    checkpoint = open_checkpoint(hub.locate_model(model, progress=progress))
    return _precompile().model_kernels(checkpoint, read_model_config(checkpoint)), folder


def _precompile() -> Any:
    return importlib.import_module("llm_worker_rbee.backends.cpu.precompile")
