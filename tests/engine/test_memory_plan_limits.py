"""The limits of a step on GPUs of several sizes, and the memory that it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llm_worker_rbee.config import MAX_BATCH, STEP_TOKENS, ModelConfig, SchedulerLimits
from llm_worker_rbee.engine.memory_plan import (
    BATCH_STEP,
    DEVICE_MEMORY_FRACTION,
    Workspace,
    block_bytes,
    choose_batch,
    choose_step_tokens,
    max_scored_tokens,
)
from llm_worker_rbee.models.families import BY_HF

GB = 10**9


def shape(
    layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int, context: int
) -> ModelConfig:
    return ModelConfig(
        family=BY_HF["llama"], n_layers=layers, d_model=width, n_heads=heads, n_kv_heads=kv_heads,
        head_dim=width // heads, d_ff=hidden, vocab_size=vocabulary, context_length=context, norm_eps=1e-5,
        rope_dim=width // heads, rope_base=1e4, attention_scale=0.1, windows=(0,) * layers,
    )  # fmt: skip


LLAMA2_7B = shape(32, 4096, 32, 32, 11_008, 32_000, 4096)
LLAMA3_8B = shape(32, 4096, 32, 8, 14_336, 128_256, 8192)
LLAMA3_8B_LONG = shape(32, 4096, 32, 8, 14_336, 128_256, 131_072)
LLAMA3_70B = shape(80, 8192, 64, 8, 28_672, 128_256, 8192)
SMALL = shape(30, 576, 9, 3, 1536, 49_152, 8192)
TINY = shape(2, 64, 4, 2, 128, 300, 128)


def choose(
    config: ModelConfig, memory: int, kv_type: str = "bfloat16", kv_memory: int | None = None
) -> SchedulerLimits:
    tokens = choose_step_tokens(Workspace(config), memory)
    batch = choose_batch(
        Workspace(config), memory, tokens, kv_token_bytes=block_bytes(config, kv_type, 1), kv_memory=kv_memory,
        context=config.context_length, memory_fraction=DEVICE_MEMORY_FRACTION,
    )  # fmt: skip
    return SchedulerLimits(batch, tokens)


@pytest.mark.parametrize(
    ("config", "memory", "kv_type", "limits"),
    [
        (LLAMA2_7B, 143 * GB, "bfloat16", (448, 8192)),  # H200, Q4_K_M
        (LLAMA3_8B, 139 * GB, "float8", (1024, 8192)),  # H200, FP8
        (LLAMA3_8B_LONG, 132 * GB, "bfloat16", (896, 8192)),  # H200, BF16
        (LLAMA3_70B, 104 * GB, "bfloat16", (256, 2048)),  # H200, Q4_K_M
        (LLAMA3_8B, 67 * GB, "bfloat16", (384, 8192)),  # 80 GiB, BF16
        (LLAMA3_8B, 18 * GB, "bfloat16", (64, 2048)),  # 24 GB, Q4_K_M
        (SMALL, 140 * GB, "bfloat16", (1024, 8192)),
        (TINY, 2 * GB, "bfloat16", (1024, 8192)),
        (LLAMA3_70B, 2 * GB, "bfloat16", (64, 512)),  # hardly any room: as on a CPU
    ],
)  # fmt: skip
def test_limits_follow_model_and_memory(
    config: ModelConfig, memory: int, kv_type: str, limits: tuple[int, int]
) -> None:
    assert choose(config, memory, kv_type) == limits


def test_limits_grow_with_memory_and_leave_room_for_the_cache() -> None:
    rng = np.random.default_rng(4)
    for config in (LLAMA2_7B, LLAMA3_8B, LLAMA3_70B, SMALL):
        found = []
        for memory in sorted(rng.integers(2 * GB, 150 * GB, 30).tolist()):
            limits = choose(config, memory)
            found.append(limits)
            assert limits.max_batch % BATCH_STEP == 0
            assert limits.max_batch <= MAX_BATCH
            assert limits.max_step_tokens in STEP_TOKENS
            left = memory - Workspace(config).bytes(limits)
            if limits.max_batch > BATCH_STEP:
                each = DEVICE_MEMORY_FRACTION * left / limits.max_batch / block_bytes(config, "bfloat16", 1)
                assert each >= 512, "tokens of each request of a full batch"
        assert found == sorted(found, key=lambda limits: limits.max_step_tokens)


def test_batch_follows_kv_memory_and_drafts() -> None:
    assert choose(LLAMA3_8B, 139 * GB, kv_memory=20 * GB).max_batch == 128
    plain, drafting = (
        choose_batch(
            Workspace(LLAMA3_8B, drafts),
            40 * GB,
            2048,
            kv_token_bytes=block_bytes(LLAMA3_8B, "float8", 1),
            context=8192,
        )
        for drafts in (0, 16)
    )
    assert plain > drafting >= BATCH_STEP


def test_workspace_covers_arrays_of_the_largest_step() -> None:
    """Of a layer: the residual stream, the product of gate and up in float32, and what the down projection reads."""
    workspace, limits = Workspace(LLAMA3_8B), SchedulerLimits(512, 8192)
    layer = 8192 * (4 * 4096 + 4 * 2 * 14_336 + 2 * 14_336)
    logits = 4 * 512 * 128_256
    assert layer + logits < workspace.bytes(limits) < 3 * (layer + logits)
    assert workspace.bytes(SchedulerLimits(512, 512)) < workspace.bytes(limits) / 2.5
    assert Workspace(LLAMA3_8B, draft_tokens=4).bytes(limits) > layer + 5 * logits
    splits = 4 * 8192 * 4 * 2 * 14_336
    assert Workspace(LLAMA3_8B, batch_invariant=True).bytes(limits) > splits, "each product is a sum of four"
    attention_heavy = shape(1, 1024, 64, 64, 64, 100, 128)
    assert Workspace(attention_heavy).token_bytes > 4 * 3 * 1024
    hidden = Workspace(LLAMA3_8B, keeps_hidden=True).token_bytes - workspace.token_bytes
    assert hidden == 4 * 4096, "of each token, for multi-token prediction"
    with_inputs = replace(LLAMA3_8B, layer_input_dim=256)
    inputs = Workspace(with_inputs).token_bytes - workspace.token_bytes
    assert inputs >= 4 * LLAMA3_8B.n_layers * 256, "per-layer embeddings, kept until the last layer"


def test_scored_tokens_are_an_eighth_of_a_step() -> None:
    assert [max_scored_tokens(tokens) for tokens in (1, 512, 2048, 4096, 16_384)] == [64, 64, 256, 512, 512]


def test_limits_as_text() -> None:
    assert str(SchedulerLimits(448, 8192)) == "up to 448 requests in a batch and 8,192 tokens in a step"
    assert SchedulerLimits() == (64, 512)
