"""Run the decoder on token ids, and build it without one of its features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.backends.reference import ACTIVATIONS, ReferenceBackend
from llm_worker_rbee.config import EngineConfig, ModelConfig, RopeScaling
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.layers.attention import Attention, GatedDelta, ShortConv
from llm_worker_rbee.layers.block import Block
from llm_worker_rbee.layers.mlp import MoE
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.weights import open_checkpoint


def load(path: Path, max_context: int | None = None) -> Transformer:
    checkpoint = open_checkpoint(path)
    return load_model(checkpoint, select_backend(backend="reference"), read_model_config(checkpoint), max_context)


def compute_logits(
    model: Transformer, ids: list[int], chunk: int = 512, kv_type: str = "float32"
) -> NDArray[np.float32]:
    """Return the logits at every position, prefilled in chunks."""
    request = Request(list(ids), SamplingParams().resolve(), 1, 0, frozenset())
    runner = SingleSequence(model, len(ids), kv_type)
    parts = []
    while request.num_computed_tokens < len(ids):
        parts.append(to_numpy(runner.step(request, chunk, all_logits=True)))
    return np.concatenate(parts)


def to_numpy(array: Any) -> NDArray[Any]:
    """Return a copy on the host: a backend may reuse its arrays in the next step."""
    return np.array(array.cpu() if hasattr(array, "cpu") else array)


def greedy(model: Transformer, ids: list[int], n: int) -> list[int]:
    request = Request(list(ids), SamplingParams(temperature=0.0).resolve(), n, 0, frozenset())
    engine = Engine(model, EngineConfig(max_context=len(ids) + n, n_blocks=-(-(len(ids) + n) // 16)))
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.tokens


def _blocks(change: Callable[[Block], Block]) -> Callable[[Transformer], Transformer]:
    return lambda model: replace(model, blocks=tuple(change(block) for block in model.blocks))


def _no_bias(block: Block) -> Block:
    attention = replace(block.attention, qkv=replace(block.attention.qkv, bias=None))
    return replace(block, attention=attention)


def _no_tail(block: Block) -> Block:
    """Let a convolution see its own token alone."""
    mixer = block.attention
    if not isinstance(mixer, ShortConv):
        return block
    weight = mixer.weight.copy()
    weight[:, :-1] = 0
    return replace(block, attention=replace(mixer, weight=weight))


def _no_output_bias(block: Block) -> Block:
    attention = replace(block.attention, output=replace(block.attention.output, bias=None))
    return replace(block, attention=attention)


def _no_expert_bias(block: Block) -> Block:
    assert isinstance(block.mlp, MoE)
    return _change_moe(gate_up=replace(block.mlp.gate_up, bias=None), down=replace(block.mlp.down, bias=None))(block)


def _no_router_bias(block: Block) -> Block:
    assert isinstance(block.mlp, MoE)
    return _change_moe(router=replace(block.mlp.router, bias=None))(block)


def _norm_each_head(block: Block) -> Block:
    q_norm, k_norm = (replace(n, weight=n.weight[0]) for n in (block.attention.q_norm, block.attention.k_norm) if n)
    return replace(block, attention=replace(block.attention, q_norm=q_norm, k_norm=k_norm))


def _change_moe(**changes: Any) -> Callable[[Block], Block]:
    def change(block: Block) -> Block:
        if block.experts is not None:
            return replace(block, experts=replace(block.experts, moe=replace(block.experts.moe, **changes)))
        return replace(block, mlp=replace(block.mlp, **changes)) if isinstance(block.mlp, MoE) else block

    return change


def _change_params(**changes: Any) -> Callable[[Block], Block]:
    def change(block: Block) -> Block:
        mlp = block.mlp if block.experts is None else block.experts.moe
        return _change_moe(params=mlp.params._replace(**changes))(block) if isinstance(mlp, MoE) else block

    return change


class _Unlimited(ReferenceBackend):
    """Does not clamp the operands of "swiglu_oai"."""

    def gated(self, gate_up: Any, activation: str) -> Any:  # type: ignore[override]
        gate, up = np.split(gate_up, 2, axis=-1)
        return ACTIVATIONS[activation](gate) * (up + 1)


def _change_attention(**changes: Any) -> Callable[[Block], Block]:
    def change(block: Block) -> Block:
        is_attention = isinstance(block.attention, Attention)
        return replace(block, attention=replace(block.attention, **changes)) if is_attention else block

    return change


def _no_decay(block: Block) -> Block:
    layer = block.attention
    if not isinstance(layer, GatedDelta):
        return block
    return replace(block, attention=replace(layer, weights=layer.weights._replace(a=0 * layer.weights.a)))


def _no_convolution(block: Block) -> Block:
    layer = block.attention
    if not isinstance(layer, GatedDelta):
        return block
    alone = np.zeros_like(layer.conv)
    alone[:, -1] = layer.conv[:, -1]
    return replace(block, attention=replace(layer, conv=alone))


# A feature is removed either from the configuration or from the built model.
WITHOUT_CONFIG: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "window": lambda c: (
        replace(c, windows=(0,) * c.n_layers, rope_local_base=0.0)
        if not c.rope_local_base
        else replace(c, windows=tuple(10**6 if w else 0 for w in c.windows))
    ),
    "score soft cap": lambda c: replace(c, attention_cap=0.0),
    "logit soft cap": lambda c: replace(c, final_cap=0.0),
    "local rope base": lambda c: replace(c, rope_local_base=0.0),
    "rope scaling": lambda c: replace(c, rope_scaling=RopeScaling(original_context=c.rope_scaling.original_context)),
    "log multiplier": lambda c: replace(c, rope_scaling=replace(c.rope_scaling, mscale=0.0)),
    "attention temperature": lambda c: replace(c, temperature_beta=0.0),
    "untruncated ramp": lambda c: replace(c, rope_scaling=replace(c.rope_scaling, truncate=True)),
    "layers without rope": lambda c: replace(c, nope_layers=()),
    "partial rotation": lambda c: replace(c, rope_dim=c.head_dim),
    "embedding multiplier": lambda c: replace(c, embedding_scale=1.0),
    "residual multiplier": lambda c: replace(c, residual_scale=1.0),
    "attention multiplier": lambda c: replace(c, attention_scale=c.head_dim**-0.5),
    "logits scaling": lambda c: replace(c, logit_scale=1.0),
}
WITHOUT_BUILT: dict[str, Callable[[Transformer], Transformer]] = {
    "bias": _blocks(_no_bias),
    "short convolution": _blocks(_no_tail),
    "output bias": _blocks(_no_output_bias),
    "router bias": _blocks(_no_router_bias),
    "bias of experts": _blocks(_no_expert_bias),
    "sinks": _blocks(lambda b: replace(b, attention=replace(b.attention, sinks=None))),
    "swiglu_oai": _blocks(_change_moe(activation="silu")),
    "limit of swiglu_oai": lambda model: replace(model, ops=_Unlimited()),
    "q/k norm": _blocks(_change_attention(q_norm=None, k_norm=None)),
    "attention gate": _blocks(_change_attention(gate=None)),
    "decay": _blocks(_no_decay),
    "convolution": _blocks(_no_convolution),
    "wide q/k norm": _blocks(_norm_each_head),
    "post norms": _blocks(lambda b: replace(b, post_attention_norm=None, post_mlp_norm=None)),
    "shared expert": _blocks(_change_moe(shared=None, shared_gate=None)),
    "selection bias": _blocks(_change_moe(selection_bias=None)),
    "scale of experts": _blocks(_change_params(scale=1.0)),
    "shared gate": _blocks(_change_moe(shared_gate=None)),
    "weights that sum up to 1": _blocks(_change_params(renormalize=False)),
    "value norm": _blocks(lambda b: replace(b, attention=replace(b.attention, v_norm=None))),
    "layer scale": _blocks(lambda b: replace(b, input_scale=1.0)),
    "per-layer inputs": _blocks(lambda b: replace(b, per_layer_gate=None)),
    "per-layer tokens": lambda model: replace(model, per_layer_inputs=replace(model.per_layer_inputs, scale=0.0)),
    "parallel experts": _blocks(lambda b: replace(b, experts=None)),
    "scales of experts": _blocks(_change_moe(expert_scales=None)),
    "embedding scale": lambda model: replace(model, embedding_scale=1.0),
}


def load_without(path: Path, feature: str, max_context: int | None = None) -> Transformer:
    checkpoint, ops = open_checkpoint(path), select_backend(backend="reference")
    if feature in WITHOUT_BUILT:
        return WITHOUT_BUILT[feature](load_model(checkpoint, ops, read_model_config(checkpoint), max_context))
    config = WITHOUT_CONFIG[feature](read_model_config(checkpoint))
    if feature == "rope scaling":  # in a GGUF some scalings are tensors
        kept = {n: t for n, t in checkpoint.tensors.items() if not n.startswith("rope_f")}
        checkpoint = replace(checkpoint, tensors=kept)
    return load_model(checkpoint, ops, config, max_context)


def step_logits(model: Transformer, ids: list[int], sizes: list[int], *, fused: bool) -> NDArray[np.float32]:
    """Return the logits at every position; `sizes` are the tokens of each step."""
    runner, at, found = SingleSequence(model, len(ids)), 0, []
    for size in sizes:
        batch = runner.batch(ids[at : at + size], at, all_logits=True)
        found.append(model.forward(batch, runner.cache) if fused else model.forward_unfused(batch, runner.cache))
        at += size
    return np.concatenate(found)
