"""Real models for the engine, questions for them, and the output of each when it runs alone: without
engine, scheduler or batch, one request on its own cache."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.backends.ops import Backend
from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine.block_pool import BlockPool
from llm_worker_rbee.engine.draft_control import DraftControl
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.engine.request import Request, StepOutput
from llm_worker_rbee.engine.sampler import sample_rows, token_logprobs
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.sampling_params import SamplingParams, TokenLogprob
from llm_worker_rbee.token_engine.protocol import RequestStream
from llm_worker_rbee.weights import open_checkpoint
from tests.conftest import DEVICE
from tests.helpers import model_zoo

SMALL = model_zoo.Variant(
    "llama", {"rope_parameters": model_zoo.DEFAULT_ROPE, "max_position_embeddings": 512, "head_dim": 32}
)

LFM2 = model_zoo.Variant(
    "lfm2",
    {
        "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
        "max_position_embeddings": 512, "norm_eps": 1e-5,
    },
)  # fmt: skip
QWEN35 = model_zoo.Variant(
    "qwen3_5_text",
    {
        **model_zoo.QWEN_MROPE, "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2,
        "max_position_embeddings": 512,
    },
)  # fmt: skip

EXPERTS = model_zoo.Variant(
    "qwen2_moe",
    {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "max_position_embeddings": 512,
        **model_zoo.SHARED_EXPERT,
    },
)  # fmt: skip

GEMMA4 = {  # layers of two shapes; those of "gemma4-e" share keys and values
    name: model_zoo.Variant("gemma4_text", {**model_zoo.ZOO[name].settings, **changes, "max_position_embeddings": 512})
    for name, changes in {
        "gemma4": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        "gemma4-e": {
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
        },
        "gemma4-moe": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    }.items()
}  # fmt: skip


def load(path: Path, *kv_types: str) -> Transformer:
    """On the tests' device, compiled; what a request is answered does not depend on its company."""
    return load_on(path, select_backend(DEVICE, deterministic=True), *kv_types)


def load_on(path: Path, ops: Backend, *kv_types: str) -> Transformer:
    """On a backend, compiled."""
    checkpoint = open_checkpoint(path)
    config = read_model_config(checkpoint)
    for kv_type in kv_types or ("float32",):
        ops.load_kernels(checkpoint, config, kv_type)
    return load_model(checkpoint, ops, config)


def small_file(path: Path, kind: str, seed: int = 0, variant: model_zoo.Variant = SMALL) -> Path:
    """A random model of three layers, two heads to a KV head; `kind` F32 or a block type."""
    model = model_zoo.make_hf(variant, seed)
    if kind == "F32":
        return model_zoo.save_gguf(variant, model, path)
    return model_zoo.save_quantized(variant, model, path, kind)


@dataclass(frozen=True)
class Question:
    """A prompt with its parameters, for many requests."""

    prompt: tuple[int, ...]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    eos: frozenset[int] = frozenset()
    sample_index: int = 0

    def request(self, **more: Any) -> Request:
        params = SamplingParams(**self.options).resolve()
        return Request(
            list(self.prompt), params, self.max_tokens, params.seed or 0, self.eos, self.sample_index, **more
        )


class Answer(NamedTuple):
    """Everything that comes back."""

    tokens: list[int]
    finish: str | None
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None] | None


def alone(model: Transformer, question: Question, kv_type: str = "float32") -> Answer:
    """The meaning of a question: one token after the other."""
    request, k = question.request(), question.options.get("logprobs")
    solo = SingleSequence(model, len(request.prompt) + request.max_tokens, kv_type)
    if request.prompt_logprobs is not None:
        for start, logits in SingleSequence(model, len(request.prompt), kv_type).catch_up(
            question.request(), all_logits=True
        ):
            following = request.prompt[start + 1 : start + 1 + len(logits)]
            request.prompt_logprobs += token_logprobs(model.ops, logits[: len(following)], following, k or 0)
    logprobs: list[TokenLogprob] = []
    while len(request.tokens) < request.max_tokens:
        (*_, (_, logits)) = solo.catch_up(request)
        token = int(model.ops.sample(logits, sample_rows(request))[0])
        if token in request.eos_ids and not request.params.ignore_eos:
            return Answer(request.tokens, "stop", logprobs, request.prompt_logprobs)
        if k is not None:
            logprobs += token_logprobs(model.ops, logits, [token], k)
        request.ids.append(token)
    return Answer(request.tokens, "length", logprobs, request.prompt_logprobs)


class Listener:
    """What came out of an engine, request by request."""

    def __init__(self) -> None:
        self.outputs: dict[Request, list[StepOutput]] = {}

    def take(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            known = self.outputs.setdefault(output.request, [])
            assert not known or known[-1].finish_reason is None, "something came of a request that had ended"
            known.append(output)

    def answer(self, request: Request) -> Answer:
        outputs = self.outputs.get(request, [])
        tokens = [o.token for o in outputs if o.finish_reason not in ("stop", "error")]
        finish = outputs[-1].finish_reason if outputs else None
        return Answer(tokens, finish, [o.logprob for o in outputs if o.logprob is not None], request.prompt_logprobs)


def engine(model: Transformer, kv_type: str = "float32", **options: Any) -> Engine:
    """One with room, unless the options say otherwise. Its budget does not depend on how fast this machine is."""
    settings = {"max_context": 256, "n_blocks": 128, "target_itl_ms": 1e9, "debug": True, **options}
    return Engine(model, EngineConfig(**settings), kv_type)


def run(engine: Engine, *requests: Request) -> Listener:
    """All of them at once, to the end."""
    listener = Listener()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        listener.take(engine.step())
    require_idle(engine)
    return listener


def require_idle(engine: Engine) -> None:
    engine.scheduler.check()
    assert not engine.has_work
    assert engine.scheduler.pool.num_free == engine.config.n_blocks
    assert engine.scheduler.states is None or not engine.scheduler.states.num_used


class AlternatingControl(DraftControl):
    """Pauses and resumes drafting after so many steps, in turn, however long they take."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self._lengths = cycle(steps)
        self._steps_left = next(self._lengths)
        self.num_switches = 0

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        assert num_tokens >= 0
        assert min(num_requests, seconds) > 0
        self._steps_left -= 1
        if not self._steps_left:
            self.is_drafting = not self.is_drafting
            self._steps_left = next(self._lengths)
            self.num_switches += 1


OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": True},
    {"temperature": 1.0, "seed": 1, "logprobs": 2},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.3, "seed": 3, "top_k": 7, "repetition_penalty": 1.3, "repeat_last_n": 9},
    {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.7, "presence_penalty": 0.3, "prompt_logprobs": True},
    {"temperature": 0.5, "seed": 5, "min_p": 0.05, "typical_p": 0.9, "logit_bias": {5: 2.0}, "logprobs": 0},
)


def some_questions(count: int, vocab: int, lengths: tuple[int, int], seed: int = 0) -> list[Question]:
    """Greedy ones and drawn ones, many of which begin alike, and some of which repeat themselves."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, vocab) for _ in range(lengths[1])] for _ in range(3)]
    made = []
    for i in range(count):
        length, common = rng.randint(*lengths), rng.choice((0, 0.5, 0.8, 1))
        prompt = beginnings[i % 3][: int(common * length)]
        while len(prompt) < length:
            prompt += prompt[-5:] if rng.random() < 0.3 else [rng.randrange(3, vocab)]
        eos = frozenset(rng.sample(range(vocab), vocab // 40)) if rng.random() < 0.4 else frozenset[int]()
        options = OPTIONS[i % len(OPTIONS)]
        made.append(Question(tuple(prompt[:length]), rng.randint(1, 14), options, eos, sample_index=i % 3))
    return made


async def all_of(stream: RequestStream) -> list[int]:
    """Return the tokens of a stream, to its end."""
    tokens: list[int] = []
    while outputs := await stream.next_outputs():
        tokens += [token for output in outputs for token in output.tokens]
    return tokens


def clear_prefix_cache(pool: BlockPool) -> int:
    """Evict all cached blocks that no request holds; return how many."""
    cached = [block for block in pool._free if pool._hashes[block] is not None]
    for block in cached:
        pool._evict(block)
    return len(cached)
