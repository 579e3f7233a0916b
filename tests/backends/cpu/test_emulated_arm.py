"""Arm processors that the test machine is not, under QEMU: their detection, no illegal instruction, the same bits.

Run by `make test-extra` on Arm where qemu-aarch64-static (Debian's qemu-user-static 7.2 was used) or qemu-aarch64 is
installed. Kernels are compiled outside the emulator, for the processor that it will emulate, and run inside, from the
cache on disk. Speeds of emulated rows say nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import machine
from llm_worker_rbee.backends import cpu_info
from llm_worker_rbee.pipe_process import describe_exit

ROOT = Path(__file__).parents[3]
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
pytestmark = pytest.mark.skipif(
    not (os.environ.get("LLM_WORKER_EMULATE") and EMULATOR and machine.is_arm()),
    reason="needs LLM_WORKER_EMULATE=1, an Arm machine and qemu-aarch64",
)

SCRIPT = """
import hashlib, json, sys
from llm_worker_rbee import machine
if sys.argv[1] == "compile":  # for the processor with these features; nothing compiled is run
    machine.cpu_features = lambda: sys.argv[2].split(",")
import numpy as np
from llm_worker_rbee.backends.cpu import CpuBackend, precompile
from llm_worker_rbee.backends.cpu.kernels.dot_int8 import ISA
from tests.helpers import synthetic
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.weights.quants import BLOCK_TYPES

TYPES = "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q6_K", "IQ4_NL", "BF16"
if sys.argv[1] == "compile":
    precompile.load_kernels(precompile._kernels_for(TYPES, [3], ["float16"]))
    print(json.dumps([ISA, {}]))
    sys.exit()
cpu, digests = CpuBackend(1), {}

def add(name, array):
    assert np.isfinite(array).all(), name
    digests[name] = hashlib.sha256(np.ascontiguousarray(array)).hexdigest()

x = np.random.default_rng(1).standard_normal((21, 512), np.float32)
for name in TYPES:
    w = cpu.prepare([synthetic.random_tensor(BLOCK_TYPES[name], (40, 512))])
    for tokens in (1, 3, 21):
        add(f"{name} x {tokens}", cpu.linear(x[:tokens], w))
    if name != "BF16":
        add(f"{name} two-term", cpu.linear(x, w.two_term()))
checkpoint = synthetic.checkpoint(synthetic.parse("smollm2-135m:Q4_1:1"))
model = load_model(checkpoint, cpu, read_model_config(checkpoint), 64)
ids = np.random.default_rng(2).integers(0, 49152, 24).tolist()
request = Request(ids, SamplingParams().resolve(), 1, 0, frozenset())
runner = SingleSequence(model, len(ids), "float16")
for chunk in (21, 1, 1, 1):
    add(f"model {request.num_computed_tokens}", runner.step(request, chunk))
print(json.dumps([ISA, digests]))
"""


def run(*command: str, cache: Path, env: dict[str, str]) -> Any:
    """Return what the script prints: the instruction set, and digests of results by name."""
    dropped = (cpu_info.ISA_VARIABLE, "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
    settings = {key: value for key, value in os.environ.items() if key not in dropped}
    settings |= {"PYTHONPATH": str(ROOT), "LLM_WORKER_KERNEL_CACHE": str(cache), cpu_info.THREADS_VARIABLE: "1", **env}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{describe_exit(done.returncode)}: {done.stderr[-2000:]}"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the digests of this machine's own instruction set."""
    cache = tmp_path_factory.mktemp("kernels")
    return run(sys.executable, "-c", SCRIPT, "run", cache=cache, env={})[1]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("cpu", "isa", "env"),
    [
        ("max", "neon_i8mm", {}),
        # what LLVM makes of a processor with SVE
        ("max", "neon_i8mm", {"NUMBA_CPU_NAME": "neoverse-v2", "NUMBA_CPU_FEATURES": "+dotprod,+i8mm"}),
        ("neoverse-n1", "neon_dotprod", {}),
        ("cortex-a72", "neon", {"NUMBA_CPU_NAME": "cortex-a72", "NUMBA_CPU_FEATURES": "+neon"}),
    ],
)
def test_emulated_processor_gives_the_same_bits(
    cpu: str, isa: str, env: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    emulate = [str(EMULATOR), "-cpu", cpu, sys.executable, "-c"]
    features = "from llm_worker_rbee import machine; import json; print(json.dumps(machine.cpu_features()))"
    found = run(*emulate, features, cache=tmp_path, env=env)
    compiled, _ = run(sys.executable, "-c", SCRIPT, "compile", ",".join(found), cache=tmp_path, env=env)
    assert compiled == isa
    assert run(*emulate, SCRIPT, "run", cache=tmp_path, env=env) == [isa, expected]
