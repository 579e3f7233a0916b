"""References to paths, without a network."""

import hashlib
from pathlib import Path

import pytest

from llm_worker_rbee.errors import InvalidRequestError, ModelNotFoundError
from llm_worker_rbee.weights import hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "llm-worker-rbee"


def test_locate_model_existing_path_returns_it(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.locate_model(str(file)) == file
    assert hub.locate_model("~/m.gguf") == file
    assert hub.locate_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("reference", ["", "nope", "a\0b", "/a\0b", "x" * 5000, "~nobody-here/x", "./no.gguf", "hf:x"])
def test_locate_model_unknown_reference_raises_not_found(reference: str, cache: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        hub.locate_model(reference)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_locate_model_error_suggests_similar_names(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"did you mean .*model-q4\.gguf"):
        hub.locate_model(str(tmp_path / "model-q5.gguf"))
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2"):
        hub.locate_model("smolm2")
    for reference in ("owner/some-repo", "https://huggingface.co/owner/some-repo"):
        with pytest.raises(ModelNotFoundError, match=r"then write hf:owner/some-repo\)"):
            hub.locate_model(reference)


def test_locate_model_by_cached_name(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "Mine.Q8_0.gguf").write_bytes(b"GGUF....")
    (cache / "notes.txt").write_text("not a model")
    (cache / "folder").mkdir()
    (cache / "folder" / "config.json").write_text("{}")
    assert hub.locate_model("Mine.Q8_0") == hub.locate_model("Mine.Q8_0.gguf") == cache / "Mine.Q8_0.gguf"
    assert hub.locate_model("folder") == cache / "folder"
    assert [(model.name, model.bytes) for model in hub.cached_models()] == [("Mine.Q8_0", 8), ("folder", 2)]
    with pytest.raises(InvalidRequestError, match="no checksum"):
        hub.verify_model("Mine.Q8_0")


def test_locate_model_without_pull_fetches_nothing(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="llm-worker-rbee pull smollm2"):
        hub.locate_model(None, pull=False)
    assert not cache.exists()


def test_locate_model_folder_named_like_builtin_does_not_hide_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(ModelNotFoundError, match="llm-worker-rbee pull smollm2"):
        hub.locate_model("smollm2", pull=False)
    assert hub.locate_model("./smollm2") == Path("smollm2")
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert hub.locate_model("smollm2") == Path("smollm2")


def test_builtin_default_model_has_expected_checksum(default_model: Path) -> None:
    model = hub.BUILTIN[hub.DEFAULT_MODEL]
    assert default_model.name == model.filename
    assert default_model.stat().st_size == model.bytes
    assert hashlib.sha256(default_model.read_bytes()).hexdigest() == model.sha256


def test_cache_dir_follows_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert hub.cache_dir() == Path("/elsewhere/llm-worker-rbee")
    for ignored in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert hub.cache_dir() == Path("/somewhere/.cache/llm-worker-rbee")


def test_cached_models_partial_file_is_not_listed(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / hub.BUILTIN["smollm2"].filename).write_bytes(b"GGUF")
    assert hub.cached_models() == []
    with pytest.raises(ModelNotFoundError):
        hub.locate_model("smollm2", pull=False)


@pytest.mark.parametrize("suffix", ["gguf", "GGUF"])
def test_cached_models_split_set_is_one_model(cache: Path, suffix: str) -> None:
    cache.mkdir(parents=True)
    for part in (1, 2):
        (cache / f"big-0000{part}-of-00002.{suffix}").write_bytes(b"GGUF" * part)
    (model,) = hub.cached_models()
    assert (model.path.name, model.bytes) == (f"big-00001-of-00002.{suffix}", 12)
