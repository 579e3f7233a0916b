"""The parser of answers: every example in one piece, by characters, by tokens, and cut anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_worker_rbee.tokenizer import Detokenizer, Tokenizer
from llm_worker_rbee.tokenizer.chat.events import Tool, ToolCallStart
from llm_worker_rbee.tokenizer.chat.format import GENERIC_TOOLS, ChatFormat, ReasoningFormat, ToolFormat
from llm_worker_rbee.tokenizer.chat.parser import ChatParser
from llm_worker_rbee.tokenizer.chat.values import without_nulls
from tests.helpers.chat_formats import ANSWERS, TOOLS, Answer, fold

Formats = Callable[[str, str], ChatFormat]
QWEN = ChatFormat(ReasoningFormat("<think>\n", "\n</think>\n\n"), GENERIC_TOOLS)


def parse(
    chat_format: ChatFormat, pieces: Iterable[str], prompt_tail: str = "", *, is_cut: bool = False, **options: Any
) -> dict[str, Any]:
    parser = ChatParser(chat_format, tools=options.pop("tools", TOOLS), prompt_tail=prompt_tail, **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    return fold(events + parser.finish(is_cut=is_cut))


def parse_ids(chat_format: ChatFormat, tokenizer: Tokenizer, ids: Iterable[int], prompt_tail: str) -> dict[str, Any]:
    """Parse tokens as a generation does."""
    parser = ChatParser(chat_format, tools=TOOLS, prompt_tail=prompt_tail)
    detokenizer = Detokenizer(tokenizer)
    events = []
    for token in ids:
        text = detokenizer.push(token)
        events += parser.push_marker(token) if token in parser.marker_ids else parser.push(text)
    return fold(events + parser.push(detokenizer.finish()) + parser.finish())


def parts(parsed: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    assert all(is_complete for _, _, is_complete in parsed["calls"])
    calls = [(name, json.loads(arguments)) for name, arguments, _ in parsed["calls"]]
    return parsed["reasoning"], parsed["content"], calls


def expected(answer: Answer) -> tuple[str, str, list[tuple[str, Any]]]:
    return answer.reasoning, answer.content, answer.calls


@pytest.mark.parametrize("name", ANSWERS)
def test_parse_whole_answer(name: str, format_of: Formats) -> None:
    answer = ANSWERS[name]
    assert parts(parse(format_of(name, "text"), [answer.text], answer.prompt_tail)) == expected(answer)


@pytest.mark.parametrize("name", ANSWERS)
def test_parse_tokens(name: str, format_of: Formats, marker_tokenizer: Tokenizer) -> None:
    """Markers are tokens of their own here."""
    answer = ANSWERS[name]
    ids = marker_tokenizer.encode(answer.text, add_special=False, parse_special=True)
    parsed = parse_ids(format_of(name, "tokens"), marker_tokenizer, ids, answer.prompt_tail)
    assert parts(parsed) == expected(answer)


@pytest.mark.parametrize("name", ANSWERS)
def test_parse_any_pieces_gives_same_events(name: str, format_of: Formats) -> None:
    answer = ANSWERS[name]
    chat_format, text = format_of(name, "text"), answer.text
    whole = parse(chat_format, [text], answer.prompt_tail)
    assert parse(chat_format, text, answer.prompt_tail) == whole
    for i in range(1, len(text)):
        assert parse(chat_format, [text[:i], text[i:]], answer.prompt_tail) == whole, text[:i]


@pytest.mark.parametrize("name", ANSWERS)
def test_parse_cut_answer_is_beginning_of_whole(name: str, format_of: Formats) -> None:
    """At each character: what was given before the cut is the beginning of the whole, and `finish` loses nothing."""
    answer = ANSWERS[name]
    chat_format, text = format_of(name, "text"), answer.text
    whole = parse(chat_format, [text], answer.prompt_tail)
    parser, events = ChatParser(chat_format, tools=TOOLS, prompt_tail=answer.prompt_tail), []
    for i, char in enumerate(text):
        events += parser.push(char)
        given_now = fold(events)
        assert whole["reasoning"].startswith(given_now["reasoning"])
        assert whole["content"].startswith(given_now["content"])
        for call, whole_call in zip(given_now["calls"], whole["calls"], strict=False):
            assert call[0] == whole_call[0]
            assert whole_call[1].startswith(call[1])
        cut = parse(chat_format, [text[: i + 1]], answer.prompt_tail)
        assert cut["reasoning"].startswith(given_now["reasoning"])
        assert [call[:2] for call in cut["calls"][: len(given_now["calls"]) - 1]] == [
            call[:2] for call in given_now["calls"][:-1]
        ]
        if not cut["calls"] and name not in ("harmony", "gemma4"):  # what is not recognised yet is content
            rest = text[: i + 1].rpartition("think>")[2].strip()
            assert rest in cut["content"] or cut["reasoning"].strip().endswith(rest) or "<think>".startswith(rest)


@pytest.mark.parametrize("name", [name for name in ANSWERS if name not in ("llama3", "pythonic")])
def test_parse_marker_as_text_is_content_where_it_is_a_token(
    name: str, format_of: Formats, marker_tokenizer: Tokenizer
) -> None:
    """Text that spells a marker was not written as a marker."""
    answer, chat_format = ANSWERS[name], format_of(name, "tokens")
    text = answer.text[answer.text.rfind("</think>") + len("</think>") :] if answer.reasoning else answer.text
    if chat_format.token_ids and name not in ("harmony", "qwen3_coder", "lfm2"):
        parsed = parse(chat_format, [text])
        assert parsed["calls"] == []
        assert parsed["content"] == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f"', "}", "\n", "a ",
                                 '"arguments": {', '"', "\\", "é", "{}", ", ", "<tool", "<"]), max_size=12),
       st.integers(0, 60))  # fmt: skip
def test_parse_any_text_in_any_pieces(words: list[str], cut: int) -> None:
    text = "".join(words)
    whole = parse(QWEN, [text])
    assert parse(QWEN, [text[:cut], text[cut:]]) == whole
    assert parse(QWEN, list(text)) == whole


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_parse_text_without_markers_is_content(text: str) -> None:
    assert parse(QWEN, [text])["content"] == text.replace("<tool_call>", "")


@pytest.mark.parametrize("markers", ["text", "tokens"])
@pytest.mark.parametrize("name", ANSWERS)
def test_parse_answer_cut_by_a_limit_shows_no_markup(name: str, markers: str, format_of: Formats) -> None:
    """At each character and marker: content and reasoning are beginnings of the whole, and so are calls."""
    answer, chat_format = ANSWERS[name], format_of(name, markers)
    ids = dict(chat_format.token_ids)
    parts_of_text = re.split(f"({'|'.join(map(re.escape, ids))})", answer.text) if ids else [answer.text]
    units = [unit for part in parts_of_text for unit in ([ids[part]] if part in ids else part)]
    for stop in range(len(units)):
        parser, events = ChatParser(chat_format, tools=TOOLS, prompt_tail=answer.prompt_tail), []
        for unit in units[:stop]:
            events += parser.push_marker(unit) if isinstance(unit, int) else parser.push(unit)
        cut = fold(events + parser.finish(is_cut=True))
        assert answer.content.startswith(cut["content"].rstrip()), units[:stop]
        assert answer.reasoning.startswith(cut["reasoning"].rstrip()), units[:stop]
        for (called, arguments, is_complete), (expected_name, value) in zip(cut["calls"], answer.calls, strict=False):
            assert called == expected_name
            assert not is_complete or json.loads(arguments) == value


def test_parse_text_cut_by_a_limit_stays_content(format_of: Formats) -> None:
    for text in ("a <tool_call> tag and mo", "one < two", '{"answer": 4'):
        assert parse(QWEN, [text], is_cut=True)["content"] == text
    for text in ('{"answer": {"a": 4', "[1, 2, 3"):
        for name in ("llama3", "pythonic"):
            assert parse(format_of(name, "text"), list(text), is_cut=True)["content"] == text


JSON_CALLS = {
    '{"name": "get_weather", "arguments": {"city": "x", "days": 2}}': {"city": "x", "days": 2},
    '```json\n{"name": "get_weather", "arguments": {"city": "x"}}\n```': {"city": "x"},
    '```\n{\n  "name": "get_weather",\n  "parameters": {\n    "city": "x"\n  }\n}\n```\n': {"city": "x"},
    '\n\n{"name":"get_weather","arguments":{"city":"x","flag":True,}} ': {"city": "x", "flag": True},
    '{"name": "get_weather", "arguments": {"city": "x", "days": null}}': {"city": "x"},  # an optional one
}


@pytest.mark.parametrize("text", JSON_CALLS)
def test_parse_answer_that_is_a_call_as_json(text: str, format_of: Formats) -> None:
    for pieces in ([text], list(text)):
        for before in ("", "<think>\nhm\n</think>\n\n"):
            parsed = parse(QWEN, [before, *pieces], parse_json_calls=True)
            assert parts(parsed) == ("hm" if before else "", "", [("get_weather", JSON_CALLS[text])])
        if "```" in text:
            parsed = parse(format_of("llama3", "text"), pieces, parse_json_calls=True)
            assert parts(parsed)[2] == [("get_weather", JSON_CALLS[text])]
        assert parse(QWEN, pieces)["calls"] == []


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"a": {"type": "string"}}}, {"b": None}),
        ({"properties": {"a": {"type": ["string", "null"]}}}, {"a": None, "b": None}),
        ({"properties": {"a": {"type": "string"}}, "required": ["a"]}, {"a": None, "b": None}),
        ({"properties": {"a": {"type": "string"}}, "required": [{}, ["a"]]}, {"b": None}),
        ({"properties": {"a": {"type": "string"}}, "required": 3}, {"b": None}),
        ({"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"a": {"type": "string"}}}}}, {"b": None}),
        ({"properties": ["a"]}, {"a": None, "b": None}), (True, {"a": None, "b": None}),
    ],
)  # fmt: skip
def test_null_of_an_optional_argument_is_left_out(schema: Any, expected: dict[str, None]) -> None:
    assert without_nulls({"a": None, "b": None}, schema) == expected


NO_JSON_CALLS = [  # the text up to which it is held back, and the rest
    ('{"name": "get_weather", "arguments": {"city": 3}', "}"),  # not valid by the schema
    ('{"name": "get_weather", "arguments": {"town": "x"}', "}"),
    ('{"name": "get_weather", "arguments": {"city": null}', "}"),
    ('{"name": "get_weather", "arguments": {"city": "x", "days": [2]}', "}"),
    ('{"name": "get_wi', 'nd", "arguments": {}}'),
    ('{"name": "A', 'da", "age": 36}'),
    ('{"no', '": 1}'),
    ("```ja", "vascript\nf();\n```"),
    ("```p", "ython\nf()\n```"),
    ('{"name": "get_time", "arguments": {"a" x', "}}"),
    ('{"name": "get_time", "arguments": {}}\nI', " call it."),
    ('```json\n{"name": "get_time", "arguments": {}}\n```\nI', " call it."),
]


@pytest.mark.parametrize(("held", "rest"), NO_JSON_CALLS)
def test_parse_json_that_is_no_call_is_held_back_no_longer_than_needed(held: str, rest: str) -> None:
    parser, events = ChatParser(QWEN, tools=TOOLS, parse_json_calls=True), []
    for char in held[:-1]:
        assert parser.push(char) == []
    events += parser.push(held[-1])
    assert fold(events)["content"] == held
    events += parser.push(rest) + parser.finish()
    assert fold(events) == {"reasoning": "", "content": held + rest, "calls": []}


@pytest.mark.parametrize("is_cut", [False, True])
def test_parse_json_call_that_ends_early_is_content(is_cut: bool) -> None:
    text = '```json\n{"name": "get_weather", "arguments": {"city": "x"}'
    for stop in range(1, len(text)):
        parsed = parse(QWEN, list(text[:stop]), is_cut=is_cut, parse_json_calls=True)
        assert parsed == {"reasoning": "", "content": text[:stop], "calls": []}


MALFORMED = [
    "a <tool_call> tag",
    '<tool_call>\n{"foo": 1}\n</tool_call>',
    "<tool_call>[1, 2]</tool_call>",
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "no json"}</tool_call>',
    "<tool_call></tool_call> and more",
    "</tool_call> alone",
    "<tool_call",
    "<tool_call>",
    '<tool_call>\n{"name": "get_we',
]


@pytest.mark.parametrize("text", MALFORMED)
def test_parse_text_that_is_no_call_stays_content(text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(QWEN, pieces) == {"reasoning": "", "content": text, "calls": []}


LENIENT = {
    '<tool_call>{"arguments": {"city": "x"}, "name": "get_weather"}</tool_call>': {"city": "x"},
    '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"x\\"}"}</tool_call>': {"city": "x"},
    '<tool_call>{"name": "get_weather"}</tool_call>': {},
    '<tool_call>{"name": "get_weather", "arguments": null}</tool_call>': {},
    '<tool_call>{"name": "get_weather", "parameters": {"a": [1, {"b": "]}"}]}}': {"a": [1, {"b": "]}"}]},
    '<tool_call>{"type": "function", "function": {"name": "get_weather", "arguments": {"n": 1}}}</tool_call>': {"n": 1},
}


@pytest.mark.parametrize("text", LENIENT)
def test_parse_variants_of_json_calls(text: str) -> None:
    parsed = parse(QWEN, list(text))
    assert parts(parsed) == ("", "", [("get_weather", LENIENT[text])])


def test_parse_cut_call_keeps_its_arguments() -> None:
    text = 'x<tool_call>{"name": "get_weather", "arguments": {"city": "K\\"'
    assert parse(QWEN, [text]) == {
        "reasoning": "",
        "content": "x",
        "calls": [["get_weather", '{"city": "K\\"', False]],
    }


REPAIRED = {
    '{"a": True, "b": [False, None]}': {"a": True, "b": [False, None]},
    '{"a": 1,}': {"a": 1},
    '{"a": [1, 2, ], }': {"a": [1, 2]},
    '{"a": "x\ny\t"}': {"a": "x\ny\t"},
    '{"a": "\\d\\u12"}': {"a": "\\d\\u12"},
    '{"a": "\\u00e9\\n\\""}': {"a": 'é\n"'},
}


@pytest.mark.parametrize("arguments", REPAIRED)
def test_parse_repairs_arguments(arguments: str, format_of: Formats) -> None:
    for text in (f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>',
                 f'<tool_call>{{"arguments": {arguments}, "name": "f"}}</tool_call>'):  # fmt: skip
        for pieces in ([text], list(text)):
            assert parts(parse(QWEN, pieces)) == ("", "", [("f", REPAIRED[arguments])])
    text = f"<|channel|>commentary to=functions.f<|message|>{arguments}<|call|>"
    assert parts(parse(format_of("harmony", "text"), list(text), "<|start|>assistant"))[2] == [
        ("f", REPAIRED[arguments])
    ]


NOT_JSON = [
    '{"a": New York}',
    '{"a": NaN}',
    '{"a": -Infinity}',
    "{'a': 1}",
    "{a: 1}",
    '{"a" 1}',
    '{"a": 01}',
    '{,"a": 1}',
]


@pytest.mark.parametrize("arguments", NOT_JSON)
def test_parse_call_without_valid_arguments_stays_content(arguments: str, format_of: Formats) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    for pieces in ([text], list(text)):
        assert parse(QWEN, pieces) == {"reasoning": "", "content": text, "calls": []}
    chat_format = format_of("harmony", "text")
    for body in (arguments, "not json"):
        text = f"<|channel|>commentary to=functions.f<|message|>{body}<|call|>"
        for pieces in ([text], list(text)):
            assert parse(chat_format, pieces, "<|start|>assistant") == {"reasoning": "", "content": body, "calls": []}


CLOSED = {
    '{"a": [1}': ({"a": [1]}, "}}"),
    '{"a": 1, "b": NaN}': ({"a": 1}, ', "b": NaN}}'),
    '{"a": "x", b}': ({"a": "x"}, ", b}}"),
    '{"a": {"b": "c"': ({"a": {"b": "c"}}, ""),  # the brackets of the call itself close it
    '{"a": "x" "b"}': ({"a": "x"}, '"b"}}'),
}


@pytest.mark.parametrize("arguments", CLOSED)
def test_parse_malformed_arguments_are_closed(arguments: str, format_of: Formats) -> None:
    """What was given becomes valid JSON, and the end marker of the call is no content."""
    value, rest = CLOSED[arguments]
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    for pieces in ([text], list(text)):
        parsed = parse(QWEN, pieces)
        assert parts(parsed)[2] == [("f", value)]
        assert parsed["content"].strip() == rest
    text = f"<|channel|>commentary to=functions.f<|message|>{arguments}<|call|>"
    assert parts(parse(format_of("harmony", "text"), list(text), "<|start|>assistant"))[2] == [("f", value)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(['"', '"a"', ":", ",", "{", "}", "[", "]", "1", "-", "True", "x", "\\", "\n", "nul"]),
                max_size=14))  # fmt: skip
def test_parse_given_arguments_are_always_json(words: list[str]) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{{"".join(words)}'
    whole = parse(QWEN, [text])
    assert parse(QWEN, list(text)) == whole
    for _, arguments, is_complete in whole["calls"]:
        assert not is_complete or isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", [name for name in ANSWERS if name not in ("harmony", "glm")])
def test_parse_cut_in_end_marker_is_no_content(name: str, format_of: Formats) -> None:
    answer, chat_format = ANSWERS[name], format_of(name, "text")
    end = chat_format.tools.section_end.strip() or chat_format.tools.call_end.strip()
    text = answer.text.rstrip()
    for cut in range(1, len(end.lstrip("]} \n")) - 1 if text.endswith(end) else 1):  # "<" may begin an argument
        parsed = parse(chat_format, [text[:-cut]], answer.prompt_tail)
        assert parts(parsed) == expected(answer), text[:-cut]


def test_parse_key_that_is_there_twice_makes_one_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}}</tool_call>'
    for pieces in ([text], list(text)):
        assert parts(parse(QWEN, pieces)) == ("", "", [("f", {})])


def test_parse_pythonic_call_begins_with_a_key(format_of: Formats) -> None:
    chat_format = format_of("pythonic", "text")
    for text in ('[get_weather("pos")]', '[get_weather("pos")] and x = 3'):
        for pieces in ([text], list(text)):
            assert parse(chat_format, pieces) == {"reasoning": "", "content": text, "calls": []}
    values = {"nan": "nan", "NaN": "NaN", "[Infinity]": "[Infinity]", "1e999": "1e999", "[1e999]": "[1e999]"}
    for value, found in values.items():
        text = f"[get_weather(city={value})]"
        assert parts(parse(chat_format, list(text)))[2] == [("get_weather", {"city": found})]


def test_parse_unknown_name_is_a_call_except_without_markers(format_of: Formats) -> None:
    text = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    assert parts(parse(QWEN, [text]))[2] == [("other", {})]
    text = '{"name": "other", "parameters": {}}'
    assert parse(format_of("llama3", "text"), list(text))["content"] == text


def test_parse_without_tools_leaves_calls_as_content() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    assert parse(QWEN, [text], parse_tools=False)["content"] == text
    assert parse(QWEN, [text], tools=[])["content"] == text


def test_parse_call_ids_are_unique_or_the_models_own(format_of: Formats) -> None:
    parser = ChatParser(QWEN, tools=TOOLS)
    events = parser.push(ANSWERS["plain"].text) + parser.finish()
    ids = [event.id for event in events if isinstance(event, ToolCallStart)]
    assert len(set(ids)) == 2
    assert all(one.startswith("call_") for one in ids)
    parser = ChatParser(format_of("kimi", "text"), tools=TOOLS)
    events = parser.push(ANSWERS["kimi"].text)
    ids = [event.id for event in events if isinstance(event, ToolCallStart)]
    assert ids == ["functions.get_weather:0", "functions.get_time:1"]


TAGGED = {
    "3": 3, "3.5": 3.5, "true": True, "True": True, "None": None, '{"a": 1}': {"a": 1}, "[1, 2]": [1, 2],
    "{'a': 1}": {"a": 1}, "not json": "not json", "": "",
    "NaN": "NaN", "[NaN]": "[NaN]", "{'a': 1e999}": "{'a': 1e999}",
}  # fmt: skip


@pytest.mark.parametrize("text", TAGGED)
def test_parse_tagged_value_by_schema(text: str, format_of: Formats) -> None:
    call = f"<tool_call>\n<function=get_weather>\n<parameter=KEY>\n{text}\n</parameter>\n</function>\n</tool_call>"
    chat_format = format_of("qwen3_coder", "text")
    (found,) = parts(parse(chat_format, list(call.replace("KEY", "deep"))))[2]
    assert found[1] == {"deep": TAGGED[text]}
    (found,) = parts(parse(chat_format, list(call.replace("KEY", "city"))))[2]
    assert found[1] == {"city": text}


def test_parse_tagged_value_by_reference(format_of: Formats) -> None:
    integer, loop = {"$ref": "#/$defs/int"}, {"$ref": "#/$defs/loop"}
    schema = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/a~1b"}, "m": {"anyOf": [integer]}, "s": loop, "t": {"$ref": "#int"}},
        "$defs": {"a/b": integer, "int": {"type": "integer"}, "loop": loop},
    }
    chat_format = format_of("qwen3_coder", "text")
    text = "".join(f"<parameter={key}>\n3\n</parameter>\n" for key in "nmst")
    text = f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>"
    parsed = parse(chat_format, [text], tools=[Tool("f", parameters=schema)])
    assert parts(parsed)[2] == [("f", {"n": 3, "m": 3, "s": "3", "t": "3"})]


def test_parse_tagged_value_by_options_that_refer_to_themselves(format_of: Formats) -> None:
    loop = [{"$ref": "#/$defs/a"}] * 100
    schema = {
        "properties": {"n": {"$ref": "#/$defs/a"}, "s": {"anyOf": [{"$ref": "#/properties/s"}] * 100}},
        "$defs": {"a": {"anyOf": [*loop, {"type": "integer"}], "oneOf": loop}},
    }
    text = "".join(f"<parameter={key}>\n3\n</parameter>\n" for key in "ns")
    text = f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>"
    parsed = parse(format_of("qwen3_coder", "text"), [text], tools=[Tool("f", parameters=schema)])
    assert parts(parsed)[2] == [("f", {"n": 3, "s": "3"})]


def test_parse_reasoning_open_in_prompt_and_cut() -> None:
    tail = "<|im_start|>assistant\n<think>\n"
    assert parse(QWEN, ["hm\n"], tail) == {"reasoning": "hm\n", "content": "", "calls": []}
    assert parse(QWEN, ["hm\n</think>\n\nyes"], tail) == {"reasoning": "hm", "content": "yes", "calls": []}
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert parse(QWEN, ["yes"], closed) == {"reasoning": "", "content": "yes", "calls": []}
    parser = ChatParser(QWEN, prompt_tail=tail)
    assert parser.is_reasoning
    parser.push("a</think>")
    assert not parser.is_reasoning


def test_parse_lone_surrogates_never_become_markers() -> None:
    chat_format = ChatFormat(tools=ToolFormat(kind="json", call_start='<t>{"name": "'), token_ids=(("<t>", 7),))
    text = '\ud800{"name": "get_time"}\udfff'
    assert parse(chat_format, [text]) == {
        "reasoning": "",
        "content": text.replace("\ud800", "\ufffd").replace("\udfff", "\ufffd"),
        "calls": [],
    }


def test_parse_long_answer_in_small_pieces() -> None:
    """The buffer is cut while it is read."""
    long = "word " * 4000
    arguments = json.dumps({"city": long})
    text = f"<think>\n{long}</think>\n\n{long}"
    text += f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    parsed = parse(QWEN, [text[i : i + 7] for i in range(0, len(text), 7)])
    assert parts(parsed) == (long, long.rstrip(), [("get_weather", {"city": long})])


@pytest.mark.parametrize("channel", ["final", "commentary"])
def test_parse_harmony_channels(channel: str, format_of: Formats) -> None:
    chat_format = format_of("harmony", "text")
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>{channel}<|message|>Hello"
    for pieces in ([text], list(text)):
        assert parse(chat_format, pieces, "<|start|>assistant") == {"reasoning": "hm", "content": "Hello", "calls": []}
    assert parse(chat_format, list("Hello"), "<|start|>assistant")["content"] == "Hello"


def test_parse_pythonic_strings_with_line_breaks_as_they_are(format_of: Formats) -> None:
    text = "<|tool_call_start|>[get_weather(city='a \"b\"\nc', deep={'x': 'y\nz'}, days=3)]<|tool_call_end|>"
    value = {"city": 'a "b"\nc', "deep": {"x": "y\nz"}, "days": 3}
    assert parts(parse(format_of("lfm2", "text"), [text]))[2] == [("get_weather", value)]
