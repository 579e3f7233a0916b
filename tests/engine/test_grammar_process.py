"""Hostile grammars: the time and the memory that they take are bounded, in the process that compiles them and here."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.engine import grammar_process
from llm_worker_rbee.engine.grammar import GrammarCompiler, validate
from llm_worker_rbee.engine.structured_outputs import StructuredOutputsParams
from llm_worker_rbee.errors import InferenceError, InvalidRequestError
from llm_worker_rbee.tokenizer import tokenizer_from_gguf
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


@pytest.mark.parametrize("name", UNBOUNDED)
def test_grammar_that_llguidance_does_not_bound_is_refused_and_remembered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = StructuredOutputsParams(**UNBOUNDED[name])
    with pytest.raises(InvalidRequestError, match=r"it takes more than .* to compile") as first:
        validate(params)
    monkeypatch.setattr(grammar_process.subprocess, "run", None)
    with pytest.raises(InvalidRequestError) as second:
        validate(params)
    assert str(second.value) == str(first.value)


def test_grammar_of_the_same_kind_that_is_small_is_accepted_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"anyOf": [{**STRING, "pattern": "^a"}, {"type": "integer", "multipleOf": 7}], "title": "remembered"}
    validate(StructuredOutputsParams(json=schema))
    monkeypatch.setattr(grammar_process.subprocess, "run", None)
    validate(StructuredOutputsParams(json=schema))


def test_invalid_grammar_is_named_by_the_process() -> None:
    schema = {"allOf": [{**STRING, "pattern": "a"}], "not": {}}
    with pytest.raises(InvalidRequestError, match='"not"'):
        validate(StructuredOutputsParams(json=schema))


def test_reasons_that_are_remembered_are_short_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "MAX_REMEMBERED", 2)
    monkeypatch.setattr(grammar_process, "_reasons", {})
    for i in range(3):
        schema = {"type": "object", "patternProperties": {f"{'a' * 2000}{i}": STRING, "a": STRING}}
        with pytest.raises(InvalidRequestError, match="patternProperty"):
            validate(StructuredOutputsParams(json=schema))
        assert 0 < len(grammar_process._reasons) <= 2
        assert max(map(len, grammar_process._reasons.values())) == grammar_process.MAX_REASON_CHARS


def test_wait_that_is_too_long_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    params = StructuredOutputsParams(json={"type": "integer", "multipleOf": 3, "title": "a busy machine"})
    with monkeypatch.context() as patch:
        patch.setattr(grammar_process, "MAX_WAIT_S", 0)
        with pytest.raises(InvalidRequestError, match="more than 0 s"):
            validate(params)
    validate(params)


def test_process_that_fails_is_no_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = StructuredOutputsParams(json={"type": "integer", "multipleOf": 3, "title": "a process that fails"})
    with monkeypatch.context() as patch:
        patch.setattr(grammar_process, "__file__", "no_such_program.py")
        with pytest.raises(InferenceError, match=r"structured_outputs\.json could not be checked"):
            validate(params)
    assert "no_such_program.py" in caplog.text
    validate(params)


def test_limits_stay_within_those_of_the_worker() -> None:
    program = (
        "import resource; from llm_worker_rbee.engine import grammar_process as process\n"
        "kinds = resource.RLIMIT_CPU, resource.RLIMIT_AS\n"
        "process.MAX_CPU_S, process.MAX_MEMORY = 200, 1 << 50\n"
        "for kind, most in zip(kinds, (100, 1 << 45)): resource.setrlimit(kind, (most, most))\n"
        "process._limit_resources(); print([resource.getrlimit(kind) for kind in kinds])"
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


def _read_status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def main() -> None:
    """Print by how many bytes the memory grew with each grammar."""
    metadata = {key: getattr(value, "value", value) for key, value in tiny_models.tokenizer_metadata().items()}
    tokenizer = tokenizer_from_gguf(metadata)
    grown = {}
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
        validate(params)
        one = compiler.compile(params, [END], 500)
    except InvalidRequestError:
        return
    rng, one.masks = random.Random(1), np.zeros((1, one.num_words), np.int32)
    for _ in range(300):
        one.fill([])
        allowed = np.flatnonzero(np.unpackbits(one.masks[0].view(np.uint8), bitorder="little")).tolist()
        if not one.consume(rng.choice(allowed)) or one.is_complete:
            return
