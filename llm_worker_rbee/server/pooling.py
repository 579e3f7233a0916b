"""Pooling models on the wire: embeddings and scores of texts, beside the chat model and behind the same port.

Each model has an engine and an admission of its own. Texts are tokenized in threads, a few at a time, so that other
requests get their turn. Everything else runs in the event loop. Replies are rows of numbers as JSON or base64, encoded
in pieces where there are many; a number has the fewest digits, nine at most, that give the same float32 again.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from starlette.responses import Response, StreamingResponse

from ..backends.ops import Ints
from ..engine.pooling_engine import Floats, Score, finish_embeddings, finish_scores
from ..errors import (
    ContextLengthError,
    InvalidRequestError,
    PayloadTooLargeError,
    WorkerError,
    counted,
)
from ..load_pooling import open_pooling_text
from ..models import read_model_config
from ..models.pooling_config import read_pooling_config
from ..progress import OnStage
from ..token_engine.pooling_supervisor import SupervisedPooling
from ..token_engine.protocol import PoolingInfo
from ..tokenizer.pooling_text import PoolingText
from ..weights import open_checkpoint
from .admission import Admission, QueueLimits, QueueLoad
from .bodies import EmbedRequest, Inputs, RankRequest
from .metrics import PREFIX, REQUEST_BOUNDS, Histogram
from .offload import OffloadPool
from .schema import JSON_TYPE

Kind = Literal["embedding", "rerank"]
TASKS: dict[Kind, str] = {"embedding": "embed", "rerank": "rank"}  # of `PoolingOptions`
OPTIONS = {"chat": "--model", "embedding": "--embedding-model", "rerank": "--rerank-model"}
MAX_QUEUED_TOKENS = 2 << 20  # of one model; a request may enter alone whatever its size
MAX_QUEUED_SEQUENCES = 16_384
MAX_REQUEST_TOKENS = 1 << 24  # estimated: 2,048 inputs of 8,192
MAX_OFFLOADED_BYTES = 256 << 20  # that wait to be parsed or tokenized: bodies are larger than a chat's
PROMPTS_OF_TYPE = {  # the names that models give the prompts of a type of input
    "query": ("query", "search_query"),
    "document": ("document", "passage", "search_document"),
}
TEXTS_AT_ONCE = 32  # that a thread tokenizes before others get their turn
CHARS_PER_TOKEN = 256  # of a text: what follows so many for each token of the limit is past it
DIGITS = 9  # give every float32
INLINE_VALUES = 8192  # of a reply that is encoded in the event loop
PIECE_VALUES = 32_768  # that a thread encodes before others get the interpreter
logger = logging.getLogger("llm_worker_rbee.server")


class Pooled(NamedTuple):
    """What a model computed for a request: a row for each input, or a score; and its tokens."""

    rows: Floats
    num_tokens: int


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
    rows: Floats,
    head: bytes,
    item: Callable[[int, bytes], bytes],
    tail: bytes,
    *,
    is_base64: bool = False,
    headers: dict[str, str] | None = None,
) -> Response:
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


class PoolingService:
    """One pooling model."""

    rows_response, list_response = staticmethod(rows_response), staticmethod(list_response)
    ranking = staticmethod(ranking)

    def __init__(
        self, name: str, kind: Kind, engine: SupervisedPooling, open_text: Callable[[PoolingInfo], PoolingText]
    ) -> None:
        """`open_text` returns the text side of the model that the engine has loaded; it is called in a thread."""
        self.name, self.kind, self.engine = name, kind, engine
        self._open_text = open_text
        self._text: PoolingText | None = None
        self.admission = Admission(
            lambda: QueueLimits(0, MAX_QUEUED_SEQUENCES, MAX_QUEUED_TOKENS),
            lambda: engine.stats.seconds_per_token,
            self._describe_load,
        )
        self.seconds = Histogram("pooling_request_seconds", "From a request to its end.", REQUEST_BOUNDS)

    async def start(self, on_stage: OnStage, _: Callable[[], None]) -> None:
        """Load the model. A request is inside `ModelPool.use` until its end, so nothing else tells when it is idle."""
        info = await self.engine.start(on_stage)
        self._text = await asyncio.to_thread(self._open_text, info)
        logger.info("the model %s is loaded", self.name)
        for note in info.notes:
            logger.info("%s: %s", self.name, note)

    @property
    def is_loaded(self) -> bool:
        return self._text is not None

    @property
    def num_open(self) -> int:
        """Requests that are not finished."""
        return self.admission.num_reservations

    @property
    def context_length(self) -> int:
        return self.engine.info.max_length

    async def close(self, error: WorkerError) -> None:
        """End the engine; requests that are left end with the error."""
        await self.engine.stop(error)

    @property
    def text(self) -> PoolingText:
        """The text side of a model that is loaded."""
        assert self._text is not None
        return self._text

    def status(self) -> str:
        """Return the state of the engine; "loading" until the text side is there too."""
        status = self.engine.status()
        return "loading" if status == "healthy" and not self.is_loaded else status

    def health(self) -> dict[str, Any]:
        """Return its state for `/health`."""
        state = {"model": self.name, "kind": self.kind, "status": self.status()}
        return state | {"inputs": self.admission.load.waiting, "restarts": self.engine.num_restarts}

    def metrics(self) -> Iterator[Metric]:
        """Yield its metrics, labelled by model and kind."""
        labels = (self.name, self.kind)
        for family, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (text, value) in table.items():
                metric = family(f"{PREFIX}pooling_{name}", text, labels=LABELS)
                metric.add_metric(labels, value(self))
                yield metric
        seconds = HistogramMetricFamily(f"{PREFIX}pooling_request_seconds", "From a request to its end.", labels=LABELS)
        seconds.add_metric(labels, self.seconds.buckets(), self.seconds.sum)
        yield seconds

    def _describe_load(self, load: QueueLoad) -> str:
        inputs, tokens = counted(load.waiting, "input"), counted(load.unprefilled_tokens, "token")
        return f"the queue of {self.name} is full: {inputs} with about {tokens} wait"

    @contextmanager
    def _open_request(self, num_sequences: int, num_tokens: int) -> Iterator[None]:
        """Hold places until the request ends; raise if there are none, or if it is too large even alone."""
        if num_tokens > MAX_REQUEST_TOKENS:
            raise PayloadTooLargeError(
                f"the request has about {num_tokens} tokens, a query counted with each document: at most "
                f"{MAX_REQUEST_TOKENS} are accepted, send fewer inputs at a time"
            )
        with self.admission.reserve(num_sequences, num_tokens):
            start = time.perf_counter()
            try:
                yield
            finally:
                self.seconds.observe(time.perf_counter() - start)

    async def embed(self, request: EmbedRequest, offload: OffloadPool) -> Pooled:
        """Return the embedding of each input."""
        text, inputs = self.text, request.inputs
        width = self.engine.info.output_dim
        if request.dimensions is not None and request.dimensions > width:
            raise InvalidRequestError(
                f"dimensions is {request.dimensions}: {self.name} gives 1 to {width}", "dimensions"
            )
        prompt = self._prompt(request)
        with self._open_request(len(inputs), min(inputs.num_tokens, len(inputs) * text.max_length)):
            if inputs.texts:
                sequences = await _encode_texts(offload, text, inputs.texts, prompt, request.truncate)
            else:
                check = partial(_check_ids, text, inputs, request.truncate)
                sequences = await offload.run(len(inputs.ids), check, is_admitted=True)
            rows = await self.engine.compute(sequences)
            finish = partial(finish_embeddings, rows, request.dimensions, text.pooling.normalize)
            finished = await offload.run(0, finish, is_admitted=True)
        return Pooled(finished, sum(map(len, sequences)))

    def _prompt(self, request: EmbedRequest) -> str:
        """Return the prompt; a type of input that the model has none for is an input like any other."""
        name = request.prompt_name
        if request.input_type is not None:
            known = PROMPTS_OF_TYPE[request.input_type]
            name = next((one for one in known if one in self.text.pooling.prompts), None)
        prompt = self.text.prompt(name)
        if name and prompt and request.inputs.lengths:
            field = "prompt_name" if request.input_type is None else "input_type"
            raise InvalidRequestError("a prompt goes before a text, not before token ids: put it into the ids", field)
        return prompt

    async def score(self, request: RankRequest, offload: OffloadPool) -> Pooled:
        """Return the score of each pair of texts, a row of one value."""
        if self.kind == "embedding":
            return await self._compare(request, offload)
        text, documents = self.text, request.documents
        with self._open_request(len(documents), min(request.num_tokens, len(documents) * text.max_length)):
            sequences, types = await _encode_pairs(offload, text, request)
            rows = await self.engine.compute(sequences, types)
        score: Score = text.pooling.score  # type: ignore[assignment]  # validated by the config
        return Pooled(finish_scores(rows, score)[:, None], sum(map(len, sequences)))

    async def _compare(self, request: RankRequest, offload: OffloadPool) -> Pooled:
        """Return the cosine of the embeddings of each pair."""
        count = len(request.queries)
        inputs = Inputs([*request.queries, *request.documents])
        found = await self.embed(EmbedRequest(inputs=inputs, truncate=request.truncate), offload)
        cosines = await offload.run(0, partial(_cosines, found.rows, count), is_admitted=True)
        return Pooled(cosines[:, None], found.num_tokens)

    def describe(self) -> dict[str, Any]:
        """Return the entry of the model in `/info`."""
        info, stats = self.engine.info, self.engine.stats
        return {
            "model": self.name,
            "kind": self.kind,
            "architecture": info.architecture,
            "quant": info.quant,
            "parameters": info.parameters,
            "context_length": info.max_length,
            "backend": info.backend,
            "device": info.device,
            "dimensions": info.output_dim,
            "weights_bytes": info.weights_bytes,
            "process_bytes": stats.process_bytes,
            "max_step_tokens": info.max_step_tokens,
            "restarts": self.engine.num_restarts,
            "status": self.engine.status(),
        }


def open_text_side(path: Path, kind: Kind) -> PoolingText:
    """Return the text side of a model, without its weights."""
    checkpoint = open_checkpoint(path)
    config = read_model_config(checkpoint)
    return open_pooling_text(checkpoint, config, read_pooling_config(checkpoint, config, TASKS[kind]))


async def _encode_texts(
    offload: OffloadPool, text: PoolingText, texts: Sequence[str], prompt: str, truncate: bool
) -> list[Ints]:
    """Return the tokens of texts, a few at a time."""
    found: list[Ints] = []
    for at in range(0, len(texts), TEXTS_AT_ONCE):
        part = [_cut(text, one, "input", at + i, truncate) for i, one in enumerate(texts[at : at + TEXTS_AT_ONCE])]
        encode = partial(text.encode_batch, part, prompt=prompt, truncate=truncate, first=at)
        found += await offload.run(sum(map(len, part)), encode, is_admitted=True)
    return found


async def _encode_pairs(offload: OffloadPool, text: PoolingText, request: RankRequest) -> tuple[list[Ints], list[Ints]]:
    """Return the sequences of pairs and the segment of each token, a few at a time."""
    sequences: list[Ints] = []
    types: list[Ints] = []
    queries, documents, truncate = request.queries, request.documents, request.truncate
    step = TEXTS_AT_ONCE if len(queries) == 1 else 1
    for at in range(0, len(documents), step):
        index = at if len(queries) > 1 else 0
        query = _cut(text, queries[index], "query", index, truncate)
        part = [_cut(text, one, "documents", at + i, truncate) for i, one in enumerate(documents[at : at + step])]
        encode = partial(text.encode_pairs, query, part, truncate=truncate, first=at)
        ids, kinds = await offload.run(sum(map(len, part)) + len(query), encode, is_admitted=True)
        sequences += ids
        types += kinds
    return sequences, types


def _cut(text: PoolingText, one: str, field: str, index: int, truncate: bool) -> str:
    """Return the part of a text that is tokenized: text far past the limit is cut, or raises."""
    longest = CHARS_PER_TOKEN * text.max_length
    if len(one) > longest and not truncate:
        raise ContextLengthError(
            f"{field} {index} has {len(one)} characters, the model takes {text.max_length} tokens: shorten it, or set "
            "truncate",
            field,
        )
    return one[:longest]


def _cosines(rows: Floats, count: int) -> Floats:
    """Return the cosine of each row after the first `count` with its own of these, or with the only one."""
    rows = finish_embeddings(rows)
    cosines: Floats = np.einsum("ij,ij->i", np.broadcast_to(rows[:count], rows[count:].shape), rows[count:])
    return cosines


def _check_ids(text: PoolingText, inputs: Inputs, truncate: bool) -> list[Ints]:
    values = np.frombuffer(inputs.ids, np.int32).astype(np.int64)
    return text.check_ids(np.split(values, np.cumsum(inputs.lengths)[:-1]), truncate=truncate)


LABELS = ("model", "kind")
GAUGES: dict[str, tuple[str, Callable[[PoolingService], float]]] = {
    "num_requests": ("Open requests to a pooling model.", lambda one: one.admission.num_reservations),
    "num_queued_sequences": (
        "Inputs that are tokenized or wait for their rows.",
        lambda one: one.admission.load.waiting,
    ),
    "num_queued_tokens": ("Tokens of these, estimated.", lambda one: one.admission.load.unprefilled_tokens),
    "engine_healthy": ("Whether its engine computes: 1 or 0.", lambda one: one.status() == "healthy"),
    "process_memory_bytes": ("Memory of its process.", lambda one: one.engine.stats.process_bytes or 0),
}
COUNTERS: dict[str, tuple[str, Callable[[PoolingService], float]]] = {
    "requests": ("Requests to a pooling model that were admitted.", lambda one: one.admission.num_reserved),
    "refused_requests": ("Requests that its full queue refused.", lambda one: one.admission.num_refused),
    "sequences": ("Sequences that were computed.", lambda one: one.engine.stats.num_sequences),
    "tokens": ("Tokens of these.", lambda one: one.engine.stats.num_tokens),
    "steps": ("Steps of the engine: sequences / steps is the batch size.", lambda one: one.engine.stats.num_steps),
    "step_seconds": ("Seconds of these.", lambda one: one.engine.stats.seconds),
    "engine_restarts": ("Restarts of its engine.", lambda one: one.engine.num_restarts),
}
