"""`llm-worker-rbee run`: one prompt, one answer, streamed to standard output; or one JSON object with all of it.

Several prompts, or several answers to one, are computed together: many.py.
"""

import sys
from typing import TYPE_CHECKING

from ..errors import WorkerError
from .answer_report import guesses, logprob_lines, report
from .asking import OutputOptions, PromptOptions
from .common import DEFAULT_MAX_TOKENS, ModelOptions, SamplingOptions, begin, gather, load
from .computing import LoadOptions
from .engine_options import EngineOptions
from .many import answer_all
from .terminal import Status, counted, figures, note, print_json, visible

if TYPE_CHECKING:
    from ..llm import LLM, Completion, Stream


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
            _write(stream, status, ask.shown(llm, question) if output.echo else "")
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


def _write(stream: "Stream", status: Status, before: str) -> None:
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
