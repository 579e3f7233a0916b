"""Readers of LoRA adapters, GGUF files and PEFT folders: pairs of small matrices by the names of what they change.

A matrix W (out, in) gains B @ A, with A (rank, in) and B (out, rank), both float32; the scale of the file is in B. The
pair of an embedding maps a row of A's columns, a token, to its increment. Experts have a pair each. What a file holds
beside that is refused by name, and so is a file that is cut off, holds NaN, or whose pairs do not fit each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import machine
from ..errors import InsufficientMemoryError, ModelFileError, UnsupportedModelError, human_bytes
from .checkpoint import Tensor
from .gguf import MAGIC, read_gguf_file
from .quants import BLOCK_TYPES
from .safetensors import SANDWICH_NAMES, TEXT_PREFIX, gguf_name, read_json, read_safetensors

Floats = NDArray[np.float32]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EMBEDDING = "token_embd.weight"
MAX_HEADER_BYTES = 16 << 20  # of an adapter's safetensors: 100,000 tensors
MAX_PATTERN_CHARS, MAX_REPEATS = 400, 4  # of patterns in a configuration
STORED_TYPES = ("F32", "F16", "BF16", "F64", "Q8_0")
DIGEST_BYTES = 16
FLOAT_BYTES = 4
MAX_SETTING = 1e9  # of a rank or an alpha
# Some versions of PEFT leave the name of the adapter in the key.
PEFT_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<name>.+)\.lora_(?:embedding_)?(?P<half>[AB])(?:\.[\w-]+)??(?:\.weight)?"
)
GGUF_TENSOR = re.compile(r"(?P<name>.+\.weight)\.lora_(?P<half>[ab])")
EXPERT_STACK = re.compile(r"(blk\.\d+\.ffn_\w+)_exps\.weight(?:\[(\d+)\])?")
LAYER = re.compile(r"\.layers\.(\d+)\.")
# Settings of PEFT that change more than pairs of matrices: what is refused, unless it has one of these values.
REFUSED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "ensure_weight_tying": (False, None),
}
CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")  # initializations that change the weights of the base


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A pair; the scale is in B."""

    a: Floats  # (rank, in)
    b: Floats  # (out, rank)

    @property
    def rank(self) -> int:
        return len(self.a)

    def times(self, scale: float) -> LowRank:
        return LowRank(self.a, self.b * np.float32(scale))


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter as its file has it; `pairs` are by the GGUF names of matrices, of experts `blk.0.ffn_up.3.weight`."""

    path: Path
    format: str  # of its names and of the order of rows: "gguf" or "safetensors"
    architecture: str | None = None  # of the base, where the file says it
    pairs: dict[str, LowRank] = field(default_factory=dict)
    digest: bytes = b""  # of the content: names, shapes and values
    is_combined: bool = False  # the sum of several

    @property
    def rank(self) -> int:
        """The largest rank of a pair."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def nbytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())


def is_adapter(path: Path) -> bool:
    """Return whether a path is a PEFT folder, or a GGUF file; the file's metadata are not read."""
    return (path / CONFIG).is_file() if path.is_dir() else path.suffix.lower() == ".gguf"


def read_adapter(path: Path) -> Adapter:
    """Read a GGUF file, a PEFT folder, or the safetensors of one."""
    if path.name == WEIGHTS:
        path = path.parent
    if path.is_dir():
        return _read_peft(path)
    if not path.is_file():  # nor a pipe, which may never end
        raise ModelFileError(f"adapter {path}: no such file or folder")
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            problem = f"neither a GGUF file nor a folder with {CONFIG}"
            raise ModelFileError(f"adapter {path.name} is {problem}: convert pickled adapters to safetensors")
    return _read_gguf(path)


def _read_gguf(path: Path) -> Adapter:
    file = read_gguf_file(path)
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (value := file.metadata.get(key)) != expected:
            raise ModelFileError(f"{path.name} is no LoRA adapter: {key} is {value!r}, not {expected!r}")
    if np.size(file.metadata.get("adapter.alora.invocation_tokens", ())):
        raise UnsupportedModelError(f"{path.name}: activated LoRA (adapter.alora.invocation_tokens) is not supported")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not _is_number(alpha):
        raise ModelFileError(f"{path.name}: adapter.lora.alpha is {alpha!r}, not a number up to {MAX_SETTING:g}")
    architecture = file.metadata.get("general.architecture")
    adapter = Adapter(path, "gguf", architecture if isinstance(architecture, str) else None)
    for name, half in _halves(path, file.tensors, GGUF_TENSOR).items():
        a, b = _values(path, name, half)
        if name == EMBEDDING and a.ndim == 2:
            a = a.T  # a token's row of A is contiguous in the file
        _add_pairs(adapter, name, a, b, lambda rank: alpha / rank if alpha else 1.0)
    return _finished(adapter)


def _read_peft(folder: Path) -> Adapter:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelFileError(f"adapter {folder}: {name} is missing; pickled adapters are refused, convert them")
    config = read_json(folder / CONFIG)
    _check_settings(folder, config)
    adapter = Adapter(folder, "safetensors")
    tensors = read_safetensors(folder / WEIGHTS, MAX_HEADER_BYTES)
    for module, half in _halves(folder, tensors, PEFT_TENSOR).items():
        _check_is_targeted(folder, module, config)
        a, b = _values(folder, module, half)
        if a.ndim == 3:
            raise UnsupportedModelError(f"{folder.name}: {module}: stacked pairs of experts are read from GGUF alone")
        _add_pairs(adapter, tensor_name(module), a, b, partial(_peft_scale, config, module))
    return _finished(adapter)


def tensor_name(module: str) -> str:
    """Return the GGUF name of the weight of a transformers module."""
    if text := TEXT_PREFIX.match(module):
        rest = module[text.end() :]
        module = rest if rest.startswith(("model.", "lm_head")) else f"model.{rest}"
    return gguf_name(f"{module}.weight", SANDWICH_NAMES)


def _halves(path: Path, tensors: Mapping[str, Tensor], pattern: re.Pattern[str]) -> dict[str, dict[str, Tensor]]:
    """Return A and B of each matrix, by the names that a file gives them."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if (part := pattern.fullmatch(name)) is None:
            kinds = {"magnitude": "of DoRA", "norm.weight": "a change of a norm"}
            what = next((kind for mark, kind in kinds.items() if mark in name), "not a half of a LoRA pair")
            raise UnsupportedModelError(f"{path.name}: tensor {name!r} is {what}, which is not supported")
        halves.setdefault(part["name"], {})[part["half"].upper()] = tensor
    needed, free = sum(FLOAT_BYTES * tensor.size for tensor in tensors.values()), machine.memory()[1]
    if free is not None and needed > free:
        sizes = f"takes {human_bytes(needed)} while it is read, and {human_bytes(free)} are free"
        raise InsufficientMemoryError(f"adapter {path.name} {sizes}")
    return halves


def _values(path: Path, name: str, half: Mapping[str, Tensor]) -> list[Floats]:
    """Return both halves of a pair as float32."""
    if missing := {"A", "B"} - half.keys():
        raise ModelFileError(f"{path.name}: {name} has one half of its pair, lora_{min(missing)} is missing")
    values = []
    for letter in "AB":
        tensor = half[letter]
        if tensor.kind.name not in STORED_TYPES or not 2 <= len(tensor.shape) <= 3:
            problem = f"has type {tensor.kind.name} and shape {tensor.shape}"
            raise UnsupportedModelError(f"{path.name}: tensor {tensor.name!r} {problem}: LoRA needs matrices of floats")
        if not tensor.size:
            raise ModelFileError(f"{path.name}: tensor {tensor.name!r} is empty, its shape is {tensor.shape}: rank 0")
        array = np.array(tensor.dequantize(), np.float32)  # a copy: the file may be replaced
        if not np.isfinite(array).all():
            raise ModelFileError(f"{path.name}: tensor {tensor.name!r} holds NaN or infinite values")
        values.append(array)
    return values


def _add_pairs(adapter: Adapter, name: str, a: Floats, b: Floats, scale: Callable[[int], float]) -> None:
    """Add the pair of a matrix, or of each expert in a stack."""
    file, stack = adapter.path.name, EXPERT_STACK.fullmatch(name)
    if a.ndim != b.ndim or (a.ndim == 3) != (stack is not None) or (a.ndim == 3 and len(a) != len(b)):
        raise ModelFileError(f"{file}: {name}: A has shape {a.shape} and B {b.shape}: experts have 3 dimensions")
    each = [(name, a, b)] if stack is None else [(f"{stack[1]}.{i}.weight", a[i], b[i]) for i in range(len(a))]
    for label, low, high in each:
        if low.shape[0] != high.shape[1]:
            sides = f"A has rank {low.shape[0]} (shape {low.shape}) and B rank {high.shape[1]} (shape {high.shape})"
            raise ModelFileError(f"{file}: {label}: {sides}")
        if label in adapter.pairs:
            raise ModelFileError(f"{file}: two pairs are for {label!r}")
        adapter.pairs[label] = LowRank(np.ascontiguousarray(low), high * np.float32(scale(low.shape[0])))


def _finished(adapter: Adapter) -> Adapter:
    """Return an adapter with its digest."""
    if not adapter.pairs:
        raise ModelFileError(f"{adapter.path.name} holds no LoRA pair")
    digest = blake2b(digest_size=DIGEST_BYTES)
    for name, pair in sorted(adapter.pairs.items()):
        digest.update(f"{adapter.format} {name} {pair.a.shape} {pair.b.shape}".encode())
        for half in (pair.a, pair.b):
            digest.update(np.ascontiguousarray(half).data)
    return replace(adapter, digest=digest.digest())


def _check_settings(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse what is not LoRA, and what changes more than pairs of matrices."""
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind.upper() != "LORA":
        raise UnsupportedModelError(f"{folder.name}: peft_type {kind!r} is not supported, LORA is")
    for key, allowed in REFUSED_SETTINGS.items():
        if (value := config.get(key)) not in allowed:
            raise UnsupportedModelError(f"{folder.name}: {key} {str(value)[:100]!r} of {CONFIG} is not supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        problem = f"init_lora_weights {start!r} changed the weights of the base"
        raise UnsupportedModelError(f"{folder.name}: {problem}: save the adapter converted to plain LoRA")
    for key in ("r", "lora_alpha"):
        if not _is_number(config.get(key)):
            problem = f"is {str(config.get(key))[:100]}, not a number up to {MAX_SETTING:g}"
            raise ModelFileError(f"{folder.name}: {key} of {CONFIG} {problem}")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(map(_is_number, patterns.values())):
            raise ModelFileError(f"{folder.name}: {key} of {CONFIG} is not an object of numbers")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_SETTING


def _matches(folder: Path, pattern: str, module: str) -> bool:
    """Return whether a pattern of a configuration matches a whole module name, or its end after a dot.

    The pattern is a stranger's: what could take more than polynomial time is refused.
    """
    repeats = len(re.findall(r"[*+{]", pattern))
    if len(pattern) > MAX_PATTERN_CHARS or repeats > MAX_REPEATS or re.search(r"\)[*+{?]", pattern):
        raise UnsupportedModelError(f"{folder.name}: pattern {pattern[:80]!r} of {CONFIG} is too complex: list modules")
    try:
        return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module) is not None
    except re.error as error:
        raise ModelFileError(f"{folder.name}: pattern {pattern[:80]!r} of {CONFIG}: {error}") from error


def _check_is_targeted(folder: Path, module: str, config: Mapping[str, Any]) -> None:
    """Raise if the settings do not name a module that has a pair: PEFT would leave the pair out."""
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    is_named = True
    if isinstance(targets, str) and targets != "all-linear":
        is_named = _matches(folder, targets, module)
    elif isinstance(targets, list):
        is_named = any(module == target or module.endswith(f".{target}") for target in targets)
    layer = LAYER.search(f".{module}.")
    if is_named and layers is not None and layer is not None:
        is_named = int(layer[1]) in (layers if isinstance(layers, list) else [layers])
    if not is_named:
        settings = "target_modules and layers_to_transform"
        raise ModelFileError(f"{folder.name}: {module} has a pair, and {settings} of {CONFIG} leave it out")


def _peft_scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of a pair: alpha / r, or alpha / sqrt(r)."""

    def setting(patterns: str, default: Any) -> float:
        chosen = config.get(patterns) or {}
        key = next((key for key in chosen if key == module or _matches(Path(patterns), key, module)), None)
        return float(default if key is None else chosen[key])

    expected = setting("rank_pattern", config["r"])
    if expected != rank:
        raise ModelFileError(f"{module}: its pair has rank {rank}, and {CONFIG} says {expected:g}")
    alpha = setting("alpha_pattern", config["lora_alpha"])
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)


def concatenated(pairs: Sequence[LowRank]) -> LowRank:
    """Return the sum of pairs as one pair, whose rank is the sum of theirs."""
    if len(pairs) == 1:
        return pairs[0]
    return LowRank(np.concatenate([pair.a for pair in pairs]), np.concatenate([pair.b for pair in pairs], axis=1))


def combined_adapter(parts: Sequence[tuple[Adapter, float]]) -> Adapter:
    """Return the sum of adapters, each times a scale, as one adapter; all are of one format."""
    first = parts[0][0]
    if any(adapter.format != first.format for adapter, _ in parts):
        raise UnsupportedModelError(
            "adapters of GGUF files and of PEFT folders cannot be combined: convert one of them"
        )
    pairs: dict[str, list[LowRank]] = {}
    for adapter, scale in parts:
        for name, pair in adapter.pairs.items():
            pairs.setdefault(name, []).append(pair.times(scale))
    sums = {name: concatenated(each) for name, each in pairs.items()}
    return replace(first, pairs=sums, digest=b"", is_combined=True)


def float_tensor(name: str, values: Floats) -> Tensor:
    """Return values as a tensor of a file."""
    data = np.ascontiguousarray(values, "<f4")
    return Tensor(name, BLOCK_TYPES["F32"], values.shape, data.view(np.uint8).reshape(-1))
