"""Program that runs this worker as a peer: the protocol of library_child.py, without HTTP."""

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
from ..engine_harness import EngineHarness
from ..library_child import Handler, serve


def load_worker(settings: dict[str, Any]) -> tuple[str, Handler]:
    """Prefill and decode as `bench e2e` runs them; with prompts, answer all of them at once."""
    checkpoint = open_checkpoint(Path(settings["model"]))
    on_cpu = settings["backend"] in ("auto", "cpu") and not settings["device"].startswith("cuda")
    backend = select_backend(settings["device"], settings["backend"], settings.get("threads") if on_cpu else None)
    config = read_model_config(checkpoint)
    kv_type = resolve_kv_type(backend)
    backend.load_kernels(checkpoint, config, kv_type)
    model = load_model(checkpoint, backend, config, settings["context"])
    harness = EngineHarness(model, settings["context"], settings.get("batch", 1), kv_type=kv_type)

    def measure(kind: str, tokens: int, prompts: Sequence[list[int]] = ()) -> dict[str, float]:
        if prompts:
            timed = harness.decode_prompts(prompts, tokens)
        else:
            timed = (harness.prefill if kind == "pp" else harness.decode)(0, tokens, 1)
        return {"seconds": timed.seconds, "tokens": timed.tokens}

    return __version__, measure


if __name__ == "__main__":
    serve(load_worker, json.loads(sys.argv[1]))
