"""Benchmarks of the scheduler without a model, and of the default model's file: tokenizer, metadata, matrix products.

`scheduler` is schedule and update of requests that decode, `scheduler_batch` also builds the arrays of the step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, cast

from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine.model_runner import ModelRunner
from llm_worker_rbee.engine.request import Request, SamplerOutput
from llm_worker_rbee.engine.scheduler import Scheduler
from llm_worker_rbee.llm import open_tokenizer
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.hub import locate_model
from llm_worker_rbee.weights.quants import BLOCK_TYPES

from ..roofline import Work, matmul_ceiling
from ..workload import TEXT, read_text
from .cases import BLOCK_BYTES, BLOCK_SHAPES, DEFAULT_MODEL_SHAPE, VOCABULARY, Case, F
from .timing import Function

MIN_PROMPT, MAX_PROMPT = 200, 400  # tokens of a request of the scheduler's benchmarks
RESTART_CONTEXT = 4096  # tokens after which all requests start again: so far apart that it does not count
BLOCK_SIZE, TOKEN_BUDGET = 16, 512
DEFAULT_MODEL_LAYERS = 30
ENCODED_CHARACTERS = 4096


def scheduler_cases() -> Iterator[Case]:
    """Yield the benchmarks of the scheduler, in the order in which they run."""
    for family, n in (*(("scheduler", n) for n in (1, 16, 64, 256)), ("scheduler_batch", 64)):
        make = partial(_decode_step, n, family == "scheduler_batch")
        yield Case(f"{family}/{n}", make, Work(64.0 * n, n), needs="scheduler")  # a cache line for each request


def _decode_step(requests: int, arrays: bool, _: Any) -> Function:
    return partial(DecodingScheduler(requests).step, arrays=arrays)


class DecodingScheduler:
    """A scheduler whose requests are past prefill; without a model."""

    def __init__(self, requests: int) -> None:
        self.count = requests
        blocks = requests * (-(-RESTART_CONTEXT // BLOCK_SIZE) + 1)
        self._config = EngineConfig(
            max_context=RESTART_CONTEXT,
            n_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_batch=requests,
            max_step_tokens=TOKEN_BUDGET,
        )
        self.restart()

    def restart(self) -> None:
        """Give each request a prompt of its own, and prefill it."""
        rng, config = random.Random(7), self._config
        self.scheduler = Scheduler(config)
        no_model = cast(
            Any, SimpleNamespace(ops=SimpleNamespace(has_device_memory=False), adapters=None, image_parts=0)
        )
        cache = cast(Any, SimpleNamespace(block_size=BLOCK_SIZE, n_slots=0))
        self._runner = ModelRunner(no_model, cache, config.max_batch, config.max_context)
        for number in range(self.count):
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(MIN_PROMPT, MAX_PROMPT))]
            params = SamplingParams(temperature=0.0, ignore_eos=True).resolve()
            request = Request(prompt, params, RESTART_CONTEXT - MAX_PROMPT, number, frozenset())
            request.arrival = number
            self.scheduler.add(request)
        self._tokens = [rng.randrange(VOCABULARY) for _ in range(self.count)]
        scheduled = self.scheduler.schedule(self.count * MAX_PROMPT)
        self.scheduler.update(scheduled, SamplerOutput(self._tokens))

    def step(self, *, arrays: bool) -> None:
        """Add a token to each request."""
        scheduled = self.scheduler.schedule(TOKEN_BUDGET)
        if arrays:
            self._runner.batch(scheduled)
        if self.scheduler.update(scheduled, SamplerOutput(self._tokens))[0].finish_reason:
            self.restart()


def model_file_cases() -> Iterator[Case]:
    """Yield the benchmarks on the default model, which is downloaded if it is not here."""
    for name in ("encode", "decode"):
        yield Case(f"tokenizer/{name}", partial(_tokenize, name), Work(float(ENCODED_CHARACTERS)), needs="tokenizer")
    metadata = Work(2e6)  # bytes, about
    yield Case("gguf_open", lambda _: partial(open_checkpoint, locate_model(None)), metadata, needs="tokenizer")
    yield from map(_products, (1, 16, 128))


def _tokenize(direction: str, _: Any) -> Function:
    tokenizer, text = open_tokenizer(open_checkpoint(locate_model(None))), read_text(TEXT)[:ENCODED_CHARACTERS]
    encode = partial(tokenizer.encode, text)
    return encode if direction == "encode" else partial(tokenizer.decode, encode())


def _products(rows: int) -> Case:
    """Time all matrix products of a step: the layers' matrices are Q4_1, the head Q8_0."""
    layers, width = DEFAULT_MODEL_LAYERS, DEFAULT_MODEL_SHAPE[0]
    size = layers * BLOCK_BYTES + VOCABULARY * BLOCK_TYPES["Q8_0"].row_bytes(width)
    values = layers * sum(n * columns for n, columns in BLOCK_SHAPES) + VOCABULARY * width
    moved = layers * sum(map(sum, BLOCK_SHAPES)) + VOCABULARY + width  # activations in and out, for each row
    work = Work(size + F * rows * moved, 2 * rows * values, arithmetic="int8")
    return Case(f"products/{rows}", lambda ops: matmul_ceiling(_model(ops), rows), work)


@lru_cache(maxsize=2)
def _model(ops: Any) -> Transformer:
    checkpoint = open_checkpoint(locate_model(None))
    return load_model(checkpoint, ops, read_model_config(checkpoint))
