"""What schemas mean: closed objects against an independent validator, and numbers that doubles hold."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import count
from typing import Any, Literal

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from llm_worker_rbee.structured_outputs.json_schema import close_objects, prepare_schema

INTEGER = {"type": "integer"}
GROUPS = ("allOf", "anyOf")  # `oneOf` is closed alike, but of options that are closed other documents have exactly one


def listing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def is_valid(schema: Any, document: Any) -> bool:
    return bool(jsonschema_rs.Draft202012Validator(schema).is_valid(document))


# ---------------------------------------------------------------------- objects

CLOSED = {  # a schema, documents that stay valid, documents that were valid when it was open
    "one object": (listing(a=INTEGER), [{"a": 1}, {}], [{"z": 1}, {"a": 1, "z": 1}]),
    "no property": (listing(), [{}], [{"z": 1}]),
    "names in required": (listing(a=INTEGER) | {"required": ["b"]}, [{"b": 1}, {"a": 1, "b": "x"}], [{"b": 1, "z": 1}]),
    "an object in an object": (listing(a=listing(b=INTEGER)), [{"a": {"b": 1}}], [{"a": {"z": 1}}]),
    "objects in a list": ({"items": listing(a=INTEGER)}, [[{"a": 1}], {"z": 1}], [[{"z": 1}]]),
    "values of a dictionary": ({"additionalProperties": listing(a=INTEGER)}, [{"z": {"a": 1}}], [{"z": {"z": 1}}]),
    "or null": ({"anyOf": [listing(a=INTEGER), {"type": "null"}]}, [None, {"a": 1}], [{"z": 1}]),
    "options are closed each alone": ({"anyOf": [listing(a=INTEGER), listing(b=INTEGER)]}, [{"a": 1}, {"b": 1}],
                                      [{"a": 1, "b": 2}]),
    "one of two": ({"oneOf": [listing(a=INTEGER) | {"required": ["a"]}, {"type": "null"}]}, [{"a": 1}, None],
                   [{"a": 1, "z": 1}]),
    "several at once": ({"allOf": [listing(a=INTEGER), listing(b=INTEGER)]}, [{"a": 1, "b": 2}], [{"a": 1, "z": 1}]),
    "several at once that need names": ({"allOf": [listing(a=INTEGER) | {"required": ["a"]},
                                                   listing(b=INTEGER) | {"required": ["b"]}]},
                                        [{"a": 1, "b": 2}], [{"a": 1, "b": 2, "z": 1}]),
    "options beside properties": (listing(a=INTEGER) | {"anyOf": [listing(b=INTEGER), {"required": ["c"]}]},
                                  [{"a": 1, "b": 2}, {"a": 1, "c": 3}], [{"a": 1, "b": 2, "z": 1}]),
    "what options need": ({"required": ["a"], "anyOf": [listing(a=INTEGER), listing(a=INTEGER, b=INTEGER)]},
                          [{"a": 1, "b": 1}], [{"a": 1, "z": 1}]),
    "a reference": ({"$ref": "#/$defs/A", "$defs": {"A": listing(a=INTEGER)}}, [{"a": 1}], [{"z": 1}]),
    "a reference beside properties": (listing(b=INTEGER) | {"$ref": "#/$defs/A", "$defs": {"A": listing(a=INTEGER)}},
                                      [{"b": 2, "a": 1}], [{"a": 1, "z": 2}]),
    "a definition alone and as a part": (
        listing(alone={"$ref": "#/$defs/A"}, part={"allOf": [{"$ref": "#/$defs/A"}, listing(b=INTEGER)]})
        | {"$defs": {"A": listing(a=listing(c=INTEGER))}},
        [{"alone": {"a": {"c": 1}}, "part": {"a": {"c": 1}, "b": 2}}],
        [{"alone": {"b": 2}}, {"part": {"z": 1}}, {"part": {"a": {"z": 1}}}]),
    "a list of itself": (listing(children={"items": {"$ref": "#"}}), [{"children": [{"children": []}]}],
                         [{"children": [{"z": 1}]}]),
    "a part that is part of a part": (
        {"$ref": "#/definitions/C", "definitions": {
            "A": listing(a=INTEGER), "B": {"allOf": [{"$ref": "#/definitions/A"}, listing(b=INTEGER)]},
            "C": {"allOf": [{"$ref": "#/definitions/B"}, listing(c=INTEGER)]}}},
        [{"a": 1, "b": 2, "c": 3}], [{"a": 1, "z": 1}]),
    "at least one": (listing(a=INTEGER, b=INTEGER) | {"minProperties": 1}, [{"a": 1}], [{"z": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_objects_with_properties_have_no_others(name: str) -> None:
    schema, kept, refused = CLOSED[name]
    before = copy.deepcopy(schema)
    closed = close_objects(schema)
    assert schema == before
    for document in kept:
        assert is_valid(schema, document)
        assert is_valid(closed, document), (closed, document)
    for document in refused:
        assert is_valid(schema, document)
        assert not is_valid(closed, document), (closed, document)


OPEN = {  # and a document that needs a name which `properties` does not have
    "any object": ({"type": "object"}, {"z": 1}),
    "a dictionary": ({"type": "object", "additionalProperties": INTEGER}, {"z": 1}),
    "said to be open": (listing(a=INTEGER) | {"additionalProperties": True}, {"z": 1}),
    "names by a pattern": (listing(a=INTEGER) | {"patternProperties": {"^x-": INTEGER}}, {"x-1": 1}),
    "a dictionary at the same time": ({"allOf": [listing(a=INTEGER), {"additionalProperties": INTEGER}]}, {"z": 1}),
    "more properties than names": (listing(a=INTEGER) | {"minProperties": 2}, {"a": 1, "z": 1}),
    "as many, but one is never valid": (listing(a=False) | {"minProperties": 1}, {"z": 1}),
    "more properties beside options": ({"anyOf": [listing(a=INTEGER), listing(b=INTEGER)], "minProperties": 3},
                                       {"a": 1, "b": 1, "z": 1}),
    "a name that options lack": ({"required": ["z"], "anyOf": [listing(a=INTEGER), listing(b=INTEGER)]}, {"z": 1}),
    "a constant with other names": (listing(a=INTEGER) | {"enum": [{"a": 1, "z": 1}]}, {"a": 1, "z": 1}),
    "a constant of a definition": ({"$ref": "#/$defs/A", "const": {"z": 1}, "$defs": {"A": listing(a=INTEGER)}},
                                   {"z": 1}),
    "a condition": (listing(a=INTEGER) | {"if": {"required": ["a"]}, "then": {"required": ["z"]}}, {"a": 1, "z": 1}),
    "two schemas of an inner value": (
        {"allOf": [listing(x=listing(a=INTEGER) | {"required": ["a"]}),
                   listing(x=listing(z=INTEGER) | {"required": ["z"]})]},
        {"x": {"a": 1, "z": 1}}),
    "two definitions of an inner value": (
        {"allOf": [{"$ref": "#/$defs/A"}, listing(x={"$ref": "#/$defs/B"})],
         "$defs": {"A": listing(x={"$ref": "#/$defs/C"}), "B": listing(a=INTEGER), "C": listing(z=INTEGER)}},
        {"x": {"z": 1, "a": 1}}),
    "two schemas of items": ({"allOf": [{"items": listing(a=INTEGER)}, {"items": listing(z=INTEGER)}]},
                             [{"a": 1, "z": 1}]),
    "a pattern for a name": ({"properties": {"x": listing(a=INTEGER)}, "patternProperties": {"x": listing(z=INTEGER)}},
                             {"x": {"a": 1, "z": 1}}),
    "a reference that is no path": ({"allOf": [{"$ref": "#here"}, listing(a=INTEGER)],
                                     "$defs": {"A": listing(z=INTEGER) | {"$anchor": "here"}}}, {"z": 1, "a": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_objects_that_cannot_be_closed_safely_stay_open(name: str) -> None:
    schema, document = OPEN[name]
    assert is_valid(schema, document)
    assert is_valid(close_objects(schema), document), close_objects(schema)


def test_chain_and_web_of_references_are_closed_in_time() -> None:
    """Definitions that each name the next twice: written out, they would be 2**400."""
    web = {f"d{i}": listing(a={"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, listing(b={"$ref": f"#/$defs/d{i + 1}"})]})
           for i in range(400)}  # fmt: skip
    closed = close_objects({"$ref": "#/$defs/d0", "$defs": {**web, "d400": listing(c=INTEGER)}})
    assert len(json.dumps(closed)) < 300_000
    assert not is_valid(closed, {"a": {"z": 1}})


@pytest.mark.parametrize("schema", [
    {"properties": 5}, {"properties": {"a": 1}, "required": 7}, {"allOf": {"a": 1}, "properties": {}}, {"$ref": 3},
    {"$ref": "#/$defs/A", "$defs": {"A": 5}}, {"anyOf": [1, "x"]}, {"type": 5, "enum": 3}, {"allOf": [{"$ref": "#"}]},
    {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}}, True, False, [], 5,
])  # fmt: skip
def test_keywords_of_the_wrong_type_are_left_to_the_compiler(schema: Any) -> None:
    prepare_schema(schema)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    owner: str | None = None


class Address(BaseModel):
    street: str
    number: int | None = None


class Household(BaseModel):
    address: Address
    second: Address | None = None
    pets: list[Cat | Dog]
    favourite: Cat | Dog = Field(discriminator="kind")
    notes: dict[str, str] = {}


def test_models_of_pydantic_are_closed() -> None:
    document: Any = {"address": {"street": "x"}, "second": None, "pets": [{"kind": "dog"}, {"kind": "cat", "lives": 9}],
                     "favourite": {"kind": "cat", "lives": 9}, "notes": {"any": "name"}}  # fmt: skip
    closed = prepare_schema(Household.model_json_schema())
    assert is_valid(closed, document)
    assert "oneOf" not in closed["properties"]["favourite"]  # the discriminator makes anyOf of it
    for place in (document, document["address"], *document["pets"], document["favourite"]):
        place["z"] = 1
        assert not is_valid(closed, document)
        del place["z"]


# Random schemas. Names of properties whose values are objects are all different: of two schemas of one value inside
# another neither is closed, which has tests of its own above.


def draw_schema(draw: Any, depth: int, fresh: Iterator[int]) -> dict[str, Any]:
    if depth == 0:
        return dict(draw(st.sampled_from([INTEGER, {"type": "string"}, {"type": "null"}, {"const": 1}])))
    kind = draw(st.sampled_from(["object", "object", "group", "beside", "choice", "list", "reference"]))
    if kind == "list":
        return {"type": "array", "items": draw_schema(draw, depth - 1, fresh)}
    if kind == "reference":
        return {"$inline": draw_schema(draw, depth - 1, fresh)}
    parts = [draw_object(draw, depth - 1, fresh) for _ in range(draw(st.integers(1, 2)))]
    parts = [{"$inline": part} if draw(st.booleans()) else part for part in parts]
    if kind == "choice":
        return {"anyOf": [*parts, {"type": "null"}]}
    group = {draw(st.sampled_from(GROUPS)): parts}
    whole = draw_object(draw, depth - 1, fresh)
    return whole if kind == "object" else group | whole if kind == "beside" else group


def draw_object(draw: Any, depth: int, fresh: Iterator[int]) -> dict[str, Any]:
    scalars = draw(st.lists(st.sampled_from("abc"), max_size=2, unique=True))
    properties = {name: draw_schema(draw, 0, fresh) for name in scalars}
    for _ in range(draw(st.integers(0, 1)) if depth else 0):
        properties[f"o{next(fresh)}"] = draw_schema(draw, depth, fresh)
    schema: dict[str, Any] = listing(**properties)
    schema["required"] = draw(st.lists(st.sampled_from([*properties, "r"]), max_size=2, unique=True))
    if draw(st.integers(0, 5)) == 0:
        schema["additionalProperties"] = draw(st.sampled_from([True, {"type": "integer"}]))
    return {key: value for key, value in schema.items() if key != "properties" or value or draw(st.booleans())}


def with_references(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema in which each `$inline` is a definition."""
    if isinstance(schema, list):
        return [with_references(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$inline" in schema:
        name = f"d{len(definitions)}"
        definitions[name] = True
        definitions[name] = with_references(schema["$inline"], definitions)
        return {"$ref": f"#/$defs/{name}"}
    return {key: with_references(value, definitions) for key, value in schema.items()}


def inline(schema: Any) -> Any:
    if isinstance(schema, list):
        return [inline(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return inline(schema["$inline"]) if "$inline" in schema else {key: inline(value) for key, value in schema.items()}


def unevaluated(schema: Any, *, is_part: bool = False) -> Any:
    """Return an inlined schema with `unevaluatedProperties: false` where an object should be closed."""
    keys = schema.keys() & {"properties", "additionalProperties", *GROUPS}
    is_choice = not is_part and len(keys) == 1 and not keys & {"properties", "additionalProperties"}
    needed = set(schema.get("required", ()))
    is_choice = (
        is_choice
        and len(schema.get("allOf", ())) < 2
        and all(
            needed <= {name for part in flatten(option) for name in part.get("properties", ())}
            for key in keys & set(GROUPS)
            for option in schema[key]
        )
    )
    parts = list(flatten(schema))
    has_more = any("additionalProperties" in part for part in parts)
    if has_more and not is_choice and not is_part and len(parts) > 1:
        return schema  # the properties of one part are more of the other's
    marked = dict(schema)
    for key in schema.keys() & set(GROUPS):
        marked[key] = [unevaluated(part, is_part=is_part or not is_choice) for part in schema[key]]
    if "properties" in schema:
        marked["properties"] = {name: unevaluated(inner) for name, inner in schema["properties"].items()}
    if "items" in schema:
        marked["items"] = unevaluated(schema["items"])
    is_listed = any("properties" in part for part in flatten(schema, ("allOf",)))
    is_closed = is_listed and not (is_part or is_choice or has_more)
    return {**marked, "unevaluatedProperties": False} if is_closed else marked


def flatten(schema: Any, keys: tuple[str, ...] = GROUPS) -> Iterator[Any]:
    yield schema
    for key in keys:
        for part in schema.get(key, ()):
            yield from flatten(part, keys)


def draw_document(draw: Any, schema: Any) -> Any:
    """Return a document that may be valid."""
    parts = list(flatten(schema))
    arrays = [part for part in parts if part.get("type") == "array"]
    if arrays:
        return [draw_document(draw, arrays[0]["items"]) for _ in range(draw(st.integers(0, 2)))]
    if not any(part.get("type") == "object" for part in parts) or draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from([1, "x", None]))
    values: dict[str, list[Any]] = {name: [{}] for part in parts for name in part.get("required", ())}
    for name, inner in ((name, inner) for part in parts for name, inner in part.get("properties", {}).items()):
        values.setdefault(name, []).insert(0, inner)
    needed = {name for part in parts for name in part.get("required", ())}
    chosen = [name for name in values if name in needed or draw(st.booleans())]
    return {name: draw_document(draw, draw(st.sampled_from(values[name][:1]))) for name in chosen}


def objects_of(document: Any) -> Iterator[dict[str, Any]]:
    if isinstance(document, dict):
        yield document
    for inner in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from objects_of(inner)


def smaller(document: Any) -> Iterator[Any]:
    """Yield a document without one or another property."""
    for i, place in enumerate(objects_of(document)):
        for name in place:
            copied = copy.deepcopy(document)
            del list(objects_of(copied))[i][name]
            yield copied


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_closing_is_that_of_unevaluated_properties(data: Any) -> None:
    drawn = draw_schema(data.draw, 3, count())
    definitions: dict[str, Any] = {}
    schema = with_references(drawn, definitions) | {"$defs": definitions}
    marked = unevaluated(inline(drawn))
    closed = close_objects(schema)
    for _ in range(3):
        document = draw_document(data.draw, inline(drawn))
        if is_valid(marked, document):
            assert is_valid(closed, document), (schema, closed, document)
            for place in objects_of(document):
                place["z"] = 1
                assert is_valid(closed, document) == is_valid(marked, document), (schema, closed, document)
                del place["z"]
        if is_valid(closed, document):
            assert is_valid(schema, document)
        if is_valid(schema, document):  # then one without what is not named is valid still
            waiting = [document]
            for found in waiting:
                if is_valid(closed, found):
                    break
                waiting += smaller(found)
            else:
                pytest.fail(f"{schema} is not satisfiable when it is closed: {closed}")
