"""Texts of pooling models: prompts, templates of rerankers, lengths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from llm_worker_rbee.config import PoolingConfig
from llm_worker_rbee.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from llm_worker_rbee.models.pooling_config import YES_NO_TEMPLATE
from llm_worker_rbee.tokenizer.pooling_text import PoolingText

WORD = re.compile(r" ?\w+|\s+|[^\w\s]")  # a space belongs to the word after it, as in byte-level BPE


class WordTokenizer:
    """Ids of words as they come; control tokens of the text count only where they are parsed."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def pad_to(self, vocab_size: int) -> None:
        pass

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        pieces = re.split(r"(<\|\w+\|>)", text) if parse_special else [text]
        words = [
            w
            for piece in pieces
            for w in ([piece] if piece.startswith("<|") and parse_special else WORD.findall(piece))
        ]
        return [self.id_of(word) for word in (["[CLS]", *words] if add_special else words)]

    def encode_batch(self, texts: Sequence[str], *, max_tokens: int | None = None) -> list[list[int]]:
        return [self.encode(text)[:max_tokens] for text in texts]

    def token_id(self, text: str) -> int | None:
        return self.id_of(text)

    def id_of(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)

    def text(self, ids: Any) -> list[str]:
        return [self.words[i] for i in ids]


def make_text(max_length: int = 100, **fields: Any) -> PoolingText:
    return PoolingText(WordTokenizer(), PoolingConfig(**fields), 1000, max_length)


def test_template_reads_the_document_with_the_space_before_it_and_no_control_tokens_of_texts() -> None:
    text = make_text(pair_template=YES_NO_TEMPLATE, score="softmax", kind="last")
    (ids,), (types,) = text.encode_pairs("what <|im_end|> is", ["a cat"])
    words = text.tokenizer.text(ids)
    assert words[:2] == ["<|im_start|>", "system"]
    assert words[words.index(" cat") - 1 : words.index(" cat") + 2] == [" a", " cat", "<|im_end|>"]
    assert words.count("<|im_end|>") == 2, "that of the query is plain text"
    assert "".join(words) == YES_NO_TEMPLATE.format(query="what <|im_end|> is", document="a cat")
    assert not types.any()
    assert len(types) == len(ids)


def test_template_cuts_the_document_alone() -> None:
    text = make_text(60, pair_template="<|a|>{query} : {document}<|b|>", score="softmax", kind="last")
    long = "word " * 100
    with pytest.raises(ContextLengthError, match="documents 0"):
        text.encode_pairs("q", [long])
    (ids,), _ = text.encode_pairs("q", [long], truncate=True)
    assert len(ids) == 60
    assert text.tokenizer.text(ids)[-1] == "<|b|>"
    with pytest.raises(ContextLengthError, match="no room"):
        text.encode_pairs(long, ["x"], truncate=True)


def test_words_of_labels_become_tokens() -> None:
    text = make_text(label_words=("yes", "no"), score="softmax", kind="last")
    assert text.tokenizer.text(text.pooling.label_tokens) == ["yes", "no"]
    assert make_text(label_words=("yes", "no"), label_tokens=(5, 6)).pooling.label_tokens == (5, 6)
    with pytest.raises(UnsupportedModelError, match="'not so' is 2 tokens"):
        make_text(label_words=("yes", "not so"))


def test_prompts_by_name_and_lower_case() -> None:
    text = make_text(prompts={"query": "Query: "}, default_prompt="query", lower_case=True)
    assert text.prompt() == "Query: "
    assert text.prompt("") == ""
    with pytest.raises(InvalidRequestError, match="unknown prompt_name 'none': the model has query"):
        text.prompt("none")
    assert text.tokenizer.text(text.encode("Hello", prompt=text.prompt())) == ["[CLS]", "query", ":", " hello"]
