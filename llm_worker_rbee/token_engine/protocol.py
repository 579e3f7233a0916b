"""The protocol between a front (HTTP, templates, tokenizing, text) and an engine (token ids): its messages, what a
front knows of a request, and the interface of an engine.

A front submits requests by id and aborts them; an engine replies with the results of its steps: tokens, events, and the
hashes of KV blocks that its prefix cache gained and lost. Messages are msgspec structs: they pass as objects inside a
process and as MessagePack between processes (wire.py). What an engine computes it never asks the front for.

A request that fails ends with an output of its error. A front drains an engine by submitting nothing more. Grammars are
fields of `SamplingParams`: the engine compiles them. Messages have defaults for what is left out, and an incompatible
change raises `VERSION`.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from itertools import count
from statistics import fmean
from typing import Any, Literal

import msgspec

from ..config import EngineConfig, LoadOptions, LoraUse, PoolingOptions
from ..engine.kv_store import TierStats
from ..engine.step_time import StepTimeCoefficients, StepTimes
from ..errors import RequestCancelledError, WorkerError
from ..images.sizes import ImagePart, VisionInfo
from ..progress import OnStage, Stage
from ..sampling_params import FinishReason, SamplingParams, TokenLogprob

MAX_BUFFERED_OUTPUTS = 4096  # of one request
VERSION = 1  # of the messages; both ends must have the same
EventKind = Literal["admitted", "prefill", "preempted", "resumed", "loaded"]


class LoraInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that was loaded."""

    path: str
    digest: bytes
    rank: int


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A request; `resolve_max_tokens` has checked that it fits. Without a prompt it only loads its adapter.

    `generated` are output tokens that were delivered before: they count for penalties, limits and draws, and the output
    goes on after them.
    """

    id: int  # unique among the requests of a front
    prompt: list[int]
    params: SamplingParams
    max_tokens: int  # 0 where the prompt is only scored
    seed: int
    eos_ids: list[int]
    sample_index: int = 0  # of several completions of one prompt
    priority: int = 0  # lower goes first
    timeout_s: float | None = None  # from its arrival at the engine
    cache_salt: str | None = None  # what its blocks depend on beside their tokens
    generated: list[int] = []
    images: list[ImagePart] = []
    loras: list[LoraUse] = []  # their increments are added

    @property
    def extra_keys(self) -> list[tuple[int, bytes]]:
        """What the hashes of its blocks have beside the tokens: a salt is text, which has no byte 255."""
        keys = [] if self.cache_salt is None else [(0, self.cache_salt.encode())]
        if self.loras:
            keys.append((0, b"\xff" + b"".join(use.digest + struct.pack("<d", use.scale) for use in self.loras)))
        return keys + [(part.start, part.digest) for part in self.images]


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message to an engine in another process: what to load."""

    options: LoadOptions | None = None
    pooling: PoolingOptions | None = None  # of a pooling model, instead
    dummy_step_s: float | None = None  # replace the model by a `DummyModel` whose steps take so long
    records_blocks: bool = False  # report the hashes of cached blocks
    nice: int = 0  # of the process: lower priority than others up to 19
    loading_nice: int = 0  # the same until the model is loaded
    version: int = VERSION

    @property
    def compute(self) -> LoadOptions | PoolingOptions:
        options = self.options or self.pooling
        assert options is not None
        return options

    def with_options(self, **changes: Any) -> Load:
        """Return the message with some options changed."""
        name = "pooling" if self.options is None else "options"
        return msgspec.structs.replace(self, **{name: replace(self.compute, **changes)})


class Pool(msgspec.Struct, frozen=True, tag=True):
    """Sequences for a pooling model: their token ids one after another, as the bytes of 32-bit integers."""

    id: int
    lengths: list[int]
    ids: bytes
    token_types: bytes = b""  # of each token; empty: the model has none


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop a request; nothing more comes of it."""

    id: int


class UnloadLora(msgspec.Struct, frozen=True, tag=True):
    """Let an adapter go, once the last request with it has ended; a later one would read it again."""

    digest: bytes


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step gives for one request: tokens, or the error that finished it."""

    id: int
    tokens: list[int]
    # "stop": the last token is an end-of-text id, or NO_TOKEN, and no part of the output; "error": there is no token
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = []  # of the tokens, where requested; none for an end-of-text id
    prompt_logprobs: list[TokenLogprob | None] | None = None  # where requested, with the first tokens
    error: WorkerError | None = None

    def split(self) -> Iterator[TokenOutput]:
        """Yield outputs of one token each."""
        last = len(self.tokens) - 1
        if last <= 0:
            yield self
            return
        for i, token in enumerate(self.tokens):
            prompt_logprobs = None if i else self.prompt_logprobs
            yield TokenOutput(
                self.id, [token], None if i < last else self.finish_reason, self.logprobs[i : i + 1], prompt_logprobs
            )


class RequestEvent(msgspec.Struct, frozen=True, array_like=True):
    """Where a request is: admitted to the batch, in prefill, preempted, or resumed after that; or what it loaded."""

    id: int
    kind: EventKind
    num_tokens: int = 0  # admitted: prompt tokens found in the prefix cache; prefill: tokens computed
    seconds: float = 0.0  # admitted: since its arrival
    lora: LoraInfo | None = None  # loaded


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine started, and gauges."""

    num_free_blocks: int
    num_blocks: int
    num_steps: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0  # prompt tokens looked up in the prefix cache
    num_hit_tokens: int = 0  # of these, found
    num_state_slots: int = 0  # of states beside the KV cache, for a model that has them
    num_used_state_slots: int = 0  # that requests hold
    num_snapshots: int = 0  # states that the prefix cache can find, those that requests hold included
    num_snapshot_hits: int = 0  # requests that started from a snapshot
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_paused_drafters: int = 0  # of engines that decode faster without drafts now
    seconds_per_prefill_token: float = 0.0  # predicted, beside the requests that decode; 0: not known yet
    step_times: dict[str, StepTimes] = {}  # by kind of step: prefill, decode, mixed
    step_time_model: StepTimeCoefficients | None = None  # None: no step is known yet
    device_bytes: int = 0
    graph_bytes: int = 0
    process_bytes: int | None = None
    kv_disk: TierStats | None = None  # None: blocks are not kept on disk
    lora_bytes: int = 0  # of adapters
    device_failed: bool = False  # every step will fail until the process is restarted

    @property
    def kv_cache_usage(self) -> float:
        """The part of the KV cache that requests hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


COUNTERS = (
    "num_steps",
    "num_preemptions",
    "num_queried_tokens",
    "num_hit_tokens",
    "num_snapshot_hits",
    "num_drafted_tokens",
    "num_accepted_tokens",
)
SUMMED_GAUGES = (
    "num_free_blocks",
    "num_blocks",
    "num_state_slots",
    "num_used_state_slots",
    "num_snapshots",
    "num_paused_drafters",
    "device_bytes",
    "graph_bytes",
    "lora_bytes",
)


def add_stats(stats: Sequence[EngineStats], ended: Sequence[EngineStats] = ()) -> EngineStats:
    """Add up the counters and gauges of engines; engines that have ended add only their counters."""
    rates = [1 / one.seconds_per_prefill_token for one in stats if one.seconds_per_prefill_token]
    sizes = [one.process_bytes for one in stats if one.process_bytes is not None]
    disks = [one.kv_disk for one in stats if one.kv_disk is not None]
    disks += [replace(one.kv_disk, num_waiting_blocks=0) for one in ended if one.kv_disk is not None]
    models = [one.step_time_model for one in stats if one.step_time_model is not None]
    return EngineStats(
        **{name: sum(getattr(one, name) for one in (*stats, *ended)) for name in COUNTERS},
        **{name: sum(getattr(one, name) for one in stats) for name in SUMMED_GAUGES},
        seconds_per_prefill_token=1 / sum(rates) if rates else 0.0,
        process_bytes=sum(sizes) if sizes else None,
        kv_disk=TierStats(*map(sum, zip(*map(astuple, disks), strict=True))) if disks else None,
        device_failed=bool(stats) and all(one.device_failed for one in stats),
        step_times=add_step_times([one.step_times for one in (*stats, *ended)]),
        step_time_model=StepTimeCoefficients(*map(fmean, zip(*models, strict=True))) if models else None,
    )


def add_step_times(engines: Sequence[dict[str, StepTimes]]) -> dict[str, StepTimes]:
    """Return the sums over engines, by kind of step."""
    kinds = {kind for one in engines for kind in one}
    return {
        kind: StepTimes(*map(sum, zip(*(astuple(one[kind]) for one in engines if kind in one), strict=True)))
        for kind in sorted(kinds)
    }


class StepResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a step changed; events that precede its computation come in a message of their own."""

    outputs: list[TokenOutput] = []
    events: list[RequestEvent] = []
    stored: list[bytes] = []  # hashes of blocks that the prefix cache can find from now on
    removed: list[bytes] = []  # of those that it cannot find any more
    stats: EngineStats | None = None


class PooledRows(msgspec.Struct, frozen=True, tag=True):
    """Rows of a `Pool` that a step computed, as the bytes of 32-bit numbers, or the error that ended it."""

    id: int
    indices: list[int]  # of its sequences
    rows: bytes
    error: WorkerError | None = None


class PoolingStep(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a step of a pooling model computed."""

    outputs: list[PooledRows]
    num_sequences: int
    num_tokens: int
    seconds: float
    process_bytes: int | None = None


class StageReport(msgspec.Struct, frozen=True, tag=True):
    """The progress of loading: of a phase, or of a slow part of one (a download, compiling)."""

    stage: Stage
    is_transfer: bool = False  # `stage.stage` is what is transferred


class Located(msgspec.Struct, frozen=True, tag=True):
    """Where the model's files are; sent before the weights are loaded."""

    path: str


class LogLine(msgspec.Struct, frozen=True, tag=True):
    """A line for the front's log."""

    level: int
    text: str
    request_id: int | None = None  # of the request that it is about


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The model could not be loaded."""

    error: WorkerError


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about any model that an engine serves."""

    path: str
    architecture: str
    quant: str
    parameters: int
    vocab_size: int
    backend: str
    device: str
    weights_bytes: int
    phases: dict[str, float]  # of loading, in seconds
    notes: list[str] = []  # on the choice of device and of the context, for people


class ModelInfo(EngineInfo, frozen=True, tag=True, kw_only=True):
    """What an engine serves, or several replicas. `engine` is the configuration of each."""

    kv_type: str
    kv_cache_bytes: int
    engine: EngineConfig
    num_replicas: int = 1
    loras: list[LoraInfo] = []  # that it was loaded with, in their order
    max_loras: int = 0  # that may be loaded
    max_lora_rank: int = 0  # of an adapter
    vision: VisionInfo | None = None  # None: it takes no images

    @property
    def max_context(self) -> int:
        return self.engine.max_context

    @property
    def max_batch(self) -> int:
        """Requests that are computed at the same time."""
        return self.num_replicas * self.engine.max_batch


class PoolingInfo(EngineInfo, frozen=True, tag=True, kw_only=True):
    """What an engine of a pooling model serves."""

    output_dim: int  # values of a row
    max_length: int  # tokens of a sequence
    max_step_tokens: int


class RequestState:
    """What a front knows of a request: its submission, the tokens that came of it, and where it is."""

    def __init__(self, submitted: Submit) -> None:
        self.submitted = submitted
        self.tokens: list[int] = list(submitted.generated)  # without an end-of-text id
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.is_running = self.is_finished = False
        self.num_cached_tokens = -1  # of the prompt; -1: it was never admitted
        self.num_computed_tokens = 0
        self.num_preemptions = self.num_restarts = 0  # restarts: of its engine
        self.queue_s = 0.0  # from its arrival at the engine to its first step
        self.lora: LoraInfo | None = None  # that it loaded

    @property
    def id(self) -> int:
        return self.submitted.id

    @property
    def prompt(self) -> list[int]:
        return self.submitted.prompt

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submitted.prompt)

    @property
    def was_admitted(self) -> bool:
        return self.num_cached_tokens >= 0

    @property
    def num_unprefilled_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return 0 if self.tokens else max(0, self.num_prompt_tokens - self.num_computed_tokens)

    def apply(self, event: RequestEvent) -> None:
        """Record an event."""
        if event.kind == "loaded":
            self.lora = event.lora
            return
        self.is_running = event.kind != "preempted"
        if event.kind == "preempted":
            self.num_preemptions += 1
        elif event.kind == "prefill":
            self.num_computed_tokens = event.num_tokens
        elif event.kind == "admitted" and not self.was_admitted:  # not after a restart
            self.num_cached_tokens = self.num_computed_tokens = event.num_tokens
            self.queue_s = event.seconds

    def add(self, output: TokenOutput) -> None:
        """Record tokens, or the end."""
        finish_reason = output.finish_reason
        self.tokens += output.tokens[:-1] if finish_reason == "stop" else output.tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if finish_reason is not None:
            self.is_finished, self.is_running = True, False


class RequestStream:
    """The outputs of one submitted request: what engines of all kinds put in, and one reader takes out.

    A reader that does not read never holds an engine up: past a bound its request is aborted.
    """

    def __init__(
        self,
        request: RequestState,
        on_abort: Callable[[RequestState], None],
        changed: Any,
        max_buffered_outputs: int = MAX_BUFFERED_OUTPUTS,
    ) -> None:
        """`changed` is an event of the reader's loop; the offline API has none, and imports no event loop."""
        self.request = request
        self.on_abort = on_abort
        self._max_buffered_outputs = max_buffered_outputs
        self._outputs: list[TokenOutput] = []
        self._changed = changed
        self._on_outputs: Callable[[], None] = self._changed.set

    async def next_outputs(self) -> list[TokenOutput]:
        """Return all outputs that are there, at least one; none after the end. An error is raised after the outputs
        before it."""
        while not self._outputs and not self.request.is_finished:
            self._changed.clear()
            await self._changed.wait()
        return self.take_outputs()

    def take_outputs(self) -> list[TokenOutput]:
        """Return all outputs that are there, which may be none; raise as `next_outputs` does."""
        outputs = self._outputs
        if not outputs:
            return outputs
        if outputs[-1].error is None:  # an error is the last output
            self._outputs = []
        elif len(outputs) > 1:  # it is raised by the next call
            self._outputs = [outputs.pop()]
            self._on_outputs()
        else:
            self._outputs = []
            raise outputs[0].error  # type: ignore[misc]
        return outputs

    def notify(self, on_outputs: Callable[[], None]) -> None:
        """Call `on_outputs` whenever there are outputs to take, now or later. It must neither block nor raise."""
        self._on_outputs = on_outputs
        if self._outputs:
            on_outputs()

    def abort(self) -> None:
        """End the request within a step; its reader gets an error."""
        self.finish_with(RequestCancelledError("the request was cancelled"))

    def put(self, output: TokenOutput) -> None:
        """Add an output; nothing comes after the end."""
        if self.request.is_finished:
            return
        self.request.add(output)
        self._outputs.append(output)
        if len(self._outputs) > self._max_buffered_outputs and not self.request.is_finished:
            self._outputs.clear()
            message = f"the output was not read: {self._max_buffered_outputs} tokens were waiting"
            self.finish_with(RequestCancelledError(message))
        self._on_outputs()

    def finish_with(self, error: WorkerError) -> None:
        """End the request with an error, and drop it from its engine."""
        if not self.request.is_finished:
            self.put(TokenOutput(self.request.id, [], "error", error=error))
            self.on_abort(self.request)


ToEngineLoop = Submit | Abort | UnloadLora
request_ids = count(1)  # of this process
LORA_TIMEOUT_S = 300.0  # of loading an adapter, and of waiting for a slot


class TokenEngine(ABC):
    """An engine, wherever it runs. All methods belong to one event loop."""

    info: ModelInfo  # once it is started
    num_restarts = 0

    @abstractmethod
    async def start(self, on_stage: OnStage) -> ModelInfo:
        """Load the model; from its return on requests may be submitted."""

    @abstractmethod
    def submit(self, request: RequestState) -> RequestStream:
        """Queue a request."""

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Requests that were submitted and are not finished."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return counters and gauges; they may be a step old."""

    @abstractmethod
    def status(self) -> str:
        """Return "healthy", "stalled" or "failed"; "loading" while it is restarted; "degraded" where some of several
        engines serve."""

    @property
    @abstractmethod
    def last_step_age_s(self) -> float:
        """Seconds since a step ended, 0 without work."""

    @property
    def is_serving(self) -> bool:
        """Whether a request that is submitted now is computed at once."""
        return self.status() == "healthy"

    @property
    def replicas(self) -> Sequence[TokenEngine]:
        """The engines that it consists of."""
        return [self]

    async def load_lora(self, path: str) -> LoraInfo:
        """Load an adapter, while requests run; several engines load it when they get a request with it."""
        number, params, uses = next(request_ids), SamplingParams().resolve(), [LoraUse(path)]
        submitted = Submit(
            id=number, prompt=[], params=params, max_tokens=0, seed=0, eos_ids=[], timeout_s=LORA_TIMEOUT_S, loras=uses
        )
        stream = self.submit(RequestState(submitted))
        try:
            await stream.next_outputs()
        finally:
            stream.abort()
        assert stream.request.lora is not None
        return stream.request.lora

    def unload_lora(self, digest: bytes) -> None:  # noqa: B027
        """Let an adapter go, once the last request with it has ended; here not before another one needs its slot."""

    @abstractmethod
    async def restart(self) -> None:
        """Replace each process that computes by a new one, one at a time; no request is lost."""

    @abstractmethod
    async def stop(self, error: WorkerError) -> None:
        """End it after its present step; unfinished requests end with `error`."""
