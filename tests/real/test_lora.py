"""A real adapter of PEFT for a 7B model is read, and every pair has its rows in a base of that shape, which has no data
here; random adapters on a real model through the real server, with the official client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest

from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.models import read_model_config
from llm_worker_rbee.models.lora import file_adapters
from llm_worker_rbee.weights import Checkpoint, Tensor
from llm_worker_rbee.weights.lora import read_adapter
from llm_worker_rbee.weights.quants import BLOCK_TYPES
from tests.helpers import lora_zoo
from tests.helpers.serve_process import ServeProcess

LAYERS, WIDTH, KV_WIDTH, INNER, VOCABULARY = 28, 3584, 512, 18944, 152_064


def base_of_7b() -> Checkpoint:
    """Return the names and shapes of a GGUF of Qwen2.5-Coder-7B."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, WIDTH), "output.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,),
    }  # fmt: skip
    for i in range(LAYERS):
        rows = {"attn_q": WIDTH, "attn_k": KV_WIDTH, "attn_v": KV_WIDTH, "attn_output": WIDTH}
        matrices = {**{role: (count, WIDTH) for role, count in rows.items()}, "ffn_down": (WIDTH, INNER)}
        matrices |= dict.fromkeys(("ffn_gate", "ffn_up"), (INNER, WIDTH))
        shapes |= {f"blk.{i}.{role}.weight": shape for role, shape in matrices.items()}
        shapes |= {f"blk.{i}.{role}.weight": (WIDTH,) for role in ("attn_norm", "ffn_norm")}
    none = np.empty(0, np.uint8)
    tensors = {name: Tensor(name, BLOCK_TYPES["Q4_K"], shape, none) for name, shape in shapes.items()}
    keys = {
        "block_count": LAYERS, "embedding_length": WIDTH, "feed_forward_length": INNER, "attention.head_count": 28,
        "attention.head_count_kv": 4, "context_length": 32_768, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6, "vocab_size": VOCABULARY,
    }  # fmt: skip
    metadata = {"general.architecture": "qwen2", **{f"qwen2.{key}": value for key, value in keys.items()}}
    return Checkpoint(Path("qwen2.5-coder-7b.gguf"), "gguf", "qwen2", metadata, tensors, {})


def test_real_adapter_is_read_and_mapped(real_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").symlink_to(real_model("security-reviewer-lora"))
    (tmp_path / "adapter_config.json").symlink_to(real_model("security-reviewer-lora-config"))
    adapter, base = read_adapter(tmp_path), base_of_7b()
    assert (len(adapter.pairs), adapter.rank) == (7 * LAYERS, 16)
    assert adapter.base == "unsloth/Qwen2.5-Coder-7B-Instruct-bnb-4bit"
    pairs = file_adapters(base, read_model_config(base), 16).pairs(adapter)
    assert len(pairs) == 4 * LAYERS  # of a layer: q, k and v, the output, gate and up, down
    parts = [pair for each in pairs.values() for parts in each for pair in parts]
    assert None not in parts
    assert sum(pair.a.nbytes + pair.b.nbytes for pair in parts if pair is not None) == adapter.nbytes
    deeper = replace(adapter, pairs={name.replace("blk.27.", "blk.28."): pair for name, pair in adapter.pairs.items()})
    with pytest.raises(InvalidRequestError, match=r"blk\.28\.attn_k\.weight' and 6 more"):
        file_adapters(base, read_model_config(base), 16).pairs(deeper)


def test_two_adapters_of_a_real_model_answer_the_official_client(
    real_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = real_model("qwen2.5-coder-1.5b")
    for seed, name in enumerate(("one", "two")):
        lora_zoo.write_random_peft(model, tmp_path / name, seed=seed, size=4)
    loras = [f"--lora={name}={tmp_path / name}" for name in ("one", "two")]
    running = ServeProcess("--model", model, "--max-context", "2048", *loras).ready()
    try:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        names = [entry.id for entry in client.models.list().data]
        answers = {}
        for name in names:
            reply = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "Name three colours."}], temperature=0, max_tokens=24
            )
            answers[name] = reply.choices[0].message.content
            assert reply.model == name
        assert len(names) == len(set(answers.values())) == 3
    finally:
        running.close()
