"""The tables that gpu.py ends in: its figures beside what was aimed at and what llama.cpp reaches on the same GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, NamedTuple

DRIVER = Path("/proc/driver/nvidia/version")


class Row(NamedTuple):
    """A figure: tokens a second where more is better, milliseconds where less is. One H200, Llama-2-7B's shape."""

    mix: str
    name: str
    aim: float | None
    other: float | None = None  # llama.cpp's of August 2026; of BF16 that of transformers, eager
    less_is_better: bool = False


ROWS = (
    Row("Q4_K_M", "tg128 tok/s", 600, 284.5), Row("Q4_K_M", "pp512 tok/s", 25_000, 9_484),
    Row("Q4_K_M", "batch 8 tok/s", None, 820), Row("Q4_K_M", "batch 32 tok/s", None, 3_263),
    Row("Q4_K_M", "batch 64 tok/s", 12_000, 4_453), Row("Q4_K_M", "depth 2048 tok/s", None, 265.5),
    Row("Q4_0", "tg128 tok/s", 700, 355.2), Row("Q4_0", "pp512 tok/s", 25_000, 10_779),
    Row("Q4_0", "batch 64 tok/s", 12_000),
    Row("Q8_0", "tg128 tok/s", 480, 271.1), Row("Q8_0", "pp512 tok/s", 25_000, 10_898),
    Row("Q8_0", "batch 32 tok/s", None, 3_244), Row("Q8_0", "batch 64 tok/s", 11_000, 4_638),
    Row("BF16", "tg128 tok/s", 290, 14), Row("BF16", "pp512 tok/s", 30_000, 23_770),
    Row("BF16", "batch 64 tok/s", 9_000),
    Row("BF16", "256 requests of 128 in, 128 out: output tok/s", 15_000),
    Row("FP8", "tg128 tok/s", None), Row("FP8", "pp512 tok/s", None), Row("FP8", "batch 64 tok/s", None),
    *(Row(mix, "depth 2048, ms more a token", 0.35, None, True) for mix in ("Q4_K_M", "Q4_0", "Q8_0", "BF16")),
    *(Row(mix, "host, ms of a step", 0.3, None, True) for mix in ("Q4_K_M", "Q4_0", "Q8_0", "BF16")),
)  # fmt: skip


def driver_version() -> str:
    """Of the GPU's driver; what the kernel says where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return DRIVER.read_text().splitlines()[0] if DRIVER.exists() else "unknown"


def figure(result: dict[str, Any], row: Row) -> float | None:
    """A row's own figure, where it was measured."""
    step, deep = (
        result.get(f"{row.mix} step ms: whole, device, host"),
        result.get(f"{row.mix} depth 2048 step ms, tok/s"),
    )
    if row.name.startswith("host"):
        return step[2] if step else None
    if row.name.startswith("depth"):
        if not deep or not step:
            return None
        return float(deep[1]) if row.name.endswith("tok/s") else round(deep[0] - step[0], 3)
    return result.get(f"{row.mix} {row.name}")


def tables(result: dict[str, Any]) -> str:
    """Against the aims; then everything."""
    lines = ["", "| | | ours | aim | reached | llama.cpp (BF16: transformers) | times |", "|" + " --- |" * 7]
    for row in ROWS:
        ours = figure(result, row)
        if ours is None:
            continue
        reached = (
            "" if row.aim is None else "yes" if (ours <= row.aim) == row.less_is_better or ours == row.aim else "no"
        )
        times = "" if row.other is None else f"{ours / row.other:.2f}"
        lines.append(
            f"| {row.mix} | {row.name} | {_of(ours)} | {_of(row.aim)} | {reached} | {_of(row.other)} | {times} |"
        )
    lines += ["", "| figure | value |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in result.items())])


def _of(number: float | None) -> str:
    return "" if number is None else f"{number:,}"
