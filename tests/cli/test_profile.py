"""The command `profile`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_worker_bench.results import Run as BenchRun

from .conftest import Run, Terminal

SMALL = ("--pp", "8", "--tg", "2", "-r", "3", "--flame", "0.05", "--backend", "reference")
FILES = {"report.md", "report.html", "flame-prefill.svg", "flame-decode.svg", "profile.speedscope.json", "run.json"}


def test_profile_prints_tables_and_writes_files(cli: Run, tiny: Path, tmp_path: Path) -> None:
    done = cli("profile", tiny, *SMALL, "--out", tmp_path / "out")
    assert done.returncode == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    text = done.stdout.decode()
    assert text.count("COMPONENT") == 2
    for label in ("embedding", "norms", "QKV", "RoPE", "KV write", "scores", "mask", "softmax", "values", "output",
                  "gate + up", "activation", "down", "head", "sampling", "scheduling",
                  "host: Python + launches"):  # fmt: skip
        assert len(re.findall(rf"^{re.escape(label)} +\d+\.\d%", text, re.MULTILINE)) == 2
    assert len(re.findall(r"^top five: (?:[^,]+, ){4}[^,]+$", text, re.MULTILINE)) == 2
    assert text.count("targets:") == 2
    assert len(re.findall(r"The components sum to \d+\.\d% of it", text)) == 2
    assert f"report: {tmp_path / 'out' / 'report.html'}" in done.stderr.decode()
    saved = BenchRun.load(tmp_path / "out" / "run.json")
    assert (saved.kind, saved.complete, saved.settings["pp"]) == ("profile", True, 8)
    assert saved.model is not None
    assert saved.model["name"] == "tiny.gguf"


def test_profile_json_is_one_object(cli: Run, tiny: Path, tmp_path: Path) -> None:
    done = cli("profile", tiny, *SMALL, "--out", tmp_path / "out", "--json", "--save", tmp_path / "saved.json")
    assert done.returncode == 0
    value = json.loads(done.stdout)
    names = {result["name"] for result in value["results"]}
    assert {"prefill/step", "decode/step", "prefill/qkv", "decode/host", "decode/components_of_step"} <= names
    qkv = next(result for result in value["results"] if result["name"] == "decode/qkv")
    assert {"share", "class", "calls", "bytes", "limit_s", "percent_of_limit", "backend"} <= set(qkv)
    assert (qkv["unit"], qkv["backend"]) == ("s", "reference")
    assert len(BenchRun.load(tmp_path / "saved.json").results) == len(names)


def test_profile_synthetic_batch_at_depth(cli: Run, tmp_path: Path) -> None:
    args = ("--synthetic", "smollm2-135m:Q4_0:1", "--pp", "0", "--tg", "2", "--batch", "3", "--depth", "32", "-r", "1")
    done = cli("profile", *args, "--flame", "0", "--out", tmp_path / "out", "--json")
    value = json.loads(done.stdout)
    assert value["model"]["name"] == "smollm2-135m:Q4_0:1"
    results = {result["name"]: result for result in value["results"]}
    assert not any(name.startswith("prefill") for name in results)
    assert results["decode/step"]["tokens"] == results["decode/step"]["batch"] == 3
    width, rows = 576, 576 + 2 * 192
    assert results["decode/qkv"]["operations"] == 2 * 3 * width * rows
    assert results["decode/qkv"]["arithmetic"] == "int8"


def test_profile_default_folder_has_model_and_date(
    cli: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert cli("profile", tiny, "--pp", "4", "--tg", "1", "-r", "1", "--flame", "0").returncode == 0
    first, second = sorted(path.name for path in tmp_path.iterdir())
    assert re.fullmatch(r"profile-tiny-\d{4}-\d\d-\d\d", first)
    assert second == f"{first}-2"
    assert {path.name for path in (tmp_path / first).iterdir()} == {"report.md", "report.html", "run.json"}


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (("--native",), 2, "--native goes with --py-spy"),
        (("--pp", "300"), 1, "--pp 300 and --tg 16 need a context of 317: the model has 256"),
        (("--pp", "0", "--tg", "0"), 2, "--pp and --tg are both 0"),
        (("--prompt", "hi", "--batch", "2"), 2, "--prompt is one request"),
        (("--synthetic", "llama2-7b:F32:1"), 2, "both a MODEL and --synthetic"),
        (("--backend", "nope"), 1, "unknown backend 'nope'"),
        (("--out", __file__), 1, "is not a folder"),
    ],
)
def test_profile_wrong_usage_is_an_error(
    cli: Run, tiny: Path, args: tuple[str, ...], status: int, message: str
) -> None:
    done = cli("profile", tiny, *args)
    assert (done.returncode, done.stdout) == (status, b"")
    assert message in done.stderr.decode()


def test_profile_ctrl_c_writes_partial_report(terminal: Callable[..., Terminal], tiny: Path, tmp_path: Path) -> None:
    screen = terminal("profile", tiny, "--pp", "4", "--tg", "2", "-r", "1000000", "--out", tmp_path / "out")
    screen.wait_for("repetition ")
    screen.wait_for("decode")
    screen.send("\x03")
    status, shown = screen.finish()
    assert status == 130
    assert b"Traceback" not in shown
    assert b"stopped" in shown
    saved = BenchRun.load(tmp_path / "out" / "run.json")
    assert not saved.complete
    assert saved.results
    assert "broken off early" in (tmp_path / "out" / "report.html").read_text()
