"""Adapter files as attacks: cut, damaged, hostile, or of a kind that is more than pairs of matrices."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from llm_worker_rbee.errors import InsufficientMemoryError, ModelFileError, UnsupportedModelError, WorkerError
from llm_worker_rbee.weights.gguf_writer import write_gguf
from llm_worker_rbee.weights.lora import combined_adapter, read_adapter

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
KEYS = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
NAME = "blk.0.attn_q.weight"


def pair(rank: int = 4, columns: int = 8, rows: int = 6) -> tuple[Any, Any]:
    random = np.random.default_rng(rank)
    return random.standard_normal((rank, columns), np.float32), random.standard_normal((rows, rank), np.float32)


def write_peft(folder: Path, tensors: dict[str, Any] | None = None, **settings: Any) -> Path:
    a, b = pair()
    tensors = {f"{MODULE}.lora_A.weight": a, f"{MODULE}.lora_B.weight": b} if tensors is None else tensors
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_file(path: Path, tensors: dict[str, Any] | None = None, **keys: Any) -> Path:
    a, b = pair()
    tensors = {f"{NAME}.lora_a": a, f"{NAME}.lora_b": b} if tensors is None else tensors
    metadata = {**KEYS, **{key.replace("__", "."): value for key, value in keys.items()}}
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)


def test_both_formats_give_the_same_pair(tmp_path: Path) -> None:
    peft, gguf = read_adapter(write_peft(tmp_path / "peft")), read_adapter(write_file(tmp_path / "a.gguf"))
    a, b = pair()
    for adapter in (peft, gguf):
        assert adapter.pairs.keys() == {NAME}
        np.testing.assert_array_equal(adapter.pairs[NAME].a, a)
        np.testing.assert_array_equal(adapter.pairs[NAME].b, b * np.float32(2))
        assert (adapter.rank, adapter.nbytes) == (4, 4 * (32 + 24))
    assert (peft.format, gguf.format, gguf.architecture) == ("safetensors", "gguf", "llama")
    assert read_adapter(tmp_path / "peft" / "adapter_model.safetensors").digest == peft.digest


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    first = read_adapter(write_peft(tmp_path / "one")).digest
    assert read_adapter(write_peft(tmp_path / "two", base_model_name_or_path="any")).digest == first
    assert read_adapter(write_peft(tmp_path / "three", lora_alpha=9)).digest != first
    a, b = pair()
    b[0, 0] = np.nextafter(b[0, 0], np.float32(9))
    changed = write_peft(tmp_path / "four", {f"{MODULE}.lora_A.weight": a, f"{MODULE}.lora_B.weight": b})
    assert read_adapter(changed).digest != first


def test_scale_of_a_gguf_without_alpha_is_one(tmp_path: Path) -> None:
    for alpha in (0.0, None):
        adapter = read_adapter(write_file(tmp_path / "a.gguf", adapter__lora__alpha=alpha))
        np.testing.assert_array_equal(adapter.pairs[NAME].b, pair()[1])


def test_embedding_of_a_gguf_is_flipped(tmp_path: Path) -> None:
    a, b = pair(2, 50, 8)
    tensors = {"token_embd.weight.lora_a": np.ascontiguousarray(a.T), "token_embd.weight.lora_b": b}
    held = read_adapter(write_file(tmp_path / "a.gguf", tensors, adapter__lora__alpha=0.0)).pairs["token_embd.weight"]
    np.testing.assert_array_equal(held.a, a)
    np.testing.assert_array_equal(held.b, b)


def test_combination_is_the_sum(tmp_path: Path) -> None:
    one, two = (read_adapter(write_peft(tmp_path / str(r), _pair_of(r), r=r)) for r in (4, 3))
    both = combined_adapter([(one, 0.5), (two, -2.0)]).pairs[NAME]
    expected = 0.5 * one.pairs[NAME].b @ one.pairs[NAME].a - 2 * two.pairs[NAME].b @ two.pairs[NAME].a
    np.testing.assert_allclose(both.b @ both.a, expected, rtol=1e-5, atol=1e-5)
    assert both.rank == 7
    with pytest.raises(UnsupportedModelError, match="cannot be combined"):
        combined_adapter([(one, 1.0), (read_adapter(write_file(tmp_path / "a.gguf")), 1.0)])


def _pair_of(rank: int) -> dict[str, Any]:
    a, b = pair(rank)
    return {f"{MODULE}.lora_A.weight": a, f"{MODULE}.lora_B.weight": b}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": None}, "peft_type None"),
        ({"r": "4"}, "r of adapter_config.json"),
        ({"r": 10**400}, "r of adapter_config.json is 1000.*, not a number up to 1e"),
        ({"lora_alpha": 1e308}, "lora_alpha of adapter_config.json"),
        ({"rank_pattern": {"q_proj": 10**400}}, "rank_pattern"),
        ({"r": 5}, "its pair has rank 4, and adapter_config.json says 5"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"target_modules": ["v_proj"]}, "leave it out"),
        ({"layers_to_transform": [1]}, "leave it out"),
        ({"target_modules": "(a+)+b"}, "too complex"),
        ({"target_modules": "a" * 1000}, "too complex"),
        ({"alpha_pattern": {"((a*)*)*": 1}}, "too complex"),
        ({"target_modules": "q_proj["}, "pattern"),
    ],
)  # fmt: skip
def test_peft_setting_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        read_adapter(write_peft(tmp_path / "adapter", **settings))


def test_slow_pattern_takes_no_long(tmp_path: Path) -> None:
    start = time.perf_counter()
    with pytest.raises(WorkerError):
        read_adapter(write_peft(tmp_path / "adapter", target_modules=".*.*.*.*x"))
    assert time.perf_counter() - start < 5


A, B = pair()
BAD_PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"A": A}, "lora_B is missing"),
    ({"B": B}, "lora_A is missing"),
    ({"A": A, "B": B[:, :3]}, "A has rank 4 .* and B rank 3"),
    ({"A": A[:0], "B": B[:, :0]}, "rank 0"),
    ({"A": A * np.float32("nan"), "B": B}, "NaN"),
    ({"A": A, "B": B * np.float32("inf")}, "NaN or infinite"),
    ({"A": A.astype(np.int32), "B": B}, "LoRA needs matrices of floats"),
    ({"A": A[0], "B": B}, "LoRA needs matrices of floats"),
    ({"A": A[None], "B": B}, "experts"),
    ({"A": A[None], "B": B[None]}, "experts|stacked"),
]


@pytest.mark.parametrize(("halves", "message"), BAD_PAIRS)
def test_bad_pair_is_refused(tmp_path: Path, halves: dict[str, Any], message: str) -> None:
    tensors = {f"{MODULE}.lora_{letter}.weight": value for letter, value in halves.items()}
    peft = write_peft(tmp_path / "adapter", tensors)
    gguf = write_file(tmp_path / "a.gguf", {f"{NAME}.lora_{x.lower()}": value for x, value in halves.items()})
    for path in (peft, gguf):
        with pytest.raises(WorkerError, match=message):
            read_adapter(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general__type": "model"}, "general.type is 'model'"),
        ({"general__type": None}, "general.type is None"),
        ({"adapter__type": "control"}, "adapter.type"),
        ({"adapter__lora__alpha": float("nan")}, "alpha"),
        ({"adapter__lora__alpha": "8"}, "alpha"),
        ({"adapter__lora__alpha": 3e38}, "alpha"),
        ({"adapter__alora__invocation_tokens": [1, 2]}, "activated LoRA"),
    ],
)
def test_gguf_key_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        read_adapter(write_file(tmp_path / "a.gguf", **keys))


def test_other_tensors_are_refused_by_name(tmp_path: Path) -> None:
    a, b = pair()
    halves = {f"{NAME}.lora_a": a, f"{NAME}.lora_b": b}
    for name, message in (("blk.0.attn_norm.weight", "a change of a norm"), ("output.bias", "not a half")):
        with pytest.raises(UnsupportedModelError, match=message):
            read_adapter(write_file(tmp_path / "a.gguf", {**halves, name: a[0]}))
    pairs = {f"{MODULE}.lora_A.weight": a, f"{MODULE}.lora_B.weight": b}
    for name, message in ((f"{MODULE}.lora_magnitude_vector", "DoRA"), ("lm_head.weight", "not a half")):
        with pytest.raises(UnsupportedModelError, match=message):
            read_adapter(write_peft(tmp_path / "adapter", {**pairs, name: a[0]}))
    with pytest.raises(ModelFileError, match="no LoRA pair"):
        read_adapter(write_peft(tmp_path / "adapter", {}))


def test_file_cut_at_every_byte_is_an_error(tmp_path: Path) -> None:
    whole = write_file(tmp_path / "a.gguf").read_bytes()
    last = len(whole.rstrip(b"\0"))
    for size in range(0, last, 7):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(WorkerError):
            read_adapter(tmp_path / "cut.gguf")
    folder = write_peft(tmp_path / "adapter")
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole, text = weights.read_bytes(), config.read_text()
    for size in range(0, len(whole), 7):
        weights.write_bytes(whole[:size])
        with pytest.raises(WorkerError):
            read_adapter(folder)
    weights.write_bytes(whole)
    for size in range(len(text)):
        config.write_text(text[:size])
        with pytest.raises(WorkerError):
            read_adapter(folder)


def test_million_tensors_are_refused_before_they_are_read(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "adapter")
    entry = ",".join(f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(1_000_000))
    header = f"{{{entry}}}".encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    start = time.perf_counter()
    with pytest.raises(ModelFileError, match="header"):
        read_adapter(folder)
    assert time.perf_counter() - start < 2


def test_missing_and_pickled_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        read_adapter(tmp_path / "none")
    (tmp_path / "adapter.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ModelFileError, match="convert pickled adapters"):
        read_adapter(tmp_path / "adapter.bin")
    folder = write_peft(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelFileError, match=r"adapter_model\.safetensors is missing"):
        read_adapter(folder)
    with pytest.raises(ModelFileError, match=r"adapter_config\.json is missing"):
        read_adapter(tmp_path)


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    folder = write_peft(tmp_path / "adapter")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).rename(tmp_path / "kept")
        os.mkfifo(folder / name)
        with pytest.raises(ModelFileError, match=f"{name} is missing"):
            read_adapter(folder)
        (folder / name).unlink()
        (tmp_path / "kept").rename(folder / name)
    with pytest.raises(ModelFileError, match="no such file"):
        read_adapter(tmp_path / "pipe.gguf")


def test_adapter_larger_than_the_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder, size = write_peft(tmp_path / "adapter"), 1 << 42
    entries = {"A": ([4, size // 16], [0, size]), "B": ([6, 4], [size, size + 96])}
    header = json.dumps(
        {
            f"{MODULE}.lora_{letter}.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}
            for letter, (shape, offsets) in entries.items()
        }
    ).encode()
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(weights, 8 + len(header) + size + 96)
    with pytest.raises(InsufficientMemoryError, match=r"adapter adapter takes 4,398.05 GB while it is read"):
        read_adapter(folder)


def test_adapter_outlives_its_file(tmp_path: Path) -> None:
    """A file that is cut off later is not read any more: a mapped page past its end would end the process."""
    folder = write_peft(tmp_path / "adapter")
    adapter = read_adapter(folder)
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert adapter.pairs[NAME].a.sum() == pair()[0].sum()
