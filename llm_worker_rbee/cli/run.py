"""`llm-worker-rbee run`: one prompt, one answer, streamed to standard output; or one JSON object with all of it.

Several prompts, or several answers to one, are computed in one batch and shown in the order of the prompts as soon as
they are finished: text under headings, or JSON Lines. A failed one does not end the others; after Ctrl-C the finished
ones are shown.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from ..errors import InvalidRequestError, WorkerError
from ..generation import Completion
from ..llm import LLM, MAX_COMPLETIONS, Stream, together
from ..progress import request_progress, supports_ansi
from .completion_report import completion_json, draft_stats, figures_line, logprob_lines
from .options import (
    DEFAULT_MAX_TOKENS,
    EngineOptions,
    LoadOptions,
    ModelOptions,
    SamplingOptions,
    gather,
    load_model,
    options_in,
    start_stream,
)
from .prompt_input import PromptOptions, PromptRequest
from .terminal import Status, count, note, one_line, print_json, style, visible

_option = options_in("Output")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is printed of the answer."""

    echo: Annotated[bool, _option("--echo", help="Show the prompt too; with --json, score its tokens.")] = False
    logprobs: Annotated[
        int | None, _option("--logprobs", metavar="K", help="Log-probabilities, also of the K most likely tokens.")
    ] = None
    choices: Annotated[
        int,
        _option("--choices", metavar="N", min=1, max=MAX_COMPLETIONS,
                help="Number of answers to each prompt (-n limits their length)."),
    ] = 1  # fmt: skip
    timeout: Annotated[
        float | None, _option("--timeout", metavar="S", show_default="none", help="An answer fails after S seconds.")
    ] = None
    as_json: Annotated[
        bool, _option("--json", help="Print one JSON object at the end; of many answers one a line.")
    ] = False
    quiet: Annotated[bool, _option("--quiet", "-q", help="Leave out progress and figures.")] = False

    def validate(self) -> None:
        """Raise a usage error if a value is out of range."""
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise typer.BadParameter(f"--timeout is {self.timeout:g}: it must be a number of seconds above 0")


@gather(
    prompt_options=PromptOptions, model=ModelOptions, computing=LoadOptions, engine=EngineOptions,
    sampling=SamplingOptions, output=OutputOptions,
)  # fmt: skip
def run(
    prompt_options: PromptOptions,
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
    output.validate()
    requests = prompt_options.read_requests(params)
    status = Status()
    llm = load_model(model, computing, status, engine)
    if prompt_options.prompts is not None or output.choices > 1:
        run_batch(llm, requests, prompt_options, output, model.model)
        return
    (request,) = requests
    ids = prompt_options.encode(llm, request)
    max_tokens = DEFAULT_MAX_TOKENS if params.max_tokens is None else None
    stream = start_stream(llm, ids, params, max_tokens, output.timeout)
    status.show(f"prefill of {count(len(ids), 'token')} ...")
    try:
        if not output.as_json:
            _print_stream(stream, status, prompt_options.echo_text(llm, request) if output.echo else "")
        completion = stream.completion()
    finally:
        status.clear()
    _print_end(llm, completion, model.model, output)


def _print_end(llm: LLM, completion: Completion, reference: str | None, output: OutputOptions) -> None:
    """Print the JSON object, or the log-probabilities and the figures."""
    drafts = draft_stats(llm)
    if output.as_json:
        speculative = None if drafts is None else drafts._asdict()
        print_json({**completion_json(llm, reference, completion), "speculative": speculative})
        return
    if completion.logprobs is not None:
        print("\n".join(logprob_lines(llm.tokenizer, completion.logprobs)), file=sys.stderr)
    if not output.quiet:
        note(figures_line(completion, drafts))


def _print_stream(stream: Stream, status: Status, prefix: str) -> None:
    """Print the answer as it comes, and end its last line, also when Ctrl-C or an error ends it early."""
    clean = visible if sys.stdout.isatty() else str
    last = prefix
    try:
        if prefix:
            status.clear()
            print(clean(prefix), end="", flush=True)
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


def run_batch(
    llm: LLM, requests: Sequence[PromptRequest], prompt_options: PromptOptions, output: OutputOptions, model: str | None
) -> None:
    """Compute all answers in one batch and print them in order."""
    streams = [stream for request in requests for stream in _start_streams(llm, request, prompt_options, output)]
    printer = _BatchPrinter(llm, requests, streams, prompt_options, output, model)
    # a bar and an answer cannot be drawn on one terminal at a time
    is_deferred = supports_ansi(sys.stderr) and sys.stdout.isatty() and not output.quiet
    if not output.quiet:
        _note_before_batch(llm, requests, prompt_options, output)
    start = time.perf_counter()
    try:
        with request_progress(len(streams), not output.quiet, last_line=False) as advance:
            for _ in together(streams, lambda tokens: advance(tokens=tokens)):
                advance(requests=1)
                if not is_deferred:
                    printer.print_ready()
        seconds = time.perf_counter() - start
    finally:
        printer.print_rest()
    if not output.quiet:
        note(printer.totals(seconds))
    if printer.failed:
        raise WorkerError(f"{printer.failed} of {count(len(streams), 'answer')} failed")


def _note_before_batch(
    llm: LLM, requests: Sequence[PromptRequest], prompt_options: PromptOptions, output: OutputOptions
) -> None:
    if prompt_options.prompts is not None and not llm.capacity.is_context_reduced:  # else it was printed
        note(str(llm.capacity))
    if output.choices > 1 and any(request.params.temperature == 0 for request in requests):
        note("at temperature 0 all answers to a prompt are the same: --choices 1 gives each once")


def _start_streams(
    llm: LLM, request: PromptRequest, prompt_options: PromptOptions, output: OutputOptions
) -> list[Stream]:
    """Return the streams of one prompt; a prompt that cannot be answered fails before anything is computed."""
    try:
        ids, params = prompt_options.encode(llm, request), request.params
        if params.max_tokens is None:
            params = replace(params, max_tokens=max(1, min(DEFAULT_MAX_TOKENS, llm.max_context - len(ids))))
        return llm.streams(ids, params, output.choices, **{"timeout": output.timeout, **request.scheduling})
    except InvalidRequestError as error:
        if request.origin:
            error.args = (f"{request.origin}: {error}", *error.args[1:])
        raise


@dataclass
class _BatchPrinter:
    """Prints finished answers in order, and counts them."""

    llm: LLM
    requests: Sequence[PromptRequest]
    streams: Sequence[Stream]  # those of the first prompt, those of the second, ...
    prompt_options: PromptOptions
    output: OutputOptions
    model: str | None
    next: int = 0  # all before it are printed
    printed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0

    def print_ready(self) -> None:
        """Print the finished ones, up to the first that is not."""
        while self.next < len(self.streams) and self.streams[self.next].has_ended:
            self.next += 1
            self._print(self.next - 1)

    def print_rest(self) -> None:
        """Print all that finished and are not printed yet."""
        for i in range(self.next, len(self.streams)):
            self.next = i + 1
            self._print(i)

    def _print(self, i: int) -> None:
        completion, error = self.streams[i].so_far(), self.streams[i].error
        if completion.finish_reason is None:  # closed before its end
            return
        index, choice = divmod(i, self.output.choices)
        self.printed += 1
        self.failed += error is not None
        self.prompt_tokens += len(completion.prompt_tokens)
        self.tokens += completion.timings.tokens
        if self.output.as_json:
            failure = {} if error is None else {"error": {"code": error.code, "message": str(error)}}
            report = completion_json(self.llm, self.model, completion)
            print_json({"index": index, "choice": choice, **report, **failure})
        else:
            self._print_text(index, choice, completion, error)

    def _print_text(self, index: int, choice: int, completion: Completion, error: WorkerError | None) -> None:
        request = self.requests[index]
        number = f"{index + 1}" if self.output.choices == 1 else f"{index + 1}.{choice + 1}"
        heading = f"==> {number}: {request.heading()} <=="
        prefix = self.prompt_options.echo_text(self.llm, request) if self.output.echo else ""
        text = (visible if sys.stdout.isatty() else str)(prefix + completion.text)
        print("\n" * (self.printed > 1) + style(heading, "bold"))
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
        if completion.logprobs is not None:
            table = [f"==> {number} <==", *logprob_lines(self.llm.tokenizer, completion.logprobs)]
            print("\n".join(table), file=sys.stderr)
        if error is not None:
            print(f"error: {number}: {one_line(str(error))}", file=sys.stderr, flush=True)

    def totals(self, seconds: float) -> str:
        """Return `24 answers · 903 prompt tokens · 960 tokens · 2.61 s · 367.5 tokens/s`, with the drafts."""
        drafts = draft_stats(self.llm)
        parts = [
            count(self.printed, "answer"), count(self.prompt_tokens, "prompt token"), count(self.tokens, "token"),
            f"{seconds:.2f} s", f"{self.tokens / seconds:,.1f} tokens/s",
            *([] if drafts is None else [drafts.describe(self.tokens)]),
        ]  # fmt: skip
        return " · ".join(parts)
