"""The state of a request, the records between scheduler, runner and sampler, and length checks.

The scheduler imports this module, so it has no arrays. sampling_params.py has the client's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..config import EngineConfig
from ..errors import ContextLengthError, InvalidRequestError, WorkerError
from ..sampling_params import FinishReason, SamplingParams, TokenLogprob

if TYPE_CHECKING:  # it holds arrays
    from ..backends.ops import SampleRow
    from ..images.prompt import PromptImages

SchedulingEvent = Literal["admitted", "preempted", "resumed"]
BATCH_PRIORITY = 1 << 31  # and above: batch work, past the priorities that a client can give (step_time.py)
NO_TOKEN = -1  # instead of an end-of-text id that was not sampled


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in progress: the client's parameters, and its state."""

    prompt: list[int]
    params: SamplingParams  # resolved
    max_tokens: int  # as `resolve_max_tokens` gives it; 0 where the prompt is only scored
    seed: int
    eos_ids: frozenset[int]
    sample_index: int = 0  # of several completions of one prompt
    priority: int = 0  # lower goes first
    deadline: float | None = None  # in the time of time.monotonic
    generated: Sequence[int] = ()  # earlier output tokens, for example of an engine that died
    extra_keys: Sequence[tuple[int, bytes]] = ()  # of the block hash: position of a token, key
    images: PromptImages | None = None
    adapter_slot: int = -1  # of its LoRA adapter in the model; -1: none
    adapter_scale: float = 1.0

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
    waiting_since: float = 0.0  # the scheduler's clock when it last had a new token, or was added
    num_waited_tokens: int = 0  # that it had then
    batch_slot: int = -1  # its row of the block tables while it is running, -1 otherwise
    num_blocks_in_table: int = 0  # written to that row
    states: dict[int, int] = field(default_factory=dict)  # tokens -> the slot of the state after them (state_pool.py)
    output_snapshot: bytes | None = None  # the hash of its last published state after the prompt
    prompt_logprobs: list[TokenLogprob | None] | None = None
    sample_row: SampleRow | None = None
    history: Any = None  # the sampler's own
    draft_state: Any = None  # the drafter's own
    constraint: Any = None  # a `Constraint`, where `params.structured_outputs` is set
    is_looked_up: bool = False  # its blocks were looked for in the host's memory and on disk
    is_held: bool = False  # steps leave it out: a thread computes the mask of its slow grammar, or reads its blocks

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
        """Prompt tokens with requested log-probabilities that are not computed yet."""
        return 0 if self.prompt_logprobs is None else self.num_prompt_tokens - len(self.prompt_logprobs)


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
    """The output of a step for one request: a token, or the error that finished it."""

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


def check_prompt_fits(num_tokens: int, max_context: int, *, is_scored_only: bool = False) -> None:
    """Raise if the prompt leaves no room for an output token; a prompt that is only scored may fill the context."""
    if num_tokens > max_context or (num_tokens == max_context and not is_scored_only):
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens, the context {max_context}: nothing is left for an answer; shorten "
            "the prompt, or allow a longer context (max_context)",
            "prompt",
        )


def fit_max_tokens(num_prompt_tokens: int, max_tokens: int | None, config: EngineConfig) -> int:
    """Return `max_tokens`, or the rest of the context and the KV cache if that is less or it is None.

    The result is at least 1: where nothing is left, `resolve_max_tokens` raises.
    """
    cache = config.n_blocks * config.block_size + 1  # keys and values of the last token are never needed
    room = max(1, min(config.max_context, cache) - num_prompt_tokens)
    return room if max_tokens is None else min(max_tokens, room)


def resolve_max_tokens(num_prompt_tokens: int, max_tokens: int | None, config: EngineConfig) -> int:
    """Return the number of tokens to generate; raise if they do not fit into the context or the KV cache.

    `max_tokens=None` means the rest of the context, 0 a prompt that is only scored. This is the only length check:
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
