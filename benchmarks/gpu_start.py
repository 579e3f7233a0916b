"""From a process's start to its first tokens on a GPU, and the memory that it takes there: for cuda_probe.py.

A GGUF of random weights is written to a temporary folder; two processes load it, the first with no kernel compiled, the
second with all of them cached and the file in the page cache. Each then answers batches of many sizes, so that as many
graphs are captured as a server would have. As a program it is one such process: CLOCK (monotonic, at its start) FILE.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENTERED = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
LENGTHS = (5, 40, 130, 300)  # tokens of prompts


def start_figures(shape: str, mix: str, layers: int) -> dict[str, Any]:
    """What two processes tell, one after the other."""
    from llm_worker_rbee.bench.synthetic import parse, write

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        path = write(parse(f"{shape}:{mix}:{layers}"), Path(folder) / "random.gguf")
        found["start: file GB, s to write"] = [round(path.stat().st_size / 1e9, 2), round(time.monotonic() - began, 1)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(Path(folder) / "kernels")}
        for name in ("nothing compiled", "kernels cached"):
            command = [sys.executable, str(Path(__file__).resolve()), str(time.monotonic()), str(path)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode:
                raise RuntimeError(f"the process that was to start failed: {done.stderr[-2000:]}")
            told = json.loads(done.stdout.splitlines()[-1])
            found |= {f"start, {name}: {key}": value for key, value in told.items()}
    return found


def child(started: float, path: str) -> dict[str, Any]:
    """Load, answer, tell."""
    from llm_worker_rbee.backends import cuda_probe
    from llm_worker_rbee.llm import LLM

    imported = time.monotonic()
    llm = LLM(path, device="cuda")
    ready = time.monotonic()
    stream = llm.stream([3, 4, 5], max_tokens=8, temperature=0, ignore_eos=True)
    arrivals = [time.monotonic() for _ in stream]
    phases = {"interpreter": ENTERED - started, "import": imported - ENTERED, **llm.phases}
    rest = ready - imported - sum(llm.phases.values())  # room for keys and values
    phases |= {"rest": rest, "first token": arrivals[0] - ready, "the 7 after it": arrivals[-1] - arrivals[0]}
    times = [round(t - started, 2) for t in (ready, arrivals[0], arrivals[-1])]
    weights = cuda_probe.packed_bytes(llm.checkpoint)
    told = {
        "s to ready, to the first token, to the eighth": times,
        "phases, s": {name: round(seconds, 2) for name, seconds in phases.items()},
        "memory": memory(llm, weights),
    }
    answer_many(llm)
    return {**told, "memory after batches of many sizes": memory(llm, weights)}


def answer_many(llm: Any) -> None:
    """Each batch twice, so that it is captured; answers end one after the other, prompts are read beside answers."""
    for n in (1, 3, 7, 16, 30, 64):
        for _ in range(2):
            prompts = [[3 + (i + j) % 1000 for j in range(LENGTHS[i % 4])] for i in range(n)]
            options = {"temperature": 0, "ignore_eos": True}
            streams = [llm.stream(p, max_tokens=4 + i % 13, **options) for i, p in enumerate(prompts)]
            for stream in streams:
                stream.completion()


def memory(llm: Any, weights: int) -> dict[str, Any]:
    """GB, the highest so far; `spare` is what the process took beside weights, keys and values, by the driver's count:
    the aim is 1 GiB (1.07 GB). Other processes on the GPU count as its own."""
    import torch

    free, total = torch.cuda.mem_get_info()
    planned = weights + llm.capacity.bytes
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    taken = total - free - torch.cuda.memory_reserved() + reserved  # the allocator may have given some back
    sizes = {
        "weights": weights, "keys and values": llm.capacity.bytes, "tensors at most": allocated,
        "of the driver at most": taken, "spare": taken - planned, "tensors beside": allocated - planned,
        "graphs": llm.graph_bytes,
    }  # fmt: skip
    found: dict[str, Any] = {name: round(size / 1e9, 3) for name, size in sizes.items()}
    graphs = getattr(llm.model.fused, "graphs", ())
    return {**found, "number of graphs": len(graphs), "within 1 GiB": taken - planned <= GIB}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(json.dumps(child(float(sys.argv[1]), sys.argv[2])))
