"""The engine's end of the protocol: submissions become requests of an engine, its steps become results.

Whoever owns the engine (a thread, a child process, a caller of the offline API) passes messages in and calls `step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

import numpy as np

from .. import machine
from ..engine.engine import Engine
from ..engine.lora import AdapterPool
from ..engine.pooling_engine import PoolingEngine
from ..engine.request import BATCH_PRIORITY, Request, StepOutput
from ..errors import ContextLengthError, DeadlineError, InferenceError, InvalidRequestError, WorkerError, copy_error
from ..images.prompt import ImageSpan, PromptImages
from ..images.sizes import ImagePart
from ..structured_outputs.constraint import Constraint
from .protocol import (
    Abort,
    EngineStats,
    LoraInfo,
    Pool,
    PooledRows,
    PoolingStep,
    RequestEvent,
    StepResult,
    Submit,
    TokenOutput,
    UnloadLora,
)
from .wire import unpack_sequences

OnEvents = Callable[[list[RequestEvent]], None]
COMPILE_WAIT_S = 0.005  # of a step without other work than grammars that are compiled


def is_urgent(message: object) -> bool:
    """Return whether a message is a request that comes before batch work."""
    return isinstance(message, Submit) and message.priority < BATCH_PRIORITY


class EngineLoop:
    """One engine and the requests that it has, by their ids."""

    def __init__(self, engine: Engine, on_events: OnEvents | None = None, *, records_blocks: bool = False) -> None:
        """`on_events` gets the events of a step before it is computed; without it they come with its result."""
        self.engine = engine
        self._requests: dict[int, Request] = {}
        self._ids: dict[Request, int] = {}
        self._arrived_at: dict[Request, float] = {}  # of requests that were never admitted
        self._early: list[TokenOutput] = []  # of requests that the engine refused
        self._compiling: dict[Request, Future[Constraint]] = {}  # that wait for their grammar
        self._adapting: dict[Request, Submit] = {}  # that wait for their adapters
        self._on_events = on_events
        self._events: list[RequestEvent] = []
        self._records_blocks = records_blocks
        engine.on_schedule = self._collect_events
        self._observe_scheduler()

    @property
    def has_work(self) -> bool:
        return self.engine.has_work or bool(self._early or self._compiling or self._adapting)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def receive(self, message: Submit | Abort | UnloadLora) -> None:
        """Take in a message of the front."""
        match message:
            case Submit():
                self.submit(message)
            case Abort():
                self.abort(message.id)
            case UnloadLora() if self.engine.adapters is not None:
                self.engine.adapters.unload(message.digest)

    def _adapters(self) -> AdapterPool:
        if self.engine.adapters is None:
            raise InvalidRequestError("this engine was started without adapters: give it max_loras", "lora")
        return self.engine.adapters

    def submit(self, message: Submit) -> None:
        """Add a request; one that the engine refuses ends with the next step, without harm to the others."""
        request = Request(
            message.prompt,
            message.params,
            message.max_tokens,
            message.seed,
            frozenset(message.eos_ids),
            message.sample_index,
            message.priority,
            generated=message.generated,
            extra_keys=message.extra_keys,
            images=_images(message.images) if message.images else None,
        )
        if message.timeout_s is not None:
            request.deadline = time.monotonic() + message.timeout_s
        self._requests[message.id], self._ids[request] = request, message.id  # first, so that any error reaches it
        self._arrived_at[request] = time.perf_counter()
        try:
            if not self.engine.has_room_for(request):
                raise ContextLengthError("the request is longer than the context or the KV cache", "max_tokens")
            if message.loras:
                self._adapters().forget_failures(waiting.loras for waiting in self._adapting.values())
                self._adapting[request] = message
            else:
                self._add(request)
        except WorkerError as error:
            self._refuse(request, error)

    def _add(self, request: Request) -> None:
        """Add a request; with a grammar, once that is compiled."""
        if request.params.structured_outputs is None:
            self.engine.add(request)
        else:
            self._compiling[request] = self._compile(request)

    def _add_adapted(self) -> None:
        """Add the requests whose adapters are in the model by now, by their priorities, then in their order.

        The first that has no slot waits until one is empty: those behind it may still use the other slots.
        """
        emptied: int | None = None
        for request, submitted in sorted(self._adapting.items(), key=lambda entry: entry[1].priority):
            try:
                pool, uses = self._adapters(), submitted.loras
                if request.deadline is not None and time.monotonic() > request.deadline:
                    raise DeadlineError("the request timed out while it waited for its adapter")
                if emptied is not None and pool.find(uses) in (None, emptied):
                    continue
                if not pool.assign(uses):
                    emptied = pool.emptiest()
                    continue
                if (place := pool.acquire(uses)) is None:
                    continue
                del self._adapting[request]
                request.adapter_slot, request.adapter_scale, packed = place
                if submitted.prompt:
                    self._add(request)
                    continue
                info = LoraInfo(path=packed.path, digest=packed.digest, rank=packed.rank)
                self._events.append(RequestEvent(submitted.id, "loaded", lora=info))
                self._early.append(TokenOutput(submitted.id, [], "length"))
                self._forget(request)
            except Exception as error:
                self._adapting.pop(request, None)
                self._refuse(request, _to_worker_error("the adapter could not be loaded", error))

    def _compile(self, request: Request) -> Future[Constraint]:
        """Start to compile the grammar of a request, in a thread: other requests go on."""
        compiler, params = self.engine.grammar_compiler, request.params
        if compiler is None:
            raise InvalidRequestError(
                "structured_outputs cannot be used: this engine has no tokenizer", "structured_outputs"
            )
        assert params.structured_outputs is not None
        return compiler.submit(
            params.structured_outputs,
            sorted(request.eos_ids),
            request.max_tokens,
            close_on_length=params.close_on_length,
            generated=request.tokens,
        )

    def _add_compiled(self) -> None:
        """Add the requests whose grammars are compiled."""
        for request, future in [one for one in self._compiling.items() if one[1].done()]:
            del self._compiling[request]
            try:
                request.constraint = future.result()
                if request.constraint.is_complete:  # by what was generated before
                    self._early.append(TokenOutput(self._ids[request], [min(request.eos_ids, default=0)], "stop"))
                    self._forget(request)
                else:
                    self.engine.add(request)
            except Exception as error:
                self._refuse(request, _to_worker_error("the grammar could not be compiled", error))

    def _refuse(self, request: Request, error: WorkerError) -> None:
        self._early.append(TokenOutput(self._ids[request], [], "error", error=error))
        self._forget(request)

    def abort(self, request_id: int) -> None:
        """Drop a request, if it is not finished."""
        request = self._requests.get(request_id)
        if request is not None:
            self._events = [event for event in self._events if event.id != request_id]
            if self._compiling.pop(request, None) is None and self._adapting.pop(request, None) is None:
                self.engine.abort(request)
            self._forget(request)

    def step(self) -> StepResult:
        """Compute a step; an error that is not of one request is raised."""
        if self._compiling or self._adapting:
            if not (self.engine.has_work or self._early):  # without other work, wait for one of them
                reading: list[Future[Any]] = [] if self.engine.adapters is None else [*self.engine.adapters.reading]
                wait([*reading, *self._compiling.values()], COMPILE_WAIT_S, FIRST_COMPLETED)
            self._add_adapted()
            self._add_compiled()
        outputs = self.engine.step()
        self._collect_events()
        self._collect_prefills()
        results, first = list[TokenOutput](), 0
        for end, output in enumerate(outputs, 1):
            if end == len(outputs) or outputs[end].request is not output.request:
                results += self._output(outputs[first:end])
                first = end
        return self._result(results)

    def fail_all(self, error: WorkerError) -> StepResult:
        """Finish every request with an error, and start the engine anew."""
        changes = self.engine.scheduler.pool.changes
        removed = [] if changes is None else [*changes, *self.engine.scheduler.pool.cached_hashes]
        self.engine.reset()
        self._observe_scheduler()
        failed = [TokenOutput(request_id, [], "error", error=copy_error(error)) for request_id in self._requests]
        for request in list(self._ids):
            self._release_adapter(request)
        waiting = self._compiling, self._adapting
        for kept in (self._requests, self._ids, self._arrived_at, self._early, self._events, *waiting):
            kept.clear()
        return StepResult(outputs=failed, removed=removed)

    def stats(self) -> EngineStats:
        engine, pool, stats = self.engine, self.engine.scheduler.pool, self.engine.scheduler.stats
        fused, states = engine.model.fused, self.engine.scheduler.states
        return EngineStats(
            num_free_blocks=pool.num_free,
            num_blocks=pool.n_blocks,
            num_steps=engine.num_steps,
            num_preemptions=stats.num_preemptions,
            num_queried_tokens=stats.num_queried_tokens,
            num_hit_tokens=stats.num_hit_tokens,
            num_drafted_tokens=stats.num_drafted_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_snapshot_hits=stats.num_snapshot_hits,
            num_state_slots=states.n_slots if states else 0,
            num_used_state_slots=states.num_used if states else 0,
            num_snapshots=states.num_snapshots if states else 0,
            num_paused_drafters=int(engine.drafter is not None and not engine.is_drafting),
            seconds_per_prefill_token=engine.seconds_per_prefill_token(),
            step_times={kind: replace(times) for kind, times in engine.step_time.totals.items()},
            step_time_model=engine.step_time.coefficients,
            device_bytes=engine.model.ops.allocated_memory(),
            graph_bytes=0 if fused is None else fused.graph_bytes,
            process_bytes=machine.resident_bytes(),
            kv_disk=None if engine.tier is None else engine.tier.stats,
            lora_bytes=0 if engine.adapters is None else engine.adapters.nbytes,
            device_failed=engine.device_failed,
        )

    def _result(self, outputs: list[TokenOutput]) -> StepResult:
        early, self._early = self._early, []
        events, self._events = self._events, []
        pool = self.engine.scheduler.pool
        if pool.changes is None:
            return StepResult(outputs=early + outputs, events=events)
        changes, pool.changes = pool.changes, {}
        stored = [block_hash for block_hash, is_cached in changes.items() if is_cached]
        removed = [block_hash for block_hash, is_cached in changes.items() if not is_cached]
        return StepResult(outputs=early + outputs, events=events, stored=stored, removed=removed)

    def _output(self, outputs: list[StepOutput]) -> list[TokenOutput]:
        """Return the outputs of one request as one; an error follows the tokens before it."""
        last, request = outputs[-1], outputs[-1].request
        request_id, failed = self._ids[request], None
        if len(outputs) == 1 and not (last.finish_reason or last.logprob or request.prompt_logprobs):
            return [TokenOutput(request_id, [last.token])]  # the usual case
        if last.finish_reason is not None:
            self._forget(request)
        if last.error is not None:
            failed = TokenOutput(request_id, [], "error", error=last.error)
            if len(outputs) == 1:
                return [failed]
            outputs, last = outputs[:-1], outputs[-2]
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        logprobs = [output.logprob for output in outputs if output.logprob is not None]
        tokens = [output.token for output in outputs]
        made = TokenOutput(request_id, tokens, last.finish_reason, logprobs, prompt_logprobs)
        return [made] if failed is None else [made, failed]

    def _release_adapter(self, request: Request) -> None:
        """Let go of a request's adapter; the engine computes nothing more of it."""
        if request.adapter_slot >= 0 and self.engine.adapters is not None:
            self.engine.adapters.release(request.adapter_slot)
            request.adapter_slot = -1

    def _forget(self, request: Request) -> None:
        self._arrived_at.pop(request, None)
        self._release_adapter(request)
        del self._requests[self._ids.pop(request)]

    def _collect_events(self) -> None:
        """Turn the scheduler's events into events of the protocol."""
        scheduled = self.engine.scheduler.events
        for request, kind in scheduled or ():
            if request in self._ids:
                arrived = self._arrived_at.pop(request, 0.0)
                seconds = request.first_scheduled_time - arrived if kind == "admitted" else 0.0
                cached = request.num_cached_tokens if kind == "admitted" else 0
                self._events.append(RequestEvent(self._ids[request], kind, cached, max(0.0, seconds)))
        if scheduled:
            scheduled.clear()
        if self._events and self._on_events is not None:
            self._on_events(self._events)
            self._events = []

    def _collect_prefills(self) -> None:
        for request in self.engine.scheduler.foremost:
            if request.num_computed_tokens < request.num_prompt_tokens:
                self._events.append(RequestEvent(self._ids[request], "prefill", request.num_computed_tokens))

    def _observe_scheduler(self) -> None:
        """Let the engine's scheduler record its events, and the prefix cache its changes."""
        scheduler = self.engine.scheduler
        scheduler.events = []
        scheduler.pool.changes = {} if self._records_blocks else None


def _to_worker_error(what: str, error: Exception) -> WorkerError:
    if isinstance(error, WorkerError):
        return error
    failure = InferenceError(f"{what} ({type(error).__name__})")
    failure.__cause__ = error
    return failure


class PoolingLoop:
    """Feeds an engine of a pooling model with messages, and turns its outputs into messages."""

    def __init__(self, engine: PoolingEngine) -> None:
        self.engine = engine

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def receive(self, message: Pool | Abort) -> None:
        """Take in a message."""
        if isinstance(message, Pool):
            self.engine.add(message.id, *unpack_sequences(message))
        else:
            self.engine.cancel(message.id)

    def step(self) -> PoolingStep:
        """Compute a step."""
        engine, start = self.engine, time.perf_counter()
        sequences, tokens = engine.num_sequences, engine.num_tokens
        outputs = engine.step()
        return PoolingStep(
            outputs=[
                PooledRows(one.id, one.indices, b"" if one.error else one.rows.astype("<f4").tobytes(), one.error)
                for one in outputs
            ],
            num_sequences=engine.num_sequences - sequences,
            num_tokens=engine.num_tokens - tokens,
            seconds=time.perf_counter() - start,
            process_bytes=machine.resident_bytes(),
        )


def _images(parts: Sequence[ImagePart]) -> PromptImages:
    spans = [ImageSpan(part.start, part.rows, part.columns, part.gap) for part in parts]
    pixels = [np.frombuffer(part.pixels, np.uint8).reshape(part.height, part.width, 3) for part in parts]
    return PromptImages(spans, pixels, [part.digest for part in parts])
