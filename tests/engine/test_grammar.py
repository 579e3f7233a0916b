"""Guided decoding in an engine: every kind of grammar, the same answer on any way, dead ends, ends in time, bounds."""

from __future__ import annotations

import json
import math
import random
import re
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.engine.speculative import DraftModel
from llm_worker_rbee.errors import GrammarDeadEndError, InvalidRequestError
from llm_worker_rbee.models import Transformer
from llm_worker_rbee.sampling_params import SamplingParams, StructuredOutputsParams
from llm_worker_rbee.structured_outputs import constraint as constraint_module
from llm_worker_rbee.structured_outputs import grammar as grammar_module
from llm_worker_rbee.structured_outputs.chat_grammar import answer_grammar
from llm_worker_rbee.structured_outputs.constraint import BUDGET_STEPS
from llm_worker_rbee.structured_outputs.grammar import LIMITS, MAX_CACHED_GRAMMARS, GrammarCompiler
from llm_worker_rbee.structured_outputs.grammar_check import GrammarChecker
from llm_worker_rbee.text_model import open_tokenizer
from llm_worker_rbee.tokenizer import Tokenizer
from llm_worker_rbee.tokenizer.chat.events import ChatOptions
from llm_worker_rbee.tokenizer.chat.format import ChatFormat
from llm_worker_rbee.weights import open_checkpoint
from tests.helpers import engine_runs, tiny_models
from tests.helpers.tiny_models import END, EOT, VOCAB

CHECKER = GrammarChecker()
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "the"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
COMPACT = {**PERSON, "x-guidance": {"whitespace_flexible": False}}
STUCK = {  # a list whose second item is never complete
    "type": "array", "prefixItems": [{"const": 12}, {"$ref": "#/$defs/x"}], "items": False, "minItems": 2,
    "$defs": {"x": {"$ref": "#/$defs/x"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_random(tmp_path_factory.mktemp("grammar") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Transformer:
    return engine_runs.load(path)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return open_tokenizer(open_checkpoint(path))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, VOCAB)


def guided(
    compiler: GrammarCompiler, max_tokens: int = 80, *, generated: list[int] | None = None, prompt: str = ">",
    eos: frozenset[int] = frozenset({END}), options: dict[str, Any] | None = None, **kind: Any,
) -> Request:  # fmt: skip
    params = SamplingParams(
        structured_outputs=CHECKER.check(StructuredOutputsParams(**kind)),
        **{"temperature": 0.9, "seed": 5, **(options or {})},
    )
    request = Request(list(prompt.encode()), params.resolve(), max_tokens, 5, eos, generated=generated or [])
    assert params.structured_outputs is not None
    request.constraint = compiler.compile(
        params.structured_outputs, sorted(eos), max_tokens, close_on_length=params.close_on_length,
        generated=generated or [],
    )  # fmt: skip
    return request


def text_of(answer: engine_runs.Answer) -> str:
    return b"".join(map(tiny_models.token_bytes, answer.tokens)).decode()


def engine_with(model: Transformer, compiler: GrammarCompiler, **options: Any) -> Engine:
    made = engine_runs.engine(model, **options)
    made.grammar_compiler = compiler
    return made


def answer_of(model: Transformer, compiler: GrammarCompiler, request: Request, **options: Any) -> engine_runs.Answer:
    return engine_runs.run(engine_with(model, compiler, **options), request).answer(request)


GBNF = 'root ::= "x" item+\nitem ::= [0-9] | "-" '
CHOICES = ['say "hi"', "naïve ☃", "back\\slash", "a/b|c", "line\nbreak", "(x)*"]
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": r"[0-9]{3}-[a-c]{2,4}"}, r"[0-9]{3}-[a-c]{2,4}"),
    "choice": ({"choice": CHOICES}, "|".join(map(re.escape, CHOICES))),
    "lark": ({"grammar": 'start: "a" B "!"\nB: /[xyz]{1,5}/'}, "a[xyz]{1,5}!"),
    "gbnf": ({"grammar": GBNF}, "x[0-9-]+"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_text_conforms(model: Transformer, compiler: GrammarCompiler, kind: str, seed: int) -> None:
    fields, pattern = KINDS[kind]
    answer = answer_of(model, compiler, guided(compiler, 200, options={"seed": seed}, **fields))
    text = text_of(answer)
    assert re.fullmatch(pattern, text) if answer.finish == "stop" else kind == "gbnf"


@pytest.mark.parametrize("schema", [PERSON, COMPACT])
@pytest.mark.parametrize("seed", range(4))
def test_json_conforms(model: Transformer, compiler: GrammarCompiler, schema: Any, seed: int) -> None:
    found = answer_of(model, compiler, guided(compiler, 240, options={"seed": seed}, json=schema))
    if found.finish == "stop":
        document = json.loads(text_of(found))
        assert list(document) == ["name", "age", "tags"]
        assert 0 <= document["age"] <= 150
        assert set(document["tags"]) <= {"a", "bb", "the"}


def test_any_json_object(model: Transformer, compiler: GrammarCompiler) -> None:
    request = guided(compiler, 120, json_object=True, options={"close_on_length": True})
    answer = answer_of(model, compiler, request)
    assert answer.finish == "stop"
    assert isinstance(json.loads(text_of(answer)), dict)


def test_forced_tokens_save_steps_and_are_always_right(model: Transformer, compiler: GrammarCompiler) -> None:
    engine, request = engine_with(model, compiler), guided(compiler, 200, json=COMPACT)
    answer = engine_runs.run(engine, request).answer(request)
    stats = engine.scheduler.stats
    assert stats.num_drafted_tokens == stats.num_accepted_tokens > 15
    assert engine.num_steps < len(answer.tokens) - 10


def replayed(compiler: GrammarCompiler, tokens: list[int], fields: dict[str, Any]) -> Any:
    """The constraint of a request that has these tokens, made anew, and its next mask."""
    fresh = guided(compiler, 200, generated=tokens, **fields).constraint
    fresh.masks = np.zeros((1, fresh.num_words), np.int32)
    fresh.fill([])
    return fresh.masks[0]


@pytest.mark.parametrize("fields", [{"json": PERSON}, {"json": COMPACT}, {"regex": "(the|then| the)*z"}])
def test_masks_are_a_function_of_the_tokens(compiler: GrammarCompiler, fields: dict[str, Any]) -> None:
    """Step by step, as drafts, and by replay into a new matcher: jump-forward and restarts rely on it."""
    rng = random.Random(1)
    for _ in range(4):
        one = guided(compiler, 200, **fields).constraint
        tokens: list[int] = []
        for _ in range(40):
            drafts = one.next_drafts([], 8)
            one.masks = np.zeros((1 + len(drafts), one.num_words), np.int32)
            one.fill(drafts)
            rows = one.masks.copy()
            for i in range(len(rows)):
                assert np.array_equal(rows[i], replayed(compiler, tokens + drafts[:i], fields)), (tokens, i)
            allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little")).tolist()
            token = rng.choice(allowed)
            assert not drafts or allowed == drafts[:1]
            if token == END:
                break
            assert one.consume(token)
            tokens.append(token)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"speculative": "ngram", "draft_tokens": 5},
    {"max_step_tokens": 3, "block_size": 16, "n_blocks": 16},
    {"max_batch": 2},
    {"prefix_cache": False, "n_blocks": 12, "max_context": 128},
]


def some_requests(compiler: GrammarCompiler) -> list[Request]:
    every = [{"json": PERSON}, {"json": COMPACT}, {"regex": "[ab]{5,30}c"}, {"json_object": True}, {"choice": CHOICES}]
    more = [
        {}, {"temperature": 0.0}, {"logprobs": 3}, {"logprobs": 2, "logprobs_mode": "masked"},
        {"close_on_length": True}, {"repetition_penalty": 1.3, "top_k": 20, "top_p": 0.9},
    ]  # fmt: skip
    return [
        guided(compiler, 60, prompt=f"> {i} the the", options={"seed": i, **options}, **fields)
        for i, (fields, options) in enumerate((fields, options) for fields in every for options in more)
    ]


@pytest.mark.parametrize("settings", SETTINGS)
def test_same_answer_alone_and_in_any_batch(
    model: Transformer, compiler: GrammarCompiler, settings: dict[str, Any], expected: list[engine_runs.Answer]
) -> None:
    engine, requests = engine_with(model, compiler, **settings), some_requests(compiler)
    free = [
        Request(list(b"free"), SamplingParams(seed=i).resolve(), 40, i, frozenset({END}), generated=[])
        for i in range(4)
    ]
    listener = engine_runs.run(engine, *free, *requests)
    for request, wanted in zip(requests, expected, strict=True):
        assert listener.answer(request) == wanted
    if settings.get("n_blocks", 128) < 17:
        assert engine.scheduler.stats.num_preemptions > 0


@pytest.fixture(scope="module")
def expected(model: Transformer, compiler: GrammarCompiler) -> list[engine_runs.Answer]:
    """Each alone, without drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constraint_module, "MAX_FORCED_TOKENS", 0)
        return [answer_of(model, compiler, request) for request in some_requests(compiler)]


def test_same_answer_with_a_draft_model(
    path: Path, model: Transformer, compiler: GrammarCompiler, expected: list[engine_runs.Answer]
) -> None:
    other = engine_runs.load(tiny_models.write_random(path.with_name("draft.gguf"), tiny_models.random_hf(1)))
    engine = engine_with(model, compiler, draft_tokens=4)
    engine.drafter = DraftModel(other, engine.config, VOCAB)
    requests = some_requests(compiler)
    listener = engine_runs.run(engine, *requests)
    assert [listener.answer(request) for request in requests] == expected


def test_same_answer_after_a_restart(
    model: Transformer, compiler: GrammarCompiler, expected: list[engine_runs.Answer]
) -> None:
    """Another engine goes on after the tokens that were delivered before."""
    for number in (0, 4, 8, 13, 22):
        request, wanted = some_requests(compiler)[number], expected[number]
        for cut in {1, len(wanted.tokens) // 2, len(wanted.tokens) - 1} - {0}:
            structured = request.params.structured_outputs
            assert structured is not None
            again = guided(
                compiler, 60, prompt=bytes(request.prompt).decode(), generated=wanted.tokens[:cut],
                options={name: getattr(request.params, name) for name in (
                    "seed", "temperature", "logprobs", "logprobs_mode", "close_on_length", "repetition_penalty",
                    "top_k", "top_p")},
                **{structured.kind: getattr(structured, structured.kind)},
            )  # fmt: skip
            again.seed = request.seed
            found = answer_of(model, compiler, again)
            assert (found.tokens, found.finish) == (wanted.tokens[cut:], wanted.finish), (number, cut)


def test_end_of_text_is_allowed_where_the_grammar_accepts(compiler: GrammarCompiler) -> None:
    one = guided(compiler, regex="a{2,3}", eos=frozenset({END, EOT})).constraint
    for token, ends in ((ord("a"), False), (ord("a"), True), (ord("a"), True)):
        assert one.consume(token)
        one.masks = np.zeros((1, one.num_words), np.int32)
        one.fill([])
        bits = np.unpackbits(one.masks[0].view(np.uint8), bitorder="little")
        assert bool(bits[END]) == bool(bits[EOT]) == ends
    assert one.is_complete


def test_ignore_eos_does_not_outlive_the_grammar(model: Transformer, compiler: GrammarCompiler) -> None:
    answer = answer_of(model, compiler, guided(compiler, regex="abc", options={"ignore_eos": True}))
    assert (text_of(answer), answer.finish) == ("abc", "stop")


def test_max_tokens_inside_a_document_is_length(model: Transformer, compiler: GrammarCompiler) -> None:
    answer = answer_of(model, compiler, guided(compiler, 5, json=PERSON))
    assert (len(answer.tokens), answer.finish) == (5, "length")


@pytest.mark.parametrize("max_tokens", [30, 45, 70, 120])
@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "array"}, COMPACT])
def test_close_on_length_ends_the_document(
    model: Transformer, compiler: GrammarCompiler, schema: dict[str, Any], max_tokens: int
) -> None:
    for seed in range(3):
        options = {"seed": seed, "close_on_length": True}
        answer = answer_of(model, compiler, guided(compiler, max(max_tokens, 60) if schema is COMPACT else max_tokens,
                                                   json=schema, options=options))  # fmt: skip
        assert answer.finish == "stop"
        json.loads(text_of(answer))


def test_close_on_length_of_a_regex(model: Transformer, compiler: GrammarCompiler) -> None:
    answer = answer_of(model, compiler, guided(compiler, 20, regex="[a-y ]*z", options={"close_on_length": True}))
    assert answer.finish == "stop"
    assert text_of(answer).endswith("z")


def test_dead_end_delivers_its_tokens_and_fails_alone(model: Transformer, compiler: GrammarCompiler) -> None:
    engine = engine_with(model, compiler)
    stuck, free = guided(compiler, json=STUCK), guided(compiler, regex="[a-z]{20}")
    listener = engine_runs.run(engine, stuck, free)
    *before, last = listener.outputs[stuck]
    assert bytes(output.token for output in before).startswith(b"[")
    assert isinstance(last.error, GrammarDeadEndError)
    assert last.error.code == "GRAMMAR_DEAD_END"
    assert len(text_of(listener.answer(free))) == 20


@pytest.mark.parametrize("num_properties", [600, 1000])
def test_objects_of_many_optional_properties_run(
    model: Transformer, compiler: GrammarCompiler, num_properties: int
) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(num_properties)}}
    for more in ({}, {"additionalProperties": False}):
        CHECKER.check(StructuredOutputsParams(json={**schema, **more}))
        last = f'{{"p0":"", "p{num_properties - 1}":'.encode()
        answer = answer_of(model, compiler, guided(compiler, 20, json={**schema, **more}, generated=list(last)))
        assert answer.finish in ("stop", "length")
        text = b"".join(map(tiny_models.token_bytes, answer.tokens))  # its end may lie inside a character
        assert text.strip().startswith(b'"')


@pytest.mark.parametrize("in_chat", [False, True])
def test_whitespace_never_runs_away(compiler: GrammarCompiler, in_chat: bool) -> None:
    """A model that takes whitespace wherever it may gets to the end of the document all the same."""
    schema = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
    fields: dict[str, Any] = {"json": schema}
    if in_chat:
        fields = {"grammar": answer_grammar(ChatFormat(), ChatOptions(), ("json", json.dumps(schema)))}
    one = guided(compiler, 2000, **fields).constraint
    one.masks = np.zeros((1, one.num_words), np.int32)
    text = b""
    while not one.is_complete:
        one.fill([])
        allowed = np.flatnonzero(np.unpackbits(one.masks[0].view(np.uint8), bitorder="little")).tolist()
        token = next((token for token in allowed if tiny_models.token_bytes(token) in (b"\n", b" ")), allowed[0])
        assert one.consume(token)
        text += tiny_models.token_bytes(token)
        assert len(text) < 500
    assert json.loads(text) == [1, 1, 1]
    assert set(re.findall(rb"\s+", text)) == {b"\n" + 40 * b" "}


def counted(compiler: GrammarCompiler, patch: pytest.MonkeyPatch) -> list[str]:
    """The kind of each grammar that is compiled from now on."""
    kinds: list[str] = []
    match = compiler._match

    def count(kind: str, text: str) -> Any:
        kinds.append(kind)
        return match(kind, text)

    patch.setattr(compiler, "_match", count)
    return kinds


def test_dead_end_compiles_nothing_again(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = GrammarCompiler(lambda: tokenizer, VOCAB)
    stuck, refused = guided(own, json=STUCK), guided(own, regex="abc").constraint
    kinds, entries = counted(own, monkeypatch), list(own._cache.values())
    listener = engine_runs.run(engine_with(model, own), stuck)
    assert isinstance(listener.outputs[stuck][-1].error, GrammarDeadEndError)
    assert not refused.consume(ord("x"))
    assert kinds == []
    assert list(own._cache.values()) == entries


BRANCHES = {"regex": "|".join(f"{char}[a-z]{{30}}{char.upper()}" for char in "abcd")}


def follow(one: Any, char: str) -> None:
    """Let a constraint of BRANCHES go through one of them."""
    one.masks = np.zeros((1, one.num_words), np.int32)
    for token in f"{char}{'x' * 30}{char.upper()}".encode():
        one.fill([])
        assert one.consume(token)
    assert one.is_complete


def test_matcher_that_is_used_up_is_replaced_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of the lexer suffice for one of the branches; the cache keeps a newer entry."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 80)
    monkeypatch.setattr(grammar_module, "MAX_SHARED_COMPILE_S", math.inf)
    own = GrammarCompiler(lambda: tokenizer, VOCAB)
    some = [guided(own, 200, **BRANCHES).constraint for _ in "abcd"]
    kinds = counted(own, monkeypatch)
    newer: Any = None
    for char, one in zip("abcd", some, strict=True):
        follow(one, char)
        if char == "b":
            assert not own._cache
            guided(own, **BRANCHES)
            (newer,) = own._cache.values()
    assert kinds == ["regex"] * 4  # b, c and d alone, and the newer entry
    assert list(own._cache.values()) == [newer]


def test_time_of_the_token_table_is_not_that_of_the_first_grammar(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def open_slowly() -> Tokenizer:
        nonlocal now
        now += 10.0
        return tokenizer

    for name in ("thread_time", "perf_counter"):
        monkeypatch.setattr(grammar_module.time, name, lambda: now)
    own = GrammarCompiler(open_slowly, VOCAB)
    kinds = counted(own, monkeypatch)
    for _ in range(2):
        guided(own, **BRANCHES)
    (entry,) = own._cache.values()
    assert now == 10.0
    assert entry.matcher is not None
    assert kinds == ["regex"]


@pytest.mark.parametrize("slow_clock", ["thread_time", "perf_counter"])
def test_processor_time_ends_a_request_and_wall_time_does_not(
    compiler: GrammarCompiler, slow_clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that takes no processor time may take long where the machine is busy."""
    clocks = {"thread_time": count(step=slow_clock == "thread_time"), "perf_counter": count()}  # seconds a reading
    for name, readings in clocks.items():
        monkeypatch.setattr(constraint_module.time, name, partial(next, readings))
    constraint = guided(compiler, regex="a+").constraint
    constraint.masks = np.zeros((1, constraint.num_words), np.int32)
    for _ in range(2 * BUDGET_STEPS):
        assert constraint.consume(ord("a"))
        constraint.fill([])
    assert constraint.is_too_slow == (slow_clock == "thread_time")


def test_slow_grammar_is_never_compiled_in_a_step(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has a lexer of its own; from the second on the next one is compiled ahead."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 80)
    monkeypatch.setattr(grammar_module, "MAX_SHARED_COMPILE_S", 0.0)
    own = GrammarCompiler(lambda: tokenizer, VOCAB)
    kinds = counted(own, monkeypatch)
    some = []
    for num_compiled in (1, 3, 4, 5):
        some.append(guided(own, 200, **BRANCHES).constraint)
        (entry,) = own._cache.values()
        assert entry.matcher is None
        if entry.spare is not None:
            entry.spare.result()
        assert len(kinds) == num_compiled
    for char, one in zip("abcd", some, strict=True):
        follow(one, char)
    assert len(kinds) == 5


def test_masked_logprobs_are_of_allowed_tokens(model: Transformer, compiler: GrammarCompiler) -> None:
    both = [
        answer_of(model, compiler, guided(compiler, regex="[ab]{8}", options={"logprobs": 5, "logprobs_mode": mode}))
        for mode in ("raw", "masked")
    ]
    assert both[0].tokens == both[1].tokens
    for raw, masked in zip(both[0].logprobs, both[1].logprobs, strict=True):
        assert len(raw.top) == 5
        assert {token for token, _ in masked.top} == set(b"ab")
        assert sum(np.exp(value) for _, value in masked.top) == pytest.approx(1)
        assert masked.logprob > raw.logprob


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "object", "properties": {"a": {"not": {}}}}}, '"not"'),
    ({"json": {"type": "nothing"}}, "nothing"),
    ({"json": {"$ref": "#/$defs/none"}}, "none"),
    ({"json": {"type": "string", "format": "idn-email"}}, "Unknown format: idn-email"),
    ({"json": {"type": "string", "format": 5}}, "format"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"grammar": "start: missing"}, "missing"),
    ({"grammar": "root ::= ("}, ""),
    ({"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}}}, "too big"),
    ({"regex": "|".join(f"word{i}x" for i in range(100_000))[: 1 << 20]}, "to compile"),
    ({"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}, ""),
]


@pytest.mark.parametrize(("fields", "reason"), INVALID, ids=lambda v: str(v)[:30])
def test_invalid_grammar_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    params, start = StructuredOutputsParams(**fields), time.perf_counter()
    with pytest.raises(InvalidRequestError) as caught:
        CHECKER.check(params)
    assert caught.value.field == "structured_outputs"
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize("name", ["path", "password", "binary"])
def test_format_that_is_not_of_json_schema_is_an_annotation(compiler: GrammarCompiler, name: str) -> None:
    form = {"type": "string", "format": name}
    schema = {
        "type": "object", "required": ["format", "const", "list", "fixed"], "additionalProperties": False,
        "properties": {"format": form, "const": {"$ref": "#/$defs/form"}, "list": {"type": "array", "items": form},
                       "fixed": {"const": form}},
        "$defs": {"form": {"anyOf": [form, {"type": "null"}]}},
    }  # fmt: skip
    CHECKER.check(StructuredOutputsParams(json=schema))
    document = {"format": "x", "const": "y", "list": ["z"], "fixed": form}
    one = guided(compiler, 200, json=schema).constraint
    assert all(map(one.consume, json.dumps(document).encode()))
    assert one.is_complete
    in_chat = answer_grammar(ChatFormat(), ChatOptions(), ("json", json.dumps(schema)))
    CHECKER.check(StructuredOutputsParams(grammar=in_chat))


HOSTILE: list[dict[str, Any]] = [
    {"regex": "(a|aa)*b" * 10},
    {"regex": "(.*a){25}"},
    {"regex": ".*a.{30}"},
    {"regex": "(a{1000}){1000}"},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}, {}]}}}},
    {"json": {"type": "object", "description": "x" * 1_000_000}},
    {"json": {"enum": [f"{'x' * 90}{i}" for i in range(9_000)]}},
    {"choice": [f"choice {i}" for i in range(10_000)]},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=lambda v: str(v)[:30])
def test_hostile_grammar_is_bounded(model: Transformer, compiler: GrammarCompiler, fields: dict[str, Any]) -> None:
    """It is refused, or its answer ends, in bounded time; another request goes on beside it."""
    engine, free = engine_with(model, compiler), guided(compiler, regex="[a-z]{10}")
    start = time.perf_counter()
    hostile = guided(compiler, 12, **fields)
    listener = engine_runs.run(engine, hostile, free)
    assert listener.outputs[hostile][-1].finish_reason is not None
    assert listener.answer(free).finish == "stop"
    assert time.perf_counter() - start < 60


def test_cache_is_bounded_and_shared_limits_fail_no_other_request(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a compiled grammar share the states of its lexer; one that finds them used up begins anew."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 40)
    monkeypatch.setattr(grammar_module, "MAX_SHARED_COMPILE_S", math.inf)
    own = GrammarCompiler(lambda: tokenizer, VOCAB)
    expected = [
        answer_of(model, GrammarCompiler(lambda: tokenizer, VOCAB), guided(own, 30, options={"seed": i}, **REGEX))
        for i in range(6)
    ]
    found = [answer_of(model, own, guided(own, 30, options={"seed": i}, **REGEX)) for i in range(6)]
    assert found == expected
    for i in range(MAX_CACHED_GRAMMARS + 5):
        guided(own, regex=f"a{i}")
    assert len(own._cache) <= MAX_CACHED_GRAMMARS


REGEX = {"regex": "([a-m]+ ){0,9}(foo|bar|baz)+"}
