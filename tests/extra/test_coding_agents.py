"""Coding agents from npm, unchanged, in a session of two tool calls: Codex (Responses) and Claude Code (Messages).

They run commands of the scripted model in a folder of their own; nothing outside this machine can be reached.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripted_engine import ScriptedServer, call, think

CLIENTS = os.environ.get("LLM_WORKER_CLIENTS", "")  # a folder with environments, from make test-extra
FOLDER = Path(CLIENTS).absolute() / "agents" / "node_modules"
LIMIT_S = 120
TASK = "What does note.txt say? Write the number after it to next.txt."
CLAUDE = {
    "ANTHROPIC_AUTH_TOKEN": "none", "DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}  # fmt: skip
READ, WRITE = "cat note.txt", "echo 43 > next.txt; cat next.txt"
DONE = "It says 42, and next.txt has 43."

pytestmark = pytest.mark.skipif(not CLIENTS, reason="needs LLM_WORKER_CLIENTS: make test-extra sets it")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path_factory.mktemp("agents")) as running:
        running.ready()
        yield running


def program(pattern: str) -> str:
    """The program of an agent; its package has one for each platform."""
    found = [str(path) for path in sorted(FOLDER.glob(pattern)) if os.access(path, os.X_OK)]
    if not found or shutil.which("node") is None:
        pytest.skip(f"{pattern} is not installed: make test-extra does it, where there is npm")
    return found[0]


def play_session(server: ScriptedServer, tool: str, key: str, **more: Any) -> None:
    """Read the note, write the next number, and say so; other questions, such as for a title, get a word."""
    steps = [
        think("I read it.", "Let me look.\n" + call(tool, **{key: READ}, **more)),
        think("42, then 43.", call(tool, **{key: WRITE}, **more)), think("Both are there.", DONE),
    ]  # fmt: skip

    def reply(prompt: str) -> str:
        turns = prompt.partition("</tools>")[2].partition(TASK)[2]
        return steps[min(turns.count("<tool_response>\n"), 2)] if "<tools>" in prompt else "Numbers"

    server.play_all(reply)


def run_session(folder: Path, line: list[str], **variables: str) -> list[Any]:
    """Run an agent where the note is; return what it printed."""
    (folder / "work").mkdir()
    (folder / "work" / "note.txt").write_text("42\n")
    events = run_agent(folder, line, LIMIT_S, **variables)
    assert (folder / "work" / "next.txt").read_text() == "43\n"
    return events


def run_agent(folder: Path, line: list[str], limit_s: float, **variables: str) -> list[Any]:
    """Run an agent in the folder `work`; return what it printed, lines of JSON."""
    work, home = folder / "work", folder / "home"
    home.mkdir(exist_ok=True)
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1", "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1", **nowhere, **variables,
    }  # fmt: skip
    done = subprocess.run(
        line, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    return [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]


def require_session(server: ScriptedServer) -> None:
    """Require that each turn begins with the one before, and that it was in the prefix cache."""
    turns = [i for i, prompt in enumerate(server.prompts) if "<tools>" in prompt]
    assert len(turns) == 3
    first, second, third = (server.prompts[i] for i in turns)
    assert "<tool_response>\n" in second.removeprefix(first)
    assert third.startswith(second)
    assert third.startswith(first)
    assert min(server.cached_parts[i] for i in turns[1:]) > 0.95


def test_codex_plays_session(server: ScriptedServer, tmp_path: Path) -> None:
    codex = program(".bin/codex")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text(
        f'model = "tiny"\nmodel_provider = "worker"\n[model_providers.worker]\nname = "worker"\n'
        f'base_url = "{server.url}/v1"\nwire_api = "responses"\n'
    )
    play_session(server, "exec_command", "cmd")
    line = [codex, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
    events = run_session(tmp_path, line, CODEX_HOME=str(tmp_path / "home"))
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [one["text"] for one in items if one["type"] == "reasoning"] == [
        "I read it.",
        "42, then 43.",
        "Both are there.",
    ]
    assert [one["text"] for one in items if one["type"] == "agent_message"] == ["Let me look.", DONE]
    commands = [one for one in items if one["type"] == "command_execution"]
    assert [(one["exit_code"], one["aggregated_output"]) for one in commands] == [(0, "42\n"), (0, "43\n")]
    usage = events[-1]["usage"]
    assert usage["cached_input_tokens"] > 0.6 * usage["input_tokens"]  # of three turns
    require_session(server)


def test_claude_code_plays_session(server: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llm_worker_rbee.server")
    claude = program("@anthropic-ai/claude-code-*/claude")
    play_session(server, "Bash", "command", description="Numbers")
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), "tiny")
    line = [claude, "-p", TASK, "--output-format", "stream-json", "--verbose", "--allowedTools", "Bash"]
    events = run_session(tmp_path, line, ANTHROPIC_BASE_URL=server.url, **CLAUDE, **models)
    blocks = [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]
    assert [one["text"] for one in blocks if one["type"] == "text"] == ["Let me look.", DONE]
    assert [one["input"]["command"] for one in blocks if one["type"] == "tool_use"] == [READ, WRITE]
    result = events[-1]
    assert (result["subtype"], result["result"]) == ("success", DONE)
    statuses = {record.figures["status"] for record in caplog.records if hasattr(record, "figures")}
    assert statuses == {200}  # it leaves out what was refused, and tries again
    require_session(server)
