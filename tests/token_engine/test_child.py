"""The engine's end of the socket: messages that the front does not read wait, up to a bound, and then hold the engine
up."""

from __future__ import annotations

import select
import socket
import threading

from llm_worker_rbee.token_engine.child import MAX_UNSENT_BYTES, Connection
from llm_worker_rbee.token_engine.protocol import Abort, LogLine, Pool
from llm_worker_rbee.token_engine.wire import FrameReader, FromEngine, encode

LIMIT_S = 30
LINE = LogLine(20, "x" * 100_000)
NUM_LINES = 2 * MAX_UNSENT_BYTES // 100_000


def test_front_that_does_not_read_holds_the_engine_up() -> None:
    front, engine = socket.socketpair()
    connection, sent = Connection(engine), threading.Semaphore(0)

    def send_all() -> None:
        for _ in range(NUM_LINES):
            connection.send(LINE)
            sent.release()
        connection.flush()

    sender = threading.Thread(target=send_all, daemon=True)
    sender.start()
    for _ in range(MAX_UNSENT_BYTES // 100_000 - 1):  # these are taken without a reader
        assert sent.acquire(timeout=LIMIT_S)
    sender.join(0.2)
    assert sender.is_alive(), "it sent twice the bound to a socket that is not read"
    reader: FrameReader[FromEngine] = FrameReader(FromEngine)
    found: list[FromEngine] = []
    front.settimeout(LIMIT_S)
    while len(found) < NUM_LINES:
        found += reader.feed(front.recv(1 << 20))
    sender.join(LIMIT_S)
    assert found == [LINE] * NUM_LINES
    front.close()
    engine.close()


def test_receive_returns_whole_messages_only() -> None:
    front, engine = socket.socketpair()
    connection, data = Connection(engine), encode(Abort(1)) + encode(Abort(2))
    assert connection.receive(wait=False) == []
    front.sendall(data[:-1])
    assert connection.receive(wait=True) == [Abort(1)]
    assert connection.receive(wait=False) == []
    front.sendall(data[-1:])
    assert connection.receive(wait=True) == [Abort(2)]
    front.close()
    engine.close()


def test_large_message_is_read_to_its_end() -> None:
    """The socket takes a part of it only; the engine does not compute a step between any two parts."""
    front, engine = socket.socketpair()
    connection, message = Connection(engine), Pool(1, [1 << 20], bytes(4 << 20), b"")
    sender = threading.Thread(target=front.sendall, args=(encode(message),), daemon=True)
    sender.start()
    assert select.select([engine], [], [], LIMIT_S)[0]
    received = [one for _ in range(5) for one in connection.receive(wait=False)]
    assert received == [message]
    sender.join(LIMIT_S)
    front.close()
    engine.close()
