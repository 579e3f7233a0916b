"""The OpenAI dialect, on its way in: a body is read and checked, its prompts become ids, its answers are taken on."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..engine.request import SamplingParams
from ..errors import ContextLengthError, WorkerError
from . import fields
from .answer import Answer
from .fields import FieldsError, Problem
from .openai_fields import CHAT, COMPLETION, params_of
from .prompts import estimate, require_short
from .worker import Worker


class Asked(NamedTuple):
    """Answers on their way, and how they are told."""

    answers: list[Answer]
    prompts: list[list[int]]
    seed: int
    values: dict[str, Any]
    is_chat: bool

    def close(self) -> None:
        """Nobody wants more of them."""
        for answer in self.answers:
            answer.close()


class Read(NamedTuple):
    """A body that is sound."""

    values: dict[str, Any]
    params: SamplingParams


async def chat(worker: Worker, body: bytes, ignored: list[str] | None) -> Asked:
    """Take a conversation on."""
    values, params = await worker.desk.read(body, lambda body: _read_chat(body, ignored))
    worker.require_model(values["model"])
    messages, n = fields.conversation(values["messages"]), values["n"]
    with worker.held(n, n * estimate(messages)) as hold:
        ids = await worker.prompts.chat_ids(messages)
        hold.correct(n * len(ids))
        try:
            seed, answers = worker.answers(ids, params, n=n, priority=values["priority"], timeout_s=_seconds(values))
        except ContextLengthError as error:
            error.field = "messages" if error.field == "prompt" else error.field
            raise
    return Asked(answers, [ids], seed, values, True)


def _read_chat(body: bytes, ignored: list[str] | None) -> Read:
    values = fields.checked(fields.read_object(body), CHAT, ignored=ignored)
    longest = values["max_completion_tokens"] or values["max_tokens"]
    _require(values["max_tokens"] in (None, longest), "max_tokens", "conflict",
             "max_tokens and max_completion_tokens differ: give one of them")  # fmt: skip
    _require(values["top_logprobs"] is None or values["logprobs"], "top_logprobs", "conflict",
             "top_logprobs needs logprobs: true")  # fmt: skip
    _require_stream(values)
    scored = (values["top_logprobs"] or 0) if values["logprobs"] else None
    return Read(values, params_of(values, longest, scored))


async def completion(worker: Worker, body: bytes, ignored: list[str] | None) -> Asked:
    """Take prompts on, one or several: all of them or none."""
    context = worker.loaded.max_context if worker.is_loaded else None
    values, params = await worker.desk.read(body, lambda body: _read_completion(body, ignored, context))
    worker.require_model(values["model"])
    several, n = _several(values["prompt"]), values["n"]
    worker.admission.require_room(worker.llm.engine, len(several) * n)
    with worker.held(len(several) * n, n * sum(map(estimate, several))) as hold:
        prompts = await worker.prompts.ids(several)
        hold.correct(n * sum(map(len, prompts)))
        seed, answers = _begun(worker, prompts, values, params)
    return Asked(answers, prompts, seed, values, False)


def _read_completion(body: bytes, ignored: list[str] | None, context: int | None) -> Read:
    found = fields.read_object(body)
    if context is not None:
        require_short(found.get("prompt"), context)
    values = fields.checked(found, COMPLETION, ignored=ignored)
    _require(values["best_of"] in (None, values["n"]), "best_of", "unsupported",
             "best_of other than n is not supported by this worker")  # fmt: skip
    _require(values["max_tokens"] > 0 or values["echo"], "max_tokens", "range",
             "max_tokens is 0: only with echo, to score the prompt")  # fmt: skip
    _require_stream(values)
    scores = values["echo"] and values["logprobs"] is not None
    return Read(values, params_of(values, max(1, values["max_tokens"]), values["logprobs"], prompt_logprobs=scores))


def _begun(
    worker: Worker, prompts: list[list[int]], values: dict[str, Any], params: SamplingParams
) -> tuple[int, list[Answer]]:
    answers: list[Answer] = []
    seed = values["seed"]
    try:
        for ids in prompts:
            seed, some = worker.answers(
                ids, params, n=values["n"], priority=values["priority"], timeout_s=_seconds(values),
                is_scored_only=values["max_tokens"] == 0,
            )  # fmt: skip
            answers += some
    except WorkerError:
        for answer in answers:
            answer.close()
        raise
    return seed, answers


def _require_stream(values: dict[str, Any]) -> None:
    _require(values["stream"] or not values["stream_options"], "stream_options", "conflict",
             "stream_options needs stream: true")  # fmt: skip


def _require(holds: bool, field: str, constraint: str, message: str) -> None:
    if not holds:
        raise FieldsError([Problem(field, constraint, message)])


def _several(prompt: Any) -> list[Any]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return prompt
    return [prompt]


def _seconds(values: dict[str, Any]) -> float | None:
    return None if values["timeout_ms"] is None else values["timeout_ms"] / 1000
