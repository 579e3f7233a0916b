"""JSON Schema's own test suite (draft 2020-12), and schemas of Hypothesis: no invalid document is accepted."""

from __future__ import annotations

import json
import random
import re
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_worker_rbee.engine.grammar import GrammarCompiler
from llm_worker_rbee.engine.grammar_check import GrammarChecker
from llm_worker_rbee.engine.structured_outputs import StructuredOutputsParams
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.tokenizer import tokenizer_from_gguf
from tests.helpers import tiny_models
from tests.helpers.json_schema import fits
from tests.helpers.pypi_archive import fetch_archive
from tests.helpers.tiny_models import END, VOCAB

PAGE = Path(__file__).parents[2] / "docs" / "structured-outputs.md"
LEAST_ACCEPTED = 0.93
CHECKER = GrammarChecker()


def accepts(compiler: GrammarCompiler, schema: Any, document: Any) -> bool:
    text = json.dumps(document, ensure_ascii=False).encode()
    constraint = compiler.compile(StructuredOutputsParams(json=schema), [END], len(text) + 1)
    return all(map(constraint.consume, text)) and bool(constraint.matcher.is_accepting())


def suite() -> Iterator[tuple[str, Any]]:
    """Yield the file and the schema with its documents of each case."""
    with tarfile.open(fetch_archive("jsonschema==4.25.1", "--no-binary", "jsonschema")) as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            if folder.endswith("json/tests/draft2020-12"):
                file = archive.extractfile(member)
                assert file is not None
                for case in json.load(file):
                    yield name.removesuffix(".json"), case


def refused_keywords(reason: str) -> set[str]:
    """Return the keywords that an error names."""
    if found := re.search(r"Unimplemented keys: \[(.*)\]", reason):
        return set(json.loads(f"[{found[1]}]"))
    for pattern, shown in (
        ("oneOf", "oneOf"), ("Unknown format: (.*)", r"format: \1"),
        ("patternProperty", "patternProperties (overlapping)"),
        ("not present in a registry", "$ref (to another document)"),
        ("Unsatisfiable", "false (no document is valid)"), ("too many digits", "multipleOf (over 9 digits)"),
        ("Expected positive integer", "lengths and counts written as 2.0"),
    ):  # fmt: skip
        if found := re.search(pattern, reason):
            return {found.expand(shown)}
    return {reason}


def listed(page: str, name: str) -> list[str]:
    """Return the lines of a generated list of the page."""
    block = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert block is not None, name
    return block[1].strip().splitlines()


def test_suite_accepts_no_invalid_document_and_most_valid_ones() -> None:
    compiler = walker()
    refused: set[str] = set()
    rejected: list[str] = []
    counts = {True: 0, False: 0}
    for name, case in suite():
        try:
            CHECKER.check(StructuredOutputsParams(json=case["schema"]))
        except InvalidRequestError as error:
            refused |= refused_keywords(str(error).partition("cannot be used: ")[2])
            continue
        for document in case["tests"]:
            counts[document["valid"]] += 1
            if accepts(compiler, case["schema"], document["data"]):
                assert document["valid"], (name, case, document)
            elif document["valid"]:
                rejected.append(f"- {name}: {case['description']}: {document['description']}")
    page = PAGE.read_text()
    assert listed(page, "refused keywords") == [f"- `{keyword}`" for keyword in sorted(refused)]
    assert listed(page, "rejected documents") == sorted(rejected)
    assert len(rejected) < (1 - LEAST_ACCEPTED) * counts[True]
    assert min(counts.values()) > 200


names = st.text('abc "\\é☃', min_size=1, max_size=4)
leaves = st.one_of(
    st.just({"type": "null"}), st.just({"type": "boolean"}),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
              st.integers(-99, 99), st.integers(0, 99)),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
              st.integers(0, 3), st.integers(0, 3)),
    st.builds(lambda some: {"enum": some}, st.lists(names | st.integers(-9, 9), min_size=1, max_size=3, unique=True)),
)  # fmt: skip
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda item, low, more: {"type": "array", "items": item, "minItems": low, "maxItems": low + more},
                  inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(lambda fields: {"type": "object", "properties": fields, "required": list(fields)[:1],
                                  "additionalProperties": False},
                  st.dictionaries(names, inner, max_size=3)),
        st.builds(lambda several: {"anyOf": several}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers(-200, 200) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(schema=schemas, document=values, seed=st.integers(0, 2**32))
def test_any_schema_gives_valid_documents_and_refuses_others(schema: Any, document: Any, seed: int) -> None:
    """A random walk under the masks ends in a valid document; a document is accepted only if it is valid."""
    compiler = walker()
    if accepts(compiler, schema, document):
        assert fits(schema, document, {})
    text = random_walk(compiler, schema, seed)
    if text is not None:
        assert fits(schema, json.loads(text), {}), (schema, text)


Pair = tuple[Any, Any]  # a schema, and a document that is valid by it


def with_bounds(kind: str, low: float, more: float, part: float) -> Pair:
    return {"type": kind, "minimum": low, "maximum": low + more}, low + (round(part * more) if kind == "integer" else 0)


def list_of(pair: Pair, count: int, spare: int) -> Pair:
    return {"type": "array", "items": pair[0], "minItems": count, "maxItems": count + spare}, [pair[1]] * count


def object_of(fields: dict[str, tuple[Pair, bool]]) -> Pair:
    """Fields that are False are neither required nor in the document."""
    schema = {
        "type": "object", "properties": {name: pair[0] for name, (pair, _) in fields.items()},
        "required": [name for name, (_, is_used) in fields.items() if is_used], "additionalProperties": False,
    }  # fmt: skip
    return schema, {name: pair[1] for name, (pair, is_used) in fields.items() if is_used}


def referring(pair: Pair) -> Pair:
    """The schema is referred to twice, once by a list of it."""
    one = {"$ref": "#/$defs/one"}
    schema, document = object_of({"a": ((one, pair[1]), True), "b": (list_of((one, pair[1]), 2, 1), True)})
    return {**schema, "$defs": {"one": pair[0]}}, document


PATTERNS = {"^[a-c]{2,4}$": "abc", "^(x|yy)+z?$": "xyyz", "^[0-9]{3}-[A-Z]$": "123-Q"}
leaf_pairs = st.one_of(
    st.just(({"type": "null"}, None)), st.builds(lambda value: ({"type": "boolean"}, value), st.booleans()),
    st.builds(with_bounds, st.just("integer"), st.integers(-99, 99), st.integers(0, 99), st.floats(0, 1)),
    st.builds(with_bounds, st.just("number"), st.sampled_from([-2.5, 0.0, 0.25, 17.75]), st.just(1.5), st.just(0.0)),
    st.builds(lambda text, spare: ({"type": "string", "minLength": len(text), "maxLength": len(text) + spare}, text),
              names, st.integers(0, 3)),
    st.builds(lambda item: ({"type": "string", "pattern": item[0]}, item[1]), st.sampled_from([*PATTERNS.items()])),
    st.builds(lambda some: ({"enum": some}, some[-1]),
              st.lists(names | st.integers(-9, 9), min_size=1, max_size=3, unique=True)),
)  # fmt: skip
pairs = st.recursive(
    leaf_pairs,
    lambda inner: st.one_of(
        st.builds(list_of, inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(object_of, st.dictionaries(names, st.tuples(inner, st.booleans()), max_size=3)),
        st.builds(lambda one, other: ({"anyOf": [other[0], one[0]]}, one[1]), inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(pair=pairs | pairs.map(referring), seed=st.integers(0, 2**32))
def test_valid_document_is_accepted_and_random_walk_is_valid(pair: Pair, seed: int) -> None:
    """By an independent validator."""
    schema, document = pair
    is_valid = jsonschema_rs.validator_for(schema).is_valid
    assert is_valid(document)
    assert accepts(walker(), schema, document)
    text = random_walk(walker(), schema, seed)
    assert text is None or is_valid(json.loads(text)), (schema, text)


@cache
def walker() -> GrammarCompiler:
    """Return one compiler for all examples."""
    metadata = {key: getattr(value, "value", value) for key, value in tiny_models.tokenizer_metadata().items()}
    tokenizer = tokenizer_from_gguf(metadata)
    return GrammarCompiler(lambda: tokenizer, VOCAB)


def random_walk(compiler: GrammarCompiler, schema: Any, seed: int) -> bytes | None:
    """Return a document of tokens that masks allow; None if it did not end."""
    rng = random.Random(seed)
    constraint = compiler.compile(StructuredOutputsParams(json=schema), [END], 300, close_on_length=True)
    constraint.masks = np.zeros((1, constraint.num_words), np.int32)
    tokens: list[int] = []
    while len(tokens) < 300 and not constraint.is_complete:
        constraint.fill([])
        allowed = np.flatnonzero(np.unpackbits(constraint.masks[0].view(np.uint8), bitorder="little")).tolist()
        tokens.append(rng.choice(allowed))
        if tokens[-1] == END:
            tokens.pop()
            break
        assert constraint.consume(tokens[-1])
    else:
        if not constraint.is_complete:
            return None
    return b"".join(map(tiny_models.token_bytes, tokens))
