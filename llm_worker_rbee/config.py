"""The numbers of a model and of an engine and the options of a load, as frozen records; and types of keys and values.

`Family` is what models of one architecture have in common (models/families.py has the table); `ModelConfig` is one
model, read from a checkpoint's metadata; `EngineConfig` is how requests share it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from .errors import InvalidRequestError, ModelFileError, UnsupportedModelError

# by `--kv-type`; int8 has a float32 scale per position and head
KV_VALUE_BYTES = {"float32": 4, "float16": 2, "int8": 1, "bfloat16": 2, "float8": 1}
KV_ON_CPU, KV_ON_CUDA = ("float32", "float16", "int8"), ("bfloat16", "float16", "float32", "float8")
KV_AUTO = "auto"
KV_CUDA = "bfloat16"  # what `auto` is on a GPU
KV_DEFAULT = "float16"  # what `auto` is for kernels: half the memory traffic; the reference rounds nothing
MAX_LAYERS, MAX_WIDTH, MAX_EXPERTS, MAX_CONV_KERNEL = 4096, 1 << 20, 1 << 14, 64
MAX_VOCABULARY, MAX_CONTEXT, MAX_BATCH, MAX_DRAFT_TOKENS = 1 << 24, 1 << 40, 1024, 16
LAYER_KINDS = ("attention", "short_conv", "gated_delta")
MIN_ROPE_FACTOR = 1e-6  # of rope scaling
SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT = 1.702, 7.0  # of the activation "swiglu_oai"
WIDTHS = ("d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff")
MAX_SHAPE = {"n_layers": MAX_LAYERS, **dict.fromkeys(WIDTHS, MAX_WIDTH)}
MAX_SHAPE |= {"vocab_size": MAX_VOCABULARY, "context_length": MAX_CONTEXT}
POOLING_KINDS, SPECULATIVE = ("mean", "cls", "last"), ("off", "ngram", "mtp")
FP8 = "fp8"  # of `quantize`: e4m3 with a scale for each row
WRITTEN_TYPES: tuple[str, ...] = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # of files
WRITTEN_TYPES += ("Q4_K", "Q5_K", "Q6_K", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "MXFP4_MOE")
STEP_TOKENS = (8192, 4096, 2048, 1024, 512)  # of a step on a GPU: the largest that model and memory allow
UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT]?)(iB?|B)?", re.IGNORECASE | re.ASCII)
IMAGE_ROWS_BYTES = 256 << 20  # of the last images, which an engine keeps in the host's memory
DEVICE_SPARE_BYTES = 1 << 30  # of a GPU beside weights, KV cache and the arrays of a step: context, kernels, graphs


class AttentionSpec(NamedTuple):
    """The attention of a family. Window, scale and cap hold for a GGUF without their keys."""

    qkv_bias: bool = False  # bias tensors are expected beside q, k and v
    output_bias: bool = False  # and beside the output projection
    qk_norm: Literal["", "head", "optional", "wide"] = ""  # of each head, in some models alone, or of all together
    v_norm: bool = False  # a norm of v without a weight
    keys_as_values: bool = False  # a layer without v has its keys, before their norm, as values
    gated: bool = False  # rows of q hold a gate's rows too, head by head: attention times its sigmoid
    sinks: bool = False  # a logit of each head joins the denominator of the softmax
    window: int = 0
    full_every: int = 0  # with a window: every n-th layer has none (0: all have it)
    full_first: bool = False  # the first of every n layers, not the last
    image_spans: Literal["", "all", "window"] = ""  # layers in which tokens of an image see each other
    scale: float = 0.0  # 0: head_dim ** -0.5
    cap: float = 0.0


class RopeSpec(NamedTuple):
    """The RoPE of a family."""

    interleaved: tuple[str, ...] = ()  # formats whose rows of q and k are for rope over neighbouring pairs
    nope_every: int = 0  # every n-th layer has no rope
    local_base: float = 0.0  # of layers with a window, where it differs and a GGUF lacks its key
    unscaled_windows: bool = False  # scaling is of the layers without a window alone
    yarn_truncate: bool = True  # YaRN's ramp is between whole pairs, unless a key says
    sections: tuple[int, ...] = ()  # M-RoPE: pairs that turn by time, row, column, unless a key says
    alternates: bool = False  # from pair to pair, not section by section


class NormSpec(NamedTuple):
    """The norms of a block."""

    pre: bool = True  # before attention and before the MLP
    post: bool = False  # after attention and after the MLP, before the residual
    stream: bool = False  # of the residual stream itself, after attention and after the MLP
    layer: bool = False  # they subtract the mean, and may have biases


class ExpertSpec(NamedTuple):
    """The experts of a family, or of a model."""

    scoring: str = "softmax"  # or "sigmoid", unless a key says
    renormalize: bool = True  # the weights of a token's experts sum up to 1, unless a key says
    shared_gate: bool = False  # the shared expert times a sigmoid of the token
    bias: bool = False  # bias tensors are expected beside the router and the experts
    parallel: bool = False  # beside the MLP of a layer, with norms of their own


class TensorLayout(NamedTuple):
    """How files hold the tensors of a family."""

    fused_qkv: bool = False  # q, k, v in one tensor
    fused_gate_up: bool = False  # gate and up in one tensor
    norm_plus_one: bool = False  # safetensors hold weight - 1 (GGUF holds the weight)
    gguf_mlp_norm: str = "ffn_norm"  # name of the norm before the MLP in a GGUF
    output_norm: str = "output_norm"  # name of the norm before the output head
    gguf_tiled_heads: bool = False  # in a GGUF, value head h of linear attention has key head h % key heads


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families of models, as data."""

    name: str
    gguf: tuple[str, ...]  # values of general.architecture
    hf: tuple[str, ...]  # values of model_type
    activation: str = "silu"
    attention: AttentionSpec = field(default_factory=AttentionSpec)
    rope: RopeSpec = field(default_factory=RopeSpec)
    norms: NormSpec = field(default_factory=NormSpec)
    experts: ExpertSpec | None = None  # None: no file may have experts
    mixer: str = "attention"  # of the layers without attention, of LAYER_KINDS
    layer_shapes: bool = False  # heads, MLPs and KV sharing differ from layer to layer (models/layer_shapes.py)
    scaled_embedding: bool = False  # embeddings times sqrt(width)
    multipliers: bool = False  # GGUF has keys for the scales of embedding, residual, attention and logits
    final_cap: float = 0.0  # of a GGUF without its key
    is_encoder: bool = False  # tokens see those after them, and there is no output head: a pooling model
    learned_positions: bool = False  # a table of positions instead of rope
    gated_mlp: bool = True
    classifier_pooling: str = "cls"  # of rerankers in GGUF files
    classifier_activation: str = "tanh"  # after the dense layer of a classifier
    tensors: TensorLayout = field(default_factory=TensorLayout)
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that a config.json lacks, not of null ones


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was first trained on."""

    kind: str = "none"  # none, linear, llama3, yarn, longrope, proportional
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None  # None: the kind's own formula
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    rotary_fraction: float = 1.0  # of the pairs of a head: the others stand still
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The experts of a model, in all layers but the dense ones."""

    count: int
    used: int  # by a token
    d_ff: int  # of an expert
    spec: ExpertSpec
    shared_d_ff: int = 0  # of the expert that all tokens use; 0: none
    scale: float = 1.0  # of the weights of a token's experts
    dense_layers: frozenset[int] = frozenset()

    def share(self, tokens: int = 1) -> float:
        """Return the share of the experts that so many tokens use, if each chooses independently of the others."""
        return float(1 - (1 - self.used / self.count) ** tokens)

    def __post_init__(self) -> None:
        for name, maximum in (("count", MAX_EXPERTS), ("used", self.count), ("d_ff", MAX_WIDTH)):
            if not 1 <= getattr(self, name) <= maximum:
                raise ModelFileError(f"experts: {name} is {getattr(self, name)}, outside 1..{maximum}")


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """The shape of the layers with linear attention: a convolution of q, k and v, then a matrix for each value head."""

    kernel: int  # of the convolution
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int

    def __post_init__(self) -> None:
        for name in ("kernel", "k_heads", "v_heads", "k_dim", "v_dim"):
            minimum, value = 2 if name == "kernel" else 1, getattr(self, name)
            if not minimum <= value <= MAX_WIDTH:
                raise ModelFileError(f"linear attention: {name} is {value}, outside {minimum}..{MAX_WIDTH}")
        values, keys = self.v_heads, self.k_heads
        if values % keys:
            raise ModelFileError(f"linear attention: {values} value heads cannot share {keys} keys evenly")

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model and every number its forward pass needs."""

    family: Family
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_dim: int
    rope_base: float
    attention_scale: float
    windows: tuple[int, ...]  # per layer; 0 sees everything
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rope_sections: tuple[int, ...] = ()  # of M-RoPE: pairs by time, row, column; text is the same in all of them
    rope_local_base: float = 0.0  # 0: layers with a window use rope_base and rope_scaling like the others
    nope_layers: tuple[int, ...] = ()  # layers without rope
    temperature_beta: float = 0.0  # queries times 1 + beta * ln(1 + position // original context); 0: none
    embedding_scale: float = 1.0  # beside the factor of `Family.scaled_embedding`
    residual_scale: float = 1.0  # what attention and MLP add to the residual stream is multiplied by it
    logit_scale: float = 1.0  # logits are divided by it
    attention_cap: float = 0.0  # soft cap of the scores; 0: none
    final_cap: float = 0.0  # soft cap of the logits; 0: none
    activation: str = "silu"
    experts: ExpertConfig | None = None
    nextn_layers: int = 0  # of multi-token prediction, after the others in the file (models/mtp.py)
    # Layers of different shapes; 0 or empty: as the fields above say.
    window_head_dim: int = 0  # head_dim of the layers with a window
    window_rope_dim: int = 0  # rope_dim of these
    layer_kv_heads: tuple[int, ...] = ()
    layer_d_ff: tuple[int, ...] = ()
    shared_kv_layers: int = 0  # the last ones: they read the keys and values of an earlier layer
    layer_input_dim: int = 0  # of the embeddings that each layer adds; 0: none
    layer_kinds: tuple[str, ...] = ()  # per layer, of LAYER_KINDS; empty: all attention
    conv_kernel: int = 0  # of short convolutions
    linear: LinearAttentionConfig | None = None
    causal: bool = True  # False: a token sees those after it too
    token_types: int = 0  # rows of the table of segments, of encoders; 0: none

    def __post_init__(self) -> None:
        for name, maximum in MAX_SHAPE.items():
            if not 1 <= getattr(self, name) <= maximum:
                raise ModelFileError(f"model shape: {name} is {getattr(self, name)}, outside 1..{maximum}")
        if self.layer_input_dim and self.activation == "swiglu_oai":
            raise ModelFileError("model shape: per-layer embeddings have no activation swiglu_oai")
        if self.n_heads % self.n_kv_heads:
            raise ModelFileError(f"model shape: {self.n_heads} heads cannot share {self.n_kv_heads} KV heads evenly")
        if self.rope_dim % 2 or not 0 < self.rope_dim <= self.head_dim:
            raise ModelFileError(f"model shape: rope over {self.rope_dim} of {self.head_dim} values a head")
        for name in ("norm_eps", "rope_base", "attention_scale", "embedding_scale", "residual_scale", "logit_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ModelFileError(f"model shape: {name} is {value}, not a positive number")
        self._check_layers()
        if self.layer_kinds:
            self._check_layer_kinds()

    def _check_layer_kinds(self) -> None:
        kinds = self.layer_kinds
        if len(kinds) != self.n_layers or not set(kinds) <= set(LAYER_KINDS):
            raise ModelFileError(f"model shape: layer_kinds must name one of {', '.join(LAYER_KINDS)} for each layer")
        if "attention" not in kinds:
            raise ModelFileError("model shape: no layer has attention: not supported")
        if "short_conv" in kinds and not 2 <= self.conv_kernel <= MAX_CONV_KERNEL:
            raise ModelFileError(f"model shape: conv_kernel is {self.conv_kernel}, outside 2..{MAX_CONV_KERNEL}")

    def layer_kind(self, i: int) -> str:
        """Return the name of the mixer of layer `i`, of LAYER_KINDS."""
        return self.layer_kinds[i] if self.layer_kinds else "attention"

    def _check_layers(self) -> None:
        """Raise if the shapes of single layers do not fit."""
        for name in ("layer_kv_heads", "layer_d_ff"):
            values = getattr(self, name)
            if values and (len(values) != self.n_layers or not all(1 <= n <= MAX_WIDTH for n in values)):
                raise ModelFileError(f"model shape: {name} must be {self.n_layers} numbers in 1..{MAX_WIDTH}")
        for n in self.layer_kv_heads:
            if self.n_heads % n:
                raise ModelFileError(f"model shape: {self.n_heads} heads cannot share {n} KV heads evenly")
        dim, rope_dim = self.window_head_dim or self.head_dim, self.window_rope_dim or self.rope_dim
        if any(self.windows) and (rope_dim % 2 or not 0 < rope_dim <= dim):
            raise ModelFileError(f"model shape: rope over {rope_dim} of {dim} values a head with a window")
        for i in range(self.n_layers - self.shared_kv_layers, self.n_layers):
            if self.kv_source(i) < 0:
                raise ModelFileError(f"model shape: layer {i} shares keys and values, and no earlier layer is like it")

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Return (KV heads, values of a head) of a layer."""
        heads = self.layer_kv_heads[layer] if self.layer_kv_heads else self.n_kv_heads
        return heads, self.window_head_dim if self.window_head_dim and self.windows[layer] else self.head_dim

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: itself, or the last owner with the same attention."""
        first_shared = self.n_layers - self.shared_kv_layers
        if layer < first_shared:
            return layer
        is_local = self.windows[layer] > 0
        return next((i for i in reversed(range(first_shared)) if (self.windows[i] > 0) == is_local), -1)

    @property
    def kv_owners(self) -> tuple[int, ...]:
        """The layers with keys and values of their own."""
        return tuple(i for i in range(self.n_layers - self.shared_kv_layers) if self.layer_kind(i) == "attention")

    def d_ff_of(self, layer: int) -> int:
        """Return the width of a layer's MLP."""
        return self.layer_d_ff[layer] if self.layer_d_ff else self.d_ff

    def kv_bytes(self, tokens: int, kv_type: str = "float32", head_step: int = 1) -> int:
        """Return the bytes of the keys and values of `tokens` tokens; heads are padded to a multiple of `head_step`."""
        scale = 4 if kv_type == "int8" else 0  # a float32 for each position and head
        shapes = [(heads, -(-dim // head_step) * head_step) for heads, dim in map(self.kv_shape, self.kv_owners)]
        return 2 * tokens * sum(heads * (dim * KV_VALUE_BYTES[kv_type] + scale) for heads, dim in shapes)

    def state_shapes(self, i: int) -> tuple[tuple[int, int], tuple[int, int, int] | None] | None:
        """Return the shapes of layer i's state of a sequence, float32; None: it has keys and values.

        The last inputs of its convolution (kernel - 1, channels), and the matrices (v_heads, k_dim, v_dim) of linear
        attention.
        """
        kind, linear = self.layer_kind(i), self.linear
        if kind == "short_conv":
            return (self.conv_kernel - 1, self.d_model), None
        if kind == "gated_delta":
            assert linear is not None
            return (linear.kernel - 1, linear.channels), (linear.v_heads, linear.k_dim, linear.v_dim)
        return None

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of a sequence in all layers; 0: the model has none."""
        shapes = [shape for i in range(self.n_layers) for shape in self.state_shapes(i) or () if shape is not None]
        return 4 * sum(math.prod(shape) for shape in shapes)


class DenseConfig(NamedTuple):
    """A dense layer after pooling."""

    name: str  # of its tensors
    columns: int
    rows: int
    activation: str = ""  # none


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How the hidden states of a sequence become one row, and how a text becomes a sequence."""

    kind: str = "mean"  # of POOLING_KINDS
    normalize: bool = True  # embeddings have length 1
    dense: tuple[DenseConfig, ...] = ()
    score: str = ""  # of a ranker, what its logits become: "sigmoid", "softmax" (of yes and no), "identity"
    label_words: tuple[str, ...] = ()  # of a ranker without a classifier: tokens whose logits score its labels
    label_tokens: tuple[int, ...] = ()  # their numbers
    max_length: int = 0  # tokens of a sequence; 0: as many as the model has positions for
    prompts: Mapping[str, str] = field(default_factory=dict)  # text before an input, by name
    default_prompt: str = ""  # a name of these
    similarity: str = "cosine"
    lower_case: bool = False  # texts are lower-cased before they become tokens
    pair_template: str = ""  # of a ranker: its prompt, with {query} and {document}; empty: a pair of segments
    notes: tuple[str, ...] = ()  # on what the files do not say, for people

    def __post_init__(self) -> None:
        if self.kind not in POOLING_KINDS:
            raise UnsupportedModelError(f"pooling {self.kind!r} is not supported (are: {', '.join(POOLING_KINDS)})")

    @property
    def is_ranker(self) -> bool:
        """Whether the model scores pairs of texts."""
        return bool(self.score)


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """How an engine divides its steps. These are the only defaults."""

    target_itl_ms: float = 100.0  # decodes beside a prefill get a token within this time
    prefix_cache: bool = True  # computed blocks are kept for requests with the same prefix
    speculative: str = "off"  # "ngram": draft from earlier tokens of the same sequence; "mtp": with the file's own head
    draft_tokens: int = 4  # drafts of one request that a step verifies, at most
    debug: bool = False  # check the scheduler's invariants after every step

    def __post_init__(self) -> None:
        _require_whole("draft_tokens", self.draft_tokens, MAX_DRAFT_TOKENS)
        if not (isinstance(self.target_itl_ms, (int, float)) and 0 < self.target_itl_ms < math.inf):
            problem = f"target_itl_ms is {self.target_itl_ms!r}: it must be a number of milliseconds above 0"
            raise InvalidRequestError(problem, "target_itl_ms")
        if self.speculative not in SPECULATIVE:
            problem = f"unknown speculative {self.speculative!r}: use one of {', '.join(SPECULATIVE)}"
            raise InvalidRequestError(problem, "speculative")


def _require_whole(name: str, value: object, maximum: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (maximum and value > maximum):
        limit = f", at most {maximum}" if maximum else ""
        raise InvalidRequestError(f"{name} is {value!r}: it must be a whole number, 1 or more{limit}", name)


def parse_size(text: str, name: str = "kv_memory") -> int:
    """Return the bytes of `512M`, `1.5GB`, `2GiB`; K, M, G and T are powers of 1,000, with an i of 1,024."""
    match = SIZE.fullmatch(text.strip())
    binary = match is not None and (match[3] or "").lower().startswith("i")
    if match is None or (binary and not match[2]):
        raise InvalidRequestError(f"{name} is {text!r}: give a size such as 512M, 1.5GB or 2GiB", name)
    size = int(float(match[1]) * (1024 if binary else 1000) ** UNITS[match[2].upper()])
    if size < 1:
        raise InvalidRequestError(f"{name} is {text!r}: it must be 1 byte or more", name)
    return size


MAX_LORAS, MAX_LORA_RANK = 1024, 1024
FOREVER_S = 100 * 365 * 86_400.0  # longer durations, whose end may have no date
DURATION_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ms|s|m|h|d|us|µs|ns)")
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration(value: str | float, name: str) -> float:
    """Return the seconds of `5m`, `1h30m`, `90s`, `0` or a number; a negative duration is infinite, as in Ollama."""
    if isinstance(value, str):
        text, sign = value.strip().lstrip("+-"), value.strip()[:1]
        parts = DURATION_PART.findall(text)
        if "".join(map("".join, parts)) != text or not text:
            if text != "0":
                raise InvalidRequestError(f"{name} is {value[:100]!r}: give a duration such as 5m, 1h30m or 0", name)
            return 0.0
        seconds = sum(float(number) * SECONDS[unit] for number, unit in parts)
        return math.inf if sign == "-" or seconds > FOREVER_S else seconds
    return math.inf if value < 0 or value > FOREVER_S else float(value)


class SchedulerLimits(NamedTuple):
    """Requests and tokens of a step."""

    max_batch: int = 64
    max_step_tokens: int = 512

    def __str__(self) -> str:
        return f"up to {self.max_batch:,} requests in a batch and {self.max_step_tokens:,} tokens in a step"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SchedulingOptions):
    """How much an engine holds; on a GPU `max_batch` and `max_step_tokens` follow from its memory."""

    max_context: int  # tokens of one request, prompt and output together
    n_blocks: int  # of the KV cache, for all requests together
    block_size: int = 16  # tokens in a block
    max_batch: int = SchedulerLimits().max_batch  # requests that are computed in one step
    max_step_tokens: int = SchedulerLimits().max_step_tokens  # of a step with prefills, decodes included
    n_slots: int = 0  # of states, for a model that has them; 0: what max_batch requests need, and a few snapshots

    def __post_init__(self) -> None:
        for name in ("max_context", "n_blocks", "block_size", "max_batch", "max_step_tokens"):
            _require_whole(name, getattr(self, name), MAX_BATCH if name == "max_batch" else None)
        if isinstance(self.n_slots, bool) or not isinstance(self.n_slots, int) or self.n_slots < 0:
            raise InvalidRequestError(f"n_slots is {self.n_slots!r}: it must be a whole number, 0 or more", "n_slots")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Which model, and what it computes on; `LLM` and `Embedder` document the options."""

    model: str | None = None
    device: str = "auto"
    backend: str = "auto"
    threads: int | None = None
    quantize: str | None = None
    deterministic: bool = False

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options that a caller named; raise on an unknown name. A path is kept as text."""
        names = [field.name for field in fields(cls)]
        for name in arguments:
            if name not in names:
                raise InvalidRequestError(f"unknown option {name!r}: use one of {', '.join(names)}", name)
        plain: Any = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
        return cls(**plain)

    @property
    def is_automatic(self) -> bool:
        """Whether a GPU is used where there is one: nothing else was requested, and threads are the CPU's."""
        return self.device == "auto" and self.backend == "auto" and self.threads is None

    @property
    def may_leave_gpu(self) -> bool:
        """Whether the CPU may take a model that does not fit on a GPU."""
        return self.is_automatic and not self.is_fp8

    @property
    def is_fp8(self) -> bool:
        """Whether the weights become FP8, in upper or lower case: only a GPU computes with them."""
        return self.quantize is not None and self.quantize.lower() == FP8


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """A LoRA adapter to load with a model: a GGUF file, a PEFT folder or hf:owner/repo."""

    name: str
    path: str
    scale: float = 1.0


class LoraUse(NamedTuple):
    """An adapter of a request; without a digest it is what the file holds when it is read."""

    path: str
    digest: bytes = b""  # of its content
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ComputeOptions, SchedulingOptions):
    """Everything that may be said about a model and its engine, from the command line to the engine's process."""

    kv_type: str = KV_AUTO
    kv_memory: int | None = None
    max_context: int | None = None
    max_batch: int | None = None  # None: `EngineConfig` says it on a CPU, the memory on a GPU
    max_step_tokens: int | None = None  # likewise
    draft_model: str | None = None
    kv_dir: str | None = None  # a folder that keeps blocks of keys and values
    kv_disk: int = 20 << 30  # bytes in it
    kv_max_age_days: float | None = None  # of a segment's last use
    kv_ram: int = 0  # bytes of the host's memory for blocks of a GPU
    num_sharing: int = 1  # engines that share the cores and the memory of the device, this one included
    reserved_memory: int = 0  # bytes that engines of other models will take
    loras: tuple[LoraSpec, ...] = ()
    max_loras: int | None = None  # adapters in the model at the same time; None: those that are named
    max_cpu_loras: int | None = None  # adapters that may be loaded; None: as many
    max_lora_rank: int | None = None  # of an adapter; None: 16, or the rank of the largest named one
    mmproj: str | None = None  # the projector, whose tower sees images; None: the one beside the model, "none": none
    max_image_tokens: int = 4096  # of an image that has a size of its own: a larger one is made smaller
    tower_memory: int = 0  # bytes that the tower takes

    def __post_init__(self) -> None:
        for name, maximum in (("max_batch", MAX_BATCH), ("max_step_tokens", None)):
            if getattr(self, name) is not None:
                _require_whole(name, getattr(self, name), maximum)
        super().__post_init__()
        for name in ("kv_dir", "kv_ram"):
            if getattr(self, name) and not self.prefix_cache:
                raise InvalidRequestError(f"{name} keeps the blocks of the prefix cache: leave that on", name)
        _require_whole("kv_disk", self.kv_disk, None)
        _require_whole("max_image_tokens", self.max_image_tokens, None)
        bounds = ("max_loras", 0, MAX_LORAS), ("max_cpu_loras", 1, MAX_LORAS), ("max_lora_rank", 1, MAX_LORA_RANK)
        for name, least, most in bounds:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise InvalidRequestError(f"{name} is {value!r}: it must be a whole number, {least} to {most}", name)
        names = [spec.name for spec in self.loras]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise InvalidRequestError(f"two adapters have the name {double!r}: use NAME=PATH", "loras")
        if len(self.loras) > self.num_loras:
            raise InvalidRequestError(
                f"{len(self.loras)} adapters are named, max_loras is {self.num_loras}", "max_loras"
            )
        if self.kv_ram:
            _require_whole("kv_ram", self.kv_ram, None)
        if self.draft_model is not None and self.speculative != "off":
            problem = "speculative and draft_model are two ways to draft: give one of them"
            raise InvalidRequestError(problem, "speculative")

    @property
    def scheduling(self) -> dict[str, Any]:
        """The fields of `SchedulingOptions`, for an `EngineConfig`."""
        return {field.name: getattr(self, field.name) for field in fields(SchedulingOptions)}

    @property
    def lora_slots(self) -> int:
        """Adapters in the model at the same time."""
        return len(self.loras) if self.max_loras is None else self.max_loras

    @property
    def num_loras(self) -> int:
        """Adapters that may be loaded; those without a slot wait in the memory of the host, or in their files."""
        return max(self.lora_slots, self.max_cpu_loras or 0)

    @property
    def has_mtp(self) -> bool:
        """Whether the head of the model's own file drafts."""
        return self.speculative == "mtp"

    @property
    def drafts_per_step(self) -> int:
        """The drafts of a request in a step."""
        return self.draft_tokens if self.draft_model is not None or self.speculative != "off" else 0


@dataclass(frozen=True, kw_only=True)
class PoolingOptions(ComputeOptions):
    """The same for an embedding model or a reranker."""

    max_length: int | None = None  # tokens of a sequence; None: what the model's own files say
    task: str = ""  # "embed" or "rank"; "": as its files say
    refuses_chat_models: bool = False  # instead of embedding by the last token, which they were not trained for
