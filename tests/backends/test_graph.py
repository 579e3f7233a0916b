"""The recorded graph of a model and the rewrites of its ops."""

from __future__ import annotations

from typing import Any

import pytest

from llm_worker_rbee.backends.graph import Graph, Node, Recorder, Rewrite, Value, apply_rewrites, record
from llm_worker_rbee.backends.ops import LOGITS, TOKENS


class Weight:
    """A weight of which only the shape matters."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns


def two_products(ops: Any, batch: Any, kv: Any) -> tuple[Value, None]:
    x = ops.embed(Weight(100, 8), batch.ids)
    y = ops.linear(ops.rms_norm(x, "norm", 1e-5), Weight(16, 8))
    y, _ = ops.add_rms_norm(ops.linear(ops.gated(y, "silu"), Weight(8, 8)), x, "final", 1e-5)
    out: Value = ops.logits(ops.take(y, batch.logits_index), Weight(100, 8))
    return out, None


def ops_of(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def test_record_notes_ops_in_order_with_symbolic_shapes_and_defaults() -> None:
    graph = record(two_products, 1)
    assert ops_of(graph) == ["embed", "rms_norm", "linear", "gated", "linear", "add_rms_norm", "take", "logits"]
    embed, norm, up, gated, *_ = graph.nodes
    assert (embed.output.shape, up.output.shape, gated.output.shape) == ((TOKENS, 8), (TOKENS, 16), (TOKENS, 8))
    assert (embed["scale"], up["bias"], norm.inputs) == (1.0, None, (embed.output,))
    assert graph.output.shape == (LOGITS, 100)


def test_recorder_of_unknown_op_raises() -> None:
    with pytest.raises(AttributeError, match="no_such_op"):
        Recorder().no_such_op()


def test_rewrite_fuses_linked_neighbours_and_keeps_their_parts() -> None:
    graph = apply_rewrites(record(two_products, 1), [Rewrite("mlp", "linear gated")])
    assert ops_of(graph) == ["embed", "rms_norm", "mlp", "linear", "add_rms_norm", "take", "logits"]
    fused = graph.nodes[2]
    assert [part.op for part in fused.fused] == ["linear", "gated"]
    assert fused.inputs == (graph.nodes[1].output,)
    assert fused.outputs == (fused.fused[1].output,)
    assert (fused.part("gated"), fused.part("take"), fused.parts("linear")) == (fused.fused[1], None, fused.fused[:1])


def test_rewrite_skips_missing_optional_ops_and_unlinked_trailing_ones() -> None:
    rewrite = Rewrite("norm", "take? add_rms_norm take?")
    graph = apply_rewrites(record(two_products, 1), [rewrite])
    assert [part.op for part in graph.nodes[5].fused] == ["add_rms_norm", "take"]
    x = Value((TOKENS, 8))
    norm, other = Node("add_rms_norm", {"x": x}, (Value((TOKENS, 8)),)), Node("take", {"x": x}, (Value((TOKENS, 8)),))
    graph = apply_rewrites(Graph((norm, other), other.output), [rewrite])
    assert [len(node.fused) for node in graph.nodes] == [1, 0]


def test_value_read_elsewhere_prevents_fusion_unless_marked() -> None:
    graph = record(two_products, 1)  # the embedding is read again as the residual stream
    assert ops_of(apply_rewrites(graph, [Rewrite("start", "embed rms_norm")]))[:2] == ["embed", "rms_norm"]
    fused = apply_rewrites(graph, [Rewrite("start", "embed* rms_norm")]).nodes[0]
    assert fused.op == "start"
    assert set(fused.outputs) == {graph.nodes[0].output, graph.nodes[1].output}


def test_condition_of_rewrite_is_asked_with_the_fused_node() -> None:
    rewrite = Rewrite("mlp", "linear gated", lambda node: node.fused[1]["activation"] == "gelu_tanh")
    assert "mlp" not in ops_of(apply_rewrites(record(two_products, 1), [rewrite]))


def test_first_matching_rewrite_wins() -> None:
    rewrites = [Rewrite("first", "linear gated"), Rewrite("second", "linear")]
    assert ops_of(apply_rewrites(record(two_products, 1), rewrites))[2:4] == ["first", "second"]


def test_last_uses_hold_the_output_until_the_end() -> None:
    graph = record(two_products, 1)
    uses = graph.last_uses()
    assert uses[graph.nodes[0].output] == 5
    assert uses[graph.output] == len(graph.nodes)
