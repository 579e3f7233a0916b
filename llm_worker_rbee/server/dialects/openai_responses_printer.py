"""The replies of `/v1/responses`: items, the events of a stream in their order, and one object."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from ...errors import ContextLengthError, WorkerError
from ...sampling_params import SamplingParams, TokenLogprob
from ...tokenizer import Tokenizer
from ...tokenizer.chat.events import ChatEvent, ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from ..bodies import GenerateRequest
from ..dialect import Answer, Printer, ReplyState, TextDelta, Usage, chat_events, chat_logprobs
from ..sse import encode_json
from .openai import error_message

REASONING_PREFIX = "rbee1."  # of `encrypted_content`: the reasoning itself, as base64
INPUT_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
INPUT_PIECES = re.compile(r'(?:[^"\\]|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....|\\[^u])+', re.DOTALL)


def error_code(error: WorkerError) -> str:
    """Return this API's code of an error."""
    if isinstance(error, ContextLengthError):
        return "context_length_exceeded"
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.code == "INFERENCE_FAILED" else error.code


class InputDecoder:
    """The text of a custom tool's `input`, from the JSON of its arguments, as it comes."""

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = False
        self.text = ""

    def push(self, arguments: str) -> str:
        """Return the newly decoded text."""
        self._held += arguments
        if not self._has_begun:
            if (begin := INPUT_START.match(self._held)) is None:
                return ""
            self._has_begun, self._held = True, self._held[begin.end() :]
        pieces = INPUT_PIECES.match(self._held)
        if pieces is None:
            return ""
        self._held = self._held[pieces.end() :]
        try:
            text = str(msgspec.json.decode(f'"{pieces[0]}"'))
        except msgspec.DecodeError:  # no JSON: as it is
            text = pieces[0]
        self.text += text
        return text

    def finish(self) -> str:
        """Return the rest; arguments in another form are the input unchanged."""
        if self._has_begun:
            return ""
        self.text, self._held = self._held, ""
        return self.text


class LogprobQueue:
    """Log-probabilities of tokens that wait for their text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._entries: list[TokenLogprob] = []

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        """Add the log-probabilities of the next tokens."""
        self._entries += entries

    def clear(self) -> None:
        """Drop the log-probabilities of a call."""
        self._entries.clear()

    def take(self, text: str) -> list[dict[str, Any]]:
        """Return the log-probabilities of the next text, and drop the ones of markers before it."""
        target = text.encode(errors="replace")
        pieces = [self._tokenizer.token_bytes(entry.token) for entry in self._entries]
        joined, starts = b"".join(pieces), accumulate(map(len, pieces), initial=0)
        begin = next((start for start in starts if joined.startswith(target, start)), joined.find(target))
        if begin < 0 or not target:
            return []
        first = last = position = 0
        while position < begin + len(target):
            position += len(pieces[last])
            first += position <= begin
            last += 1
        entries, self._entries = self._entries[first:last], self._entries[last:]
        content: list[dict[str, Any]] = chat_logprobs(self._tokenizer, entries)["content"]
        return content


class ItemKind(NamedTuple):
    """A kind of item: the event of its deltas, the key of the text in the last delta, and its part."""

    type: str
    id_prefix: str
    delta: str
    key: str = "text"
    part: Mapping[str, Any] = MappingProxyType({})
    part_event: str = ""
    index_key: str = ""
    list_key: str = ""  # of the item: where the part is


MESSAGE = ItemKind(
    "message",
    "msg",
    "response.output_text",
    part={"type": "output_text", "annotations": []},
    part_event="response.content_part",
    index_key="content_index",
    list_key="content",
)
REASONING = ItemKind(
    "reasoning",
    "rs",
    "response.reasoning_text",
    part={"type": "reasoning_text"},
    part_event="response.content_part",
    index_key="content_index",
    list_key="content",
)
SUMMARY = ItemKind(
    "reasoning",
    "rs",
    "response.reasoning_summary_text",
    part={"type": "summary_text"},
    part_event="response.reasoning_summary_part",
    index_key="summary_index",
    list_key="summary",
)
FUNCTION = ItemKind("function_call", "fc", "response.function_call_arguments", "arguments")
CUSTOM = ItemKind("custom_tool_call", "ctc", "response.custom_tool_call_input", "input")


class OpenItem:
    """An item of the output that is not complete."""

    def __init__(self, kind: ItemKind, index: int, **fields: Any) -> None:
        self.kind = kind
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.decoder = InputDecoder() if kind is CUSTOM else None
        identity = {"id": f"{kind.id_prefix}_{uuid4().hex}", "type": kind.type}
        self.fields = {**identity, "status": "in_progress", **fields}
        self.place: dict[str, Any] = {"item_id": self.fields["id"], "output_index": index}
        if kind.index_key:
            self.place[kind.index_key] = 0
        head = {"type": f"{kind.delta}.delta", **self.place}
        self.delta_head = f"event: {kind.delta}.delta\ndata: ".encode() + encode_json(head)[:-1]

    def part(self, text: str) -> dict[str, Any]:
        """Return the part that holds a text."""
        logprobs = {"logprobs": self.logprobs} if self.kind is MESSAGE else {}
        return {**self.kind.part, "text": text, **logprobs}

    def item(self, status: str, text: str) -> dict[str, Any]:
        """Return the item with its text so far; an item that has just begun has none."""
        kind = self.kind
        if not kind.list_key:
            return {**self.fields, "status": status, kind.key: text}
        has_part = status != "in_progress"
        item = {**self.fields, "status": status, kind.list_key: [self.part(text)] if has_part else []}
        if has_part and kind.type == "reasoning":
            item["encrypted_content"] = REASONING_PREFIX + base64.b64encode(text.encode(errors="replace")).decode()
        return item


class ResponsesPrinter(Printer):
    """Events of a response, or the whole response, both from the same items."""

    def __init__(self, reply: ReplyState) -> None:
        super().__init__(reply)
        self._values = reply.request.values
        self._id = f"resp_{uuid4().hex}"
        self._output: list[dict[str, Any]] = []
        self._sequence = 0
        self._item: OpenItem | None = None
        self._is_cut = False
        has_logprobs = reply.request.params.logprobs is not None
        self._logprobs = LogprobQueue(reply.tokenizer) if has_logprobs else None

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def print_delta(self, index: int, delta: TextDelta) -> bytes:
        printed = self._print_events(chat_events(delta), delta.logprobs, delta.call_ends)
        return printed if delta.finish_reason is None else printed + self._finish(delta.finish_reason == "length")

    def _print_events(
        self, events: Sequence[ChatEvent], logprobs: Sequence[TokenLogprob], call_ends: Sequence[int]
    ) -> bytes:
        """Print events; drop the log-probabilities of a call at its end."""
        if (queue := self._logprobs) is None:
            return b"".join(map(self._print_event, events))
        parts = iter([logprobs[begin:end] for begin, end in pairwise([0, *call_ends, len(logprobs)])])
        queue.add(next(parts))
        printed = b""
        for event in events:
            printed += self._print_event(event)
            if isinstance(event, ToolCallEnd):
                queue.clear()
                queue.add(next(parts))
        return printed

    def _finish(self, is_cut: bool) -> bytes:
        """Complete the open item; an empty answer is an empty message."""
        self._is_cut = is_cut
        has_output = bool(self._output) or self._item is not None
        printed = b"" if has_output else self._open(MESSAGE, role="assistant")
        return printed + self._close(is_complete=not is_cut)

    def end(self) -> bytes:
        status = "incomplete" if self._is_cut else "completed"
        return self._event(f"response.{status}", response=self._response(status))

    def print_error(self, error: WorkerError) -> bytes:
        response = self._response("failed")
        response["error"] = {"code": error_code(error), "message": error_message(error)}
        return self._event("response.failed", response=response)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        self._print_events(answer.fold.events, answer.logprobs, answer.call_ends)
        self._finish(answer.finish_reason == "length")
        return self._response("incomplete" if self._is_cut else "completed")

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return encode_named(kind, number, **fields)

    def _print_event(self, event: ChatEvent) -> bytes:
        if isinstance(event, ContentDelta):
            return self._open_kind(MESSAGE, role="assistant") + self._delta(event.text)
        if isinstance(event, ReasoningDelta):
            kind = SUMMARY if self._values["has_summary"] else REASONING
            return self._open_kind(kind, summary=[], encrypted_content=None) + self._delta(event.text)
        if isinstance(event, ToolCallStart):
            kind = CUSTOM if event.name in self._values["custom"] else FUNCTION
            names = {"name": event.name}
            if (namespace := self._values["namespaces"].get(event.name)) is not None:
                names = dict(zip(("namespace", "name"), namespace, strict=True))
            return self._close() + self._open(kind, call_id=event.id, **names)
        if isinstance(event, ToolCallDelta):
            return self._delta(event.arguments)
        return self._close()

    def _open_kind(self, kind: ItemKind, **fields: Any) -> bytes:
        """Open an item of this kind, unless one is open."""
        if self._item is not None and self._item.kind is kind:
            return b""
        return self._close() + self._open(kind, **fields)

    def _open(self, kind: ItemKind, **fields: Any) -> bytes:
        item = self._item = OpenItem(kind, len(self._output), **fields)
        added = self._event(
            "response.output_item.added", output_index=len(self._output), item=item.item("in_progress", "")
        )
        if not kind.part_event:
            return added
        return added + self._event(f"{kind.part_event}.added", **item.place, part=item.part(""))

    def _delta(self, text: str) -> bytes:
        """Return the event of more text of the open item; deltas differ by number and text, mostly."""
        item = self._item
        assert item is not None
        if item.decoder is not None:
            text = item.decoder.push(text)
        if not text:
            return b""
        item.texts.append(text)
        suffix = b""
        if self._logprobs is not None and item.kind.list_key:
            logprobs = self._logprobs.take(text)
            if item.kind is MESSAGE:
                item.logprobs += logprobs
                suffix = b',"logprobs":' + encode_json(logprobs)
        elif item.kind is MESSAGE:
            suffix = b',"logprobs":[]'
        number, self._sequence = self._sequence, self._sequence + 1
        return b'%b,"sequence_number":%d%b,"delta":%b}\n\n' % (item.delta_head, number, suffix, encode_json(text))

    def _close(self, is_complete: bool = True) -> bytes:
        """Complete the item that is open."""
        item, self._item = self._item, None
        if item is None:
            return b""
        if item.decoder is not None:
            item.texts.append(item.decoder.finish())
        kind, text = item.kind, "".join(item.texts)
        extra = {"logprobs": item.logprobs} if kind is MESSAGE else {}
        printed = self._event(f"{kind.delta}.done", **item.place, **{kind.key: text}, **extra)
        if kind.part_event:
            printed += self._event(f"{kind.part_event}.done", **item.place, part=item.part(text))
        done = item.item("completed" if is_complete else "incomplete", text)
        printed += self._event("response.output_item.done", output_index=len(self._output), item=done)
        self._output.append(done)
        return printed

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response so far."""
        reply = self.reply
        usage = encode_usage(reply.usage()) if status in ("completed", "incomplete") else None
        params = reply.generations[0].request.submitted.params
        head = response_head(self._id, status, reply.created_at, reply.request, params)
        return {**head, "model": reply.model, "output": list(self._output), "usage": usage, "seed": reply.seed}


def encode_named(kind: str, number: int, **fields: Any) -> bytes:
    """Return the bytes of one event."""
    data = {"type": kind, "sequence_number": number, **fields}
    return f"event: {kind}\ndata: ".encode() + encode_json(data) + b"\n\n"


def response_head(
    name: str, status: str, created_at: float, request: GenerateRequest, params: SamplingParams
) -> dict[str, Any]:
    """Return a response without its output."""
    echo = msgspec.json.decode(request.values["echo"], type=dict[str, msgspec.Raw])
    return {
        "id": name, "object": "response", "created_at": int(created_at), "status": status, "error": None,
        "completed_at": int(time.time()) if status == "completed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": request.model, "output": [], **echo, "usage": None,
        "temperature": params.temperature, "top_p": params.top_p, "top_logprobs": params.logprobs or 0,
        "background": False, "store": False, "previous_response_id": None, "truncation": "disabled",
        "service_tier": "default",
    }  # fmt: skip


def print_overflow(request: GenerateRequest, error: WorkerError) -> bytes:
    """Return the stream of a request whose prompt does not fit: agents shorten it when they get this event."""
    response = response_head(f"resp_{uuid4().hex}", "in_progress", time.time(), request, request.params)
    failure = {"code": error_code(error), "message": error_message(error)}
    failed = {**response, "status": "failed", "error": failure}
    return encode_named("response.created", 0, response=response) + encode_named("response.failed", 1, response=failed)


def encode_usage(usage: Usage) -> dict[str, Any]:
    """Return the usage of a response."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }
