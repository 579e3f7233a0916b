"""Valid files of an impossible model: keys, shapes and tensors that no decoder can be built from."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.config import ModelConfig
from llm_worker_rbee.errors import ModelFileError, UnsupportedModelError
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.models.families import BY_GGUF, BY_HF
from llm_worker_rbee.models.metadata import model_config_from_hf
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import Raw, Typed, write_gguf

from ..helpers import minimal_gguf

REQUIRED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
WHOLE = (*REQUIRED[:-1], "attention.head_count_kv")
POSITIVE = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "attention.scale")
HF_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
HF_CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 64, "vocab_size": 10,
}  # fmt: skip


def load(path: Path) -> Transformer:
    checkpoint = open_checkpoint(path)
    return load_model(checkpoint, select_backend(backend="reference"), read_model_config(checkpoint))


def write(path: Path, changes: dict[str, Any] | None = None, family: str = "llama", drop: tuple[str, ...] = ()) -> Path:
    """Write a tiny model with changed keys (`block_count` is `<family>.block_count`); None removes one."""
    metadata = minimal_gguf.metadata(family)
    for key, value in (changes or {}).items():
        metadata[f"{family}.{key}"] = value
    tensors = {name: t for name, t in minimal_gguf.tensors(family).items() if name not in drop}
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)


def refused(path: Path, expected: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        load(path)
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", minimal_gguf.FAMILIES)
def test_load_model_valid_model_loads(tmp_path: Path, family: str) -> None:
    assert load(write(tmp_path / "m.gguf", family=family)).config.family.name == family


def test_load_model_blocks_packed_at_once_are_those_packed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minimal_gguf, "LAYERS", 5)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf"))
    x = np.random.default_rng(1).standard_normal((2, read_model_config(checkpoint).d_model), np.float32)
    found = []
    for threads in (None, 3):
        backend, done = ReferenceBackend(), list[int]()
        backend.threads = threads
        model = load_model(checkpoint, backend, read_model_config(checkpoint), advance=done.append)
        assert done == sorted(done)
        found.append([done[-1], *(backend.linear(x, block.attention.qkv.weight).tolist() for block in model.blocks)])
    assert len(found[0]) == 1 + 5
    assert found[0] == found[1]


def test_load_model_blocks_packed_at_once_name_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimal_gguf, "LAYERS", 5)
    drop = ("blk.0.ffn_down.weight", "blk.1.ffn_up.weight")
    checkpoint, backend = open_checkpoint(write(tmp_path / "m.gguf", drop=drop)), ReferenceBackend()
    backend.threads = 2
    with pytest.raises(ModelFileError, match=drop[0]):
        load_model(checkpoint, backend, read_model_config(checkpoint))


@pytest.mark.parametrize("key", REQUIRED)
def test_gguf_key_missing_raises(tmp_path: Path, key: str) -> None:
    refused(write(tmp_path / "m.gguf", {key: None}), f"'llama.{key}' is missing")


@pytest.mark.parametrize("value", ["8", True, 8.5, [[8]], ["8"], Typed("uint32", [])], ids=str)
@pytest.mark.parametrize("key", WHOLE)
def test_gguf_integer_of_wrong_type_raises(tmp_path: Path, key: str, value: Any) -> None:
    refused(write(tmp_path / "m.gguf", {key: value}), f"'llama.{key}' must be int")


@pytest.mark.parametrize("value", [0, -1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("key", WHOLE)
def test_gguf_integer_out_of_range_raises(tmp_path: Path, key: str, value: int) -> None:
    refused(write(tmp_path / "m.gguf", {key: value}), f"'llama.{key}' is {value}, outside 1..")


@pytest.mark.parametrize("value", ["1", True, [1.0], [[1.0]]], ids=str)
@pytest.mark.parametrize("key", POSITIVE)
def test_gguf_number_of_wrong_type_raises(tmp_path: Path, key: str, value: Any) -> None:
    refused(write(tmp_path / "m.gguf", {key: value}), f"'llama.{key}' must be int or float")


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, -np.inf, Typed("float64", 1e300), 1e-38], ids=str)
@pytest.mark.parametrize("key", POSITIVE)
def test_gguf_number_without_reciprocal_raises(tmp_path: Path, key: str, value: Any) -> None:
    refused(write(tmp_path / "m.gguf", {key: value}), f"'llama.{key}' is ")


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, 1e-20, "30"], ids=str)
def test_gguf_invalid_soft_cap_raises(tmp_path: Path, key: str, value: Any) -> None:
    refused(write(tmp_path / "m.gguf", {key: value}, "gemma2"), f"'gemma2.{key}'")


@pytest.mark.parametrize("value", [[1, 2], [2, 1]], ids=str)
def test_gguf_array_that_varies_by_layer_raises(tmp_path: Path, value: list[int]) -> None:
    path = write(tmp_path / "m.gguf", {"attention.head_count_kv": value})
    with pytest.raises(UnsupportedModelError, match=r"'llama\.attention\.head_count_kv' differs from layer to layer"):
        load(path)


def test_gguf_array_of_equal_numbers_is_that_number(tmp_path: Path) -> None:
    assert load(write(tmp_path / "m.gguf", {"attention.head_count_kv": [1, 1, 1]})).config.n_kv_heads == 1


@pytest.mark.parametrize("value", ["sliding", 1.5, True, [True, False], [], ["x"], [[True]], -1], ids=str)
def test_gguf_scalar_for_array_is_accepted(tmp_path: Path, value: Any) -> None:
    refused(
        write(tmp_path / "m.gguf", {"attention.sliding_window_pattern": value}, "gemma2"),
        r"'gemma2\.attention\.sliding_window_pattern'",
    )


@pytest.mark.parametrize(
    "key",
    [
        "rope.dimension_count",
        "attention.key_length",
        "attention.sliding_window",
        "rope.scaling.original_context_length",
        "expert_count",
        "vocab_size",
    ],
)
def test_gguf_optional_key_of_wrong_type_raises(tmp_path: Path, key: str) -> None:
    drop = ("token_embd.weight",) if key == "vocab_size" else ()
    refused(write(tmp_path / "m.gguf", {key: "many"}, drop=drop), f"'llama.{key}' must be int")


@pytest.mark.parametrize(("changes", "expected"), [
    ({"rope.dimension_count": 3}, "'llama.rope.dimension_count' is 3, an odd number"),
    ({"rope.dimension_count": 6}, r"'llama.rope.dimension_count' is 6, outside 1\.\.4"),
    ({"attention.head_count": 3, "attention.head_count_kv": 2, "rope.dimension_count": 2},
     "'llama.attention.head_count_kv' is 2: 3 heads cannot"),
    ({"attention.value_length": 8}, "'llama.attention.value_length' differs"),
    ({"rope.freq_base": 1.0}, "'llama.rope.freq_base' is 1.0"),
    ({"rope.scaling.type": "ntk"}, "'ntk' is not supported"),
    ({"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 0}, "scaling.original_context_length' is 0"),
    ({"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 1}, "original_context_length' is 1"),
    ({"rope.scaling.type": "longrope"}, "longrope"),
    ({"rope.scaling.type": 3}, "'llama.rope.scaling.type' must be str"),
    ({"rope.scaling.yarn_log_multiplier": -0.5}, "yarn_log_multiplier' is -0.5, outside"),
    ({"rope.dimension_sections": [4, 2, 2, 0]}, "rope.dimension_sections' .M-RoPE. is not supported"),
    ({"residual_scale": 0.0}, "'llama.residual_scale' is 0.0, outside"),
    ({"logit_scale": -1.0}, "'llama.logit_scale' is -1.0, outside"),
    ({"attention.temperature_scale": 0.1, "rope.scaling.original_context_length": 0}, "original_context_length' is 0"),
    ({"rope.scaling.yarn_beta_fast": 0.0}, "'llama.rope.scaling.yarn_beta_fast'"),
    ({"expert_count": 8}, "'llama.expert_used_count' is missing"),
    ({"expert_count": 8, "expert_used_count": 9}, "'llama.expert_used_count' is 9, outside 1..8"),
    ({"expert_count": 8, "expert_used_count": 2}, "tensor 'blk.0.ffn_gate_inp.weight' is missing"),
    ({"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 7}, "'llama.expert_gating_func' is 7"),
    ({"expert_count": 8, "expert_used_count": 2, "expert_group_count": 4}, "groups of experts"),
], ids=str)  # fmt: skip
def test_gguf_inconsistent_numbers_raise(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    refused(write(tmp_path / "m.gguf", changes), expected)


@pytest.mark.parametrize("family", minimal_gguf.FAMILIES)
@pytest.mark.parametrize("layers", [4096, 10**9, 2**32 - 1])
def test_load_model_huge_block_count_raises_at_once(tmp_path: Path, family: str, layers: int) -> None:
    path = write(tmp_path / "m.gguf", {"block_count": layers, "attention.sliding_window_pattern": None}, family)
    load(write(tmp_path / "sound.gguf", family=family))  # warm imports and tables before memory is counted
    tracemalloc.start()
    try:
        refused(path, rf"'{family}\.block_count' is {layers}" if layers > 4096 else "the metadata says 4096 layers")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(("key", "value"), [("context_length", 2**40), ("feed_forward_length", 2**20)])
def test_load_model_huge_numbers_allocate_nothing(tmp_path: Path, key: str, value: int) -> None:
    path = write(tmp_path / "m.gguf", {key: value})
    tracemalloc.start()
    try:
        if key == "context_length":
            load(path)
        else:
            refused(path, "tensor 'blk.0.ffn_down.weight' has shape")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


OPTIONAL = {"rope_freqs.weight", "output.weight"}


@pytest.mark.parametrize("family", minimal_gguf.FAMILIES)
def test_load_model_missing_tensor_raises(tmp_path: Path, family: str) -> None:
    for name in minimal_gguf.tensors(family):
        path = write(tmp_path / f"{name}.gguf", family=family, drop=(name,))
        if name in OPTIONAL:
            load(path)
        else:
            refused(path, f"tensor '{re.escape(name)}' is missing")


@pytest.mark.parametrize("family", minimal_gguf.FAMILIES)
def test_load_model_wrong_shape_raises(tmp_path: Path, family: str) -> None:
    for name, tensor in minimal_gguf.tensors(family).items():
        wrong: list[Any]
        if isinstance(tensor, Raw):
            shape = (2 * tensor.shape[0], *tensor.shape[1:])
            wrong = [tensor._replace(shape=shape, data=np.tile(np.asarray(tensor.data), 2))]
        else:
            wrong = [np.concatenate([tensor, tensor]), tensor[None], tensor[:0]]
        for i, other in enumerate(wrong):
            tensors = {**minimal_gguf.tensors(family), name: other}
            path = write_gguf(tmp_path / f"{name}-{i}.gguf", minimal_gguf.metadata(family), tensors)
            if (name, i) == ("token_embd.weight", 0) and family != "llama":
                continue  # a tied embedding with more rows is a larger vocabulary
            blamed = "output.weight" if (name, i) == ("token_embd.weight", 0) else name  # the two disagree
            refused(path, f"tensor '{re.escape(blamed)}' has shape")


@pytest.mark.parametrize("name", ["blk.1.attn_norm.weight", "blk.0.attn_q_norm.weight", "blk.0.attn_rot.weight", "x"])
def test_load_model_extra_tensor_raises(tmp_path: Path, name: str) -> None:
    tensors = {**minimal_gguf.tensors("llama"), name: np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", minimal_gguf.metadata("llama"), tensors)
    refused(path, f"tensor '{re.escape(name)}' is not part of a llama model")


def test_load_model_single_rope_factors_list_raises(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", family="phi3", drop=("rope_factors_short.weight",))
    refused(path, "'rope_factors_short.weight' is missing")


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-20])
def test_load_model_invalid_rope_factors_raise(tmp_path: Path, value: float) -> None:
    tensors = {**minimal_gguf.tensors("llama"), "rope_freqs.weight": np.array([1.0, value], np.float32)}
    refused(write_gguf(tmp_path / "m.gguf", minimal_gguf.metadata("llama"), tensors), "rope_freqs.weight")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("family", minimal_gguf.FAMILIES)
def test_load_model_non_finite_value_in_any_tensor_raises(tmp_path: Path, family: str, value: float) -> None:
    for name, tensor in minimal_gguf.tensors(family).items():
        bad: Any
        if isinstance(tensor, Raw):
            half = np.array([value], np.float16 if tensor.kind == "Q4_0" else np.float32).view(np.uint8)[-2:]
            bad = tensor._replace(data=np.concatenate([np.asarray(tensor.data)[:-18], half, np.zeros(16, np.uint8)]))
        else:
            bad = tensor.copy()
            bad.reshape(-1)[-1] = value
        tensors = {**minimal_gguf.tensors(family), name: bad}
        path = write_gguf(tmp_path / f"{name}.gguf", minimal_gguf.metadata(family), tensors)
        refused(path, f"tensor '{re.escape(name)}' holds .*NaN or infinite")


def test_detect_family_unsupported_lists_the_nearest(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "olmo9"})
    nearest = f"nearest of the {len(BY_GGUF)} that are: olmo"
    with pytest.raises(UnsupportedModelError, match=f"'olmo9' is not supported .{nearest}"):
        load(path)


@pytest.mark.parametrize("metadata", [{}, {"general.architecture": ""}, {"config": "x"}], ids=str)
def test_detect_family_missing_architecture_raises(tmp_path: Path, metadata: dict[str, Any]) -> None:
    refused(write_gguf(tmp_path / "m.gguf", metadata), "'general.architecture' is missing")


def test_gguf_key_named_config_is_ignored(tmp_path: Path) -> None:
    tensors = {name: t for name, t in minimal_gguf.tensors("llama").items() if name != "output.weight"}
    load(write_gguf(tmp_path / "m.gguf", {**minimal_gguf.metadata("llama"), "config": "x"}, tensors))


def from_hf(**changes: Any) -> ModelConfig:
    config = {key: value for key, value in {**HF_CONFIG, **changes}.items() if value is not None}
    return model_config_from_hf(json.loads(json.dumps(config)), BY_HF["llama"])


@pytest.mark.parametrize("key", HF_REQUIRED)
def test_hf_key_missing_raises(key: str) -> None:
    with pytest.raises(ModelFileError, match=rf"config\.json: .*'{key}' is missing"):
        from_hf(**{key: None})


@pytest.mark.parametrize("value", ["4", True, 4.0, {"a": 1}, [], ["4"], [[4]]], ids=str)
@pytest.mark.parametrize("key", HF_REQUIRED)
def test_hf_key_of_wrong_type_raises(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=rf"config\.json: .*'{key}' must be int"):
        from_hf(**{key: value})


@pytest.mark.parametrize("value", [0, -1, 10**400, 2**63])
@pytest.mark.parametrize("key", HF_REQUIRED)
def test_hf_integer_out_of_range_raises(key: str, value: int) -> None:
    with pytest.raises(ModelFileError, match=rf"config\.json: .*'{key}' is .*outside") as caught:
        from_hf(**{key: value})
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(("changes", "expected"), [
    ({"rms_norm_eps": float("nan")}, "'rms_norm_eps'"),
    ({"rms_norm_eps": 10**400}, "'rms_norm_eps'"),
    ({"rope_theta": 0}, "'rope_theta'"),
    ({"rope_theta": "big"}, "'rope_theta'"),
    ({"rope_parameters": 3}, "'rope_parameters' must be dict"),
    ({"rope_parameters": {"full_attention": 3}}, "'full_attention' must be dict"),
    ({"rope_parameters": {"rope_theta": float("inf")}}, "'rope_theta'"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "'factor'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "'factor'"),
    ({"rope_scaling": {"rope_type": ["linear"]}}, "'rope_type' must be str"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}}, "'high_freq_factor'"),
    ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1}}, "'original_max_position_embe"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": "x"}}, "'short_factor' must be list"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [0.0]}}, "'short_factor' must be a list of positive"),
    ({"partial_rotary_factor": float("nan")}, "'partial_rotary_factor'"),
    ({"partial_rotary_factor": 2.0}, "'partial_rotary_factor'"),
    ({"partial_rotary_factor": 0.0}, "rope over 0 of 4"),
    ({"layer_types": "full_attention"}, "'layer_types'"),
    ({"layer_types": ["full_attention", ["sliding_attention"]]}, "'layer_types'"),
    ({"layer_types": ["full_attention"]}, "'layer_types'"),
    ({"sliding_window": -1}, "'sliding_window'"),
    ({"hidden_act": "relu"}, "'relu' is not supported"),
    ({"hidden_act": 7}, "'hidden_act' must be str"),
    ({"num_key_value_heads": 3}, "cannot share"),
    ({"head_dim": 3}, "rope over 3"),
    ({"vocab_size": None}, "'vocab_size' is missing"),
], ids=str)  # fmt: skip
def test_hf_invalid_numbers_raise(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelFileError, match=expected):
        from_hf(**changes)


def test_hf_valid_config_is_read() -> None:
    assert from_hf().head_dim == 4


def test_read_model_config_reads_no_tensor(tmp_path: Path) -> None:
    config = read_model_config(open_checkpoint(write_gguf(tmp_path / "m.gguf", minimal_gguf.metadata("llama"))))
    assert config.vocab_size == len(minimal_gguf.SPM["tokenizer.ggml.tokens"])
