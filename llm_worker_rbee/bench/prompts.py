"""Prompts from a file: JSON lines of {"prompt": ...} or {"messages": [...]}, with "max_tokens" where one wants it.

Any other file is taken as plain text, one prompt a line. The repository's own prompts and words lie in data/.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError

DATA = Path(__file__).parent / "data"
PROMPTS, TEXT, WORDS = DATA / "prompts.jsonl", DATA / "text.txt", DATA / "words.txt"
LARGEST_FILE = 64 << 20
MOST_TOKENS = 1_000_000
KEYS = {"prompt", "messages", "max_tokens"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or a conversation: one of the two is there."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None

    @property
    def words(self) -> int:
        """How long it is, roughly: words stand for tokens where nobody counts these."""
        contents = [self.text] if self.messages is None else [m.get("content") for m in self.messages]
        return sum(len(text.split()) for text in contents if isinstance(text, str))


def read_text(path: Path) -> str:
    """A text file, not too large, in UTF-8."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InvalidRequestError(f"{path} is too large: at most {LARGEST_FILE >> 20} MiB are read")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)  # a device tells no size
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > LARGEST_FILE:
        raise InvalidRequestError(f"{path} is too large: at most {LARGEST_FILE >> 20} MiB are read")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text: byte {error.start} is wrong") from None


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file; a wrong line is named."""
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidRequestError(f"{path} holds no prompt")
    if path.suffix != ".jsonl":
        return [Prompt(line.rstrip("\r")) for _, line in lines]
    return [_parsed(line, f"{path}, line {number}") for number, line in lines]


def _parsed(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise InvalidRequestError(f'{where}: give an object with either "prompt" or "messages"')
    if unknown := sorted(set(value) - KEYS):
        raise InvalidRequestError(f"{where}: unknown field {unknown[0]!r} (known: {', '.join(sorted(KEYS))})")
    text, messages, most = value.get("prompt"), value.get("messages"), value.get("max_tokens")
    if "prompt" in value and (not isinstance(text, str) or not text):
        raise InvalidRequestError(f'{where}: "prompt" must be a text that is not empty')
    if "messages" in value and not _are_messages(messages):
        raise InvalidRequestError(f'{where}: "messages" must be a list of objects, each with a "role"')
    if most is not None and (type(most) is not int or not 1 <= most <= MOST_TOKENS):
        raise InvalidRequestError(f'{where}: "max_tokens" must be a whole number from 1 to {MOST_TOKENS}')
    return Prompt(text, messages, most)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)
    )
