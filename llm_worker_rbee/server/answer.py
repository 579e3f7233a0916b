"""One request's tokens as text, for both dialects: pieces of what became visible, as soon as it exists.

Tokens that are ready together come in one piece. A whole reply is a fold over the same pieces.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from ..engine.async_engine import RequestStream
from ..engine.request import FinishReason, StepOutput, TokenLogprob
from ..tokenizer import Detokenizer


class Piece(NamedTuple):
    """What became visible together; `finish` with the last one."""

    text: str
    tokens: list[int]  # without an end-of-text id
    logprobs: list[TokenLogprob]
    finish: FinishReason | None = None
    stop: str | None = None  # the stop string that was met


class Answer:
    """A request on its way."""

    def __init__(
        self,
        ticket: RequestStream,
        decoder: Detokenizer,
        on_outputs: Callable[[float, int], None],
        on_first: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.ticket = ticket
        self.num_tokens = 0  # sampled, the end-of-text id included
        self.began_at = time.perf_counter()
        self.first_at = self.last_at = 0.0
        self._decoder = decoder
        self._on_outputs = on_outputs  # so many, so long after those before or the request
        self._on_first, self._on_end = on_first, on_end

    async def pieces(self) -> AsyncIterator[Piece]:
        """Until the end; an error that ends it is raised, and leaving early cancels it."""
        try:
            while outputs := await self.ticket.next_outputs():
                piece = self._piece(outputs)
                yield piece
                if piece.finish is not None:
                    return
        finally:
            self.close()

    def close(self) -> None:
        """Nobody wants more of it; once is enough."""
        self._on_first()
        self._on_end()
        self.ticket.abort()

    def _piece(self, outputs: list[StepOutput]) -> Piece:
        now = time.perf_counter()
        self._on_outputs(now - (self.last_at or self.began_at), len(outputs))
        self.last_at = now
        if not self.first_at:
            self.first_at = self.last_at
            self._on_first()
        texts: list[str] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        finish: FinishReason | None = None
        for output in outputs:
            self.num_tokens += 1
            finish = output.finish_reason
            if finish == "stop":
                break
            tokens.append(output.token)
            texts.append(self._decoder.push(output.token))
            if output.logprob is not None:
                logprobs.append(output.logprob)
            if self._decoder.stop_matched is not None:
                finish = "stop"
                break
        if finish is not None:
            texts.append(self._decoder.finish())
        return Piece("".join(texts), tokens, logprobs, finish, self._decoder.stop_matched)

    @property
    def decode_ms(self) -> float:
        """From the first token to the last."""
        return 1000 * max(0.0, self.last_at - self.first_at)
