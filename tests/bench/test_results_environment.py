"""The description of machine, commit and model, and that the fingerprint differs between machines."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from llm_worker_bench import results
from llm_worker_rbee import machine


@pytest.fixture(autouse=True)
def fresh() -> None:
    for cached in (results.describe_machine, results.package_versions, results.describe_commit):
        cached.cache_clear()


def test_describe_machine_fingerprint_is_stable() -> None:
    first = results.describe_machine()
    results.describe_machine.cache_clear()
    assert results.describe_machine()["fingerprint"] == first["fingerprint"]
    assert first["cores"] == machine.usable_cores()
    assert first["cpu"]


@pytest.mark.parametrize("part", ["cpu_name", "cpu_features", "usable_cores", "cpu_quota", "gpus"])
def test_describe_machine_other_hardware_changes_fingerprint(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = results.describe_machine()["fingerprint"]
    results.describe_machine.cache_clear()
    monkeypatch.setattr(machine, part, lambda: ["something", "else"])
    assert results.describe_machine()["fingerprint"] != here
    results.describe_machine.cache_clear()


def test_package_versions_include_dependencies() -> None:
    found = results.package_versions()
    assert {"llm-worker-rbee", "python", "numpy", "tokenizers"} <= set(found)


def test_describe_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*args: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@e", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(results, "__file__", str(tmp_path / "llm_worker_bench" / "results.py"))
    assert results.describe_commit() is None
    git("init", "-q")
    source, page = tmp_path / "llm_worker_rbee" / "module.py", tmp_path / "page.md"
    source.parent.mkdir()
    source.write_text("one")
    page.write_text("one")
    git("add", ".")
    git("commit", "-qm", "first")
    results.describe_commit.cache_clear()
    clean = results.describe_commit()
    assert clean is not None
    assert (clean["id"], clean["dirty"]) == (git("rev-parse", "HEAD"), False)
    page.write_text("two")  # not a part of what is measured
    results.describe_commit.cache_clear()
    assert results.describe_commit() == clean
    source.write_text("two")
    results.describe_commit.cache_clear()
    changed = results.describe_commit()
    assert changed is not None
    assert changed["dirty"]
    results.describe_commit.cache_clear()


def test_describe_model_hashes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(5000))
    reported: list[tuple[str, int, int | None]] = []
    found = results.describe_model(path, lambda *step: reported.append(step))
    assert found == {"name": "model.gguf", "bytes": 5004, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert reported[-1][1:] == (5004, 5004)


def test_describe_model_split_file_and_folder_hash_all_parts(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-{number:05d}-of-00002.gguf").write_bytes(bytes([number]) * 10)
        (tmp_path / f"model-{number:05d}-of-00002.safetensors").write_bytes(bytes([number]) * 20)
    first = tmp_path / "m-00001-of-00002.gguf"
    split, folder = results.describe_model(first), results.describe_model(tmp_path)
    assert (split["bytes"], folder["bytes"]) == (20, 40)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"x" * 10)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"x" * 20)
    assert results.describe_model(first)["sha256"] != split["sha256"]
    assert results.describe_model(tmp_path)["sha256"] != folder["sha256"]
