"""Faults of an engine process at an exact point: it ends, or sends what is no message, once, when a state is reached.

A `sitecustomize` module in the folder of `EngineFaults` calls `install` in the engine's process. A file names the fault
that comes next; the process removes the file before the fault, so the engine that follows works.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from llm_worker_rbee.engine.model_runner import ModelRunner
from llm_worker_rbee.engine.scheduler import Scheduler
from llm_worker_rbee.errors import InferenceError
from llm_worker_rbee.token_engine import wire
from llm_worker_rbee.token_engine.engine_loop import EngineLoop
from llm_worker_rbee.token_engine.protocol import Abort, Failed, StepResult

CUSTOMIZE = """
import sys
if any("token_engine.child" in word for word in sys.orig_argv):
    from tests.helpers.engine_faults import install
    install({path!r})
"""
# Before a step: what the scheduler holds.
STATES: dict[str, Callable[[Scheduler], bool]] = {
    "queued": lambda scheduler: bool(scheduler.waiting and scheduler.running),
    "prefill": lambda scheduler: any(0 < one.num_computed_tokens < len(one.prompt) for one in scheduler.running),
    "scoring": lambda scheduler: any(len(one.prompt_logprobs or ()) > 1 for one in scheduler.running),
    "decode": lambda scheduler: bool(scheduler.running) and all(len(one.tokens) >= 5 for one in scheduler.running),
}
LAST_TOKEN, HALF_MESSAGE = "last token", "half a message"
FAILED_STEP = "failed step"  # it raises, and the process goes on
KILLS = (*STATES, LAST_TOKEN, HALF_MESSAGE)


def _frame(value: Any) -> bytes:
    body = msgspec.msgpack.encode(value)
    return wire.HEADER.pack(len(body)) + body


INVALID: dict[str, bytes] = {
    "no MessagePack": wire.HEADER.pack(9) + b"\xc1" * 9,
    "oversized": wire.HEADER.pack(wire.MAX_FRAME_BYTES + 1),
    "unknown tag": _frame({"type": "Other"}),
    "wrong type": _frame({"type": "StepResult", "outputs": 7}),
    "other direction": wire.encode(Abort(1)),
    "second load": wire.encode(Failed(InferenceError("again"))),
}


class EngineFaults:
    """A folder for `PYTHONPATH` of the front, and the next fault of its engine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._next = folder, folder / "fault"
        (folder / "sitecustomize.py").write_text(CUSTOMIZE.format(path=str(self._next)))

    def arm(self, fault: str) -> None:
        """Let the engine fail once, in this way."""
        written = self._next.with_suffix(".new")
        written.write_text(fault)
        written.replace(self._next)

    @property
    def is_armed(self) -> bool:
        return self._next.exists()


def install(path: str) -> None:
    """Let this process fail as the file says."""
    step, encode, batch = EngineLoop.step, wire.encode, ModelRunner.batch

    def failing_step(self: EngineLoop) -> StepResult:
        fault = _read(path)
        if fault in STATES and STATES[fault](self.engine.scheduler):
            _end(path)
        result = step(self)
        if fault == LAST_TOKEN and any(output.finish_reason is not None for output in result.outputs):
            _end(path)
        return result

    def failing_encode(message: Any) -> bytes:
        frame = encode(message)
        if isinstance(message, StepResult) and message.outputs:
            fault = _read(path)
            if fault == HALF_MESSAGE:
                _end(path, frame[: len(frame) // 2])
            if fault in INVALID:
                os.unlink(path)
                return INVALID[fault] + frame
        return frame

    def failing_batch(self: ModelRunner, *args: Any) -> Any:
        if _read(path) == FAILED_STEP:
            os.unlink(path)
            raise ZeroDivisionError
        return batch(self, *args)

    EngineLoop.step = failing_step  # type: ignore[method-assign]
    ModelRunner.batch = failing_batch  # type: ignore[method-assign]
    wire.encode = failing_encode


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _end(path: str, written: bytes = b"") -> NoReturn:
    """Send the bytes, and die."""
    os.unlink(path)
    if written:
        os.write(int(sys.argv[1]), written)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
