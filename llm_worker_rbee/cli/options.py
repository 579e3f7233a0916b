"""Options that several commands share, each declared once; commands.py has the commands, loading.py what uses them.

A group is a dataclass whose fields are options, or groups; without eq and repr it is made in a third of the time.
`with_options` gives its options to a command, and the filled group to the body. Defaults come from `SamplingParams` and
`EngineConfig`. Help and usage errors import this module: it imports no NumPy, no engine, no server.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import (
    KV_AUTO,
    KV_VALUE_BYTES,
    MAX_BATCH,
    SPECULATIVE,
    STEP_TOKENS,
    WRITTEN_TYPES,
    EngineConfig,
    LoadOptions,
    LoraSpec,
    parse_size,
)
from ..errors import InvalidRequestError
from ..sampling_params import BUILT_IN_SAMPLING, SamplingParams
from .terminal import argument_text

MODEL_HELP = "A GGUF file, a folder with safetensors, hf:owner/repo:quant, or a name. The default model if left out."
DEFAULT_MAX_TOKENS = 512
KV_TYPES = (KV_AUTO, *KV_VALUE_BYTES)
# Nine digits are more than any vocabulary needs. Python's int and float would take 1_0 and other scripts' digits too.
LOGIT_BIAS = re.compile(r"(-?[0-9]{1,9})=([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?inf|nan)")
LORA = re.compile(r"(?:(?P<name>[^=/]+)=)?(?P<path>.+?)(?::(?P<scale>-?[0-9]{1,3}(?:\.[0-9]{0,6})?))?")
SAMPLING = SamplingParams()
ENGINE_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}


def option_fields(panel: str | None) -> Callable[..., Any]:
    """Return a function that declares an option of a panel of the help, as a field of a group, which names it."""

    def option(default: Any, metavar: str | None, help: str, *names: str, **extra: Any) -> Any:
        metadata = {"names": names, "metavar": metavar, "help": help, "rich_help_panel": panel, **extra}
        return field(default=default, metadata=metadata)

    return option


_model, _sampling = option_fields("Model"), option_fields("Sampling")
_device, _engine = option_fields("Computing"), option_fields("Memory and batches")
_adapters, _images = option_fields("LoRA adapters"), option_fields("Images")
_several, _files, _worker = map(option_fields, ("Several models", "Files and batches", None))


def _defaulted(name: str, metavar: str, help: str, *names: str) -> Any:
    """Declare a sampling option whose default is the model's, or built in where the model has none."""
    return _sampling(None, metavar, help, *names, show_default=f"the model's, or {BUILT_IN_SAMPLING[name]:g}")


def with_options(group: Any, import_body: Callable[[], Callable[[Any], None]]) -> Callable[..., None]:
    """Return a function whose parameters are the options of a group; it calls the body with the filled group."""

    def call(**values: Any) -> None:
        import_body()(_fill(group, values))

    call.__signature__ = inspect.Signature(_parameters(group))  # type: ignore[attr-defined]
    return call


def _parameters(group: Any) -> list[inspect.Parameter]:
    """Return the options of a group, and of the groups in it."""
    kind, parameters = inspect.Parameter.KEYWORD_ONLY, []
    for part in fields(group):
        if is_dataclass(part.type):
            parameters += _parameters(part.type)
        else:
            default = inspect.Parameter.empty if part.default is MISSING else part.default
            parameters.append(inspect.Parameter(part.name, kind, annotation=_annotation(part), default=default))
    return parameters


def _fill(group: Any, values: dict[str, Any]) -> Any:
    """Return a group, and the groups in it, with the values of the options."""
    parts = {part.name: part.type for part in fields(group)}
    return group(**{name: _fill(kind, values) if is_dataclass(kind) else values[name] for name, kind in parts.items()})


def with_defaults(group: Any, **values: Any) -> Any:
    """Return a group with these values of options, and the defaults of the others."""
    return _fill(group, {option.name: option.default for option in _parameters(group)} | values)


def _annotation(declared: Field[Any]) -> Any:
    """Return the type of a field with its option; `names` are short ones, or replace the name of the field."""
    if not declared.metadata:  # annotated with its option already
        return declared.type
    options = dict(declared.metadata)
    names = options.pop("names")
    if not any(name.startswith("--") for name in names):
        names = ("--" + declared.name.replace("_", "-"), *names)
    return Annotated[declared.type, typer.Option(*names, **options)]


def check_usage(function: Callable[..., Any], *args: Any, option: str | None = None, **values: Any) -> Any:
    """Call a function that validates; a value that it rejects is wrong usage, and the message names the option."""
    try:
        return function(*args, **values)
    except InvalidRequestError as error:
        field = error.field or ""
        raise typer.BadParameter(str(error).replace(field, option or "--" + field.replace("_", "-"), 1)) from None


@dataclass(kw_only=True, eq=False, repr=False)
class ModelFlags:
    """Which model."""

    model: str | None = _model(None, "MODEL", MODEL_HELP, "-m")
    max_context: int | None = _model(
        None, "N", "Limit the context, prompt and answer together, to N tokens.", min=2, show_default="the model's"
    )
    chat_template: Path | None = _model(None, "FILE", "Jinja file that replaces the model's chat template.")


@dataclass(kw_only=True, eq=False, repr=False)
class ServedFlags:
    """Which models."""

    models: list[str] | None = _model(
        None, "MODEL", f"{MODEL_HELP} Repeatable: a request names one of them, and it is loaded.", "--model", "-m"
    )
    max_context: int | None = _model(
        None, "N", "Limit the context, prompt and answer together, to N tokens.", min=2, show_default="the model's"
    )
    chat_template: Path | None = _model(None, "FILE", "Jinja file that replaces the model's chat template.")

    @property
    def first(self) -> ModelFlags:
        """The only model, or the first."""
        model = self.models[0] if self.models else None
        return ModelFlags(model=model, max_context=self.max_context, chat_template=self.chat_template)


@dataclass(kw_only=True, eq=False, repr=False)
class PoolFlags:
    """Several models behind one port."""

    models_dir: Path | None = _several(
        None, "DIR", "Serve the models of this folder too: GGUF files and folders, by their names."
    )
    max_models: int | None = _several(
        None, "N", "Models that are loaded at the same time.", min=1, show_default="as many as are named, at least 3"
    )
    model_memory: str | None = _several(
        None, "SIZE", "Memory for all loaded models: 8GB, 20GiB.", show_default="what is free at the start"
    )
    sleep_after: str | None = _several(
        None,
        "TIME",
        "Unload a model after so long without a request (90s, 5m, 1h); the next one loads it again.",
        show_default="never",
    )
    max_pull: str = _several(
        "100GB", "SIZE", "The largest model of the hub that a request may fetch into --models-dir."
    )
    load_timeout: float = _several(300.0, "S", "A request waits S seconds for its model to be loaded.", min=0.1)


@dataclass(kw_only=True, eq=False, repr=False)
class FilesFlags:
    """Files and batches."""

    files_dir: Path | None = _files(
        None, "FOLDER", "Serve files and batches: they are kept in this folder, and go on after a restart."
    )
    files_size: str = _files("1GiB", "SIZE", "Limit of that folder; uploads beyond it are refused.")
    files_age: str = _files("720h", "TIME", "Delete files, and batches that have ended, after so long.")


@dataclass(kw_only=True, eq=False, repr=False)
class WorkerFlags:
    """A worker that runs."""

    url: str = _worker("http://127.0.0.1:8080", "URL", "Address of the worker.")
    api_key_file: Path | None = _worker(None, "FILE", "File with the worker's key. Or LLM_WORKER_API_KEY.")


@dataclass(kw_only=True, eq=False, repr=False)
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
        return check_usage(SamplingParams, **{**vars(self), "stop": stops, "logit_bias": bias}, **extra)  # type: ignore[no-any-return]


def _parse_logit_bias(text: str) -> tuple[int, float]:
    match = LOGIT_BIAS.fullmatch(text)
    if match is None:
        raise typer.BadParameter(
            f"--logit-bias {text!r} is not of the form ID=X, such as 42=-1.5 (ID: at most 9 digits)"
        )
    return int(match[1]), float(match[2])


@dataclass(kw_only=True, eq=False, repr=False)
class ComputeFlags:
    """Device, backend, threads, instruction set."""

    device: str = _device("auto", "NAME", "The hardware: auto, cpu, cuda or cuda:N.")
    backend: str = _device("auto", "NAME", "The implementation: auto, reference, cpu or cuda.")
    threads: int | None = _device(None, "N", "Threads to compute with.", min=1, show_default="physical cores")
    cpu_isa: str | None = _device(
        None, "NAME", "Instruction set of the kernels; doctor lists them.", show_default="the best"
    )

    def validate(self) -> None:
        """Raise a usage error for options that exclude each other, or a type that does not exist."""
        if self.backend == "reference" and self.cpu_isa is not None:
            raise typer.BadParameter("--cpu-isa is for the kernels: it does not go with --backend reference")
        for name, value in (("--threads", self.threads), ("--cpu-isa", self.cpu_isa)):
            if value is not None and (self.device.startswith("cuda") or self.backend == "cuda"):
                raise typer.BadParameter(f"{name} is for the CPU: it does not go with a GPU")

    @property
    def kernel_threads(self) -> int | None:
        """The threads of a backend with kernels; the reference takes its number from the environment."""
        return None if self.backend == "reference" else self.threads

    def options(self, model: str | None = None) -> LoadOptions:
        """Return the options of a load."""
        return LoadOptions(model=model, device=self.device, backend=self.backend, threads=self.kernel_threads)


@dataclass(kw_only=True, eq=False, repr=False)
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

    def validate(self) -> None:
        if self.kv_type not in KV_TYPES:
            raise typer.BadParameter(f"--kv-type {self.kv_type}: use one of {', '.join(KV_TYPES)}")
        _check_quantize(self.quantize)
        super().validate()

    def options(self, model: str | None = None) -> LoadOptions:
        return replace(super().options(model), kv_type=self.kv_type, quantize=self.quantize)


def _check_quantize(quantize: str | None) -> None:
    if quantize is not None and quantize.upper() not in (*WRITTEN_TYPES, "FP8"):
        raise typer.BadParameter(f"--quantize {quantize}: use one of {', '.join(WRITTEN_TYPES)}, or fp8 on a GPU")


@dataclass(kw_only=True, eq=False, repr=False)
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

    def validate(self) -> None:
        _check_quantize(self.quantize)
        super().validate()

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


@dataclass(kw_only=True, eq=False, repr=False)
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
        kv_memory = None if self.kv_memory is None else check_usage(parse_size, self.kv_memory)
        limits: Any = {"max_batch": self.max_batch, "max_step_tokens": self.max_step_tokens}
        return check_usage(replace, options, kv_memory=kv_memory, **limits)  # type: ignore[no-any-return]


def parse_lora(text: str) -> LoraSpec:
    """Parse [NAME=]PATH[:SCALE]; the name is otherwise the file's or the folder's."""
    match = LORA.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"--lora {text!r} is not of the form [NAME=]PATH[:SCALE]")
    path = match["path"] if match["path"].startswith("hf:") else str(Path(match["path"]).expanduser().absolute())
    name = match["name"] or Path(match["path"]).name.removesuffix(".gguf")
    return LoraSpec(name=name, path=path, scale=float(match["scale"] or 1.0))


@dataclass(kw_only=True, eq=False, repr=False)
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
    kv_dir: str | None = _engine(
        None,
        "FOLDER",
        "Keep the keys and values of prompts and answers in this folder: a conversation goes on at once after a "
        "restart. Whoever reads the folder can recover their text.",
    )
    kv_disk: str = _engine("20GiB", "SIZE", "Limit of that folder; what was used least recently goes first.")
    kv_max_age: float | None = _engine(
        None, "DAYS", "Remove from it what was not used for so long.", min=0, show_default="no limit"
    )

    kv_ram: str | None = _engine(
        None, "SIZE", "Host memory that keeps keys and values when a GPU has no room for them.", show_default="none"
    )

    mmproj: str | None = _images(
        None,
        "FILE",
        "The projector file of the model, with the tower that sees images; none: take text alone.",
        show_default="mmproj*.gguf beside the model, or its own folder",
    )
    max_image_tokens: int = _images(
        LoadOptions.max_image_tokens, "N", "Make larger images smaller, so that each has at most N tokens.", min=1
    )
    lora: list[str] | None = _adapters(
        None,
        "[NAME=]PATH[:SCALE]",
        "A LoRA adapter: a GGUF file, a PEFT folder, or hf:owner/repo. Repeatable. `serve` offers each as a model.",
    )
    max_loras: int | None = _adapters(
        None, "N", "Maximum number of adapters in the model.", min=0, show_default="all of --lora; with a folder 8"
    )
    max_cpu_loras: int | None = _adapters(
        None, "N", "Maximum number of adapters that are loaded, the others in RAM.", min=1, show_default="--max-loras"
    )
    max_lora_rank: int | None = _adapters(
        None, "R", "Largest rank of an adapter.", min=1, show_default="16, or the largest rank of --lora"
    )

    def apply(self, options: LoadOptions) -> LoadOptions:
        off = self.speculative in (None, "off")
        if self.draft_model is not None and not off:
            raise typer.BadParameter(f"--draft-model and --speculative {self.speculative} both draft: choose one")
        if self.draft_tokens is not None and off and self.draft_model is None:
            raise typer.BadParameter("--draft-tokens goes with --speculative ngram or mtp, or with --draft-model")
        values: Any = {"speculative": self.speculative, "draft_tokens": self.draft_tokens}
        return check_usage(  # type: ignore[no-any-return]
            replace,
            super().apply(options),
            target_itl_ms=self.target_itl_ms,
            prefix_cache=not self.no_prefix_cache,
            draft_model=self.draft_model,
            deterministic=self.deterministic,
            kv_dir=None if self.kv_dir is None else str(Path(self.kv_dir).expanduser().absolute()),
            kv_disk=check_usage(parse_size, self.kv_disk, "kv_disk"),
            kv_max_age_days=self.kv_max_age,
            mmproj=self.mmproj,
            max_image_tokens=self.max_image_tokens,
            loras=tuple(map(parse_lora, self.lora or ())),
            max_loras=self.max_loras,
            max_cpu_loras=self.max_cpu_loras,
            max_lora_rank=self.max_lora_rank,
            kv_ram=0 if self.kv_ram is None else check_usage(parse_size, self.kv_ram, "kv_ram"),
            **{name: value for name, value in values.items() if value is not None},
        )
