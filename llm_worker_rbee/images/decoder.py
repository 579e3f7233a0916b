"""`ImageDecoder`: bytes of a client's image to the parts that a tower takes, decoded in another process.

Limits are of one image. Errors say what is wrong with the image; the caller names its place in the request.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequestError, MissingDependencyError, UnavailableError
from ..pipe_process import PipeProcess, ProgramError, package_command
from .sizes import ImageSettings, PartPlan, count_tokens

logger = logging.getLogger("llm_worker_rbee")
PROGRAM = f"from {__package__}.decode_process import main; main()"
MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS = 20 << 20, 50_000_000
MAX_CPU_S, MAX_WAIT_S = 20.0, 90.0
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TMPDIR")  # none that holds a key
MAX_REPLY_BYTES = 4096  # of its line
CHANNELS = 3
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """The parts of an image as pixels, (height, width, RGB), before normalization."""

    width: int  # of the picture, upright
    height: int
    plan: PartPlan
    parts: tuple[Pixels, ...]
    digests: tuple[bytes, ...]  # of each: pixels and size
    cpu_s: float = 0.0  # which decoding took

    def num_tokens(self, settings: ImageSettings) -> int:
        return count_tokens(self.plan, settings)


class ImageDecoder:
    """Decodes images with the settings of one model, in a process that is started when it is needed. Safe to use from
    several threads, each of which has a process while it decodes."""

    def __init__(
        self,
        settings: ImageSettings,
        max_bytes: int = MAX_IMAGE_BYTES,
        max_pixels: int = MAX_IMAGE_PIXELS,
        key: bytes = b"",
    ) -> None:
        """`key`, the tower's digest, is part of all digests."""
        self.settings, self.max_bytes, self.max_pixels, self._key = settings, max_bytes, max_pixels, key
        self._idle: list[PipeProcess] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _stop_all, self._idle)

    def decode(self, data: bytes, detail: str = "auto", cpu_s: float = MAX_CPU_S) -> DecodedImage:
        """Return an image's parts; raise for one that is too large, too slow, damaged or of another format."""
        if len(data) > self.max_bytes:
            raise InvalidRequestError(f"the image has {len(data)} bytes, and at most {self.max_bytes} are read")
        header: dict[str, Any] = {"bytes": len(data), "max_pixels": self.max_pixels}
        header |= {"cpu_s": math.ceil(min(cpu_s, MAX_CPU_S)), "settings": self.settings.with_detail(detail)}
        reply, pixels = self._request([json.dumps(header).encode() + b"\n", data])
        if "error" in reply:
            raise InvalidRequestError(f"the image cannot be used: {reply['error']}")
        plan = PartPlan(**{**reply["plan"], "resizes": tuple(map(tuple, reply["plan"]["resizes"]))})
        return replace(_decoded(reply["width"], reply["height"], plan, pixels, self._key), cpu_s=reply["cpu_s"])

    def _request(self, request: Sequence[bytes]) -> tuple[dict[str, Any], bytearray]:
        """Ask a process; one that was ended from outside is replaced once."""
        for is_last in (False, True):
            with self._lock:
                process = self._idle.pop() if self._idle else None
            try:
                if process is None or process.poll() is not None:
                    process = self._start_process()
                answer = process.ask(request, lambda end, child=process: _read_reply(child, end), MAX_WAIT_S)  # type: ignore[misc]
            except ProgramError as error:
                logger.warning("the process that decodes images %s%s", error, "" if is_last else ": decoding again")
                continue
            with self._lock:
                self._idle.append(process)
            return answer
        raise UnavailableError("the image could not be decoded: the process that decodes images was ended from outside")

    def _start_process(self) -> PipeProcess:
        if importlib.util.find_spec("PIL") is None:
            raise MissingDependencyError("images need Pillow: install llm-worker-rbee[vision]")
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        return PipeProcess(package_command(PROGRAM), kept, inherits=False)

    def close(self) -> None:
        """End the processes that wait for work."""
        with self._lock:
            idle, self._idle[:] = list(self._idle), []
        _stop_all(idle)


def _read_reply(process: PipeProcess, deadline: float) -> tuple[dict[str, Any], bytearray]:
    reply: dict[str, Any] = json.loads(process.read_line(deadline, MAX_REPLY_BYTES))
    return reply, process.read(reply.get("bytes", 0), deadline)


def _decoded(width: int, height: int, plan: PartPlan, pixels: bytearray, key: bytes) -> DecodedImage:
    parts, at = list[Pixels](), 0
    for rows, columns in plan.sizes:
        count = rows * columns * CHANNELS
        parts.append(np.frombuffer(pixels, np.uint8, count, at).reshape(rows, columns, CHANNELS))
        at += count
    digests = [hashlib.sha256(key + json.dumps(part.shape).encode() + part.tobytes()).digest() for part in parts]
    return DecodedImage(width, height, plan, tuple(parts), tuple(digests))


def _stop_all(processes: list[PipeProcess]) -> None:
    for process in processes:
        process.stop()
