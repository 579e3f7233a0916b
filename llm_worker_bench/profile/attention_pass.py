"""The attention pass that the Rust worker's report showed: its shares at width 4096 and 128 tokens, compared with ours.

One layer of Llama 2 7B in float32 stands for it: 32 heads of 128, a prompt of 128 tokens. Where a kernel computes
scores, mask, softmax and output together, they are one share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import nan

from ..micro.suite import ORIGINAL_S
from ..results import Run, quantity

SPEC = "llama2-7b:F32:1"
TOKENS = 128
ORIGINAL = {"QKV": 0.612, "RoPE": 0.086, "scores": 0.079, "mask": 0.020, "softmax and output": 0.203}
ORIGINAL_SECONDS = ORIGINAL_S["qkv_projection/128"] / ORIGINAL["QKV"]
TOGETHER = ("scores", "mask", "softmax and output")
ALL = "scores to output together"
PARTS = {
    "qkv": "QKV",
    "rope": "RoPE",
    "rope_angles": "RoPE",
    "kv_write": "RoPE",
    "rope_kv_write": "RoPE",
    "kv_read": "scores",
    "scores": "scores",
    "mask": "mask",
    "softmax": "softmax and output",
    "values": "softmax and output",
    "attention": ALL,
    "attention_split": ALL,
}


def backends(run: Run) -> list[str]:
    """Return the backends of a run, in its order."""
    return list(dict.fromkeys(str(name) for r in run.results if (name := r.fields.get("backend"))))


def of_backend(run: Run, backend: str) -> Run:
    """Return the run with the results of one backend."""
    return replace(run, results=tuple(r for r in run.results if r.fields.get("backend") == backend))


def seconds_by_part(run: Run) -> dict[str, float]:
    """Return the time of each part of the pass, of a run on one backend."""
    seconds: dict[str, float] = {}
    for result in run.results:
        part = PARTS.get(result.name.removeprefix("prefill/"))
        if part is not None and result.name.startswith("prefill/"):
            seconds[part] = seconds.get(part, 0.0) + result.estimate
    if ALL not in seconds:
        seconds[ALL] = sum(seconds.get(part, 0.0) for part in TOGETHER)
    return seconds


def rows(run: Run) -> Iterator[list[str]]:
    """Yield the rows of the table: the original's shares, and the shares of each backend."""
    names = backends(run)
    taken = {name: seconds_by_part(of_backend(run, name)) for name in names}
    whole = {name: sum(parts.get(own, 0.0) for own in ("QKV", "RoPE", ALL)) for name, parts in taken.items()}
    yield ["part of the pass", "original", *names]
    shares = ORIGINAL | {ALL: sum(ORIGINAL[part] for part in TOGETHER)}
    for part, share in shares.items():
        ours = [taken[name].get(part, nan) / whole[name] for name in names]
        label = "RoPE (ours with the KV write)" if part == "RoPE" else part
        yield [label, f"{share:.1%}", *("in one kernel" if own != own else f"{own:.1%}" for own in ours)]
    yield [
        "whole pass (the original: from its QKV)",
        quantity(ORIGINAL_SECONDS, "s"),
        *(quantity(whole[name], "s") for name in names),
    ]
