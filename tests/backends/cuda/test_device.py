"""Choosing a GPU, with PyTorch patched, and planning its memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llm_worker_rbee import backends
from llm_worker_rbee.backends import select
from llm_worker_rbee.backends.cuda import CudaBackend, device, precompile, repack
from llm_worker_rbee.config import DEVICE_SPARE_BYTES, LoadOptions
from llm_worker_rbee.engine.memory_plan import device_weight_bytes, place_model
from llm_worker_rbee.errors import InsufficientMemoryError, InvalidRequestError, MissingDependencyError
from llm_worker_rbee.weights.quants import ALL_TYPES
from tests.helpers import cuda_models
from tests.helpers.random_tensors import random_tensor

cuda = CudaBackend()
DEVICE = cuda.torch_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two GPUs; the second has more free memory."""
    monkeypatch.setattr(device, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (10 * (i + 1), 100))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA X")
    return monkeypatch


def test_select_gpu_takes_index_or_most_free(two_gpus: pytest.MonkeyPatch) -> None:
    assert (device.select_gpu(0), device.select_gpu(1), device.select_gpu(None)) == (0, 1, 1)


def test_select_gpu_missing_index_raises(two_gpus: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="'cuda:7' does not exist: this machine has 2 GPUs, cuda:0 to cuda:1"):
        device.select_gpu(7)
    two_gpus.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidRequestError, match="'cuda:7' does not exist: this machine has 1 GPU, cuda:0"):
        device.select_gpu(7)


def test_select_gpu_old_capability_raises(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(torch.cuda, "get_device_capability", lambda i: (7, 5))
    with pytest.raises(MissingDependencyError, match=r"NVIDIA X has compute capability 7\.5, and .* 8\.0 or newer"):
        device.select_gpu(0)


def test_select_gpu_without_gpu_raises(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDependencyError, match="finds no NVIDIA GPU: check the driver"):
        device.select_gpu(None)
    two_gpus.setattr(torch.version, "cuda", None)
    with pytest.raises(MissingDependencyError, match="is a build without CUDA: install one with it"):
        device.select_gpu(None)


@pytest.mark.skipif(not device.is_interpreted(), reason="under the interpreter there is no GPU to look for")
def test_gpu_without_e4m3_has_no_float8_kv_cache(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(torch.cuda, "get_device_capability", lambda i: (8, 6))
    two_gpus.setattr(device, "open_device", lambda index: torch.device("cuda", 0))
    two_gpus.setattr(precompile, "open_cache", lambda capability: None)
    found = CudaBackend()
    assert found.kv_types == ("bfloat16", "float16", "float32")
    with pytest.raises(InvalidRequestError, match="kv_type float8 is not for this GPU: use one of auto, bfloat16"):
        select.resolve_kv_type(found, "float8")
    assert "float8" in cuda.kv_types
    assert not device.has_pdl(torch.device("cuda", 1))


def test_select_backend_under_interpreter_is_cuda() -> None:
    assert isinstance(backends.select_backend("cuda"), CudaBackend)
    assert isinstance(backends.select_backend("auto", "cuda"), CudaBackend)
    assert not isinstance(backends.select_backend("cpu"), CudaBackend)


@pytest.mark.parametrize("name", ALL_TYPES)
def test_bits_table_matches_packed_size(name: str) -> None:
    packed = repack.pack_weight([random_tensor(name, 8, 512, np.random.default_rng(0))], DEVICE)
    assert packed.nbytes * 8 == pytest.approx(select.PACKED_BITS.get(name, 32.0) * 8 * 512, rel=1e-3)


def test_auto_falls_back_to_cpu_if_kv_cache_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights fit, the KV cache does not; with `device cuda` it is an error instead."""
    models = [cuda_models.random_checkpoint(cuda_models.GROUPED, "F16")]
    free = device_weight_bytes(models, LoadOptions()) + DEVICE_SPARE_BYTES + 100
    monkeypatch.setattr(CudaBackend, "free_memory", lambda self: free)
    automatic = LoadOptions(max_batch=4)
    ops, kv_type, capacity, limits, notes, rows = place_model(cuda, models, automatic)
    assert {row.memory for row in rows} == {"host"}
    assert ops.name == "cpu"
    assert (kv_type, capacity.n_blocks > 0, limits) == ("float16", True, (4, 512))
    assert [note.startswith("the GPU is not used: ") for note in notes] == [True]
    with pytest.raises(InsufficientMemoryError):
        place_model(cuda, models, replace(automatic, device="cuda"))
    free += 1 << 30
    assert place_model(cuda, models, automatic)[0] is cuda


def test_device_bytes_uses_quantized_type() -> None:
    models = [cuda_models.random_checkpoint(cuda_models.GROUPED, "F16")]
    as_they_are, quantized = (device_weight_bytes(models, LoadOptions(quantize=kind)) for kind in (None, "Q4_0"))
    assert as_they_are == select.packed_bytes(models[0])
    # 4.5 bits of 16, and 8.5 for the head; rows of 128 columns have room for 256
    assert 0.25 < quantized / as_they_are < 0.6
