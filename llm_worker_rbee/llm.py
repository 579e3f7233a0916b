"""The offline API: a model in this process, text in and text out.

    llm = LLM("smollm2")                                    # a path, a short name, or hf:owner/repo[:quant]
    llm.generate("Once upon a time", max_tokens=32).text
    for chunk in llm.stream("Once upon a time", max_tokens=32): print(chunk.text, end="", flush=True)
    llm.generate(["One prompt", "another"], max_tokens=32)   # both at once
    llm.chat([{"role": "user", "content": "Hello!"}]).text

A whole reply is a fold over the stream of the same request, so the two cannot differ.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, overload

from .backends import is_automatic, resolve_kv_type
from .backends.ops import Backend
from .config import KV_AUTO, EngineConfig, ModelConfig
from .engine.engine import Engine
from .engine.request import FinishReason, Request, SamplingParams, StepOutput, TokenLogprob, token_limit
from .engine.sampler import draw_seed
from .engine.speculative import DraftModel
from .errors import ChatTemplateError, InvalidRequestError, RequestCancelledError, WorkerError
from .load import OnStage, Phases, opened, picked, settled
from .models import Transformer, load_model, read_model_config
from .models.convert import quantize_checkpoint
from .outputs import Chunk, Completion, Timings
from .progress import request_progress
from .tokenizer import ChatTemplate, Detokenizer, Tokenizer, tokenizer_from_gguf, tokenizer_from_hf
from .tokenizer.chat_template import Message, protect_messages, validate_messages
from .weights import Checkpoint, open_checkpoint
from .weights.hub import Progress, locate_model
from .weights.quant_mix import quant_name

__all__ = ["LLM", "Chunk", "Completion", "SamplingParams", "Stream", "Timings", "open_tokenizer", "together"]

Prompt = str | Sequence[int]


class LLM:
    """A model, loaded, and the engine that serves it."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        backend: str = "auto",
        threads: int | None = None,
        kv_type: str = KV_AUTO,
        kv_memory: int | None = None,
        quantize: str | None = None,
        max_context: int | None = None,
        chat_template: str | None = None,
        draft_model: str | Path | None = None,
        deterministic: bool = False,
        progress: Progress | None = None,
        on_stage: OnStage | None = None,
        **settings: Any,
    ) -> None:
        """Load a model: a path, a short name, `hf:owner/repo[:quant]`, or nothing for the built-in one.

        `threads` is how many the kernels of this process use (default: physical cores); `kv_type` how keys and values
        are kept and `kv_memory` the bytes for them (default: a part of what is free); `quantize` a type that the
        weights are brought into first. `max_context` bounds prompt and answer together (default: the model's own, or
        what fits: `capacity` tells); `chat_template` is Jinja source that replaces the file's own; `draft_model` a
        smaller model with the same tokenizer that guesses for this one; `deterministic` asks for the same answer to a
        request in any company, which the CPU always gives and a GPU in a slower mode; `progress` hears of what takes
        long: downloads, compiling, quantizing; `on_stage` of every phase of loading while it lasts.
        The other settings are those of `EngineConfig`: max_batch, target_itl_ms, prefix_cache, speculative,
        draft_tokens, ... `phases` says afterwards how long each part took.
        """
        self.loading = Phases(on_stage, progress)
        self.phases = self.loading.seconds
        timed, progress = self.loading.timed, self.loading.progress
        require_settings(settings, draft_model)
        with timed("backend"):
            ops = picked(device, backend, threads, deterministic, quantize)
            resolve_kv_type(ops, kv_type)
        with timed("locate"):
            path = locate_model(str(model) if model is not None else None, progress=progress)
            guesser = None if draft_model is None else locate_model(str(draft_model), progress=progress)
        with timed("open"):
            self.checkpoint: Checkpoint = opened(path, quantize)
            self.config: ModelConfig = read_model_config(self.checkpoint)
            draft = None if guesser is None else open_checkpoint(guesser)
            models = [self.checkpoint] if draft is None else [self.checkpoint, draft]
            many = settings.get("max_batch", SETTINGS["max_batch"])
            # `notes`: what a person should know of how it was loaded
            ops, self.kv_type, self.capacity, self.notes = settled(
                ops, models, kv_type, quantize, is_automatic=is_automatic(device, backend, threads),
                kv_memory=kv_memory, max_context=max_context, max_batch=many,
            )  # fmt: skip
            self.max_context = self.capacity.max_context
        with timed("tokenizer"):
            self.tokenizer: Tokenizer = open_tokenizer(self.checkpoint)
            if draft is not None:
                require_same_tokens(self.tokenizer, open_tokenizer(draft))
        self.quant = quant_name(self.checkpoint) if quantize is None else quantize.upper()
        self.model: Transformer = self._loaded(self.checkpoint, ops, quantize)
        self.tokenizer.pad_to(self.config.vocab_size)
        made = EngineConfig(max_context=self.max_context, n_blocks=self.capacity.n_blocks, **settings)
        drafter = None
        if draft is not None:
            guessing = self._loaded(draft, ops, None)
            drafter = DraftModel(guessing, made, self.config.vocab_size, self.kv_type)
        self.driver = Driver(Engine(self.model, made, self.kv_type, drafter))
        self._template_source = self.tokenizer.chat_template if chat_template is None else chat_template

    @property
    def engine(self) -> Engine:
        """What computes; it counts steps, hits and guesses."""
        return self.driver.engine

    def _loaded(self, checkpoint: Checkpoint, ops: Backend, quantize: str | None) -> Transformer:
        config, timed, progress = read_model_config(checkpoint), self.loading.timed, self.loading.progress
        if quantize is not None:
            with timed("quantize"):
                checkpoint = quantize_checkpoint(checkpoint, quantize, progress=progress)
        with timed("kernels"):
            ops.load_kernels(checkpoint, config, self.kv_type, progress)
        with timed("weights", checkpoint.nbytes):
            return load_model(checkpoint, ops, config, self.max_context, self.loading.advance)

    @property
    def backend(self) -> str:
        """Which implementation of the ops computes."""
        return self.model.ops.name

    @property
    def device(self) -> str:
        """What it computes on: cpu, cuda:0, ..."""
        return self.model.ops.device

    @property
    def device_bytes(self) -> int:
        """Bytes of tensors in the device's own memory."""
        return self.model.ops.allocated_memory()

    @property
    def graph_bytes(self) -> int:
        """Memory of a device that captured steps take; it grows while new sizes of steps come."""
        return 0 if self.model.fused is None else self.model.fused.graph_bytes

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be answered."""
        return self._template_source is not None

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
        return self._template.render(validate_messages(messages), **fields)

    def tokenize_chat(self, messages: Sequence[Message], **fields: Any) -> list[int]:
        """Messages -> the ids of that prompt. The template's control tokens are parsed; those in a message are text."""
        prompt = self._template.render(protect_messages(self.tokenizer, validate_messages(messages)), **fields)
        return self.tokenizer.encode(prompt, parse_special=True, protected=True)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """Answer a prompt (text, or ids) piece by piece.

        Keyword options are those of `SamplingParams`, and `priority` (lower goes first) and `timeout` in seconds.
        """
        return self.streams(prompt, params, **options)[0]

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any) -> Stream:
        """Answer a conversation piece by piece."""
        return self.streams(self.tokenize_chat(messages), params, **options)[0]

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, n: None = None, **options: Any
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, n: int, **options: Any
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int,
        progress: bool | None = None,
        **options: Any,
    ) -> list[list[Completion]]: ...
    def generate(
        self, prompt: Any, params: Any = None, *, n: int | None = None, progress: bool | None = None, **options: Any
    ) -> Any:
        """Answer a prompt, or all of a list of prompts together, with a progress bar on a terminal (`progress`).

        `params` may be a list too, one for each prompt. With `n` there are so many answers to each prompt: a list.
        """
        if not are_many(prompt):
            found = self._finished(self.streams(prompt, params, n, **options), bool(progress))
            return found[0] if n is None else found
        each = params if isinstance(params, (list, tuple)) else [params] * len(prompt)
        if len(each) != len(prompt):
            raise InvalidRequestError(f"there are {len(prompt)} prompts and {len(each)} params", "params")
        groups = []
        for i, (one, its) in enumerate(zip(prompt, each, strict=True)):
            with numbered(i):
                groups.append(self.streams(one, its, n, **options))
        answers = iter(self._finished([stream for group in groups for stream in group], progress))
        together = [[next(answers) for _ in group] for group in groups]
        return [group[0] for group in together] if n is None else together

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any) -> Completion:
        """Answer a conversation: `[{"role": "user", "content": "..."}]`."""
        return self.stream_chat(messages, params, **options).completion()

    def streams(
        self, prompt: Prompt, params: SamplingParams | None = None, n: int | None = None, **options: Any
    ) -> list[Stream]:
        """`n` answers to one prompt, a stream each; they share prompt and seed, and draw numbers of their own."""
        choices = range(1 if n is None else checked_choices(n))
        priority, timeout = checked_scheduling(options.pop("priority", 0), options.pop("timeout", None))
        merged = merged_params(params, options)
        ids = self.tokenize(prompt) if isinstance(prompt, str) else self._checked_ids(prompt)
        seed = draw_seed() if merged.seed is None else merged.seed
        return [
            Stream(self, ids, merged, seed=seed, choice=choice, priority=priority, timeout=timeout)
            for choice in choices
        ]

    def _finished(self, streams: Sequence[Stream], progress: bool | None) -> list[Completion]:
        """Compute them together; if one fails, the others end with it."""
        with request_progress(len(streams), progress) as advance:
            for stream in together(streams, lambda tokens: advance(tokens=tokens)):
                advance(requests=1)
                stream.raise_error()
        return [stream.so_far() for stream in streams]

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


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that a checkpoint carries, whatever its architecture."""
    if checkpoint.format == "gguf":
        return tokenizer_from_gguf(checkpoint.metadata)
    return tokenizer_from_hf(checkpoint.path)


Box = deque[tuple[float, StepOutput]]  # when, on the clock of time.perf_counter, and what


class Driver:
    """Steps an engine on behalf of those who wait."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._boxes: dict[Request, Box] = {}
        self._dropped: deque[Request] = deque()
        self._lock = threading.Lock()

    def add(self, request: Request) -> Box:
        """Take a request on; what comes of it goes into the box."""
        with self._lock:
            self._forget_dropped()
            self.engine.add(request)
            self._boxes[request] = box = Box()
            return box

    def drop(self, request: Request) -> None:
        """Nobody wants the rest of it."""
        self._dropped.append(request)

    def wait_for(self, box: Box) -> None:
        """Step until there is something in the box."""
        while not box:
            with self._lock:
                if not box:
                    assert self.engine.has_work, "somebody waits for a request that the engine does not have"
                    self._step()

    def _step(self) -> None:
        self._forget_dropped()
        try:
            outputs, now = self.engine.step(), time.perf_counter()
            for output in outputs:
                self._boxes[output.request].append((now, output))
                if output.finish_reason is not None:
                    del self._boxes[output.request]
        except BaseException:  # Ctrl-C: between two steps, or where nothing is written, the others could go on
            if not self.engine.is_computing:
                self._start_anew()
            raise

    def _forget_dropped(self) -> None:
        while self._dropped:
            request = self._dropped.popleft()
            if self._boxes.pop(request, None) is not None:
                self.engine.abort(request)

    def _start_anew(self) -> None:
        self.engine.reset()
        now = time.perf_counter()
        for request, box in self._boxes.items():
            error = RequestCancelledError("the answer was interrupted")
            box.append((now, StepOutput(request, -1, None, "error", error)))
        self._boxes.clear()


class Stream:
    """Iterate for chunks, or call `completion()` for the whole. It is computed together with all others of its model
    from the first chunk on; one that is closed, or that nobody holds any more, ends."""

    def __init__(
        self,
        llm: LLM,
        prompt: list[int],
        params: SamplingParams,
        *,
        seed: int,
        choice: int = 0,
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        limit = token_limit(len(prompt), params.max_tokens, llm.max_context)
        _require_known(params, llm.config.vocab_size)
        self.seed = seed
        self.prompt_tokens = prompt
        self.params = params
        self.timeout = timeout
        self._driver = llm.driver
        self._request = Request(prompt, params, limit, seed, llm.tokenizer.eos_ids, choice, priority)
        continuation = llm.tokenizer.is_continuation(prompt)
        self._decoder = Detokenizer(llm.tokenizer, tuple(params.stop), continuation=continuation)
        self._box: Box | None = None
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: FinishReason | None = None
        self._texts: list[str] = []
        self._began = self._first_token_s = self._elapsed_s = 0.0
        self._sampled = 0
        self._is_closed = False
        self.error: WorkerError | None = None  # that ended it

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        if self.has_ended:
            raise StopIteration
        self.wait()
        return self._taken(*self.start().popleft())

    def __del__(self) -> None:
        if hasattr(self, "_is_closed"):  # it was made to its end
            self.close()

    def start(self) -> Box:
        """Begin to be computed, in the steps that anybody makes."""
        if self._box is None:
            self._began = time.perf_counter()
            if self.timeout is not None:
                self._request.deadline = time.monotonic() + self.timeout
            self._box = self._driver.add(self._request)
        return self._box

    def wait(self) -> None:
        """Step until something has been made for it."""
        if not self.has_ended:
            self._driver.wait_for(self.start())

    def take_ready(self) -> int:
        """Take what has been made for it, without a step; how many tokens that were. An error is kept for later."""
        count = 0
        while self._box and not self.has_ended:
            try:
                self._taken(*self._box.popleft())
            except WorkerError:
                break
            count += 1
        return count

    def raise_error(self) -> None:
        """Raise the error that ended it, if one did."""
        if self.error is not None:
            raise self.error

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._finish_reason is not None or self._is_closed

    def close(self) -> None:
        """End it where it is; what it holds of the model is free for others."""
        if not self._is_closed and self._box is not None and self._finish_reason is None:
            self._driver.drop(self._request)
        self._is_closed = True

    def completion(self) -> Completion:
        """Run to the end and fold the chunks; after an iteration that was broken off, the rest is made now."""
        for _ in self:
            pass
        return self.so_far()

    def so_far(self) -> Completion:
        """What has been made until now, as a completion."""
        request = self._request
        return Completion(
            prompt_tokens=self.prompt_tokens,
            tokens=request.tokens[: self._sampled],
            text="".join(self._texts),
            finish_reason=self._finish_reason,
            stop_sequence=self._decoder.stop_matched,
            seed=self.seed,
            timings=Timings(self._first_token_s, self._elapsed_s, self._sampled),
            logprobs=list(self._logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=None if request.num_unscored_tokens else request.prompt_logprobs,
            cached_tokens=max(0, request.num_cached_tokens),
        )

    def _taken(self, at: float, output: StepOutput) -> Chunk:
        """What one token shows; an error ends the stream and is the caller's."""
        self._elapsed_s = at - self._began
        if output.error is not None:
            self._finish_reason, self.error = "error", output.error
            raise output.error
        self._first_token_s = self._first_token_s or self._elapsed_s
        self._sampled += 1
        reason = output.finish_reason
        ended_by_token = reason == "stop"
        if output.logprob is not None:
            self._logprobs.append(output.logprob)
        text = "" if ended_by_token else self._decoder.push(output.token)
        if self._decoder.stop_matched is not None:
            if reason is None:
                self._driver.drop(self._request)
            reason = "stop"
        if reason is not None:
            text += self._decoder.finish()
            self._finish_reason = reason
        self._texts.append(text)
        return Chunk(text, None if ended_by_token else output.token, output.logprob, reason)


def together(streams: Sequence[Stream], on_tokens: Callable[[int], None] = lambda _: None) -> Iterator[Stream]:
    """Compute streams of one model in the same steps; gives each as it ends, also one that ended with an error."""
    left = list(streams)
    try:
        for stream in streams:
            stream.start()
        while left:
            left[0].wait()
            on_tokens(sum(stream.take_ready() for stream in left))
            ended = [stream for stream in left if stream.has_ended]
            left = [stream for stream in left if not stream.has_ended]
            yield from ended
    finally:
        for stream in streams:
            stream.close()


def _require_known(params: SamplingParams, vocab_size: int) -> None:
    for token in params.logit_bias:
        if token >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias names token {token}, past the vocabulary of {vocab_size}", "logit_bias"
            )


MOST_CHOICES = 128
PLANNED = ("max_context", "n_blocks", "block_size")  # of an engine's settings: they follow from the memory there is
SETTINGS = {field.name: field.default for field in fields(EngineConfig) if field.name not in PLANNED}


def merged_params(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """Params with some of them replaced."""
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, not {type(params).__name__}", "params")
    unknown = set(options) - set(SamplingParams.__dataclass_fields__)
    if unknown:
        raise InvalidRequestError(f"unknown sampling option {min(unknown)!r}", min(unknown))
    return replace(params or SamplingParams(), **options)


def are_many(prompt: Any) -> bool:
    """A list of texts or of lists of ids; a list of ids is one prompt."""
    is_list = isinstance(prompt, (list, tuple)) and bool(prompt)
    return is_list and all(isinstance(one, (str, list, tuple)) or hasattr(one, "tolist") for one in prompt)


@contextmanager
def numbered(i: int) -> Iterator[None]:
    """An error of one of many prompts says which."""
    try:
        yield
    except InvalidRequestError as error:
        error.args = (f"prompt {i}: {error}", *error.args[1:])
        raise


def checked_choices(n: Any) -> int:
    """How many answers to one prompt."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_CHOICES:
        raise InvalidRequestError(f"n is {n!r}: it must be a whole number, 1 to {MOST_CHOICES}", "n")
    return n


def checked_scheduling(priority: Any, timeout: Any) -> tuple[int, float | None]:
    """When its turn is, and how long it may take."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority must be a whole number, not {priority!r}", "priority")
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < float("inf")):
        raise InvalidRequestError(f"timeout is {timeout!r}: it must be a number of seconds above 0", "timeout")
    return priority, timeout


def require_settings(settings: Mapping[str, Any], draft_model: object) -> None:
    """What cannot be is said before anything is loaded."""
    for name in settings:
        if name not in SETTINGS:
            raise InvalidRequestError(f"unknown option {name!r}: an engine has {', '.join(SETTINGS)}", name)
    EngineConfig(max_context=1, n_blocks=1, **settings)
    if draft_model is not None and settings.get("speculative", "off") != "off":
        raise InvalidRequestError("speculative and draft_model are two ways to guess: give one of them", "speculative")


def require_same_tokens(tokenizer: Tokenizer, draft: Tokenizer) -> None:
    """Ids mean the same to both models."""
    sizes = tokenizer.vocab_size, draft.vocab_size
    if sizes[0] != sizes[1] or any(tokenizer.piece(i) != draft.piece(i) for i in range(sizes[0])):
        raise InvalidRequestError(
            f"the draft model's tokenizer ({sizes[1]} tokens) is not that of the model ({sizes[0]} tokens): "
            "only a model with the same vocabulary can guess for it",
            "draft_model",
        )
