"""The built wheels, installed outside the checkout into an environment of their own, without torch and Numba."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from llm_worker_rbee.backends import cpu_info

ROOT = Path(__file__).parent.parent.parent
# One of each kind of kernels: plain, experts, short convolutions, linear attention, inputs of each layer.
FAMILIES = ("qwen3", "qwen3moe", "lfm2", "qwen3_5", "gemma4-e")
HAS_LIBRARY = shutil.which("cc") is not None and sys.platform == "linux" and cpu_info.available_isas()[0] != "portable"


def run(command: list[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pure wheel, and with that of this kind of machine with the kernels of this one."""
    out = tmp_path_factory.mktemp("wheels")
    tool = [sys.executable, ROOT / "tools" / "build_kernels.py", "host", "--wheel", out]
    built = run(tool if HAS_LIBRARY else [*tool[:2], "--pure", "--wheel", out])
    assert built.returncode == 0, built.stderr
    return out


@pytest.fixture(scope="module")
def pure(wheels: Path) -> Path:
    return next(wheels.glob("llm_worker_rbee-*-py3-none-any.whl"))


@pytest.fixture(scope="module")
def packed(wheels: Path) -> Path:
    if not HAS_LIBRARY:
        pytest.skip("libraries need Linux, a C compiler and a processor with vector instructions")
    return next(wheels.glob("llm_worker_rbee-*-manylinux*.whl"))


def install(wheel: Path, folder: Path, *options: str) -> Path:
    """Install a wheel into the environment of a folder; return its `python`."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    installed = run([*pip, "install", "-q", "--no-compile", *options, wheel])
    assert installed.returncode == 0, installed.stderr
    return python


@pytest.fixture(scope="module")
def environment(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(packed, tmp_path_factory.mktemp("environment") / "env").parents[1]


@pytest.fixture
def variables() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def test_wheels_hold_package_and_licences(wheels: Path) -> None:
    for wheel in wheels.glob("*.whl"):
        names = zipfile.ZipFile(wheel).namelist()
        assert "llm_worker_rbee/py.typed" in names
        assert any(name.endswith("licenses/LICENSE") for name in names)
        assert any(name.endswith("licenses/NOTICE") for name in names)
        assert not [name for name in names if name.startswith(("tests", "docs", "tools"))]
        missing = {str(p.relative_to(ROOT)) for p in (ROOT / "llm_worker_rbee").rglob("*.py")} - set(names)
        assert not missing


def test_wheels_differ_in_libraries_only(pure: Path, packed: Path) -> None:
    """A resolver reads the metadata of one wheel for all."""
    assert f"_{platform.machine()}.whl" in packed.name
    with zipfile.ZipFile(pure) as without, zipfile.ZipFile(packed) as with_libraries:
        libraries = set(with_libraries.namelist()) - set(without.namelist())
        assert libraries
        assert all(name.startswith("llm_worker_rbee/backends/cpu/prebuilt/") for name in libraries)
        differing = [name for name in without.namelist() if without.read(name) != with_libraries.read(name)]
        assert {Path(name).name for name in differing} == {"WHEEL", "RECORD"}
        assert "numba" not in "".join(
            line
            for name in without.namelist()
            if name.endswith("METADATA")
            for line in without.read(name).decode().splitlines()
            if line.startswith("Requires-Dist") and "extra ==" not in line
        )


def test_installed_wheel_generates_without_torch_and_numba(
    environment: Path, default_model: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    python = environment / "bin" / "python"
    for name in ("torch", "numba", "llvmlite"):
        assert run([python, "-c", f"import {name}"], cwd=tmp_path, env=variables).returncode == 1
    command = [python.parent / "llm-worker-rbee", "run", "--temperature", "0", "--max-tokens", "8", "--json"]
    answer = run([*command, "--raw", "The capital of France is"], cwd=tmp_path, env=variables)
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in json.loads(answer.stdout)["text"]


def make_models(folder: Path) -> Path:
    """Write random files of each family, in a process of its own: the shapes of the zoo are changed there."""
    made = run([sys.executable, "-m", "tests.golden", "make", folder, *FAMILIES], cwd=ROOT)
    assert made.returncode == 0, made.stderr
    return folder


def record(python: str | Path, models: Path, variables: dict[str, str], **changes: str) -> dict[str, object]:
    """Return golden records of the CPU backend by the installation of a Python."""
    out = models / "records.json"
    script = [ROOT / "tests" / "golden.py", "record", models, out, "cpu"]
    done = run([python, *script], cwd=models, env={**variables, **changes})
    assert done.returncode == 0, done.stderr
    records: dict[str, object] = json.loads(out.read_text())
    assert not [name for name in records if name.endswith("error")]
    return records


@pytest.mark.skipif("LLM_WORKER_EXAMPLES" not in os.environ, reason="compiles every kernel: make test-extra")
def test_library_gives_the_answers_of_compiled_kernels(
    environment: Path, default_model: Path, embedding_model: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    """Each kind of family and KV type, log-probabilities, an encoder. (test_kernel_library.py compares ops.)"""
    models = make_models(tmp_path / "models")
    records = record(environment / "bin" / "python", models, variables)
    compiled = record(sys.executable, models, variables, LLM_WORKER_PREBUILT="0", PYTHONPATH=str(ROOT))
    assert records == compiled


def test_library_has_the_kernels_of_every_kind_of_family(
    environment: Path, default_model: Path, embedding_model: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    models = make_models(tmp_path / "models")
    records = record(environment / "bin" / "python", models, variables)
    assert {name.partition("-")[0] for name in records} >= {"qwen3", "qwen3moe", "lfm2", "qwen3_5", "gemma4"}
    assert records == record(sys.executable, models, variables, PYTHONPATH=str(ROOT))


def test_pure_wheel_says_what_to_install(
    pure: Path, environment: Path, default_model: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "env"
    shutil.copytree(environment, folder, symlinks=True)
    python = install(pure, folder, "--no-deps", "--force-reinstall", "--no-index")
    command = [python, "-m", "llm_worker_rbee", "run", "--temperature", "0", "--max-tokens", "2", "--raw", "1, 2,"]
    refused = run(command, cwd=tmp_path, env=variables)
    assert refused.returncode == 1
    assert refused.stderr == (
        "error: this installation has no compiled kernels for this processor: pip install 'llm-worker-rbee[compile]' "
        "compiles them here (backend 'reference' computes without, many times slower)\n"
    )
    answer = run([*command, "--backend", "reference"], cwd=tmp_path, env=variables)
    assert (answer.returncode, answer.stdout.strip()) == (0, "3")
