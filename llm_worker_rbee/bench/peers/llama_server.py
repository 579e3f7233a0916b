"""llama-server as a peer: many requests at once, each in a slot of its own, over loopback.

It is started by us with as many slots as there are requests and ended by us; every wait is bounded. What it gets is the
ids themselves, and the cheapest greedy sampling that it has.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import tempfile
import time
from typing import Any

from . import streams
from .process import PeerError, Task, ending

PAUSE_S = 0.05  # between two looks whether it has loaded the model
SLOT = 256  # the context of a slot is a multiple of this
END_S = 5


class LlamaServer:
    """The program, alive between runs."""

    name = "llama-server"

    def __init__(self, program: str, model: str, threads: int, slots: int, context: int, timeout_s: float) -> None:
        self.version = ""
        each = -(-context // SLOT) * SLOT
        self._command = [program, "-m", model, "-t", str(threads), "-ngl", "0", "-np", str(slots)]
        self._command += ["-c", str(slots * each), "--host", "127.0.0.1"]
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def takes(self, test: Task) -> bool:
        """It is here for several at once."""
        return bool(test.prompts)

    def start(self) -> None:
        """Begin the process and wait until the model is loaded."""
        self._port = _free_port()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            self._said.close()
            raise PeerError(f"{self.name} cannot be started: {error.strerror}") from None
        end = time.monotonic() + self._timeout_s
        while self._get("/health") is None:
            if self._process.poll() is not None:
                raise PeerError(self._ending())
            if time.monotonic() > end:
                raise PeerError(f"{self.name} was not ready within {self._timeout_s:g} s")
            time.sleep(PAUSE_S)
        told = self._get("/props") or {}
        self.version = str(told.get("build_info") or "unknown build")

    def rate(self, test: Task) -> float:
        """All prompts at once; tokens a second while all of them are being answered."""
        common: dict[str, Any] = {
            "n_predict": test.tokens, "temperature": 0.0, "samplers": ["temperature"], "ignore_eos": True,
            "cache_prompt": False, "stream": True,
        }  # fmt: skip
        bodies = [json.dumps({"prompt": list(prompt), **common}).encode() for prompt in test.prompts]
        try:
            made = streams.ask(self._port, "/completion", bodies, self._timeout_s)
            answers = [streams.counted(stream, "tokens_predicted") for stream in made]
            for answer in answers:
                if answer[-1].tokens != test.tokens:
                    raise streams.StreamError(f"it made {answer[-1].tokens} tokens where {test.tokens} were asked for")
            return streams.rate(answers)
        except streams.StreamError as error:
            assert self._process is not None
            ended = self._process.poll() is not None
            raise PeerError(self._ending() if ended else f"{self.name}: {error}") from None

    def close(self) -> None:
        """End the process; it has nothing to save."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()
        self._process = None

    def _get(self, path: str) -> dict[str, Any] | None:
        """The object at a path; None while there is none."""
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout_s)
        try:
            link.request("GET", path)
            answer = link.getresponse()
            found = json.loads(answer.read())
            return found if answer.status == 200 and isinstance(found, dict) else None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            link.close()

    def _ending(self) -> str:
        assert self._process is not None
        status = self._process.wait(self._timeout_s)
        self._said.seek(0)
        return ending(self.name, status, self._said.read())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
