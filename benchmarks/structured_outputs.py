"""Measure guided decoding: the token table, masks, and tokens per second compared with free text.

    python benchmarks/structured_outputs.py [MODEL] [--streams 1,16] [--rounds 5] [--device auto]

Free and guided runs alternate, with prompts and lengths alike; the medians of the rounds are compared. Guided text is a
document that is long enough by its schema; each stream has a schema of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from llm_worker_rbee import LLM, SamplingParams
from llm_worker_rbee.sampling_params import StructuredOutputsParams

TOKENS = 96
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing"]},
        "email": {"type": "string", "format": "email"},
        "since": {"type": "string", "format": "date-time"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "score": {"type": "number", "minimum": 0, "maximum": 100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "kind", "score", "tags"],
    "additionalProperties": False,
}


def schema(i: int, *, compact: bool = False) -> dict[str, Any]:
    """Return the schema of stream i; no two streams share a grammar."""
    made = {"type": "array", "items": {**ITEM, "description": f"of stream {i}"}, "minItems": 200 + i}
    return {**made, "x-guidance": {"whitespace_flexible": False}} if compact else made


def measure_masks(llm: LLM) -> None:
    """Print the time of the token table, of compiling, and of masks along a sampled document."""
    compiler = llm.engine.grammar_compiler
    assert compiler is not None
    start = time.perf_counter()
    compiler.compile(StructuredOutputsParams(json_object=True), [0], 10)
    print(f"first grammar, with the token table of {compiler.vocab_size:,}: {time.perf_counter() - start:.3f} s")
    params = StructuredOutputsParams(json={**schema(0), "minItems": 1})
    start = time.perf_counter()
    one = compiler.compile(params, sorted(llm.tokenizer.eos_ids), 4000)
    print(f"compile a realistic schema: {1e3 * (time.perf_counter() - start):.2f} ms")
    document = json.dumps([
        {"name": f"Ada Lovelace {i}", "kind": "person", "email": f"ada{i}@example.org", "since": "1835-06-05T12:00:00Z",
         "code": f"ABC-{i:04}", "score": 10.5 + i, "tags": ["maths", "code"]}
        for i in range(12)
    ])  # fmt: skip
    one.masks = np.zeros((1, one.num_words), np.int32)
    seconds: dict[str, list[float]] = {"mask": [], "consume": [], "forced": []}
    for token in llm.tokenizer.encode(document, add_special=False):
        times = [time.perf_counter()]
        one.fill([])
        times.append(time.perf_counter())
        one.next_drafts([], 16)
        times.append(time.perf_counter())
        assert one.consume(token), one.describe_error()
        times.append(time.perf_counter())
        for name, spent in zip(("mask", "forced", "consume"), np.diff(times), strict=True):
            seconds[name].append(float(spent))
    for name, values in seconds.items():
        median, last = np.percentile(values, [50, 99])
        print(f"{name}: median {1e6 * median:.0f} us, P99 {1e6 * last:.0f} us of {len(values)}")


def rate(llm: LLM, streams: int, guided: str) -> tuple[float, float]:
    """Return tokens per second after the first of each stream, and how many tokens a step gave."""
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.8, "ignore_eos": True}
    params = [
        SamplingParams(**options, seed=i, structured_outputs=StructuredOutputsParams(
            json=schema(i, compact=guided == "compact")) if guided != "free" else None)
        for i in range(streams)
    ]  # fmt: skip
    prompts = [f"A JSON list of people, places and things, number {i}:\n" for i in range(streams)]
    steps = llm.engine.num_steps
    start = time.perf_counter()
    done = llm.generate(prompts, params, progress=False)
    first = max(one.timings.time_to_first_token for one in done)
    tokens = sum(len(one.tokens) for one in done)
    return (tokens - streams) / (time.perf_counter() - start - first), tokens / (llm.engine.num_steps - steps)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    llm = LLM(options.model, device=options.device)
    measure_masks(llm)
    for streams in map(int, options.streams.split(",")):
        kinds = "free", "json", "compact"
        for kind in kinds:
            rate(llm, streams, kind)
        rounds = [[rate(llm, streams, kind) for kind in kinds] for _ in range(options.rounds)]
        medians = [statistics.median(one[i][0] for one in rounds) for i in range(len(kinds))]
        ratios = [statistics.median(one[i][0] / one[0][0] for one in rounds) for i in range(len(kinds))]
        for i, kind in enumerate(kinds):
            print(f"{streams} streams, {kind}: {medians[i]:.1f} tokens/s, {ratios[i]:.1%} of free, "
                  f"{rounds[0][i][1]:.2f} tokens a step")  # fmt: skip


if __name__ == "__main__":
    main()
