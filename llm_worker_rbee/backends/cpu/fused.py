"""A whole step of the model as one program: every thread walks through all layers inside one parallel region.

plan.py says what a step does. Buffers are kept from step to step and grow with the largest batch; one step at a time
runs (a lock), its logits are the caller's own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InferenceError
from ..ops import Array, Batch, KVLayer, ModelParts, OnClock
from . import activations, heads, threads
from .kv import kind_of, places
from .plan import sections
from .program import Program
from .step import Step, Table, new_step


class Model:
    """A decoder whose steps are one call."""

    def __init__(self, parts: ModelParts) -> None:
        self._parts = parts
        self._whole: dict[str, Program] = {}  # by what the cache holds
        self._parted: dict[str, list[tuple[str, Program]]] = {}
        self._step = new_step()
        self._buffers: dict[int, NDArray[Any]] = {}
        self._room = 0
        self._kv: tuple[weakref.ref[Any], Table] | None = None  # the first layer's keys stand for the whole cache
        self._lock = threading.Lock()

    def __call__(self, batch: Batch, kv: Sequence[KVLayer]) -> Array:
        """One step: writes the cache, gives the logits at `batch.logits_index`: (N, vocabulary)."""
        kind = kind_of(kv[0])
        if kind not in self._whole:
            self._whole[kind] = Program(one for _, some in sections(self._parts, kind) for one in some)
        return self._run(batch, kv, self._whole[kind].run)

    def in_parts(self, batch: Batch, kv: Sequence[KVLayer], on_clock: OnClock) -> Array:
        """The same, each part of the model as a program of its own, for who wants to know where the time goes."""
        kind = kind_of(kv[0])
        if kind not in self._parted:
            self._parted[kind] = [(part, Program(some)) for part, some in sections(self._parts, kind)]

        def run(step: Table) -> None:
            for part, program in self._parted[kind]:
                on_clock(part, program.run)(step)

        return self._run(batch, kv, run)

    def _run(self, batch: Batch, kv: Sequence[KVLayer], run: Callable[[Table], None]) -> Array:
        p, step, b = self._parts, self._step, batch
        tokens, wanted = len(b.ids), len(b.logits_index)
        if tokens and not 0 <= b.ids.min() <= b.ids.max() < p.embedding.rows:
            raise InferenceError(f"a token id is outside the vocabulary of {p.embedding.rows}")
        logits = np.empty((wanted, p.head.rows), np.float32)
        given = b.ids, b.positions, b.slot_mapping, b.query_start, b.block_table, b.logits_index
        held = [np.ascontiguousarray(array, np.int64) for array in given]
        threads.launching()  # in a forked child this is an error, where the lock might never open
        with self._lock:
            self._make_room(max(tokens, wanted))
            step[Step.TOKENS], step[Step.WANTED] = tokens, wanted
            step[Step.TILES] = step[Step.SINGLES] = 0  # nobody counts them where there are no tokens
            step[Step.BLOCK_SIZE], step[Step.TABLE_WIDTH] = kv[0].v.shape[2], b.block_table.shape[1]
            step[Step.REQUESTS] = len(b.context_len)
            step[Step.IDS : Step.INDEX + 1] = [array.ctypes.data for array in held]
            step[Step.KV] = self._places(kv).ctypes.data
            step[Step.LOGITS] = logits.ctypes.data
            run(step)
        return np.float32(p.soft_cap) * np.tanh(logits / np.float32(p.soft_cap)) if p.soft_cap else logits

    def _places(self, kv: Sequence[KVLayer]) -> Table:
        """Where the keys and values of each layer lie; asked again for the same cache in each step."""
        if self._kv is None or self._kv[0]() is not kv[0].k:
            self._kv = weakref.ref(kv[0].k), places(kv)
        return self._kv[1]

    def _make_room(self, tokens: int) -> None:
        """Buffers for so many tokens."""
        if tokens <= self._room:
            return
        p, b = self._parts, self._parts.blocks[0]
        width, queries = p.head.columns, b.n_heads * heads.padded(b.head_dim)
        widest = max(w.columns for w in (b.qkv, b.output, b.gate_up, b.down, p.head))
        sizes: dict[int, int] = {
            Step.STREAM: width, Step.DELTA: width, Step.NORMED: width, Step.QKV: b.qkv.rows, Step.QUERIES: queries,
            Step.MIXED: queries, Step.COMPACT: b.n_heads * b.head_dim, Step.GATE_UP: b.gate_up.rows,
            Step.HIDDEN: b.down.columns,
            **dict.fromkeys(range(Step.ANGLES, Step.SECOND_SIN + 1), b.head_dim),
        }  # fmt: skip
        made: dict[int, NDArray[Any]] = {entry: np.zeros(tokens * n, np.float32) for entry, n in sizes.items()}
        made[Step.WORK] = np.empty(tokens * b.n_heads * 4, np.int64)
        room: tuple[NDArray[Any], ...] = activations.room(2 * tokens, widest)
        made |= dict(enumerate(room, Step.ACTIVATIONS))
        for entry, buffer in made.items():
            self._step[entry] = buffer.ctypes.data
        self._buffers, self._room = made, tokens  # only now that there was memory for all of it
