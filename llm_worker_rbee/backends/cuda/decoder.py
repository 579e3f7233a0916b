"""The whole decoder at once: which kernels a step takes, its numbers on the device, graphs where sizes repeat.

Steps where everybody answers run in CUDA graphs, padded to a size of SIZES (whoever pads stands at position -1 and
writes nothing): up to FEW tokens through few.py, more through many.py. So do steps that read prompts, where few
requests read at once and they are of a usual length; larger ones run as they come.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..ops import Batch, BlockParts, Ints, KVLayer, ModelParts, Profiler, RopeTable
from . import device
from .cuda_graphs import Graphs
from .decode_small_batch import Few, Rope, is_packed
from .forward_batched import FIXED_QUERIES, QUERIES, Many
from .fp8 import is_fp8

NO_IDS = np.empty(0, np.int64)
FEW = 4  # tokens that few.py takes: the tensor cores are faster for more
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
READING = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)  # tokens of a step that reads, padded
BESIDE = (0, 16, 64, 256)  # of them those that answer
WANTED = (0, 1, 4, 16, 64, 256)  # logits
ROOM = 8  # requests that read in such a step
LARGEST_TABLE = 1 << 22  # entries of block tables on the device
FIRST_POSITIONS = 8192  # that cosines and sines are made for at first


class Decoder:
    """A model's way through a step."""

    is_fixed = False

    def __init__(self, model: ModelParts) -> None:
        self.model = model
        self.graphs = Graphs()
        self.inputs = Inputs()
        self.many = Many(model, self.is_fixed)
        self._few: dict[int, Few] = {}
        self._static: torch.Tensor | None = None
        self._ropes: list[Rope] = []
        self._positions = 0
        self._cache: weakref.ref[Any] | None = None  # that graphs write to: its first tensor
        self._few_most = FEW if all(is_packed(w) or is_fp8(w) for w in layer_matrices(model)) else 1

    def __call__(self, batch: Batch, kv: Sequence[KVLayer]) -> torch.Tensor:
        """One step: writes the cache, gives the logits at `batch.logits_index`: float32, on the device, good until the
        next step."""
        device.activate()
        with device.memory_errors():
            self._get_ready(batch, kv)
            return self._step(batch, kv)

    def _step(self, batch: Batch, kv: Sequence[KVLayer]) -> torch.Tensor:
        tokens = len(batch.ids)
        if tokens == len(batch.context_len) == len(batch.logits_index) and tokens <= SIZES[-1]:
            size = next(size for size in SIZES if size >= tokens)
            if batch.block_table.shape[1] * size <= LARGEST_TABLE:
                return self._answer(batch, kv, tokens, size)
        return self._read(batch, kv)

    @property
    def graph_bytes(self) -> int:
        return self.graphs.nbytes

    def run_profiled(self, batch: Batch, kv: Sequence[KVLayer], profiler: Profiler) -> torch.Tensor:
        """The same, timed as one part."""

        def step() -> torch.Tensor:
            logits = self(batch, kv)
            if logits.is_cuda:
                torch.cuda.synchronize()
            return logits

        out: torch.Tensor = profiler("decoder", step)()
        return out

    def _answer(self, batch: Batch, kv: Sequence[KVLayer], tokens: int, size: int) -> torch.Tensor:
        """Everybody answers: through a graph. Ids that the step before has chosen are on the device already."""
        table, is_there = batch.block_table, isinstance(batch.ids, torch.Tensor)
        arrays = {
            "width": (1, np.array(table.shape[1]), 0), "ids": (size, NO_IDS if is_there else batch.ids, 0),
            "standing": (size, batch.positions, -1), "tables": (table.size, table, 0),
        }  # fmt: skip
        at = self.inputs.put(arrays, self._room())
        if is_there:
            at["ids"][:tokens].copy_(cast(torch.Tensor, batch.ids))
        at["tile_first"] = at["width"][:0]
        if size <= self._few_most:
            few = self._few.get(size) or self._few.setdefault(size, Few(self.model, size))
            names = (at["ids"], at["standing"], at["tables"], at["width"])
            return self.graphs.run(size, lambda: few.step(*names, kv, self._ropes))[:tokens]
        return self.graphs.run(size, lambda: self.many.step(size, at, size, None, kv, self._ropes))[:tokens]

    def _read(self, batch: Batch, kv: Sequence[KVLayer]) -> torch.Tensor:
        """Somebody reads: through a graph where the numbers fit one of the usual sizes, else as it comes."""
        answering = _leading_ones(np.diff(batch.query_start))
        requests, firsts = _tiles(batch.query_start, answering)
        tokens, wanted, table = len(batch.ids), len(batch.logits_index), batch.block_table
        sizes = _size_of(tokens, READING), _size_of(answering, BESIDE), _size_of(wanted, WANTED)
        fits = None not in sizes and len(requests) <= tokens // QUERIES + ROOM and len(table) <= answering + ROOM
        fits = fits and table.size <= LARGEST_TABLE
        is_there = isinstance(batch.ids, torch.Tensor)
        if not fits:
            sizes = (tokens, answering, wanted)
        size, beside, asked = (int(n or 0) for n in sizes)
        slots = np.concatenate((np.full(answering, -1), batch.slot_mapping[answering:]))
        room = (size // QUERIES + ROOM, beside + ROOM) if fits else (len(requests), len(table))
        arrays = {
            "width": (1, np.array(table.shape[1]), 0), "ids": (size, NO_IDS if is_there else batch.ids, 0),
            "positions": (size, batch.positions, 0), "standing": (beside, batch.positions[:answering], -1),
            "slots": (size, slots, -1), "query_start": (room[1] + 1, batch.query_start, 0),
            "context_len": (room[1], batch.context_len, 0), "tile_request": (room[0], requests, -1),
            "tile_first": (room[0], firsts, 0), "logits_index": (asked, batch.logits_index, 0),
            "tables": (table.size, table, 0),
        }  # fmt: skip
        at = self.inputs.put(arrays, self._room() if fits else None)
        if is_there:
            at["ids"][:tokens].copy_(cast(torch.Tensor, batch.ids))

        def step() -> torch.Tensor:
            return self.many.step(size, at, beside, asked, kv, self._ropes)

        return (self.graphs.run((size, beside, asked), step) if fits else step())[:wanted]

    def _room(self) -> torch.Tensor:
        if self._static is None:
            size = LARGEST_TABLE + 4 * READING[-1] + 16 * SIZES[-1]
            self._static = torch.zeros(size, dtype=torch.int32, device=device.current())
        return self._static

    def _get_ready(self, batch: Batch, kv: Sequence[KVLayer]) -> None:
        """Graphs remember where the cache and the tables are."""
        most = int(batch.context_len.max())
        if most > self._positions:
            self._positions = max(2 * self._positions, most, FIRST_POSITIONS)
            made = {id(b.rope): b.rope for b in self.model.blocks}
            tables = {key: rope_of(table, self._positions) for key, table in made.items()}
            self._ropes = [tables[id(block.rope)] for block in self.model.blocks]
            self._cache = None
        if self._cache is None or self._cache() is not kv[0].k:
            self._cache = weakref.ref(kv[0].k)
            self.graphs.forget()


class FixedDecoder(Decoder):
    """The same where a token's numbers may not depend on the others: nobody is told from those who read, and every
    product and every query is summed in one order. Steps where everybody answers run in graphs."""

    is_fixed = True

    def _step(self, batch: Batch, kv: Sequence[KVLayer]) -> torch.Tensor:
        tokens, wanted, table = len(batch.ids), len(batch.logits_index), batch.block_table
        is_there = isinstance(batch.ids, torch.Tensor)
        size = _size_of(tokens, SIZES) if tokens == len(table) == wanted else None
        if size is None or table.shape[1] * size > LARGEST_TABLE:
            size = 0
        requests, firsts = _tiles(batch.query_start, 0, FIXED_QUERIES)
        room = (size, size, size) if size else (tokens, len(requests), len(table))
        arrays = {
            "width": (1, np.array(table.shape[1]), 0), "ids": (room[0], NO_IDS if is_there else batch.ids, 0),
            "positions": (room[0], batch.positions, 0), "slots": (room[0], batch.slot_mapping, -1),
            "query_start": (room[2] + 1, batch.query_start, 0), "context_len": (room[2], batch.context_len, 0),
            "tile_request": (room[1], requests, -1), "tile_first": (room[1], firsts, 0),
            "logits_index": (size or wanted, batch.logits_index, 0), "tables": (table.size, table, 0),
        }  # fmt: skip
        at = self.inputs.put(arrays, self._room() if size else None)
        if is_there:
            at["ids"][:tokens].copy_(cast(torch.Tensor, batch.ids))
        if not size:
            return self.many.step(tokens, at, 0, wanted, kv, self._ropes)
        return self.graphs.run(size, lambda: self.many.step(size, at, 0, None, kv, self._ropes))[:tokens]


def rope_of(table: RopeTable, positions: int) -> Rope:
    """Cosines and sines of all positions: the angles in float32, as everywhere, their functions exact."""
    where = device.current()
    angles = torch.arange(positions, device=where, dtype=torch.float32)[:, None] * torch.tensor(
        table.inv_freq, device=where
    )
    cos, sin = (f(angles.double()).mul(table.scale).float().contiguous() for f in (torch.cos, torch.sin))
    return Rope(cos, sin)


def _size_of(count: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest size that has room."""
    return next((size for size in sizes if size >= count), None)


def _leading_ones(counts: Ints) -> int:
    """How many requests at the front have one token."""
    other = np.flatnonzero(counts != 1)
    return int(other[0]) if len(other) else len(counts)


def _tiles(query_start: Ints, answering: int, queries: int = QUERIES) -> tuple[Ints, Ints]:
    """Runs of `queries` tokens of the requests that read: (request, first token of the run in the request)."""
    counts = np.diff(query_start)[answering:]
    each = -(-counts // queries)
    requests = np.repeat(np.arange(len(counts)), each)
    before = np.cumsum(each) - each
    return requests + answering, (np.arange(int(each.sum())) - before[requests]) * queries


def layer_matrices(model: ModelParts) -> list[Any]:
    """All matrices of all layers."""
    return [w for b in model.blocks for w in (b.qkv, b.output, b.gate_up, b.down)]


def fuse(model: ModelParts, fixed: bool = False) -> Decoder | None:
    """The decoder of a model; None where it has what these kernels do not know: then it runs op by op."""
    device.give_back()  # what packing needed: keys and values will take the rest
    matrices = [model.embedding, model.head, *layer_matrices(model)]
    uniform = all(len({part.values is None for part in w.parts}) == 1 for w in matrices)
    single = all(len(w.parts) == 1 for w in matrices if is_packed(w) is False)
    if not uniform or not single or len(model.embedding.parts) != 1 or model.norm.shape[0] % 32:
        return None
    if not all(map(_is_known, model.blocks)):
        return None
    return FixedDecoder(model) if fixed else Decoder(model)


def _is_known(block: BlockParts) -> bool:
    """Whether a block is of the plain kind: rotary over whole heads, no norms after, no bias but that of q, k and v."""
    extra = (block.output_bias, block.gate_up_bias, block.down_bias, block.post_attention_norm, block.post_mlp_norm)
    plain = all(part is None for part in extra) and block.activation == "silu"
    single = all(len(w.parts) == 1 for w in (block.output, block.gate_up, block.down))
    dim = block.head_dim
    whole = 2 * len(block.rope.inv_freq) == dim and dim in (32, 64, 128, 256)
    return plain and single and whole and block.gate_up.rows % 64 == 0


LENGTH = 1 << 20  # numbers
STEP = 4  # numbers: 16 bytes


def aligned(count: int) -> int:
    """The place after an array of so many numbers."""
    return -(-count // STEP) * STEP


class Inputs:
    """Page-locked memory of the host."""

    def __init__(self) -> None:
        self._make(LENGTH)

    def _make(self, length: int) -> None:
        self._block = torch.empty(length, dtype=torch.int32, pin_memory=device.current().type == "cuda")
        self._numbers = self._block.numpy()
        self._at = 0

    def _piece(self, count: int) -> int:
        """The first of `count` numbers that nobody copies from."""
        if self._at + count > len(self._numbers):
            if device.current().type == "cuda":
                torch.cuda.current_stream().synchronize()
            if count > len(self._numbers):
                self._make(2 * count)
            self._at = 0
        start = self._at
        self._at += count
        return start

    def put(self, arrays: Mapping[str, tuple[int, NDArray[Any], int]], target: torch.Tensor | None = None) -> Any:
        """Copy arrays, each given as (room, its numbers, what fills the rest of the room), into `target` if there is
        one; views of it by name."""
        total = sum(aligned(room) for room, _, _ in arrays.values())
        first = at = self._piece(total)
        numbers = self._numbers
        for room, array, rest in arrays.values():
            end = at + array.size
            numbers[at:end] = array.reshape(-1)
            if array.size < room:
                numbers[end : at + room] = rest
            at += aligned(room)
        if target is None:
            target = torch.empty(total, dtype=torch.int32, device=device.current())
        target[:total].copy_(self._block[first:at], non_blocking=True)
        return views(arrays, target)


def views(arrays: Mapping[str, tuple[int, Any, int]], target: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same places in a block of the device."""
    found, at = {}, 0
    for name, (room, _, _) in arrays.items():
        found[name] = target[at : at + room]
        at += aligned(room)
    return found
