"""The fused forward pass: a model's graph as one program per step.

Every thread walks through all layers inside one parallel region; lowering.py makes its tasks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import InferenceError
from .. import reference
from ..graph import TOKENS, Graph, ProgramLine, Value, op_names
from ..ops import Array, Batch, KVLayer, Profiler
from .kv_layout import kv_type_of, layer_addresses
from .lowering import HostCall, LoweredStep, fuse, lower
from .program import Program, Step, Table, Task, new_step, require_not_forked

Floats = NDArray[np.float32]
Part = tuple[str, Program | HostCall]


class CpuForward:
    """The fused forward pass of a model.

    Buffers are kept from step to step and grow with the largest batch; one step runs at a time (a lock), and its logits
    are the caller's own.
    """

    graph_bytes = 0

    def __init__(self, graph: Graph, threads: int) -> None:
        self.graph, self.threads = fuse(graph), threads
        nodes = {node.op: node for node in graph.nodes}
        self._vocabulary: int = nodes["embed"]["table"].rows
        self._num_logits: int = nodes["logits"]["head"].rows
        self._soft_cap = np.float32(nodes["logits"]["soft_cap"])
        self._lowered: dict[str, LoweredStep] = {}  # by KV type, as all of these
        self._whole: dict[str, list[Part]] = {}
        self._components: dict[str, list[Part]] = {}
        self._step, self._buffers = new_step(), dict[int, NDArray[Any]]()
        self._counts: list[int] = []  # entries of numbers that tasks write
        self._held = ("", 0)  # KV type and tokens of the buffers
        self._kv: tuple[weakref.ref[Any], Table] | None = None  # the first layer's keys stand for the whole cache
        self._lock = threading.Lock()

    def __call__(self, batch: Batch, kv: Sequence[KVLayer]) -> Array:
        """Run one step: write the cache, return the logits at `batch.logits_index`: (N, vocabulary)."""
        kv_type = kv_type_of(kv[0])
        if kv_type not in self._whole:
            self._whole[kv_type] = _programs(self._lower(kv_type), lambda component: "")
        return self._run(batch, kv, self._whole[kv_type])

    def run_profiled(self, batch: Batch, kv: Sequence[KVLayer], profiler: Profiler) -> Array:
        """Run one step with each component as a program of its own."""
        kv_type = kv_type_of(kv[0])
        if kv_type not in self._components:
            self._components[kv_type] = _programs(self._lower(kv_type), lambda component: component)
        return self._run(batch, kv, self._components[kv_type], profiler)

    def program(self, kv_type: str) -> list[ProgramLine]:
        return [ProgramLine(part.component, op_names(part.node), part.runs) for part in self._lower(kv_type).parts]

    def _lower(self, kv_type: str) -> LoweredStep:
        if kv_type not in self._lowered:
            self._lowered[kv_type] = lower(self.graph, kv_type, self.threads)
        return self._lowered[kv_type]

    def _run(self, batch: Batch, kv: Sequence[KVLayer], parts: list[Part], profiler: Profiler | None = None) -> Array:
        b, tokens, n_logits = batch, len(batch.ids), len(batch.logits_index)
        if tokens and not 0 <= b.ids.min() <= b.ids.max() < self._vocabulary:
            raise InferenceError(f"a token id is outside the vocabulary of {self._vocabulary}")
        logits = np.empty((n_logits, self._num_logits), np.float32)
        arrays = b.ids, b.positions, b.slot_mapping, b.query_start, b.block_table, b.logits_index
        held = [np.ascontiguousarray(array, np.int64) for array in arrays]
        require_not_forked()  # before the lock, which a forked child might find locked for ever
        with self._lock:
            step = self._step_for(kv_type_of(kv[0]), max(tokens, n_logits))
            step[Step.TOKENS], step[Step.NUM_LOGITS] = tokens, n_logits
            step[Step.BLOCK_SIZE], step[Step.TABLE_WIDTH] = kv[0].v.shape[2], b.block_table.shape[1]
            step[Step.REQUESTS] = len(b.context_len)
            step[Step.TOKEN_IDS : Step.LOGITS_INDEX + 1] = [array.ctypes.data for array in held]
            step[Step.KV] = self._kv_addresses(kv).ctypes.data
            step[Step.LOGITS] = logits.ctypes.data
            step[self._counts] = 0  # not counted in a step without tokens
            for component, part in parts:
                run: Callable[..., None] = self._run_host if isinstance(part, HostCall) else part.run
                args = (part, tokens, n_logits) if isinstance(part, HostCall) else (step, self.threads)
                (run if profiler is None else profiler(component, run))(*args)
        return self._soft_cap * np.tanh(logits / self._soft_cap) if self._soft_cap else logits

    def _run_host(self, call: HostCall, tokens: int, n_logits: int) -> None:
        """Compute an op as the reference does, from buffers to buffers."""

        def array(value: Value, entry: int) -> NDArray[Any]:
            shape = (tokens if value.shape[0] == TOKENS else n_logits, *cast(tuple[int, ...], value.shape[1:]))
            return self._buffers[entry][: int(np.prod(shape))].reshape(shape)

        node = call.node
        args = {name: array(node[name], entry) for name, entry in call.inputs.items()}
        results = getattr(reference, node.op)(**{**node.args, **args})
        results = results if isinstance(results, tuple) else (results,)
        for value, entry, result in zip(node.outputs, call.outputs, results, strict=True):
            array(value, entry)[...] = result

    def _kv_addresses(self, kv: Sequence[KVLayer]) -> Table:
        if self._kv is None or self._kv[0]() is not kv[0].k:
            self._kv = weakref.ref(kv[0].k), layer_addresses(kv)
        return self._kv[1]

    def _step_for(self, kv_type: str, tokens: int) -> Table:
        """Return the step table with buffers for this many tokens."""
        held_type, held_tokens = self._held
        if kv_type != held_type or tokens > held_tokens:
            lowered = self._lower(kv_type)
            step, buffers = new_step(lowered.num_entries), dict[int, NDArray[Any]]()
            for first, layout in lowered.buffers.items():
                for entry, (count, dtype) in enumerate(layout, first):
                    if count:
                        buffers[entry] = np.zeros(tokens * count, dtype)
                        step[entry] = buffers[entry].ctypes.data
            self._counts = [entry for entry in range(Step.END, lowered.num_entries) if entry not in buffers]
            self._step, self._buffers = step, buffers  # only now that there was memory for all of it
            self._held = kv_type, tokens
        return self._step


def _programs(lowered: LoweredStep, key: Callable[[str], str]) -> list[Part]:
    """Return adjacent tasks of one key as one program; calls of the host stand alone."""
    made: list[Part] = []
    for name, group in groupby(lowered.parts, lambda part: (isinstance(part.work, HostCall), key(part.component))):
        works = [part.work for part in group]
        if name[0]:
            made += [(name[1], cast(HostCall, work)) for work in works]
        else:
            made.append((name[1], Program(task for work in works for task in cast(list[Task], work))))
    return made
