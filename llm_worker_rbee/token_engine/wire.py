"""Messages between processes: frames of a length and MessagePack. An error travels as its class name and message."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from ..backends.ops import Ints
from ..errors import InferenceError, InvalidRequestError, QueueFullError, WorkerError
from .protocol import (
    Abort,
    Failed,
    Load,
    Located,
    LogLine,
    ModelInfo,
    Pool,
    PoolingInfo,
    PoolingStep,
    StageReport,
    StepResult,
    Submit,
    UnloadLora,
)

T = TypeVar("T")
HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 28
MAX_DATA_BYTES = MAX_FRAME_BYTES - (1 << 20)  # of the tokens or pixels of a request
ToEngine = Load | Submit | Pool | Abort | UnloadLora
FromEngine = StageReport | Located | LogLine | Failed | ModelInfo | StepResult | PoolingInfo | PoolingStep


class ProtocolError(Exception):
    """What came is no message of this protocol."""


def _to_plain(value: Any) -> Any:
    if isinstance(value, WorkerError):
        detail = getattr(value, "field", None) or getattr(value, "retry_after", None)
        return [type(value).__name__, str(value), detail]
    raise NotImplementedError(type(value).__name__)


def _from_plain(kind: type, value: Any) -> Any:
    if kind is not WorkerError:
        raise NotImplementedError(kind.__name__)
    name, message, detail = value
    error = _error_classes().get(name, InferenceError)
    takes_detail = issubclass(error, InvalidRequestError | QueueFullError) and detail is not None
    return error(message, detail) if takes_detail else error(message)


def _error_classes() -> dict[str, type[WorkerError]]:
    classes, pending = {}, [WorkerError]
    while pending:
        kind = pending.pop()
        classes[kind.__name__] = kind
        pending += kind.__subclasses__()
    return classes


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Return the frame of a message."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def pack_sequences(sequences: Sequence[Ints], token_types: Sequence[Ints] | None) -> Pool:
    """Return a message without an id."""
    ids, types = (
        b"" if rows is None else np.concatenate(rows).astype("<i4").tobytes() for rows in (sequences, token_types)
    )
    return Pool(0, list(map(len, sequences)), ids, types)


def unpack_sequences(message: Pool) -> tuple[list[Ints], list[Ints] | None]:
    """Return the sequences of a message, and the types of their tokens, if it has them."""
    return _split(message.ids, message.lengths), _split(
        message.token_types, message.lengths
    ) if message.token_types else None


def _split(data: bytes, lengths: Sequence[int]) -> list[Ints]:
    values = np.frombuffer(data, "<i4").astype(np.int64)
    if values.size != sum(lengths):
        raise InferenceError(f"{values.size} token ids for sequences of {sum(lengths)}")
    return np.split(values, np.cumsum(lengths)[:-1])


class FrameReader(Generic[T]):
    """Takes bytes as they come and yields the messages that are complete."""

    def __init__(self, kind: Any) -> None:
        """`kind` is the union of the messages that may come: `ToEngine` or `FromEngine`."""
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)
        self._data = bytearray()

    @property
    def is_partial(self) -> bool:
        """Whether a message has begun and is not complete."""
        return bool(self._data)

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the messages that these bytes complete; raise `ProtocolError` if there is anything else."""
        self._data += data
        at = 0
        while len(self._data) - at >= HEADER.size:
            (size,) = HEADER.unpack_from(self._data, at)
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes")
            if len(self._data) - at - HEADER.size < size:
                break
            body = self._data[at + HEADER.size : at + HEADER.size + size]
            at += HEADER.size + size
            yield self._decode(body)
        del self._data[:at]

    def _decode(self, body: bytearray) -> T:
        try:
            return self._decoder.decode(body)  # type: ignore[no-any-return]
        except Exception as error:  # whatever it is, it is not a message
            raise ProtocolError(f"{type(error).__name__}: {error}") from None
