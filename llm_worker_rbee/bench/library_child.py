"""The program that computes logits with somebody else's library, run by peer_logits.py. It imports none of ours.

It runs under any interpreter that has NumPy and the library. Arguments: which library, the model, the longest sequence,
the number of threads. Standard input has lines of {"ids", "last", "file"}: the logits (float32) of all positions, or of
the last, go to that .npy file. The answers are lines too: {"version"} first, {"rows"} for each request, {"error"} for a
failure.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Compute = Callable[[list[int]], Any]  # ids -> (positions, vocabulary)


def open_transformers(model: Path, context: int, threads: int) -> tuple[str, Compute]:
    """Float32 on the CPU; a GGUF file is dequantized by transformers itself."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    torch.set_num_threads(threads)
    folder, where = (model.parent, {"gguf_file": model.name}) if model.is_file() else (model, {})
    key = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, **where, **{key: torch.float32}).eval()

    def compute(ids: list[int]) -> Any:
        with torch.inference_mode():
            return loaded(torch.tensor([ids])).logits[0].float().numpy()

    return f"transformers {transformers.__version__}", compute


def open_llama_cpp(model: Path, context: int, threads: int) -> tuple[str, Compute]:
    """llama.cpp as it comes, on the CPU, with the logits of each position kept."""
    library = importlib.import_module("llama_cpp")
    loaded = library.Llama(
        str(model), n_ctx=context, n_batch=context, n_gpu_layers=0, logits_all=True, verbose=False, seed=0,
        n_threads=threads, n_threads_batch=threads,
    )  # fmt: skip

    def compute(ids: list[int]) -> Any:
        loaded.reset()
        loaded.eval(ids)
        return loaded.scores[: len(ids)]

    return f"llama-cpp-python {library.__version__}", compute


OPENERS = {"transformers": open_transformers, "llama-cpp-python": open_llama_cpp}


def main() -> None:
    """Load, then answer each line until there is none."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the replies

    def reply(**fields: Any) -> None:
        print(json.dumps(fields), file=replies, flush=True)

    try:
        kind, model, context, threads = sys.argv[1:]
        version, compute = OPENERS[kind](Path(model), int(context), int(threads))
        reply(version=version)
        for line in sys.stdin:
            asked = json.loads(line)
            logits = compute(asked["ids"])
            kept = np.ascontiguousarray(logits[-1:] if asked["last"] else logits, np.float32)
            np.save(asked["file"], kept)
            reply(rows=len(kept))
    except Exception as error:
        reply(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
