"""Malformed GGUF files, built byte by byte: the error names the key or tensor."""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf
from llm_worker_rbee.weights.quants import REMOVED_TYPES
from tests.helpers.minimal_gguf import write_split

from ..helpers import minimal_gguf

HUGE = 2**64 - 1
U32, STRING, ARRAY = 4, 8, 9
F32, Q4_0 = 0, 2
Cases = dict[str, tuple[bytes, str]]  # case -> file, and part of the message


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def header(n_tensors: int, n_metadata: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_metadata)


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def with_metadata(*pairs: bytes) -> bytes:
    return header(0, len(pairs)) + b"".join(pairs)


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


def entry(name: str | bytes, dims: list[int], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def with_tensors(*entries: bytes, data: int = 64) -> bytes:
    directory = header(len(entries), 0) + b"".join(entries)
    return directory + bytes(-len(directory) % 32 + data)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


HEADER: Cases = {
    "no bytes": (b"", "empty"),
    "bad magic": (header(0, 0, magic=b"GGML"), "GGML"),
    "two bytes": (b"GG", "not a GGUF file"),
    "version 0": (header(0, 0, version=0), "version 0"),
    "version 1": (header(0, 0, version=1), "version 1"),
    "version 4": (header(0, 0, version=4), "version 4"),
    "version 2^32-1": (header(0, 0, version=2**32 - 1), "version 4294967295"),
    "byte-swapped": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count 2^64-1": (header(HUGE, 0), f"tensor count {HUGE}"),
    "metadata count 2^64-1": (header(0, HUGE), f"metadata count {HUGE}"),
    "tensor count one too high": (header(1, 0), "tensor number 0"),
    "metadata count one too high": (header(0, 2) + pair("k", U32, u32(1)), "metadata key number 1"),
}
METADATA: Cases = {
    "key length 2^64-1": (header(0, 1) + struct.pack("<Q", HUGE) + bytes(64), "metadata key number 0"),
    "key one byte too long": (header(0, 1) + struct.pack("<Q", 33) + bytes(32), "metadata key number 0"),
    "empty key": (with_metadata(pair("", U32, u32(1))), "metadata key number 0 is empty"),
    "key not UTF-8": (with_metadata(pair(b"\xff\xfe", U32, u32(1))), "metadata key number 0 is not valid UTF-8"),
    "unknown value type": (with_metadata(pair("a.key", 13, u32(1))), "'a.key' has unknown value type 13"),
    "array of unknown value type": (with_metadata(pair("a.key", ARRAY, array(99, 1, u32(1)))), "'a.key' is an arr"),
    "duplicate key": (with_metadata(pair("a.key", U32, u32(1)), pair("a.key", U32, u32(1))), "'a.key' appears twice"),
    "string longer than the file": (with_metadata(pair("a.key", STRING, text("x" * 99)[:-1])), "'a.key'"),
    "string of 2^64-1 bytes": (with_metadata(pair("a.key", STRING, struct.pack("<Q", HUGE))), "'a.key'"),
    "string not UTF-8": (with_metadata(pair("a.key", STRING, text(b"\xc3("))), "'a.key' is not valid UTF-8"),
    "array longer than the file": (with_metadata(pair("a.key", ARRAY, array(U32, 3, bytes(11)))), "'a.key'"),
    "array of 2^64-1 numbers": (with_metadata(pair("a.key", ARRAY, array(U32, HUGE, bytes(64)))), "'a.key'"),
    "array whose bytes wrap to 0": (with_metadata(pair("a.key", ARRAY, array(U32, 2**62, bytes(64)))), "'a.key'"),
    "array of 2^64-1 strings": (with_metadata(pair("a.key", ARRAY, array(STRING, HUGE, bytes(64)))), "'a.key'"),
    "more strings than there are": (
        with_metadata(pair("a.key", ARRAY, array(STRING, 3, text("abcdefgh") * 2))),
        "string 2 of metadata key 'a.key'",
    ),
    "string in an array too long": (
        with_metadata(pair("a.key", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE)))),
        "string 0 of metadata key 'a.key'",
    ),
    "string in an array not UTF-8": (
        with_metadata(pair("a.key", ARRAY, array(STRING, 2, text("a") + text(b"\xff")))),
        "string 1 of metadata key 'a.key'",
    ),
    "array of 2^64-1 arrays": (with_metadata(pair("a.key", ARRAY, array(ARRAY, HUGE, bytes(64)))), "'a.key'"),
    "arrays nested 100,000 deep": (with_metadata(pair("a.key", ARRAY, array(ARRAY, 1) * 100_000)), "'a.key'.* nested"),
    "value cut off": (with_metadata(pair("a.key", 10, bytes(7))), "'a.key'"),
    "alignment 0": (with_metadata(pair("general.alignment", U32, u32(0))), "'general.alignment' is 0"),
    "alignment 13": (with_metadata(pair("general.alignment", U32, u32(13))), "'general.alignment' is 13"),
    "alignment of the wrong type": (
        with_metadata(pair("general.alignment", STRING, text("32"))),
        "'general.alignment' is of type string",
    ),
    "alignment of a wider type": (
        with_metadata(pair("general.alignment", 10, struct.pack("<Q", 32))),
        "'general.alignment' is of type uint64",
    ),
    "architecture not a string": (with_metadata(pair("general.architecture", U32, u32(1))), "'general.architecture'"),
}
TENSORS: Cases = {
    "name of 64 bytes": (with_tensors(entry("n" * 64, [4])), "64 bytes.*nnnn"),
    "name of 2^64-1 bytes": (header(1, 0) + struct.pack("<Q", HUGE) + bytes(64), "the name of tensor number 0"),
    "name of 64 bytes in 32 characters": (with_tensors(entry("é" * 32, [4])), "64 bytes"),
    "empty name": (with_tensors(entry("", [4])), "tensor number 0"),
    "name not UTF-8": (with_tensors(entry(b"\xff", [4])), "the name of tensor number 0 is not valid UTF-8"),
    "5 dimensions": (with_tensors(entry("t.x", [1, 1, 1, 1, 1])), "'t.x' has 5 dimensions"),
    "2^32-1 dimensions": (header(1, 0) + text("t.x") + u32(2**32 - 1) + bytes(64), "'t.x' has 4294967295 dimensions"),
    "dimension -1": (with_tensors(entry("t.x", [HUGE])), "'t.x': dimensions .* overflow"),
    "element count overflows": (with_tensors(entry("t.x", [2**32, 2**32])), "'t.x': dimensions .* overflow"),
    "element count overflows beside a zero": (with_tensors(entry("t.x", [2**40, 2**40, 0])), "'t.x': dimensions"),
    "byte size overflows": (with_tensors(entry("t.x", [2**59])), "'t.x' needs bytes"),
    "unknown type": (with_tensors(entry("t.x", [4], 1000)), "'t.x' has unknown type 1000"),
    **{
        f"removed type {name}": (with_tensors(entry("t.x", [32], i)), f"'t.x' has removed type {name}")
        for i, name in REMOVED_TYPES.items()
    },
    "row not a multiple of its block": (with_tensors(entry("t.x", [33, 32], Q4_0)), "'t.x': rows of 33 values"),
    "scalar of a block type": (with_tensors(entry("t.x", [], Q4_0)), "'t.x': rows of 1 values"),
    "offset 2^64-1": (with_tensors(entry("t.x", [4], F32, HUGE)), "'t.x': offset"),
    "aligned offset near 2^64": (with_tensors(entry("t.x", [8], F32, 2**64 - 32)), "'t.x' needs bytes"),
    "unaligned offset": (with_tensors(entry("t.x", [4], F32, 4)), "'t.x': offset 4"),
    "overlapping": (with_tensors(entry("t.x", [16]), entry("t.y", [4], F32, 32)), "'t.x' and 't.y' overlap"),
    "the same bytes twice": (with_tensors(entry("t.x", [4]), entry("t.y", [4])), "'t.x' and 't.y' overlap"),
    "one within another": (with_tensors(entry("t.x", [24]), entry("t.y", [4], F32, 32), data=96), "'t.x' and 't.y' ov"),
    "past the end": (with_tensors(entry("t.x", [4], F32, 64)), "'t.x' needs bytes 64"),
    "empty and past the end": (with_tensors(entry("t.x", [0], F32, 96)), "'t.x': offset 96 is past the end"),
    "duplicate name": (with_tensors(entry("t.x", [4]), entry("t.x", [4], F32, 32)), "'t.x' appears twice"),
    "one byte short": (with_tensors(entry("t.x", [16]))[:-1], "'t.x' needs bytes 0 to 64 .*has 63"),
    "sizes that overflow when added": (
        with_tensors(entry("t.x", [8]), entry("t.y", [2**58], F32, 2**64 - 2**32)),
        "'t.y' needs bytes",
    ),
    "directory cut off": (with_tensors(entry("t.x", [4]), data=0)[:50], "tensor 't.x'"),
}
ALL = {"header": HEADER, "metadata": METADATA, "tensors": TENSORS}


@pytest.mark.parametrize(("group", "case"), [(group, case) for group, cases in ALL.items() for case in cases])
def test_open_gguf_malformed_file_raises_naming_the_part(tmp_path: Path, group: str, case: str) -> None:
    data, expected = ALL[group][case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            open_checkpoint(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert re.search(expected, message), message
    assert "bad.gguf" in message
    assert "\n" not in message
    assert peak < 1_000_000, f"{peak} bytes were allocated before the error"


@pytest.mark.parametrize("case", ["version 1", "byte-swapped"])
def test_open_gguf_unknown_version_raises_unsupported(tmp_path: Path, case: str) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(HEADER[case][0])
    with pytest.raises(UnsupportedModelError):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["n", "n" * 63, "é" * 31])
def test_tensor_name_of_63_bytes_is_accepted(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_tensors(entry(name, [4])))
    assert list(open_checkpoint(path).tensors) == [name]


def test_tensor_with_zero_dimension_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_tensors(entry("t.x", [0, 5]), entry("t.y", [16])))
    found = open_checkpoint(path).tensors
    assert found["t.x"].shape == (5, 0)
    assert found["t.x"].dequantize().shape == (5, 0)
    assert found["t.y"].size == 16


def test_trailing_bytes_are_accepted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"k": 1}, {"t.x": np.arange(8, dtype=np.float32)})
    path.write_bytes(path.read_bytes() + b"anything at all" * 100)
    assert open_checkpoint(path).tensors["t.x"].dequantize().tolist() == list(range(8))


def test_error_of_long_key_is_short(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_metadata(pair("k" * 100_000, 13, u32(1))))
    with pytest.raises(ModelFileError, match="kkk") as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("family", minimal_gguf.FAMILIES)
def test_file_truncated_at_every_byte_raises(memory_dir: Path, family: str) -> None:
    whole = write_gguf(memory_dir / "m.gguf", minimal_gguf.metadata(family), minimal_gguf.tensors(family)).read_bytes()
    found = open_checkpoint(memory_dir / "m.gguf").tensors.values()
    used = max(whole.rindex(tensor.data.tobytes()) + tensor.nbytes for tensor in found)  # end of the last tensor
    cut = memory_dir / "cut.gguf"
    for length in range(len(whole)):
        cut.unlink(missing_ok=True)
        cut.write_bytes(whole[:length])
        if length >= used:
            open_checkpoint(cut)  # only padding is missing
            continue
        with pytest.raises(ModelFileError, match=r"cut\.gguf") as caught:
            open_checkpoint(cut)
        report = str(caught.value)
        assert "the file is cut off or damaged" in report or length < 4
        if "bytes are missing" in report:  # known once the list of tensors is read
            assert f"{used - length} of {used} bytes are missing" in report
    assert "1 of " in report
    assert len(whole) - 32 < used <= len(whole)


SPLIT_TENSORS = {f"t.{i}": np.full(4, i, np.float32) for i in range(6)}


def edit_part(number: int, **changes: object) -> Callable[[list[Path]], None]:
    """Rewrite one file of a set with other split keys (None removes one)."""

    def change(paths: list[Path]) -> None:
        keys: dict[str, object] = {"split.no": number, "split.count": 3, "split.tensors.count": 6}
        keys |= {key.replace("_", "."): value for key, value in changes.items()}
        part = {name: SPLIT_TENSORS[name] for name in list(SPLIT_TENSORS)[number::3]}
        write_gguf(paths[number], {k: v for k, v in keys.items() if v is not None}, part)

    return change


def fill(number: int, data: bytes) -> Callable[[list[Path]], None]:
    def change(paths: list[Path]) -> None:
        paths[number].write_bytes(data)

    return change


def tensor_twice(paths: list[Path]) -> None:
    keys = {"split.no": 1, "split.count": 3, "split.tensors.count": 6}
    write_gguf(paths[1], keys, {"t.0": SPLIT_TENSORS["t.0"], "t.1": SPLIT_TENSORS["t.1"]})


def exchange(paths: list[Path]) -> None:
    second, third = (path.read_bytes() for path in paths[1:])
    paths[1].write_bytes(third)
    paths[2].write_bytes(second)


SPLITS: dict[str, tuple[Callable[[list[Path]], None], str]] = {
    "file missing": (lambda paths: paths[2].unlink(), "m-00003-of-00003.gguf is missing"),
    "file empty": (fill(1, b""), "m-00002-of-00003.gguf: the file is empty"),
    "file of another kind": (fill(1, b"GGML" * 9), "m-00002-of-00003.gguf: not a GGUF"),
    "files exchanged": (exchange, "m-00002-of-00003.gguf: its 'split.no'"),
    "number missing": (edit_part(1, split_no=None), "m-00002-of-00003.gguf: metadata key 'split.no' is missing"),
    "count missing": (edit_part(2, split_count=None), "m-00003-of-00003.gguf: metadata key 'split.count' is missing"),
    "count of the wrong type": (edit_part(0, split_count="3"), "m-00001-of-00003.gguf: metadata key 'split.count'"),
    "counts that differ": (edit_part(1, split_count=4), "m-00002-of-00003.gguf: its 'split.no' or 'split.count'"),
    "count unlike the name": (edit_part(0, split_count=5), "its name says 3 files, its 'split.count' 5"),
    "count of 2^63": (edit_part(0, split_count=2**63), "its name says 3 files"),
    "tensor in two files": (tensor_twice, "m-00002-of-00003.gguf: tensor 't.0' is in two files"),
    "total that differs": (edit_part(0, split_tensors_count=7), "6 tensors, 'split.tensors.count' is 7"),
    "total of the wrong type": (edit_part(0, split_tensors_count=[1]), "metadata key 'split.tensors.count'"),
}


@pytest.mark.parametrize("case", SPLITS)
def test_split_set_inconsistent_raises(tmp_path: Path, case: str) -> None:
    paths = write_split(tmp_path / "m.gguf", {}, SPLIT_TENSORS, 3)
    assert len(open_checkpoint(paths[0]).tensors) == 6
    damage, expected = SPLITS[case]
    damage(paths)
    with pytest.raises(ModelFileError, match=expected):
        open_checkpoint(paths[0])


def test_split_set_opened_by_later_file_names_the_first(tmp_path: Path) -> None:
    paths = write_split(tmp_path / "m.gguf", {}, SPLIT_TENSORS, 3)
    with pytest.raises(ModelFileError, match=r"open m-00001-of-00003\.gguf"):
        open_checkpoint(paths[1])


def test_split_set_file_renamed_raises(tmp_path: Path) -> None:
    path = write_split(tmp_path / "m.gguf", {}, SPLIT_TENSORS, 3)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r"model\.gguf is part of a split set of 3 files"):
        open_checkpoint(path)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".PT"])
def test_open_checkpoint_pickled_weights_raises_unsupported(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(b"\x80\x04anything")
    with pytest.raises(UnsupportedModelError, match=f"weights{suffix}: pickled weights .* refused"):
        open_checkpoint(path)


@pytest.mark.parametrize("weights", [True, False])
def test_open_checkpoint_folder_without_model_raises(tmp_path: Path, weights: bool) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelFileError, match=r"holds no model: no \.gguf file, no config\.json"):
        open_checkpoint(tmp_path, weights=weights)


@pytest.mark.parametrize("name", ["nothing.gguf", "n" * 300, "a\0b", "file/below"])
def test_open_checkpoint_invalid_path_raises_not_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError):
        open_checkpoint(tmp_path / name)
