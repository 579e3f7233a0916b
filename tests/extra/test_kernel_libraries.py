"""The library of every instruction set of this kind of machine: built, opened without Numba, the same bits as kernels
that are compiled here.

Run by `make test-extra`. A set that the processor lacks runs under qemu-aarch64 on Arm; QEMU has no AVX-512 or AMX.
Building takes about three minutes a set on two cores.
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
from tests.backends.cpu.test_emulated_arm import EMULATOR, SCRIPT

ROOT = Path(__file__).parents[2]
# Processors of QEMU that have no more than the instruction set.
EMULATED = {"neon_i8mm": "max", "neon_dotprod": "neoverse-n1", "neon": "cortex-a72"}
ISAS = [name for name in cpu_info.INSTRUCTION_SETS if name.startswith("neon") == machine.is_arm()]
WITHOUT_NUMBA = f"""
import sys
from pathlib import Path
sys.modules["numba"] = sys.modules["llvmlite"] = None
from llm_worker_rbee.backends import kernel_library
kernel_library.FOLDER = Path(sys.argv.pop())
{SCRIPT}"""


def run(isa: str, *command: str, **variables: str) -> Any:
    """Return what the script prints: the instruction set, and digests of results by name."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), cpu_info.ISA_VARIABLE: isa, cpu_info.THREADS_VARIABLE: "1"}
    done = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """Return the digests of kernels that are compiled here."""
    isa = cpu_info.current_isa()
    digests: dict[str, str] = run(isa, sys.executable, "-c", SCRIPT, "run", LLM_WORKER_PREBUILT="0")[1]
    return digests


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("isa", [name for name in ISAS if name != "portable"])
def test_library_gives_the_bits_of_compiled_kernels(isa: str, expected: dict[str, str], tmp_path: Path) -> None:
    emulate: list[str] = []
    if isa not in cpu_info.available_isas():
        if not (machine.is_arm() and EMULATOR):
            pytest.skip(f"this processor has no {isa}, and there is no emulator for it")
        emulate = [EMULATOR, "-cpu", EMULATED[isa]]
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("there is no C compiler to link with")
    tool = [sys.executable, str(ROOT / "tools" / "build_kernels.py"), isa, "--out", str(tmp_path)]
    subprocess.run(tool, check=True, capture_output=True)
    assert run(isa, *emulate, sys.executable, "-c", WITHOUT_NUMBA, "run", str(tmp_path)) == [isa, expected]
