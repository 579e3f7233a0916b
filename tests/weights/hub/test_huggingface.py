"""`hf:owner/repo[:quant]` against a local server with the part of the hub's API that a pull needs."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_worker_rbee.errors import DownloadError, ModelNotFoundError, UnsupportedModelError, WorkerError
from llm_worker_rbee.weights import hub
from llm_worker_rbee.weights.hub.huggingface import choose_files, parse_reference
from tests.helpers.hub_server import running_hub

ROOT = Path(__file__).parents[3]
QUANTS = {f"X-{quant}.gguf": quant.encode() * 1000 for quant in ("Q4_K_S", "Q4_K_M", "Q8_0", "BF16")}
SPLIT = {f"big/Y-Q6_K-0000{part}-of-00003.gguf": b"%d" % part * 500 for part in (1, 2, 3)}
FOLDER = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
    "model-00001-of-00002.safetensors": b"a" * 3000,
    "model-00002-of-00002.safetensors": b"b" * 3000,
    "consolidated.safetensors": b"never fetched",
    "pytorch_model.bin": b"never fetched",
    "README.md": b"never fetched",
}
REPOS: dict[str, dict[str, bytes]] = {
    "me/quants": QUANTS | SPLIT | {"X.imatrix.gguf": b"no", "README.md": b"no"},
    "me/sees": QUANTS
    | dict.fromkeys(("mmproj-X-Q8_0.gguf", "mmproj-X-f16.gguf", "mmproj-X-F32.gguf", "other/mmproj-BF16.gguf"), b"v"),
    "me/one": {"One.IQ3_XS.gguf": b"one" * 100},
    "me/odd": {"A.Q5_1.gguf": b"a", "A.Q5_0.gguf": b"b"},
    "me/folder": FOLDER,
    "me/pickled": {"config.json": b"{}", "pytorch_model.bin": b"no"},
    "me/gated": QUANTS,
    "me/broken": QUANTS,
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Counter[str]"]:
    """Yield the counted requests of the hub; the environment points at it and at an empty cache."""

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with running_hub(REPOS) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running.seen


def downloads(seen: "Counter[str]") -> list[str]:
    return sorted(line.split("/resolve/main/")[1] for line in seen if line.startswith("GET") and "/resolve/" in line)


# Choosing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "chosen"),
    [
        ("hf:me/quants", ["X-Q4_K_M.gguf"]),
        ("hf:me/quants:q4_k_m", ["X-Q4_K_M.gguf"]),
        ("hf:me/quants:Q8_0", ["X-Q8_0.gguf"]),
        ("hf:me/quants:Q6_K", sorted(SPLIT)),
        ("hf:me/quants:X-BF16.gguf", ["X-BF16.gguf"]),
        ("hf:me/one", ["One.IQ3_XS.gguf"]),
        ("hf:me/sees:Q8_0", ["X-Q8_0.gguf", "mmproj-X-f16.gguf"]),
        ("hf:me/folder", sorted(FOLDER, key=list(FOLDER).index)[:5]),
    ],
)
def test_choose_files_returns_files_of_one_model(reference: str, chosen: list[str]) -> None:
    model = parse_reference(reference)
    found = choose_files(model, list(REPOS[model.repo]))
    assert found[0] == chosen[0]
    assert sorted(found) == sorted(chosen)


def test_choose_files_of_sentence_transformers_takes_its_modules() -> None:
    chosen = [
        "config.json", "tokenizer.json", "modules.json", "config_sentence_transformers.json", "1_Pooling/config.json",
        "2_Dense/config.json", "2_Dense/model.safetensors", "sentence_bert_config.json", "model.safetensors",
    ]  # fmt: skip
    others = ["onnx/model.onnx", "openvino/config.json", "2_Dense/pytorch_model.bin", "README.md", "vocab.txt"]
    assert choose_files(parse_reference("hf:me/embedder"), others + chosen[::-1]) == chosen
    plain = [name for name in chosen if name != "modules.json"]
    assert "1_Pooling/config.json" not in choose_files(parse_reference("hf:me/embedder"), plain)


@pytest.mark.parametrize(
    ("reference", "kind", "message"),
    [
        ("hf:me/quants:Q4_K", ModelNotFoundError, "holds no Q4_K; it holds: .*Q4_K_S, Q8_0"),
        ("hf:me/quants:F16", ModelNotFoundError, "holds no F16"),
        ("hf:me/odd", ModelNotFoundError, "several models, choose one: Q5_0, Q5_1"),
        ("hf:me/odd:A", ModelNotFoundError, r"matches several files.*A\.Q5_0\.gguf, A\.Q5_1\.gguf"),
        ("hf:me/folder:Q8_0", ModelNotFoundError, "holds no GGUF"),
        ("hf:me/pickled", UnsupportedModelError, "pickled"),
    ],
)
def test_choose_files_ambiguous_or_absent_lists_choices(reference: str, kind: type[WorkerError], message: str) -> None:
    model = parse_reference(reference)
    with pytest.raises(kind, match=message):
        choose_files(model, list(REPOS[model.repo]))


def test_choose_files_incomplete_split_set_or_parent_path_raises() -> None:
    with pytest.raises(ModelNotFoundError, match="2 of 3 parts"):
        choose_files(parse_reference("hf:me/quants:Q6_K"), sorted(SPLIT)[:2])
    with pytest.raises(ModelNotFoundError, match="holds no GGUF"):
        choose_files(parse_reference("hf:me/evil"), ["../../evil.gguf", "/etc/evil.gguf"])


MALFORMED = ["hf:", "hf:x", "hf:a/b/c", "hf:a/b:", "hf:../..", "hf:a/b:c:d", "hf:a b/c", "hf:a/b\n"]


@pytest.mark.parametrize("reference", MALFORMED)
def test_parse_reference_malformed_raises(reference: str) -> None:
    with pytest.raises(ModelNotFoundError, match="hf:owner/repo"):
        parse_reference(reference)


# Pulling --------------------------------------------------------------------------------------------------------------


def test_pull_quant_downloads_once_and_lists_it(server: "Counter[str]", tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = hub.locate_model("hf:me/quants:Q8_0", progress=lambda *report: seen.append(report))
    assert path.read_bytes() == QUANTS["X-Q8_0.gguf"]
    assert path.is_relative_to(tmp_path / "hf")
    assert (seen[0], seen[-1]) == (
        ("downloading hf:me/quants:Q8_0", 0, path.stat().st_size),
        ("downloading hf:me/quants:Q8_0", path.stat().st_size, path.stat().st_size),
    )
    seen.clear()
    assert hub.locate_model("hf:me/quants:Q8_0", progress=lambda *report: seen.append(report)) == path
    assert (downloads(server), seen) == (["X-Q8_0.gguf"], [])
    (listed,) = hub.cached_models()
    assert (listed.name, listed.reference, listed.path) == ("me/quants:Q8_0", "hf:me/quants:Q8_0", path)
    assert listed.bytes == len(QUANTS["X-Q8_0.gguf"])
    assert hub.locate_model("me/quants:Q8_0") == path


def test_pull_split_set_downloads_all_parts(server: "Counter[str]") -> None:
    path = hub.locate_model("hf:me/quants:Q6_K")
    assert path.name == "Y-Q6_K-00001-of-00003.gguf"
    assert downloads(server) == sorted(SPLIT)
    assert hub.cached_models()[0].bytes == sum(map(len, SPLIT.values()))


def test_pull_folder_skips_pickles(server: "Counter[str]") -> None:
    folder = hub.locate_model("hf:me/folder")
    assert sorted(path.name for path in folder.iterdir()) == sorted(list(FOLDER)[:5])
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"b" * 3000


def test_pull_sends_hf_token(server: "Counter[str]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.locate_model("hf:me/one")
    assert server["token Bearer hf_secret"] >= 2


@pytest.mark.parametrize(
    ("reference", "kind", "message"),
    [
        ("hf:me/nothing", ModelNotFoundError, "no model 'me/nothing' at http://127"),
        ("hf:me/gated:Q8_0", DownloadError, "gated: accept its terms .* HF_TOKEN"),
        ("hf:me/broken", DownloadError, "cannot fetch hf:me/broken .*500"),
        ("hf:me/quants:Q2_K", ModelNotFoundError, "it holds"),
    ],
)
def test_pull_refused_by_hub_raises_one_line(
    server: "Counter[str]", reference: str, kind: type[WorkerError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        hub.locate_model(reference)
    assert "\n" not in str(caught.value)
    assert hub.cached_models() == []


def test_pull_unreachable_hub_uses_cache_or_raises(server: "Counter[str]", monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.locate_model("hf:me/one")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert hub.locate_model("hf:me/one") == path
    with pytest.raises(DownloadError, match="cannot fetch hf:me/quants from http://127"):
        hub.locate_model("hf:me/quants")


def test_verify_model_damaged_file_is_fetched_again(server: "Counter[str]") -> None:
    path = hub.locate_model("hf:me/one")
    assert hub.verify_model("hf:me/one").path == path
    assert server["GET /me/one/resolve/main/One.IQ3_XS.gguf"] == 1
    path.resolve().write_bytes(b"bad" * 100)
    assert hub.verify_model("hf:me/one").path.read_bytes() == b"one" * 100
    assert server["GET /me/one/resolve/main/One.IQ3_XS.gguf"] == 2


def test_pull_full_disk_names_the_folder(server: "Counter[str]", tmp_path: Path) -> None:
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))"
    result = run_locate("hf:me/quants:Q8_0", script)
    assert f"DownloadError: no room in {tmp_path / 'hf'}" in result
    assert not any("X-Q8_0" in path.name for path in (tmp_path / "hf").rglob("*"))


def run_locate(reference: str, first: str = "", **env: str) -> str:
    """Run `locate_model` in a new process (huggingface_hub reads its environment at import); return path or error."""
    script = f"""
import sys
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.weights import hub
{first}
try:
    print(hub.locate_model(sys.argv[1]))
except WorkerError as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    command = [sys.executable, "-c", script, reference]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_pull_offline_uses_cache(server: "Counter[str]") -> None:
    path, folder = hub.locate_model("hf:me/quants:Q8_0"), hub.locate_model("hf:me/folder")
    before = server.total()
    assert run_locate("hf:me/quants:Q8_0", HF_HUB_OFFLINE="1") == str(path)
    assert run_locate("hf:me/folder", HF_HUB_OFFLINE="true") == str(folder)
    assert "holds no Q4_K_M; it holds: Q8_0" in run_locate("hf:me/quants:Q4_K_M", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in run_locate("hf:me/one", HF_HUB_OFFLINE="1")
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert "only partly cached (model-00001-of-00002" in run_locate("hf:me/folder", HF_HUB_OFFLINE="1")
    assert server.total() == before
