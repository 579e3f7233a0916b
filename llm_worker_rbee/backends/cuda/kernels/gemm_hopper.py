"""GEMM of packed weights for GPUs of capability 9.0, in Gluon (Triton's lower level): the twin of `gemm_packed`.

Planes are laid out as in gemv.py, activations as in gemm.py. TMA brings both to shared memory, some stages ahead; words
are dequantized in registers, in the layout of wgmma's left operand, while the product of the words before them runs.

ptxas makes each wgmma wait for the one before, which costs 10 to 30% and is no error, if it is short of registers or if
the loop is not unrolled over the words of a group. Then `ptxas -v` prints C7510 to C7515; the tests look for it.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..device import pdl_options
from ..packed_weight import Activations, WeightPart
from . import gemm, gemv
from .experts import SlotTiles
from .gemm import SECOND_WORD_PTX, WORD_OPERANDS, WORD_PTX, lookup
from .gemv import high_planes, low_words

# Names of Triton 3.6 and of later versions.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
IS_TRITON_3_6 = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))
interleaved_offset, apply_gate = gluon.jit(gemm.interleaved_offset.fn), gluon.jit(gemv.apply_gate.fn)
SMALL_TILE_TOKENS = 16  # up to which a stage holds a whole group, which saves barriers
QUEUE_TOKENS = gl.constexpr(128)  # of a tile from which a product waits behind the one before, which takes registers
PIECE_TOKENS = gl.constexpr(16)  # of results that are stored at a time: more take too many registers


@gluon.constexpr_function
def word_layout(rows, warps, is_gated):
    """Return the layout of (rows, 16) words: a thread has four neighbours of every eighth row, a warp sixteen rows.
    Gated: `read_rows` has the order."""
    place = {n: n for n in (1, 2, 4, 8, 16, 32, 64, 128)}
    if is_gated:
        place = {1: 2, 2: 16, 4: 1, 8: rows // 2, 16: 4, 32: 8, 64: 32}
    lanes, of_warps = [[0, 4], [0, 8], *([place[n], 0] for n in (1, 2, 4))], (16, 32, 64)[: 2 if warps == 4 else 3]
    more = [[place[n], 0] for n in (64, 128) if n < rows and n not in of_warps]
    own = [[0, 1], [0, 2], [place[8], 0], *more]
    return gl.DistributedLinearLayout(own, lanes, [[place[n], 0] for n in of_warps], [], [rows, 16])


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
def box_matrix(box, i, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """Return matrix i of the COUNT ones of a box in shared memory."""
    COLUMNS: gl.constexpr = box.shape[len(box.shape) - 1]
    if IS_TRITON_3_6:
        matrices = box._reinterpret(box.dtype, [COUNT, ROWS, COLUMNS], matrix_layout(box.layout))
    else:
        matrices = box.reinterpret(box.dtype, [COUNT, ROWS, COLUMNS], matrix_layout(box.layout))
    return matrices.index(i)


@gluon.jit
def load_weights(descs, buffers, t, WORD: gl.constexpr, first, last, row, KIND: gl.constexpr):
    """Begin to load stage t of the groups from `first` to `last`, if there is one: some words of a group from WORD on,
    and with the first word the group's scales. The stage waits for its activations too."""
    x_desc, low_desc, high_desc, scales_desc = descs
    x_buffer, low_buffer, high_buffer, scales_buffer, barriers = buffers
    PER_GROUP: gl.constexpr = 4 // x_desc.block_shape[0]  # stages
    BYTES: gl.constexpr = box_bytes(x_desc) + box_bytes(low_desc)
    HIGH_BYTES: gl.constexpr = box_bytes(high_desc) if high_planes(KIND) else 0
    group, stage = first + t // PER_GROUP, t % x_buffer.shape[0]
    is_there, barrier = group < last, barriers.index(stage)
    mbarrier.expect(barrier, BYTES + HIGH_BYTES + (box_bytes(scales_desc) if WORD == 0 else 0), pred=is_there)
    load_box(low_desc, [0, WORD, 0, row, group * 16], barrier, low_buffer.index(stage), pred=is_there)
    if high_planes(KIND) > 0:
        at = [WORD * high_planes(KIND) // 4, 0, row, group * 16]
        load_box(high_desc, at, barrier, high_buffer.index(stage), pred=is_there)
    if WORD == 0:
        scales = scales_buffer.index(t // PER_GROUP % scales_buffer.shape[0])
        load_box(scales_desc, [0, row, group * 16], barrier, scales, pred=is_there)


@gluon.jit
def load_activations(descs, buffers, t, WORD: gl.constexpr, first, last, m):
    """Begin to load the activations of a stage."""
    x_desc, _, _, _ = descs
    x_buffer, _, _, _, barriers = buffers
    PER_GROUP: gl.constexpr = 4 // x_desc.block_shape[0]  # stages
    group, stage = first + t // PER_GROUP, t % x_buffer.shape[0]
    at = [WORD, group * 2, m, 0]
    load_box(x_desc, at, barriers.index(stage), x_buffer.index(stage), pred=group < last)


@gluon.jit
def read_words(buffers, stage, WORD: gl.constexpr, KIND: gl.constexpr, W: gl.constexpr):
    """Read word WORD of a group from its stage, and what belongs to it: the last sixteen bytes, or high bits."""
    _, low_buffer, high_buffer, _, _ = buffers
    PARTS: gl.constexpr = low_words(KIND) // 4
    WORDS: gl.constexpr = low_buffer.shape[2]
    GATED: gl.constexpr = low_buffer.shape[3] == 2
    word = read_rows(low_buffer.index(stage), WORD % WORDS, PARTS * WORDS, GATED, W)
    extra = word
    if PARTS == 2:
        extra = read_rows(low_buffer.index(stage), WORDS + WORD % WORDS, PARTS * WORDS, GATED, W)
    elif high_planes(KIND) > 0:
        PLANES: gl.constexpr = high_buffer.shape[1]
        extra = read_rows(high_buffer.index(stage), WORD * high_planes(KIND) // 4 % PLANES, PLANES, GATED, W)
    return word, extra


@gluon.jit
def prepare_next(descs, buffers, group, i: gl.constexpr, s, first, last, row, m0, KIND: gl.constexpr, W: gl.constexpr):
    """Load into the stage that the products have left, wait for the word after word i of a group, and read it: return
    (word, what belongs to it, scales of its group)."""
    WORDS: gl.constexpr = descs[0].block_shape[0]
    STAGES: gl.constexpr = buffers[0].shape[0]
    barriers, scales_buffer = buffers[4], buffers[3]
    t = group * (4 // WORDS) + i // WORDS
    if i % WORDS == 0:
        load_weights(descs, buffers, t + STAGES - 1, (i + (STAGES - 1) * WORDS) % 4, first, last, row, KIND)
        load_activations(descs, buffers, t + STAGES - 1, (i + (STAGES - 1) * WORDS) % 4, first, last, m0)
    if (i + 1) % WORDS == 0:
        is_there = group + (i + 1) // 4 < last - first
        mbarrier.wait(barriers.index((t + 1) % STAGES), (t + 1) // STAGES & 1, pred=is_there)
    next_t = group * (4 // WORDS) + (i + 1) // WORDS
    word, extra = read_words(buffers, next_t % STAGES, (i + 1) % 4, KIND, W)
    if i == 3:
        s = read_rows(scales_buffer.index((group + 1) % scales_buffer.shape[0]), 0, 1, descs[1].block_shape[2] == 2, W)
    return word, extra, s


@gluon.jit
def read_rows(box, i, COUNT: gl.constexpr, GATED: gl.constexpr, W: gl.constexpr):
    """Read matrix i of a box. Gated, the first half of its rows are gates: then eight of them come before the eight
    rows that they belong to, of columns 16 last + 2 r + p of a word of interleaved activations. No value moves.
    """
    BN: gl.constexpr = W.shape[0]
    words = box_matrix(box, i, COUNT, BN).load(W)
    if GATED:
        words = words.reshape([2, BN // 64, 2, 4, 2, 2, 16])  # half, block, last, word, r, p
        words = words.permute((1, 3, 0, 5, 2, 4, 6)).reshape([BN, 16])
    return words


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
def store_pieces(pieces, out, tokens, row, rows, out_rows, slots, bias, ACTIVATION: gl.constexpr, gated):
    """Store results, cut into pieces of few tokens."""
    if pieces[0].shape[1] > PIECE_TOKENS:
        BN: gl.constexpr = pieces[0].shape[0]
        TOKENS: gl.constexpr = pieces[0].shape[1] // 2
        halves = ()
        for i in gl.static_range(len(pieces)):
            halves = halves + pieces[i].reshape([BN, 2, TOKENS]).permute((0, 2, 1)).split()
        store_pieces(halves, out, tokens, row, rows, out_rows, slots, bias, ACTIVATION, gated)
    elif ACTIVATION != "":
        for i in gl.static_range(len(pieces)):
            store_gated_piece(pieces[i], i * PIECE_TOKENS, out, tokens, row, rows, ACTIVATION, gated)
    else:
        LAYOUT: gl.constexpr = pieces[0].type.layout
        n = row + gl.arange(0, pieces[0].shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
        bias_of_rows = 0.0
        if bias is not None:
            bias_of_rows = gl.load(bias + n, mask=n < rows, other=0.0)
        places = ()  # all loads first: a load does not pass a store
        for i in gl.static_range(len(pieces)):
            m = i * PIECE_TOKENS + gl.arange(0, pieces[0].shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
            if slots is not None:
                m = gl.load(slots + m)
            places = places + (m,)
        for i in gl.static_range(len(pieces)):
            is_there = places[i] < tokens
            if slots is not None:
                is_there = places[i] >= 0
            gl.store(out + (places[i] * out_rows + n), pieces[i] + bias_of_rows, mask=is_there & (n < rows))


@gluon.jit
def store_gated_piece(values, first, out, tokens, row, rows, ACTIVATION: gl.constexpr, gated):
    """Store activation(gate) * up of a few tokens as interleaved activations (gemm.py)."""
    all_tokens, m0, factor = gated
    BN: gl.constexpr = values.shape[0]
    TOKENS: gl.constexpr = values.shape[1]
    gate, up = values.reshape([BN // 16, 2, 8, TOKENS]).permute((0, 2, 3, 1)).split()
    gate, up = gate.reshape([BN // 2, TOKENS]), up.reshape([BN // 2, TOKENS])
    LAYOUT: gl.constexpr = gate.type.layout
    i = gl.arange(0, BN // 2, gl.SliceLayout(1, LAYOUT))[:, None]  # in the order of `read_rows`
    n = row + i // 32 * 32 + i // 2 % 2 * 16 + i // 8 % 4 * 4 + i % 2 * 2 + i // 4 % 2
    m = first + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))[None, :]
    y = (apply_gate(gate, up, ACTIVATION) * factor).to(gl.float16)
    groups = (rows + 511) // 512
    at = interleaved_offset(m0 + m, n // 32, n % 32, all_tokens, groups)
    gl.store(out + at, y, mask=(m < tokens) & (n < rows))
    if row + BN // 2 >= rows:  # the blocks that the last group lacks
        for start in range(rows, groups * 512, BN // 2):
            more = n - row + start
            at = interleaved_offset(m0 + m, more // 32, more % 32, all_tokens, groups)
            gl.store(out + at, gl.zeros_like(y), mask=(m < tokens) & (more < groups * 512))


@gluon.jit(do_not_specialize=["tokens"])
def gemm_hopper(
    x_desc, factors, unit, low_desc, high_desc, scales_desc, out, tokens, rows, out_rows, BLOCKS: gl.constexpr,
    KIND: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, tile_experts=None, slots=None,
    SLOTS: gl.constexpr = 1, bias=None, ACTIVATION: gl.constexpr = "",
    out_factor=1.0, STARTS_NEXT: gl.constexpr = "", WAITS_FIRST: gl.constexpr = True,
):  # fmt: skip
    """Multiply interleaved x * factors (tokens) by packed weights; out (splits, tokens, out_rows) sums to the product.

    With `tile_experts`, as in `gemm_packed`, but x holds the activations of the slots in the order of tiles. With
    `ACTIVATION`, the first half of all rows are gates, and out holds activation(gate) * up * out_factor as interleaved
    activations; rows belong to a half.

    STARTS_NEXT: the next kernel starts "early", once activations are on their way, or "late", after the products.
    Weights come before the previous kernel has ended; without WAITS_FIRST, when that multiplies by another part of the
    same matrix, activations too.

    A program has BN rows and BM tokens of one split of the columns, whose number alone determines the order of sums; a
    stage has as many words of a group of 16 blocks as the box of `x_desc`."""
    WARPS: gl.constexpr = gl.num_warps()
    GATED: gl.constexpr = ACTIVATION != ""
    HALVES: gl.constexpr = 2 if GATED else 1
    W: gl.constexpr = word_layout(BN, WARPS, GATED)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    GROUPS: gl.constexpr = (BLOCKS + 15) // 16
    WORDS: gl.constexpr = x_desc.block_shape[0]
    QUEUES: gl.constexpr = BM >= QUEUE_TOKENS
    row, m0, split = gl.program_id(1) * (BN // HALVES), gl.program_id(0) * BM, gl.program_id(2)
    first, last = split * GROUPS // gl.num_programs(2), (split + 1) * GROUPS // gl.num_programs(2)
    expert_row = row
    if tile_experts is not None:
        row, m0 = gl.program_id(0) * BN, gl.program_id(1) * BM
        expert_row = row
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
        load_weights(descs, buffers, i, i * WORDS % 4, first, last, expert_row, KIND)
    if STARTS_NEXT != "" and WAITS_FIRST:
        gdc_wait()
    for i in gl.static_range(STAGES - 1):
        load_activations(descs, buffers, i, i * WORDS % 4, first, last, m0)
    if STARTS_NEXT == "early":
        gdc_launch_dependents()
    mbarrier.wait(barriers.index(0), 0)
    s = read_rows(scales_buffer.index(0), 0, 1, GATED, W)
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
            if not QUEUES:
                acc, _, _ = warpgroup_mma_wait(0, deps=(acc, a, b))
                word, extra, s = prepare_next(descs, buffers, group, i, s, first, last, expert_row, m0, KIND, W)
            x = x_buffer.index(t % STAGES)
            x_first, x_last = (
                box_matrix(x, i % WORDS * 2, WORDS * 2, BM),
                box_matrix(x, i % WORDS * 2 + 1, WORDS * 2, BM),
            )
            acc = warpgroup_mma(next_a, x_first.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma(next_b, x_last.permute((1, 0)), acc, is_async=True)
            if QUEUES:
                acc, _, _ = warpgroup_mma_wait(2, deps=(acc, a, b))
                acc = warpgroup_mma_init(acc)
                word, extra, s = prepare_next(descs, buffers, group, i, s, first, last, expert_row, m0, KIND, W)
            a, b = next_a, next_b
    m = m0 + gl.arange(0, BM, gl.SliceLayout(0, MMA))
    is_there = m < tokens
    if slots is not None:
        m = gl.load(slots + m - m0)
        is_there, m = m >= 0, m // SLOTS
    factor = unit * gl.load(factors + m, mask=is_there, other=0.0)
    acc, _, _ = warpgroup_mma_wait(0, deps=(acc, a, b))
    acc = acc * factor[None, :]
    if STARTS_NEXT != "" and not WAITS_FIRST:
        gdc_wait()
    if STARTS_NEXT == "late":
        gdc_launch_dependents()
    if slots is None and not GATED:
        out += (split * tokens + m0).to(gl.int64) * out_rows
    gated = tokens, m0, out_factor
    store_pieces((acc,), out, tokens - m0, row, rows, out_rows, slots, bias, ACTIVATION, gated)


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


def view_halves(plane: torch.Tensor, count: int, rows: int) -> torch.Tensor:
    """View a plane (.., rows, blocks) as (.., count, rows, blocks): each with `rows` more rows before it."""
    *shape, all_rows, blocks = plane.shape
    *strides, of_row, of_block = plane.stride()
    size = (*shape, count, all_rows - (count - 1) * rows, blocks)
    return plane.as_strided(size, (*strides, rows * of_row, of_row, of_block))


def view_tiles(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """View interleaved activations as (words, halves of groups, tokens, 64) with more tokens than there are: boxes that
    lie partly outside a tensor are slow. The rows of no token are rows of the next word, or uninitialized."""
    of_word, of_token = x.numel() // 4, x.shape[1] // 4
    return x.as_strided((4, of_token // 64, tokens, 64), (of_word, 64, of_token, 1))


def launch_gemm(
    x: Activations,
    part: WeightPart,
    out: torch.Tensor,
    out_rows: int,
    splits: int,
    tile: tuple[int, int, int, int],
    experts: ExpertTiles | None = None,
    *,
    gate: tuple[str, float] | None = None,
    starts_next: str = "",
    waits_first: bool = True,
) -> None:
    """Multiply interleaved activations by a part of a matrix, into partial sums of rows of `out_rows`; `tile` is rows
    and tokens of a program, warps, and stages. With `experts`, x holds the activations of their slots."""
    (tile_rows, columns, warps, stages), tokens = tile, len(x.values)
    words = 4 if columns <= SMALL_TILE_TOKENS else 1
    high_words = high_planes(part.kind)
    low, high, scales = part.low.unflatten(1, (-1, 4)).permute(1, 2, 0, 3), part.high, part.scales
    box = (2, tile_rows // 2, 16) if gate else (1, tile_rows, 16)
    high_box = max(1, words * high_words // 4), *box
    of_experts = (experts.tiles.experts, experts.tiles.slots, experts.per_row, experts.bias) if experts else ()
    rows = part.rows // (experts.count if experts else box[0])
    row_tiles, token_tiles = cdiv(rows, box[1]), cdiv(tokens, columns)
    gemm_hopper[(row_tiles, token_tiles, 1) if experts else (token_tiles, row_tiles, splits)](
        describe_boxes(view_tiles(x.values, token_tiles * columns), words, 2, columns, 64),
        x.factors,
        part.unit * x.unit,
        describe_boxes(view_halves(low, box[0], rows), len(low), words, *box),
        describe_boxes(view_halves(high.transpose(0, 1), box[0], rows), *high_box) if high_words else None,
        describe_boxes(view_halves(scales, box[0], rows), *box),
        out,
        tokens,
        rows,
        out_rows,
        part.blocks,
        part.kind,
        tile_rows,
        columns,
        stages,
        *(of_experts or (None, None, 1, None)),
        *(gate or ("", 1.0)),
        starts_next,
        waits_first,
        num_warps=warps,
        **pdl_options(starts_next != ""),
    )
