"""Typed access to a checkpoint's metadata: every failure names the key and what it must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import MAX_WIDTH
from ..errors import ModelFileError, UnsupportedModelError

MIN_POSITIVE, MAX_NUMBER = 1e-30, 1e30  # of a positive number
MIN_SOFT_CAP = 1e-3


@dataclass(frozen=True, slots=True)
class MetadataReader:
    """One metadata mapping."""

    values: Mapping[str, Any]
    prefix: str = ""  # goes before every key
    source: str = ""  # goes before every message

    def error(self, key: str, problem: str) -> ModelFileError:
        """Return an error that names the key."""
        return ModelFileError(f"{self.describe_key(key)} {problem}")

    def describe_key(self, key: str) -> str:
        return f"{self.source}metadata key {self.prefix + key!r}"

    def has(self, key: str) -> bool:
        return self.values.get(self.prefix + key) is not None

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the value; raise if it is not of the given type, or missing without a default."""
        value = self.values.get(self.prefix + key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            types = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise self.error(key, f"must be {types}, not {type(value).__name__}")
        return value

    def integer(self, key: str, default: int | None = None, minimum: int = 0, maximum: int = (1 << 63) - 1) -> int:
        """Return an integer within bounds; an array of one repeated number counts as that number."""
        values = self.array(key)
        if values is None:
            value = int(self.get(key, int, default))
        elif not values or not all(type(v) is int for v in values):
            raise self.error(key, "must be int, or an array of the same int for each layer")
        elif any(v != values[0] for v in values):
            raise UnsupportedModelError(f"{self.describe_key(key)} differs from layer to layer: not supported")
        else:
            value = values[0]
        if not minimum <= value <= maximum:
            raise self.error(key, f"is {value}, outside {minimum}..{maximum}")
        return value

    def per_layer(self, key: str, n_layers: int) -> tuple[int, ...]:
        """Return an integer for each layer; empty if the key holds one for all."""
        values = self.array(key)
        if values is None:
            return ()
        if len(values) != n_layers or not all(type(v) is int and 0 <= v <= MAX_WIDTH for v in values):
            raise self.error(key, f"must be a number for each of {n_layers} layers, in 0..{MAX_WIDTH}")
        return tuple(values)

    def number(
        self, key: str, default: float | None = None, minimum: float = 0.0, maximum: float = MAX_NUMBER
    ) -> float:
        """Return a finite number within bounds."""
        value = self.get(key, (int, float), default)
        if not minimum <= value <= maximum:  # NaN, and an int too large for a float, are rejected too
            raise self.error(key, f"is {repr(value)[:40]}, outside {minimum:g}..{maximum:g}")
        return float(value)

    def positive(self, key: str, default: float | None = None, minimum: float = MIN_POSITIVE) -> float:
        """Return a number that float32 can divide by."""
        return self.number(key, default, minimum)

    def cap(self, key: str, default: float) -> float:
        """Return a soft cap: 0 is none; what lies between 0 and a usable cap cannot be divided by."""
        value = self.number(key, default)
        if 0 < value < MIN_SOFT_CAP:
            raise self.error(key, f"is {value}: a cap is 0 or at least {MIN_SOFT_CAP}")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers, empty if the key is missing."""
        values = self.get(key, list, [])
        if not all(isinstance(v, int | float) and MIN_POSITIVE <= v <= MAX_NUMBER for v in values):
            raise self.error(key, "must be a list of positive numbers")
        return tuple(float(v) for v in values)

    def array(self, key: str) -> list[Any] | None:
        """Return the value as a list if it is an array, else None."""
        value = self.values.get(self.prefix + key)
        value = value.tolist() if value is not None and hasattr(value, "tolist") else value
        return value if isinstance(value, list) else None
