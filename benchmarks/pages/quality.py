"""docs/quality.md: how near answers are to float32, compared with llama.cpp; every figure comes from a saved run."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llm_worker_bench.results import Result, Run

from .benchmarks import table, with_interval

Runs = Mapping[str, Run]
PEER = "llama.cpp"  # as `bench accuracy` names it
INTRO = """# Quality

How close this worker is to the same weights in float32. The truth is the reference backend: every weight dequantized,
every product in float32, no approximation. The differences come from arithmetic: activations rounded to int8 for the
products, the type of the KV cache, the order of sums. The loss from quantizing the file itself is not included: the
truth reads the same file.

`bench accuracy` scores a text that comes with the package, in windows of 256 tokens, and the ends of 20 prompts. KL is
the mean Kullback-Leibler divergence from the truth's distribution of the next token, in nats; top-1 is the share of
positions with the same likeliest token; perplexity is relative to the truth's. Intervals are 95%, by bootstrap over
positions."""
TYPES_TEXT = """
`convert` made the files marked "requantized" from the Q4_K_M file. Their truth is the requantized file: a row compares
arithmetic, not types.""".strip()
KV_TEXT = """
int8 has one scale for the keys of a position and head. Qwen 2 and 2.5 add a bias to their keys that is far larger in a
few channels and would determine the scale; heads are rotated by a Hadamard matrix first, so that all values are of one
size. What is left is an error relative to the whole key: use float16 for these models.""".strip()
FUNCTIONS_TEXT = """
40 small functions of our own (`benchmarks/small_functions.py`), requested by signature and one sentence, with greedy
decoding; the answer's code runs on examples in a bounded child process. transformers computes in float32 on the
dequantized weights of the same file.""".strip()
LM_EVAL_TEXT = """## lm-evaluation-harness

`lm-eval` measures a served model through `/v1/completions`; tasks that score their choices need `echo` and `logprobs`,
which the route has:

```sh
llm-worker-rbee serve --model model.gguf --served-model-name coder
lm_eval --model local-completions --tasks YOUR_TASK --limit 50 --model_args \\
  model=coder,base_url=http://127.0.0.1:8080/v1/completions,tokenizer_backend=huggingface,tokenizer=FOLDER,num_concurrent=4
```

FOLDER has the tokenizer as `transformers` saves it:
`AutoTokenizer.from_pretrained(DIR, gguf_file=FILE).save_pretrained(FOLDER)`.
Tried with lm-eval 0.4.13 and a multiple-choice task in a folder (`--include_path`)."""


def markdown(runs: Runs) -> str:
    """Return the page."""
    accuracy = {name: run for name, run in runs.items() if run.kind == "accuracy"}
    peers = [run for run in accuracy.values() if _find(run, f"kl/{PEER}") is not None]
    alone = [run for run in accuracy.values() if run not in peers]
    functions = [run for run in runs.values() if run.kind == "functions"]
    parts = [INTRO]
    if peers:
        parts += ["## Beside llama.cpp on the same file", _peer_table(peers), TYPES_TEXT, _verdict(peers)]
    if alone:
        same = [run for run in peers if _file(run) == _file(alone[0])]
        parts += ["## By type of the KV cache", _kv_table([*same, *alone]), KV_TEXT]
    if functions:
        parts += ["## Functions that run", FUNCTIONS_TEXT, _functions_table(functions)]
    return "\n\n".join([*parts, LM_EVAL_TEXT])


def _find(run: Run, name: str) -> Result | None:
    return next((result for result in run.results if result.name == name), None)


def _cell(run: Run, name: str) -> str:
    result = _find(run, name)
    if result is None:
        return "-"
    if name.startswith("ppl_ratio"):
        value, low, high = (f"{100 * (ratio - 1):+.2f}" for ratio in (result.estimate, result.low, result.high))
        return f"{value}% ({low} to {high})"
    if name.startswith("top1"):
        value, low, high = (f"{100 * share:.1f}" for share in (result.estimate, result.low, result.high))
        return f"{value}% ({low} to {high})"
    return with_interval(result)


def _file(run: Run) -> str:
    name = str((run.model or {}).get("name", "")).removesuffix(".gguf")
    found = re.fullmatch(r"(.*)-[0-9a-f]{8}-as-(\w+)", name)
    return name if found is None else f"{found[1]}, requantized to {found[2]}"


def _peer_table(runs: list[Run]) -> str:
    head = ["file", "KL here", "KL llama.cpp", "top-1 here", "llama.cpp", "perplexity here", "llama.cpp"]
    rows = [
        [_file(run)]
        + [_cell(run, name + suffix) for name in ("kl", "top1", "ppl_ratio") for suffix in ("", f"/{PEER}")]
        for run in runs
    ]
    return "\n".join(table(head, rows))


def _verdict(runs: list[Run]) -> str:
    """Return how many rows are nearer to the truth than llama.cpp, and which are not."""
    others = []
    for run in runs:
        ours, theirs = _find(run, "kl"), _find(run, f"kl/{PEER}")
        assert ours is not None
        assert theirs is not None
        if ours.estimate > theirs.estimate:
            others.append(f"{_file(run)} ({'within the interval' if ours.low <= theirs.high else 'further'})")
    nearer = f"By KL this worker is nearer to float32 than llama.cpp in {len(runs) - len(others)} of {len(runs)} rows"
    return f"{nearer}, not in: {', '.join(others)}." if others else f"{nearer}."


def _kv_table(runs: list[Run]) -> str:
    rows = [
        [_file(run), "float16" if (kind := str(run.settings["kv_type"])) == "auto" else kind]
        + [_cell(run, name) for name in ("kl", "top1", "ppl_ratio")]
        for run in runs
    ]
    return "\n".join(table(["file", "KV cache", "KL", "top-1", "perplexity"], rows))


def _functions_table(runs: list[Run]) -> str:
    rows = [
        [str((run.model or {})["name"]).removesuffix(".gguf"), result.name.partition("/")[2],
         f"{result.estimate:.0f} of {result.fields['count']}",
         ", ".join(result.fields["wrong"]) or "-"]
        for run in runs
        for result in run.results
    ]  # fmt: skip
    return "\n".join(table(["file", "by", "right", "wrong"], rows))
