"""The worker's own cache folder: its lock, its work folders, and what its failures are called.

One flat folder. A model lies in it under its own file name; `.locks/` holds one lock file for each such name, and
`.pull-<name>-*/` is the work folder of a pull under way (same file system, so that the last rename is atomic). A work
folder exists only while its lock is held: whoever gets the lock may sweep what a killed process left behind.
"""

import errno
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ...errors import DownloadError, human_bytes

# (what is going on, bytes done, bytes in all or None); may be called from a thread that watches a download
Progress = Callable[[str, int, int | None], None]

APP_NAME = "llm-worker-rbee"
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # the second: the terminal was closed
UNWRITABLE_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def no_progress(what: str, done: int, total: int | None) -> None:
    """Progress that nobody looks at."""


def cache_dir() -> Path:
    """The folder of our own models; it need not exist yet."""
    return user_cache_dir() / APP_NAME


def user_cache_dir() -> Path:
    """`$XDG_CACHE_HOME`, or `~/.cache`. A relative one is ignored, as the XDG rules say."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise DownloadError("there is no home folder to keep models in: set XDG_CACHE_HOME to a writable one") from None


def disk_full_error(folder: Path, needed: int | None) -> DownloadError:
    """The error for a full disk: the folder, what is free and what is needed."""
    wants = f", {human_bytes(needed)} needed" if needed else ""
    return DownloadError(
        f"no room in {folder}{wants}{_free_space(folder)}: free some space, or set XDG_CACHE_HOME (HF_HOME for hf:) to"
        " a larger disk"
    )


def _free_space(folder: Path) -> str:
    try:
        return f", {human_bytes(shutil.disk_usage(folder).free)} free"
    except OSError:
        return ""


def require_space(folder: Path, needed: int) -> None:
    """Refuse before the first byte what cannot fit."""
    if shutil.disk_usage(folder).free < needed:
        raise disk_full_error(folder, needed)


@contextmanager
def explain_os_errors(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turn a failure of the file system below `folder` into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise disk_full_error(folder, needed) from error
        if error.errno in UNWRITABLE_ERRNOS:
            raise DownloadError(
                f"cannot write to {error.filename or folder} ({error.strerror}): make it writable, or set"
                " XDG_CACHE_HOME to a folder that is"
            ) from error
        raise DownloadError(f"cannot keep a model in {folder}: {error.strerror or error}") from error


@contextmanager
def model_lock(name: str, progress: Progress) -> Iterator[Path]:
    """Hold the lock on the cache entry `name`, waiting for whoever has it; give the cache folder.

    flock, because the kernel drops it when the holder dies, however it dies.
    """
    folder = cache_dir()
    with explain_os_errors(folder):
        (folder / ".locks").mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".locks" / f"{name}.lock", "ab")  # noqa: SIM115 - held open over the yield below
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that is fetching {name}", 0, None)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder


@contextmanager
def work_folder(folder: Path, name: str) -> Iterator[Path]:
    """An empty folder beside the model `name`, gone at the end whatever happens. The lock on `name` must be held."""
    for stale in folder.glob(f".pull-{name}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with _exit_on_termination():
        with explain_os_errors(folder):
            work = Path(tempfile.mkdtemp(prefix=f".pull-{name}-", dir=folder))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _exit_on_termination() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack (and so clean up) where nobody has asked for anything else."""
    here = threading.current_thread() is threading.main_thread()
    ours = [number for number in EXIT_SIGNALS if here and signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, _exit_on_signal)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def move_into_place(finished: Path, final: Path) -> None:
    """Move a complete, flushed file to its final name, durably."""
    os.replace(finished, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
