"""Benchmarks on the built-in model, which is fetched if it is not here: its tokenizer, file and matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ...llm import open_tokenizer
from ...models import Transformer, describe, load_model
from ...weights import open_checkpoint
from ...weights.hub import locate
from ...weights.quants import BLOCK_TYPES
from ..products import products
from ..prompts import TEXT, read_text
from ..roofline import Work
from ..timing import Function
from .cases import SMALL, VOCABULARY, Case, F

ENCODED_CHARACTERS = 4096
LAYERS = 30


def cases() -> Iterator[Case]:
    """In the order in which they run."""
    size = float(ENCODED_CHARACTERS)
    yield Case("tokenizer/encode", _encode, Work(size), needs="tokenizer")
    yield Case("tokenizer/decode", _decode, Work(size), needs="tokenizer")
    yield Case("gguf_open", _gguf_open, Work(2e6), needs="tokenizer")  # about 2 MB of metadata in the built-in model
    yield from (_products(rows) for rows in (1, 16))


def _encode(_: Any) -> Function:
    tokenizer, text = open_tokenizer(open_checkpoint(locate(None))), read_text(TEXT)[:ENCODED_CHARACTERS]
    return lambda: tokenizer.encode(text)


def _decode(_: Any) -> Function:
    tokenizer = open_tokenizer(open_checkpoint(locate(None)))
    ids = tokenizer.encode(read_text(TEXT)[:ENCODED_CHARACTERS])
    return lambda: tokenizer.decode(ids)


def _gguf_open(_: Any) -> Function:
    path = locate(None)
    return lambda: open_checkpoint(path)


def _products(rows: int) -> Case:
    """All matrix products of a step: the layers' matrices are Q4_1, the head Q8_0."""
    width, heads, kv_heads, head_dim, d_ff = SMALL
    shapes = (((heads + 2 * kv_heads) * head_dim, width), (width, width), (2 * d_ff, width), (width, d_ff))
    size = sum(n * BLOCK_TYPES["Q4_1"].row_bytes(columns) for n, columns in shapes)
    head = VOCABULARY * BLOCK_TYPES["Q8_0"].row_bytes(width)
    values = LAYERS * sum(n * columns for n, columns in shapes) + VOCABULARY * width
    moved = LAYERS * sum(map(sum, shapes)) + VOCABULARY + width  # activations in and out, for each row
    work = Work(LAYERS * size + head + F * rows * moved, 2 * rows * values)
    return Case(f"products/{rows}", lambda ops: products(_model(ops), rows), work)


@lru_cache(maxsize=2)
def _model(ops: Any) -> Transformer:
    checkpoint = open_checkpoint(locate(None))
    return load_model(checkpoint, ops, describe(checkpoint))
