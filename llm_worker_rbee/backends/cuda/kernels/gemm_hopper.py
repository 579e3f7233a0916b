"""GEMM of packed weights for GPUs of capability 9.0, in Gluon (Triton's lower level): the twin of `gemm_packed`.

Planes are those of gemv.py, activations those of gemm.py. TMA brings both to shared memory, some stages ahead; words
are dequantized in registers, in the layout of wgmma's left operand, while the product of the words before them runs.

ptxas makes each wgmma wait for the one before, which costs 10 to 30% and is no error, if something waits for a barrier
while a product runs, or if the loop is not unrolled over the words of a group. Then `ptxas -v` prints C7510 to C7515;
the tests look for it.
"""

# Kernels add to tuples that are empty at first.
# mypy: disable-error-code="assignment, misc"
from __future__ import annotations

from typing import NamedTuple

import torch
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..packed_weight import Activations, WeightPart
from .experts import SlotTiles
from .gemm import SECOND_WORD_PTX, WORD_OPERANDS, WORD_PTX, lookup
from .gemv import high_planes, low_words

# Names of Triton 3.6 and of later versions.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
IS_TRITON_3_6 = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))
SMALL_TILE_TOKENS = 16  # up to which a stage holds a whole group, which saves barriers
PIECE_TOKENS = gl.constexpr(16)  # of results that are stored at a time: more take too many registers


@gluon.constexpr_function
def word_layout(rows, warps):
    """Return the layout of (rows, 16) words: a thread has four neighbours of every eighth row, a warp sixteen rows."""
    lanes, of_warps = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [64, 0]][: 2 if warps == 4 else 3]
    more = [[n, 0] for n in (64, 128) if n < rows and [n, 0] not in of_warps]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0], *more], lanes, of_warps, [], [rows, 16])


@gluon.constexpr_function
def matrix_layout(layout):
    """Return the layout of the last two axes of a box."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, 2)


@gluon.constexpr_function
def box_bytes(desc):
    """Return the size of a descriptor's box."""
    size = desc.dtype.primitive_bitwidth // 8
    for length in desc.block_shape:
        size *= length
    return size


@gluon.jit
def box_matrix(box, i, COUNT: gl.constexpr):
    """Return matrix i of the COUNT ones of a box in shared memory."""
    ROWS: gl.constexpr = box.shape[len(box.shape) - 2]
    COLUMNS: gl.constexpr = box.shape[len(box.shape) - 1]
    if IS_TRITON_3_6:
        matrices = box._reinterpret(box.dtype, [COUNT, ROWS, COLUMNS], matrix_layout(box.layout))
    else:
        matrices = box.reinterpret(box.dtype, [COUNT, ROWS, COLUMNS], matrix_layout(box.layout))
    return matrices.index(i)


@gluon.jit
def load_stage(descs, buffers, t, WORD: gl.constexpr, first, last, row, m, KIND: gl.constexpr):
    """Begin to load stage t of the groups from `first` to `last`, if there is one: some words of a group from WORD on,
    their activations, and with the first word the group's scales."""
    x_desc, low_desc, high_desc, scales_desc = descs
    x_buffer, low_buffer, high_buffer, scales_buffer, barriers = buffers
    PER_GROUP: gl.constexpr = 4 // x_desc.block_shape[0]  # stages
    BYTES: gl.constexpr = box_bytes(x_desc) + box_bytes(low_desc)
    HIGH_BYTES: gl.constexpr = box_bytes(high_desc) if high_planes(KIND) else 0
    group, stage = first + t // PER_GROUP, t % x_buffer.shape[0]
    is_there, barrier = group < last, barriers.index(stage)
    mbarrier.expect(barrier, BYTES + HIGH_BYTES + (box_bytes(scales_desc) if WORD == 0 else 0), pred=is_there)
    load_box(low_desc, [0, WORD, row, group * 16], barrier, low_buffer.index(stage), pred=is_there)
    if high_planes(KIND) > 0:
        at = [WORD * high_planes(KIND) // 4, row, group * 16]
        load_box(high_desc, at, barrier, high_buffer.index(stage), pred=is_there)
    if WORD == 0:
        scales = scales_buffer.index(t // PER_GROUP % scales_buffer.shape[0])
        load_box(scales_desc, [row, group * 16], barrier, scales, pred=is_there)
    load_box(x_desc, [WORD, group * 2, m, 0], barrier, x_buffer.index(stage), pred=is_there)


@gluon.jit
def read_words(buffers, stage, WORD: gl.constexpr, KIND: gl.constexpr, W: gl.constexpr):
    """Read word WORD of a group from its stage, and what belongs to it: the last sixteen bytes, or high bits."""
    _, low_buffer, high_buffer, _, _ = buffers
    PARTS: gl.constexpr = low_words(KIND) // 4
    WORDS: gl.constexpr = low_buffer.shape[2]
    word = box_matrix(low_buffer.index(stage), WORD % WORDS, PARTS * WORDS).load(W)
    extra = word
    if PARTS == 2:
        extra = box_matrix(low_buffer.index(stage), WORDS + WORD % WORDS, PARTS * WORDS).load(W)
    elif high_planes(KIND) > 0:
        PLANES: gl.constexpr = high_buffer.shape[1]
        extra = box_matrix(high_buffer.index(stage), WORD * high_planes(KIND) // 4 % PLANES, PLANES).load(W)
    return word, extra


@gluon.jit
def split_blocks(words):
    """Split the blocks 4 lane + n of (rows, 16) words into those with n < 2 and the others: two of (rows, 8)."""
    BN: gl.constexpr = words.shape[0]
    first, last = words.reshape([BN, 4, 2, 2]).permute((0, 1, 3, 2)).split()
    return first.reshape([BN, 8]), last.reshape([BN, 8])


@gluon.jit
def dequantize_half(word, extra, s, WORD: gl.constexpr, KIND: gl.constexpr, A: gl.constexpr):
    """Return (rows, 64) float16 of the words WORD of (rows, 8) blocks as the left operand: no value moves."""
    BN: gl.constexpr = word.shape[0]
    e = gl.inline_asm_elementwise(
        lookup(SECOND_WORD_PTX if high_planes(KIND) == 2 and WORD % 2 == 1 else WORD_PTX, KIND),
        lookup(WORD_OPERANDS, KIND),
        [word, extra, s],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    first = gl.join(gl.join(e[0], e[1]), gl.join(e[2], e[3]))
    second = gl.join(gl.join(e[4], e[5]), gl.join(e[6], e[7]))
    w = gl.join(first, second).reshape([BN, 4, 2, 2, 2, 2])  # lane, n, r, last, p
    return gl.convert_layout(w.permute((0, 2, 5, 4, 1, 3)).reshape([BN, 64]), A, assert_trivial=True)


@gluon.jit
def store_pieces(pieces, out, factors, unit, tokens, row, rows, out_rows, slots, SLOTS: gl.constexpr, bias):
    """Store results, cut into pieces of few tokens."""
    if pieces[0].shape[1] > PIECE_TOKENS:
        BN: gl.constexpr = pieces[0].shape[0]
        TOKENS: gl.constexpr = pieces[0].shape[1] // 2
        halves = ()
        for i in gl.static_range(len(pieces)):
            halves = halves + pieces[i].reshape([BN, 2, TOKENS]).permute((0, 2, 1)).split()
        store_pieces(halves, out, factors, unit, tokens, row, rows, out_rows, slots, SLOTS, bias)
    else:
        for i in gl.static_range(len(pieces)):
            store_piece(
                pieces[i], i * PIECE_TOKENS, out, factors, unit, tokens, row, rows, out_rows, slots, SLOTS, bias
            )


@gluon.jit
def store_piece(values, first, out, factors, unit, tokens, row, rows, out_rows, slots, SLOTS: gl.constexpr, bias):
    """Store the results of a few tokens, or slots, from `first` on."""
    LAYOUT: gl.constexpr = values.type.layout
    n = row + gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    m = first + gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    is_there, token = m < tokens, m
    if slots is not None:
        m = gl.load(slots + m)
        is_there, token = m >= 0, m // SLOTS
    y = values * (unit * gl.load(factors + token, mask=is_there, other=0.0))
    if bias is not None:
        y += gl.load(bias + n, mask=n < rows, other=0.0)
    gl.store(out + (m * out_rows + n), y, mask=is_there & (n < rows))


@gluon.jit(do_not_specialize=["tokens"])
def gemm_hopper(
    x_desc, factors, unit, low_desc, high_desc, scales_desc, out, tokens, rows, out_rows, BLOCKS: gl.constexpr,
    KIND: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, tile_experts=None, slots=None,
    SLOTS: gl.constexpr = 1, bias=None,
):  # fmt: skip
    """Multiply interleaved x * factors (tokens) by packed weights; out (splits, tokens, out_rows) sums to the product.

    With `tile_experts`, as in `gemm_packed`, but x holds the activations of the slots in the order of tiles.

    A program has BN rows and BM tokens of one split of the columns, whose number alone determines the order of sums; a
    stage has as many words of a group of 16 blocks as the box of `x_desc`."""
    WARPS: gl.constexpr = gl.num_warps()
    W: gl.constexpr = word_layout(BN, WARPS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    GROUPS: gl.constexpr = (BLOCKS + 15) // 16
    WORDS: gl.constexpr = x_desc.block_shape[0]
    row, m0, split = gl.program_id(0) * BN, gl.program_id(1) * BM, gl.program_id(2)
    first, last = split * GROUPS // gl.num_programs(2), (split + 1) * GROUPS // gl.num_programs(2)
    expert_row = row
    if tile_experts is not None:
        expert = gl.load(tile_experts + gl.program_id(1))
        if expert < 0:
            return
        expert_row += expert * rows
        slots += m0
        if bias is not None:
            bias += expert * out_rows
    x_buffer = gl.allocate_shared_memory(gl.float16, [STAGES] + x_desc.block_shape, x_desc.layout)
    low_buffer = gl.allocate_shared_memory(gl.int32, [STAGES] + low_desc.block_shape, low_desc.layout)
    high_buffer = low_buffer
    if high_planes(KIND) > 0:
        high_buffer = gl.allocate_shared_memory(gl.int16, [STAGES] + high_desc.block_shape, high_desc.layout)
    shape: gl.constexpr = [1 + (STAGES - 2) * WORDS // 4] + scales_desc.block_shape  # the group's own are in registers
    scales_buffer = gl.allocate_shared_memory(scales_desc.dtype, shape, scales_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    descs = x_desc, low_desc, high_desc, scales_desc
    buffers = x_buffer, low_buffer, high_buffer, scales_buffer, barriers
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
    for i in gl.static_range(STAGES - 1):
        load_stage(descs, buffers, i, i * WORDS % 4, first, last, expert_row, m0, KIND)
    mbarrier.wait(barriers.index(0), 0)
    s = scales_buffer.index(0).load(W)
    word, extra = read_words(buffers, 0, 0, KIND, W)
    acc = warpgroup_mma_init(gl.zeros((BN, BM), gl.float32, MMA))
    a, b = gl.zeros((BN, 64), gl.float16, A), gl.zeros((BN, 64), gl.float16, A)
    for group in range(0, last - first):
        s_first, s_last = split_blocks(s)
        for i in gl.static_range(4):
            t = group * (4 // WORDS) + i // WORDS
            word_first, word_last = split_blocks(word)
            extra_first, extra_last = split_blocks(extra)
            next_a = dequantize_half(word_first, extra_first, s_first, i, KIND, A)
            next_b = dequantize_half(word_last, extra_last, s_last, i, KIND, A)
            acc, _, _ = warpgroup_mma_wait(0, deps=(acc, a, b))
            a, b = next_a, next_b
            if i % WORDS == 0:  # the stage before is free
                load_stage(
                    descs, buffers, t + STAGES - 1, (i + (STAGES - 1) * WORDS) % 4, first, last, expert_row, m0, KIND
                )
            if (i + 1) % WORDS == 0:
                is_there = group + (i + 1) // 4 < last - first
                mbarrier.wait(barriers.index((t + 1) % STAGES), (t + 1) // STAGES & 1, pred=is_there)
            next_t = group * (4 // WORDS) + (i + 1) // WORDS
            word, extra = read_words(buffers, next_t % STAGES, (i + 1) % 4, KIND, W)
            if i == 3:
                s = scales_buffer.index((group + 1) % scales_buffer.shape[0]).load(W)
            x = x_buffer.index(t % STAGES)
            acc = warpgroup_mma(a, box_matrix(x, i % WORDS * 2, WORDS * 2).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma(b, box_matrix(x, i % WORDS * 2 + 1, WORDS * 2).permute((1, 0)), acc, is_async=True)
    acc, _, _ = warpgroup_mma_wait(0, deps=(acc, a, b))
    if slots is None:
        out += (split * tokens + m0).to(gl.int64) * out_rows
        factors += m0
    store_pieces((acc,), out, factors, unit, tokens - m0, row, rows, out_rows, slots, SLOTS, bias)


class ExpertTiles(NamedTuple):
    """Of a stack of matrices: their number, tiles of slots, slots of a row of activations, and a bias."""

    count: int
    tiles: SlotTiles
    per_row: int
    bias: torch.Tensor | None


def describe_boxes(values: torch.Tensor, *box: int) -> TensorDescriptor:
    """Return the descriptor by which TMA loads boxes of a tensor; what lies outside the tensor is zeros."""
    size = values.element_size()
    layout = gl.NVMMASharedLayout(min(128, box[-1] * size), size * 8, len(box))
    return TensorDescriptor(values, list(values.shape), list(values.stride()), list(box), layout)


def launch_gemm(
    x: Activations,
    part: WeightPart,
    out: torch.Tensor,
    out_rows: int,
    splits: int,
    tile: tuple[int, int, int, int],
    experts: ExpertTiles | None = None,
) -> None:
    """Multiply interleaved activations by a part of a matrix, into partial sums of rows of `out_rows`; `tile` is rows
    and tokens of a program, warps, and stages. With `experts`, x holds the activations of their slots."""
    (tile_rows, columns, warps, stages), tokens = tile, len(x.values)
    words = 4 if columns <= SMALL_TILE_TOKENS else 1
    high_words = high_planes(part.kind)
    low = part.low.unflatten(1, (-1, 4)).permute(1, 2, 0, 3)
    high_box = max(1, words * high_words // 4), tile_rows, 16
    of_experts = (experts.tiles.experts, experts.tiles.slots, experts.per_row, experts.bias) if experts else ()
    rows = part.rows // (experts.count if experts else 1)
    gemm_hopper[(cdiv(rows, tile_rows), cdiv(tokens, columns), splits)](
        describe_boxes(x.values.view(4, tokens, -1, 64).transpose(1, 2), words, 2, columns, 64),
        x.factors,
        part.unit,
        describe_boxes(low, len(low), words, tile_rows, 16),
        describe_boxes(part.high.transpose(0, 1), *high_box) if high_words else None,
        describe_boxes(part.scales, tile_rows, 16),
        out,
        tokens,
        rows,
        out_rows,
        part.blocks,
        part.kind,
        tile_rows,
        columns,
        stages,
        *of_experts,
        num_warps=warps,
    )
