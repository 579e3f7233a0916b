"""A whole step as one program: the bits of single ops for every family, and what a program itself promises."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_worker_rbee.backends import reference_sampling
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.cpu.forward import CpuForward, useful_threads
from llm_worker_rbee.backends.cpu.jit import TaskKernel
from llm_worker_rbee.backends.cpu.kernels.elementwise import embed_task
from llm_worker_rbee.backends.cpu.kernels.pointers import i64
from llm_worker_rbee.backends.cpu.kernels.program import Step, Task, pack_args
from llm_worker_rbee.backends.cpu.linear import dequantize_rows
from llm_worker_rbee.backends.cpu.lowering import REWRITES
from llm_worker_rbee.backends.cpu.packed_weight import LAYOUT_BY_TYPE
from llm_worker_rbee.backends.cpu.program import Program, new_step
from llm_worker_rbee.backends.graph import op_names
from llm_worker_rbee.backends.ops import SampleRow
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.errors import InferenceError
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.quants import ALL_TYPES
from tests.backends.cpu.test_encoder import ENCODER_REWRITES
from tests.helpers.model_runs import compute_logits, load, step_logits
from tests.helpers.model_zoo import NO_GGUF_KEY, ZOO, make_hf, prompt_ids, save_gguf, save_hf, save_quantized
from tests.helpers.synthetic import random_tensor

cpu = CpuBackend()


@pytest.mark.parametrize("name", ZOO)
def test_fused_forward_has_the_bits_of_single_ops_and_the_values_of_the_reference(name: str, tmp_path: Path) -> None:
    made = make_hf(ZOO[name])
    has_gguf = name not in NO_GGUF_KEY
    path = save_gguf(ZOO[name], made, tmp_path / "model.gguf") if has_gguf else save_hf(made, tmp_path / "model")
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, cpu, read_model_config(checkpoint))  # type: ignore[arg-type]
    ids = prompt_ids(ZOO[name])
    whole = step_logits(model, ids, [len(ids)], fused=True)
    np.testing.assert_array_equal(whole, step_logits(model, ids, [len(ids)], fused=False))
    cut = [1, 5, 2, *[1] * (len(ids) - 8)]
    np.testing.assert_array_equal(step_logits(model, ids, cut, fused=True), whole)
    expected = compute_logits(load(path), ids)
    assert np.abs(whole - expected).max() < 2e-3 * np.abs(expected).max()


def test_every_rewrite_is_used_and_has_the_bits_of_single_ops(default_model: Path, tmp_path: Path) -> None:
    """On quantized weights; heads of 64, which attention quantizes itself, are those of the default model."""
    names, used = ("llama", "qwen2", "qwen3", "gemma2", "olmo2", "gemma4-e", "lfm2", "qwen3_5"), set()
    paths = [save_quantized(ZOO[name], make_hf(ZOO[name]), tmp_path / f"{name}.gguf", "Q8_0") for name in names]
    for path in (*paths, default_model):
        checkpoint = open_checkpoint(path)
        model = load_model(checkpoint, cpu, read_model_config(checkpoint), 64)
        ids = list(range(3, 15))
        single = step_logits(model, ids, [len(ids)], fused=False)
        np.testing.assert_array_equal(step_logits(model, ids, [len(ids)], fused=True), single)
        assert isinstance(model.fused, CpuForward)
        used |= {(node.op, op_names(node)) for node in model.fused.graph.nodes if node.fused}
    for rewrite in (one for one in REWRITES if one.into not in ENCODER_REWRITES):
        needed = {name.rstrip("*") for name in rewrite.pattern.split() if not name.endswith("?")}
        assert any(op == rewrite.into and needed <= set(ops.split(" + ")) for op, ops in used), rewrite.pattern


@pytest.mark.parametrize("name", LAYOUT_BY_TYPE)
def test_embed_task_of_every_type_equals_dequantized_rows(name: str) -> None:
    columns, factor = 512, 3.0
    weight = cpu.prepare([random_tensor(ALL_TYPES[name], (70, columns), seed=5)])
    ids = np.array([69, 0, 17, 17, 32], np.int64)
    out = np.full((len(ids), columns), np.nan, np.float32)
    step = new_step(Step.END + 1)
    step[Step.TOKENS], step[Step.TOKEN_IDS], step[Step.END] = len(ids), ids.ctypes.data, out.ctypes.data
    Program([embed_task(weight.parts[0], factor, Step.END)]).run(step, 2)
    np.testing.assert_array_equal(out, dequantize_rows(weight.parts[0], ids) * np.float32(factor))


def mark(args, step, piece):  # type: ignore[no-untyped-def]
    """Count that this piece was done."""
    i64(i64(step)[Step.SAMPLE_INTS])[piece] += 1


def gather(args, step, piece):  # type: ignore[no-untyped-def]
    """The sum of all that the instruction before should have written, less what it must be."""
    s, a = i64(step), i64(args)
    total = 0
    for i in range(a[0]):
        total += i64(s[Step.SAMPLE_INTS])[i]
    i64(s[Step.SAMPLE_FLOATS])[piece] += total - a[1]


MARK, GATHER = TaskKernel(mark), TaskKernel(gather)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_program_runs_every_piece_once_before_the_next_task(workers: int) -> None:
    pieces, rounds = 37, 40
    tasks = []
    for i in range(rounds):
        tasks.append(Task(MARK, pack_args(0), 1, Step.TOKENS, 1))
        tasks.append(Task(GATHER, pack_args(pieces, pieces * (i + 1)), 5, Step.TOKENS, pieces))
    done, missed, step = np.zeros(pieces, np.int64), np.zeros(5, np.int64), new_step()
    step[Step.TOKENS], step[Step.SAMPLE_INTS], step[Step.SAMPLE_FLOATS] = pieces, done.ctypes.data, missed.ctypes.data
    program = Program(tasks)
    for _ in range(20):
        done[:] = 0
        program.run(step, min(workers, 2))
        np.testing.assert_array_equal(done, rounds)
        np.testing.assert_array_equal(missed, 0)


def test_step_uses_fewer_threads_for_a_small_model_and_more_for_long_contexts(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    model = load_model(checkpoint, cpu, read_model_config(checkpoint), 64)  # type: ignore[arg-type]
    fused = CpuForward(model.graph(), 2)
    fused.threads = 1024  # as many as a step may want
    kv = [cpu.empty_kv(4, 16, 3, 64, "float16") for _ in model.blocks]
    parts = fused._programs("float16")

    def threads(tokens: int, context: int) -> int:
        batch = SimpleNamespace(ids=np.zeros(tokens, np.int64), context_len=np.array([context], np.int64))
        return fused._threads_for(batch, kv, parts)  # type: ignore[arg-type]

    one, deep, many = threads(1, 1), threads(1, 8192), threads(512, 512)
    assert 2 < one < deep < many
    fused.threads = 4
    assert threads(512, 512) == 4
    assert useful_threads(1000, 300) == 2  # of the smallest model
    powers = {useful_threads(work, 300) for work in range(10**6, 10**9, 10**6)}
    assert powers == {2, 4, 8, 16, 32, 64}


def test_fused_forward_from_two_python_threads_has_the_same_bits(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    model = load_model(checkpoint, cpu, read_model_config(checkpoint), 64)  # type: ignore[arg-type]
    prompts = [np.random.default_rng(seed).integers(0, 49152, 12).tolist() for seed in range(4)]
    alone = [step_logits(model, ids, [8, 1, 1, 1, 1], fused=True) for ids in prompts]
    together: dict[int, NDArray[np.float32]] = {}

    def one(i: int) -> None:
        together[i] = step_logits(model, prompts[i], [8, 1, 1, 1, 1], fused=True)

    workers = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i, expected in enumerate(alone):
        np.testing.assert_array_equal(together[i], expected)


def test_fused_forward_of_empty_step_and_repeated_logits_index(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    model = load_model(checkpoint, cpu, read_model_config(checkpoint), 64)  # type: ignore[arg-type]
    runner = SingleSequence(model, 32)
    batch = runner.batch(list(range(100, 110)), 0, all_logits=False)
    last = model.forward(batch, runner.cache)
    twice = model.forward(replace(batch, logits_index=np.array([9, 3, 9, 9], np.int64)), runner.cache)
    np.testing.assert_array_equal(twice[[0, 2, 3]], np.repeat(last, 3, axis=0))
    nothing = runner.batch([], 10, all_logits=True)
    assert model.forward(nothing, runner.cache).shape == (0, 49152)
    with pytest.raises(InferenceError, match="outside the vocabulary"):
        model.forward(runner.batch([49152], 10, all_logits=False), runner.cache)


def test_fused_forward_keeps_no_reference_to_the_kv_cache(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    model = load_model(checkpoint, cpu, read_model_config(checkpoint), 64)  # type: ignore[arg-type]
    runner = SingleSequence(model, 16)
    model.forward(runner.batch([1, 2], 0, all_logits=False), runner.cache)
    keys = weakref.ref(runner.cache.layers[0].k)
    del runner
    gc.collect()
    assert keys() is None


def test_memory_of_logits_is_used_again_once_no_array_refers_to_it(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    model = load_model(checkpoint, cpu, read_model_config(checkpoint), 64)  # type: ignore[arg-type]
    runner = SingleSequence(model, 32)
    batches = [runner.batch([token], 0, all_logits=False) for token in (5, 6, 7)]
    expected = [model.forward(batch, runner.cache).copy() for batch in batches]
    first = model.forward(batches[0], runner.cache)
    row = model.forward(batches[1], runner.cache)[0]  # the rest is not kept
    address = model.forward(batches[2], runner.cache).ctypes.data
    np.testing.assert_array_equal(first, expected[0])
    np.testing.assert_array_equal(row, expected[1][0])
    assert address not in (first.ctypes.data, row.ctypes.data)
    assert model.forward(batches[0], runner.cache).ctypes.data == address


def test_batch_that_is_changed_in_place_is_seen(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    model = load_model(checkpoint, cpu, read_model_config(checkpoint), 64)  # type: ignore[arg-type]
    runner, other = SingleSequence(model, 32), SingleSequence(model, 32)
    batch = runner.batch([5], 0, all_logits=False)
    spread = replace(batch, ids=np.array([5, 0], np.int64)[::2])  # apart in memory: the step has a copy of it
    for token in (5, 900, 7):
        batch.ids[0] = spread.ids[0] = token
        expected = model.forward(other.batch([token], 0, all_logits=False), other.cache).copy()
        for changed in (batch, spread):
            np.testing.assert_array_equal(model.forward(changed, runner.cache), expected)
            np.testing.assert_array_equal(model.forward(changed, other.cache), expected)
    batch.ids[0] = 49152
    with pytest.raises(InferenceError, match="outside the vocabulary"):
        model.forward(batch, runner.cache)


@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_of_a_step_are_those_of_the_reference(default_model: Path, threads: int) -> None:
    """Rows come, change places and go; only their positions and the tokens that penalties cover change."""
    checkpoint = open_checkpoint(default_model)
    backend = CpuBackend(threads)
    model = load_model(checkpoint, backend, read_model_config(checkpoint), 64)  # type: ignore[arg-type]
    assert model.fused is not None
    rng, runner = np.random.default_rng(4), SingleSequence(model, 32)
    rows = [
        SampleRow(temperature=0.0),
        SampleRow(temperature=0.8, top_p=0.9, seed=2**64 - 1),
        SampleRow(temperature=1.1, top_k=7, repetition_penalty=1.3, seed=5),
        SampleRow(temperature=0.0, presence_penalty=0.9, frequency_penalty=0.4),
        SampleRow(temperature=0.0, logit_bias=((17, 100.0),)),
    ]
    for position in range(12):
        count = int(rng.integers(0, 7))
        sampled = [rows[i] for i in rng.integers(0, len(rows), count)]
        for row in sampled:
            row.position = position
            if row.repetition_penalty != 1.0:
                row.penalty_window = rng.integers(0, 49152, rng.integers(0, 40))
            if row.presence_penalty:
                row.output_ids = rng.integers(0, 49152, rng.integers(0, 40))
        batch = runner.batch(rng.integers(0, 49152, max(1, count)).tolist(), 0, all_logits=True)
        batch = replace(batch, logits_index=np.arange(count))
        logits, tokens = model.fused.sample(batch, runner.cache.layers, sampled)
        expected = [reference_sampling.sample_row(line, row) for line, row in zip(logits, sampled, strict=True)]
        assert [want if token < 0 else token for token, want in zip(tokens, expected, strict=True)] == expected
        assert tokens.count(-1) <= 1
        assert backend.sample(logits, sampled).tolist() == expected
