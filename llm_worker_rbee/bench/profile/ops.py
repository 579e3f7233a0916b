"""Op tables that pass every call on to a backend's and note what it cost: `TimedOps` its time, `CountedOps` its work.

The two are apart so that counting does not disturb the clock. A `linear` belongs to the part of the model whose weight
it is given; an op that this file does not know gets a line of its own, by its name. Time is that of the calling thread:
a backend must have finished when its op returns.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...backends.ops import Batch, Ops
from ...models import Transformer
from ...weights import Checkpoint
from ..roofline import Work

Call = Callable[..., Any]
SETUP = {"prepare", "prepare_vector", "empty_kv"}  # not part of a step
COMPONENT_OF = {
    "embed": "embedding",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "rope_store": "rope_kv_write",
    "attention": "attention",
    "gated": "mlp",
    "take": "head",
    "logits": "head",
    "sample": "sampling",
    "logprobs": "sampling",
}
# operations for each value of the answer; an exponential counts as one
PER_VALUE = {"rms_norm": 4, "add_rms_norm": 5, "gated": 4, "embed": 1, "rope": 3}
# (component, layer's part, its tensors in the file)
PARTS: tuple[tuple[str, Callable[[Any], Any], tuple[str, ...]], ...] = (
    ("qkv", lambda block: block.attention.qkv, ("attn_q", "attn_k", "attn_v", "attn_qkv")),
    ("output", lambda block: block.attention.output, ("attn_output",)),
    ("mlp", lambda block: block.mlp.gate_up, ("ffn_gate", "ffn_up")),
    ("mlp", lambda block: block.mlp.down, ("ffn_down",)),
)


class Weight(NamedTuple):
    """A packed weight: whose it is, what it takes in the file, how many values it has."""

    component: str
    bytes: int
    values: int


def weights_of(model: Transformer, checkpoint: Checkpoint) -> dict[int, Weight]:
    """The weights of a model, by the identity of their handles."""
    tensors, found = checkpoint.tensors, {}
    for i, block in enumerate(model.blocks):
        for component, part, names in PARTS:
            own = [tensors[key] for name in names if (key := f"blk.{i}.{name}.weight") in tensors]
            weight = Weight(component, sum(t.nbytes for t in own), sum(t.size for t in own))
            found[id(part(block).weight)] = weight
    head = tensors.get("output.weight") or tensors["token_embd.weight"]
    table = tensors["token_embd.weight"]
    return {
        id(model.embedding): Weight("embedding", table.nbytes, table.size),
        **found,
        id(model.head): Weight("head", head.nbytes, head.size),
    }


def is_split(ops: Ops) -> bool:
    """Whether a backend has the rotation and the write into the cache as functions of their own."""
    return hasattr(ops, "rope") and hasattr(ops, "store")


@dataclass(slots=True)
class Spent:
    """What one component has taken until now."""

    seconds: float = 0.0
    calls: int = 0


@dataclass(slots=True)
class Stopwatch:
    """Time by component."""

    parts: dict[str, Spent] = field(default_factory=dict)

    def timed(self, component: str, function: Call) -> Call:
        """The same function, on the clock."""
        spent, clock = self.parts.setdefault(component, Spent()), time.perf_counter

        def call(*args: Any, **more: Any) -> Any:
            start = clock()
            result = function(*args, **more)
            spent.seconds += clock() - start
            spent.calls += 1
            return result

        return call

    def take(self) -> dict[str, Spent]:
        """What was noted since the last time; the clocks start at zero again."""
        taken = {name: Spent(spent.seconds, spent.calls) for name, spent in self.parts.items() if spent.calls}
        for spent in self.parts.values():
            spent.seconds, spent.calls = 0.0, 0
        return taken


class _Passing:
    """Passes ops on; a wrapped op is made once, when it is first asked for."""

    def __init__(self, ops: Ops, weights: Mapping[int, Weight]) -> None:
        self._ops = ops
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if callable(value) and name not in SETUP:
            value = self._rope_store if name == "rope_store" and is_split(self._ops) else self._wrapped(name, value)
        setattr(self, name, value)
        return value

    def _rope_store(self, q: Any, k: Any, v: Any, positions: Any, table: Any, kv: Any, slots: Any) -> Any:
        """What `rope_store` means, in two parts."""
        self.store(self.rope(k, positions, table), v, kv, slots)
        return self.rope(q, positions, table)

    def _wrapped(self, name: str, function: Call) -> Call:
        raise NotImplementedError


PARTED = {**COMPONENT_OF, "rope": "rope", "store": "kv_write"}


class TimedOps(_Passing):
    """An op table on a stopwatch."""

    def __init__(self, ops: Ops, weights: Mapping[int, Weight], watch: Stopwatch) -> None:
        super().__init__(ops, weights)
        self._watch = watch

    def _wrapped(self, name: str, function: Call) -> Call:
        if name != "linear":
            return self._watch.timed(PARTED.get(name, name), function)
        known = {key: self._watch.timed(weight.component, function) for key, weight in self._weights.items()}
        other = self._watch.timed("linear", function)
        return lambda x, w, bias=None: known.get(id(w), other)(x, w, bias)


class CountedOps(_Passing):
    """An op table that adds up the work of each component: what the answer needs, not what the backend does for it."""

    def __init__(self, ops: Ops, weights: Mapping[int, Weight], resident: float) -> None:
        super().__init__(ops, weights)
        self._resident = resident  # bytes of all weights: each is read once a step, so none is in a cache by then
        self._work: dict[str, Counter[Work]] = {}

    def take_work(self) -> dict[str, Counter[Work]]:
        """Calls by their work, of each component, since the last time."""
        taken, self._work = self._work, {}
        return taken

    def _wrapped(self, name: str, function: Call) -> Call:
        def call(*args: Any, **more: Any) -> Any:
            result = function(*args, **more)
            given = _positional(function, args, more)
            component = PARTED.get(name, name)
            if name == "linear" and id(given[1]) in self._weights:
                component = self._weights[id(given[1])].component
            self._work.setdefault(component, Counter())[self._count(name, given, result)] += 1
            return result

        return call

    def _count(self, name: str, args: tuple[Any, ...], result: Any) -> Work:
        if name in ("linear", "logits") and (weight := self._weights.get(id(args[1]))) is not None:
            moved = weight.bytes + _touched((args[0], result))
            return Work(moved, 2.0 * args[0].shape[0] * weight.values, max(self._resident, moved))
        if name == "embed" and (weight := self._weights.get(id(args[0]))) is not None:
            values = math.prod(result.shape)
            return Work(weight.bytes * values / weight.values + _touched((result,)), values)
        if name == "attention":
            return attention_work(args[0], args[1], args[2], args[3], result)
        if name == "rope_store":
            q, k, v = args[:3]
            return Work(2 * _touched((q, k, v)), PER_VALUE["rope"] * (math.prod(q.shape) + math.prod(k.shape)))
        if name == "store":
            return Work(2 * _touched(args[:2]))
        values = sum(math.prod(array.shape) for array in list(_arrays((result,)))[:1])
        return Work(_touched((*args, result)), PER_VALUE.get(name, 0) * values)


def attention_work(q: Any, kv: Any, batch: Batch, params: Any, result: Any) -> Work:
    """Every query meets the keys that it may see, twice (scores, mix); a key is read once for its request."""
    pairs = keys = 0
    for r, length in enumerate(batch.context_len.tolist()):
        start, end = int(batch.query_start[r]), int(batch.query_start[r + 1])
        seen = [min(p + 1, params.window or length) for p in batch.positions[start:end].tolist()]
        pairs += sum(seen)
        keys += min(length, max(seen, default=0) + end - start - 1)
    heads, dim = q.shape[-2:]
    # The reference has positions before heads; where keys lie otherwise (five dimensions), values have them behind.
    slots = kv.v.shape[0] * kv.v.shape[1 if kv.k.ndim == 4 else 2]
    per_key = sum(cache.nbytes // slots for cache in kv)
    return Work(keys * per_key + _touched((q, result)), 4.0 * heads * dim * pairs)


def _positional(function: Call, args: tuple[Any, ...], more: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(inspect.signature(function).bind(*args, **more).args) if more else args


def _arrays(values: Iterable[Any]) -> Iterator[Any]:
    """Arrays among the values, also in a tuple of results; caches and packed weights are not looked into."""
    for value in values:
        if type(value) is tuple:
            yield from _arrays(value)
        elif hasattr(value, "nbytes") and hasattr(value, "shape"):
            yield value


def _touched(values: Iterable[Any]) -> float:
    return float(sum(array.nbytes for array in _arrays(values)))
