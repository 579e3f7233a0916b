"""Messages as bytes: every kind round-trips, in any division into pieces; anything else is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from llm_worker_rbee.config import EngineConfig, LoadOptions
from llm_worker_rbee.errors import ContextLengthError, DeadlineError, QueueFullError, WorkerError
from llm_worker_rbee.progress import Stage
from llm_worker_rbee.sampling_params import SamplingParams, TokenLogprob
from llm_worker_rbee.token_engine.protocol import (
    Abort,
    EngineStats,
    Failed,
    Load,
    Located,
    LogLine,
    ModelInfo,
    RequestEvent,
    StageReport,
    StepResult,
    Submit,
    TokenOutput,
)
from llm_worker_rbee.token_engine.wire import HEADER, FrameReader, FromEngine, ProtocolError, ToEngine, encode

PARAMS = SamplingParams(seed=2**64 - 1, stop=["a", "é"], logit_bias={7: -1.5}, logprobs=3, prompt_logprobs=True)
SCORES = [TokenLogprob(5, -0.25, ((5, -0.25), (6, -2.0)))]
TO_ENGINE = [
    Load(options=LoadOptions(max_batch=3)),
    Submit(id=1, prompt=[1, 2**31], params=PARAMS.resolve(), max_tokens=9, seed=2**53, eos_ids=[2], generated=[4, 5]),
    Abort(7),
]
FROM_ENGINE = [
    StageReport(Stage("weights", 3, None, 0.5, "detail")),
    Located("/a/é.gguf"),
    LogLine(30, "text"),
    ModelInfo(
        path="m", architecture="llama", quant="Q4_0", parameters=5, vocab_size=10, backend="cpu", device="cpu",
        kv_type="float16", weights_bytes=1, kv_cache_bytes=2, engine=EngineConfig(max_context=8, n_blocks=4), phases={},
    ),
    StepResult(
        outputs=[TokenOutput(1, [5, 6], None, SCORES, [None, *SCORES]), TokenOutput(2, [9], "stop")],
        events=[RequestEvent(1, "admitted", 16, 0.125)], stored=[b"\x00\xff"], removed=[b"x"],
        stats=EngineStats(num_free_blocks=1, num_blocks=4),
    ),
]  # fmt: skip


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_messages_to_engine_round_trip(message: Any) -> None:
    assert list(FrameReader[Any](ToEngine).feed(encode(message))) == [message]


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_messages_from_engine_round_trip(message: Any) -> None:
    assert list(FrameReader[Any](FromEngine).feed(encode(message))) == [message]


@pytest.mark.parametrize(
    "error", [ContextLengthError("too long", "prompt"), QueueFullError("full", 7), DeadlineError("late"),
              WorkerError("plain")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_errors_keep_class_message_and_detail(error: WorkerError) -> None:
    outputs = [TokenOutput(1, [], "error", error=error)]
    found = list(FrameReader[Any](FromEngine).feed(encode(StepResult(outputs=outputs)) + encode(Failed(error))))
    for one in (found[0].outputs[0].error, found[1].error):
        assert type(one) is type(error)
        assert (str(one), vars(one)) == (str(error), vars(error))


def test_messages_in_any_pieces() -> None:
    data, draw = b"".join(map(encode, FROM_ENGINE * 20)), random.Random(1)
    reader, found, at = FrameReader[Any](FromEngine), list[Any](), 0
    while at < len(data):
        size = draw.choice((1, 2, 3, 50, 1000))
        found += reader.feed(data[at : at + size])
        at += size
    assert found == FROM_ENGINE * 20


def test_invalid_frames_raise_protocol_error() -> None:
    """Random bytes, a huge length, a message for the other end, and a damaged message: each is refused or waits for
    more bytes, and nothing else is raised."""
    draw = random.Random(2)
    with pytest.raises(ProtocolError, match="4294967295 bytes"):
        list(FrameReader[Any](FromEngine).feed(b"\xff" * 4))
    with pytest.raises(ProtocolError):
        list(FrameReader[Any](FromEngine).feed(encode(Abort(1))))
    refused = 0
    for _ in range(300):
        body = bytearray(encode(draw.choice(FROM_ENGINE))[HEADER.size :])
        for _ in range(draw.randint(1, 4)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        try:
            list(FrameReader[Any](FromEngine).feed(HEADER.pack(len(body)) + bytes(body)))
        except ProtocolError:
            refused += 1
    assert refused > 100
