"""Quantized safetensors: the tensors of a module (codes, scales, zero points) become one tensor of blocks.

A module is recognised by its tensors, so that lists of modules left unquantized need no reading:

    GPTQ, AWQ            qweight, qzeros, scales, g_idx
    compressed-tensors   weight_packed or weight, weight_scale, weight_zero_point, weight_shape, weight_g_idx,
                         weight_global_scale
    FP8, ModelOpt        weight, weight_scale or weight_scale_inv, weight_scale_2
    FP8 experts          gate_up_proj and down_proj of all experts, with gate_up_proj_scale_inv and down_proj_scale_inv

Blocks of 32 columns (quants.GROUP_TYPES, or MXFP4) hold the codes of the file and its scales as float32, so a weight is
the file's own number; they are made when a tensor is loaded. Columns whose groups are not runs of columns (`desc_act`)
are stored by group, and the tensor has their order. Scales of activations and of a quantized KV cache are
not used.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFileError, UnsupportedModelError
from .checkpoint import NO_BYTES, DeferredTensor, Tensor
from .quants import BLOCK_TYPES, GROUP_TYPES, BlockType
from .quants.codebooks import e4m3_values, e8m0_halves

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
BLOCK = 32  # columns
SLAB_VALUES = 1 << 22
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word, lowest first

GPTQ, AWQ, FP8, FBGEMM, COMPRESSED, MODELOPT, MXFP4 = METHODS = (
    "gptq",
    "awq",
    "fp8",
    "fbgemm_fp8",
    "compressed-tensors",
    "modelopt",
    "mxfp4",
)
FORMATS = {
    GPTQ: ("gptq", "gptq_v2"),
    AWQ: ("gemm",),
    COMPRESSED: (
        "dense",
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mixed-precision",
    ),
    MODELOPT: ("FP8", "NVFP4"),
}
FORMAT_KEYS = {GPTQ: "checkpoint_format", AWQ: "version", COMPRESSED: "format", MODELOPT: "quant_algo"}
PART = re.compile(
    r"^(.+)\.(qweight|qzeros|scales|g_idx|weight|weight_packed|weight_scale|weight_scale_inv|weight_scale_2"
    r"|weight_zero_point|weight_shape|weight_g_idx|weight_global_scale)$"
)
STACK_PART = re.compile(r"^(.+\.experts\.(?:gate_up|down)_proj)(_scale_inv|)$")  # of all experts
ACTIVATION_SCALE = re.compile(r"(\.input_(scale|zero_point|global_scale)|[._]activation_scale)$")
KV_SCALE = re.compile(r"(\.[kqv]_(scale|zero_point)|\.[kv]_proj\.output_scale|\.prob_output_scale)$")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization settings of config.json; `problem` is the reason if they are not supported."""

    method: str
    format: str = ""
    bits: int = 0
    group_size: int = 0  # columns that share a scale; 0: as the tensors have it, -1: all
    block: tuple[int, int] | None = None  # rows and columns that share a scale of FP8
    kv_scales: int = 0  # of a quantized KV cache, ignored
    problem: str = ""


def read_quantization(settings: object) -> Quantization | None:
    """Parse `quantization_config`; return None without one."""
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ModelFileError("config.json: 'quantization_config' is not an object")
    method = str(settings.get("quant_method", "modelopt" if "quant_algo" in settings else ""))
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise ModelFileError("config.json: 'config_groups' of 'quantization_config' is not an object of objects")
    weights = [g["weights"] for g in groups.values() if isinstance(g.get("weights"), dict)]
    first = {**weights[0], **settings} if weights else settings
    chosen = str(settings.get(FORMAT_KEYS.get(method, "fmt")) or FORMATS.get(method, ("",))[0])
    block = settings.get("weight_block_size") or first.get("block_structure")
    if isinstance(block, list) and not (len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise ModelFileError("config.json: 'weight_block_size' must be two positive numbers")
    bits = {FP8: 8, FBGEMM: 8, MXFP4: 4}.get(method) or {"FP8": 8, "NVFP4": 4}.get(chosen, 0)
    return Quantization(
        method,
        chosen,
        _number(first, "bits") or _number(first, "num_bits") or bits,
        _number(first, "group_size"),
        (block[0], block[1]) if isinstance(block, list) else None,
        problem=_find_problem(method, chosen, settings),
    )


def _number(settings: Mapping[str, Any], key: str) -> int:
    value = settings.get(key)
    return value if isinstance(value, int) else 0


def _find_problem(method: str, chosen: str, settings: Mapping[str, Any]) -> str:
    """Return the reason why weights with these settings are not supported, or ""."""
    if method not in METHODS:
        return f"weights quantized by {method!r} cannot be read: supported are {', '.join(METHODS)}"
    choices = FORMATS.get(method)
    if choices and chosen.lower() not in map(str.lower, choices):
        key = FORMAT_KEYS[method]
        return f"{method} weights with {key} {chosen!r} cannot be read: supported are {', '.join(choices)}"
    if settings.get("transform_config"):
        return f"{method} weights with 'transform_config' need rotated activations, which are not supported"
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        return f"{method} weights with sparsity {sparsity['format']!r} cannot be read: use one without"
    return ""


def merge_quantized(
    tensors: Mapping[str, Tensor], quantization: Quantization
) -> tuple[dict[str, Tensor], Quantization]:
    """Merge the tensors of each quantized module into `<module>.weight`; return all tensors and the updated record."""
    modules: dict[str, dict[str, Tensor]] = defaultdict(dict)  # by the name of what they become, and the part
    out: dict[str, Tensor] = {}
    kv_scales, problem = 0, quantization.problem
    for name, tensor in tensors.items():
        if part := PART.match(name):
            modules[f"{part[1]}.weight"][part[2]] = replace(tensor, name=name)
        elif part := STACK_PART.match(name):
            modules[part[1]][f"weight{part[2]}"] = replace(tensor, name=name)
        elif KV_SCALE.search(name):
            kv_scales += 1
        elif not ACTIVATION_SCALE.search(name):
            out[name] = tensor
    for name, parts in modules.items():
        try:
            merged = None if problem or set(parts) == {"weight"} else _merge(name, parts, quantization)
        except UnsupportedModelError as error:  # the file can still be inspected
            merged, problem = None, str(error)
        out |= {tensor.name: tensor for tensor in (parts.values() if merged is None else [merged])}
    return out, replace(quantization, kv_scales=kv_scales, problem=problem)


def _merge(name: str, parts: Mapping[str, Tensor], quantization: Quantization) -> Tensor:
    if name.endswith(".weight"):
        return _Module(name.removesuffix(".weight"), parts, quantization).tensor()
    count = parts["weight"].shape[0] if "weight" in parts and parts["weight"].shape else 0
    for suffix in ("weight", "weight_scale_inv"):
        if not count or suffix not in parts or len(parts[suffix].shape) != 3 or parts[suffix].shape[0] != count:
            shape = parts[suffix].shape if suffix in parts else "missing"
            problem = f"tensor '{name}{suffix.removeprefix('weight')}' is {shape}"
            raise ModelFileError(f"{problem}: quantized experts need (experts, rows, columns) and scales")
    views = {suffix: tensor.matrices() for suffix, tensor in parts.items()}
    experts = [_Module(name, {part: views[part][i] for part in views}, quantization).tensor() for i in range(count)]
    shape, sources = (count, *experts[0].shape), tuple(parts.values())
    return DeferredTensor(name, experts[0].kind, shape, NO_BYTES, sources=sources, make=partial(_join, experts))


def _join(tensors: Sequence[Tensor]) -> Bytes:
    return np.concatenate([tensor.load().data for tensor in tensors])


class ScaleGrid(NamedTuple):
    """Scales (or zero points), each of `rows` x `columns` weights."""

    values: Floats
    rows: int
    columns: int

    def take(self, start: int, stop: int, columns: int, step: int) -> Floats:
        """Return the scales of rows `start` to `stop`, one for every `step` columns."""
        rows, groups = np.arange(start, stop) // self.rows, np.arange(0, columns, step) // self.columns
        return self.values[rows][:, groups]


class Groups(NamedTuple):
    """A matrix to convert to blocks: codes of some rows, a byte each, and their scales."""

    kind: BlockType
    shape: tuple[int, int]
    codes: Callable[[int, int], Bytes]  # (first row, last) -> (rows, columns)
    scales: Callable[[], ScaleGrid]
    zeros: Callable[[], ScaleGrid] | None = None


def make_blocks(name: str, groups: Groups) -> Bytes:
    """Return the bytes of all blocks; raise for NaN and infinite scales."""
    (rows, columns), kind, scales = groups.shape, groups.kind, groups.scales()
    zeros = groups.zeros() if groups.zeros else None
    if not np.isfinite(scales.values).all():
        raise ModelFileError(f"tensor {name!r}: a scale is NaN or infinite, the file is damaged")
    out = np.empty((rows, columns // BLOCK, kind.block_bytes), np.uint8)
    for start in range(0, rows, step := max(1, SLAB_VALUES // columns)):
        stop = min(rows, start + step)
        codes = groups.codes(start, stop).reshape(stop - start, -1, BLOCK)
        if kind.name == "FP8" and ((codes & np.uint8(127)) == 127).any():
            raise ModelFileError(f"tensor {name!r}: a weight is NaN, the file is damaged")
        body = codes if kind.name in ("INT8", "FP8") else codes[..., :16] | codes[..., 16:] << np.uint8(4)
        per_scale = 16 if kind.name == "NVFP4_F32" else BLOCK
        head = scales.take(start, stop, columns, per_scale).reshape(*body.shape[:2], -1)
        if zeros is not None:
            zero = zeros.take(start, stop, columns, BLOCK)
            head = np.concatenate([head, zero[..., None]], axis=-1)
        head = head.astype(np.uint8) if kind.name == "MXFP4" else np.ascontiguousarray(head, "<f4").view(np.uint8)
        out[start:stop] = np.concatenate([head, body], axis=-1)
    return out.reshape(-1)


def _take_columns(codes: Callable[[int, int], Bytes], order: NDArray[np.intp], start: int, stop: int) -> Bytes:
    return codes(start, stop)[:, order]


def read_numbers(tensor: Tensor) -> Floats:
    """Return the scales of a file as float32: E4M3 and E8M0 too."""
    if tensor.kind.name == "F8_E4M3":
        return e4m3_values().take(tensor.data).reshape(tensor.shape)
    if tensor.kind.name in ("U8", "F8_E8M0"):
        return (2 * np.where(tensor.data == 255, np.float32(np.nan), e8m0_halves().take(tensor.data))).reshape(
            tensor.shape
        )
    return tensor.dequantize()


def unpack_words(words: NDArray[np.uint32], bits: int) -> Bytes:
    """Return the codes of (n, words) uint32, lowest bits first: (n, words * 32 / bits)."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed
    out = np.empty((*packed.shape, 2), np.uint8)
    out[..., 0], out[..., 1] = packed & np.uint8(15), packed >> np.uint8(4)
    return out.reshape(len(packed), -1)


class _Module(NamedTuple):
    """The tensors of one quantized module, by the last part of their names."""

    name: str
    parts: Mapping[str, Tensor]
    quantization: Quantization

    def tensor(self) -> Tensor:
        groups = self._groups()
        rows, columns = groups.shape
        if columns % BLOCK:
            raise UnsupportedModelError(f"{self._weight}: {columns} columns are no multiple of {BLOCK}")
        order = self._column_order(columns)
        if order is not None:
            groups = groups._replace(codes=partial(_take_columns, groups.codes, order))
        if groups.kind.name != "MXFP4":
            self._check_group_size(groups)
        make, sources = partial(make_blocks, self._weight, groups), tuple(self.parts.values())
        return DeferredTensor(
            self._weight, groups.kind, (rows, columns), NO_BYTES, order=order, sources=sources, make=make
        )

    @property
    def _weight(self) -> str:
        return f"{self.name}.weight"

    @property
    def _is_fp8(self) -> bool:
        return "weight" in self.parts and self.parts["weight"].kind.name == "F8_E4M3"

    def _part(self, suffix: str, *types: str) -> Tensor:
        if suffix not in self.parts:
            raise ModelFileError(f"tensor '{self.name}.{suffix}' is missing: the weight is quantized")
        tensor = self.parts[suffix]
        if types and tensor.kind.name not in types:
            raise UnsupportedModelError(
                f"tensor '{self.name}.{suffix}' has type {tensor.kind.name}, of a {self.quantization.method} model "
                f"{' or '.join(types)} is supported"
            )
        return tensor

    def _matrix(self, suffix: str, *types: str) -> Tensor:
        tensor = self._part(suffix, *types)
        if len(tensor.shape) != 2:
            raise UnsupportedModelError(f"tensor '{self.name}.{suffix}' has {len(tensor.shape)} dimensions, not 2")
        return tensor

    def _words(self, suffix: str) -> NDArray[np.uint32]:
        tensor = self._matrix(suffix, "I32")
        return tensor.data.view("<u4").reshape(tensor.shape)

    def _groups(self) -> Groups:
        if "qweight" in self.parts:
            return self._awq() if self.quantization.method == AWQ else self._gptq()
        if "weight_packed" in self.parts:
            is_words = self.parts["weight_packed"].kind.name == "I32"
            return self._pack_quantized() if is_words else self._float4("weight_packed")
        kind = self._part("weight").kind.name
        if kind == "U8":
            return self._float4("weight")
        return self._bytes("FP8" if self._is_fp8 else "INT8")

    def _require_bits(self, bits: int, *supported: int) -> None:
        if bits not in supported:
            raise UnsupportedModelError(
                f"{self._weight}: {self.quantization.method} weights of {bits} bits cannot be read: "
                f"supported are {' and '.join(map(str, supported))}"
            )

    def _gptq(self) -> Groups:
        """Codes are packed along the columns of the transposed matrix, zero points along its rows."""
        bits, words, zeros = self.quantization.bits, self._words("qweight"), self._words("qzeros")
        self._require_bits(bits, 4, 8)
        columns, rows = words.shape[0] * 32 // bits, words.shape[1]
        less_one = 0 if self.quantization.format == "gptq_v2" else 1
        middle, ones = 1 << (bits - 1), 0x11111111 if bits == 4 else 0x01010101
        self._require_shape("scales", (len(zeros), rows))
        self._require_shape("qzeros", (len(zeros), rows * bits // 32))
        symmetric = bool((zeros == (middle - less_one) * ones).all())
        self._require_symmetric(bits, symmetric)

        def codes(start: int, stop: int) -> Bytes:
            unpacked = unpack_words(words[:, start:stop].T, bits)
            return unpacked if bits == 4 else unpacked ^ np.uint8(128)  # less the middle, as int8

        def zero_points() -> ScaleGrid:
            points = (unpack_words(zeros, bits) + np.uint8(less_one)) & np.uint8(2 * middle - 1)
            return self._grid(points.T.astype(np.float32), rows, columns)

        return self._integers(bits, (rows, columns), codes, None if symmetric else zero_points)

    def _awq(self) -> Groups:
        """Codes of eight rows, in an order of their own, share a word of the transposed matrix."""
        self._require_bits(self.quantization.bits, 4)
        words, zeros = self._words("qweight"), self._words("qzeros")
        columns, rows = words.shape[0], words.shape[1] * 8
        self._require_shape("scales", (len(zeros), rows))
        self._require_shape("qzeros", (len(zeros), rows // 8))
        order = np.argsort(AWQ_ORDER)
        symmetric = bool((zeros == 0x88888888).all())

        def unpack(some: NDArray[np.uint32]) -> Bytes:
            nibbles = unpack_words(some, 4).reshape(len(some), -1, 8)
            return nibbles[..., order].reshape(len(some), -1).T

        def codes(start: int, stop: int) -> Bytes:
            first, last = start // 8, -(-stop // 8)
            unpacked = unpack(words[:, first:last])[start - 8 * first : stop - 8 * first]
            return np.ascontiguousarray(unpacked)

        def zero_points() -> ScaleGrid:
            return self._grid(unpack(zeros).astype(np.float32), rows, columns)

        return self._integers(4, (rows, columns), codes, None if symmetric else zero_points)

    def _pack_quantized(self) -> Groups:
        """Codes of compressed-tensors, plus half of their range, along the columns; zero points along the rows."""
        words, stored = self._words("weight_packed"), self._part("weight_shape", "I64", "I32")
        self._require_shape("weight_shape", (2,))
        rows, columns = (int(n) for n in stored.data.view("<i8" if stored.kind.name == "I64" else "<i4")[:2])
        bits = 32 * words.shape[1] // max(1, columns)
        self._require_bits(bits, 4, 8)
        self._require_shape("weight_packed", (rows, columns * bits // 32))
        has_zeros = "weight_zero_point" in self.parts
        zeros = self._words("weight_zero_point") if has_zeros else np.zeros((0, 0), np.uint32)
        ones = 0x11111111 if bits == 4 else 0x01010101
        symmetric = not has_zeros or bool((zeros == (1 << (bits - 1)) * ones).all())
        self._require_symmetric(bits, symmetric)

        def codes(start: int, stop: int) -> Bytes:
            unpacked = unpack_words(words[start:stop], bits)
            return unpacked if bits == 4 else unpacked ^ np.uint8(128)

        def zero_points() -> ScaleGrid:
            points = unpack_words(zeros.T, bits).T[:rows]
            return self._grid(points.astype(np.float32), rows, columns)

        return self._integers(bits, (rows, columns), codes, None if symmetric else zero_points)

    def _require_symmetric(self, bits: int, symmetric: bool) -> None:
        if bits == 8 and not symmetric:
            raise UnsupportedModelError(f"{self._weight}: 8-bit weights with zero points cannot be read: use 4 bits")

    def _require_shape(self, suffix: str, shape: tuple[int, ...]) -> None:
        actual = self._part(suffix).shape
        if actual != shape:
            raise ModelFileError(f"tensor '{self.name}.{suffix}' has shape {actual}, the weight needs {shape}")

    def _integers(
        self,
        bits: int,
        shape: tuple[int, int],
        codes: Callable[[int, int], Bytes],
        zeros: Callable[[], ScaleGrid] | None,
    ) -> Groups:
        kind = GROUP_TYPES["INT8" if bits == 8 else "INT4" if zeros is None else "INT4_ZP"]
        suffix = "scales" if "scales" in self.parts else "weight_scale"

        def scales() -> ScaleGrid:
            values = read_numbers(self.parts[suffix])
            return self._grid(values.T if suffix == "scales" else values, *shape)

        self._part(suffix, "F16", "BF16", "F32")
        return Groups(kind, shape, codes, scales, zeros)

    def _bytes(self, kind: str) -> Groups:
        """FP8 and int8 weights, a byte each."""
        weight = self._matrix("weight", "F8_E4M3", "I8")
        rows, columns = weight.shape
        suffix = "weight_scale_inv" if "weight_scale_inv" in self.parts else "weight_scale"
        self._part(suffix)
        zeros = self.parts.get("weight_zero_point")
        if zeros is not None and zeros.data.any():
            self._require_symmetric(8, symmetric=False)
        return Groups(
            GROUP_TYPES[kind],
            (rows, columns),
            lambda start, stop: weight.rows[start:stop],
            lambda: self._grid(read_numbers(self.parts[suffix]), rows, columns),
        )

    def _float4(self, suffix: str) -> Groups:
        """E2M1 numbers, the first of two in the low bits; a scale of 16 (E4M3) or 32 (E8M0) columns."""
        packed = self._matrix(suffix, "U8")
        scale = self._part("weight_scale", "F8_E4M3", "U8", "F8_E8M0")
        rows, columns = packed.shape[0], 2 * packed.shape[1]

        def codes(start: int, stop: int) -> Bytes:
            out = np.empty((stop - start, columns // 2, 2), np.uint8)
            some = packed.rows[start:stop]
            out[..., 0], out[..., 1] = some & np.uint8(15), some >> np.uint8(4)
            return out.reshape(stop - start, columns)

        if scale.kind.name != "F8_E4M3":
            self._require_shape("weight_scale", (rows, columns // 32))
            numbers = scale.data.reshape(scale.shape).astype(np.float32)
            if (scale.data == 255).any():
                raise ModelFileError(f"tensor '{self.name}.weight_scale': a scale is NaN, the file is damaged")
            return Groups(BLOCK_TYPES["MXFP4"], (rows, columns), codes, lambda: ScaleGrid(numbers, 1, 32))
        self._require_shape("weight_scale", (rows, columns // 16))

        def scales() -> ScaleGrid:
            return ScaleGrid(read_numbers(scale) * (np.float32(0.5) * self._global_scale()), 1, 16)

        return Groups(GROUP_TYPES["NVFP4_F32"], (rows, columns), codes, scales)

    def _global_scale(self) -> np.float32:
        """Return the factor of all scales of NVFP4: ModelOpt stores it, compressed-tensors its inverse."""
        is_inverse = "weight_global_scale" in self.parts
        values = read_numbers(self._part("weight_global_scale" if is_inverse else "weight_scale_2")).reshape(-1)
        if values.size != 1 or not np.isfinite(values[0]) or values[0] <= 0:
            raise ModelFileError(f"{self._weight}: its global scale is not one positive number")
        return np.float32(1 / values[0] if is_inverse else values[0])

    def _grid(self, values: Floats, rows: int, columns: int) -> ScaleGrid:
        """Return scales with the rows and columns that each covers, from their shape."""
        if values.size == 1:
            return ScaleGrid(values.reshape(1, 1), rows, columns)
        if values.ndim == 1:
            values = values[:, None]
        block = self.quantization.block
        if block and values.shape == (-(-rows // block[0]), -(-columns // block[1])):
            return ScaleGrid(values, *block)
        is_even = values.ndim == 2 and values.size and rows % len(values) == columns % values.shape[1] == 0
        has_bands = self._is_fp8 and (block is None or values.shape[-1] == 1)  # one scale for gate, one for up
        if is_even and (len(values) == rows or has_bands):
            return ScaleGrid(values, rows // len(values), columns // values.shape[1])
        raise ModelFileError(
            f"{self._weight}: scales of shape {values.shape} do not fit a weight of {rows} x {columns}"
        )

    def _check_group_size(self, groups: Groups) -> None:
        """Raise unless scales are of whole blocks; reads the shape of the scales alone."""
        size, columns = self._columns_per_scale(groups), groups.shape[1]
        unit = 16 if groups.kind.name == "NVFP4_F32" else BLOCK
        if size % unit and size != columns:
            raise UnsupportedModelError(f"{self._weight}: groups of {size} columns cannot be read: use {unit} or more")

    def _columns_per_scale(self, groups: Groups) -> int:
        if groups.kind.name == "NVFP4_F32":
            return 16
        suffix = next(s for s in ("scales", "weight_scale_inv", "weight_scale") if s in self.parts)
        shape = self.parts[suffix].shape
        placeholder = np.broadcast_to(np.float32(1), shape[::-1] if suffix == "scales" else shape)
        return self._grid(placeholder, *groups.shape).columns

    def _column_order(self, columns: int) -> NDArray[np.intp] | None:
        """Return the columns in the order of their groups, or None if groups are runs of columns."""
        tensor = self.parts.get("g_idx", self.parts.get("weight_g_idx"))
        if tensor is None:
            return None
        order = tensor.dequantize().astype(np.intp).reshape(-1)
        suffix = "scales" if "scales" in self.parts else "weight_scale"
        shape = self.parts[suffix].shape
        count = shape[0 if suffix == "scales" else -1] if len(shape) > 1 else 1
        if (order < 0).all():
            return None
        if not count or order.size != columns or order.min() < 0 or order.max() >= count:
            raise ModelFileError(f"tensor '{self.name}.g_idx' does not name a group of {count} for {columns} columns")
        if len(set(np.bincount(order, minlength=count))) > 1:
            raise UnsupportedModelError(f"{self._weight}: groups of columns of different sizes cannot be read")
        return None if (order[1:] >= order[:-1]).all() else np.argsort(order, kind="stable")
