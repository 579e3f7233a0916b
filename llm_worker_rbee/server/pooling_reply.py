"""Replies of pooling models: rows of numbers as JSON or base64, encoded in pieces where there are many.

A number is written with the fewest digits, nine at most, that give the same float32 again.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response, StreamingResponse

from ..engine.pooling_engine import Floats
from .call import JSON_TYPE

DIGITS = 9  # give every float32
INLINE_VALUES = 8192  # of a reply that is encoded in the event loop
PIECE_VALUES = 32_768  # that a thread encodes before others get the interpreter


def encode_rows(rows: Floats) -> list[bytes]:
    """Return each row as a JSON list."""
    return [msgspec.json.encode(row) for row in shorten(rows).tolist()]


def shorten(rows: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return float64 whose shortest decimals have nine digits at most, and are the float32 again when rounded."""
    values = rows.astype(np.float64)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log10(np.abs(values)))
    places = np.clip(DIGITS - 1 - np.where(np.isfinite(exponent), exponent, 0), 0, 22)
    scale = np.power(10.0, places)  # exact up to 10**22, and so is the quotient rounded once
    shortened: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = np.round(values * scale) / scale
    return np.where(shortened.astype(np.float32) == rows, shortened, values)


def encode_base64(rows: Floats) -> list[bytes]:
    """Return the little-endian float32 of each row as a JSON string of base64."""
    return [b'"' + base64.b64encode(row.tobytes()) + b'"' for row in rows.astype("<f4", copy=False)]


def rows_response(
    rows: Floats, head: bytes, item: Callable[[int, bytes], bytes], tail: bytes, *, is_base64: bool = False,
    headers: dict[str, str] | None = None,
) -> Response:  # fmt: skip
    """Return a reply of `head`, what `item` makes of the index and the text of each row, and `tail`."""
    encode = encode_base64 if is_base64 else encode_rows
    step = max(1, PIECE_VALUES // max(1, rows.shape[1]))

    def piece(at: int) -> bytes:
        encoded = encode(rows[at : at + step])
        return b","[: at > 0] + b",".join(item(at + i, one) for i, one in enumerate(encoded))

    if rows.size <= INLINE_VALUES:
        body = b"".join((head, *map(piece, range(0, len(rows), step)), tail))
        return Response(body, 200, headers, JSON_TYPE)
    return StreamingResponse(_pieces(head, piece, range(0, len(rows), step), tail), 200, headers, JSON_TYPE)


async def _pieces(head: bytes, piece: Callable[[int], bytes], places: range, tail: bytes) -> AsyncIterator[bytes]:
    yield head
    for at in places:
        yield await asyncio.to_thread(piece, at)
    yield tail


def list_response(head: bytes, items: Iterable[Any], tail: bytes, headers: dict[str, str] | None = None) -> Response:
    """Return a reply of `head`, the items, and `tail`; each item is encoded when the one before it is sent."""
    return StreamingResponse(_list_pieces(head, items, tail), 200, headers, JSON_TYPE)


async def _list_pieces(head: bytes, items: Iterable[Any], tail: bytes) -> AsyncIterator[bytes]:
    yield head
    for i, item in enumerate(items):
        yield b","[: i > 0] + msgspec.json.encode(item)
        await asyncio.sleep(0)
    yield tail


def ranking(scores: Floats, top_n: int | None) -> Iterator[tuple[int, float]]:
    """Yield index and score of the best, the best first; equal ones in the order in which they came."""
    values = scores[:, 0]
    for i in np.argsort(-values, kind="stable")[:top_n]:
        yield int(i), float(f"{values[i]:.9g}")
