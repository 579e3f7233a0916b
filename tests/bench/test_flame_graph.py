"""Stack samples, speedscope's JSON and the SVG; the zoom in a real browser where there is one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from llm_worker_bench import flame_graph
from llm_worker_bench.flame_graph import Flame, Frame, PySpy
from llm_worker_rbee.errors import MissingDependencyError, WorkerError

SVG = "{http://www.w3.org/2000/svg}"
OUTER, INNER = Frame("outer", "a.py", 1, "ours"), Frame("<inner> & 'co'", "b.py", 2, "numpy")
OTHER = Frame("other", "", 0, "native")
PLANTED = [((OUTER, INNER), 0.2), ((OUTER,), 0.1), ((OTHER,), 0.1), ((OUTER, INNER), 0.0001)]


def spin() -> int:
    end, total = time.perf_counter() + 0.01, 0
    while time.perf_counter() < end:
        total += sum(range(500))
    return total


def work() -> None:
    spin()


def test_split_regions_divides_a_function_among_its_tasks() -> None:
    caller, region, other = (Frame(name, "a.py", 1, "ours") for name in ("step", "Program.run_timed", "schedule"))
    flame: Flame = [((caller, region), 3.0), ((caller, other), 1.0), ((caller, region, other), 1.0)]
    tasks = {("QKV", "matmul"): 6.0, ("head", "matmul"): 2.0, ("norms", "norm"): 0.0}
    found = flame_graph.split_regions(flame, "Program.run_timed", tasks)
    named = {tuple(frame.name for frame in stack): weight for stack, weight in found}
    assert named == {
        ("step", "schedule"): 1.0,
        ("step", "Program.run_timed", "QKV", "matmul"): 3.0,
        ("step", "Program.run_timed", "head", "matmul"): 1.0,
    }
    assert flame_graph.split_regions(flame, "Program.run_timed", {}) == flame
    assert flame_graph.leave_out(flame, ["schedule"]) == flame[:1]
    assert flame_graph.kernel_flame(tasks) == [
        ((Frame("QKV", "", 0, "component"), Frame("matmul", "", 0, "kernel")), 6.0),
        ((Frame("head", "", 0, "component"), Frame("matmul", "", 0, "kernel")), 2.0),
    ]


def test_record_in_process_sees_callers() -> None:
    interval = sys.getswitchinterval()
    seen = flame_graph.record_flame(work, 0.2)
    assert sys.getswitchinterval() == interval
    assert len(seen) > 5
    names = [[frame.name for frame in stack] for stack, _ in seen]
    assert all(stack[0] == "work" for stack in names)  # nothing of the test runner below it
    assert any(stack[:2] == ["work", "spin"] for stack in names)
    assert all(weight > 0 for _, weight in seen)


def test_record_in_process_shows_running_source_lines() -> None:
    seen = flame_graph.record_flame(lambda: json.loads(json.dumps(flame_graph.render_svg(PLANTED, "x"))), 0.2)
    frames = {frame for stack, _ in seen for frame in stack}
    categories = {frame.category for frame in frames}
    assert {"ours", "line"} <= categories
    for frame in frames:
        assert not frame.file.startswith("/"), "a path of this machine"
    lines = [frame for frame in frames if frame.category == "line"]
    source = Path(flame_graph.__file__).read_text().splitlines()
    own = [frame for frame in lines if frame.file.endswith("bench/flame_graph.py")]
    assert own
    assert all(frame.name.removesuffix("…") in " ".join(source[frame.line - 1].split()) for frame in own)


def test_stack_instruction_without_line_is_sampled() -> None:
    bottom = SimpleNamespace(f_code=flame_graph._call_marked.__code__, f_lineno=1, f_back=None)
    frame = SimpleNamespace(f_code=flame_graph.record_flame.__code__, f_lineno=None, f_back=bottom)
    assert [one.name for one in flame_graph._stack(frame)] == ["record_flame"]  # type: ignore[arg-type]


def test_speedscope_follows_its_schema() -> None:
    value = json.loads(json.dumps(flame_graph.speedscope({"prefill": [], "decode": PLANTED}, "a model")))
    assert value["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = value["shared"]["frames"]
    assert [frame["name"] for frame in frames] == ["outer", "<inner> & 'co'", "other"]
    assert all(set(frame) <= {"name", "file", "line", "col"} for frame in frames)
    assert [profile["name"] for profile in value["profiles"]] == ["prefill", "decode"]
    for profile in value["profiles"]:
        assert set(profile) == {"type", "name", "unit", "startValue", "endValue", "samples", "weights"}
        assert (profile["type"], profile["unit"]) == ("sampled", "seconds")
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["endValue"] == pytest.approx(sum(profile["weights"]))
    assert value["profiles"][1]["samples"] == [[0, 1], [0], [2], [0, 1]]


def test_build_tree_merges_common_callers() -> None:
    root = flame_graph.build_tree(PLANTED)
    assert root.seconds == pytest.approx(sum(weight for _, weight in PLANTED))
    assert {node.frame.name: node.seconds for node in root.children.values()} == pytest.approx(
        {"outer": 0.3001, "other": 0.1}
    )
    assert 1 + max(level for _, _, level in flame_graph._layout(root, 0.0, 0)) == 3


def test_render_svg_is_valid_and_self_contained() -> None:
    text = flame_graph.render_svg(PLANTED, "Decode of <x>")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    root = ElementTree.fromstring(text)
    boxes = {g.get("data-n"): g for g in root.iter(f"{SVG}g")}
    assert set(boxes) == {"all", "outer", "<inner> & 'co'", "other"}
    place = {name: (float(g.get("data-x", "")), float(g.get("data-w", ""))) for name, g in boxes.items()}
    assert place["all"] == (0.0, 1.0)
    assert place["outer"][1] == pytest.approx(0.3001 / 0.4001, abs=1e-5)
    left, right = place["outer"][0], sum(place["outer"])
    inner = place["<inner> & 'co'"]
    assert left <= inner[0] + 1e-6 <= sum(inner) <= right + 1e-6
    assert sum(place["outer"]) <= place["other"][0] + 1e-5 or sum(place["other"]) <= place["outer"][0] + 1e-5
    title = boxes["<inner> & 'co'"].find(f"{SVG}title")
    assert title is not None
    assert title.text == "<inner> & 'co' · b.py:2\n200.1 ms, 50.0%"
    heights = {name: float(g.find(f"{SVG}rect").get("y", "")) for name, g in boxes.items()}  # type: ignore[union-attr]
    assert heights["all"] > heights["outer"] > heights["<inner> & 'co'"]


def test_render_svg_without_samples_is_valid() -> None:
    ElementTree.fromstring(flame_graph.render_svg([], "nothing"))


def test_render_svg_click_zooms(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine: the zoom of the flame graph is not tried")
    click = "document.querySelector('g.frame[data-n=outer]').dispatchEvent(new MouseEvent('click'));"
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><body>{flame_graph.render_svg(PLANTED, 'x')}<script>{click}</script></body>")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60)
    dom = unescape(done.stdout)
    outer, other = (dom.partition(f'data-n="{name}"')[2].partition("</g>")[0] for name in ("outer", "other"))
    assert f'width="{flame_graph.WIDTH - 2 * flame_graph.MARGIN - 0.5}"' in outer
    assert "display: none" in other
    assert 'class="frame below"' in dom.partition('data-n="all"')[0].rpartition("<g")[2]


def test_record_py_spy_stacks_are_parsed_and_cut() -> None:
    lines = [
        "<module> (x.py:1);_call_marked (llm_worker_bench/flame_graph.py:70);step "
        "(llm_worker_rbee/engine/model_runner.py:31);dot (numpy/linalg.py:5);sgemm_kernel (libopenblas.so) 3",
        "look (threading.py:9) 7",
        "_call_marked (llm_worker_bench/flame_graph.py:70) 2",
        "nonsense",
    ]
    samples = flame_graph._parse_collapsed(lines, 0.5)
    assert [weight for _, weight in samples] == [0.5] * 3
    stack = samples[0][0]
    assert [(frame.name, frame.category) for frame in stack] == [
        ("step", "ours"), ("dot", "numpy"), ("sgemm_kernel", "numpy"),
    ]  # fmt: skip
    assert (stack[0].file, stack[0].line) == ("llm_worker_rbee/engine/model_runner.py", 31)


def program(folder: Path, text: str) -> str:
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_find_py_spy_missing_or_forbidden_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(MissingDependencyError, match=r"pip install 'llm-worker-rbee\[bench\]'"):
        flame_graph.find_py_spy()
    program(tmp_path, 'echo "Error: Permission Denied: Try running again with elevated permissions" >&2; exit 1')
    with pytest.raises(WorkerError, match="may not sample this process: run as root, allow ptrace"):
        flame_graph.find_py_spy()
    monkeypatch.setenv("PATH", os.defpath)
    broken = program(tmp_path, 'echo "Error: out of luck" >&2; exit 3')
    with pytest.raises(WorkerError, match="py-spy failed: Error: out of luck"):
        flame_graph.record_flame(work, 1, PySpy(broken))
