"""JSON Schema's own test suite (draft 2020-12), and schemas of Hypothesis: no invalid document is accepted."""

from __future__ import annotations

import json
import random
import re
import tarfile
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.sampling_params import StructuredOutputsParams
from llm_worker_rbee.structured_outputs.grammar import GrammarCompiler
from llm_worker_rbee.structured_outputs.grammar_check import GrammarChecker
from llm_worker_rbee.structured_outputs.json_schema import LOWER, UPPER
from llm_worker_rbee.tokenizer import tokenizer_from_gguf
from tests.helpers import tiny_models
from tests.helpers.json_schema import fits
from tests.helpers.pypi_archive import fetch_archive
from tests.helpers.tiny_models import END, VOCAB
from tests.structured_outputs.test_json_schema import CLOSED, OPEN

PAGE = Path(__file__).parents[2] / "docs" / "structured-outputs.md"
LEAST_ACCEPTED = 0.93
CHECKER = GrammarChecker()


def accepts(compiler: GrammarCompiler, schema: Any, document: Any, objects: str = "closed") -> bool:
    text = json.dumps(document, ensure_ascii=False).encode()
    params = StructuredOutputsParams(json=schema, additional_properties=objects)
    constraint = compiler.compile(params, [END], len(text) + 1)
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
            CHECKER.check(StructuredOutputsParams(json=case["schema"], additional_properties="open"))
        except InvalidRequestError as error:
            refused |= refused_keywords(str(error).partition("cannot be used: ")[2])
            continue
        CHECKER.check(StructuredOutputsParams(json=case["schema"]))  # closing leaves it satisfiable
        for document in case["tests"]:
            counts[document["valid"]] += 1
            if accepts(compiler, case["schema"], document["data"], "open"):
                assert document["valid"], (name, case, document)
            elif document["valid"]:
                rejected.append(f"- {name}: {case['description']}: {document['description']}")
    page = PAGE.read_text()
    assert listed(page, "refused keywords") == [f"- `{keyword}`" for keyword in sorted(refused)]
    assert listed(page, "rejected documents") == sorted(rejected)
    assert len(rejected) < (1 - LEAST_ACCEPTED) * counts[True]
    assert min(counts.values()) > 200


def accepts_text(schema: Any, text: str) -> bool:
    constraint = walker().compile(StructuredOutputsParams(json=schema), [END], len(text) + 1)
    return all(map(constraint.consume, text.encode())) and bool(constraint.matcher.is_accepting())


@pytest.mark.parametrize("name", CLOSED)
def test_grammar_has_no_property_that_is_not_named(name: str) -> None:
    schema, kept, refused = CLOSED[name]
    CHECKER.check(StructuredOutputsParams(json=schema))
    assert [accepts(walker(), schema, document) for document in kept] == [True] * len(kept)
    assert [accepts(walker(), schema, document) for document in refused] == [False] * len(refused)
    if name != "at least one":  # llguidance has it of closed objects only
        assert [accepts(walker(), schema, document, "open") for document in refused] == [True] * len(refused)


@pytest.mark.parametrize("name", [name for name in OPEN if name != "a condition"])
def test_grammar_is_satisfiable_where_objects_stay_open(name: str) -> None:
    schema, document = OPEN[name]
    try:
        CHECKER.check(StructuredOutputsParams(json=schema, additional_properties="open"))
    except InvalidRequestError:  # llguidance has no such schemas
        return
    CHECKER.check(StructuredOutputsParams(json=schema))
    assert accepts(walker(), schema, document)


HELD = {  # a schema, texts that are accepted, texts that are not
    "integers": ({"type": "integer"}, ["0", "-7", "9000000000000000000", "-9000000000000000000"],
                 ["9000000000000000001", "1" * 20, "-" + "9" * 19]),
    "no maximum": ({"type": "integer", "minimum": 0}, ["0", "8" * 18], ["-1", "9" * 19, "9" * 40]),
    "no minimum": ({"type": "integer", "exclusiveMaximum": 5}, ["4", "-8000000000000000000"], ["5", "-" + "9" * 19]),
    "or null": ({"type": ["integer", "null"]}, ["null", "12"], ["9" * 19]),
    "an option": ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["3", '"x"'], ["9" * 19]),
    "items": ({"type": "array", "items": {"type": "integer"}}, ["[1,2]"], [f"[{'9' * 19}]"]),
    "64 bits": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
                ["9200000000000000000", "-9200000000000000000"], ["9200000000000000001", "9" * 20]),
    "a maximum of 64 bits": ({"type": "integer", "maximum": 2**63 - 1}, ["9" * 18], ["9" * 19]),
    "any number of 64 bits": ({"type": "number", "minimum": -(2**63), "maximum": 2**63 - 1}, ["0.5", "-8"], ["9" * 19]),
    "a minimum beyond the default": ({"type": "integer", "minimum": 91 * 10**17}, ["9100000000000000000"], ["9" * 18]),
    "rounded up": ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 8}, ["9007199254740994"],
                   ["9007199254740992", "9007199254740993"]),
    "rounded down": ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**60 + 1}, [str(2**60)], [str(2**60 + 1)]),
    "fractions": ({"type": "integer", "minimum": 1.5, "maximum": 3.5}, ["2", "3"], ["1", "4"]),
    "an exclusive bound of draft 4": ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, ["6"], ["5"]),
    "numbers": ({"type": "number"}, ["1e-7", "6.02e23", "-0.5", "12"], ["01", "1."]),
    "numbers with a minimum": ({"type": "number", "minimum": 0}, ["0.25", "9" * 17, "7"], ["-1", "9" * 18]),
    "numbers with a wide range": ({"type": "number", "minimum": -1e31, "maximum": 1e31}, ["0.5", "-12"], ["9" * 20]),
    "numbers but 0": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1"], ["0", "0.0", "-0"]),
    "numbers below 3": ({"type": "number", "minimum": 2.5, "exclusiveMaximum": 3}, ["2.75"], ["3", "3.0"]),
    "numbers below -3": ({"type": "number", "minimum": -3.5, "exclusiveMaximum": -3}, ["-3.25"], ["-3", "-3.0"]),
    "numbers close to 0": ({"type": "number", "minimum": 1e-300, "maximum": 2}, ["1.5"], ["0", "0.0"]),
    "multiples": ({"type": "integer", "multipleOf": 5}, ["0", "-15"], ["3"]),
    "constants": ({"const": 2**60}, [str(2**60)], ["1152921504606846977"]),
    "a float that is an integer": ({"type": "integer", "const": 1e2}, ["100"], ["100.0", "1e2"]),
    "integers told apart": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["5", '"x"'], ["9" * 20]),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_numbers_have_bounds_that_doubles_hold(name: str) -> None:
    schema, accepted, refused = HELD[name]
    CHECKER.check(StructuredOutputsParams(json=schema))
    assert [accepts_text(schema, text) for text in accepted] == [True] * len(accepted)
    assert [accepts_text(schema, text) for text in refused] == [False] * len(refused)


REFUSED = {  # a schema, and what its error names
    "a constant over 64 bits": ({"const": 12345678901234567890}, "const has 12345678901234567890"),
    "a constant between two doubles": ({"enum": [1, 2**53 + 1]}, "enum has 9007199254740993"),
    "inside a list": ({"const": [1, {"id": 2**53 + 1}]}, "const has 9007199254740993"),
    "of a property": ({"properties": {"a": {"const": -(2**63)}}}, "const has -9223372036854775808"),
    "a range beyond": ({"type": "integer", "minimum": -1e31, "maximum": -1e30}, "minimum -1e+31 and maximum -1e+30"),
    "a range of numbers beyond": ({"type": "number", "minimum": 1e30}, "minimum 1e+30"),
    "a range without a type": ({"maximum": -(10**400)}, "maximum -1000"),
    "a range between two doubles": ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
                                    "minimum 9007199254740993 and maximum 9007199254740993"),
    "nothing in it": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum 5 and maximum 3"),
    "multiples of 0": ({"type": "integer", "multipleOf": 0}, "multipleOf is 0"),
    "negative multiples": ({"type": "number", "multipleOf": -0.5}, "multipleOf is -0.5"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_cannot_be_held_are_refused_by_name(name: str) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.json cannot be used: ") as caught:
        CHECKER.check(StructuredOutputsParams(json=schema))
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ['{"maximum": 1e999}', '{"const": NaN}', '{"default": -Infinity}'])
def test_numbers_that_are_not_json_are_refused(text: str) -> None:
    for schema in (text, json.loads(text)):
        with pytest.raises(InvalidRequestError, match=r"structured_outputs\.json is not plain JSON: Out of range"):
            StructuredOutputsParams(json=schema)


any_number = st.one_of(
    st.integers(-100, 100), st.integers(-(2**64), 2**64), st.floats(-10, 10),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, -0.0, 5e-324, 2**53, 2**53 + 1, 1e17, 9e18, -(2**63)]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(["integer", "number", ["integer", "null"]]), seed=st.integers(0, 2**32),
       bounds=st.dictionaries(st.sampled_from([*LOWER, *UPPER]), any_number, max_size=3))  # fmt: skip
def test_any_range_gives_numbers_in_it_or_a_clear_error(kind: Any, bounds: dict[str, float], seed: int) -> None:
    schema = {"type": kind, **bounds}
    text, error = None, ""
    try:
        text = random_walk(walker(), schema, seed)
    except InvalidRequestError as refusal:
        error = str(refusal)
    assert not error or all(f"{key} {value}"[:100] in error for key, value in bounds.items()), error
    if text and text.strip() != b"null" and not re.search(rb"e[+-]?[0-9]{4}", text, re.IGNORECASE):
        value, ends = Fraction(text.decode()), {key: Fraction(bound) for key, bound in bounds.items()}
        slack = {key: 0 if isinstance(bound, int) else abs(ends[key]) / 2**51 for key, bound in bounds.items()}
        assert all(value >= ends[key] - slack[key] for key in LOWER if key in ends), (schema, text)  # it reads floats
        assert all(value <= ends[key] + slack[key] for key in UPPER if key in ends), (schema, text)  # to an ulp
        assert value not in [ends.get(LOWER[1]), ends.get(UPPER[1])], (schema, text)


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
