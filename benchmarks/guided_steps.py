"""Measure the steps of a batch of guided and of free requests, in the engine alone: the cost of masks on a GPU.

    python -m benchmarks.guided_steps [MODEL] --batch 64 --tokens 256 --device cuda
    python -m benchmarks.guided_steps [MODEL] --synthetic llama3-8b:Q4_K_M --batch 64 --tokens 256 --device cuda

All requests have schemas of their own, which no answer ends early. The ways alternate; medians of the rounds are
compared. `ahead` and `synchronous` free steps differ by the gap that a step pays which is not launched ahead
(GAP_S of engine/async_scheduling.py). Exit status 1 if guided steps without forced drafts lose more than --max-loss.
The last line is JSON. With --synthetic the weights are random, and MODEL gives the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any, NamedTuple

from benchmarks.structured_outputs import schema
from llm_worker_bench import synthetic
from llm_worker_rbee.backends import resolve_kv_type, select_backend
from llm_worker_rbee.config import KV_AUTO, EngineConfig
from llm_worker_rbee.engine import async_scheduling
from llm_worker_rbee.engine.async_scheduling import StepPipeline, forced_drafts_pay
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.sampling_params import SamplingParams, StructuredOutputsParams
from llm_worker_rbee.structured_outputs.grammar import GrammarCompiler
from llm_worker_rbee.text_model import open_tokenizer
from llm_worker_rbee.token_engine.launch import warm_up
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.hub import locate_model

WAYS = ("free, ahead", "free, synchronous", "guided, no forced drafts", "guided")
PROMPT_TOKENS = 64
MAX_STEP_TOKENS = 2048


class Measured(NamedTuple):
    """One run of a batch."""

    tokens_per_s: float
    step_ms: float
    tokens_per_step: float
    masks_ms: float  # of the host, in a step: rows and masks


class Bench:
    """An engine, and runs of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        ops = select_backend(options.device)
        own = open_checkpoint(locate_model(options.model))
        made = synthetic.checkpoint(synthetic.parse(options.synthetic)) if options.synthetic else own
        self.config = read_model_config(made)
        kv_type, context = resolve_kv_type(ops, KV_AUTO), PROMPT_TOKENS + options.tokens + 1
        settings = EngineConfig(
            max_context=context, n_blocks=options.batch * (2 + context // 16), max_batch=options.batch,
            max_step_tokens=MAX_STEP_TOKENS,
        )  # fmt: skip
        ops.load_kernels(made, self.config, kv_type)
        self.engine = Engine(load_model(made, ops, self.config), settings, kv_type)
        self.tokenizer = open_tokenizer(own)
        self.compiler = GrammarCompiler(lambda: self.tokenizer, self.config.vocab_size)
        self.engine.grammar_compiler = self.compiler
        self._can_launch = self.engine.pipeline.is_enabled
        self._options, self._masks_s = options, 0.0
        warm_up(self.engine)

    def run(self, way: str) -> Measured:
        """Answer a batch; count from the first token of the last request."""
        engine, is_guided = self.engine, way.startswith("guided")
        engine.pipeline.is_enabled = self._can_launch and "synchronous" not in way
        vars(async_scheduling)["forced_drafts_pay"] = forced_drafts_pay if way == "guided" else lambda *_: False
        requests = [self._request(i, is_guided=is_guided) for i in range(self._options.batch)]
        for request in requests:
            engine.add(request)
        while not all(request.tokens for request in requests):
            engine.step()
        before, steps, self._masks_s = sum(len(one.tokens) for one in requests), engine.num_steps, 0.0
        start = time.perf_counter()
        while all(not request.is_finished for request in requests):
            engine.step()
        seconds = time.perf_counter() - start
        tokens, steps = sum(len(one.tokens) for one in requests) - before, engine.num_steps - steps
        for request in requests:
            engine.abort(request)
        while engine.has_work:
            engine.step()
        return Measured(tokens / seconds, 1e3 * seconds / steps, tokens / steps, 1e3 * self._masks_s / steps)

    def _request(self, i: int, *, is_guided: bool) -> Request:
        """Return request i; ids of its prompt are random, so that no prefix is shared."""
        draw, eos_ids = random.Random(), frozenset(self.tokenizer.eos_ids)
        grammar = StructuredOutputsParams(json=schema(i)) if is_guided else None
        params = SamplingParams(temperature=0.8, ignore_eos=True, structured_outputs=grammar).resolve()
        prompt = [draw.randrange(self.config.vocab_size) for _ in range(PROMPT_TOKENS)]
        request = Request(prompt, params, self._options.tokens, i, eos_ids)
        if grammar is not None:
            request.constraint = self.compiler.compile(grammar, sorted(eos_ids), self._options.tokens)
        return request

    def time_masks(self) -> None:
        """Measure the time of rows and masks of guided steps."""
        original = StepPipeline._masked_rows

        def timed(launcher: StepPipeline, requests: Any) -> Any:
            start = time.perf_counter()
            rows = original(launcher, requests)
            self._masks_s += time.perf_counter() - start
            return rows

        StepPipeline._masked_rows = timed  # type: ignore[method-assign, assignment]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--synthetic", metavar="SHAPE:TYPES")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-loss", type=float, default=0.05)
    options = parser.parse_args()
    bench = Bench(options)
    bench.time_masks()
    for way in WAYS:
        bench.run(way)
    rounds = [[bench.run(way) for way in WAYS] for _ in range(options.rounds)]
    found: dict[str, Any] = {}
    for i, way in enumerate(WAYS):
        median = Measured(*map(statistics.median, zip(*[one[i] for one in rounds], strict=True)))
        ratio = statistics.median(one[i].tokens_per_s / one[0].tokens_per_s for one in rounds)
        found[way] = {**median._asdict(), "of_free": ratio}
        print(
            f"{way}: {median.tokens_per_s:,.0f} tokens/s, {ratio:.1%} of free; {median.step_ms:.2f} ms and "
            f"{median.tokens_per_step:.1f} tokens a step; {median.masks_ms:.2f} ms for masks"
        )
    gap = found[WAYS[1]]["step_ms"] - found[WAYS[0]]["step_ms"]
    print(f"gap of a step that is not launched ahead: {gap:.2f} ms")
    print(json.dumps({"batch": options.batch, "gap_ms": gap, **found}))
    sys.exit(found[WAYS[2]]["of_free"] < 1 - options.max_loss)


if __name__ == "__main__":
    main()
