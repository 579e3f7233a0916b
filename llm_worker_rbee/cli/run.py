"""`llm-worker-rbee run`: one prompt, one answer, streamed to standard output; or one JSON object with all of it.

Several prompts, or several answers to one, are computed in one batch and shown in the order of the prompts as soon as
they are finished: text under headings, or JSON Lines. A failed one does not end the others; after Ctrl-C the finished
ones are shown.
"""

import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import typer

from ..errors import InvalidRequestError, WorkerError, counted
from ..generation import Chunk, Completion
from ..llm import LLM, Stream, together
from ..progress import request_progress, supports_ansi
from ..sampling_params import NEUTRAL_SAMPLING, OBJECT_MODES, SamplingParams, StructuredOutputsParams, TokenLogprob
from ..structured_outputs.grammar_check import GrammarChecker
from ..text_model import EncodedPrompt
from ..tokenizer import Tokenizer
from ..tokenizer.chat.events import ReasoningDelta
from ..tokenizer.chat.template import start_ahead, validate_messages
from ..weights.hub import DEFAULT_MODEL
from .commands import GuidedFlags, OutputFlags, PromptFlags, RunCommand
from .loading import limit_tokens, load_model, start_stream
from .terminal import (
    Status,
    argument_text,
    cell,
    columns,
    note,
    one_line,
    print_json,
    read_file,
    read_stdin,
    read_text,
    style,
    visible,
)

NO_PROMPT = "there is no prompt: give one as an argument, with --file FILE, or on standard input"
JSON_LINE = re.compile(r'\s*\{\s*["}]')  # how the first line of JSON Lines begins
JSON_SUFFIXES = {".jsonl", ".ndjson"}
SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__)
SCHEDULING_FIELDS = ("priority", "timeout")
MAX_HEADING_CHARS = 60


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt (text, or the messages of a conversation), its place in the file, and its parameters."""

    origin: str  # "line 3", or nothing for the only one
    prompt: str | list[Any]
    params: SamplingParams
    scheduling: dict[str, Any] = field(default_factory=dict)  # its own values of SCHEDULING_FIELDS

    def messages(self) -> list[Any]:
        """Return the conversation for a chat template."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt

    def text(self) -> str:
        """Return the prompt for --raw."""
        if not isinstance(self.prompt, str):
            raise InvalidRequestError("messages need the chat template, which --raw leaves out", "messages")
        return self.prompt

    def heading(self) -> str:
        """Return the beginning of the last message on one line."""
        last = validate_messages(self.messages())[-1].get("content") or ""
        text = cell(" ".join(last.split()))
        return text if len(text) <= MAX_HEADING_CHARS else text[: MAX_HEADING_CHARS - 3] + "..."


def read_requests(source: PromptFlags, params: SamplingParams) -> list[PromptRequest]:
    """Return the one prompt, or all of a file."""
    if source.special and not source.raw:
        raise typer.BadParameter("--special goes with --raw: a chat message is always text")
    if source.image and (source.raw or source.prompts is not None):
        raise typer.BadParameter("--image goes with one prompt in the chat template: leave out --raw and --prompts")
    if source.raw and source.system is not None:
        raise typer.BadParameter("--system goes into the chat template, which --raw leaves out")
    argument_text(source.system or "", "--system")
    if source.prompts is None:
        return [PromptRequest("", _read_prompt(source), params)]
    if source.prompt is not None or source.file is not None:
        raise typer.BadParameter("--prompts brings all prompts: leave out PROMPT and --file")
    return read_prompt_file(source.prompts, params)


def _read_prompt(source: PromptFlags) -> str:
    """Return the text. As a message, a file loses one final newline; raw, it is used as it is."""
    text = read_text(source.prompt, source.file, NO_PROMPT)
    if source.raw:
        return text
    text = text if source.file is None else text.removesuffix("\n")
    if not text:
        raise typer.BadParameter(NO_PROMPT)
    return text


def messages_of(source: PromptFlags, request: PromptRequest) -> list[Any]:
    """Return the conversation with the system message."""
    messages = request.messages()
    if source.image:
        messages = [{**messages[0], "images": source.image}]
    if source.system is None:
        return messages
    if not isinstance(request.prompt, str):
        raise InvalidRequestError("messages bring their own system message: leave out --system", "messages")
    return [{"role": "system", "content": source.system}, *messages]


def encode_prompt(source: PromptFlags, llm: LLM, request: PromptRequest) -> EncodedPrompt:
    """Return the tokens of a prompt, and how its answer is parsed and guided."""
    guided = request.params.structured_outputs
    if source.raw:
        return EncodedPrompt(llm.tokenize(request.text(), parse_special=source.special), None, guided)
    return llm.prepare_chat(messages_of(source, request), None, guided)


def echo_text(source: PromptFlags, llm: LLM, request: PromptRequest) -> str:
    """Return the prompt as text, with the chat template applied."""
    return request.text() if source.raw else llm.apply_chat_template(messages_of(source, request))


def guided_fields(guided: GuidedFlags) -> dict[str, Any]:
    """Return the fields of `SamplingParams`; a grammar that is wrong fails before the model is loaded."""
    values = {name: value for name, value in vars(guided).items() if value and not isinstance(value, bool)}
    options = [f"--{name.replace('_', '-')}" for name in values]
    if len(values) > 1:
        raise typer.BadParameter(f"{options[0]} and {options[1]} exclude each other: give one of them")
    if guided.open_objects and not guided.json_schema:
        raise typer.BadParameter("--open-objects needs --json-schema")
    if not values:
        if guided.close_on_length:
            raise typer.BadParameter("--close-on-length needs --json-schema, --regex, --choice or --grammar")
        return {}
    try:
        params = GrammarChecker().check(_guided_params(guided))
    except InvalidRequestError as error:
        reason = re.sub(r"^structured_outputs\.\w+", options[0], str(error))
        raise typer.BadParameter(reason if reason.startswith("--") else f"{options[0]}: {reason}") from None
    return {"structured_outputs": params, "close_on_length": guided.close_on_length}


def _guided_params(guided: GuidedFlags) -> StructuredOutputsParams:
    if guided.json_schema:
        is_text = guided.json_schema.lstrip().startswith("{")
        schema = guided.json_schema if is_text else read_file(Path(guided.json_schema))
        return StructuredOutputsParams(json=schema, additional_properties=OBJECT_MODES[guided.open_objects])
    if guided.grammar:
        return StructuredOutputsParams(grammar=read_file(guided.grammar))
    texts = [argument_text(text, "--choice") for text in guided.choice or ()]
    return StructuredOutputsParams(regex=guided.regex, choice=texts or None)


def run(options: RunCommand) -> None:
    """Answer the prompt, or all prompts in one batch."""
    output, source = options.output, options.source
    scored = {"logprobs": output.logprobs, "prompt_logprobs": output.echo and output.as_json}
    params = options.sampling.params(**scored, **guided_fields(options.guided))
    if output.timeout is not None and not 0 < output.timeout < math.inf:
        raise typer.BadParameter(f"--timeout is {output.timeout:g}: it must be a number of seconds above 0")
    requests = read_requests(source, params)
    if not source.raw:
        start_ahead()
    status = Status()
    llm = load_model(options.model, options.computing, status, options.engine)
    if source.prompts is not None or output.choices > 1:
        run_batch(llm, requests, source, output, options.model.model)
        return
    (request,) = requests
    encoded = encode_prompt(source, llm, request)
    stream = start_stream(llm, encoded, params, timeout=output.timeout)
    status.show(f"prefill of {counted(len(encoded.ids), 'token')} ...")
    try:
        if not output.as_json:
            prefix = echo_text(source, llm, request) if output.echo else ""
            _print_stream(stream, status, prefix, shows_reasoning=not output.quiet)
        completion = stream.completion()
    finally:
        status.clear()
    _print_end(llm, completion, options.model.model, output)


def _print_end(llm: LLM, completion: Completion, reference: str | None, output: OutputFlags) -> None:
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


class ReasoningNotes:
    """Prints the reasoning of an answer on standard error, dimmed, and ends its last line before the content."""

    def __init__(self) -> None:
        self._is_open = False

    def show(self, chunk: Chunk, status: Status) -> None:
        """Print the reasoning of a chunk."""
        text = "".join(event.text for event in chunk.events if isinstance(event, ReasoningDelta))
        if text:
            status.clear()
            print(style(visible(text), "dim", stream=sys.stderr), end="", file=sys.stderr, flush=True)
            self._is_open = True
        if chunk.text and self._is_open:
            print(file=sys.stderr, flush=True)
            self._is_open = False


def _print_stream(stream: Stream, status: Status, prefix: str, *, shows_reasoning: bool) -> None:
    """Print the answer as it comes, and end its last line, also when Ctrl-C or an error ends it early."""
    clean = visible if sys.stdout.isatty() else str
    last, reasoning = prefix, ReasoningNotes()
    try:
        if prefix:
            status.clear()
            print(clean(prefix), end="", flush=True)
        for chunk in stream:
            if shows_reasoning and chunk.events:
                reasoning.show(chunk, status)
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
    llm: LLM, requests: Sequence[PromptRequest], source: PromptFlags, output: OutputFlags, model: str | None
) -> None:
    """Compute all answers in one batch and print them in order."""
    streams = [stream for request in requests for stream in _start_streams(llm, request, source, output)]
    printer = _BatchPrinter(llm, requests, streams, source, output, model)
    # a bar and an answer cannot be drawn on one terminal at a time
    is_deferred = supports_ansi(sys.stderr) and sys.stdout.isatty() and not output.quiet
    if not output.quiet:
        _note_before_batch(llm, requests, source, output)
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
        raise WorkerError(f"{printer.failed} of {counted(len(streams), 'answer')} failed")


def _note_before_batch(llm: LLM, requests: Sequence[PromptRequest], source: PromptFlags, output: OutputFlags) -> None:
    if source.prompts is not None and not llm.capacity.is_context_reduced:  # else it was printed
        note(str(llm.capacity))
    temperatures = [request.params.resolve(llm.sampling_defaults.values).temperature for request in requests]
    if output.choices > 1 and 0 in temperatures:
        note("at temperature 0 all answers to a prompt are the same: --choices 1 gives each once")


def _start_streams(llm: LLM, request: PromptRequest, source: PromptFlags, output: OutputFlags) -> list[Stream]:
    """Return the streams of one prompt; a prompt that cannot be answered fails before anything is computed."""
    try:
        encoded = encode_prompt(source, llm, request)
        params = limit_tokens(llm, encoded.ids, request.params).with_structured_outputs(encoded.structured_outputs)
        options = {"timeout": output.timeout, **request.scheduling}
        return llm.streams(encoded, params, output.choices, **options)
    except InvalidRequestError as error:
        if request.origin:
            error.args = (f"{request.origin}: {error}", *error.args[1:])
        raise


@dataclass
class _BatchPrinter:
    """Prints finished answers in order, and counts them."""

    llm: LLM
    requests: Sequence[PromptRequest]
    streams: Sequence[Stream]  # the first prompt's streams, the second's, ...
    source: PromptFlags
    output: OutputFlags
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
        prefix = echo_text(self.source, self.llm, request) if self.output.echo else ""
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
            counted(self.printed, "answer"),
            counted(self.prompt_tokens, "prompt token"),
            counted(self.tokens, "token"),
            f"{seconds:.2f} s",
            f"{self.tokens / seconds:,.1f} tokens/s",
            *([] if drafts is None else [drafts.describe(self.tokens)]),
        ]
        return " · ".join(parts)


def read_prompt_file(path: Path, params: SamplingParams) -> list[PromptRequest]:
    """Return the prompts of a file without its blank lines; `-` is standard input."""
    text = read_stdin() if str(path) == "-" else read_file(path)
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise typer.BadParameter(f"--prompts: there is no prompt in {'standard input' if str(path) == '-' else path}")
    if path.suffix.lower() in JSON_SUFFIXES or JSON_LINE.match(lines[0][1]):
        return [_parse_json_line(f"line {number}", line, params) for number, line in lines]
    return [PromptRequest(f"line {number}", line, params) for number, line in lines]


def _parse_json_line(origin: str, line: str, params: SamplingParams) -> PromptRequest:
    """Parse `{"prompt" or "messages": ..., SCHEDULING_FIELDS, fields of SamplingParams}`; reject others by name."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{origin} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"{origin} is not a JSON object")
    prompts = [fields.pop(name) for name in ("prompt", "messages") if name in fields]
    scheduling = {name: fields.pop(name) for name in SCHEDULING_FIELDS if name in fields}
    unknown = fields.keys() - SAMPLING_FIELDS
    if unknown:
        raise InvalidRequestError(f"{origin}: unknown field {min(unknown)!r}", min(unknown))
    if len(prompts) != 1 or not prompts[0] or not isinstance(prompts[0], (str, list)):
        raise InvalidRequestError(f'{origin} must have either a "prompt" (text) or "messages" (a list)', "prompt")
    if isinstance(fields.get("logit_bias"), dict):  # keys of JSON objects are strings
        fields["logit_bias"] = {_token_id(key): value for key, value in fields["logit_bias"].items()}
    values = {name: value for name, value in fields.items() if value is not None or name not in NEUTRAL_SAMPLING}
    try:
        if values.get("structured_outputs") is not None:
            values["structured_outputs"] = StructuredOutputsParams.from_fields(values["structured_outputs"])
        return PromptRequest(origin, prompts[0], replace(params, **values), scheduling)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{origin}: {error}", error.field) from None


def _token_id(key: str) -> int | str:
    return int(key) if re.fullmatch("[0-9]{1,9}", key) else key


class DraftStats(NamedTuple):
    """Draft tokens, and how many of them were accepted."""

    drafted: int
    accepted: int

    def describe(self, tokens: int) -> str:
        """Return `drafts 68% accepted (35 of 51), 1.34 tokens a step`: a step gives one token more than it accepts."""
        if not self.drafted:
            return "no drafts"
        share = f"{self.accepted / self.drafted:.0%} accepted ({self.accepted:,} of {self.drafted:,})"
        return f"drafts {share}, {tokens / max(1, tokens - self.accepted):.2f} tokens a step"


def draft_stats(llm: LLM, before: DraftStats | None = None) -> DraftStats | None:
    """Return the drafts of this model, or those since `before`; None without speculative decoding."""
    if llm.engine.drafter is None:
        return None
    stats, (drafted, accepted) = llm.engine.scheduler.stats, before or (0, 0)
    return DraftStats(stats.num_drafted_tokens - drafted, stats.num_accepted_tokens - accepted)


def completion_json(llm: LLM, reference: str | None, completion: Completion) -> dict[str, Any]:
    """Return the object of `--json`; what was not requested is null, but `prompt_logprobs`, which is left out."""
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
        "cached_tokens": completion.cached_tokens,
        "timings": {
            "load_s": sum(llm.phases.values()),
            "time_to_first_token_s": timings.time_to_first_token,
            "total_s": timings.total,
            "tokens_per_second": timings.tokens_per_second,
        },
    }
    if completion.reasoning:
        report["reasoning"] = completion.reasoning
    if completion.logprobs is not None:
        report["logprobs"] = [_logprob_json(llm.tokenizer, entry) for entry in completion.logprobs]
    if completion.prompt_logprobs is not None:
        report["prompt_logprobs"] = [
            None if entry is None else _logprob_json(llm.tokenizer, entry) for entry in completion.prompt_logprobs
        ]
    return report


def _logprob_json(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    top = [{"id": token, "logprob": value, "text": tokenizer.piece(token)} for token, value in entry.top]
    return {"id": entry.token, "logprob": entry.logprob, "text": tokenizer.piece(entry.token), "top": top}


def logprob_lines(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> list[str]:
    """Return a table: each token, and the most likely ones at its place."""
    rows = [["LOGPROB", "TOKEN", "LIKELIEST"]]
    for entry in entries:
        likeliest = "  ".join(f"{tokenizer.piece(token)!r} {value:.2f}" for token, value in entry.top)
        rows.append([f"{entry.logprob:.3f}", repr(tokenizer.piece(entry.token)), likeliest])
    return columns(rows, right=[0])


def figures_line(completion: Completion, drafts: DraftStats | None) -> str:
    """Return `34 prompt tokens (16 cached) · 21 tokens · first token 0.41 s · 4.1 tokens/s · stop`, with the drafts."""
    timings, cached = completion.timings, completion.cached_tokens
    parts = [
        counted(len(completion.prompt_tokens), "prompt token") + (f" ({cached:,} cached)" if cached else ""),
        counted(len(completion.tokens), "token"),
        f"first token {timings.time_to_first_token:.2f} s",
    ]
    if timings.tokens_per_second:
        parts.append(f"{timings.tokens_per_second:.1f} tokens/s")
    if drafts is not None:
        parts.append(drafts.describe(timings.tokens))
    return " · ".join([*parts, completion.finish_reason or "stopped"])
