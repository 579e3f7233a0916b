"""This worker as one of the peers: the same questions and answers as child.py, in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...backends import resolve_kv_type, select_backend
from ...models import load_model, read_model_config
from ...weights import open_checkpoint
from ..engine_harness import Drive
from .child import Measure, serve


def this_worker(given: dict[str, Any]) -> tuple[str, Measure]:
    """Prefill and decode as `bench e2e` runs them, and several answers at once."""
    checkpoint = open_checkpoint(Path(given["model"]))
    on_cpu = given["backend"] in ("auto", "cpu") and not given["device"].startswith("cuda")
    threads = given.get("threads") if on_cpu else None
    ops = select_backend(given["device"], given["backend"], threads)
    config = read_model_config(checkpoint)
    kv_type = resolve_kv_type(ops)
    ops.load_kernels(checkpoint, config, kv_type)
    model = load_model(checkpoint, ops, config, given["context"])
    drive = Drive(model, given["context"], given.get("batch", 1), kv_type=kv_type)

    def measure(kind: str, tokens: int, prompts: Sequence[list[int]] = ()) -> dict[str, float]:
        if prompts:
            timed = drive.together(prompts, tokens)
        else:
            timed = (drive.prefill if kind == "pp" else drive.decode)(0, tokens, 1)
        return {"seconds": timed.seconds, "tokens": timed.tokens}

    return __version__, measure


if __name__ == "__main__":
    serve(this_worker, json.loads(sys.argv[1]))
