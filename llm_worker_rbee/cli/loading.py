"""The use of the shared options: setting up the device, loading a model, starting a stream. Errors name options.

`set_up` comes first in a command: threads and instruction set must be known before kernels are loaded.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from ..backends import cpu_info
from ..backends.ops import CAPTURING, COMPILING
from ..config import LoadOptions
from ..engine.kv_store import check_folder
from ..errors import InsufficientMemoryError, InvalidRequestError, WorkerError
from ..llm import LLM, Stream
from ..progress import OnStage, transfer_progress
from ..sampling_params import SamplingParams
from ..text_model import EncodedPrompt
from ..weights.hub import Progress
from . import NUMPY_THREAD_VARIABLES
from .options import DEFAULT_MAX_TOKENS, ComputeFlags, EngineFlags, LoadFlags, ModelFlags, check_usage
from .terminal import OutputThread, Status, note, read_template

# Arguments of `LLM` that error messages name and the user types as options.
SETTING = re.compile(
    r"(?<![\w-])(?:kv_memory|kv_type|max_context|max_tokens|max_batch|max_step_tokens|draft_model|quantize|max_length|max_loras|max_cpu_loras|"
    r"max_lora_rank|prompt_name)(?!\w)"
)


def set_up(computing: ComputeFlags) -> int:
    """Validate and apply the options of computing, and return the number of threads."""
    computing.validate()
    count = use_threads(computing.threads, computing.backend)
    if computing.cpu_isa is not None:
        check_usage(cpu_info.force_isa, computing.cpu_isa, option="--cpu-isa")
    return count


def use_threads(threads: int | None, backend: str = "auto") -> int:
    """Return the number of computing threads; the reference uses NumPy's, 1 by default."""
    if backend != "reference":  # without --threads the number comes from the environment, which is no usage error
        choose = cpu_info.choose_thread_count
        return choose() if threads is None else check_usage(choose, threads, option="--threads")
    if threads is not None and os.environ.get(NUMPY_THREAD_VARIABLES[0]) != str(threads):
        raise WorkerError("--threads cannot be changed once NumPy is loaded: start a new process")
    return int(os.environ.get(NUMPY_THREAD_VARIABLES[0]) or 1)


@contextmanager
def option_names_in_errors(**others: str) -> Iterator[None]:
    """Rename settings in error messages to options: kv_memory to --kv-memory, or as `others` say."""
    try:
        yield
    except (InvalidRequestError, InsufficientMemoryError) as error:
        error.args = (with_option_names(str(error), **others), *error.args[1:])
        raise


def with_option_names(text: str, **others: str) -> str:
    """Return a message with the names of options instead of settings: --kv-memory for kv_memory."""
    return SETTING.sub(lambda match: others.get(match[0]) or "--" + match[0].replace("_", "-"), text)


def load_model(
    model: ModelFlags,
    computing: LoadFlags,
    status: Status,
    engine: EngineFlags | None = None,
    on_stage: OnStage | None = None,
    prepare: Callable[[LLM], object] = lambda llm: None,
    options: LoadOptions | None = None,
) -> LLM:
    """Load the model and `prepare` it, with a status line or bars; `on_stage` is called for each stage."""
    options = options or load_options(model, computing, engine)
    set_up(computing)
    with shown_loading(model.model or "the default model", status) as progress:
        template = None if model.chat_template is None else read_template(model.chat_template)
        llm = LLM(options, chat_template=template, progress=progress, on_stage=on_stage)
        llm.default_lora = {spec.name: spec.scale for spec in options.loras}
        prepare(llm)
    for text in llm.notes if engine is None else llm.info.notes:
        note(with_option_names(text))
    return llm


@contextmanager
def shown_loading(model: str, status: Status, **others: str) -> Iterator[Progress]:
    """Show a status line or bars while a model is loaded; errors name options, or what `others` say."""
    status.show(f"loading {model} ...")
    try:
        with transfer_progress(COMPILING, CAPTURING) as bar, option_names_in_errors(**others):

            def progress(what: str, done: int, total: int | None) -> None:
                status.clear()
                bar(what, done, total)

            yield progress
    finally:
        status.clear()


class LoadingOutput:
    """What is shown while models load, until it is closed, by a thread of its own."""

    def __init__(self) -> None:
        self._output, self._shown, self._status = OutputThread(), ExitStack(), Status()
        self._shown.callback(self._status.clear)
        self._bar = self._shown.enter_context(transfer_progress(COMPILING, CAPTURING))
        self._last: deque[tuple[str, int, int | None]] = deque(maxlen=1)

    def status(self, text: str) -> None:
        self._output.call(partial(self._status.show, text))

    def progress(self, what: str, done: int, total: int | None) -> None:
        self._last.append((what, done, total))
        self._output.call(self._draw)

    def _draw(self) -> None:
        if self._last:  # later ones replace those that were not drawn in time
            self._status.clear()
            self._bar(*self._last.pop())

    def close(self, then: Callable[[], object] = lambda: None) -> None:
        self._output.call(self._shown.close)
        self._output.call(then)

    def __enter__(self) -> LoadingOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if not self._output.wait():
            os._exit(0 if kind is None else 1)  # any other exit waits for the terminal


def load_options(model: ModelFlags, computing: LoadFlags, engine: EngineFlags | None = None) -> LoadOptions:
    """Return the load options of these flags."""
    options = replace(computing.options(model.model), max_context=model.max_context)
    options = options if engine is None else engine.apply(options)
    if options.kv_dir is not None:
        check_usage(check_folder, options.kv_dir)
    return options


def limit_tokens(llm: LLM, prompt: list[int], params: SamplingParams, *, is_reduced: bool = False) -> SamplingParams:
    """Set max_tokens where it is not given, to what fits into the context at most; `is_reduced`: also a given one."""
    if params.max_tokens is not None and not is_reduced:
        return params
    max_tokens = params.max_tokens or DEFAULT_MAX_TOKENS
    return replace(params, max_tokens=max(1, min(max_tokens, llm.max_context - len(prompt))))


def start_stream(
    llm: LLM, prompt: EncodedPrompt, params: SamplingParams, *, timeout: float | None = None, is_reduced: bool = False
) -> Stream:
    """Start a generation with the limit of `limit_tokens`; errors name options."""
    with option_names_in_errors():
        limited = limit_tokens(llm, prompt.ids, params, is_reduced=is_reduced)
        guided = limited.with_structured_outputs(prompt.structured_outputs)
        return llm.streams(prompt, guided, timeout=timeout)[0]
