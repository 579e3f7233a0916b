"""The matrix products of a model alone: every matrix once, with the real weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.backends.cpu import CpuBackend, program
from llm_worker_rbee.backends.cpu.linear import linear_tasks
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.bench import matmul_ceiling as room
from llm_worker_rbee.bench.synthetic import Shape, Spec, checkpoint
from llm_worker_rbee.models import Transformer, load_model, read_model_config

cpu = CpuBackend()

SHAPE = Shape(2, 64, 4, 2, 96, 300, 320)


def model(ops: Any, mix: str = "Q8_0") -> Transformer:
    made = checkpoint(Spec("small", SHAPE, mix, 2))
    return load_model(made, ops, read_model_config(made))


def test_products_one_by_one_use_each_matrix_once() -> None:
    used = list[tuple[tuple[int, ...], Any]]()

    class Recording(ReferenceBackend):
        def linear(self, x: Any, w: Any, bias: Any = None) -> Any:
            used.append((x.shape, w))
            return super().linear(x, w, bias)

    plain = model(Recording())
    out: Any = room.products(plain, 3)()
    parts = plain.parts()
    layers = [w for b in parts.blocks for w in (b.qkv, b.output, b.gate_up, b.down)]
    assert [w for _, w in used] == layers
    assert {shape for shape, _ in used} == {(3, 64), (3, 96)}
    np.testing.assert_array_equal(out, ReferenceBackend().logits(room._random(3, 64), plain.head))


@pytest.mark.parametrize("mix", ["Q8_0", "Q4_K_M", "F16"])
@pytest.mark.parametrize("rows", [1, 16])
def test_products_program_ends_with_the_head(mix: str, rows: int) -> None:
    made = model(cpu, mix)
    head, widest = made.head.two_term(), max(96, 64)
    out: Any = room.products(made, rows)()
    x = room._random(rows, widest).reshape(-1)[: rows * 64].reshape(rows, 64)
    wanted = head.matmul(x, cpu.threads)
    np.testing.assert_array_equal(out.reshape(-1)[: wanted.size], wanted.reshape(-1))


def test_products_program_has_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made of the tasks of the single products, in the order of the layers."""
    made, run = model(cpu), list[Any]()
    original = program.Program
    monkeypatch.setattr(program, "Program", lambda some: run.extend(some) or original(some))
    room.products(made, 2)()
    parts = made.parts()
    weights = [w for b in parts.blocks for w in (b.qkv, b.output, b.gate_up, b.down)] + [parts.head.two_term()]
    step = program.Step
    single = [linear_tasks(w, step.TOKENS, step.RESIDUAL_DELTA, step.QKV, cpu.threads) for w in weights]
    wanted = [task.args.tolist() for some in single for task in some]
    found = [task.args.tolist() for task in run]
    assert [args for args in found if args in wanted] == wanted
