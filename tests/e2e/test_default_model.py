"""The built-in model itself, compared with transformers on the real file, and what it costs in memory.

transformers dequantizes the GGUF to float32 (some fifteen seconds), so all that needs it is in this one file. Prompts
are ids of our own tokenizer: the one that transformers makes of this file ignores its pre-tokenizer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from llm_worker_rbee import LLM
from tests.conftest import ON_CPU
from tests.helpers import model_runs, model_zoo

TOLERANCE = 1e-3
NEW_TOKENS = 12
# The kernels hold weights of their own, and Numba; the file that they were made from counts as long as it is mapped.
MEMORY_LIMIT_MB = {"reference": 350, "cpu": 400}
PROMPTS = {
    "plain": "The capital of France is",
    "chat": "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "code": "def fibonacci(n):\n    if n < 2:\n        return",
    "unicode": "Les élèves naïfs 🐝 日本語 12345",
    "one token": "The",
}


@pytest.fixture(scope="module")
def theirs(default_model: Path) -> Iterator[Any]:
    """transformers' model of the same file, in float32."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        default_model.parent,
        gguf_file=default_model.name,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    yield model.eval()
    del model


@pytest.fixture(scope="module")
def ids(reference_llm: LLM) -> dict[str, list[int]]:
    return {name: reference_llm.tokenize(text, parse_special=True) for name, text in PROMPTS.items()}


@pytest.mark.parametrize("name", PROMPTS)
def test_default_model_logits_match_reference_at_every_position(
    name: str, reference_llm: LLM, theirs: Any, ids: dict[str, list[int]]
) -> None:
    expected = model_zoo.hf_logits(theirs, ids[name])
    ours = model_runs.compute_logits(reference_llm.model, ids[name])
    assert ours.shape == (len(ids[name]), 49152)
    assert expected.max() - expected.min() > 5
    assert np.abs(ours - expected).max() < TOLERANCE
    assert np.array_equal(ours.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", ["plain", "chat"])
def test_default_model_greedy_tokens_and_text(
    name: str, reference_llm: LLM, theirs: Any, ids: dict[str, list[int]]
) -> None:
    answer = reference_llm.generate(ids[name], temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    expected = model_zoo.hf_greedy(theirs, ids[name], NEW_TOKENS)
    assert answer.tokens == expected
    assert answer.text == reference_llm.tokenizer.decode(
        expected, continuation=reference_llm.tokenizer.is_continuation(ids[name])
    )


MEASURE = """
import json, sys
def peak_kb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
bare = peak_kb()
from llm_worker_rbee import LLM
llm = LLM(sys.argv[1], backend=sys.argv[2])
answer = llm.chat([{"role": "user", "content": "Tell me about bees. " * 20}], temperature=0, max_tokens=4)
print(json.dumps({"bare": bare, "peak": peak_kb(), "phases": llm.phases, "tokens": answer.tokens}))
"""


@ON_CPU
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from /proc, which this system has not"
)
@pytest.mark.parametrize("backend", MEMORY_LIMIT_MB)
def test_default_model_memory_is_bounded(default_model: Path, backend: str, default_llm: LLM) -> None:
    """Load, a prompt of some hundred tokens, an answer: so much more than Python alone. No kernel is compiled then."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(default_model), backend],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1"},
    )
    found = json.loads(done.stdout)
    assert len(found["tokens"]) == 4
    assert (found["peak"] - found["bare"]) / 1024 < MEMORY_LIMIT_MB[backend]
