"""The command as a whole: what it imports, how it fails, what it does in a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llm_worker_rbee import __version__
from llm_worker_rbee.cli import COMMANDS as COMMAND_TABLE
from llm_worker_rbee.cli import load_command
from llm_worker_rbee.cli.terminal import cell, visible

from .conftest import ROOT, Run, Terminal, environment

COMMANDS = ["run", "chat", "serve", "embed", "rerank", "inspect", "tokenize", "pull", "models", "warmup", "doctor"]


def test_version_and_help_import_nothing_heavy() -> None:
    script = """
import sys
from llm_worker_rbee.cli import run_command_line
assert run_command_line(sys.argv[1:]) == 0
heavy = {"numpy", "tokenizers", "jinja2", "huggingface_hub", "torch", "numba", "starlette", "uvicorn", "msgspec"}
print(sorted(heavy & set(sys.modules)))
"""
    for args in (["--version"], ["--help"], ["bench", "--help"]):
        done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, env=environment())
        assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("name", COMMAND_TABLE)
def test_command_summary_is_first_sentence_of_its_help(name: str) -> None:
    first = " ".join(load_command(name).help.partition("\n\n")[0].split())
    assert first == COMMAND_TABLE[name].summary


@pytest.mark.parametrize("name", COMMAND_TABLE)
def test_paragraphs_of_help_are_wrapped_by_the_terminal(name: str) -> None:
    for paragraph in load_command(name).help.split("\n\n"):
        assert paragraph.startswith("\b") or "\n" not in paragraph


def test_help_and_usage_errors_of_commands_import_options_and_texts_only() -> None:
    """Of every command: no body, none of its packages; and nothing that draws where only an error is printed."""
    script = """
import sys
from llm_worker_rbee.cli import COMMANDS, run_command_line
for name in COMMANDS:
    assert run_command_line([*name.split(), "--no-such-option"]) == 2
assert "rich" not in sys.modules
for name in COMMANDS:
    assert run_command_line([*name.split(), "--help"]) == 0
worker = {name.removeprefix("llm_worker_rbee.") for name in sys.modules if name.startswith("llm_worker_rbee.")}
bench = {name.removeprefix("llm_worker_bench.") for name in sys.modules if name.startswith("llm_worker_bench.")}
heavy = {"numpy", "numba", "tokenizers", "msgspec", "uvicorn", "pydantic"}  # pydantic: typer converts values with it
print(sorted(worker), sorted(bench), sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    own = ["cli", "cli.commands", "cli.options", "cli.terminal"]
    shared = ["config", "errors", "progress", "sampling_params", "server", "server.settings"]
    assert done.stdout.splitlines()[-1] == f"{own + shared} {['commands', 'commands.options']} []", done.stderr


def test_version_prints_program_and_version(spawn: Run) -> None:
    done = spawn("--version")
    assert (done.returncode, done.stdout.decode()) == (0, f"llm-worker-rbee {__version__}\n")


def test_program_without_command_prints_help(spawn: Run) -> None:
    done = spawn()
    assert done.returncode == 0
    assert done.stdout == spawn("--help").stdout
    for command in COMMANDS:
        assert f" {command} ".encode() in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_command_help_has_example_and_no_escape_codes(spawn: Run, command: str) -> None:
    done = spawn(command, "--help", env={"GITHUB_ACTIONS": "1"})
    assert done.returncode == 0
    examples = done.stdout.decode().partition("Examples:")[2]
    assert f"llm-worker-rbee {command}" in examples
    examples = examples.partition("╭")[0]
    assert all(line.startswith("   ") for line in examples.splitlines() if line.strip()), "an example is wrapped"
    assert b"\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "status", "expected"),
    [
        (["nonsense"], 2, "error: No such command 'nonsense'"),
        (["run", "--nonsense"], 2, "(see llm-worker-rbee run --help)"),
        (["run", "hi", "--temperature", "9"], 2, "error: --temperature is 9.0: it must be 0 or more, at most 2"),
        (["run", "hi", "--temperature", "nan"], 2, "error: --temperature must be a finite number"),
        (["run", "hi", "--top-p", "x"], 2, "--top-p"),
        (["run", "hi", "--max-tokens", "0"], 2, "error: --max-tokens is 0"),
        (["run", "hi", "--seed", str(1 << 64)], 2, "error: --seed is"),
        (["run", "hi", "--stop", ""], 2, "stop string"),
        (["run", "hi", "--logit-bias", "12"], 2, "error: --logit-bias '12' is not of the form ID=X"),
        (["run", "hi", "--logit-bias", "99999999999999999999=1"], 2, "error: --logit-bias '99999999999999999999=1'"),
        (["run", "hi", "--logit-bias", "1_0=1"], 2, "error: --logit-bias '1_0=1' is not of the form ID=X"),
        (["run", "hi", "--logit-bias", "１=1"], 2, "error: --logit-bias '１=1' is not of the form ID=X"),
        (["run", "hi", "--logit-bias", "1=1_0"], 2, "error: --logit-bias '1=1_0' is not of the form ID=X"),
        (["run", "hi", "--logit-bias", "1=nan"], 2, "error: --logit-bias of token 1 must be a finite number"),
        (["run", "hi", "--logit-bias", "-1=1"], 2, "error: --logit-bias is -1"),
        (["run", "hi", "--stop", "a\udcff"], 1, "error: --stop is not UTF-8 text: byte 1 is 0xFF"),
        (["run", "hi", "--system", "a\udcff"], 1, "error: --system is not UTF-8 text: byte 1 is 0xFF"),
        (["chat", "--system", "a\udcff"], 1, "error: --system is not UTF-8 text: byte 1 is 0xFF"),
        (["run", "hi", "--special"], 2, "--raw: a chat message is always text"),
        (["run", "hi", "--raw", "--system", "x"], 2, "error: --system goes into the chat template"),
        (["run", "hi", "--file", "x"], 2, "given twice"),
        (["run"], 2, "error: there is no prompt"),  # standard input is empty
        (["run", "hi", "--model", "/no/such.gguf"], 1, "error: no such file or folder: '/no/such.gguf'"),
        (["run", "hi", "--model", "no\nsuch\x1b[31m"], 1, "error: no such model"),
        (["run", "--file", "/no/such.txt"], 1, "error: cannot read /no/such.txt"),
        (["tokenize", "--jsonl", "--json"], 2, "error: --jsonl reads standard input"),
    ],
)
def test_error_prints_one_plain_line(cli: Run, args: list[str], status: int, expected: str) -> None:
    done = cli(*args)
    assert (done.returncode, done.stdout) == (status, b"")
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert expected in lines[0]
    assert "\x1b" not in lines[0]


def test_debug_anywhere_prints_traceback(cli: Run) -> None:
    for args in (["--debug", "inspect", "/no/such.gguf"], ["inspect", "/no/such.gguf", "--debug"]):
        done = cli(*args)
        assert done.returncode == 1
        assert b"Traceback" in done.stderr
        assert b"ModelNotFoundError" in done.stderr
    assert b"Traceback" not in cli("inspect", "/no/such.gguf", "--", "--debug").stderr


def test_unexpected_error_prints_one_line() -> None:
    script = """
import sys
from llm_worker_rbee import cli
def boom(): raise ZeroDivisionError("a\\nb")
cli.app.command()(boom)
sys.exit(cli.run_command_line(["boom"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: unexpected ZeroDivisionError: a b (run again with --debug)\n"


def test_closed_pipe_exits_without_message(tiny: Path) -> None:
    command = [sys.executable, "-m", "llm_worker_rbee", "inspect", str(tiny), "--metadata", "--tensors"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=ROOT)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(30) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_full_disk_exits_with_error(tiny: Path) -> None:
    command = [sys.executable, "-m", "llm_worker_rbee", "inspect", str(tiny), "--json"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment(), cwd=ROOT, timeout=60)
    assert done.returncode == 1
    assert done.stderr == b"error: cannot read or write: No space left on device\n"


@pytest.mark.parametrize(
    "settings", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "LC_ALL": "POSIX"}]
)
def test_any_locale_writes_utf8(spawn: Run, tiny: Path, settings: dict[str, str]) -> None:
    text = "é 🙂 日本"
    done = spawn("tokenize", tiny, stdin=text.encode(), env=settings)
    assert done.returncode == 0
    echoed = spawn("run", "--raw", "-m", tiny, "-n", "1", "--echo", text, env=settings)
    assert echoed.returncode == 0
    assert echoed.stdout.startswith(text.encode())
    assert " · ".encode() in echoed.stderr


def test_colour_only_on_terminal_without_no_color(terminal: type[Terminal]) -> None:
    status, coloured = terminal("models", "--help").finish()
    assert status == 0
    assert b"\x1b[3" in coloured or b"\x1b[1;3" in coloured
    plain = terminal("doctor", NO_COLOR="1").finish()[1]
    assert b"processor" in plain
    assert b"\x1b" not in plain
    assert b"\x1b[32m" in terminal("doctor").finish()[1]


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="this system has no /dev/zero")
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["run", "--file", "/dev/zero"], "/dev/zero is too long: at most 64 MiB are read"),
        (["run", "hi", "--chat-template", "/dev/zero"], "/dev/zero is too long: at most 1 MiB are read"),
        (["tokenize"], "standard input is too long: at most 64 MiB are read"),
        (["tokenize", "--jsonl", "TINY"], "line 1 is too long: at most 64 MiB are read"),
        (["chat", "-m", "TINY"], "line 1 is too long: at most 64 MiB are read"),
    ],
)
def test_endless_input_is_rejected(tiny: Path, args: list[str], expected: str) -> None:
    command = [sys.executable, "-m", "llm_worker_rbee", *(str(tiny) if arg == "TINY" else arg for arg in args)]
    with open("/dev/zero", "rb") as zeros:
        done = subprocess.run(command, stdin=zeros, capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {expected}\n")


def test_dumb_terminal_gets_no_escape_codes(terminal: type[Terminal], tiny: Path) -> None:
    status, shown = terminal("run", "hi", "-m", tiny, "-n", "2", "-q", "--logit-bias", "52=100", TERM="dumb").finish()
    assert (status, shown) == (0, b"RR\r\n")
    screen = terminal("chat", "-m", tiny, "-n", "2", "-q", "--logit-bias", "52=100", TERM="dumb")
    screen.wait_for("> ")
    screen.send("hi\n")
    shown = screen.wait_for("RR\r\n")
    screen.send("/exit\n")
    status, rest = screen.finish()
    assert status == 0
    assert b"\x1b" not in shown + rest
    assert b"loading" not in shown


@pytest.mark.parametrize("mark", ["\u061c", "\u200e", "\u200f", "\u202a", "\u202e", "\u2066", "\u2069", "\x9b"])
def test_visible_control_characters_are_replaced(mark: str) -> None:
    assert visible(f"a{mark}b\tc\n") == "a\ufffdb\tc\n"
    assert cell(f"a{mark}b\tc\n\u2028") == "a\ufffdb␉c␊\ufffd"
    assert visible("שלום é 🙂") == cell("שלום é 🙂") == "שלום é 🙂"


def test_claims_outside_a_checkout_say_where_they_are(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.claims.command", raising=False)
    monkeypatch.setitem(sys.modules, "benchmarks", None)  # as if it were not there
    done = cli("bench", "experiments")
    assert done.returncode == 1
    assert b"bench experiments is part of the repository, not of the package" in done.stderr
