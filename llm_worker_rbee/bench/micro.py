"""Micro-benchmarks: ops, the scheduler, the default model's file; on one backend, or on two in turn, beside the limit.

The first five families and their sizes are those of the Rust worker's suite (float32, batch 1, hidden 4096, 32 heads of
128, rope base 10000, positions from 0). A case that needs a function beyond the op table runs on the reference where
the backend has none. `Work` is the least that an ideal implementation would read, write and compute. `scheduler` is
schedule and update of requests that decode, `scheduler_batch` also builds the arrays of the step. `kernel/` are the
kernels of the CPU at the sizes of models, for comparing instruction sets: matrix products by layout and tokens, with
quantizing the activations; attention as HEADS/TOKENS@CONTEXT; quantizing alone.
"""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from statistics import fmean, median, pstdev
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..backends import resolve_kv_type, select_backend
from ..backends.ops import AttentionParams, Batch, KVLayer, RopeTable, SampleRow
from ..backends.reference import ReferenceBackend
from ..config import EngineConfig
from ..engine.model_runner import ModelRunner
from ..engine.request import Request, SamplerOutput, SamplingParams
from ..engine.scheduler import Scheduler
from ..errors import DownloadError, InvalidRequestError
from ..layers.attention import Attention
from ..layers.block import Block
from ..layers.linear import Linear
from ..layers.rms_norm import RMSNorm
from ..layers.rope import inverse_frequencies
from ..layers.swiglu import SwiGLU
from ..llm import open_tokenizer
from ..models import Transformer, load_model, read_model_config
from ..progress import StepProgress
from ..weights import Tensor, open_checkpoint
from ..weights.hub import locate_model
from ..weights.quants import BLOCK_TYPES, BlockType
from . import statistics
from .baseline import Comparison, compare_results
from .results import Recorder, Result, round_samples
from .roofline import Limits, Work, backend_threads, matmul_ceiling, measure_limits, product_program, quantize_program
from .synthetic import random_tensor
from .workload import TEXT, read_text

Function = Callable[[], object]
MIN_SAMPLE_S = 0.002  # a shorter sample would measure the loop and the clock
ROUNDS = 12  # over all cases: a disturbance of some seconds then meets only a part of each case's samples

HIDDEN, HEADS, HEAD_DIM, D_FF, ROPE_BASE = 4096, 32, 128, 11008, 10000.0
LINEAR_ROWS, LINEAR_COLUMNS = 1024, 4096
DEQUANTIZED_SHAPE = (256, 4096)
VOCABULARY = 49152
F = 4  # bytes of a float32
RANDOM_PERIOD = 65521  # a prime: random values repeat after so many, as drawing millions takes longer than measuring
WEIGHT_TYPES = [kind for kind in BLOCK_TYPES.values() if kind.name not in ("F64", "I8", "I16", "I32", "I64")]
# The block of the default model: (d_model, n_heads, n_kv_heads, head_dim), and (rows, columns) of its Q4_1 matrices
DEFAULT_MODEL_SHAPE = (576, 9, 3, 64)
BLOCK_SHAPES = ((960, 576), (576, 576), (2 * 1536, 576), (576, 1536))  # qkv, output, gate and up, down
BLOCK_BYTES = sum(rows * BLOCK_TYPES["Q4_1"].row_bytes(columns) for rows, columns in BLOCK_SHAPES)
DEFAULT_MODEL_LAYERS = 30
ENCODED_CHARACTERS = 4096

KERNEL = "kernel/"
KERNEL_SHAPE = (11008, 4096)  # gate or up of Llama-2-7B: larger than most caches
# One block type for each layout that common files have; Q4_K is packed as Q4_1.
KERNEL_TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL")
KERNEL_TOKENS = (1, 2, 4, 8, 16, 128)
FLOAT_KERNEL_TOKENS = (1, 16)
# (heads, KV heads, head_dim) of the default model and of Llama-2-7B -> (tokens, context) of attention
KERNEL_CONTEXTS = {
    (9, 3, 64): ((1, 4096), (1, 8192), (128, 128), (512, 512), (512, 4096)),
    (32, 32, 128): ((1, 4096), (128, 128), (512, 512), (128, 4096)),
}
KERNEL_KV_BYTES = 2  # float16

MIN_PROMPT, MAX_PROMPT = 200, 400  # tokens of a request of the scheduler's benchmarks
RESTART_CONTEXT = 4096  # tokens after which all requests start again: so far apart that it does not count
BLOCK_SIZE, TOKEN_BUDGET = 16, 512


@dataclass(frozen=True, slots=True)
class TimingPlan:
    """How long to measure each function: about `seconds`, within the bounds on samples."""

    seconds: float = 1.0
    min_samples: int = 10
    max_samples: int = 100
    warm_up_s: float = 0.2


@dataclass(slots=True)
class Measurement:
    """The samples of one function: seconds per call, over enough calls to exceed the clock's resolution."""

    iterations: int
    samples: list[float] = field(default_factory=list)


def measure(
    functions: Sequence[Function], plan: TimingPlan, on_progress: Callable[[float], None] | None = None
) -> list[Measurement]:
    """Sample the functions in turn, so that all meet the same noise; the order is reversed every other round.

    Garbage collection is off while samples are taken. `on_progress` gets the fraction done.
    """
    taken = [Measurement(calibrate(function, plan)) for function in functions]
    budget, start = plan.seconds * len(functions), time.perf_counter()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        while True:
            pairs = list(zip(functions, taken, strict=True))
            count = len(taken[0].samples)
            for function, one in reversed(pairs) if count % 2 else pairs:
                one.samples.append(seconds_per_call(function, one.iterations))
            spent = time.perf_counter() - start
            if on_progress is not None:
                on_progress(min(1.0, max(spent / budget if budget else 1.0, count / plan.max_samples)))
            if count + 1 >= plan.max_samples or (spent >= budget and count + 1 >= plan.min_samples):
                return taken
    finally:
        if was_enabled:
            gc.enable()


def seconds_per_call(function: Function, iterations: int) -> float:
    """Return the mean over so many calls."""
    clock = time.perf_counter
    start = clock()
    for _ in range(iterations):
        function()
    return (clock() - start) / iterations


def calibrate(function: Function, plan: TimingPlan) -> int:
    """Warm up, and return the calls per sample that make it long enough; all samples together should fill the time."""
    iterations, start = 1, time.perf_counter()
    while True:
        took = seconds_per_call(function, iterations) * iterations
        if time.perf_counter() - start >= plan.warm_up_s and took >= MIN_SAMPLE_S / 10:
            break
        if took < MIN_SAMPLE_S:
            iterations *= 2
    return max(1, round(iterations * max(MIN_SAMPLE_S, plan.seconds / plan.max_samples) / took))


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark: `make(ops)` builds the data and returns the function to time."""

    name: str
    make: Callable[[Any], Function]
    work: Work
    needs: str | None = None  # a function beyond the op table, which the reference backend has
    backend: str | None = None  # the only one that can run it

    def select_ops(self, ops: Any) -> Any:
        """Return the backend that can run this: the given one, or the reference."""
        return ops if self.needs is None or hasattr(ops, self.needs) else ReferenceBackend()


def op_cases() -> Iterator[Case]:
    """Yield the benchmarks of ops, in the order in which they run."""
    short, ends, qkv = (1, 8, 32, 128), (1, 128), 3 * HIDDEN * HIDDEN

    def full_attention(n: int) -> Work:
        return Work(F * HIDDEN * 4 * n, 2 * n * (n + 1) * HIDDEN)  # causality leaves half of the query-key pairs

    def attention_scores(n: int) -> Work:
        return Work(F * (2 * n * HIDDEN + HEADS * n * n), 2 * HEADS * n * n * HEAD_DIM)

    def attention_decode(n: int) -> Work:
        return Work(F * HIDDEN * 2 * (1 + n), 4 * n * HIDDEN)

    yield from _family("rope_forward", short, _rope, lambda n: Work(2 * F * n * HIDDEN, 3 * n * HIDDEN), "rope")
    yield from _family("qkv_projection", short, _qkv, lambda n: Work(F * (qkv + 4 * n * HIDDEN), 2 * n * qkv))
    yield from _family("attention_scores", short, _scores, attention_scores, "attention_scores")
    yield from _family("causal_mask", (8, 32, 128, 512), _mask, lambda n: Work(2 * F * HEADS * n * n), "causal_mask")
    yield from _family("full_attention", (1, 8, 32), lambda n, ops: _attention(n, n, ops), full_attention)
    yield from _family("attention_decode", (128, 2048), partial(_attention, 1), attention_decode)
    yield from _family("rms_norm", ends, _rms_norm, lambda n: Work(F * HIDDEN * (2 * n + 1), 4 * n * HIDDEN))
    yield from _family("swiglu", ends, _swiglu, lambda n: Work(F * 3 * n * D_FF, 5 * n * D_FF))
    yield from _family("kv_cache_write", ends, _kv_write, lambda n: Work(4 * F * n * HIDDEN), "store")
    yield from _family("kv_cache_read", (128, 2048), _kv_read, lambda n: Work(4 * F * n * HIDDEN), "gather")
    yield from _family("block", (1, 32, 128), _block, _block_work)
    for method, row in SAMPLE_ROWS.items():
        yield Case(f"sampling/{method}", partial(_sampling, row), Work(F * VOCABULARY, VOCABULARY))
    for kind in WEIGHT_TYPES:
        yield from _family(f"linear/{kind.name}", ends, partial(_linear, kind), partial(_linear_work, kind))
    for kind in WEIGHT_TYPES:
        yield _dequantize(kind)


def _family(
    name: str, lengths: Sequence[int], make: Callable[[int, Any], Function], work: Callable[[int], Work],
    needs: str | None = None,
) -> Iterator[Case]:  # fmt: skip
    return (Case(f"{name}/{n}", partial(make, n), work(n), needs) for n in lengths)


def _random(ops: Any, *shape: int) -> Any:
    drawn = np.random.default_rng(7).standard_normal(RANDOM_PERIOD, np.float32)
    return ops.prepare_vector(np.resize(drawn, shape))


def rope_table(head_dim: int = HEAD_DIM) -> RopeTable:
    """Return RoPE without scaling."""
    return RopeTable(inverse_frequencies(ROPE_BASE, head_dim), 1.0)


def _positions(count: int, start: int = 0) -> NDArray[np.int64]:
    return np.arange(start, start + count, dtype=np.int64)


def consecutive_batch(tokens: int, context: int, block_size: int = 16) -> Batch:
    """Return the last `tokens` tokens of one request with `context` tokens, in consecutive blocks."""
    positions = _positions(tokens, context - tokens)
    blocks = -(-context // block_size)
    return Batch(
        ids=positions, positions=positions, slot_mapping=positions, query_start=np.array([0, tokens]),
        context_len=np.array([context]), block_table=_positions(blocks)[None, :], logits_index=np.array([tokens - 1]),
    )  # fmt: skip


def _filled_kv(ops: Any, context: int, kv_heads: int, head_dim: int, kind: str = "float32") -> KVLayer:
    kv: KVLayer = ops.empty_kv(-(-context // 16), 16, kv_heads, head_dim, kind)
    keys, values = _random(ops, 2, context, kv_heads, head_dim)
    ops.rope_store(keys, keys, values, _positions(context), rope_table(head_dim), kv, _positions(context))
    return kv


def _rope(tokens: int, ops: Any) -> Function:
    return partial(ops.rope, _random(ops, tokens, HEADS, HEAD_DIM), _positions(tokens), rope_table())


def _qkv(tokens: int, ops: Any) -> Function:
    parts = [random_tensor(BLOCK_TYPES["F32"], (HIDDEN, HIDDEN), seed) for seed in range(3)]
    return partial(ops.linear, _random(ops, tokens, HIDDEN), ops.prepare(parts))


def _scores(tokens: int, ops: Any) -> Function:
    return partial(ops.attention_scores, *_random(ops, 2, HEADS, tokens, HEAD_DIM), AttentionParams(HEAD_DIM**-0.5))


def _mask(tokens: int, ops: Any) -> Function:
    scores, positions = _random(ops, 1, HEADS, tokens, tokens), _positions(tokens)
    return lambda: np.where(ops.causal_mask(positions, positions), scores, np.float32(-np.inf))


def _attention(tokens: int, context: int, ops: Any) -> Function:
    q, kv = _random(ops, tokens, HEADS, HEAD_DIM), _filled_kv(ops, context, HEADS, HEAD_DIM)
    return partial(ops.attention, q, kv, consecutive_batch(tokens, context), AttentionParams(HEAD_DIM**-0.5))


def _rms_norm(tokens: int, ops: Any) -> Function:
    return partial(ops.rms_norm, _random(ops, tokens, HIDDEN), _random(ops, HIDDEN), 1e-5)


def _swiglu(tokens: int, ops: Any) -> Function:
    return partial(ops.gated, _random(ops, tokens, 2 * D_FF), "silu")


def _kv_write(tokens: int, ops: Any) -> Function:
    kv, (k, v) = ops.empty_kv(128, 16, HEADS, HEAD_DIM), _random(ops, 2, tokens, HEADS, HEAD_DIM)
    return partial(ops.store, k, v, kv, np.random.default_rng(3).permutation(128 * 16)[:tokens])


def _kv_read(context: int, ops: Any) -> Function:
    kv = _filled_kv(ops, context, HEADS, HEAD_DIM)
    table = np.random.default_rng(3).permutation(context // 16)
    return lambda: [np.ascontiguousarray(ops.gather(half, table, context)) for half in kv]


def _block(tokens: int, ops: Any) -> Function:
    width, heads, kv_heads, head_dim = DEFAULT_MODEL_SHAPE
    kind, params = BLOCK_TYPES["Q4_1"], AttentionParams(head_dim**-0.5)
    qkv, output, gate_up, down = (Linear(ops.prepare([random_tensor(kind, s)])) for s in BLOCK_SHAPES)
    norm = RMSNorm(ops.prepare_vector(np.ones(width, np.float32)), 1e-5)
    attention = Attention(qkv, output, heads, kv_heads, head_dim, rope_table(head_dim), params)
    block = Block(norm, attention, norm, SwiGLU(gate_up, down))
    kv, x = ops.empty_kv(-(-tokens // 16), 16, kv_heads, head_dim), _random(ops, tokens, width)
    return partial(block, ops, x, x, kv, consecutive_batch(tokens, tokens))


def _block_work(tokens: int) -> Work:
    operations = 2 * tokens * sum(rows * columns for rows, columns in BLOCK_SHAPES)
    return Work(BLOCK_BYTES + 4 * F * tokens * DEFAULT_MODEL_SHAPE[0], operations)


SAMPLE_ROWS = {
    "greedy": SampleRow(temperature=0.0),
    "temperature": SampleRow(temperature=0.8, seed=1),
    "top_k": SampleRow(temperature=0.8, top_k=40, seed=1),
    "top_p": SampleRow(temperature=0.8, top_p=0.95, seed=1),
    "penalties": SampleRow(temperature=0.8, repetition_penalty=1.1, penalty_window=np.arange(128), seed=1),
}


def _sampling(row: SampleRow, ops: Any) -> Function:
    return partial(ops.sample, 3 * _random(ops, 1, VOCABULARY), [row])


def _linear(kind: BlockType, tokens: int, ops: Any) -> Function:
    weight = ops.prepare([random_tensor(kind, (LINEAR_ROWS, LINEAR_COLUMNS))])
    return partial(ops.linear, _random(ops, tokens, LINEAR_COLUMNS), weight)


def _linear_work(kind: BlockType, tokens: int) -> Work:
    moved = LINEAR_ROWS * kind.row_bytes(LINEAR_COLUMNS) + F * tokens * (LINEAR_ROWS + LINEAR_COLUMNS)
    return Work(moved, 2 * tokens * LINEAR_ROWS * LINEAR_COLUMNS)


def _dequantize(kind: BlockType) -> Case:
    def make(_: Any) -> Function:
        tensor: Tensor = random_tensor(kind, DEQUANTIZED_SHAPE)
        return tensor.dequantize if kind.name != "F32" else tensor.dequantize().copy

    rows, columns = DEQUANTIZED_SHAPE
    work = Work(rows * kind.row_bytes(columns) + F * rows * columns, rows * columns)
    return Case(f"dequantize/{kind.name}", make, work, needs="dequantize")


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
            max_context=RESTART_CONTEXT, n_blocks=blocks, block_size=BLOCK_SIZE, max_batch=requests,
            max_step_tokens=TOKEN_BUDGET,
        )  # fmt: skip
        self.restart()

    def restart(self) -> None:
        """Give each request a prompt of its own, and prefill it."""
        rng, config = random.Random(7), self._config
        self.scheduler = Scheduler(config)
        no_model, cache = cast(Any, None), cast(Any, SimpleNamespace(block_size=BLOCK_SIZE))
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


def kernel_cases() -> Iterator[Case]:
    """Yield the benchmarks of the CPU's kernels, in the order in which they run."""
    for name, lengths in (*((name, KERNEL_TOKENS) for name in KERNEL_TYPES), ("F16", FLOAT_KERNEL_TOKENS)):
        for n in lengths:
            yield _kernel(f"matmul/{name}/{n}", partial(_matmul, name, False, n), _matmul_work(name, n))
    for name in ("Q6_K", "Q8_0"):  # the output head, whose activations have two terms
        yield _kernel(f"matmul_two_term/{name}/1", partial(_matmul, name, True, 1), _matmul_work(name, 1, terms=2))
    for heads, contexts in KERNEL_CONTEXTS.items():
        for tokens, context in contexts:
            name = f"attention/{heads[0]}x{heads[2]}/{tokens}@{context}"
            yield _kernel(name, partial(_paged_attention, heads, tokens, context), _paged_work(heads, tokens, context))
    for n in (1, 128):
        work = Work((F + 1) * n * KERNEL_SHAPE[1])  # floats to bytes
        yield _kernel(f"quantize/{n}", partial(_quantize, n), work)


def _kernel(name: str, make: Callable[[Any], Function], work: Work) -> Case:
    return Case(KERNEL + name, make, work, backend="cpu")


@cache
def _kernel_weight(ops: Any, kind: str) -> Any:
    return ops.prepare([random_tensor(BLOCK_TYPES[kind], KERNEL_SHAPE)])


def _matmul(kind: str, two_term: bool, tokens: int, ops: Any) -> Function:
    weight = _kernel_weight(ops, kind)
    return product_program([weight.two_term() if two_term else weight], tokens, ops.threads)


def _matmul_work(kind: str, tokens: int, terms: int = 1) -> Work:
    rows, columns = KERNEL_SHAPE
    moved = rows * BLOCK_TYPES[kind].row_bytes(columns) + F * tokens * (rows + columns)
    return Work(moved, 2 * terms * tokens * rows * columns)


def _quantize(tokens: int, ops: Any) -> Function:
    return quantize_program(KERNEL_SHAPE[1], tokens, ops.threads)


@cache
def _kernel_kv(ops: Any, context: int, kv_heads: int, head_dim: int) -> KVLayer:
    return _filled_kv(ops, context, kv_heads, head_dim, resolve_kv_type(ops))


def _paged_attention(heads: tuple[int, int, int], tokens: int, context: int, ops: Any) -> Function:
    n_heads, kv_heads, head_dim = heads
    q, kv = _random(ops, tokens, n_heads, head_dim), _kernel_kv(ops, context, kv_heads, head_dim)
    return partial(ops.attention, q, kv, consecutive_batch(tokens, context), AttentionParams(head_dim**-0.5))


def _paged_work(heads: tuple[int, int, int], tokens: int, context: int) -> Work:
    n_heads, kv_heads, head_dim = heads
    pairs = tokens * context - tokens * (tokens - 1) // 2  # a query sees the keys up to its own
    moved = 2 * KERNEL_KV_BYTES * context * kv_heads * head_dim + 2 * F * tokens * n_heads * head_dim
    return Work(moved, 4 * pairs * n_heads * head_dim)


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
    work = Work(size + F * rows * moved, 2 * rows * values)
    return Case(f"products/{rows}", lambda ops: matmul_ceiling(_model(ops), rows), work)


@lru_cache(maxsize=2)
def _model(ops: Any) -> Transformer:
    checkpoint = open_checkpoint(locate_model(None))
    return load_model(checkpoint, ops, read_model_config(checkpoint))


def select(pattern: str | None) -> list[Case]:
    """Return the cases whose name matches the regular expression; raise if there is none."""
    try:
        expression = re.compile(pattern or "")
    except re.error as error:
        raise InvalidRequestError(f"--filter {pattern!r} is not a regular expression: {error}", "filter") from None
    all_cases = [*op_cases(), *scheduler_cases(), *model_file_cases(), *kernel_cases()]
    found = [case for case in all_cases if expression.search(case.name)]
    if not found:
        families = ", ".join(sorted({case.name.split("/")[0] for case in all_cases}))
        raise InvalidRequestError(f"--filter {pattern!r} matches no benchmark (there are {families})", "filter")
    return found


def run(
    recorder: Recorder, progress: StepProgress, selected: Sequence[Case], backends: Sequence[str], plan: TimingPlan,
    threads: int | None = None, rounds: int = ROUNDS, isa: str | None = None,
) -> None:  # fmt: skip
    """Measure each case on each backend, in several rounds over all cases; in a round the backends take turns.

    `isa` is the instruction set that was forced: results of the CPU's kernels are named by it.
    """
    tables = [select_backend("auto", name, None if name == "reference" else threads) for name in backends]
    selected = [case for case in selected if _can_run(case, tables, recorder)]
    total = rounds * len(selected)
    progress("measuring the machine's limits", 0, total)
    limits = measure_limits(max(map(backend_threads, tables)))
    recorder.details["limits"] = limits.as_json()
    taken: dict[str, list[list[Measurement]]] = {case.name: [] for case in selected}  # rounds, then backends
    for index, case in enumerate([*selected] * rounds):

        def on_progress(part: float, index: int = index, name: str = case.name) -> None:
            progress(name, index + part, total)

        on_progress(0.0)
        used = [case.select_ops(ops) for ops in tables]
        try:
            functions = [case.make(ops) for ops in used]
        except DownloadError as error:
            recorder.details.setdefault("left_out", {})[case.name] = str(error)
            continue
        taken[case.name].append(measure(functions, plan, on_progress))
        kept = quietest_rounds(taken[case.name])
        for name, measured in zip(_backend_labels(used, isa), zip(*taken[case.name], strict=True), strict=True):
            recorder.add_result(make_result(case, name, measured, kept, limits))


def _can_run(case: Case, tables: Sequence[Any], recorder: Recorder) -> bool:
    """Return whether all backends can run a case; one that they cannot is left out with the reason."""
    if case.backend is None or all(ops.name == case.backend for ops in tables):
        return True
    recorder.details.setdefault("left_out", {})[case.name] = f"only the backend {case.backend} has it"
    return False


def round_plan(seconds: float, rounds: int = ROUNDS) -> TimingPlan:
    """Return the plan of one round, so that all rounds of a case together take so long."""
    return TimingPlan(seconds=seconds / rounds, min_samples=2, max_samples=25, warm_up_s=min(0.02, seconds / 5))


def quietest_rounds(rounds: Sequence[Sequence[Measurement]]) -> list[int]:
    """Return the half of the rounds in which all backends together took least: the least disturbed."""
    spent = [sum(statistics.estimate(side.samples).value for side in sides) for sides in rounds]
    return sorted(sorted(range(len(rounds)), key=spent.__getitem__)[: -(-len(rounds) // 2)])


def _backend_labels(used: Sequence[Any], isa: str | None) -> list[str]:
    """Return the names of backends, `cpu:avx2` where the instruction set was forced.

    A backend that is measured against itself, as a test of the noise, is numbered.
    """
    names = [f"{ops.name}:{isa}" if isa and ops.name == "cpu" else str(ops.name) for ops in used]
    return names if len(set(names)) == len(names) else [f"{name}#{i + 1}" for i, name in enumerate(names)]


def make_result(case: Case, backend: str, rounds: Sequence[Measurement], kept: Sequence[int], limits: Limits) -> Result:
    """Return the samples of the rounds that are kept, with their statistics and the limit."""
    samples, work = [sample for i in kept for sample in rounds[i].samples], case.work
    limit_s = limits.min_seconds(work)
    set_aside = [sample for i, one in enumerate(rounds) if i not in kept for sample in one.samples]
    return Result.from_samples(
        case.name, "s", samples, backend=backend, iterations=rounds[0].iterations,
        rounds=[len(rounds[i].samples) for i in kept], set_aside=round_samples(set_aside),
        mean=fmean(samples), median=median(samples), sd=pstdev(samples),
        outliers=statistics.outliers(samples)._asdict(), bytes=work.bytes, operations=work.operations,
        limit_s=limit_s, bound_by=limits.bound_by(work),
        percent_of_limit=100 * limit_s / statistics.estimate(samples).value,
    )  # fmt: skip


def compare_backends(results: Sequence[Result]) -> list[Comparison]:
    """Compare the second backend with the first where a benchmark ran on two."""
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    pairs = [both for both in by_name.values() if len(both) == 2]
    return [Comparison(first, second, compare_results(first, second, paired=True)) for first, second in pairs]
