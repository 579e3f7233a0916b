"""The meter of a chat template: how long it runs and how large the values are that it makes.

Sizes are in characters of the value's text, counted as a tree (a list that holds the same list twice counts it twice),
so that printing, comparing or hashing a value is bounded as well. Every operation that can make something larger than
what it was given has an estimate here, and is refused before it allocates.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, thread_time
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_SECONDS = 1.0  # of this thread's processor time: a busy machine must not make a good template fail
MAX_WALL_SECONDS = 4.0
MAX_VALUE = 1 << 20  # characters of one value, and of the output; the input adds to it
MAX_DEPTH = 100
_MAX_WORK = 64  # all values made in one rendering, in units of the largest value
_ITEM = 8  # what an element costs besides its own size
_INT_BITS = 20_000


class Meter:
    """The use of one rendering."""

    def __init__(self, inputs: object = None) -> None:
        self._known: dict[int, tuple[object, int, int]] = {}  # id -> (kept alive, size, depth)
        self.limit = 1 << 62
        self.limit = MAX_VALUE + 4 * self.measure(inputs)[0]
        self._work = 0
        self._deadline = thread_time() + MAX_SECONDS
        self._wall_deadline = monotonic() + MAX_WALL_SECONDS

    def tick(self, size: int = 0) -> None:
        """One more step that adds `size` characters."""
        self._work += size
        if self._work > _MAX_WORK * self.limit:
            raise SecurityError(f"the template makes more than {_MAX_WORK * self.limit} characters of text")
        if thread_time() > self._deadline or monotonic() > self._wall_deadline:
            raise SecurityError(f"the template runs for more than {MAX_SECONDS:g} s")

    def check(self, size: int) -> None:
        """Refuse a value of this size before it is made."""
        if size > self.limit:
            raise SecurityError(f"the template makes a value of more than {self.limit} characters")

    def made(self, value: Any) -> Any:
        """Count a value that was just made."""
        size = len(value) if type(value) is str else self.measure(value)[0]
        self.check(size)
        self.tick(size)
        return value

    def measure(self, value: object, depth: int = 0) -> tuple[int, int]:
        """(size, depth) of a value as a tree. Containers are remembered: the sandbox makes them immutable."""
        if isinstance(value, str | bytes | range):
            return len(value) * (_ITEM if isinstance(value, range) else 1), 0
        if isinstance(value, int):
            if value.bit_length() > _INT_BITS:
                raise SecurityError(f"the template makes a number of more than {_INT_BITS} bits")
            return 1 + value.bit_length() // 3, 0
        if not isinstance(value, list | tuple | dict | set | frozenset):
            return _ITEM, 0
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = (value, *self._measure_items(value, depth))
        return known[1], known[2]

    def _measure_items(self, value: Any, depth: int) -> tuple[int, int]:
        if depth > MAX_DEPTH:
            raise SecurityError(f"the template nests values more than {MAX_DEPTH} deep")
        size, deepest = _ITEM, 0
        items = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
        for item in items:
            if isinstance(item, Namespace):
                raise SecurityError("a namespace cannot be part of a list or a mapping")
            item_size, item_depth = (len(item), 0) if type(item) is str else self.measure(item, depth + 1)
            size += _ITEM + item_size
            deepest = max(deepest, item_depth)
            self.check(size)
        if deepest >= MAX_DEPTH:
            raise SecurityError(f"the template nests values more than {MAX_DEPTH} deep")
        return size, deepest + 1

    def size(self, value: object) -> int:
        """Characters of a value."""
        return self.measure(value)[0]


def _count(value: object) -> int:
    return abs(value) if isinstance(value, int) else 0


def _width(meter: Meter, this: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """ljust, center, indent, batch, ...: any number among the arguments may become that many characters, per line."""
    number = max([_count(arg) for arg in (*args, *kwargs.values())], default=0)
    lines = 1 + (this.count("\n") + this.count("\t") if isinstance(this, str) else 0)
    filler = max([meter.size(arg) for arg in (*args, *kwargs.values())], default=0)
    return meter.size(this) + number * lines + lines * filler


def _replace(meter: Meter, this: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    text, old, new = str(this), str([*args, ""][0]), str([*args, "", ""][1])
    old, new = str(kwargs.get("old", old)), str(kwargs.get("new", new))
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _join(meter: Meter, this: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """`sep.join(items)` and `items|join(sep)` alike: one of the two is the separator."""
    parts = [this, *args[:1], *kwargs.values()]
    separator = max((len(part) for part in parts if isinstance(part, str)), default=0)
    items = [part for part in parts if hasattr(part, "__len__")]
    return sum(meter.size(part) for part in items) + separator * max((len(part) for part in items), default=0)


def _format(meter: Meter, this: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """str.format, `%` and the filter: widths are numbers in the pattern, or arguments."""
    flat = [*args, *kwargs.values()]
    for arg in list(flat):
        flat += arg if isinstance(arg, tuple | list) else (arg.values() if isinstance(arg, dict) else ())
    text = this if isinstance(this, str) else str(this)
    fields = text.count("%") + text.count("{")
    largest = max([meter.size(arg) + _count(arg) * ("*" in text or "{" in text) for arg in flat], default=0)
    return len(text) + sum(min(int(n[:18]), 1 << 60) for n in re.findall(r"\d+", text)) + fields * largest


def _translate(meter: Meter, this: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return len(this) * max([meter.size(arg) for arg in args], default=1)


def _slices(meter: Meter, this: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return _width(meter, this, args, kwargs) * _ITEM


def _digits(meter: Meter, this: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """A number of digits: beyond a few hundred there is no honest use."""
    return meter.limit + 1 if any(_count(arg) > 300 for arg in (*args, *kwargs.values())) else 0


def _sum(meter: Meter, this: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Adding up lists takes quadratic time: numbers only."""
    start = kwargs.get("start", [*args, 0, 0][1])
    return 0 if isinstance(start, int | float) else meter.limit + 1


def _tojson(meter: Meter, this: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    size, depth = meter.measure(this)
    extra = [arg for arg in (*args, *kwargs.values()) if not isinstance(arg, bool)]
    indent = max([_count(arg) + (0 if isinstance(arg, int) else meter.size(arg)) for arg in extra], default=0)
    return size + (size // _ITEM) * indent * (depth + 1)


Estimate = Callable[[Meter, Any, Sequence[Any], Mapping[str, Any]], int]

METHODS: dict[str, Estimate] = {
    "ljust": _width, "rjust": _width, "center": _width, "zfill": _width, "expandtabs": _width, "hex": _width,
    "to_bytes": _width, "replace": _replace, "join": _join, "format": _format, "format_map": _format,
    "translate": _translate,
}  # fmt: skip
FILTERS: dict[str, Estimate] = {
    "center": _width, "indent": _width, "batch": _width, "slice": _slices, "replace": _replace, "join": _join,
    "format": _format, "round": _digits, "sum": _sum, "tojson": _tojson,
}  # fmt: skip


def estimate_operator(meter: Meter, operator: str, left: Any, right: Any) -> int:
    """Characters that `left operator right` makes at most."""
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * _count(right) > _INT_BITS:
            return meter.limit + 1
        return 0
    if operator == "%" and isinstance(left, str | bytes):
        return _format(meter, left, right if isinstance(right, tuple) else (right,), {})
    if operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
        return max(meter.size(left), 1) * _count(right) + max(meter.size(right), 1) * _count(left)
    return meter.size(left) + meter.size(right)
