"""MLPs: plain, gated (SwiGLU, or GeGLU with activation gelu_tanh), and mixtures of experts.

A router chooses a few gated MLPs for each token; a shared one may serve all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend, PackedExperts, RouteParams
from .linear import Linear
from .norm import RMSNorm


@dataclass(frozen=True, slots=True, eq=False)
class MLP:
    """down(act(up(x)))."""

    up: Linear
    down: Linear
    activation: str

    def __call__(self, ops: Backend, x: Array) -> Array:
        """Map (T, width) to (T, width)."""
        return self.down(ops, ops.activate(self.up(ops, x), self.activation))


@dataclass(frozen=True, slots=True, eq=False)
class SwiGLU:
    """down(act(gate(x)) * up(x)); the fused projection holds gate rows, then up rows."""

    gate_up: Linear
    down: Linear
    activation: str = "silu"

    def __call__(self, ops: Backend, x: Array) -> Array:
        """Map (T, width) to (T, width)."""
        return self.down(ops, ops.gated(self.gate_up(ops, x), self.activation))


@dataclass(frozen=True, slots=True, eq=False)
class GroupedLinear:
    """(T, columns) or (T, k, columns) -> (T, k, rows), with the matrix of each chosen expert."""

    weight: PackedExperts
    bias: Array | None = None  # (experts, rows)

    def __call__(self, ops: Backend, x: Array, experts: Array) -> Array:
        """Return x @ weight[expert].T + bias[expert] for the experts of each token."""
        return ops.grouped_linear(x, self.weight, experts, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class MoE:
    """The weighted sum of k experts, each a gated MLP, plus the shared expert."""

    router: Linear
    params: RouteParams
    gate_up: GroupedLinear
    down: GroupedLinear
    activation: str = "silu"
    selection_bias: Array | None = None  # (experts,), added to the scores for the choice alone
    shared: SwiGLU | None = None
    shared_gate: Linear | None = None  # to one logit: its sigmoid multiplies the shared expert
    expert_scales: Array | None = None  # (experts,), of the weight of each

    def __call__(self, ops: Backend, x: Array, routed: Array | None = None) -> Array:
        """Map (T, width) to (T, width); the router reads `routed`, or x."""
        logits = self.router(ops, x if routed is None else routed)
        experts, weights = ops.route(logits, self.params, self.selection_bias, self.expert_scales)
        rows = self.down(ops, ops.gated(self.gate_up(ops, x, experts), self.activation), experts)
        shared = None if self.shared is None else self.shared(ops, x)
        gate = None if self.shared_gate is None else self.shared_gate(ops, x)
        return ops.combine(rows, weights, shared, gate)


@dataclass(frozen=True, slots=True, eq=False)
class ParallelExperts:
    """Experts in parallel with a dense MLP: both read the residual stream, each through its own norm, and add up."""

    router_norm: RMSNorm
    norm: RMSNorm
    moe: MoE
    post_norm: RMSNorm
    mlp_post_norm: RMSNorm

    def __call__(self, ops: Backend, x: Array, residual: Array) -> Array:
        """Return the MLP's result `x` plus the experts' result: (T, width)."""
        dense, routed = self.mlp_post_norm(ops, x), self.router_norm(ops, residual)
        routed_out = self.moe(ops, self.norm(ops, residual), routed)
        return ops.add(self.post_norm(ops, routed_out), dense)
