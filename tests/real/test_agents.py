"""Coding agents from npm with a real model, unchanged but for short instructions: each edits a file by a command.

With their own instructions a first turn of Codex has 8,341 tokens, and the 1.5B answers with the list of its tools.
`make test-agents` installs and runs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.extra.test_coding_agents import CLAUDE, program, run_agent
from tests.helpers.serve_process import ServeProcess

TASK = "Run the command: sed -i 's/Hi /Hello, /' greet.py   Then run: cat greet.py"
INSTRUCTIONS = "You are a coding agent in a folder on a computer. Call the tool {} to run commands."
BEFORE, AFTER = (f"def greet(name):\n    return '{word}' + name\n" for word in ("Hi ", "Hello, "))
LIMIT_S = 600

pytestmark = pytest.mark.skipif(
    not os.environ.get("LLM_WORKER_AGENTS"), reason="needs LLM_WORKER_AGENTS: make test-agents sets it"
)


@pytest.fixture(scope="module")
def worker(real_model: Callable[[str], Path]) -> Iterator[ServeProcess]:
    process = ServeProcess("--model", real_model("qwen2.5-coder-1.5b"), "--served-model-name", "coder")
    yield process.ready()
    process.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "work" / "greet.py").write_text(BEFORE)
    return tmp_path


def test_codex_edits_a_file(worker: ServeProcess, folder: Path) -> None:
    codex, home = program(".bin/codex"), folder / "home"
    (home / "short.md").write_text(INSTRUCTIONS.format("exec_command"))
    (home / "config.toml").write_text(
        f'model = "coder"\nmodel_provider = "worker"\nmodel_instructions_file = "{home}/short.md"\n'
        "include_permissions_instructions = false\ninclude_apps_instructions = false\n"
        "include_environment_context = false\n[skills]\ninclude_instructions = false\n"
        f'[model_providers.worker]\nname = "worker"\nbase_url = "{worker.url}/v1"\nwire_api = "responses"\n'
        f"stream_idle_timeout_ms = {1000 * LIMIT_S}\n"
    )
    line = [codex, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
    events = run_agent(folder, line, LIMIT_S, CODEX_HOME=str(home))
    assert (folder / "work" / "greet.py").read_text() == AFTER
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    outputs = [item["aggregated_output"] for item in items if item["type"] == "command_execution"]
    assert AFTER in outputs
    assert events[-1]["usage"]["cached_input_tokens"] > 0  # the second turn begins with the first


def test_claude_code_edits_a_file(worker: ServeProcess, folder: Path) -> None:
    claude = program("@anthropic-ai/claude-code-*/claude")
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), "coder")
    line = [claude, "-p", TASK, "--output-format", "stream-json", "--verbose", "--tools", "Bash"]
    line += ["--allowedTools", "Bash", "--system-prompt", INSTRUCTIONS.format("Bash")]
    events = run_agent(folder, line, LIMIT_S, ANTHROPIC_BASE_URL=worker.url, **CLAUDE, **models)
    assert (folder / "work" / "greet.py").read_text() == AFTER
    assert events[-1]["subtype"] == "success"
    assert events[-1]["usage"]["cache_read_input_tokens"] > 0
