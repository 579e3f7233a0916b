"""How a model writes reasoning and tool calls: one record, and a table of formats that templates do not show.

detection.py finds the record of a model; the parser and the grammar of answers are made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ..tokenizer import Tokenizer

ToolKind = Literal["none", "json", "tag_json", "tag_arguments", "pythonic", "gemma", "harmony"]
ID = "\0"  # the place of a call's id in `call_start` and `name_suffix`
KEY = "\1"  # the place of an argument's name in `argument_end`
HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # it has low, medium and high


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers of reasoning, as the template prints them: with the whitespace around them."""

    start: str = ""
    end: str = ""
    is_open: bool = False  # the generation prompt of the template's defaults has the start already
    switch: str = ""  # the variable of the template that turns reasoning on and off, where there is one


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written: section_start (call_start NAME name_suffix ARGUMENTS call_end) ... section_end.

    `kind`: "json" is an object with name and arguments, `call_start` ends inside it; "tag_json" has the name between
    markers and JSON arguments; "tag_arguments" has markers around each argument; "pythonic" is `[f(a=1)]`; "gemma" is
    `call:f{a:1}`; "harmony" has channels.
    """

    kind: ToolKind = "none"
    section_start: str = ""
    call_start: str = ""
    name_suffix: str = ""
    call_end: str = ""
    separator: str = ""
    section_end: str = ""
    name_key: str = "name"  # of kind "json"; empty: the name is the key of the arguments
    arguments_key: str = "arguments"
    id_key: str = ""
    argument_start: str = ""  # of kind "tag_arguments"
    argument_name_suffix: str = ""
    argument_name_suffix_json: str = ""  # where the value is not a string
    argument_end: str = ""
    argument_separator: str = ""
    other_starts: tuple[str, ...] = ()  # markers that some answers have before a call
    name_is_id: bool = False  # Kimi: `functions.NAME:INDEX`
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class MessageRules:
    """How messages are adapted to a template; template_worker.py does it."""

    tools: Literal["template", "xml_tools", "system"] = "system"  # where definitions go; "system": into that message
    calls: Literal["object", "string", "content"] = "content"  # arguments of calls; "content": as text of the message
    has_tool_role: bool = False
    has_system_role: bool = True
    has_late_system: bool = True  # a system message may follow others
    has_developer_role: bool = False
    must_alternate: bool = False  # two messages of a user in a row are refused
    has_null_content: bool = False
    has_short_ids: bool = False  # ids of calls must have 9 letters and digits
    has_parallel_calls: bool = True  # a message may have several calls
    has_content_beside_reasoning: bool = True  # a message with calls may have both
    reasoning_field: str = ""
    parts: Literal["", "images", "all"] = ""  # content is a list of parts: of messages with images, or of all


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The format of a model's answers."""

    reasoning: ReasoningFormat = field(default_factory=ReasoningFormat)
    tools: ToolFormat = field(default_factory=ToolFormat)
    content_start: str = ""
    content_end: str = ""
    rules: MessageRules = field(default_factory=MessageRules)
    token_ids: tuple[tuple[str, int], ...] = ()  # markers that are single tokens, the longest first
    control_ids: tuple[tuple[int, int], ...] = ()  # ranges of the control tokens of the vocabulary
    control_names: frozenset[str] = frozenset()  # of `token_ids`, those that are no part of the text

    @property
    def has_reasoning(self) -> bool:
        return bool(self.reasoning.end)

    @property
    def has_native_tools(self) -> bool:
        """Whether the template describes tools; else they are described in a system message."""
        return self.rules.tools != "system"

    def thinking_kwargs(self, is_enabled: bool) -> dict[str, Any]:
        """Return the template's variables that turn reasoning on or off."""
        if self.tools.kind == "harmony" and not is_enabled:  # it reasons in any case
            return {"reasoning_effort": "low"}
        return {self.reasoning.switch: is_enabled} if self.reasoning.switch else {}

    def template_variables(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's variables in this template's names: whether to reason, and the effort."""
        variables, is_enabled = dict(kwargs), kwargs.get("enable_thinking")
        effort = variables.get("reasoning_effort")
        if self.tools.kind == "harmony" and isinstance(effort, str):
            variables["reasoning_effort"] = HARMONY_EFFORTS.get(effort, effort)
        return variables if is_enabled is None else {**self.thinking_kwargs(bool(is_enabled)), **variables}

    def is_reasoning_open(self, prompt_tail: str) -> bool:
        """Return whether a prompt ends inside the reasoning."""
        start, end, tail = self.reasoning.start.strip(), self.reasoning.end.strip(), prompt_tail.rstrip()
        return bool(start) and tail.endswith(start) and not tail.endswith(end)

    def adaptation(self) -> dict[str, Any]:
        """Return the rules in the form of the template renderer."""
        tools = self.tools if self.tools.kind in ("json", "pythonic", "tag_json") else GENERIC_TOOLS
        markers = [name for name, _ in self.token_ids if name not in self.control_names]
        return {**asdict(self.rules), "format": asdict(tools), "markers": markers}


GENERIC_TOOLS = ToolFormat(
    kind="json",
    call_start='<tool_call>\n{"name": "',
    name_suffix='", "arguments": ',
    call_end="}\n</tool_call>",
    separator="\n",
)
_LFM2 = ToolFormat(
    kind="pythonic", section_start="<|tool_call_start|>[", section_end="]<|tool_call_end|>", separator=", "
)
_KIMI = ToolFormat(
    kind="tag_json",
    section_start="<|tool_calls_section_begin|>",
    call_start="<|tool_call_begin|>",
    name_suffix="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    section_end="<|tool_calls_section_end|>",
    name_is_id=True,
)
_DEEPSEEK = ToolFormat(
    kind="tag_json",
    section_start="<｜tool▁calls▁begin｜>",
    call_start="<｜tool▁call▁begin｜>",
    name_suffix="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    section_end="<｜tool▁calls▁end｜>",
)
_DEEPSEEK_R1 = replace(
    _DEEPSEEK,
    call_start="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_suffix="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
    separator="\n",
)
_GEMMA = ToolFormat(kind="gemma", call_start="<|tool_call>call:", name_suffix="{", call_end="}<tool_call|>")
_MISTRAL_ARGS = ToolFormat(kind="tag_json", call_start="[TOOL_CALLS]", name_suffix="[ARGS]")
_MISTRAL = ToolFormat(
    kind="json",
    section_start="[TOOL_CALLS][",
    call_start='{"name": "',
    name_suffix='", "arguments": ',
    call_end="}",
    separator=", ",
    section_end="]",
    id_key="id",
)
_LLAMA = ToolFormat(
    kind="json",
    call_start='{"name": "',
    name_suffix='", "parameters": ',
    call_end="}",
    arguments_key="parameters",
    is_parallel=False,
)
# Features of a template's source, all of which must be there, and its format; the first row that fits counts. Rows
# marked True replace what rendering finds: it shows these formats incompletely.
TABLE: tuple[tuple[tuple[str, ...], bool, ToolFormat], ...] = (
    (("<|channel|>", "<|message|>", "<|start|>"), True, ToolFormat(kind="harmony")),
    (("<|tool_call>", "call:"), True, _GEMMA),
    (("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), True, _KIMI),
    (("<|tool_call_start|>",), False, _LFM2),
    (("<|tool_list_start|>",), False, _LFM2),
    (("<｜tool▁calls▁begin｜>", "```json"), True, _DEEPSEEK_R1),
    (("<｜tool▁calls▁begin｜>",), False, _DEEPSEEK),
    (("[TOOL_CALLS]", "[ARGS]"), False, _MISTRAL_ARGS),
    (("[TOOL_CALLS]",), False, _MISTRAL),
    (("<|python_tag|>", '"parameters": '), False, _LLAMA),
)
REASONING_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
)
CONTENT_PAIRS = (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>"))
HARMONY_NAMES = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)
GEMMA_QUOTE = '<|"|>'
_KNOWN = repr((GENERIC_TOOLS, TABLE, REASONING_PAIRS, CONTENT_PAIRS, HARMONY_NAMES, GEMMA_QUOTE))


def marker_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return names and ids of the tokens that may be markers: grammars name these by number, and no others.

    User-defined tokens are among them only if the model's own template or a known format names them: HTML tags, which
    some vocabularies have, are text. The ids depend on the model's file alone, so every process finds the same.
    """
    named = f"{tokenizer.chat_template}{_KNOWN}"
    markers = ((name, i) for name, i in tokenizer.verbatim_ids.items() if len(name) > 2 and set(name) & set("<>[]|｜"))
    return {name: i for name, i in markers if name in named or tokenizer.is_special(i)}
