"""Machine code on disk: one file for each kernel, in a folder that is keyed by all that the code depends on.

A file is a SHA-256 and the pickled code; it is written beside its name and moved there, so processes that compile at
once never see half a file, and one that is damaged is compiled anew. Numba's own cache has an index for several
signatures, which two processes can spoil for each other, and believes what it reads. A folder that cannot be written,
or a full disk, costs time, not the answer.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import pickle
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import compiler, serialize
from numba.core.runtime import nrt

VARIABLE = "LLM_WORKER_KERNEL_CACHE"
FOLDERS_KEPT = 4  # the newest stay however old they are
UNUSED_DAYS = 30
DIGEST = 32  # bytes before the code
_rebuild: Any = compiler.CompileResult._rebuild
_dumps: Any = serialize.dumps
logger = logging.getLogger(__name__)


def place() -> Path | None:
    """The folder of all kernels: what the variable names, or a part of the user's cache; None without a home."""
    given, home = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given).absolute()
    try:
        base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "llm-worker-rbee" / "kernels"


def open_folder(fingerprint: str) -> Path | None:
    """Where the code of this fingerprint is kept; for this process alone, or nowhere, where that cannot be written.

    A folder that was filled beforehand, for an image say, is good enough if it can be read.
    """
    above = place()
    try:
        if above is None:
            raise OSError("there is no home folder")
        folder = above / fingerprint
        if folder.is_dir() and not os.access(folder, os.W_OK) and any(folder.iterdir()):
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        os.utime(folder)  # when it was last used
        _remove_old(above)
        return folder
    except OSError as error:
        logger.warning(
            "compiled kernels cannot be kept in %s (%s), so each start compiles them: set %s to a folder that can be "
            "written to", above, error.strerror or error, VARIABLE,
        )  # fmt: skip
        return _passing_folder(fingerprint)


def _passing_folder(fingerprint: str) -> Path | None:
    """A folder that ends with this process."""
    try:
        above = Path(tempfile.mkdtemp(prefix="llm-worker-rbee-kernels-"))
        folder = above / fingerprint
        folder.mkdir()
    except OSError:
        return None
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not at the end of a forked child
            shutil.rmtree(above, ignore_errors=True)

    atexit.register(remove)
    return folder


def _remove_old(above: Path) -> None:
    """Code of earlier versions: what nobody has used for long, but for the newest few."""
    with suppress(OSError):
        ours = [folder for folder in above.iterdir() if re.fullmatch("[0-9a-f]{16}", folder.name)]
        used = {folder: folder.stat().st_mtime for folder in ours}
        for folder in sorted(used, key=lambda one: used[one])[:-FOLDERS_KEPT]:
            if used[folder] < time.time() - UNUSED_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)


@cache
def _tell_once(folder: Path, reason: str) -> None:
    logger.warning(
        "compiled kernels cannot be kept in %s (%s), so the next start compiles them again: free some space, or set "
        "%s to another folder", folder, reason, VARIABLE,
    )  # fmt: skip


class Kept:
    """The machine code of one function, as Numba asks for it and gives it: a cache of its dispatcher."""

    def __init__(self, function: Any, folder: Callable[[], Path | None]) -> None:
        """`folder` is asked for when it is needed: importing kernels changes nothing on the disk."""
        self.function = function
        self.folder = folder

    @property
    def cache_path(self) -> str:
        """Numba's interface: the folder."""
        return str(self.folder())

    def file(self, signature: Any, codegen: Any) -> Path | None:
        """Where the code for this signature is kept."""
        folder = self.folder()
        if folder is None:
            return None
        name = f"{self.function.__module__.rpartition('.')[2]}.{self.function.__qualname__}"
        key = (name, str(signature), codegen.magic_tuple(), self.function.__code__.co_code)
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        return folder / f"{re.sub('[^A-Za-z0-9._-]+', '-', name)[:80]}-{digest}"

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The code, ready to run, or None where it must be compiled.

        Numba would load all that it can compile first (a quarter of a second, more where SciPy is installed); code that
        is there needs its memory manager alone.
        """
        nrt.rtsys.initialize(context)
        file = self.file(signature, context.codegen())
        try:
            data = b"" if file is None else file.read_bytes()
        except OSError:
            return None
        if len(data) <= DIGEST or hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
            return None
        return _rebuild(context, *pickle.loads(data[DIGEST:]))

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep what was compiled; a disk that is full is no reason to fail."""
        file = self.file(signature, compiled.codegen)
        if file is None or compiled.lifted or compiled.library.has_dynamic_globals:
            return
        code = _dumps(compiled._reduce())
        try:
            _write(file, hashlib.sha256(code).digest() + code)
        except OSError as error:
            _tell_once(file.parent, error.strerror or str(error))

    def enable(self) -> None:
        """Numba's interface: nothing to do."""

    def disable(self) -> None:
        """Numba's interface: nothing to do."""

    def flush(self) -> None:
        """Numba's interface: nothing to do."""


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        part.write_bytes(data)
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
