"""Decode attention: both kernels in many configurations, against plain torch over the same cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import CudaBackend, device  # noqa: E402
from llm_worker_rbee.backends.cuda.kernels import attention_decode  # noqa: E402
from llm_worker_rbee.backends.cuda.kernels.attention_decode import (  # noqa: E402
    SplitKVConfig,
    launch_decode_attention,
    split_kv_scratch,
)
from llm_worker_rbee.backends.cuda.kernels.rope import rope_tables  # noqa: E402
from llm_worker_rbee.backends.cuda.lowering import Attention  # noqa: E402
from llm_worker_rbee.backends.cuda.packed_weight import Int8Activations, kernel_outputs  # noqa: E402
from llm_worker_rbee.backends.ops import AttentionParams, KVLayer, RopeTable  # noqa: E402
from llm_worker_rbee.layers.rope import inverse_frequencies  # noqa: E402
from tests.helpers import int8_activations, torch_attention  # noqa: E402
from tests.helpers.layer_inputs import BlockTables, normal  # noqa: E402
from tests.helpers.random_tensors import relative_error  # noqa: E402

DEVICE = device.open_device(0)
LENGTHS = [75, 1, 20, 33, 9]  # of contexts, with the new token
CASES = {  # config; (heads, kv heads, dim), block size; cache, window, cap; norms and bias, parts, int8; rotated values
    "one head each": (SplitKVConfig(2, 1, 4, 1, 0, False), (2, 2, 32), 4, "float32", 0, 0.0, False, 1, True),
    "words of bfloat16": (SplitKVConfig(4, 1, 1, 1, 0, False), (2, 2, 64), 16, "bfloat16", 0, 0.0, False, 2, False),
    "float16, odd blocks": (SplitKVConfig(4, 1, 2, 1, 0, False), (3, 1, 32), 6, "float16", 40, 0.0, True, 1, False),
    "float8, cap, 4 warps": (SplitKVConfig(2, 4, 4, 2, 0, False), (2, 1, 64), 16, "float8", 0, 5.0, False, 1, False),
    "staged": (SplitKVConfig(4, 1, 4, 1, 3, False), (2, 1, 64), 8, "float16", 30, 0.0, False, 1, True),
    "dot": (SplitKVConfig(16, 1, 4, 1, 0, True), (4, 1, 32), 16, "float32", 0, 0.0, True, 1, True),
    "dot of words, staged": (SplitKVConfig(16, 1, 1, 1, 3, True), (7, 1, 32), 4, "float16", 30, 8.0, False, 1, False),
    "dot of float8": (SplitKVConfig(32, 1, 2, 1, 0, True), (8, 2, 64), 16, "float8", 0, 0.0, False, 2, True),
    "dot of bfloat16": (SplitKVConfig(16, 1, 8, 2, 0, True), (4, 1, 64), 16, "bfloat16", 0, 0.0, False, 1, False),
    "heads of 96": (SplitKVConfig(2, 1, 4, 1, 0, False), (2, 2, 96), 4, "float16", 0, 0.0, False, 2, True),
    "heads of 80, part": (SplitKVConfig(4, 2, 2, 1, 3, False), (2, 1, 80), 16, "bfloat16", 30, 0.0, True, 1, False, 20),
    "part of 64": (SplitKVConfig(4, 1, 4, 1, 0, False), (2, 1, 64), 8, "float32", 0, 0.0, True, 2, True, 48),
    "heads of 12": (SplitKVConfig(2, 1, 4, 1, 0, False), (2, 2, 12), 4, "float16", 0, 0.0, False, 1, False),
    "dot of heads of 80": (SplitKVConfig(16, 1, 4, 1, 0, True), (4, 1, 80), 16, "float8", 0, 5.0, True, 1, False),
    "dot, part of 96": (SplitKVConfig(16, 1, 2, 1, 3, True), (6, 1, 96), 4, "float16", 0, 0.0, True, 2, True, 72),
}  # fmt: skip
# The interpreter rounds the new key and value differently: it truncates bfloat16, and a float8 that should become the
# next power of two is half of it.
ROUNDED = {"float32": 1e-6, "float16": 1e-5, "bfloat16": 2e-3, "float8": 2e-2}


def block_of(shape: tuple[int, int, int], params: AttentionParams, rope: RopeTable, extra: bool, rng: Any) -> Any:
    """Make a fused op without its matrices; `extra`: with biases, norms and sinks."""
    heads, kv_heads, dim = shape
    bias, q_norm, k_norm = (
        torch.tensor(normal(rng, n), device=DEVICE) if extra else None for n in ((heads + 2 * kv_heads) * dim, dim, dim)
    )
    sinks = torch.linspace(-1, 3, heads, device=DEVICE) if extra else None
    none: Any = None
    return Attention(
        none, bias, q_norm, k_norm, 1e-5, heads, kv_heads, dim, rope, params, 0, sinks, none, none, 0.0, none
    )


def run(
    block: Any, config: SplitKVConfig, qkv: Any, kv: KVLayer, pages: BlockTables, requests: list[int], as_int8: bool
) -> Any:
    """Run the kernel for some of the requests and one row of padding."""
    where, tokens = DEVICE, len(requests) + 1
    rope = rope_tables(block.rope, torch.arange(max(LENGTHS), device=DEVICE))
    positions = device.upload(np.array([LENGTHS[r] - 1 for r in requests] + [-1]), DEVICE)
    tables = device.upload(np.concatenate((pages.table[requests], np.zeros_like(pages.table[:1]))), DEVICE)
    width = device.upload(np.array([pages.table.shape[1]]), DEVICE)
    columns = block.n_heads * block.head_dim
    partial, stats = split_kv_scratch(tokens, block.n_heads, block.head_dim, config, where)
    counters = torch.zeros(tokens, block.n_heads, dtype=torch.int32, device=where)
    scratch = (partial.fill_(torch.nan), stats.fill_(torch.nan), counters)
    out: Any = (
        Int8Activations.allocate(tokens, columns, where) if as_int8 else torch.zeros(tokens, columns, device=where)
    )
    qkv = qkv[:, [*requests, 0]].contiguous()
    launch_decode_attention(qkv, block, kv, rope, positions, tables, width, tokens, config, scratch, out, pdl=False)
    assert not scratch[2].any()
    assert not any(part[-1].any() for part in kernel_outputs(out))
    return int8_activations.dequantize(out)[:-1] if as_int8 else out[:-1]


@pytest.mark.parametrize("case", CASES)
def test_decode_attention_matches_torch(case: str, rng: np.random.Generator) -> None:
    config, shape, size, kind, window, cap, extra, parts, as_int8, *rope_dim = CASES[case]
    if not device.is_interpreted() and kind == "float32":
        kind = "bfloat16"
    heads, kv_heads, dim = shape
    params = AttentionParams(dim**-0.5, window, cap)
    temperature = 0.3 if parts == 2 else 0.0
    rope = RopeTable(inverse_frequencies(1e4, rope_dim[0] if rope_dim else dim), 1.25, temperature, 8)
    block, pages = block_of(shape, params, rope, extra, rng), BlockTables(LENGTHS, rng, size)
    kv = CudaBackend().empty_kv(pages.n_blocks, size, kv_heads, dim, kind)
    for cache in kv:
        cache.copy_(torch.tensor(normal(rng, *cache.shape)).to(cache.dtype))
    twin = KVLayer(*(cache.clone() for cache in kv))
    qkv = torch.tensor(normal(rng, parts, len(LENGTHS), (heads + 2 * kv_heads) * dim), device=DEVICE)

    batch = pages.batch([(r, n - 1, n) for r, n in enumerate(LENGTHS)])
    whole = qkv.sum(0) if block.bias is None else qkv.sum(0) + block.bias
    q, k, v = whole.view(len(LENGTHS), -1, dim).split((heads, kv_heads, kv_heads), 1)
    if extra:
        q, k = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w for x, w in
                ((q, block.q_norm), (k, block.k_norm)))  # fmt: skip
    turned = torch_attention.rope_store(q, k, v, batch.positions, rope, twin, batch.slot_mapping)
    found = run(block, config, qkv, kv, pages, list(range(len(LENGTHS))), as_int8)
    for ours, theirs in zip(kv, twin, strict=True):
        assert relative_error(ours.float(), theirs.float()) < ROUNDED[kind]
    wanted = torch_attention.attention(turned, kv, batch, params, block.sinks)
    assert relative_error(found, wanted) < (1e-5 if device.is_interpreted() and not as_int8 else 1e-2)
    alone = torch.cat([run(block, config, qkv, kv, pages, [r], as_int8) for r in (3, 0)])
    assert torch.equal(alone, found[[3, 0]])  # in any batch


def test_split_kv_config_is_valid_for_its_kernel() -> None:
    for requests in (1, 4, 5, 64, 256, 2000):
        for heads, kv_heads in ((32, 32), (9, 3), (32, 8), (28, 4), (64, 8)):
            config = attention_decode.split_kv_config(requests, heads, kv_heads)
            assert all((n & (n - 1)) == 0 for n in (config.tile_keys, config.max_splits, config.num_warps))
            assert 1 <= config.max_splits <= 32
    for size in (1, 6, 16, 48, 256):
        for dim, item, keys in ((32, 4, 64), (64, 2, 64), (80, 2, 32), (96, 1, 64), (128, 1, 64), (256, 2, 16)):
            config = SplitKVConfig(8, 2, 1, 1, 0, False)
            rows, runs = attention_decode.tile_runs(config, dim, item, size)
            assert size % rows == 0
            assert rows * runs == keys
