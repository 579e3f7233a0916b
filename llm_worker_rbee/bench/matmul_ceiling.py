"""All matrix products of a model and nothing else: the rate that they alone would allow for a number of rows.

On the CPU they are one program, with the activation quantization they need, as in a step; elsewhere they run one after
the other. Activations are random, results are discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models import Transformer

SEED = 5


def products(model: Transformer, rows: int) -> Callable[[], object]:
    """Return a function that multiplies `rows` activations with every matrix of the model once."""
    return _program(model, rows) if model.ops.name == "cpu" else _one_by_one(model, rows)


def _one_by_one(model: Transformer, rows: int) -> Callable[[], object]:
    ops, c, blocks = model.ops, model.config, model.parts().blocks
    wide, heads, deep = (
        ops.prepare_vector(_random(rows, width)) for width in (c.d_model, c.n_heads * c.head_dim, c.d_ff)
    )
    pairs = [pair for b in blocks for pair in ((wide, b.qkv), (heads, b.output), (wide, b.gate_up), (deep, b.down))]

    def multiply() -> object:
        for x, weight in pairs:
            ops.linear(x, weight)
        return ops.logits(wide, model.head)

    return multiply


def _program(model: Transformer, rows: int) -> Callable[[], object]:
    """Make a program whose step table points at one input and one output, large enough for all."""
    names = ("linear", "program", "quantize_activations")  # they need Numba
    linear, programs, quantize_activations = (import_module(f"llm_worker_rbee.backends.cpu.{name}") for name in names)
    Step, parts, threads = programs.Step, model.parts(), model.ops.threads or 1  # noqa: N806
    weights = [w for b in parts.blocks for w in (b.qkv, b.output, b.gate_up, b.down)] + [parts.head.two_term()]
    widest = max(w.columns for w in weights)
    made: list[Any] = []
    for w in weights:
        width, two_term = w.columns, any(w.residual_activations)
        made += linear.quantize_tasks(
            Step.TOKENS, Step.RESIDUAL_DELTA, 1, width, width, w.needs_int8, two_term=two_term
        )
        made += linear.linear_tasks(w, Step.TOKENS, Step.RESIDUAL_DELTA, Step.QKV, threads)
    program, step = programs.Program(made), programs.new_step()
    buffers: dict[int, NDArray[Any]] = {
        Step.RESIDUAL_DELTA: _random(rows, widest),
        Step.QKV: np.empty((rows, max(w.rows for w in weights)), np.float32),
        **dict(enumerate(quantize_activations.allocate(2 * rows, widest), Step.ACTIVATIONS)),
    }
    step[Step.TOKENS] = rows
    for entry, buffer in buffers.items():
        step[entry] = buffer.ctypes.data

    def multiply() -> object:
        program.run(step, threads)
        return buffers[Step.QKV]

    return multiply


def _random(rows: int, width: int) -> NDArray[np.float32]:
    return np.random.default_rng(SEED).standard_normal((rows, width), np.float32)
