"""Scenarios of `bench e2e` other than plain prefill and decode: whole requests, single steps, bursts, speculation, ...

A scenario drives the engine of its `harness` and adds a sample to its results each time. Those that share an engine are
measured in turn. `ModelBench` is what all of them share: the model, its limits, the samples so far.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from llm_worker_rbee.config import MAX_BATCH, ModelConfig
from llm_worker_rbee.errors import ContextLengthError, InferenceError, InvalidRequestError
from llm_worker_rbee.models import Transformer
from llm_worker_rbee.models.loader import LAYER_NUMBER
from llm_worker_rbee.weights import Checkpoint

from . import statistics
from .engine_harness import EngineHarness, TimedRun, encode_bundled_prompts
from .results import Better, Recorder, Result
from .roofline import Limits, product_arithmetic

Kind = Literal["pp", "tg"]
WARM_UP_TOKENS = 8  # of a decode run
TAIL_TOKENS = 4  # behind the shared prefix
DECODING_REQUESTS = 4  # during a prefill
DECODING_PROMPT_TOKENS = 32
PREFILL_TOKENS = 2000  # or three quarters of a shorter context
MAX_ITL_CONTEXT = 2688
NO_TARGET_MS = 1e9
QUANTILES = {"median": 0.5, "p95": 0.95, "max": 1.0}
MIN_SPECULATIVE_PROMPTS = 8
UNCOUNTED_STEPS, COUNTED_STEPS = 3, 8  # of one composition, in each sample
MAX_PROMPT_TOKENS = 1 << 20
COMPOSITION = re.compile(r"([0-9]{1,7})x([0-9]{1,7})(?:\+([0-9]{1,7}))?", re.ASCII)


class Composition(NamedTuple):
    """Requests of one step, or of a burst: prompts of one length, and requests that decode with them."""

    prompts: int
    length: int
    decoding: int = 0

    @staticmethod
    def parse(text: str, option: str) -> Composition:
        """Parse `20x26` (20 prompts of 26 tokens), `1x27+63` (with 63 that decode) or `0x0+256`."""
        match = COMPOSITION.fullmatch(text)
        if match is None:
            raise InvalidRequestError(f"{option} is {text!r}: write PROMPTSxTOKENS or PROMPTSxTOKENS+DECODING", option)
        composition = Composition(int(match[1]), int(match[2]), int(match[3] or 0))
        is_empty = not composition.requests or (composition.prompts == 0) != (composition.length == 0)
        if is_empty or composition.requests > MAX_BATCH or composition.length > MAX_PROMPT_TOKENS:
            raise InvalidRequestError(
                f"{option} is {text!r}: use 1 to {MAX_BATCH} requests, with prompts of 1 token or more", option
            )
        return composition

    @property
    def requests(self) -> int:
        return self.prompts + self.decoding

    @property
    def tokens(self) -> int:
        """Tokens that a step of this composition computes."""
        return self.prompts * self.length + self.decoding

    @property
    def step_tokens(self) -> int:
        """The token budget with which all prompts are prefilled in one step: each gets half of the remaining budget."""
        return self.tokens + self.length

    def __str__(self) -> str:
        return f"{self.prompts}x{self.length}" + (f"+{self.decoding}" if self.decoding else "")


@dataclass(frozen=True, slots=True)
class Case:
    """One length at one depth with one batch size."""

    kind: Kind
    tokens: int
    depth: int
    batch: int

    @property
    def name(self) -> str:
        """`pp512`, `tg128@d2048@b8`."""
        return f"{self.kind}{self.tokens}{self.suffix}"

    @property
    def suffix(self) -> str:
        return (f"@d{self.depth}" if self.depth else "") + batch_suffix(self.batch)

    @property
    def context(self) -> int:
        """Tokens of one sequence."""
        return self.depth + self.tokens


def batch_suffix(batch: int) -> str:
    """Return the suffix of a result's name for a batch size."""
    return f"@b{batch}" if batch != 1 else ""


def _is_read(name: str, config: ModelConfig) -> bool:
    """Return whether a step reads a tensor: layers for multi-token prediction are not read."""
    layer = LAYER_NUMBER.match(name)
    return not name.startswith("mtp.") and (layer is None or int(layer[1]) < config.n_layers)


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes and operations of a model, counted from its tensors."""

    weights: int  # bytes that every decode step reads: all but experts and embeddings that are not looked up
    matrices: int  # values of the layers' matrices, without experts
    head: int  # values of the output head
    config: ModelConfig
    kv_type: str = "float32"
    experts: int = 0  # bytes of all experts
    expert_matrices: int = 0  # their values

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint, config: ModelConfig, kv_type: str = "float32") -> Cost:
        """Count the tensors: a tied head is read whole, an embedding of its own is a lookup of one row."""
        tensors, experts = checkpoint.tensors, checkpoint.expert_tensors
        table = tensors["token_embd.weight"]
        head = tensors.get("output.weight", table)
        lookups = [t for t in (table, tensors.get("per_layer_token_embd.weight")) if t is not None and t is not head]
        unread = {id(t) for t in (*lookups, head, *experts.values())}
        rest = [t for name, t in tensors.items() if id(t) not in unread and _is_read(name, config)]
        row = sum(tensor.nbytes // max(1, tensor.shape[0]) for tensor in lookups)
        matrices = sum(t.size for t in rest if len(t.shape) == 2)
        both = sum(t.nbytes for t in experts.values()), sum(t.size for t in experts.values())
        return Cost(sum(t.nbytes for t in rest) + head.nbytes + row, matrices, head.size, config, kv_type, *both)

    def bytes_per_token(self, case: Case) -> float:
        """Return the bytes read for a token halfway through the answer: weights once a batch, of the experts those that
        it uses, KV for each sequence; states are read and written."""
        kv = self.config.kv_bytes(case.depth + case.tokens // 2, self.kv_type)
        return self.step_weights(case.batch) / case.batch + kv + 2 * self.config.state_bytes

    def step_weights(self, tokens: int) -> float:
        """Return the bytes of weights that a step of so many tokens reads."""
        experts = self.config.experts
        return self.weights + (0.0 if experts is None else self.experts * experts.share(tokens))

    def operations(self, case: Case) -> float:
        """Return the operations of a prefill: two for each value of a matrix, the head once a sequence."""
        experts = self.config.experts
        chosen = 0.0 if experts is None else self.expert_matrices * experts.share()
        return 2.0 * case.batch * ((self.matrices + chosen) * case.tokens + self.head)


@dataclass(slots=True)
class ModelBench:
    """A loaded model with its limits and the samples so far; shared by all scenarios."""

    recorder: Recorder
    harness: EngineHarness
    cost: Cost
    limits: Limits
    backend: str
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def model(self) -> Transformer:
        return self.harness.engine.model

    @property
    def arithmetic(self) -> str:
        """The arithmetic of most matrix products."""
        return product_arithmetic(self.model.matrices()[0])

    def add(self, name: str, unit: str, sample: float, better: Better = "lower", **fields: Any) -> None:
        """Add a sample and remake its result."""
        self.samples.setdefault(name, []).append(sample)
        self.put(name, unit, better, **fields)

    def put(self, name: str, unit: str, better: Better = "lower", **fields: Any) -> None:
        """Remake a result from its samples."""
        result = Result.from_samples(name, unit, self.samples[name], better, backend=self.backend, **fields)
        self.recorder.add_result(result)

    def ratio(self, name: str, other: str) -> float | None:
        """Return one result over another by repetition: a machine that changes its speed changes both."""
        pairs = zip(self.samples.get(name, ()), self.samples.get(other, ()), strict=False)
        ratios = [sample / beside for sample, beside in pairs]
        return statistics.estimate(ratios).value if ratios else None


class WholeRequests:
    """Output tokens per second of requests that are submitted at once, prefill included; `batch` run at a time."""

    def __init__(self, bench: ModelBench, prompt: int, tokens: int, batch: int, requests: int) -> None:
        self.bench, self.harness = bench, bench.harness
        self.prompt, self.tokens, self.batch, self.requests = prompt, tokens, batch, requests
        suffix = f"@n{requests}" if requests != batch else ""
        self.name = f"pp{prompt}+tg{tokens}{batch_suffix(batch)}{suffix}"

    def warm_up(self) -> None:
        self.harness.complete(self.prompt, min(self.tokens, WARM_UP_TOKENS), self.batch)

    def add_sample(self) -> None:
        timed = self.harness.complete(self.prompt, self.tokens, self.requests)
        sizes: dict[str, Any] = {"batch": self.batch, "prompt": self.prompt, "requests": self.requests}
        self.bench.add(self.name, "tok/s", timed.tokens / timed.seconds, "higher", seconds=timed.seconds, **sizes)


class StepTime:
    """Time of one step of a given composition, whose prompts are new each time; the median of several steps.

    The decoding requests have `depth` tokens at first, and go on from step to step.
    """

    def __init__(self, bench: ModelBench, harness: EngineHarness, composition: Composition, depth: int) -> None:
        self.bench, self.harness, self.composition = bench, harness, composition
        self.depth = depth if composition.decoding else 0
        self.name = f"step{composition}" + (f"@d{self.depth}" if self.depth else "")

    def warm_up(self) -> None:
        """Run prompts and decodes alone first: a budget for both follows from steps of these sizes."""
        if self.composition.prompts and self.composition.decoding:
            self._run(self.composition._replace(decoding=0), UNCOUNTED_STEPS)
            self._run(self.composition._replace(prompts=0, length=0), UNCOUNTED_STEPS)
        self._run(self.composition, 1)

    def add_sample(self) -> None:
        step = self.composition
        seconds = float(np.median(self._run(step, COUNTED_STEPS)))
        sizes: dict[str, Any] = {"prompts": step.prompts, "decoding": step.decoding, "tokens": step.tokens}
        self.bench.add(self.name, "s", seconds, depth=self.depth, **sizes)

    def _run(self, composition: Composition, count: int) -> list[float]:
        return self.harness.time_steps(
            composition.prompts, composition.length, composition.decoding, self.depth, UNCOUNTED_STEPS, count
        )


class Burst:
    """Time to first token of prompts that are submitted at once to an idle engine."""

    def __init__(self, bench: ModelBench, burst: Composition) -> None:
        self.bench, self.harness, self.burst, self.name = bench, bench.harness, burst, f"burst{burst}"

    def warm_up(self) -> None:
        self.harness.time_burst(self.burst.prompts, self.burst.length)

    def add_sample(self) -> None:
        seconds = self.harness.time_burst(self.burst.prompts, self.burst.length)
        for which, quantile in QUANTILES.items():
            value = float(np.quantile(seconds, quantile))
            self.bench.add(f"{self.name}/ttft_{which}", "s", value, batch=self.burst.prompts, prompt=self.burst.length)


class PrefixHit:
    """Time to first token of a first and of a second request with `prefix` tokens in common.

    Each repetition has a prefix of its own, so that the first request finds nothing cached and the second all whole
    blocks of it; a tail of a few tokens differs.
    """

    def __init__(self, bench: ModelBench, prefix: int, kv_type: str) -> None:
        self.bench, self.prefix, self.length = bench, prefix, prefix + TAIL_TOKENS
        self.name = f"shared prefix of {prefix}"
        self.harness = EngineHarness(bench.model, self.length, 1, 0, kv_type)
        self.rng = np.random.default_rng(11)

    def run(self) -> tuple[float, float]:
        """Return the seconds to the first token of both requests."""
        vocabulary, size = self.bench.model.config.vocab_size, self.harness.engine.config.block_size
        shared = self.rng.integers(0, vocabulary, self.prefix).tolist()
        tails = self.rng.permutation(vocabulary)[: 2 * TAIL_TOKENS].reshape(2, -1).tolist()
        first, second = (self.harness.time_first_tokens([shared + tail]) for tail in tails)
        assert (first.tokens, second.tokens) == (self.length, self.length - self.prefix // size * size)
        return first.seconds, second.seconds

    warm_up = run

    def add_sample(self) -> None:
        first, shared = f"ttft_first@p{self.prefix}", f"ttft_shared@p{self.prefix}"
        first_s, shared_s = self.run()
        self.bench.add(first, "s", first_s, prompt=self.length)
        self.bench.samples.setdefault(shared, []).append(shared_s)
        self.bench.put(shared, "s", prompt=self.length, times_shorter=self.bench.ratio(first, shared))


class ItlUnderPrefill:
    """Inter-token latency of running requests while a prompt is prefilled, at one target.

    A sample is the median, the 95th percentile and the longest of the steps that prefill the prompt. The engine is kept
    between repetitions, so that its token budget knows the machine's speed; every prompt is drawn anew.
    """

    def __init__(self, bench: ModelBench, target_ms: int, kv_type: str) -> None:
        self.bench, self.target_ms = bench, target_ms  # 0: none
        self.context, target = itl_context_length(bench.model.config), float(target_ms or NO_TARGET_MS)
        self.prompt = min(PREFILL_TOKENS, self.context * 3 // 4)
        self.name = f"prefill of {self.prompt}, " + (f"target {target_ms} ms" if target_ms else "no target")
        self.harness = EngineHarness(bench.model, self.context, DECODING_REQUESTS + 1, 0, kv_type, target_itl_ms=target)
        self.rng = np.random.default_rng(13)

    def run(self) -> list[float]:
        """Return the seconds of each step."""
        vocabulary, length = self.bench.model.config.vocab_size, min(DECODING_PROMPT_TOKENS, self.prompt)
        beside = self.rng.integers(0, vocabulary, (DECODING_REQUESTS, length)).tolist()
        prompt = self.rng.integers(0, vocabulary, self.prompt).tolist()
        return self.harness.time_prefill_steps(prompt, beside, self.context - DECODING_PROMPT_TOKENS)

    warm_up = run

    def add_sample(self) -> None:
        seconds = self.run()
        suffix = f"@t{self.target_ms}" if self.target_ms else "@none"
        for name, quantile in QUANTILES.items():
            self.bench.add(
                f"itl_{name}{suffix}",
                "s",
                float(np.quantile(seconds, quantile)),
                target_ms=self.target_ms or None,
                answering=DECODING_REQUESTS,
                prompt=self.prompt,
                steps=len(seconds),
            )
        self.bench.add(f"ttft{self.prompt}{suffix}", "s", sum(seconds), prompt=self.prompt)


def itl_context_length(config: ModelConfig) -> int:
    """Return the tokens of a sequence where ITL is measured during a prefill."""
    return min(MAX_ITL_CONTEXT, config.context_length)


class SpeculativeDecoding:
    """Speculative decoding against plain decoding, on real text: random ids never repeat themselves.

    A sample is a run over the bundled prompts in groups of `batch`: tokens from when all of a group have begun to when
    the first ends, over that time. One engine runs both, its drafter set or not: CUDA graphs belong to one KV cache.
    Where logits do not depend on the batch both sides must generate the same tokens; elsewhere their agreement is
    reported.
    """

    def __init__(
        self,
        bench: ModelBench,
        tokens: int,
        batch: int,
        checkpoint: Checkpoint,
        kv_type: str,
        draft_model: Transformer | None,
        **options: Any,
    ) -> None:
        self.bench, self.tokens, self.batch = bench, tokens, batch
        self.is_exact = bench.model.ops.deterministic
        drafter = options["speculative"] if draft_model is None else "draft"
        self.plain_name, self.name = (f"tg{tokens}@{side}{batch_suffix(batch)}" for side in ("text", drafter))
        prompts = encode_bundled_prompts(checkpoint, batch * -(-MIN_SPECULATIVE_PROMPTS // batch))
        self.groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        needed, context = max(map(len, prompts)) + tokens, bench.model.config.context_length
        if needed > context:
            message = f"the prompts and tg{tokens} need {needed} tokens, the model's context has {context}"
            raise ContextLengthError(f"{message}: use a smaller --tg", "tg")
        self.harness = EngineHarness(bench.model, needed, batch, 0, kv_type, draft_model, **options)
        self.drafter = self.harness.engine.drafter

    def warm_up(self) -> None:
        self._run_both(min(self.tokens, WARM_UP_TOKENS))

    def _run_both(self, tokens: int) -> tuple[TimedRun, TimedRun]:
        """Return the run without and the run with drafts."""
        engine = self.harness.engine
        engine.drafter = None
        plain = self._run(tokens)
        engine.drafter = self.drafter
        return plain, self._run(tokens)

    def _run(self, tokens: int) -> TimedRun:
        """Return the runs over all groups as one."""
        runs = [self.harness.decode_prompts(group, tokens) for group in self.groups]
        seconds, generated, steps = (sum(values) for values in zip(*(run[:3] for run in runs), strict=True))
        return TimedRun(seconds, int(generated), int(steps), [answer for run in runs for answer in run.answers])

    def add_sample(self) -> None:
        counts = self.harness.engine.scheduler.stats
        drafted, accepted = counts.num_drafted_tokens, counts.num_accepted_tokens
        plain, drafting = self._run_both(self.tokens)
        same = sum(a == b for a, b in zip(plain.answers, drafting.answers, strict=True)) / len(plain.answers)
        if self.is_exact and same < 1:
            raise InferenceError("speculative decoding changed an answer")
        if self.harness.engine.drafter is None:
            raise InferenceError("the drafter failed: see the warning")
        drafted, accepted = counts.num_drafted_tokens - drafted, counts.num_accepted_tokens - accepted
        self.bench.add(self.plain_name, "tok/s", plain.tokens / plain.seconds, "higher", batch=self.batch)
        self.bench.samples.setdefault(self.name, []).append(drafting.tokens / drafting.seconds)
        self.bench.put(
            self.name,
            "tok/s",
            "higher",
            batch=self.batch,
            drafted=drafted,
            accepted=accepted,
            acceptance=accepted / drafted if drafted else 0.0,
            tokens_per_step=drafting.tokens / drafting.steps / self.batch,
            times_plain=self.bench.ratio(self.name, self.plain_name),
            **({} if self.is_exact else {"same_answers": same}),
        )
