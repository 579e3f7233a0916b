"""Claude Code, installed by npm (`make test-extra`), in a session with a tool, against a real server whose model plays
given texts."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripted_engine import ScriptedServer, call, think

CLAUDE = Path(os.environ.get("LLM_WORKER_CLIENTS", ".venv-clients")).absolute() / "npm/node_modules/.bin/claude"
SAID, NAME = "from-the-tool", "claude-here"
pytestmark = pytest.mark.skipif(not CLAUDE.exists(), reason="Claude Code is not installed: make test-extra, with npm")


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path, served_name=NAME) as running:
        running.ready()
        yield running


def play(server: ScriptedServer, folder: Path, prompt: str) -> list[dict[str, Any]]:
    """Return the events that Claude Code prints."""
    settings = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": NAME, "ANTHROPIC_DEFAULT_HAIKU_MODEL": NAME,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1",
    }  # fmt: skip
    command = [CLAUDE, "-p", prompt, "--output-format", "stream-json", "--verbose", "--allowedTools", "Bash"]
    done = subprocess.run(
        command, cwd=folder, env=settings, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_session_with_tool(scripted: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    scripted.play(
        think("I run it.", call("Bash", command=f"echo {SAID}", description="Say it")),
        think("Done.", f"It said {SAID}."),
    )
    with caplog.at_level(logging.INFO, "llm_worker_rbee.server"):
        events = play(scripted, folder, "Run echo and repeat what it said.")
    ended = next(event for event in events if event["type"] == "result")
    assert (ended["subtype"], ended["result"], ended["num_turns"]) == ("success", f"It said {SAID}.", 2)
    assert len(scripted.prompts) == 2
    assert SAID in scripted.prompts[1].rpartition("<tool_response>")[2]
    assert "x-anthropic-billing-header" not in scripted.prompts[0]
    usages = [event["message"]["usage"] for event in events if event["type"] == "assistant"]
    first, last = usages[0], usages[-1]
    assert first["input_tokens"] > 1500
    assert last["cache_read_input_tokens"] > 0.95 * (last["input_tokens"] + last["cache_read_input_tokens"])
    statuses = [record.figures["status"] for record in caplog.records if hasattr(record, "figures")]
    assert statuses == [200, 200]  # a refused field would be left out in another try
