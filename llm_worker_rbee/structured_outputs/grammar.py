"""Grammars of structured outputs: a request's parameters -> an llguidance matcher over the model's own tokens.

grammar_check.py has checked a grammar before it comes here. `GrammarCompiler` belongs to an engine. It builds a token
table once, when the first guided request comes, and keeps the compiled grammars that were used last. Time and memory
of a grammar are bounded by LIMITS.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from ..errors import GrammarDeadEndError, InvalidRequestError, WorkerError
from ..sampling_params import STRUCTURED, StructuredOutputsParams
from ..tokenizer.chat.format import marker_ids
from .chat_grammar import escape_slashes, quote
from .constraint import Constraint, lower_thread_priority
from .json_schema import prepare_schema

if TYPE_CHECKING:  # only its interface is used
    from ..tokenizer import Tokenizer

logger = logging.getLogger("llm_worker_rbee.engine")
# Of llguidance's LLParserLimits. The size bounds compiling and masks, which are quadratic in the optional properties of
# an object: one is 8 symbols, and 4 items of a row. Fuel and states bound a mask. A state of a lexer takes 1 to 2 kB.
LIMITS = {
    "max_grammar_size": 10_000,
    "max_items_in_row": 12_000,
    "initial_lexer_fuel": 250_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 10_000,
}
# Sets of tokens that a mask takes as one where all of them are allowed: whitespace, and up to so many characters of a
# JSON string. The lengths matter where few characters are left of a string with a maxLength: a set that fits saves
# looking at its tokens, and one that does not costs a walk of its own. With these the slowest masks are the quickest.
WHITESPACE, STRING_CHARACTER, SLICE_LENGTHS = r"[\x20\x0A\x0D\x09]+", r'[^"\\\x00-\x1F\x7F]', (6, 7, 8, 14, 30)
SLICES = (WHITESPACE, *(f"{STRING_CHARACTER}{{1,{length}}}" for length in SLICE_LENGTHS), f"{STRING_CHARACTER}+")
ANY_OBJECT = {"type": "object"}
MAX_CACHED_GRAMMARS = 32
MAX_CACHED_CHARS = 4 << 20
MAX_SHARED_COMPILE_S = 0.02  # of a grammar whose lexer requests share
MAX_REASON_CHARS = 300
# Parts of llguidance's messages: a position, definitions that closing adds to a schema, expressions as it prints them.
POSITION = re.compile(r"^(?:at )?\d+\(\d+\): ")
ADDED_SCHEMA = re.compile(r"(?:json-schema:///)?#/\$defs/(?:closed|number)-\d+")
EXPRESSION = re.compile(r":?\s+\((?:And|Or|Not|Concat|Repeat|Literal|Regex|SearchRegex)\b.*")
NUM_THREADS = 2  # that compile
ANCHOR = "\x02"  # a character that no token of a SentencePiece vocabulary has together with others
MAX_GREEDY_BYTES = 32  # of a token
# Tokens that end a document soon, in the order in which a search for its end tries them.
ENDING_TEXTS = (
    '"}]}', '"}}', '"]}', '"}]', '"}', '"]', '"', '":"', '":', '","', '",', "}]}", "}}", "]}", "}]", "}", "]", '""',
    "[]", "{}", "0", "1", "null", "true", "false", '": "', '": ', '", "', ',"', ', "', ",", ":", '{"', '["', "{", "[",
    " ", *map(chr, range(0x21, 0x7F)),
)  # fmt: skip


@cache
def _library() -> Any:
    import llguidance

    return llguidance


def _limits() -> Any:
    return _library().LLParserLimits(**LIMITS, verbose_errors=False)


def to_grammar(params: StructuredOutputsParams) -> str:
    """Return a request's constraint as a grammar of llguidance, without calling it; raise for a bad schema."""
    if params.kind in ("json", "json_object"):
        try:
            schema = json.loads(str(params.json)) if params.kind == "json" else ANY_OBJECT
            prepared = prepare_schema(schema, is_open=params.additional_properties == "open")
            return json.dumps({"grammars": [{"json_schema": prepared}]})
        except ValueError as error:
            raise invalid(params.kind, str(error)) from None
        except RecursionError:
            raise invalid(params.kind, "it is nested too deeply") from None
    if params.regex is not None:
        return f"start: /{escape_slashes(params.regex)}/" if params.regex else 'start: ""'
    if params.choice is not None:
        return f"start: CHOICE\nCHOICE: {' | '.join(map(quote, params.choice))}"
    return str(params.grammar)


def invalid(kind: str, reason: str) -> InvalidRequestError:
    """Return the error of a grammar that cannot be used; positions count only in a text that the client wrote."""
    text = shorten(reason if kind == "grammar" else POSITION.sub("", reason))
    return InvalidRequestError(f"{STRUCTURED}.{kind} cannot be used: {text}", STRUCTURED)


def shorten(reason: str) -> str:
    """Return the informative line of an llguidance error."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    error = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    text = (error or (lines[0] if lines else "no reason given")).partition("; following special tokens")[0]
    text = EXPRESSION.sub("", ADDED_SCHEMA.sub("a part of it", text))
    return text if len(text) <= MAX_REASON_CHARS else f"{text[: MAX_REASON_CHARS - 3]}..."


class TokenTable:
    """The tokens of a model for llguidance: bytes by id, special ids, and an encoder that never raises."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        if tokenizer.decode_error is not None:
            raise InvalidRequestError(
                f"{STRUCTURED} cannot be used with this model: {tokenizer.decode_error}", STRUCTURED
            )
        tokenizer.pad_to(vocab_size)
        self.tokens = list(map(tokenizer.token_bytes, range(vocab_size)))
        self.eos_ids = sorted(token for token in tokenizer.eos_ids if token < vocab_size)
        # Tokens that a grammar names: llguidance rolls back the right number of bytes only if they are special.
        named = {token for token in marker_ids(tokenizer).values() if token < vocab_size}
        special = (token for token in tokenizer.control_ids if token < vocab_size)
        self._special = frozenset({*special, *self.eos_ids, *named})
        self.special_token_ids = sorted(self._special)
        self.eos_token_id = self.eos_ids[0] if self.eos_ids else vocab_size - 1
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer
        self._before = ANCHOR if tokenizer.space_at_start else ""  # so that the encoder adds no space to a text
        self._num_before = len(tokenizer.encode(self._before, add_special=False))

    def __call__(self, text: str) -> list[int]:
        """Return tokens with the bytes of a text, none of them special: llguidance takes other bytes for an error."""
        data = text.encode()
        try:
            ids = self._tokenizer.encode(self._before + text, add_special=False)[self._num_before :]
        except WorkerError:  # an exception would put the matcher into its error state
            ids = []
        is_same = b"".join([self.tokens[token] for token in ids if token < len(self.tokens)]) == data
        return ids if is_same and self._special.isdisjoint(ids) else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """Return the longest token, repeatedly."""
        ids: list[int] = []
        while size := next((size for size in range(MAX_GREEDY_BYTES, 0, -1) if data[:size] in self._ids), 0):
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """The ids of tokens that are not special, by their bytes."""
        return {text: i for i, text in reversed(list(enumerate(self.tokens))) if text and i not in self._special}

    @cached_property
    def ending_tokens(self) -> list[int]:
        """The ids of ENDING_TEXTS that are tokens."""
        ids = (self._ids.get(text.encode(), -1) for text in ENDING_TEXTS)
        return list(dict.fromkeys(token for token in ids if token >= 0))


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A grammar and the next request's matcher: a copy of `matcher`, or for a slow grammar a separate matcher.

    Copies share the states of the lexer. One that finds them used up compiles the grammar again inside a step, which
    must not take long. So a grammar that is slow to compile has a `spare` for the next request instead, if it was used
    more than once.
    """

    text: str
    matcher: Any
    spare: Future[Any] | None = None


class GrammarCompiler:
    """Makes the constraints of an engine's requests, in threads of its own."""

    def __init__(self, open_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._open_tokenizer = open_tokenizer
        self._cache: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()
        self._lock, self._tokenizer_lock = threading.Lock(), threading.Lock()
        self._built: tuple[TokenTable, Any] | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar", initializer=lower_thread_priority)

    def submit(self, *args: Any, **options: Any) -> Future[Constraint]:
        """Start `compile` with its arguments; the future raises what it raises."""
        return self._threads.submit(self.compile, *args, **options)

    def compile(
        self,
        params: StructuredOutputsParams,
        eos_ids: Sequence[int],
        max_tokens: int,
        *,
        close_on_length: bool = False,
        generated: Sequence[int] = (),
    ) -> Constraint:
        """Return the constraint of a request; `generated` are output tokens that it has already."""
        matcher, match_alone = self._matcher_of(params)
        table, _ = self._tokenizer
        constraint = Constraint(
            matcher,
            table.eos_ids or [table.eos_token_id],
            eos_ids,
            self.vocab_size,
            max_tokens,
            match_alone,
            table.ending_tokens if close_on_length else None,
        )
        for token in generated:
            if not constraint.replay(token):
                raise GrammarDeadEndError(constraint.describe_error())
        constraint.advance(())  # the first mask, here, where no step waits for it
        return constraint

    def make_executor(self) -> Any:
        """Return an executor that fills the masks of several matchers at once."""
        return _library().LLExecutor(num_threads=min(8, max(1, (os.cpu_count() or 1) // 2)))

    def _matcher_of(self, params: StructuredOutputsParams) -> tuple[Any, Callable[[], Any] | None]:
        """Return a matcher for a request, and a function that compiles another if this one shares its lexer."""
        key, kind = params, params.kind
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None:
                self._cache.move_to_end(key)
        if cached is None:
            text, _ = to_grammar(params), self._tokenizer  # made before the clock starts
            start = time.thread_time()  # llguidance compiles in the calling thread
            matcher = self._match(kind, text)
            is_slow = time.thread_time() - start > MAX_SHARED_COMPILE_S
            cached = CompiledGrammar(text, None if is_slow else matcher)
            with self._lock:
                self._cache[key] = cached
                while len(self._cache) > 1 and not self._fits():
                    self._cache.popitem(last=False)
            if is_slow:
                return matcher, None
        if cached.matcher is not None:
            return cached.matcher.deep_copy(), partial(self._match_alone, params, cached)
        with self._lock:
            spare, cached.spare = cached.spare, self._threads.submit(self._match, kind, cached.text)
        is_begun = spare is not None and not spare.cancel()  # one that waits for a thread may wait for this one
        return spare.result() if spare is not None and is_begun else self._match(kind, cached.text), None

    def _fits(self) -> bool:
        sizes = [len(compiled.text) for compiled in self._cache.values()]
        return len(sizes) <= MAX_CACHED_GRAMMARS and sum(sizes) <= MAX_CACHED_CHARS

    def _match(self, kind: str, text: str) -> Any:
        matcher = _library().LLMatcher(self._tokenizer[1], text, log_level=0, limits=_limits())
        if matcher.is_error():
            raise invalid(kind, matcher.get_error())
        return matcher

    def _match_alone(self, params: StructuredOutputsParams, used_up: CompiledGrammar) -> Any:
        """Return a matcher that shares nothing: its limits then count for one request alone."""
        with self._lock:
            if self._cache.get(params) is used_up:
                del self._cache[params]
        return self._match(params.kind, used_up.text)

    @property
    def _tokenizer(self) -> tuple[TokenTable, Any]:
        """The tokens of the model and llguidance's object of them, made when they are first needed."""
        with self._tokenizer_lock:
            if self._built is None:
                table = TokenTable(self._open_tokenizer(), self.vocab_size)
                eos_ids, kind = table.eos_ids or [table.eos_token_id], _library().LLTokenizer
                self._built = table, kind(table, n_vocab=self.vocab_size, eos_token=eos_ids, slices=list(SLICES))
            return self._built
