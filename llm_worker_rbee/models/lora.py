"""Adapters of a model: which products they add to, and where the rows of a file's matrices are in the packed ones.

The loader stacks, splits and permutes matrices while it packs them. It runs once more here, with the row numbers of
matrices instead of their bytes and a backend that only notes what it is given: so each product is known by the tensors
and rows that it is made of, in every family, and the pairs of an adapter follow them. An adapter of the other format
(PEFT on a GGUF, and the reverse) is read as if the base were of that format.

A step in which a token has an adapter runs a graph of its own: the model's, with `shrink` and `expand` after each
product. All other steps run the graph that they run without adapters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..backends.graph import Graph, Node, record
from ..backends.ops import Array, Backend, Batch, FusedForward, LoraSite, Ops, PackedWeight, RopeTable
from ..config import ModelConfig
from ..errors import InvalidRequestError, UnsupportedModelError
from ..layers.rope import still_table
from ..weights import Checkpoint, Tensor
from ..weights.lora import EMBEDDING, EXPERT_STACK, Adapter, LowRank
from ..weights.quants import BLOCK_TYPES
from .decoder import Transformer
from .families import BY_GGUF, gguf_architecture
from .loader import ModelLoader

HEAD = "output.weight"
WEIGHTS = {"linear": "w", "grouped_linear": "w", "logits": "head", "embed": "table"}  # arguments of products
SiteKey = tuple[str, int]  # op, identity of the packed weight
ROW_BYTES = 4
USUAL = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down))\.weight")
MAX_COMBINED = 4  # times the largest rank: what adapters that a request combines may have together


@dataclass(frozen=True, slots=True, eq=False)
class RowNumbers(Tensor):
    """A tensor whose rows are their numbers in the file, of each expert from 0."""

    @property
    def rows(self) -> NDArray[np.uint8]:
        return self.data.reshape(-1, ROW_BYTES)

    @property
    def numbers(self) -> NDArray[np.int32]:
        return self.data.view(np.int32)

    def dequantize(self) -> NDArray[np.float32]:
        return np.ones(self.shape, np.float32)

    def find_nonfinite_scale(self) -> int | None:
        return None


class Packed(NamedTuple):
    """What the loader would pack into one weight: for each expert, or once, the tensors of its parts."""

    parts: Sequence[Sequence[RowNumbers]]
    num_experts: int = 0

    @property
    def rows(self) -> int:
        return sum(part.shape[0] for part in self.parts[0])

    @property
    def columns(self) -> int:
        return int(self.parts[0][0].shape[1])


NOTING_BACKEND = SimpleNamespace(
    has_device_memory=True,  # blocks are built in one thread
    threads=1,
    prepare=lambda tensors: Packed([tensors]),
    prepare_experts=lambda experts: Packed(experts, len(experts)),
    prepare_vector=lambda values: values,
    fuse=lambda graph: None,
)


@dataclass(slots=True)
class RowLoader(ModelLoader):
    """The loader, over row numbers."""

    def matrix(self, name: str, *shape: int) -> Tensor:
        if name not in self.checkpoint.tensors or self.checkpoint.tensors[name].shape != shape:
            raise UnsupportedModelError(f"tensor {name!r} of shape {shape} is not in the base as the adapter names it")
        numbers = np.arange(np.prod(shape[:-1]), dtype=np.int32)
        if len(shape) == 3:
            numbers %= shape[1]
        return RowNumbers(name, BLOCK_TYPES["F32"], shape, numbers.view(np.uint8))

    def head(self, embedding: PackedWeight) -> PackedWeight:
        if HEAD not in self.checkpoint.tensors:
            return embedding
        return self.pack([self.matrix(HEAD, self.config.vocab_size, self.config.d_model)])

    def rope_order(self, name: str, rows: int) -> NDArray[np.intp] | None:
        if self.checkpoint.format != "gguf":
            return super(RowLoader, self).rope_order(name, rows)
        family = BY_GGUF[gguf_architecture(self.config)]  # whose GGUF files may order rows otherwise than this one's
        own = replace(self.config, family=replace(self.config.family, rope=family.rope))
        return ModelLoader(self.checkpoint, own, self.ops, 1, self.advance).rope_order(name, rows)

    def vector(self, name: str, *shape: int) -> NDArray[np.float32]:
        return np.ones(shape, np.float32)

    def optional_vector(self, name: str, width: int) -> NDArray[np.float32] | None:
        return None

    def require_biases(self, names: list[str]) -> None: ...
    def check_quantization(self) -> None: ...
    def refuse_unused_tensors(self) -> None: ...
    def ropes(self) -> list[RopeTable]:
        return [still_table(self.config)] * self.config.n_layers  # which nothing computes


class WithAdapters(Ops):
    """An op table whose products include the increments of adapters."""

    def __init__(self, ops: Ops, sites: Mapping[SiteKey, LoraSite], batch: Batch) -> None:
        self._ops, self._sites, self._batch = ops, sites, batch

    def compute(self, op: str, args: dict[str, Any]) -> Any:
        ops, out = self._ops, getattr(self._ops, op)(**args)
        site = self._sites.get((op, id(args[WEIGHTS[op]]))) if op in WEIGHTS else None
        if site is None:
            return out
        index, experts = self._batch.logits_index if op == "logits" else None, args.get("experts")
        x, scale = args["ids" if op == "embed" else "x"], args.get("scale", 1.0)
        low = ops.shrink(x, site, self._batch, index, experts, scale)
        return ops.expand(out, low, site, self._batch, index, experts)


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter, packed for the sites that it changes."""

    path: str
    digest: bytes
    rank: int
    nbytes: int
    sites: Mapping[SiteKey, Any]


@dataclass(slots=True, eq=False)
class ModelAdapters:
    """The sites of a model, and the graph of steps with adapters; it has the sites that an adapter has changed."""

    model: Transformer
    checkpoint: Checkpoint
    max_rank: int
    num_slots: int
    max_loaded: int = 0  # more than slots: the others wait in the host's memory
    sites: dict[SiteKey, LoraSite] = field(init=False)
    active: dict[SiteKey, LoraSite] = field(default_factory=dict)
    fused: FusedForward | None = None
    _usual: set[SiteKey] = field(default_factory=set)  # what most adapters change

    def __post_init__(self) -> None:
        self.sites = {}
        for key, packed in self._products(self.checkpoint.format):
            first, is_table = packed.parts[0], key[0] == "embed"
            if all(USUAL.fullmatch(part.name) for part in first):
                self._usual.add(key)
            rows = (packed.columns,) if is_table else tuple(part.shape[0] for part in first)
            columns = packed.rows if is_table else packed.columns
            kinds = {self.checkpoint.tensors[part.name.partition("[")[0]].kind.name for part in first}
            ranks = MAX_COMBINED * self.max_rank * len(rows)
            self.sites[key] = LoraSite(key[0], columns, rows, packed.num_experts, ranks, kinds <= {"F32", "F64"})

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def graph(self) -> Graph:
        """Return the ops of a step with adapters."""
        return record(lambda ops, batch, kv: self.compute(ops, batch, kv), len(self.model.blocks))

    def compute(self, ops: Backend, batch: Batch, kv: Any) -> tuple[Array, Array]:
        """Compute a step with adapters op by op."""
        return self.model.compute(cast(Backend, WithAdapters(ops, self.active, batch)), batch, kv)

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Pack an adapter, in any thread; raise where it does not fit the model."""
        most = self.max_rank * (MAX_COMBINED if adapter.is_combined else 1)
        if adapter.rank > most:
            several = f" of combined adapters may be {most} together" if adapter.is_combined else f" is {most}"
            problem = f"adapter {adapter.path.name} has rank {adapter.rank}, and max_lora_rank{several}"
            raise InvalidRequestError(f"{problem}: start with a larger one", "lora")
        pairs = self.pairs(adapter)
        packed = {key: self.model.ops.pack_adapter(self.sites[key], each) for key, each in pairs.items()}
        nbytes = sum(
            (pair.a.size + pair.b.size) * (4 if self.sites[key].is_exact else 2)
            for key, each in pairs.items()
            for parts in each
            for pair in filter(None, parts)
        )
        return PackedAdapter(str(adapter.path), adapter.digest, adapter.rank, nbytes, packed)

    def place(self, slot: int, packed: PackedAdapter | None) -> None:
        """Let a slot hold an adapter, or nothing; no step runs meanwhile."""
        held = {} if packed is None else packed.sites
        self._place(slot, held, held.keys())

    def prepare(self) -> None:
        """Make the graph of the usual adapters before there is any: on a GPU it takes seconds."""
        self._place(0, {}, self._usual)

    def _place(self, slot: int, held: Mapping[SiteKey, Any], changed: Collection[SiteKey]) -> None:
        ops, is_new = self.model.ops, not set(changed) <= self.active.keys()
        if is_new:
            self.active = {key: site for key, site in self.sites.items() if key in self.active or key in changed}
        for key, site in self.active.items():
            ops.place_adapter(site, slot, held.get(key), self.num_slots)
        if is_new:
            self.fused = ops.fuse(self.graph)

    def pairs(self, adapter: Adapter) -> dict[SiteKey, list[list[LowRank | None]]]:
        """Return the pairs for each site: for each expert, or once, a pair for each part that is changed."""
        self._check_base(adapter)
        left = dict(adapter.pairs)
        pairs: dict[SiteKey, list[list[LowRank | None]]] = {}
        for key, packed in self._products(adapter.format):
            for expert, parts in enumerate(packed.parts):
                for i, part in enumerate(parts):
                    name = _pair_name(part.name, key[0])
                    if (pair := adapter.pairs.get(name)) is None:
                        continue
                    left.pop(name, None)
                    empty: list[list[LowRank | None]] = [[None] * len(parts) for _ in packed.parts]
                    pairs.setdefault(key, empty)[expert][i] = self._rows_of(adapter, name, pair, part, key)
        self._refuse_rest(adapter, left)
        return pairs

    def _rows_of(self, adapter: Adapter, name: str, pair: LowRank, part: RowNumbers, key: SiteKey) -> LowRank:
        """Return the pair for the rows that a part has of a tensor."""
        tensor = self.checkpoint.tensors.get(name) or self.checkpoint.tensors.get(EMBEDDING)
        shape = part.shape if EXPERT_STACK.fullmatch(part.name) or tensor is None else tensor.shape
        shape = shape if len(shape) == 2 else (1, *shape)  # a vector in the file
        if key[0] == "embed":
            shape = shape[::-1]
        if (pair.b.shape[0], pair.a.shape[1]) != shape:
            sides = f"(A {pair.a.shape}, B {pair.b.shape}) is for a matrix of {pair.b.shape[0]} x {pair.a.shape[1]}"
            problem = f"the pair of {name} {sides}, and the base has {shape[0]} x {shape[1]}"
            raise InvalidRequestError(f"adapter {adapter.path.name}: {problem}", "lora")
        return pair if key[0] == "embed" else LowRank(pair.a, pair.b[part.numbers])

    def _check_base(self, adapter: Adapter) -> None:
        """Raise for an adapter of another architecture, and for what cannot follow the order of the base's rows."""
        own, said = gguf_architecture(self.config), adapter.architecture
        if said is not None and said != own:
            problem = f"adapter {adapter.path.name} is for a base of architecture {said!r}, and this one is {own!r}"
            raise InvalidRequestError(problem, "lora")
        if HEAD in adapter.pairs and self.config.final_cap:
            problem = f"adapter {adapter.path.name} changes {HEAD}, whose logits this base caps: that is not supported"
            raise UnsupportedModelError(problem)
        if adapter.format != self.checkpoint.format and self.config.linear is not None:
            problem = f"adapter {adapter.path.name} is {adapter.format}, and the base with linear attention is not"
            raise UnsupportedModelError(f"{problem}: use both in one format")

    def _refuse_rest(self, adapter: Adapter, left: Iterable[str]) -> None:
        """Raise if the model has no matrix for a pair; heads for multi-token prediction are left alone."""
        loader = self._loader(adapter.format)
        rest = [name for name in left if not (loader.is_of_nextn_layer(name) or loader.is_of_shared_keys(name))]
        if rest:
            others = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            base = f"{self.checkpoint.path.name} ({self.config.family.name}, {self.config.n_layers} layers)"
            problem = f"changes {min(rest)!r}{others}, which no matrix of {base} is"
            raise InvalidRequestError(f"adapter {adapter.path.name} {problem}", "lora")

    def _loader(self, form: str) -> RowLoader:
        checkpoint = replace(self.checkpoint, format=form, metadata={})
        return RowLoader(checkpoint, self.config, cast(Backend, NOTING_BACKEND), 1, lambda packed_bytes: None)

    def _products(self, form: str) -> list[tuple[SiteKey, Packed]]:
        """Return the products of the model, with the rows that each has of the file's tensors."""
        noted = self._loader(form).model().graph().nodes
        nodes = zip(self.model.graph().nodes, noted, strict=True)
        return [(_site_key(node), other[WEIGHTS[node.op]]) for node, other in nodes if node.op in WEIGHTS]


def file_adapters(checkpoint: Checkpoint, config: ModelConfig, max_rank: int) -> ModelAdapters:
    """Return what says whether an adapter fits a file, of which nothing is packed."""
    loader = RowLoader(checkpoint, config, cast(Backend, NOTING_BACKEND), 1, lambda packed_bytes: None)
    return ModelAdapters(loader.model(), checkpoint, max_rank, 0)


def _site_key(node: Node) -> SiteKey:
    return node.op, id(node[WEIGHTS[node.op]])


def _pair_name(name: str, op: str) -> str:
    """Return the name of the pair for a tensor: a tied head has its own, experts have one each."""
    if op == "logits" and name == EMBEDDING:
        return HEAD
    stack = EXPERT_STACK.fullmatch(name)
    return name if stack is None else f"{stack[1]}.{stack[2]}.weight"
