"""Which functions of llama.cpp and mistral.rs take the CPU time of a prefill and of a decode, sampled by Linux `perf`.

    python -m benchmarks.peer_profile --llama-bench PATH --save docs/results/MACHINE/peers-profile.json.gz

Needs `perf` and programs with symbols; mistral.rs is taken from the environment that `bench peers --install mistral.rs`
makes. A process is sampled for some seconds after its model is loaded. The default model and its Q4_0 conversion show
the cost of a type without a SIMD kernel or a repacked layout. docs/peers.md shows the functions with their shares.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from llm_worker_bench.peers import find, library_child
from llm_worker_bench.peers.plan import Row, make_file
from llm_worker_bench.peers.programs import OURS, load_worker
from llm_worker_bench.processes import library_environment
from llm_worker_bench.results import Recorder, Result, describe_model
from llm_worker_rbee.backends.cpu.program import Program
from llm_worker_rbee.weights.hub import locate_model

SECONDS, FREQUENCY, LEAST_SHARE = 5, 499, 0.01
START_S = {"llama-bench": 3.0, "mistral.rs": 0.5}  # until the model is loaded and the first run is under way
TASKS = {"pp128": ("pp", 128), "tg32": ("tg", 32)}


@contextmanager
def llama_bench(program: str, model: Path, threads: int, kind: str, tokens: int) -> Iterator[int]:
    """Run llama-bench over and over; yield its process."""
    lengths = ["-p", str(tokens), "-n", "0"] if kind == "pp" else ["-p", "0", "-n", str(tokens)]
    command = [program, "-m", str(model), "-t", str(threads), "-ngl", "0", "-r", "1000", *lengths]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextmanager
def mistralrs(python: str, model: Path, threads: int, kind: str, tokens: int) -> Iterator[int]:
    """Load the model, then ask for more runs than will be sampled; yield the process."""
    settings = json.dumps({"model": str(model.absolute()), "threads": threads, "context": 256})
    command = [python, "-c", Path(library_child.__file__).read_text(encoding="utf-8"), "mistral.rs", settings]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=library_environment(threads),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        process.stdin.write((json.dumps({"kind": kind, "tokens": tokens}) + "\n").encode() * 1000)
        process.stdin.flush()
        yield process.pid
    finally:
        process.kill()
        process.wait()


def sample(pid: int) -> dict[str, float]:
    """Return the share of each function in the samples of a process."""
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/perf.data"
        command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(FREQUENCY), "-p", str(pid), "-o", data]
        subprocess.run([*command, "--", "sleep", str(SECONDS)], check=True, stdout=subprocess.DEVNULL)
        report = ["perf", "report", "-i", data, "--no-children", "--sort", "dso,symbol", "--stdio", "-t", "|"]
        text = subprocess.run(report, check=True, capture_output=True, text=True).stdout
    return parse(text)


def parse(report: str) -> dict[str, float]:
    """Return function and share of each line `12.34%|library|[.] name`; without a name, the library."""
    found: dict[str, float] = {}
    for share, library, name in re.findall(
        r"^\s*([\d.]+)%\s*\|(\S+)\s*\|\[.\] (.+?)\s*(?:\|.*)?$", report, re.MULTILINE
    ):
        short = library if name.startswith("0x") else shorten(name)
        found[short] = found.get(short, 0.0) + float(share) / 100
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def shorten(name: str) -> str:
    """Return the last two parts of a path of names: `BlockQ4_1::vec_dot_unopt`, generic arguments left out."""
    name = re.sub(r"<([^<>]*) as [^<>]*>", lambda match: match[1], name)
    while (plain := re.sub(r"<[^<>]*>", "", name)) != name:
        name = plain
    parts = [part for part in name.split("::") if part and not re.fullmatch(r"h[0-9a-f]{16}|\{.*\}.*", part)]
    return "::".join(parts[-2:]) or name


def describe_graph(program: str, model: Path) -> dict[str, float]:
    """Return the nodes of llama.cpp's graph for a token, and the bytes of weights that it repacked."""
    command = [program, "-m", str(model), "-ngl", "0", "-p", "0", "-n", "1", "-r", "1", "-v"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    nodes = re.search(r"graph nodes\s*=\s*(\d+)", text)
    repacked = re.search(r"CPU_REPACK model buffer size =\s*([\d.]+) MiB", text)
    return {
        "graph_nodes": float(nodes[1]) if nodes else math.nan,
        "repacked_bytes": float(repacked[1]) * (1 << 20) if repacked else 0.0,
    }


def count_tasks(model: Path, threads: int) -> int:
    """Return the tasks of this worker's program for a token; threads wait for each other after each."""
    counts: list[int] = []
    run = Program.run

    def count(program: Program, *args: Any, **options: Any) -> None:
        counts.append(len(program.tasks))
        run(program, *args, **options)

    settings = {"model": str(model), "context": 64, "device": "cpu", "backend": "cpu", "threads": threads}
    with mock.patch.object(Program, "run", count):
        load_worker(settings)[2]("tg", 2)
    return counts[-1]


def main() -> int:
    """Sample each program on each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", metavar="PATH", required=True)
    parser.add_argument("--save", metavar="FILE", type=Path, required=True)
    parser.add_argument("--threads", metavar="N", type=int, default=2)
    parser.add_argument("--files", metavar="DIR", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    default = locate_model(None)
    recorder = Recorder("peer-profile", {"threads": given.threads, "seconds": SECONDS, "frequency": FREQUENCY})
    recorder.command = "python -m benchmarks.peer_profile --llama-bench llama-bench"
    for row in (Row("default", model=default), Row("q4_0", model=default, converted="Q4_0")):
        model = make_file(row, given.files, lambda *_: None)
        recorder.details.setdefault("models", {})[row.name] = describe_model(model)
        for name, value in describe_graph(given.llama_bench, model).items():
            recorder.add_result(Result.from_samples(f"{row.name}/llama-bench/{name}", "", [value], "lower"))
        tasks = count_tasks(model, given.threads)
        recorder.add_result(Result.from_samples(f"{row.name}/{OURS}/tasks", "", [tasks], "lower"))
        for test, task in TASKS.items():
            for peer, start, program in (
                ("llama-bench", llama_bench, given.llama_bench),
                ("mistral.rs", mistralrs, str(find.environment_python("mistral.rs"))),
            ):
                with start(program, model, given.threads, *task) as pid:
                    time.sleep(START_S[peer])
                    shares = sample(pid)
                for name, share in shares.items():
                    if share >= LEAST_SHARE:
                        full = f"{row.name} {test}/{peer}/{name}"
                        recorder.add_result(Result.from_samples(full, "", [share], "lower"))
                print(row.name, test, peer, dict(list(shares.items())[:4]), flush=True)
    recorder.to_run().save(given.save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
