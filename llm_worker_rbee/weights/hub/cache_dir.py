"""The cache folder of the worker: locks, work folders, errors.

One flat folder. Models have their own file names; `.locks/` holds one lock file for each, and `.pull-<name>-*/` is the
work folder of a running pull (same file system, so that the final rename is atomic). A work folder exists only while
its lock is held: the next holder removes what a killed process left behind.
"""

import errno
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ...errors import DownloadError, human_bytes

# (activity, bytes done, total bytes or None); may be called from another thread
Progress = Callable[[str, int, int | None], None]

APP_NAME = "llm-worker-rbee"
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
UNWRITABLE_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def no_progress(what: str, done: int, total: int | None) -> None:
    """Ignore a progress report."""


def cache_dir() -> Path:
    """Return the folder of our own models; it may not exist yet."""
    return user_cache_dir() / APP_NAME


def user_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME`, or `~/.cache`. A relative path is ignored, as the XDG specification demands."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise DownloadError("no home folder to store models in: set XDG_CACHE_HOME to a writable folder") from None


def disk_full_error(folder: Path, needed: int | None) -> DownloadError:
    """Return the error for a full disk, with free and needed space."""
    space = f", {human_bytes(needed)} needed" if needed else ""
    with suppress(OSError):
        space += f", {human_bytes(shutil.disk_usage(folder).free)} free"
    return DownloadError(
        f"no room in {folder}{space}: free some space, or set XDG_CACHE_HOME (HF_HOME for hf:) to a larger disk"
    )


def require_space(folder: Path, needed: int) -> None:
    """Raise DownloadError if `needed` bytes do not fit."""
    if shutil.disk_usage(folder).free < needed:
        raise disk_full_error(folder, needed)


@contextmanager
def explain_os_errors(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turn file system errors below `folder` into a DownloadError with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise disk_full_error(folder, needed) from error
        if error.errno in UNWRITABLE_ERRNOS:
            raise DownloadError(
                f"cannot write to {error.filename or folder} ({error.strerror}): make it writable, or set"
                " XDG_CACHE_HOME to a writable folder"
            ) from error
        raise DownloadError(f"cannot store a model in {folder}: {error.strerror or error}") from error


@contextmanager
def model_lock(name: str, progress: Progress) -> Iterator[Path]:
    """Hold the lock of the cache entry `name`, waiting if another process has it; yield the cache folder.

    flock, because the kernel releases it when the holder dies.
    """
    folder = cache_dir()
    with explain_os_errors(folder):
        (folder / ".locks").mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".locks" / f"{name}.lock", "ab")  # noqa: SIM115 - held open over the yield below
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that fetches {name}", 0, None)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder


@contextmanager
def work_folder(folder: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder next to the model `name` and remove it at the end. The lock of `name` must be held."""
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
    """Let SIGTERM and SIGHUP unwind the stack (and so clean up) unless the program handles them."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    handled = [number for number in EXIT_SIGNALS if is_main_thread and signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in handled:
            signal.signal(number, _exit_on_signal)
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def move_into_place(finished: Path, final: Path) -> None:
    """Rename a complete, flushed file to its final name, durably."""
    os.replace(finished, final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
