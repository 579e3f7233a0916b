"""Hostile grammars: the time and the memory that they take are bounded, in the process that compiles them and here."""

from __future__ import annotations

import bisect
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.errors import InvalidRequestError, UnavailableError
from llm_worker_rbee.sampling_params import StructuredOutputsParams
from llm_worker_rbee.structured_outputs import grammar_check, grammar_process
from llm_worker_rbee.structured_outputs.grammar import MAX_REASON_CHARS, GrammarCompiler
from llm_worker_rbee.structured_outputs.grammar_check import GrammarChecker
from llm_worker_rbee.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.helpers import tiny_models
from tests.helpers.tiny_models import END, VOCAB

MAX_GROWTH = 160 << 20  # of the memory of a process by one grammar, as docs/structured-outputs.md says
STATUS = Path("/proc/self/status")
STRING = {"type": "string"}
UNBOUNDED: dict[str, dict[str, Any]] = {  # by llguidance
    "multipleOf": {"json": {"type": "integer", "multipleOf": 999_999}},
    "several": {"json": {"type": "object", "properties": {f"p{i}": {"multipleOf": 99_990 + i} for i in range(50)}}},
    "allOf": {"json": {"allOf": [{**STRING, "pattern": f"a.{{{i}}}b"} for i in range(40)]}},
    "patternProperties": {"json": {"type": "object", "patternProperties": {f"^p{i}_": STRING for i in range(500)}}},
    "and": {"grammar": "start: A\nA: /.*a.{20}/ & /.*b.{19}/ & /.*c.{18}/ & ~/.*d.{15}e/"},
    "escape": {"grammar": 'start: %json {"type": "integer", "\\u006dultipleOf": 999999}'},
}
BOUNDED: dict[str, dict[str, Any]] = {  # the largest last: what they free is used again
    "exponential": {"regex": ".*a.{30}"},
    "nested repetitions": {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "classes": {"regex": r"(\w+\s\p{L}*){200}"},
    "10,000 properties": {"json": {"type": "object", "properties": {f"p{i}": STRING for i in range(10_000)}}},
    "1,200 properties": {"json": {"type": "object", "properties": {f"property {i}": STRING for i in range(1200)}}},
    "1 MB": {"json": {"type": "object", "description": "x" * 1_000_000}},
    "enum": {"json": {"enum": [f"{'x' * 90}{i}" for i in range(9_000)]}},
    "choices": {"choice": [f"{i * 7919:x} choice" for i in range(10_000)]},
    "lengths": {"json": {**STRING, "minLength": 1_000_000}},
    "items": {"json": {"type": "array", "items": STRING, "minItems": 1_000_000_000}},
    "recursion": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}},
    "ambiguous": {"grammar": 'start: s\ns: s s | s s s | "a" | "a" s |'},
    "repetitions": {"regex": "(a{1000}){1000}"},
    "long": {"regex": "|".join(f"w{i:x}" for i in range(170_000))[: 1 << 20]},
}


CHAINS: dict[str, dict[str, Any]] = {  # what overflows a stack
    "integer": {"grammar": 'start: %json {"type": "integer", "minimum": -1e31, "maximum": -1e30}'},
    "rules": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + '\nr3000: "a"'},
    "terminals": {"grammar": "start: T0\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(3000)) + '\nT3000: "a"'},
    "GBNF": {"grammar": "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(1500)) + '\nr1500 ::= "a"'},
    "groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
}


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


@pytest.mark.parametrize("name", CHAINS)
def test_grammar_that_crashes_its_process_is_refused(checker: GrammarChecker, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"nest|chain|too big"):
        checker.check(StructuredOutputsParams(**CHAINS[name]))
    checker.check(StructuredOutputsParams(regex="a"))  # by the same process


def test_stack_of_a_check_is_half_of_the_smallest_later(checker: GrammarChecker, tokenizer: Tokenizer) -> None:
    """The longest chain of rules that passes a check compiles and runs on twice the stack."""

    def chain(length: int) -> StructuredOutputsParams:
        rules = "\n".join(f"r{i}: r{i + 1}" for i in range(length))
        return StructuredOutputsParams(grammar=f'start: r0\n{rules}\nr{length}: "a"')

    def passes(length: int) -> bool:
        try:
            checker.check(chain(length))
        except InvalidRequestError:
            return False
        return True

    longest = bisect.bisect_left(range(3000), True, key=lambda length: not passes(length)) - 1
    assert 50 < longest < 2900
    stack = threading.stack_size(2 * grammar_process.MAX_STACK)
    try:
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(_follow, GrammarCompiler(lambda: tokenizer, VOCAB), chain(longest)).result() is None
    finally:
        threading.stack_size(stack)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_grammar_that_llguidance_does_not_bound_is_refused_and_remembered(checker: GrammarChecker, name: str) -> None:
    params = StructuredOutputsParams(**UNBOUNDED[name])
    assert checker.recall(params) is None
    with pytest.raises(InvalidRequestError, match=r"it takes more than .* to compile") as first:
        checker.check(params)
    with pytest.raises(InvalidRequestError) as second:
        checker.recall(params)
    assert str(second.value) == str(first.value)


def test_gbnf_is_checked_as_the_lark_that_engines_compile(checker: GrammarChecker) -> None:
    params = StructuredOutputsParams(grammar='root ::= "x" [0-9]+')
    checked = checker.check(params)
    assert "start:" in str(checked.grammar)
    assert checker.recall(params) == checked == checker.check(checked)


def test_tokens_are_named_by_id_and_by_text() -> None:
    checker = GrammarChecker(1000, {999: "<|call|>"})
    for grammar in ('start: <[999]> "a" <|call|>', "start: <[^999]>* <[5-10]>"):
        checker.check(StructuredOutputsParams(grammar=grammar))
    for grammar in ("start: <[1000]>", "start: <|other|>"):
        with pytest.raises(
            InvalidRequestError, match=r"1000 is not a token id|unknown special token: \"<\|other\|>\"$"
        ):
            checker.check(StructuredOutputsParams(grammar=grammar))
    checker.close()


@pytest.mark.parametrize("name", ["max_tokens", "temperature"])
def test_attribute_that_engines_cannot_hold_is_refused(checker: GrammarChecker, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"attribute {name} .* is not supported"):
        checker.check(StructuredOutputsParams(grammar=f"start: a\na[lazy, {name}=5]: /.*x/"))
    checker.check(StructuredOutputsParams(grammar=f'start: "[{name}=5]" /[{name}=]/'))


def test_invalid_grammar_is_named_by_the_process(checker: GrammarChecker) -> None:
    schema = {"allOf": [{**STRING, "pattern": "a"}], "not": {}}
    with pytest.raises(InvalidRequestError, match='"not"'):
        checker.check(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"grammar": 'root ::= [\\'}, "grammar cannot be used: it ends inside a literal or a class"),
        ({"grammar": 'root ::= "a\\'}, "grammar cannot be used: it ends inside a literal or a class"),
        ({"grammar": 'root ::= "\x7f"'}, "grammar cannot be used: lexer error"),
        ({"json": {"type": "string", "pattern": "^x$", "const": "y"}}, "Unsatisfiable schema: Regex is empty"),
        ({"json": {"allOf": [{"pattern": "^x$", "type": "string"}, {"const": "y"}]}}, "Regex is empty"),
    ],
)  # fmt: skip
def test_reason_is_of_what_the_client_wrote(checker: GrammarChecker, fields: dict[str, Any], reason: str) -> None:
    """No position in a text that it did not write, no expression as llguidance prints it."""
    with pytest.raises(InvalidRequestError) as raised:
        checker.check(StructuredOutputsParams(**fields))
    assert str(raised.value).endswith(reason)


def test_choice_may_have_any_character(checker: GrammarChecker) -> None:
    checker.check(StructuredOutputsParams(choice=[chr(code) for code in range(256)]))


def test_reasons_that_are_remembered_are_short_and_few(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_REMEMBERED", 2)
    params = [
        StructuredOutputsParams(json={"type": "object", "patternProperties": {f"{'a' * 2000}{i}": STRING, "a": STRING}})
        for i in range(3)
    ]
    for each in params:
        with pytest.raises(InvalidRequestError, match="patternProperty") as caught:
            checker.check(each)
        assert len(str(caught.value)) < MAX_REASON_CHARS + 100
    assert checker.recall(params[0]) is None


def test_process_that_is_killed_is_replaced(checker: GrammarChecker, caplog: pytest.LogCaptureFixture) -> None:
    checker.check(StructuredOutputsParams(regex="a"))
    (process,) = checker._idle
    process.kill()
    checker.check(StructuredOutputsParams(regex="b"))
    (another,) = checker._idle
    assert another.pid != process.pid


def test_child_that_is_killed_from_outside_is_retried_and_no_fault_of_the_grammar(
    checker: GrammarChecker, caplog: pytest.LogCaptureFixture
) -> None:
    params = StructuredOutputsParams(**UNBOUNDED["multipleOf"])
    for num_kills, expected in ((1, InvalidRequestError), (2, UnavailableError)):
        with ThreadPoolExecutor(1) as thread:
            checking = thread.submit(GrammarChecker().check, params)
            seen: set[int] = set()
            while len(seen) < num_kills:
                seen |= kill_children(seen)
            with pytest.raises(expected):
                checking.result()
    assert "was killed by SIGKILL: checking again" in caplog.text


def kill_children(but: set[int]) -> set[int]:
    """Kill the children of processes that check grammars; return their ids."""
    program = Path(grammar_process.__file__).name.encode()
    killed = set()
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            status = path.read_text()
            parent, pid = re.search(r"PPid:\t(\d+)", status)[1], int(path.parent.name)  # type: ignore[index]
            commands = [Path(f"/proc/{each}/cmdline").read_bytes() for each in (pid, parent)]
            if pid not in but and all(program in command for command in commands) and is_of_this_process(int(parent)):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        except (OSError, TypeError):
            continue
    return killed


def is_of_this_process(pid: int) -> bool:
    return f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{pid}/status").read_text()


def test_child_that_is_stopped_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that never answers is replaced once, then the worker is at fault."""
    monkeypatch.setattr(grammar_check, "MAX_WAIT_S", 0)
    monkeypatch.setattr(grammar_check, "REPLY_MARGIN_S", 0.02)  # no process starts in it
    with pytest.raises(UnavailableError, match="could not be checked"):
        GrammarChecker().check(StructuredOutputsParams(**UNBOUNDED["multipleOf"]))


def test_limits_stay_within_those_of_the_worker() -> None:
    program = (
        "import resource; from llm_worker_rbee.structured_outputs import grammar_process as process\n"
        "kinds = resource.RLIMIT_CPU, resource.RLIMIT_AS\n"
        "process.MAX_CPU_S, process.MAX_MEMORY = 200, 1 << 50\n"
        "for kind, most in zip(kinds, (100, 1 << 45)): resource.setrlimit(kind, (most, most))\n"
        "process.limit_resources(); print([resource.getrlimit(kind) for kind in kinds])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.decode().strip() == str([(100, 100), (1 << 45, 1 << 45)])


@pytest.mark.skipif(not STATUS.exists(), reason="needs Linux")
def test_memory_of_hostile_grammars_is_bounded() -> None:
    """Each is validated, compiled and followed in one process, which reads its peak."""
    program = f"from {__name__} import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    grown = json.loads(done.stdout)
    assert list(grown) == list(BOUNDED)
    assert max(grown.values()) < MAX_GROWTH, grown
    assert max(grown.values()) > 1 << 20  # the peak is read


def make_tokenizer() -> Tokenizer:
    metadata = {key: getattr(value, "value", value) for key, value in tiny_models.tokenizer_metadata().items()}
    return tokenizer_from_gguf(metadata)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def _read_status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def main() -> None:
    """Print by how many bytes the memory grew with each grammar."""
    tokenizer, grown = make_tokenizer(), {}
    for name, fields in BOUNDED.items():
        params = StructuredOutputsParams(**fields)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _read_status("VmRSS")
        _follow(GrammarCompiler(lambda: tokenizer, VOCAB), params)
        grown[name] = _read_status("VmHWM") - before
    print(json.dumps(grown))


def _follow(compiler: GrammarCompiler, params: StructuredOutputsParams) -> None:
    """Validate and compile a grammar, and take random tokens that it allows; it may be refused, or end."""
    try:
        params = GrammarChecker().check(params)
        one = compiler.compile(params, [END], 500)
    except InvalidRequestError:
        return
    rng, one.masks = random.Random(1), np.zeros((1, one.num_words), np.int32)
    for _ in range(300):
        one.fill([])
        allowed = np.flatnonzero(np.unpackbits(one.masks[0].view(np.uint8), bitorder="little")).tolist()
        if not one.consume(rng.choice(allowed)) or one.is_complete:
            return
