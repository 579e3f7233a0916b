"""A model into another type: `convert` writes a GGUF file, `quantize_checkpoint` does it in memory.

Matrices get the types of llama.cpp's mixes, norms and biases are float32. The model is checked first as if it were to
be run: what our loader refuses is not converted. From safetensors the metadata is made anew (metadata.py,
vocabulary.py), and what a GGUF cannot say is refused by name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

from ...backends.ops import Backend
from ...weights import Checkpoint
from ...weights.quantize import parallel, stream_writer
from ...weights.quantize.parallel import Progress
from ..families import read_model_config
from ..loader import load_model
from .gguf_metadata import gguf_metadata, rope_tensors
from .tensor_plan import TYPES, find_type_mix, is_fp8, mark_fp8, plan_file, plan_matrices

__all__ = ["TYPES", "ConvertResult", "convert", "is_fp8", "planned_types", "quantize_checkpoint"]


class ConvertResult(NamedTuple):
    """What was written."""

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
    """Write the model as one GGUF file of this type or mix; what was there under this name is replaced."""
    mix, config = find_type_mix(type_name), read_model_config(checkpoint)
    metadata = gguf_metadata(checkpoint, config, mix.file_type)
    load_model(checkpoint, cast(Backend, _Nothing()), config)
    work = plan_file(checkpoint, config, mix, rope_tensors(checkpoint, config))
    stream_writer.write_quantized_gguf(path, metadata, work, threads=threads, progress=progress)
    return ConvertResult(path, path.stat().st_size, dict(Counter(job.kind.name for job in work)))


def quantize_checkpoint(
    checkpoint: Checkpoint, type_name: str, *, threads: int | None = None, progress: Progress | None = None
) -> Checkpoint:
    """The same model with its matrices in another type, in memory; everything else stays as it was. FP8 is a mark: a
    GPU rounds while it packs."""
    if is_fp8(type_name):
        return mark_fp8(checkpoint)
    work = plan_matrices(checkpoint, read_model_config(checkpoint), find_type_mix(type_name))
    made = parallel.quantize_in_memory([job for job in work if job.kind is not job.source.kind], threads, progress)
    return replace(checkpoint, tensors={**checkpoint.tensors, **made})


def planned_types(checkpoint: Checkpoint, type_name: str) -> dict[str, str]:
    """The type of every matrix after `quantize_checkpoint`, by name."""
    return {
        job.name: job.kind.name
        for job in plan_matrices(checkpoint, read_model_config(checkpoint), find_type_mix(type_name))
    }


class _Nothing:
    """A backend that keeps nothing: the loader looks at every tensor all the same."""

    def prepare(self, tensors: object) -> None:
        return None

    def prepare_vector(self, values: object) -> None:
        return None

    def fuse(self, model: object) -> None:
        return None
