"""This worker as one of the peers: the same questions and answers as child.py, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ... import __version__
from ...backends import kernels, pick
from ...models import describe, load_model
from ...weights import open_checkpoint
from ..drive import Drive
from .child import Measure, serve


def this_worker(given: dict[str, Any]) -> tuple[str, Measure]:
    """Prefill and decode as `bench e2e` runs them."""
    checkpoint = open_checkpoint(Path(given["model"]))
    threads = None if given["backend"] == "reference" else given.get("threads")
    ops = pick(given["device"], given["backend"], threads)
    config = describe(checkpoint)
    kernels.get_ready_for(ops, kernels.Needs.of(checkpoint, config))
    model = load_model(checkpoint, ops, config, given["context"])
    drive = Drive(model, given["context"])

    def measure(kind: str, tokens: int) -> None:
        act = drive.prefill if kind == "pp" else drive.decode
        act(0, tokens, 1)

    return __version__, measure


if __name__ == "__main__":
    serve(this_worker, json.loads(sys.argv[1]))
