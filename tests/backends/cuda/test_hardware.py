"""Which GPU is used: PyTorch's answers are set here, what we make of them is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llm_worker_rbee import backends
from llm_worker_rbee.backends import cuda, gpu
from llm_worker_rbee.backends.cuda import device, hardware, matrix
from llm_worker_rbee.errors import InvalidRequestError, MissingDependencyError
from llm_worker_rbee.weights.quants import BLOCK_TYPES

from .making import random_tensor


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two of them; the second has more room."""
    monkeypatch.setattr(hardware, "interpreting", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (10 * (i + 1), 100))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA X")
    return monkeypatch


def test_the_one_that_is_asked_for_or_the_freest(two_gpus: pytest.MonkeyPatch) -> None:
    assert (hardware.require(0), hardware.require(1), hardware.require(None)) == (0, 1, 1)


def test_one_that_is_not_there(two_gpus: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="'cuda:7' is not there: this machine has 2 GPUs, cuda:0 to cuda:1"):
        hardware.require(7)
    two_gpus.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidRequestError, match="'cuda:7' is not there: this machine has 1 GPU, cuda:0"):
        hardware.require(7)


def test_one_that_is_too_old(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(torch.cuda, "get_device_capability", lambda i: (7, 5))
    with pytest.raises(MissingDependencyError, match=r"NVIDIA X has compute capability 7\.5, and .* 8\.0 or newer"):
        hardware.require(0)


def test_none_at_all(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDependencyError, match="finds no NVIDIA GPU: check the driver"):
        hardware.require(None)
    two_gpus.setattr(torch.version, "cuda", None)
    with pytest.raises(MissingDependencyError, match="is a build without CUDA: install one with it"):
        hardware.require(None)


@pytest.mark.skipif(not device.interpreting(), reason="under the interpreter there is no GPU to look for")
def test_under_the_interpreter_it_is_the_same_backend() -> None:
    assert backends.pick("cuda") is cuda
    assert gpu.is_cuda(backends.pick("auto", "cuda"))
    assert backends.pick("cpu") is not cuda


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_what_a_type_takes_is_what_is_planned(name: str) -> None:
    packed = matrix.prepare([random_tensor(name, 8, 512, np.random.default_rng(0))])
    assert packed.nbytes * 8 == pytest.approx(gpu.BITS.get(name, 32.0) * 8 * 512, rel=1e-3)
