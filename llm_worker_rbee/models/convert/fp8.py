"""`quantize fp8`: which matrices a GPU keeps in e4m3. They are marked here, and rounded on the device when packed.

Those of the layers, and the head where it has a matrix of its own; the embedding, a head that is the embedding, norms
and biases stay as the file has them.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import InvalidRequestError
from ...weights import Checkpoint, Tensor

FP8 = "fp8"
NUMBERS = ("F64", "F32", "F16", "BF16")
EMBEDDING = "token_embd.weight"
STEP = 16  # what rows and columns must be a multiple of for the product of bytes; others stay as they are


def is_fp8(type_name: str | None) -> bool:
    """Whether this type is asked for, in either case."""
    return type_name is not None and type_name.lower() == FP8


def marked(checkpoint: Checkpoint) -> Checkpoint:
    """The same model, with its matrices to be kept in e4m3; one that is quantized already is refused."""
    found = {name: t for name, t in checkpoint.tensors.items() if len(t.shape) == 2 and name != EMBEDDING}
    for tensor in found.values():
        _require_numbers(tensor)
    marks = {name: replace(t, kept_as=FP8) for name, t in found.items() if not any(n % STEP for n in t.shape)}
    return replace(checkpoint, tensors={**checkpoint.tensors, **marks})


def _require_numbers(tensor: Tensor) -> None:
    if tensor.kind.name not in NUMBERS:
        raise InvalidRequestError(
            f"quantize fp8 is for files of {', '.join(NUMBERS[1:])}, and tensor {tensor.name!r} is {tensor.kind.name} "
            "already: leave quantize out, such a file is computed as it is",
            "quantize",
        )
