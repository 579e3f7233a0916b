"""The records of a chat other than its messages: the tools that a model may call, and the events of its answer.

Every dialect of the server and the offline API use the same records.
"""

from __future__ import annotations

import binascii
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ...errors import InvalidRequestError

ToolChoice = Literal["auto", "none", "required"]  # or a `NamedTool`
DATA_URL = re.compile(r"data:image(?:/[\w.+-]{1,40})?(?:;[\w.=-]{1,80})*;base64,", re.ASCII | re.IGNORECASE)
IMAGE = "\ufdd1"  # stands for an image in a text: a noncharacter


def without_images(text: str) -> str:
    """Return a text of a client, which must not hold the mark itself."""
    return text.replace(IMAGE, "\ufffd")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False  # arguments are held to the schema, also where calling is left to the model


@dataclass(frozen=True, slots=True)
class Image:
    """A picture in a message: the bytes of a file, or the URL of one."""

    data: bytes = b""
    url: str = ""
    place: str = "the image"  # in the request, for errors
    detail: str = "auto"  # "low": of fewer tokens

    @classmethod
    def from_url(cls, place: str, url: str, detail: str | None = None) -> Image:
        """Return the image of a data URL, or of one of HTTP, which is not fetched here."""
        if url[:8].lower().startswith(("http://", "https://")):
            return cls(url=url, place=place, detail=detail or "auto")
        if (head := DATA_URL.match(url)) is None:
            raise _image_error(place, "must be a data URL of an image in base64, or a URL of http or https")
        return cls.from_base64(place, url[head.end() :], detail)

    @classmethod
    def from_base64(cls, place: str, text: str, detail: str | None = None) -> Image:
        try:
            data = binascii.a2b_base64(text, strict_mode=True)
        except ValueError as error:
            raise _image_error(place, f"is not valid base64: {error}") from None
        if not data:
            raise _image_error(place, "is empty")
        return cls(data=data, place=place, detail=detail or "auto")


def _image_error(place: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place} {problem}", place.partition("[")[0])


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of a chat other than its messages and sampling parameters; and its images, for which the text of the
    messages has `IMAGE`."""

    tools: list[Tool] = field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None  # the one tool that must be called
    parallel_tool_calls: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the template: `enable_thinking`, ...
    thinking_budget: int | None = None  # tokens; then the end of the reasoning is forced
    images: list[Image] = field(default_factory=list)  # in their order


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of a tool begins; calls are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the arguments of a call; the deltas of a call, joined, are its arguments as JSON."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of a call are complete."""

    index: int


ChatEvent = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class ToolCall(NamedTuple):
    """A call as a whole; `arguments` is JSON, or its beginning if the answer was cut."""

    id: str
    name: str
    arguments: str


def thinking_variables(template_kwargs: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Return variables of a template, and the variables that an effort of reasoning sets; "none" turns it off."""
    variables = dict(template_kwargs or {})
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        if effort != "none":
            variables.setdefault("reasoning_effort", effort)
    return variables


TEXT_FIELDS: dict[type, str] = {ContentDelta: "text", ReasoningDelta: "text", ToolCallDelta: "arguments"}


class EventFold:
    """Joins the events of an answer, and keeps their order."""

    def __init__(self) -> None:
        self._runs: list[tuple[ChatEvent, list[str]]] = []  # deltas in a row: the first, all texts
        self._num_calls = self._num_open = 0  # open: calls that have not ended

    def add(self, events: Iterable[ChatEvent]) -> str:
        """Add events; return their content."""
        content = []
        for event in events:
            if (key := TEXT_FIELDS.get(type(event))) is None:
                self._runs.append((event, []))
                self._num_calls += isinstance(event, ToolCallStart)
                self._num_open += 1 if isinstance(event, ToolCallStart) else -1
                continue
            if not self._runs or type(self._runs[-1][0]) is not type(event):
                self._runs.append((event, []))
            self._runs[-1][1].append(getattr(event, key))
            if isinstance(event, ContentDelta):
                content.append(event.text)
        return "".join(content)

    @property
    def events(self) -> list[ChatEvent]:
        """The events in their order; consecutive deltas of one kind are joined."""
        return [
            replace(first, **{TEXT_FIELDS[type(first)]: "".join(texts)}) if texts else first  # type: ignore[arg-type]
            for first, texts in self._runs
        ]

    @property
    def content(self) -> str:
        return self._join(ContentDelta)

    @property
    def reasoning(self) -> str:
        return self._join(ReasoningDelta)

    def _join(self, kind: type) -> str:
        return "".join(["".join(texts) for first, texts in self._runs if isinstance(first, kind)])

    @property
    def ends_with_calls(self) -> bool:
        """Whether there are calls, and all of them are complete."""
        return bool(self._num_calls) and not self._num_open

    @property
    def calls(self) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for first, texts in self._runs:
            if isinstance(first, ToolCallStart):
                calls.append(ToolCall(first.id, first.name, ""))
            elif isinstance(first, ToolCallDelta):
                calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + "".join(texts))
        return calls


def new_call_id() -> str:
    """Return the id of a call for a model that gives its calls none."""
    return f"call_{secrets.token_hex(12)}"
