"""Synthetic models: llama.cpp's mix of types, sound random blocks, a file that others read."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llm_worker_bench import synthetic
from llm_worker_bench.engine_harness import EngineHarness
from llm_worker_bench.micro import WEIGHT_TYPES
from llm_worker_bench.synthetic import (
    SHAPES,
    SPREAD,
    Shape,
    Spec,
    block_pool,
    checkpoint,
    parse,
    plans,
    random_tensor,
    write,
)
from llm_worker_rbee import LLM
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.errors import InsufficientMemoryError, InvalidRequestError, WorkerError
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.models.pooling_config import read_pooling_config
from llm_worker_rbee.models.pooling_loader import load_pooling_model
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.quants import BlockType
from tests.helpers import llama_cpp_types

ROLES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
EXPERTS = {"experts": 4, "used_experts": 2, "expert_ff": 128}
SMALL = Shape(3, 256, 8, 2, 512, 320, 64)


def spread_out(line: str, layers: int) -> dict[str, list[str]]:
    """A line of the table of facts: role -> types over the layers."""
    embedding, output, *rest = line.split(" ")
    found = {"token_embd": [embedding], "output": [] if output == "-" else [output]}
    for role, runs in zip(ROLES, rest, strict=True):
        pairs = [run.rpartition("x") if "x" in run else (run, "x", str(layers)) for run in runs.split(",")]
        found[role] = list(chain.from_iterable([kind] * int(count) for kind, _, count in pairs))
        assert len(found[role]) == layers
    return found


@pytest.mark.parametrize("mix", llama_cpp_types.TYPES["plain"])
@pytest.mark.parametrize("name", llama_cpp_types.SHAPES)
def test_plans_types_equal_llama_cpp(name: str, mix: str) -> None:
    shape = llama_cpp_types.SHAPES[name]
    found: dict[str, list[str]] = {role: [] for role in ("token_embd", "output", *ROLES)}
    for plan in plans(Spec(name, shape, mix, shape.layers)):
        if len(plan.shape) == 2:
            found[plan.name.removesuffix(".weight").rpartition(".")[2]].append(plan.kind.name)
        else:
            assert plan.kind.name == "F32"
    assert found == spread_out(llama_cpp_types.TYPES[name][mix], shape.layers)


def test_spec_nbytes_of_a_known_file() -> None:
    # llama-2-7b.Q4_K_M.gguf has 4,081,004,224 bytes; 741,056 of them are metadata and padding.
    assert parse("llama2-7b:Q4_K_M").nbytes == 4_080_263_168
    assert parse("llama2-7b:Q4_K_M:4").nbytes < 4_080_263_168 / 4


@pytest.mark.parametrize("kind", WEIGHT_TYPES, ids=lambda kind: kind.name)
def test_random_tensor_is_finite_and_of_its_size(kind: BlockType) -> None:
    tensor = random_tensor(kind, (64, 4096), size=0.02)
    values = tensor.dequantize()
    assert np.isfinite(values).all()
    assert 0.02 / SPREAD < np.sqrt(np.mean(np.square(values))) < 0.02 * SPREAD
    assert abs(values.mean()) < 0.02
    assert len(np.unique(tensor.rows, axis=0)) > 16


def test_checkpoint_tensors_differ() -> None:
    made = checkpoint(Spec("small", SMALL, "Q4_K_M", 3), seed=1)
    matrices = [t for t in made.tensors.values() if len(t.shape) == 2]
    for i, one in enumerate(matrices):
        assert one.find_nonfinite_scale() is None
        for other in matrices[i + 1 :]:
            assert one.data[:4096].tobytes() != other.data[:4096].tobytes()
    same = checkpoint(Spec("small", SMALL, "Q4_K_M", 3), seed=1)
    assert all((same.tensors[name].data == t.data).all() for name, t in made.tensors.items())
    other = checkpoint(Spec("small", SMALL, "Q4_K_M", 3), seed=2)
    assert (other.tensors["token_embd.weight"].data != made.tensors["token_embd.weight"].data).any()


@pytest.mark.parametrize("mix", ["Q4_K_M", "BF16"])
def test_checkpoint_matrices_are_read_only_views_of_shared_blocks(mix: str) -> None:
    """A model takes little more memory than its largest matrix, and has the bits of tensors made one by one."""
    shape = SMALL._replace(layers=12, vocabulary=2048)
    made = checkpoint(Spec("small", shape, mix, 12), seed=1)
    matrices = {i: t for i, t in enumerate(made.tensors.values()) if len(t.shape) == 2}
    shared: dict[int, int] = {}  # address of an array that matrices are views of -> its bytes
    for number, tensor in matrices.items():
        assert tensor.data.base is not None
        shared[id(tensor.data.base)] = tensor.data.base.nbytes
        assert (tensor.data == random_tensor(tensor.kind, tensor.shape, (1, number)).data).all(), tensor.name
        with pytest.raises(ValueError, match="read-only"):
            tensor.data[0] = 0
    groups = {(t.kind, t.shape[1]) for t in matrices.values()}
    largest = [max(t.nbytes for t in matrices.values() if (t.kind, t.shape[1]) == group) for group in groups]
    pools = sum(block_pool(kind, float(np.float16(columns**-0.5))).nbytes for kind, columns in groups)
    assert sum(shared.values()) <= sum(largest) + 2 * pools
    assert sum(largest) < sum(t.nbytes for t in matrices.values()) / 3


@pytest.mark.parametrize(
    "more",
    [{"architecture": "llama"}, {"architecture": "qwen2"}, {"architecture": "qwen3moe", **EXPERTS}],
    ids=lambda more: more["architecture"],
)
def test_checkpoint_activations_stay_finite(more: dict[str, Any]) -> None:
    shape = SMALL._replace(layers=12, **more)
    made = checkpoint(Spec("deep", shape, "Q4_K_M", 12))
    model = load_model(made, ReferenceBackend(), read_model_config(made))
    ((token,),) = EngineHarness(model, 8).prefill(0, 8, 1).answers  # refuses logits that are not finite
    assert 0 <= token < shape.vocabulary


def test_encoder_is_read_from_its_file(tmp_path: Path) -> None:
    spec = Spec("small", SHAPES["minilm"]._replace(width=64, heads=4, kv_heads=4, d_ff=128, vocabulary=200), "Q8_0", 2)
    opened = open_checkpoint(write(spec, tmp_path / "small.gguf"))
    config = read_model_config(opened)
    model = load_pooling_model(opened, ReferenceBackend(), config, read_pooling_config(opened, config), "float32")
    rows = model.run([np.arange(5), np.arange(9)])
    assert (model.pooling.kind, model.max_length, rows.shape) == ("mean", 512, (2, 64))
    assert np.isfinite(rows).all()


@pytest.mark.parametrize("mix", ["Q4_K_M", "Q5_1", "BF16"])
def test_write_is_read_by_gguf_and_by_us(tmp_path: Path, mix: str) -> None:
    spec = Spec("small", SMALL, mix, 2)
    path = write(spec, tmp_path / "small.gguf", seed=4)
    made, opened = checkpoint(spec, seed=4), open_checkpoint(path)
    assert {name: (t.kind.name, t.shape) for name, t in opened.tensors.items()} == {
        name: (t.kind.name, t.shape) for name, t in made.tensors.items()
    }
    assert all((opened.tensors[name].data == t.data).all() for name, t in made.tensors.items())
    # the file keeps its numbers as float32
    assert replace(read_model_config(opened), norm_eps=1e-5) == read_model_config(made)
    read = gguf.GGUFReader(path)
    for tensor in read.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        assert (values.reshape(-1) == opened.tensors[tensor.name].dequantize().reshape(-1)).all()
    assert len(LLM(path).generate("t5 hello", max_tokens=3, temperature=0.0, ignore_eos=True).tokens) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama9:Q4_0", "unknown synthetic model 'llama9': use one of llama2-7b"),
        ("llama2-7b", "is not of the form"),
        ("llama2-7b:Q4_0:4:4:4", "is not of the form"),
        ("llama2-7b:Q4_0:4:4", "the shape has no experts"),
        ("qwen3-30b-a3b:Q4_0:4:129", "experts must be 1 to 128, not '129'"),
        ("llama2-7b:Q9", "unknown type mix 'Q9': use one of F32"),
        ("llama2-7b:Q4_0:33", "layers must be 1 to 32, not '33'"),
        ("llama2-7b:Q4_0:0", "layers must be 1 to 32, not '0'"),
        ("llama2-7b:Q4_0:x", "layers must be 1 to 32, not 'x'"),
    ],
)
def test_parse_invalid_name_raises(text: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(text)


def test_spec_names() -> None:
    assert str(parse("llama2-7b:q4_k_m:4")) == "llama2-7b:Q4_K_M:4"
    assert str(parse("llama2-7b:Q4_K_M:32")) == "llama2-7b:Q4_K_M"
    assert str(parse("qwen3-30b-a3b:Q4_K_M:48:128")) == "qwen3-30b-a3b:Q4_K_M"
    few = parse("qwen3-30b-a3b:Q4_K_M:4:6")
    assert (str(few), few.shape.experts, few.shape.used_experts) == ("qwen3-30b-a3b:Q4_K_M:4:6", 6, 6)
    for name, shape in SHAPES.items():
        assert shape.head_dim or shape.width % shape.heads == 0, name
        assert shape.heads % shape.kv_heads == 0, name


def test_parse_fp8_is_bf16_quantized_while_loading() -> None:
    spec = parse("llama2-7b:fp8:2")
    assert (str(spec), spec.mix_name, spec.quantize) == ("llama2-7b:FP8:2", "BF16", "fp8")


def test_shapes_have_the_published_parameter_counts() -> None:
    published = {
        "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama3-8b": 8_030_261_248,
        "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824, "mistral-7b": 7_241_732_096,
        "tinyllama-1.1b": 1_100_048_384, "smollm2-135m": 134_515_008, "smollm2-1.7b": 1_711_376_384,
        "qwen2.5-0.5b": 494_032_768,
        "phi3-mini": 3_821_079_552, "qwen3-30b-a3b": 30_532_122_624, "gpt-oss-20b": 20_914_757_184,
        "lfm2-2.6b": 2_569_272_320,
        # without the vision part
        "gemma3-4b": 3_880_099_328, "ministral3-8b": 8_489_553_920, "qwen3.5-9b": 8_953_803_264,
        "gemma4-12b": 11_907_350_576, "qwen2.5-vl-7b": 7_615_616_512, "smolvlm-256m": 134_515_008 + 128 * 576,
        # without the pooler; two segments, and no positions for padding
        "minilm": 22_713_216 - 147_840, "bge-large": 335_141_888 - 1_049_600,
        "bge-m3": 567_754_752 - 1_049_600 - 2 * 1024 + 1024,
    }  # fmt: skip
    assert {name: parse(f"{name}:F32").nbytes // 4 for name in SHAPES} == published


def test_checkpoint_too_large_raises(tmp_path: Path) -> None:
    huge = Spec("huge", Shape(50, 1 << 18, 64, 64, 1 << 20, 1 << 17, 64), "F16", 50)
    with pytest.raises(InsufficientMemoryError, match=r"^huge:F16 takes [\d,.]+ GB of memory and [\d,.]+ GB are free"):
        checkpoint(huge)
    with pytest.raises(WorkerError, match=r"^huge:F16 takes [\d,.]+ GB on disk and .* GB left: use fewer layers"):
        write(huge, tmp_path / "huge.gguf")
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_progress_ends_at_the_total() -> None:
    steps: list[tuple[str, float, float]] = []
    spec = Spec("small", SMALL, "Q8_0", 1)
    synthetic.checkpoint(spec, progress=lambda *step: steps.append(step))
    assert steps[-1] == ("making small:Q8_0:1", spec.nbytes, spec.nbytes)
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
