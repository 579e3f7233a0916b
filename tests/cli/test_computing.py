"""The options that say on what and how a model is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_type_hints

import pytest

from llm_worker_rbee.backends import isa
from llm_worker_rbee.backends.cpu import threads
from llm_worker_rbee.backends.ops import KV_TYPES
from llm_worker_rbee.cli import options
from llm_worker_rbee.config import KV_AUTO, KV_VALUE_BYTES

from .conftest import Run

ASK = ("--raw", "hello", "-n", "12", "--seed", "3", "--ignore-eos", "--json")


def answer(cli: Run, tiny: Path, *options: str) -> list[int]:
    done = cli("run", *ASK, "-m", tiny, *options)
    assert done.returncode == 0, done.stderr
    tokens: list[int] = json.loads(done.stdout)["tokens"]
    assert len(tokens) == 12
    return tokens


def test_the_help_names_what_there_is() -> None:
    text = str(get_type_hints(options.LoadOptions, include_extras=True)["kv_type"].__metadata__[0].help)
    assert all(name in text for name in (KV_AUTO, *KV_VALUE_BYTES))


def test_the_same_answer_with_any_number_of_threads(cli: Run, tiny: Path) -> None:
    before = threads.count()
    try:
        usual = answer(cli, tiny)
        assert answer(cli, tiny, "--threads", "1") == usual
        assert threads.count() == 1
        assert answer(cli, tiny, "--cpu-isa", isa.current()) == usual
    finally:
        threads.use(before)


def test_weights_and_keys_may_be_held_in_fewer_bits(cli: Run, tiny: Path) -> None:
    assert answer(cli, tiny, "--quantize", "q8_0", "--backend", "reference")
    for kind in KV_TYPES:
        assert answer(cli, tiny, "--kv-type", kind)


@pytest.mark.parametrize(
    ("options", "status", "told"),
    [
        (("--threads", "1000"), 2, "error: --threads is 1000: it must be 1 to "),
        (("--threads", "0"), 2, "--threads"),
        (("--cpu-isa", "z80"), 2, "instruction set 'z80' is unknown: use one of "),
        (("--cpu-isa", "portable", "--backend", "reference"), 2, "--cpu-isa is for the kernels"),
        (("--kv-type", "int4"), 2, "--kv-type int4: use one of auto, float32, float16, int8"),
        (("--kv-type", "float8", "--device", "cpu"), 1, "--kv-type float8 is not for the CPU: use one of auto"),
        (("--device", "cuda:7x"), 1, "unknown device 'cuda:7x': a GPU is cuda, or cuda:N"),
        (("--device", "cuda", "--threads", "2"), 2, "--threads is for the CPU: it does not go with a GPU"),
        (("--backend", "cuda", "--cpu-isa", "portable"), 2, "--cpu-isa is for the CPU"),
        (("--quantize", "Q9"), 2, "--quantize Q9: use one of F32, F16"),
        (("--quantize", "fp8", "--device", "cpu"), 1, "--quantize fp8 needs an NVIDIA GPU"),
    ],
)
def test_what_cannot_be_is_told(cli: Run, tiny: Path, options: tuple[str, ...], status: int, told: str) -> None:
    done = cli("run", "hello", "-m", tiny, *options)
    assert (done.returncode, done.stdout) == (status, b"")
    (line,) = done.stderr.decode().splitlines()
    assert told in line


def test_the_number_of_threads_from_the_environment(cli: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_WORKER_THREADS", "none")
    done = cli("run", "hello", "-m", tiny)
    assert done.returncode == 1
    assert b"error: LLM_WORKER_THREADS is 'none': give a whole number of 1 or more" in done.stderr
