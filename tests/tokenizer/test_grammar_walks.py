"""Random walks through the grammars of every chat format: no allowed token leads to a dead end, and no token of a mask
is refused, with forced tokens, drafts and rollbacks. tests/extra walks further, over real vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from llm_worker_rbee.structured_outputs.grammar import TokenTable
from llm_worker_rbee.tokenizer import Tokenizer, tokenizer_from_gguf
from llm_worker_rbee.tokenizer.chat.detection import detect_chat_format
from tests.helpers.chat_formats import ANSWERS, template_of, with_markers
from tests.helpers.grammar_walks import Walker, check_walks
from tests.helpers.tokenizer_metadata import bpe_metadata, data, spm_metadata


def spm_words() -> dict[str, object]:
    """Return metadata of a SentencePiece vocabulary with the words of the committed one."""
    texts = (text.replace("Ġ", "\u2581").replace("Ċ", "\n") for text in data("vocabulary.json")["tokens"][3:])
    words = dict.fromkeys(text for text in texts if text.replace("\u2581", "").isascii())
    return spm_metadata(list(words), eos_token_id=2, bos_token_id=1)


VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    "BPE, markers are text": lambda: tokenizer_from_gguf(bpe_metadata()),
    "BPE, markers are tokens": lambda: with_markers(bpe_metadata()),
    "SentencePiece, markers are text": lambda: tokenizer_from_gguf(spm_words()),
    "SentencePiece, markers are tokens": lambda: with_markers(spm_words()),
}


@cache
def walker_of(vocabulary: str) -> Walker:
    return Walker(VOCABULARIES[vocabulary]())


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", ANSWERS)
def test_walks_never_come_to_a_dead_end(name: str, vocabulary: str) -> None:
    walker = walker_of(vocabulary)
    chat_format = detect_chat_format(template_of(name), walker.tokenizer)
    counts = check_walks(walker, chat_format, [f"{name} {i}" for i in range(2)], 80)
    assert counts["steps"]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_forced_text_becomes_tokens_of_the_same_bytes(vocabulary: str) -> None:
    """Whatever the encoder does to a text: a space before it, names of markers, characters without a token."""
    tokenizer = VOCABULARIES[vocabulary]()
    table = TokenTable(tokenizer, tokenizer.vocab_size)
    for text in ('{"name": "f"', " x", "x  y ", "<tool_call>", 'a</think>\n<|im_end|>"', "ü日\ufdd0", "\u2581", "\x02"):
        ids = table(text)
        assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
        assert not set(ids) & set(table.special_token_ids)
