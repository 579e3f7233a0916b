"""The command line: the list of commands, and how each of them ends.

Exit status: 0 done, 1 any error of ours, 2 wrong usage, 130 Ctrl-C. An error is one plain line on standard error;
`--debug`, before or after the command, shows the traceback. Nothing heavy is imported here: a command's file imports
its room when the command is called, so that `--help` and `--version` come at once.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core

from .. import __version__
from ..errors import ChatTemplateError, WorkerError
from .bench import COMMANDS as BENCH_COMMANDS
from .chat import chat
from .convert import convert
from .doctor import doctor
from .inspect import inspect
from .models import models, pull
from .profile import profile
from .run import run
from .serve import serve
from .terminal import abandon_output, one_line, set_up_logging, set_up_streams, spare_pipes_from_colour
from .tokenize import tokenize
from .warmup import warmup

PROGRAM = "llm-worker-rbee"
COMMANDS = {
    "Use a model": (run, chat, serve),
    "Look at a model": (inspect, tokenize),
    "Models and machine": (pull, convert, models, warmup, doctor),
    "Measure": (profile,),
}
# typer carries a copy of click in some versions and imports it in others; its usage errors have one base in both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _plain_flags(params: list[Any]) -> list[Any]:
    """A flag takes no value: its help shows no type, where typer would write <bool>."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class _Command(typer.core.TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_flags(super().get_params(ctx))


class _Group(typer.core.TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_flags(super().get_params(ctx))


app = typer.Typer(
    cls=_Group,
    name=PROGRAM,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
bench = typer.Typer(cls=_Group, name="bench", context_settings=app.info.context_settings)
for group, commands in ((app, COMMANDS), (bench, BENCH_COMMANDS)):
    for panel, functions in commands.items():
        for function in functions:
            group.command(cls=_Command, rich_help_panel=panel)(function)
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


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. Also after the command.")
    ] = False,
) -> None:
    """Run language models on this machine: a model file in, text out.

    With no --model, commands use a small built-in one, fetched once.

    \b
    Examples:
      llm-worker-rbee run "Why is the sky blue?"
      llm-worker-rbee chat --system "Answer in one sentence."
      llm-worker-rbee inspect model.gguf
    """


def main() -> None:
    """Run the command that the arguments name, and leave with its exit status."""
    # Before NumPy is imported. Slabs of the reference backend are too small for two threads to gain anything, and where
    # a core is busy the threads wait for each other: 17 s to the first token instead of 0.6 (docs/decisions.md).
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(status_of(sys.argv[1:]))


def status_of(args: Sequence[str]) -> int:
    """Run one command line; its exit status."""
    set_up_streams()
    spare_pipes_from_colour()
    set_up_logging()
    rest, debug = _without_debug(args)
    try:
        status = app(rest or ["--help"], prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except SystemExit as leaving:  # typer's way to end on a closed pipe
        abandon_output()
        return leaving.code if isinstance(leaving.code, int) else 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader has seen enough, as in `| head -1`
        abandon_output()
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"error: {one_line(_told(error, rest))}", file=sys.stderr)
        if isinstance(error, OSError):
            abandon_output()
        return 2 if isinstance(error, UsageError) else 1


def _without_debug(args: Sequence[str]) -> tuple[list[str], bool]:
    """`--debug` counts wherever it stands before a `--`: one adds it to the end of the line that has just failed."""
    end = args.index("--") if "--" in args else len(args)
    options = [arg for arg in args[:end] if arg != "--debug"]
    return [*options, *args[end:]], len(options) < end


def _command_of(args: Sequence[str]) -> list[str]:
    """The command that these arguments name, with its group."""
    names = {function.__name__ for functions in COMMANDS.values() for function in functions}
    inner = {function.__name__ for functions in BENCH_COMMANDS.values() for function in functions}
    first = [arg for arg in args if arg in names | {"bench"}][:1]
    return first + ([arg for arg in args if arg in inner][:1] if first == ["bench"] else [])


def _told(error: Exception, args: Sequence[str]) -> str:
    """What an error says to a person, and what to do about it where that is known."""
    if isinstance(error, UsageError):
        command = " ".join([PROGRAM, *_command_of(args)])
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
