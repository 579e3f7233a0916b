"""A step of a model as a graph: the op calls of its definition, recorded once, and rewrites of neighbouring ops.

`Recorder` is a backend that computes nothing: its ops note what they were called with and return `Value`s, arrays whose
shape is known but for the sizes that a step decides. A backend lowers the graph to what it runs: first its table of
`Rewrite`s replaces runs of neighbouring ops by fused ones, then every op that is left becomes tasks or launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from .ops import LOGITS, SHAPES, TOKENS, Batch, Ops, Shape


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An array of a step; `name` is set for what the step gets from outside."""

    shape: Shape
    name: str = ""


class Node:
    """One op with its arguments by name: values, weights, parameters. A fused op has the ops that it replaces."""

    __slots__ = ("args", "fused", "inputs", "op", "outputs")

    def __init__(
        self, op: str, args: Mapping[str, Any], outputs: tuple[Value, ...], fused: tuple[Node, ...] = ()
    ) -> None:
        self.op, self.args, self.outputs, self.fused = op, args, outputs, fused
        read = [value for value in args.values() if isinstance(value, Value)]
        if fused:  # without what it makes for itself
            written = {value for node in fused for value in node.outputs}
            read = [value for node in fused for value in node.inputs if value not in written]
        self.inputs: tuple[Value, ...] = tuple(dict.fromkeys(read))

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    @property
    def output(self) -> Value:
        (value,) = self.outputs
        return value

    def parts(self, op: str) -> tuple[Node, ...]:
        """Return the ops of this name that it replaces, or itself."""
        return tuple(node for node in self.fused or (self,) if node.op == op)

    def part(self, op: str) -> Node | None:
        """Return the first of `parts`, if there is one."""
        return next(iter(self.parts(op)), None)


class Graph(NamedTuple):
    """The ops of a step in the order of their execution; `output` are the logits."""

    nodes: tuple[Node, ...]
    output: Value
    hidden: Value | None = None  # a second result of the step, after the logits

    def last_uses(self) -> dict[Value, int]:
        """Return for each value the index of the last node that reads it."""
        uses = {value: index for index, node in enumerate(self.nodes) for value in node.inputs}
        return uses | {value: len(self.nodes) for value in (self.output, self.hidden) if value is not None}


class Recorder(Ops):
    """An op table that records its calls."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def compute(self, op: str, args: dict[str, Any]) -> Any:
        outputs = tuple(Value(shape) for shape in SHAPES[op](**args))
        self.nodes.append(Node(op, args, outputs))
        return outputs[0] if len(outputs) == 1 else outputs


def record(
    forward: Callable[[Any, Batch, Sequence[Any]], tuple[Value, Value | None]],
    n_layers: int,
    hidden_width: int = 0,
    image_width: int = 0,
) -> Graph:
    """Return the graph of `forward(ops, batch, kv)`, which returns logits and hidden states; in it, `kv` is the number
    of a layer. `hidden_width`: of the hidden states that come with the batch; `image_width`: of encoded images."""
    recorder = Recorder()
    of_tokens = "ids", "positions", "slot_mapping", "state_out", "token_types", "rope_positions", "spans", "image_rows"
    sizes = dict.fromkeys((*of_tokens, "adapters", "adapter_scales"), TOKENS) | {"logits_index": LOGITS}
    arrays: Any = {field.name: Value((sizes.get(field.name, field.name),), field.name) for field in fields(Batch)}
    arrays["places"] = Value((TOKENS, 2), "places")
    for name, width in (("hidden", hidden_width), ("images", image_width)):
        arrays[name] = Value((TOKENS, width), name) if width else None
    output, hidden = forward(recorder, Batch(**arrays), range(n_layers))
    return Graph(tuple(recorder.nodes), output, hidden)


@dataclass(frozen=True)
class Rewrite:
    """A run of neighbouring ops that becomes one fused op.

    `?` marks optional ops, `*` ops whose values other ops may read too; the last op's values are always readable.
    """

    into: str
    pattern: str
    condition: Callable[[Node], bool] = lambda node: True

    @cached_property
    def _names(self) -> list[tuple[str, bool]]:
        return [(name.rstrip("?*"), name.endswith("?")) for name in self.pattern.split()]

    @cached_property
    def _shared(self) -> set[str]:
        return {name.rstrip("*") for name in self.pattern.split() if name.endswith("*")}

    def match(self, nodes: Sequence[Node], first: int) -> tuple[Node, ...]:
        """Return the nodes of the run that starts at `first`; none if there is no such run."""
        run: list[Node] = []
        num_required = sum(not is_optional for _, is_optional in self._names)
        for name, is_optional in self._names:
            node = nodes[first + len(run)] if first + len(run) < len(nodes) else None
            if node is not None and node.op == name and (num_required or _reads(node, run)):
                run.append(node)
                num_required -= not is_optional
            elif not is_optional:
                return ()
        return tuple(run)

    def fuse(self, run: tuple[Node, ...], readers: Mapping[Value, set[Node]]) -> Node | None:
        """Return the fused op of a run; None where its ops are not linked, or others read what lies inside."""
        if any(not any(_reads(later, [node]) for later in run[i + 1 :]) for i, node in enumerate(run[:-1])):
            return None
        outside = [value for node in run for value in node.outputs if readers.get(value, set()) - set(run)]
        if any(value in node.outputs for node in run[:-1] if node.op not in self._shared for value in outside):
            return None
        outputs = tuple(dict.fromkeys((*outside, *run[-1].outputs)))
        fused = Node(self.into, {}, outputs, tuple(part for node in run for part in node.fused or (node,)))
        return fused if self.condition(fused) else None


def have_one_eps(node: Node) -> bool:
    """Return whether all norms of a fused node have the same eps, for kernels that take one."""
    return len({part["eps"] for part in node.fused if "eps" in part.args}) <= 1


def _reads(node: Node, others: Sequence[Node]) -> bool:
    return any(value in other.outputs for other in others for value in node.inputs)


def apply_rewrites(graph: Graph, rewrites: Sequence[Rewrite]) -> Graph:
    """Replace runs of ops by fused ones, each by the first rewrite that matches; ops of no run stay."""
    readers: dict[Value, set[Node]] = defaultdict(set)
    for node in graph.nodes:
        for value in node.inputs:
            readers[value].add(node)
    if graph.hidden is not None:
        readers[graph.hidden].add(Node("return", {}, ()))
    result: list[Node] = []
    at = 0
    while at < len(graph.nodes):
        runs = ((rewrite, rewrite.match(graph.nodes, at)) for rewrite in rewrites)
        matches = ((run, rewrite.fuse(run, readers)) for rewrite, run in runs if run)
        run, node = next(((run, node) for run, node in matches if node is not None), ((), graph.nodes[at]))
        result.append(node)
        at += len(run) or 1
    return graph._replace(nodes=tuple(result))


class ProgramLine(NamedTuple):
    """One fused op of a lowered program, as `inspect --program` shows it."""

    component: str
    ops: str  # the recorded ops that it replaces
    runs: str  # kernels or launches


def op_names(node: Node) -> str:
    """Return the names of the ops of a fused node."""
    return " + ".join(part.op for part in node.fused or (node,))


def collapse_repeats(lines: Sequence[ProgramLine]) -> list[tuple[int, list[ProgramLine]]]:
    """Return the lines in runs, each with how often it repeats: layers that run the same appear once."""
    groups: list[tuple[int, list[ProgramLine]]] = []
    at = 0
    while at < len(lines):
        period, count = 1, 1
        for size in range(1, (len(lines) - at) // 2 + 1):
            unit, times = lines[at : at + size], 1
            while lines[at + times * size : at + (times + 1) * size] == unit:
                times += 1
            if times > 1 and times * size > period * count:
                period, count = size, times
        if count == 1 and groups and groups[-1][0] == 1:
            groups[-1][1].append(lines[at])
        else:
            groups.append((count, list(lines[at : at + period])))
        at += period * count
    return groups
