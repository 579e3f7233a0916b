"""Compiles a grammar once in a process of its own, whose time and memory the system limits.

llguidance bounds most work by its limits, but not intersections of expressions (`allOf` of patterns, each pair of
`patternProperties`, `&` and `~` in Lark) and `multipleOf`: a schema of a few lines may take minutes and gigabytes, and
a thread cannot be stopped. The program needs nothing but llguidance, and no vocabulary: what it takes depends on the
grammar alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_CPU_S, MAX_MEMORY = 2, 128 << 20  # for compiling; beside what the interpreter takes
MAX_WAIT_S = 60  # wall time: the machine may be busy
MAX_PROCESSES = 2
MAX_REMEMBERED, MAX_REASON_CHARS = 1000, 300
MULTIPLES, EXPRESSIONS = re.compile("multipleOf"), re.compile("pattern|format")
COMBINATIONS = re.compile(r"allOf|anyOf|oneOf|\$ref|patternProperties")
LARK_COMBINATIONS = re.compile(r"[&~]|\\u")  # an escape may hide a keyword of a schema within Lark
OUT_OF_MEMORY = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)  # a failed allocation aborts; a stack cannot grow

_reasons: dict[bytes, str] = {}  # by the digest of a grammar: what `check` returned
_places = threading.Semaphore(MAX_PROCESSES)


def is_unbounded(text: str, *, is_lark: bool) -> bool:
    """Return whether a grammar has what llguidance does not bound."""
    if MULTIPLES.search(text) or (is_lark and LARK_COMBINATIONS.search(text)):
        return True
    return EXPRESSIONS.search(text) is not None and COMBINATIONS.search(text) is not None


def check(text: str, limits: Mapping[str, int], slices: Sequence[str], library_path: str) -> str:
    """Return why a grammar cannot be used, empty if it can; a grammar that was checked before is not compiled again.

    `library_path` is the folder in which llguidance is installed. Raises `CalledProcessError` if the process fails for
    a reason that is not the grammar's.
    """
    request = json.dumps({"text": text, "limits": dict(limits), "slices": list(slices)}).encode()
    digest = hashlib.sha256(request).digest()
    found = _reasons.get(digest)
    if found is not None:
        return found
    command = [sys.executable, "-I", "-S", str(Path(__file__)), library_path]
    with _places:
        try:
            done = subprocess.run(
                command, input=request, capture_output=True, timeout=MAX_WAIT_S, start_new_session=True, check=False
            )
        except subprocess.TimeoutExpired:  # is not remembered: the machine was busy
            return f"it takes more than {MAX_WAIT_S} s to compile"
    reason = _reason_of(done)
    if len(_reasons) >= MAX_REMEMBERED:
        _reasons.clear()
    _reasons[digest] = reason
    return reason


def _reason_of(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode == -signal.SIGXCPU:
        return f"it takes more than {MAX_CPU_S} s to compile"
    if done.returncode in OUT_OF_MEMORY or (done.returncode > 0 and b"MemoryError" in done.stderr):
        return f"it takes more than {MAX_MEMORY >> 20} MiB of memory to compile"
    done.check_returncode()
    return shorten(done.stdout.decode()) if done.stdout else ""


def shorten(reason: str) -> str:
    """Return the line of an error of llguidance that says what is wrong."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    found = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    text = found or (lines[0] if lines else "no reason given")
    return text if len(text) <= MAX_REASON_CHARS else f"{text[: MAX_REASON_CHARS - 3]}..."


class _Bytes:
    """A vocabulary of the bytes and an end of text, as llguidance wants it."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def compile_grammar(library: Any, text: str, limits: Mapping[str, int], slices: Sequence[str]) -> str:
    """Return why a grammar is invalid; compile one that is not, whatever comes of it with these tokens."""
    bounds = library.LLParserLimits(**limits, verbose_errors=False)
    reason = str(library.LLMatcher.validate_grammar(text, None, limits=bounds))
    if not reason:
        tokenizer = library.LLTokenizer(_Bytes(), n_vocab=257, eos_token=256, slices=slices)
        library.LLMatcher(tokenizer, text, log_level=0, limits=bounds)
    return reason


def _limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit; the present hard limit cannot be raised."""
    _, present = resource.getrlimit(kind)
    if present != resource.RLIM_INFINITY:
        soft, hard = min(soft, present), min(hard, present)
    resource.setrlimit(kind, (soft, hard))


def _limit_resources() -> None:
    _limit(resource.RLIMIT_CORE, 0, 0)
    _limit(resource.RLIMIT_CPU, MAX_CPU_S, MAX_CPU_S + 1)
    statistics = Path("/proc/self/statm")
    if statistics.exists():  # elsewhere the time bounds it
        taken = int(statistics.read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, taken + MAX_MEMORY, taken + MAX_MEMORY)


def main() -> None:
    """Compile the grammar of standard input and print why it is invalid."""
    sys.path.insert(0, sys.argv[1])
    import llguidance

    request = json.loads(sys.stdin.buffer.read())
    _limit_resources()
    sys.stdout.write(compile_grammar(llguidance, request["text"], request["limits"], request["slices"]))


if __name__ == "__main__":
    main()
