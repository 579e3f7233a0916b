"""How many requests and tokens a step may have by default, and the memory of a GPU that the largest step takes.

On a CPU the limits are those of `EngineConfig`: a larger batch would take as much longer. A GPU computes a hundred
requests in little more than the time of one, so there the limits follow from the memory beside the weights: as many
requests as the KV cache has room for, as many tokens as a step computes in a fraction of a second. No arrays here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..config import MAX_BATCH, EngineConfig, ModelConfig

DEFAULT_CONFIG = EngineConfig(max_context=1, n_blocks=1)
DELTA_CHUNK = 64  # tokens of a chunk of the gated delta rule on a GPU
BATCH_STEP = 64  # the default is a multiple of this
# Tokens that each request of a full batch has room for: an eighth of the context, within these bounds.
CONTEXT_SHARE, MIN_REQUEST_TOKENS, MAX_REQUEST_TOKENS = 8, 512, 1024
STEP_TOKENS = (8192, 4096, 2048, 1024, 512)
MIN_STEP_TOKENS_BY_TIME = 2048  # however large the model: fewer would leave tensor cores idle
MAX_STEP_FLOPS = 1.5e14  # of the matrix products of a step: 8,192 tokens of 8B parameters, 0.2 to 0.4 s on an H200
WORKSPACE_SHARE = 0.1  # of the memory beside the weights, that the arrays of a step may take by default
MAX_SCORED_TOKENS = 512  # in a step, of prompts whose log-probabilities are requested: each needs a row of logits
MIN_SCORED_TOKENS = 64
GRAPH_TOKENS = 1024  # of the largest captured step: graphs keep their arrays in a memory pool of their own
LOGIT_COPIES = 3  # as computed, in the buffer that graphs share, capped or gathered for sampling
SAMPLED_ROWS = 192  # at a time, at most: one on each multiprocessor, two numbers of 8 bytes a token of the vocabulary
# Float32 copies of a product: its parts, and joined or scaled; batch-invariant products have 4 splits in every step.
PRODUCT_COPIES, BATCH_INVARIANT_COPIES = 2, 8


class SchedulerLimits(NamedTuple):
    """Requests and tokens of a step."""

    max_batch: int = DEFAULT_CONFIG.max_batch
    max_step_tokens: int = DEFAULT_CONFIG.max_step_tokens

    def __str__(self) -> str:
        return f"up to {self.max_batch:,} requests in a batch and {self.max_step_tokens:,} tokens in a step"


def max_scored_tokens(max_step_tokens: int) -> int:
    """Return how many prompt tokens with log-probabilities a step may have."""
    return min(MAX_SCORED_TOKENS, max(MIN_SCORED_TOKENS, max_step_tokens // 8))


@dataclass(frozen=True, slots=True)
class Workspace:
    """The arrays of a step on a GPU, beside weights and KV cache."""

    config: ModelConfig
    draft_tokens: int = 0  # of each decoding request
    batch_invariant: bool = False
    keeps_hidden: bool = False  # of all tokens, for multi-token prediction

    @property
    def token_bytes(self) -> int:
        """The bytes of one token at the layer that takes most; activations have 2 bytes a value."""
        config, copies = self.config, BATCH_INVARIANT_COPIES if self.batch_invariant else PRODUCT_COPIES
        width, layers = config.d_model, range(config.n_layers)
        heads, kv_heads = max((config.n_heads * dim, n * dim) for n, dim in map(config.kv_shape, layers))
        attention = copies * 4 * (heads + 2 * kv_heads) + (2 + 4 + 2) * heads  # product; queries, output, activations
        if config.family.gated_attention:
            attention += copies * 4 * heads
        if (linear := config.linear) is not None:  # product; convolution; w, u and scores of chunks; result
            values = linear.v_heads * linear.v_dim
            chunks = linear.v_heads * (linear.k_dim + linear.v_dim + DELTA_CHUNK)
            delta = copies * 4 * (linear.channels + values) + 4 * (linear.channels + chunks) + 6 * values
            attention = max(attention, delta)
        d_ff = max(map(config.d_ff_of, layers))
        mlp = copies * 4 * 2 * d_ff + 2 * d_ff  # gate and up; their combination
        if (experts := config.experts) is not None:  # products of all experts of a token, without splits
            made = experts.used * (10 * experts.d_ff + 4 * width) + copies * 8 * experts.shared_d_ff
            mlp = max(mlp, made + (4 * width if config.family.parallel_experts else 0))  # the MLP's result is kept
        inputs = 4 * config.n_layers * config.layer_input_dim  # per-layer embeddings, kept until the last layer
        first = (1 + copies) * inputs  # rows of their table, and the product
        hidden = 4 * width if self.keeps_hidden else 0
        return 4 * width + 2 * width + hidden + inputs + max(attention, mlp, first)  # with the stream and its norm

    def bytes(self, limits: SchedulerLimits) -> int:
        """Return the bytes of the largest step, with those that its graphs keep."""
        decoding = limits.max_batch * (1 + self.draft_tokens)
        tokens = max(limits.max_step_tokens, decoding)
        rows = decoding + min(limits.max_step_tokens, max_scored_tokens(limits.max_step_tokens))
        logits = (LOGIT_COPIES * 4 * rows + 2 * 8 * min(rows, SAMPLED_ROWS)) * self.config.vocab_size
        return (tokens + min(tokens, GRAPH_TOKENS)) * self.token_bytes + logits


def choose_step_tokens(workspace: Workspace, memory: int) -> int:
    """Return the default of `max_step_tokens` on a GPU with `memory` bytes beside the weights."""
    config = workspace.config
    experts, d_ff = config.experts, config.d_ff
    if experts is not None:
        d_ff = experts.used * experts.d_ff + experts.shared_d_ff + (d_ff if config.family.parallel_experts else 0)
    matrix_rows = 2 * (config.n_heads + config.n_kv_heads) * config.head_dim + 3 * d_ff  # of d_model values each
    flops = 2 * config.n_layers * config.d_model * matrix_rows  # of a token
    for tokens in STEP_TOKENS:
        is_fast = flops * tokens <= MAX_STEP_FLOPS or tokens <= MIN_STEP_TOKENS_BY_TIME
        if is_fast and workspace.bytes(SchedulerLimits(BATCH_STEP, tokens)) <= WORKSPACE_SHARE * memory:
            return tokens
    return STEP_TOKENS[-1]


def choose_batch(
    workspace: Workspace, memory: int, max_step_tokens: int, *, kv_token_bytes: int, context: int,
    kv_memory: int | None = None, memory_fraction: float = 1.0, state_bytes: int = 0,
) -> int:  # fmt: skip
    """Return the default of `max_batch` on a GPU with `memory` bytes beside the weights.

    It is the number of requests, of a share of the context and `state_bytes` each, that fit into the KV cache:
    `kv_memory` bytes, or `memory_fraction` of what the arrays of a step leave.
    """
    tokens_each = min(context, max(MIN_REQUEST_TOKENS, min(MAX_REQUEST_TOKENS, context // CONTEXT_SHARE)))
    for batch in range(MAX_BATCH, BATCH_STEP, -BATCH_STEP):
        left = memory - workspace.bytes(SchedulerLimits(batch, max_step_tokens))
        room = int(memory_fraction * left) if kv_memory is None else min(kv_memory, left)
        if batch * (tokens_each * kv_token_bytes + state_bytes) <= room:
            return batch
    return BATCH_STEP
