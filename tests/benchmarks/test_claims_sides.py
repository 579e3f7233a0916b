"""The experiments' sides compute the same: caches, masks, rotations, modules and integrated forwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.claims import architecture, caches, masks, numpy_model, rope
from benchmarks.claims.harness import Harness, Shape, Step, require_equal
from benchmarks.claims.targets import Target
from llm_worker_bench import synthetic
from llm_worker_bench.micro import ROPE_BASE
from llm_worker_bench.results import Recorder
from llm_worker_rbee.backends import reference, select_backend
from llm_worker_rbee.backends.ops import RopeTable
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.errors import InferenceError, UnsupportedModelError
from llm_worker_rbee.layers.rope import inverse_frequencies
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf
from tests.cli.conftest import HEADS, model_keys, model_tensors, vocabulary, write_model

SHAPE = Shape(d_model=64, n_heads=2, head_dim=32, d_ff=64)
REFERENCE = Target(ReferenceBackend())
STEPS = [Step("prefill", 6), Step("decode", 5)]


@pytest.fixture(scope="module")
def cpu() -> Target:
    return Target(select_backend("cpu", "cpu", 1))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("experiments") / "tiny.gguf")


def harness_of(*targets: Target) -> Harness:
    return Harness(Recorder("experiments"), lambda *_: None, Path("none"), targets, shape=SHAPE)


@pytest.mark.parametrize("prompt", [1, 9, numpy_model.QUERY_TILE + 6])
@pytest.mark.parametrize("modules", [numpy_model.DENSE, numpy_model.GROWING, numpy_model.CACHED_MASKS])
def test_numpy_sides_equal_the_models_logits(tiny: Path, prompt: int, modules: numpy_model.DenseBackend) -> None:
    checkpoint, capacity = open_checkpoint(tiny), prompt + architecture.DECODE_STEPS
    made = architecture.make_sides(REFERENCE, checkpoint, capacity, modules)
    for step in (Step("prefill", prompt), Step("decode", prompt), Step("decode", prompt)):  # it starts anew each time
        made.check(step)
    sequence = SingleSequence(load_model(checkpoint, ReferenceBackend(), read_model_config(checkpoint)), capacity)
    plain = sequence.model.forward(sequence.batch(made.ids, 0, all_logits=False), sequence.cache)
    assert np.allclose(plain, made.run("integrated", Step("decode", prompt)), atol=1e-4)


def test_kernel_sides_agree_on_a_block_and_refuse_a_difference(cpu: Target) -> None:
    checkpoint = synthetic.checkpoint(architecture.block_spec(SHAPE))
    made = architecture.make_sides(cpu, checkpoint, 12, numpy_model.DENSE)
    for step in STEPS:
        made.check(step)
        assert made.run("modules", step).tobytes() == made.run("integrated", step).tobytes()
    other = architecture.make_sides(REFERENCE, checkpoint, 12, numpy_model.DENSE)
    other.check(STEPS[0])
    broken = replace(other.sides.model, norm=replace(other.sides.model.norm, eps=1.0))
    assert isinstance(other.sides, architecture.NumpySides)
    other.sides.model = broken
    with pytest.raises(InferenceError, match="logits of prefill of 6 tokens on reference: the two sides"):
        other.check(STEPS[0])


def test_numpy_sides_grouped_heads_agree(tmp_path: Path) -> None:
    """As the default model has them: several query heads on one KV head."""
    keys = {**model_keys(), **vocabulary(), "llama.attention.head_count_kv": HEADS // 2}
    tensors = model_tensors(len(keys["tokenizer.ggml.tokens"]))
    halved = {name: t[: len(t) // 2] if "attn_k." in name or "attn_v." in name else t for name, t in tensors.items()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "grouped.gguf", keys, halved))
    made = architecture.make_sides(REFERENCE, checkpoint, numpy_model.QUERY_TILE + 7, numpy_model.GROWING)
    for phase in ("prefill", "decode"):
        made.check(Step(phase, numpy_model.QUERY_TILE + 5))  # type: ignore[arg-type]


def test_require_plain_llama_other_model_raises(tiny: Path) -> None:
    config = read_model_config(open_checkpoint(tiny))
    numpy_model.require_plain_llama(config)
    with pytest.raises(UnsupportedModelError, match="needs a plain llama: this model has a window"):
        numpy_model.require_plain_llama(replace(config, windows=(4,) * config.n_layers))
    with pytest.raises(UnsupportedModelError, match="activation gelu_tanh"):
        numpy_model.require_plain_llama(replace(config, activation="gelu_tanh"))


def test_no_work_model_calls_as_many_ops_as_a_model_of_its_layers() -> None:
    one, three = (architecture.load_no_work_model(ReferenceBackend(), n).graph().nodes for n in (1, 3))
    many = synthetic.checkpoint(synthetic.parse("smollm2-135m:Q4_1:3"))
    real = load_model(many, ReferenceBackend(), read_model_config(many)).graph().nodes
    assert [node.op for node in three] == [node.op for node in real]
    assert len(three) > 2 * len(one)


@pytest.mark.parametrize("step", STEPS)
def test_unified_and_separate_caches_are_equal(cpu: Target, step: Step) -> None:
    for target in (REFERENCE, cpu):
        inputs = caches.make_inputs(target, SHAPE, step)
        one, other = (make(target, SHAPE, step).attend(*inputs, step.start) for make in caches.CACHES.values())
        assert one.tobytes() == other.tobytes()


def test_caches_attend_as_the_formula_says(cpu: Target) -> None:
    step, positions = STEPS[0], np.arange(6)
    q, k, v = caches.make_inputs(REFERENCE, SHAPE, step)
    table = RopeTable(inverse_frequencies(ROPE_BASE, SHAPE.head_dim), 1.0)
    turned, keys = (reference.rope(x, positions, table) for x in (q, k))
    scores = np.einsum("thd,shd->hts", turned, keys) * SHAPE.head_dim**-0.5
    seen = reference.causal_mask(positions, positions)
    weights = reference.softmax(np.where(seen, scores, -np.inf).astype(np.float32))
    expected = np.einsum("hts,shd->thd", weights, v)
    for target, tolerance in ((REFERENCE, 1e-5), (cpu, 5e-3)):  # keys and values of the kernels are float16
        found = caches.CACHES["unified"](target, SHAPE, step).attend(q, k, v)
        assert np.allclose(found.reshape(expected.shape), expected, atol=tolerance)


def test_measure_memory_is_little_more_than_the_arrays() -> None:
    n, heads, dim = 64, SHAPE.n_heads, SHAPE.head_dim
    arrays, step = 4 * (2 * n * heads * dim + 2 * n * dim // 2 + n * n), Step("prefill", n)
    inputs = caches.make_inputs(REFERENCE, SHAPE, step)
    for make in caches.CACHES.values():
        held = caches.measure_memory(REFERENCE.ops, lambda m=make: m(REFERENCE, SHAPE, step), inputs)  # type: ignore[misc]
        assert arrays < held < arrays + 8192


@pytest.mark.parametrize("step", STEPS)
def test_three_kinds_of_kv_cache_give_the_same(step: Step) -> None:
    grown, preallocated, paged = (side() for side in caches.kv_sides(SHAPE, step).values())
    for a, b, c in zip(grown, preallocated, paged, strict=True):
        assert a.shape == (step.context, SHAPE.n_heads, SHAPE.head_dim)
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)
    one, other = (side() for side in caches.rope_sides(SHAPE, step).values())
    assert np.array_equal(one, other)


@pytest.mark.parametrize("step", [Step("prefill", n) for n in (1, 31, 32, 33, 70)] + [Step("decode", 40)])
def test_bounded_softmax_equals_masked_softmax(step: Step) -> None:
    sides = masks.numpy_sides(REFERENCE, harness_of(REFERENCE), step)
    assert np.allclose(sides["none"](), sides["masked"](), atol=1e-6)
    assert sides["made"]().tobytes() == sides["kept"]().tobytes() == sides["adding"]().tobytes()
    assert sides["making"]().tobytes() == sides["lookup"]().tobytes()


def test_mask_bytes_are_those_of_all_lengths() -> None:
    assert masks.mask_bytes(1) == 4
    assert masks.mask_bytes(70) == sum(numpy_model.additive_mask(n).nbytes for n in range(1, 71))


@pytest.mark.parametrize("step", [Step("prefill", 130), Step("decode", 9)])
def test_rope_sides_of_each_backend_agree(cpu: Target, step: Step) -> None:
    """`make_sides` raises if a side differs from the formula."""
    assert set(rope.make_sides(REFERENCE, harness_of(REFERENCE), step)) == {"formula", "angles", "table", "in_place"}
    assert set(rope.make_sides(cpu, harness_of(cpu), step)) == {"formula", "angles", "table"}


def test_rope_in_place_allocates_nothing_new() -> None:
    q, k, _ = caches.make_inputs(REFERENCE, SHAPE, STEPS[0])
    rotation = rope.InPlaceRope(q, k, STEPS[0])
    before = rotation.heads[0]
    assert rotation.rotate()[0] is before


def test_require_equal_different_sides_raises() -> None:
    one = np.zeros(4, np.float32)
    require_equal(one, one + np.float32(1e-6), 1e-5, "x")
    for wrong in (one + np.float32(1e-3), one * np.nan, np.zeros(5, np.float32)):
        with pytest.raises(InferenceError, match="x: the two sides of the experiment differ"):
            require_equal(one, wrong, 1e-5, "x")
