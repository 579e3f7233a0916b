"""Shared options: device, threads, types; KV cache, batches, speculative decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm_worker_rbee.backends import cpu_info
from llm_worker_rbee.cli.options import EngineFlags
from llm_worker_rbee.config import LoadOptions

from .conftest import Run

ASK_REPEATED = ("--raw", "hello hello hello", "-n", "12", "--seed", "3", "--ignore-eos", "--json")
ASK = ("--raw", "hello", "-n", "12", "--seed", "3", "--ignore-eos", "--json")


def answer(cli: Run, tiny: Path, *options: str) -> list[int]:
    done = cli("run", *ASK, "-m", tiny, *options)
    assert done.returncode == 0, done.stderr
    tokens: list[int] = json.loads(done.stdout)["tokens"]
    assert len(tokens) == 12
    return tokens


def test_threads_and_isa_give_same_answer(cli: Run, tiny: Path) -> None:
    usual = answer(cli, tiny)
    assert answer(cli, tiny, "--threads", "1") == usual
    assert answer(cli, tiny, "--cpu-isa", cpu_info.current_isa()) == usual


def test_quantize_gives_an_answer(cli: Run, tiny: Path) -> None:
    assert answer(cli, tiny, "--quantize", "q8_0", "--backend", "reference")


# bytes of a head of 8 values, padded to 16, at one position; int8 has a float32 scale
@pytest.mark.parametrize(
    ("kv_type", "used", "head_bytes"),
    [("auto", "float16", 32), ("float32", "float32", 64), ("float16", "float16", 32), ("int8", "int8", 20)],
)
def test_kv_type_is_that_of_the_cache(cli: Run, tiny: Path, kv_type: str, used: str, head_bytes: int) -> None:
    memory = 10 * (2 * 2 * 4 * head_bytes * 16)  # blocks x (keys and values x layers x heads x bytes x tokens)
    done = cli("run", *ASK, "-m", tiny, "--kv-type", kv_type, "--kv-memory", str(memory))
    assert len(json.loads(done.stdout)["tokens"]) == 12
    assert f"KV cache {memory / 1000:.1f} kB ({used}): 160 tokens = " in done.stderr.decode()


def test_help_lists_kv_types(cli: Run) -> None:
    text = cli("run", "--help").stdout.decode()
    assert all(name in text for name in ("auto", "float32", "float16", "int8", "bfloat16", "float8"))


@pytest.mark.parametrize(
    ("options", "status", "message"),
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
def test_invalid_device_option_is_named(
    cli: Run, tiny: Path, options: tuple[str, ...], status: int, message: str
) -> None:
    done = cli("run", "hello", "-m", tiny, *options)
    assert (done.returncode, done.stdout) == (status, b"")
    (line,) = done.stderr.decode().splitlines()
    assert message in line


def test_invalid_thread_count_in_environment_is_an_error(cli: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_WORKER_THREADS", "none")
    done = cli("run", "hello", "-m", tiny)
    assert done.returncode == 1
    assert b"error: LLM_WORKER_THREADS is 'none': give a whole number of 1 or more" in done.stderr


def test_flags_become_load_options() -> None:
    assert EngineFlags().apply(LoadOptions()) == LoadOptions(), "a flag has the default of its option"
    changed = EngineFlags(
        kv_memory="2GiB", max_batch=3, max_step_tokens=99, target_itl_ms=7.5, no_prefix_cache=True,
        speculative="ngram", draft_tokens=2,
    )  # fmt: skip
    assert changed.apply(LoadOptions(model="tiny")) == LoadOptions(
        model="tiny", kv_memory=2 << 30, max_batch=3, max_step_tokens=99, target_itl_ms=7.5, prefix_cache=False,
        speculative="ngram", draft_tokens=2,
    )  # fmt: skip


def test_engine_options_give_same_answer(cli: Run, tiny: Path) -> None:
    def answer(*options: str | Path) -> list[int]:
        done = cli("run", *ASK_REPEATED, "-m", tiny, *options)
        assert done.returncode == 0, done.stderr
        tokens: list[int] = json.loads(done.stdout)["tokens"]
        return tokens

    usual = answer()
    assert answer("--max-batch", "1", "--max-step-tokens", "5", "--no-prefix-cache", "--target-itl-ms", "1") == usual
    assert answer("--speculative", "ngram", "--draft-tokens", "3") == usual
    assert answer("--draft-model", tiny) == usual
    assert answer("--kv-memory", "150K", "--max-context", "100") == usual
    assert answer("--deterministic") == usual


@pytest.mark.parametrize(
    ("options", "status", "message"),
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
        (("--max-batch", "0"), 2, "--max-batch is 0: it must be a whole number, 1 or more, at most 1024"),
        (("--max-batch", "1025"), 2, "--max-batch is 1025: it must be a whole number, 1 or more, at most 1024"),
        (("--max-step-tokens", "0"), 2, "--max-step-tokens is 0: it must be a whole number, 1 or more"),
        (("--target-itl-ms", "nan"), 2, "--target-itl-ms is nan: it must be a number of milliseconds above 0"),
        (("--speculative", "magic"), 2, "unknown --speculative 'magic': use one of off, ngram, mtp"),
        (("--draft-tokens", "99", "--speculative", "ngram"), 2, "--draft-tokens is 99: it must be"),
        (("--draft-tokens", "2"), 2, "--draft-tokens goes with --speculative ngram or mtp, or with --draft-model"),
        (("--draft-model", "x", "--speculative", "ngram"), 2, "both draft: choose one"),
    ],
)
def test_invalid_engine_option_is_named(
    cli: Run, tiny: Path, options: tuple[str, ...], status: int, message: str
) -> None:
    for command in (("run", "hello"), ("chat",)):
        done = cli(*command, "-m", tiny, *options, stdin=b"hello\n")
        assert (done.returncode, done.stdout) == (status, b"")
        (line,) = done.stderr.decode().splitlines()
        assert message in line


def test_reduced_context_is_noted(cli: Run, tiny: Path) -> None:
    block = 2 * 2 * 4 * 16 * 2 * 16  # keys and values x layers x heads x padded values x bytes x tokens
    done = cli("run", *ASK_REPEATED, "-m", tiny, "--kv-memory", str(10 * block + 1))
    assert done.returncode == 0
    (line,) = done.stderr.decode().splitlines()
    assert line == (
        "KV cache 81.9 kB (float16): 160 tokens = 1 context of 160 (not 256), or 10 requests of 16 each; "
        "--kv-memory or a smaller --kv-type gives longer contexts"
    )
    whole = cli("run", *ASK_REPEATED, "-m", tiny, "--kv-memory", str(16 * block))
    assert (whole.returncode, whole.stderr) == (0, b"")
