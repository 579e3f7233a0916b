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
from llm_worker_rbee.errors import InvalidRequestError
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
def test_grammar_that_llguidance_does_not_bound_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"it takes more than .* to compile"):
        validate(StructuredOutputsParams(**UNBOUNDED[name]))


def test_grammar_of_the_same_kind_that_is_small_is_accepted_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"anyOf": [{**STRING, "pattern": "^a"}, {"type": "integer", "multipleOf": 7}], "title": "remembered"}
    validate(StructuredOutputsParams(json=schema))
    monkeypatch.setattr(grammar_process.subprocess, "run", None)
    validate(StructuredOutputsParams(json=schema))


def test_invalid_grammar_is_named_by_the_process() -> None:
    schema = {"allOf": [{**STRING, "pattern": "a"}], "not": {}}
    with pytest.raises(InvalidRequestError, match='"not"'):
        validate(StructuredOutputsParams(json=schema))


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
