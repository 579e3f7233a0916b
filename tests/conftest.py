"""Shared by all tests: the device, the default model, a tiny one, seeded numbers, one folder for compiled kernels.

Kernels come from the library that `make test` builds; as Numba is imported here, those that it lacks are compiled.
LLM_WORKER_TEST_DEVICE=cuda runs the tests of engine, server and LLM on a GPU; without it tests/backends/cuda alone
sees one. The kernel folder belongs to this checkout and stays from run to run: a test with its own home would compile
everything.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import numba  # noqa: F401
import numpy as np
import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.config import KV_DEFAULT
from llm_worker_rbee.models import read_model_config
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.hub import DEFAULT_EMBEDDING_MODEL, locate_model
from tests.helpers import limits, tiny_models

os.environ.setdefault("LLM_WORKER_KERNEL_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))
DEVICE = os.environ.get("LLM_WORKER_TEST_DEVICE", "cpu")  # of tests that name none
HIDDEN = "CUDA_VISIBLE_DEVICES"
IN_MEMORY = Path("/dev/shm")
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="tests the CPU backend")
TESTS = Path(__file__).parent
# Half a minute and more each. They run first, so that no process is left alone with one at the end; two that compile
# kernels do not start together, or both would compile the same.
SLOW_FILES = (
    "backends/cuda/test_compile.py",
    "backends/cpu/test_backend.py",
    "tokenizer/test_chat_template.py",
    "backends/cuda/test_forward_batch_invariant.py",
    "cli/test_serve_processes.py",
    "token_engine/test_replicas.py",
    "bench/test_report.py",
    "engine/test_engine_same_answer.py",
    "e2e/test_wheel.py",
    "e2e/test_default_model.py",
    "server/test_openapi_schemathesis.py",
    "backends/cuda/test_forward.py",
    "backends/cuda/test_precompile.py",
)


@pytest.fixture(autouse=True, scope="session")
def _use_one_device() -> None:
    """Hide other devices, also from processes that tests start."""
    if DEVICE == "cpu":
        os.environ[HIDDEN] = ""
    else:
        select_backend(DEVICE)  # fails with one line if something is missing


@pytest.fixture(autouse=True, scope="session")
def _measure_limits_briefly() -> None:
    limits.measure_briefly()


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Return the built-in model, fetched once into the user's cache, with its kernels compiled."""
    return with_kernels(locate_model(None))


def with_kernels(path: Path, kv_type: str = KV_DEFAULT) -> Path:
    """Compile the kernels of a model, so that no command under test prints progress."""
    checkpoint = open_checkpoint(path)
    select_backend(DEVICE).load_kernels(checkpoint, read_model_config(checkpoint), kv_type)
    return path


@pytest.fixture(scope="session")
def embedding_model() -> Path:
    """Return the built-in embedding model, fetched once into the user's cache, with its kernels compiled."""
    return with_kernels(locate_model(DEFAULT_EMBEDDING_MODEL), "float32")


@pytest.fixture(scope="session")
def default_llm(default_model: Path) -> LLM:
    return LLM(default_model, device=DEVICE, deterministic=True)


@pytest.fixture(scope="session")
def reference_llm(default_model: Path) -> LLM:
    """For tests that compare numbers: float32 throughout."""
    return LLM(default_model, backend="reference")


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama over bytes: every token depends on all those before."""
    return tiny_models.write_random(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_llm(tiny_file: Path) -> LLM:
    return LLM(tiny_file, device=DEVICE, deterministic=True)


@pytest.fixture
def memory_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where the system has one: for tests that write thousands of files."""
    if not os.access(IN_MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1234)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slow files first."""
    order = {TESTS / name: place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among the million objects of all imports, neither now nor later: half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind reports objects that the interpreter leaves at its end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutations", type=int, default=5_000, help="how many damaged files the GGUF fuzz test opens")
