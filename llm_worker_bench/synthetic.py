"""Models of a real shape and a real mix of quantization types with random weights: for speed only.

`parse("llama2-7b:Q4_K_M:4")` names one of synthetic_shapes.py; `checkpoint` makes it in memory, `write` as a GGUF that
llama.cpp reads too. Values have the size 1 / sqrt(columns), so that activations stay finite through all layers.
`random_tensor` needs no encoder: it draws bytes and keeps blocks whose values are finite and of about that size; a few
thousand of them, repeated, make a tensor of any size. The matrices of a checkpoint are views of such repeated blocks
that begin with different ones: a model of 16 GB takes the time and memory of its largest matrix.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee import machine
from llm_worker_rbee.errors import InsufficientMemoryError, InvalidRequestError, WorkerError, human_bytes
from llm_worker_rbee.progress import StepProgress
from llm_worker_rbee.weights import Checkpoint, Tensor
from llm_worker_rbee.weights.gguf_writer import Raw, Typed, write_gguf
from llm_worker_rbee.weights.quant_mix import EMBEDDING, OUTPUT, Mix, Place, find_mix, matrix_type
from llm_worker_rbee.weights.quants import BLOCK_TYPES, GROUP_TYPES, BlockType

from .synthetic_shapes import SEGMENTS, SHAPES, Shape, architecture, architecture_keys

Seed = int | tuple[int, ...]
RESERVE_BYTES = 512 << 20  # memory or disk that stays free
DRAWN_BLOCKS = 1 << 13  # a round
POOL_BLOCKS = 1021  # a prime number, so that the rows of a matrix differ
MAX_ROUNDS = 64
SPREAD = 4.0  # factor by which the size of a block's values may differ from the wanted one
EXAMPLE = "llama2-7b:Q4_K_M, llama2-7b:Q4_K_M:4 or qwen3-30b-a3b:Q4_K_M:4:16"
MAX_DIGITS = 4  # of a number of layers or experts


@dataclass(frozen=True, slots=True)
class Spec:
    """A shape, a quantization mix and a number of layers; the shape has the experts that are made."""

    name: str
    shape: Shape
    mix_name: str
    layers: int
    quantize: str | None = None  # while loading: "fp8" for the mix FP8, which is BF16 in the file

    @property
    def mix(self) -> Mix:
        return find_mix(self.mix_name)

    def __str__(self) -> str:
        whole, experts = SHAPES.get(self.name, self.shape), self.shape.experts
        counts = f":{self.layers}:{experts}" if experts != whole.experts else f":{self.layers}"
        suffix = "" if (self.layers, experts) == (whole.layers, whole.experts) else counts
        return f"{self.name}:{(self.quantize or self.mix_name).upper()}{suffix}"

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
        return prod(self.shape[:-1]) * self.kind.row_bytes(self.shape[-1])

    @property
    def is_random(self) -> bool:
        """Whether it is a matrix; a vector or a bias has one value throughout."""
        return len(self.shape) > 1 and not self.name.endswith(".bias")

    @property
    def constant(self) -> float:
        return 0.0 if self.name.endswith(".bias") else -1.0 if self.name.endswith(".ssm_a") else 1.0


def parse(text: str) -> Spec:
    """Parse `shape:mix`, `shape:mix:layers` or `shape:mix:layers:experts`."""
    name, *rest = text.split(":")
    if name not in SHAPES:
        raise InvalidRequestError(f"unknown synthetic model {name!r}: use one of {', '.join(SHAPES)}", "synthetic")
    if not 1 <= len(rest) <= 3:
        form = "SHAPE:TYPES[:LAYERS[:EXPERTS]]"
        raise InvalidRequestError(f"{text!r} is not of the form {form}, such as {EXAMPLE}", "synthetic")
    shape, mix = SHAPES[name], rest[0].upper()
    mix, quantize = ("BF16", "fp8") if mix == "FP8" else (mix, None)
    find_mix(mix)
    layers = _count(text, "layers", rest[1], shape.layers) if len(rest) > 1 else shape.layers
    if len(rest) > 2:
        experts = _count(text, "experts", rest[2], shape.experts)
        shape = shape._replace(experts=experts, used_experts=min(experts, shape.used_experts))
    return Spec(name, shape, mix, layers, quantize)


def _count(text: str, what: str, digits: str, maximum: int) -> int:
    if not maximum:
        raise InvalidRequestError(f"{text!r}: the shape has no {what}", "synthetic")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS and 1 <= int(digits) <= maximum):
        raise InvalidRequestError(f"{text!r}: {what} must be 1 to {maximum}, not {digits!r}", "synthetic")
    return int(digits)


def plans(spec: Spec) -> Iterator[Plan]:
    """Yield every tensor of the model, in the order of the file."""
    s, arch = spec.shape, architecture(spec.shape)

    def plan(name: str, role: str, shape: tuple[int, ...], layer: int = 0) -> Plan:
        kind = "F32"
        if role and len(shape) > 1 and not name.endswith(".bias"):
            place = Place(layer, spec.layers, s.heads // s.kv_heads, s.experts)
            kind = matrix_type(spec.mix, role, shape[-1], place, tied=s.tied)
        return Plan(name, BLOCK_TYPES[kind], shape)

    yield plan("token_embd.weight", EMBEDDING, (s.vocabulary, s.width))
    yield plan(f"{arch.output_norm}.weight", "", (s.width,))
    if not s.tied:
        yield plan("output.weight", OUTPUT, (s.vocabulary, s.width))
    for name, shape in arch.more(s).items():
        yield plan(name, "", shape)
    for layer in range(spec.layers):
        for name, shape in arch.layer(s, layer).items():
            yield plan(f"blk.{layer}.{name}", name.removesuffix(".weight"), shape, layer)


def checkpoint(spec: Spec, seed: int = 0, progress: StepProgress | None = None) -> Checkpoint:
    """Make the model in memory; matrices of one type and width share read-only bytes, which backends copy to pack."""
    require_memory(spec)
    tensors: dict[str, Tensor] = {}
    done, total = 0, spec.nbytes
    shared = _repeat_blocks(spec)
    for number, plan in enumerate(plans(spec)):
        if not plan.is_random:
            data = np.full(plan.shape, plan.constant, np.float32).reshape(-1).view(np.uint8)
        else:
            key = plan.kind, plan.shape[-1]
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
        if plan.is_random:
            key = plan.kind, plan.shape[-1]
            largest[key] = max(plan.nbytes, largest.get(key, 0))
    repeated = {key: np.resize(pool := _pool_of(*key), pool.size + nbytes) for key, nbytes in largest.items()}
    for blocks in repeated.values():
        blocks.flags.writeable = False
    return repeated


def without_weights(spec: Spec) -> Checkpoint:
    """Return the metadata alone: enough to know the shape."""
    return Checkpoint(Path(str(spec)), "gguf", spec.shape.architecture, metadata(spec), {}, {})


def write(
    spec: Spec,
    path: Path,
    seed: int = 0,
    progress: StepProgress | None = None,
    *,
    control_tokens: Sequence[str] = (),
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model as a GGUF file; `control_tokens` are the last ones of its vocabulary, `keys` more metadata."""
    needed, free = spec.nbytes, shutil.disk_usage(path.parent).free
    if needed + RESERVE_BYTES > free:
        raise WorkerError(
            f"{spec} takes {human_bytes(needed)} on disk and {path.parent} has {human_bytes(free)} left: "
            "use fewer layers, or another folder (TMPDIR)"
        )
    tensors = checkpoint(spec, seed, progress).tensors
    raws = {name: Raw(t.kind.name, t.shape, t.data) for name, t in tensors.items()}
    return write_gguf(path, {**metadata(spec), **_vocabulary(spec.shape, control_tokens), **(keys or {})}, raws)


def metadata(spec: Spec) -> dict[str, Any]:
    """Return the GGUF metadata of the shape."""
    s = spec.shape
    general = {
        "architecture": s.architecture,
        "name": f"synthetic {spec}",
        "file_type": spec.mix.file_type,
        "quantization_version": 2,
    }
    keys = architecture_keys(s, spec.layers)
    sections = (("general", general), (s.architecture, keys))
    return {f"{section}.{key}": value for section, pairs in sections for key, value in pairs.items()}


def _vocabulary(shape: Shape, control_tokens: Sequence[str] = ()) -> dict[str, Any]:
    """Return a vocabulary of the right size: control tokens, then invented pieces; WordPiece for encoders."""
    size, is_encoder = shape.vocabulary, shape.architecture == "bert"
    special: dict[str, Any]
    if is_encoder:
        head = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        special = {"unknown_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "seperator_token_id": 3}
        special |= {"padding_token_id": 0, "mask_token_id": 4, "token_type_count": SEGMENTS}
        kinds = [3] * len(head)
    else:
        head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
        kinds = [2, 3, 3] + [6] * 256
    word = "\u2581t{}" if is_encoder else "t{}"  # a word begins so in llama.cpp's form of WordPiece
    tokens = [*head, *(word.format(number) for number in range(size - len(head)))][:size]
    tokens[size - len(control_tokens) :] = control_tokens
    kinds = [*kinds, *[1] * (size - len(kinds) - len(control_tokens)), *[3] * len(control_tokens)]
    scores = Typed("float32", [-float(number) for number in range(size)])
    keys = {
        "model": "bert" if is_encoder else "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": Typed("int32", kinds[:size]),
        **special,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def require_memory(spec: Spec) -> None:
    """Raise if the model does not fit into memory."""
    needed, (_, free) = spec.nbytes, machine.memory()
    limit, used = machine.memory_limit()
    room = [x for x in (free, None if limit is None else limit - used) if x is not None]
    if room and needed + RESERVE_BYTES > min(room):
        raise InsufficientMemoryError(
            f"{spec} takes {human_bytes(needed)} of memory and {human_bytes(max(0, min(room)))} are free: "
            f"use fewer layers ({spec.name}:{spec.mix_name}:N)" + (" or experts (:N:M)" if spec.shape.experts else "")
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
    rng = np.random.default_rng(kind.id if kind.id >= 0 else [*kind.name.encode()])
    if kind.block_size == 1:
        return _unquantized_values(kind, size, rng)
    kept: list[NDArray[np.uint8]] = []
    for _ in range(MAX_ROUNDS):
        blocks = rng.integers(0, 256, (DRAWN_BLOCKS, kind.block_bytes), np.uint8)
        if kind.name in GROUP_TYPES:
            _draw_float_scales(kind, blocks, size, rng)
        with np.errstate(all="ignore"):
            rms = np.sqrt(np.mean(np.square(kind.decode(blocks), dtype=np.float64), axis=1))
            kept.append(blocks[(rms > size / SPREAD) & (rms < size * SPREAD)])  # NaN and infinity fail both
        if sum(map(len, kept)) >= POOL_BLOCKS:
            break
    pool = np.concatenate(kept)[:POOL_BLOCKS]
    assert len(pool), f"no usable block of {kind.name} was drawn"
    return pool


def _draw_float_scales(kind: BlockType, blocks: NDArray[np.uint8], size: float, rng: np.random.Generator) -> None:
    """Replace the float32 numbers that lead blocks of quantized safetensors: of random bits few would be usable."""
    count = 2 if kind.name in ("INT4_ZP", "NVFP4_F32") else 1
    numbers = (size * 2.0 ** rng.uniform(-10, 0, (len(blocks), count))).astype(np.float32)
    if kind.name == "INT4_ZP":
        numbers[:, 1] = rng.integers(0, 16, len(blocks))
    blocks[:, : 4 * count] = numbers.view(np.uint8)


def _unquantized_values(kind: BlockType, size: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    values = (size * rng.standard_normal(65521)).astype(np.float32)
    types = {"F32": np.float32, "F16": np.float16}
    narrow = values.view(np.uint16)[1::2].copy() if kind.name == "BF16" else values.astype(types[kind.name])
    return narrow.view(np.uint8).reshape(-1, kind.block_bytes)
