"""The repository's own prompts as ids of a model: real text, for what random ids cannot show."""

from __future__ import annotations

from itertools import cycle, islice

from ..llm import open_tokenizer
from ..weights import Checkpoint
from .workload import PROMPTS, read_prompts


def prompts_of(checkpoint: Checkpoint, count: int) -> list[list[int]]:
    """So many of them; from the first again where there are not enough."""
    tokenizer = open_tokenizer(checkpoint)
    return [tokenizer.encode(prompt.text or "") for prompt in islice(cycle(read_prompts(PROMPTS)), count)]
