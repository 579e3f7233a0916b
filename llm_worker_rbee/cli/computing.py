"""The options that say on what and how a model is computed, the same for every command that computes.

What they set must be set before NumPy and the kernels are loaded, so a command calls `set_up` first of all.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..errors import InsufficientMemoryError, InvalidRequestError, WorkerError
from .convert import TYPES

COMPUTING_PANEL = "Computing"
# Named here for --help, which imports nothing heavy; a test holds it against backends.types.KV_TYPES.
KV_TYPES = "auto float32 float16 int8 bfloat16 float8"
# What messages of the engine name, and a person types as an option.
SETTING = re.compile(r"(?<![\w-])(?:kv_memory|kv_type|max_context|max_tokens|draft_model|quantize)(?!\w)")
LIBRARY_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=COMPUTING_PANEL, **more)


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """On what."""

    device: Annotated[str, _option("--device", metavar="NAME", help="The hardware: auto, cpu, cuda or cuda:N.")] = (
        "auto"
    )
    backend: Annotated[
        str, _option("--backend", metavar="NAME", help="The implementation: auto, reference, cpu or cuda.")
    ] = "auto"
    threads: Annotated[
        int | None,
        _option("--threads", metavar="N", min=1, show_default="physical cores", help="Threads to compute with."),
    ] = None
    cpu_isa: Annotated[
        str | None,
        _option("--cpu-isa", metavar="NAME", show_default="the best", help="An instruction set that doctor lists."),
    ] = None

    def set_up(self) -> int:
        """Make it so; how many threads will compute."""
        if self.backend == "reference" and self.cpu_isa is not None:
            raise typer.BadParameter("--cpu-isa is for the kernels: it does not go with --backend reference")
        for name, value in (("--threads", self.threads), ("--cpu-isa", self.cpu_isa)):
            if value is not None and (self.device.startswith("cuda") or self.backend == "cuda"):
                raise typer.BadParameter(f"{name} is for the CPU: it does not go with a GPU")
        used = use_threads(self.threads, self.backend)
        if self.cpu_isa is not None:
            from ..backends import isa

            _named(isa.force, self.cpu_isa, "--cpu-isa")
        return used

    @property
    def kernel_threads(self) -> int | None:
        """What the backend is told; the reference takes its number from the environment."""
        return None if self.backend == "reference" else self.threads


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ComputeOptions):
    """On what, and how the model is held in memory."""

    kv_type: Annotated[
        str,
        _option("--kv-type", metavar="T",
                help="How keys and values are kept: auto, float32, float16; on a CPU int8; on a GPU bfloat16, float8."),
    ] = "auto"  # fmt: skip
    quantize: Annotated[
        str | None,
        _option("--quantize", metavar="T", show_default="as they are",
                help="Quantize the weights while loading; T as convert --type takes it, on a GPU also fp8."),
    ] = None  # fmt: skip

    def set_up(self) -> int:
        """Make it so; how many threads will compute."""
        if self.kv_type not in KV_TYPES.split():
            raise typer.BadParameter(f"--kv-type {self.kv_type}: use one of {', '.join(KV_TYPES.split())}")
        if self.quantize is not None and self.quantize.upper() not in (*TYPES.split(), "FP8"):
            raise typer.BadParameter(
                f"--quantize {self.quantize}: use one of {', '.join(TYPES.split())}, or fp8 on a GPU"
            )
        return super().set_up()


def use_threads(threads: int | None, backend: str = "auto") -> int:
    """How many threads will compute. Those of the reference are NumPy's (1 unless asked): before NumPy is loaded."""
    if backend != "reference":
        from ..backends import thread_count

        return _named(thread_count.choose, threads, "--threads")  # type: ignore[no-any-return]
    wanted = str(threads or 1)
    if "numpy" in sys.modules and threads is not None and os.environ.get(LIBRARY_VARIABLES[0]) != wanted:
        raise WorkerError("--threads cannot be changed once NumPy is loaded: start a new process")
    if threads is not None:
        os.environ.update(dict.fromkeys(LIBRARY_VARIABLES, wanted))
    return int(os.environ.get(LIBRARY_VARIABLES[0]) or 1)


def in_options(message: str, **others: str) -> str:
    """A message with settings as they are typed: kv_memory as --kv-memory, or as `others` say."""
    return SETTING.sub(lambda found: others.get(found[0]) or "--" + found[0].replace("_", "-"), message)


@contextmanager
def naming_options(**others: str) -> Iterator[None]:
    """Errors that refuse a setting name its option."""
    try:
        yield
    except (InvalidRequestError, InsufficientMemoryError) as error:
        error.args = (in_options(str(error), **others), *error.args[1:])
        raise


def _named(check: Any, value: Any, option: str) -> Any:
    """What is wrong with an option is wrong usage, and names it."""
    try:
        return check(value)
    except InvalidRequestError as error:
        if value is None:
            raise
        raise typer.BadParameter(str(error).replace(error.field or "", option, 1)) from None
