"""The ops of the heads one by one: programs of a few instructions, with a step of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ops import AttentionParams, Batch, Ints, KVLayer, RopeTable
from . import heads
from .kv import kind_of, places
from .program import Program
from .step import Step, new_step

Floats = NDArray[np.float32]
NO_PARAMS = AttentionParams(1.0)


def rope_store(
    q: Floats, k: Floats, v: Floats, positions: Ints, table: RopeTable, kv: KVLayer, slot_mapping: Ints
) -> Floats:
    """Rotate q and k, write k and v into the cache, give back q: (T, heads, head_dim), a view of padded heads."""
    tokens, n_heads, dim = q.shape
    half, n_kv = len(table.inv_freq), k.shape[1]
    out = np.empty((tokens, n_heads, heads.padded(dim)), np.float32)
    args = heads.arguments(0, 0, half, n_heads, n_kv, dim, NO_PARAMS)
    program = Program([heads.angle_instruction(table, 0), heads.store_instruction(args, kind_of(kv))])
    cos, sin = (np.empty(tokens * half, np.float32) for _ in range(2))
    entries = {
        Step.POSITIONS: positions.astype(np.int64), Step.SLOTS: slot_mapping.astype(np.int64), Step.KV: places([kv]),
        Step.ANGLES: cos, Step.SIN: sin,
        Step.QKV: np.concatenate((q, k, v), axis=1, dtype=np.float32), Step.QUERIES: out,
    }  # fmt: skip
    _run(program, entries, {Step.TOKENS: tokens, Step.BLOCK_SIZE: kv.v.shape[2]})
    return out[:, :, :dim]


def attention(q: Floats, kv: KVLayer, batch: Batch, params: AttentionParams) -> Floats:
    """Each query over its own request's cached keys: (T, heads, head_dim) -> (T, heads * head_dim)."""
    tokens, n_heads, dim = q.shape
    n_kv, size, padded = kv.v.shape[1:]
    wide = np.zeros((tokens, n_heads, padded), np.float32)
    wide[:, :, :dim] = q
    out = np.empty_like(wide)
    args = heads.arguments(0, 0, 0, n_heads, n_kv, dim, params)
    program = Program([heads.deal_instruction(args), *heads.attend_instructions(args, kind_of(kv))])
    entries = {
        Step.POSITIONS: batch.positions, Step.QUERY_START: batch.query_start, Step.BLOCK_TABLE: batch.block_table,
        Step.KV: places([kv]), Step.WORK: np.empty(tokens * n_heads * 4, np.int64), Step.QUERIES: wide, Step.MIXED: out,
    }  # fmt: skip
    counts = {
        Step.TOKENS: tokens, Step.BLOCK_SIZE: size, Step.TABLE_WIDTH: batch.block_table.shape[1],
        Step.REQUESTS: len(batch.context_len),
    }  # fmt: skip
    _run(program, entries, counts)
    return out[:, :, :dim].reshape(tokens, n_heads * dim)


def _run(program: Program, entries: dict[Step, NDArray[Any]], counts: dict[Step, int]) -> None:
    held = {entry: np.ascontiguousarray(array) for entry, array in entries.items()}  # of int64 or float32
    step = new_step()
    for entry, array in held.items():
        step[entry] = array.ctypes.data
    for entry, count in counts.items():
        step[entry] = count
    program.run(step)
