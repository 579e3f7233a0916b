"""`doctor`: a report on this machine, and what it says where something is missing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llm_worker_rbee.backends import cpu_info
from llm_worker_rbee.cli.doctor import _check_optional, _check_package

from .conftest import Run


def test_doctor_json_lists_all_checks(spawn: Run, tmp_path: Path) -> None:
    done = spawn("doctor", "--json", env={"XDG_CACHE_HOME": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, b"")
    output = json.loads(done.stdout)
    checks = {check["name"]: check for check in output["checks"]}
    assert output["healthy"] is True
    for name in ("processor", "cores", "memory", "GPU", "Python", "numpy", "tokenizers", "torch", "cache"):
        assert checks[name]["status"] in ("ok", "warn", "missing")
        assert checks[name]["found"]
    assert str(tmp_path) in checks["cache"]["found"]
    assert checks["CPU kernels"]["found"].startswith(f"{cpu_info.current_isa()} (of ")
    assert checks["threads"]["found"].startswith("{} ({})".format(*cpu_info.explain_thread_count()))
    there = "the package has compiled kernels" if cpu_info.prebuilt_isas() else "kernels compiled"
    assert there in checks["kernel cache"]["found"]
    assert checks["default model"]["status"] == "missing"
    assert "llm-worker-rbee pull" in checks["default model"]["remedy"]
    assert not (tmp_path / "llm-worker-rbee").exists()  # looking changes nothing


def test_bad_number_of_threads_is_a_warning(spawn: Run) -> None:
    done = spawn("doctor", "--json", env={"LLM_WORKER_THREADS": "x"})
    assert done.returncode == 0
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["threads"]["status"] == "warn"
    assert "LLM_WORKER_THREADS is 'x'" in checks["threads"]["found"]


def test_broken_required_package_fails(spawn: Run, tmp_path: Path) -> None:
    (tmp_path / "jinja2").mkdir()
    (tmp_path / "jinja2" / "__init__.py").write_text("raise ImportError('half of it is gone')")
    root = str(Path(__file__).parents[2])
    done = spawn("doctor", env={"PYTHONPATH": f"{tmp_path}:{root}"})
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.decode().splitlines() if " jinja2 " in line]
    assert line.startswith("missing")
    assert "half of it is gone -> pip install" in line


def test_missing_packages_have_remedies() -> None:
    required = _check_package("no_such_package")
    assert (required.status, required.required) == ("missing", True)
    assert required.remedy is not None
    optional = _check_optional("no_such_package", "pip install it")
    assert (optional.status, optional.required, optional.remedy) == ("missing", False, "pip install it")


def cache_line(spawn: Run, **env: str) -> dict[str, str]:
    done = spawn("doctor", "--json", env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "cache"]
    assert isinstance(check, dict)
    return check


@pytest.mark.parametrize("place", ["xdg", "xdg/llm-worker-rbee", "xdg/llm-worker-rbee/.locks"])
@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_cache_path_that_is_no_folder_warns(spawn: Run, tmp_path: Path, place: str, kind: str) -> None:
    wrong = tmp_path / place
    wrong.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        wrong.write_text("in the way")
    else:
        wrong.symlink_to(tmp_path / "nowhere")
    check = cache_line(spawn, XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert check["status"] == "warn"
    assert f"{wrong} is not a folder" in check["found"]
    assert "XDG_CACHE_HOME" in check["remedy"]


def test_cache_below_read_only_folder_warns(spawn: Run, tmp_path: Path) -> None:
    # /proc refuses every user, root too; elsewhere a folder without the right to write refuses all but root
    closed = Path("/proc/self") if Path("/proc/self").exists() else tmp_path
    if closed == tmp_path:
        closed.chmod(0o500)
    if os.access(closed, os.W_OK):
        pytest.skip(f"{closed} can be written to")
    check = cache_line(spawn, XDG_CACHE_HOME=str(closed / "xdg" / "deep"))
    assert check["status"] == "warn"
    assert f"{closed} cannot be written to" in check["found"]
    assert check["remedy"].startswith(f"make {closed} writable, or set XDG_CACHE_HOME")
    last = spawn("doctor", env={"XDG_CACHE_HOME": str(closed / "xdg" / "deep")}).stdout.decode().splitlines()[-1]
    assert last.startswith("All required packages are installed, with warnings about: ")
    assert "cache" in last
