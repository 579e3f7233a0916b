"""Questions of the Berkeley Function-Calling Leaderboard as round trips: schema, call as text, grammar, parser."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.structured_outputs.chat_grammar import answer_grammar
from llm_worker_rbee.tokenizer import ChatTemplate, Detokenizer
from llm_worker_rbee.tokenizer.chat.detection import detect_chat_format
from llm_worker_rbee.tokenizer.chat.events import ChatOptions, Tool
from llm_worker_rbee.tokenizer.chat.parser import ChatParser
from tests.helpers.chat_formats import ANSWERS, USER, GrammarChecker, fold, template_of
from tests.helpers.pypi_files import download

EVERY = int(os.environ.get("BFCL_EVERY", "80"))  # of how many questions one is taken
CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string", "String": "string"}
FORMATS = [name for name in ANSWERS if name != "harmony"]  # whose template prints calls in another way than models


@pytest.fixture(scope="session")
def questions() -> list[tuple[list[Tool], list[tuple[str, dict[str, Any]]]]]:
    """Tools and the calls that answer a question."""
    return list(_read_questions(download("bfcl-eval==2026.3.23")))


def _read_questions(path: Path) -> Iterator[tuple[list[Tool], list[tuple[str, dict[str, Any]]]]]:
    with zipfile.ZipFile(path) as archive:
        for category in CATEGORIES:
            asked = archive.read(f"bfcl_eval/data/BFCL_v4_{category}.json").decode().splitlines()
            answers = archive.read(f"bfcl_eval/data/possible_answer/BFCL_v4_{category}.json").decode().splitlines()
            for question, answer in list(zip(asked, answers, strict=True))[::EVERY]:
                functions, truth = json.loads(question)["function"], json.loads(answer)["ground_truth"]
                tools = [Tool(one["name"], one["description"], _schema(one["parameters"]), True) for one in functions]
                properties = {tool.name: tool.parameters["properties"] for tool in tools}
                calls = [(name, _arguments(values, properties[name])) for one in truth for name, values in one.items()]
                yield tools, calls


def _schema(schema: Any) -> Any:
    """Return a schema with the names of types that JSON Schema has, and without what it does not have."""
    if isinstance(schema, list):
        return [_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _schema(value) for key, value in schema.items() if key not in ("optional", "default", "format")}
    if isinstance(made.get("type"), str):
        made["type"] = TYPES.get(made["type"], made["type"])
    return made


def _arguments(values: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the first of the possible values of each argument, in the order of the schema; "" is left out."""
    first = {key: options[0] for key, options in values.items() if options and options[0] != ""}
    return {key: _value(first[key], schema) for key, schema in schemas.items() if key in first}


def _value(value: Any, schema: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return _arguments(value, schema.get("properties") or {key: {} for key in value})
    if isinstance(value, list):
        return [_value(item, schema.get("items") or {}) for item in value]
    if schema.get("type") == "number" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _call_text(template: ChatTemplate, calls: list[tuple[str, dict[str, Any]]], tools: list[Tool]) -> str:
    """Return calls as the template prints them: what a conversation with them has more than one with a word."""
    functions = [{"name": name, "arguments": json.dumps(values)} for name, values in calls]
    made = [{"id": f"functions.{function['name']}:{i}", "type": "function", "function": function}
            for i, function in enumerate(functions)]  # fmt: skip

    def render(**message: Any) -> str:
        messages = [USER, {"role": "assistant", **message}]
        return template.render(messages, tools=tools, add_generation_prompt=False)

    before, after = render(content="Qx7").split("Qx7")
    return render(content="", tool_calls=made).removeprefix(before).removesuffix(after).strip("\n")


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip(name: str, questions: list[Any], checkers: dict[str, GrammarChecker]) -> None:
    checker, template = checkers["tokens"], template_of(name)
    chat_format = detect_chat_format(template, checker.tokenizer)
    template.rules = chat_format.adaptation()
    closed = chat_format.reasoning.end  # so that the answer has no reasoning
    for tools, expected in questions:
        calls = expected if chat_format.tools.is_parallel else expected[:1]
        text = _call_text(template, calls, tools)
        grammar = answer_grammar(chat_format, ChatOptions(tools=tools, tool_choice="required"), prompt_tail=closed)
        assert grammar is not None
        assert checker.takes(grammar, text), text
        parser, detokenizer = ChatParser(chat_format, tools=tools), Detokenizer(checker.tokenizer)
        events = []
        for token in checker.tokenizer.encode(text, add_special=False, parse_special=True):
            added = detokenizer.push(token)
            events += parser.push_marker(token) if token in parser.marker_ids else parser.push(added)
        found = [(call, json.loads(arguments)) for call, arguments, _ in fold(events + parser.finish())["calls"]]
        assert found == calls, text
