"""Logits from another library, in a process of its own under the interpreter that has it.

The ids are ours, so that all sides read the same tokens. Logits come back through a file in a temporary folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InvalidRequestError, MissingDependencyError, WorkerError

CHILD = Path(__file__).with_name("logits_child.py")
GGUF_ONLY = {"llama-cpp-python"}
TOLD = 2000  # last characters of what a failed child wrote
HIDDEN = ("PYTHONPATH", "PYTHONHOME")  # ours, not the other interpreter's
COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Peer:
    """A library under way; `close` ends its process."""

    limit_s = 600.0  # for loading the model, and for each answer

    def __init__(self, kind: str, python: str, model: Path, context: int, threads: int = 1) -> None:
        """Start the process and wait until it has loaded the model for sequences of up to `context` tokens."""
        if kind in GGUF_ONLY and model.is_dir():
            raise InvalidRequestError(f"{kind} reads GGUF files only, and {model.name} is a folder")
        self.kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="llm-worker-rbee-")
        self._told = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        try:
            self._process = subprocess.Popen(
                [_absolute(python), "-c", CHILD.read_text(), kind, str(model.resolve()), str(context), str(threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._told, encoding="utf-8",
                env={**{k: v for k, v in os.environ.items() if k not in HIDDEN}, **dict.fromkeys(COUNTS, str(threads))},
                cwd=self._folder.name,  # an empty one: our modules must not stand before its own
                start_new_session=True,  # Ctrl-C is for us; we end it
            )  # fmt: skip
        except OSError as error:
            self._folder.cleanup()
            raise MissingDependencyError(f"cannot run {python!r}: {error.strerror}") from None
        try:
            self.version = str(self._reply()["version"])
        except BaseException:
            self.close()
            raise

    def logits(self, ids: list[int], *, last: bool = False) -> NDArray[np.float32]:
        """(positions, vocabulary), or (1, vocabulary) of the last one."""
        file = Path(self._folder.name) / "logits.npy"
        try:
            assert self._process.stdin is not None
            print(json.dumps({"ids": ids, "last": last, "file": str(file)}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            pass  # the reply, or its absence, says why
        self._reply()
        return np.asarray(np.load(file, allow_pickle=False), np.float32)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._told.close()
        self._folder.cleanup()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Timer(self.limit_s, self._process.kill)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        told = _parsed(line) if line else {"error": self._last_words()}
        if "error" in told:
            missing = "No module named" in told["error"]
            hint = ": name an interpreter that has it with --peer-python or --llama-cpp-python" if missing else ""
            raise (MissingDependencyError if missing else WorkerError)(f"{self.kind}: {told['error']}{hint}")
        return told

    def _last_words(self) -> str:
        self._process.wait()
        self._told.seek(0)
        text = self._told.read()[-TOLD:].decode(errors="replace").strip()
        status = self._process.returncode
        if status == -signal.SIGKILL:
            return f"it did not answer within {self.limit_s:g} s, or the system ended it for want of memory"
        if status == -signal.SIGILL:
            return "it uses instructions that this processor refuses: build it anew here, with fewer of them"
        return text.rpartition("\n")[2] or f"its process ended with status {status}"


def _parsed(line: str) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        told = None
    return told if isinstance(told, dict) else {"error": f"it answered {line[:100]!r}: is that a Python?"}


def _absolute(python: str) -> str:
    """A path that holds in any folder, its links unresolved (they make an environment); a bare name is looked up."""
    return str(Path(python).absolute()) if "/" in python else python
