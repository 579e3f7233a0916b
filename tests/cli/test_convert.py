"""`convert` as a person or a program calls it: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.models import convert as room
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf
from tests.cli.conftest import Run, environment, model_keys, model_tensors, vocabulary, write_model
from tests.helpers import model_runs
from tests.helpers.minimal_gguf import write_split
from tests.helpers.process import spawn as spawn_process

ANSWER = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is"


def test_convert_prints_path_only(cli: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    done = cli("convert", tiny, out, "--type", "q8_0")
    assert (done.returncode, done.stdout.decode()) == (0, f"{out}\n")
    message = done.stderr.decode().splitlines()
    assert re.match(r"converting: [\d.]+ kB of [\d.]+ kB$", message[0])
    assert message[-1] == f"{tiny.stat().st_size / 1e3:.1f} kB -> {out.stat().st_size / 1e3:.1f} kB"
    made = open_checkpoint(out)
    assert made.tensors["blk.0.attn_q.weight"].kind.name == "Q8_0"
    assert made.metadata["general.file_type"] == 7
    assert list(tmp_path.iterdir()) == [out]
    assert out.stat().st_mode & 0o777 == tiny.stat().st_mode & 0o777
    answer = cli("run", "--model", out, "--temperature", "0", "--max-tokens", "4", "--ignore-eos", "hello")
    assert answer.returncode == 0


def test_convert_json_prints_one_object(cli: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    done = cli("convert", tiny, out, "--type", "F16", "--json", "--threads", "1")
    assert json.loads(done.stdout) == {
        "source": str(tiny), "path": str(out), "type": "F16", "bytes": out.stat().st_size,
        "tensors": {"F16": 15, "F32": 5},
    }  # fmt: skip


def test_convert_help_lists_all_types(cli: Run) -> None:
    text = " ".join(cli("convert", "--help").stdout.decode().replace("│", " ").split())
    assert " ".join(room.TYPES) in text


def test_quantized_source_is_noted(cli: Run, tiny: Path, tmp_path: Path) -> None:
    assert cli("convert", tiny, tmp_path / "a.gguf", "--type", "Q4_0").stderr.count(b"quantized already") == 0
    again = cli("convert", tmp_path / "a.gguf", tmp_path / "b.gguf", "--type", "Q8_0")
    assert again.returncode == 0
    assert b"the source is already quantized (Q4_0, Q8_0): converting from the original loses less\n" in again.stderr


def test_existing_file_needs_force(cli: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"precious")
    done = cli("convert", tiny, out, "--type", "F16")
    assert done.returncode == 1
    assert done.stderr.decode() == f"error: {out} exists: give another name, or --force to replace it\n"
    assert out.read_bytes() == b"precious"
    assert cli("convert", tiny, out, "--type", "F16", "--force").returncode == 0
    assert open_checkpoint(out).architecture == "llama"


def test_failed_convert_keeps_old_file(cli: Run, tmp_path: Path) -> None:
    """A value of the last tensor does not fit: what was there under the name stays."""
    keys = {**model_keys(), **vocabulary()}
    tensors = model_tensors(len(keys["tokenizer.ggml.tokens"]))
    tensors["blk.1.ffn_down.weight"][-1, -1] = 1e9
    source = write_gguf(tmp_path / "source.gguf", keys, tensors)
    out = tmp_path / "out.gguf"
    out.write_bytes(b"precious")
    done = cli("convert", source, out, "--type", "Q8_0", "--force")
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last == "error: tensor 'blk.1.ffn_down.weight': a value of 1e+09 does not fit into Q8_0"
    assert out.read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "source.gguf"]


@pytest.mark.parametrize(
    ("out", "kind", "status", "message"),
    [
        ("out.gguf", "Q3_K", 2, "--type Q3_K: use one of F32, F16, BF16"),
        ("absent/out.gguf", "F16", 1, "absent does not exist: make it first"),
        (".", "F16", 1, "is a folder: give the name of a file"),
        ("source.gguf", "F16", 1, "source.gguf is the source itself: give another name"),
        ("alias.gguf", "F16", 1, "alias.gguf is the source itself: give another name"),
        (f"{'x' * 260}.gguf", "F16", 1, "File name too long"),
    ],
)
def test_convert_usage_error_is_named(cli: Run, tmp_path: Path, out: str, kind: str, status: int, message: str) -> None:
    source = write_model(tmp_path / "source.gguf")
    (tmp_path / "alias.gguf").symlink_to(source)
    before = source.read_bytes()
    done = cli("convert", source, tmp_path / out, "--type", kind, "--force")
    assert done.returncode == status
    assert done.stderr.decode().startswith("error: ")
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert source.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alias.gguf", "source.gguf"]


def test_part_of_split_source_is_not_overwritten(cli: Run, tmp_path: Path) -> None:
    keys = {**model_keys(), **vocabulary()}
    parts = write_split(tmp_path / "m.gguf", keys, model_tensors(len(keys["tokenizer.ggml.tokens"])), 2)
    done = cli("convert", parts[0], parts[1], "--type", "F16", "--force")
    assert b"is the source itself" in done.stderr
    assert cli("convert", parts[0], tmp_path / "whole.gguf", "--type", "F16").returncode == 0


def test_missing_source_is_an_error(cli: Run, tmp_path: Path) -> None:
    done = cli("convert", tmp_path / "absent.gguf", tmp_path / "out.gguf", "--type", "F16")
    assert done.returncode == 1
    assert b"absent.gguf" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_too_small_disk_fails_at_once(cli: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = shutil.disk_usage(tmp_path)._replace(free=5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: little)
    done = cli("convert", tiny, tmp_path / "out.gguf", "--type", "F16")
    assert done.returncode == 1
    line = f"error: no room in {tmp_path}: out.gguf takes 58.2 kB and 5.0 kB are free: free some space first\n"
    assert done.stderr.decode() == line
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_no_file(tiny: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    command = [sys.executable, "-m", "llm_worker_rbee", "convert", tiny, tmp_path / "out.gguf", "--type", "F32"]
    done = subprocess.run(command, capture_output=True, env=environment(), preexec_fn=limit, timeout=60)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[-1] == f"error: cannot write {tmp_path / 'out.gguf'}: File too large"
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_no_file(default_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llm_worker_rbee", "convert", default_model, tmp_path / "out.gguf", "-t", "Q6_K"]
    child = spawn_process(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
    assert child.stderr is not None
    while not child.stderr.readline().startswith(b"converting"):
        assert child.poll() is None
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130
    assert child.communicate()[0] == b""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("kind", "most"), [("Q8_0", 0.05), ("Q4_K_M", 0.2), ("Q4_0", 0.6)])
def test_convert_default_model_keeps_its_answers(
    kind: str, most: float, cli: Run, default_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    assert cli("convert", default_model, out, "--type", kind).returncode == 0
    llm, original = LLM(out), LLM(default_model)
    ids = llm.tokenize(ANSWER, parse_special=True)
    assert llm.generate(ids, temperature=0, max_tokens=2).text.startswith(" Paris")
    ours, theirs = (model_runs.compute_logits(one.model, ids) for one in (llm, original))
    assert 0 < float(np.sqrt(np.mean(np.square(ours - theirs))) / theirs.std()) < most
