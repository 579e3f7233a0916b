"""Sessions of `chat`: each is a file with the messages of a conversation, which a later command continues.

    $XDG_DATA_HOME/llm-worker-rbee/sessions/NAME.json    model, number of tokens, messages; NAME.lock is held meanwhile

A file is replaced as a whole by a rename, so a killed process loses at most the turn in progress. What cannot be read
is never replaced. The keys and values of the messages are not here, but in a `kv_dir`.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import msgspec
import typer

from ..engine.kv_store import READ, open_folder
from ..errors import WorkerError
from ..weights.hub.cache_dir import APP_NAME
from .options import check_usage
from .terminal import MAX_TEXT_BYTES

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class SavedMessage(TypedDict):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str
    reasoning_content: NotRequired[str]
    images: NotRequired[list[str]]  # their files


class SavedChat(msgspec.Struct):
    """The content of a file."""

    model: str
    tokens: int  # of the messages, for this model
    messages: list[SavedMessage]


def sessions_folder() -> Path:
    """Return the folder of the files; it may not exist yet."""
    named = os.environ.get("XDG_DATA_HOME", "")
    try:
        base = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "share"
    except RuntimeError:
        raise WorkerError("there is no home folder for sessions: set XDG_DATA_HOME to a writable folder") from None
    return base / APP_NAME / "sessions"


class Session:
    """A session that this process alone may change."""

    def __init__(self, name: str, folder: int) -> None:
        self.name, self._folder = name, folder
        self.path = sessions_folder() / f"{name}.json"
        self.saved = _read(self.path)

    def write(self, saved: SavedChat) -> None:
        """Replace the file."""
        temporary, data = f"{self.name}.part", msgspec.json.format(msgspec.json.encode(saved), indent=1)
        if len(data) >= MAX_TEXT_BYTES:
            raise WorkerError(f"this turn is not saved: {self.path} would be too long; /reset starts over")
        try:
            with os.fdopen(os.open(temporary, WRITE | os.O_TRUNC, 0o600, dir_fd=self._folder), "wb") as file:
                file.write(data + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as error:
            problem = f"this turn is not saved: cannot write {self.path}: {error.strerror}"
            raise WorkerError(f"{problem}; the next turn saves it too") from None


@contextmanager
def open_session(name: str) -> Iterator[Session]:
    """Lock a session for the length of the block; raise if its name is invalid or another process has it."""
    if not NAME.fullmatch(name):
        rule = "at most 100 letters, digits, `-`, `_` and `.`, of which the first is a letter or a digit"
        raise typer.BadParameter(f"--session {name!r}: a name has {rule}")
    path = sessions_folder()
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = check_usage(open_folder, path, option="the folder of sessions")
    try:
        with os.fdopen(os.open(f"{name}.lock", WRITE, 0o600, dir_fd=folder), "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise WorkerError(f"session {name} is open in another chat: end it, or use another name") from None
            yield Session(name, folder)
    finally:
        os.close(folder)


def _read(path: Path) -> SavedChat:
    """Return the content of a file, an empty one where there is none; raise if it is damaged, or no file."""
    try:
        with os.fdopen(os.open(path, READ), "rb") as file:
            return msgspec.json.decode(file.read(MAX_TEXT_BYTES), type=SavedChat)
    except FileNotFoundError:
        return SavedChat("", 0, [])
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        reason = getattr(error, "strerror", None) or str(error)
    raise WorkerError(f"session {path.stem} cannot be read: {path}: {reason}; repair it or use another name")
