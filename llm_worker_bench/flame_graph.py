"""Flame graphs: samples of the call stack, as speedscope's JSON and as one SVG that needs nothing else.

The built-in sampler is a thread that reads `sys._current_frames()`. It sees Python only, so the running source line
stands on top of its function: in array code that tells which expression it is. py-spy samples from outside and, with
`--native`, native code as well. In the SVG callers are below callees; hovering shows a frame in full, a click zooms.
"""

from __future__ import annotations

import linecache
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from llm_worker_rbee import __version__
from llm_worker_rbee.errors import MissingDependencyError, WorkerError

INTERVAL_S = 0.002
PACKAGES = ("llm_worker_rbee", __name__.split(".")[0])
SCHEMA = "https://www.speedscope.app/file-format-schema.json"
RAW_FRAME = re.compile(r"(?P<name>.*) \((?P<file>.*?)(?::(?P<line>\d+))?\)")
MAX_LINE_CHARACTERS = 90


class Frame(NamedTuple):
    """A place in the program; the colours of the SVG tell categories apart."""

    name: str
    file: str  # as a module path: `numpy/_core/fromnumeric.py`
    line: int
    category: str  # ours, line (a source line of ours), component, kernel, numpy, stdlib, native, other


Stack = tuple[Frame, ...]  # the root first
Flame = list[tuple[Stack, float]]  # the samples of one phase in order, each with the seconds it stands for


class PySpy(NamedTuple):
    """The command, and whether it samples native code."""

    path: str
    native: bool = False


def record_flame(function: Callable[[], object], seconds: float, py_spy: PySpy | None = None) -> Flame:
    """Call the function repeatedly for so long, and sample the stack."""
    if py_spy is not None:
        return _record_py_spy(function, seconds, py_spy)
    flame, stop, thread = Flame(), threading.Event(), threading.get_ident()

    def sample() -> None:
        last = time.perf_counter()
        while not stop.wait(INTERVAL_S):
            frame = sys._current_frames().get(thread)
            now = time.perf_counter()
            if frame is not None and (stack := _stack(frame)):
                flame.append((stack, now - last))
            del frame
            last = now

    sampler = threading.Thread(target=sample, name="flame sampler", daemon=True)
    before, end = sys.getswitchinterval(), time.perf_counter() + seconds
    sys.setswitchinterval(INTERVAL_S / 4)  # so that Python code yields to the sampler in time
    try:
        sampler.start()
        while time.perf_counter() < end:
            _call_marked(function)
    finally:
        stop.set()
        sampler.join()
        sys.setswitchinterval(before)
    return flame


def kernel_flame(seconds: Mapping[tuple[str, str], float]) -> Flame:
    """Return a graph of kernels alone, by the name of their component and their own."""
    return [(_kernel_stack(*names), taken) for names, taken in seconds.items() if taken > 0]


def leave_out(flame: Flame, functions: Sequence[str]) -> Flame:
    """Return the samples outside of these functions."""
    return [(stack, weight) for stack, weight in flame if not any(frame.name in functions for frame in stack)]


def split_regions(flame: Flame, region: str, seconds: Mapping[tuple[str, str], float]) -> Flame:
    """Divide the time of a function among what it ran, by component and kernel: a sampler sees the function alone."""
    whole = sum(seconds.values())
    if whole <= 0:
        return flame
    found, inside = Flame(), dict[Stack, float]()
    for stack, weight in flame:
        depth = next((i + 1 for i, frame in enumerate(stack) if frame.name.endswith(region)), 0)
        if depth:
            inside[stack[:depth]] = inside.get(stack[:depth], 0.0) + weight
        else:
            found.append((stack, weight))
    for stack, weight in inside.items():
        shares = ((_kernel_stack(*names), taken / whole) for names, taken in seconds.items())
        found += [(stack + kernels, weight * share) for kernels, share in shares if share > 0]
    return found


def _kernel_stack(component: str, kernel: str) -> Stack:
    return Frame(component, "", 0, "component"), Frame(kernel, "", 0, "kernel")


def _call_marked(function: Callable[[], object]) -> None:
    """Mark the bottom of every stack that counts: frames below it, and stacks without it, belong to the caller."""
    function()


def _stack(frame: FrameType | None) -> Stack:
    """Return the frames above `_call_marked`, the root first; empty if it is not on the stack."""
    found = [] if frame is None else [_line_frame(frame.f_code, frame.f_lineno or 0)]  # an instruction may have no line
    while frame is not None and frame.f_code is not _call_marked.__code__:
        found.append(_function_frame(frame.f_code))
        frame = frame.f_back
    return () if frame is None or len(found) < 2 else tuple(one for one in reversed(found) if one is not None)


@cache
def _function_frame(code: CodeType) -> Frame:
    file, category = _short_path(code.co_filename)
    return Frame(code.co_qualname, file, code.co_firstlineno, category)


@cache
def _line_frame(code: CodeType, number: int) -> Frame | None:
    file, category = _short_path(code.co_filename)
    text = " ".join(linecache.getline(code.co_filename, number).split())
    if category != "ours" or not text:
        return None
    return Frame(text if len(text) <= MAX_LINE_CHARACTERS else text[:MAX_LINE_CHARACTERS] + "…", file, number, "line")


@cache
def _short_path(path: str) -> tuple[str, str]:
    """Return (a path that is the same on every machine, the category)."""
    paths = sysconfig.get_paths()
    roots = (str(Path(__file__).parents[1]), paths["purelib"], paths["platlib"], paths["stdlib"])
    for root in sorted(set(roots), key=len, reverse=True):  # packages may lie inside the standard library's folder
        if path.startswith(root + os.sep):
            short = path[len(root) + 1 :].replace(os.sep, "/")
            return short, _category(short, is_stdlib=root == paths["stdlib"])
    return Path(path).name, _category(path, is_stdlib=path.startswith("<frozen"))


def _category(short: str, *, is_stdlib: bool) -> str:
    top = short.split("/")[0]
    if top in PACKAGES:
        return "ours"
    if top in ("numpy", "scipy_openblas64_") or "openblas" in short or "multiarray" in short:
        return "numpy"
    return "native" if re.search(r"\.(so|c|cpp|h|S)\b|^lib", short) else "stdlib" if is_stdlib else "other"


def find_py_spy() -> str:
    """Return the path of py-spy, next to this interpreter or on PATH; raise if it may not sample this process."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        remedy = "pip install 'llm-worker-rbee[bench]', or leave out --py-spy"
        raise MissingDependencyError(f"py-spy is not installed: {remedy}")
    command = [found, "dump", "--nonblocking", "--pid", str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=60)
    if done.returncode:
        raise _py_spy_error(done.stderr)
    return found


def _record_py_spy(function: Callable[[], object], seconds: float, py_spy: PySpy) -> Flame:
    rate = round(1 / INTERVAL_S)
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "stacks"
        command = [py_spy.path, "record", "--pid", str(os.getpid()), "--format", "raw", "--rate", str(rate)]
        command += ["--output", str(raw), "--duration", str(max(1, round(seconds)))]
        command.append("--native" if py_spy.native else "--nonblocking")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            while process.poll() is None:
                _call_marked(function)
        finally:
            process.kill()
            stderr = process.communicate()[1]
        if process.returncode or not raw.exists():
            raise _py_spy_error(stderr)
        return _parse_collapsed(raw.read_text(errors="replace").splitlines(), 1 / rate)


def _py_spy_error(stderr: str) -> WorkerError:
    if re.search("permi|ptrace|EPERM|root", stderr, re.IGNORECASE):
        return WorkerError(
            "py-spy may not sample this process: run as root, allow ptrace (CAP_SYS_PTRACE, or "
            "kernel.yama.ptrace_scope = 0), or leave out --py-spy"
        )
    lines = [line for line in stderr.splitlines() if line.strip()]
    return WorkerError(f"py-spy failed: {lines[-1] if lines else 'it wrote nothing'}")


def _parse_collapsed(lines: Iterable[str], weight: float) -> Flame:
    """Parse py-spy's collapsed stacks: `frame;frame;frame count`, the root first."""
    samples = Flame()
    for line in lines:
        text, _, count = line.rpartition(" ")
        frames = text.split(";")
        below = [i for i, one in enumerate(frames) if one.startswith(f"{_call_marked.__name__} (")]
        if below and count.isdigit() and frames[below[-1] + 1 :]:
            samples += [(tuple(map(_parse_frame, frames[below[-1] + 1 :])), weight)] * int(count)
    return samples


@cache
def _parse_frame(text: str) -> Frame:
    found = RAW_FRAME.fullmatch(text)
    if found is None:
        return Frame(text, "", 0, "native")
    category = _category(found["file"], is_stdlib=found["file"].endswith(".py"))
    return Frame(found["name"], found["file"], int(found["line"] or 0), category)


def speedscope(flames: Mapping[str, Flame], title: str) -> dict[str, Any]:
    """Return the object that https://www.speedscope.app opens, with one profile for each phase."""
    numbers: dict[Frame, int] = {}
    profiles = []
    for name, flame in flames.items():
        samples = [[numbers.setdefault(frame, len(numbers)) for frame in stack] for stack, _ in flame]
        weights = [weight for _, weight in flame]
        span = {"unit": "seconds", "startValue": 0, "endValue": sum(weights)}
        profiles.append({"type": "sampled", "name": name, **span, "samples": samples, "weights": weights})
    frames = [{"name": f.name, "file": f.file, "line": f.line} if f.file else {"name": f.name} for f in numbers]
    head = {"$schema": SCHEMA, "name": title, "exporter": f"llm-worker-rbee {__version__}", "activeProfileIndex": 0}
    return {**head, "shared": {"frames": frames}, "profiles": profiles}


WIDTH, MARGIN, ROW, TOP, BOTTOM = 1200, 10, 18, 58, 28
LETTER_WIDTH = 6.7  # pixels
MIN_SHARE = 0.001  # of the time: narrower frames are left out
# category -> (text of the legend, hue, saturation, lightness); shades of it tell neighbours apart
CATEGORIES = {
    "ours": ("llm_worker_rbee", 28, 85, 66),
    "line": ("its source lines", 46, 90, 74),
    "numpy": ("NumPy", 210, 62, 74),
    "stdlib": ("standard library", 140, 34, 72),
    "native": ("native code", 275, 40, 78),
    "component": ("components", 340, 55, 74),
    "kernel": ("their kernels", 5, 68, 70),
    "other": ("other", 0, 0, 78),
}
ROOT = Frame("all", "", 0, "other")
STYLE = Path(__file__).with_name("flame_graph.css").read_text(encoding="utf-8")
# Each frame carries its place as fractions of the whole (data-x, data-w), its depth and its name.
SCRIPT = Path(__file__).with_name("flame_graph.js").read_text(encoding="utf-8")


@dataclass(slots=True)
class Node:
    """A frame with the time spent in it, under one chain of callers."""

    frame: Frame
    seconds: float = 0.0
    children: dict[tuple[str, str], Node] = field(default_factory=dict)


def build_tree(flame: Flame) -> Node:
    """Merge stacks with a common beginning."""
    root = Node(ROOT)
    for stack, weight in flame:
        node = root
        node.seconds += weight
        for frame in stack:
            node = node.children.setdefault((frame.name, frame.file), Node(frame))
            node.seconds += weight
    return root


def render_svg(flame: Flame, title: str) -> str:
    """Return an SVG that also works inside HTML: no `<` or `&` in its script, and styles begin with `.flame`."""
    root = build_tree(flame)
    whole = root.seconds or 1.0
    rows = [one for one in _layout(root, 0.0, 0) if one[0].seconds / whole >= MIN_SHARE or one[2] == 0]
    height = TOP + (1 + max(level for _, _, level in rows)) * ROW + BOTTOM
    script = SCRIPT.replace("SPAN", str(WIDTH - 2 * MARGIN)).replace("MARGIN", str(MARGIN))
    lines = [
        f'<svg class="flame" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(title)}">',
        f"<style>\n{STYLE}</style>",
        f'<text class="head" x="{MARGIN}" y="22">{escape(title)}</text>',
        *_legend({node.frame.category for node, _, level in rows if level}),
        *(_frame_svg(node, left, level, whole, height) for node, left, level in rows),
        f'<text class="note" x="{MARGIN}" y="{height - 8}">{len(flame):,} samples, {whole:.2f} s · '
        "hover for a frame in full, click to zoom, click the lowest bar to zoom out</text>",
        f"<script>\n{script.replace('LETTER', str(LETTER_WIDTH))}</script>",
    ]
    return "\n".join([*lines, "</svg>\n"])


def _layout(node: Node, left: float, level: int) -> Iterator[tuple[Node, float, int]]:
    """Yield (node, seconds to its left, row), callees by name so that the same code looks the same in two graphs."""
    yield node, left, level
    for one in sorted(node.children.values(), key=lambda n: (n.frame.name, n.frame.file)):
        yield from _layout(one, left, level + 1)
        left += one.seconds


def _frame_svg(node: Node, left: float, level: int, whole: float, height: int) -> str:
    span = WIDTH - 2 * MARGIN
    x, wide = MARGIN + span * left / whole, span * node.seconds / whole
    y = height - BOTTOM - (level + 1) * ROW
    frame, letters = node.frame, int((wide - 8) / LETTER_WIDTH)
    shown = frame.name if len(frame.name) <= letters else frame.name[: letters - 1] + "…" if letters > 2 else ""
    where = f" · {frame.file}:{frame.line}" if frame.file else ""
    title = f"{frame.name}{where}\n{node.seconds * 1e3:,.1f} ms, {node.seconds / whole:.1%}"
    return (
        f'<g class="frame" data-x="{left / whole:.6f}" data-w="{node.seconds / whole:.6f}" data-d="{level}" '
        f'data-n="{escape(frame.name)}"><title>{escape(title)}</title>'
        f'<rect x="{x:.2f}" y="{y}" width="{max(0.3, wide - 0.5):.2f}" height="{ROW - 1}" rx="2" '
        f'fill="{_frame_colour(frame)}"/><text x="{x + 4:.2f}" y="{y + 12}">'
        f"{escape(shown)}</text></g>"
    )


def _frame_colour(frame: Frame) -> str:
    _, hue, saturation, lightness = CATEGORIES.get(frame.category, CATEGORIES["other"])
    shade = zlib.crc32(frame.name.encode()) % 9 - 4  # the same in every run
    return f"hsl({hue + shade * (saturation > 0)} {saturation}% {lightness + shade}%)"


def _legend(categories: set[str]) -> Iterator[str]:
    x = float(MARGIN)
    for words, hue, saturation, lightness in (look for category, look in CATEGORIES.items() if category in categories):
        yield f'<rect x="{x:.0f}" y="34" width="12" height="12" rx="2" fill="hsl({hue} {saturation}% {lightness}%)"/>'
        yield f'<text class="note" x="{x + 17:.0f}" y="44">{words}</text>'
        x += 17 + 6.6 * len(words) + 16
