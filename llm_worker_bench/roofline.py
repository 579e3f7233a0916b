"""The measured peak rates of this machine: bytes read per second for several sizes, operations per second of each
arithmetic that the kernels have (float32 FMA, int8 dot products; on a GPU the tensor cores).

A benchmark states the bytes and operations that its answer needs; the larger of the two times is its limit, and `% of
limit` is that over the measured time. Small data is in a cache, so bandwidth is taken at the size at hand. Rates are
measured with the kernels' own instructions and nothing else to do (backends/cpu_peak.py), so no kernel exceeds them.
`matmul_ceiling` is a limit by measurement: all matrix products of a model for a number of rows, and nothing else.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee import machine
from llm_worker_rbee.backends import Backend
from llm_worker_rbee.backends.ops import RouteParams
from llm_worker_rbee.errors import MissingDependencyError
from llm_worker_rbee.models import Transformer

from .backends import measure_device

with suppress(ImportError):  # before the kernels: then loops and parts are compiled where a library lacks them (jit.py)
    importlib.import_module("numba")

SIZES = tuple(1 << shift for shift in (15, 16, 17, 18, 20, 22, 24, 26, 28, 30))  # 32 KiB to 1 GiB
SECONDS_PER_RATE = 0.05
MIN_READ_BYTES = 1 << 27  # of a thread, so that starting it does not count
MIN_COPY_BYTES = 1 << 24  # from which a copy is measured too: it is one call
ROUNDS = 4_000_000  # of an arithmetic loop: some 10 ms
ACTIVATION_SEED = 5
MAX_MEMORY_FRACTION = 8  # the largest buffer takes at most one part in so many of the free memory


class Work(NamedTuple):
    """The least that one call must do."""

    bytes: float = 0.0  # read and written
    operations: float = 0.0  # multiplications and additions
    resident: float | None = None  # the size of the data touched, where parts of it are read more than once
    arithmetic: str = "float32"  # of the operations: float32, int8, ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured rates, with the number of threads they hold for."""

    threads: int
    bandwidth: tuple[tuple[int, float], ...]  # (size of the data, bytes per second)
    operations: float  # per second, in float32; on a GPU in float16 on tensor cores
    others: tuple[tuple[str, float], ...] = ()  # (arithmetic, operations per second)

    @staticmethod
    def of_device(size: int, bandwidth: float, operations: float, others: Mapping[str, float]) -> Limits:
        """Make the limits of a device without CPU threads."""
        return Limits(0, ((size, bandwidth),), operations, tuple(others.items()))

    def best_of(self, other: Limits) -> Limits:
        """Return the higher of two measurements of each rate: nothing makes a machine faster than it is."""
        both = zip(self.bandwidth, other.bandwidth, strict=True)
        bandwidth = tuple((size, max(rate, again)) for (size, rate), (_, again) in both)
        others = tuple((name, max(rate, other.rate(name))) for name, rate in self.others)
        return Limits(self.threads, bandwidth, max(self.operations, other.operations), others)

    def rate(self, arithmetic: str) -> float:
        """Return operations per second."""
        return dict(self.others).get(arithmetic, self.operations)

    def bandwidth_at(self, size: float) -> float:
        """Return bytes per second for data of this size, interpolated over the logarithm of sizes."""
        sizes, rates = zip(*self.bandwidth, strict=True)
        return float(np.interp(np.log2(max(size, 1.0)), np.log2(sizes), rates))

    @property
    def memory_bandwidth(self) -> float:
        """Bandwidth at the largest size, which no cache holds."""
        return self.bandwidth[-1][1]

    def times(self, work: Work) -> tuple[float, float]:
        """Return the seconds that its bytes take, and its operations."""
        size = work.bytes if work.resident is None else work.resident
        return work.bytes / self.bandwidth_at(size), work.operations / self.rate(work.arithmetic)

    def min_seconds(self, work: Work) -> float:
        return max(self.times(work))

    def bound_by(self, work: Work) -> str:
        memory_s, arithmetic_s = self.times(work)
        return "memory" if memory_s >= arithmetic_s else "arithmetic"

    def as_json(self) -> dict[str, Any]:
        """Return the object for `details` of a run."""
        return {
            "threads": self.threads,
            "bandwidth": [{"bytes": size, "bytes_per_second": rate} for size, rate in self.bandwidth],
            "operations_per_second": self.operations,
            "other_operations_per_second": dict(self.others),
        }


def backend_threads(ops: Backend) -> int:
    """Return how many threads a backend computes with: its own, or the matrix library's."""
    return ops.threads or library_threads()


def library_threads() -> int:
    """Return the threads of the matrix library: from the environment, or all cores."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").isdigit():
            return max(1, int(os.environ[name]))
    return machine.usable_cores()


def product_arithmetic(weight: Any) -> str:
    """Return the arithmetic of the product with a packed weight, as its backend computes it."""
    if getattr(weight, "needs_int8", False):
        return "int8"
    if hasattr(weight, "is_fp8"):  # a GPU's: dequantized for its tensor cores
        return "fp8" if weight.is_fp8 else "float16"
    return "float32"


def backend_limits(ops: Backend) -> Limits:
    """Measure the limits of a backend's device or threads."""
    measured = measure_device(ops)
    return _measure_limits(backend_threads(ops)) if measured is None else Limits.of_device(*measured)


@cache
def measure_limits(threads: int) -> Limits:
    """Return the limits for so many threads; the first call takes about two seconds."""
    return _measure_limits(threads)


def _measure_limits(threads: int) -> Limits:
    peak = _import_peak()
    available = machine.memory()[1] or SIZES[-1] * MAX_MEMORY_FRACTION
    buffer = np.ones(min(SIZES[-1], available // MAX_MEMORY_FRACTION), np.uint8)
    operands = [peak.operands() for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        sizes = [size for size in SIZES if size <= buffer.nbytes]
        read = [_read_rate(pool, peak, buffer[:size], threads) for size in reversed(sizes)]
        # what fits into a smaller cache is never read slower; a thread's part may be too short to show it
        bandwidth = tuple(zip(sizes, np.maximum.accumulate(read)[::-1].tolist(), strict=True))
        rates = {
            name: threads
            * loop.operations
            * ROUNDS
            / _min_seconds(pool, [partial(loop.run, operand.ctypes.data, ROUNDS) for operand in operands])
            for name, loop in peak.peaks().items()
        }
    return Limits(threads, bandwidth, rates.pop("float32"), tuple(rates.items()))


def _import_peak() -> Any:
    """Return the module of loops at the peak rate, which are compiled when they are used."""
    try:
        return importlib.import_module(f"{__package__}.backends.cpu_peak")
    except ModuleNotFoundError:
        raise MissingDependencyError(
            "measuring the limits of a processor needs Numba: pip install 'llm-worker-rbee[bench]'"
        ) from None


def _read_rate(pool: ThreadPoolExecutor, peak: Any, data: NDArray[np.uint8], threads: int) -> float:
    step = 64 * peak.NUM_SUMS
    size = max(step, data.nbytes // threads // step * step)
    repeats = -(-MIN_READ_BYTES // size)
    reads = [partial(peak.read_memory, data.ctypes.data + i * size, size, repeats) for i in range(threads)]
    read = float(threads * size * repeats) / _min_seconds(pool, reads)
    return read if data.nbytes < MIN_COPY_BYTES else max(read, _copy_rate(pool, data, threads))


def _copy_rate(pool: ThreadPoolExecutor, data: NDArray[np.uint8], threads: int) -> float:
    """Return bytes read and written per second: some machines read and write at once faster than they read."""
    half = data.nbytes // 2
    parts = zip(np.array_split(data[half : 2 * half], threads), np.array_split(data[:half], threads), strict=True)
    return 2 * half / _min_seconds(pool, [partial(np.copyto, *both) for both in parts])


def _min_seconds(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], object]]) -> float:
    """Return the shortest time of all calls at once, of many rounds: the one that nothing disturbed."""
    best, end = float("inf"), time.perf_counter() + SECONDS_PER_RATE
    for count in range(1000):
        start = time.perf_counter()
        if len(calls) == 1:
            calls[0]()
        else:
            list(pool.map(lambda call: call(), calls))
        if count:  # the first round compiles and touches memory
            best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end and count >= 3:
            break
    return best


def matmul_ceiling(model: Transformer, rows: int) -> Callable[[], object]:
    """Return a function that multiplies `rows` random activations with every matrix of the model once.

    On the CPU the products are one program, with the activation quantization they need, as in a step.
    """
    one_program = model.ops.name == "cpu" and model.config.experts is None
    return _program(model, rows) if one_program else _one_by_one(model, rows)


def _one_by_one(model: Transformer, rows: int) -> Callable[[], object]:
    ops, weights = model.ops, model.matrices()
    experts, settings = model.experts(), model.config.experts
    inputs = {w.columns: ops.prepare_vector(_random(rows, w.columns)) for w in [*weights, *experts]}
    if settings is not None:
        chosen, _ = ops.route(ops.prepare_vector(_random(rows, settings.count)), RouteParams(settings.used))

    def multiply() -> object:
        for w in experts:
            ops.grouped_linear(inputs[w.columns], w, chosen)
        for w in weights[:-1]:
            ops.linear(inputs[w.columns], w)
        return ops.logits(inputs[model.head.columns], model.head)

    return multiply


def _program(model: Transformer, rows: int) -> Callable[[], object]:
    *layers, head = model.matrices()
    return product_program([*layers, head.two_term()], rows, model.ops.threads or 1)


def product_program(weights: Sequence[Any], rows: int, threads: int) -> Callable[[], object]:
    """Return a function that multiplies random activations with packed weights of the CPU, one after the other.

    The step table points at one input and one output, large enough for all. The caller keeps the weights alive.
    """
    from llm_worker_rbee.backends.cpu import linear  # these modules need Numba
    from llm_worker_rbee.backends.cpu.kernels import elementwise, quantize_activations
    from llm_worker_rbee.backends.cpu.kernels.program import Step

    widest = max(w.columns for w in weights)
    out = np.empty((rows, max(w.rows for w in weights)), np.float32)
    arrays = _random(rows, widest), out, *quantize_activations.allocate(rows, widest)
    source, target, activations = range(Step.END, Step.END + 3)
    tasks: list[Any] = []
    for w in weights:
        if w.needs_int8:
            two_term = any(w.residual_activations)
            tasks.append(elementwise.quantize_task(Step.TOKENS, source, activations, w.columns, two_term=two_term))
        tasks += linear.linear_tasks(w, Step.TOKENS, source, activations, target, threads)
    return _run_tasks(tasks, arrays, rows, threads)


def quantize_program(columns: int, rows: int, threads: int) -> Callable[[], object]:
    """Return a function that quantizes random activations, as the CPU does before a matrix product."""
    from llm_worker_rbee.backends.cpu.kernels import elementwise, quantize_activations  # they need Numba
    from llm_worker_rbee.backends.cpu.kernels.program import Step

    unused = np.empty(1, np.float32)  # entries of a step, as in `product_program`
    arrays = _random(rows, columns), unused, *quantize_activations.allocate(rows, columns)
    task = elementwise.quantize_task(Step.TOKENS, Step.END, Step.END + 2, columns, two_term=False)
    return _run_tasks([task], arrays, rows, threads)


def _run_tasks(tasks: list[Any], arrays: Sequence[NDArray[Any]], rows: int, threads: int) -> Callable[[], object]:
    """Return a function that runs the tasks on these arrays, the entries of the step table behind its own."""
    from llm_worker_rbee.backends.cpu.kernels.program import Step  # it needs Numba
    from llm_worker_rbee.backends.cpu.program import Program, new_step

    program, step = Program(tasks), new_step(Step.END + len(arrays))
    step[Step.TOKENS] = rows
    step[Step.END :] = [array.ctypes.data for array in arrays]

    def run() -> object:
        program.run(step, threads)
        return arrays[1]

    return run


def _random(rows: int, width: int) -> NDArray[np.float32]:
    return np.random.default_rng(ACTIVATION_SEED).standard_normal((rows, width), np.float32)
