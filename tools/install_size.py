"""Measure what an installation of a wheel downloads and takes on disk, by package; write the table of docs/install.md.

    python tools/install_size.py dist/llm_worker_rbee-*-manylinux*.whl           print the table
    python tools/install_size.py --write dist/llm_worker_rbee-*-manylinux*.whl   and put it into the page

Downloads are the sizes of the files that pip fetches; disk is what an empty environment grows by, without pip itself.
"""

from __future__ import annotations

import argparse
import email
import platform
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from zipfile import ZipFile

PAGE = Path(__file__).parents[1] / "docs" / "install.md"
BEGIN, END = "<!-- sizes: written by tools/install_size.py -->\n", "<!-- end of sizes -->\n"
# What brings a package, where it is no dependency of the worker itself.
PURPOSES = {
    "llm-worker-rbee": "the worker, with compiled kernels",
    "numpy": "arrays, file formats, repacking of weights",
    "tokenizers": "text to token ids",
    "llguidance": "grammars and JSON schemas",
    "huggingface-hub": "fetching models; tokenizers needs it",
    "hf-xet": "of huggingface-hub",
    "pygments": "of rich",
    "rich": "the command line: colours, Markdown, progress",
    "typer": "the command line: options and help",
    "jinja2": "chat templates",
    "starlette": "HTTP: routes",
    "uvicorn": "HTTP: connections",
    "httptools": "HTTP: parser",
    "msgspec": "JSON, messages between processes",
    "prometheus-client": "metrics",
}


def megabytes(size: int) -> str:
    """Return a size as a number of the table."""
    return f"{size / 1e6:.1f}"


def normalized(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def download_sizes(wheel: Path, folder: Path) -> dict[str, int]:
    """Fetch the wheel's requirements; return the bytes of each file by package."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "-d", str(folder), str(wheel)]
    subprocess.run(pip, check=True)
    return {normalized(path.name.split("-")[0]): path.stat().st_size for path in folder.glob("*.whl")}


def disk_sizes(wheel: Path, files: Path, folder: Path) -> dict[str, int]:
    """Install the fetched files into an empty environment; return the bytes of each package there."""
    venv.create(folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "-q", "--no-index", "--find-links", str(files), str(wheel)], check=True)
    sizes = {}
    for record in folder.rglob("*.dist-info/RECORD"):
        name = email.message_from_string((record.parent / "METADATA").read_text())["Name"]
        rows = [line.rsplit(",", 2)[0] for line in record.read_text().splitlines()]
        paths = [record.parents[1] / row.strip('"') for row in rows]
        sizes[normalized(name)] = sum(path.stat().st_size for path in paths if path.is_file())
    return sizes


def measure(wheel: Path) -> str:
    """Return the table of a wheel."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "files")
        downloads = download_sizes(wheel, files)
        disk = disk_sizes(wheel, files, Path(folder, "environment"))
    name = ZipFile(wheel).filename or ""
    lines = [
        f"`{Path(name).name}`, Python {platform.python_version()}, Linux on {platform.machine()}:",
        "",
        "| package | for | download, MB | disk, MB |",
        "| --- | --- | --- | --- |",
    ]
    small = [package for package in disk if package not in PURPOSES]
    rows = sorted((size, package) for package, size in disk.items() if package in PURPOSES)
    lines += [
        f"| {package} | {PURPOSES[package]} | {megabytes(downloads[package])} | {megabytes(size)} |"
        for size, package in reversed(rows)
    ]
    lines += [
        f"| {len(small)} more | what these need | {megabytes(sum(downloads[package] for package in small))} "
        f"| {megabytes(sum(disk[package] for package in small))} |",
        f"| **all** | | **{megabytes(sum(downloads.values()))}** | **{megabytes(sum(disk.values()))}** |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    options = parser.parse_args()
    table = measure(options.wheel)
    print(table, end="")
    if options.write:
        text = PAGE.read_text()
        before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
        PAGE.write_text(f"{text[:before]}\n{table}\n{text[after:]}")


if __name__ == "__main__":
    main()
