"""`llm-worker-rbee warmup`: compile the kernels ahead of time."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidRequestError
from ..progress import transfer_progress
from .options import ComputeOptions
from .terminal import counted, note, print_json

if TYPE_CHECKING:
    from ..backends.precompile import Kernel


def warmup(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Only what this model needs. The built-in model's if left out."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every kernel there is, for any model.")] = False,
    cpu_isa: Annotated[
        str | None,
        typer.Option("--cpu-isa", metavar="NAME", show_default="the best", help="One that doctor lists."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: kernels, compiled, seconds, folder, instruction_set.")
    ] = False,
) -> None:
    """Compile the kernels ahead of time, so that no answer waits for it.

    It happens once for each version, machine and instruction set; the first answer does it otherwise. The built-in
    model is not fetched for this: where it is not here, every kernel is compiled.

    Other caches (--kv-type) and other types (--quantize) than the model's own: --all.

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
    from ..backends import isa, precompile, select_backend

    select_backend("cpu", "cpu")
    start = time.perf_counter()
    with transfer_progress(precompile.COMPILING) as progress:
        wanted, folder = _wanted(model, all_, progress)
        compiled = precompile.get_ready(wanted, folder, progress)
    seconds = time.perf_counter() - start
    if as_json:
        print_json({"kernels": len(wanted), "compiled": compiled, "seconds": seconds,
                    "folder": None if folder is None else str(folder), "instruction_set": isa.current()})  # fmt: skip
        return
    if compiled:
        note(f"compiled {counted(compiled, 'kernel')} of {len(wanted)} in {seconds:.1f} s, for {isa.current()}")
    else:
        note(f"nothing to compile: {counted(len(wanted), 'kernel')} for {isa.current()} were there")
    print(folder)


def _wanted(model: str | None, all_: bool, progress: Any) -> tuple[Sequence["Kernel"], Path | None]:
    from ..backends import precompile
    from ..backends.cpu import catalog
    from ..backends.cpu.jit import folder, place
    from ..models import read_model_config
    from ..weights import hub, open_checkpoint

    above, kept = place(), folder()
    if above is None or kept is None or kept.parent != above:
        where = "there is no home folder" if above is None else f"{above} cannot be written to"
        raise InvalidRequestError(f"kernels cannot be kept: {where}, set LLM_WORKER_KERNEL_CACHE to another folder")
    if all_ or (model is None and not hub.BUILTIN[hub.DEFAULT_MODEL].is_present):
        return catalog.every(), folder()
    checkpoint = open_checkpoint(hub.locate_model(model, progress=progress))
    return catalog.needed(*precompile.Needs.of(checkpoint, read_model_config(checkpoint))), folder()
