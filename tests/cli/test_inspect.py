"""`inspect`: every file that opens is described."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llm_worker_rbee.weights.gguf_writer import write_gguf
from tests.helpers.synthetic import Shape, Spec, write

from ..helpers import mtp_models
from ..helpers.model_zoo import ZOO, make_hf
from ..helpers.quantized_hf import save_quantized_hf
from .conftest import Run, model_keys, vocabulary, write_model


def inspected(cli: Run, *args: str | Path) -> dict[str, Any]:
    done = cli("inspect", "--json", *args)
    assert (done.returncode, done.stderr) == (0, b"")
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_inspect_experts_says_what_a_token_uses(cli: Run, tmp_path: Path) -> None:
    shape = Shape(
        2, 64, 4, 2, 96, 300, 320, architecture="qwen3moe", head_dim=16, experts=4, used_experts=1, expert_ff=32
    )
    path = write(Spec("experts", shape, "F32", 2), tmp_path / "m.gguf")
    report = inspected(cli, path)["experts"]
    assert (report["count"], report["used"], report["feed_forward"]) == (4, 1, 32)
    assert report["active_parameters"] * 4 == report["bytes_per_token"]
    assert b"1 of 4, feed-forward 32" in cli("inspect", path).stdout


def test_inspect_names_a_head_for_multi_token_prediction(cli: Run, tmp_path: Path) -> None:
    path = mtp_models.make("glm4moe").save_gguf(tmp_path / "m.gguf")
    found = json.loads(cli("inspect", path, "--json").stdout)
    assert (found["mtp"]["layers"], found["mtp"]["kv_token_bytes"]) == (1, 2 * 2 * 24 * 2)
    assert 0 < found["mtp"]["weights_bytes"] < found["memory"]["weights_bytes"]
    assert "a head for multi-token prediction" in (shown := cli("inspect", path).stdout.decode())
    assert "--speculative mtp uses it" in shown


def test_inspect_quantized_safetensors_shows_method_and_bits(cli: Run, tmp_path: Path) -> None:
    folder = save_quantized_hf(make_hf(ZOO["llama"]), tmp_path, "awq")
    report = inspected(cli, folder)
    method = report["quantization_method"]
    assert (method["method"], method["bits"], method["group_size"], method["problem"]) == ("awq", 4, 32, "")
    assert {q["type"]: q["tensors"] for q in report["quantization"]} == {"INT4_ZP": 21, "F32": 9}
    assert b"awq, gemm, 4 bits, groups of 32" in cli("inspect", folder).stdout


def test_inspect_default_model(cli: Run, default_model: Path) -> None:
    report = inspected(cli, default_model, "--context", "2048")
    assert (report["architecture"], report["supported"], report["parameters"]) == ("llama", True, 134_515_008)
    assert report["file_bytes"] == default_model.stat().st_size
    shape = report["shape"]
    assert (shape["layers"], shape["width"], shape["heads"], shape["kv_heads"], shape["context"]) == (
        30,
        576,
        9,
        3,
        8192,
    )
    assert {q["type"]: q["tensors"] for q in report["quantization"]} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    assert sum(q["share"] for q in report["quantization"]) == pytest.approx(1)
    assert report["memory"]["kv_type"] == "float16"
    assert report["memory"]["kv_bytes"] == 2 * 30 * 3 * 64 * 2 * 2048
    assert report["memory"]["total_bytes"] == report["memory"]["weights_bytes"] + report["memory"]["kv_bytes"]
    assert report["tokenizer"]["vocabulary"] == 49152
    assert {end["text"] for end in report["tokenizer"]["eos"]} == {"<|endoftext|>", "<|im_end|>"}
    assert len(report["tensors"]) == 272
    assert report["metadata"]["tokenizer.ggml.tokens"]["count"] == 49152


def test_inspect_as_text(cli: Run, tiny: Path) -> None:
    done = cli("inspect", tiny, "--tensors", "--metadata")
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert "\x1b" not in text
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert rows["architecture"].endswith("llama (supported)")
    assert rows["context"].endswith("256 tokens")
    assert rows["chat template"].endswith("yes")
    assert "blk.1.ffn_down.weight" in text
    assert "32 x 64" in text
    assert "llama.block_count" in text


def test_inspect_shows_sampling_defaults_with_source(cli: Run, default_model: Path, tmp_path: Path) -> None:
    default = inspected(cli, default_model)
    assert default["sampling_defaults"]["temperature"] == {"value": 0.7, "source": "built-in"}
    assert default["warnings"] == []
    keys = {"general.architecture": "llama", "general.sampling.temp": 0.6, "general.sampling.top_p": 7.0}
    path = write_gguf(tmp_path / "m.gguf", keys, {})
    report = inspected(cli, path)
    assert report["sampling_defaults"]["temperature"] == {"value": 0.6, "source": "GGUF metadata"}
    assert report["sampling_defaults"]["top_p"] == {"value": 0.95, "source": "built-in"}
    rows = [line.split("  ", 1) for line in cli("inspect", path).stdout.decode().splitlines() if "  " in line]
    shown = {name: text.strip() for name, text in rows}
    assert shown["sampling"] == "temperature 0.6 (GGUF metadata); top_p 0.95, min_p 0.05 (built-in)"
    assert shown["warning"] == "GGUF metadata: general.sampling.top_p is ignored: " + (
        "top_p is 7.0: it must be 0 or more, at most 1"
    )


def test_inspect_program_lists_fused_ops_and_layers_once(cli: Run, tiny: Path) -> None:
    text = cli("inspect", str(tiny), "--program", "--device", "cpu").stdout.decode()
    table = text[text.index("Program of a step on cpu") :]
    assert re.search(r"^ +rope_kv_write +split_heads \+ rope_store +rope.rope_store\[", table, re.MULTILINE)
    report = json.loads(cli("inspect", str(tiny), "--program", "--device", "cpu", "--json").stdout)
    counts = [one["repeats"] * [op["component"] for op in one["ops"]].count("attention") for one in report["program"]]
    assert sum(counts) == report["shape"]["layers"]
    assert report["program"][-1]["ops"][-1]["component"] == "head"


def test_inspect_lists_kv_cache_that_fits(cli: Run, default_model: Path) -> None:
    options = ("--kv-memory", "100M", "--max-batch", "8")
    fits = inspected(cli, default_model, *options)["fits"]
    assert (fits["device"], fits["kv_memory"], fits["max_batch"], fits["max_step_tokens"]) == ("cpu", 10**8, 8, 512)
    float32, int8 = fits["kv_types"]["float32"], fits["kv_types"]["int8"]
    assert float32 == {
        "bytes": 99_532_800, "tokens": 2160, "max_context": 2160, "contexts": 1, "max_batch": 8, "requests": 8,
        "tokens_each": 256,
        "n_slots": 0,
        "slot_bytes": 0,
    }  # fmt: skip
    assert (int8["max_context"], int8["contexts"], int8["tokens_each"]) == (8160, 1, 1008)
    shown = cli("inspect", default_model, *options).stdout.decode()
    assert re.search(r"^float32 +99\.5 MB +2,160 +1 of 2,160 tokens +8 of 256 tokens each$", shown, re.MULTILINE)
    assert re.search(
        r"^steps +up to 8 requests in a batch and 512 tokens in a step \(--max-batch, ", shown, re.MULTILINE
    )
    default = inspected(cli, default_model, "--max-step-tokens", "1000")["fits"]
    assert list(default["kv_types"]) == ["float32", "float16", "int8"]
    assert (default["max_batch"], default["max_step_tokens"]) == (64, 1000)


def test_kv_cache_that_does_not_fit_is_reported(cli: Run, tiny: Path) -> None:
    fits = inspected(cli, tiny, "--kv-memory", "900T")["fits"]
    assert all("--kv-memory is 900,000.00 GB" in cache["error"] for cache in fits["kv_types"].values())
    shown = cli("inspect", tiny, "--context", "200", "--kv-memory", "120K").stdout.decode()
    assert (
        "\nfloat32: the keys and values of 200 tokens take 213.0 kB, and --kv-memory is 120.0 kB: give more, or use a "
        "smaller --context or --kv-type\n"
    ) in shown
    assert re.search(r"^float16 .* 1 of 200 tokens ", shown, re.MULTILINE)


def test_inspect_usage_errors(cli: Run, tiny: Path) -> None:
    done = cli("inspect", tiny, "--context", "999")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"error: --context is 999: it must be 1 to 256, the model's context\n"
    assert cli("inspect", tiny, "--kv-memory", "much").returncode == 2


def test_unknown_architecture_without_tensors_is_reported(cli: Run, tmp_path: Path) -> None:
    keys = {"general.architecture": "made-up", "made-up.context_length": 77, **vocabulary()}
    path = write_gguf(tmp_path / "vocab.gguf", keys)
    report = inspected(cli, path)
    assert (report["architecture"], report["supported"], report["parameters"], report["tensors"]) == (
        "made-up",
        False,
        0,
        [],
    )
    assert "made-up" in report["reason"]
    assert report["shape"] == {"context": 77}
    assert report["memory"] == {
        "context": 77, "weights_bytes": 0, "kv_type": None, "kv_bytes": None, "state_bytes": 0,
        "total_bytes": None,
    }  # fmt: skip
    assert report["fits"] is None
    assert report["tokenizer"]["vocabulary"] == 260
    shown = cli("inspect", path)
    assert shown.returncode == 0
    assert b"the file holds no tensors" in shown.stdout
    tokens = cli("tokenize", path, "--text", "hi", "--json")
    assert (tokens.returncode, json.loads(tokens.stdout)["pieces"]) == (0, ["h", "i"])
    refused = cli("run", "hi", "-m", path)
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"'made-up' is not supported" in refused.stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.model": "whatever"}, "whatever"),
        ({"tokenizer.ggml.pre": "no-such-pre"}, "no-such-pre"),
        ({"tokenizer.ggml.tokens": ["only one"]}, ""),
    ],
)
def test_broken_tokenizer_is_reported(cli: Run, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = write_model(tmp_path / "broken.gguf", changes)
    shown = cli("inspect", path)
    assert (shown.returncode, shown.stderr) == (0, b"")
    (row,) = [line for line in shown.stdout.decode().splitlines() if line.startswith("tokenizer")]
    assert "not usable: " in row
    assert reason in row


def test_folder_without_model_is_named(cli: Run) -> None:
    """The files of the whole system are not listed."""
    done = cli("inspect", "/")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"error: / holds no model")


def test_empty_and_broken_files(cli: Run, tmp_path: Path) -> None:
    assert inspected(cli, write_gguf(tmp_path / "empty.gguf", {}))["architecture"] is None
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    bad = cli("inspect", tmp_path / "bad.gguf")
    assert (bad.returncode, bad.stdout) == (1, b"")
    assert bad.stderr.startswith(b"error: bad.gguf: not a GGUF file")


def test_odd_metadata_values_are_shown(cli: Run, tmp_path: Path) -> None:
    keys = {**model_keys(), "general.name": "evil\x1b[31m\nname", "x.nan": float("nan"), "x.list": [float("inf")] * 3}
    path = write_gguf(tmp_path / "odd.gguf", keys, {"t\x1b": np.zeros(4, np.float32)})
    done = cli("inspect", path, "--metadata", "--tensors")
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout
    strict = cli("inspect", path, "--json").stdout.decode()
    assert (
        json.loads(strict, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))["metadata"]["x.nan"]["value"]
        is None
    )


def test_metadata_cannot_break_the_table(cli: Run, tmp_path: Path) -> None:
    keys = {**model_keys(), "x.a\nfake": "one\ntwo\u2028", "x.\u202eb\t": "\u2066three", "x.c": ["four\n", "\x1b"]}
    path = write_gguf(tmp_path / "odd.gguf", keys, {"t\nfake": np.zeros(4, np.float32)})
    done = cli("inspect", path, "--metadata", "--tensors")
    assert done.returncode == 0
    section = done.stdout.decode().partition("Metadata\n")[2]
    metadata, _, tensors = section.partition("\n\nTensors\n")
    assert len(metadata.splitlines()) == len(keys)
    assert len(tensors.splitlines()) == 2
    rows = {line.split()[0]: line for line in metadata.splitlines()}
    assert rows["x.a␊fake"].endswith(r"'one\ntwo\u2028'")
    assert rows["x.\ufffdb␉"].endswith(r"'\u2066three'")
    assert "t␊fake" in tensors


def test_nested_lists_are_shown(cli: Run, tmp_path: Path) -> None:
    value = [[1, 2, 3], [4, 5], []]
    deep = [[[1.5], [float("nan")]], [[2.5]]]
    keys = {**model_keys(), "x.lists": [np.array(inner, np.int32) for inner in value], "x.deep": deep}
    path = write_gguf(tmp_path / "lists.gguf", keys)
    report = inspected(cli, path)["metadata"]
    assert report["x.lists"]["value"] == value
    assert report["x.deep"]["value"] == [[[1.5], [None]], [[2.5]]]
    shown = cli("inspect", path, "--metadata")
    assert shown.returncode == 0
    (row,) = [line for line in shown.stdout.decode().splitlines() if "x.lists" in line]
    assert row.endswith("[[1, 2, 3], [4, 5], []]")


def test_known_architecture_without_tensors_cannot_run(cli: Run, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "vocab.gguf", {**model_keys(), **vocabulary()})
    report = json.loads(cli("inspect", path, "--json").stdout)
    assert (report["supported"], report["reason"]) == (False, "it holds no tensors")
    assert report["memory"]["total_bytes"] is None
    assert cli("tokenize", path, "--text", "hello").returncode == 0


def test_unused_metadata_is_listed(cli: Run, tmp_path: Path) -> None:
    """A folder with FP8 weights can be looked at; only loading it is refused."""
    save_file({"w": torch.zeros(4, 8, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    report = json.loads(cli("inspect", tmp_path, "--json").stdout)
    assert [(t["type"], t["shape"], t["bytes"]) for t in report["tensors"]] == [("F8_E4M3", [4, 8], 32)]
