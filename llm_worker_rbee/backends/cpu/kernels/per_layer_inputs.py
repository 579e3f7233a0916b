"""Per-layer embeddings: the inputs of all layers, made once in a step, and the gate of each layer.

Rows are independent: a token has the same bits alone and in a batch.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ..jit import TaskKernel
from . import simd as f
from .elementwise import TOKENS_PER_PIECE, gate_row, norm_row, quantize_row
from .pointers import f32, f64, i64, scratch
from .program import Step, Task, pack_args, pack_floats
from .simd import LANES

Floats = NDArray[np.float32]
ACTIVATIONS = ("silu", "gelu_tanh")

# X, TOKENS and OUT are entries; a row has RUNS of WIDTH values.
InputsArg = IntEnum("InputsArg", "X TOKENS OUT RUNS WIDTH WEIGHT EPS", start=0)
# OUT and ACTIVATIONS (quantize the rows) are optional; FIRST is the place of the layer's values in a row of inputs.
GateArg = IntEnum("GateArg", "X INPUTS OUT ACTIVATIONS WIDTH INPUTS_WIDTH FIRST ACTIVATION TWO_TERM", start=0)


def per_layer_inputs(args, step, piece):
    """Norm each run of values of some tokens, and add their embeddings."""
    a, s = i64(args), i64(step)
    runs, width, eps = a[InputsArg.RUNS], a[InputsArg.WIDTH], np.float32(f64(args)[InputsArg.EPS])
    x, tokens, out = f32(s[a[InputsArg.X]]), f32(s[a[InputsArg.TOKENS]]), f32(s[a[InputsArg.OUT]])
    first, whole = piece * TOKENS_PER_PIECE, width - width % LANES
    for t in range(first, min(s[Step.TOKENS], first + TOKENS_PER_PIECE)):
        for at in range(t * runs * width, (t + 1) * runs * width, width):
            norm_row(x, at, f32(a[InputsArg.WEIGHT]), eps, out, at, width)
            for i in range(0, whole, LANES):
                f.store(out, at + i, f.add(f.load(out, at + i), f.load(tokens, at + i)))
            for i in range(whole, width):
                out[at + i] = out[at + i] + tokens[at + i]


def per_layer_gate(args, step, piece):
    """Multiply the inputs of a layer of some tokens by their gates, and quantize them."""
    a, s = i64(args), i64(step)
    width, tokens, first = a[GateArg.WIDTH], s[Step.TOKENS], piece * TOKENS_PER_PIECE
    x, inputs, own = f32(s[a[GateArg.X]]), f32(s[a[GateArg.INPUTS]]), scratch(width)
    for t in range(first, min(tokens, first + TOKENS_PER_PIECE)):
        to, at = (f32(s[a[GateArg.OUT]]), t * width) if a[GateArg.OUT] else (own, 0)
        up = t * a[GateArg.INPUTS_WIDTH] + a[GateArg.FIRST]
        gate_row(x, t * width, inputs, up, to, at, width, a[GateArg.ACTIVATION] == 1)
        if a[GateArg.ACTIVATIONS]:
            quantize_row(to, at, s, a[GateArg.ACTIVATIONS], t, width, a[GateArg.TWO_TERM], tokens)


PER_LAYER_INPUTS, PER_LAYER_GATE = TaskKernel(per_layer_inputs), TaskKernel(per_layer_gate)


def inputs_task(x: int, tokens: int, out: int, runs: int, weight: Floats, eps: float) -> Task:
    """Return the inputs of all layers; the first arguments are entries."""
    args = pack_args(x, tokens, out, runs, len(weight), weight, 0)
    return Task(PER_LAYER_INPUTS, pack_floats(args, InputsArg.EPS, [eps]), 1, Step.TOKENS, TOKENS_PER_PIECE)


def gate_task(
    entries: tuple[int, int, int, int], width: int, inputs_width: int, layer: int, activation: str, *, two_term: bool
) -> Task:
    """Return the gate of a layer: entries of X, INPUTS, OUT and ACTIVATIONS."""
    args = pack_args(*entries, width, inputs_width, layer * width, ACTIVATIONS.index(activation), two_term)
    return Task(PER_LAYER_GATE, args, 1, Step.TOKENS, TOKENS_PER_PIECE)
