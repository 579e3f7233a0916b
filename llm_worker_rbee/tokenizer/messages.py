"""The messages of a conversation, checked and brought to the form that chat templates expect."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequestError
from .tokenizer import Tokenizer

Message = Mapping[str, Any]


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates expect them: a role, and text (a list of text parts is joined)."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list of {role, content} that is not empty", "messages")
    return [_checked_message(i, message) for i, message in enumerate(messages)]


def protected(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Message]:
    """The same messages with control tokens that were typed into them marked as text."""
    return [
        {**message, "content": tokenizer.protect(message["content"])} if message.get("content") else message
        for message in messages
    ]


def _checked_message(i: int, message: Message) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequestError(f"messages[{i}] must have a role", "messages")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return {**message, "content": "".join(part["text"] for part in content)}
    raise InvalidRequestError(f"messages[{i}].content must be text, or a list of text parts", "messages")
