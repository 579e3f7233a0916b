"""`llm-worker-rbee run`: one prompt, one answer, streamed to standard output; or one JSON object with all of it.

Several prompts, or several answers to one, are computed together, and shown in the order of the prompts as soon as they
are whole: text under headings, or JSON Lines. One that fails does not take the others with it; what had ended before
Ctrl-C is shown.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidRequestError, WorkerError
from ..progress import request_progress, supports_ansi
from .completion_report import guesses, logprob_lines, report
from .options import (
    DEFAULT_MAX_TOKENS,
    OUTPUT_PANEL,
    EngineOptions,
    LoadOptions,
    ModelOptions,
    SamplingOptions,
    begin,
    gather,
    load,
)
from .prompt_input import PromptOptions, Question
from .terminal import Status, counted, figures, note, one_line, print_json, style, visible

if TYPE_CHECKING:
    from ..llm import LLM, Completion, Stream

MOST_CHOICES = 128  # here for --help, which imports nothing heavy; a test holds it against llm.options


def _output_option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=OUTPUT_PANEL, **more)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is shown of the answer."""

    echo: Annotated[bool, _output_option("--echo", help="Show the prompt too; with --json, score its tokens.")] = False
    logprobs: Annotated[
        int | None, _output_option("--logprobs", metavar="K", help="Log-probabilities, also of the K likeliest tokens.")
    ] = None
    choices: Annotated[
        int,
        _output_option("--choices", metavar="N", min=1, max=MOST_CHOICES,
                       help="So many answers to each prompt (how long one may be: -n)."),
    ] = 1  # fmt: skip
    timeout: Annotated[
        float | None,
        _output_option("--timeout", metavar="S", show_default="none", help="An answer fails after S seconds."),
    ] = None
    as_json: Annotated[
        bool, _output_option("--json", help="Print one JSON object, at the end; of many answers one a line.")
    ] = False
    quiet: Annotated[bool, _output_option("--quiet", "-q", help="Leave out progress and figures.")] = False

    def check(self) -> None:
        """What cannot be is wrong usage."""
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise typer.BadParameter(f"--timeout is {self.timeout:g}: it must be a number of seconds above 0")


@gather(
    ask=PromptOptions, model=ModelOptions, computing=LoadOptions, engine=EngineOptions, sampling=SamplingOptions,
    output=OutputOptions,
)  # fmt: skip
def run(
    ask: PromptOptions,
    model: ModelOptions,
    computing: LoadOptions,
    engine: EngineOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Answer one prompt, or all prompts of a file.

    The answer is streamed to standard output; figures follow on standard error.

    A raw prompt is used byte for byte; standard input loses one final newline.

    \b
    Examples:
      llm-worker-rbee run "Why is the sky blue?"
      llm-worker-rbee run --file notes.txt --system "Summarise this."
      git diff | llm-worker-rbee run -m model.gguf -n 100
      llm-worker-rbee run --raw "Once upon a time" -t 0.8 --seed 7 --choices 3
      llm-worker-rbee run "Say yes or no." -t 0 --json --logprobs 5
      llm-worker-rbee run "Hello" -m folder --quantize Q4_K_M --threads 4
      llm-worker-rbee run --prompts questions.txt --json > answers.jsonl
    """
    params = sampling.params(logprobs=output.logprobs, prompt_logprobs=output.echo and output.as_json)
    output.check()
    questions = ask.questions(params)
    status = Status()
    llm = load(model, computing, status, engine)
    if ask.prompts is not None or output.choices > 1:
        answer_all(llm, questions, ask, output, model.model)
        return
    (question,) = questions
    ids = ask.encode(llm, question)
    stream = begin(llm, ids, params, DEFAULT_MAX_TOKENS if params.max_tokens is None else None, output.timeout)
    status.show(f"reading {counted(len(ids), 'token')} ...")
    try:
        if not output.as_json:
            _write_stream(stream, status, ask.shown(llm, question) if output.echo else "")
        completion = stream.completion()
    finally:
        status.clear()
    _finish(llm, completion, model.model, output)


def _finish(llm: "LLM", completion: "Completion", reference: str | None, output: OutputOptions) -> None:
    """What comes after the answer: the object, or the scores and the figures."""
    guessed = guesses(llm)
    if output.as_json:
        told = None if guessed is None else guessed._asdict()
        print_json({**report(llm, reference, completion), "speculative": told})
        return
    if completion.logprobs is not None:
        print("\n".join(logprob_lines(llm.tokenizer, completion.logprobs)), file=sys.stderr)
    if not output.quiet:
        note(figures(completion, *([] if guessed is None else [guessed.told(completion.timings.tokens)])))


def _write_stream(stream: "Stream", status: Status, before: str) -> None:
    """Stream the answer, and end its last line, also when Ctrl-C or an error ends it early."""
    clean = visible if sys.stdout.isatty() else str
    last = before
    try:
        if before:
            status.clear()
            print(clean(before), end="", flush=True)
        for chunk in stream:
            if chunk.text:
                status.clear()
                print(clean(chunk.text), end="", flush=True)
                last = chunk.text
    except (KeyboardInterrupt, WorkerError):
        status.clear()
        if last:
            print(flush=True)
        raise
    status.clear()
    if not last.endswith("\n"):
        print(flush=True)


def answer_all(
    llm: "LLM", questions: Sequence[Question], ask: PromptOptions, output: OutputOptions, model: str | None
) -> None:
    """Compute all answers together and show them in order."""
    from ..llm import together

    streams = [stream for question in questions for stream in _streams(llm, question, ask, output)]
    show = _Show(llm, questions, streams, ask, output, model)
    # a bar and an answer cannot be drawn on one terminal at a time
    is_later = supports_ansi(sys.stderr) and sys.stdout.isatty() and not output.quiet
    if not output.quiet:
        _remark(llm, questions, ask, output)
    start = time.perf_counter()
    try:
        with request_progress(len(streams), not output.quiet, last_line=False) as advance:
            for _ in together(streams, lambda tokens: advance(tokens=tokens)):
                advance(requests=1)
                if not is_later:
                    show.next_ones()
        seconds = time.perf_counter() - start
    finally:
        show.rest()
    if not output.quiet:
        note(show.sum(seconds))
    if show.failed:
        raise WorkerError(f"{show.failed} of {counted(len(streams), 'answer')} failed")


def _remark(llm: "LLM", questions: Sequence[Question], ask: PromptOptions, output: OutputOptions) -> None:
    """What is good to know before it begins."""
    if ask.prompts is not None and not llm.capacity.is_cut:  # else it has been said
        note(str(llm.capacity))
    if output.choices > 1 and any(question.params.temperature == 0 for question in questions):
        note("at temperature 0 all answers to a prompt are the same: --choices 1 gives each once")


def _streams(llm: "LLM", question: Question, ask: PromptOptions, output: OutputOptions) -> list["Stream"]:
    """The answers to a question, of bounded length; what cannot be answered is said before anything is computed."""
    try:
        ids, params = ask.encode(llm, question), question.params
        if params.max_tokens is None:
            params = replace(params, max_tokens=max(1, min(DEFAULT_MAX_TOKENS, llm.max_context - len(ids))))
        return llm.streams(ids, params, output.choices, **{"timeout": output.timeout, **question.scheduling})
    except InvalidRequestError as error:
        if question.origin:
            error.args = (f"{question.origin}: {error}", *error.args[1:])
        raise


@dataclass
class _Show:
    """Shows one answer after the other, and keeps count."""

    llm: "LLM"
    questions: Sequence[Question]
    streams: Sequence["Stream"]  # those of the first question, those of the second, ...
    ask: PromptOptions
    output: OutputOptions
    model: str | None
    next: int = 0  # all before it are shown
    shown: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0

    def next_ones(self) -> None:
        """Show those that have ended, up to the first that has not."""
        while self.next < len(self.streams) and self.streams[self.next].has_ended:
            self.next += 1
            self._show(self.next - 1)

    def rest(self) -> None:
        """Show all that ended by themselves and have not been shown."""
        for i in range(self.next, len(self.streams)):
            self.next = i + 1
            self._show(i)

    def _show(self, i: int) -> None:
        completion, error = self.streams[i].so_far(), self.streams[i].error
        if completion.finish_reason is None:  # closed before its end
            return
        index, choice = divmod(i, self.output.choices)
        self.shown += 1
        self.failed += error is not None
        self.prompt_tokens += len(completion.prompt_tokens)
        self.tokens += completion.timings.tokens
        if self.output.as_json:
            told = {} if error is None else {"error": {"code": error.code, "message": str(error)}}
            print_json({"index": index, "choice": choice, **report(self.llm, self.model, completion), **told})
        else:
            self._write(index, choice, completion, error)

    def _write(self, index: int, choice: int, completion: "Completion", error: WorkerError | None) -> None:
        question = self.questions[index]
        number = f"{index + 1}" if self.output.choices == 1 else f"{index + 1}.{choice + 1}"
        heading = f"==> {number}: {question.heading()} <=="
        before = self.ask.shown(self.llm, question) if self.output.echo else ""
        text = (visible if sys.stdout.isatty() else str)(before + completion.text)
        print("\n" * (self.shown > 1) + style(heading, "bold"))
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
        if completion.logprobs is not None:
            table = [f"==> {number} <==", *logprob_lines(self.llm.tokenizer, completion.logprobs)]
            print("\n".join(table), file=sys.stderr)
        if error is not None:
            print(f"error: {number}: {one_line(str(error))}", file=sys.stderr, flush=True)

    def sum(self, seconds: float) -> str:
        """`24 answers · 903 prompt tokens · 960 tokens · 2.61 s · 367.5 tokens/s`, and how good guesses were."""
        guessed = guesses(self.llm)
        parts = [
            counted(self.shown, "answer"), counted(self.prompt_tokens, "prompt token"), counted(self.tokens, "token"),
            f"{seconds:.2f} s", f"{self.tokens / seconds:,.1f} tokens/s",
            *([] if guessed is None else [guessed.told(self.tokens)]),
        ]  # fmt: skip
        return " · ".join(parts)
