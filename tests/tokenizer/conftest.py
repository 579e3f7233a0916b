"""Tokenizers with and without tokens for markers, and grammars over them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from llm_worker_rbee.tokenizer import Tokenizer, tokenizer_from_gguf
from llm_worker_rbee.tokenizer.chat.detection import detect_chat_format
from llm_worker_rbee.tokenizer.chat.format import ChatFormat
from llm_worker_rbee.weights.gguf import open_gguf
from tests.helpers.chat_formats import GrammarChecker, template_of, with_markers


@pytest.fixture(scope="session")
def plain_tokenizer(default_model: Path) -> Tokenizer:
    return tokenizer_from_gguf(open_gguf(default_model).metadata)


@pytest.fixture(scope="session")
def marker_tokenizer(default_model: Path) -> Tokenizer:
    return with_markers(open_gguf(default_model).metadata)


@pytest.fixture(scope="session")
def checkers(plain_tokenizer: Tokenizer, marker_tokenizer: Tokenizer) -> dict[str, GrammarChecker]:
    """Markers as text, and as tokens."""
    return {"text": GrammarChecker(plain_tokenizer), "tokens": GrammarChecker(marker_tokenizer)}


@pytest.fixture(scope="session")
def format_of(plain_tokenizer: Tokenizer, marker_tokenizer: Tokenizer) -> Callable[[str, str], ChatFormat]:
    @cache
    def detect(name: str, markers: str) -> ChatFormat:
        return detect_chat_format(template_of(name), plain_tokenizer if markers == "text" else marker_tokenizer)

    return detect
