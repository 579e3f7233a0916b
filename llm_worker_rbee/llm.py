"""The offline API: a model in this process, text in and text out.

    llm = LLM("smollm2")                                    # a path, a short name, or hf:owner/repo[:quant]
    llm.generate("Once upon a time", max_tokens=32).text
    for chunk in llm.stream("Once upon a time", max_tokens=32): print(chunk.text, end="", flush=True)
    llm.generate(["One prompt", "another"], max_tokens=32)   # both at once
    llm.chat([{"role": "user", "content": "Hello!"}]).text

A completion is a fold over the stream of the same request, so the two cannot differ.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, overload

from .config import LoadOptions, LoraSpec
from .engine.engine import Engine
from .engine.kv_store import check_folder
from .errors import InvalidRequestError, RequestCancelledError, WorkerError
from .generation import Chunk, Completion, Generation, Timings, check_lora_scale, make_generations, named_loras
from .load import LoadPhases, load, make_engine
from .progress import OnStage, request_progress
from .sampling_params import MAX_COMPLETIONS, SamplingParams, StructuredOutputsParams, TokenLogprob
from .text_model import EncodedPrompt, TextModel, open_tokenizer
from .token_engine.engine_loop import EngineLoop
from .token_engine.launch import model_info
from .token_engine.protocol import (
    LoraUse,
    RequestState,
    StepResult,
    TokenOutput,
)
from .tokenizer.chat.events import ChatOptions, EventFold, Tool, ToolCall, thinking_variables
from .tokenizer.chat.template import Message
from .weights.hub import Progress

__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "SamplingParams",
    "Stream",
    "StructuredOutputsParams",
    "Timings",
    "Tool",
    "ToolCall",
    "open_tokenizer",
    "together",
]

Prompt = str | Sequence[int]
ParamsOfEach = SamplingParams | Sequence[SamplingParams] | None


class LLM(TextModel):
    """A loaded model and the engine that serves it."""

    def __init__(
        self,
        model: str | Path | LoadOptions | None = None,
        *,
        chat_template: str | None = None,
        open_objects: bool = False,
        progress: Progress | None = None,
        on_stage: OnStage | None = None,
        loras: Mapping[str, str | Path | tuple[str | Path, float]] | None = None,
        **options: Any,
    ) -> None:
        """Load a model: a path, a short name, `hf:owner/repo[:quant]`, or None for the built-in one.

        `options` are the fields of `LoadOptions`, which may also be the only argument. `device` is auto, cpu, cuda or
        cuda:N, `backend` auto, reference, cpu or cuda; `threads` is the number of CPU threads of the kernels (default:
        physical cores); `kv_type` the type of keys and values and `kv_memory` their bytes (default: a part of the free
        memory); `quantize` a type to quantize the weights to. `max_context` bounds prompt and output together (default:
        the model's own, or what fits: see `capacity`); `draft_model` is a smaller model with the same tokenizer for
        speculative decoding, `speculative` another way to draft, `draft_tokens` the drafts of a step; `deterministic`
        makes results batch-invariant, as they always are on the CPU, and costs speed on a GPU. `target_itl_ms` and
        `prefix_cache` are explained in `SchedulingOptions`; `max_batch` and `max_step_tokens` are 64 and 512 on a CPU
        and chosen from model and memory on a GPU, unless they are given. `kv_dir` is a folder that keeps blocks of keys
        and values, up to `kv_disk` bytes, so that later processes continue the same texts without computing them;
        `kv_ram` is bytes of the host's memory for what a GPU has no room for.

        `loras` are LoRA adapters by name: a GGUF file, a PEFT folder or hf:owner/repo, or a pair of that and a scale;
        `max_loras` and `max_lora_rank` bound what is kept of them. The option `lora` of a request names one, or several
        with the scale of each: `llm.generate("Hello", lora="legal")`, `lora={"legal": 0.5, "short": 1.0}`.

        `chat_template` is Jinja source that replaces the file's own; `open_objects` lets objects have properties that
        their JSON schemas do not name. `progress` is called during downloads, compiling and quantizing, `on_stage`
        during every phase of loading; `phases` has their seconds afterwards.
        """
        if loras:
            options["loras"] = lora_specs(loras)
        if not isinstance(model, LoadOptions):
            model = LoadOptions.from_arguments({"model": model, **options})
        elif options:
            raise InvalidRequestError(f"{min(options)} is given beside LoadOptions: set it there", min(options))
        if model.kv_dir is not None:
            check_folder(model.kv_dir)
        self.loading = LoadPhases(on_stage, progress)
        self.phases = self.loading.seconds
        loaded = load(model, self.loading)
        self.checkpoint, self.config, self.model = loaded.checkpoint, loaded.config, loaded.model
        self.quant, self.kv_type = loaded.quant, loaded.kv_type
        self.capacity, self.notes = loaded.capacity, loaded.notes
        self.engine = make_engine(loaded, model)
        self.info = model_info(loaded, self.engine, self.loading)
        assert loaded.tokenizer is not None
        name, sizes = self.checkpoint.path.name, (self.config.vocab_size, self.capacity.max_context)
        super().__init__(loaded.tokenizer, name, *sizes, loaded.sampling_defaults, chat_template)
        self.open_objects = open_objects
        if self.info.vision is not None:
            self.use_images(self.info.vision)
        self.loras = named_loras(model.loras, self.info)
        self.default_lora: Mapping[str, float] = {}  # of requests without the option `lora`
        self._sync_engine = SyncEngine(self.engine)

    @property
    def backend(self) -> str:
        """The name of the backend: reference, cpu or cuda."""
        return self.model.ops.name

    @property
    def device(self) -> str:
        """The device: cpu, cuda:0, ..."""
        return self.model.ops.device

    @property
    def device_bytes(self) -> int:
        """Bytes of tensors in the device's own memory."""
        return self.model.ops.allocated_memory()

    @property
    def graph_bytes(self) -> int:
        """Bytes of captured CUDA graphs; they grow as steps of new sizes are captured."""
        return 0 if self.model.fused is None else self.model.fused.graph_bytes

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """Return the completion of a prompt (text, or ids) as a stream of chunks.

        Keyword options are the fields of `SamplingParams`, `priority` (lower goes first) and `timeout` in seconds.
        Parameters that neither they nor `params` set come from `sampling_defaults`: the model's own, or temperature
        0.7, top-p 0.95 and min-p 0.05.
        """
        return self.streams(prompt, params, **options)[0]

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any) -> Stream:
        """Return the reply to a conversation as a stream of chunks.

        Options in addition to `stream`'s: `tools` that the model may call (`Tool`, or as OpenAI describes functions),
        `tool_choice` (auto, none, required, or the name of the tool that must be called), `parallel_tool_calls`,
        `chat_template_kwargs` (variables of the template, such as `enable_thinking`), `reasoning_effort` ("none" turns
        reasoning off) and `thinking_budget_tokens`.
        """
        chat = _pop_chat_options(options)
        guided = {name: options.pop(name) for name in ("structured_outputs",) if name in options}
        merged = _merge_params(params, guided)
        prompt = self.prepare_chat(messages, chat, merged.structured_outputs)
        merged = merged.with_structured_outputs(prompt.structured_outputs)
        return self.streams(prompt, merged, **options)[0]

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
        params: ParamsOfEach = None,
        *,
        n: None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: ParamsOfEach = None,
        *,
        n: int,
        progress: bool | None = None,
        **options: Any,
    ) -> list[list[Completion]]: ...
    def generate(
        self, prompt: Any, params: Any = None, *, n: int | None = None, progress: bool | None = None, **options: Any
    ) -> Any:
        """Complete a prompt, or a list of prompts in one batch, with a progress bar on a terminal (`progress`).

        `params` may be a list too, one for each prompt. With `n` each prompt has a list of `n` completions.
        """
        if not _is_batch(prompt):
            streams = self._run_streams(self.streams(prompt, params, n, **options), bool(progress))
            return streams[0] if n is None else streams
        each = params if isinstance(params, (list, tuple)) else [params] * len(prompt)
        if len(each) != len(prompt):
            raise InvalidRequestError(f"there are {len(prompt)} prompts and {len(each)} params", "params")
        groups = []
        for i, (item, its) in enumerate(zip(prompt, each, strict=True)):
            with _naming_prompt(i):
                groups.append(self.streams(item, its, n, **options))
        completions = iter(self._run_streams([stream for group in groups for stream in group], progress))
        grouped = [[next(completions) for _ in group] for group in groups]
        return [group[0] for group in grouped] if n is None else grouped

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any) -> Completion:
        """Reply to a conversation: `[{"role": "user", "content": "..."}]`."""
        return self.stream_chat(messages, params, **options).completion()

    def streams(
        self,
        prompt: Prompt | EncodedPrompt,
        params: SamplingParams | None = None,
        n: int | None = None,
        *,
        lora: str | Mapping[str, float] | None = None,
        **options: Any,
    ) -> list[Stream]:
        """Return `n` completions of one prompt, a stream each; they share prompt and seed, not draws."""
        if n is not None:
            _check_num_completions(n)
        priority, timeout = _check_scheduling(options.pop("priority", 0), options.pop("timeout", None))
        params = _merge_params(params, options).resolve(self.sampling_defaults.values)
        params = params.with_structured_outputs(self.check_grammar(params.structured_outputs))
        uses = self._lora_uses(lora)
        if not isinstance(prompt, EncodedPrompt):
            prompt = EncodedPrompt(self.tokenize(prompt) if isinstance(prompt, str) else self._check_ids(prompt))
        generations = make_generations(
            self.tokenizer,
            self.engine.config,
            self.config.vocab_size,
            prompt,
            params,
            n=n or 1,
            priority=priority,
            timeout_s=timeout,
            loras=uses,
        )
        return [Stream(self._sync_engine, generation) for generation in generations]

    def _lora_uses(self, lora: str | Mapping[str, float] | None) -> list[LoraUse]:
        """Return the adapters of a request: by name, or several with their scales."""
        if lora is None:
            lora = self.default_lora
        elif isinstance(lora, str):
            lora = {lora: self.loras[lora].scale if lora in self.loras else 1.0}
        uses = []
        for name, scale in lora.items():
            if name not in self.loras:
                names = ", ".join(map(repr, self.loras)) or "none"
                raise InvalidRequestError(f"there is no adapter {name[:100]!r}: there are {names}", "lora")
            uses.append(LoraUse(self.loras[name].digest, check_lora_scale(scale)))
        return [use for use in uses if use.scale]

    def _run_streams(self, streams: Sequence[Stream], progress: bool | None) -> list[Completion]:
        """Compute streams in one batch; if one fails, the others are closed."""
        with request_progress(len(streams), progress) as advance:
            for stream in together(streams, lambda tokens: advance(tokens=tokens)):
                advance(requests=1)
                stream.raise_error()
        return [stream.so_far() for stream in streams]

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        ids = ids.tolist() if hasattr(ids, "tolist") else ids  # a NumPy array
        if not isinstance(ids, Sequence) or isinstance(ids, (bytes, bytearray)):
            raise InvalidRequestError(f"prompt must be text or a list of token ids, not {type(ids).__name__}", "prompt")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < self.config.vocab_size:
                raise InvalidRequestError(
                    f"prompt: {token!r} is not a token id (0..{self.config.vocab_size - 1})", "prompt"
                )
        return [int(token) for token in ids]


OutputQueue = deque[tuple[float, TokenOutput]]  # with the time, as time.perf_counter gives it


class SyncEngine:
    """Steps an engine for threads that wait, without a thread of its own.

    Any thread that waits for a token steps the engine; outputs of other requests go into their queues. A request that
    is no longer wanted is only noted, because Python may collect its stream in the middle of a step.
    """

    def __init__(self, engine: Engine) -> None:
        self._loop = EngineLoop(engine)
        self._requests: dict[int, tuple[RequestState, OutputQueue]] = {}
        self._aborted: deque[int] = deque()
        self._lock = threading.Lock()

    def submit(self, request: RequestState) -> OutputQueue:
        """Add a request; its outputs go into the queue, one token each."""
        with self._lock:
            self._drop_aborted()
            self._loop.submit(request.submitted)
            self._requests[request.id] = request, OutputQueue()
            return self._requests[request.id][1]

    def abort(self, request: RequestState) -> None:
        """Drop a request before the next step."""
        self._aborted.append(request.id)

    def wait_for_output(self, queue: OutputQueue) -> None:
        """Step until the queue is not empty."""
        while not queue:
            with self._lock:
                if not queue:
                    assert self._loop.has_work, "the engine does not have the request that is waited for"
                    self._step()

    def _step(self) -> None:
        self._drop_aborted()
        try:
            self._take(self._loop.step())
        except BaseException:  # Ctrl-C: during a forward pass nothing is being changed, so the others can go on
            if not self._loop.engine.is_computing:
                self._take(self._loop.fail_all(RequestCancelledError("the answer was interrupted")))
            raise

    def _take(self, result: StepResult) -> None:
        now = time.perf_counter()
        for event in result.events:
            if event.id in self._requests:
                self._requests[event.id][0].apply(event)
        for output in result.outputs:
            request, queue = self._requests[output.id]
            request.add(output)
            queue.extend((now, part) for part in output.split())
            if output.finish_reason is not None:
                del self._requests[output.id]

    def _drop_aborted(self) -> None:
        while self._aborted:
            request_id = self._aborted.popleft()
            if self._requests.pop(request_id, None) is not None:
                self._loop.abort(request_id)


class Stream:
    """One completion in progress: iterate for chunks, or call `completion()` for the whole.

    It is computed in one batch with all other streams of its model, from the first chunk on; closing or dropping it
    aborts the request.
    """

    def __init__(self, engine: SyncEngine, generation: Generation) -> None:
        submitted = generation.request.submitted
        self.seed, self.prompt_tokens, self.params = submitted.seed, submitted.prompt, submitted.params
        self.error: WorkerError | None = None  # that ended it
        self._engine = engine
        self._generation = generation
        self._queue: OutputQueue | None = None
        self._logprobs: list[TokenLogprob] = []
        self._texts: list[str] = []
        self._events = EventFold()
        self._is_closed = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        if self.has_ended:
            raise StopIteration
        self.wait()
        return self._take(*self.start().popleft())

    def __del__(self) -> None:
        if hasattr(self, "_is_closed"):  # __init__ did not raise
            self.close()

    def start(self) -> OutputQueue:
        """Submit the request, so that any thread's steps compute it."""
        if self._queue is None:
            self._queue = self._engine.submit(self._generation.start())
        return self._queue

    def wait(self) -> None:
        """Step until there is an output."""
        if not self.has_ended:
            self._engine.wait_for_output(self.start())

    def take_ready(self) -> int:
        """Take the outputs that are there, without a step; return how many. An error is kept for `raise_error`."""
        count = 0
        while self._queue and not self.has_ended:
            try:
                self._take(*self._queue.popleft())
            except WorkerError:
                break
            count += 1
        return count

    def raise_error(self) -> None:
        """Raise the error that ended the stream, if one did."""
        if self.error is not None:
            raise self.error

    @property
    def has_ended(self) -> bool:
        return self._generation.finish_reason is not None or self._is_closed

    def close(self) -> None:
        """Abort the request, if it is not finished."""
        if not self._is_closed and self._queue is not None and self._generation.finish_reason is None:
            self._engine.abort(self._generation.request)
        self._is_closed = True

    def completion(self) -> Completion:
        """Run to the end and return the whole, chunks that were read before included."""
        for _ in self:
            pass
        return self.so_far()

    def so_far(self) -> Completion:
        """Return the text generated so far as a completion."""
        generation, request = self._generation, self._generation.request
        started = generation.started_at
        first = generation.first_token_at - started if generation.first_token_at else 0.0
        total = generation.last_token_at - started if generation.last_token_at else 0.0
        return Completion(
            prompt_tokens=self.prompt_tokens,
            tokens=request.tokens[: generation.num_tokens],
            text="".join(self._texts),
            finish_reason=generation.finish_reason,
            stop_sequence=generation.stop_sequence,
            seed=self.seed,
            timings=Timings(first, total, generation.num_tokens),
            logprobs=list(self._logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=request.prompt_logprobs,
            cached_tokens=max(0, request.num_cached_tokens),
            reasoning=self._events.reasoning,
            tool_calls=self._events.calls,
        )

    def _take(self, at: float, output: TokenOutput) -> Chunk:
        try:
            delta = self._generation.push((output,), at)
        except WorkerError as error:
            self.error = error
            raise
        if delta.finish_reason is not None and output.finish_reason is None:  # a stop string
            self._engine.abort(self._generation.request)
        text = delta.text if delta.events is None else self._events.add(delta.events)
        self._texts.append(text)
        self._logprobs += delta.logprobs
        logprob = output.logprobs[0] if output.logprobs else None
        token = delta.tokens[0] if delta.tokens else None
        return Chunk(text, token, logprob, delta.finish_reason, delta.events or ())


def together(streams: Sequence[Stream], on_tokens: Callable[[int], None] = lambda _: None) -> Iterator[Stream]:
    """Compute streams of one model in one batch; yield each as it ends, also one that ended with an error."""
    waiting = list(streams)
    try:
        for stream in streams:
            stream.start()
        while waiting:
            waiting[0].wait()
            on_tokens(sum(stream.take_ready() for stream in waiting))
            ended = [stream for stream in waiting if stream.has_ended]
            waiting = [stream for stream in waiting if not stream.has_ended]
            yield from ended
    finally:
        for stream in streams:
            stream.close()


def _pop_chat_options(options: dict[str, Any]) -> ChatOptions:
    """Take the options of a chat out of keyword options."""
    tools = [
        tool if isinstance(tool, Tool) else _to_tool(i, tool) for i, tool in enumerate(options.pop("tools", None) or [])
    ]
    choice = options.pop("tool_choice", "auto")
    name = None if choice in ("auto", "none", "required") else choice
    if name is not None and name not in [tool.name for tool in tools]:
        raise InvalidRequestError(f"tool_choice is {name!r}: use auto, none, required or a tool's name", "tool_choice")
    if choice == "required" and not tools:
        raise InvalidRequestError("tool_choice required needs tools", "tool_choice")
    return ChatOptions(
        tools,
        "required" if name is not None else choice,
        name,
        options.pop("parallel_tool_calls", True),
        thinking_variables(options.pop("chat_template_kwargs", None), options.pop("reasoning_effort", None)),
        options.pop("thinking_budget_tokens", None),
    )


def _to_tool(i: int, tool: Any) -> Tool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"tools[{i}] must be a Tool, or an object with a function and its name", "tools")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(function["name"], function.get("description") or "", parameters, bool(function.get("strict")))


def _merge_params(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, not {type(params).__name__}", "params")
    unknown = set(options) - set(SamplingParams.__dataclass_fields__)
    if unknown:
        raise InvalidRequestError(f"unknown sampling option {min(unknown)!r}", min(unknown))
    return replace(params or SamplingParams(), **options)


def lora_specs(loras: Mapping[str, Any]) -> tuple[LoraSpec, ...]:
    """Return adapters as the options of a load have them."""
    pairs = {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in loras.items()}
    return tuple(LoraSpec(name=name, path=str(path), scale=check_lora_scale(x)) for name, (path, x) in pairs.items())


def _is_batch(prompt: Any) -> bool:
    """Return whether it is a list of texts or of lists of ids; a list of ids is one prompt."""
    is_list = isinstance(prompt, (list, tuple)) and bool(prompt)
    return is_list and all(isinstance(item, (str, list, tuple)) or hasattr(item, "tolist") for item in prompt)


@contextmanager
def _naming_prompt(i: int) -> Iterator[None]:
    """Add the prompt's index to the error."""
    try:
        yield
    except InvalidRequestError as error:
        error.args = (f"prompt {i}: {error}", *error.args[1:])
        raise


def _check_num_completions(n: Any) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_COMPLETIONS:
        raise InvalidRequestError(f"n is {n!r}: it must be a whole number, 1 to {MAX_COMPLETIONS}", "n")


def _check_scheduling(priority: Any, timeout: Any) -> tuple[int, float | None]:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority must be a whole number, not {priority!r}", "priority")
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < float("inf")):
        raise InvalidRequestError(f"timeout is {timeout!r}: it must be a number of seconds above 0", "timeout")
    return priority, timeout
