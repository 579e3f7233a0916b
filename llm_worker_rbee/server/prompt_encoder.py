"""What a request gives to be answered -> token ids, away from the event loop; what can never fit is refused before it
is tokenized, for that takes seconds where a text is long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..errors import ContextLengthError, InvalidRequestError
from ..llm import LLM
from .offload import Desk

BYTES_PER_TOKEN = 4  # about, where nothing is known yet


def num_bytes(value: Any) -> int:
    """UTF-8 bytes of all text in a prompt or in messages."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, list):
        return sum(map(num_bytes, value))
    return sum(map(num_bytes, value.values())) if isinstance(value, dict) else 0


def estimate(prompt: Any) -> int:
    """About how many tokens a prompt, or messages, will have; ids are what they are."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return num_bytes(prompt) // BYTES_PER_TOKEN + 1


def require_short(prompt: Any, context: int) -> None:
    """Ids that are more than the context, told before each of them is looked at."""
    if not isinstance(prompt, list) or not prompt:
        return
    for ids in prompt if isinstance(prompt[0], list) else [prompt]:
        if isinstance(ids, list) and len(ids) > context and not isinstance(ids[0], (str, list)):
            raise ContextLengthError(f"the prompt has {len(ids)} tokens, the context {context}", "prompt")


class Prompts:
    """For one model."""

    def __init__(self, llm: LLM, desk: Desk) -> None:
        self._llm, self._desk = llm, desk

    async def ids(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Of texts; ids are checked."""
        size = sum(num_bytes(one) if isinstance(one, str) else len(one) for one in prompts)
        return await self._desk.run(size, lambda: [self._text(p) if isinstance(p, str) else self._known(p)
                                                   for p in prompts])  # fmt: skip

    async def chat_ids(self, messages: list[Any]) -> list[int]:
        """Of a conversation."""
        return await self._desk.run(num_bytes(messages), lambda: self._chat(messages))

    def _text(self, text: str) -> list[int]:
        self._require(num_bytes(text), "prompt")
        return self._llm.tokenize(text)

    def _chat(self, messages: list[Any]) -> list[int]:
        if num_bytes(messages) > self._llm.max_context:  # a template may leave some out: what it makes is what counts
            self._require(num_bytes(self._llm.apply_chat_template(messages)), "messages")
        return self._llm.tokenize_chat(messages)

    def _known(self, ids: list[int]) -> list[int]:
        size = self._llm.config.vocab_size
        if (largest := max(ids)) >= size:
            raise InvalidRequestError(f"prompt: {largest} is not a token id (0..{size - 1})", "prompt")
        return list(ids)

    def _require(self, size: int, field: str) -> None:
        context = self._llm.max_context
        if size > context and size > context * self._longest:
            raise ContextLengthError(
                f"the prompt has {size} bytes, over the context: its {context} tokens have {self._longest} bytes each "
                f"at most, together {context * self._longest}",
                field,
            )

    @cached_property
    def _longest(self) -> int:
        tokenizer = self._llm.tokenizer
        return max(1, *(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)))
