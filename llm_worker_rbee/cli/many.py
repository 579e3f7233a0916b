"""Many answers at once, for `run`: the prompts of a file, several answers to each.

All are computed together, and shown in the order of the prompts as soon as they are whole: text under headings, or JSON
Lines. One that fails does not take the others with it; what had ended before Ctrl-C is shown.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ..engine.request import SamplingParams, token_limit
from ..errors import ContextLengthError, InvalidRequestError, WorkerError
from ..progress import Advance, draws, generating
from .answer_report import logprob_lines, report
from .asking import OutputOptions, PromptOptions, Question
from .common import DEFAULT_MAX_TOKENS
from .terminal import counted, note, one_line, print_json, style, visible

if TYPE_CHECKING:
    from ..llm import LLM, Completion, Stream


class Answer(NamedTuple):
    """A whole answer, or what there is of one that failed."""

    completion: "Completion"
    error: WorkerError | None


def answer_all(
    llm: "LLM", questions: Sequence[Question], ask: PromptOptions, output: OutputOptions, model: str | None
) -> None:
    """Compute all answers together and show them in order."""
    streams = [stream for question in questions for stream in _streams(llm, *_prepared(llm, question, ask), output.n)]
    show = _Show(llm, questions, ask, output, model)
    later: list[Answer] = []  # a bar and an answer cannot be drawn on one terminal at a time
    keep = later.append if draws(sys.stderr) and sys.stdout.isatty() and not output.quiet else show
    start = time.perf_counter()
    try:
        with generating(len(streams), not output.quiet) as advance:
            for answer in _in_order(streams, advance):
                keep(answer)
        seconds = time.perf_counter() - start
    finally:
        for answer in later:
            show(answer)
    if not output.quiet:
        note(show.sum(seconds))
    if show.failed:
        raise WorkerError(f"{show.failed} of {counted(len(streams), 'answer')} failed")


def _prepared(llm: "LLM", question: Question, ask: PromptOptions) -> tuple[list[int], SamplingParams]:
    """The ids of a question and its bounded length; what cannot be answered is said before anything is computed."""
    try:
        ids, params = ask.encode(llm, question), question.params
        if params.max_tokens is None:
            params = replace(params, max_tokens=max(1, min(DEFAULT_MAX_TOKENS, llm.max_context - len(ids))))
        token_limit(len(ids), params.max_tokens, llm.max_context)
        return ids, params
    except InvalidRequestError as error:
        told = f"{question.origin}: {error}" if question.origin else str(error)
        kind = ContextLengthError if isinstance(error, ContextLengthError) else InvalidRequestError
        raise kind(told, error.field) from None


def _streams(llm: "LLM", ids: list[int], params: SamplingParams, n: int) -> list["Stream"]:
    """One for each answer to a prompt; they share its seed, and draw numbers of their own."""
    from ..engine.sampler import draw_seed
    from ..llm import Stream
    from ..llm.options import checked_choices

    seed = draw_seed() if params.seed is None else params.seed
    return [Stream(llm, ids, params, seed=seed, choice=choice) for choice in range(checked_choices(n))]


def _in_order(streams: Sequence["Stream"], advance: Advance) -> Iterator[Answer]:
    """Each answer as soon as it and all before it have ended."""
    errors: dict[Stream, WorkerError] = {}
    left = list(streams)
    try:
        for stream in streams:
            stream.start()
        for stream in streams:
            while not stream.has_ended:
                tokens = _take(stream, errors, wait=True) + sum(_take(one, errors) for one in left)
                advance(requests=sum(one.has_ended for one in left), tokens=tokens)
                left = [one for one in left if not one.has_ended]
            yield Answer(stream.so_far(), errors.get(stream))
    finally:
        for stream in streams:
            stream.close()


def _take(stream: "Stream", errors: dict["Stream", WorkerError], *, wait: bool = False) -> int:
    """Take what has been made for a stream: how many tokens. Its error, if that ends it, is kept."""
    try:
        if wait:
            next(stream)
        return wait + stream.take_ready()
    except WorkerError as error:
        errors[stream] = error
        return 0


@dataclass
class _Show:
    """Shows one answer after the other, and keeps count."""

    llm: "LLM"
    questions: Sequence[Question]
    ask: PromptOptions
    output: OutputOptions
    model: str | None
    answers: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0

    def __call__(self, answer: Answer) -> None:
        index, choice = divmod(self.answers, self.output.n)
        self.answers += 1
        self.failed += answer.error is not None
        self.prompt_tokens += len(answer.completion.prompt_tokens)
        self.tokens += answer.completion.timings.tokens
        if self.output.as_json:
            told = report(self.llm, self.model, answer.completion)
            error = None if answer.error is None else {"code": answer.error.code, "message": str(answer.error)}
            print_json({"index": index, "choice": choice, **told, **({} if error is None else {"error": error})})
        else:
            self._write(index, choice, answer)

    def _write(self, index: int, choice: int, answer: Answer) -> None:
        question, completion = self.questions[index], answer.completion
        number = f"{index + 1}" if self.output.n == 1 else f"{index + 1}.{choice + 1}"
        before = self.ask.shown(self.llm, question) if self.output.echo else ""
        text = (visible if sys.stdout.isatty() else str)(before + completion.text)
        print("\n" * (self.answers > 1) + style(f"==> {number}: {question.heading()} <==", "bold"))
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
        if completion.logprobs is not None:
            print("\n".join(logprob_lines(self.llm.tokenizer, completion.logprobs)), file=sys.stderr)
        if answer.error is not None:
            print(f"error: {number}: {one_line(str(answer.error))}", file=sys.stderr, flush=True)

    def sum(self, seconds: float) -> str:
        """`24 answers · 903 prompt tokens · 960 tokens · 2.61 s · 367.5 tokens/s`."""
        parts = [
            counted(self.answers, "answer"), counted(self.prompt_tokens, "prompt token"), counted(self.tokens, "token"),
            f"{seconds:.2f} s", f"{self.tokens / seconds:,.1f} tokens/s",
        ]  # fmt: skip
        return " · ".join(parts)
