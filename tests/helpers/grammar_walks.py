"""Random walks through grammars as an engine goes: masks, forced tokens, drafts that are accepted or rolled back."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from llm_worker_rbee.backends.ops import TokenMask
from llm_worker_rbee.sampling_params import StructuredOutputsParams
from llm_worker_rbee.structured_outputs.chat_grammar import answer_grammar
from llm_worker_rbee.structured_outputs.constraint import Constraint
from llm_worker_rbee.structured_outputs.grammar import GrammarCompiler
from llm_worker_rbee.tokenizer import Detokenizer, Tokenizer
from llm_worker_rbee.tokenizer.chat.events import ChatOptions, Tool
from llm_worker_rbee.tokenizer.chat.format import ChatFormat
from llm_worker_rbee.tokenizer.chat.parser import ChatParser
from tests.helpers.chat_formats import fold

Drafting = Literal["none", "forced", "drafts"]
MODES: tuple[Drafting, ...] = ("none", "forced", "drafts")
NUM_DRAFTS, MAX_OPEN_STEPS = 6, 40
WORDS = ("city", "days", "unit", "Straße", "a b", "x-y", "id", "日", "q", "name", "arguments", "type")
TEXTS = ("celsius", "a", "", 'no "q"', "<tool_call>", "</tool_call>", "new\nline", "ü", "\\d", "{", "true", "12")
PATTERNS = ("^[a-z]{2,5}$", "[0-9]+", "^a|b$", r"^\d{4}-\d{2}$", "^(x/y)*$")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of the kinds that tools have."""
    leaves = ("string", "string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "any", "date")
    kind = rng.choice(leaves if depth > 2 else (*leaves, "object", "object", "array", "array", "anyOf", "dict"))
    if kind == "object":
        return random_object(rng, depth + 1)
    if kind == "array":
        limits = rng.choice(({}, {"minItems": 1, "maxItems": 3}, {"maxItems": 2}))
        return {"type": "array", "items": random_schema(rng, depth + 1), **limits}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    simple: dict[str, Any] = {
        "string": {"type": "string", **rng.choice(({}, {}, {"minLength": 2, "maxLength": 9}))},
        "integer": {"type": "integer", **rng.choice(({}, {"minimum": -3}, {"minimum": 0, "maximum": 120}))},
        "number": {"type": "number", **rng.choice(({}, {"exclusiveMinimum": 0}, {"minimum": -1.5, "maximum": 2}))},
        "enum": {"enum": rng.sample(TEXTS, rng.randint(1, 5)) + rng.choice(([], [1], [None, True]))},
        "const": {"const": rng.choice((*TEXTS, 1, None))},
        "pattern": {"type": "string", "pattern": rng.choice(PATTERNS)},
        "date": {"type": "string", "format": rng.choice(("date", "uuid", "email"))},
        "dict": {"type": "object", "additionalProperties": {"type": "integer"}},
        "any": {},
    }
    return dict(simple.get(kind, {"type": kind}))


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return the schema of an object, such as the arguments of a tool."""
    names = rng.sample(WORDS, rng.randint(0 if depth else 1, 5))
    properties = {name: random_schema(rng, depth) for name in names}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    if depth == 0 and rng.random() < 0.2:
        schema["$defs"] = {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {}}}}
        properties["tree"] = {"$ref": "#/$defs/node"}
    return schema


def random_tools(rng: random.Random) -> list[Tool]:
    names = rng.sample(("get_weather", "f", "a_b", "find-all"), rng.randint(1, 3))
    return [Tool(name, parameters=random_object(rng), strict=rng.random() < 0.5) for name in names]


def random_options(rng: random.Random, chat_format: ChatFormat) -> tuple[ChatOptions, tuple[str, Any] | None, str]:
    """Return options of a chat, the form of its content, and the end of its prompt; all of them need a grammar."""
    tools, start = random_tools(rng), chat_format.reasoning.start
    tail = rng.choice((start, chat_format.reasoning.end)) if chat_format.has_reasoning else ""
    tail = "<|start|>assistant" if chat_format.tools.kind == "harmony" else tail
    fields: dict[str, Any] = {"tools": tools, "parallel_tool_calls": rng.random() < 0.7}
    structured: tuple[str, Any] | None = None
    choice = rng.choice(("required", "required", "named", "auto", "none", "structured"))
    if choice == "named":
        fields["tool_name"] = tools[0].name
    elif choice == "structured":
        structured = "json_object", True
    elif choice == "auto":
        fields["tools"] = [Tool(tool.name, parameters=tool.parameters, strict=True) for tool in tools]
    else:
        fields["tool_choice"] = choice
    if chat_format.has_reasoning and rng.random() < 0.4:
        fields["thinking_budget"] = rng.choice((0, 3, 20))
    return ChatOptions(**fields), structured, tail


@dataclass
class Walk:
    """What a walk came to: its tokens, and whether the grammar may end after them."""

    tokens: list[int]
    is_complete: bool = False
    error: str = ""


class Walker:
    """Walks through grammars over the tokens of a model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size or tokenizer.vocab_size
        self._compiler = GrammarCompiler(lambda: tokenizer, self.vocab_size)
        self._eos_ids = sorted(tokenizer.eos_ids)
        texts = ('"', '"}', "}", "]", '"]', '",', ",", ")", ">", "\n", "</", " ", "0", "null", "true", '"}}\n', "}}\n")
        ids = (tokenizer.encode(text, add_special=False) for text in texts)
        self._ending = sorted({tokens[-1] for tokens in ids if tokens})

    def start(self, grammar: str, max_tokens: int) -> Constraint:
        return self._compiler.compile(StructuredOutputsParams(grammar=grammar), self._eos_ids, max_tokens)

    def walk(self, grammar: str, rng: random.Random, drafting: Drafting, max_steps: int) -> Walk:
        """Take allowed tokens until the end of the text, up to a number of steps."""
        constraint, walk = self.start(grammar, max_steps), Walk([])
        while len(walk.tokens) < max_steps and not walk.is_complete and not walk.error:
            drafts = self._drafts(constraint, rng, drafting)
            constraint.masks = np.zeros((1 + len(drafts), constraint.num_words), np.int32)
            constraint.fill(drafts)
            for mask, draft in zip(constraint.masks, [*drafts, None], strict=True):
                token = self._choose(mask, draft, rng, len(walk.tokens))
                if token in self._eos_ids:
                    walk.is_complete = True
                elif not constraint.consume(token):
                    reason = constraint.matcher.get_error().partition("\n")[0]
                    walk.error = f"{constraint.describe_error()} ({reason}); the next is {token}, drafts are {drafts}"
                else:
                    walk.tokens.append(token)
                    walk.is_complete = constraint.is_complete
                if walk.is_complete or walk.error or token != draft:
                    break
        return walk

    def _drafts(self, constraint: Constraint, rng: random.Random, drafting: Drafting) -> list[int]:
        if drafting == "none":
            return []
        guesses: list[int] = []
        if drafting == "drafts":
            copy = constraint.matcher.deep_copy()
            mask = np.zeros(constraint.num_words, np.int32)
            while len(guesses) < NUM_DRAFTS and not copy.is_stopped():
                copy.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                guesses.append(self._choose(mask, None, rng, 0))
                if not copy.consume_token(guesses[-1]):
                    break
        return constraint.next_drafts(guesses, NUM_DRAFTS)

    def _choose(self, mask: TokenMask, draft: int | None, rng: random.Random, step: int) -> int:
        """Return an allowed token: the draft, the end of the text, one that ends a value, or any."""
        ends, few = ([token for token in ids if _allows(mask, token)] for ids in (self._eos_ids, self._ending))
        if draft is not None and rng.random() < 0.7 and _allows(mask, draft):
            return draft
        if ends and (rng.random() < 0.05 or step > MAX_OPEN_STEPS):
            return rng.choice(ends)
        if few and rng.random() < 0.3:
            return rng.choice(few)
        words = np.flatnonzero(mask)
        first = 32 * int(words[rng.randrange(len(words))])
        return rng.choice([token for token in range(first, first + 32) if _allows(mask, token)])

    def parse(self, chat_format: ChatFormat, options: ChatOptions, tail: str, tokens: Sequence[int]) -> dict[str, Any]:
        """Return what the answer consists of, as a generation finds it."""
        parser = ChatParser(chat_format, tools=options.tools, prompt_tail=tail)
        detokenizer = Detokenizer(self.tokenizer)
        events = []
        for token in tokens:
            is_marker = token in parser.marker_ids
            events += parser.push(detokenizer.flush() if is_marker else detokenizer.push(token))
            events += parser.push_marker(token) if is_marker else []
        return fold(events + parser.push(detokenizer.finish()) + parser.finish())


def _allows(mask: TokenMask, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


def check_walks(
    walker: Walker, chat_format: ChatFormat, seeds: Iterable[str], max_steps: int, modes: Sequence[Drafting] = MODES
) -> Counter[str]:
    """Walk through the grammar of each seed in each way; raise where one cannot go on, or its calls cannot be read."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        options, structured, tail = random_options(rng, chat_format)
        grammar = answer_grammar(chat_format, options, structured, prompt_tail=tail)
        if grammar is None:
            continue
        for drafting in modes:
            walk = walker.walk(grammar, random.Random(seed), drafting, max_steps)
            text = walker.tokenizer.decode(walk.tokens, skip_special=False)
            assert not walk.error, (seed, drafting, walk.error, text, grammar)
            counts += Counter(walks=1, steps=len(walk.tokens), complete=int(walk.is_complete))
            if walk.is_complete and (options.tool_choice == "required" or options.tool_name is not None):
                counts["calls"] += _check_calls(walker.parse(chat_format, options, tail, walk.tokens), options, text)
    return counts


def _check_calls(parsed: dict[str, Any], options: ChatOptions, text: str) -> int:
    assert parsed["calls"], text
    assert parsed["content"] == "", text
    for name, arguments, is_complete in parsed["calls"]:
        assert is_complete, text
        assert name in [tool.name for tool in options.tools], text
        assert isinstance(json.loads(arguments), dict), text
    return len(parsed["calls"])
