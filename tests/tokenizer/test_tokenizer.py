"""Vocabularies: the bytes of tokens."""

from __future__ import annotations

import pytest

from llm_worker_rbee.tokenizer.tokenizer import Style, TokenType, Vocabulary

NORMAL, CONTROL, BYTE = int(TokenType.NORMAL), int(TokenType.CONTROL), int(TokenType.BYTE)
VOCABULARIES: list[tuple[list[str], list[int], Style]] = [
    (["a", "abc", "\u0120\u0120\u0120\u0120"], [NORMAL] * 3, "byte"),  # a byte is one character there
    (["\u2581abc", "\u6f22\u6f22", "<0x0A>"], [NORMAL, NORMAL, BYTE], "spm"),
    (["abcd", "\U0001f600\U0001f600"], [NORMAL, NORMAL], "verbatim"),
    (["a", "<|end|>", ""], [NORMAL, CONTROL, NORMAL], "byte"),
    ([], [], "byte"),
]


@pytest.mark.parametrize(("texts", "kinds", "style"), VOCABULARIES)
def test_max_token_bytes_is_that_of_the_longest(texts: list[str], kinds: list[int], style: Style) -> None:
    vocabulary = Vocabulary(texts, kinds, style)
    longest = max((len(vocabulary.token_bytes(token)) for token in range(len(texts))), default=0)
    assert vocabulary.max_token_bytes() == longest
