"""What becomes of the tokens that were chosen for a request: some are its answer, guesses are right or wrong, one may
end it. No arrays here."""

from __future__ import annotations

from collections.abc import Sequence

from .request import FinishReason, Request, StepOutput, TokenLogprob
from .step import SchedulerStats


def accept_tokens(
    request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, counts: SchedulerStats
) -> list[StepOutput]:
    """Append the tokens up to the first that was guessed wrong: that one is right, those behind it are not."""
    drafts, ids = request.drafts, request.ids
    finish: FinishReason | None = None
    outputs: list[StepOutput] = []
    for i, token in enumerate(tokens):
        if token in request.stop_ids:
            finish = "stop"
        else:
            ids.append(token)
            finish = "length" if len(ids) >= request.max_total_tokens else None
        outputs.append(StepOutput(request, token, logprobs[i] if logprobs and finish != "stop" else None, finish))
        if finish or (i < len(drafts) and drafts[i] != token):
            break
    counts.num_drafted_tokens += len(drafts)
    counts.num_accepted_tokens += len(outputs) - 1
    request.drafts = []
    request.num_computed_tokens = len(ids) - (finish != "stop")
    return outputs
