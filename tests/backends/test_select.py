"""Selecting a device where there is no GPU, or an unsuitable one: errors name the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.backends import resolve_kv_type, select, select_backend
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.config import KV_CUDA, KV_ON_CUDA
from llm_worker_rbee.engine.memory_plan import fallback_to_cpu
from llm_worker_rbee.errors import InvalidRequestError, MissingDependencyError
from llm_worker_rbee.weights import open_checkpoint

cpu = CpuBackend()

ROOT = Path(__file__).parents[2]


class Device:
    """The part of a GPU backend that the selection reads."""

    has_device_memory, kv_types, default_kv_type = True, KV_ON_CUDA, KV_CUDA

    def __init__(self, free: int) -> None:
        self.free = free

    def free_memory(self) -> int:
        return self.free


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a child process: whether PyTorch was imported belongs to a process."""
    dropped = ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return subprocess.run(
        [sys.executable, "-c", code], env={**kept, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_select_cuda_without_packages_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "REQUIRED_PACKAGES", ("no_such_package", "numpy"))
    for names in (("cuda", "auto"), ("cuda:1", "cuda"), ("auto", "cuda")):
        with pytest.raises(MissingDependencyError) as caught:
            select_backend(*names)
        assert "needs no_such_package: pip install 'llm-worker-rbee[cuda]'" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_select_cuda_without_gpu_raises() -> None:
    if select.missing_packages() or select.has_driver():
        pytest.skip("PyTorch and Triton and no GPU are needed")
    done = run_python("from llm_worker_rbee.backends import select_backend; select_backend('cuda')")
    line = done.stderr.strip().splitlines()[-1]
    assert "MissingDependencyError: device 'cuda': PyTorch" in line
    assert "build without CUDA" in line or "finds no NVIDIA GPU" in line
    assert "use device cpu" in line


def test_select_auto_without_gpu_does_not_import_torch() -> None:
    code = (
        "import sys; from llm_worker_rbee.backends import select_backend as s; print(s().name, 'torch' in sys.modules)"
    )
    done = run_python(code, CUDA_VISIBLE_DEVICES="")
    assert (done.stdout.split(), done.stderr) == (["cpu", "False"], "")


def test_has_driver_respects_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sign = tmp_path / "nvidia0"
    monkeypatch.setattr(select, "DRIVER_FILES", (str(sign),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not select.has_driver()
    sign.touch()
    assert select.has_driver()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not select.has_driver()


def test_fallback_to_cpu_if_gpu_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small: Any = Device(2 * 10**9)
    backend, note = fallback_to_cpu(small, 10**9)
    assert isinstance(backend, CpuBackend)
    assert note == "the GPU has 2.00 GB of memory free, and the model takes 2.07 GB: computing on the CPU"
    assert fallback_to_cpu(small, 9 * 10**8) == (small, None)
    monkeypatch.setattr(select, "DRIVER_FILES", ())
    assert fallback_to_cpu(cpu, 10**15) == (cpu, None)


def test_gpu_without_packages_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "DRIVER_FILES", ("/",))
    monkeypatch.setattr(select, "REQUIRED_PACKAGES", ("no_such_package",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert isinstance(select_backend(), CpuBackend)
    assert fallback_to_cpu(cpu, 1)[1] == "there is an NVIDIA GPU; to compute on it: pip install 'llm-worker-rbee[cuda]'"


@pytest.mark.parametrize(
    ("device", "backend", "message"),
    [
        ("cuda:x", "auto", "unknown device 'cuda:x': a GPU is cuda, or cuda:N"),
        ("cuda:", "auto", "unknown device 'cuda:'"),
        ("cuda:-1", "auto", "unknown device 'cuda:-1'"),
        ("cpu:1", "auto", "unknown device 'cpu:1'"),
        ("cudax", "auto", "unknown device 'cudax': use one of auto, cpu, cuda, cuda:N"),
        ("cuda", "reference", "backend 'reference' computes on the CPU"),
        ("cuda", "cpu", "backend 'cpu' computes on the CPU"),
        ("cpu", "cuda", "backend 'cuda' computes on a GPU"),
    ],
)
def test_select_incompatible_device_and_backend_raises(device: str, backend: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        select_backend(device, backend)


def test_select_cuda_with_threads_raises() -> None:
    with pytest.raises(InvalidRequestError, match="threads sets the threads of CPU kernels"):
        select_backend("cuda", threads=2)


def test_resolve_kv_type_per_backend() -> None:
    device: Any = Device(0)
    assert [resolve_kv_type(ops) for ops in (cpu, ReferenceBackend(), device)] == ["float16", "float32", "bfloat16"]
    assert resolve_kv_type(device, "float8") == "float8"
    with pytest.raises(InvalidRequestError, match="kv_type float8 is not for the CPU: use one of auto, float32"):
        resolve_kv_type(cpu, "float8")
    with pytest.raises(InvalidRequestError, match="kv_type int8 is not for a GPU: use one of auto, bfloat16"):
        resolve_kv_type(device, "int8")
    with pytest.raises(InvalidRequestError, match="unknown kv_type 'int4'"):
        resolve_kv_type(device, "int4")


def test_packed_bytes_estimates_checkpoint(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    assert checkpoint.nbytes <= select.packed_bytes(checkpoint) <= 1.3 * checkpoint.nbytes
