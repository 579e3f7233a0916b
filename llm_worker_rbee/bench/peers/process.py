"""Talking to a peer: a child that answers a line with a line, or llama-bench called anew each time.

Whatever goes wrong there becomes a `PeerError` that says what happened in one line; every wait is bounded.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ...errors import WorkerError


class PeerError(WorkerError):
    """A peer that crashed, hung or said something else than agreed."""

    code = "PEER_FAILED"


class Task(NamedTuple):
    """`pp` or `tg` with a length; with prompts, an answer of that length to all of them at once."""

    kind: str
    tokens: int
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        """`pp512`, `tg128@b16`."""
        return f"{self.kind}{self.tokens}" + (f"@b{len(self.prompts)}" if self.prompts else "")


class Peer(Protocol):
    """Someone to compare with; `version` is known once it has started."""

    name: str
    version: str

    def takes(self, test: Task) -> bool:
        """Whether this is something it can be asked for."""

    def start(self) -> None:
        """Load the model, where it is kept; raises PeerError."""

    def rate(self, test: Task) -> float:
        """Tokens a second of one run."""

    def close(self) -> None:
        """End it."""


class Child:
    """A peer that stays alive between runs, so that loading is paid once."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], timeout_s: float, *, batches: bool = False
    ) -> None:
        self.name, self.version = name, ""
        self._batches = batches
        self._command, self._env, self._timeout_s = list(command), dict(env), timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""

    def takes(self, test: Task) -> bool:
        """Only this worker is asked for several answers at once."""
        return self._batches or not test.prompts

    def start(self) -> None:
        """Begin the process and wait until the model is loaded."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = _started(self.name, self._command, self._env, self._errors.fileno())
        self.version = str(self._answer("version")["version"])

    def rate(self, test: Task) -> float:
        """Ask for one run."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({k: v for k, v in test._asdict().items() if v}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise PeerError(self._ending()) from None
        answer = self._answer("seconds")
        return float(answer.get("tokens", test.tokens)) / float(answer["seconds"])

    def close(self) -> None:
        """End the process; it has nothing to save."""
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._errors.close()
        self._process = None

    def _answer(self, key: str) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        end, source = time.monotonic() + self._timeout_s, self._process.stdout.fileno()
        while b"\n" not in self._read:
            left = end - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                raise PeerError(f"{self.name} did not answer within {self._timeout_s:g} s")
            part = os.read(source, 1 << 16)
            if not part:
                raise PeerError(self._ending())
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
            answer[key]
        except (ValueError, KeyError, TypeError):
            raise PeerError(f"{self.name} answered {line[:200]!r}, which has no {key}") from None
        return answer

    def _ending(self) -> str:
        assert self._process is not None
        status = self._process.wait(self._timeout_s)
        self._errors.seek(0)
        return ending(self.name, status, self._errors.read())


class LlamaBench:
    """The llama-bench program: it loads the model for each run, warms up, and times without loading."""

    name = "llama-bench"

    def __init__(self, program: str, model: str, threads: int, timeout_s: float) -> None:
        self.version = ""
        self._command = [program, "-m", model, "-t", str(threads), "-ngl", "0", "-r", "1", "-o", "json"]
        self._timeout_s = timeout_s

    def takes(self, test: Task) -> bool:
        """One sequence at a time."""
        return not test.prompts

    def start(self) -> None:
        """A first short run shows that it works, and which build it is."""
        self._run(Task("tg", 1))

    def rate(self, test: Task) -> float:
        """Its own average of one run."""
        return self._run(test)

    def close(self) -> None:
        """Nothing is left running."""

    def _run(self, test: Task) -> float:
        prompt, generated = (test.tokens, 0) if test.kind == "pp" else (0, test.tokens)
        try:
            done = subprocess.run(
                [*self._command, "-p", str(prompt), "-n", str(generated)], capture_output=True, timeout=self._timeout_s
            )
        except subprocess.TimeoutExpired:
            raise PeerError(f"{self.name} did not end within {self._timeout_s:g} s") from None
        except OSError as error:
            raise PeerError(f"{self.name} cannot be started: {error.strerror}") from None
        if done.returncode != 0:
            raise PeerError(ending(self.name, done.returncode, done.stderr))
        return self._parsed(done.stdout, prompt, generated)

    def _parsed(self, output: bytes, prompt: int, generated: int) -> float:
        try:
            (row,) = [r for r in json.loads(output) if (r["n_prompt"], r["n_gen"]) == (prompt, generated)]
            self.version = f"build {row['build_number']} ({row['build_commit']})"
            return float(row["avg_ts"])
        except (ValueError, KeyError, TypeError):
            raise PeerError(f"{self.name} did not print the JSON that it is known to print: {output[:200]!r}") from None


def ending(name: str, status: int, errors: bytes) -> str:
    """How a process ended, and its last words."""
    if status < 0:
        known = {s.value: s.name for s in signal.Signals}
        how = f"was ended by {known.get(-status, f'signal {-status}')}"
    else:
        how = f"ended with exit status {status}"
    lines = errors.decode(errors="replace").strip().splitlines()
    return f"{name} {how}" + (f": {lines[-1][:300]}" if lines else "")


def _started(name: str, command: list[str], env: Mapping[str, str], errors: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env)
    except OSError as error:
        raise PeerError(f"{name} cannot be started: {error.strerror}: {command[0]}") from None
