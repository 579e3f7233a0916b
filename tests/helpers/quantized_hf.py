"""Small quantized safetensors folders of every format, packed here bit by bit, and the weights that they stand for.

Formulas are those of GPTQ, AutoAWQ, compressed-tensors and ModelOpt; nothing of the package is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Tensors = dict[str, torch.Tensor]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass(frozen=True)
class Format:
    """One way to store a matrix: `pack` returns its tensors by suffix, and its values (rows, columns)."""

    settings: dict[str, Any]
    pack: Callable[..., tuple[Tensors, NDArray[np.float64]]]
    options: dict[str, Any] = field(default_factory=dict)
    type: str = ""  # that it is read as


def pack_words(codes: NDArray[np.int64], bits: int, axis: int) -> torch.Tensor:
    """Pack neighbours of an axis into int32, the first in the lowest bits."""
    moved = np.moveaxis(codes, axis, -1)
    per_word = 32 // bits
    padded = np.pad(moved, ((0, 0), (0, -moved.shape[-1] % per_word)))
    words = np.zeros((len(padded), padded.shape[1] // per_word), np.int64)
    for i in range(padded.shape[1]):
        words[:, i // per_word] |= padded[:, i] << (bits * (i % per_word))
    signed = np.where(words >= 1 << 31, words - (1 << 32), words).astype(np.int32)
    return torch.tensor(np.ascontiguousarray(np.moveaxis(signed, -1, axis)))


def round_to_groups(
    w: NDArray[np.float64], bits: int, group: int, symmetric: bool, dtype: torch.dtype, groups: Any = None
) -> tuple[NDArray[np.int64], torch.Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """Return unsigned codes (rows, columns), scales and zero points (rows, groups), and the group of each column."""
    columns = w.shape[1]
    of_column = np.arange(columns) // (columns if group < 0 else group) if groups is None else np.asarray(groups)
    count, top = int(of_column.max()) + 1, (1 << bits) - 1
    members = [w[:, of_column == g] for g in range(count)]
    low = np.stack([np.minimum(m.min(1), 0) for m in members], 1)
    high = np.stack([np.maximum(m.max(1), 0) for m in members], 1)
    scale = np.maximum(-low, high) / (top / 2) if symmetric else (high - low) / top
    scales = torch.tensor(scale).to(dtype)
    scale = scales.double().numpy()
    zero = np.full_like(scale, 1 << (bits - 1)) if symmetric else np.clip(np.round(-low / scale), 0, top)
    codes = np.clip(np.round(w / scale[:, of_column] + zero[:, of_column]), 0, top).astype(np.int64)
    return codes, scales, zero.astype(np.int64), of_column


def integers(
    w: NDArray[np.float64], *, layout: str, bits: int = 4, group: int = 32, symmetric: bool = True,
    dtype: torch.dtype = torch.float16, order: bool = False,
) -> tuple[Tensors, NDArray[np.float64]]:  # fmt: skip
    """GPTQ (two versions), AWQ and pack-quantized."""
    columns = w.shape[1]
    mixed = np.random.default_rng(1).permutation(columns) // group if order else None
    codes, scales, zero, of_column = round_to_groups(w, bits, group, symmetric, dtype, mixed)
    values = (codes - zero[:, of_column]) * scales.double().numpy()[:, of_column]
    if layout == "pack":
        made = {
            "weight_packed": pack_words(codes, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(w.shape),
        }
        if not symmetric:
            made["weight_zero_point"] = pack_words(zero, bits, 0)
        return made | ({"weight_g_idx": torch.tensor(of_column, dtype=torch.int32)} if order else {}), values
    if layout == "awq":
        order_of_nibbles = [8 * (i // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[i % 8] for i in range(len(w))]
        parts = {"qweight": codes.T[:, order_of_nibbles], "qzeros": zero.T[:, order_of_nibbles]}
        return {name: pack_words(x, 4, 1) for name, x in parts.items()} | {"scales": scales.T.contiguous()}, values
    stored = zero if layout == "gptq_v2" else (zero - 1) % (1 << bits)
    made = {"qweight": pack_words(codes.T, bits, 0), "qzeros": pack_words(stored.T, bits, 1)}
    return made | {"scales": scales.T.contiguous(), "g_idx": torch.tensor(of_column, dtype=torch.int32)}, values


def int8_rows(w: NDArray[np.float64]) -> tuple[Tensors, NDArray[np.float64]]:
    scales = torch.tensor(np.abs(w).max(1, keepdims=True) / 127).bfloat16()
    codes = np.clip(np.round(w / scales.double().numpy()), -128, 127)
    return {"weight": torch.tensor(codes, dtype=torch.int8), "weight_scale": scales}, codes * scales.double().numpy()


def fp8(
    w: NDArray[np.float64], *, block: tuple[int, int] | None = None, suffix: str = "weight_scale", dtype: Any = None
) -> tuple[Tensors, NDArray[np.float64]]:
    """E4M3 with a scale of a tensor (block None), or of blocks of rows and columns (0: all)."""
    rows, columns = w.shape if block is None else (block[0] or w.shape[0], block[1] or w.shape[1])
    grid = -(-w.shape[0] // rows), -(-w.shape[1] // columns)
    scales = np.zeros(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            scales[i, j] = np.abs(w[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]).max() / 448
    stored = torch.tensor(scales).to(dtype or torch.float32)
    spread = stored.double().numpy().repeat(rows, 0).repeat(columns, 1)[: w.shape[0], : w.shape[1]]
    codes = torch.tensor(w / spread).float().to(torch.float8_e4m3fn)
    if block is None:
        stored = stored.reshape(())
    return {"weight": codes, suffix: stored, "input_scale": torch.tensor(1.0)}, codes.double().numpy() * spread


def fp4(w: NDArray[np.float64], *, layout: str) -> tuple[Tensors, NDArray[np.float64]]:
    """NVFP4 of ModelOpt and compressed-tensors, and MXFP4."""
    size = 32 if layout == "mxfp4" else 16
    top = np.abs(w).reshape(len(w), -1, size).max(-1) / 6
    whole = np.float32(top.max() / 448)
    if layout == "mxfp4":
        exponents = np.clip(np.ceil(np.log2(top)) + 127, 0, 254).astype(np.uint8)
        stored, scale = torch.tensor(exponents), np.exp2(exponents - 127.0)
    else:
        inverse = np.float32(1) / whole
        stored = torch.tensor(top / whole).float().to(torch.float8_e4m3fn)
        factor = float(np.float32(1) / inverse) if layout == "pack" else float(whole)
        scale = stored.double().numpy() * factor
    spread = scale.repeat(size, 1)
    distance = np.abs(np.abs(w / spread)[..., None] - np.array(E2M1))
    codes = distance.argmin(-1) | (w < 0) << 3
    values = np.array(E2M1 + [-x for x in E2M1])[codes] * spread
    packed = torch.tensor((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))
    if layout == "modelopt":
        return {"weight": packed, "weight_scale": stored, "weight_scale_2": torch.tensor(whole)}, values
    made = {"weight_packed": packed, "weight_scale": stored}
    return made if layout == "mxfp4" else made | {"weight_global_scale": torch.tensor([inverse])}, values


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": kind}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


def gptq(version: str = "gptq", **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": version, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
BF16, F32 = torch.bfloat16, torch.float32
FORMATS = {
    "gptq": Format(gptq(), integers, {"layout": "gptq"}, "INT4"),
    "gptq-zeros": Format(gptq(sym=False), integers, {"layout": "gptq", "symmetric": False}, "INT4_ZP"),
    "gptq-v2": Format(gptq("gptq_v2", sym=False), integers, {"layout": "gptq_v2", "symmetric": False}, "INT4_ZP"),
    "gptq-8": Format(gptq(bits=8, group_size=-1), integers, {"layout": "gptq", "bits": 8, "group": -1}, "INT8"),
    "gptq-order": Format(gptq(desc_act=True), integers, {"layout": "gptq", "order": True}, "INT4"),
    "awq": Format(AWQ, integers, {"layout": "awq", "symmetric": False}, "INT4_ZP"),
    "pack": Format(
        compressed("pack-quantized", num_bits=4, group_size=32), integers, {"layout": "pack", "dtype": BF16}, "INT4"
    ),
    "pack-rows": Format(
        compressed("pack-quantized", num_bits=4), integers, {"layout": "pack", "group": -1, "dtype": F32}, "INT4"
    ),
    "pack-zeros": Format(
        compressed("pack-quantized", num_bits=4, symmetric=False), integers,
        {"layout": "pack", "symmetric": False, "dtype": BF16}, "INT4_ZP",
    ),
    "pack-8": Format(
        compressed("pack-quantized", num_bits=8), integers, {"layout": "pack", "bits": 8, "dtype": BF16}, "INT8"
    ),
    "int8": Format(compressed("int-quantized", num_bits=8, strategy="channel"), int8_rows, {}, "INT8"),
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "static"}, fp8, {}, "FP8"),
    "fp8-rows": Format(
        compressed("float-quantized", num_bits=8, type="float"), fp8, {"block": (1, 0), "dtype": BF16}, "FP8"
    ),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "weight_block_size": [32, 64]}, fp8, {"block": (32, 64), "suffix": "weight_scale_inv"},
        "FP8",
    ),
    "nvfp4": Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, fp4, {"layout": "modelopt"}, "NVFP4_F32"),
    "nvfp4-pack": Format(compressed("nvfp4-pack-quantized", num_bits=4), fp4, {"layout": "pack"}, "NVFP4_F32"),
    "mxfp4-pack": Format(compressed("mxfp4-pack-quantized", num_bits=4), fp4, {"layout": "mxfp4"}, "MXFP4"),
}  # fmt: skip


def separate_experts(key: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return views of a stack of experts by the names that each has alone; another weight as it is."""
    prefix, _, role = key.rpartition(".")
    if not prefix.endswith("mlp.experts"):
        return {key: weight}
    halves = (
        zip(("gate_proj", "up_proj"), weight.chunk(2, 1), strict=True) if role == "gate_up_proj" else [(role, weight)]
    )
    return {f"{prefix}.{i}.{name}.weight": one for name, stack in halves for i, one in enumerate(stack)}


def stack_experts(key: str, stack: torch.Tensor, made: Format) -> Tensors:
    """Return a stack of FP8 matrices and one of their scales, and set the stack to what they stand for."""
    packed = [made.pack(weight.double().numpy(), **made.options) for weight in stack]
    with torch.no_grad():
        stack.copy_(torch.tensor(np.stack([values for _, values in packed])))
    tensors = {suffix: torch.stack([parts[suffix] for parts, _ in packed]) for suffix in packed[0][0]}
    return {f"{key}{suffix.removeprefix('weight').replace('input', '_activation')}": x for suffix, x in tensors.items()}


def save_quantized_hf(model: Any, folder: Path, name: str, *, stacked: bool = False) -> Path:
    """Write the model with the matrices of its layers in a format, and set them in the model to what they stand for."""
    from safetensors.torch import save_file

    made, tensors = FORMATS[name], dict[str, torch.Tensor]()
    for whole, stack in model.state_dict().items():
        if stacked and ".experts." in whole:
            tensors |= stack_experts(whole, stack, made)
            continue
        for key, weight in separate_experts(whole, stack).items():
            if not key.endswith("proj.weight"):
                tensors[key] = weight.contiguous()
                continue
            parts, values = made.pack(weight.double().numpy(), **made.options)
            tensors |= {f"{key.removesuffix('weight')}{suffix}": x for suffix, x in parts.items()}
            with torch.no_grad():
                weight.copy_(torch.tensor(values))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {**model.config.to_dict(), "quantization_config": made.settings}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder
