"""Prompts and messages -> token ids, off the event loop. What can never fit the context is refused before tokenizing,
which takes seconds for a long text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..engine.request import check_prompt_fits
from ..errors import ContextLengthError, InvalidRequestError
from ..llm import LLM
from .offload import OffloadPool

BYTES_PER_TOKEN = 4  # an estimate


def num_bytes(value: Any) -> int:
    """Return the UTF-8 bytes of all text in a prompt or in messages."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, list):
        return sum(map(num_bytes, value))
    return sum(map(num_bytes, value.values())) if isinstance(value, dict) else 0


def estimate_tokens(prompt: Any) -> int:
    """Estimate the tokens of a text or of messages; return the number of token ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return num_bytes(prompt) // BYTES_PER_TOKEN + 1


def require_ids_fit(prompt: Any, context: int) -> None:
    """Raise if there are more token ids than the context, before each of them is validated."""
    if not isinstance(prompt, list) or not prompt:
        return
    for ids in prompt if isinstance(prompt[0], list) else [prompt]:
        if isinstance(ids, list) and ids and not isinstance(ids[0], (str, list)):
            check_prompt_fits(len(ids), context, is_scored_only=True)


class PromptEncoder:
    """Encodes prompts for one model."""

    def __init__(self, llm: LLM, offload: OffloadPool) -> None:
        self._llm, self._offload = llm, offload

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Return the ids of each prompt; given ids are checked against the vocabulary."""
        size = sum(num_bytes(prompt) if isinstance(prompt, str) else len(prompt) for prompt in prompts)
        return await self._offload.run(size, lambda: [self._encode_one(prompt) for prompt in prompts])

    async def encode_chat(self, messages: list[Any]) -> list[int]:
        """Return the ids of a conversation, by the model's chat template."""
        return await self._offload.run(num_bytes(messages), lambda: self._encode_chat(messages))

    def _encode_one(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            self._require_text_fits(num_bytes(prompt), "prompt")
            return self._llm.tokenize(prompt)
        vocab_size = self._llm.config.vocab_size
        if (largest := max(prompt)) >= vocab_size:
            raise InvalidRequestError(f"prompt: {largest} is not a token id (0..{vocab_size - 1})", "prompt")
        return list(prompt)

    def _encode_chat(self, messages: list[Any]) -> list[int]:
        if num_bytes(messages) > self._llm.max_context:  # a template may drop messages: its output is what counts
            self._require_text_fits(num_bytes(self._llm.apply_chat_template(messages)), "messages")
        return self._llm.tokenize_chat(messages)

    def _require_text_fits(self, size: int, field: str) -> None:
        context = self._llm.max_context
        if size > context and size > context * (longest := self._max_token_bytes):
            raise ContextLengthError(
                f"the prompt has {size} bytes, over the context: its {context} tokens have {longest} bytes each "
                f"at most, together {context * longest}",
                field,
            )

    @cached_property
    def _max_token_bytes(self) -> int:
        tokenizer = self._llm.tokenizer
        return max(1, *(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)))
