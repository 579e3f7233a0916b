"""Vision towers: pixels of images to rows that stand in for tokens of a decoder; and their loader.

A step takes parts of several images, whatever their sizes. A part is a sequence of patches in an order of the tower's:
the patches of a token are adjacent, and so are the patches of a window. There is no KV cache, as in pooling.py.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backends.graph import Graph, record
from ..backends.ops import (
    NO_TOKENS,
    Array,
    Backend,
    Batch,
    FusedForward,
    Ints,
    KVLayer,
    Progress,
    RopeTable,
    StepLimits,
    WarmUp,
)
from ..config import LoadOptions
from ..errors import InvalidRequestError, MissingDependencyError, ModelFileError, WorkerError
from ..images.sizes import ImageSettings, VisionInfo
from ..layers.block import Block, Norm
from ..layers.encoder import Merger, PatchEmbedding
from ..layers.linear import Linear
from ..layers.norm import LayerNorm, RMSNorm
from ..layers.rope import inverse_frequencies, still_table
from ..weights import Checkpoint, Tensor
from ..weights.checkpoint import release_pages
from ..weights.hub import locate_model
from ..weights.quants import BLOCK_TYPES
from .families import read_model_config
from .pooling import BLOCK_SIZE, WARM_UP_TOKENS, Workspace
from .pooling_loader import PoolingLoader
from .vision_config import BY_GGUF, VisionConfig, find_tower, read_vision_config

Floats = NDArray[np.float32]
CHANNELS, MAX_VALUE = 3, 255
MAX_KEPT_ORDERS = 32
NO_PROJECTOR = "none"  # of the option mmproj
SAMPLE_BYTES = 1 << 16  # of each end of a tensor
ALIGNED_VALUES, PADDED_VALUES = 8, 64  # 16 bytes of bfloat16; a tile
ROW_AXIS, COLUMN_AXIS = 1, 2  # of `Batch.rope_positions`


@dataclass(frozen=True, slots=True, eq=False)
class VisionTower:
    """A tower whose weights are packed for one backend."""

    config: VisionConfig
    ops: Backend
    embedding: PatchEmbedding
    blocks: tuple[Block, ...]
    norm: Norm | None
    merger: Merger
    deepstack: dict[int, Merger]  # by block: what the tower returns beside its own rows, for layers of the decoder
    workspace: Workspace
    digest: bytes  # of its weights
    fused: FusedForward | None = None

    @property
    def row_width(self) -> int:
        """The columns of what `encode` returns: the width of the decoder, once more for each merger of deepstack."""
        return self.config.output_dim * (1 + len(self.deepstack))

    @property
    def info(self) -> VisionInfo:
        family = self.config.family
        return VisionInfo(family.encoder.name, self.config.images, family.prompt, self.digest)

    def encode(self, parts: Sequence[NDArray[np.uint8]]) -> list[Floats]:
        """Return the rows of each part, (tokens, row_width), on the host; a part has the same bits in any step."""
        batch = make_batch(parts, self.config)
        rows = self.ops.to_host(self.forward(batch, self.workspace.layers(int(batch.block_table.max()) + 1)))
        per_token = self.config.merge**2
        ends = np.cumsum(np.diff(batch.query_start) // per_token)
        return np.split(rows, ends[:-1])

    def warm_up(self, max_step_tokens: int, progress: Progress = lambda what, done, total: None) -> WarmUp:
        """Do all one-time work of the backend before the first image: compile and load kernels."""
        patches = min(max_step_tokens * self.config.merge**2, WARM_UP_TOKENS)
        kv = self.workspace.layers(-(-patches // BLOCK_SIZE))

        def run(batch: Batch) -> Array:
            blank = make_batch([blank_part(self.config, len(batch.ids))], self.config)
            return self.forward(blank, self.workspace.layers(int(blank.block_table.max()) + 1))[:, :0]  # no logits

        limits = StepLimits(max_batch=1, max_tokens=patches, max_logits=1, max_context=patches)
        return self.ops.warm_up(run, None, kv, limits, progress)

    def forward(self, batch: Batch, kv: Sequence[KVLayer]) -> Array:
        """Compute a step: (N, row_width)."""
        return self.compute(self.ops, batch, kv)[0] if self.fused is None else self.fused(batch, kv)

    def compute(self, ops: Backend, batch: Batch, kv: Sequence[KVLayer]) -> tuple[Array, None]:
        """Compute a step with these ops: the definition of the tower."""
        x, residual, features = self.embedding(ops, batch), None, list[Array]()
        for i, (block, layer) in enumerate(zip(self.blocks, kv, strict=True)):
            x, residual = block(ops, x, residual, layer, batch)
            if i in self.deepstack:
                x, residual = ops.add(x, residual), None
                features.append(self.deepstack[i](ops, x, batch))
        if residual is not None and self.norm is not None:
            x, _ = self.norm.add_and_norm(ops, x, residual)
        elif residual is not None:
            x = ops.add(x, residual)
        elif self.norm is not None:
            x = self.norm(ops, x)
        rows = self.merger(ops, x, batch)
        for feature in features:
            rows = ops.join(rows, feature)
        return rows, None

    def graph(self) -> Graph:
        """Return the ops of a step, for a fused forward."""
        return record(self.compute, len(self.blocks), hidden_width=self.config.patch_values)


class PatchOrder(NamedTuple):
    """The order of the patches of a part; arrays of one size are kept and not changed."""

    patches: Ints  # (P,) numbers of patches, counted row by row
    places: Ints  # (P, 2) their rows and columns
    tokens: Ints  # (tokens,) row by row: which group of patches is the token
    spans: Ints  # (P, 2) the window of each, as a range of the order; empty without windows


@lru_cache(maxsize=MAX_KEPT_ORDERS)
def patch_order(rows: int, columns: int, merge: int, window: int) -> PatchOrder:
    """Return the order of a grid of patches: by window of `window` x `window` tokens (0: none), then by token."""
    token_rows, token_columns, per_token = rows // merge, columns // merge, merge**2
    tokens = np.arange(token_rows * token_columns)
    row, column = np.divmod(tokens, token_columns)
    spans = NO_TOKENS
    if window:
        in_window = row // window * -(-token_columns // window) + column // window
        tokens = np.argsort(in_window, kind="stable")
        counts = np.unique(in_window, return_counts=True)[1] * per_token
        ends = np.cumsum(counts)
        spans = np.repeat(np.stack((ends - counts, ends), axis=1), counts, axis=0)
    inner_row, inner_column = np.divmod(np.arange(per_token), merge)
    patch_row = row[tokens][:, None] * merge + inner_row
    patch_column = column[tokens][:, None] * merge + inner_column
    places = np.stack((patch_row.ravel(), patch_column.ravel()), axis=1)
    return PatchOrder(places[:, 0] * columns + places[:, 1], places, np.argsort(tokens), spans)


def make_batch(parts: Sequence[NDArray[np.uint8]], config: VisionConfig) -> Batch:
    """Return a step of parts, (height, width, RGB); `logits_index` are the groups of patches that are its tokens."""
    patch, settings = config.images.patch, config.images
    grids = [(part.shape[0] // patch, part.shape[1] // patch) for part in parts]
    orders = [patch_order(*grid, config.merge, config.window) for grid in grids]
    counts = np.array([len(order.patches) for order in orders], np.int64)
    start = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    positions = np.arange(start[-1]) - np.repeat(start[:-1], counts)
    blocks = -(-counts // BLOCK_SIZE)
    first, column = np.cumsum(blocks) - blocks, np.arange(blocks.max())
    places = np.concatenate([order.places for order in orders])
    groups = start[:-1] // config.merge**2
    pixels = [cut_patches(part, settings, order.patches) for part, order in zip(parts, orders, strict=True)]
    return Batch(
        ids=places[:, 0],
        token_types=places[:, 1],
        positions=positions,
        slot_mapping=np.repeat(first * BLOCK_SIZE, counts) + positions,
        query_start=start,
        context_len=counts,
        block_table=np.where(column < blocks[:, None], first[:, None] + column, 0),
        logits_index=np.concatenate([order.tokens + group for order, group in zip(orders, groups, strict=True)]),
        rope_positions=np.concatenate((np.zeros((len(places), 1), np.int64), places), axis=1),
        spans=np.concatenate([order.spans for order in orders]),
        places=np.concatenate([table_places(*grid, config)[o.patches] for grid, o in zip(grids, orders, strict=True)]),
        hidden=np.concatenate(pixels) if len(pixels) > 1 else pixels[0],
    )


def blank_part(config: VisionConfig, patches: int) -> NDArray[np.uint8]:
    """Return a part of about so many patches, or of the tower's only size."""
    unit, tokens = config.images.patch * config.merge, max(1, patches // config.merge**2)
    rows = isqrt(tokens)
    height, width = (config.images.size,) * 2 if config.images.size else (rows * unit, tokens // rows * unit)
    return np.zeros((height, width, CHANNELS), np.uint8)


def cut_patches(part: NDArray[np.uint8], settings: ImageSettings, patches: Ints) -> Floats:
    """Return the normalized pixels of these patches, counted row by row: (patches, channels * patch * patch)."""
    size, (rows, columns) = settings.patch, (n // settings.patch for n in part.shape[:2])
    by_patch = part.reshape(rows, size, columns, size, CHANNELS).transpose(0, 2, 4, 1, 3)
    pixels = by_patch.reshape(rows * columns, CHANNELS, -1)[patches]
    in_pairs = pixels.shape[-1] % 2 == 0
    indices, normal = (pixels.view(np.uint16) if in_pairs else pixels), normal_values(settings, in_pairs=in_pairs)
    values = np.empty(indices.shape, normal.dtype)
    for i in range(CHANNELS):
        values[:, i] = normal[i].take(indices[:, i])
    return values.view(np.float32).reshape(len(patches), -1)


@lru_cache(maxsize=8)
def normal_values(settings: ImageSettings, *, in_pairs: bool) -> NDArray[Any]:
    """Return what the values 0 .. 255 of each channel become; or two of them that lie side by side, as a number of
    8 bytes: a third of the time."""
    values = (np.arange(MAX_VALUE + 1) * np.float64(1 / MAX_VALUE)).astype(np.float32)
    mean, std = (np.array(numbers, np.float32)[:, None] for numbers in (settings.mean, settings.std))
    normal = (values - mean) / std
    normal = np.asarray(2 * (normal - np.float32(0.5)) if settings.signed else normal, np.float32)
    low, high = np.arange(1 << 16).astype("=u2").view(np.uint8).reshape(-1, 2).T
    return np.stack((normal[:, low], normal[:, high]), axis=-1).view(np.uint64)[..., 0] if in_pairs else normal


def table_places(rows: int, columns: int, config: VisionConfig) -> Floats:
    """Return the places of the patches of a grid in the table of positions, row by row: (patches, 2).

    The corners of a grid are the corners of the table.
    """
    if config.table is None or config.family.table == "sides":
        return np.zeros((rows * columns, 2), np.float32)
    sides = zip((rows, columns), config.table, strict=True)
    row, column = (
        np.arange(n, dtype=np.float32) * np.float32(side - 1) / np.float32(max(n - 1, 1)) for n, side in sides
    )
    return np.stack(np.meshgrid(row, column, indexing="ij"), axis=-1).reshape(-1, 2)


class Projector(NamedTuple):
    """The tower of a model, before it is loaded; `config` has the limit of tokens of an image."""

    checkpoint: Checkpoint
    config: VisionConfig


def find_projector(model: Checkpoint, options: LoadOptions) -> tuple[LoadOptions, Projector | None, list[str]]:
    """Return the options with the memory of a model's tower, its projector, and why one that is there is not used.

    One that was not requested is not used where it cannot be: the model then takes text alone.
    """
    if options.mmproj == NO_PROJECTOR:
        return options, None, []
    if options.mmproj is not None and options.mmproj.startswith("hf:"):
        remedy = f"`llm-worker-rbee pull {options.mmproj[:200]}` fetches a model with its projector; give that file"
        raise InvalidRequestError(f"mmproj must be a file or a folder, not a name of the hub: {remedy}")
    try:
        path = None if options.mmproj is None else locate_model(options.mmproj, pull=False)
        if (pair := find_tower(model, read_model_config(model), path)) is None:
            return options, None, []
        if importlib.util.find_spec("PIL") is None:
            raise MissingDependencyError("images need Pillow: install llm-worker-rbee[vision]")
    except WorkerError as error:
        if options.mmproj is not None:
            raise
        return options, None, [f"the model takes no images: {error}"]
    checkpoint, config = pair
    config = replace(config, images=config.limit_images(options.max_image_tokens))
    return replace(options, tower_memory=checkpoint.nbytes + config.step_bytes), Projector(checkpoint, config), []


def load_vision_tower(
    checkpoint: Checkpoint, ops: Backend, kv_type: str = "", config: VisionConfig | None = None
) -> VisionTower:
    """Build the tower; `kv_type` is the type of keys and values within a step, `config` None: what the file says."""
    config, kv_type = config or read_vision_config(checkpoint), kv_type or ops.default_kv_type
    ops.load_kernels(checkpoint, config.model, kv_type)
    loader = VisionLoader(checkpoint, config.model, ops, 1, lambda packed_bytes: None)
    return loader.vision_tower(config, kv_type)


def float_tensor(name: str, values: NDArray[np.float32]) -> Tensor:
    """Return values as a tensor."""
    data = np.ascontiguousarray(values, np.float32)
    return Tensor(name, BLOCK_TYPES["F32"], data.shape, data.reshape(-1).view(np.uint8))


def patches_by_channel(matrix: Tensor, config: VisionConfig) -> Tensor:
    """Return a projection of patches, (width, row, column, channel), as a convolution."""
    side = config.images.patch
    values = matrix.dequantize().reshape(-1, side, side, CHANNELS).transpose(0, 3, 1, 2)
    return float_tensor(matrix.name, values)


class VisionLoader(PoolingLoader):
    """Builds a tower from the tensors of a checkpoint."""

    __slots__ = ()

    def vision_tower(self, v: VisionConfig, kv_type: str) -> VisionTower:
        c = self.config
        self.check_layer_count()
        rope = self.axes_table(v) if v.family.rope else still_table(c)
        blocks = self.blocks([rope] * c.n_layers, partial(self.tower_block, v))
        tower = VisionTower(
            config=v,
            ops=self.ops,
            embedding=self.patch_embedding(v),
            blocks=blocks,
            norm=self.optional_norm(c.family.tensors.output_norm),
            merger=self.merger(v),
            deepstack={i: self.deepstack_merger(v, i) for i in v.deepstack},
            workspace=Workspace(self.ops, c, kv_type),
            digest=self.digest(),
        )
        self.refuse_unused_tensors()
        for tensor in self.checkpoint.tensors.values():
            release_pages(tensor.data)
        return replace(tower, fused=self.ops.fuse(tower.graph))

    def digest(self) -> bytes:
        """Return a digest of names, shapes and a sample of each tensor: another projector has others."""
        state = hashlib.sha256(repr(self.checkpoint.metadata.get("general.name")).encode())
        for name, tensor in sorted(self.checkpoint.tensors.items()):
            state.update(f"{name} {tensor.kind.name} {tensor.shape}".encode())
            state.update(tensor.data[:SAMPLE_BYTES].tobytes())
            state.update(tensor.data[-SAMPLE_BYTES:].tobytes())
        return state.digest()

    def axes_table(self, v: VisionConfig) -> RopeTable:
        """Return the RoPE of two axes, each with half of the pairs of a head."""
        base, dim = self.config.rope_base, self.config.head_dim
        own = inverse_frequencies(base, dim // 2)
        both = inverse_frequencies(base, dim)
        frequencies = (both[0::2], both[1::2]) if v.family.rope == "apart" else (own, own)
        order = [COLUMN_AXIS, ROW_AXIS] if v.family.rope == "halves" else [ROW_AXIS, COLUMN_AXIS]
        return RopeTable(np.concatenate(frequencies), 1.0, axes=np.repeat(np.array(order, np.int64), dim // 4))

    def rope_order(self, name: str, rows: int) -> NDArray[np.intp] | None:
        """Return the order of rows of q or k, or of their norms, that makes pairs (i, i + half) of a head."""
        if BY_GGUF[self.config.family.name].rope != "halves":
            return super().rope_order(name, rows)
        if name.rpartition(".")[0].rpartition(".")[2] not in ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm"):
            return None
        return np.arange(rows).reshape(-1, 2, 2, self.config.head_dim // 4).swapaxes(1, 2).reshape(-1)

    def padded(self, name: str, width: int) -> int:
        """Return the width of an MLP with zeros behind it where rows of it would not begin at 16 bytes."""
        is_mlp = name.rpartition(".")[2] in ("ffn_gate", "ffn_up", "ffn_down") and width == self.config.d_ff
        return width + (-width % PADDED_VALUES if is_mlp and width % ALIGNED_VALUES else 0)

    def projection(self, name: str, rows: int, columns: int) -> Tensor:
        tensor, stem = super().projection(name, rows, columns), name.removesuffix(".weight")
        shape = self.padded(stem, rows), self.padded(stem, columns)
        if shape == (rows, columns):
            return tensor
        more_bytes = tensor.kind.row_bytes(shape[1] - columns)
        data = np.pad(tensor.rows, ((0, shape[0] - rows), (0, more_bytes)))
        return replace(tensor, shape=shape, data=data.reshape(-1))

    def optional_vector(self, name: str, width: int) -> NDArray[np.float32] | None:
        vector = super().optional_vector(name, width)
        return None if vector is None else np.pad(vector, (0, self.padded(name.removesuffix(".bias"), width) - width))

    def linear(self, names: list[str], rows: list[int], columns: int) -> Linear:
        """Stack matrices by rows, where limits of their inputs are alike; limits stay beside them."""
        inputs, outputs = ([self.limits(f"{name}.{kind}") for name in names] for kind in ("input", "output"))
        if len(set(inputs)) > 1:
            first, *others = (self.linear([name], [n], columns) for name, n in zip(names, rows, strict=True))
            return replace(first, others=tuple(others))
        linear = super().linear(names, rows, columns)
        widths = [self.padded(name, n) for name, n in zip(names, rows, strict=True)]
        limits = (
            self.columns_within(inputs[:1], [self.padded(names[0], columns)]),
            self.columns_within(outputs, widths),
        )
        return replace(linear, inputs=limits[0], outputs=limits[1])

    def limits(self, name: str) -> tuple[float, float]:
        """Return the lowest and the highest value of a clamped product; they are infinite in some models."""
        low, high = -np.inf, np.inf
        if f"{name}_min" in self.checkpoint.tensors:
            low, high = (float(self.tensor(f"{name}_{end}").dequantize().reshape(-1)[0]) for end in ("min", "max"))
        if not low <= high:
            raise ModelFileError(f"tensors '{name}_min' and '{name}_max' hold {low} and {high}")
        return low, high

    def columns_within(self, limits: list[tuple[float, float]], widths: list[int]) -> tuple[Array, Array] | None:
        """Return the limits of each column, if any has one."""
        if np.isinf(limits).all():
            return None
        sides = (np.array(side, np.float32) for side in zip(*limits, strict=True))
        low, high = (self.ops.prepare_vector(np.repeat(side, widths)) for side in sides)
        return low, high

    def tower_block(self, v: VisionConfig, i: int, rope: RopeTable) -> Block:
        prefix, has_windows = f"blk.{i}.", v.window > 0 and i not in v.full_layers
        attention, post = self.attention(i, prefix, rope), v.family.encoder.norms.post
        width = self.config.d_model
        return Block(
            attention_norm=self.width_norm(prefix + "attn_norm"),
            attention=replace(attention, params=attention.params._replace(spans=has_windows)),
            mlp_norm=self.width_norm(prefix + "ffn_norm"),
            mlp=self.encoder_mlp(i, prefix),
            post_attention_norm=self.norm(prefix + "attn_post_norm.weight", width) if post else None,
            post_mlp_norm=self.norm(prefix + "ffn_post_norm.weight", width) if post else None,
        )

    def optional_norm(self, name: str) -> Norm | None:
        return self.width_norm(name) if f"{name}.weight" in self.checkpoint.tensors else None

    def width_norm(self, name: str) -> Norm:
        return (
            self.layer_norm(name)
            if self.config.family.norms.layer
            else self.norm(f"{name}.weight", self.config.d_model)
        )

    def patch_embedding(self, v: VisionConfig) -> PatchEmbedding:
        """Return the convolution as a product; the frames of a picture are alike, so their weights are added."""
        name, width, values = "patch_embd.weight", self.config.d_model, v.patch_values
        weight = self.tensor(name)
        weight = patches_by_channel(weight, v) if len(weight.shape) == 2 else weight
        if (
            weight.shape == (width, CHANNELS, v.images.patch, v.images.patch)
            and f"{name}.1" not in self.checkpoint.tensors
        ):
            matrix = replace(weight, shape=(width, values))
        else:
            frames = [weight.dequantize().reshape(width, CHANNELS, -1, v.images.patch**2).sum(axis=2)]
            if f"{name}.1" in self.checkpoint.tensors:
                frames.append(self.tensor(f"{name}.1").dequantize().reshape(frames[0].shape))
            matrix = float_tensor(name, np.sum(frames, axis=0).reshape(width, values))
        bias = self.optional_vector("patch_embd.bias", width)
        table, sides = None, None
        if v.table is not None and v.family.table == "sides":
            columns, rows = self.vector("position_embd.weight", 2, v.table[0], width)
            sides = self.pack([float_tensor("rows", rows)]), self.pack([float_tensor("columns", columns)])
        elif v.table is not None:
            rows = self.vector("position_embd.weight", v.table[0] * v.table[1], width)
            table = self.ops.prepare_vector(rows.reshape(*v.table, width))
        projection = Linear(self.pack([matrix]), None if bias is None else self.ops.prepare_vector(bias))
        return PatchEmbedding(projection, table, sides, self.optional_norm("pre_ln"))

    def merger(self, v: VisionConfig) -> Merger:
        width, count = self.config.d_model, v.merge**2
        joined = count * width
        if v.family.merger == "pool":
            norm = self.vector("mm.soft_emb_norm.weight", width)
            if self.checkpoint.format == "safetensors":
                norm = norm + np.float32(1)
            projection = self.vector("mm.input_projection.weight", width, v.output_dim).T
            first = Linear(self.pack([float_tensor("mm.input_projection.weight", projection)]))
            return Merger(count, True, RMSNorm(self.ops.prepare_vector(norm), self.config.norm_eps), first)
        if v.family.merger == "pool_out":
            plain, affine = self.unit_norm(width), None
            if "std_bias" in self.checkpoint.tensors:
                bias, scale = self.vector("std_bias", width), self.vector("std_scale", width)
                diagonal = np.diag(scale * np.float32(width**0.5))
                affine = Linear(
                    self.pack([float_tensor("std_scale", diagonal)]), self.ops.prepare_vector(-bias * scale)
                )
            else:
                plain = replace(plain, eps=plain.eps / width)
            first = self.linear(["mm.input_projection"], [v.output_dim], width)
            return Merger(count, True, plain, first, affine=affine)
        if v.family.merger == "unfold":
            first, last = (
                self.linear(["mm.1"], [v.output_dim], width),
                self.linear(["mm.2"], [v.output_dim], v.output_dim),
            )
            middle = None
            if count > 1:  # whose columns are, in files, the patches of each channel
                matrix = self.vector("mm.patch_merger.weight", width, joined).reshape(width, width, count)
                values = matrix.swapaxes(1, 2).reshape(width, joined)
                middle = Linear(self.pack([float_tensor("mm.patch_merger.weight", values)]))
            return Merger(count, False, None, first, last, middle)
        if v.family.merger == "linear":
            return Merger(count, False, None, self.linear(["mm.model.fc"], [v.output_dim], joined))
        first, last = self.linear(["mm.0"], [joined], joined), self.linear(["mm.2"], [v.output_dim], joined)
        return Merger(count, False, None, first, last)

    def deepstack_merger(self, v: VisionConfig, i: int) -> Merger:
        prefix, count = f"deepstack.{i}.", v.merge**2
        width = count * self.config.d_model
        weight, bias = (
            self.ops.prepare_vector(self.vector(f"{prefix}norm.{part}", width)) for part in ("weight", "bias")
        )
        first, last = (
            self.linear([prefix + "fc1"], [width], width),
            self.linear([prefix + "fc2"], [v.output_dim], width),
        )
        return Merger(count, False, LayerNorm(weight, bias, self.config.norm_eps), first, last)
