"""What several commands take and do alike: groups of options written once, loading a model.

A group is a dataclass whose fields are typer options; `gather` puts its options into a command and hands the command
the filled group. The defaults of sampling are those of `SamplingParams`, those of the engine those of `EngineConfig`.
What the options of computing set must be set before NumPy and the kernels are loaded, so a command calls `set_up` first
of all.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..backends.precompile import COMPILING
from ..config.engine import SPECULATIVE, EngineConfig
from ..engine.kv_cache_budget import bytes_of
from ..engine.request import SamplingParams
from ..errors import InsufficientMemoryError, InvalidRequestError, WorkerError
from ..progress import transfer_progress
from . import NUMPY_THREAD_VARIABLES
from .convert import TYPES
from .prompt_input import argument_text, read_template
from .terminal import Status, note

if TYPE_CHECKING:
    from ..llm import LLM, Stream
    from ..load import OnStage

MODEL_HELP = "A GGUF file, a folder with safetensors, hf:owner/repo:quant, or a name. The built-in model if left out."
DEFAULT_MAX_TOKENS = 512
# Nine digits are more than any vocabulary needs. Python's int and float would take 1_0 and other scripts' digits too.
BIAS = re.compile(r"(-?[0-9]{1,9})=([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?inf|nan)")
DEFAULTS = SamplingParams()
MODEL_PANEL, SAMPLING_PANEL, OUTPUT_PANEL = "Model", "Sampling", "Output"


def gather(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of each group, and the group itself as the argument of that name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
        kind = inspect.Parameter.KEYWORD_ONLY
        shared = [
            inspect.Parameter(f.name, kind, default=f.default, annotation=f.type)
            for g in groups.values()
            for f in fields(g)
        ]

        @functools.wraps(command)
        def call(**given: Any) -> None:
            made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
            command(**given, **made)

        call.__signature__ = inspect.Signature([p.replace(kind=kind) for p in own] + shared)  # type: ignore[attr-defined]
        return call

    return decorate


def _model_option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MODEL_PANEL, **more)


def _sampling_option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING_PANEL, **more)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model."""

    model: Annotated[str | None, _model_option("--model", "-m", metavar="MODEL", help=MODEL_HELP)] = None
    max_context: Annotated[
        int | None,
        _model_option(
            "--max-context", metavar="N", min=1, show_default="the model's", help="Use no more context than this."
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        _model_option("--chat-template", metavar="FILE", help="A Jinja file in place of the model's template."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How an answer is drawn."""

    max_tokens: Annotated[
        int | None,
        _sampling_option(
            "--max-tokens",
            "-n",
            metavar="N",
            show_default=f"{DEFAULT_MAX_TOKENS}, or what fits",
            help="The longest answer, in tokens.",
        ),
    ] = None
    temperature: Annotated[
        float, _sampling_option("--temperature", "-t", metavar="X", help="0 always takes the likeliest token.")
    ] = DEFAULTS.temperature
    top_k: Annotated[
        int, _sampling_option("--top-k", metavar="K", help="Draw from the K likeliest tokens; 0: all.")
    ] = DEFAULTS.top_k
    top_p: Annotated[
        float, _sampling_option("--top-p", metavar="P", help="Draw from the likeliest tokens that hold P together.")
    ] = DEFAULTS.top_p
    min_p: Annotated[
        float, _sampling_option("--min-p", metavar="P", help="Drop tokens below P times the likeliest one.")
    ] = DEFAULTS.min_p
    typical_p: Annotated[
        float, _sampling_option("--typical-p", metavar="P", help="Draw from the most typical tokens that hold P.")
    ] = DEFAULTS.typical_p
    repetition_penalty: Annotated[
        float, _sampling_option("--repetition-penalty", metavar="X", help="Above 1: make recent tokens less likely.")
    ] = DEFAULTS.repetition_penalty
    repeat_last_n: Annotated[
        int, _sampling_option("--repeat-last-n", metavar="N", help="How many tokens count as recent.")
    ] = DEFAULTS.repeat_last_n
    presence_penalty: Annotated[
        float, _sampling_option("--presence-penalty", metavar="X", help="Subtracted from each token already there.")
    ] = DEFAULTS.presence_penalty
    frequency_penalty: Annotated[
        float, _sampling_option("--frequency-penalty", metavar="X", help="The same, once for each time it is there.")
    ] = DEFAULTS.frequency_penalty
    logit_bias: Annotated[
        list[str] | None,
        _sampling_option("--logit-bias", metavar="ID=X", help="Add X (-100 to 100) to a token's logit. Repeatable."),
    ] = None
    seed: Annotated[
        int | None,
        _sampling_option("--seed", metavar="N", show_default="drawn", help="The same seed gives the same answer."),
    ] = DEFAULTS.seed
    stop: Annotated[
        list[str] | None, _sampling_option("--stop", metavar="TEXT", help="End before this text. Repeatable.")
    ] = None
    ignore_eos: Annotated[bool, _sampling_option("--ignore-eos", help="Go on past the end-of-text token.")] = (
        DEFAULTS.ignore_eos
    )

    def params(self, **more: Any) -> SamplingParams:
        """The checked parameters; a value out of range is wrong usage, and its option is named."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given |= {
            "stop": tuple(argument_text(text, "--stop") for text in self.stop or ()),
            "logit_bias": dict(map(_bias, self.logit_bias or ())),
        }
        try:
            return SamplingParams(**given, **more)
        except InvalidRequestError as error:
            field = error.field or ""
            raise typer.BadParameter(str(error).replace(field, "--" + field.replace("_", "-"), 1)) from None


def _bias(text: str) -> tuple[int, float]:
    found = BIAS.fullmatch(text)
    if found is None:
        raise typer.BadParameter(
            f"--logit-bias {text!r} is not of the form ID=X, such as 42=-1.5 (ID: at most 9 digits)"
        )
    return int(found[1]), float(found[2])


COMPUTING_PANEL = "Computing"
# Named here for --help, which imports nothing heavy; a test holds it against backends.types.KV_TYPES.
KV_TYPES = "auto float32 float16 int8 bfloat16 float8"
# What messages of the engine name, and a person types as an option.
SETTING = re.compile(r"(?<![\w-])(?:kv_memory|kv_type|max_context|max_tokens|draft_model|quantize)(?!\w)")


def _compute_option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=COMPUTING_PANEL, **more)


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """On what."""

    device: Annotated[
        str, _compute_option("--device", metavar="NAME", help="The hardware: auto, cpu, cuda or cuda:N.")
    ] = "auto"
    backend: Annotated[
        str, _compute_option("--backend", metavar="NAME", help="The implementation: auto, reference, cpu or cuda.")
    ] = "auto"
    threads: Annotated[
        int | None,
        _compute_option(
            "--threads", metavar="N", min=1, show_default="physical cores", help="Threads to compute with."
        ),
    ] = None
    cpu_isa: Annotated[
        str | None,
        _compute_option(
            "--cpu-isa", metavar="NAME", show_default="the best", help="An instruction set that doctor lists."
        ),
    ] = None  # fmt: skip

    def set_up(self) -> int:
        """Make it so; how many threads will compute."""
        if self.backend == "reference" and self.cpu_isa is not None:
            raise typer.BadParameter("--cpu-isa is for the kernels: it does not go with --backend reference")
        for name, value in (("--threads", self.threads), ("--cpu-isa", self.cpu_isa)):
            if value is not None and (self.device.startswith("cuda") or self.backend == "cuda"):
                raise typer.BadParameter(f"{name} is for the CPU: it does not go with a GPU")
        used = use_threads(self.threads, self.backend)
        if self.cpu_isa is not None:
            from ..backends import isa

            _check_option(isa.force, self.cpu_isa, "--cpu-isa")
        return used

    @property
    def kernel_threads(self) -> int | None:
        """What the backend is told; the reference takes its number from the environment."""
        return None if self.backend == "reference" else self.threads


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ComputeOptions):
    """On what, and how the model is held in memory."""

    kv_type: Annotated[
        str,
        _compute_option("--kv-type", metavar="T",
                help="How keys and values are kept: auto, float32, float16; on a CPU int8; on a GPU bfloat16, float8."),
    ] = "auto"  # fmt: skip
    quantize: Annotated[
        str | None,
        _compute_option("--quantize", metavar="T", show_default="as they are",
                help="Quantize the weights while loading; T as convert --type takes it, on a GPU also fp8."),
    ] = None  # fmt: skip

    def set_up(self) -> int:
        """Make it so; how many threads will compute."""
        if self.kv_type not in KV_TYPES.split():
            raise typer.BadParameter(f"--kv-type {self.kv_type}: use one of {', '.join(KV_TYPES.split())}")
        if self.quantize is not None and self.quantize.upper() not in (*TYPES.split(), "FP8"):
            raise typer.BadParameter(
                f"--quantize {self.quantize}: use one of {', '.join(TYPES.split())}, or fp8 on a GPU"
            )
        return super().set_up()


def use_threads(threads: int | None, backend: str = "auto") -> int:
    """How many threads will compute. Those of the reference are NumPy's (1 unless asked): before NumPy is loaded."""
    if backend != "reference":
        from ..backends import thread_count

        return _check_option(thread_count.choose, threads, "--threads")  # type: ignore[no-any-return]
    if threads is not None and os.environ.get(NUMPY_THREAD_VARIABLES[0]) != str(threads):
        raise WorkerError("--threads cannot be changed once NumPy is loaded: start a new process")
    return int(os.environ.get(NUMPY_THREAD_VARIABLES[0]) or 1)


def in_options(message: str, **others: str) -> str:
    """A message with settings as they are typed: kv_memory as --kv-memory, or as `others` say."""
    return SETTING.sub(lambda found: others.get(found[0]) or "--" + found[0].replace("_", "-"), message)


@contextmanager
def naming_options(**others: str) -> Iterator[None]:
    """Errors that refuse a setting name its option."""
    try:
        yield
    except (InvalidRequestError, InsufficientMemoryError) as error:
        error.args = (in_options(str(error), **others), *error.args[1:])
        raise


def _check_option(check: Any, value: Any, option: str) -> Any:
    """What is wrong with an option is wrong usage, and names it."""
    try:
        return check(value)
    except InvalidRequestError as error:
        if value is None:
            raise
        raise typer.BadParameter(str(error).replace(error.field or "", option, 1)) from None


ENGINE_PANEL = "Memory and batches"
ENGINE_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}
KV_MEMORY_HELP = "Memory for keys and values: 512M, 1.5GB, 2GiB."


def _engine_option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=ENGINE_PANEL, **more)


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """How much is held."""

    kv_memory: Annotated[
        str | None,
        _engine_option("--kv-memory", metavar="SIZE", show_default="from the memory that is free", help=KV_MEMORY_HELP),
    ] = None
    max_batch: Annotated[
        int, _engine_option("--max-batch", metavar="N", help="Requests that are computed at once; others wait.")
    ] = ENGINE_DEFAULTS["max_batch"]

    def arguments(self) -> dict[str, Any]:
        """What an `LLM` is told; a value that cannot be is wrong usage, and its option is named."""
        return {
            "kv_memory": None if self.kv_memory is None else _check_setting(bytes_of, self.kv_memory),
            "max_batch": self._checked(max_batch=self.max_batch)["max_batch"],
        }

    @staticmethod
    def _checked(**given: Any) -> dict[str, Any]:
        _check_setting(EngineConfig, max_context=1, n_blocks=1, **given)
        return given


@dataclass(frozen=True, kw_only=True)
class EngineOptions(CapacityOptions):
    """How much is held, and how a step is divided."""

    target_itl_ms: Annotated[
        float,
        _engine_option("--target-itl-ms", metavar="X",
                help="While prompts are read, running answers get a token within X milliseconds."),
    ] = ENGINE_DEFAULTS["target_itl_ms"]  # fmt: skip
    no_prefix_cache: Annotated[
        bool, _engine_option("--no-prefix-cache", help="Compute every prompt anew, also where it begins like another.")
    ] = not ENGINE_DEFAULTS["prefix_cache"]
    speculative: Annotated[
        str | None,
        _engine_option("--speculative", metavar="|".join(SPECULATIVE), show_default=ENGINE_DEFAULTS["speculative"],
                help="ngram: guess tokens from what was said before. The answer stays the same."),
    ] = None  # fmt: skip
    draft_tokens: Annotated[
        int | None,
        _engine_option("--draft-tokens", metavar="K", show_default=str(ENGINE_DEFAULTS["draft_tokens"]),
                help="Guess at most K tokens a step."),
    ] = None  # fmt: skip
    draft_model: Annotated[
        str | None,
        _engine_option("--draft-model", metavar="MODEL", help="Let a small model with the same vocabulary guess."),
    ] = None
    deterministic: Annotated[
        bool,
        _engine_option("--deterministic",
                help="The same answer alone and among others: a CPU always gives it, a GPU in a slower mode."),
    ] = False  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """What an `LLM` is told; a value that cannot be is wrong usage, and its option is named."""
        off = self.speculative in (None, "off")
        if self.draft_model is not None and not off:
            raise typer.BadParameter(f"--draft-model and --speculative {self.speculative} both guess: choose one")
        if self.draft_tokens is not None and off and self.draft_model is None:
            raise typer.BadParameter("--draft-tokens goes with --speculative ngram or --draft-model")
        given = {
            "target_itl_ms": self.target_itl_ms,
            "prefix_cache": not self.no_prefix_cache,
            "speculative": ENGINE_DEFAULTS["speculative"] if self.speculative is None else self.speculative,
            "draft_tokens": ENGINE_DEFAULTS["draft_tokens"] if self.draft_tokens is None else self.draft_tokens,
        }
        more = {"draft_model": self.draft_model, "deterministic": self.deterministic}
        return {**super().arguments(), **self._checked(**given), **more}


def _check_setting(check: Any, *given: Any, **more: Any) -> Any:
    """What is wrong with an option is wrong usage, and names it."""
    try:
        return check(*given, **more)
    except InvalidRequestError as error:
        field = error.field or ""
        raise typer.BadParameter(str(error).replace(field, "--" + field.replace("_", "-"), 1)) from None


def load(
    options: ModelOptions,
    computing: LoadOptions,
    status: Status,
    engine: EngineOptions | None = None,
    on_stage: "OnStage | None" = None,
) -> "LLM":
    """Load the model; on a terminal the status line says so. What takes long shows its bar; `on_stage` hears all."""
    more = {} if engine is None else engine.arguments()
    computing.set_up()
    status.show(f"loading {options.model or 'the built-in model'} ...")
    try:
        from ..llm import LLM

        template = None if options.chat_template is None else read_template(options.chat_template)
        with transfer_progress(COMPILING) as bar, naming_options():

            def progress(what: str, done: int, total: int | None) -> None:
                status.clear()
                bar(what, done, total)

            llm = LLM(
                options.model,
                device=computing.device,
                backend=computing.backend,
                threads=computing.kernel_threads,
                kv_type=computing.kv_type,
                quantize=computing.quantize,
                max_context=options.max_context,
                chat_template=template,
                progress=progress,
                on_stage=on_stage,
                **more,
            )
    finally:
        status.clear()
    for told in llm.notes:
        note(told)
    if engine is not None and llm.capacity.is_cut:
        note(f"{llm.capacity}; --kv-memory or a smaller --kv-type gives longer contexts")
    return llm


def begin(
    llm: "LLM", prompt: list[int], params: SamplingParams, longest: int | None, timeout: float | None = None
) -> "Stream":
    """Start an answer; `longest` bounds it where that leaves less than the context does."""
    if longest is not None:
        params = replace(params, max_tokens=max(1, min(longest, llm.max_context - len(prompt))))
    with naming_options():
        return llm.stream(prompt, params, timeout=timeout)
