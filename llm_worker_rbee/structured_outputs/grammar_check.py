"""Checks of grammars: nothing that a client sends reaches llguidance in a process that others share before it was
compiled and followed in a child of grammar_process.py, which may crash.

`GrammarChecker.check` returns a request's constraint as engines compile it, or raises an error that names the reason.
A grammar that was checked before is not checked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import signal
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import MissingDependencyError, UnavailableError
from ..pipe_process import PipeProcess, ProgramError, describe_exit
from ..sampling_params import StructuredOutputsParams
from . import grammar_process
from .grammar import LIMITS, POSITION, SLICES, invalid, shorten, to_grammar
from .grammar_process import MAX_CPU_S, MAX_MEMORY, MAX_WAIT_S

logger = logging.getLogger("llm_worker_rbee.engine")
MAX_REMEMBERED, MAX_REMEMBERED_CHARS = 1000, 16 << 20
REPLY_MARGIN_S = 10.0  # of wall time, for the process to tell of a child that it had to kill
MAX_REPLY_BYTES = 64 << 20
TOO_SLOW = f"it takes more than {MAX_CPU_S} s of processor time to compile"
REASONS = {  # of what a child dies of
    -signal.SIGXCPU: TOO_SLOW,
    -signal.SIGABRT: f"it takes more than {MAX_MEMORY >> 20} MiB of memory to compile",
    **dict.fromkeys((-signal.SIGSEGV, -signal.SIGBUS), "it is nested too deeply, or has a chain of too many rules"),
}
# Literals and expressions of Lark, in which an attribute is text; attributes of rules that engines cannot hold.
LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*')
LARK_ATTRIBUTE = re.compile(r"\[[^\[\]]*?\b(max_tokens|temperature)\s*=")
LARK_IDS = re.compile(r"<\[\^?([\d,\-\s]+)\]>")


class Verdict(NamedTuple):
    """The result of a check: a grammar that replaces GBNF, and the problem of an unusable one, else empty."""

    grammar: str
    reason: str


class GrammarChecker:
    """Checks grammars for one vocabulary, in processes that are started when they are needed. Safe to use from several
    threads, each of which has a process while it checks."""

    def __init__(self, vocab_size: int = 0, special: Mapping[int, str] | None = None) -> None:
        """`special`: names of tokens that a grammar may have, by their ids."""
        setup = {"limits": LIMITS, "slices": list(SLICES), "vocab_size": vocab_size, "special": dict(special or {})}
        self._vocab_size = vocab_size
        self._setup = json.dumps(setup).encode() + b"\n"
        self._idle: list[PipeProcess] = []
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _stop_all, self._idle)

    def start(self) -> None:
        """Start a process ahead of the first check, to import what it needs."""
        with suppress(ProgramError, MissingDependencyError):  # what is wrong is reported when it is needed
            process = self._start_process()
            with self._lock:
                self._idle.append(process)

    def _start_process(self) -> PipeProcess:
        process = PipeProcess([sys.executable, "-I", "-S", grammar_process.__file__, _library_path()])
        process.ask([self._setup], lambda deadline: None, MAX_WAIT_S)
        return process

    def recall(self, params: StructuredOutputsParams) -> StructuredOutputsParams | None:
        """Return the parameters that an earlier `check` returned, or raise its error; None if it was not called yet."""
        with self._lock:
            verdict = self._verdicts.get(_digest(params))
        return None if verdict is None else _apply(params, verdict)

    def check(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return the parameters with GBNF as Lark; raise if a grammar is wrong, not supported, too large or too slow.

        It takes milliseconds for most grammars and up to seconds, so do not call it in an event loop.
        """
        if (problem := self.recall(params)) is not None:
            return problem
        if params.grammar is not None:
            self._check_lark(LARK_TEXT.sub('""', params.grammar))
        text = to_grammar(params)
        verdict = self._try(json.dumps({"grammar": text, "may_be_gbnf": params.kind == "grammar"}).encode() + b"\n")
        if verdict.grammar == text:
            verdict = verdict._replace(grammar="")
        elif verdict.grammar:  # a position in it says nothing to the client
            verdict = verdict._replace(reason=POSITION.sub("", verdict.reason))
        with self._lock:
            self._verdicts[_digest(params)] = verdict
            while len(self._verdicts) > MAX_REMEMBERED or self._num_chars() > MAX_REMEMBERED_CHARS:
                self._verdicts.popitem(last=False)
        return _apply(params, verdict)

    def _check_lark(self, rules: str) -> None:
        """Raise for an attribute that has no effect or cannot be rolled back, and for an id past the vocabulary."""
        if attribute := LARK_ATTRIBUTE.search(rules):
            advice = f"use {attribute[1]} of the request"
            raise invalid("grammar", f"the attribute {attribute[1]} of a rule is not supported: {advice}")
        numbers = (int(number) for ids in LARK_IDS.findall(rules) for number in re.findall(r"\d{1,18}", ids))
        largest = max(numbers, default=0)
        if self._vocab_size and largest >= self._vocab_size:
            raise invalid("grammar", f"{largest} is not a token id (0..{self._vocab_size - 1})")

    def _num_chars(self) -> int:
        return sum(len(verdict.grammar) for verdict in self._verdicts.values())

    def _try(self, request: bytes) -> Verdict:
        """Return the verdict on a grammar; a process that was killed from outside is replaced once."""
        for is_last in (False, True):
            try:
                reply = self._request(request)
                if "reason" in reply:
                    return Verdict(reply.get("grammar", ""), shorten(reply["reason"]) if reply["reason"] else "")
                if reply["status"] in REASONS or reply["cpu_s"] >= MAX_CPU_S:
                    return Verdict("", REASONS.get(reply["status"], TOO_SLOW))
                failure = describe_exit(reply["status"])
            except ProgramError as error:
                failure = str(error)
            logger.warning("the process that checks grammars %s%s", failure, "" if is_last else ": checking again")
        raise UnavailableError("the grammar could not be checked: the process that checks it was ended from outside")

    def _request(self, request: bytes) -> dict[str, Any]:
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        process = self._start_process() if idle is None or idle.poll() is not None else idle
        reply: dict[str, Any] = process.ask(
            [request], lambda end: json.loads(process.read_line(end, MAX_REPLY_BYTES)), MAX_WAIT_S + REPLY_MARGIN_S
        )
        with self._lock:
            self._idle.append(process)
        return reply

    def close(self) -> None:
        """End the processes that wait for work."""
        with self._lock:
            idle, self._idle[:] = list(self._idle), []
        _stop_all(idle)


def _stop_all(processes: list[PipeProcess]) -> None:
    for process in processes:
        process.stop()


def _library_path() -> str:
    """Return the folder in which llguidance is installed; it is not imported here."""
    spec = find_spec("llguidance")
    if spec is None or spec.origin is None:
        raise MissingDependencyError("structured outputs need llguidance: pip install llguidance")
    return str(Path(spec.origin).parents[1])


def _digest(params: StructuredOutputsParams) -> bytes:
    return hashlib.sha256(repr(params).encode(errors="surrogatepass")).digest()


def _apply(params: StructuredOutputsParams, verdict: Verdict) -> StructuredOutputsParams:
    if verdict.reason:
        raise invalid(params.kind, verdict.reason)
    return StructuredOutputsParams(grammar=verdict.grammar) if verdict.grammar else params
