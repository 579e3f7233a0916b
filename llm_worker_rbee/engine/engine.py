"""Many requests, one model: `add` and `abort` between steps, `step` until there is no work.

The engine knows token ids only. It belongs to one thread at a time; token_engine/ connects others.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ..backends.ops import Array, Progress, StepLimits, StepStopped, WarmUp
from ..config import EngineConfig
from ..errors import InferenceError, InsufficientMemoryError, InvalidRequestError, ModelFileError, WorkerError
from ..models import ModelAdapters, Transformer
from ..models.kv_cache import KVCache
from ..models.vision import VisionTower
from ..structured_outputs.grammar import GrammarCompiler
from .async_scheduling import StepPipeline
from .draft_control import DraftControl
from .encoder import ImageEncoder
from .kv_tier import KVTier
from .lora import AdapterPool
from .mask_filler import MaskFiller, collect_held, consume_outputs
from .model_runner import ModelRunner, forward
from .request import BATCH_PRIORITY, Request, SamplerOutput, ScheduledTokens, StepOutput
from .sampler import sample
from .scheduler import MIN_PREFILL_TOKENS, Scheduler, max_scored_tokens
from .speculative import Drafter, DraftModel, NgramDrafter, max_drafts
from .state_pool import default_slots
from .step_time import LONG_STEP_S, BatchShare, StepSize, StepTimeModel, chunk_context, step_size

logger = logging.getLogger("llm_worker_rbee.engine")


class Engine:
    """Schedules, computes and samples the steps of one model."""

    def __init__(
        self, model: Transformer, config: EngineConfig, kv_type: str = "float32", drafter: Drafter | None = None
    ) -> None:
        self.model = model
        self.config = config
        if config.speculative == "mtp" and drafter is None:
            raise InvalidRequestError(
                "speculative mtp needs the head of the model: load_model_with_head makes it", "speculative"
            )
        self.drafter = drafter or (NgramDrafter(config.draft_tokens) if config.speculative == "ngram" else None)
        drafts = 0 if self.drafter is None else config.draft_tokens
        slots = (config.n_slots or default_slots(config.max_batch, drafts)) if model.config.state_bytes else 0
        self.cache = KVCache(model.ops, model.config, config.n_blocks, config.block_size, kv_type, slots)
        self.step_time = StepTimeModel(model.ops.query_tile)
        self.share = BatchShare(self.step_time)
        self.scheduler = Scheduler(config, n_slots=slots, share=self.share)
        self.runner = ModelRunner(model, self.cache, config.max_batch, config.max_context)
        self.draft_control = DraftControl()
        self.draft_control.can_pause = self.drafter is None or self.drafter.can_pause
        self.grammar_compiler: GrammarCompiler | None = None  # where the model's tokenizer is known
        self.mask_filler = MaskFiller(lambda: self.grammar_compiler and self.grammar_compiler.make_executor())
        self.tier: KVTier | None = None
        self.encoder: ImageEncoder | None = None
        places = model.adapters  # where requests may have LoRA adapters
        self.adapters = AdapterPool(places) if isinstance(places, ModelAdapters) else None
        self.num_steps = 0
        self.is_computing = False  # during a forward pass: the scheduler's state is then consistent
        self.device_failed = False  # every step will fail until the process is restarted
        self.on_schedule: Callable[[], None] = lambda: None  # called after scheduling, before the forward pass
        self.pipeline = StepPipeline(self)
        self.has_urgent: Callable[[], bool] | None = None
        self._can_stop = model.fused is not None and self.drafter is None and not model.ops.has_device_memory
        if self.pipeline.is_enabled:  # a request that arrives waits for the step in flight and the one after it
            self.share.max_step_s /= 2
        self._called_at = self._returned_at = 0.0  # of the last call of `step`
        self._began_at = 0.0  # of the present step: when it was launched, or when the result before it arrived
        self._arrivals = 0

    def stop_for(self, has_urgent: Callable[[], bool]) -> None:
        """Let batch work alone have long steps, which are given up once `has_urgent` says that a request has come."""
        if self._can_stop:
            self.has_urgent, self.share.long_step_s = has_urgent, LONG_STEP_S

    def replace_model(self, compute: Callable[[list[ScheduledTokens]], SamplerOutput]) -> None:
        """Compute steps with another function, such as a `DummyModel`."""
        self._set_tier(None)  # there are no keys and values
        vars(self).update(_run=lambda scheduled: (compute(scheduled), None), _sample=lambda _, sampled, tokens: sampled)
        self.pipeline.is_enabled = self._can_stop = False

    def use_tower(self, tower: VisionTower) -> None:
        """Take requests with images."""
        if isinstance(self.drafter, DraftModel):
            raise InvalidRequestError(
                "a draft model takes no images: leave it out, or use speculative ngram", "draft_model"
            )
        if tower.row_width != self.model.image_parts * self.model.config.d_model:
            raise ModelFileError(
                f"the projector gives rows of {tower.row_width} values, the model takes "
                f"{self.model.image_parts} x {self.model.config.d_model}: they do not belong together"
            )
        self.encoder = ImageEncoder(tower, self.config.max_step_tokens)
        self.scheduler.keeps_images_whole = self.model.sees_both_ways

    def use_tier(self, tier: KVTier) -> None:
        """Write full blocks behind the steps, and read them back before requests are admitted."""
        self._set_tier(tier)

    def _set_tier(self, tier: KVTier | None) -> None:
        scheduler, self.tier = self.scheduler, tier
        scheduler.on_publish = None if tier is None else tier.publish
        scheduler.on_unpublish, scheduler.on_admit = (None, None) if tier is None else (self._drop, self._read_ahead)
        if scheduler.states is not None:
            scheduler.states.on_publish = None if tier is None else tier.publish_state

    def _drop(self, hashes: list[bytes]) -> None:
        with self._tier_may_fail():
            assert self.tier is not None
            self.tier.drop(hashes)

    def _read_ahead(self, request: Request) -> None:
        """Begin to read blocks of a request that is about to be admitted."""
        hashes, num_running = self.scheduler.cacheable_hashes(request), len(self.scheduler.running)
        with self._tier_may_fail():
            assert self.tier is not None
            self.tier.read_ahead(request, hashes, num_running=num_running)

    @contextmanager
    def _tier_may_fail(self) -> Iterator[None]:
        """Go on without the tier if it fails."""
        try:
            yield
        except Exception:
            logger.exception("kv_dir and kv_ram are not used any more")
            tier = self.tier
            self._set_tier(None)
            assert tier is not None
            tier.abandon()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or (self.tier is not None and self.tier.has_work)

    @property
    def is_drafting(self) -> bool:
        """Whether steps are followed by drafts: there is a drafter, and it is not paused."""
        return self.drafter is not None and self.draft_control.is_drafting

    def add(self, request: Request) -> None:
        """Queue a request; `resolve_max_tokens` has checked that it fits."""
        assert self.has_room_for(request), "the request is longer than the context or the KV cache"
        if request.arrival >= 0:
            raise InvalidRequestError("a request can be added only once: make a new one", "request")
        request.arrival = self._arrivals
        self._arrivals += 1
        if request.images is not None and self.encoder is None:
            raise InvalidRequestError("the model takes no images: it has no vision tower", "messages")
        self.scheduler.add(request)
        if request.images is not None and self.encoder is not None:
            self.encoder.hold(request, self.scheduler.count_matched(request))

    def has_room_for(self, request: Request) -> bool:
        """Return whether an otherwise idle engine can compute the whole request."""
        cache, total = self.config.n_blocks * self.config.block_size, request.max_total_tokens
        return total <= self.config.max_context and max(total - 1, request.num_prompt_tokens) <= cache

    def abort(self, request: Request) -> bool:
        """Drop a request and free its blocks; return whether the engine had it."""
        is_removed = self.scheduler.remove(request)
        if not self.has_work:
            self.runner.release()
        return is_removed

    def warm_up(self, progress: Progress = lambda what, done, total: None) -> WarmUp:
        """Do all one-time work of the backend before the first request: compile kernels, capture graphs."""
        config, drafts = self.config, 0 if self.drafter is None else self.config.draft_tokens
        rows = config.max_batch * (1 + drafts)
        limits = StepLimits(
            max_batch=config.max_batch,
            max_tokens=max(config.max_step_tokens, rows + MIN_PREFILL_TOKENS),
            max_logits=rows + max_scored_tokens(config.max_step_tokens),
            max_context=config.max_context,
        )
        run = partial(forward, self.model, cache=self.cache)
        own = self.model.ops.warm_up(run, self.model.fused, self.cache.layers, limits, progress)
        if (adapted := self.model.adapters) is not None and adapted.fused is not None:
            more = self.model.ops.warm_up(run, adapted.fused, self.cache.layers, limits, progress)
            own = WarmUp(own.kernels + more.kernels, own.compiled + more.compiled)
        if self.encoder is not None:
            more = self.encoder.warm_up(self.model, self.cache, limits, progress)
            own = WarmUp(own.kernels + more.kernels, own.compiled + more.compiled)
        drafting = WarmUp(0, 0) if self.drafter is None else self.drafter.warm_up(limits, progress)
        self.step_time.ignores_first_runs = not self.model.ops.has_device_memory
        return WarmUp(own.kernels + drafting.kernels, own.compiled + drafting.compiled)

    def step(self) -> list[StepOutput]:
        """Compute the next tokens of the running requests."""
        outputs = self._begin_step()
        if self.pipeline.in_flight is not None:
            outputs += self.pipeline.collect()
        elif scheduled := self.schedule():
            is_ahead = self.pipeline.is_enabled and self.pipeline.can_launch(scheduled)
            outputs += self.pipeline.launch(scheduled) if is_ahead else self.run_step(scheduled)
        return self._end_step(outputs)

    def _begin_step(self) -> list[StepOutput]:
        """Return the outputs of expired requests, and of requests whose slow grammars are done."""
        self.is_computing = False  # an interrupted step leaves it set
        self._called_at = time.perf_counter()
        outputs = self.scheduler.expire(time.monotonic())
        if self.tier is not None:
            running, waiting = self.scheduler.running, self.scheduler.waiting
            is_idle, has_next = not running and self.pipeline.in_flight is None, not all(r.is_held for r in waiting)
            with self._tier_may_fail():
                self.tier.collect(is_idle=is_idle, has_next=has_next, num_running=len(running))
        if self.encoder is not None and self.encoder.waiting:
            requests = self.encoder.next_requests(self.scheduler.waiting[::-1], self.scheduler.running)
            outputs += self._encode_images(self.encoder, requests)
        if self.mask_filler.held:
            is_idle = self.pipeline.in_flight is None and all(request.is_held for request in self.scheduler.running)
            outputs += collect_held(self.mask_filler, self.scheduler.remove, is_idle=is_idle)
        return outputs

    def _encode_images(self, encoder: ImageEncoder, requests: list[Request]) -> list[StepOutput]:
        """Encode some images of waiting requests; return the errors of those for which that failed."""
        try:
            encoder.run_step(requests)
        except Exception as error:
            if len(requests) > 1:  # one of them may have failed all
                return [output for request in requests for output in self._encode_images(encoder, [request])]
            encoder.drop(requests)
            return self.scheduler.fail([ScheduledTokens(r, 0, 0, 0) for r in requests], _to_worker_error(error))
        return []

    def _end_step(self, outputs: list[StepOutput]) -> list[StepOutput]:
        if self.config.debug:
            self.scheduler.check()
        if not self.scheduler.has_work:
            self.runner.release()
        self._returned_at = time.perf_counter()
        return outputs

    def schedule(self) -> list[ScheduledTokens]:
        """Return the tokens of the next step."""
        scheduled = self.scheduler.schedule(self.max_prefill_tokens)
        if scheduled:
            self.on_schedule()
        return scheduled

    def reset(self) -> None:
        """Drop all requests and the prefix cache, after an interrupt while the scheduler's state was changing."""
        tier, self.tier = self.tier, None  # until it has another pool
        if tier is not None:
            tier.settle()
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            request.is_finished, request.batch_slot, request.blocks, request.states = True, -1, [], {}
        self.scheduler = Scheduler(self.config, self.scheduler.stats, self.cache.n_slots, self.share)
        self.scheduler.keeps_images_whole = self.model.sees_both_ways
        if self.encoder is not None:
            self.encoder.waiting.clear()
        if tier is not None:
            tier.reset(self.scheduler.pool, self.scheduler.states)
            self.use_tier(tier)
        self.pipeline.in_flight, self.is_computing = None, False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Mark the scheduler's state as consistent; an interrupt keeps the mark, an error removes it."""
        self.is_computing = True
        try:
            yield
        except Exception:
            self.is_computing = False
            raise
        self.is_computing = False

    def begin_timing(self) -> None:
        """Count the time of the step from now on, unless it follows a step in flight."""
        self._began_at = time.perf_counter()

    def observe_launched(self, scheduled: list[ScheduledTokens], num_running: int) -> None:
        """Learn from the arrival of the tokens of a step that was launched ahead."""
        self.num_steps += 1
        size = step_size(scheduled, self.step_time.query_tile)
        seconds = self._observe_result(size, len(scheduled), num_running)
        if seconds is not None:
            self.step_time.observe(size, seconds)

    def _observe_result(self, size: StepSize, num_requests: int, num_tokens: int) -> float | None:
        """Return the seconds between the last two results, from which the draft control learns; None if most of them
        passed between two calls of `step`."""
        now, waited = time.perf_counter(), self._called_at - max(self._began_at, self._returned_at)
        seconds, self._began_at = now - self._began_at, now
        if waited >= 0.5 * seconds:
            return None
        if self.drafter is not None and size.kind == "decode":
            self.draft_control.observe(num_requests, num_tokens, seconds)
        return seconds

    def run_step(self, scheduled: list[ScheduledTokens]) -> list[StepOutput]:
        """Compute a step and wait for its tokens."""
        start = time.perf_counter()
        size = step_size(scheduled, self.step_time.query_tile)
        self.is_computing = True
        try:
            logits, tokens = self._run(scheduled)
            sampled = self._sample(scheduled, logits, tokens)
        except StepStopped:
            self.share.note_request()
            try:
                self.mask_filler.wait()
            except Exception as error:
                return self.fail_step(scheduled, error)
            self.is_computing = False
            return []
        except Exception as error:
            return self.fail_step(scheduled, error)
        self.is_computing = False
        outputs = self.update(scheduled, sampled)
        if self.drafter is not None:  # with the time of its drafts, after the last result
            self._observe_result(size, len(scheduled), len(outputs))
        self.draft()
        if size.kind != "decode":
            self.begin_timing()  # the drafter's work on prompts is no part of the next step
        self.num_steps += 1
        self.step_time.observe(size, time.perf_counter() - start)
        return outputs

    def _run(self, scheduled: list[ScheduledTokens]) -> tuple[Array, list[int] | None]:
        """Return the logits, while the masks of guided requests are filled; and tokens, if the step sampled them."""
        if not self.scheduler.num_guided:
            return self._run_model(scheduled)
        guided = [item for item, _, stop, _ in scheduled if item.constraint is not None and stop >= len(item.ids)]
        if guided and not self.model.ops.has_device_memory:
            self.mask_filler.start(guided)
        computed = self._run_model(scheduled)
        if guided and self.model.ops.has_device_memory:  # which computes while the host fills masks
            self.mask_filler.start(guided)
        return computed

    def _sample(self, scheduled: list[ScheduledTokens], logits: Array, tokens: list[int] | None) -> SamplerOutput:
        if self.mask_filler.pending is not None:
            self.mask_filler.wait()
        return sample(self.model.ops, scheduled, logits, tokens)

    def _run_model(self, scheduled: list[ScheduledTokens]) -> tuple[Array, list[int] | None]:
        if self.encoder is not None:
            self.encoder.prepare(scheduled)
        if self.drafter is None or not self.drafter.needs_hidden:
            is_batch = scheduled[0].request.priority >= BATCH_PRIORITY  # other requests come first
            return self.runner.run(scheduled, self.has_urgent if is_batch and self.share.is_long else None)
        logits, hidden = self.runner.run_hidden(scheduled)
        self.drafter.observe(scheduled, hidden)
        return logits, None

    def update(self, scheduled: list[ScheduledTokens], sampled: SamplerOutput) -> list[StepOutput]:
        is_guided = self.scheduler.num_guided > 0
        outputs = self.scheduler.update(scheduled, sampled)
        return consume_outputs(outputs, self.scheduler.remove, self.mask_filler) if is_guided else outputs

    def fail_step(self, scheduled: list[ScheduledTokens], error: Exception) -> list[StepOutput]:
        """Finish the requests of a failed step with an error; the others go on."""
        self.is_computing = False
        self.device_failed = self.device_failed or (not isinstance(error, WorkerError) and self.model.ops.has_failed())
        return self.scheduler.fail(scheduled, _to_worker_error(error))

    def draft(self) -> None:
        """Set draft tokens for the next step: the drafter's, and tokens that grammars force."""
        if self.drafter is not None and self.is_drafting:
            self._run_drafter(self.drafter)
        if not (self.scheduler.num_guided or self.pipeline.is_enabled):
            return
        grammar_drafts = self.grammar_drafts()
        num_drafts = sum(len(drafts) for _, drafts in grammar_drafts)
        if not self.pipeline.is_enabled or self.pipeline.waits_for(num_drafts) or self.is_drafting:
            for request, drafts in grammar_drafts:
                request.drafts = drafts

    def grammar_drafts(self) -> list[tuple[Request, list[int]]]:
        """Return the next tokens of decoding guided requests: forced tokens, or allowed drafts."""
        pairs, budget = [], self.scheduler.max_scored_tokens
        for request in self.scheduler.foremost:
            if request.constraint is not None:
                room = min(budget, max_drafts(request))
                drafts = request.constraint.next_drafts(request.drafts, room) if room else []
                pairs.append((request, drafts))
                budget -= len(drafts)
        return pairs

    def _run_drafter(self, drafter: Drafter) -> None:
        """Let a drafter set drafts. They are optional: a failing drafter is not used again."""
        try:
            batch = partial(self.runner.batch, has_states=False)
            drafter.draft(self.scheduler.foremost, self.scheduler.reserve, batch)
        except Exception as error:
            for request in self.scheduler.running:
                request.drafts = []
            if isinstance(error, InferenceError):
                return
            self.drafter = None
            warnings.warn(f"speculative decoding is off: the drafter failed: {error}", RuntimeWarning, stacklevel=2)

    def max_prefill_tokens(self, decodes: Sequence[ScheduledTokens], start: int) -> int:
        """Return the prompt tokens that a step may have so that its decodes get their tokens in time."""
        limit = self.config.max_step_tokens
        if not any(item.stop > item.request.num_prompt_tokens for item in decodes):
            return limit - len(decodes)  # no request waits for its next token
        size = step_size(decodes, self.step_time.query_tile)
        return self.step_time.max_prefill_tokens(self.config.target_itl_ms / 1000, size, start, limit - size.tokens)

    def seconds_per_prefill_token(self, start: int = 0) -> float:
        """Return the predicted seconds of a prompt token, after `start` others, in a step with the current decodes; 0:
        not known yet."""
        running = [item for item in self.scheduler.foremost[:] if len(item.ids) > item.num_prompt_tokens]
        decodes = [ScheduledTokens(item, len(item.ids) - 1, len(item.ids), 0) for item in running]
        count = max(MIN_PREFILL_TOKENS, self.max_prefill_tokens(decodes, start))
        context = sum(item.stop for item in decodes) + chunk_context(start, count, self.step_time.query_tile)
        return (self.step_time.predict(StepSize("mixed", False, len(decodes) + count, context)) or 0.0) / count


def _to_worker_error(error: Exception) -> WorkerError:
    if isinstance(error, WorkerError):
        return error
    shown: WorkerError = InferenceError(f"the step failed ({type(error).__name__})")  # its text may hold internals
    if isinstance(error, MemoryError):
        shown = InsufficientMemoryError("a step did not fit into memory: use a smaller kv_memory, max_batch or prompt")
    shown.__cause__ = error
    return shown
