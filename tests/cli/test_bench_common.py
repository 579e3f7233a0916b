"""The command line that a saved run records."""

from __future__ import annotations

import pytest

from llm_worker_bench.commands.common import repeatable_command


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["bench", "micro", "--filter", "rope|qkv"], "llm-worker-rbee bench micro --filter 'rope|qkv'"),
        (["bench", "e2e", "--save", "a.json", "--pp", "8"], "llm-worker-rbee bench e2e --pp 8"),
        (["bench", "e2e", "--save=a.json", "--json"], "llm-worker-rbee bench e2e"),
        (["profile", "--save-baseline", "x", "--tg", "4"], "llm-worker-rbee profile --tg 4"),
        (["bench", "peers", "--llama-bench", "/opt/lb"], "llm-worker-rbee bench peers --llama-bench lb"),
        (["bench", "peers", "--files=/data/models"], "llm-worker-rbee bench peers --files=models"),
    ],
)  # fmt: skip
def test_command_is_without_places_of_this_machine(arguments: list[str], command: str) -> None:
    assert repeatable_command(arguments) == command
