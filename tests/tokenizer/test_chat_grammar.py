"""Grammars of answers over a real tokenizer: what they accept, force and refuse, and the round trip with the parser."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.structured_outputs.chat_grammar import answer_grammar
from llm_worker_rbee.tokenizer.chat.events import ChatOptions, Tool
from llm_worker_rbee.tokenizer.chat.format import GENERIC_TOOLS, ChatFormat, ReasoningFormat
from tests.helpers.chat_formats import ANSWERS, TOOLS, WEATHER, GrammarChecker

Formats = Callable[[str, str], ChatFormat]
Checkers = dict[str, GrammarChecker]
STRICT = [replace(tool, strict=True) for tool in TOOLS]
MARKERS = pytest.mark.parametrize("markers", ["text", "tokens"])


def grammar(chat_format: ChatFormat, structured: tuple[str, Any] | None = None, tail: str = "", **options: Any) -> str:
    made = answer_grammar(chat_format, ChatOptions(**options), structured, prompt_tail=tail)
    assert made is not None
    return made


def calls_text(name: str) -> str:
    """Return an answer without its content, which calls that are required do not have."""
    answer = ANSWERS[name]
    text = answer.text.replace(answer.content, "", 1).replace("\n\n\n", "\n\n") if answer.content else answer.text
    return text if answer.reasoning else text.lstrip("\n")


@MARKERS
@pytest.mark.parametrize("name", ANSWERS)
def test_required_accepts_calls_and_nothing_else(
    name: str, markers: str, format_of: Formats, checkers: Checkers
) -> None:
    answer, checker = ANSWERS[name], checkers[markers]
    made = grammar(format_of(name, markers), tail=answer.prompt_tail, tools=STRICT, tool_choice="required")
    assert checker.takes(made, calls_text(name))
    for wrong in ("Hello.", calls_text(name).replace("get_weather", "other"), calls_text(name).replace("city", "town")):
        assert not checker.takes(made, wrong)


@pytest.mark.parametrize("name", ANSWERS)
def test_tokens_that_a_grammar_names_roll_back(name: str, format_of: Formats, checkers: Checkers) -> None:
    """Forced tokens are drafts of an engine: each run of them is consumed and rolled back before the token comes."""
    checker, chat_format = checkers["tokens"], format_of(name, "tokens")
    ids = checker.tokenizer.encode(calls_text(name), add_special=False, parse_special=True)
    made = grammar(chat_format, tail=ANSWERS[name].prompt_tail, tools=STRICT, tool_choice="required")
    matcher, num_rolled_back = checker.matcher(made), 0
    for token in ids:
        forced = matcher.compute_ff_tokens()
        assert matcher.consume_tokens(forced)
        assert matcher.rollback(len(forced)), matcher.get_error()
        assert matcher.consume_token(token), matcher.get_error()
        num_rolled_back += len(forced)
    assert matcher.is_accepting()
    assert num_rolled_back


@pytest.mark.parametrize("name", ["qwen3", "glm", "deepseek_v3"])
def test_forced_text_that_spells_a_marker_is_text(name: str, format_of: Formats, checkers: Checkers) -> None:
    checker, text = checkers["tokens"], "a <tool_call> tag"
    chat_format = format_of(name, "tokens")
    made = grammar(chat_format, ("json", json.dumps({"const": text})), chat_format.reasoning.end)
    matcher = checker.matcher(made)
    while not matcher.is_stopped():
        forced = matcher.compute_ff_tokens()
        assert forced
        assert checker.tokenizer.token_id("<tool_call>") not in forced
        assert matcher.consume_tokens(forced), matcher.get_error()
    assert matcher.is_accepting()


SEPARATED = ["qwen3", "qwen3_coder", "plain"]  # formats with whitespace between calls


@MARKERS
@pytest.mark.parametrize("name", SEPARATED)
def test_separator_may_follow_the_last_call(name: str, markers: str, format_of: Formats, checkers: Checkers) -> None:
    """Models print it there too; it promises no other call."""
    answer, checker, chat_format = ANSWERS[name], checkers[markers], format_of(name, markers)
    separator, text = chat_format.tools.separator, calls_text(name)
    assert separator.isspace()
    made = grammar(chat_format, tail=answer.prompt_tail, tools=STRICT, tool_choice="required")
    assert checker.takes(made, text + separator)
    assert not checker.takes(made, text + separator * 3)
    assert not checker.takes(made, text + separator + "Hello.")
    one = grammar(chat_format, tail=answer.prompt_tail, tools=STRICT, tool_choice="required", parallel_tool_calls=False)
    assert not checker.takes(one, text)


@MARKERS
@pytest.mark.parametrize("name", ANSWERS)
def test_auto_with_strict_tools(name: str, markers: str, format_of: Formats, checkers: Checkers) -> None:
    answer, checker = ANSWERS[name], checkers[markers]
    chat_format = format_of(name, markers)
    made = grammar(chat_format, tail=answer.prompt_tail, tools=STRICT)
    assert checker.takes(made, answer.text)
    assert not checker.takes(made, answer.text.replace("city", "town"))
    reasoning = chat_format.reasoning
    start = "" if chat_format.is_reasoning_open(answer.prompt_tail) else reasoning.start.lstrip()
    before = f"{start}hm{reasoning.end}" if answer.reasoning else ""
    assert checker.takes(made, f"{before}Just text, <b>nothing</b> else.")


@MARKERS
@pytest.mark.parametrize("name", [name for name in ANSWERS if name not in ("llama3", "pythonic")])
def test_tool_choice_none_forbids_calls(name: str, markers: str, format_of: Formats, checkers: Checkers) -> None:
    answer, checker = ANSWERS[name], checkers[markers]
    made = grammar(format_of(name, markers), tail=answer.prompt_tail, tools=TOOLS, tool_choice="none")
    assert not checker.takes(made, answer.text)
    if not answer.reasoning:
        assert checker.takes(made, "Just text.")


@MARKERS
@pytest.mark.parametrize("name", ["qwen3", "kimi", "minimax", "plain"])
def test_parallel_tool_calls_false_allows_one(name: str, markers: str, format_of: Formats, checkers: Checkers) -> None:
    answer, chat_format, checker = ANSWERS[name], format_of(name, markers), checkers[markers]
    both, one = calls_text(name), ChatOptions(tools=TOOLS, tool_choice="required")
    assert checker.takes(answer_grammar(chat_format, one) or "", both)
    for choice in ("required", "auto"):
        made = grammar(chat_format, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        assert not checker.takes(made, both)
        assert not checker.takes(made, answer.text)


def test_named_tool_must_be_called(format_of: Formats, checkers: Checkers) -> None:
    made = grammar(format_of("plain", "text"), tools=TOOLS, tool_name="get_time")
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    assert checkers["text"].takes(made, call)
    assert not checkers["text"].takes(made, call.replace("get_time", "get_weather"))
    with pytest.raises(InvalidRequestError, match="'other', which is not in tools"):
        answer_grammar(ChatFormat(), ChatOptions(tools=TOOLS, tool_name="other"))
    with pytest.raises(InvalidRequestError, match="there are no tools"):
        answer_grammar(ChatFormat(), ChatOptions(tool_choice="required"))


def test_forced_call_is_forced_token_by_token(format_of: Formats, checkers: Checkers) -> None:
    """The engine gets the text up to the arguments as drafts."""
    made = grammar(format_of("plain", "text"), tools=[WEATHER], tool_choice="required")
    tokenizer = checkers["text"].tokenizer
    _, _, forced = checkers["text"].run(made, [])
    assert (
        tokenizer.decode(forced)
        == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'[: len(tokenizer.decode(forced))]
    )
    assert len(forced) >= 10


def test_nothing_constrained_is_none(format_of: Formats) -> None:
    chat_format = format_of("qwen3", "tokens")
    assert answer_grammar(chat_format, ChatOptions()) is None
    assert answer_grammar(chat_format, ChatOptions(tools=TOOLS)) is None
    assert answer_grammar(ChatFormat(), ChatOptions(thinking_budget=5)) is None  # it does not think


STRUCTURED: dict[str, tuple[Any, str, str]] = {
    "json": ('{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}', '{"a": 1}', '{"a": "x"}'),
    "json_object": (True, '{"b": [1]}', "[1]"),
    "regex": ("[a-z]+/(x|\\n)", "abc/x", "abc"),
    "choice": (["yes", 'no "q"\n'], 'no "q"\n', "no"),
    "grammar": ('start: "x" NUMBER\nNUMBER: /[0-9]+/', "x12", "x"),
}


@MARKERS
@pytest.mark.parametrize("kind", STRUCTURED)
def test_structured_output_begins_after_reasoning(
    kind: str, markers: str, format_of: Formats, checkers: Checkers
) -> None:
    value, good, bad = STRUCTURED[kind]
    chat_format, checker = format_of("qwen3", markers), checkers[markers]
    for tail, before in (("", ["", "<think>\nhm {\n</think>\n\n"]), ("<think>\n", ["hm {\n</think>\n\n"]),
                         ("<think>\n\n</think>\n\n", [""])):  # fmt: skip
        made = grammar(chat_format, (kind, value), tail)
        for reasoning in before:
            assert checker.takes(made, reasoning + good)
            assert not checker.takes(made, reasoning + bad)
    assert not checker.takes(made, "<think>\nhm\n</think>\n\n" + good)


@pytest.mark.parametrize("kind", STRUCTURED)
def test_structured_output_without_reasoning_format(kind: str, checkers: Checkers) -> None:
    value, good, bad = STRUCTURED[kind]
    made = grammar(ChatFormat(), (kind, value))
    assert checkers["text"].takes(made, good)
    assert not checkers["text"].takes(made, bad)


def test_structured_output_or_call(format_of: Formats, checkers: Checkers) -> None:
    made = grammar(format_of("plain", "text"), ("json_object", True), tools=TOOLS)
    assert checkers["text"].takes(made, '{"a": 1}')
    assert checkers["text"].takes(made, calls_text("plain"))
    assert not checkers["text"].takes(made, "Hello.")


def test_harmony_structured_output_is_in_final_channel(format_of: Formats, checkers: Checkers) -> None:
    made = grammar(format_of("harmony", "tokens"), ("json_object", True), "<|start|>assistant")
    final = '<|channel|>final<|message|>{"a": 1}'
    assert checkers["tokens"].takes(made, final)
    assert checkers["tokens"].takes(made, f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{final}")
    assert not checkers["tokens"].takes(made, '{"a": 1}')


@pytest.mark.parametrize("structured", [None, ("json_object", True)])
def test_thinking_budget_forces_end_marker(
    structured: tuple[str, Any] | None, format_of: Formats, checkers: Checkers
) -> None:
    """Counted in tokens where the end marker is one."""
    checker = checkers["tokens"]
    tokenizer = checker.tokenizer
    made = grammar(format_of("qwen3", "tokens"), structured, "<think>\n", thinking_budget=5)
    ids = tokenizer.encode("one two three four five six seven", add_special=False)
    count, _, _ = checker.run(made, ids)
    assert count == 5
    _, _, forced = checker.run(made, ids[:5])
    assert tokenizer.decode(forced).startswith("</think>\n\n")
    assert checker.takes(made, "one\n</think>\n\n{}")
    none = grammar(format_of("qwen3", "tokens"), structured, "<think>\n", thinking_budget=0)
    assert checker.run(none, ids[:1])[0] == 0
    optional = grammar(format_of("qwen3", "tokens"), structured, "", thinking_budget=0)
    assert checker.run(optional, tokenizer.encode("<think>", add_special=False))[0] == 0


def test_thinking_budget_of_text_markers_counts_characters(format_of: Formats, checkers: Checkers) -> None:
    chat_format = replace(format_of("plain", "text"), reasoning=ReasoningFormat("Thoughts:\n", "\n[ANSWER]\n"))
    made = grammar(chat_format, None, "Thoughts:\n", thinking_budget=3)
    checker = checkers["text"]
    assert not checker.takes(made, "much too long a thought\n[ANSWER]\nyes")
    assert checker.takes(made, "short\n[ANSWER]\nyes")
    text = checker.tokenizer.decode(checker.run(made, checker.tokenizer.encode("123456789012", add_special=False))[2])
    assert text.startswith("[ANSWER]")


HOSTILE_NAMES = ['q"uote', "back\\slash", "new\nline", "</tool_call>", "ünï", "a b", "{}", "<|im_end|>", "%json", "/x/"]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_tool_names_stay_names(name: str, checkers: Checkers) -> None:
    chat_format = ChatFormat(tools=GENERIC_TOOLS, control_ids=((0, 16),))
    key = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    made = grammar(chat_format, tools=[Tool(name, parameters=key, strict=True)], tool_choice="required")
    call = {"name": name, "arguments": {name: 1}}
    text = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    ids = checkers["text"].tokenizer.encode(text, add_special=False)
    count, is_complete, _ = checkers["text"].run(made, ids)
    assert (count, is_complete) == (len(ids), True)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        answer_grammar(ChatFormat(tools=GENERIC_TOOLS), ChatOptions(tools=[Tool("a\ud800")], tool_choice="required"))


def test_unsupported_keywords_count_for_strict_tools_only(checkers: Checkers) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]}
    chat_format = ChatFormat(tools=GENERIC_TOOLS)
    made = grammar(chat_format, tools=[Tool("f", parameters=schema)], tool_choice="required")
    assert checkers["text"].takes(made, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    made = grammar(chat_format, tools=[Tool("f", parameters=schema, strict=True)], tool_choice="required")
    with pytest.raises(AssertionError, match="not"):
        checkers["text"].run(made, [])


NODE = {
    "type": "object", "required": ["kids", "n"], "additionalProperties": False,
    "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                   "n": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}},
}  # fmt: skip
TREE = Tool(
    "tree", "",
    {"type": "object", "properties": {"node": {"$ref": "#/$defs/node"}}, "required": ["node"],
     "additionalProperties": False, "$defs": {"node": NODE, "count": {"type": "integer"}}},
    strict=True,
)  # fmt: skip
JSON_NODE = '{"kids": [{"kids": [], "n": INNER}], "n": 1}'
TREE_CALLS = {
    "plain": f'<tool_call>\n{{"name": "tree", "arguments": {{"node": {JSON_NODE}}}}}\n</tool_call>',
    "mistral_args": f'[TOOL_CALLS]tree[ARGS]{{"node": {JSON_NODE}}}',
    "functionary": f'<function=tree>{{"node": {JSON_NODE}}}</function>',
    "minimax": '<minimax:tool_call>\n<invoke name="tree">\n'
    f'<parameter name="node">{JSON_NODE}</parameter>\n</invoke>\n</minimax:tool_call>',
    "lfm2": f"<|tool_call_start|>[tree(node={JSON_NODE})]<|tool_call_end|>",
    "pythonic": f"[tree(node={JSON_NODE})]",
    "gemma4": "<|tool_call>call:tree{node:{kids:[{kids:[],n:INNER}],n:1}}<tool_call|>",
}


@MARKERS
@pytest.mark.parametrize("name", TREE_CALLS)
def test_recursive_schema_of_a_tool_holds_at_every_depth(
    name: str, markers: str, format_of: Formats, checkers: Checkers
) -> None:
    made = grammar(format_of(name, markers), tools=[TREE], tool_choice="required")
    checker, call = checkers[markers], TREE_CALLS[name]
    null = "None" if name in ("lfm2", "pythonic") else "null"
    assert checker.takes(made, call.replace("INNER", "2"))
    assert checker.takes(made, call.replace("INNER", null))
    for wrong in ("true", "True", "[]", "{}", '"x"', '<|"|>x<|"|>'):
        assert not checker.takes(made, call.replace("INNER", wrong)), wrong
    assert not checker.takes(made, call.replace("INNER", "2").replace("kids", "sons"))


WIDE = {  # every property refers to the whole, with a sibling beside the reference
    "type": "object", "additionalProperties": False,
    "properties": {f"p{i}": {"$ref": "#", "type": "object"} for i in range(10)},
}  # fmt: skip
LOOP = {  # an option that refers to its own list a hundred times
    "type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}, "required": ["n"], "additionalProperties": False,
    "$defs": {"a": {"anyOf": [*[{"$ref": "#/$defs/a"}] * 100, {"type": "integer"}]}},
}  # fmt: skip
HOSTILE_CALLS = {
    "pythonic": "[f(KEY=VALUE)]",
    "gemma4": "<|tool_call>call:f{KEY:VALUE}<tool_call|>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="KEY">VALUE</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
}


@pytest.mark.parametrize("name", HOSTILE_CALLS)
def test_references_with_siblings_are_expanded_once(name: str, format_of: Formats, checkers: Checkers) -> None:
    tool = Tool("f", parameters=WIDE, strict=True)
    made = grammar(format_of(name, "text"), tools=[tool], tool_choice="required")
    call = HOSTILE_CALLS[name].replace("KEY", "p0")
    if name == "minimax":  # the library compiles the schema, and refuses it
        with pytest.raises(AssertionError, match="circular references with sibling keys"):
            checkers["text"].takes(made, call)
        return
    key = "p9:" if name == "gemma4" else '"p9": '
    for depth in (1, 12):
        nested = call.replace("VALUE", f"{{{key}" * depth + "VALUE" + "}" * depth)
        assert checkers["text"].takes(made, nested.replace("VALUE", "{}"))
        assert not checkers["text"].takes(made, nested.replace("VALUE", "1"))
        assert not checkers["text"].takes(made, nested.replace("VALUE", "{}").replace("p9", "q9"))


@pytest.mark.parametrize("name", HOSTILE_CALLS)
def test_options_that_refer_to_themselves_are_read_once(name: str, format_of: Formats, checkers: Checkers) -> None:
    tool, call = Tool("f", parameters=LOOP, strict=True), HOSTILE_CALLS[name].replace("KEY", "n")
    made = grammar(format_of(name, "text"), tools=[tool], tool_choice="required")
    assert checkers["text"].takes(made, call.replace("VALUE", "12"))
    assert not checkers["text"].takes(made, call.replace("VALUE", "true"))


@pytest.mark.parametrize("name", HOSTILE_CALLS)
def test_long_chains_of_references_are_refused(name: str, format_of: Formats) -> None:
    """Rules of Python's and Gemma's notation are written one within the other; JSON takes the schema as it is."""
    links = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(500)
    }
    chain = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": links}
    options = ChatOptions(tools=[Tool("f", parameters=chain)], tool_choice="required")
    if name == "minimax":
        assert "%json" in (answer_grammar(format_of(name, "text"), options) or "")
        return
    with pytest.raises(InvalidRequestError, match="the schema of a tool is nested too deeply") as caught:
        answer_grammar(format_of(name, "text"), options)
    assert caught.value.field == "tools"
