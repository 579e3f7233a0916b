"""What a reply of Anthropic's Messages API looks like: events, whole messages, usage, errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from ...errors import ContextLengthError, ModelNotFoundError, WorkerError
from ...tokenizer.chat.events import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
)
from .. import log
from ..printer import Answer, Printer, ReplyState, Usage, chat_events
from ..sse import encode_json

if TYPE_CHECKING:
    from ...generation import TextDelta

SIGNATURE = "unsigned"  # of reasoning; what a client sends back is not verified
ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def error_body(error: WorkerError) -> dict[str, Any]:
    """Return an error in the shape that the official client parses; some clients look for its first words."""
    message = str(error)
    if isinstance(error, ContextLengthError):
        message = f"prompt is too long: {message}"
    elif isinstance(error, ModelNotFoundError):
        message += "; the option --served-model-name of the worker gives the model another name"
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": log.correlation_id.get()}


def encode_event(kind: str, **fields: Any) -> bytes:
    """Return the bytes of one event."""
    return f"event: {kind}\ndata: ".encode() + encode_json({"type": kind, **fields}) + b"\n\n"


class MessagePrinter(Printer):
    """The events of a message, or one object. The first event waits for the first token: it has the cached tokens."""

    ping = encode_event("ping")

    def __init__(self, reply: ReplyState) -> None:
        super().__init__(reply)
        self._values = reply.request.values
        self._has_started, self._has_calls = False, False
        self._index = -1  # of the last block
        self._open = ""  # its type, while it is open
        self._delta_head = b""  # of its text

    def print_delta(self, index: int, delta: TextDelta) -> bytes:
        parts: list[bytes] = []
        if not self._has_started:
            self._has_started = True
            parts.append(encode_event("message_start", message=self._message([], None, None)))
        parts += map(self._print_event, chat_events(delta))
        if delta.finish_reason is not None:
            reason = self._stop_reason(delta.finish_reason, delta.stop_sequence)
            ended = {"stop_reason": reason, "stop_sequence": delta.stop_sequence}
            usage = encode_usage(self.reply.usage())
            parts += [self._close(), encode_event("message_delta", delta=ended, usage=usage, **self._edits())]
        return b"".join(parts)

    def _print_event(self, event: ChatEvent) -> bytes:
        if isinstance(event, ContentDelta):
            return self._print_text("text", event.text)
        if isinstance(event, ReasoningDelta):
            return self._print_text("thinking", event.text)
        if isinstance(event, ToolCallStart):
            self._has_calls = True
            return self._begin({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        if isinstance(event, ToolCallDelta):
            return self._delta({"type": "input_json_delta", "partial_json": event.arguments})
        return self._close()

    def _print_text(self, kind: str, text: str) -> bytes:
        """Return a delta of text or reasoning, which begins a block where none of its type is open."""
        begin = b"" if self._open == kind else self._begin(_text_block(kind, ""))
        if kind == "thinking" and self._values["omits_thinking"]:
            return begin
        return begin + self._delta_head + encode_json(text) + b"}}\n\n"

    def _begin(self, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._open, self._index = block["type"], self._index + 1
        head = f'{{"type":"content_block_delta","index":{self._index},"delta":{{"type":"{self._open}_delta"'
        self._delta_head = f'event: content_block_delta\ndata: {head},"{self._open}":'.encode()
        return closed + encode_event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return encode_event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = ""
        return signed + encode_event("content_block_stop", index=self._index)

    def end(self) -> bytes:
        return encode_event("message_stop")

    def print_error(self, error: WorkerError) -> bytes:
        body = error_body(error)
        return b"event: error\ndata: " + encode_json(body) + b"\n\n"

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        assert answer.finish_reason is not None
        content: list[dict[str, Any]] = []
        calls = iter(answer.fold.calls)
        for event in answer.fold.events:
            if isinstance(event, ContentDelta):
                content.append(_text_block("text", event.text))
            elif isinstance(event, ReasoningDelta):
                shown = "" if self._values["omits_thinking"] else event.text
                content.append({**_text_block("thinking", shown), "signature": SIGNATURE})
            elif isinstance(event, ToolCallStart):
                self._has_calls = True
                content.append(encode_call(next(calls)))
        reason = self._stop_reason(answer.finish_reason, answer.stop_sequence)
        return self._message(content, reason, answer.stop_sequence) | self._edits()

    def _message(self, content: list[dict[str, Any]], reason: str | None, stop_sequence: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant",
            "model": self.reply.request.model or self.reply.model, "content": content, "stop_reason": reason,
            "stop_sequence": stop_sequence, "usage": encode_usage(self.reply.usage()),
        }  # fmt: skip

    def _stop_reason(self, finish_reason: str, stop_sequence: str | None) -> str:
        if finish_reason == "length":
            is_whole = self.reply.max_tokens == self.reply.request.params.max_tokens
            return "max_tokens" if is_whole else "model_context_window_exceeded"
        if stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._has_calls else "end_turn"

    def _edits(self) -> dict[str, Any]:
        """Say that none of the edits of the context that a request allows was made."""
        return {"context_management": {"applied_edits": []}} if self._values["has_edits"] else {}


def _text_block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def encode_call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call of a message; arguments that are no object, since they were cut, stay text."""
    try:
        given = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        given = None
    arguments = given if isinstance(given, dict) else {"partial_json": call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def encode_usage(usage: Usage) -> dict[str, Any]:
    """Return the usage of a reply; `input_tokens` are those that were not cached."""
    return {
        "input_tokens": usage.prompt - usage.cached, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached, "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning}, "service_tier": "standard",
    }  # fmt: skip
