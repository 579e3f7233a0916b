"""The folder of compiled kernels: kept, temporary, or filled beforehand; old versions are removed."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from llm_worker_rbee.backends import kernel_folder

NAME = "f" * 16


def test_open_cache_dir_removes_unused_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_folder.CACHE_VARIABLE, str(tmp_path))
    days = {f"{number:016x}": age for number, age in enumerate([90, 50, 40, 35, 20, 10])}
    for name, age in [*days.items(), ("not-ours", 90)]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel").write_text("code")
        os.utime(tmp_path / name, (time.time() - age * 86400,) * 2)
    assert kernel_folder.open_cache_dir(NAME) == tmp_path / NAME
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {name for name, age in days.items() if age <= 35} | {"not-ours", NAME}


def test_unwritable_root_gives_a_temporary_folder_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv(kernel_folder.CACHE_VARIABLE, str(blocked))
    with caplog.at_level(logging.WARNING):
        folder = kernel_folder.open_cache_dir(NAME)
    assert folder is not None
    assert folder.is_dir()
    assert folder.parent.parent != tmp_path
    assert f"compiled kernels cannot be kept in {blocked}" in caplog.text


def test_read_only_folder_is_extended_by_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_folder.CACHE_VARIABLE, str(tmp_path))
    filled = tmp_path / NAME
    (filled / "entry").mkdir(parents=True)
    (filled / "entry" / "kernel").write_text("code")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != filled)
    assert kernel_folder.open_cache_dir(NAME) == filled
    folder = kernel_folder.open_cache_dir(NAME, must_grow=True)
    assert folder is not None
    assert (folder / "entry" / "kernel").read_text() == "code"
    (folder / "new").mkdir()
    assert [path.name for path in filled.iterdir()] == ["entry"]


def test_root_is_the_variable_or_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_folder.CACHE_VARIABLE, "/kernels")
    assert kernel_folder.cache_root() == Path("/kernels")
    monkeypatch.delenv(kernel_folder.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert kernel_folder.cache_root() == Path("/cache/llm-worker-rbee/kernels")
