"""What callers of the offline API give, checked; the rules are those of `SamplingParams` and `EngineConfig`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from ..config import EngineConfig
from ..engine.request import SamplingParams
from ..errors import InvalidRequestError
from ..tokenizer import Tokenizer

MOST_CHOICES = 128
PLANNED = ("max_context", "n_blocks", "block_size")  # of an engine's settings: they follow from the memory there is
SETTINGS = {field.name: field.default for field in fields(EngineConfig) if field.name not in PLANNED}


def merged_params(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """Params with some of them replaced."""
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, not {type(params).__name__}", "params")
    unknown = set(options) - set(SamplingParams.__dataclass_fields__)
    if unknown:
        raise InvalidRequestError(f"unknown sampling option {min(unknown)!r}", min(unknown))
    return replace(params or SamplingParams(), **options)


def are_many(prompt: Any) -> bool:
    """A list of texts or of lists of ids; a list of ids is one prompt."""
    is_list = isinstance(prompt, (list, tuple)) and bool(prompt)
    return is_list and all(isinstance(one, (str, list, tuple)) or hasattr(one, "tolist") for one in prompt)


@contextmanager
def numbered(i: int) -> Iterator[None]:
    """An error of one of many prompts says which."""
    try:
        yield
    except InvalidRequestError as error:
        error.args = (f"prompt {i}: {error}", *error.args[1:])
        raise


def checked_choices(n: Any) -> int:
    """How many answers to one prompt."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_CHOICES:
        raise InvalidRequestError(f"n is {n!r}: it must be a whole number, 1 to {MOST_CHOICES}", "n")
    return n


def checked_scheduling(priority: Any, timeout: Any) -> tuple[int, float | None]:
    """When its turn is, and how long it may take."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority must be a whole number, not {priority!r}", "priority")
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < float("inf")):
        raise InvalidRequestError(f"timeout is {timeout!r}: it must be a number of seconds above 0", "timeout")
    return priority, timeout


def require_settings(settings: Mapping[str, Any], draft_model: object) -> None:
    """What cannot be is said before anything is loaded."""
    for name in settings:
        if name not in SETTINGS:
            raise InvalidRequestError(f"unknown option {name!r}: an engine has {', '.join(SETTINGS)}", name)
    EngineConfig(max_context=1, n_blocks=1, **settings)
    if draft_model is not None and settings.get("speculative", "off") != "off":
        raise InvalidRequestError("speculative and draft_model are two ways to guess: give one of them", "speculative")


def require_same_tokens(tokenizer: Tokenizer, draft: Tokenizer) -> None:
    """Ids mean the same to both models."""
    sizes = tokenizer.vocab_size, draft.vocab_size
    if sizes[0] != sizes[1] or any(tokenizer.piece(i) != draft.piece(i) for i in range(sizes[0])):
        raise InvalidRequestError(
            f"the draft model's tokenizer ({sizes[1]} tokens) is not that of the model ({sizes[0]} tokens): "
            "only a model with the same vocabulary can guess for it",
            "draft_model",
        )
