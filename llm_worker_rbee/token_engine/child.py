"""The engine's process: loads the model, then computes, in one thread; the front is at the other end of a socket.

Between steps it takes in what has come; without work it waits for the socket. A front that does not read holds it up
once much is waiting to be sent. It ends with the front, and by itself where it cannot compute any more: the front then
starts another one and submits its requests again.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import numpy as np

from .. import machine
from ..backends.select import has_driver, import_cpu_backend
from ..engine.pooling_engine import PoolingEngine
from ..errors import InferenceError, WorkerError, describe_failure
from ..load import LoadPhases
from ..load_pooling import LoadedPooling, load_pooling
from ..progress import Stage
from ..text_model import open_tokenizer
from ..weights import open_checkpoint
from .engine_loop import EngineLoop, PoolingLoop, is_urgent
from .launch import common_facts, load_engine, replace_with_dummy, warm_up
from .protocol import VERSION, Abort, Failed, Load, Located, LogLine, Pool, PoolingInfo, StageReport, StepResult
from .wire import FrameReader, FromEngine, ProtocolError, ToEngine, encode

STATS_INTERVAL_S = 0.1
READ_BYTES = 1 << 20
PARTIAL_WAIT_MS = 20  # for more of a message that has begun, before a step
MAX_UNSENT_BYTES = 16 << 20  # past it a step waits for the front to read
EXIT_FAILED = 70  # the engine cannot compute any more


def _exit(status: int) -> NoReturn:
    """End the process at once; what was registered for its end, such as removing a temporary folder, is done."""
    atexit._run_exitfuncs()
    os._exit(status)


class Connection:
    """The socket to the front: messages in and out; only `receive(wait=True)` and too much unsent data block."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine)
        self._unsent = bytearray()
        self._lock = threading.RLock()  # downloads and logs report from threads of their own
        sock.setblocking(False)

    def send(self, message: FromEngine) -> None:
        """Queue a message and send what the socket takes."""
        with self._lock:
            self._unsent += encode(message)
            self._flush()
            while len(self._unsent) > MAX_UNSENT_BYTES:
                self._poll(select.POLLOUT)
                self._flush()

    def flush(self) -> None:
        """Send everything."""
        with self._lock:
            while self._unsent:
                self._poll(select.POLLOUT)
                self._flush()

    def receive(self, wait: bool) -> list[ToEngine]:
        """Return the messages that have come; with `wait` at least one. The process ends with the front's end.

        A message that has begun is read to its end, unless the front pauses: a socket takes a part of a large one only.
        """
        received: list[ToEngine] = []
        while True:
            timeout_ms = None if wait and not received else PARTIAL_WAIT_MS * self._reader.is_partial
            events = self._poll(select.POLLIN | (select.POLLOUT if self._unsent else 0), timeout_ms)
            with self._lock:
                self._flush()
            if events & ~select.POLLOUT:
                data = self._socket.recv(READ_BYTES)
                if not data:
                    _exit(0)  # no front is left
                received += self._reader.feed(data)
            is_enough = bool(received) or not wait
            if is_enough and not (self._reader.is_partial and events):
                return received

    def _poll(self, events: int, timeout_ms: int | None = None) -> int:
        """Wait until the socket is ready and return for what; unlike `select` for any file descriptor."""
        poll = select.poll()
        poll.register(self._socket, events)
        return sum(ready for _, ready in poll.poll(timeout_ms))

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            _exit(0)


class _FrontLog(logging.Handler):
    """Passes log lines to the front."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        self._connection.send(LogLine(record.levelno, record.getMessage()))


def _receive_load(connection: Connection) -> Load:
    """Wait for the first message; a process that was started ahead imports what most loads need meanwhile."""
    received = connection.receive(wait=False)
    if not received and not has_driver():
        with suppress(WorkerError):
            import_cpu_backend()
    first = (received or connection.receive(wait=True))[0]
    if not isinstance(first, Load):
        raise ProtocolError("the first message is not Load")
    return first


def _load(message: Load, connection: Connection) -> EngineLoop | PoolingLoop:
    """Load the model, with reports to the front, and compute a token: what only the first step needs is done then."""

    def on_stage(stage: Stage) -> None:
        connection.send(StageReport(stage))

    def progress(what: str, done: int, total: int | None) -> None:
        connection.send(StageReport(Stage(what, done, total, 0.0), is_transfer=True))

    if message.version != VERSION:
        raise InferenceError(f"the engine speaks version {VERSION} of the protocol, the front {message.version}")

    def on_located(path: Path) -> None:
        connection.send(Located(str(path)))

    phases = LoadPhases(on_stage, progress)
    if message.nice:
        machine.set_priority(message.nice)
    elif message.loading_nice:
        with_threads = machine.can_raise_priority()
        machine.set_priority(message.loading_nice, with_threads=with_threads)
    if message.options is None:
        assert message.pooling is not None
        loaded = load_pooling(message.pooling, phases, on_located=on_located)
        return _warm_up_pooling(loaded, phases, connection)
    engine, info = load_engine(message.options, phases, on_located=on_located)
    warm_up(engine, phases)
    if message.dummy_step_s is not None:
        replace_with_dummy(engine, open_tokenizer(open_checkpoint(Path(info.path))), message.dummy_step_s)
    loop = EngineLoop(
        engine, lambda events: connection.send(StepResult(events=events)), records_blocks=message.records_blocks
    )
    if message.loading_nice:
        machine.set_priority(0, with_threads=with_threads)
    connection.send(info)
    connection.send(StepResult(stats=loop.stats()))
    return loop


def _warm_up_pooling(loaded: LoadedPooling, phases: LoadPhases, connection: Connection) -> PoolingLoop:
    """Do all one-time work of a pooling model, and compute a sequence."""
    model, max_step_tokens = loaded.model, loaded.max_step_tokens
    with phases.timed("warm-up"):
        model.warm_up(max_step_tokens, phases.progress)
        model.run([np.zeros(min(16, model.max_length), np.int64)])
    facts = common_facts(loaded, phases) | {"output_dim": model.output_dim, "max_length": model.max_length}
    connection.send(PoolingInfo(max_step_tokens=max_step_tokens, **facts))
    return PoolingLoop(PoolingEngine(model, max_step_tokens, loaded.checkpoint.path.name))


def _serve(loop: EngineLoop, connection: Connection) -> NoReturn:
    stats_at, early = 0.0, list[ToEngine]()

    def has_urgent() -> bool:
        early.extend(connection.receive(wait=False))
        return any(map(is_urgent, early))

    loop.engine.stop_for(has_urgent)
    while True:
        received, early = early, []
        for message in received + connection.receive(wait=not (loop.has_work or received)):
            if not isinstance(message, Load | Pool):
                loop.receive(message)
        if not loop.has_work:  # the last request was aborted: its blocks are free
            connection.send(StepResult(stats=loop.stats()))
            continue
        result = loop.step()
        if loop.engine.device_failed:
            raise InferenceError("the device computes no more")
        _log_failures(result, connection)
        now = time.monotonic()
        if now - stats_at >= STATS_INTERVAL_S or not loop.has_work:
            stats_at = now
            result = StepResult(
                outputs=result.outputs,
                events=result.events,
                stored=result.stored,
                removed=result.removed,
                stats=loop.stats(),
            )
        connection.send(result)


def _serve_pooling(loop: PoolingLoop, connection: Connection) -> NoReturn:
    while True:
        for message in connection.receive(wait=not loop.has_work):
            if isinstance(message, Pool | Abort):
                loop.receive(message)
        if loop.has_work:
            connection.send(loop.step())


def _log_failures(result: StepResult, connection: Connection) -> None:
    """Log what is behind a request's error: only its message travels."""
    for output in result.outputs:
        if output.error is not None and output.error.__cause__ is not None:
            text = f"{output.error}: {describe_failure(output.error.__cause__)}"
            connection.send(LogLine(logging.ERROR, text, output.id))


def main() -> NoReturn:
    """Run an engine, in a process of `spawn`: the first argument is the socket's file descriptor."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):  # a service manager sends them to both
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=int(sys.argv[1])))
    root = logging.getLogger()
    root.handlers = [_FrontLog(connection)]
    logging.captureWarnings(True)
    try:
        loop = _load(_receive_load(connection), connection)
    except Exception as error:
        known = error if isinstance(error, WorkerError) else InferenceError(f"{type(error).__name__}: {error}")
        connection.send(Failed(known))
        connection.flush()
        _exit(1)
    try:
        if isinstance(loop, PoolingLoop):
            _serve_pooling(loop, connection)
        _serve(loop, connection)
    except BaseException as error:
        cause = error.__cause__ or error
        connection.send(LogLine(logging.ERROR, f"the engine ends: {describe_failure(cause)}"))
        connection.flush()
        os._exit(EXIT_FAILED)  # without more: a device that has failed may hang
