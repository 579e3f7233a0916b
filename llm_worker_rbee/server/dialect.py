"""The interface of a dialect: the routes of one API with the parsers of their bodies, and the printers of its replies.

A reply passes each delta to a printer, with the records here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import NotFoundError, WorkerError
from ..sampling_params import FinishReason, TokenLogprob
from ..tokenizer import Tokenizer
from ..tokenizer.chat.events import ChatEvent, ContentDelta, EventFold
from .bodies import GenerateRequest
from .json_schema import Schema
from .schema import ParseOptions
from .settings import ServerSettings
from .sse import PING

# Types that dialects name and never make. Importing them takes 20 MB and half a second (docs/decisions/server.md), and
# the process that parses large bodies imports the dialects for their parsers.
if TYPE_CHECKING:
    from ..generation import Generation as Generation
    from ..generation import TextDelta as TextDelta
    from ..text_model import TextModel as TextModel
    from .model_pool import Member as Member
    from .model_pool import ModelFacts as ModelFacts
    from .model_store import ModelStore as ModelStore
    from .pooling import PoolingService as PoolingService
    from .worker import Front as Front
    from .worker import Worker as Worker
else:
    Generation = TextDelta = TextModel = PoolingService = Front = Worker = Member = ModelFacts = ModelStore = Any

Parse = Callable[[bytes, ParseOptions], Any]


class Usage(NamedTuple):
    """Token counts of a reply."""

    prompt: int
    output: int
    cached: int  # of the prompt, found in the prefix cache
    reasoning: int  # of the output
    images: int = 0  # tokens of the prompt


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
    """Return the events of a delta; text without events is content."""
    if delta.events is not None:
        return delta.events
    return (ContentDelta(delta.text),) if delta.text else ()


class ReplyState(Protocol):
    """The state of a reply, for its printer."""

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

    An error after `begin` ends the stream.
    """

    media_type = "text/event-stream; charset=utf-8"  # of a stream
    ping = PING  # on an idle stream

    def __init__(self, reply: ReplyState) -> None:
        self.reply = reply

    def begin(self) -> bytes:
        """Return the text before the first delta."""
        return b""

    @abstractmethod
    def print_delta(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a delta of one generation."""

    def end(self) -> bytes:
        """Return the text after the last delta of all generations."""
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

    return {
        "content": [
            {**encode(entry.token, entry.logprob), "top_logprobs": [encode(*top) for top in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


class Call(Protocol):
    """A request, as passed to a handler."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def path_params(self) -> dict[str, Any]: ...
    @property
    def query(self) -> Mapping[str, str]: ...
    def require_own_page(self) -> None: ...  # raises if a page of another site sent it, which needs no body to do so
    @property
    def content_type(self) -> str: ...
    @property
    def base_url(self) -> str: ...
    def stream(self) -> AsyncIterator[bytes]: ...  # the body in parts, of any type
    def require_trusted(self, has_key: bool) -> None: ...  # raises unless it has the key, or comes from this machine
    async def body(self) -> bytes: ...  # raises unless it is JSON and arrives in time
    def until_disconnect(self) -> AbstractAsyncContextManager[None]: ...  # its task is cancelled then


def require_store(worker: Front, call: Call) -> ModelStore:
    """Return --models-dir; raise unless the client may change it."""
    if worker.store is None:
        why = "the models of this worker are chosen when it starts (llm-worker-rbee serve --models-dir)"
        raise NotFoundError(f"{call.path} is not supported: {why}")
    call.require_trusted(has_key=worker.settings.api_key is not None)
    worker.require_ready()
    return worker.store


# Returns a response, or what becomes one: an object or (object or bytes, status, headers).
Handler = Callable[[Call], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A route's description in `/openapi.json`; schemas are given by name."""

    summary: str
    request: str | None = None
    reply: str = "Any"  # or a media type
    event: str | None = None  # of a stream
    status: int = 200


@dataclass(frozen=True, slots=True)
class GenerateRoute:
    """A POST route that the model answers, streamed or whole."""

    path: str
    parse: Callable[[bytes, ParseOptions], GenerateRequest]
    printer: Callable[[ReplyState], Printer]
    operation: Operation
    # The events of a stream whose prompt does not fit, where the API has them; elsewhere it is an error with a status.
    print_overflow: Callable[[GenerateRequest, WorkerError], bytes] | None = None
    unloads: bool = False  # in a pool a body without a prompt may unload the model


@dataclass(frozen=True, slots=True)
class Route:
    """Any other route."""

    method: str
    path: str
    operation: Operation
    needs_pool: bool = False  # a worker whose models are fixed does not have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API."""

    prefixes: tuple[str, ...]  # of paths whose errors have its form, routes that do not exist included
    error_body: Callable[[WorkerError], dict[str, Any]]
    generate: tuple[GenerateRoute, ...] = ()
    routes: tuple[Route, ...] = ()
    make_handlers: Callable[[Front], Mapping[str, Handler]] = lambda _: {}  # of `routes`, by their paths
    # Besides the parsers of `generate`: by name, with the type of the record.
    parsers: dict[str, tuple[Parse, Any]] = field(default_factory=dict)
    schemas: Callable[[ServerSettings], dict[str, Schema]]  # of bodies and replies, by name
    takes_any_content_type: bool = False  # of a body, unless a page sends it, as its clients and documents expect
    body_limits: Mapping[str, int] = field(default_factory=dict)  # of paths, instead of the usual limit
    has_large_bodies: bool = False  # the limit of pooling models applies
    error_schema: str = "Error"
    invalid_schema: str | None = None  # of status 400, where it differs
