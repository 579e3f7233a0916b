"""Damaged files: a mutated model loads or raises a WorkerError. Seeded, any number of mutations.

`pytest tests/weights/test_gguf_fuzz.py --mutations 200000` runs more. A failure prints the family and the number of the
mutation, which `mutate` turns into the same bytes again.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import struct
import warnings
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.tokenizer import tokenizer_from_gguf
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf

from ..helpers import minimal_gguf

Rng = np.random.Generator
LENGTH = re.compile(rb"(?=[^\0]\0{7})")
sound_tensors = cache(minimal_gguf.tensors)
BYTES = (0, 1, 2, 7, 8, 9, 31, 32, 64, 127, 128, 254, 255)
WORDS = (0, 1, 2, 3, 5, 8, 9, 13, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 0x7F800000, 0x7FC00000, 0xFF800000)
LONGS = (0, 1, 32, 33, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)


def place(data: bytearray, rng: Rng, size: int = 1) -> int:
    """Return an offset to damage: mostly in header, metadata or directory, which come first."""
    end = len(data) - size + 1
    return int(rng.integers(0, min(end, 48)) if rng.random() < 0.2 else rng.integers(0, max(1, end)))


def flip_bits(data: bytearray, rng: Rng) -> None:
    for _ in range(int(rng.integers(1, 4))):
        data[place(data, rng)] ^= 1 << int(rng.integers(0, 8))


def set_bytes(data: bytearray, rng: Rng) -> None:
    for _ in range(int(rng.integers(1, 4))):
        data[place(data, rng)] = int(rng.choice(BYTES))


def set_word(data: bytearray, rng: Rng) -> None:
    struct.pack_into("<I", data, place(data, rng, 4), WORDS[int(rng.integers(len(WORDS)))])


def set_long(data: bytearray, rng: Rng) -> None:
    struct.pack_into("<Q", data, place(data, rng, 8), LONGS[int(rng.integers(len(LONGS)))])


def set_length(data: bytearray, rng: Rng) -> None:
    """Overwrite something like a length: eight bytes, only the first not zero."""
    spots = [match.start() for match in LENGTH.finditer(data)]
    at = spots[int(rng.integers(len(spots)))]
    change = LONGS[int(rng.integers(len(LONGS)))] if rng.random() < 0.5 else data[at] + int(rng.integers(-3, 4))
    struct.pack_into("<Q", data, at, change % 2**64)


def swap(data: bytearray, rng: Rng) -> None:
    size = int(rng.integers(1, 33))
    a, b = (place(data, rng, size) for _ in range(2))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def insert(data: bytearray, rng: Rng) -> None:
    at = place(data, rng)
    data[at:at] = rng.bytes(int(rng.integers(1, 65)))


def delete(data: bytearray, rng: Rng) -> None:
    at = place(data, rng)
    del data[at : at + int(rng.integers(1, 65))]


def truncate(data: bytearray, rng: Rng) -> None:
    del data[place(data, rng) :]


DAMAGE = (flip_bits, set_bytes, set_word, set_long, set_length, swap, insert, delete, truncate)


def rewrite(family: str, rng: Rng, path: Path) -> bytearray:
    """Return a valid file with one or two metadata values replaced by edge values of some type."""
    metadata, tensors = minimal_gguf.metadata(family), sound_tensors(family)
    for _ in range(int(rng.integers(1, 3))):
        key = list(metadata)[int(rng.integers(len(metadata)))]
        choices = minimal_gguf.typed_variants(metadata[key])
        metadata[key] = choices[int(rng.integers(len(choices)))]
    return bytearray(write_gguf(path, metadata, tensors).read_bytes())


def mutate(family: str, valid: bytes, number: int, path: Path) -> bytearray:
    """Return mutation `number` of a family; deterministic."""
    rng = np.random.default_rng([minimal_gguf.FAMILIES.index(family), number])
    if number % 4 == 0:
        return rewrite(family, rng, path)
    data = bytearray(valid)
    for _ in range(1 + (rng.random() < 0.2)):
        if len(data) > 64:
            DAMAGE[int(rng.integers(len(DAMAGE)))](data, rng)
    return data


def outcome(path: Path) -> str:
    """Return 'loaded' or the class of the WorkerError; other exceptions propagate."""
    try:
        checkpoint = open_checkpoint(path)
        for tensor in checkpoint.tensors.values():
            tensor.dequantize()
    except WorkerError as error:
        return explained(error)
    results = []
    for step in (
        lambda: load_model(checkpoint, select_backend(backend="reference"), read_model_config(checkpoint)),
        lambda: tokenizer_from_gguf(checkpoint.metadata).encode("ab é\n<|x|>", parse_special=True),
    ):
        try:
            step()
            results.append("loaded")
        except WorkerError as error:
            results.append(explained(error))
    return " + ".join(results)


# A key, a tensor, a token or an architecture by name, or a part of the header, which has no name but its own.
NAMED = re.compile(
    r"'[^']+'|\"[^\"]+\"|tokenizer\.\w+|token \d|rope_\w+|model shape: \w+|rope scaling|not a GGUF file|GGUF version"
    r"|the version|(tensor|metadata) count|the file is empty|(key|tensor) number \d+"
    r"|longrope|embedding \d+ rows|big-endian"
)


def explained(error: WorkerError) -> str:
    message = str(error)
    assert NAMED.search(message), repr(message)
    assert "\n" not in message, repr(message)
    return type(error).__name__


@pytest.mark.parametrize("family", minimal_gguf.FAMILIES)
def test_open_gguf_damaged_file_loads_or_raises_worker_error(
    family: str, request: pytest.FixtureRequest, memory_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "llm_worker_rbee")
    path = memory_dir / "damaged.gguf"
    valid = write_gguf(path, minimal_gguf.metadata(family), minimal_gguf.tensors(family)).read_bytes()
    assert outcome(path) == "loaded + loaded"
    open_before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    seen: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(request.config.getoption("--mutations") // len(minimal_gguf.FAMILIES)):
            path.unlink()  # the last one may still be mapped
            path.write_bytes(mutate(family, valid, number, path))
            try:
                seen[outcome(path)] += 1
            except BaseException as error:
                error.add_note(f"reproduce with mutate({family!r}, valid, {number}, path)")
                raise
    print(family, dict(seen))
    assert seen["loaded + loaded"] > 0
    assert seen["ModelFileError"] > 0
    gc.collect()
    if open_before:
        assert len(os.listdir("/proc/self/fd")) <= open_before + 2
