"""What a dialect makes of a reply: the interface of its printer, and the records that it prints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..sampling_params import FinishReason, TokenLogprob
from ..tokenizer.chat.events import ChatEvent, ContentDelta, EventFold
from .sse import PING

if TYPE_CHECKING:  # the process that parses large bodies imports this module too
    from ..errors import WorkerError
    from ..generation import Generation, TextDelta
    from ..tokenizer import Tokenizer
    from .bodies import GenerateRequest


class Usage(NamedTuple):
    """Tokens of a reply."""

    prompt: int
    output: int
    cached: int  # of the prompt, found in the prefix cache
    reasoning: int  # of the output


@dataclass(slots=True)
class Answer:
    """All deltas of one generation, folded."""

    fold: EventFold = field(default_factory=EventFold)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    call_ends: list[int] = field(default_factory=list)  # how many tokens there were at the end of each call
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None

    def add(self, delta: TextDelta) -> None:
        """Join the next delta."""
        self.call_ends += [len(self.tokens) + end for end in delta.call_ends]
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_sequence = delta.finish_reason, delta.stop_sequence
        self.fold.add(chat_events(delta))


def chat_events(delta: TextDelta) -> Sequence[ChatEvent]:
    """Return what a delta is made of; text without events is content."""
    if delta.events is not None:
        return delta.events
    return (ContentDelta(delta.text),) if delta.text else ()


class ReplyState(Protocol):
    """What a printer knows of a reply."""

    request: GenerateRequest
    prompts: list[list[int]]  # token ids
    generations: list[Generation]
    created_at: float  # a date
    started_at: float  # in the time of time.perf_counter

    @property
    def model(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def max_tokens(self) -> int: ...  # of each answer, within the context
    @property
    def seed(self) -> int: ...
    def usage(self) -> Usage: ...


class Printer(ABC):
    """Prints a reply in the form of one dialect: `begin`, then `print_delta` for each delta, then `end`; or `whole`.

    An error after `begin` is the last that a stream has.
    """

    media_type = "text/event-stream; charset=utf-8"  # of a stream
    ping = PING  # on an idle stream

    def __init__(self, reply: ReplyState) -> None:
        self.reply = reply

    def begin(self) -> bytes:
        """Return what precedes the first delta."""
        return b""

    @abstractmethod
    def print_delta(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta of one generation."""

    def end(self) -> bytes:
        """Return what follows the last delta of all generations."""
        return b""

    @abstractmethod
    def print_error(self, error: WorkerError) -> bytes:
        """Return the event of an error, and the end of the stream."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return a whole reply."""


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities in the shape of chat completions."""

    def encode(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    return {"content": [
        {**encode(entry.token, entry.logprob), "top_logprobs": [encode(*top) for top in entry.top]} for entry in entries
    ], "refusal": None}  # fmt: skip
