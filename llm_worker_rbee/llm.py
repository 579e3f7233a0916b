"""The offline API: a model in this process, text in and text out.

    llm = LLM("smollm2")                                    # a path, a short name, or hf:owner/repo[:quant]
    llm.generate("Once upon a time", max_tokens=32).text
    for chunk in llm.stream("Once upon a time", max_tokens=32): print(chunk.text, end="", flush=True)
    llm.chat([{"role": "user", "content": "Hello!"}]).text

A whole reply is a fold over the stream of the same request, so the two cannot differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, overload

from .backends import kernels, pick
from .backends.types import KV_TYPES
from .config import ModelConfig
from .engine.engine import Generation
from .engine.request import FinishReason, Request, SamplingParams, TokenLogprob, token_limit
from .engine.sampler import draw_seed
from .errors import ChatTemplateError, InvalidRequestError
from .models import Transformer, describe, load_model
from .models.convert import quantize_checkpoint
from .tokenizer import ChatTemplate, StreamDecoder, Tokenizer, tokenizer_from_gguf, tokenizer_from_hf
from .tokenizer.messages import Message, checked_messages, protected
from .weights import Checkpoint, open_checkpoint
from .weights.hub import Progress, locate

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one answer went, in seconds."""

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
    """What became visible with one token; `text` may be empty while a character or a stop string is incomplete."""

    text: str
    token: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    prompt_tokens: list[int]
    tokens: list[int]  # without the end-of-text id
    text: str
    # "stop": an end-of-text id or a stop string; "length": max_tokens or the context; None: not ended yet
    finish_reason: FinishReason | None
    stop_sequence: str | None  # the stop string that was met
    seed: int
    timings: Timings
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # as long as prompt_tokens, the first None


class LLM:
    """A model, loaded."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        backend: str = "auto",
        threads: int | None = None,
        kv_type: str = "float32",
        quantize: str | None = None,
        max_context: int | None = None,
        chat_template: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Load a model: a path, a short name, `hf:owner/repo[:quant]`, or nothing for the built-in one.

        `threads` is how many the kernels of this process use (default: physical cores); `kv_type` how keys and values
        are kept; `quantize` a type that the weights are brought into first. `max_context` bounds prompt and answer
        together (default: the model's own); `chat_template` is Jinja source that replaces the file's own; `progress`
        hears of what takes long: downloads, compiling, quantizing. `phases` says afterwards how long each part took.
        """
        self.phases: dict[str, float] = {}
        self.kv_type = _known_kv_type(kv_type)
        with self._timed("backend"):
            ops = pick(device, backend, threads)
        with self._timed("locate"):
            path = locate(str(model) if model is not None else None, progress=progress)
        with self._timed("open"):
            self.checkpoint: Checkpoint = open_checkpoint(path)
            self.config: ModelConfig = describe(self.checkpoint)
            self.max_context = _context(max_context, self.config.context_length)
        with self._timed("tokenizer"):
            self.tokenizer: Tokenizer = open_tokenizer(self.checkpoint)
        checkpoint = self.checkpoint
        if quantize is not None:
            with self._timed("quantize"):
                checkpoint = quantize_checkpoint(checkpoint, quantize, progress=progress)
        with self._timed("kernels"):
            kernels.get_ready_for(ops, kernels.Needs.of(checkpoint, self.config, self.kv_type), progress)
        with self._timed("weights"):
            self.model: Transformer = load_model(checkpoint, ops, self.config, self.max_context)
            self.tokenizer.pad_to(self.config.vocab_size)
        self._template_source = self.tokenizer.chat_template if chat_template is None else chat_template

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases[phase] = time.perf_counter() - start

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._template_source is None:
            raise ChatTemplateError(f"{self.checkpoint.path.name} has no chat template", "chat_template")
        tok = self.tokenizer
        bos, eos = ("" if i is None else tok.piece(i) for i in (tok.bos_id, tok.eos_id))
        return ChatTemplate(self._template_source, bos_token=bos, eos_token=eos)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Text -> ids: with BOS where the file says so; `parse_special` recognises control tokens in the text."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Ids -> text."""
        return self.tokenizer.decode(tokens, skip_special=skip_special)

    def apply_chat_template(self, messages: Sequence[Message], **fields: Any) -> str:
        """Messages -> the prompt that the model's own template makes of them."""
        return self._template.render(checked_messages(messages), **fields)

    def tokenize_chat(self, messages: Sequence[Message], **fields: Any) -> list[int]:
        """Messages -> the ids of that prompt. The template's control tokens are parsed; those in a message are text."""
        prompt = self._template.render(protected(self.tokenizer, checked_messages(messages)), **fields)
        return self.tokenizer.encode(prompt, parse_special=True, protected=True)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """Answer a prompt (text, or ids) piece by piece; keyword options are those of `SamplingParams`."""
        ids = self.tokenize(prompt) if isinstance(prompt, str) else self._checked_ids(prompt)
        return Stream(self, ids, _merge(params, options))

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any) -> Stream:
        """Answer a conversation piece by piece."""
        return Stream(self, self.tokenize_chat(messages), _merge(params, options))

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: list[str], params: SamplingParams | None = None, **options: Any) -> list[Completion]: ...
    def generate(
        self, prompt: Prompt | list[str], params: SamplingParams | None = None, **options: Any
    ) -> Completion | list[Completion]:
        """Answer a prompt, or each of a list of prompts."""
        if isinstance(prompt, list) and prompt and all(isinstance(p, str) for p in prompt):
            return [self.stream(p, params, **options).completion() for p in prompt]
        return self.stream(prompt, params, **options).completion()  # type: ignore[arg-type]

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any) -> Completion:
        """Answer a conversation: `[{"role": "user", "content": "..."}]`."""
        return self.stream_chat(messages, params, **options).completion()

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        ids = ids.tolist() if hasattr(ids, "tolist") else ids  # a NumPy array
        if not isinstance(ids, Sequence) or isinstance(ids, (bytes, bytearray)):
            raise InvalidRequestError(f"prompt must be text or a list of token ids, not {type(ids).__name__}", "prompt")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < self.config.vocab_size:
                raise InvalidRequestError(
                    f"prompt: {token!r} is not a token id (0..{self.config.vocab_size - 1})", "prompt"
                )
        return [int(token) for token in ids]


class Stream:
    """One answer as it is made: iterate for chunks, or call `completion()` for the whole."""

    def __init__(self, llm: LLM, prompt: list[int], params: SamplingParams) -> None:
        limit = token_limit(len(prompt), params.max_tokens, llm.max_context)
        for token in params.logit_bias:
            if token >= llm.config.vocab_size:
                raise InvalidRequestError(
                    f"logit_bias names token {token}, past the vocabulary of {llm.config.vocab_size}", "logit_bias"
                )
        self.seed = draw_seed() if params.seed is None else params.seed
        self.prompt_tokens = prompt
        self.params = params
        self._request = Request(prompt, params, limit, self.seed, llm.tokenizer.eos_ids)
        self._generation = Generation(llm.model, self._request, llm.kv_type)
        continuation = llm.tokenizer.continues(prompt)
        self._decoder = StreamDecoder(llm.tokenizer, tuple(params.stop), continuation=continuation)
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: FinishReason | None = None
        self._texts: list[str] = []
        self._chunks = self._run()
        self._first_token_s = self._elapsed_s = 0.0
        self._sampled = 0

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def completion(self) -> Completion:
        """Run to the end and fold the chunks; after an iteration that was broken off, the rest is made now."""
        for _ in self._chunks:
            pass
        return self.so_far()

    def so_far(self) -> Completion:
        """What has been made until now, as a completion."""
        return Completion(
            prompt_tokens=self.prompt_tokens,
            tokens=list(self._request.tokens),
            text="".join(self._texts),
            finish_reason=self._finish_reason,
            stop_sequence=self._decoder.stop_matched,
            seed=self.seed,
            timings=Timings(self._first_token_s, self._elapsed_s, self._sampled),
            logprobs=list(self._logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=self._generation.prompt_logprobs,
        )

    def _run(self) -> Iterator[Chunk]:
        start = time.perf_counter()
        for output in self._generation:
            self._elapsed_s = time.perf_counter() - start
            self._first_token_s = self._first_token_s or self._elapsed_s
            self._sampled += 1
            reason = output.finish_reason
            ended_by_token = reason == "stop"
            if output.logprob is not None:
                self._logprobs.append(output.logprob)
            text = "" if ended_by_token else self._decoder.push(output.token)
            if self._decoder.stop_matched is not None:
                reason = "stop"
            if reason is not None:
                text += self._decoder.finish()
                self._finish_reason = reason
            self._texts.append(text)
            yield Chunk(text, None if ended_by_token else output.token, output.logprob, reason)
            if reason is not None:
                return


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that a checkpoint carries, whatever its architecture."""
    if checkpoint.format == "gguf":
        return tokenizer_from_gguf(checkpoint.metadata)
    return tokenizer_from_hf(checkpoint.path)


def _merge(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, not {type(params).__name__}", "params")
    unknown = set(options) - set(SamplingParams.__dataclass_fields__)
    if unknown:
        raise InvalidRequestError(f"unknown sampling option {min(unknown)!r}", min(unknown))
    return replace(params or SamplingParams(), **options)


def _known_kv_type(name: str) -> str:
    if name not in KV_TYPES:
        raise InvalidRequestError(f"unknown kv_type {name!r}: use one of {', '.join(KV_TYPES)}", "kv_type")
    return name


def _context(asked: int | None, largest: int) -> int:
    if asked is None:
        return largest
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= largest:
        raise InvalidRequestError(
            f"max_context is {asked!r}: it must be 1 to {largest}, the model's context", "max_context"
        )
    return asked
