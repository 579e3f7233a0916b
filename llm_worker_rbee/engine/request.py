"""What a caller asks for, and what comes back: plain records, checked once when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from ..errors import ContextLengthError, InvalidRequestError

FinishReason = Literal["stop", "length"]
MAX_SEED = 1 << 64
MAX_STOPS = 16
MAX_STOP_CHARS = 100
MAX_LOGPROBS = 20
# field -> (lowest, highest, the lowest itself is excluded)
NUMBERS: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 2.0, False),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, False),
    "typical_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, 2.0, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}
# field -> (lowest, highest or None, may be None)
INTEGERS: dict[str, tuple[int, int | None, bool]] = {
    "max_tokens": (1, None, True),
    "top_k": (0, None, False),
    "repeat_last_n": (0, None, False),
    "seed": (0, MAX_SEED - 1, True),
    "logprobs": (0, MAX_LOGPROBS, True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an answer is drawn. `temperature=0` is greedy; `max_tokens=None` is what is left of the context."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    repeat_last_n: int = 128
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many of the likeliest tokens to report beside the chosen one
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        plain: dict[str, Any] = {"stop": _checked_stops(stops), "logit_bias": _checked_bias(self.logit_bias)}
        for name, (low, high, open_end) in NUMBERS.items():
            plain[name] = _number(name, getattr(self, name), low, high, open_end)
        for name, (least, most, optional) in INTEGERS.items():
            value = getattr(self, name)
            plain[name] = None if value is None and optional else _integer(name, value, least, most)
        for name in ("ignore_eos", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        for name, value in plain.items():  # NumPy's numbers become Python's, mutable values are copied
            object.__setattr__(self, name, value)


def _checked_stops(stops: Any) -> tuple[str, ...]:
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) for s in stops):
        raise InvalidRequestError("stop must be a string or a list of strings", "stop")
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop holds {len(stops)} strings: at most {MAX_STOPS} are allowed", "stop")
    if any(not 1 <= len(s) <= MAX_STOP_CHARS for s in stops):
        raise InvalidRequestError(f"each stop string must have 1 to {MAX_STOP_CHARS} characters", "stop")
    return tuple(stops)


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequestError("logit_bias must map token ids to numbers", "logit_bias")
    return {
        _integer("logit_bias", token, 0, None): _number(
            "logit_bias", value, -100.0, 100.0, False, shown=f"logit_bias of token {token}"
        )
        for token, value in bias.items()
    }


def _number(name: str, value: Any, low: float, high: float, open_end: bool, shown: str | None = None) -> float:
    shown = shown or name
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not abs(value) < math.inf:  # NaN is less than nothing
        raise InvalidRequestError(f"{shown} must be a finite number, not {value!r}", name)
    if not low <= value <= high or (open_end and value == low):
        least = f"above {low:g}" if open_end else f"{low:g} or more"
        raise InvalidRequestError(f"{shown} is {value}: it must be {least}, at most {high:g}", name)
    return float(value)


def _integer(name: str, value: Any, least: int, most: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(f"{name} must be a whole number, not {value!r}", name)
    if int(value) < least or (most is not None and int(value) > most):
        limit = "" if most is None else f", at most {most}"
        raise InvalidRequestError(f"{name} is {value}: it must be {least} or more{limit}", name)
    return int(value)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being computed: the prompt's ids, then the generated ones behind them."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int  # resolved: what was asked for, or what is left of the context
    seed: int
    eos_ids: frozenset[int]
    choice: int = 0
    tokens: list[int] = field(default_factory=list)  # generated so far
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.prompt) + len(self.tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability and the likeliest tokens at its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step gives for one request."""

    token: int
    logprob: TokenLogprob | None = None
    # "stop": an end-of-text id, which is then not part of the answer
    finish_reason: FinishReason | None = None


def token_limit(prompt: int, asked: int | None, context: int) -> int:
    """How many tokens an answer may have; an answer that cannot fit is refused with all the figures."""
    if prompt == 0:
        raise InvalidRequestError("the prompt is empty: it must have at least one token", "prompt")
    if prompt >= context:
        raise ContextLengthError(
            f"the prompt has {prompt} tokens, the context {context}: nothing is left for an answer", "prompt"
        )
    if asked is not None and prompt + asked > context:
        raise ContextLengthError(
            f"the prompt has {prompt} tokens and max_tokens is {asked}: together {prompt + asked}, "
            f"over the context of {context}",
            "max_tokens",
        )
    return context - prompt if asked is None else asked
