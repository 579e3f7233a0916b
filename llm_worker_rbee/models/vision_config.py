"""Vision towers as a table: what differs between families is data, and the blocks are described as a decoder's are.

`read_vision_config` reads the keys of a projector file (`clip.vision.*`) or of a folder (`vision_config` of config.json
and preprocessor_config.json).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..config import MAX_LAYERS, MAX_WIDTH, AttentionSpec, Family, ModelConfig, NormSpec, RopeSpec, TensorLayout
from ..errors import ModelFileError, UnsupportedModelError, WorkerError
from ..images.prompt import PADDING
from ..images.sizes import BICUBIC, BILINEAR, LANCZOS, ImageSettings, PromptStyle
from ..weights import Checkpoint
from ..weights.vision_names import find_projectors, open_projector
from .metadata import ENCODER_ACTIVATIONS
from .metadata_reader import MetadataReader

logger = logging.getLogger("llm_worker_rbee")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MAX_SIDE = 1 << 16  # of an image or a table of positions
GEMMA3_TOKENS = 256  # of an image, in files without the key
QWEN_PROMPT = PromptStyle("<|image_pad|>", "<|image_pad|>", wrapped="<|vision_start|><|image_pad|><|vision_end|>")
FAKE = "<fake_token_around_image>"
LAYERS = TensorLayout(output_norm="post_ln")
PIXTRAL_EPS, AREA_TOKENS = 1e-5, 280  # in files without their keys
STEP_PATCHES = 4096  # of a tower's step, or as many as one part has


class VisionFamily(NamedTuple):
    """What the towers of a family have in common."""

    encoder: Family  # its blocks; the name is the `projector_type` of files
    hf: tuple[str, ...]  # values of model_type
    text: tuple[str, ...]  # families of the decoders that its rows are made for
    images: ImageSettings
    merger: Literal["mlp", "pool", "pool_out", "linear", "unfold"]  # `pool_out`: its matrix is not transposed
    prompt: PromptStyle
    eps: float = 1e-6
    # RoPE of two axes. `rows`: pairs of the first half turn by the row, the others by the column; `apart`: they share
    # one list of frequencies in turn; `halves`: each half of a head has pairs of its own, columns first
    rope: Literal["", "rows", "apart", "halves"] = ""
    rope_base: float = 10000.0
    table: Literal["", "grid", "resized", "sides"] = "grid"  # of learned positions; `sides`: of rows and of columns
    has_windows: bool = False


def _blocks(name: str, activation: str, *, gated: bool = False, **more: Any) -> Family:
    fields = {"norms": NormSpec(layer=not gated), "tensors": LAYERS, **more}
    return Family(name, gguf=(), hf=(), is_encoder=True, activation=activation, gated_mlp=gated, **fields)


FAMILIES = (
    VisionFamily(
        _blocks("qwen2.5vl_merger", "silu", gated=True),
        hf=("qwen2_5_vl",),
        text=("qwen2vl",),
        images=ImageSettings(
            "native", 14, 2, min_pixels=56 * 56, max_pixels=28 * 28 * 16384, mean=CLIP_MEAN, std=CLIP_STD
        ),
        merger="mlp",
        prompt=QWEN_PROMPT,
        rope="rows",
        table="",
        has_windows=True,
    ),
    VisionFamily(
        _blocks("qwen3vl_merger", "gelu_tanh"),
        hf=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        text=("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"),
        images=ImageSettings("native", 16, 2, min_pixels=256 * 256, max_pixels=4096 * 4096),
        merger="mlp",
        prompt=QWEN_PROMPT,
        rope="rows",
        table="resized",
    ),
    VisionFamily(
        _blocks("gemma3", "gelu_tanh"),
        hf=("gemma3",),
        text=("gemma3",),
        images=ImageSettings("square", 14, 4, size=896, resample=BILINEAR),
        merger="pool",
        prompt=PromptStyle("<start_of_image>", "<image_soft_token>", "\n\n<start_of_image>", "<end_of_image>\n\n"),
    ),
    VisionFamily(
        _blocks("idefics3", "gelu_tanh"),
        hf=("idefics3", "smolvlm"),
        text=("llama",),
        images=ImageSettings("tiles", 16, 4, size=512, longest_edge=2048, resample=LANCZOS),
        merger="linear",
        prompt=PromptStyle("<image>", "<image>", f"{FAKE}<global-img>", FAKE, f"{FAKE}<row_{{row}}_col_{{column}}>"),
    ),
    VisionFamily(
        _blocks(
            "pixtral",
            "silu",
            gated=True,
            rope=RopeSpec(("gguf",)),
            tensors=LAYERS._replace(output_norm="mm.input_norm"),
        ),
        hf=("llava", "mistral3"),
        text=("llama", "mistral", "mistral3"),
        images=ImageSettings("longest", 16, 1, longest_edge=1024, mean=CLIP_MEAN, std=CLIP_STD),
        merger="unfold",
        prompt=PromptStyle("[IMG]", "[IMG]", after="[IMG_END]", row_end="[IMG_BREAK]"),
        eps=PIXTRAL_EPS,
        rope="apart",
        table="",
    ),
    VisionFamily(
        _blocks(
            "gemma4v",
            "gelu_tanh",
            gated=True,
            attention=AttentionSpec(qk_norm="head", v_norm=True, scale=1.0),
            norms=NormSpec(post=True),
        ),
        hf=("gemma4",),
        text=("gemma4",),
        images=ImageSettings(
            "area", 16, 3, max_pixels=AREA_TOKENS * 48 * 48, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), signed=True
        ),
        merger="pool_out",
        prompt=PromptStyle("<|image|>", "<|image|>", "<|image>", "<image|>"),
        rope="halves",
        rope_base=100.0,
        table="sides",
    ),
)
BY_GGUF = {family.encoder.name: family for family in FAMILIES}
BY_HF = {name: family for family in FAMILIES for name in family.hf}
KEY_OF_RESAMPLE = {BICUBIC: "bicubic", BILINEAR: "bilinear", LANCZOS: "lanczos"}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The shape of one tower and every number that a step needs."""

    family: VisionFamily
    model: ModelConfig  # its blocks
    images: ImageSettings
    output_dim: int  # the width of the decoder
    table: tuple[int, int] | None = None  # rows and columns that have learned positions
    window: int = 0  # tokens of each side of a window of attention; 0: none
    full_layers: frozenset[int] = field(default_factory=frozenset)  # without windows
    deepstack: tuple[int, ...] = ()  # layers whose patches become rows for the decoder too

    @property
    def merge(self) -> int:
        """Patches of each side of a token."""
        return self.images.merge

    @property
    def side(self) -> int:
        """Pixels of each side of a token."""
        return self.images.patch * self.merge

    @property
    def patch_values(self) -> int:
        return 3 * self.images.patch**2

    def limit_images(self, max_tokens: int) -> ImageSettings:
        """Return the settings of images of so many tokens at most, where they have sizes of their own."""
        images = self.images
        if images.kind == "longest":
            return images.with_longest_edge(isqrt(max_tokens) * self.side)
        most = max(images.min_pixels, min(images.max_pixels, max_tokens * self.side**2))
        return images._replace(max_pixels=most)

    @property
    def part_patches(self) -> int:
        """The patches of the largest part of an image."""
        images = self.images
        if images.size:
            return (images.size // images.patch) ** 2
        if images.kind == "longest":
            return (-(-images.longest_edge // self.side) * self.merge) ** 2
        return images.max_pixels // images.patch**2

    @property
    def step_patches(self) -> int:
        """The patches of a step: of several parts, if they are small."""
        return max(self.part_patches, STEP_PATCHES)

    @property
    def step_bytes(self) -> int:
        """The bytes of a step, an estimate."""
        return 4 * self.step_patches * (self.patch_values + 8 * self.model.d_model + 3 * self.model.d_ff)


def open_tower(checkpoint: Checkpoint, config: ModelConfig, path: Path) -> tuple[Checkpoint, VisionConfig]:
    """Open the projector of a model; raise if they do not belong together."""
    projector = open_projector(path)
    vision = read_vision_config(projector)
    family, side = vision.family, f"the projector {path.name} ({vision.family.encoder.name})"
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens")
    spans = bool(config.family.attention.image_spans)  # a Gemma 4 file does not say whether it has them
    facts: list[tuple[str, Any, Any]] = [
        ("the width", vision.output_dim, config.d_model),
        (f"a model of {' or '.join(family.text)}", True, config.family.name in family.text),
        ("M-RoPE", family.images.kind == "native", bool(config.rope_sections)),
        (
            "images that attend in both directions",
            family.merger == "pool" or (spans and family.merger == "pool_out"),
            spans,
        ),
        (f"a token {family.prompt.token!r}", True, tokens is None or family.prompt.token in tokens),
    ]
    for what, needed, actual in facts:
        if needed != actual:
            shown = [("no", "yes")[value] if isinstance(value, bool) else value for value in (needed, actual)]
            model = f"the model {checkpoint.path.name} ({config.family.name})"
            raise ModelFileError(
                f"{side} and {model} do not belong together: {what}: {shown[0]} and {shown[1]} (mmproj)"
            )
    return projector, vision


def find_tower(
    checkpoint: Checkpoint, config: ModelConfig, path: Path | None
) -> tuple[Checkpoint, VisionConfig] | None:
    """Return the projector at a path, or one beside a model that belongs to it; None: there is none."""
    if path is not None:
        return open_tower(checkpoint, config, path)
    for candidate in find_projectors(checkpoint.path):
        try:
            return open_tower(checkpoint, config, candidate)
        except WorkerError as error:
            logger.info("%s is not used: %s", candidate.name, error)
    return None


def read_vision_config(checkpoint: Checkpoint) -> VisionConfig:
    """Detect the family of a tower and read its configuration."""
    if checkpoint.format == "gguf":
        return _from_gguf(checkpoint)
    name = str(checkpoint.metadata["config"].get("model_type"))
    if name not in BY_HF:
        raise UnsupportedModelError(f"the vision tower of {name!r} is not supported (are: {', '.join(BY_HF)})")
    return _from_hf(checkpoint, BY_HF[name])


def _from_gguf(checkpoint: Checkpoint) -> VisionConfig:
    metadata, keys = checkpoint.metadata, MetadataReader(checkpoint.metadata, "clip.vision.")
    both = MetadataReader(metadata, "clip.")
    name = both.get("vision.projector_type", str, both.get("projector_type", str, "mlp"))
    if name not in BY_GGUF:
        raise UnsupportedModelError(f"projector type {name!r} is not supported (are: {', '.join(BY_GGUF)})")
    family, count = BY_GGUF[name], keys.integer("block_count", minimum=1, maximum=MAX_LAYERS)
    patch = keys.integer("patch_size", minimum=1, maximum=MAX_SIDE)
    merge = keys.integer("spatial_merge_size", keys.integer("projector.scale_factor", family.images.merge), 1, 64)
    size = keys.integer("image_size", family.images.size or family.images.longest_edge or 1, 1, MAX_SIDE)
    unit = (patch * merge) ** 2
    images = family.images._replace(
        patch=patch,
        merge=merge,
        size=size if family.images.size else 0,
        longest_edge=size
        if family.images.kind == "longest"
        else keys.integer("preproc_image_size", family.images.longest_edge, maximum=MAX_SIDE),
        min_pixels=keys.integer("image_min_pixels", 8 * unit),
        max_pixels=keys.integer(
            "image_max_pixels", (AREA_TOKENS if family.images.kind == "area" else 4096) * unit, unit
        ),
        mean=_triple(keys, "image_mean", family.images.mean),
        std=_triple(keys, "image_std", family.images.std),
    )
    up = checkpoint.tensors.get("blk.0.ffn_up.weight")
    if not keys.integer("feed_forward_length", 1) and up is not None:  # as in old files of Qwen
        keys = replace(keys, values={**keys.values, keys.prefix + "feed_forward_length": up.shape[0]})
    flags = keys.array("is_deepstack_layers") or []
    every = keys.integer("n_wa_pattern", 0, maximum=MAX_LAYERS)
    window = keys.integer("window_size", 112, 1, MAX_SIDE) if family.has_windows and every else 0
    return _vision_config(
        family,
        keys=keys,
        names=("block_count", "embedding_length", "feed_forward_length", "attention.head_count"),
        activation=_gguf_activation(both, family),
        eps=keys.positive("attention.layer_norm_epsilon", family.eps),
        images=images,
        table=_table_sides(checkpoint, family),
        output_dim=_output_dim(checkpoint, family),
        window=window // (patch * merge),
        full_layers=frozenset(i for i in range(count) if every and (i + 1) % every == 0),
        deepstack=tuple(i for i, flag in enumerate(flags[:count]) if flag),
    )


def _gguf_activation(keys: MetadataReader, family: VisionFamily) -> str:
    if keys.get("use_gelu", bool, False):
        return "gelu_tanh"
    if keys.get("use_silu", bool, False):
        return "silu"
    if family.encoder.gated_mlp:
        return family.encoder.activation
    raise UnsupportedModelError("the file has neither clip.use_gelu nor clip.use_silu, and quick GELU is not supported")


def _from_hf(checkpoint: Checkpoint, family: VisionFamily) -> VisionConfig:
    whole = checkpoint.metadata["config"]
    keys = MetadataReader(whole["vision_config"], source="config.json: vision_config: ")
    patch = keys.integer("patch_size", family.images.patch, 1, MAX_SIDE)
    images = _hf_images(checkpoint, family, keys)
    _refuse_hf_variants(whole, family, keys)
    is_qwen = family.images.kind == "native"
    names = ("depth", "hidden_size", "intermediate_size", "num_heads")
    others = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    name = keys.get("hidden_act", str, keys.get("hidden_activation", str, family.encoder.activation))
    if name not in (*ENCODER_ACTIVATIONS, *ENCODER_ACTIVATIONS.values()):
        raise UnsupportedModelError(f"{keys.describe_key('hidden_act')}: {name!r} is not supported")
    return _vision_config(
        family,
        keys=keys,
        names=names if is_qwen else others,
        activation=ENCODER_ACTIVATIONS.get(name, name),
        eps=keys.positive("layer_norm_eps", family.eps),
        images=images,
        table=_table_sides(checkpoint, family),
        output_dim=_output_dim(checkpoint, family),
        window=keys.integer("window_size", 112, 1, MAX_SIDE) // (patch * images.merge) if family.has_windows else 0,
        full_layers=frozenset(keys.get("fullatt_block_indexes", list, [7, 15, 23, 31]))
        if family.has_windows
        else frozenset(),
        deepstack=tuple(keys.get("deepstack_visual_indexes", list, [])) if family.table == "resized" else (),
    )


def _refuse_hf_variants(config: Mapping[str, Any], family: VisionFamily, keys: MetadataReader) -> None:
    """Raise for what no GGUF has a key for, where it is not as in the models that exist."""
    rope = MetadataReader(keys.get("rope_parameters", dict, keys.values), source=keys.source)
    whole, text = MetadataReader(config, source="config.json: "), config.get("text_config") or {}
    expected: list[tuple[MetadataReader, str, object]] = []
    if family.rope in ("apart", "halves"):
        expected.append((rope, "rope_theta", family.rope_base))
    if family.merger == "unfold":
        tower = [(keys, "model_type", "pixtral"), (whole, "vision_feature_layer", -1)]
        rest = [(whole, "vision_feature_select_strategy", "full"), (whole, "projector_hidden_act", "gelu")]
        eps = MetadataReader(text, source="config.json: text_config: ")
        expected += [
            *tower,
            *rest,
            *([(eps, "rms_norm_eps", PIXTRAL_EPS)] if config["model_type"] == "mistral3" else []),
        ]
    if family.table == "sides":
        expected.append((MetadataReader(text, source="config.json: text_config: "), "pad_token_id", PADDING))
    for reader, key, value in expected:
        if reader.values.get(key, value) != value:
            raise UnsupportedModelError(
                f"{reader.describe_key(key)} is {reader.values[key]!r}: only {value!r} is supported"
            )


def _hf_images(checkpoint: Checkpoint, family: VisionFamily, keys: MetadataReader) -> ImageSettings:
    """Return the settings of preprocessor_config.json; what it does not say is the family's."""
    usual, whole = family.images, MetadataReader(checkpoint.metadata["config"], source="config.json: ")
    reader = MetadataReader(checkpoint.metadata["preprocessor"], source="preprocessor_config.json: ")
    for key in ("do_resize", "do_rescale"):
        if not reader.get(key, bool, True):
            raise UnsupportedModelError(f"{reader.describe_key(key)} is false: not supported")
    if reader.get("do_pan_and_scan", bool, False):
        raise UnsupportedModelError(f"{reader.describe_key('do_pan_and_scan')} is not supported: set it to false")
    size = MetadataReader(reader.get("size", dict, {}), source=f"{reader.source}size: ")
    tile = MetadataReader(reader.get("max_image_size", dict, {}), source=f"{reader.source}max_image_size: ")
    patch = keys.integer("patch_size", usual.patch, 1, MAX_SIDE)
    image_size = keys.integer("image_size", usual.size or 1, 1, MAX_SIDE)
    common = usual._replace(
        patch=patch,
        resample=reader.integer("resample", usual.resample, 0, 5),
        mean=_triple(reader, "image_mean", usual.mean),
        std=_triple(reader, "image_std", usual.std),
    )
    if not reader.get("do_normalize", bool, not usual.signed):
        common = common._replace(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    if usual.kind == "area":
        merge = keys.integer("pooling_kernel_size", usual.merge, 1, 64)
        tokens = reader.integer("max_soft_tokens", AREA_TOKENS, 1)
        return common._replace(merge=merge, max_pixels=tokens * (patch * merge) ** 2)
    if usual.kind == "longest":
        merge = whole.integer("spatial_merge_size", 2, 1, 64) if whole.values["model_type"] == "mistral3" else 1
        return common._replace(merge=merge, longest_edge=size.integer("longest_edge", image_size, 1, MAX_SIDE))
    if usual.kind == "native":
        lowest = reader.integer("min_pixels", size.integer("shortest_edge", usual.min_pixels), 1)
        highest = reader.integer("max_pixels", size.integer("longest_edge", usual.max_pixels), 1)
        merge = keys.integer("spatial_merge_size", usual.merge, 1, 64)
        return common._replace(merge=merge, min_pixels=lowest, max_pixels=highest)
    if usual.kind == "square":
        side = size.integer("height", image_size, 1, MAX_SIDE)
        if side != image_size or size.integer("width", side) != side:
            raise UnsupportedModelError(f"{size.describe_key('height')}: only {image_size} x {image_size} is supported")
        per_side = isqrt(whole.integer("mm_tokens_per_image", GEMMA3_TOKENS, 1))
        return common._replace(size=side, merge=max(1, side // patch // per_side))
    return common._replace(
        size=tile.integer("longest_edge", image_size, 1, MAX_SIDE),
        merge=whole.integer("scale_factor", usual.merge, 1, 64),
        longest_edge=size.integer("longest_edge", 4 * image_size, 1, MAX_SIDE),
        splits=reader.get("do_image_splitting", bool, True),
    )


def _triple(keys: MetadataReader, key: str, usual: tuple[float, float, float]) -> tuple[float, float, float]:
    values = keys.array(key)
    if values is None:
        return usual
    if len(values) != 3 or not all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in values):
        raise keys.error(key, "must be three numbers in 0..1")
    red, green, blue = map(float, values)
    return red, green, blue


def _table_sides(checkpoint: Checkpoint, family: VisionFamily) -> tuple[int, int] | None:
    """Return the rows and columns of the table of positions."""
    table = checkpoint.tensors.get("position_embd.weight")
    if table is None:
        return None
    if family.table == "sides":
        if len(table.shape) != 3 or table.shape[0] != 2:
            raise ModelFileError(f"tensor 'position_embd.weight' has shape {table.shape}: it must be of two axes")
        return table.shape[1], table.shape[1]
    side = isqrt(table.shape[0])
    if len(table.shape) != 2 or side * side != table.shape[0] or not side:
        raise ModelFileError(
            f"tensor 'position_embd.weight' has shape {table.shape}: it must be of a square of patches"
        )
    return side, side


def _output_dim(checkpoint: Checkpoint, family: VisionFamily) -> int:
    """Return the width of the decoder, as the last projection has it."""
    is_transposed = int(family.merger == "pool")
    for name, axis in (("mm.2.weight", 0), ("mm.model.fc.weight", 0), ("mm.input_projection.weight", is_transposed)):
        tensor = checkpoint.tensors.get(name)
        if tensor is not None and len(tensor.shape) == 2:
            return tensor.shape[axis]
    raise ModelFileError(f"{checkpoint.path.name} has no projection to the decoder (mm.*): it is not a projector file")


def _vision_config(
    family: VisionFamily, *, keys: MetadataReader, names: tuple[str, ...], activation: str, eps: float, **fields: Any
) -> VisionConfig:
    maxima = (MAX_LAYERS, MAX_WIDTH, MAX_WIDTH, MAX_WIDTH)
    n_layers, d_model, d_ff, n_heads = (
        keys.integer(name, minimum=1, maximum=maximum) for name, maximum in zip(names, maxima, strict=True)
    )
    if d_model % n_heads:
        raise keys.error(names[3], f"is {n_heads}: a width of {d_model} cannot be shared evenly")
    head_dim = d_model // n_heads
    if keys.integer("head_dim", head_dim) != head_dim or keys.integer("num_key_value_heads", n_heads) != n_heads:
        raise UnsupportedModelError(f"{keys.describe_key('head_dim')}: heads of another size or number for keys")
    if family.rope and head_dim % 4:
        raise keys.error(names[3], f"gives heads of {head_dim} values: RoPE by rows and columns needs a multiple of 4")
    model = ModelConfig(
        family=family.encoder,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        vocab_size=1,
        context_length=1,
        norm_eps=eps,
        rope_dim=head_dim - head_dim % 2,
        rope_base=family.rope_base,
        attention_scale=family.encoder.attention.scale or head_dim**-0.5,
        windows=(0,) * n_layers,
        activation=activation,
        causal=False,
    )
    return _checked(VisionConfig(family, model, **fields))


def _checked(config: VisionConfig) -> VisionConfig:
    """Return the configuration; raise if its numbers do not fit together."""
    images, name = config.images, config.family.encoder.name
    if (config.table is None) == bool(config.family.table):
        raise ModelFileError(
            f"tensor 'position_embd.weight': a tower of {name} has {'one' if config.table is None else 'none'}"
        )
    longest = images.max_pixels // images.patch**2 // images.merge
    if config.table is not None and config.family.table == "sides" and config.table[0] < longest:
        raise ModelFileError(f"tensor 'position_embd.weight' has {config.table[0]} places, an image up to {longest}")
    if images.size:
        side = images.size // images.patch
        if side % images.merge or images.size % images.patch:
            raise ModelFileError(f"images of {images.size} pixels are no whole tokens of {images.patch * images.merge}")
        if config.table != (side, side):
            raise ModelFileError(
                f"tensor 'position_embd.weight' is of {config.table} patches, an image has {side} a side"
            )
    if any(type(i) is not int or not 0 <= i < config.model.n_layers for i in config.deepstack):
        raise ModelFileError(f"deepstack layers {config.deepstack} are not all below {config.model.n_layers}")
    return config


def vision_keys(config: VisionConfig) -> Mapping[str, Any]:
    """Return the keys of a projector file for a tower."""
    c, images = config.model, config.images
    keys: dict[str, Any] = {
        "image_size": images.size or images.longest_edge or images.patch * images.merge,
        "patch_size": images.patch,
        "embedding_length": c.d_model,
        "feed_forward_length": c.d_ff,
        "block_count": c.n_layers,
        "projection_dim": config.output_dim,
        "attention.head_count": c.n_heads,
        "attention.layer_norm_epsilon": c.norm_eps,
        "image_mean": list(images.mean),
        "image_std": list(images.std),
        "spatial_merge_size" if images.kind in ("native", "longest") else "projector.scale_factor": images.merge,
    }
    if images.max_pixels:
        keys |= {"image_min_pixels": images.min_pixels, "image_max_pixels": images.max_pixels}
    if images.kind == "tiles":
        keys["preproc_image_size"] = images.longest_edge
    if config.window:
        every = min(config.full_layers, default=c.n_layers) + 1
        if config.full_layers != {i for i in range(c.n_layers) if (i + 1) % every == 0}:
            raise UnsupportedModelError(
                f"fullatt_block_indexes {sorted(config.full_layers)}: a GGUF has every n-th layer"
            )
        keys |= {"n_wa_pattern": every, "window_size": config.window * images.patch * images.merge}
    if config.deepstack:
        keys["is_deepstack_layers"] = [i in config.deepstack for i in range(c.n_layers)]
    activation = {"gelu_tanh": "use_gelu", "gelu": "use_gelu", "silu": "use_silu"}.get(c.activation)
    flags = {f"clip.{activation}": True} if activation else {}
    return {f"clip.vision.{key}": value for key, value in keys.items()} | flags
