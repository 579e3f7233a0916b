"""The text side of a pooling model: texts and pairs of texts to token ids, without weights or an engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import PoolingConfig
from ..errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from . import Tokenizer

Ints = NDArray[np.int64]
CONTROL_TOKEN = re.compile(r"<\|[^<>|]{1,64}\|>")  # of a template


class EncodedPairs(NamedTuple):
    """The sequences of pairs of texts, with the segment of each token."""

    ids: list[Ints]
    token_types: list[Ints]


class PoolingText:
    """Texts to sequences of at most `max_length` tokens, special tokens included."""

    def __init__(self, tokenizer: Tokenizer, pooling: PoolingConfig, vocab_size: int, max_length: int) -> None:
        tokenizer.pad_to(vocab_size)
        self.tokenizer, self.vocab_size, self.max_length = tokenizer, vocab_size, max_length
        self.pooling = pooling if pooling.label_tokens else replace(pooling, label_tokens=self._label_tokens(pooling))

        if pooling.pair_template:
            self._check_template(pooling.pair_template)

    def _check_template(self, template: str) -> None:
        """Raise if a pair does not fit a template, or if its control tokens are none of the vocabulary."""
        before, _, after = template.partition("{document}")
        if before.count("{query}") != 1 or "{query}" in after or "{document}" in after or "{document}" not in template:
            raise UnsupportedModelError("the template of a reranker must have {query} once, then {document} once")
        if CONTROL_TOKEN.search(before.partition("{query}")[2]):
            raise UnsupportedModelError("the template of a reranker has a control token between query and document")
        for name in CONTROL_TOKEN.findall(template):
            if self.tokenizer.token_id(name) is None:
                raise UnsupportedModelError(f"the template of the reranker has {name}, which is no token of the model")

    def _label_tokens(self, pooling: PoolingConfig) -> tuple[int, ...]:
        """Return the ids of the label words, whose logits are read; each word must be one token."""
        tokens = [self.tokenizer.encode(word, add_special=False) for word in pooling.label_words]
        for word, ids in zip(pooling.label_words, tokens, strict=True):
            if len(ids) != 1:
                raise UnsupportedModelError(f"{word!r} is {len(ids)} tokens: a reranker by words needs one")
        return tuple(int(ids[0]) for ids in tokens)

    def prompt(self, name: str | None = None) -> str:
        """Return the text that goes before an input, by name; None: the model's default one."""
        name = self.pooling.default_prompt if name is None else name
        if not name:
            return ""
        if name not in self.pooling.prompts:
            names = ", ".join(sorted(self.pooling.prompts)) or "none"
            raise InvalidRequestError(f"unknown prompt_name {name!r}: the model has {names}", "prompt_name")
        return self.pooling.prompts[name]

    def encode(self, text: str, *, prompt: str = "", truncate: bool = False) -> Ints:
        """Return the ids of one text."""
        return self.encode_batch([text], prompt=prompt, truncate=truncate)[0]

    def encode_batch(
        self, texts: Sequence[str], *, prompt: str = "", truncate: bool = False, first: int = 0
    ) -> list[Ints]:
        """Return the ids of texts; one that is too long raises, or is cut at its end with `truncate`. `first` is the
        index of the first of them, for errors."""
        limit = self.max_length if truncate else None
        whole = [prompt + text for text in texts]
        whole = [text.lower() for text in whole] if self.pooling.lower_case else whole
        encoded = self.tokenizer.encode_batch(whole, max_tokens=limit)
        return self.check_lengths([np.array(ids, np.int64) for ids in encoded], "input", first)

    def encode_pairs(
        self, query: str, documents: Sequence[str], *, truncate: bool = False, first: int = 0
    ) -> EncodedPairs:
        """Return a query with each document; a pair that is too long raises, or its document is cut. `first` is the
        index of the first document, for errors."""
        if self.pooling.pair_template:
            ids = self._encode_template(self.pooling.pair_template, query, documents, truncate=truncate)
            return EncodedPairs(
                self.check_lengths(ids, "documents", first), [np.zeros(len(row), np.int64) for row in ids]
            )
        pairs = self.tokenizer.encode_pairs(query, documents, max_tokens=self.max_length if truncate else None)
        ids = self.check_lengths([np.array(ids, np.int64) for ids, _ in pairs], "documents", first)
        return EncodedPairs(ids, [np.array(types, np.int64) for _, types in pairs])

    def _encode_template(self, template: str, query: str, documents: Sequence[str], *, truncate: bool) -> list[Ints]:
        """Return the prompt of a template, {query} and {document} in it replaced, its own control tokens parsed.

        The texts are tokenized together with the words of the template around them: a space before a document is part
        of its first token.
        """
        before, after = template.split("{document}")
        first_end = max((token.end() for token in CONTROL_TOKEN.finditer(before)), default=0)
        last_start = min((token.start() for token in CONTROL_TOKEN.finditer(after)), default=len(after))
        encode = self.tokenizer.encode
        first = encode(before[:first_end], add_special=False, parse_special=True)
        start, between = before[first_end:].split("{query}")
        last = encode(after[last_start:], add_special=False, parse_special=True)
        room = self.max_length - len(first) - len(last)
        if truncate and room <= len(encode(start + query + between, add_special=False)):
            message = f"the query leaves no room for a document: at most {self.max_length} tokens"
            raise ContextLengthError(message, "query")
        sequences = []
        for document in documents:
            ids = encode(start + query + between + document + after[:last_start], add_special=False)
            sequences.append(np.array([*first, *(ids[:room] if truncate else ids), *last], np.int64))
        return sequences

    def check_ids(self, sequences: Sequence[Sequence[int] | Ints], *, truncate: bool = False) -> list[Ints]:
        """Return sequences of ids from a caller as arrays; raise on empty sequences and ids outside the vocabulary."""
        checked = []
        for i, sequence in enumerate(sequences):
            ids = np.asarray(sequence, np.int64)
            if not ids.size:
                raise InvalidRequestError(f"input {i} has no tokens", "input")
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise InvalidRequestError(f"input {i}: a token id is outside 0..{self.vocab_size - 1}", "input")
            checked.append(self._cut(ids) if truncate else ids)
        return self.check_lengths(checked, "input")

    def _cut(self, ids: Ints) -> Ints:
        """Return at most `max_length` ids; the special tokens that end them stay."""
        if len(ids) <= self.max_length:
            return ids
        suffix = self.tokenizer.affixes[1]
        end = suffix if suffix and ids[-len(suffix) :].tolist() == suffix else []
        return np.array([*ids[: max(self.max_length - len(end), 0)], *end], np.int64)

    def check_lengths(self, sequences: list[Ints], what: str, first: int = 0) -> list[Ints]:
        """Raise if a sequence is empty, or too long for the model; `first` is the index of the first."""
        for i, ids in enumerate(sequences, first):
            if not len(ids):
                raise InvalidRequestError(f"{what} {i} has no tokens", what)
            if len(ids) > self.max_length:
                raise ContextLengthError(
                    f"{what} {i} has {len(ids)} tokens, the model takes {self.max_length}: shorten it, or set truncate",
                    what,
                )
        return sequences
