"""The folder in which compiled kernels are kept, one for each version of the code, the compiler and the device.

The name of a folder is a hash of all that the machine code depends on, so what it holds is never stale. Folders that
were not used for long are removed. A folder that cannot be written costs time only: each start compiles again.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

CACHE_VARIABLE = "LLM_WORKER_KERNEL_CACHE"
MIN_DIRS_KEPT = 4  # the newest stay however old they are
MAX_UNUSED_DAYS = 30
logger = logging.getLogger(__name__)


def cache_root() -> Path | None:
    """Return the folder of all versions: the variable's, or one in the user's cache; None without a home."""
    variable, home = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if variable:
        return Path(variable).absolute()
    try:
        base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "llm-worker-rbee" / "kernels"


def open_cache_dir(name: str, *, must_grow: bool = False) -> Path | None:
    """Return the folder of a version, a temporary one if it cannot be written, or None.

    One that was filled beforehand, as in a container image, only has to be readable. If it `must_grow`, there is a
    temporary one that starts with links to all that it holds.
    """
    root = cache_root()
    try:
        if root is None:
            raise OSError("there is no home folder")
        folder = root / name
        if folder.is_dir() and not os.access(folder, os.W_OK) and any(folder.iterdir()):
            return _temporary_dir(name, folder) if must_grow else folder
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        os.utime(folder)  # the time of last use
        _remove_unused(root)
        return folder
    except OSError as error:
        logger.warning(
            "compiled kernels cannot be kept in %s (%s), so each start compiles them: set %s to a folder that can be "
            "written to",
            root,
            error.strerror or error,
            CACHE_VARIABLE,
        )
        return _temporary_dir(name)


def _temporary_dir(name: str, linked: Path | None = None) -> Path | None:
    """Return a folder that is removed when this process ends, with links to the entries of `linked`."""
    try:
        root = Path(tempfile.mkdtemp(prefix="llm-worker-rbee-kernels-"))
        folder = root / name
        folder.mkdir()
        for entry in () if linked is None else linked.iterdir():
            (folder / entry.name).symlink_to(entry)
    except OSError:
        return None
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not at the end of a forked child
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return folder


def _remove_unused(root: Path) -> None:
    """Remove code of versions that were not used for long, except the newest few."""
    with suppress(OSError):
        versions = [folder for folder in root.iterdir() if re.fullmatch("[0-9a-f]{16}", folder.name)]
        last_used = {folder: folder.stat().st_mtime for folder in versions}
        for folder in sorted(last_used, key=lambda path: last_used[path])[:-MIN_DIRS_KEPT]:
            if last_used[folder] < time.time() - MAX_UNUSED_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)
