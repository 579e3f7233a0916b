"""A completion as the JSON object of `--json`, the table of log-probabilities, the line of figures."""

from typing import Any, NamedTuple

from ..engine.request import TokenLogprob
from ..generation import Completion
from ..llm import LLM
from ..tokenizer import Tokenizer
from ..weights.hub import DEFAULT_MODEL
from .terminal import columns, count


class DraftStats(NamedTuple):
    """Draft tokens, and how many of them were accepted."""

    drafted: int
    accepted: int

    def describe(self, tokens: int) -> str:
        """Return `drafts 68% accepted (35 of 51), 1.34 tokens a step`: a step gives one token beside the accepted."""
        if not self.drafted:
            return "no drafts"
        share = f"{self.accepted / self.drafted:.0%} accepted ({self.accepted:,} of {self.drafted:,})"
        return f"drafts {share}, {tokens / max(1, tokens - self.accepted):.2f} tokens a step"


def draft_stats(llm: LLM, before: DraftStats | None = None) -> DraftStats | None:
    """Return the drafts of this model, or those since `before`; None without speculative decoding."""
    if llm.engine.drafter is None:
        return None
    stats, (drafted, accepted) = llm.engine.scheduler.stats, before or (0, 0)
    return DraftStats(stats.num_drafted_tokens - drafted, stats.num_accepted_tokens - accepted)


def completion_json(llm: LLM, reference: str | None, completion: Completion) -> dict[str, Any]:
    """Return the object of `--json`; what was not requested is null, but `prompt_logprobs`, which is left out."""
    timings = completion.timings
    report: dict[str, Any] = {
        "model": reference or DEFAULT_MODEL,
        "prompt_tokens": completion.prompt_tokens,
        "tokens": completion.tokens,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_sequence": completion.stop_sequence,
        "logprobs": None,
        "seed": completion.seed,
        "cached_tokens": completion.cached_tokens,
        "timings": {
            "load_s": sum(llm.phases.values()),
            "time_to_first_token_s": timings.time_to_first_token,
            "total_s": timings.total,
            "tokens_per_second": timings.tokens_per_second,
        },
    }
    if completion.logprobs is not None:
        report["logprobs"] = [_logprob_json(llm.tokenizer, entry) for entry in completion.logprobs]
    if completion.prompt_logprobs is not None:
        report["prompt_logprobs"] = [
            None if entry is None else _logprob_json(llm.tokenizer, entry) for entry in completion.prompt_logprobs
        ]
    return report


def _logprob_json(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    top = [{"id": token, "logprob": value, "text": tokenizer.piece(token)} for token, value in entry.top]
    return {"id": entry.token, "logprob": entry.logprob, "text": tokenizer.piece(entry.token), "top": top}


def logprob_lines(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> list[str]:
    """Return a table: each token, and the most likely ones at its place."""
    rows = [["LOGPROB", "TOKEN", "LIKELIEST"]]
    for entry in entries:
        likeliest = "  ".join(f"{tokenizer.piece(token)!r} {value:.2f}" for token, value in entry.top)
        rows.append([f"{entry.logprob:.3f}", repr(tokenizer.piece(entry.token)), likeliest])
    return columns(rows, right=[0])


def figures_line(completion: Completion, drafts: DraftStats | None) -> str:
    """Return `34 prompt tokens · 21 tokens · first token 0.41 s · 4.1 tokens/s · stop`, with the drafts."""
    timings = completion.timings
    parts = [
        count(len(completion.prompt_tokens), "prompt token"),
        count(len(completion.tokens), "token"),
        f"first token {timings.time_to_first_token:.2f} s",
    ]
    if timings.tokens_per_second:
        parts.append(f"{timings.tokens_per_second:.1f} tokens/s")
    if drafts is not None:
        parts.append(drafts.describe(timings.tokens))
    return " · ".join([*parts, completion.finish_reason or "stopped"])
