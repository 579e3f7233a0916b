"""Whole models on the CPU kernels: near the reference on float weights, sensible on the default model, the same bits
however a prompt is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.weights import open_checkpoint
from tests.cli.conftest import write_model

cpu = CpuBackend()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cpu") / "tiny.gguf")


def logits(path: Path, ids: list[int], chunk: int) -> np.ndarray:
    """After each prompt token, computed `chunk` tokens at a time."""
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, cpu, read_model_config(checkpoint), 64)  # type: ignore[arg-type]
    runner = SingleSequence(model, len(ids))
    request = Request(ids, SamplingParams().resolve(), 1, 0, frozenset())
    parts = [runner.step(request, chunk, all_logits=True) for _ in range(-(-len(ids) // chunk))]
    return np.concatenate(parts)


def test_cpu_backend_on_float_weights_answers_as_the_reference(tiny: Path) -> None:
    options = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logprobs": 3}
    slow, fast = (
        LLM(tiny, backend=name, kv_type="float32").generate("hello there", **options) for name in ("reference", "cpu")
    )
    assert fast.tokens == slow.tokens
    assert fast.logprobs is not None
    assert slow.logprobs is not None
    for a, b in zip(fast.logprobs, slow.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_logits_bits_do_not_depend_on_prefill_chunks(default_model: Path) -> None:
    ids = np.random.default_rng(3).integers(0, 49152, 37).tolist()
    whole = logits(default_model, ids, 37)
    for chunk in (1, 8, 16):
        np.testing.assert_array_equal(logits(default_model, ids, chunk), whole)


def test_default_model_completes_capital_of_france(default_model: Path) -> None:
    text = LLM(default_model, backend="cpu").generate("The capital of France is", max_tokens=4, temperature=0.0).text
    assert "Paris" in text


def test_cpu_backend_does_not_read_the_file_after_loading(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny.read_bytes())
    llm = LLM(copy, backend="cpu")
    before = llm.generate("hello", max_tokens=8, temperature=0.0, ignore_eos=True).tokens
    with copy.open("r+b") as file:
        file.truncate(0)
    assert llm.generate("hello", max_tokens=8, temperature=0.0, ignore_eos=True).tokens == before
