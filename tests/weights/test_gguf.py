"""GGUF reader and writer against each other and against the gguf package; the default model."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llm_worker_rbee.weights import Tensor, open_checkpoint
from llm_worker_rbee.weights.gguf import SCALARS, read_gguf_file
from llm_worker_rbee.weights.gguf_writer import NUMPY_TYPES, Raw, Typed, write_gguf
from llm_worker_rbee.weights.quants import BLOCK_TYPES
from tests.helpers.minimal_gguf import write_split

EDGES: dict[str, list[Any]] = {
    "uint8": [0, 255], "int8": [-128, 127], "uint16": [0, 65535], "int16": [-32768, 32767], "uint32": [0, 2**32 - 1],
    "int32": [-(2**31), 2**31 - 1], "float32": [0.5, -3.0e38], "bool": [True, False], "uint64": [0, 2**64 - 1],
    "int64": [-(2**63), 2**63 - 1], "float64": [0.1, -1e300],
}  # fmt: skip


def base_of(array: np.ndarray[Any, Any]) -> object:
    """Return the object that owns the array's memory."""
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner.obj if isinstance(owner, memoryview) else owner


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


def test_scalar_edges_cover_every_type() -> None:
    assert set(EDGES) == {name for name, _ in SCALARS.values()}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind", EDGES)
def test_metadata_written_and_read_is_equal(tmp_path: Path, kind: str, version: int) -> None:
    values = {f"scalar.{i}": Typed(kind, value) for i, value in enumerate(EDGES[kind])}
    path = write_gguf(tmp_path / "m.gguf", {**values, "array": Typed(kind, EDGES[kind])}, version=version)
    checkpoint = open_checkpoint(path)
    for i, value in enumerate(EDGES[kind]):
        assert checkpoint.metadata[f"scalar.{i}"] == (np.float32(value) if kind == "float32" else value)
        assert checkpoint.value_types[f"scalar.{i}"] == kind
    array = checkpoint.metadata["array"]
    assert (array.dtype.name, checkpoint.value_types["array"]) == (kind, f"array of {kind}")
    assert same(array, np.array(EDGES[kind], kind))
    assert read_gguf_file(path).version == version


def test_metadata_strings_and_nested_arrays_round_trip(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "text": "naïve 🦀\x00\n", "empty": "", "texts": ["", "a", "é" * 300], "no texts": Typed("string", []),
        "none": [],
        "nested": [[1, 2], [], [3]], "deep": [[["a"], ["b", ""]], [[]]], "mixed": [[1, -1], [2**40], ["x"], [1.5]],
        "arrays": [np.arange(3, dtype=np.int16), np.ones(2, np.float64)], "typed": [Typed("uint8", [7])],
    }  # fmt: skip
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", values)).metadata
    assert list(found) == list(values)
    assert [found[key] for key in ("text", "empty", "texts")] == ["naïve 🦀\x00\n", "", ["", "a", "é" * 300]]
    assert found["deep"][0] == [["a"], ["b", ""]]
    assert found["no texts"] == []
    assert found["none"].size == 0
    for key in ("nested", "mixed", "arrays"):
        assert all(same(a, b) for a, b in zip(found[key], values[key], strict=True)), key
    assert [a.dtype.name for a in found["mixed"][:2]] == ["int32", "uint64"]
    assert [a.dtype.name for a in found["arrays"]] == ["int16", "float64"]
    assert found["typed"][0].dtype == np.uint8


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_tensors_from_numpy_round_trip(tmp_path: Path, name: str, rng: np.random.Generator) -> None:
    values = (rng.normal(size=(3, 4, 5)) * 50).astype(name)
    tensor = open_checkpoint(write_gguf(tmp_path / "m.gguf", {}, {"x": values})).tensors["x"]
    assert (tensor.kind.name, tensor.shape, tensor.size) == (NUMPY_TYPES[name], (3, 4, 5), 60)
    assert tensor.data.tobytes() == values.tobytes()
    assert np.array_equal(tensor.dequantize(), values.astype(np.float32))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_tensors_from_raw_bytes_round_trip(tmp_path: Path, name: str, rng: np.random.Generator) -> None:
    kind = BLOCK_TYPES[name]
    shape = (3, 2 * kind.block_size)
    data = rng.integers(0, 256, 3 * kind.row_bytes(shape[1]), dtype=np.uint8)
    written = {"first": Raw(name, shape, data), "second": Raw(name, shape, data[::-1].tobytes())}
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", {}, written)).tensors
    assert [(t.kind.name, t.shape) for t in found.values()] == [(name, shape)] * 2
    assert np.array_equal(found["first"].data, data)
    assert np.array_equal(found["second"].data, data[::-1])
    assert found["first"].rows.shape == (3, kind.row_bytes(shape[1]))


@pytest.mark.parametrize("shape", [(), (0,), (0, 32), (5, 0), (2, 0, 32), (1, 1, 1, 1)])
def test_tensor_of_zero_or_no_dimensions_opens(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {"before": np.ones(3, np.float32), "x": np.ones(shape, np.float32), "after": np.full(2, 7, np.float32)}
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", {}, tensors)).tensors
    assert found["x"].shape == shape
    assert found["x"].size == found["x"].dequantize().size == int(np.prod(shape))
    assert found["x"].dequantize().shape == shape
    assert found["after"].dequantize().tolist() == [7, 7]


@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 4096])
def test_alignment_other_than_default_is_honoured(tmp_path: Path, alignment: int) -> None:
    tensors = {f"t{i}": np.arange(i + 1, dtype=np.int8) for i in range(4)}
    path = write_gguf(tmp_path / "m.gguf", {"k": 1}, tensors, alignment=alignment)
    found = open_checkpoint(path)
    assert found.metadata.get("general.alignment", 32) == alignment
    for name, values in tensors.items():
        assert np.array_equal(found.tensors[name].data, values.view(np.uint8))


def test_open_gguf_without_keys_and_tensors_succeeds(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {})
    assert path.stat().st_size == 24
    checkpoint = open_checkpoint(path)
    assert (dict(checkpoint.metadata), dict(checkpoint.tensors), checkpoint.architecture) == ({}, {}, None)
    assert checkpoint.nbytes == 0


@pytest.mark.parametrize("files", [1, 2, 3, 7])
def test_open_gguf_split_set_gives_all_tensors(tmp_path: Path, files: int, rng: np.random.Generator) -> None:
    tensors = {f"t{i}": rng.normal(size=(i + 1, 4)).astype(np.float32) for i in range(5)}
    paths = write_split(tmp_path / "model.gguf", {"general.architecture": "llama", "k": "v"}, tensors, files)
    assert [p.name for p in paths] == [f"model-{i + 1:05d}-of-{files:05d}.gguf" for i in range(files)]
    checkpoint = open_checkpoint(paths[0])
    assert checkpoint.metadata["k"] == "v"
    assert set(checkpoint.tensors) == set(tensors)
    assert all(np.array_equal(checkpoint.tensors[name].dequantize(), values) for name, values in tensors.items())


def test_written_file_is_read_by_gguf_package(tmp_path: Path, rng: np.random.Generator) -> None:
    values: dict[str, Any] = {f"k.{kind}": Typed(kind, edges[0]) for kind, edges in EDGES.items()}
    values |= {f"a.{kind}": Typed(kind, edges) for kind, edges in EDGES.items()}
    values |= {"general.architecture": "llama", "text": "naïve 🦀", "texts": ["a", "", "é"]}
    kinds = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q4_K", "Q6_K", "I8", "I64", "F64"]
    raws = {kind: Raw(kind, (4, 256), rng.integers(0, 256, 4 * BLOCK_TYPES[kind].row_bytes(256), dtype=np.uint8))
            for kind in kinds}  # fmt: skip
    theirs = gguf.GGUFReader(write_gguf(tmp_path / "m.gguf", values, raws))
    for key, value in values.items():
        found = theirs.fields[key].contents()
        plain = value.value if isinstance(value, Typed) else value
        assert found == plain if not key.endswith("float32") else same(found, np.array(plain, np.float32)), key
    assert [t.name for t in theirs.tensors] == kinds
    for tensor in theirs.tensors:
        assert (tensor.tensor_type.name, tensor.shape.tolist()) == (tensor.name, [256, 4])
        assert tensor.data.tobytes() == raws[tensor.name].data.tobytes()  # type: ignore[union-attr]


def test_file_of_gguf_package_is_read(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, (low, high) in EDGES.items():
        getattr(writer, f"add_{kind}")(f"k.{kind}", high if kind != "float32" else low)
    writer.add_string("text", "naïve 🦀")
    writer.add_array("texts", ["a", "bc", "é"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_custom_alignment(64)
    plain = rng.normal(size=(3, 64)).astype(np.float32)
    writer.add_tensor("plain", plain)
    writer.add_tensor("half", plain.astype(np.float16))
    writer.add_tensor(
        "blocks", gguf.quants.quantize(plain, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = open_checkpoint(path)
    assert ours.architecture == "llama"
    for kind, (low, high) in EDGES.items():
        assert ours.metadata[f"k.{kind}"] == (high if kind != "float32" else low)
        assert ours.value_types[f"k.{kind}"] == kind
    assert (ours.metadata["text"], ours.metadata["texts"]) == ("naïve 🦀", ["a", "bc", "é"])
    assert ours.metadata["numbers"].tolist() == [1, -2, 3]
    assert ours.metadata["general.alignment"] == 64
    assert {name: t.kind.name for name, t in ours.tensors.items()} == {"plain": "F32", "half": "F16", "blocks": "Q8_0"}
    assert np.array_equal(ours.tensors["plain"].dequantize(), plain)
    assert np.array_equal(ours.tensors["half"].dequantize(), plain.astype(np.float16).astype(np.float32))
    assert np.abs(ours.tensors["blocks"].dequantize() - plain).max() < 0.02


def assert_no_copy(tensor: Tensor) -> None:
    assert isinstance(base_of(tensor.data), mmap.mmap), tensor.name
    assert not tensor.data.flags.writeable
    if tensor.kind.name == "F32":
        assert np.shares_memory(tensor.dequantize(), tensor.data), tensor.name


def test_default_model_tensors_are_views_of_the_file(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    assert checkpoint.architecture == "llama"
    assert len(checkpoint.tensors) == 272
    assert len({id(base_of(t.data)) for t in checkpoint.tensors.values()}) == 1
    for tensor in checkpoint.tensors.values():
        assert_no_copy(tensor)
        assert tensor.nbytes == tensor.size // tensor.kind.block_size * tensor.kind.block_bytes
        assert tensor.find_nonfinite_scale() is None
    size = default_model.stat().st_size
    assert 0 <= size - checkpoint.nbytes < size // 50
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 49152
    assert set(checkpoint.value_types) == set(checkpoint.metadata)
