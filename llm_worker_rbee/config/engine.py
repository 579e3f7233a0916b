"""How requests share a model: the numbers of one engine, with their defaults, which are written nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import InvalidRequestError

SPECULATIVE = ("off", "ngram")
MAX_BATCH, MAX_DRAFT_TOKENS = 4096, 16
DEVICE_SPARE = 1 << 30  # bytes of a GPU beside weights and KV cache: kernels, graphs, the arrays of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is told: how much it holds, and how it divides its steps."""

    max_context: int  # tokens of one request, prompt and answer together
    n_blocks: int  # of the KV cache, for all requests together
    block_size: int = 16  # tokens in a block
    max_batch: int = 64  # requests that are computed in one step
    max_step_tokens: int = 512  # tokens of a step that reads prompts, and those who answer beside them
    target_itl_ms: float = 100.0  # while prompts are read, running requests get a token within this time
    prefix_cache: bool = True  # what is computed is kept for requests that begin alike
    speculative: str = "off"  # "ngram": guess from what was said before
    draft_tokens: int = 4  # at most so many guesses are verified in a step
    debug: bool = False  # check the books after every step

    def __post_init__(self) -> None:
        whole = {
            "max_context": None, "n_blocks": None, "block_size": None, "max_batch": MAX_BATCH, "max_step_tokens": None,
            "draft_tokens": MAX_DRAFT_TOKENS,
        }  # fmt: skip
        for name, most in whole.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most and value > most):
                limit = f", at most {most}" if most else ""
                raise InvalidRequestError(f"{name} is {value!r}: it must be a whole number, 1 or more{limit}", name)
        if not (isinstance(self.target_itl_ms, (int, float)) and 0 < self.target_itl_ms < math.inf):
            raise InvalidRequestError(
                f"target_itl_ms is {self.target_itl_ms!r}: it must be a number of milliseconds above 0", "target_itl_ms"
            )
        if self.speculative not in SPECULATIVE:
            raise InvalidRequestError(
                f"unknown speculative {self.speculative!r}: use one of {', '.join(SPECULATIVE)}", "speculative"
            )
