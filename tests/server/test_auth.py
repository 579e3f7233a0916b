"""Where the API key comes from and when one is required."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_worker_rbee.config import ServerSettings
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.server.auth import find_key

pytestmark = pytest.mark.usefixtures("leaves_server_healthy")


@pytest.mark.parametrize("key", ["", "  "])
def test_settings_empty_api_key_raises(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        ServerSettings(model_ref="x", api_key=key)


def test_find_key_returns_first_source(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("one\n")
    both = {"LLM_WORKER_API_KEY": "one", "LLORCH_API_TOKEN": "one"}
    assert find_key(None, {}) is None
    for given, env, shell in ((file, both, "cat"), (None, both, "$LLM_"), (None, {"LLORCH_API_TOKEN": "one"}, "$LLO")):
        key = find_key(given, env)
        assert key is not None
        assert key.value == "one"
        assert shell in key.shell
    with pytest.raises(InvalidRequestError, match="hold different keys"):
        find_key(file, {"LLORCH_API_TOKEN": "two"})
    file.write_text("\n")
    with pytest.raises(InvalidRequestError, match="is empty"):
        find_key(file, both)
