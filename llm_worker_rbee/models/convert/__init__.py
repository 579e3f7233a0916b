"""Convert a model to another type: `convert` writes a GGUF file, `quantize_checkpoint` works in memory.

Matrices get the types of llama.cpp's mixes; norms and biases are float32. A model that the loader refuses is not
converted. Metadata of safetensors is translated (gguf_metadata.py, tokenizer_export.py); what GGUF cannot express is
an error that names it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

from ...backends.ops import Backend
from ...weights import Checkpoint
from ...weights.gguf_writer import write_quantized_gguf
from ...weights.quantize import Progress, quantize_in_memory
from ..families import read_model_config
from ..loader import load_model
from .gguf_metadata import gguf_metadata, rope_tensors
from .tensor_plan import TYPES, find_type_mix, is_fp8, mark_fp8, plan_file, plan_matrices

__all__ = ["TYPES", "ConvertResult", "convert", "is_fp8", "planned_types", "quantize_checkpoint"]


class ConvertResult(NamedTuple):
    """The written file."""

    path: Path
    bytes: int
    tensors: dict[str, int]  # block type -> tensors


def convert(
    checkpoint: Checkpoint,
    path: Path,
    type_name: str,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write the model as one GGUF file of this type or mix; an existing file is replaced."""
    mix, config = find_type_mix(type_name), read_model_config(checkpoint)
    metadata = gguf_metadata(checkpoint, config, mix.file_type)
    load_model(checkpoint, cast(Backend, _CheckOnlyBackend()), config)
    work = plan_file(checkpoint, config, mix, rope_tensors(checkpoint, config))
    write_quantized_gguf(path, metadata, work, threads=threads, progress=progress)
    return ConvertResult(path, path.stat().st_size, dict(Counter(job.kind.name for job in work)))


def quantize_checkpoint(
    checkpoint: Checkpoint, type_name: str, *, threads: int | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Return the model with its matrices in another type. FP8 is only marked: the GPU backend rounds while packing."""
    if is_fp8(type_name):
        return mark_fp8(checkpoint)
    work = plan_matrices(checkpoint, read_model_config(checkpoint), find_type_mix(type_name))
    made = quantize_in_memory([job for job in work if job.kind is not job.source.kind], threads, progress)
    return replace(checkpoint, tensors={**checkpoint.tensors, **made})


def planned_types(checkpoint: Checkpoint, type_name: str) -> dict[str, str]:
    """Return the type that `quantize_checkpoint` would give each matrix, by name."""
    return {
        job.name: job.kind.name
        for job in plan_matrices(checkpoint, read_model_config(checkpoint), find_type_mix(type_name))
    }


class _CheckOnlyBackend:
    """A backend that packs nothing, so that the loader only checks every tensor."""

    def prepare(self, tensors: object) -> None:
        return None

    def prepare_vector(self, values: object) -> None:
        return None

    def fuse(self, model: object) -> None:
        return None
