"""The options that say how requests share a model: they reach it, and what cannot be is named."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from llm_worker_rbee.cli.options import EngineOptions
from llm_worker_rbee.config import EngineConfig

from .conftest import Run

ASK = ("--raw", "hello hello hello", "-n", "12", "--seed", "3", "--ignore-eos", "--json")


def test_the_defaults_are_the_engine_s() -> None:
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    told = EngineOptions().arguments()
    assert [told.pop(name) for name in ("kv_memory", "draft_model", "deterministic")] == [None, None, False]
    assert told == {name: defaults[name] for name in told}
    changed = EngineOptions(
        kv_memory="2GiB", max_batch=3, target_itl_ms=7.5, no_prefix_cache=True, speculative="ngram", draft_tokens=2
    )
    assert changed.arguments() == {
        "kv_memory": 2 << 30, "max_batch": 3, "target_itl_ms": 7.5, "prefix_cache": False, "speculative": "ngram",
        "draft_tokens": 2, "draft_model": None, "deterministic": False,
    }  # fmt: skip


def test_the_answer_stays_the_same(cli: Run, tiny: Path) -> None:
    def answer(*options: str | Path) -> list[int]:
        done = cli("run", *ASK, "-m", tiny, *options)
        assert done.returncode == 0, done.stderr
        tokens: list[int] = json.loads(done.stdout)["tokens"]
        return tokens

    usual = answer()
    assert answer("--max-batch", "1", "--no-prefix-cache", "--target-itl-ms", "1") == usual
    assert answer("--speculative", "ngram", "--draft-tokens", "3") == usual
    assert answer("--draft-model", tiny) == usual
    assert answer("--kv-memory", "150K", "--max-context", "100") == usual
    assert answer("--deterministic") == usual


@pytest.mark.parametrize(
    ("options", "status", "told"),
    [
        (("--kv-memory", "1x"), 2, "--kv-memory is '1x': give a size such as 512M"),
        (("--kv-memory", "0"), 2, "--kv-memory is '0': it must be 1 byte or more"),
        (("--kv-memory", "900T"), 1, "--kv-memory is 900,000.00 GB, and "),
        (("--kv-memory", "1K"), 1, "the keys and values of 128 tokens take 65.5 kB, and --kv-memory is 1.0 kB: "),
        (
            ("--kv-memory", "100K", "--max-context", "250"),
            1,
            "the keys and values of 250 tokens take 131.1 kB, and --kv-memory is 100.0 kB: give more, or use a smaller "
            "--max-context or --kv-type",
        ),
        (("--max-context", "257"), 1, "--max-context is 257: it must be 1 to 256, the model's context"),
        (("--max-batch", "0"), 2, "--max-batch is 0: it must be a whole number, 1 or more, at most 4096"),
        (("--target-itl-ms", "nan"), 2, "--target-itl-ms is nan: it must be a number of milliseconds above 0"),
        (("--speculative", "magic"), 2, "unknown --speculative 'magic': use one of off, ngram"),
        (("--draft-tokens", "99", "--speculative", "ngram"), 2, "--draft-tokens is 99: it must be"),
        (("--draft-tokens", "2"), 2, "--draft-tokens goes with --speculative ngram or --draft-model"),
        (("--draft-model", "x", "--speculative", "ngram"), 2, "both draft: choose one"),
    ],
)
def test_what_cannot_be_is_told(cli: Run, tiny: Path, options: tuple[str, ...], status: int, told: str) -> None:
    for command in (("run", "hello"), ("chat",)):
        done = cli(*command, "-m", tiny, *options, stdin=b"hello\n")
        assert (done.returncode, done.stdout) == (status, b"")
        (line,) = done.stderr.decode().splitlines()
        assert told in line


def test_a_context_that_is_cut_is_said(cli: Run, tiny: Path) -> None:
    block = 2 * 2 * 4 * 16 * 2 * 16  # keys and values x layers x heads x padded values x bytes x tokens
    done = cli("run", *ASK, "-m", tiny, "--kv-memory", str(10 * block + 1))
    assert done.returncode == 0
    (line,) = done.stderr.decode().splitlines()
    assert line == (
        "KV cache 81.9 kB (float16): 160 tokens = 1 context of 160 (not 256), or 10 requests of 16 each; "
        "--kv-memory or a smaller --kv-type gives longer contexts"
    )
    whole = cli("run", *ASK, "-m", tiny, "--kv-memory", str(16 * block))
    assert (whole.returncode, whole.stderr) == (0, b"")
