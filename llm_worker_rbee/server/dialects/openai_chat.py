"""OpenAI's chat completions: `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...sampling_params import MAX_LOGPROBS
from ...tokenizer.chat.events import (
    ChatEvent,
    ContentDelta,
    EventFold,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)
from ..bodies import (
    Conversation,
    GenerateRequest,
    Messages,
    Tools,
    chat_options,
    function_call,
    function_places,
    to_tool,
)
from ..dialect import Answer, Dialect, GenerateRoute, Operation, ReplyState, chat_logprobs
from ..json_schema import COUNT, TEXT, Schema, or_null, ref, reply_schema, with_field, with_values
from ..schema import (
    Boolean,
    Field,
    MaxTokens,
    ParseOptions,
    integer,
    require,
    sampling_params,
    table_schema,
    unsupported,
    validate_known,
)
from ..settings import ServerSettings
from ..sse import encode_json
from .openai import (
    COMMON,
    FINISH,
    GUIDED,
    LOGPROBS,
    REASONING,
    SCHEMAS,
    STREAM_OPTIONS,
    ChunkPrinter,
    ToolChoice,
    completion_schema,
    encode_usage,
    error_body,
    guiding_field,
    head,
    require_stream,
    structured_outputs,
    usage_values,
)

if TYPE_CHECKING:
    from ...generation import TextDelta

NOT_HONOURED: dict[str, tuple[Any, ...]] = {  # known fields, with the values that change nothing
    "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (), "prediction": (),
    "verbosity": ("medium",), "web_search_options": (),
}  # fmt: skip
CHAT: dict[str, Field] = {
    **COMMON,
    "messages": Field(Messages(), required=True, is_secret=True),
    "max_tokens": Field(MaxTokens()),
    "max_completion_tokens": Field(MaxTokens()),
    "logprobs": Field(Boolean(), False),
    "top_logprobs": Field(integer(0, MAX_LOGPROBS)),
    "tools": Field(Tools(), []),
    "tool_choice": Field(ToolChoice()),
    "parallel_tool_calls": Field(Boolean(), True),
    **REASONING,
    **{name: unsupported(*allowed) for name, allowed in NOT_HONOURED.items()},
}


def parse_chat(body: bytes, options: ParseOptions) -> GenerateRequest:
    """Validate the body of `/v1/chat/completions`."""
    values, ignored = validate_known(body, CHAT, options)
    max_tokens = values["max_completion_tokens"] or values["max_tokens"]
    require(values["max_tokens"] in (None, max_tokens), "max_tokens", "conflict",
            "max_tokens and max_completion_tokens differ: give one of them")  # fmt: skip
    require(values["top_logprobs"] is None or values["logprobs"], "top_logprobs", "conflict",
            "top_logprobs needs logprobs: true")  # fmt: skip
    require_stream(values)
    params = sampling_params(
        values, options.limits, max_tokens, logprobs=(values["top_logprobs"] or 0) if values["logprobs"] else None,
        structured_outputs=structured_outputs(values), **{name: values[name] for name in GUIDED},
    )  # fmt: skip
    chat = chat_options(
        [to_tool(tool["function"]) for tool in values["tools"]], values["tool_choice"],
        parallel=values["parallel_tool_calls"], effort=values["reasoning_effort"],
        template_kwargs=values["chat_template_kwargs"], thinking_budget=values["thinking_budget_tokens"],
    )  # fmt: skip
    same = {name: values[name] for name in ("model", "n", "stream", "priority", "timeout_ms")}
    return GenerateRequest(
        **same, structured_outputs_field=guiding_field(values), prompts=[Conversation.encode(values["messages"], chat)],
        params=params, ignored=ignored, tool_places=function_places(values["tools"]),
        values=usage_values(values),
    )  # fmt: skip


class ChatPrinter(ChunkPrinter):
    """Chunks of chat completions, or one object. Most chunks differ from each other by their text alone."""

    def __init__(self, reply: ReplyState) -> None:
        super().__init__(reply, head(reply, "chat.completion.chunk", "chatcmpl"))
        self._has_logprobs = reply.request.params.logprobs is not None
        self._folds = [EventFold() for _ in reply.generations]
        self._templates: list[tuple[bytes, bytes]] = []

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        for i in range(len(self.reply.generations)):
            event = self._delta_chunk(i, {"content": "-"})
            before, _, after = event.rpartition(b'"content":"-"')  # no string holds it: quotes are escaped
            self._templates.append((before + b'"content":', after))
        return b"".join([self._delta_chunk(i, first) for i in range(len(self.reply.generations))])

    def print_delta(self, index: int, delta: TextDelta) -> bytes:
        chunks = b""
        if self._has_logprobs:
            chunks = self._print_with_logprobs(index, delta)
        elif delta.events is None:
            chunks = self._content(index, delta.text) if delta.text else b""
        else:
            chunks = b"".join([self._print_event(index, event) for event in delta.events])
        self._folds[index].add(delta.events or ())
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason, self._folds[index].ends_with_calls)
            chunks += self._delta_chunk(index, {}, finish_reason=reason)
        return chunks

    def _print_with_logprobs(self, index: int, delta: TextDelta) -> bytes:
        """Return the chunks of a delta; its log-probabilities are in the first, which may have no text."""
        events = [ContentDelta(delta.text)] if delta.events is None else delta.events
        if not (delta.logprobs or events):
            return b""
        logprobs = chat_logprobs(self.reply.tokenizer, delta.logprobs)
        deltas = [self._delta(index, event) for event in events] or [{"content": ""}]
        chunks = [self._delta_chunk(index, deltas[0], logprobs=logprobs)]
        return b"".join(chunks + [self._delta_chunk(index, one) for one in deltas[1:] if one])

    def _print_event(self, index: int, event: ChatEvent) -> bytes:
        if isinstance(event, ContentDelta):
            return self._content(index, event.text)
        delta = self._delta(index, event)
        return self._delta_chunk(index, delta) if delta else b""

    def _delta(self, index: int, event: ChatEvent) -> dict[str, Any]:
        if isinstance(event, ContentDelta):
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            return {"reasoning_content": event.text, "reasoning": event.text}
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        if isinstance(event, ToolCallDelta):
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}
        return {}

    def _content(self, index: int, text: str) -> bytes:
        if self._has_continuous_usage:
            return self._delta_chunk(index, {"content": text})
        before, after = self._templates[index]
        return before + encode_json(text) + after

    def _delta_chunk(
        self, index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:  # fmt: skip
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunk(choice)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        usage = encode_usage(self.reply.usage())
        return {
            **head(self.reply, "chat.completion", "chatcmpl"), "choices": choices, "usage": usage,
            "seed": self.reply.seed,
        }  # fmt: skip

    def _choice(self, i: int, answer: Answer) -> dict[str, Any]:
        text, calls = answer.fold.content, answer.fold.calls
        content = None if calls and not text else text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := answer.fold.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = [function_call(*call) for call in calls]
        assert answer.finish_reason is not None
        logprobs = chat_logprobs(self.reply.tokenizer, answer.logprobs) if self._has_logprobs else None
        reason = finish_reason(answer.finish_reason, answer.fold.ends_with_calls)
        return {"index": i, "message": message, "logprobs": logprobs, "finish_reason": reason}


def finish_reason(reason: str, ends_with_calls: bool) -> str:
    """Return the reason of the end as this API has it: a call that a stop string cut is none."""
    return "tool_calls" if reason == "stop" and ends_with_calls else reason


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    message = reply_schema(role={"const": "assistant"}, content=or_null(TEXT))
    choice = reply_schema(index=COUNT, message=message, logprobs=LOGPROBS, finish_reason=FINISH)
    chunk = reply_schema(index=COUNT, delta={"type": "object"}, logprobs=LOGPROBS, finish_reason=FINISH)
    return {
        **SCHEMAS,
        "ChatRequest": {
            **table_schema(CHAT, settings.names, is_open=settings.ignore_unknown_fields),
            "anyOf": [with_values(top_logprobs={"type": "null"}), with_field("logprobs", const=True)],
            "allOf": [STREAM_OPTIONS],
        },
        "ChatCompletion": completion_schema(choice, usage=ref("Usage")),
        "ChatChunk": completion_schema(chunk),
    }


OPERATION = Operation(
    summary="Complete a conversation", request="ChatRequest", reply="ChatCompletion", event="ChatChunk"
)
DIALECT = Dialect(
    prefixes=("/v1",), error_body=error_body, schemas=_schemas, error_schema="OpenAIError",
    generate=(GenerateRoute("/v1/chat/completions", parse_chat, ChatPrinter, OPERATION),),
)  # fmt: skip
