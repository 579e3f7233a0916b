"""The process of a pooling model, once it has its `Load`: loads, then computes requests step by step.

Its steps are small, and the front gives it a lower priority than chat: what a decode step waits for is short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from .. import machine
from ..backends.ops import Ints
from ..engine.pooling_engine import PoolingEngine, PoolingOutput
from ..errors import InferenceError
from ..load import LoadPhases
from ..load_pooling import LoadedPooling, load_pooling
from .protocol import Abort, Load, Pool, PooledRows, PoolingInfo, PoolingStep
from .wire import FromEngine, ToEngine

HOST_STEP_TOKENS = 1024
DEVICE_STEP_TOKENS = 16_384


class PoolingLoop:
    """Feeds an engine with messages, and turns its outputs into messages."""

    def __init__(self, engine: PoolingEngine) -> None:
        self.engine = engine

    def receive(self, message: ToEngine) -> None:
        """Take in a message."""
        if isinstance(message, Pool):
            types = split_rows(message.token_types, message.lengths) if message.token_types else None
            self.engine.add(message.id, split_rows(message.ids, message.lengths), types)
        elif isinstance(message, Abort):
            self.engine.cancel(message.id)

    def step(self) -> PoolingStep:
        """Compute a step."""
        engine, start = self.engine, time.perf_counter()
        sequences, tokens = engine.num_sequences, engine.num_tokens
        outputs = engine.step()
        return PoolingStep(
            outputs=list(map(_encode, outputs)),
            num_sequences=engine.num_sequences - sequences,
            num_tokens=engine.num_tokens - tokens,
            seconds=time.perf_counter() - start,
            process_bytes=machine.resident_bytes(),
        )


def _encode(output: PoolingOutput) -> PooledRows:
    rows = b"" if output.error is not None else output.rows.astype("<f4", copy=False).tobytes()
    return PooledRows(output.id, output.indices, rows, output.error)


def split_rows(data: bytes, lengths: Sequence[int]) -> list[Ints]:
    """Return sequences from the bytes of all of them."""
    values = np.frombuffer(data, "<i4").astype(np.int64)
    if values.size != sum(lengths):
        raise InferenceError(f"{values.size} token ids for sequences of {sum(lengths)}")
    return np.split(values, np.cumsum(lengths)[:-1])


def join_rows(sequences: Sequence[Ints]) -> bytes:
    """Return the bytes of sequences, one after another."""
    return np.concatenate(sequences).astype("<i4").tobytes()


def load_pooling_loop(
    message: Load, phases: LoadPhases, on_located: Callable[[Path], None]
) -> tuple[PoolingLoop, PoolingInfo]:
    """Load a pooling model, do all one-time work of its backend, and compute a sequence."""
    if message.nice:
        machine.lower_priority(message.nice)
    assert message.pooling is not None
    loaded = load_pooling(message.pooling, phases, on_located=on_located)
    info = pooling_info(loaded, phases)
    with phases.timed("warm-up"):
        loaded.model.warm_up(info.max_step_tokens, phases.progress)
        loaded.model.run([np.zeros(min(16, info.max_length), np.int64)])
    return PoolingLoop(PoolingEngine(loaded.model, info.max_step_tokens, loaded.path.name)), info


def pooling_info(loaded: LoadedPooling, phases: LoadPhases) -> PoolingInfo:
    """Return the facts that a front needs."""
    checkpoint, ops = loaded.checkpoint, loaded.model.ops
    return PoolingInfo(
        path=str(loaded.path),
        architecture=loaded.config.family.name,
        quant=loaded.quant,
        parameters=sum(tensor.size for tensor in checkpoint.tensors.values()),
        vocab_size=loaded.config.vocab_size,
        backend=ops.name,
        device=ops.device,
        weights_bytes=checkpoint.nbytes,
        output_dim=loaded.model.output_dim,
        max_length=loaded.model.max_length,
        phases=phases.seconds,
        notes=list(loaded.notes),
        max_step_tokens=DEVICE_STEP_TOKENS if ops.has_device_memory else HOST_STEP_TOKENS,
    )


def serve_pooling(
    loop: PoolingLoop, receive: Callable[[bool], list[ToEngine]], send: Callable[[FromEngine], None]
) -> NoReturn:
    """Compute what comes; `receive(True)` waits for it."""
    while True:
        for message in receive(not loop.engine.has_work):
            loop.receive(message)
        if loop.engine.has_work:
            send(loop.step())
