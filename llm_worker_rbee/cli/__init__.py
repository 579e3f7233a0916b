"""The command line: the table of commands, and the exit status of each.

Exit status: 0 success, 1 any error of the worker, 2 wrong usage, 130 Ctrl-C. An error is one plain line on standard
error; `--debug`, before or after the command, shows the traceback. The options and texts of commands are apart from
their bodies: the module of a body is imported when its command is called, so help imports nothing heavy.
"""

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from inspect import cleandoc
from typing import Annotated, Any, NamedTuple

import typer
import typer.core

from .. import __version__
from ..errors import ChatTemplateError, WorkerError
from .terminal import disable_colour_in_pipes, discard_output, one_line, set_up_logging, set_up_streams

PROGRAM = "llm-worker-rbee"
# typer carries a copy of click in some versions and imports it in others; its usage errors have one base in both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
# The libraries behind NumPy read these once, when NumPy is imported.
NUMPY_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

# The modules with the options and texts: of `bench load`, the class `LoadCommand`.
OPTIONS, BENCH_OPTIONS = ".commands", "llm_worker_bench.commands.options"


class Command(NamedTuple):
    """A command before its options are imported: `summary` is the first sentence of its text."""

    panel: str
    module: str  # holds a function with the last word of the command, which takes its options
    summary: str


COMMANDS = {
    "run": Command("Use a model", ".run", "Answer one prompt, or all prompts of a file."),
    "chat": Command("Use a model", ".chat", "Talk with a model."),
    "serve": Command("Use a model", ".serve",
        "Serve models over HTTP: the APIs of OpenAI, Anthropic and Ollama, embeddings, reranking, jobs, a chat page."),
    "run-batch": Command("Use a model", ".run_batch",
        "Answer the lines of a batch file, as OpenAI's batches have them, and write a file of their results."),
    "ps": Command("Use a model", ".ps", "Show the models of a running worker: which are loaded, and their memory."),
    "stop": Command("Use a model", ".ps", "Unload a model of a running worker once its requests have ended."),
    "embed": Command("Use a model", ".embed", "Write the embeddings of the texts of a file."),
    "rerank": Command("Use a model", ".embed", "Order the texts of a file by how well they answer a query."),
    "inspect": Command("Look at a model", ".inspect",
        "Show what is in a model file: architecture, shape, quantization types, tokenizer, sampling defaults, memory."),
    "tokenize": Command("Look at a model", ".tokenize", "Show the tokens of a text: ids and pieces."),
    "pull": Command("Models and machine", ".models", "Fetch a model, and print its path."),
    "convert": Command("Models and machine", ".convert",
        "Convert a model to a GGUF of another type, and print its path."),
    "models": Command("Models and machine", ".models", "List the models in the cache, with their sizes."),
    "kv": Command("Models and machine", ".kv",
        "List, check or remove the keys and values that --kv-dir keeps in a folder."),
    "warmup": Command("Models and machine", ".warmup",
        "Compile the kernels ahead of time, so that no answer waits for it."),
    "doctor": Command("Models and machine", ".doctor",
        "Check this machine: processor, memory, GPU, packages, kernels, cache. Say what is missing and how to fix it."),
    "profile": Command("Measure", "llm_worker_bench.commands.profile",
        "Show where the time goes, by component, for prefill and decode."),
    "bench micro": Command("Measure", "llm_worker_bench.commands.micro",
        "Measure the ops and parts one by one, each with the limit of this machine."),
    "bench e2e": Command("Measure", "llm_worker_bench.commands.e2e_load",
        "Measure a whole model: prefill, decode, time to first token, memory."),
    "bench load": Command("Measure", "llm_worker_bench.commands.e2e_load",
        "Measure a start: import, open, kernels, weights, warm-up, first token."),
    "bench embed": Command("Measure", "llm_worker_bench.commands.embed",
        "Measure embeddings: texts and tokens a second, by length and batch, against peers."),
    "bench serving": Command("Measure", "llm_worker_bench.commands.serving",
        "Put load on any OpenAI-compatible server; measure what its users would see."),
    "bench accuracy": Command("Judge", "llm_worker_bench.commands.accuracy",
        "Measure how far a path is from float32 on the dequantized weights: the truth."),
    "bench peers": Command("Judge", "llm_worker_bench.commands.peers",
        "Measure this worker against llama.cpp, mistral.rs, vLLM and transformers."),
    "bench experiments": Command("Judge", "benchmarks.claims.command",
        "Judge the claims about optimisations on this machine."),
    "bench compare": Command("Compare and show", "llm_worker_bench.commands.saved_runs", "Compare two saved runs."),
    "bench report": Command("Compare and show", "llm_worker_bench.commands.saved_runs",
        "Write one HTML page with tables and plots of saved runs."),
}  # fmt: skip


def _hide_flag_types(params: list[Any]) -> list[Any]:
    """Show no type in the help of a flag, which takes no value: typer would write <bool>."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class _Command(typer.core.TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_types(super().get_params(ctx))


class _LazyGroup(typer.core.TyperGroup):
    """Lists commands by their summaries; the options of the one that is run are imported."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        full_name = f"bench {name}" if self.name == "bench" else name
        return name, load_command(full_name) if full_name in COMMANDS else command, rest


def load_command(name: str) -> Any:
    """Return a command with its options; its body is imported when it is called."""
    word = name.split()[-1]
    module = importlib.import_module(OPTIONS if COMMANDS[name].module.startswith(".") else BENCH_OPTIONS, __name__)
    group = getattr(module, "".join(map(str.capitalize, word.split("-"))) + "Command")
    function = importlib.import_module(".options", __name__).with_options(group, lambda: _import_body(name, word))
    single = typer.Typer(add_completion=False, context_settings=app.info.context_settings)
    paragraphs = cleandoc(group.__doc__).split("\n\n")  # typer would keep the ends of their lines
    help = "\n\n".join(text if text.startswith("\b") else " ".join(text.split()) for text in paragraphs)
    single.command(cls=_Command, help=help)(function)
    return typer.main.get_command(single)


def _import_body(name: str, word: str) -> Any:
    """Import the body of a command."""
    try:
        module = importlib.import_module(COMMANDS[name].module, __name__)
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", "benchmarks.claims"):
            raise
        raise WorkerError(f"{PROGRAM} {name} is part of the repository, not of the package: run it there") from None
    if not gc.isenabled():  # the entry point disabled it
        importlib.import_module("..machine", __name__).resume_collection()
    return getattr(module, word.replace("-", "_"))


app = typer.Typer(
    cls=_LazyGroup,
    name=PROGRAM,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
bench = typer.Typer(cls=_LazyGroup, name="bench", context_settings=app.info.context_settings)
for _name, _listed in COMMANDS.items():
    _group = bench if _name.startswith("bench ") else app
    _group.command(_name.split()[-1], help=_listed.summary, rich_help_panel=_listed.panel)(lambda: None)
app.add_typer(bench, rich_help_panel="Measure")


@bench.callback()
def bench_root() -> None:
    """Measure: speed, accuracy, claims, peers; keep baselines and compare.

    \b
    Examples:
      llm-worker-rbee bench micro --save-baseline before
      llm-worker-rbee bench e2e --pp 512 --tg 128
      llm-worker-rbee bench experiments
    """


def _show_version(is_set: bool) -> None:
    if is_set:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. Also after the command.")
    ] = False,
) -> None:
    """Run language models on this machine: a model file in, text out.

    With no --model, commands use a small default model (SmolLM2-135M, 93 MB), fetched once.

    \b
    Examples:
      llm-worker-rbee run "Why is the sky blue?"
      llm-worker-rbee chat --system "Answer in one sentence."
      llm-worker-rbee inspect model.gguf
    """


def main() -> None:
    """Run the command that the arguments name, and exit with its status."""
    # Before NumPy is imported. Slabs of the reference backend are too small for two threads to gain anything, and where
    # a core is busy the threads wait for each other: 17 s to the first token instead of 0.6 (docs/decisions/).
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    status = run_command_line(sys.argv[1:])
    if "torch" not in sys.modules:  # its extension modules report objects that are left as leaks
        gc.freeze()  # the interpreter would search all objects for garbage before it ends: 0.1 s
    sys.exit(status)


def run_command_line(args: Sequence[str]) -> int:
    """Run one command line and return its exit status."""
    set_up_streams()
    disable_colour_in_pipes()
    set_up_logging()
    rest, debug = _without_debug(args)
    _set_numpy_threads(rest)
    try:
        status = _run(rest or ["--help"])
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except SystemExit as exiting:  # typer's way to end on a closed pipe
        discard_output()
        return exiting.code if isinstance(exiting.code, int) else 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader closed the pipe, as in `| head -1`
        discard_output()
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"error: {one_line(_error_message(error, rest))}", file=sys.stderr)
        if isinstance(error, OSError):
            discard_output()
        return 2 if isinstance(error, UsageError) else 1


def _run(args: list[str]) -> Any:
    """Run the command that the arguments begin with; the options of the group would be converted first, in 0.1 s."""
    words = _command_words(args)
    name = " ".join(words)
    if name in COMMANDS and args[: len(words)] == words:
        return load_command(name)(args[len(words) :], prog_name=f"{PROGRAM} {name}", standalone_mode=False)
    return app(args, prog_name=PROGRAM, standalone_mode=False)


def _without_debug(args: Sequence[str]) -> tuple[list[str], bool]:
    """Take `--debug` out of the arguments, wherever it stands before a `--`."""
    end = args.index("--") if "--" in args else len(args)
    options = [arg for arg in args[:end] if arg != "--debug"]
    return [*options, *args[end:]], len(options) < end


def _set_numpy_threads(args: Sequence[str]) -> None:
    """Apply --threads where the reference computes: its threads are NumPy's, set before a command imports NumPy."""
    threads = _option_value(args, "--threads")
    is_reference = _option_value(args, "--backend") == "reference" or args[:2] == ["bench", "experiments"]
    if is_reference and threads.isdecimal() and "numpy" not in sys.modules:
        os.environ.update(dict.fromkeys(NUMPY_THREAD_VARIABLES, threads))


def _option_value(args: Sequence[str], name: str) -> str:
    """Return the value of an option before the arguments are parsed, or nothing."""
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        if arg == name:
            return following
        if arg.startswith(f"{name}="):
            return arg.removeprefix(f"{name}=")
    return ""


def _command_words(args: Sequence[str]) -> list[str]:
    """Return the command that these arguments name, with its group."""
    names = {name.split()[0] for name in COMMANDS}
    first = [arg for arg in args if arg in names][:1]
    return first + ([arg for arg in args if f"bench {arg}" in COMMANDS][:1] if first == ["bench"] else [])


def _error_message(error: Exception, args: Sequence[str]) -> str:
    """Return the text of an error for the user, with the remedy if one is known."""
    if isinstance(error, UsageError):
        command = " ".join([PROGRAM, *_command_words(args)])
        message = str(getattr(error, "format_message", lambda: error)()).removeprefix("Invalid value: ")
        return f"{message} (see {command} --help)"
    if isinstance(error, ChatTemplateError) and error.field == "chat_template":
        return f"{error}: --chat-template FILE gives one, run --raw needs none"
    if isinstance(error, WorkerError):
        return str(error)
    if isinstance(error, MemoryError):
        return "not enough memory: try a smaller model, a shorter prompt, fewer --max-tokens or less --kv-memory"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else f"cannot read or write: {error.strerror}"
    return f"unexpected {type(error).__name__}: {error} (run again with --debug)"
