"""Numbers for people. Files and `--json` hold plain units; prefixes are added here, for tables and pages."""

from __future__ import annotations

from collections.abc import Sequence

PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "ns"))


def quantity(value: float, unit: str) -> str:
    """Format a value with its unit: `1.23 ms`, `4.10 tok/s`, `98.4 MB`."""
    if value != value:
        return "-"
    size, name = scale(value, unit) if value else (1.0, unit)
    if name == unit and size == 1.0 and unit != "s" and value == round(value, 0):
        return f"{value:,.0f} {unit}".rstrip()  # probably a count
    return f"{digits(value / size)} {name}".rstrip()


def scale(value: float, unit: str) -> tuple[float, str]:
    """Return the size and the name of the prefixed unit that suits a value."""
    if unit == "s":
        size, name = next(((s, n) for s, n in SECONDS if abs(value) >= s), SECONDS[-1])
        return size or 1e-9, name
    if unit in ("B", "B/s", "FLOP/s"):
        size, name = next(((s, n) for s, n in PREFIXES if abs(value) >= s), PREFIXES[-1])
        return size, name + unit
    return 1.0, unit


def digits(value: float) -> str:
    """Format about three significant digits, and all of those before the point."""
    size = abs(value)
    if size >= 1000 or not value:
        return f"{value:,.0f}"
    return f"{value:.2f}" if 0.1 <= size < 100 else f"{value:.3g}"


def percent(value: float) -> str:
    """Format a value that is in percent: `43.2%`, `0.006%`."""
    return f"{value:.1f}%" if abs(value) >= 1 or not value else f"{value:.2g}%"


def spread(values: Sequence[float], unit: str) -> str:
    """Format two values as `1.20 to 1.26 ms`; each with its own unit where those differ."""
    low, high = (quantity(value, unit) for value in values)
    number, _, name = low.partition(" ")
    return f"{number} to {high}" if name == high.partition(" ")[2] else f"{low} to {high}"
