"""Convert a model to another type: `convert` writes a GGUF file, `quantize_checkpoint` works in memory.

Matrices get the types of llama.cpp's mixes; norms and biases are float32. A model that the loader refuses is not
converted. Metadata of safetensors is translated (gguf_metadata.py, tokenizer_export.py); settings without a GGUF key
are errors that name them. Tensors change, too: GGUF files of `llama` order q and k rows for RoPE over neighbours, GGUF
norms hold the weight where safetensors of some families hold weight - 1, and linear_attention.py has more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ...backends.ops import Backend
from ...config import FP8, WRITTEN_TYPES, ModelConfig
from ...errors import InvalidRequestError, UnsupportedModelError
from ...weights import Checkpoint, Tensor
from ...weights.checkpoint import NO_BYTES, DeferredTensor
from ...weights.encoder_names import is_training_head
from ...weights.gguf_writer import write_gguf, write_quantized_gguf
from ...weights.lora import EXPERT_STACK, Adapter, LowRank, concatenated, float_tensor
from ...weights.quant_mix import MIXES, Mix, Place, matrix_type
from ...weights.quantize import Progress, TensorJob, quantize_in_memory
from ...weights.quants import BLOCK_TYPES
from ..families import BY_GGUF, gguf_architecture, read_model_config
from ..loader import IGNORED_SUFFIXES, LAYER_NUMBER, load_model, load_model_with_head, rope_row_order
from ..lora import file_adapters
from ..mtp import has_head
from ..pooling_config import is_pooling_model
from .expert_stacks import EXPERT, stack_experts
from .gguf_metadata import gguf_metadata, rope_tensors
from .linear_attention import gguf_linear_attention
from .pooling_keys import CHECK_ONLY_BACKEND, TABLES, check_pooling_model, label_rows

# Q4_K and Q5_K are pure; the mixes give more bits to some matrices. MXFP4_MOE: experts are MXFP4 already.
PURE = {"Q4_K": replace(MIXES["Q4_K_S"], rules={}), "Q5_K": MIXES["Q5_K_S"]}
TYPES: dict[str, Mix] = {name: PURE.get(name) or MIXES[name] for name in WRITTEN_TYPES}
BLOCK = re.compile(r"^blk\.([0-9]+)\.((?:shortconv\.)?\w+)\.weight$")
EMBEDDING, EMBEDDINGS = "token_embd.weight", ("token_embd.weight", "per_layer_token_embd.weight")  # tables of rows
LAST_TENSORS = ("output_norm.weight", "token_embd_norm.weight", "output.weight")
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
FP8_ALIGNMENT = 16  # FP8 products need rows and columns in multiples of this; other matrices keep their type


class ConvertResult(NamedTuple):
    """The written file."""

    path: Path
    bytes: int
    tensors: dict[str, int]  # block type -> tensors


def convert(
    checkpoint: Checkpoint, path: Path, type_name: str, *, threads: int | None = None, progress: Progress | None = None
) -> ConvertResult:
    """Write the model as one GGUF file of this type or mix; an existing file is replaced."""
    mix, stated = find_type_mix(type_name), read_model_config(checkpoint)
    with_head = has_head(checkpoint, stated)
    config = stated if with_head else replace(stated, nextn_layers=0)
    pooling = check_pooling_model(checkpoint, config) if is_pooling_model(checkpoint, config) else None
    metadata = gguf_metadata(checkpoint, config, mix.file_type, pooling)
    if pooling is None:
        (load_model_with_head if with_head else load_model)(checkpoint, cast(Backend, CHECK_ONLY_BACKEND), stated)
    tensors = stack_experts(checkpoint, config)
    if checkpoint.format != "gguf":
        tensors = gguf_linear_attention(tensors, config)
    extra = {**rope_tensors(checkpoint, config), **label_rows(checkpoint, pooling)}
    work = plan_file(replace(checkpoint, tensors=tensors), config, mix, extra)
    write_quantized_gguf(path, metadata, work, threads=threads, progress=progress)
    return ConvertResult(path, path.stat().st_size, dict(Counter(job.kind.name for job in work)))


def merge_adapters(checkpoint: Checkpoint, adapters: Sequence[tuple[Adapter, float]]) -> Checkpoint:
    """Return the model with adapters, each times a scale, added to its matrices, which become float32."""
    config = read_model_config(checkpoint)
    fits = file_adapters(checkpoint, config, max(adapter.rank for adapter, _ in adapters))
    is_tied = "output.weight" not in checkpoint.tensors
    pairs: dict[str, list[LowRank]] = {}
    for adapter, scale in adapters:
        fits.pairs(adapter)
        if is_tied and adapter.pairs.keys() & {EMBEDDING, "output.weight"}:
            problem = "changes the embedding or the head, which are one matrix in the base"
            raise UnsupportedModelError(f"adapter {adapter.path.name} {problem}: it cannot be merged")
        if adapter.format != checkpoint.format:
            if checkpoint.format != "gguf":
                problem = "is a GGUF file, and the base a folder of safetensors"
                raise UnsupportedModelError(f"adapter {adapter.path.name} {problem}: convert the base, and merge there")
            adapter = gguf_adapter(adapter, config)
        for name, pair in adapter.pairs.items():
            pairs.setdefault(name, []).append(pair.times(scale))
    sums = {name: concatenated(each) for name, each in pairs.items()}
    merged = {name: _merged(tensor, sums) for name, tensor in checkpoint.tensors.items()}
    metadata = {key: value for key, value in checkpoint.metadata.items() if key != "quantization"}
    return replace(checkpoint, tensors=merged, metadata=metadata)


def _merged(tensor: Tensor, pairs: Mapping[str, LowRank]) -> Tensor:
    """Return a matrix, or a stack of experts, with what adapters add to it."""
    stack = EXPERT_STACK.fullmatch(tensor.name)
    count = tensor.shape[0] if stack else 1
    names = [f"{stack[1]}.{i}.weight" for i in range(count)] if stack else [tensor.name]
    if not any(name in pairs for name in names):
        return tensor

    def make() -> NDArray[np.uint8]:
        values = np.array(tensor.dequantize(), np.float32).reshape(count, -1, tensor.shape[-1])
        for i, name in enumerate(names):
            if (pair := pairs.get(name)) is not None:
                values[i] += (pair.b @ pair.a).T if name == EMBEDDING else pair.b @ pair.a
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    return DeferredTensor(tensor.name, BLOCK_TYPES["F32"], tensor.shape, NO_BYTES, sources=(tensor,), make=make)


def gguf_adapter(adapter: Adapter, config: ModelConfig) -> Adapter:
    """Return an adapter of PEFT with the rows of its matrices in the order of GGUF files."""
    pairs = dict(adapter.pairs)
    for name, pair in adapter.pairs.items():
        job = _adapt_to_gguf(TensorJob(name, float_tensor(name, pair.b), BLOCK_TYPES["F32"]), config)
        if job.order is not None:
            pairs[name] = LowRank(pair.a, pair.b[job.order])
        role = name.split(".")[-2]
        if config.linear is not None and (role.startswith("ssm_") or role in ("attn_qkv", "attn_gate")):
            raise UnsupportedModelError(f"adapter {adapter.path.name}: linear attention has no GGUF form for adapters")
    return replace(adapter, format="gguf", architecture=gguf_architecture(config), pairs=pairs)


def write_adapter(adapter: Adapter, base: Checkpoint, path: Path, type_name: str) -> int:
    """Write an adapter of PEFT as a GGUF file, with its pairs in a float type; return how many there are."""
    if type_name not in ("F32", "F16"):
        raise InvalidRequestError(f"an adapter is written as F32 or F16, not {type_name}", "type")
    config = read_model_config(base)
    file_adapters(base, config, adapter.rank).pairs(adapter)
    written = adapter if adapter.format == "gguf" else gguf_adapter(adapter, config)
    kind = np.float32 if type_name == "F32" else np.float16
    tensors: dict[str, NDArray[Any]] = {}
    stacks: dict[str, dict[int, LowRank]] = {}
    for name, pair in written.pairs.items():
        if expert := EXPERT.match(name):
            stacks.setdefault(f"{expert[1]}_exps.weight", {})[int(expert[2])] = pair
        else:
            tensors |= {f"{name}.lora_a": pair.a.T if name == EMBEDDING else pair.a, f"{name}.lora_b": pair.b}
    for name, pairs in stacks.items():
        count, rank = config.experts.count if config.experts else 0, max(pair.rank for pair in pairs.values())
        first = next(iter(pairs.values()))
        a = np.zeros((count, rank, first.a.shape[1]), np.float32)
        b = np.zeros((count, first.b.shape[0], rank), np.float32)
        for i, pair in pairs.items():
            a[i, : pair.rank], b[i, :, : pair.rank] = pair.a, pair.b
        tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
    metadata = {
        "general.type": "adapter",
        "general.architecture": gguf_architecture(config),
        "general.name": adapter.path.name,
        "adapter.type": "lora",
        "adapter.lora.alpha": 0.0,  # the scale is in B
    }
    write_gguf(path, metadata, {name: np.ascontiguousarray(values, kind) for name, values in tensors.items()})
    return len(written.pairs)


def quantize_checkpoint(
    checkpoint: Checkpoint, type_name: str, *, threads: int | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Return the model with its matrices in another type. FP8 is only marked: the GPU backend rounds while packing."""
    config = read_model_config(checkpoint)
    if is_fp8(type_name):
        if config.experts is not None:
            raise UnsupportedModelError("experts have no FP8 products: leave quantize out, or use Q8_0")
        return mark_fp8(checkpoint)
    jobs = [job for job in _plan_in_memory(checkpoint, type_name) if job.kind is not job.source.kind]
    quantized = quantize_in_memory(jobs, threads, progress)
    replaced = {source.name for job in jobs for source in _sources(job.source, checkpoint)}
    kept = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in replaced}
    return replace(checkpoint, tensors={**kept, **quantized})


def planned_types(checkpoint: Checkpoint, type_name: str) -> dict[str, str]:
    """Return the type that `quantize_checkpoint` would give each matrix, by name."""
    work = _plan_in_memory(checkpoint, type_name)
    return {source.name: job.kind.name for job in work for source in _sources(job.source, checkpoint)}


def _plan_in_memory(checkpoint: Checkpoint, type_name: str) -> list[TensorJob]:
    config, mix = read_model_config(checkpoint), find_type_mix(type_name)
    return plan_matrices(replace(checkpoint, tensors=stack_experts(checkpoint, config)), config, mix)


def _sources(tensor: Tensor, checkpoint: Checkpoint) -> tuple[Tensor, ...]:
    """Return the checkpoint tensors from which a tensor is made."""
    is_stack = isinstance(tensor, DeferredTensor) and tensor.name not in checkpoint.tensors
    return tensor.sources if is_stack and isinstance(tensor, DeferredTensor) else (tensor,)


def find_type_mix(type_name: str) -> Mix:
    """Return the mix of this name, upper or lower case."""
    if type_name.upper() not in TYPES:
        raise InvalidRequestError(f"unknown type {type_name!r}: use one of {', '.join(TYPES)}", "type")
    return TYPES[type_name.upper()]


def plan_matrices(checkpoint: Checkpoint, config: ModelConfig, mix: Mix) -> list[TensorJob]:
    """Return a job for every matrix of the model, and every stack of matrices."""
    tied = "output.weight" not in checkpoint.tensors
    others = (*IGNORED_SUFFIXES, ".bias", *TABLES)
    matrices = [t for name, t in checkpoint.tensors.items() if len(t.shape) > 1 and not name.endswith(others)]
    return [TensorJob(t.name, t, BLOCK_TYPES[_matrix_type(t, config, mix, tied=tied)]) for t in matrices]


def _matrix_type(tensor: Tensor, config: ModelConfig, mix: Mix, *, tied: bool) -> str:
    block = BLOCK.match(tensor.name)
    layer, role = (int(block[1]), block[2]) if block else (0, tensor.name.removesuffix(".weight"))
    experts = 0 if config.experts is None else config.experts.count
    place = Place(layer, config.n_layers, config.n_heads // config.n_kv_heads, experts)
    return matrix_type(mix, role, tensor.shape[-1], place, tied=tied)


def plan_file(checkpoint: Checkpoint, config: ModelConfig, mix: Mix, extra: Mapping[str, Tensor]) -> list[TensorJob]:
    """Return a job for every tensor of the file, in file order: the embedding first, then layer by layer."""
    matrices = {job.name: job for job in plan_matrices(checkpoint, config, mix)}
    plan = [
        matrices.get(name) or TensorJob(name, tensor, BLOCK_TYPES["F32"])
        for name, tensor in {**checkpoint.tensors, **extra}.items()
        if not name.endswith(IGNORED_SUFFIXES)
    ]
    if checkpoint.format != "gguf":
        plan = [_adapt_to_gguf(job, config) for job in plan if not _is_left_out(job, config)]
    return sorted(plan, key=_file_order)


def _file_order(job: TensorJob) -> tuple[int, int]:
    block = re.match(r"blk\.([0-9]+)\.", job.name)
    if block:
        return 2, int(block[1])
    if job.name in LAST_TENSORS:
        return 3, LAST_TENSORS.index(job.name)
    return (0, 0) if job.name == EMBEDDING else (1, 0)


def _is_left_out(job: TensorJob, config: ModelConfig) -> bool:
    """Return whether a tensor has no place: of layers for further tokens that are not counted, of a training head."""
    layer = LAYER_NUMBER.match(job.name)
    is_further = layer is not None and int(layer[1]) >= config.n_layers + config.nextn_layers
    is_head = config.family.is_encoder and is_training_head(job.name)
    return is_further or is_head or job.name.startswith("mtp.")


def _adapt_to_gguf(job: TensorJob, config: ModelConfig) -> TensorJob:
    role = job.name.split(".")[-2]
    interleaved = BY_GGUF[gguf_architecture(config)].rope.interleaved
    is_permuted = "gguf" in interleaved and "safetensors" not in config.family.rope.interleaved
    if role in ("attn_q", "attn_k") and is_permuted:
        inverse = np.argsort(rope_row_order(job.source.shape[0], config.head_dim, config.rope_dim))
        return job._replace(order=inverse)
    if role == "ffn_norm":
        job = job._replace(name=job.name.replace(role, config.family.tensors.gguf_mlp_norm))
    if role.endswith("norm") and role != "ssm_norm" and config.family.tensors.norm_plus_one:
        return job._replace(offset=1.0)
    return job


def is_fp8(type_name: str | None) -> bool:
    """Return whether this type is FP8, in upper or lower case."""
    return type_name is not None and type_name.lower() == FP8


def mark_fp8(checkpoint: Checkpoint) -> Checkpoint:
    """Return the model with its matrices, but the embedding, marked for e4m3; raise if one is quantized already."""
    linear = {name: t for name, t in checkpoint.tensors.items() if len(t.shape) == 2 and name not in EMBEDDINGS}
    for tensor in linear.values():
        if tensor.kind.name not in FLOAT_TYPES:
            raise InvalidRequestError(
                f"quantize fp8 is for files of {', '.join(FLOAT_TYPES[1:])}, and tensor {tensor.name!r} is "
                f"{tensor.kind.name} already: leave quantize out, such a file is computed as it is",
                "quantize",
            )
    marks = {name: replace(t, pack_as=FP8) for name, t in linear.items() if not any(n % FP8_ALIGNMENT for n in t.shape)}
    return replace(checkpoint, tensors={**checkpoint.tensors, **marks})
