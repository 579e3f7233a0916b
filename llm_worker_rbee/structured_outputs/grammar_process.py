"""Tries grammars in children of its own: a program that grammar_check.py starts. It imports no module of the package.

llguidance bounds most work by its limits, but not all: intersections of expressions and `multipleOf` take minutes and
gigabytes, a chain of rules overflows the stack, and a thread can be neither stopped nor survived. So a grammar is
compiled and followed for a few tokens here first. This process has llguidance imported; it forks a child for each
grammar, whose time, memory and stack the system limits, and reports how the child ended.

JSON lines on standard input and output: {"limits", "slices", "vocab_size", "special"} first, then {"grammar",
"may_be_gbnf"} for each grammar, which gets {"grammar", "reason"}, or {"status", "cpu_s"} of a child that died.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import sys
import time
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_CPU_S, MAX_MEMORY = 2, 128 << 20  # of a child; the memory on top of what it has from this process
# Half of the smallest stack on which a grammar runs later: threads of llguidance's executor have 2 MiB, others as much
# as the system allows a process.
MAX_STACK = 1 << 20
MAX_WAIT_S = 30  # wall time: the machine may be busy
NUM_STEPS, ROLLBACK_INTERVAL = 32, 4
NICE = 5


class Vocabulary:
    """Tokens for llguidance: names of the model's special tokens at their ids, nothing at the others, then the bytes
    and an end of text. The cost of compiling a grammar depends on no other token."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocab_size: int, special: dict[str, str]) -> None:
        self.first_byte = vocab_size
        self.tokens = [b""] * vocab_size + [bytes([byte]) for byte in range(256)] + [b"<end>"]
        self.eos_token_id = vocab_size + 256
        self.special_token_ids = [*map(int, special), self.eos_token_id]
        for token, name in special.items():
            self.tokens[int(token)] = name.encode()

    def __call__(self, text: str | bytes) -> list[int]:
        return [self.first_byte + byte for byte in (text if isinstance(text, bytes) else text.encode())]


class GrammarTrial:
    """Compiles one grammar after another with the same limits and tokens."""

    def __init__(self, library: Any, setup: dict[str, Any]) -> None:
        self._library = library
        self._limits = library.LLParserLimits(**setup["limits"], verbose_errors=False)
        self._has_vocabulary = setup["vocab_size"] > 0  # else tokens that a grammar names are not known
        vocabulary = Vocabulary(setup["vocab_size"], setup["special"])
        size, end = len(vocabulary.tokens), vocabulary.eos_token_id
        self._tokenizer = library.LLTokenizer(vocabulary, n_vocab=size, eos_token=end, slices=setup["slices"])
        self._mask = array("I", bytes(4 * -(-size // 32)))

    def run(self, request: dict[str, Any]) -> dict[str, str]:
        """Return the grammar, GBNF as Lark, and why it is invalid, empty if it is not."""
        grammar = request["grammar"]
        try:
            if request["may_be_gbnf"]:
                grammar = str(self._library.gbnf_to_lark.any_to_lark(grammar))
        except Exception as error:  # the converter of GBNF raises whatever its input leads to
            reasons = {RecursionError: "it is nested too deeply", IndexError: "it ends inside a literal or a class"}
            return {"reason": reasons.get(type(error), str(error)) or "it is not valid GBNF"}
        reason = str(self._library.LLMatcher.validate_grammar(grammar, None, limits=self._limits))
        if not reason:
            matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if self._has_vocabulary and matcher.is_error():
                reason = str(matcher.get_error())
            self._follow(matcher)
        return {"grammar": grammar, "reason": reason}

    def _follow(self, matcher: Any) -> None:
        """Consume random tokens as requests do: forced tokens, masks, copies, some rolled back."""
        address, size = self._mask.buffer_info()
        draws = random.Random(0)
        for step in range(NUM_STEPS):
            if matcher.is_error() or matcher.is_stopped():
                return
            matcher.compute_ff_tokens()
            matcher.unsafe_compute_mask_ptr(address, size * self._mask.itemsize)
            words = [i for i, word in enumerate(self._mask) if word]
            if not words:
                return
            word = draws.choice(words)
            token = 32 * word + draws.choice([bit for bit in range(32) if self._mask[word] >> bit & 1])
            is_rolled_back = step % ROLLBACK_INTERVAL == 0
            if matcher.consume_token(token) and is_rolled_back and not matcher.is_stopped():
                matcher.rollback(1)
                matcher = matcher.deep_copy()


def run_child(trial: GrammarTrial, request: dict[str, Any]) -> bytes:
    """Try a grammar in a child; return its reply, or how it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        limit_resources()
        try:
            reply = trial.run(request)
        except MemoryError:
            os.abort()  # as a failed allocation of llguidance does
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(reply).encode())
        os._exit(0)
    os.close(writer)
    deadline, chunks = time.monotonic() + MAX_WAIT_S, []
    with os.fdopen(reader, "rb", buffering=0) as replies:
        while select.select([replies], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunks.append(replies.read(1 << 20))
            if not chunks[-1]:
                break
        else:
            os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    if status == 0 and any(chunks):
        return b"".join(chunks)
    return json.dumps({"status": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime}).encode()


def _limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit; the present hard limit cannot be raised."""
    _, present = resource.getrlimit(kind)
    if present != resource.RLIM_INFINITY:
        soft, hard = min(soft, present), min(hard, present)
    resource.setrlimit(kind, (soft, hard))


def limit_resources() -> None:
    """Limit this process."""
    _limit(resource.RLIMIT_CORE, 0, 0)
    _limit(resource.RLIMIT_CPU, MAX_CPU_S, MAX_CPU_S + 1)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = MAX_STACK if stack == resource.RLIM_INFINITY else min(MAX_STACK, stack // 2)
    _limit(resource.RLIMIT_STACK, stack, stack)
    statistics = Path("/proc/self/statm")
    if statistics.exists():  # elsewhere the time bounds it
        taken = int(statistics.read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, taken + MAX_MEMORY, taken + MAX_MEMORY)


def main() -> None:
    """Reply to lines until the end of the input."""
    sys.path.insert(0, sys.argv[1])
    import llguidance
    import llguidance.gbnf_to_lark  # is not imported with it

    os.nice(NICE)
    with suppress(OSError):  # the kernel may share the cores among sessions first
        Path("/proc/self/autogroup").write_text(str(NICE))
    trial = GrammarTrial(llguidance, json.loads(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(run_child(trial, json.loads(line)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
