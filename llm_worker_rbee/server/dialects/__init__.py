"""The dialects: each module here parses the bodies of one API into a `GenerateRequest` and prints its replies.

A module has `DIALECT`. Routes, error bodies, the description in `/openapi.json` and the parsers of the process for
large bodies follow from it: a new dialect is a new module, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..bodies import (
    Conversation,
    GenerateRequest,
    PackedIds,
    ParseOptions,
    parse_apply_template,
    parse_detokenize,
    parse_tokenize,
)
from ..schema import Schema

if TYPE_CHECKING:  # the process that parses large bodies imports this module too
    from ...errors import WorkerError
    from ..call import Call
    from ..printer import Printer, ReplyState
    from ..settings import ServerSettings
    from ..worker import Worker

Parse = Callable[[bytes, ParseOptions], Any]
Handler = Callable[
    ["Call"], Awaitable[Any]
]  # returns a response, or what becomes one: an object or (object, status, headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What `/openapi.json` says of a route; schemas are given by their names."""

    summary: str
    request: str | None = None
    reply: str = "Any"  # or a media type
    event: str | None = None  # of a stream
    status: int = 200


@dataclass(frozen=True, slots=True)
class GenerateRoute:
    """A POST route whose body is answered by the model, streamed or whole."""

    path: str
    parse: Callable[[bytes, ParseOptions], GenerateRequest]
    printer: Callable[[ReplyState], Printer]
    operation: Operation
    # The events of a stream whose prompt does not fit, where the API has them; elsewhere it is an error with a status.
    print_overflow: Callable[[GenerateRequest, WorkerError], bytes] | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """Any other route."""

    method: str
    path: str
    operation: Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API."""

    prefixes: tuple[str, ...]  # of paths whose errors have its form, routes that do not exist included
    error_body: Callable[[WorkerError], dict[str, Any]]
    generate: tuple[GenerateRoute, ...] = ()
    routes: tuple[Route, ...] = ()
    make_handlers: Callable[[Worker], Mapping[str, Handler]] = lambda _: {}  # of `routes`, by their paths
    parsers: dict[str, tuple[Parse, Any]] = field(
        default_factory=dict
    )  # besides those of `generate`: by name, with the type of the record
    schemas: Callable[[ServerSettings], dict[str, Schema]]  # of bodies and replies, by name
    takes_any_content_type: bool = False  # of a body, unless a page sends it, as its clients and documents expect
    has_large_bodies: bool = False  # the limit is that of pooling models
    error_schema: str = "Error"
    invalid_schema: str | None = None  # of status 400, where it differs


@cache
def all_dialects() -> tuple[Dialect, ...]:
    """Return the dialects of the modules in this folder."""
    names = sorted(module.name for module in iter_modules(__path__))
    modules = [import_module(f"{__name__}.{name}") for name in names]
    return tuple(module.DIALECT for module in modules if hasattr(module, "DIALECT"))


@lru_cache(256)
def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path, whose form its errors have: the one that claims most of it."""
    return max(all_dialects(), key=lambda dialect: max(map(partial(_claimed_length, path), dialect.prefixes)))


def _claimed_length(path: str, prefix: str) -> int:
    path = path or "/"
    claims = path == prefix or path.startswith(prefix.rstrip("/") + "/")
    return len(prefix) if claims else -1


def generate_routes() -> Iterator[GenerateRoute]:
    """Yield the routes that the model answers."""
    for dialect in all_dialects():
        yield from dialect.generate


@cache
def dialect_parsers() -> dict[str, tuple[Parse, Any]]:
    """Return the parsers of all dialects by name, a path or what the dialect calls it."""
    parsers: dict[str, tuple[Parse, Any]] = {}
    for dialect in all_dialects():
        parsers |= {route.path: (route.parse, GenerateRequest) for route in dialect.generate} | dialect.parsers
    return parsers


@cache
def body_parsers() -> dict[str, tuple[Parse, Any]]:
    """Return the parsers of all bodies by name, with the type of the record that each returns."""
    return {
        **dialect_parsers(),
        "tokenize": (parse_tokenize, dict[str, Any]),
        "detokenize": (parse_detokenize, PackedIds),
        "apply_template": (parse_apply_template, Conversation),
    }
