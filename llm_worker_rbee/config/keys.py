"""Typed look-ups in a model's metadata, shared by the two dialects: every failure names the key and what it must be.

Limits are generous bounds of what any real model has; they exist so that nothing is computed or allocated from a number
that cannot be true, and so that float32 neither overflows nor divides by zero later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelFileError, UnsupportedModelError

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 40
SMALLEST, LARGEST = 1e-30, 1e30  # of a positive number
LEAST_FACTOR = 1e-6  # of rope scaling
SMALLEST_CAP = 1e-3


class Keys:
    """One metadata mapping; `prefix` goes before every key, `source` before every message."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "", source: str = "") -> None:
        self.values = values
        self.prefix = prefix
        self.source = source

    def fail(self, key: str, problem: str) -> ModelFileError:
        """An error that names the key."""
        return ModelFileError(f"{self.named(key)} {problem}")

    def named(self, key: str) -> str:
        """The key as messages show it."""
        return f"{self.source}metadata key {self.prefix + key!r}"

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(self.prefix + key) is not None

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value, of the given type; a missing one without a default is an error."""
        value = self.values.get(self.prefix + key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise self.fail(key, f"must be {wanted}, not {type(value).__name__}")
        return value

    def integer(self, key: str, default: int | None = None, least: int = 0, most: int = (1 << 63) - 1) -> int:
        """A whole number within bounds; an array of one repeated number counts as that number."""
        values = self.array(key)
        if values is None:
            value = int(self.get(key, int, default))
        elif not values or not all(type(v) is int for v in values):
            raise self.fail(key, "must be int, or an array of the same int for each layer")
        elif any(v != values[0] for v in values):
            raise UnsupportedModelError(f"{self.named(key)} differs from layer to layer: not supported")
        else:
            value = values[0]
        if not least <= value <= most:
            raise self.fail(key, f"is {value}, outside {least}..{most}")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0, most: float = LARGEST) -> float:
        """A finite number within bounds, whole or not."""
        value = self.get(key, (int, float), default)
        if not least <= value <= most:  # so is NaN, and an int too large for a float
            raise self.fail(key, f"is {repr(value)[:40]}, outside {least:g}..{most:g}")
        return float(value)

    def positive(self, key: str, default: float | None = None, least: float = SMALLEST) -> float:
        """A number that float32 can divide by."""
        return self.number(key, default, least)

    def cap(self, key: str, default: float) -> float:
        """A soft cap: 0 is none, and anything between it and a real one is no number to divide by."""
        value = self.number(key, default)
        if 0 < value < SMALLEST_CAP:
            raise self.fail(key, f"is {value}: a cap is 0 or at least {SMALLEST_CAP}")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers, empty where the key is missing."""
        values = self.get(key, list, [])
        if not all(isinstance(v, int | float) and SMALLEST <= v <= LARGEST for v in values):
            raise self.fail(key, "must be a list of positive numbers")
        return tuple(float(v) for v in values)

    def array(self, key: str) -> list[Any] | None:
        """The value as a list where it is an array, else None."""
        value = self.values.get(self.prefix + key)
        value = value.tolist() if value is not None and hasattr(value, "tolist") else value
        return value if isinstance(value, list) else None


def layer_windows(window: int, full_every: int, n_layers: int) -> tuple[int, ...]:
    """The window of each layer: every `full_every`-th one sees everything."""
    return tuple(0 if full_every and (i + 1) % full_every == 0 else window for i in range(n_layers))
