"""`chat` on a terminal and in a pipe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_worker_rbee import LLM, SamplingParams
from llm_worker_rbee.cli.chat import Conversation

from .conftest import Run, Terminal, write_model

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny)


def test_chat_in_pipe_answers_each_line(cli: Run, tiny: Path, llm: LLM) -> None:
    done = cli("chat", "-m", tiny, "-t", "0", "-n", "4", "-q", stdin=b"one\n\ntwo\n")
    assert done.returncode == 0
    first = llm.chat([{"role": "user", "content": "one"}], PARAMS).text
    history = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first}]
    second = llm.chat([*history, {"role": "user", "content": "two"}], PARAMS).text
    assert done.stdout.decode() == f"{first}\n{second}\n"


def test_chat_commands(cli: Run, tiny: Path, tmp_path: Path, llm: LLM) -> None:
    saved, page = tmp_path / "talk.json", tmp_path / "talk.md"
    lines = [
        "forgotten",
        "/reset",
        "/system Be kind.",
        "/system",
        "hé",
        f"/save {saved}",
        f"/save {page}",
        "/nonsense",
        "/help",
    ]
    lines += ["/save /no/such/folder/x", "/save", "//slash", f"/save {saved}2", "/exit", "never"]
    done = cli("chat", "-m", tiny, "-t", "0", "-n", "4", stdin="\n".join(lines).encode())
    assert done.returncode == 0
    answer = llm.chat([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hé"}], PARAMS).text
    messages = json.loads(saved.read_text())
    assert messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hé"},
        {"role": "assistant", "content": answer},
    ]
    assert page.read_text().startswith("**System**\n\nBe kind.\n\n**User**\n\nhé\n\n**Assistant**\n")
    later = json.loads(Path(f"{saved}2").read_text())
    assert [m["content"] for m in later if m["role"] == "user"] == ["hé", "/slash"]
    report = done.stderr.decode()
    assert "system: Be kind." in report
    assert "unknown command /nonsense" in report
    assert "cannot write /no/such/folder/x: No such file or directory" in report
    assert "forget the conversation" in report
    assert "(cut after 4 tokens: --max-tokens allows more)" in report


def test_model_without_chat_template_is_rejected(cli: Run, tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare.gguf", {"tokenizer.chat_template": None})
    done = cli("chat", "-m", bare, stdin=b"hello\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"no chat template" in done.stderr


def test_full_context_names_reset(cli: Run, tiny: Path, llm: LLM) -> None:
    done = cli("chat", "-m", tiny, "-n", "4", stdin=b"x" * 300)
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert "/reset starts over" in line
    nearly = len(llm.tokenize(llm.apply_chat_template([{"role": "user", "content": ""}]), parse_special=True))
    letter = llm.tokenizer.token_id("Q")
    text = b"x" * (llm.max_context - nearly - 3)
    cut = cli("chat", "-m", tiny, "-t", "0", "--logit-bias", f"{letter}=100", stdin=text)
    assert (cut.returncode, cut.stdout) == (0, b"QQQ\n")
    assert "(the context is full: /reset starts over)" in cut.stderr.decode()


def test_chat_prints_draft_stats_of_each_answer(cli: Run, tiny: Path) -> None:
    ask = ("chat", "-m", tiny, "-t", "0", "-n", "4", "--ignore-eos", "--draft-model", tiny, "--draft-tokens", "2")
    report = re.findall(r" · drafts (.*) · length", cli(*ask, stdin=b"one\ntwo\n").stderr.decode())
    assert report == ["100% accepted (2 of 2), 2.00 tokens a step"] * 2


def test_failed_message_is_not_kept(llm: LLM) -> None:
    conversation = Conversation(llm, PARAMS, None, quiet=True)
    assert conversation.handle_line("hi")
    before = list(conversation.messages)
    with pytest.raises(Exception, match="/reset"):
        conversation.handle_line("x" * 300)
    assert conversation.messages == before
    assert not conversation.handle_line("/exit")


def test_chat_on_terminal(terminal: Callable[..., Terminal], endless: Path, llm: LLM, tmp_path: Path) -> None:
    letter = llm.tokenizer.token_id("Q")
    saved = tmp_path / "talk.json"
    screen = terminal("chat", "-m", endless, "-t", "0", "-n", "60000", "--logit-bias", f"{letter}=100")
    assert b"KV cache " in screen.wait_for("/help lists the commands")
    screen.wait_for("> ")
    screen.send("hello\n")
    screen.wait_for("QQQ")
    screen.send("\x03")  # stops the answer, not the program
    screen.wait_for("(stopped)")
    screen.wait_for("> ")
    screen.send("half a line")
    screen.wait_for("line")
    screen.press_until("\x03", "(Ctrl-D or /exit ends the conversation)")
    screen.wait_for("> ")
    screen.send(f"/save {saved}\n")
    screen.wait_for("(saved 2 messages")
    screen.wait_for("> ")
    screen.send("\x04")
    status, shown = screen.finish()
    assert status == 0
    assert b"Traceback" not in shown
    messages = json.loads(saved.read_text())
    assert messages[0] == {"role": "user", "content": "hello"}
    assert set(messages[1]["content"]) == {"Q"}


def test_message_of_several_lines(terminal: Callable[..., Terminal], tiny: Path, tmp_path: Path) -> None:
    """A backslash at the end of a line continues the message; what is pasted is one message."""
    saved = tmp_path / "talk.json"
    screen = terminal("chat", "-m", tiny, "-n", "2", NO_COLOR="1")
    for keys in ("one\\\ntwo\n", "\x1b[200~three\nfour\x1b[201~\n"):
        screen.wait_for("> ")
        screen.send(keys)
        screen.wait_for("tokens")
    screen.wait_for("> ")
    screen.send(f"/save {saved}\n")
    screen.wait_for("(saved 4 messages")
    assert [m["content"] for m in json.loads(saved.read_text())[::2]] == ["one\ntwo", "three\nfour"]
    screen.send("/exit\n")
    assert screen.finish()[0] == 0


def test_error_on_terminal_ends_only_the_turn(terminal: Callable[..., Terminal], tiny: Path) -> None:
    screen = terminal("chat", "-m", tiny, "-n", "2", NO_COLOR="1")
    screen.wait_for("> ")
    screen.send("x" * 300 + "\n")
    screen.wait_for("/reset starts over")
    screen.wait_for("> ")
    screen.send("/exit\n")
    assert screen.finish()[0] == 0


def test_save_keeps_existing_file(cli: Run, tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    saved.write_text("precious")
    done = cli("chat", "-m", tiny, "-n", "2", "-q", stdin=f"hi\n/save {saved}\ny\n".encode())
    assert done.returncode == 0
    assert saved.read_text() == "precious"
    report = done.stderr.decode()
    assert f"({saved} exists: give another name)\n(not saved)" in report
    assert len(done.stdout.splitlines()) >= 2  # the y was a message like any other


def test_save_on_terminal_asks_before_replacing(terminal: Callable[..., Terminal], tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    saved.write_text("precious")
    screen = terminal("chat", "-m", tiny, "-n", "2", "-q", "--system", "Be kind.", NO_COLOR="1")
    for answer in ("\n", "n\n", "\x04"):
        screen.wait_for("> ")
        screen.send(f"/save {saved}\n")
        screen.wait_for("exists: replace it? (y/N)")
        screen.wait_for("> ")
        screen.send(answer)
        screen.wait_for("(not saved)")
        assert saved.read_text() == "precious"
    screen.wait_for("> ")
    screen.send(f"/save {saved}\n")
    screen.wait_for("(y/N)")
    screen.wait_for("> ")
    screen.send("y\n")
    screen.wait_for("(saved 1 message")
    assert json.loads(saved.read_text()) == [{"role": "system", "content": "Be kind."}]
    screen.send("/exit\n")
    assert screen.finish()[0] == 0
