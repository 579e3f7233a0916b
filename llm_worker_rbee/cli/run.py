"""`llm-worker-rbee run`: one prompt, one answer, streamed to standard output; or one JSON object with all of it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    DEFAULT_MAX_TOKENS,
    OUTPUT_PANEL,
    PROMPT_PANEL,
    ModelOptions,
    SamplingOptions,
    argument_text,
    begin,
    gather,
    load,
    read_text,
)
from .computing import LoadOptions
from .terminal import Status, columns, counted, figures, note, print_json, visible

if TYPE_CHECKING:
    from ..engine.request import TokenLogprob
    from ..llm import LLM, Completion, Stream
    from ..tokenizer import Tokenizer

MISSING = "there is no prompt: give one as an argument, with --file FILE, or on standard input"


def _prompt_option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PROMPT_PANEL, **more)


def _output_option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=OUTPUT_PANEL, **more)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What is asked, and how it is put to the model."""

    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to say to the model; - or nothing: standard input.")
    ] = None
    file: Annotated[
        Path | None, _prompt_option("--file", "-f", metavar="FILE", help="Take the prompt from a file.")
    ] = None
    system: Annotated[
        str | None, _prompt_option("--system", "-s", metavar="TEXT", help="A system message before the prompt.")
    ] = None
    raw: Annotated[bool, _prompt_option("--raw", help="No chat template: go on where this text ends.")] = False
    special: Annotated[bool, _prompt_option("--special", help="With --raw: recognise special tokens.")] = False

    def read(self) -> str:
        """The text of the prompt. As a message, a file has no final newline either; raw, it is used as it is."""
        if self.special and not self.raw:
            raise typer.BadParameter("--special goes with --raw: a chat message is always text")
        if self.raw and self.system is not None:
            raise typer.BadParameter("--system goes into the chat template, which --raw leaves out")
        argument_text(self.system or "", "--system")
        text = read_text(self.prompt, self.file, MISSING)
        if self.raw:
            return text
        text = text if self.file is None else text.removesuffix("\n")
        if not text:
            raise typer.BadParameter(MISSING)
        return text

    def messages(self, text: str) -> list[dict[str, str]]:
        """The conversation that the template gets."""
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, {"role": "user", "content": text}]

    def encode(self, llm: "LLM", text: str) -> list[int]:
        """What the model reads: the text itself, or the conversation that the template makes of it."""
        return llm.tokenize(text, parse_special=self.special) if self.raw else llm.tokenize_chat(self.messages(text))

    def shown(self, llm: "LLM", text: str) -> str:
        """The same, for people."""
        return text if self.raw else llm.apply_chat_template(self.messages(text))


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is shown of the answer."""

    echo: Annotated[bool, _output_option("--echo", help="Show the prompt too; with --json, score its tokens.")] = False
    logprobs: Annotated[
        int | None, _output_option("--logprobs", metavar="K", help="Log-probabilities, also of the K likeliest tokens.")
    ] = None
    as_json: Annotated[bool, _output_option("--json", help="Print one JSON object, at the end.")] = False
    quiet: Annotated[bool, _output_option("--quiet", "-q", help="Leave out the last line with the figures.")] = False


@gather(ask=PromptOptions, model=ModelOptions, computing=LoadOptions, sampling=SamplingOptions, output=OutputOptions)
def run(
    ask: PromptOptions, model: ModelOptions, computing: LoadOptions, sampling: SamplingOptions, output: OutputOptions
) -> None:
    """Answer one prompt.

    The answer is streamed to standard output; figures follow on standard error.

    A raw prompt is used byte for byte; standard input loses one final newline.

    \b
    Examples:
      llm-worker-rbee run "Why is the sky blue?"
      llm-worker-rbee run --file notes.txt --system "Summarise this."
      git diff | llm-worker-rbee run -m model.gguf -n 100
      llm-worker-rbee run --raw "Once upon a time" -t 0.8 --seed 7
      llm-worker-rbee run "Say yes or no." -t 0 --json --logprobs 5
      llm-worker-rbee run "Hello" -m folder --quantize Q4_K_M --threads 4
    """
    params = sampling.params(logprobs=output.logprobs, prompt_logprobs=output.echo and output.as_json)
    text = ask.read()
    status = Status()
    llm = load(model, computing, status)
    ids = ask.encode(llm, text)
    stream = begin(llm, ids, params, DEFAULT_MAX_TOKENS if params.max_tokens is None else None)
    status.show(f"reading {counted(len(ids), 'token')} ...")
    try:
        if not output.as_json:
            _write(stream, status, ask.shown(llm, text) if output.echo else "")
        completion = stream.completion()
    finally:
        status.clear()
    _finish(llm, completion, model.model, output)


def _finish(llm: "LLM", completion: "Completion", reference: str | None, output: OutputOptions) -> None:
    """What comes after the answer: the object, or the scores and the figures."""
    if output.as_json:
        print_json(_report(llm, reference, completion))
        return
    if completion.logprobs is not None:
        print("\n".join(_logprob_lines(llm.tokenizer, completion.logprobs)), file=sys.stderr)
    if not output.quiet:
        note(figures(completion))


def _write(stream: "Stream", status: Status, before: str) -> None:
    """Stream the answer, and end its last line, also when Ctrl-C ends it early."""
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
    except KeyboardInterrupt:
        status.clear()
        if last:
            print(flush=True)
        raise
    status.clear()
    if not last.endswith("\n"):
        print(flush=True)


def _report(llm: "LLM", reference: str | None, completion: "Completion") -> dict[str, Any]:
    """The object of `--json`; what was not asked for is null, but `prompt_logprobs`, which is left out."""
    from ..weights.hub import DEFAULT_MODEL

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
        "timings": {
            "load_s": sum(llm.phases.values()),
            "time_to_first_token_s": timings.time_to_first_token,
            "total_s": timings.total,
            "tokens_per_second": timings.tokens_per_second,
        },
    }
    if completion.logprobs is not None:
        report["logprobs"] = [_scored(llm.tokenizer, entry) for entry in completion.logprobs]
    if completion.prompt_logprobs is not None:
        scored = [None if entry is None else _scored(llm.tokenizer, entry) for entry in completion.prompt_logprobs]
        report["prompt_logprobs"] = scored
    return report


def _scored(tokenizer: "Tokenizer", entry: "TokenLogprob") -> dict[str, Any]:
    top = [{"id": token, "logprob": value, "text": tokenizer.piece(token)} for token, value in entry.top]
    return {"id": entry.token, "logprob": entry.logprob, "text": tokenizer.piece(entry.token), "top": top}


def _logprob_lines(tokenizer: "Tokenizer", entries: list["TokenLogprob"]) -> list[str]:
    rows = [["LOGPROB", "TOKEN", "LIKELIEST"]]
    for entry in entries:
        likeliest = "  ".join(f"{tokenizer.piece(token)!r} {value:.2f}" for token, value in entry.top)
        rows.append([f"{entry.logprob:.3f}", repr(tokenizer.piece(entry.token)), likeliest])
    return columns(rows, right=[0])
