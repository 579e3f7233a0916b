"""The reply to a request that the model answers: starts its generations and folds their deltas, whatever the dialect.

`start_reply` admits a request and starts it; the `Reply` passes each delta to the dialect's `Printer`, which makes
chunks, or one object of all deltas.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable

import msgspec

from ..engine.request import BATCH_PRIORITY, check_prompt_fits, fit_max_tokens
from ..errors import ContextLengthError, InferenceError, InvalidRequestError, WorkerError
from ..generation import Generation
from ..sampling_params import STRUCTURED, SamplingParams
from ..structured_outputs.chat_grammar import ToolSchemaError
from ..text_model import EncodedPrompt
from ..tokenizer import Tokenizer
from . import log
from .bodies import GenerateRequest, estimate_tokens
from .dialect import Answer, Printer, ReplyState, Usage
from .offload import OffloadPool
from .sse import EventSource
from .worker import Worker

TOKEN_BYTES = 16  # of a reply, an estimate


async def start_reply(worker: Worker, request: GenerateRequest, make_printer: Callable[[ReplyState], Printer]) -> Reply:
    """Start the generations of a request: all of them or none. Without prompts it starts none."""
    started_at = time.perf_counter()
    name = worker.loras.name_of(request.model)
    loras = worker.loras.uses_of(request.model, request.lora)
    if not request.prompts:
        return Reply(name, worker.offload, request, [], [], make_printer, started_at)
    context, chat, n = worker.model.max_context, request.chat, request.n
    if chat is None:
        worker.admission.require_capacity(len(request.prompts) * n)
        worker.encoder.check_texts(request.prompts)
    is_batch = request.priority >= BATCH_PRIORITY  # the runner of batches bounds it
    num_tokens = 0 if is_batch else n * sum(estimate_tokens(prompt, context) for prompt in request.prompts)
    with worker.admission.reserve(0 if is_batch else len(request.prompts) * n, num_tokens) as reservation:
        try:
            prompts = await worker.encoder.encode(request.prompts, request.params.structured_outputs, request.timeout_s)
        except InvalidRequestError as error:
            _rename_field(error, request)
            raise
        generations: list[Generation] = []
        try:
            for prompt in prompts:
                check_prompt_fits(len(prompt.ids), context, is_scored_only=request.is_scored_only)
            if not is_batch:
                reservation.set_actual(n * sum(len(prompt.ids) for prompt in prompts))
            for prompt in prompts:
                generations += worker.start_generations(
                    prompt,
                    fit_params(worker, request.params, prompt),
                    n=n,
                    priority=request.priority,
                    timeout_s=request.time_left(started_at),
                    cache_salt=request.cache_salt,
                    is_scored_only=request.is_scored_only,
                    loras=loras,
                )
        except WorkerError as error:
            for generation in generations:
                generation.close()
            if chat is not None and isinstance(error, ContextLengthError) and error.field == "prompt":
                error.field = request.messages_field
            raise
    ids = [prompt.ids for prompt in prompts]
    return Reply(name, worker.offload, request, ids, generations, make_printer, started_at, worker)


def _rename_field(error: InvalidRequestError, request: GenerateRequest) -> None:
    """Rename the field of an error to the dialect's name."""
    if error.field == STRUCTURED:
        error.field = request.structured_outputs_field
        if error.field != STRUCTURED:
            message = re.sub(rf"^{STRUCTURED}\.\w+", request.structured_outputs_field, str(error))
            error.args = (message, *error.args[1:])
    elif error.field == "messages":
        error.field = request.messages_field
    elif isinstance(error, ToolSchemaError) and request.tool_places:
        error.args = (f"{request.tool_places[error.index]} ({error.name:.100}): {error.reason}", *error.args[1:])


def fit_params(worker: Worker, params: SamplingParams, prompt: EncodedPrompt) -> SamplingParams:
    """Return the parameters with `max_tokens` reduced to the room after the prompt, and with the answer's grammar."""
    limit = params.max_tokens or worker.model.sampling_defaults.values.get("max_tokens")
    max_tokens = fit_max_tokens(len(prompt.ids), limit, worker.engine.info.engine)
    return params.with_max_tokens(max_tokens).with_structured_outputs(prompt.structured_outputs)


class Reply(EventSource):
    """The generations of one request, and their output from the dialect's printer."""

    def __init__(
        self,
        model: str,
        offload: OffloadPool,
        request: GenerateRequest,
        prompts: list[list[int]],
        generations: list[Generation],
        make_printer: Callable[[ReplyState], Printer],
        started_at: float,
        worker: Worker | None = None,
    ) -> None:
        """`model` is the name of the model, or of the adapter that the request names; `worker` has it, where it is
        needed for prompts."""
        self.model, self._offload = model, offload
        self.request, self.prompts, self.generations = request, prompts, generations
        self.created_at = time.time()
        self.started_at = started_at  # in the time of time.perf_counter
        self._worker = worker
        self._events = b""  # not taken
        self._open: dict[int, Generation] = {}  # not finished, by their indices
        self.printer = make_printer(self)

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._worker is not None
        return self._worker.loaded.tokenizer

    @property
    def max_tokens(self) -> int:
        """The token limit of each answer; with several prompts the smallest."""
        return min((generation.request.submitted.max_tokens for generation in self.generations), default=0)

    @property
    def seed(self) -> int:
        return self.generations[-1].request.submitted.seed

    def usage(self) -> Usage:
        """Return the token counts so far."""
        output = 0 if self.request.is_scored_only else sum(generation.num_tokens for generation in self.generations)
        first_choices = self.generations[:: self.request.n]
        cached = sum(max(0, generation.request.num_cached_tokens) for generation in first_choices)
        reasoning = sum(generation.num_reasoning_tokens for generation in self.generations)
        parts = [part for generation in first_choices for part in generation.request.submitted.images]
        images = sum(part.rows * part.columns for part in parts)
        return Usage(sum(map(len, self.prompts)), output, cached, reasoning, images)

    def close(self) -> None:
        """Release all generations."""
        for generation in self.generations:
            generation.close()

    def start(self, on_ready: Callable[[], None]) -> None:
        self._events += self.printer.begin()
        self._open = dict(enumerate(self.generations))
        for generation in self.generations:
            generation.notify(on_ready)
        if self._events or not self.generations:
            on_ready()

    def take(self) -> bytes:
        events, self._events = self._events, b""
        try:
            for i, generation in list(self._open.items()):
                if (delta := generation.take()) is not None:
                    events += self.printer.print_delta(i, delta)
                    if delta.finish_reason is not None:
                        del self._open[i]
                        generation.close()
            if not self._open:
                events += self.printer.end()
                self._finish()
        except WorkerError as error:
            events += self.printer.print_error(error)
            self._finish()
        except Exception as error:
            log.request_failed(error)
            events += self.printer.print_error(InferenceError("internal error of the worker"))
            self._finish()
        return events

    def _finish(self) -> None:
        self.is_finished = True
        self.close()

    async def complete(self) -> bytes:
        """Return one object with all answers, as JSON; a large one is encoded in a thread."""
        try:
            folds = [fold(generation) for generation in self.generations]
            answers = [await folds[0]] if len(folds) == 1 else await asyncio.gather(*folds)
        finally:
            self.close()  # one that fails ends the others
        size = TOKEN_BYTES * sum(len(answer.tokens) for answer in answers)
        if self.request.values.get("echo"):
            size += TOKEN_BYTES * self.request.n * sum(map(len, self.prompts))
        size *= 1 + (self.request.params.logprobs or 0)
        return await self._offload.encode_reply(size, lambda: msgspec.json.encode(self.printer.whole(answers)))


async def fold(generation: Generation) -> Answer:
    """Return all deltas of a generation as one; they are taken as they come, and only the last one is waited for."""
    answer = Answer()
    ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def on_outputs() -> None:
        if ended.done():
            return
        try:
            delta = generation.take()
        except Exception as error:
            ended.set_exception(error)
            return
        if delta is not None:
            answer.add(delta)
            if delta.finish_reason is not None:
                ended.set_result(answer)

    generation.notify(on_outputs)
    return await ended
