"""Starts, in real processes: what is named, what is cold, how a failure is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_worker_bench import load, processes
from llm_worker_bench.results import Recorder
from llm_worker_rbee.errors import WorkerError
from tests.cli.conftest import write_model

PHASES = ("backend", "locate", "open", "tokenizer", "kernels", "weights", "first_token", "total")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("load") / "tiny.gguf")


def test_run_records_every_phase_cold_and_warm(tiny: Path) -> None:
    if not processes.can_drop_pages():
        pytest.skip("this system cannot empty the file cache of a file")
    recorder = Recorder("load")
    steps: list[str] = []
    load.run(recorder, lambda what, *_: steps.append(what), tiny, 1)
    found = {result.name: result for result in recorder.results()}
    names = {f"{phase}/{cache}" for phase in PHASES for cache in ("cold", "warm")}
    memory = {f"memory/{when}" for when in ("import", "load", "peak", "serve_engine")}
    commands = {f"command/{name}" for name in ("version", "help", "run_help", "run_first_token", "serve_ready")}
    assert set(found) == names | {"interpreter", "import"} | memory | commands
    assert steps[-3:] == ["cold start 1 of 1", "warm start 1 of 1", "commands"]
    for name, result in found.items():
        assert result.unit == ("B" if name.startswith("memory/") else "s")
        is_once = name in names | commands or name == "memory/serve_engine"
        assert len(result.samples) == (1 if is_once else 2)  # what does not read the file counts for both
        assert result.estimate > 0
    assert found["interpreter"].estimate < found["import"].estimate  # Python alone loads neither NumPy nor us
    assert found["memory/import"].estimate <= found["memory/load"].estimate <= found["memory/peak"].estimate
    for place, cache in enumerate(("cold", "warm")):
        parts = [found[f"{phase}/{cache}"].samples[0] for phase in PHASES[:-1]]
        parts += [found[name].samples[place] for name in ("interpreter", "import")]
        total = found[f"total/{cache}"].samples[0]
        assert 0.5 * total < sum(parts) <= total * 1.001
    assert len(recorder.details["resident_after_drop"]) == 1
    assert recorder.model is not None
    assert recorder.model["name"] == "tiny.gguf"


def test_run_failing_start_is_one_line(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes()[:5000])
    with pytest.raises(WorkerError, match=r"^the worker does not start: broken\.gguf"):
        load.run(Recorder("load"), lambda *_: None, broken, 1)


def test_prepare_page_cache_warm_and_cold(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(3_000_001))
    if not processes.can_drop_pages() or processes.cached_fraction([file]) is None:
        pytest.skip("this system has no file cache that can be emptied and looked at")
    processes.drop_pages([file])
    emptied = processes.cached_fraction([file])  # a file system in memory keeps all of it
    load._prepare_page_cache([file], "warm", {})
    assert processes.cached_fraction([file]) == 1
    details: dict[str, object] = {}
    load._prepare_page_cache([file], "cold", details)
    assert details["resident_after_drop"] == [emptied]


def test_prepare_page_cache_without_files_warns_not(tmp_path: Path) -> None:
    details: dict[str, object] = {}
    load._prepare_page_cache([], "cold", details)
    assert "warning" not in details
    assert details["resident_after_drop"] == [None]


def test_run_with_compile_kernels_adds_a_start_with_an_empty_cache(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes themselves are slow to compile: what they print is made up, the folder they get is real."""
    caches: list[str | None] = []

    def start(settings: dict[str, object], variables: dict[str, str] | None = None) -> dict[str, object]:
        caches.append((variables or {}).get("LLM_WORKER_KERNEL_CACHE"))
        assert caches[-1] is None or Path(caches[-1]).is_dir()
        return {"seconds": {"import": 1.0, "total": 2.0}, "bytes": {"load": 3}}

    monkeypatch.setattr(load, "_start", start)
    recorder = Recorder("load")
    load.run(recorder, lambda *_: None, tiny, 1, compile_kernels=True)
    found = {result.name: result for result in recorder.results()}
    assert {"total/compiling", "total/warm", "memory/load"} <= set(found)
    assert len(found["memory/load"].samples) == len(caches) - 2  # neither the compiling start nor the one before
    assert [cache is not None for cache in caches] == [True] + [False] * (len(caches) - 1)


def test_run_with_warm_up_is_the_start_of_an_engine_of_serve(tiny: Path) -> None:
    """As on a GPU: without a tokenizer, ready after the warm-up, kernels and graphs counted."""
    recorder = Recorder("load")
    load.run(recorder, lambda *_: None, tiny, 1, warms_up=True)
    found = {result.name: result for result in recorder.results()}
    phases = ("backend", "locate", "open", "kernels", "weights", "warm-up", "ready", "first_token", "total")
    counts = {"kernels_compiled": "kernels", "kernels_loaded": "kernels", "graphs_captured": "graphs"}
    assert {f"{phase}/warm" for phase in (*phases, *counts)} <= set(found)
    assert "tokenizer/warm" not in found
    for name, unit in counts.items():
        assert (found[f"{name}/warm"].unit, found[f"{name}/warm"].estimate) == (unit, 0)  # a CPU has none of them
    seconds = {name: found[f"{name}/warm"].estimate for name in phases}
    assert seconds["warm-up"] < seconds["ready"] < seconds["total"]
    assert seconds["ready"] + seconds["first_token"] <= 1.001 * seconds["total"]
