"""The causal convolution of each channel over the tokens of its request, and the slots of states on the device.

A token is a program for some channels: it reads the inputs before it, from the step or from the state. Where requests
have several tokens, a second kernel stores the states, as others may still read them in the first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...ops import StateLayer
from ..device import is_interpreted, pdl_options
from .intrinsics import launch_next, wait_for_previous

BLOCK = 256  # channels of a program
RUN = 128  # tokens that are searched for slots at once
MAX_REQUESTS = 64  # programs for each part of a state: they go on with further requests


class StateInputs(NamedTuple):
    """The slots of a step; padding is no request and no slot (-1)."""

    query_start: torch.Tensor  # (requests + 1,)
    state_in: torch.Tensor  # (requests,)
    state_out: torch.Tensor  # (tokens,)
    token_request: torch.Tensor  # (tokens,)
    num_requests: torch.Tensor  # (1,)


@triton.jit
def conv_input(x, state, first, i, slot, c, width, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, GATED: tl.constexpr):
    """Return input i of a request whose first token of the step is `first`; below 0, of its state."""
    at = x + (first + i).to(tl.int64) * width + c
    mask = c < tl.where(i >= 0, CHANNELS, 0)
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        value *= tl.load(at + 2 * CHANNELS, mask=mask, other=0.0).to(tl.float32)
    tail = state + (slot * (KERNEL - 1) + KERNEL - 1 + i) * CHANNELS + c
    kept = tl.where(i < 0, tl.where(slot >= 0, CHANNELS, 0), 0)
    return value + tl.load(tail, mask=c < kept, other=0.0)


@triton.jit
def conv_tokens(
    x, weight, state, query_start, state_in, state_out, token_request, out, width,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    WRITES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Convolve BLOCK channels of a token: program (channels, token). x (tokens, width) holds the channels first.

    GATED: three parts of them, b, c and v: c * conv(b * v). WRITES: a request has one token, and its state is stored.
    """
    c, t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    launch_next(PDL)
    wait_for_previous(PDL)
    request = tl.load(token_request + t)
    if request >= 0:
        mask = c < CHANNELS
        first, slot = tl.load(query_start + request), tl.load(state_in + request).to(tl.int64)
        written = tl.load(state_out + t).to(tl.int64)
        total = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(KERNEL):
            i = t - first - (KERNEL - 1) + j
            value = conv_input(x, state, first, i, slot, c, width, CHANNELS, KERNEL, GATED)
            total += tl.load(weight + c * KERNEL + j, mask=mask, other=0.0) * value
            if WRITES and j > 0:  # behind the reads of this row: rows move towards the first
                to = state + (written * (KERNEL - 1) + j - 1) * CHANNELS + c
                tl.store(to, value, mask=c < tl.where(written >= 0, CHANNELS, 0))
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        if GATED:
            total *= tl.load(x + t.to(tl.int64) * width + CHANNELS + c, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + t.to(tl.int64) * CHANNELS + c, total, mask=mask)


@triton.jit
def conv_states(
    x,
    state,
    query_start,
    state_in,
    state_out,
    num_requests,
    width,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Store the states of some requests: program (channels, requests). TAIL: KERNEL - 1, rounded up to a power of 2."""
    c, j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TAIL)[:, None]
    place, in_channels = j * CHANNELS + c[None, :], (c < CHANNELS)[None, :]
    mask, size = in_channels & (j < KERNEL - 1), (KERNEL - 1) * CHANNELS
    for request in range(tl.program_id(1), tl.load(num_requests), tl.num_programs(1)):
        first, end = tl.load(query_start + request), tl.load(query_start + request + 1)
        slot = tl.load(state_in + request).to(tl.int64)
        has_tail = in_channels & (j < tl.where(slot >= 0, KERNEL - 1, 0))
        tail = tl.load(state + slot * size + place, mask=has_tail, other=0.0)  # before anything is written
        for start in range(first, end, RUN):
            run = start + tl.arange(0, RUN)
            if tl.max(tl.load(state_out + run, mask=run < end, other=-1), 0) >= 0:
                for t in range(start, tl.minimum(start + RUN, end)):
                    written = tl.load(state_out + t).to(tl.int64)
                    if written >= 0:
                        i = t - first - (KERNEL - 2) + j  # of the input for each row
                        at = x + (first + i).to(tl.int64) * width + c[None, :]
                        value = tl.load(at, mask=mask & (i >= 0), other=0.0).to(tl.float32)
                        if GATED:
                            value *= tl.load(at + 2 * CHANNELS, mask=mask & (i >= 0), other=0.0).to(tl.float32)
                        for row in tl.static_range(KERNEL - 1):  # of the state before, for the first tokens
                            kept = tl.sum(tl.where(j == row, tail, 0.0), 0)
                            value += tl.where(i + (KERNEL - 1) == row, kept[None, :], 0.0)
                        tl.store(state + written * size + place, value, mask=mask)


def launch_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: StateLayer,
    slots: StateInputs,
    activation: str,
    *,
    gated: bool,
    one_token: bool,
    pdl: bool = False,
) -> torch.Tensor:
    """Return the convolution (tokens, channels) of rows (tokens, width), and store the states.

    `one_token`: of each request."""
    channels, kernel = weight.shape
    out = torch.empty(len(x), channels, device=x.device)
    block = 1024 if is_interpreted() else BLOCK
    grid = triton.cdiv(channels, block)
    conv_tokens[(grid, len(x))](
        x, weight, state.conv, *slots[:4], out, x.shape[1], channels, kernel, activation == "silu", gated, block,
        one_token, pdl, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    if not one_token:
        conv_states[(grid, min(len(slots.state_in), MAX_REQUESTS))](
            x,
            state.conv,
            *slots[:3],
            slots.num_requests,
            x.shape[1],
            channels,
            kernel,
            gated,
            block,
            RUN,
            triton.next_power_of_2(kernel - 1),
            num_warps=4,
        )
    return out
