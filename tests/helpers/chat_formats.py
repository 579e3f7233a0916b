"""Chat formats for tests: templates, answers in each format with their parts, and tokenizers with markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance
import llguidance.numpy as masks

from llm_worker_rbee.structured_outputs.grammar import TokenTable
from llm_worker_rbee.tokenizer import ChatTemplate, Tokenizer, tokenizer_from_gguf
from llm_worker_rbee.tokenizer.chat.events import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    Tool,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from llm_worker_rbee.tokenizer.tokenizer import TokenType

TEMPLATES = Path(__file__).parent.parent / "tokenizer" / "templates"
USER = {"role": "user", "content": "Weather in Köln?"}
WEATHER = Tool(
    "get_weather", "The weather of a city.",
    {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"},
                                      "deep": {"type": "object"}, "flag": {"type": "boolean"}},
     "required": ["city"]},
)  # fmt: skip
TIME = Tool("get_time", "", {"type": "object", "properties": {}})
TOOLS = [WEATHER, TIME]
CITY = 'Köln "am"\nRhein {x}'


@dataclass
class Answer:
    """An answer as text, and what it consists of."""

    text: str
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    prompt_tail: str = ""


_BOTH: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": CITY, "days": 3}), ("get_time", {})]
_ONE: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": CITY, "days": 3})]
_ARGS = '{"city": "Köln \\"am\\"\\nRhein {x}", "days": 3}'
ANSWERS: dict[str, Answer] = {
    "qwen3": Answer(
        f'<think>\nLook\n\nup.\n</think>\n\nOne moment.\n<tool_call>\n{{"name": "get_weather", "arguments": {_ARGS}}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "Look\n\nup.", "One moment.", _BOTH,
    ),
    "qwen3_coder": Answer(
        f"Look up.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        "Look up.", "", _BOTH, "<|im_start|>assistant\n<think>\n",
    ),
    "glm": Answer(
        f"Look up.</think>Sure.<tool_call>get_weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>get_time</tool_call>",
        "Look up.", "Sure.", _BOTH, "<|assistant|><think>",
    ),
    "llama3": Answer(f'{{"name": "get_weather", "parameters": {_ARGS}}}', calls=_ONE),
    "mistral_nemo": Answer(
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_ARGS}, "id": "abcdefgh1"}}, '
        '{"name": "get_time", "arguments": {}, "id": "abcdefgh2"}]', calls=_BOTH,
    ),
    "mistral_args": Answer(
        f"Sure.[TOOL_CALLS]get_weather[ARGS]{_ARGS}[TOOL_CALLS]get_time[ARGS]{{}}", "", "Sure.", _BOTH
    ),
    "kimi": Answer(
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{_ARGS}"
        "<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>", calls=_BOTH,
    ),
    "deepseek_v3": Answer(
        f"Look up.</think>Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_ARGS}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Look up.", "Sure.", _BOTH, "<｜Assistant｜><think>",
    ),
    "deepseek_dsml": Answer(
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
        f'{CITY}</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        calls=_BOTH,
    ),
    "lfm2": Answer(
        "<|tool_call_start|>[get_weather(city='Köln \"am\"\\nRhein {x}', days=3), get_time()]<|tool_call_end|>",
        calls=_BOTH,
    ),
    "pythonic": Answer('[get_weather(city="Köln \\"am\\"\\nRhein {x}", days=3), get_time()]', calls=_BOTH),
    "gemma4": Answer(
        f'<|tool_call>call:get_weather{{city:<|"|>{CITY}<|"|>,days:3}}<tool_call|>'
        "<|tool_call>call:get_time{}<tool_call|>",
        calls=_BOTH,
    ),
    "harmony": Answer(
        "<|channel|>analysis<|message|>Look up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{_ARGS}", "Look up.", "", _ONE, "<|start|>assistant",
    ),
    "minimax": Answer(
        f'Sure.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">{CITY}</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        "", "Sure.", _BOTH,
    ),
    "functionary": Answer(
        f"Sure.<function=get_weather>{_ARGS}</function><function=get_time>{{}}</function>", "", "Sure.", _BOTH
    ),
    "apertus": Answer(
        f'<|tools_prefix|>[{{"get_weather": {_ARGS}}}, {{"get_time": {{}}}}]<|tools_suffix|>', calls=_BOTH
    ),
    "plain": Answer(
        f'Sure.\n<tool_call>\n{{"name": "get_weather", "arguments": {_ARGS}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_time", "arguments": {}}\n</tool_call>', "", "Sure.", _BOTH,
    ),
}  # fmt: skip
MARKERS = {  # control tokens and user-defined tokens, as published vocabularies have them
    TokenType.CONTROL: [
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_end|>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>",
        "<|constrain|>", "<|call|>", "<|return|>", "<|tool_call_start|>", "<|tools_prefix|>", "<|tools_suffix|>",
        "<|tool_call>", "<tool_call|>", '<|"|>', "<minimax:tool_call>", "</minimax:tool_call>",
    ],
    TokenType.USER_DEFINED: [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
}  # fmt: skip


def template_of(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def with_markers(metadata: Any) -> Tokenizer:
    """Return the tokenizer of a model's metadata with tokens added for the markers, and templates that name them."""
    added = [(text, int(kind)) for kind, texts in MARKERS.items() for text in texts]
    tokens = [*metadata["tokenizer.ggml.tokens"], *(text for text, _ in added)]
    kinds = [*map(int, metadata["tokenizer.ggml.token_type"]), *(kind for _, kind in added)]
    named = "".join(path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.glob("*.jinja")))
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.chat_template": named}
    if (scores := metadata.get("tokenizer.ggml.scores")) is not None:
        keys["tokenizer.ggml.scores"] = [*map(float, scores), *[0.0] * len(added)]
    return tokenizer_from_gguf({**metadata, **keys})


def fold(events: Sequence[ChatEvent]) -> dict[str, Any]:
    """Return reasoning, content and calls (name, arguments as text, complete or not) of events."""
    texts: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for event in events:
        if isinstance(event, ReasoningDelta):
            texts["reasoning"] += event.text
        elif isinstance(event, ContentDelta):
            texts["content"] += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(texts["calls"])
            texts["calls"].append([event.name, "", False])
        elif isinstance(event, ToolCallDelta):
            assert event.index == len(texts["calls"]) - 1
            texts["calls"][event.index][1] += event.arguments
        elif isinstance(event, ToolCallEnd):
            texts["calls"][event.index][2] = True
    return texts


class GrammarChecker:
    """Runs grammars over a tokenizer, as the engine does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        table = TokenTable(tokenizer, tokenizer.vocab_size)
        self._library = llguidance.LLTokenizer(table, n_vocab=tokenizer.vocab_size, eos_token=table.eos_ids)
        self._mask = masks.allocate_token_bitmask(1, self._library.vocab_size)

    def run(self, grammar: str, ids: Sequence[int]) -> tuple[int, bool, list[int]]:
        """Return how many ids the grammar takes, whether it may end there, and the tokens that it forces next."""
        matcher = self.matcher(grammar)
        for count, token in enumerate(ids):
            masks.fill_next_token_bitmask(matcher, self._mask)
            if not self._mask[0][token // 32] >> (token % 32) & 1:
                return count, False, []
            assert matcher.consume_token(token), matcher.get_error()
        return len(ids), matcher.is_accepting(), matcher.compute_ff_tokens()

    def takes(self, grammar: str, text: str) -> bool:
        """Return whether a grammar accepts a whole text; where it forces tokens they are taken, as the engine does."""
        matcher = self.matcher(grammar)
        ids = self._encode(text)
        while ids:
            forced = matcher.compute_ff_tokens()
            if forced and forced != ids[: len(forced)]:
                written, rest = self._bytes(forced), self._bytes(ids)
                if not rest.startswith(written):
                    return False
                ids = [*forced, *self._encode(rest[len(written) :].decode())]
            masks.fill_next_token_bitmask(matcher, self._mask)
            token = ids.pop(0)
            if not self._mask[0][token // 32] >> (token % 32) & 1:
                return False
            assert matcher.consume_token(token), matcher.get_error()
        return bool(matcher.is_accepting())

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        made = llguidance.LLMatcher(self._library, grammar)
        assert not made.is_error(), made.get_error()
        return made

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=False, parse_special=True)

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self.tokenizer.token_bytes, ids))
