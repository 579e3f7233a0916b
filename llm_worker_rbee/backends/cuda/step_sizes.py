"""The sizes that steps are padded to: few, so that all kernels are compiled and all graphs captured ahead of time.

A decode step is padded to one of DECODE_SIZES. A step with prefill is padded to one of STEP_SIZES tokens, whatever
requests it is made of: its first tokens may decode (in DECODE_SLOTS), the others go through tiles of queries, whose
number is read on the device. Larger steps keep the GPU busy for longer than their launches take: they are padded to
a multiple of STEP_MULTIPLE and not captured. Padding has position -1 or slot -1, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..ops import StepLimits
from .device import is_interpreted

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
STEP_SIZES: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
if is_interpreted():  # which computes padding too, one program at a time
    STEP_SIZES = (1, 2, 4, 8, *STEP_SIZES)
STEP_MULTIPLE = 128
DECODE_SLOTS = (16, 64, 256)  # decoding tokens of a step with prefill; more of them: as many as it has tokens
LOGITS_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MAX_SIZE_WITH_HEAD = 256  # decoding tokens of a graph that ends with the logits: larger results are not kept
MIN_TILE_PROGRAMS = 32  # beside one for each full tile of queries: they go on with further tiles


class StepSizes(NamedTuple):
    """What the arrays of a step have room for."""

    tokens: int
    decoding: int  # tokens at the front that decode by split-KV; the others go through tiles of queries
    has_tiles: bool
    num_logits: int | None  # None: of all tokens
    is_captured: bool = True

    @property
    def has_head(self) -> bool:
        """Whether the logits are part of the step's graph."""
        return self.num_logits is None and self.tokens <= MAX_SIZE_WITH_HEAD

    @property
    def graph(self) -> tuple[int, int, bool]:
        """The key of its graph."""
        return self.tokens, self.decoding, self.num_logits is None


def padded(count: int, sizes: tuple[int, ...], multiple: int) -> int:
    """Return the smallest size that has room, or the next multiple."""
    return next((size for size in sizes if size >= count), -(-count // multiple) * multiple)


def decode_sizes(requests: int, *, is_tiled: bool) -> StepSizes:
    """Return the sizes of a step in which every request computes one token and its logits."""
    size = padded(requests, DECODE_SIZES, STEP_MULTIPLE)
    return StepSizes(size, 0 if is_tiled else size, is_tiled, None, size <= DECODE_SIZES[-1])


def prefill_sizes(tokens: int, decoding: int, num_logits: int, *, is_tiled: bool) -> StepSizes:
    """Return the sizes of any other step."""
    size = padded(tokens, STEP_SIZES, STEP_MULTIPLE)
    slots = 0 if is_tiled else min(size, padded(decoding, DECODE_SLOTS, size))
    return StepSizes(size, slots, True, padded_logits(num_logits), size <= STEP_SIZES[-1])


def padded_logits(count: int) -> int:
    """Return how many logits are computed where a step needs `count` of them."""
    return padded(count, LOGITS_SIZES, LOGITS_SIZES[-1]) if count else 0


def tile_programs(tokens: int, tile_queries: int) -> int:
    """Return the programs for each head among which the tiles of a step are divided."""
    return min(tokens, tokens // tile_queries + MIN_TILE_PROGRAMS)


def all_sizes(limits: StepLimits, *, is_tiled: bool) -> Iterator[StepSizes]:
    """Yield the sizes of every step within the limits, the largest first: graphs share memory. Uncaptured steps run the
    kernels of the largest of them."""
    most = padded(limits.max_tokens, STEP_SIZES, STEP_MULTIPLE)
    if most > STEP_SIZES[-1]:
        yield prefill_sizes(most, 0, 0, is_tiled=is_tiled)
    for tokens in reversed([size for size in STEP_SIZES if size <= most]):
        slots = [count for count in (*DECODE_SLOTS, tokens) if count <= tokens]
        found = {prefill_sizes(tokens, min(count, limits.max_batch), 0, is_tiled=is_tiled) for count in slots}
        yield from sorted(found, reverse=True)
    largest = padded(limits.max_batch, DECODE_SIZES, STEP_MULTIPLE)
    for size in reversed([size for size in DECODE_SIZES if size <= largest]):
        yield decode_sizes(size, is_tiled=is_tiled)


def uncaptured_sizes(limits: StepLimits, *, is_tiled: bool) -> Iterator[StepSizes]:
    """Yield the sizes of larger steps within the limits."""
    for tokens in range(STEP_SIZES[-1] + STEP_MULTIPLE, limits.max_tokens, STEP_MULTIPLE):
        yield prefill_sizes(tokens, 0, 0, is_tiled=is_tiled)


def all_logits_sizes(limits: StepLimits) -> list[int]:
    """Return the numbers of logits of steps within the limits."""
    largest = padded_logits(limits.max_logits)
    return [size for size in LOGITS_SIZES if size <= largest]
