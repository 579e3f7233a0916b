"""Prompts from files, and the requests of a load: lengths and arrivals of a seeded process.

A prompt file has JSON lines of {"prompt": ...} or {"messages": [...]}, with an optional "max_tokens"; any other file is
plain text, one prompt a line. Request i of a workload depends on (seed, i) alone, and is made when it is due. Lengths
are counted in plain English words, about a token each; or in tokens, where prompts are token ids. The bundled prompts
and words are in data/.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from llm_worker_rbee.errors import InvalidRequestError

DATA = Path(__file__).parent / "data"
PROMPTS, TEXT, WORDS = DATA / "prompts.jsonl", DATA / "text.txt", DATA / "words.txt"
MAX_FILE_BYTES = 64 << 20
MAX_TOKENS = 1_000_000
PROMPT_FIELDS = {"prompt", "messages", "max_tokens"}
MAX_REQUESTS = 1_000_000
LENGTHS = re.compile(r"(\d{1,7})|(\d{1,7})-(\d{1,7})|normal:(\d{1,7}(?:\.\d{1,6})?),(\d{1,7}(?:\.\d{1,6})?)", re.ASCII)
ARRIVALS, CONTENT, PREFIX = 0, 1, 2  # streams of one seed


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, a conversation or token ids: one of them is set."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    ids: list[int] | None = None

    @property
    def words(self) -> int:
        """The length in words, which stand for tokens where the server does not count them, or in token ids."""
        if self.ids is not None:
            return len(self.ids)
        contents = [self.text] if self.messages is None else [m.get("content") for m in self.messages]
        return sum(len(text.split()) for text in contents if isinstance(text, str))


def read_text(path: Path) -> str:
    """Read a UTF-8 text file of bounded size."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequestError(f"{path} is too large: at most {MAX_FILE_BYTES >> 20} MiB are read")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text: byte {error.start} is invalid") from None


def read_prompts(path: Path) -> list[Prompt]:
    """Read all prompts of a file; raise naming a wrong line."""
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidRequestError(f"{path} has no prompts")
    if path.suffix != ".jsonl":
        return [Prompt(line.rstrip("\r")) for _, line in lines]
    return [_parse_prompt(line, f"{path}, line {number}") for number, line in lines]


def _parse_prompt(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise InvalidRequestError(f'{where}: give an object with either "prompt" or "messages"')
    if unknown := sorted(set(value) - PROMPT_FIELDS):
        raise InvalidRequestError(f"{where}: unknown field {unknown[0]!r} (known: {', '.join(sorted(PROMPT_FIELDS))})")
    text, messages, max_tokens = value.get("prompt"), value.get("messages"), value.get("max_tokens")
    if "prompt" in value and (not isinstance(text, str) or not text):
        raise InvalidRequestError(f'{where}: "prompt" must be a non-empty string')
    if "messages" in value and not _are_messages(messages):
        raise InvalidRequestError(f'{where}: "messages" must be a list of objects, each with a "role"')
    if max_tokens is not None and (type(max_tokens) is not int or not 1 <= max_tokens <= MAX_TOKENS):
        raise InvalidRequestError(f'{where}: "max_tokens" must be a whole number from 1 to {MAX_TOKENS}')
    return Prompt(text, messages, max_tokens)


def _are_messages(value: Any) -> bool:
    are_objects = isinstance(value, list) and value and all(isinstance(message, dict) for message in value)
    return bool(are_objects) and all(isinstance(message.get("role"), str) for message in value)


@dataclass(frozen=True, slots=True)
class Lengths:
    """`128`, `64-256` (uniform) or `normal:128,32` (mean and standard deviation; at least 1)."""

    low: float
    high: float
    normal: bool = False

    @staticmethod
    def parse(text: str, option: str) -> Lengths:
        match = LENGTHS.fullmatch(text)
        if match is None:
            raise InvalidRequestError(f"{option} is {text!r}: write N, LOW-HIGH or normal:MEAN,SD", option)
        if match[4]:
            span = Lengths(float(match[4]), float(match[5]), normal=True)
        else:
            span = Lengths(float(match[1] or match[2]), float(match[1] or match[3]))
        if not 1 <= span.low <= MAX_TOKENS or span.high > MAX_TOKENS or (span.high < span.low and not span.normal):
            message = f"{option} is {text!r}: use lengths from 1 to {MAX_TOKENS}, the smaller first"
            raise InvalidRequestError(message, option)
        return span

    def draw(self, rng: np.random.Generator) -> int:
        if self.normal:
            return int(min(max(1, round(rng.normal(self.low, self.high))), MAX_TOKENS))
        return int(rng.integers(int(self.low), int(self.high) + 1))


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send."""

    index: int
    arrival: float | None  # seconds after the start; None: as soon as the concurrency allows
    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a run."""

    requests: int
    input_len: Lengths
    output_len: Lengths
    rate: float = math.inf
    burstiness: float = 1.0
    seed: int = 0
    shared_prefix: int = 0
    prefix_groups: int = 1
    prompts: Sequence[Prompt] = ()
    vocab_size: int = 0  # above 0: prompts are token ids below it

    def jobs(self) -> Iterator[Job]:
        arrivals = self._arrivals()
        for index in range(self.requests):
            yield self.job(index, next(arrivals))

    def job(self, index: int, arrival: float | None = None) -> Job:
        rng = np.random.default_rng((self.seed, CONTENT, index))
        length, max_tokens = self.input_len.draw(rng), self.output_len.draw(rng)
        if self.prompts:
            prompt = self.prompts[index % len(self.prompts)]
            return Job(index, arrival, prompt, prompt.max_tokens or max_tokens)
        return Job(index, arrival, self._make_prompt(index, rng, length), max_tokens)

    def count_arrivals(self, seconds: float) -> int:
        """Return how many arrive within the first `seconds`, at a finite rate."""
        due = takewhile(lambda arrival: arrival is not None and arrival < seconds, self._arrivals())
        return sum(1 for _ in islice(due, self.requests))

    def warm_up(self, count: int) -> list[Job]:
        """Return requests like the measured ones with other prompts, so that no prefix of the run is cached."""
        return [self.job(MAX_REQUESTS + i) for i in range(count)]

    def _make_prompt(self, index: int, rng: np.random.Generator, length: int) -> Prompt:
        """Make a prompt of words or token ids behind its shared prefix; requests to warm up have another prefix."""
        parts = self._draw(rng, length)
        if self.shared_prefix:
            group = MAX_REQUESTS if index >= MAX_REQUESTS else index % self.prefix_groups
            parts = self._draw(np.random.default_rng((self.seed, PREFIX, group)), self.shared_prefix) + parts
        return Prompt(ids=parts) if self.vocab_size else Prompt(" ".join(parts))

    def _draw(self, rng: np.random.Generator, count: int) -> list[Any]:
        return _draw_ids(rng, count, self.vocab_size) if self.vocab_size else _draw_words(rng, count)

    def _arrivals(self) -> Iterator[float | None]:
        """Yield arrivals with gamma gaps of mean 1/rate: shape 1 is Poisson, below it bursts, above it regular."""
        if math.isinf(self.rate):
            while True:
                yield None
        rng, now = np.random.default_rng((self.seed, ARRIVALS)), 0.0
        while True:
            yield now
            now += float(rng.gamma(self.burstiness, 1 / (self.rate * self.burstiness)))


@cache
def vocabulary() -> tuple[str, ...]:
    """Return the words that prompts are made of."""
    return tuple(read_text(WORDS).split())


def _draw_words(rng: np.random.Generator, count: int) -> list[str]:
    words = vocabulary()
    return [words[i] for i in rng.integers(0, len(words), count)]


def _draw_ids(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Draw from the middle half of a vocabulary: control tokens are at its ends."""
    drawn: list[int] = rng.integers(vocab_size // 4, vocab_size - vocab_size // 4, count).tolist()
    return drawn
