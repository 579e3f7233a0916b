"""Which GPU is used: PyTorch's answers are set here, what we make of them is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from llm_worker_rbee import backends, load
from llm_worker_rbee.backends import cuda_probe
from llm_worker_rbee.backends.cuda import CudaBackend, device, repack
from llm_worker_rbee.config import DEVICE_SPARE_BYTES
from llm_worker_rbee.errors import InsufficientMemoryError, InvalidRequestError, MissingDependencyError
from llm_worker_rbee.weights.quants import BLOCK_TYPES

from . import tiny
from .making import random_tensor

cuda = CudaBackend()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two of them; the second has more room."""
    monkeypatch.setattr(device, "interpreting", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (10 * (i + 1), 100))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA X")
    return monkeypatch


def test_the_one_that_is_asked_for_or_the_freest(two_gpus: pytest.MonkeyPatch) -> None:
    assert (device.require(0), device.require(1), device.require(None)) == (0, 1, 1)


def test_one_that_is_not_there(two_gpus: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="'cuda:7' is not there: this machine has 2 GPUs, cuda:0 to cuda:1"):
        device.require(7)
    two_gpus.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidRequestError, match="'cuda:7' is not there: this machine has 1 GPU, cuda:0"):
        device.require(7)


def test_one_that_is_too_old(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(torch.cuda, "get_device_capability", lambda i: (7, 5))
    with pytest.raises(MissingDependencyError, match=r"NVIDIA X has compute capability 7\.5, and .* 8\.0 or newer"):
        device.require(0)


def test_none_at_all(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDependencyError, match="finds no NVIDIA GPU: check the driver"):
        device.require(None)
    two_gpus.setattr(torch.version, "cuda", None)
    with pytest.raises(MissingDependencyError, match="is a build without CUDA: install one with it"):
        device.require(None)


@pytest.mark.skipif(not device.interpreting(), reason="under the interpreter there is no GPU to look for")
def test_under_the_interpreter_it_is_the_same_backend() -> None:
    assert isinstance(backends.select_backend("cuda"), CudaBackend)
    assert isinstance(backends.select_backend("auto", "cuda"), CudaBackend)
    assert not isinstance(backends.select_backend("cpu"), CudaBackend)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_what_a_type_takes_is_what_is_planned(name: str) -> None:
    packed = repack.prepare([random_tensor(name, 8, 512, np.random.default_rng(0))])
    assert packed.nbytes * 8 == pytest.approx(cuda_probe.BITS.get(name, 32.0) * 8 * 512, rel=1e-3)


def test_auto_gives_way_where_keys_and_values_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights do; who asked for the GPU by name is told instead."""
    models = [tiny.tiny(tiny.GROUPED, "F16")]
    free = load.device_weight_bytes(models, None) + DEVICE_SPARE_BYTES + 100
    monkeypatch.setattr(CudaBackend, "free_memory", lambda self: free)
    automatic = load.LoadOptions(
        model=None, device="auto", backend="auto", threads=None, kv_type="auto", kv_memory=None, quantize=None,
        max_context=None, draft_model=None, deterministic=False, settings={"max_batch": 4},
    )  # fmt: skip
    ops, kv_type, capacity, notes = load.place_model(cuda, models, automatic)
    assert ops.name == "cpu"
    assert (kv_type, capacity.n_blocks > 0) == ("float16", True)
    assert [note.startswith("the GPU is not used: ") for note in notes] == [True]
    with pytest.raises(InsufficientMemoryError):
        load.place_model(cuda, models, replace(automatic, device="cuda"))
    free += 1 << 30
    assert load.place_model(cuda, models, automatic)[0] is cuda


def test_weights_are_planned_in_the_type_that_they_are_brought_into() -> None:
    models = [tiny.tiny(tiny.GROUPED, "F16")]
    as_they_are, quantized = (load.device_weight_bytes(models, kind) for kind in (None, "Q4_0"))
    assert as_they_are == cuda_probe.packed_bytes(models[0])
    assert 0.25 < quantized / as_they_are < 0.45  # 4.5 bits of 16, and 8.5 for the head
