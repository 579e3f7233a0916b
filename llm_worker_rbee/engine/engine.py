"""One request from its prompt to its last token. Text, templates and files are other rooms' business."""

from __future__ import annotations

from collections.abc import Iterator

from ..backends.types import Array
from ..models import Transformer
from .request import Request, TokenLogprob, TokenOutput
from .runner import Runner
from .sampler import sample, token_logprobs


class Generation:
    """A request being answered; iterate over it for its tokens."""

    def __init__(self, model: Transformer, request: Request, kv_type: str = "float32") -> None:
        self.model = model
        self.request = request
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.runner = Runner(model, len(request.prompt) + request.max_tokens, kv_type)

    def __iter__(self) -> Iterator[TokenOutput]:
        """Compute the prompt, then token after token until an end-of-text id or the limit."""
        logits = self.prefill()
        while True:
            output = self.next_token(logits)
            yield output
            if output.finish_reason is not None:
                return
            logits = self.runner.step(self.request, 1)

    def prefill(self) -> Array:
        """The logits after the last prompt token; scores the prompt on the way if that was asked for."""
        request, scored = self.request, self.request.params.prompt_logprobs
        scores: list[TokenLogprob | None] = [None]
        for start, logits in self.runner.catch_up(request, all_logits=scored):
            if scored:
                following = request.prompt[start + 1 : start + 1 + logits.shape[0]]
                k = request.params.logprobs or 0
                scores += token_logprobs(self.model.ops, logits[: len(following)], following, k)
        self.prompt_logprobs = scores if scored else None
        return logits[-1:]

    def next_token(self, logits: Array) -> TokenOutput:
        """Choose from (1, vocabulary) and say whether the answer ends with it."""
        request = self.request
        (token,) = sample(self.model.ops, logits, [request])
        if token in request.eos_ids and not request.params.ignore_eos:
            return TokenOutput(token, None, "stop")
        logprob = None
        if request.params.logprobs is not None:
            (logprob,) = token_logprobs(self.model.ops, logits, [token], request.params.logprobs)
        request.tokens.append(token)
        return TokenOutput(token, logprob, "length" if len(request.tokens) >= request.max_tokens else None)
