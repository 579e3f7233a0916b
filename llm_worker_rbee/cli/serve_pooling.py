"""Options of `serve` for models of embeddings and rankers beside the chat model, and the engines that they start."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from ..config import LoadOptions, PoolingOptions
from ..errors import WorkerError
from ..load_pooling import open_pooling_text
from ..models import read_model_config
from ..models.pooling_config import read_pooling_config
from ..server.pooling import Kind, PoolingService
from ..token_engine.pooling_supervisor import SupervisedPooling
from ..token_engine.protocol import Load, PoolingInfo
from ..tokenizer.pooling_text import PoolingText
from ..weights import open_checkpoint
from ..weights.hub import find_model
from .options import option_fields

WORKSPACE_BYTES = 1 << 30  # of a pooling model, beside its weights: an estimate for planning the KV cache
NICE = 10  # of the process of a pooling model: a tenth of the cores beside chat that never pauses (decision 103)
TASKS: dict[Kind, str] = {"embedding": "embed", "rerank": "rank"}
HELP = "A GGUF file, a folder, hf:owner/repo:quant, or a name such as all-minilm-l6-v2."

_pooling = option_fields("Embeddings and reranking")


@dataclass(frozen=True, kw_only=True)
class PoolingServeFlags:
    """Models beside the chat model."""

    embedding_model: str | None = _pooling(None, "MODEL", f"Serve the embeddings of this model too. {HELP}")
    rerank_model: str | None = _pooling(None, "MODEL", "Serve this model of rankings too.")

    def references(self) -> dict[Kind, str]:
        """Return what was given, by kind."""
        given: dict[Kind, str | None] = {"embedding": self.embedding_model, "rerank": self.rerank_model}
        if self.embedding_model is not None and self.embedding_model == self.rerank_model:
            raise typer.BadParameter("--embedding-model and --rerank-model are the same: a model does one of both")
        return {kind: reference for kind, reference in given.items() if reference is not None}

    def require_processes(self, engine_process: str) -> None:
        """Raise if there are models, and no process that leaves memory for them."""
        if engine_process == "off" and self.references():
            raise typer.BadParameter("--embedding-model and --rerank-model need --engine-process on")

    def reserved_bytes(self) -> int:
        """Return the memory that the KV cache of the chat model has to leave; of models that are on this machine."""
        total = 0
        for reference in self.references().values():
            total += WORKSPACE_BYTES
            with suppress(WorkerError, OSError):
                total += find_model(reference, pull=False).bytes
        return total

    def services(self, options: LoadOptions, supervision: Mapping[str, Any]) -> list[PoolingService]:
        """Start a process for each model; `options` are the chat model's."""
        return [_start(kind, name, options, supervision) for kind, name in self.references().items()]


def _start(kind: Kind, name: str, chat: LoadOptions, supervision: Mapping[str, Any]) -> PoolingService:
    opening: Future[PoolingText] = Future()

    def on_located(path: str) -> None:
        """Open the text side of the model while the engine loads the weights."""
        threading.Thread(target=partial(_open, Path(path), TASKS[kind], opening), name="tokenizer", daemon=True).start()

    def open_text(info: PoolingInfo) -> PoolingText:
        return opening.result()

    options = PoolingOptions(
        model=name,
        device=chat.device,
        backend=chat.backend,
        threads=chat.threads,
        deterministic=chat.deterministic,
        task=TASKS[kind],
        refuses_chat_models=True,
    )
    load = Load(pooling=options, nice=NICE)
    engine = SupervisedPooling(load, on_located=on_located, **supervision)
    engine.label = f"the engine of {name}"
    return PoolingService(name, kind, engine, open_text)


def _open(path: Path, task: str, opening: "Future[PoolingText]") -> None:
    try:
        checkpoint = open_checkpoint(path)
        config = read_model_config(checkpoint)
        opening.set_result(open_pooling_text(checkpoint, config, read_pooling_config(checkpoint, config, task)))
    except Exception as error:
        opening.set_exception(error)
