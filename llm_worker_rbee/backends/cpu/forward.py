"""The fused forward pass: a model's graph as one program per step.

Every thread walks through all layers inside one parallel region; lowering.py makes its tasks.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import isqrt, log2
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import InferenceError
from .. import reference
from ..graph import Graph, Node, ProgramLine, Value, op_names
from ..ops import (
    ARRAYS,
    LOGITS,
    REQUESTS,
    SHAPES,
    TOKENS,
    Array,
    Batch,
    Ints,
    LayerCache,
    Profiler,
    SampleRow,
    StateLayer,
    TaskLabel,
    first_kv,
)
from .kernels import lora
from .kernels.experts import GroupEntry
from .kernels.kv_layout import kv_type_of, layer_addresses
from .kernels.pointers import aligned
from .kernels.program import Step, Table, Task
from .kernels.quantize_activations import pad_to_panels
from .lowering import EXPERTS, HostCall, Lowering, fuse
from .program import Program, new_step, run_step
from .sampling import SAMPLE, RowTables

Floats = NDArray[np.float32]
Part = tuple[tuple[TaskLabel, ...], Program | HostCall]
# Bytes of weights and keys that a thread reads while (0.12 us) one more thread delays the end of a task.
BYTES_PER_EXTRA_THREAD = 1200
MIN_USEFUL_THREADS = 2
UNSHARED = 2  # references to an object that sys.getrefcount counts where there is one: it has another itself
WEIGHT_NAMES = {"linear": "w", "grouped_linear": "w", "logits": "head"}  # arguments of ops


def useful_threads(work_bytes: int, num_tasks: int) -> int:
    """Return the fastest number of threads for a step of so many bytes: a power of two, at least MIN_USEFUL_THREADS.

    A task of n bytes on p threads takes as long as n / p + p * BYTES_PER_EXTRA_THREAD bytes on one: least at the square
    root of the quotient.
    """
    best = isqrt(work_bytes // (max(1, num_tasks) * BYTES_PER_EXTRA_THREAD))
    return max(MIN_USEFUL_THREADS, 1 << round(log2(max(1, best))))


def _weight_bytes(graph: Graph) -> int:
    """Return the bytes of the matrices that one token is multiplied by."""
    size = 0
    for node in graph.nodes:
        if node.op in WEIGHT_NAMES:
            packed = sum(part.packed.nbytes for part in node[WEIGHT_NAMES[node.op]].parts)
            size += packed * node["experts"].shape[1] // node["w"].count if node.op == "grouped_linear" else packed
    return size


_instances: weakref.WeakSet[CpuForward] = weakref.WeakSet()


def _after_fork() -> None:
    """In the child, replace locks: a thread of the parent may have held one."""
    for forward in list(_instances):
        forward._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def run_alone(op: str, args: dict[str, Any], threads: int) -> Any:
    """Compute one op by the tasks of a step, or as the reference does if it has none."""
    values = {name: Value((TOKENS, *args[name].shape[1:])) for name in ARRAYS[op] if args[name] is not None}
    symbols = {name: 0 if isinstance(arg, StateLayer) else arg for name, arg in args.items()} | values  # 0: its layer
    outputs = tuple(Value(shape) for shape in SHAPES[op](**symbols))
    graph = Graph((Node(op, symbols, outputs),), outputs[0], (*outputs, None)[1])
    lowering = Lowering(fuse(graph), "float32", threads, values.values())
    (part,) = lowering.parts
    if isinstance(part.work, HostCall):
        return getattr(reference, op)(**args)
    arrays: dict[int, Any] = {}
    sizes: dict[Any, int] = {TOKENS: len(args[ARRAYS[op][0]])}
    for arg in args.values():
        if isinstance(arg, Batch):
            sizes[REQUESTS] = len(arg.query_start) - 1
            arrays |= {Step.QUERY_START: arg.query_start, Step.STATE_IN: arg.state_in, Step.STATE_OUT: arg.state_out}
        elif isinstance(arg, StateLayer):
            arrays[Step.KV] = layer_addresses([arg])
    arrays |= dict(enumerate((np.array(args[name], np.float32) for name in values), Step.END))  # tasks may change them
    for value in outputs:
        shape = sizes[value.shape[0]], *cast(tuple[int, ...], value.shape[1:])
        arrays.setdefault(lowering.entries[value], np.empty(shape, np.float32))
    counts: dict[int, int] = {Step.TOKENS: sizes[TOKENS], Step.REQUESTS: sizes.get(REQUESTS, 0)}
    run_step(Program(part.work), arrays, counts, threads)
    results = tuple(arrays[lowering.entries[value]] for value in outputs)
    return results if len(results) > 1 else results[0]


def adapter_entries(places: Mapping[Any, int], batch: Batch) -> tuple[dict[int, int], list[NDArray[Any]]]:
    """Return the entries of a step about adapters, and the arrays that they point at."""
    entries, arrays = dict[int, int](), list[NDArray[Any]]()
    for kind, first in places.items():
        slots, scales = batch.adapters, batch.adapter_scales
        if kind == LOGITS:
            slots, scales = slots[batch.logits_index], scales[batch.logits_index]
        own: list[NDArray[Any]] = [np.ascontiguousarray(slots, np.int64), np.ascontiguousarray(scales, np.float32)]
        if kind != EXPERTS:
            own = lora.group_by_adapter(own[0], own[1])
            entries[first + lora.LoraEntry.NUM_UNITS] = len(own[lora.LoraEntry.UNITS])
        entries |= {first + i: array.ctypes.data for i, array in enumerate(own)}
        arrays += own
    return entries, arrays


def run_adapters(op: str, args: dict[str, Any], threads: int) -> Floats:
    """Compute `shrink` or `expand` by its kernels, on rows in the order of the caller."""
    site, chosen, is_shrink = args["site"], args["experts"], op == "shrink"
    dtype = np.int64 if site.op == "embed" and is_shrink else np.float32
    values: NDArray[Any] = np.array(args["x" if is_shrink else "out"], dtype)
    shape = (*(values.shape[:1] if chosen is None else chosen.shape), site.max_rank)
    low: Floats = np.zeros(shape, np.float32) if is_shrink else np.ascontiguousarray(args["low"], np.float32)
    kind: Any
    kind, places, experts = LOGITS if args["index"] is not None else TOKENS, Step.END + 4, tuple[int, ...]()
    step, arrays = new_step(places + len(lora.LoraEntry) + len(GroupEntry)), [values, low]
    if chosen is not None:
        kind, grouping = EXPERTS, places + len(lora.LoraEntry)
        arrays += [np.ascontiguousarray(chosen, np.int64), np.arange(chosen.size)]
        step[grouping], step[grouping + GroupEntry.ROWS] = arrays[3].ctypes.data, chosen.size
        experts = grouping, Step.END + 2, chosen.shape[1], values.ndim == 3
    step[Step.END : Step.END + len(arrays)] = [array.ctypes.data for array in arrays]
    batch = args["batch"] if args["index"] is None else replace(args["batch"], logits_index=args["index"])
    numbers, held = adapter_entries({kind: places}, batch)
    for entry, number in numbers.items():
        step[entry] = number
    scale = args.get("scale", 1.0)
    Program([lora.lora_task(op, site, places, Step.END, Step.END + 1, threads, experts, scale)]).run(step, threads)
    del held  # until here
    return low if is_shrink else values


class CpuForward:
    """The fused forward pass of a model.

    Buffers are kept from step to step and grow with the largest batch; one step runs at a time (a lock). Its logits are
    the caller's own: their memory is used again once no array refers to it. So is what follows from a batch, if the
    caller changes its arrays in place and passes it again.
    """

    graph_bytes = 0

    def __init__(self, graph: Graph, threads: int) -> None:
        self.graph, self.threads = fuse(graph), threads
        embeds = [node for node in graph.nodes if node.op == "embed"]
        self._table_rows: dict[str, int] = {node["ids"].name: node["table"].rows for node in embeds}
        self._output_rows, self._num_logits = graph.output.shape[0], cast(int, graph.output.shape[1])
        self._weight_bytes = _weight_bytes(graph)
        self._soft_cap = np.float32(sum(node["soft_cap"] for node in graph.nodes if node.op == "logits"))
        self._lowered: dict[str, Lowering] = {}  # by KV type
        self._parts: dict[str, list[Part]] = {}  # by KV type
        self._step, self._buffers = new_step(), dict[int, NDArray[Any]]()
        self._step_address = self._step.ctypes.data
        self._entries = self._step.data  # a memory view writes single numbers in half the time
        # the host applies a soft cap to the logits
        self.samples = any(node.op == "logits" for node in graph.nodes) and not self._soft_cap
        self._rows = RowTables(self._num_logits)
        self._batch: Batch | None = None  # that the step points at
        self._inputs: list[Ints] = []  # its arrays
        self._ids: list[tuple[str, int, memoryview]] = []  # of them, those that are rows of a table
        self._logits: Floats = np.empty((0, self._num_logits), np.float32)
        self._counts: list[int] = []  # entries of numbers that tasks write
        self._adapters: dict[int, int] = {}  # entries about adapters, for the batch
        self._adapter_arrays: list[NDArray[Any]] = []  # that they point at
        self._hidden = graph.hidden
        self._held = ("", 0)  # KV type and tokens of the buffers
        self._partials = np.empty(0, np.uint8)  # of attention
        self._partials_at = (("", -1), 0)  # what they are for, KV type and positions, and their address
        self._kv: Table = np.empty(0, np.int64)
        self._keys: Callable[[], Any] = lambda: None  # a weak reference: the first keys stand for the whole cache
        self._first_kv = 0  # the layer that has them
        self._lock = threading.Lock()
        _instances.add(self)

    def __call__(self, batch: Batch, kv: Sequence[LayerCache]) -> Array:
        """Run one step: write the cache, return the logits at `batch.logits_index`: (N, vocabulary)."""
        return self._run(batch, kv)[0]

    def with_hidden(self, batch: Batch, kv: Sequence[LayerCache]) -> tuple[Array, Array]:
        return self._run(batch, kv)[:2]

    def sample(
        self, batch: Batch, kv: Sequence[LayerCache], rows: Sequence[SampleRow], profiler: Profiler | None = None
    ) -> tuple[Array, list[int]]:
        assert self.samples, "its logits are not ready within the program"
        assert len(rows) == len(batch.logits_index), "each row of logits has its settings"
        return self._run(batch, kv, profiler, rows)[::2]

    def run_profiled(self, batch: Batch, kv: Sequence[LayerCache], profiler: Profiler) -> Array:
        """Run the same step with each task timed."""
        return self._run(batch, kv, profiler)[0]

    def program(self, kv_type: str) -> list[ProgramLine]:
        return [ProgramLine(part.component, op_names(part.node), part.runs) for part in self._lower(kv_type).parts]

    def _lower(self, kv_type: str) -> Lowering:
        if kv_type not in self._lowered:
            self._lowered[kv_type] = Lowering(self.graph, kv_type, self.threads)
        return self._lowered[kv_type]

    def _programs(self, kv_type: str) -> list[Part]:
        """Return adjacent tasks as one program, with a label for each; calls of the host stand alone."""
        if kv_type not in self._parts:
            steps: list[Part] = []
            for is_host, group in groupby(self._lower(kv_type).parts, lambda part: isinstance(part.work, HostCall)):
                parts = list(group)
                if is_host:
                    steps += [((), cast(HostCall, part.work)) for part in parts]
                    continue
                tasks = [(part.component, task) for part in parts for task in cast(list[Task], part.work)]
                labels = tuple(TaskLabel(component, task.kernel.name) for component, task in tasks)
                steps.append((labels, Program(task for _, task in tasks)))
            if self.samples:
                labels, head = steps[-1]
                assert isinstance(head, Program), "the head is no call of the host"
                steps[-1] = (*labels, TaskLabel("sampling", SAMPLE.kernel.name)), Program((*head.tasks, SAMPLE))
            self._parts[kv_type] = steps
        return self._parts[kv_type]

    def _run(
        self,
        batch: Batch,
        kv: Sequence[LayerCache],
        profiler: Profiler | None = None,
        sampled: Sequence[SampleRow] = (),
    ) -> tuple[Array, Floats | None, list[int]]:
        """Run one step; return the logits, a copy of the hidden states if the graph has them, and sampled tokens."""
        tokens, n_logits = len(batch.ids), len(batch.logits_index)
        rows = n_logits if self._output_rows == LOGITS else len(batch.context_len)
        with self._lock:
            if batch is not self._batch or self._keys() is not kv[self._first_kv].k:
                self._point_at(batch, kv)
            self._check_ids()
            step, kv_type = self._step, self._held[0]
            parts = self._parts[kv_type]
            logits = self._logits_for(rows)
            for entry in self._counts:
                self._entries[entry] = 0  # not counted in a step without tokens
            for entry, value in self._adapters.items():
                self._entries[entry] = value
            self._rows.set_rows(sampled, self._entries)
            for name, entry in self._lower(kv_type).inputs.items():
                values = getattr(batch, name)
                self._buffers[entry][: values.size] = values.reshape(-1)
            threads = self._threads_for(batch, kv, parts)
            for labels, part in parts:
                if isinstance(part, HostCall):
                    self._run_host(part, tokens, n_logits)  # of a profile, a part of the host's time
                elif batch.should_stop is not None:
                    part.run_unless(batch.should_stop, step, threads, self._step_address)
                elif profiler is None:
                    part.run(step, threads, self._step_address)
                else:
                    profiler(labels, part.run_timed(step, threads, self._step_address))
            token_ids = self._rows.token_ids[: len(sampled)].tolist()
            hidden = None if self._hidden is None else self._hidden_states(self._hidden, tokens, n_logits)
        if self._soft_cap:
            with np.errstate(all="ignore"):
                logits /= self._soft_cap
                np.tanh(logits, out=logits)
                logits *= self._soft_cap
        return logits, hidden, token_ids

    def _point_at(self, batch: Batch, kv: Sequence[LayerCache]) -> None:
        """Let the step point at the arrays of a batch, and at a cache."""
        b, first, tokens, n_logits = batch, first_kv(kv), len(batch.ids), len(batch.logits_index)
        kv_type, block_size, width = kv_type_of(first), first.v.shape[2], b.block_table.shape[1]
        self._batch = None  # until all has succeeded
        if self._keys() is not first.k:
            self._kv, self._keys = layer_addresses(kv), weakref.ref(first.k)
            self._first_kv = [layer is first for layer in kv].index(True)
        self._programs(kv_type)
        step = self._step_for(kv_type, pad_to_panels(max(tokens, n_logits)))
        numbers = b.ids, b.positions, b.slot_mapping, b.query_start, b.block_table, b.logits_index
        arrays = *numbers, b.state_in, b.state_out, b.token_types, b.rope_positions, b.spans, b.image_rows
        self._inputs = [np.ascontiguousarray(array, np.int64) for array in arrays]
        step[: Step.PARTIALS + 1] = [
            tokens,
            n_logits,
            block_size,
            width,
            len(b.context_len),
            self._num_logits,
            *(array.ctypes.data if array.size else 0 for array in self._inputs),
            self._kv.ctypes.data,
            self._logits.ctypes.data,
            self._partials_for(kv_type, width * block_size),
        ]
        self._adapters, self._adapter_arrays = adapter_entries(self._lower(kv_type).adapters, b)
        self._ids = [(name, rows, getattr(batch, name).data) for name, rows in self._table_rows.items()]
        if all(held is array for held, array in zip(self._inputs, arrays, strict=True)):  # changes will be seen
            self._batch = batch

    def _logits_for(self, rows: int) -> Floats:
        """Return memory for logits: the last step's, unless an array still refers to it or it is too large."""
        if sys.getrefcount(self._logits) > UNSHARED or not rows <= len(self._logits) <= 2 * rows:
            self._logits = np.empty((rows, self._num_logits), np.float32)
            self._entries[Step.LOGITS] = self._logits.ctypes.data
        return self._logits[:rows]

    def _check_ids(self) -> None:
        """Raise if a token, or its position or segment, has no row in its table."""
        for name, rows, view in self._ids:
            ids = view.tolist()
            if ids and not 0 <= min(ids) <= max(ids) < rows:
                what = "a token id is outside the vocabulary" if name == "ids" else f"{name} are outside the table"
                raise InferenceError(f"{what} of {rows}")

    def _hidden_states(self, value: Value, tokens: int, n_logits: int) -> Floats:
        """Return a copy of the hidden states of a step that has run."""
        count, width = tokens if value.shape[0] == TOKENS else n_logits, cast(int, value.shape[1])
        entry = self._lower(self._held[0]).hidden_out
        hidden: Floats = self._buffers[entry][: count * width].reshape(count, width).copy()
        return hidden

    def _threads_for(self, batch: Batch, kv: Sequence[LayerCache], parts: Sequence[Part]) -> int:
        """Return the number of threads of a step: small models are not faster with more."""
        if self.threads <= MIN_USEFUL_THREADS:
            return self.threads
        values = first_kv(kv).v
        key_bytes = 2 * len(kv) * values.shape[1] * values.shape[3] * values.itemsize  # of a token, with its value
        # each token after the first takes about a quarter of its time
        work = self._weight_bytes * (3 + len(batch.ids)) // 4 + int(batch.context_len.sum()) * key_bytes
        num_tasks = sum(len(part.tasks) for _, part in parts if isinstance(part, Program))
        return min(self.threads, useful_threads(work, num_tasks))

    def _run_host(self, call: HostCall, tokens: int, n_logits: int) -> None:
        """Compute an op as the reference does, from buffers to buffers."""

        def array(value: Value, entry: int) -> NDArray[Any]:
            shape = (tokens if value.shape[0] == TOKENS else n_logits, *cast(tuple[int, ...], value.shape[1:]))
            return self._buffers[entry][: int(np.prod(shape))].reshape(shape)

        node = call.node
        args = {name: array(node[name], entry) for name, entry in call.inputs.items()}
        with np.errstate(all="ignore"):
            results = getattr(reference, node.op)(**{**node.args, **args})
        results = results if isinstance(results, tuple) else (results,)
        for value, entry, result in zip(node.outputs, call.outputs, results, strict=True):
            array(value, entry)[...] = result

    def _partials_for(self, kv_type: str, positions: int) -> int:
        """Return the address of memory for partial results of attention; 0 if none is needed."""
        if self._partials_at[0] != (kv_type, positions):
            size = self._lower(kv_type).partial_bytes(positions)
            if size > self._partials.size:
                self._partials = np.empty(2 * size, np.uint8)  # room for a context that grows
            self._partials_at = (kv_type, positions), self._partials.ctypes.data if size else 0
        return self._partials_at[1]

    def _step_for(self, kv_type: str, tokens: int) -> Table:
        """Return the step table with buffers for this many tokens."""
        held_type, held_tokens = self._held
        if kv_type != held_type or tokens > held_tokens:
            lowered = self._lower(kv_type)
            step, buffers = new_step(lowered.buffers.end), dict[int, NDArray[Any]]()
            for first, layout in lowered.buffers.layouts.items():
                for entry, (count, dtype) in enumerate(layout, first):
                    if count:
                        buffers[entry] = aligned(np.zeros, tokens * count, dtype)
                        step[entry] = buffers[entry].ctypes.data
            self._counts = [entry for entry in range(Step.END, lowered.buffers.end) if entry not in buffers]
            self._step, self._step_address, self._entries = step, step.ctypes.data, step.data
            self._buffers = buffers  # only now that there was memory for all of it
            self._held = kv_type, tokens
        return self._step
