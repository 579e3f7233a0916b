"""Checkpoints: SwiGLU and block 1e-4, logits 1e-3, argmax and text at temperature 0 exact, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.llama import modeling_llama as llama

from llm_worker_rbee import LLM
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.layers.block import Block
from llm_worker_rbee.layers.mlp import SwiGLU
from llm_worker_rbee.layers.norm import RMSNorm
from llm_worker_rbee.models import Transformer
from tests.checkpoints.test_attention import LENGTHS, STEPS, our_attention
from tests.helpers import model_runs, model_zoo, tiny_models
from tests.helpers.layer_inputs import BlockTables, Floats, assert_caught, assert_checkpoint, linear, normal

ops = ReferenceBackend()

SWIGLU = BLOCK = 1e-4
LOGITS = 1e-3
SMOL: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
}
ODD: dict[str, Any] = {
    "hidden_size": 45,
    "intermediate_size": 77,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
}
GATED: dict[str, tuple[Any, Any, str]] = {
    "SmolLM2": (llama.LlamaMLP, transformers.LlamaConfig(**SMOL), "silu"),
    "odd": (llama.LlamaMLP, transformers.LlamaConfig(**ODD), "silu"),
    "gelu": (gemma2.Gemma2MLP, transformers.Gemma2Config(**ODD), "gelu_tanh"),
}


def randomised(module: Any) -> Any:
    torch.manual_seed(11)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = (
                torch.rand_like(weight) + 0.5 if "norm" in name else torch.randn_like(weight) / weight.shape[-1] ** 0.5
            )
            weight.copy_(noise)
    return module.float().eval()


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("tokens", [1, 7])
def test_swiglu_equals_transformers(kind: str, tokens: int, rng: np.random.Generator) -> None:
    cls, config, activation = GATED[kind]
    module = randomised(cls(config))
    x = normal(rng, tokens, config.hidden_size, scale=3.0)
    layer = SwiGLU(linear(module.gate_proj, module.up_proj), linear(module.down_proj), activation)
    expected = module(torch.from_numpy(x)).detach().numpy()
    assert_checkpoint(lambda: layer(ops, x), expected, SWIGLU)
    assert_caught(replace(layer, activation="gelu_tanh" if activation == "silu" else "silu")(ops, x), expected, SWIGLU)
    swapped = replace(layer, gate_up=linear(module.up_proj, module.gate_proj))
    assert_caught(swapped(ops, x), expected, SWIGLU)


def their_layer(settings: dict[str, Any]) -> Any:
    config: Any = transformers.AutoConfig.for_model(
        "llama",
        **settings,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return randomised(llama.LlamaDecoderLayer(config, 0))


def our_block(layer: Any, eps: float) -> Block:
    norms = [RMSNorm(n.weight.detach().numpy(), eps) for n in (layer.input_layernorm, layer.post_attention_layernorm)]
    mlp = SwiGLU(linear(layer.mlp.gate_proj, layer.mlp.up_proj), linear(layer.mlp.down_proj))
    return Block(norms[0], our_attention(layer.self_attn), norms[1], mlp)


def their_block_output(layer: Any, x: Floats) -> Floats:
    n, hidden = len(x), torch.from_numpy(x)[None]
    mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        embeddings = llama.LlamaRotaryEmbedding(layer.self_attn.config)(hidden, torch.arange(n)[None])
        out = layer(hidden, attention_mask=mask, position_embeddings=embeddings)
    return np.asarray((out[0] if isinstance(out, tuple) else out).reshape(n, -1))


def run_block(block: Block, xs: list[Floats], *, with_residual: bool) -> Floats:
    """Return each request's residual stream; the input is whole, or a residual and the previous block's delta."""
    pages = BlockTables(LENGTHS, np.random.default_rng(2))
    kv = ops.empty_kv(pages.n_blocks, pages.block_size, block.attention.n_kv_heads, block.attention.head_dim)
    outs = [np.empty_like(x) for x in xs]
    for spans in STEPS["chunks mixed with decode"]:
        batch = pages.batch(spans)
        x = np.concatenate([xs[r][start:end] for r, start, end in spans])
        half = x * np.float32(0.25)  # exact, so that the parts add up again
        added, stream = block(ops, half, x - half, kv, batch) if with_residual else block(ops, x, None, kv, batch)
        for (r, start, end), at in zip(spans, batch.query_start, strict=False):
            outs[r][start:end] = (added + stream)[at : at + end - start]
    return np.concatenate(outs)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("settings", [SMOL, ODD], ids=["SmolLM2", "odd"])
def test_block_equals_transformers(settings: dict[str, Any], with_residual: bool, rng: np.random.Generator) -> None:
    layer = their_layer(settings)
    block, xs = (
        our_block(layer, layer.self_attn.config.rms_norm_eps),
        [normal(rng, n, settings["hidden_size"]) for n in LENGTHS],
    )
    expected = np.concatenate([their_block_output(layer, x) for x in xs])
    assert_checkpoint(lambda: run_block(block, xs, with_residual=with_residual), expected, BLOCK)


def test_block_with_a_wrong_epsilon_or_scale_is_caught(rng: np.random.Generator) -> None:
    layer = their_layer(SMOL)
    xs = [normal(rng, n, 576, scale=0.1) for n in LENGTHS]
    expected = np.concatenate([their_block_output(layer, x) for x in xs])
    right = our_block(layer, 1e-5)
    assert_caught(run_block(our_block(layer, 1e-3), xs, with_residual=False), expected, BLOCK)
    scaled = replace(right, attention=replace(right.attention, params=right.attention.params._replace(scale=1 / 64)))
    assert_caught(run_block(scaled, xs, with_residual=False), expected, BLOCK)
    swapped = replace(right, attention_norm=right.mlp_norm, mlp_norm=right.attention_norm)
    assert_caught(run_block(swapped, xs, with_residual=False), expected, BLOCK)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Transformer]:
    theirs = model_zoo.make_hf(model_zoo.ZOO["llama"])
    return theirs, model_runs.load(model_zoo.save_hf(theirs, tmp_path_factory.mktemp("small")))


@pytest.mark.parametrize("length", [1, 24, 65])
def test_logits_and_argmax_equal_transformers(length: int, small: tuple[Any, Transformer]) -> None:
    theirs, ours = small
    ids = np.random.default_rng(length).integers(3, model_zoo.VOCAB, length).tolist()
    expected = model_zoo.hf_logits(theirs, ids)
    assert_checkpoint(lambda: model_runs.compute_logits(ours, ids), expected, LOGITS)
    assert np.array_equal(model_runs.compute_logits(ours, ids).argmax(-1), expected.argmax(-1))


def test_logits_of_a_wrong_model_are_caught(small: tuple[Any, Transformer]) -> None:
    theirs, ours = small
    ids = model_zoo.prompt_ids(model_zoo.ZOO["llama"])
    expected = model_zoo.hf_logits(theirs, ids)

    def with_blocks(change: Any) -> Transformer:
        return replace(ours, blocks=tuple(change(b) for b in ours.blocks))

    wrong = {
        "epsilon": with_blocks(lambda b: replace(b, mlp_norm=replace(b.mlp_norm, eps=1e-2))),
        "scale": with_blocks(
            lambda b: replace(b, attention=replace(b.attention, params=b.attention.params._replace(scale=0.3)))
        ),
        "layer order": replace(ours, blocks=ours.blocks[::-1]),
    }
    for model in wrong.values():
        assert_caught(model_runs.compute_logits(model, ids), expected, LOGITS)
    more_heads = with_blocks(lambda b: replace(b, attention=replace(b.attention, n_heads=2, n_kv_heads=3)))
    with pytest.raises(ValueError, match="shape"):
        model_runs.compute_logits(more_heads, ids)


def test_greedy_text_equals_transformers(tmp_path: Path) -> None:
    """End to end with the tokenizer, against transformers' greedy tokens on the same weights."""
    model = tiny_models.random_hf()
    llm = LLM(tiny_models.write_random(tmp_path / "tiny.gguf", model))
    for prompt in ("Hello again", "a", "x = 1\n"):
        ids = list(prompt.encode())  # one token per byte
        answer = llm.generate(prompt, temperature=0, max_tokens=24, ignore_eos=True)
        expected = model_zoo.hf_greedy(model, ids, 24)
        assert answer.prompt_tokens == ids
        assert answer.tokens == expected
        assert answer.text == b"".join(tiny_models.token_bytes(t) for t in expected).decode(errors="replace")
