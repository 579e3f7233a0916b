"""`--lora` of `run` and `chat`, `convert --merge-lora` and `--lora-base`, and wrong usage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.cli.options import parse_lora
from llm_worker_rbee.weights.hub import locate_model
from llm_worker_rbee.weights.lora import read_adapter
from tests.helpers import lora_zoo
from tests.helpers.hub_server import running_hub

PROMPT = "Once upon a time, in a small town by the sea, there lived"
RUN = ("--raw", PROMPT, "-t", "0", "-n", "12", "--max-context", "256", "--json", "-q")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lora_zoo.write_random_peft(locate_model(None), tmp_path_factory.mktemp("a") / "mine", rank=8, size=3)


def cli(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "llm_worker_rbee", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, **options)


def text(*args: str | Path) -> str:
    done = cli("run", *RUN, *args)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["text"])


def test_run_applies_adapters_merged_ones_are_the_same(adapter: Path, tmp_path: Path) -> None:
    plain, changed = text(), text("--lora", adapter)
    assert changed != plain
    assert text("--lora", f"mine={adapter}:0") == plain
    second = shutil.copytree(adapter, tmp_path / "second")
    assert text("--lora", f"{adapter}:0.5", "--lora", f"{second}:0.5")[:16] == changed[:16]
    model, merged, written = locate_model(None), tmp_path / "merged.gguf", tmp_path / "adapter.gguf"
    done = cli("convert", adapter, written, "--type", "F32", "--lora-base", model, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(written)
    assert len(read_adapter(written).pairs) == len(read_adapter(adapter).pairs)
    assert text("--lora", written) == changed
    done = cli("convert", model, merged, "--type", "F16", "--merge-lora", adapter, "--json")
    assert done.returncode == 0, done.stderr
    assert text("-m", merged)[:16] == changed[:16]


@pytest.mark.parametrize("others", [(), ("config.json", "README.md", "checkpoint-5/adapter_model.safetensors")])
def test_adapter_is_fetched_from_the_hub(adapter: Path, tmp_path: Path, others: tuple[str, ...]) -> None:
    files = {path.name: path.read_bytes() for path in adapter.iterdir()} | dict.fromkeys(others, b"{}")
    with running_hub({"me/adapter": files}) as running:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env |= {
            "HF_ENDPOINT": running.url,
            "HF_HOME": str(tmp_path),
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_DISABLE_XET": "1",
        }
        line = ("run", "-m", locate_model(None), *RUN, "--lora", "hf:me/adapter")
        first = cli(*line, env=env)
        again = cli(*line, env={**env, "HF_HUB_OFFLINE": "1"})
    for done in (first, again):
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["text"] == text("--lora", adapter)
    fetched = [line for line in running.seen if line.startswith("GET") and "/resolve/" in line]
    assert {line.rsplit("/", 1)[1] for line in fetched} == {"adapter_config.json", "adapter_model.safetensors"}
    assert not any("checkpoint" in line for line in fetched)


def test_chat_applies_an_adapter(adapter: Path) -> None:
    options = ("-t", "0", "-n", "8", "--max-context", "256", "-q")
    plain, changed = (cli("chat", *options, *more, input="Hello!\n") for more in ((), ("--lora", adapter)))
    assert plain.returncode == changed.returncode == 0, changed.stderr
    assert plain.stdout != changed.stdout


def test_spellings() -> None:
    for written, (name, path, scale) in {
        "legal=/a/b": ("legal", "/a/b", 1.0),
        "/a/b.gguf:0.5": ("b", "/a/b.gguf", 0.5),
        "x=hf:owner/repo:-2": ("x", "hf:owner/repo", -2.0),
        "hf:owner/repo": ("repo", "hf:owner/repo", 1.0),
        "/a=b/c": ("c", "/a=b/c", 1.0),
    }.items():
        spec = parse_lora(written)
        assert (spec.name, spec.path, spec.scale) == (name, path, scale), written


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", *RUN, "--lora", "/nowhere"), "no such file or folder"),
        (("run", *RUN, "--lora", "{adapter}", "--max-lora-rank", "4"), "rank 8, and --max-lora-rank is 4"),
        (("run", *RUN, "--lora", "{adapter}", "--max-loras", "0"), "--max-loras is 0"),
        (("serve", "--lora-dir", "/nowhere"), "is not a folder"),
        (("serve", "--lora", "bad name=/x"), "--lora 'bad name'"),
        (("serve", "--lora", "a=/x", "--lora", "a=/y"), "two adapters have the name 'a'"),
        (("serve", "--lora", "smollm2:latest=/x"), "'smollm2:latest' is the name of the model"),
        (("serve", "-m", "a", "-m", "b", "--lora", "x=/x"), "--lora is for a single model"),
        (("convert", "{adapter}", "{out}", "--type", "Q4_0", "--lora-base", "smollm2"), "F32 or F16"),
        (("convert", "smollm2", "{out}", "--type", "F16", "--merge-lora", "/nowhere"), "no such file or folder"),
    ],
)
def test_wrong_usage_is_explained(adapter: Path, tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    done = cli(*(arg.format(adapter=adapter, out=tmp_path / "out.gguf") for arg in args))
    assert done.returncode in (1, 2)
    assert message in " ".join(done.stderr.replace("│", "").split())
    assert not (tmp_path / "out.gguf").exists()
