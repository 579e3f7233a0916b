"""docs/pictures/speed.svg: tokens per second of this worker and of llama.cpp, from the saved runs of `bench peers`.

A bar is as long as the ratio of both, the grey bar below it is llama.cpp at 1; the figures stand next to them. The data
is inside the picture, under `metadata`, as JSON.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llm_worker_bench.results import Result, Run

from .benchmarks import OURS, machine_name, number, uses_gpu

Runs = Mapping[str, Run]
# rows of runs -> what the chart calls them
MODELS = {
    r"default|smollm2-135m:Q4_1|SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M, Q4_1",
    r"requests": "SmolLM2-135M, Q4_1",
    r"coder-0.5b": "Qwen2.5-Coder-0.5B, Q4_K_M",
    r"coder-1.5b": "Qwen2.5-Coder-1.5B, Q4_K_M",
    r"7b-q4_k_m|llama2-7b:Q4_K_M:4": "Llama-2-7B, 4 of 32 layers, Q4_K_M",
    r"7b-q8_0|llama2-7b:Q8_0:4": "Llama-2-7B, 4 of 32 layers, Q8_0",
    r"llama2-7b[:-]Q4_K_M(-32)?(\.gguf)?": "Llama-2-7B, 32 layers, Q4_K_M",
}
WIDTH, LEFT, RIGHT, ROW, BAR, TOP = 880, 330, 165, 34, 13, 74
INK, SOFT, OURS_COLOUR, PEER_COLOUR = "#0f172a", "#64748b", "#2563eb", "#cbd5e1"


def chart_data(runs: Runs) -> list[dict[str, Any]]:
    """Return the rows of the chart: machine, label, tokens per second of both, their ratio."""
    rows = []
    for name, run in runs.items():
        if run.kind != "peers":
            continue
        values = {result.name: result for result in run.results}
        for key, result in values.items():
            task, _, peer = key.rpartition("/")
            ours = values.get(f"{task}/{OURS}")
            label = _label(task, str((run.model or {}).get("name", "")))
            if not peer.startswith("llama-") or ours is None or label is None:
                continue
            rows.append({
                "machine": _machine(run), "label": label, "this_worker": _rounded(ours), "llama_cpp": _rounded(result),
                "ratio": round(float(result.fields["ours_over_peer"]), 3), "date": run.created[:10],
                "commit": "" if run.commit is None else str(run.commit["id"])[:7], "run": name, "command": run.command,
            })  # fmt: skip
    return rows


def _rounded(result: Result) -> float:
    return float(f"{result.estimate:.4g}")


def _machine(run: Run) -> str:
    name = machine_name(run)
    return name.partition(" (")[0] if uses_gpu(run) else f"{name.partition(',')[0]}, {run.settings['threads']} threads"


def _label(task: str, model_file: str) -> str | None:
    """Return `Llama-2-7B shape, Q4_K_M: decode`, or None for a row that the chart leaves out.

    A run of one file does not repeat its name in each task.
    """
    found = re.fullmatch(r"(?:(\S+) )?(pp|tg)(\d+)(?:@b(\d+))?", task)
    if found is None:
        return None
    row, phase, tokens, batch = found[1] or model_file, found[2], int(found[3]), found[4]
    model = next((label for pattern, label in MODELS.items() if re.fullmatch(pattern, row)), None)
    if model is None:
        return None
    what = f"prefill of {tokens:,}" if phase == "pp" else "decode"
    return f"{model}: {what}" + (f", {batch} requests" if batch else "")


def svg(runs: Runs) -> str:
    """Return the picture."""
    rows = chart_data(runs)
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    longest = max((row["ratio"] for row in rows), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts, y = [], float(TOP)
    for machine in machines:
        own = [row for row in rows if row["machine"] == machine]
        when = ", ".join(dict.fromkeys(f"{row['date']}, commit {row['commit']}" for row in own))
        parts.append(_text(20, y, machine, 14, INK, bold=True))
        parts.append(_text(WIDTH - 20, y, when, 11, SOFT, anchor="end"))
        y += 14
        for row in own:
            parts += _bars(row, y, scale)
            y += ROW
        y += 30
    height = round(y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" role="img" '
        'aria-label="Tokens per second of this worker relative to llama.cpp">'
    )
    data = html.escape(json.dumps(rows, indent=0, ensure_ascii=False), quote=False)
    return "\n".join([
        head, f"<metadata>{data}</metadata>", f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(20, 28, "Tokens per second, this worker and llama.cpp", 17, INK, bold=True),
        _text(20, 48, "relative to llama.cpp on the same machine and file, measured in turn in one run", 12, SOFT),
        _bar(WIDTH - 230, 19, 22, BAR, OURS_COLOUR), _text(WIDTH - 202, 30, "this worker", 12, INK),
        _bar(WIDTH - 110, 22, 22, BAR / 2, PEER_COLOUR), _text(WIDTH - 82, 30, "llama.cpp", 12, INK),
        *parts, "</svg>",
    ])  # fmt: skip


def _bars(row: Mapping[str, Any], y: float, scale: float) -> list[str]:
    ratio, middle = float(row["ratio"]), y + ROW / 2
    figures = f"{number(row['this_worker'])} / {number(row['llama_cpp'])} tok/s"
    end = LEFT + max(ratio, 1) * scale + 8
    return [
        _text(LEFT - 10, middle + 4, row["label"], 12, INK, anchor="end"),
        _bar(LEFT, middle - BAR, ratio * scale, BAR, OURS_COLOUR),
        _bar(LEFT, middle + 2, scale, BAR / 2, PEER_COLOUR),
        _text(end, middle - 2, f"{ratio:.2f}x", 13, INK, bold=True),
        _text(end, middle + 12, figures, 11, SOFT),
    ]


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{colour}"/>'


def _text(x: float, y: float, text: str, size: int, colour: str, *, anchor: str = "start", bold: bool = False) -> str:
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"' + ' font-weight="bold"' * bold
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text, quote=False)}</text>'


def embedded_data(picture: str) -> Sequence[Mapping[str, Any]]:
    """Return the data inside a picture."""
    found = re.search(r"<metadata>(.*?)</metadata>", picture, re.DOTALL)
    return json.loads(html.unescape(found[1])) if found else []
