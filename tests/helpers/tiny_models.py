"""Tiny GGUF models with a byte vocabulary: random weights, or weights that generate a given text.

Ids 0 to 255 are bytes, then a few merged tokens, then control tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.weights.gguf_writer import Typed, write_gguf
from tests.helpers import model_zoo

MERGED = ["Ġt", "he", "Ġthe"]
MERGES = ["Ġ t", "h e", "Ġt he"]
CONTROL = ["<|end|>", "<|eot|>", "<|user|>", "<|assistant|>"]
VOCAB = 256 + len(MERGED) + len(CONTROL)
END, EOT, USER, ASSISTANT = range(VOCAB - len(CONTROL), VOCAB)
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HEAD = 32  # supported by fused decoders
LLAMA = model_zoo.Variant("llama", {"rope_parameters": model_zoo.DEFAULT_ROPE, "vocab_size": VOCAB, "head_dim": HEAD})


def byte_chars() -> list[str]:
    """Return the printable character of each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def token_bytes(token: int) -> bytes:
    """Return the bytes of a token; empty for control tokens."""
    if token < 256:
        return bytes([token])
    return MERGED[token - 256].replace("Ġ", " ").encode() if token < 256 + len(MERGED) else b""


def tokenizer_metadata(**changes: Any) -> dict[str, Any]:
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*byte_chars(), *MERGED, *CONTROL],
        "merges": MERGES,
        "token_type": Typed("int32", [1] * (256 + len(MERGED)) + [3] * len(CONTROL)),
        "eos_token_id": END,
        **changes,
    }
    return {**{f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None}, "tokenizer.chat_template": TEMPLATE}


def random_hf(seed: int = 0, **settings: Any) -> Any:
    return model_zoo.make_hf(replace(LLAMA, settings={**LLAMA.settings, **settings}), seed)


def write_random(path: Path, model: Any = None, **tokenizer: Any) -> Path:
    """Write a random llama with this vocabulary: its output depends on every token before."""
    model = model or random_hf()
    return write_gguf(
        path,
        {**model_zoo.gguf_metadata(LLAMA, model), **tokenizer_metadata(**tokenizer)},
        model_zoo.gguf_tensors(LLAMA, model),
    )


def write_scripted(
    path: Path,
    follows: Mapping[int, int | Mapping[int, float]],
    metadata: Mapping[str, Any] | None = None,
    vocab: int = VOCAB,
    context: int = 256,
) -> Path:
    """Write a llama in which `follows[i]` comes after token i (or tokens, with logits in the ratio of their weights).

    Attention and MLP add nothing; the head's row of a token is the sum of the embeddings of those it follows.
    """
    width = HEAD * -(-vocab // HEAD)
    embedding = np.zeros((vocab, width), np.float32)
    embedding[np.arange(vocab), np.arange(vocab)] = 1.0
    head = np.zeros((vocab, width), np.float32)
    for before, after in follows.items():
        for token, weight in (after if isinstance(after, Mapping) else {after: 1.0}).items():
            head[token] += embedding[before] * np.float32(weight)
    return write_gguf(
        path,
        {**_scripted_metadata(width, vocab, context), **(metadata or tokenizer_metadata())},
        {"token_embd.weight": embedding, "output.weight": head, **_silent_block(width)},
    )


def chain(*tokens: int) -> dict[int, int]:
    """Return a script in which each token is followed by the next; tokens must be unique."""
    assert len(set(tokens)) == len(tokens)
    return dict(pairwise(tokens))


def say(text: str | Sequence[int], end: int = END, first: int = ord(">")) -> dict[int, int]:
    """Return a script that answers the prompt '>' with this text (no byte twice) and ends."""
    return chain(first, *(text.encode() if isinstance(text, str) else text), end)


def _scripted_metadata(width: int, vocab: int, context: int) -> dict[str, Any]:
    keys = {
        "block_count": 1,
        "embedding_length": width,
        "attention.head_count": 1,
        "feed_forward_length": HEAD,
        "context_length": context,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HEAD,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
    }
    return {"general.architecture": "llama", "general.name": "scripted", **{f"llama.{k}": v for k, v in keys.items()}}


def _silent_block(width: int) -> dict[str, NDArray[np.float32]]:
    shapes = {
        "attn_q": (HEAD, width),
        "attn_k": (HEAD, width),
        "attn_v": (HEAD, width),
        "attn_output": (width, HEAD),
        "ffn_gate": (HEAD, width),
        "ffn_up": (HEAD, width),
        "ffn_down": (width, HEAD),
    }
    block = {f"blk.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    norms = {
        name: np.ones(width, np.float32)
        for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")
    }
    return block | norms
