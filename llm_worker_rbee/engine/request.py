"""What a client asks for, how far a request is, and the records that pass between scheduler, runner and sampler.

Plain records, validated once when they are made. The scheduler imports this module, so it has no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ..config import EngineConfig
from ..errors import ContextLengthError, InvalidRequestError, WorkerError
from ..structured_outputs.params import StructuredOutputsParams

if TYPE_CHECKING:  # it holds arrays
    from ..backends.ops import SampleRow

FinishReason = Literal["stop", "length", "error"]
SchedulingEvent = Literal["admitted", "preempted", "resumed"]
LogprobsMode = Literal["raw", "masked"]
MAX_SEED = 1 << 64
NO_TOKEN = -1  # instead of an end-of-text id that was not sampled
MAX_COUNT = (1 << 63) - 1  # the largest integer that a kernel takes
MAX_STOPS = 16
MAX_STOP_CHARS = 100
MAX_LOGPROBS = 20


class Bounds(NamedTuple):
    """The values that a numeric parameter accepts; an error message and a JSON schema follow from it."""

    minimum: float
    maximum: float | None = None
    excludes_minimum: bool = False
    is_integer: bool = False
    is_optional: bool = False  # None is accepted too

    def describe(self) -> str:
        """Return the range in words, for error messages."""
        least = f"above {self.minimum:g}" if self.excludes_minimum else f"{_shown(self.minimum)} or more"
        return least if self.maximum is None else f"{least}, at most {_shown(self.maximum)}"

    def __contains__(self, value: object) -> bool:
        if type(value) not in (int, float) and not isinstance(value, Real):
            return False
        if value < self.minimum or (self.excludes_minimum and value == self.minimum):  # type: ignore[operator]
            return False
        return self.maximum is None or value <= self.maximum  # type: ignore[operator]


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


# Every numeric field of SamplingParams; the HTTP schema takes its bounds from here.
SAMPLING_BOUNDS: dict[str, Bounds] = {
    "max_tokens": Bounds(1, is_integer=True, is_optional=True),
    "temperature": Bounds(0.0, 2.0),
    "top_k": Bounds(-1, MAX_COUNT, is_integer=True),  # -1 is 0: all tokens
    "top_p": Bounds(0.0, 1.0),
    "min_p": Bounds(0.0, 1.0),
    "typical_p": Bounds(0.0, 1.0),
    "repetition_penalty": Bounds(0.0, 2.0, excludes_minimum=True),
    "repeat_last_n": Bounds(0, MAX_COUNT, is_integer=True),
    "presence_penalty": Bounds(-2.0, 2.0),
    "frequency_penalty": Bounds(-2.0, 2.0),
    "seed": Bounds(-1, MAX_SEED - 1, is_integer=True, is_optional=True),  # -1 is None: drawn
    "logprobs": Bounds(0, MAX_LOGPROBS, is_integer=True, is_optional=True),
}
LOGIT_BIAS_BOUNDS = Bounds(-100.0, 100.0)
# The fields that a model has defaults for, and the values that leave its distribution as it is.
NEUTRAL_SAMPLING: dict[str, float] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0,
    "repeat_last_n": 128,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled. `temperature=0` is greedy; `max_tokens=None` is what is left of the context.

    A field of `NEUTRAL_SAMPLING` that is None is not set: `LLM` and the server take the model's default for it, by
    `resolve`. The engine gets resolved parameters only.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many of the most probable tokens to report beside the sampled one
    prompt_logprobs: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    close_on_length: bool = False  # end a document within max_tokens, by the shortest way that the grammar allows
    logprobs_mode: LogprobsMode = "raw"  # "masked": of the tokens that the grammar allows only

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        checked: dict[str, Any] = {"stop": _check_stops(stops), "logit_bias": _check_logit_bias(self.logit_bias)}
        for name, bounds in SAMPLING_BOUNDS.items():
            value = getattr(self, name)
            is_unset = value is None and name in NEUTRAL_SAMPLING
            checked[name] = None if is_unset else _check_number(name, value, bounds)
        checked["top_k"] = 0 if checked["top_k"] == -1 else checked["top_k"]
        checked["seed"] = None if checked["seed"] == -1 else checked["seed"]
        for name in ("ignore_eos", "prompt_logprobs", "close_on_length"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise InvalidRequestError(
                f"logprobs_mode must be raw or masked, not {self.logprobs_mode!r}", "logprobs_mode"
            )
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, NoneType)):
            raise InvalidRequestError("structured_outputs must be a StructuredOutputsParams", "structured_outputs")
        for name, value in checked.items():  # NumPy numbers become Python's, mutable values are copied
            object.__setattr__(self, name, value)

    @property
    def is_resolved(self) -> bool:
        return all(getattr(self, name) is not None for name in NEUTRAL_SAMPLING)

    def resolve(self, defaults: Mapping[str, Any] = NEUTRAL_SAMPLING) -> SamplingParams:
        """Return the parameters with the fields that are not set taken from `defaults`."""
        if self.is_resolved:
            return self
        return self._copy({name: defaults[name] for name in NEUTRAL_SAMPLING if getattr(self, name) is None})

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        """Return the parameters with another limit."""
        return self._copy({"max_tokens": max_tokens})

    def with_structured_outputs(self, structured_outputs: StructuredOutputsParams | None) -> SamplingParams:
        """Return the parameters with another grammar."""
        return self._copy({"structured_outputs": structured_outputs})

    def _copy(self, changes: Mapping[str, Any]) -> SamplingParams:
        """Return a copy with values that are valid; `dataclasses.replace` would check all of them again."""
        copied = object.__new__(SamplingParams)
        for name in self.__slots__:
            object.__setattr__(copied, name, changes[name] if name in changes else getattr(self, name))
        return copied


def _check_stops(stops: Any) -> tuple[str, ...]:
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) for s in stops):
        raise InvalidRequestError("stop must be a string or a list of strings", "stop")
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop holds {len(stops)} strings: at most {MAX_STOPS} are allowed", "stop")
    if any(not 1 <= len(s) <= MAX_STOP_CHARS for s in stops):
        raise InvalidRequestError(f"each stop string must have 1 to {MAX_STOP_CHARS} characters", "stop")
    return tuple(stops)


def _check_logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequestError("logit_bias must map token ids to numbers", "logit_bias")
    if all(type(t) is int and t >= 0 and type(v) is float and v in LOGIT_BIAS_BOUNDS for t, v in bias.items()):
        return dict(bias)
    token_bounds = Bounds(0, is_integer=True)
    return {
        _check_number("logit_bias", token, token_bounds): _check_number(
            "logit_bias", value, LOGIT_BIAS_BOUNDS, shown=f"logit_bias of token {token}"
        )
        for token, value in bias.items()
    }


def _check_number(name: str, value: Any, bounds: Bounds, shown: str | None = None) -> Any:
    """Return the value as a Python number, or raise an error that names the parameter and its range."""
    if value is None and bounds.is_optional:
        return None
    if type(value) is (int if bounds.is_integer else float) and value == value and value in bounds:
        return value
    shown = shown or name
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    if bounds.is_integer and not (is_number and isinstance(value, Integral)):
        raise InvalidRequestError(f"{shown} must be a whole number, not {value!r}", name)
    if not (is_number and abs(value) < math.inf):  # NaN compares false, so it is rejected too
        raise InvalidRequestError(f"{shown} must be a finite number, not {value!r}", name)
    if value not in bounds:
        raise InvalidRequestError(f"{shown} is {value}: it must be {bounds.describe()}", name)
    return int(value) if bounds.is_integer else float(value)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being computed: the client's parameters, and how far it is."""

    prompt: list[int]
    params: SamplingParams  # resolved
    max_tokens: int  # as `resolve_max_tokens` gives it; 0 where the prompt is only scored
    seed: int
    eos_ids: frozenset[int]
    sample_index: int = 0  # of several completions of one prompt
    priority: int = 0  # lower goes first
    deadline: float | None = None  # in the time of time.monotonic
    generated: Sequence[int] = ()  # output tokens from before: those of an engine that died, say

    # State of the scheduler. There are no phases: each step brings num_computed_tokens nearer to num_tokens.
    ids: list[int] = field(default_factory=list)  # prompt and output tokens
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0  # that the step in flight computes, while the one after it is scheduled
    pending_row: int = -1  # likewise: where that step samples its next token, -1 if it samples none
    num_prompt_tokens: int = 0
    max_total_tokens: int = 0  # prompt and output
    stop_ids: frozenset[int] = frozenset()  # tokens that finish it
    drafts: list[int] = field(default_factory=list)  # draft tokens that follow `ids`
    arrival: int = -1  # the engine's count
    is_finished: bool = True  # not in the scheduler
    blocks: list[int] = field(default_factory=list)  # its KV blocks, in order
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, chained
    num_hashed_blocks: int = 0  # published in the prefix cache
    num_cached_tokens: int = -1  # prefix hit when it was first scheduled
    first_scheduled_time: float = 0.0  # in the time of time.perf_counter
    num_shared_tokens: int = 0  # prefix hit when it was last scheduled
    num_matched_tokens: int = 0  # of cached blocks when it was last matched, with a snapshot after them or not
    num_preemptions: int = 0
    batch_slot: int = -1  # its row of the block tables while it is running, -1 otherwise
    num_blocks_in_table: int = 0  # written to that row
    states: dict[int, int] = field(default_factory=dict)  # tokens -> the slot of the state after them (state_pool.py)
    output_snapshot: bytes | None = None  # the hash of its last published state after the prompt
    prompt_logprobs: list[TokenLogprob | None] | None = None
    sample_row: SampleRow | None = None
    history: Any = None  # the sampler's own
    draft_state: Any = None  # the drafter's own
    constraint: Any = None  # a `Constraint`, where `params.structured_outputs` is set
    is_held: bool = False  # steps leave it out: its grammar is slow, and a thread computes the next mask

    def __post_init__(self) -> None:
        assert self.params.is_resolved, "sampling parameters of a request must be resolved"
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequestError(f"priority must be a whole number, not {self.priority!r}", "priority")
        self.ids = [*self.prompt, *self.generated]
        self.num_prompt_tokens = len(self.prompt)
        self.max_total_tokens = self.num_prompt_tokens + self.max_tokens
        is_guided = self.params.structured_outputs is not None  # a grammar decides where its text may end
        self.stop_ids = frozenset() if self.params.ignore_eos and not is_guided else self.eos_ids
        self.prompt_logprobs = [None] if self.params.prompt_logprobs else None

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def has_slow_grammar(self) -> bool:
        return self.constraint is not None and self.constraint.is_slow

    @property
    def tokens(self) -> list[int]:
        return self.ids[self.num_prompt_tokens :]

    @property
    def num_unscheduled_tokens(self) -> int:
        """Known tokens that are neither computed nor in flight."""
        return len(self.ids) - self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def num_unscored_tokens(self) -> int:
        """Prompt tokens whose log-probabilities were requested and are not computed yet."""
        return 0 if self.prompt_logprobs is None else self.num_prompt_tokens - len(self.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability and the most probable tokens at its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ScheduledTokens(NamedTuple):
    """Consecutive tokens of one request that a step computes; logits are needed from `logits_from` on."""

    request: Request
    start: int
    stop: int
    logits_from: int


@dataclass(slots=True)
class SamplerOutput:
    """The tokens of a step, flat: one for each request that is computed to its end, one more for each draft."""

    tokens: list[int]
    logprobs: dict[Request, list[TokenLogprob]] = field(default_factory=dict)  # where requested, for each token
    failed: dict[Request, WorkerError] = field(default_factory=dict)  # these have no tokens


class StepOutput(NamedTuple):
    """What a step gives for one request: a token, or the error that finished it."""

    request: Request
    token: int
    logprob: TokenLogprob | None = None
    # "stop": `token` is an end-of-text id, or NO_TOKEN, and no part of the output; "error": there is no token
    finish_reason: FinishReason | None = None
    error: WorkerError | None = None


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the engine started."""

    num_preemptions: int = 0
    num_queried_tokens: int = 0  # prompt tokens looked up in the prefix cache
    num_hit_tokens: int = 0  # of these, found
    num_snapshot_hits: int = 0  # requests that started from a snapshot of a state
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


def error_output(request: Request, error: WorkerError) -> StepOutput:
    """Return the output that finishes a request with an error."""
    return StepOutput(request, -1, None, "error", error)


def copy_error(error: WorkerError) -> WorkerError:
    """Return the same error for one more request: one object raised in several places would gather all tracebacks."""
    own = copy(error)
    own.__cause__ = error.__cause__
    return own


def check_prompt_fits(num_tokens: int, max_context: int, *, is_scored_only: bool = False) -> None:
    """Raise if the prompt leaves no room for an output token; a prompt that is only scored may fill the context."""
    if num_tokens > max_context or (num_tokens == max_context and not is_scored_only):
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens, the context {max_context}: nothing is left for an answer; shorten "
            "the prompt, or allow a longer context (max_context)",
            "prompt",
        )


def fit_max_tokens(num_prompt_tokens: int, max_tokens: int | None, config: EngineConfig) -> int:
    """Return `max_tokens`, or what is left of the context and the KV cache if that is less or it is None.

    The result is at least 1: where nothing is left, `resolve_max_tokens` raises.
    """
    cache = config.n_blocks * config.block_size + 1  # keys and values of the last token are never needed
    left = max(1, min(config.max_context, cache) - num_prompt_tokens)
    return left if max_tokens is None else min(max_tokens, left)


def resolve_max_tokens(num_prompt_tokens: int, max_tokens: int | None, config: EngineConfig) -> int:
    """Return how many tokens may be generated; raise if they do not fit into the context or the KV cache.

    `max_tokens=None` is what is left of the context, 0 a prompt that is only scored. This is the only length check:
    the engine asserts it.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt is empty: it must have at least one token", "prompt")
    check_prompt_fits(num_prompt_tokens, config.max_context, is_scored_only=max_tokens == 0)
    resolved = config.max_context - num_prompt_tokens if max_tokens is None else max_tokens
    total, cache = num_prompt_tokens + resolved, config.n_blocks * config.block_size
    sizes = f"the prompt has {num_prompt_tokens} tokens and max_tokens is {resolved}: together {total}"
    if total > config.max_context:
        raise ContextLengthError(f"{sizes}, over the context of {config.max_context}", "max_tokens")
    if num_prompt_tokens + max(resolved, 1) - 1 > cache:  # keys and values of the last token are never needed
        raise ContextLengthError(
            f"{sizes}, and the KV cache holds {cache}: ask for fewer tokens, or give the cache more memory (kv_memory)",
            "max_tokens",
        )
    return resolved
