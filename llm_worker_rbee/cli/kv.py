"""`llm-worker-rbee kv`: the folder of --kv-dir, by model: list it, check it, remove from it."""

import time
from collections.abc import Callable

import typer

from ..engine.kv_store import (
    DAMAGED,
    StoredFile,
    check_segment,
    list_files,
    open_folder,
    read_about,
    remove_files,
)
from ..errors import counted, human_bytes
from ..progress import transfer_progress
from .commands import KvCommand
from .terminal import cell, columns, print_json


def kv(options: KvCommand) -> None:
    """Run an action; the status of `check` is 1 where something is damaged."""
    actions: dict[str, Callable[[KvCommand, int], None]] = {"ls": _list, "check": _check, "rm": _remove}
    if options.action not in actions:
        raise typer.BadParameter(f"{options.action!r} is no action: use {', '.join(actions)}")
    if options.older is not None and options.action != "rm":
        raise typer.BadParameter("--older goes with rm")
    actions[options.action](options, open_folder(options.folder, create=False))


def _list(options: KvCommand, folder: int) -> None:
    """Print the namespaces."""
    by_namespace: dict[str, list[StoredFile]] = {}
    for file in list_files(folder):
        by_namespace.setdefault(file.namespace, []).append(file)
    entries = []
    for namespace, files in by_namespace.items():
        about = read_about(folder, namespace)
        facts = {name: str(about.get(name, "-")) for name in ("model", "kv_type", "backend")}
        used_at = max(file.used_at for file in files)
        damaged = sum(file.name.endswith(DAMAGED) for file in files)
        size = sum(file.size for file in files)
        entries.append({"namespace": namespace, **facts, "bytes": size, "damaged": damaged, "used_at": used_at})
    entries.sort(key=lambda entry: -float(str(entry["used_at"])))
    if options.as_json:
        print_json({"folder": str(options.folder), "namespaces": entries})
        return
    rows = [["MODEL", "KV TYPE", "BACKEND", "SIZE", "LAST USED"]]
    for entry in entries:
        names = [cell(str(entry[name])) for name in ("model", "kv_type", "backend")]
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(str(entry["used_at"]))))
        rows.append([*names, human_bytes(int(str(entry["bytes"]))), day])
    print("\n".join(columns(rows, right=[3])) if entries else f"nothing is kept in {options.folder}")


def _check(options: KvCommand, folder: int) -> None:
    """Read everything; print the files that are damaged."""
    files, num_blocks, damaged = list(list_files(folder)), 0, []
    total, done = sum(file.size for file in files), 0
    with transfer_progress() as progress:
        for file in files:
            count, is_damaged = check_segment(folder, file)
            num_blocks, done = num_blocks + count, done + file.size
            progress("checking", done, total)
            damaged += [str(file)] * (is_damaged or file.name.endswith(DAMAGED))
    if options.as_json:
        print_json({"files": len(files), "bytes": total, "blocks": num_blocks, "damaged": damaged})
    else:
        print(f"{counted(num_blocks, 'block')} in {counted(len(files), 'file')} ({human_bytes(total)}) verified")
        for text in damaged:
            print(f"damaged, or cut off by a crash: {text}; only blocks before the damage are used")
    if damaged:
        raise typer.Exit(1)


def _remove(options: KvCommand, folder: int) -> None:
    """Remove files."""
    oldest = time.time() - 86_400 * (options.older or 0)
    files = [file for file in list_files(folder) if options.older is None or file.used_at < oldest]
    removed = remove_files(folder, files)
    if options.as_json:
        print_json({"files": len(files), "bytes": removed})
    else:
        print(f"removed {counted(len(files), 'file')} ({human_bytes(removed)})")
