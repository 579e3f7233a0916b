"""Requests to token engines in child processes, and what their outputs must have in common."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from llm_worker_rbee.config import LoadOptions
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.token_engine.protocol import Load, RequestState, RequestStream, Submit, TokenOutput
from tests.conftest import DEVICE

numbers = count(1)
# A sitecustomize module: an engine that computes the request with seed 666 dies after its token 20.
POISON = """
import os, signal, sys
if any("token_engine.child" in word for word in sys.orig_argv):
    from llm_worker_rbee.engine.scheduler import Scheduler
    update = Scheduler.update
    def dying(self, scheduled, sampled):
        if any(one.request.seed == 666 and len(one.request.ids) > 20 for one in scheduled):
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, scheduled, sampled)
    Scheduler.update = dying
"""


def load_of(path: Path, **more: Any) -> Load:
    arguments = {"model": str(path), "device": DEVICE, "backend": "auto", "kv_type": "auto", "kv_memory": 16 << 20}
    return Load(options=LoadOptions.from_arguments({**arguments, "deterministic": True, **more}))


def request(
    seed: int, max_tokens: int = 200, timeout_s: float | None = None, prompt: list[int] | None = None, **params: Any
) -> RequestState:
    """A request for random digits: the model goes on for ever."""
    made = SamplingParams(**{"temperature": 1.0, **params}).resolve()
    return RequestState(
        Submit(id=next(numbers), prompt=prompt or list(b"?"), params=made, max_tokens=max_tokens, seed=seed, eos_ids=[],
               timeout_s=timeout_s)
    )  # fmt: skip


async def outputs_of(stream: RequestStream) -> list[TokenOutput]:
    found: list[TokenOutput] = []
    while outputs := await stream.next_outputs():
        found += outputs
    return found


def summary(outputs: list[TokenOutput]) -> tuple[list[int], list[Any], list[Any], str | None]:
    """Tokens, their log-probabilities, those of the prompt, and the finish reason: what must not change."""
    prompt = [score for output in outputs for score in output.prompt_logprobs or ()]
    tokens = [token for output in outputs for token in output.tokens]
    return tokens, [score for output in outputs for score in output.logprobs], prompt, outputs[-1].finish_reason
