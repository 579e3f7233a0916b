"""One completion in progress, as text: its request, detokenizer, stop strings, clock and counts; and the records of the
offline API: `Chunk`, `Completion`, `Timings`.

`LLM` (whose callers step the engine) and the server (whose event loop awaits it) both pass the token outputs of a
request to its `Generation` and get text deltas back. Validation that needs the model is here, once.

    generations = make_generations(tokenizer, engine_config, vocab_size, ids, params, n=2)
    request = generation.start(); delta = generation.push(outputs)                # offline
    generation.submit(token_engine); async for delta in generation.deltas(): ...  # served
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .config import EngineConfig, LoraSpec, LoraUse
from .engine.request import NO_TOKEN, resolve_max_tokens
from .engine.sampler import draw_seed
from .errors import InvalidRequestError, counted
from .images.sizes import ImagePart
from .sampling_params import FinishReason, SamplingParams, TokenLogprob
from .text_model import EncodedPrompt
from .token_engine.protocol import (
    LoraInfo,
    ModelInfo,
    RequestState,
    RequestStream,
    Submit,
    TokenEngine,
    TokenOutput,
    request_ids,
)
from .token_engine.wire import MAX_DATA_BYTES
from .tokenizer import Detokenizer, Tokenizer
from .tokenizer.chat.events import ChatEvent, ToolCall, ToolCallEnd
from .tokenizer.chat.parser import ChatParser

MAX_SCALE = 1000.0  # of an adapter


class NamedLora(NamedTuple):
    """An adapter by the name that requests use, with its own scale."""

    name: str
    path: str  # as it was given
    scale: float
    info: LoraInfo

    def use(self, scale: float) -> LoraUse:
        return LoraUse(self.info.path, self.info.digest, scale)


def named_loras(specs: Sequence[LoraSpec], info: ModelInfo) -> dict[str, NamedLora]:
    """Return the adapters that an engine was loaded with, by their names."""
    pairs = zip(specs, info.loras, strict=True)
    return {spec.name: NamedLora(spec.name, spec.path, spec.scale, own) for spec, own in pairs}


def check_lora_scale(scale: Any) -> float:
    """Return the scale of an adapter; raise if it is no number."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not -MAX_SCALE <= scale <= MAX_SCALE:
        raise InvalidRequestError(
            f"the scale of an adapter is {scale!r}: it must be a number up to {MAX_SCALE:g}", "lora"
        )
    return float(scale)


class TextDelta(NamedTuple):
    """What a generation added since the last delta; `finish_reason` with the last one."""

    text: str  # may be empty while a character or a stop string is incomplete
    tokens: list[int]  # without an end-of-text id
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None  # the stop string that was found
    events: list[ChatEvent] | None = None  # what the text is, in a chat that has reasoning or tools
    call_ends: tuple[int, ...] = ()  # of each call that ended: how many of the tokens there were by then


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one completion went, in seconds from its start, waiting included."""

    time_to_first_token: float
    total: float
    tokens: int  # sampled, the end-of-text id included

    @property
    def tokens_per_second(self) -> float:
        """The rate after the first token; 0 where there was no second one."""
        rest = self.total - self.time_to_first_token
        return (self.tokens - 1) / rest if self.tokens > 1 and rest > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one token added; `text` may be empty while a character or a stop string is incomplete."""

    text: str
    token: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    events: Sequence[ChatEvent] = ()  # reasoning, content and tool calls, in a chat that may have more than content


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of one request."""

    prompt_tokens: list[int]
    tokens: list[int]  # without the end-of-text id
    text: str  # of a chat the content, without reasoning and tool calls
    # "stop": an end-of-text id or a stop string; "length": max_tokens or the context; None: not finished
    finish_reason: FinishReason | None
    stop_sequence: str | None  # the stop string that was found
    seed: int
    timings: Timings
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # as long as prompt_tokens, the first None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    reasoning: str = ""  # of a chat
    tool_calls: Sequence[ToolCall] = ()  # likewise


class GenerationListener:
    """Hooks for metrics and admission; each does nothing by default. `seconds` is the time since the last outputs."""

    def on_first_outputs(self, generation: Generation, seconds: float, count: int) -> None: ...
    def on_outputs(self, generation: Generation, seconds: float, count: int) -> None: ...
    def on_close(self, generation: Generation) -> None: ...


class Generation:
    """A request and the text of its output. It neither steps nor waits: `push` takes what a step gave."""

    def __init__(
        self,
        request: RequestState,
        tokenizer: Tokenizer,
        listener: GenerationListener | None = None,
        parser: ChatParser | None = None,
    ) -> None:
        """`parser` tells reasoning, content and tool calls apart."""
        self.request = request
        self.num_tokens = 0  # sampled, the end-of-text id included
        self.num_reasoning_tokens = 0  # of these
        self._parser = parser
        self.started_at = self.first_token_at = self.last_token_at = 0.0  # in the time of time.perf_counter
        self.finish_reason: FinishReason | None = None
        self._listener = listener or GenerationListener()
        stop = tuple(request.submitted.params.stop)
        self._detokenizer = Detokenizer(tokenizer, stop, continuation=tokenizer.is_continuation(request.prompt))
        self._stream: RequestStream | None = None
        self._is_closed = False

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that was found."""
        return self._detokenizer.stop_matched

    @property
    def decode_ms(self) -> float:
        """Milliseconds from the first token to the last."""
        return 1000 * max(0.0, self.last_token_at - self.first_token_at)

    def start(self) -> RequestState:
        """Start the clock; return the request, to be submitted."""
        self.started_at = time.perf_counter()
        return self.request

    def push(self, outputs: Sequence[TokenOutput], now: float) -> TextDelta:
        """Return the text of outputs that arrived at `now`; an error that finished the request is raised."""
        if outputs[0].error is not None:
            self.finish_reason, self.last_token_at = "error", now
            raise outputs[0].error
        if self._parser is None and len(outputs) == 1 and len(outputs[0].tokens) == 1 and not outputs[0].finish_reason:
            return self._push_token(outputs[0], now)  # most deltas are one token
        self._observe(sum(len(output.tokens) for output in outputs), now)
        texts: list[str] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        events: list[ChatEvent] | None = None if self._parser is None else []
        call_ends: list[int] = []
        finish: FinishReason | None = None
        for output in outputs:
            finish = output.finish_reason
            added = output.tokens[:-1] if finish == "stop" else output.tokens
            self.num_tokens += len(output.tokens) - (output.tokens[-1] == NO_TOKEN)
            count, ended = self._detokenize(added, texts, events)
            call_ends += [len(tokens) + end for end in ended]
            if count < len(added) or self._detokenizer.stop_matched is not None:  # a stop string ends it before
                self.num_tokens -= len(output.tokens) - count - (output.tokens[-1] == NO_TOKEN)
                finish = "stop"
            tokens += added[:count]
            logprobs += output.logprobs[:count]
            if finish is not None:
                break
        if finish is not None:
            texts.append(self._detokenizer.finish())
            if self._parser is not None and events is not None:
                is_cut = finish == "length" or self._detokenizer.stop_matched is not None
                last = self._parser.push(texts[-1]) + self._parser.finish(is_cut=is_cut)
                events += last
                call_ends += [len(tokens)] * num_call_ends(last)
            self.finish_reason = finish
        return TextDelta(
            "".join(texts), tokens, logprobs, finish, self._detokenizer.stop_matched, events, tuple(call_ends)
        )

    def _push_token(self, output: TokenOutput, now: float) -> TextDelta:
        """As `push` of one token that is not the last."""
        self._observe(1, now)
        self.num_tokens += 1
        text = self._detokenizer.push(output.tokens[0])
        if (stop := self._detokenizer.stop_matched) is not None:
            self.finish_reason = "stop"
        return TextDelta(text, output.tokens, output.logprobs, self.finish_reason, stop)

    def _detokenize(
        self, tokens: Sequence[int], texts: list[str], events: list[ChatEvent] | None
    ) -> tuple[int, list[int]]:
        """Add the text of tokens up to a stop string, and its events.

        Return how many tokens that are, and how many there were at the end of each call.
        """
        parser, call_ends = self._parser, list[int]()
        for i, token in enumerate(tokens, 1):
            if parser is None or events is None:
                texts.append(self._detokenizer.push(token))
            else:
                self.num_reasoning_tokens += parser.is_reasoning
                if token in parser.marker_ids:
                    texts.append(self._detokenizer.flush())
                    new = parser.push(texts[-1]) + parser.push_marker(token)
                else:
                    texts.append(self._detokenizer.push(token))
                    new = parser.push(texts[-1])
                events += new
                call_ends += [i] * num_call_ends(new)
            if self._detokenizer.stop_matched is not None:
                return i, call_ends
        return len(tokens), call_ends

    def submit(self, engine: TokenEngine) -> None:
        """Start it in an engine; `deltas` then gives its text."""
        self._stream = engine.submit(self.start())

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """Yield deltas until the end; tokens that are ready together come in one. Leaving early aborts the request."""
        assert self._stream is not None
        try:
            while outputs := await self._stream.next_outputs():
                delta = self.push(outputs, time.perf_counter())
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.close()

    def notify(self, on_outputs: Callable[[], None]) -> None:
        """Call `on_outputs` whenever `take` has a delta: instead of `deltas`, without a task for each reader."""
        assert self._stream is not None
        self._stream.notify(on_outputs)

    def take(self) -> TextDelta | None:
        """Return the delta of the tokens that are there, None without any; raise the error that ended the request."""
        assert self._stream is not None
        outputs = self._stream.take_outputs()
        return self.push(outputs, time.perf_counter()) if outputs else None

    def abort(self) -> None:
        """End the request within a step; the reader of `deltas` gets an error."""
        if self._stream is not None:
            self._stream.abort()

    def close(self) -> None:
        """Abort what is not finished; more than once does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._listener.on_close(self)
        self.abort()
        if self._stream is not None:
            self._stream.notify(_ignore)  # what it would call refers to this generation

    def _observe(self, count: int, now: float) -> None:
        seconds, self.last_token_at = now - (self.last_token_at or self.started_at), now
        if self.first_token_at:
            self._listener.on_outputs(self, seconds, count)
        else:
            self.first_token_at = now
            self._listener.on_first_outputs(self, seconds, count)


def _ignore() -> None: ...


def num_call_ends(events: Sequence[ChatEvent]) -> int:
    """Return how many calls end among events."""
    return sum(isinstance(event, ToolCallEnd) for event in events)


def _require_sendable(images: Sequence[ImagePart], n: int) -> None:
    """Raise for more pixels than the engine's process takes."""
    size = n * sum(len(part.pixels) for part in images)
    if size > MAX_DATA_BYTES:
        problem = f"the images of {counted(n, 'answer')} (n) have {size} bytes of pixels"
        remedy = f"at most {MAX_DATA_BYTES} are accepted, send fewer or smaller ones{', or lower n' * (n > 1)}"
        raise InvalidRequestError(f"{problem}: {remedy}", "messages")


def make_generations(
    tokenizer: Tokenizer,
    config: EngineConfig,
    vocab_size: int,
    prompt: EncodedPrompt,
    params: SamplingParams,
    *,
    n: int = 1,
    priority: int = 0,
    timeout_s: float | None = None,
    cache_salt: str | None = None,
    is_scored_only: bool = False,
    loras: Sequence[LoraUse] = (),
    listener: GenerationListener | None = None,
) -> list[Generation]:
    """Return `n` generations of one prompt; they share the seed, which is drawn where `params` has none.

    Raise if the prompt and max_tokens do not fit. With `is_scored_only` the prompt's log-probabilities are all that
    is wanted: the engine still samples one token, which the caller discards.
    """
    _require_sendable(prompt.images, n)
    max_tokens = resolve_max_tokens(len(prompt.ids), 0 if is_scored_only else params.max_tokens, config)
    if (token := max(params.logit_bias, default=0)) >= vocab_size:
        raise InvalidRequestError(f"logit_bias names token {token}, past the vocabulary of {vocab_size}", "logit_bias")
    seed = draw_seed() if params.seed is None else params.seed
    eos_ids = sorted(tokenizer.eos_ids)
    submissions = [
        Submit(
            id=next(request_ids),
            prompt=prompt.ids,
            images=list(prompt.images),
            params=params,
            max_tokens=max_tokens,
            seed=seed,
            eos_ids=eos_ids,
            sample_index=i,
            priority=priority,
            timeout_s=timeout_s,
            cache_salt=cache_salt,
            loras=list(loras),
        )
        for i in range(n)
    ]
    make_parser = prompt.make_parser
    return [
        Generation(RequestState(submitted), tokenizer, listener, None if make_parser is None else make_parser())
        for submitted in submissions
    ]
