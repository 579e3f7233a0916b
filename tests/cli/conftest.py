"""The real command line, in a child process or in this one, and small models for it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.cli import run_command_line
from llm_worker_rbee.tokenizer.tokenizer import CHAR_TO_BYTE
from llm_worker_rbee.weights.gguf_writer import Typed, write_gguf
from tests.conftest import with_kernels
from tests.helpers.process import restore_signals

ROOT = Path(__file__).parents[2]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDTH, HEADS, LAYERS, CONTEXT = 32, 4, 2, 256

Done = subprocess.CompletedProcess[bytes]
Run = Callable[..., Done]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a command: no colour variables, one thread, this checkout."""
    dropped = ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "COLUMNS", "_TYPER_FORCE_DISABLE_TERMINAL")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | changes


@pytest.fixture(scope="session")
def spawn() -> Run:
    """Run `python -m llm_worker_rbee ...` in a child process with piped streams, and wait for it."""

    def run(*args: str | Path, stdin: bytes = b"", env: dict[str, str] | None = None) -> Done:
        command = [sys.executable, "-m", "llm_worker_rbee", *map(str, args)]
        return subprocess.run(command, input=stdin, capture_output=True, env=environment(**(env or {})), timeout=60)

    return run


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the same in this process, which is quicker, with its streams replaced."""

    def run(*args: str | Path, stdin: bytes = b"") -> Done:
        streams = {
            name: io.TextIOWrapper(io.BytesIO(stdin if name == "stdin" else b""))
            for name in ("stdin", "stdout", "stderr")
        }
        with monkeypatch.context() as patch:
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            status = run_command_line([str(arg) for arg in args])
        written = []
        for name in ("stdout", "stderr"):
            streams[name].flush()
            written.append(streams[name].buffer.getvalue())  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(args, status, *written)

    return run


def vocabulary() -> dict[str, Any]:
    """Return the metadata of a byte-level vocabulary: three control tokens, the 256 bytes, one merge."""
    tokens = [*SPECIALS, *CHAR_TO_BYTE, "he"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed("int32", [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS))),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def model_keys(context: int = CONTEXT) -> dict[str, Any]:
    keys = {
        "context_length": context,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": 2 * WIDTH,
        "attention.head_count": HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    return {"general.architecture": "llama", "general.name": "Tiny", **{f"llama.{k}": v for k, v in keys.items()}}


def model_tensors(vocab_size: int, seed: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return (rng.standard_normal((rows, columns)) * 1.5 / columns**0.5).astype(np.float32)

    tensors = {"token_embd.weight": matrix(vocab_size, WIDTH), "output_norm.weight": np.ones(WIDTH, np.float32)}
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"blk.{i}.{name}.weight"] = matrix(WIDTH, WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            tensors[f"blk.{i}.{name}.weight"] = matrix(2 * WIDTH, WIDTH)
        tensors[f"blk.{i}.ffn_down.weight"] = matrix(WIDTH, 2 * WIDTH)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{name}.weight"] = np.ones(WIDTH, np.float32)
    return tensors


def write_model(path: Path, changes: dict[str, Any] | None = None, context: int = CONTEXT) -> Path:
    keys = {**model_keys(context), **vocabulary(), "tokenizer.chat_template": TEMPLATE, **(changes or {})}
    keys = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(path, keys, model_tensors(len(keys["tokenizer.ggml.tokens"])))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random llama with a byte-level vocabulary and a chat template; its kernels are compiled."""
    return with_kernels(write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same with a context for an answer that takes longer than any test waits."""
    return with_kernels(write_model(tmp_path_factory.mktemp("endless") / "endless.gguf", context=1 << 16))


class Terminal:
    """The command on a pseudo-terminal; every wait is bounded."""

    def __init__(self, *args: str | Path, **env: str) -> None:
        self.master, slave = pty.openpty()
        settings = {"TERM": "xterm-256color", "COLUMNS": "100"} | env
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llm_worker_rbee", *map(str, args)],
            stdin=slave, stdout=slave, stderr=slave, env=environment(**settings), start_new_session=True,
            preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(slave)
        self.seen = b""

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = 30) -> bytes:
        """Read until the text appears; return and drop everything up to its end."""
        wanted, end = text.encode(), time.monotonic() + seconds
        while wanted not in self.seen:
            if not self._read(end - time.monotonic()):
                raise AssertionError(f"{text!r} did not appear in {self.seen[-2000:]!r}")
        before, _, self.seen = self.seen.partition(wanted)
        return before + wanted

    def press_until(self, key: str, text: str) -> None:
        """Press a key, repeatedly: a signal just before Python waits for input is seen with the next one."""
        for _ in range(5):
            self.send(key)
            try:
                self.wait_for(text, 4)
                return
            except AssertionError:
                continue
        raise AssertionError(f"{text!r} did not appear in {self.seen[-2000:]!r}")

    def finish(self, seconds: float = 30) -> tuple[int, bytes]:
        """Read until the command ends; return (exit status, output since the last wait)."""
        end = time.monotonic() + seconds
        while self._read(end - time.monotonic()):
            pass
        return self.process.wait(max(1.0, end - time.monotonic())), self.seen

    def _read(self, seconds: float) -> bool:
        if seconds <= 0 or not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            part = os.read(self.master, 65536)
        except OSError:  # Linux: the other end is closed
            return False
        self.seen += part
        return bool(part)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.master)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C typed into it is a signal."""
    restore_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*args: str | Path, **env: str) -> Terminal:
        opened.append(Terminal(*args, **env))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
