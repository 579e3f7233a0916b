"""Options that several commands share, each declared once, and their use: loading a model, starting a stream.

A group is a dataclass whose fields are options; `gather` adds its options to a command and passes the filled group.
Defaults come from `SamplingParams` and `EngineConfig`. `set_up` of the device options comes first in a command:
threads and instruction set must be known before kernels are loaded.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..backends import cpu_info
from ..backends.ops import CAPTURING, COMPILING
from ..config import (
    KV_AUTO,
    KV_VALUE_BYTES,
    MAX_BATCH,
    SPECULATIVE,
    STEP_TOKENS,
    WRITTEN_TYPES,
    EngineConfig,
    LoadOptions,
    parse_size,
)
from ..errors import InsufficientMemoryError, InvalidRequestError, WorkerError
from ..llm import LLM, Stream
from ..progress import OnStage, transfer_progress
from ..sampling_params import BUILT_IN_SAMPLING, SamplingParams
from ..text_model import EncodedPrompt
from ..weights.hub import Progress
from . import NUMPY_THREAD_VARIABLES
from .terminal import Status, argument_text, note, read_template

MODEL_HELP = "A GGUF file, a folder with safetensors, hf:owner/repo:quant, or a name. The default model if left out."
DEFAULT_MAX_TOKENS = 512
KV_TYPES = (KV_AUTO, *KV_VALUE_BYTES)
# Nine digits are more than any vocabulary needs. Python's int and float would take 1_0 and other scripts' digits too.
LOGIT_BIAS = re.compile(r"(-?[0-9]{1,9})=([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?inf|nan)")
# Arguments of `LLM` that error messages name and the user types as options.
SETTING = re.compile(
    r"(?<![\w-])(?:kv_memory|kv_type|max_context|max_tokens|max_batch|max_step_tokens|draft_model|quantize|max_length|"
    r"prompt_name)(?!\w)"
)
SAMPLING = SamplingParams()
ENGINE_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}


def options_in(panel: str) -> Any:
    """Return `typer.Option` for one panel of the help."""
    return functools.partial(typer.Option, rich_help_panel=panel)


def option_fields(panel: str) -> Callable[..., Any]:
    """Return a function that declares an option of a panel as a field of a group, which gives it its name."""

    def option(default: Any, metavar: str | None, help: str, *names: str, **extra: Any) -> Any:
        metadata = {"names": names, "metavar": metavar, "help": help, "rich_help_panel": panel, **extra}
        return field(default=default, metadata=metadata)

    return option


_model, _sampling = option_fields("Model"), option_fields("Sampling")
_device, _engine = option_fields("Computing"), option_fields("Memory and batches")


def _defaulted(name: str, metavar: str, help: str, *names: str) -> Any:
    """Declare a sampling option whose default is the model's, or built in where the model has none."""
    return _sampling(None, metavar, help, *names, show_default=f"the model's, or {BUILT_IN_SAMPLING[name]:g}")


def gather(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of each group, and the filled group as the argument of that name."""
    parameters = {name: group_parameters(group) for name, group in groups.items()}
    kind = inspect.Parameter.KEYWORD_ONLY

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]

        @functools.wraps(command)
        def call(**values: Any) -> None:
            filled = {
                name: group(**{p.name: values.pop(p.name) for p in parameters[name]}) for name, group in groups.items()
            }
            command(**values, **filled)

        shared = [p for group in parameters.values() for p in group]
        call.__signature__ = inspect.Signature([p.replace(kind=kind) for p in own] + shared)  # type: ignore[attr-defined]
        return call

    return decorate


def group_parameters(group: Any) -> list[inspect.Parameter]:
    """Return the options of a group as parameters of a command."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, annotation=_annotation(f), default=f.default) for f in fields(group)]


def _annotation(declared: Field[Any]) -> Any:
    """Return the type of a field with its option; `names` are short ones, or replace the name of the field."""
    if not declared.metadata:  # annotated with its option already
        return declared.type
    options = dict(declared.metadata)
    names = options.pop("names")
    if not any(name.startswith("--") for name in names):
        names = ("--" + declared.name.replace("_", "-"), *names)
    return Annotated[declared.type, typer.Option(*names, **options)]


def _check(function: Callable[..., Any], *args: Any, option: str | None = None, **values: Any) -> Any:
    """Call a function that validates; a value that it rejects is wrong usage, and the message names the option."""
    try:
        return function(*args, **values)
    except InvalidRequestError as error:
        field = error.field or ""
        raise typer.BadParameter(str(error).replace(field, option or "--" + field.replace("_", "-"), 1)) from None


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Which model."""

    model: str | None = _model(None, "MODEL", MODEL_HELP, "-m")
    max_context: int | None = _model(
        None, "N", "Limit the context, prompt and answer together, to N tokens.", min=2, show_default="the model's"
    )
    chat_template: Path | None = _model(None, "FILE", "Jinja file that replaces the model's chat template.")


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How tokens are sampled: fields of `SamplingParams`; those that are not given have the model's defaults."""

    max_tokens: int | None = _sampling(
        None, "N", "Stop after N tokens.", "-n", show_default=f"{DEFAULT_MAX_TOKENS}, or what fits"
    )
    temperature: float | None = _defaulted("temperature", "X", "0 always takes the most likely token.", "-t")
    top_k: int | None = _defaulted("top_k", "K", "Sample from the K most likely tokens; 0: all.")
    top_p: float | None = _defaulted("top_p", "P", "Sample from the most likely tokens with probability P in sum.")
    min_p: float | None = _defaulted("min_p", "P", "Drop tokens below P times the probability of the most likely.")
    typical_p: float | None = _defaulted("typical_p", "P", "Sample from the most typical tokens with P in sum.")
    repetition_penalty: float | None = _defaulted("repetition_penalty", "X", "Above 1: make recent tokens less likely.")
    repeat_last_n: int | None = _defaulted("repeat_last_n", "N", "How many tokens count as recent.")
    presence_penalty: float = _sampling(SAMPLING.presence_penalty, "X", "Subtract X from the logit of each token seen.")
    frequency_penalty: float = _sampling(
        SAMPLING.frequency_penalty, "X", "Subtract X per occurrence of a token from its logit."
    )
    logit_bias: list[str] | None = _sampling(None, "ID=X", "Add X (-100 to 100) to a token's logit. Repeatable.")
    seed: int | None = _sampling(None, "N", "The same seed gives the same answer.", show_default="random")
    stop: list[str] | None = _sampling(None, "TEXT", "Stop before this text. Repeatable.")
    ignore_eos: bool = _sampling(False, None, "Continue past the end-of-text token.")

    def params(self, **extra: Any) -> SamplingParams:
        stops = tuple(argument_text(text, "--stop") for text in self.stop or ())
        bias = dict(map(_parse_logit_bias, self.logit_bias or ()))
        return _check(SamplingParams, **{**vars(self), "stop": stops, "logit_bias": bias}, **extra)  # type: ignore[no-any-return]


def _parse_logit_bias(text: str) -> tuple[int, float]:
    match = LOGIT_BIAS.fullmatch(text)
    if match is None:
        raise typer.BadParameter(
            f"--logit-bias {text!r} is not of the form ID=X, such as 42=-1.5 (ID: at most 9 digits)"
        )
    return int(match[1]), float(match[2])


@dataclass(frozen=True, kw_only=True)
class ComputeFlags:
    """Device, backend, threads, instruction set."""

    device: str = _device("auto", "NAME", "The hardware: auto, cpu, cuda or cuda:N.")
    backend: str = _device("auto", "NAME", "The implementation: auto, reference, cpu or cuda.")
    threads: int | None = _device(None, "N", "Threads to compute with.", min=1, show_default="physical cores")
    cpu_isa: str | None = _device(
        None, "NAME", "Instruction set of the kernels; doctor lists them.", show_default="the best"
    )

    def set_up(self) -> int:
        """Apply the options and return the number of threads."""
        if self.backend == "reference" and self.cpu_isa is not None:
            raise typer.BadParameter("--cpu-isa is for the kernels: it does not go with --backend reference")
        for name, value in (("--threads", self.threads), ("--cpu-isa", self.cpu_isa)):
            if value is not None and (self.device.startswith("cuda") or self.backend == "cuda"):
                raise typer.BadParameter(f"{name} is for the CPU: it does not go with a GPU")
        count = use_threads(self.threads, self.backend)
        if self.cpu_isa is not None:
            _check(cpu_info.force_isa, self.cpu_isa, option="--cpu-isa")
        return count

    @property
    def kernel_threads(self) -> int | None:
        """The threads of a backend with kernels; the reference takes its number from the environment."""
        return None if self.backend == "reference" else self.threads

    def options(self, model: str | None = None) -> LoadOptions:
        """Return the options of a load."""
        return LoadOptions(model=model, device=self.device, backend=self.backend, threads=self.kernel_threads)


@dataclass(frozen=True, kw_only=True)
class LoadFlags(ComputeFlags):
    """The same, and the types of KV cache and weights."""

    kv_type: str = _device(
        KV_AUTO, "T", "Type of the KV cache: auto, float32, float16; on a CPU int8; on a GPU bfloat16, float8."
    )
    quantize: str | None = _device(
        None,
        "T",
        "Quantize the weights while loading; T as convert --type takes it, on a GPU also fp8.",
        show_default="as they are",
    )

    def set_up(self) -> int:
        if self.kv_type not in KV_TYPES:
            raise typer.BadParameter(f"--kv-type {self.kv_type}: use one of {', '.join(KV_TYPES)}")
        _check_quantize(self.quantize)
        return super().set_up()

    def options(self, model: str | None = None) -> LoadOptions:
        return replace(super().options(model), kv_type=self.kv_type, quantize=self.quantize)


def _check_quantize(quantize: str | None) -> None:
    if quantize is not None and quantize.upper() not in (*WRITTEN_TYPES, "FP8"):
        raise typer.BadParameter(f"--quantize {quantize}: use one of {', '.join(WRITTEN_TYPES)}, or fp8 on a GPU")


@dataclass(frozen=True, kw_only=True)
class PoolingFlags(ComputeFlags):
    """Which embedding model or reranker, and how it computes."""

    model: str | None = _model(None, "MODEL", MODEL_HELP, "-m")
    max_length: int | None = _model(None, "N", "Limit an input to N tokens.", min=1, show_default="the model's")
    quantize: str | None = _device(
        None, "T", "Quantize the weights while loading; T as convert --type takes it.", show_default="as they are"
    )
    max_step_tokens: int | None = _device(
        None,
        "N",
        "Maximum number of tokens in a step.",
        "--batch-tokens",
        "--max-step-tokens",
        min=1,
        show_default="by device",
    )

    def set_up(self) -> int:
        _check_quantize(self.quantize)
        return super().set_up()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Embedder` and `Reranker`, but for the model."""
        return {
            "device": self.device,
            "backend": self.backend,
            "threads": self.kernel_threads,
            "quantize": self.quantize,
            "max_length": self.max_length,
            "max_step_tokens": self.max_step_tokens,
        }


def use_threads(threads: int | None, backend: str = "auto") -> int:
    """Return the number of computing threads; the reference uses NumPy's, 1 by default."""
    if backend != "reference":  # without --threads the number comes from the environment, which is no usage error
        choose = cpu_info.choose_thread_count
        return choose() if threads is None else _check(choose, threads, option="--threads")
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


@dataclass(frozen=True, kw_only=True)
class CapacityFlags:
    """Size of the KV cache and of a batch."""

    kv_memory: str | None = _engine(
        None, "SIZE", "Memory for keys and values: 512M, 1.5GB, 2GiB.", show_default="from the free memory"
    )
    max_batch: int | None = _engine(
        None,
        "N",
        "Maximum number of requests in a batch; others wait.",
        show_default=f"{ENGINE_DEFAULTS['max_batch']}, on a GPU what fits, at most {MAX_BATCH}",
    )
    max_step_tokens: int | None = _engine(
        None,
        "N",
        "Maximum number of tokens in a step with prefill.",
        show_default=f"{ENGINE_DEFAULTS['max_step_tokens']}, on a GPU by model and memory, at most {STEP_TOKENS[0]}",
    )

    def apply(self, options: LoadOptions) -> LoadOptions:
        """Return the options of a load with these; a value that is out of range is wrong usage."""
        kv_memory = None if self.kv_memory is None else _check(parse_size, self.kv_memory)
        limits: Any = {"max_batch": self.max_batch, "max_step_tokens": self.max_step_tokens}
        return _check(replace, options, kv_memory=kv_memory, **limits)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class EngineFlags(CapacityFlags):
    """The same, and how steps are divided."""

    target_itl_ms: float = _engine(
        ENGINE_DEFAULTS["target_itl_ms"],
        "X",
        "During prefill of other prompts, running requests get a token within X milliseconds.",
    )
    no_prefix_cache: bool = _engine(
        not ENGINE_DEFAULTS["prefix_cache"], None, "Do not reuse the KV cache of prompts with the same prefix."
    )
    speculative: str | None = _engine(
        None,
        "|".join(SPECULATIVE),
        "Draft tokens from earlier text (ngram) or by a head in the file (mtp). The answer stays the same.",
        show_default=ENGINE_DEFAULTS["speculative"],
    )
    draft_tokens: int | None = _engine(
        None, "K", "Maximum number of draft tokens per step.", show_default=str(ENGINE_DEFAULTS["draft_tokens"])
    )
    draft_model: str | None = _engine(None, "MODEL", "Small model with the same vocabulary that drafts tokens.")
    deterministic: bool = _engine(
        False, None, "The same answer alone and in a batch: a CPU always gives it, a GPU in a slower mode."
    )

    def apply(self, options: LoadOptions) -> LoadOptions:
        off = self.speculative in (None, "off")
        if self.draft_model is not None and not off:
            raise typer.BadParameter(f"--draft-model and --speculative {self.speculative} both draft: choose one")
        if self.draft_tokens is not None and off and self.draft_model is None:
            raise typer.BadParameter("--draft-tokens goes with --speculative ngram or mtp, or with --draft-model")
        values: Any = {"speculative": self.speculative, "draft_tokens": self.draft_tokens}
        return _check(  # type: ignore[no-any-return]
            replace,
            super().apply(options),
            target_itl_ms=self.target_itl_ms,
            prefix_cache=not self.no_prefix_cache,
            draft_model=self.draft_model,
            deterministic=self.deterministic,
            **{name: value for name, value in values.items() if value is not None},
        )


def load_model(
    model: ModelFlags,
    computing: LoadFlags,
    status: Status,
    engine: EngineFlags | None = None,
    on_stage: OnStage | None = None,
    prepare: Callable[[LLM], object] = lambda llm: None,
) -> LLM:
    """Load the model and `prepare` it, with a status line or bars; `on_stage` is called for each stage."""
    options = load_options(model, computing, engine)
    computing.set_up()
    with shown_loading(model.model or "the default model", status) as progress:
        template = None if model.chat_template is None else read_template(model.chat_template)
        llm = LLM(options, chat_template=template, progress=progress, on_stage=on_stage)
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


def load_options(model: ModelFlags, computing: LoadFlags, engine: EngineFlags | None = None) -> LoadOptions:
    """Return the load options of these flags."""
    options = replace(computing.options(model.model), max_context=model.max_context)
    return options if engine is None else engine.apply(options)


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
        return llm.streams(prompt.ids, guided, timeout=timeout, make_parser=prompt.make_parser)[0]
