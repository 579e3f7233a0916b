"""Projector files (mmproj): the vision tower of a folder, or of another projector file, as a GGUF that llama.cpp reads.

Matrices get the type of the mix. Tables of positions, norms and biases are F32; the projection of pixels, and matrices
that readers transpose, are F32 or F16.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...backends.ops import Backend
from ...weights import Checkpoint, Tensor
from ...weights.gguf_writer import Typed, write_quantized_gguf
from ...weights.quant_mix import Mix, Place, matrix_type
from ...weights.quantize import Progress, TensorJob
from ...weights.quants import BLOCK_TYPES
from ...weights.vision_names import CLIP, gguf_projector_name
from ..loader import rope_row_order
from ..vision import float_tensor, load_vision_tower, patches_by_channel
from ..vision_config import VisionConfig, read_vision_config, vision_keys
from . import ConvertResult, find_type_mix
from .gguf_metadata import QUANTIZATION_VERSION
from .pooling_keys import CHECK_ONLY_BACKEND

BLOCK = re.compile(r"^blk\.([0-9]+)\.(\w+)\.weight$")
TRANSPOSED, PIXELS = "mm.input_projection.weight", ("patch_embd.weight", "patch_embd.weight.1")
FUSED = ".attn_qkv."


def convert_projector(
    checkpoint: Checkpoint, path: Path, type_name: str, *, threads: int | None = None, progress: Progress | None = None
) -> ConvertResult:
    """Write the tower as one GGUF file of this type or mix; an existing file is replaced."""
    mix, config = find_type_mix(type_name), read_vision_config(checkpoint)
    load_vision_tower(checkpoint, cast(Backend, CHECK_ONLY_BACKEND), "float32")
    jobs = [_job(tensor, config, mix, checkpoint.format) for tensor in _tensors(checkpoint, config)]
    metadata: dict[str, Any] = {
        "general.architecture": CLIP,
        "general.type": "mmproj",
        "general.name": checkpoint.path.resolve().name,
        "general.file_type": Typed("uint32", mix.file_type),
        "general.quantization_version": Typed("uint32", QUANTIZATION_VERSION),
        "clip.has_vision_encoder": True,
        "clip.projector_type": config.family.encoder.name,
        **vision_keys(config),
    }
    write_quantized_gguf(path, metadata, jobs, threads=threads, progress=progress)
    return ConvertResult(path, path.stat().st_size, dict(Counter(job.kind.name for job in jobs)))


def _tensors(checkpoint: Checkpoint, config: VisionConfig) -> Iterator[Tensor]:
    """Yield the tensors of the file by our names: frames of pixels apart, q, k and v where readers expect them so."""
    for name, tensor in checkpoint.tensors.items():
        if name == PIXELS[0] and len(tensor.shape) == 5:
            for i, frame in enumerate(tensor.dequantize().transpose(2, 0, 1, 3, 4)):
                yield float_tensor(PIXELS[i], frame)
        elif name == PIXELS[0] and len(tensor.shape) == 2:
            yield patches_by_channel(tensor, config)
        elif not tensor.shape:
            yield replace(tensor, shape=(1,))
        elif FUSED in name and config.family.has_windows:
            width = config.model.d_model
            for i, part in enumerate("qkv"):
                span, own = slice(i * width, (i + 1) * width), name.replace(FUSED, f".attn_{part}.")
                is_bias = len(tensor.shape) == 1
                yield (
                    float_tensor(own, tensor.dequantize()[span])
                    if is_bias
                    else replace(tensor.take_rows(span), name=own)
                )
        else:
            yield tensor


def _job(tensor: Tensor, config: VisionConfig, mix: Mix, source: str) -> TensorJob:
    name = gguf_projector_name(tensor.name)
    if tensor.name == "mm.soft_emb_norm.weight":
        return TensorJob(name, tensor, BLOCK_TYPES["F32"], offset=float(source == "safetensors"))
    if len(tensor.shape) < 2 or tensor.name == "position_embd.weight":
        return TensorJob(name, tensor, BLOCK_TYPES["F32"])
    if tensor.name in PIXELS or tensor.name == TRANSPOSED:
        return TensorJob(name, tensor, BLOCK_TYPES["F32" if mix.base == "F32" else "F16"])
    block = BLOCK.match(tensor.name)
    place = Place(int(block[1]) if block else 0, config.model.n_layers, 1)
    kind = matrix_type(mix, block[2] if block else tensor.name, tensor.shape[-1], place, tied=False)
    c, order = config.model, None
    if source != "gguf" and c.family.rope.interleaved and block and block[2] in ("attn_q", "attn_k"):
        order = np.argsort(rope_row_order(tensor.shape[0], c.head_dim, c.rope_dim))
    return TensorJob(name, tensor, BLOCK_TYPES[kind], order=order)
