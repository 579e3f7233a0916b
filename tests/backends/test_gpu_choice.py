"""Which device is picked where there is no GPU, or one that does not do: errors name the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.backends import cuda_probe, fallback_to_cpu, resolve_kv_type, select_backend
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.config import KV_CUDA, KV_ON_CUDA
from llm_worker_rbee.errors import InvalidRequestError, MissingDependencyError
from llm_worker_rbee.weights import open_checkpoint

cpu = CpuBackend()

ROOT = Path(__file__).parents[2]


class Device:
    """What the choice asks of a backend on a GPU: its name, and what is free there."""

    has_device_memory, kv_types, default_kv_type = True, KV_ON_CUDA, KV_CUDA

    def __init__(self, free: int) -> None:
        self.free = free

    def free_memory(self) -> int:
        return self.free


def told_by(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: whether PyTorch is there, and was imported, belongs to a process."""
    dropped = ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return subprocess.run(
        [sys.executable, "-c", code], env={**kept, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_without_the_extra_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_probe, "PACKAGES", ("no_such_package", "numpy"))
    for asked in (("cuda", "auto"), ("cuda:1", "cuda"), ("auto", "cuda")):
        with pytest.raises(MissingDependencyError) as caught:
            select_backend(*asked)
        assert "needs no_such_package: pip install 'llm-worker-rbee[cuda]'" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_with_pytorch_but_no_gpu_it_says_so() -> None:
    if cuda_probe.missing_packages() or cuda_probe.is_seen():
        pytest.skip("PyTorch and Triton are wanted here, and no GPU")
    done = told_by("from llm_worker_rbee.backends import select_backend; select_backend('cuda')")
    line = done.stderr.strip().splitlines()[-1]
    assert "MissingDependencyError: device 'cuda': PyTorch" in line
    assert "build without CUDA" in line or "finds no NVIDIA GPU" in line
    assert "use device cpu" in line


def test_auto_without_a_gpu_imports_no_pytorch_and_says_nothing() -> None:
    code = (
        "import sys; from llm_worker_rbee.backends import select_backend as s; print(s().name, 'torch' in sys.modules)"
    )
    done = told_by(code, CUDA_VISIBLE_DEVICES="")
    assert (done.stdout.split(), done.stderr) == (["cpu", "False"], "")


def test_what_hides_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sign = tmp_path / "nvidia0"
    monkeypatch.setattr(cuda_probe, "SIGNS", (str(sign),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not cuda_probe.is_seen()
    sign.touch()
    assert cuda_probe.is_seen()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not cuda_probe.is_seen()


def test_auto_leaves_a_gpu_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small: Any = Device(2 * 10**9)
    ops, told = fallback_to_cpu(small, 10**9)
    assert isinstance(ops, CpuBackend)
    assert told == "the GPU has 2.00 GB of memory free, and the model takes 2.07 GB: computing on the CPU"
    assert fallback_to_cpu(small, 9 * 10**8) == (small, None)
    monkeypatch.setattr(cuda_probe, "SIGNS", ())
    assert fallback_to_cpu(cpu, 10**15) == (cpu, None)


def test_a_gpu_without_the_extra_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_probe, "SIGNS", ("/",))
    monkeypatch.setattr(cuda_probe, "PACKAGES", ("no_such_package",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert isinstance(select_backend(), CpuBackend)
    assert fallback_to_cpu(cpu, 1)[1] == "there is an NVIDIA GPU; to compute on it: pip install 'llm-worker-rbee[cuda]'"


@pytest.mark.parametrize(
    ("device", "backend", "told"),
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
def test_devices_and_backends_that_do_not_go_together(device: str, backend: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        select_backend(device, backend)


def test_threads_are_the_cpus() -> None:
    with pytest.raises(InvalidRequestError, match="threads sets the threads of CPU kernels"):
        select_backend("cuda", threads=2)


def test_each_backend_keeps_keys_and_values_its_own_way() -> None:
    device: Any = Device(0)
    assert [resolve_kv_type(ops) for ops in (cpu, ReferenceBackend(), device)] == ["float16", "float32", "bfloat16"]
    assert resolve_kv_type(device, "float8") == "float8"
    with pytest.raises(InvalidRequestError, match="kv_type float8 is not for the CPU: use one of auto, float32"):
        resolve_kv_type(cpu, "float8")
    with pytest.raises(InvalidRequestError, match="kv_type int8 is not for a GPU: use one of auto, bfloat16"):
        resolve_kv_type(device, "int8")
    with pytest.raises(InvalidRequestError, match="unknown kv_type 'int4'"):
        resolve_kv_type(device, "int4")


def test_the_weights_of_a_file_are_estimated(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    assert checkpoint.nbytes <= cuda_probe.packed_bytes(checkpoint) <= 1.3 * checkpoint.nbytes
