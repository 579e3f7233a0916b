"""`chat --session` through real processes: what is saved, what goes on after a kill, what is refused."""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import ANY

import pytest

from llm_worker_rbee import LLM, SamplingParams
from llm_worker_rbee.engine.kv_store import check_segment, list_files, open_folder
from tests.conftest import DEVICE
from tests.helpers.process import spawn as start_process
from tests.helpers.serve_process import until

from .conftest import Run, Terminal, environment, write_model

QUESTION = "A long beginning, number by number: " + ", ".join(map(str, range(20)))
GREEDY = ("-t", "0", "-n", "4")


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Give commands folders of their own for sessions and their keys and values."""
    folders = {name: str(tmp_path / name.lower()) for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME")}
    for name, folder in folders.items():
        monkeypatch.setenv(name, folder)
    return folders


@pytest.fixture
def work(homes: dict[str, str]) -> Path:
    """Return the file of the session `work`."""
    return Path(homes["XDG_DATA_HOME"]) / "llm-worker-rbee" / "sessions" / "work.json"


@pytest.fixture
def open_chat(tiny: Path, homes: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a chat that waits for lines."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: str | Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "llm_worker_rbee", "chat", "-m", tiny, *GREEDY, *args]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(start_process(command, env=environment(), bufsize=0, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def messages(path: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(path.read_text())["messages"]
    return found


def say(process: subprocess.Popen[bytes], text: str, path: Path, count: int) -> None:
    """Send a line, and wait until the session has so many messages."""
    assert process.stdin is not None
    process.stdin.write(text.encode() + b"\n")
    until(lambda: path.exists() and len(messages(path)) == count)


@pytest.mark.skipif(DEVICE != "cpu", reason="without --deterministic a GPU gives other bits")
def test_conversation_goes_on_from_disk_after_a_kill(
    open_chat: Callable[..., subprocess.Popen[bytes]], spawn: Run, tiny: Path, work: Path, homes: dict[str, str]
) -> None:
    first = open_chat("--session", "work", "--system", "Be kind.")
    say(first, QUESTION, work, 3)
    kept = Path(homes["XDG_CACHE_HOME"]) / "llm-worker-rbee" / "kv"
    num_blocks = len(QUESTION) // 16

    def written() -> int:
        return sum(check_segment(folder, file)[0] for file in list_files(folder))

    folder = open_folder(kept)
    until(lambda: written() >= num_blocks)
    first.send_signal(signal.SIGKILL)
    first.wait()
    llm, history = LLM(tiny), messages(work)
    assert [message["content"] for message in history[:2]] == ["Be kind.", QUESTION]
    done = spawn("chat", "-m", tiny, *GREEDY, "--session", "work", stdin=b"And then?\n")
    assert done.returncode == 0, done.stderr
    follow_up = [*history, {"role": "user", "content": "And then?"}]
    answer = llm.chat(follow_up, SamplingParams(max_tokens=4, temperature=0.0)).text
    assert done.stdout.decode() == f"{answer}\n"
    assert messages(work) == [*follow_up, {"role": "assistant", "content": answer}]
    report = done.stderr.decode()
    assert re.search(r"^session work: 3 messages, \d+ tokens$", report, re.MULTILINE)
    found = re.search(r"^\d+ prompt tokens \((\d+) cached\) · 4 tokens", report, re.MULTILINE)
    assert found is not None, report
    assert int(found[1]) >= 16 * num_blocks
    for path, mode in ((work, 0o600), (work.parent, 0o700), (kept, 0o700)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert not list(work.parent.glob("*.part"))


def test_kill_loses_the_turn_in_progress_alone(
    terminal: Callable[..., Terminal], endless: Path, work: Path, homes: dict[str, str]
) -> None:
    letter = LLM(endless).tokenizer.token_id("Q")
    options = ("chat", "-m", endless, "-t", "0", "-n", "60000", "--logit-bias", f"{letter}=100", "--session", "work")
    screen = terminal(*options, NO_COLOR="1")
    screen.wait_for(f"session work: new, saved in {work}")
    screen.wait_for("> ")
    screen.send("hello\n")
    screen.wait_for("QQQ")
    screen.send("\x03")
    screen.wait_for("(stopped)")
    saved = messages(work)
    assert [message["role"] for message in saved] == ["user", "assistant"]
    screen.wait_for("> ")
    screen.send("and now?\n")
    screen.wait_for("QQQ")
    screen.process.kill()
    screen.process.wait()
    assert messages(work) == saved
    again = terminal(*options, NO_COLOR="1")
    again.wait_for("session work: 2 messages, ")
    again.wait_for("> hello")
    again.wait_for("> ")
    again.send("/exit\n")
    assert again.finish()[0] == 0


def test_commands_change_the_saved_conversation(cli: Run, tiny: Path, tmp_path: Path, work: Path) -> None:
    ask = ("chat", "-m", tiny, *GREEDY, "--session", "work")
    assert cli(*ask, stdin=b"one\n").returncode == 0
    assert cli(*ask, stdin=b"/system Be kind.\n").returncode == 0
    assert [message["role"] for message in messages(work)] == ["system", "user", "assistant"]
    assert b"system: Be kind." in cli(*ask, stdin=b"/system\n").stderr
    changed = cli(*ask, "--system", "Be brief.", stdin=b"two\n")
    assert b"session work: 3 messages" in changed.stderr
    assert [messages(work)[i]["content"] for i in (0, 1, 3)] == ["Be brief.", "one", "two"]
    other = write_model(tmp_path / "other.gguf", {"general.name": "Other"})
    done = cli("chat", "-m", other, *GREEDY, "--session", "work", stdin=b"three\n")
    assert b"session work: 5 messages, " in done.stderr
    assert " · so far with Tiny\n" in done.stderr.decode()
    assert json.loads(work.read_text())["model"] == "Other"
    listed = cli("chat", "--sessions")
    assert [line.split()[:2] for line in listed.stdout.decode().splitlines()] == [["NAME", "SAVED"], ["work", ANY]]
    cli(*ask, stdin=b"/reset\n")
    assert [message["content"] for message in messages(work)] == ["Be brief."]


def test_damaged_session_is_refused_and_left_alone(cli: Run, tiny: Path, work: Path, tmp_path: Path) -> None:
    assert cli("chat", "--sessions").stdout == b"no session is saved: --session NAME begins one\n"
    ask = ("chat", "-m", tiny, *GREEDY, "--session", "work")
    cli(*ask, stdin=b"one\n")
    whole = work.read_text()
    wrong = '{"model": "", "tokens": 0, "messages": [{"role": "robot", "content": ""}]}'
    for text, reason in ((whole[:-9], "truncated"), ("", "truncated"), ("{}", "model"), (wrong, "role")):
        work.write_text(text)
        done = cli(*ask, stdin=b"two\n")
        assert (done.returncode, done.stdout) == (1, b"")
        (line,) = done.stderr.decode().splitlines()
        assert line.startswith(f"error: session work cannot be read: {work}: ")
        assert reason in line
        assert line.endswith("; repair it or use another name")
        assert work.read_text() == text
    work.unlink()
    work.symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "elsewhere.json").write_text(whole)
    assert b"Too many levels of symbolic links" in cli(*ask, stdin=b"two\n").stderr
    work.parent.chmod(0o755)
    done = cli(*ask, stdin=b"two\n")
    assert done.returncode == 2
    assert f"the folder of sessions is {work.parent}: other users may open it" in done.stderr.decode()


def test_one_chat_at_a_time(
    open_chat: Callable[..., subprocess.Popen[bytes]], cli: Run, tiny: Path, work: Path
) -> None:
    first = open_chat("--session", "work")
    say(first, "one", work, 2)
    done = cli("chat", "-m", tiny, "--session", "work", stdin=b"two\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"error: session work is open in another chat: end it, or use another name\n"
    assert cli("chat", "-m", tiny, *GREEDY, "--session", "other", stdin=b"two\n").returncode == 0
    first.communicate()  # the end of its input
    assert cli("chat", "-m", tiny, *GREEDY, "--session", "work", stdin=b"two\n").returncode == 0
    assert len(messages(work)) == 4


@pytest.mark.parametrize("name", ["", "../work", "a/b", ".hidden", "-x", "x" * 101, "ä", "a b"])
def test_name_is_no_path(cli: Run, name: str, work: Path) -> None:
    done = cli("chat", f"--session={name}", stdin=b"hello\n")
    assert done.returncode == 2
    assert f"--session {name!r}: a name has at most 100 letters, digits" in done.stderr.decode()
    assert not work.parent.exists()


def test_turn_that_cannot_be_saved_is_an_error_that_names_the_file(cli: Run, tiny: Path, work: Path) -> None:
    cli("chat", "-m", tiny, *GREEDY, "--session", "work", stdin=b"one\n")
    work.with_suffix(".part").mkdir()
    done = cli("chat", "-m", tiny, *GREEDY, "--session", "work", stdin=b"two\n")
    assert done.returncode == 1
    assert f"error: this turn is not saved: cannot write {work}: Is a directory" in done.stderr.decode()
    assert len(messages(work)) == 2


@pytest.mark.parametrize("options", [("--no-prefix-cache",), ("--backend", "reference")])
def test_session_without_keys_and_values(
    cli: Run, tiny: Path, work: Path, homes: dict[str, str], options: tuple[str, ...]
) -> None:
    done = cli("chat", "-m", tiny, *GREEDY, "--session", "work", *options, stdin=b"one\n")
    assert done.returncode == 0, done.stderr
    assert len(messages(work)) == 2
