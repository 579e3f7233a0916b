"""Answers of a real model to 20 plain JSON schemas, over HTTP: how many are complete, valid and without properties that
the schema does not name.

    python benchmarks/schema_answers.py ours=http://127.0.0.1:8080 llama-server=http://127.0.0.1:8081

Each server answers each schema once, greedily, by the chat route of OpenAI. With `--samples 5` it answers five more
times at a temperature of 0.7: greedy answers of two servers part at the first tie in the last bits, and one of the two
texts may run on. With `--compact` a server is asked again without whitespace (`x-guidance`, an extension of llguidance
that other servers ignore). Needs `jsonschema_rs`.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from typing import Any, NamedTuple

import jsonschema_rs

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))


def obj(*optional: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object whose properties are all required, except the optional ones."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }


def array(items: Any, **more: Any) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": items, **more}


def maybe(schema: Any) -> dict[str, Any]:
    """Return a schema as pydantic writes `T | None = None`."""
    return {"anyOf": [schema, {"type": "null"}], "default": None}


def ref(name: str) -> dict[str, str]:
    """Return a reference to a definition."""
    return {"$ref": f"#/$defs/{name}"}


SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": ("Invent a person.", obj(name=STRING, age=INTEGER)),
    "capital": ("What is the capital of France?", obj(country=STRING, capital=STRING, population=INTEGER)),
    "sentiment": (
        "Classify: 'The battery died after two days.'",
        obj(sentiment={"enum": ["positive", "negative", "neutral"]}, confidence=NUMBER),
    ),
    "recipe": (
        "A recipe for pancakes.", obj(title=STRING, minutes=INTEGER, ingredients=array(STRING), steps=array(STRING)),
    ),
    "address": (
        "The address of the White House.",
        {**obj(name=STRING, address=ref("Address")), "$defs": {"Address": obj(street=STRING, city=STRING, zip=STRING)}},
    ),
    "invoice": (
        "An invoice for two chairs at 40 euros and a table at 120.",
        {
            **obj(number=STRING, lines=array(ref("Line")), total=NUMBER, paid=BOOLEAN),
            "$defs": {"Line": obj(description=STRING, quantity=INTEGER, price=NUMBER)},
        },
    ),
    "event": (
        "Plan a team meeting on 3 March 2026 at 10:00.",
        obj(title=STRING, date={"type": "string", "format": "date"}, attendees=array(STRING), online=BOOLEAN),
    ),
    "optional": (
        "Ada Lovelace, mathematician, no phone.",
        obj("phone", "email", name=STRING, job=STRING, phone=maybe(STRING), email=maybe(STRING)),
    ),
    "review": (
        "Review the film Inception.", obj(title=STRING, rating={**INTEGER, "minimum": 1, "maximum": 5}, summary=STRING),
    ),
    "tasks": (
        "Three tasks for moving house.",
        {
            **obj(tasks=array(ref("Task"))),
            "$defs": {"Task": obj(title=STRING, status=ref("Status"), priority=INTEGER),
                      "Status": {"enum": ["todo", "doing", "done"], "type": "string"}},
        },
    ),
    "point": ("Where is Berlin?", obj(latitude=NUMBER, longitude=NUMBER)),
    "contact": (
        "Extract: mail Bob at bob@example.com.", obj(name=STRING, email={"type": "string", "format": "email"}),
    ),
    "steps": (
        "Solve 8x + 7 = -23.",
        {**obj(steps=array(ref("Step")), answer=STRING), "$defs": {"Step": obj(explanation=STRING, output=STRING)}},
    ),
    "library": (
        "Describe the Python library requests.",
        obj(name=STRING, language=STRING, tags=array(STRING), is_open_source=BOOLEAN, stars=INTEGER),
    ),
    "union": (
        "A pet: a dog called Rex.",
        {
            **obj(pet={"anyOf": [ref("Cat"), ref("Dog")]}),
            "$defs": {"Cat": obj(kind={"const": "cat"}, name=STRING, lives=INTEGER),
                      "Dog": obj(kind={"const": "dog"}, name=STRING, breed=STRING)},
        },
    ),
    "matrix": ("The identity matrix of size 2.", obj(rows=array(array(INTEGER)))),
    "function": (
        "Describe a function that adds two numbers.",
        {
            **obj(name=STRING, parameters=array(ref("Parameter")), returns=STRING),
            "$defs": {"Parameter": obj(name=STRING, type=STRING)},
        },
    ),
    "list": ("Three prime numbers.", array(INTEGER)),
    "tree": (
        "A folder 'src' with a file 'main.py' in it.",
        {**ref("Node"), "$defs": {"Node": obj(name=STRING, children=array(ref("Node")))}},
    ),
    "weather": (
        "The weather in Oslo: snow, -5 degrees.",
        obj(city=STRING, unit={"enum": ["celsius", "fahrenheit"]}, temperature=NUMBER, conditions=STRING),
    ),
}  # fmt: skip


class Outcome(NamedTuple):
    """One answer: whether it is complete and valid, whether the schema names all its properties, and its tokens."""

    is_complete: bool
    is_closed: bool
    num_tokens: int
    text: str


def close(schema: Any) -> Any:
    """Return a schema that allows only the properties that it names; these schemas combine no objects by allOf."""
    if isinstance(schema, list):
        return [close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close(value) for key, value in schema.items()}
    return {**closed, "additionalProperties": False} if schema.get("type") == "object" else closed


def ask(url: str, prompt: str, schema: dict[str, Any], max_tokens: int, seed: int = 0) -> Outcome:
    """Ask a server for an answer to a schema; return the outcome. Seed 0 is greedy, other seeds sample."""
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    messages = [{"role": "user", "content": f"{prompt} Answer in JSON."}]
    sampling = {"seed": seed, "temperature": 0.7} if seed else {"temperature": 0}
    body = {"messages": messages, "max_tokens": max_tokens, **sampling, "response_format": response_format}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        reply = json.load(response)
    choice = reply["choices"][0]
    text, tokens = choice["message"]["content"], reply["usage"]["completion_tokens"]
    plain = {key: value for key, value in schema.items() if key != "x-guidance"}
    try:
        document = json.loads(text)
    except ValueError:
        return Outcome(False, False, tokens, text)
    is_valid = jsonschema_rs.Draft202012Validator(plain, validate_formats=True).is_valid(document)
    is_closed = jsonschema_rs.Draft202012Validator(close(plain)).is_valid(document)
    return Outcome(is_valid and choice["finish_reason"] == "stop", is_closed, tokens, text)


def main() -> None:
    """Print a table with a row for each server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--compact", action="store_true", help="ask each server without whitespace, too")
    parser.add_argument("--samples", type=int, default=0, help="sampled answers in addition to the greedy one")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--show", action="store_true", help="print answers that are not complete and closed")
    options = parser.parse_args()
    print("| server | complete and valid | of these without other properties | tokens | seconds |")
    print("| --- | --- | --- | --- | --- |")
    for server in options.servers:
        name, _, url = server.partition("=")
        for is_compact in (False, True) if options.compact else (False,):
            style = {"x-guidance": {"whitespace_flexible": False}} if is_compact else {}
            for seeds in ((0,), range(1, options.samples + 1)) if options.samples else ((0,),):
                start = time.perf_counter()
                outcomes = [
                    (key, ask(url.rstrip("/"), prompt, {**schema, **style}, options.max_tokens, seed))
                    for key, (prompt, schema) in SCHEMAS.items()
                    for seed in seeds
                ]
                seconds = time.perf_counter() - start
                label = ", ".join([name, *(["compact"] if is_compact else []), *(["sampled"] if seeds[0] else [])])
                report(label, outcomes, seconds, show=options.show)


def report(label: str, outcomes: list[tuple[str, Outcome]], seconds: float, *, show: bool) -> None:
    """Print a row of the table."""
    complete = [outcome for _, outcome in outcomes if outcome.is_complete]
    closed, tokens = sum(outcome.is_closed for outcome in complete), sum(o.num_tokens for _, o in outcomes)
    print(f"| {label} | {len(complete)} of {len(outcomes)} | {closed} | {tokens} | {seconds:.1f} |", flush=True)
    for key, outcome in outcomes if show else ():
        if not (outcome.is_complete and outcome.is_closed):
            print(f"    {key}: {outcome.text[:300]!r}")


if __name__ == "__main__":
    main()
