"""What several commands take and do alike: groups of options written once, texts from outside, loading a model.

A group is a dataclass whose fields are typer options; `gather` puts its options into a command and hands the command
the filled group. The defaults of sampling are those of `SamplingParams`.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from ..engine.request import SamplingParams
from ..errors import InvalidRequestError
from .computing import LoadOptions, naming_options
from .engine_options import EngineOptions
from .terminal import Status, note

if TYPE_CHECKING:
    from ..llm import LLM, Stream
    from ..llm.loading import OnStage

MODEL_HELP = "A GGUF file, a folder with safetensors, hf:owner/repo:quant, or a name. The built-in model if left out."
DEFAULT_MAX_TOKENS = 512
# What is read whole is bounded, so that a wrong path (a disk image, /dev/zero) cannot fill the memory.
LONGEST_TEXT, LONGEST_TEMPLATE = 64 << 20, 1 << 20
# Nine digits are more than any vocabulary needs. Python's int and float would take 1_0 and other scripts' digits too.
BIAS = re.compile(r"(-?[0-9]{1,9})=([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?inf|nan)")
DEFAULTS = SamplingParams()
MODEL_PANEL, SAMPLING_PANEL, PROMPT_PANEL, OUTPUT_PANEL = "Model", "Sampling", "Prompt", "Output"


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


def decode(data: bytes, origin: str) -> str:
    """Bytes from outside as text; what is not UTF-8 is refused with its place."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{origin} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02X}"
        ) from None


def argument_text(given: str, origin: str) -> str:
    """Text from the command line, where Python hides bytes that are not UTF-8 in surrogates."""
    return decode(given.encode(errors="surrogateescape"), origin)


def read_file(path: Path, longest: int = LONGEST_TEXT) -> str:
    """A text file, byte for byte."""
    try:
        with path.open("rb") as file:
            return decode(_read(file, str(path), longest), str(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InvalidRequestError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def read_stdin() -> str:
    """All of standard input, without the one newline that `echo` and editors put at the end."""
    return decode(_read(sys.stdin.buffer, "standard input", LONGEST_TEXT), "standard input").removesuffix("\n")


def stdin_lines() -> Iterator[tuple[int, bytes]]:
    """Each line of standard input with its number, as soon as it is there."""
    number = 0
    while line := sys.stdin.buffer.readline(LONGEST_TEXT + 1):
        number += 1
        yield number, _bounded(line, f"line {number}", LONGEST_TEXT)


def _read(file: IO[bytes], origin: str, longest: int) -> bytes:
    return _bounded(file.read(longest + 1), origin, longest)


def _bounded(data: bytes, origin: str, longest: int) -> bytes:
    if len(data) > longest:
        raise InvalidRequestError(f"{origin} is too long: at most {longest >> 20} MiB are read")
    return data


def read_template(path: Path) -> str:
    """A chat template; an empty one is a mistake, not a wish for the model's own."""
    text = read_file(path, LONGEST_TEMPLATE)
    if not text.strip():
        raise InvalidRequestError(
            f"the chat template {path} is empty: leave out --chat-template to use the model's own"
        )
    return text


def read_text(given: str | None, file: Path | None, missing: str) -> str:
    """The text that a command works on: given, in a file (`-` is standard input), or on standard input."""
    if given is not None and file is not None:
        raise typer.BadParameter("the text is given twice: as an argument and with --file")
    if file is not None and str(file) != "-":
        return read_file(file)
    if given is not None and given != "-":
        return argument_text(given, "the text")
    if file is None and given is None and sys.stdin.isatty():
        raise typer.BadParameter(missing)
    return read_stdin()


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
        from .progress import progress_bar

        template = None if options.chat_template is None else read_template(options.chat_template)
        with progress_bar() as bar, naming_options():

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
