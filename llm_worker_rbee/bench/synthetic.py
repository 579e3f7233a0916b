"""Models of a real shape and a real mix of quantization types with random weights: for speed only.

`parse("llama2-7b:Q4_K_M:4")` names one; `checkpoint` makes it in memory, `write` as a GGUF that llama.cpp reads too.
Values have the size 1 / sqrt(columns), so that activations stay finite through all layers. `random_tensor` needs no
encoder: it draws bytes and keeps blocks whose values are finite and of about that size; a few thousand of them,
repeated, make a tensor of any size. The matrices of a checkpoint are views of such repeated blocks that begin with
different ones: a model of 16 GB takes the time and memory of its largest matrix.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import machine
from ..errors import InsufficientMemoryError, InvalidRequestError, WorkerError, human_bytes
from ..models.families import BY_GGUF
from ..progress import StepProgress
from ..weights import Checkpoint, Tensor
from ..weights.gguf_writer import Raw, Typed, write_gguf
from ..weights.quant_mix import EMBEDDING, OUTPUT, Mix, Place, find_mix, matrix_type
from ..weights.quants import BLOCK_TYPES, BlockType

Seed = int | tuple[int, ...]
RESERVE_BYTES = 512 << 20  # memory or disk that stays free
DRAWN_BLOCKS = 1 << 13  # a round
POOL_BLOCKS = 1021  # a prime number, so that the rows of a matrix differ
MAX_ROUNDS = 64
SPREAD = 4.0  # factor by which the size of a block's values may differ from the wanted one
EXAMPLE = "llama2-7b:Q4_K_M or llama2-7b:Q4_K_M:4"


class Shape(NamedTuple):
    """The dimensions of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    d_ff: int
    vocabulary: int
    context: int
    rope_base: float = 10000.0
    tied: bool = False
    eps: float = 1e-5
    architecture: str = "llama"
    head_dim: int = 0  # 0: width / heads
    window: int = 0  # of sliding-window attention; 0: none


SHAPES: dict[str, Shape] = {
    "llama2-7b": Shape(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2-13b": Shape(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama3-8b": Shape(32, 4096, 32, 8, 14336, 128256, 8192, rope_base=500000.0),
    "llama3.2-1b": Shape(16, 2048, 32, 8, 8192, 128256, 131072, rope_base=500000.0, tied=True),
    "llama3.2-3b": Shape(28, 3072, 24, 8, 8192, 128256, 131072, rope_base=500000.0, tied=True),
    "mistral-7b": Shape(32, 4096, 32, 8, 14336, 32000, 32768),
    "tinyllama-1.1b": Shape(22, 2048, 32, 4, 5632, 32000, 2048),
    "smollm2-135m": Shape(30, 576, 9, 3, 1536, 49152, 8192, rope_base=100000.0, tied=True),
    "smollm2-1.7b": Shape(24, 2048, 32, 32, 8192, 49152, 8192, rope_base=130000.0, tied=True),
    "qwen2.5-0.5b": Shape(24, 896, 14, 2, 4864, 151936, 32768, 1e6, tied=True, eps=1e-6, architecture="qwen2"),
    "phi3-mini": Shape(32, 3072, 32, 32, 8192, 32064, 4096, architecture="phi3"),
    "gemma3-4b": Shape(34, 2560, 8, 4, 10240, 262144, 131072, 1e6, True, 1e-6, "gemma3", head_dim=256, window=1024),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """A shape, a quantization mix and a number of layers."""

    name: str
    shape: Shape
    mix_name: str
    layers: int
    quantize: str | None = None  # while loading: "fp8" for the mix FP8, which is BF16 in the file

    @property
    def mix(self) -> Mix:
        return find_mix(self.mix_name)

    def __str__(self) -> str:
        layers = "" if self.layers == self.shape.layers else f":{self.layers}"
        return f"{self.name}:{(self.quantize or self.mix_name).upper()}{layers}"

    @property
    def nbytes(self) -> int:
        return sum(plan.nbytes for plan in plans(self))


class Plan(NamedTuple):
    """One tensor to make."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return rows * self.kind.row_bytes(self.shape[-1])


def parse(text: str) -> Spec:
    """Parse `shape:mix` or `shape:mix:layers`."""
    name, *rest = text.split(":")
    if name not in SHAPES:
        raise InvalidRequestError(f"unknown synthetic model {name!r}: use one of {', '.join(SHAPES)}", "synthetic")
    if not 1 <= len(rest) <= 2:
        raise InvalidRequestError(f"{text!r} is not of the form SHAPE:TYPES[:LAYERS], such as {EXAMPLE}", "synthetic")
    shape, mix = SHAPES[name], rest[0].upper()
    mix, quantize = ("BF16", "fp8") if mix == "FP8" else (mix, None)
    find_mix(mix)
    layers = rest[1] if len(rest) == 2 else str(shape.layers)
    if not (layers.isascii() and layers.isdigit() and len(layers) < 5 and 1 <= int(layers) <= shape.layers):
        raise InvalidRequestError(f"{text!r}: layers must be 1 to {shape.layers}, not {layers!r}", "synthetic")
    return Spec(name, shape, mix, int(layers), quantize)


def plans(spec: Spec) -> Iterator[Plan]:
    """Yield every tensor of the model, in the order of the file."""
    s, tied, nowhere = spec.shape, spec.shape.tied, Place(0, spec.layers, 1)

    def matrix(name: str, role: str, rows: int, columns: int, place: Place = nowhere) -> Plan:
        kind = matrix_type(spec.mix, role, columns, place, tied=tied)
        return Plan(f"{name}.weight", BLOCK_TYPES[kind], (rows, columns))

    def vector(name: str, width: int) -> Plan:
        return Plan(name, BLOCK_TYPES["F32"], (width,))

    yield matrix("token_embd", EMBEDDING, s.vocabulary, s.width)
    yield vector("output_norm.weight", s.width)
    if not tied:
        yield matrix("output", OUTPUT, s.vocabulary, s.width)
    head = s.head_dim or s.width // s.heads
    q, kv, up = s.heads * head, s.kv_heads * head, s.d_ff
    matrices = {
        "attn_q": (q, s.width), "attn_k": (kv, s.width), "attn_v": (kv, s.width), "attn_output": (s.width, q),
        "ffn_gate": (up, s.width), "ffn_up": (up, s.width), "ffn_down": (s.width, up),
    }  # fmt: skip
    family = BY_GGUF[s.architecture]
    if family.fused_qkv:
        for name in ("attn_q", "attn_k", "attn_v"):
            del matrices[name]
        matrices["attn_qkv"] = (q + 2 * kv, s.width)
    if family.fused_gate_up:
        del matrices["ffn_gate"]
        matrices["ffn_up"] = (2 * up, s.width)
    norms = dict.fromkeys(("attn_norm", "ffn_norm") if family.pre_norms else (), s.width)
    norms |= dict.fromkeys(("post_attention_norm", "post_ffw_norm") if family.post_norms else (), s.width)
    if family.qk_norm:
        widths = (q, kv) if family.wide_qk_norm else (head, head)
        norms |= dict(zip(("attn_q_norm", "attn_k_norm"), widths, strict=True))
    for layer in range(spec.layers):
        prefix, place = f"blk.{layer}.", Place(layer, spec.layers, s.heads // s.kv_heads)
        yield from (vector(f"{prefix}{norm}.weight", width) for norm, width in norms.items())
        for role, (rows, columns) in matrices.items():
            yield matrix(prefix + role, role, rows, columns, place)
            if family.qkv_bias and role in ("attn_q", "attn_k", "attn_v"):
                yield vector(f"{prefix}{role}.bias", rows)


def checkpoint(spec: Spec, seed: int = 0, progress: StepProgress | None = None) -> Checkpoint:
    """Make the model in memory; matrices of one type and width share read-only bytes, which backends copy to pack."""
    require_memory(spec)
    tensors: dict[str, Tensor] = {}
    done, total = 0, spec.nbytes
    shared = _repeat_blocks(spec)
    for number, plan in enumerate(plans(spec)):
        if len(plan.shape) == 1:  # the zeros of a bias, or the ones of a norm
            data = np.full(plan.shape, 0.0 if plan.name.endswith(".bias") else 1.0, np.float32).view(np.uint8)
        else:
            key = plan.kind, plan.shape[1]
            start = _first_block(_pool_of(*key), (seed, number)) * plan.kind.block_bytes
            data = shared[key][start : start + plan.nbytes]
        tensors[plan.name] = Tensor(plan.name, plan.kind, plan.shape, data)
        done += plan.nbytes
        if progress is not None:
            progress(f"making {spec}", done, total)
    return replace(without_weights(spec), tensors=tensors)


def _repeat_blocks(spec: Spec) -> dict[tuple[BlockType, int], NDArray[np.uint8]]:
    """Return the pool of each type and width, repeated for the largest matrix, whichever block it begins with."""
    largest: dict[tuple[BlockType, int], int] = {}  # bytes
    for plan in plans(spec):
        if len(plan.shape) == 2:
            key = plan.kind, plan.shape[1]
            largest[key] = max(plan.nbytes, largest.get(key, 0))
    repeated = {key: np.resize(pool := _pool_of(*key), pool.size + nbytes) for key, nbytes in largest.items()}
    for blocks in repeated.values():
        blocks.flags.writeable = False
    return repeated


def without_weights(spec: Spec) -> Checkpoint:
    """Return the metadata alone: enough to know the shape."""
    return Checkpoint(Path(str(spec)), "gguf", spec.shape.architecture, metadata(spec), {}, {})


def write(spec: Spec, path: Path, seed: int = 0, progress: StepProgress | None = None) -> Path:
    """Write the model as a GGUF file."""
    needed, free = spec.nbytes, shutil.disk_usage(path.parent).free
    if needed + RESERVE_BYTES > free:
        raise WorkerError(
            f"{spec} takes {human_bytes(needed)} on disk and {path.parent} has {human_bytes(free)} left: "
            "use fewer layers, or another folder (TMPDIR)"
        )
    tensors = checkpoint(spec, seed, progress).tensors
    raws = {name: Raw(t.kind.name, t.shape, t.data) for name, t in tensors.items()}
    return write_gguf(path, {**metadata(spec), **_vocabulary(spec.shape.vocabulary)}, raws)


def metadata(spec: Spec) -> dict[str, Any]:
    """Return the GGUF metadata of the shape."""
    s = spec.shape
    head = s.head_dim or s.width // s.heads
    general = {
        "architecture": s.architecture, "name": f"synthetic {spec}", "file_type": spec.mix.file_type,
        "quantization_version": 2,
    }  # fmt: skip
    keys = {
        "context_length": s.context, "embedding_length": s.width, "block_count": spec.layers,
        "feed_forward_length": s.d_ff, "attention.head_count": s.heads, "attention.head_count_kv": s.kv_heads,
        "attention.layer_norm_rms_epsilon": s.eps, "rope.dimension_count": head, "rope.freq_base": s.rope_base,
        "vocab_size": s.vocabulary,
        **({"attention.key_length": head, "attention.value_length": head} if s.head_dim else {}),
        **({"attention.sliding_window": s.window} if s.window else {}),
    }  # fmt: skip
    sections = (("general", general), (s.architecture, keys))
    return {f"{section}.{key}": value for section, pairs in sections for key, value in pairs.items()}


def _vocabulary(size: int) -> dict[str, Any]:
    """Return a SentencePiece vocabulary of the right size: control tokens, bytes, then invented pieces."""
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*head, *(f"t{number}" for number in range(size - len(head)))][:size]
    kinds = ([2, 3, 3] + [6] * 256 + [1] * size)[:size]
    scores = Typed("float32", [-float(number) for number in range(size)])
    keys = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": Typed("int32", kinds),
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def require_memory(spec: Spec) -> None:
    """Raise if the model does not fit into memory."""
    needed, (_, free) = spec.nbytes, machine.memory()
    limit, used = machine.memory_limit()
    left = [x for x in (free, None if limit is None else limit - used) if x is not None]
    if left and needed + RESERVE_BYTES > min(left):
        raise InsufficientMemoryError(
            f"{spec} takes {human_bytes(needed)} of memory and {human_bytes(max(0, min(left)))} are free: "
            f"use fewer layers ({spec.name}:{spec.mix_name}:N)"
        )


def random_tensor(kind: BlockType, shape: tuple[int, ...], seed: Seed = 7, size: float | None = None) -> Tensor:
    """Make a tensor, not shared; `size` is the root mean square of its values, by default 1 / sqrt(columns)."""
    pool = _pool_of(kind, shape[-1], size)
    rotated = np.roll(pool, -_first_block(pool, seed), axis=0)
    return Tensor("random", kind, shape, np.resize(rotated, prod(shape[:-1]) * kind.row_bytes(shape[-1])))


def _pool_of(kind: BlockType, columns: int, size: float | None = None) -> NDArray[np.uint8]:
    """Return the pool for rows of this width."""
    return block_pool(kind, float(np.float16(columns**-0.5 if size is None else size)))


def _first_block(pool: NDArray[np.uint8], seed: Seed) -> int:
    """Return the block of a pool that a tensor begins with."""
    return -int(np.random.default_rng(seed).integers(len(pool))) % len(pool)


@lru_cache(maxsize=64)
def block_pool(kind: BlockType, size: float) -> NDArray[np.uint8]:
    """Return usable blocks of a type: (blocks, block_bytes)."""
    rng = np.random.default_rng(kind.id)
    if kind.block_size == 1:
        return _unquantized_values(kind, size, rng)
    kept: list[NDArray[np.uint8]] = []
    for _ in range(MAX_ROUNDS):
        blocks = rng.integers(0, 256, (DRAWN_BLOCKS, kind.block_bytes), np.uint8)
        with np.errstate(all="ignore"):
            rms = np.sqrt(np.mean(np.square(kind.decode(blocks), dtype=np.float64), axis=1))
            kept.append(blocks[(rms > size / SPREAD) & (rms < size * SPREAD)])  # NaN and infinity fail both
        if sum(map(len, kept)) >= POOL_BLOCKS:
            break
    found = np.concatenate(kept)[:POOL_BLOCKS]
    assert len(found), f"no usable block of {kind.name} was drawn"
    return found


def _unquantized_values(kind: BlockType, size: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    values = (size * rng.standard_normal(65521)).astype(np.float32)
    types = {"F32": np.float32, "F16": np.float16}
    narrow = values.view(np.uint16)[1::2].copy() if kind.name == "BF16" else values.astype(types[kind.name])
    return narrow.view(np.uint8).reshape(-1, kind.block_bytes)
