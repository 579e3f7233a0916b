"""What is told of an answer beside its text: the object of `--json`, the scores for people, how good guesses were."""

from typing import TYPE_CHECKING, Any, NamedTuple

from .terminal import columns

if TYPE_CHECKING:
    from ..engine.request import TokenLogprob
    from ..llm import LLM, Completion
    from ..tokenizer import Tokenizer


class Guesses(NamedTuple):
    """Tokens that were guessed for all answers of a time, and how many of them were right."""

    drafted: int
    accepted: int

    def told(self, tokens: int) -> str:
        """`guesses 68% right (35 of 51), 1.34 tokens a step`: a step gives one token beside those guessed right."""
        if not self.drafted:
            return "no guesses"
        right = f"{self.accepted / self.drafted:.0%} right ({self.accepted:,} of {self.drafted:,})"
        return f"guesses {right}, {tokens / max(1, tokens - self.accepted):.2f} tokens a step"


def guesses(llm: "LLM", before: Guesses | None = None) -> Guesses | None:
    """Those of this model, or those since another time; None where nothing guesses."""
    if llm.engine.drafter is None:
        return None
    counts, (drafted, accepted) = llm.engine.scheduler.stats, before or (0, 0)
    return Guesses(counts.num_drafted_tokens - drafted, counts.num_accepted_tokens - accepted)


def report(llm: "LLM", reference: str | None, completion: "Completion") -> dict[str, Any]:
    """The object of `--json`; what was not asked for is null, but `prompt_logprobs`, which is left out."""
    from ..weights.hub import DEFAULT_MODEL

    timings = completion.timings
    told: dict[str, Any] = {
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
        told["logprobs"] = [_scored(llm.tokenizer, entry) for entry in completion.logprobs]
    if completion.prompt_logprobs is not None:
        scored = [None if entry is None else _scored(llm.tokenizer, entry) for entry in completion.prompt_logprobs]
        told["prompt_logprobs"] = scored
    return told


def _scored(tokenizer: "Tokenizer", entry: "TokenLogprob") -> dict[str, Any]:
    top = [{"id": token, "logprob": value, "text": tokenizer.piece(token)} for token, value in entry.top]
    return {"id": entry.token, "logprob": entry.logprob, "text": tokenizer.piece(entry.token), "top": top}


def logprob_lines(tokenizer: "Tokenizer", entries: list["TokenLogprob"]) -> list[str]:
    """A table: each token, and the likeliest ones at its place."""
    rows = [["LOGPROB", "TOKEN", "LIKELIEST"]]
    for entry in entries:
        likeliest = "  ".join(f"{tokenizer.piece(token)!r} {value:.2f}" for token, value in entry.top)
        rows.append([f"{entry.logprob:.3f}", repr(tokenizer.piece(entry.token)), likeliest])
    return columns(rows, right=[0])
