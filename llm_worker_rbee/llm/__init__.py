"""The offline API: a model in this process, text in and text out.

    llm = LLM("smollm2")                                    # a path, a short name, or hf:owner/repo[:quant]
    llm.generate("Once upon a time", max_tokens=32).text
    for chunk in llm.stream("Once upon a time", max_tokens=32): print(chunk.text, end="", flush=True)
    llm.generate(["One prompt", "another"], max_tokens=32)   # both at once
    llm.chat([{"role": "user", "content": "Hello!"}]).text

A whole reply is a fold over the stream of the same request, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, overload

from ..backends import cuda_probe, is_automatic, kv_type_for, precompile
from ..backends.ops import Ops
from ..config import KV_AUTO, EngineConfig, ModelConfig
from ..engine.draft_model import DraftModel
from ..engine.engine import Engine
from ..engine.request import SamplingParams
from ..engine.sampler import draw_seed
from ..errors import ChatTemplateError, InvalidRequestError
from ..models import Transformer, describe, load_model
from ..models.convert import quantize_checkpoint
from ..progress import generating
from ..tokenizer import ChatTemplate, Tokenizer, tokenizer_from_gguf, tokenizer_from_hf
from ..tokenizer.chat_template import Message, checked_messages, protected
from ..weights import Checkpoint, open_checkpoint
from ..weights.hub import Progress, locate
from .about import quant_name
from .answers import Chunk, Completion, Timings
from .driver import Driver
from .loading import OnStage, Phases
from .options import (
    SETTINGS,
    are_many,
    checked_choices,
    checked_scheduling,
    merged_params,
    numbered,
    require_same_tokens,
    require_settings,
)
from .placing import opened, picked, settled
from .stream import Stream, together

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
            kv_type_for(ops, kv_type)
        with timed("locate"):
            path = locate(str(model) if model is not None else None, progress=progress)
            guesser = None if draft_model is None else locate(str(draft_model), progress=progress)
        with timed("open"):
            self.checkpoint: Checkpoint = opened(path, quantize)
            self.config: ModelConfig = describe(self.checkpoint)
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

    def _loaded(self, checkpoint: Checkpoint, ops: Ops, quantize: str | None) -> Transformer:
        config, timed, progress = describe(checkpoint), self.loading.timed, self.loading.progress
        if quantize is not None:
            with timed("quantize"):
                checkpoint = quantize_checkpoint(checkpoint, quantize, progress=progress)
        with timed("kernels"):
            precompile.get_ready_for(ops, precompile.Needs.of(checkpoint, config, self.kv_type), progress)
        with timed("weights", checkpoint.nbytes):
            return load_model(checkpoint, ops, config, self.max_context, self.loading.advance)

    @property
    def backend(self) -> str:
        """Which implementation of the ops computes."""
        name = str(getattr(self.model.ops, "__name__", "")).rpartition(".")[2]
        return "cuda" if cuda_probe.is_cuda(self.model.ops) else name

    @property
    def device(self) -> str:
        """What it computes on, as its backend says: `DEVICE`, or this machine's processor."""
        return str(getattr(self.model.ops, "DEVICE", "cpu"))

    @property
    def device_bytes(self) -> int:
        """Memory that is held on a device of its own, as its backend says: `device_bytes()`, or none."""
        held = getattr(self.model.ops, "device_bytes", None)
        return 0 if held is None else int(held())

    @property
    def graph_bytes(self) -> int:
        """Memory of a device that captured steps take; it grows while new sizes of steps come."""
        return int(getattr(getattr(self.model.fused, "graphs", None), "nbytes", 0))

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
        return self._template.render(checked_messages(messages), **fields)

    def tokenize_chat(self, messages: Sequence[Message], **fields: Any) -> list[int]:
        """Messages -> the ids of that prompt. The template's control tokens are parsed; those in a message are text."""
        prompt = self._template.render(protected(self.tokenizer, checked_messages(messages)), **fields)
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
        with generating(len(streams), progress) as advance:
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
