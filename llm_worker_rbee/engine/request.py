"""What a caller asks for, and what comes back: plain records, checked once when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import InvalidRequestError

FinishReason = Literal["stop", "length"]
MAX_SEED = 1 << 64
MAX_STOPS = 16
MAX_STOP_CHARS = 100
MAX_LOGPROBS = 20
# field -> (lowest, highest, the lowest itself is excluded)
RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 2.0, False),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, False),
    "typical_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, 2.0, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
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
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, (low, high, open_end) in RANGES.items():
            _check_number(name, getattr(self, name), low, high, open_end)
        _check_int("max_tokens", self.max_tokens, 1, None, optional=True)
        _check_int("top_k", self.top_k, 0, None)
        _check_int("repeat_last_n", self.repeat_last_n, 0, None)
        _check_int("seed", self.seed, 0, MAX_SEED - 1, optional=True)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        self._check_stops()
        for name in ("ignore_eos", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError("logit_bias must map token ids to numbers", "logit_bias")
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, None)
            _check_number("logit_bias", bias, -100.0, 100.0, False, shown=f"logit_bias of token {token}")

    def _check_stops(self) -> None:
        if not isinstance(self.stop, (list, tuple)) or not all(isinstance(s, str) for s in self.stop):
            raise InvalidRequestError("stop must be a string or a list of strings", "stop")
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequestError(f"stop holds {len(self.stop)} strings: at most {MAX_STOPS} are allowed", "stop")
        if any(not 1 <= len(s) <= MAX_STOP_CHARS for s in self.stop):
            raise InvalidRequestError(f"each stop string must have 1 to {MAX_STOP_CHARS} characters", "stop")


def _check_number(name: str, value: Any, low: float, high: float, open_end: bool, shown: str | None = None) -> None:
    shown = shown or name
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or (isinstance(value, float) and not math.isfinite(value)):  # isfinite overflows on a huge int
        raise InvalidRequestError(f"{shown} must be a finite number, not {value!r}", name)
    if value > high or value < low or (open_end and value == low):
        least = f"above {low:g}" if open_end else f"{low:g} or more"
        raise InvalidRequestError(f"{shown} is {value}: it must be {least}, at most {high:g}", name)


def _check_int(name: str, value: Any, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be a whole number, not {value!r}", name)
    if value < low or (high is not None and value > high):
        raise InvalidRequestError(
            f"{name} is {value}: it must be {low} or more" + ("" if high is None else f", at most {high}"), name
        )


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
