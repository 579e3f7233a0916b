"""Committed tokenizer data, GGUF metadata made from it, and hard texts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

DATA = Path(__file__).parents[1] / "tokenizer" / "data"

seeded = settings(derandomize=True, deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))

_HARD_TEXTS = [
    " ", "  ", " " * 17, "\n", "\n\n\n", "\r\n", "\t", "\u00a0", "\u3000", "0", "7", "12345", "3.14", "a", "Z", "the",
    " the", "don't", "'S", "é", "e\u0301", "\u0301", "\u200d", "\ufeff", "\x00", "\x1b", "\x7f", "\x85", "你好",
    "日本語", "한국어", "שלום", "مرحبا", "हिन्दी", "😀", "👨‍👩‍👧‍👦", "🇫🇷", "👍🏽", "\U0001d4b3",
    "def f(x):\n    return x\n", "!=", "</div>", "<s>", "</s>", "<|im_end|>", "<0x0A>", "?",
]  # fmt: skip
unicode_text = st.lists(
    st.one_of(st.sampled_from(_HARD_TEXTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=4)), max_size=12
).map("".join)


@cache
def data(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def bpe_metadata(pre: str | None = "smollm", **more: object) -> dict[str, object]:
    """Return metadata of the committed vocabulary; `more` are keys under `tokenizer.ggml.`, None removes one."""
    vocabulary = data("vocabulary.json")
    kinds = np.ones(len(vocabulary["tokens"]), np.int32)
    kinds[vocabulary["control"]] = 3
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(vocabulary["tokens"]),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(vocabulary["merges"]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }
    return _merge_keys(metadata, more)


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def spm_metadata(words: list[str], word_scores: list[float] | None = None, **more: object) -> dict[str, object]:
    """Return metadata of a SentencePiece-style vocabulary: special and byte tokens, then words, best first."""
    tokens = [*SPM_TOKENS, *words]
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(SPM_TOKENS) + (word_scores or [-float(i) for i in range(len(words))]),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
    }
    return _merge_keys(metadata, more)


def _merge_keys(metadata: dict[str, object], more: dict[str, object]) -> dict[str, object]:
    metadata = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in more.items()}}
    return {key: value for key, value in metadata.items() if value is not None}
