"""llm-worker-rbee: a model file becomes a fast, honest inference endpoint.

>>> from llm_worker_rbee import LLM, SamplingParams
>>> llm = LLM("smollm2")
>>> llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)).text
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = [
    "LLM", "Chunk", "Completion", "Embedder", "RankResult", "Reranker", "SamplingParams", "Stream",
    "StructuredOutputsParams", "Timings", "Tool", "ToolCall", "WorkerError", "__version__",
]  # fmt: skip

if TYPE_CHECKING:
    from .embedder import Embedder, RankResult, Reranker
    from .errors import WorkerError
    from .generation import Chunk, Completion, Timings
    from .llm import LLM, Stream
    from .sampling_params import SamplingParams, StructuredOutputsParams
    from .tokenizer.chat.events import Tool, ToolCall


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that `--version` and `--help` do not import NumPy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import embedder, errors, llm

    module = errors if name == "WorkerError" else embedder if name in embedder.__all__ else llm
    return getattr(module, name)


def __dir__() -> list[str]:
    """Return the names that an editor completes."""
    return sorted(__all__)
