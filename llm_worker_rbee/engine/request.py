"""What a caller asks for, and what comes back: plain records, checked once when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import ContextLengthError, InvalidRequestError, WorkerError

if TYPE_CHECKING:  # the books import no array library
    from ..backends.ops import SampleRow


FinishReason = Literal["stop", "length", "error"]
MAX_SEED = 1 << 64
MAX_COUNT = (1 << 63) - 1  # what a kernel can be told
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
    "top_k": (0, MAX_COUNT, False),
    "repeat_last_n": (0, MAX_COUNT, False),
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
    """One sequence being computed: what was asked for, and how far it is."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int  # resolved: what was asked for, or what is left of the context; 0 where the prompt is only scored
    seed: int
    eos_ids: frozenset[int]
    sample_index: int = 0  # of several answers to one prompt
    priority: int = 0  # lower goes first
    deadline: float | None = None  # on the clock of time.monotonic

    # The engine's books. No phases: each step brings num_computed_tokens nearer to num_tokens.
    ids: list[int] = field(default_factory=list)  # the prompt, then what was generated
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    max_total_tokens: int = 0  # prompt and output
    stop_ids: frozenset[int] = frozenset()  # that end it
    drafts: list[int] = field(default_factory=list)  # guesses for the tokens after `ids`
    arrival: int = -1  # the engine's count
    is_finished: bool = True  # not in the scheduler
    blocks: list[int] = field(default_factory=list)  # of the KV cache, in order
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, chained
    num_hashed_blocks: int = 0  # that others can find
    num_cached_tokens: int = -1  # of the prompt, found when it was first admitted
    first_scheduled_time: float = 0.0  # that was when, on the clock of time.perf_counter
    num_shared_tokens: int = 0  # found when it was last admitted
    num_preemptions: int = 0  # how often it gave its blocks to others
    batch_slot: int = -1  # row of the block tables while it is running, -1 otherwise
    num_blocks_in_table: int = 0  # that its row of the block table has
    prompt_logprobs: list[TokenLogprob | None] | None = None
    sample_row: SampleRow | None = None
    draft_state: Any = None  # what a drafter remembers of it

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequestError(f"priority must be a whole number, not {self.priority!r}", "priority")
        self.ids = list(self.prompt)
        self.num_prompt_tokens = len(self.prompt)
        self.max_total_tokens = self.num_prompt_tokens + self.max_tokens
        self.stop_ids = frozenset() if self.params.ignore_eos else self.eos_ids
        self.prompt_logprobs = [None] if self.params.prompt_logprobs else None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.ids)

    @property
    def tokens(self) -> list[int]:
        """What was generated so far."""
        return self.ids[self.num_prompt_tokens :]

    @property
    def num_unscored_tokens(self) -> int:
        """Tokens of the prompt whose log-probabilities are wanted and not known yet."""
        return 0 if self.prompt_logprobs is None else self.num_prompt_tokens - len(self.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability and the likeliest tokens at its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StepOutput(NamedTuple):
    """What a step gives for one request: a token, or the error that ended it."""

    request: Request
    token: int
    logprob: TokenLogprob | None = None
    # "stop": an end-of-text id, which is then not part of the answer; "error": there is no token, `error` says why
    finish_reason: FinishReason | None = None
    error: WorkerError | None = None


def copy_error(error: WorkerError) -> WorkerError:
    """The same error for one more request: raised in several places, one object would gather all their tracebacks."""
    own = copy(error)
    own.__cause__ = error.__cause__
    return own


def token_limit(prompt: int, asked: int | None, context: int) -> int:
    """How many tokens an answer may have; an answer that cannot fit is refused with all the figures. One of 0 tokens
    is a prompt that is only scored: it may fill the context."""
    if prompt == 0:
        raise InvalidRequestError("the prompt is empty: it must have at least one token", "prompt")
    if prompt > context or (prompt == context and asked != 0):
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


class ScheduledTokens(NamedTuple):
    """Neighbouring tokens of one request, computed in one step; logits are wanted from `logits_from` on."""

    request: Request
    start: int
    stop: int
    logits_from: int


@dataclass(slots=True)
class SamplerOutput:
    """What was chosen in a step: for each span that reaches the end of its request a token, and one for each guess."""

    tokens: list[int]
    logprobs: dict[Request, list[TokenLogprob]] = field(default_factory=dict)  # of those who asked, for each token
    failed: dict[Request, WorkerError] = field(default_factory=dict)  # they have no tokens


@dataclass(slots=True)
class SchedulerStats:
    """What happened since the engine began."""

    num_preemptions: int = 0
    num_queried_tokens: int = 0  # of prompts, looked up in the prefix cache
    num_hit_tokens: int = 0  # and found
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
