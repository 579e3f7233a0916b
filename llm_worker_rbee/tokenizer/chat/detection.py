"""The format of a model's answers, found by rendering its chat template.

The template renders conversations whose names and values are unique words, so that the text between two of them is a
marker; conversations that differ in one thing (one call or two, content or none, reasoning or none) tell apart what
belongs to a call, to the list of calls and to the turn. Formats that a template does not show have a row in a table,
recognised by a marker in its source. What a template refuses says how messages must be adapted to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ...errors import WorkerError
from ..tokenizer import Tokenizer
from .events import Tool, ToolCallDelta, ToolCallStart
from .format import (
    CONTENT_PAIRS,
    GEMMA_QUOTE,
    GENERIC_TOOLS,
    HARMONY_NAMES,
    ID,
    KEY,
    REASONING_PAIRS,
    TABLE,
    ChatFormat,
    MessageRules,
    ReasoningFormat,
    ToolFormat,
    marker_ids,
)
from .parser import ChatParser
from .template import ChatTemplate
from .values import load_json

# Unique words; names and values that a template might treat as something else are avoided.
USER, CONTENT, REASONING, RESULT, SYSTEM = "Uzq1question", "Czq2content", "Rzq3thought", "Tzq4result", "Szq5system"
NAMES, KEYS, VALUES, IDS = ("zqfa", "zqfb"), ("zqka", "zqkb"), ("Vzqva", "Vzqvb"), ("zqid00001", "zqid00002")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
LONG_ID = "call_zq6identifier000000001"
_SEGMENT = re.compile(r"<[^<>\s][^<>\n]{0,80}>|\[/?[A-Z_]+\]|\w+|\s|.", re.DOTALL)
_TAG = re.compile(r"<[^<>\s][^<>\n]{0,80}>|\[/?[A-Z_]+\]")


def detect_chat_format(template: ChatTemplate, tokenizer: Tokenizer) -> ChatFormat:
    """Return the format of a model's answers. A template that fails gives a format without reasoning and tools."""
    probe = _Probe(template, [tokenizer.piece(token) for token in sorted(tokenizer.eos_ids)])
    calls = _detect_calls(probe)
    rules = _detect_rules(probe, calls)
    tools = _choose_tools(probe, calls, rules)
    reasoning, name = _detect_reasoning(probe)
    name = name or _reasoning_field_of_calls(probe, calls)
    rules = replace(rules, reasoning_field=name, has_content_beside_reasoning=_takes_content(probe, calls, name))
    empty = reasoning.start.strip() + reasoning.end.strip()  # before the calls of a turn without reasoning
    if empty:
        tools = replace(tools, section_start=tools.section_start.removeprefix(empty))
    start, end = next((pair for pair in CONTENT_PAIRS if all(mark in template.source for mark in pair)), ("", ""))
    chat_format = ChatFormat(reasoning, tools, start, end, rules)
    return _with_tokens(chat_format, tokenizer)


class _Probe:
    """Renders conversations; None for a conversation that the template refuses."""

    def __init__(self, template: ChatTemplate, end_names: list[str]) -> None:
        self.source, self.end_names = template.source, end_names  # names: of the tokens that end an answer
        self._template, self._is_stopped = template, False
        self.tools_variable, self.has_parts = "tools", False
        plain = self.render([_user()])
        if plain is not None and USER not in plain:  # perhaps it takes lists of parts alone
            self.has_parts = True
            parts = self.render([_user()])
            self.has_parts = parts is not None and USER in parts
            plain = parts if self.has_parts else plain
        self.prompt = "" if plain is None else _after(plain, USER)

    def render(self, messages: list[dict[str, Any]], *, prompt: bool = True, **fields: Any) -> str | None:
        if self._is_stopped:
            return None
        try:
            if self.has_parts:
                texts = [message["content"] for message in messages]
                parts = [[{"type": "text", "text": text}] if isinstance(text, str) else text for text in texts]
                messages = [{**message, "content": part} for message, part in zip(messages, parts, strict=True)]
            return self._template.render(messages, add_generation_prompt=prompt, **fields)
        except WorkerError as error:
            self._is_stopped = "was stopped: it takes" in str(error)  # its limit is a second each
            return None

    def with_tools(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str | None:
        return self.render(messages, prompt=prompt, **{self.tools_variable: _tools()})


def _user(content: str = USER) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str | None = CONTENT, **fields: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def _tools() -> list[dict[str, Any]]:
    properties = {key: {"type": "string", "description": "d"} for key in KEYS}
    schema = {"type": "object", "properties": properties, "required": list(KEYS)}
    functions = [{"name": name, "description": "d", "parameters": schema} for name in NAMES]
    return [{"type": "function", "function": function} for function in functions]


def _call(index: int, arguments: dict[str, Any], *, as_text: bool = False) -> dict[str, Any]:
    function = {"name": NAMES[index], "arguments": json.dumps(arguments) if as_text else arguments}
    return {"id": IDS[index], "type": "function", "function": function}


def _results(count: int) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": IDS[i], "name": NAMES[i], "content": RESULT} for i in range(count)]


def _after(text: str, word: str) -> str:
    return text[text.rindex(word) + len(word) :] if word in text else text


@dataclass(slots=True)
class _Calls:
    """The template's output for calls: texts after the content, without the end of the turn."""

    as_text: bool  # arguments were given as text
    one: str  # a call with two arguments
    two: str | None  # two calls, with one argument each
    none: str | None  # a call without arguments
    number: str | None  # a call whose argument is a number
    shows_two: bool = True  # of two calls in a message


def _detect_calls(probe: _Probe) -> _Calls | None:
    """Render calls in the forms that templates may expect; None if no form shows them."""
    both = dict(zip(KEYS, VALUES, strict=True))
    for as_text in (False, True):
        for content in (CONTENT, "", None):
            for has_results in (False, True):

                def render(
                    arguments: list[dict[str, Any]],
                    content: str | None = content,
                    as_text: bool = as_text,
                    has_results: bool = has_results,
                ) -> str | None:
                    calls = [_call(i, values, as_text=as_text) for i, values in enumerate(arguments)]
                    results = _results(len(calls)) if has_results else []
                    messages = [_user(), _assistant(content, tool_calls=calls), *results]
                    return _calls_text(probe, probe.with_tools(messages), has_results=has_results)

                single = render([both])
                if single is not None and (NAMES[0] in single or IDS[0] in single) and VALUES[0] in single:
                    two = render([{KEYS[0]: VALUES[0]}, {KEYS[1]: VALUES[1]}])
                    shows_two = two is not None and VALUES[1] in two
                    two = two if two is not None and NAMES[1] in two else None
                    return _Calls(as_text, single, two, render([{}]), render([{KEYS[0]: 731}]), shows_two)
    return None


def _calls_text(probe: _Probe, text: str | None, *, has_results: bool) -> str | None:
    """Return the part of a rendered conversation that is the calls: after the content, before the end of the turn."""
    if text is None:
        return None
    text = _after(text, USER)
    plain = probe.with_tools([_user(), _assistant(), *([_user("Uzq7next")] if has_results else [])])
    plain = None if plain is None else _after(plain, USER)
    if CONTENT in text:
        text = _after(text, CONTENT)
    elif plain is not None:
        text = text[len(_common_prefix(text, plain.partition(CONTENT)[0])) :]
    turn_end = "" if plain is None else _after(plain, CONTENT).partition("Uzq7next")[0]
    first = next((segment for segment in _SEGMENT.findall(turn_end) if not segment.isspace()), None)
    marks = [mark for mark in dict.fromkeys([first, *_TAG.findall(turn_end), *probe.end_names]) if mark]
    words = (*VALUES, *NAMES)
    last = max((text.rfind(word) + len(word) for word in words if word in text), default=0)
    ends = [text.index(mark, last) for mark in marks if mark in text[last:]]
    text = text[: min(ends)] if ends else text
    begin = text.find(NAMES[0])
    if begin > 0 and first is not None and first in text[:begin]:  # the calls have a turn of their own
        tags = list(_TAG.finditer(text, 0, begin))
        text = text[tags[-1].start() :] if tags else text
    return text.partition(RESULT)[0].strip()


def _common_prefix(a: str, b: str) -> str:
    """Return the longest common prefix of whole segments: words, tags, single characters."""
    length = 0
    for x, y in zip(_SEGMENT.findall(a), _SEGMENT.findall(b), strict=False):
        if x != y:
            break
        length += len(x)
    return a[:length]


def _common_suffix(a: str, b: str) -> str:
    length = 0
    for x, y in zip(reversed(_SEGMENT.findall(a)), reversed(_SEGMENT.findall(b)), strict=False):
        if x != y:
            break
        length += len(x)
    return a[len(a) - length :]


def _choose_tools(probe: _Probe, calls: _Calls | None, rules: MessageRules) -> ToolFormat:
    """Return the row of the table, the format that rendering shows, or the generic format."""
    row = next((row for row in TABLE if all(mark in probe.source for mark in row[0])), None)
    if row is not None and row[1]:
        return row[2]
    tools = None if calls is None else _analyse_calls(calls)
    if calls is not None and tools is not None and not _reads(tools, calls.one):
        tools = None
    if tools is None:
        return row[2] if row is not None and rules.tools != "system" else GENERIC_TOOLS
    if "<|python_tag|>" in probe.source and tools.call_start.startswith("{"):
        tools = replace(tools, other_starts=("<|python_tag|>",))
    return tools


def _reads(tools: ToolFormat, text: str) -> bool:
    """Return whether the parser reads back a call that the template printed."""
    parser = ChatParser(ChatFormat(tools=tools), tools=[Tool(name) for name in NAMES])
    events = parser.push(text) + parser.finish()
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    return names == [NAMES[0]] and load_json(arguments) == dict(zip(KEYS, VALUES, strict=True))


def _analyse_calls(calls: _Calls) -> ToolFormat | None:
    text = calls.one
    position = text.find(NAMES[0])
    if position < 0:
        return None
    if (span := _find_object(text, position)) is not None:
        return _analyse_json(calls, *span)
    brace = text.find("{", position)
    if brace >= 0 and _decode(text, brace)[0] == dict(zip(KEYS, VALUES, strict=True)):
        return _analyse_tag(calls)
    if text[position + len(NAMES[0]) :].startswith("("):
        start, end = text[:position], text[text.index(")", text.index(VALUES[1])) + 1 :]
        return ToolFormat(kind="pythonic", section_start=start, section_end=end, separator=", ")
    return _analyse_tagged(calls)


def _decode(text: str, start: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None, start


def _find_object(text: str, position: int) -> tuple[int, int, dict[str, Any]] | None:
    """Return start, stop and value of the JSON object around a position that has a name and arguments."""
    start = text.rfind("{", 0, position)
    value, stop = _decode(text, start) if start >= 0 else (None, 0)
    return (start, stop, value) if isinstance(value, dict) and stop > position else None


def _frame(calls: _Calls, starts: list[int], stops: list[int], texts: list[str]) -> dict[str, Any]:
    """Return the markers around calls: of one call `starts[0]` to `stops[0]`, of two calls the others."""
    before, after = texts[0][: starts[0]], texts[0][stops[0] :]
    if calls.two is None:
        return {"call_start": before, "call_end": after, "is_parallel": False}
    between = texts[1][stops[1] : starts[2]]
    call_end = _common_prefix(after, between)
    between = between[len(call_end) :]
    call_start = _common_suffix(before, between)
    section_start, separator = before[: len(before) - len(call_start)], between[: len(between) - len(call_start)]
    frame = {"section_start": section_start, "call_start": call_start, "separator": separator}
    return {**frame, "call_end": call_end, "section_end": after[len(call_end) :]}


def _analyse_json(calls: _Calls, start: int, stop: int, value: dict[str, Any]) -> ToolFormat | None:
    name_key = next((key for key, item in value.items() if item == NAMES[0]), "")
    arguments_key = next(
        (
            key
            for key, item in value.items()
            if isinstance(item, (dict, str)) and key != name_key and VALUES[0] in json.dumps(item)
        ),
        None,
    )
    id_key = next((key for key, item in value.items() if item == IDS[0]), "")
    if arguments_key is None or (not name_key and NAMES[0] not in value):
        return None
    texts, starts, stops = [calls.one], [start], [stop]
    if calls.two is not None:
        texts.append(calls.two)
        for name in NAMES:
            span = _find_object(calls.two, calls.two.index(name))
            if span is None:
                return None
            starts.append(span[0])
            stops.append(span[1])
    frame = _frame(calls, starts, stops, texts)
    head = calls.one[start : calls.one.index(NAMES[0], start)]
    arguments = calls.one.index("{", calls.one.index(NAMES[0], start))
    suffix, tail = (
        calls.one[start + len(head) + len(NAMES[0]) : arguments],
        calls.one[_decode(calls.one, arguments)[1] :],
    )
    tail = tail[: len(tail) - (len(calls.one) - stop)]
    frame["call_start"] += head.replace(IDS[0], ID)
    frame["call_end"] = tail.replace(IDS[0], ID) + frame["call_end"]
    suffix = suffix.replace(IDS[0], ID)
    arguments_key = arguments_key if name_key else ""
    return ToolFormat(
        kind="json", name_suffix=suffix, name_key=name_key, arguments_key=arguments_key, id_key=id_key, **frame
    )


def _analyse_tag(calls: _Calls) -> ToolFormat | None:
    texts, starts, stops = [calls.one], [], []
    suffix = ""
    for text, names in ((calls.one, NAMES[:1]), (calls.two, NAMES)):
        for name in names if text is not None else ():
            assert text is not None
            text = text.replace(IDS[0], ID * len(IDS[0])).replace(IDS[1], ID * len(IDS[1]))
            position = text.index(name)
            brace = text.find("{", position)
            value, stop = _decode(text, brace) if brace >= 0 else (None, 0)
            if not isinstance(value, dict):
                return None
            starts.append(position)
            stops.append(stop)
            suffix = suffix or text[position + len(name) : brace]
    texts = [text.replace(IDS[0], ID * 9).replace(IDS[1], ID * 9) for text in (calls.one, calls.two) if text]
    frame: dict[str, Any] = {
        key: value.replace(ID * 9, ID) if isinstance(value, str) else value
        for key, value in _frame(calls, starts, stops, texts).items()
    }
    return ToolFormat(kind="tag_json", name_suffix=suffix.replace(ID * 9, ID), **frame)


def _analyse_tagged(calls: _Calls) -> ToolFormat | None:
    text = calls.one
    places = [text.find(word) for word in (NAMES[0], KEYS[0], VALUES[0], KEYS[1], VALUES[1])]
    if -1 in places or places != sorted(places):
        return None
    head = text[places[0] + len(NAMES[0]) : places[1]]
    suffix = text[places[1] + len(KEYS[0]) : places[2]]
    between = text[places[2] + len(VALUES[0]) : places[3]].replace(KEYS[0], KEY)
    after = text[places[4] + len(VALUES[1]) :].replace(KEYS[1], KEY)
    argument_end = _common_prefix(after, between)
    between = between[len(argument_end) :]
    argument_start = _common_suffix(head, between)
    separator = between[: len(between) - len(argument_start)]
    if not argument_end.strip() or not (argument_start.strip() or suffix.strip()):
        return None
    tail = after[len(argument_end) :]
    number = calls.number or ""
    json_suffix = suffix
    if KEYS[0] in number and "731" in number:
        json_suffix = number[number.index(KEYS[0]) + len(KEYS[0]) : number.index("731")]
    frame: dict[str, Any] = {"call_start": text[: places[0]], "call_end": tail, "is_parallel": False}
    if calls.two is not None:
        first = calls.two.index(VALUES[0]) + len(VALUES[0])
        starts = [places[0], calls.two.index(NAMES[0]), calls.two.index(NAMES[1])]
        first += len(argument_end.replace(KEY, KEYS[0]))
        frame = _frame(calls, starts, [len(text) - len(tail), first], [text, calls.two])
    return ToolFormat(
        kind="tag_arguments",
        name_suffix=head[: len(head) - len(argument_start)],
        argument_start=argument_start,
        argument_name_suffix=suffix,
        argument_name_suffix_json=json_suffix,
        argument_end=argument_end,
        argument_separator=separator,
        **frame,
    )


def _detect_rules(probe: _Probe, calls: _Calls | None) -> MessageRules:
    tools: Literal["template", "xml_tools", "system"] = "system"
    described = probe.with_tools([_user()], prompt=True)
    if described is not None and NAMES[0] in described:
        tools = "template"
    elif "xml_tools" in probe.source:
        probe.tools_variable = tools = "xml_tools"
    style: Literal["object", "string", "content"] = "content"
    if calls is not None:
        style = "string" if calls.as_text else "object"
    tool_calls = [_call(0, {KEYS[0]: VALUES[0]}, as_text=style == "string")]
    asking = _assistant("", tool_calls=tool_calls) if calls is not None else _assistant()
    answered = probe.with_tools([_user(), asking, *_results(1)], prompt=True)
    system, developer = {"role": "system", "content": SYSTEM}, {"role": "developer", "content": SYSTEM}
    null = None if calls is None else probe.with_tools([_user(), {**asking, "content": None}, *_results(1)])
    long_id = [{**tool_calls[0], "id": LONG_ID}]
    result = {**_results(1)[0], "tool_call_id": LONG_ID}
    short = answered is not None and probe.with_tools([_user(), _assistant("", tool_calls=long_id), result]) is None
    return MessageRules(
        tools=tools,
        calls=style,
        has_tool_role=answered is not None and RESULT in answered,
        has_system_role=_shows(probe.render([system, _user()])),
        has_late_system=_shows(probe.render([_user("a"), _assistant("b"), system, _user()])),
        has_developer_role="developer" in probe.source and _shows(probe.render([developer, _user()])),
        must_alternate=probe.render([_user(), _user()]) is None,
        has_null_content=null is not None and "None" not in _after(null, USER),
        has_short_ids=calls is not None and short,
        has_parallel_calls=calls is None or calls.shows_two,
        parts="all" if probe.has_parts else "",
    )


def _reasoning_field_of_calls(probe: _Probe, calls: _Calls | None) -> str:
    """Return the field whose reasoning a template shows before calls alone (Gemma 4)."""
    if calls is None:
        return ""
    tool_calls = [_call(0, {KEYS[0]: VALUES[0]}, as_text=calls.as_text)]
    for name in REASONING_FIELDS:
        text = probe.with_tools([_user(), _assistant("", tool_calls=tool_calls, **{name: REASONING}), *_results(1)])
        if text is not None and REASONING in text:
            return name
    return ""


def _takes_content(probe: _Probe, calls: _Calls | None, reasoning_field: str) -> bool:
    """Return whether a message with calls may have both content and reasoning."""
    if calls is None or not reasoning_field:
        return True
    sent = [_call(0, {KEYS[0]: VALUES[0]}, as_text=calls.as_text)]
    both, bare = (_assistant(content, tool_calls=sent, **{reasoning_field: REASONING}) for content in (CONTENT, ""))
    return probe.with_tools([_user(), both, *_results(1)]) is not None or (
        probe.with_tools([_user(), bare, *_results(1)]) is None
    )


def _shows(text: str | None) -> bool:
    return text is not None and SYSTEM in text


def _detect_reasoning(probe: _Probe) -> tuple[ReasoningFormat, str]:
    """Return the markers of reasoning, and the field of a message that the template takes it from."""
    start, end, name = "", "", ""
    for candidate in REASONING_FIELDS:
        text = probe.render([_user(), _assistant(**{candidate: REASONING})], prompt=False)
        if text is None or REASONING not in text or CONTENT not in _after(text, REASONING):
            continue
        before, end = _after(text.partition(REASONING)[0], USER), _after(text, REASONING).partition(CONTENT)[0]
        start, name = _reasoning_start(before, probe.prompt, end.strip()), candidate
        break
    if not (start.strip() and end.strip()):
        start, end = next((pair for pair in REASONING_PAIRS if pair[0] in probe.source), ("", ""))
    if not end:
        return ReasoningFormat(), name
    switch = ""
    for variable in ("enable_thinking", "thinking"):
        if variable in probe.source:
            on, off = probe.render([_user()], **{variable: True}), probe.render([_user()], **{variable: False})
            if on is not None and off is not None and on != off:
                switch = variable
                break
    is_open = probe.prompt.rstrip().endswith(start.strip())
    return ReasoningFormat(start, end, is_open, switch), name


def _reasoning_start(before: str, prompt: str, end: str) -> str:
    """Return the marker before the reasoning: the text after the assistant's header, which the prompt has too."""
    if prompt.startswith(before) and len(prompt) > len(before) and end not in prompt[len(before) :]:
        return prompt[len(before) :]
    start = before[len(_common_prefix(before, prompt)) :]
    if start.strip():
        return start
    tags = list(_TAG.finditer(before))
    return before[tags[-1].start() :] if tags else ""


def _with_tokens(chat_format: ChatFormat, tokenizer: Tokenizer) -> ChatFormat:
    """Add the ids of the markers that are single tokens, and the ids of the control tokens."""
    strings = [
        value
        for record in (chat_format.tools, chat_format.reasoning)
        for value in asdict(record).values()
        if isinstance(value, str)
    ]
    strings += [chat_format.content_start, chat_format.content_end, *chat_format.tools.other_starts]
    if chat_format.tools.kind == "harmony":
        strings += HARMONY_NAMES
    if chat_format.tools.kind == "gemma":
        strings.append(GEMMA_QUOTE)
    text = "\n".join(strings)
    names = {name: i for name, i in marker_ids(tokenizer).items() if name in text}
    ordered = tuple(sorted(names.items(), key=lambda item: -len(item[0])))
    control = frozenset(name for name, i in ordered if tokenizer.is_special(i))
    return replace(chat_format, token_ids=ordered, control_names=control, control_ids=_ranges(tokenizer.control_ids))


def _ranges(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return sorted ids as inclusive ranges."""
    ranges: list[list[int]] = []
    for token_id in ids:
        if ranges and token_id == ranges[-1][1] + 1:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    return tuple((first, last) for first, last in ranges)
