"""The parts of gpu.py in processes of their own, so that a crash in one does not spoil the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MIXES = ("Q4_K_M", "Q4_0", "Q8_0", "BF16", "FP8")
START_ONLY = "start"


def apart(given: list[str], result: dict[str, Any]) -> None:
    """A process for every mix, one for the start and one for the file. Before them two for each mix, all at once: one
    that checks, and one that compiles, on one layer, what the others will find compiled."""
    checking = [started("", [*given, "--checks", mix], hidden=("OUT", "GPU_MODEL")) for mix in MIXES]
    compiling = [started(mix, [*given, "--layers", "1", "--checks", "none"]) for mix in MIXES]
    for child in (*checking, *compiling):
        text, _ = child.communicate()
        if child in checking:
            print(*(line for line in text.splitlines() if "check" in line), sep="\n", flush=True)
        keep(result, child.args, text, only="check")
    for mix in [*MIXES, *([] if "--quick" in given else [START_ONLY]), *([""] if os.environ.get("GPU_MODEL") else [])]:
        child, lines = started(mix, [*given, "--checks", "none"]), []
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if not line.startswith("{"):
                print(line, end="", flush=True)
        child.wait()
        keep(result, child.args, "".join(lines))


def started(mix: str, given: list[str], hidden: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A process for one mix; for the file where there is none."""
    hidden = hidden or (("OUT", "GPU_MODEL") if mix else ("OUT",))
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, str(Path(__file__).with_name("gpu.py").resolve()), *given, "--only", mix, "--part"]
    return subprocess.Popen(command, env=kept, stdout=subprocess.PIPE, text=True)


def keep(result: dict[str, Any], command: Any, text: str, only: str = "") -> None:
    """The figures of a process, those that begin with `only`; what failed is added up."""
    last = (text.splitlines() or [""])[-1]
    found: dict[str, Any] = json.loads(last) if last.startswith("{") else {"failed": [" ".join(command[2:])]}
    failed = [*result.get("failed", []), *found.pop("failed", [])]
    result.update({name: value for name, value in found.items() if name.startswith(only)})
    if failed:
        result["failed"] = failed
