"""Text from outside: arguments, files, standard input, templates; and the prompts of `run`, one or a file of them.

What is read whole is bounded, so that a wrong path (a disk image, /dev/zero) cannot fill the memory.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from ..engine.request import SamplingParams
from ..errors import InvalidRequestError
from ..llm import LLM
from ..tokenizer.chat_template import validate_messages
from .terminal import cell

MAX_TEXT_BYTES, MAX_TEMPLATE_BYTES = 64 << 20, 1 << 20
PROMPT_PANEL = "Prompt"
NO_PROMPT = "there is no prompt: give one as an argument, with --file FILE, or on standard input"
JSON_LINE = re.compile(r'\s*\{\s*["}]')  # how the first line of JSON Lines begins
JSON_SUFFIXES = {".jsonl", ".ndjson"}
SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__)
SCHEDULING_FIELDS = ("priority", "timeout")
MAX_HEADING_CHARS = 60

_option = partial(typer.Option, rich_help_panel=PROMPT_PANEL)


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


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompt, and how it is encoded."""

    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; - or nothing: standard input.")
    ] = None
    file: Annotated[Path | None, _option("--file", "-f", metavar="FILE", help="Read the prompt from a file.")] = None
    prompts: Annotated[
        Path | None,
        _option("--prompts", metavar="FILE", help="Answer all prompts of a file in one batch: one a line, or "
                'JSON Lines {"prompt" or "messages", "max_tokens", "priority", ...}; - is standard input.'),
    ] = None  # fmt: skip
    system: Annotated[
        str | None, _option("--system", "-s", metavar="TEXT", help="A system message before the prompt.")
    ] = None
    raw: Annotated[bool, _option("--raw", help="No chat template: continue this text.")] = False
    special: Annotated[bool, _option("--special", help="With --raw: recognise special tokens.")] = False

    def read_requests(self, params: SamplingParams) -> list[PromptRequest]:
        """Return the one prompt, or all of a file."""
        if self.special and not self.raw:
            raise typer.BadParameter("--special goes with --raw: a chat message is always text")
        if self.raw and self.system is not None:
            raise typer.BadParameter("--system goes into the chat template, which --raw leaves out")
        argument_text(self.system or "", "--system")
        if self.prompts is None:
            return [PromptRequest("", self._read_prompt(), params)]
        if self.prompt is not None or self.file is not None:
            raise typer.BadParameter("--prompts brings all prompts: leave out PROMPT and --file")
        return read_prompt_file(self.prompts, params)

    def _read_prompt(self) -> str:
        """Return the text. As a message, a file loses one final newline; raw, it is used as it is."""
        text = read_text(self.prompt, self.file, NO_PROMPT)
        if self.raw:
            return text
        text = text if self.file is None else text.removesuffix("\n")
        if not text:
            raise typer.BadParameter(NO_PROMPT)
        return text

    def messages(self, request: PromptRequest) -> list[Any]:
        """Return the conversation with the system message."""
        if self.system is None:
            return request.messages()
        if not isinstance(request.prompt, str):
            raise InvalidRequestError("messages bring their own system message: leave out --system", "messages")
        return [{"role": "system", "content": self.system}, *request.messages()]

    def encode(self, llm: LLM, request: PromptRequest) -> list[int]:
        """Return the prompt's token ids."""
        if self.raw:
            return llm.tokenize(request.text(), parse_special=self.special)
        return llm.tokenize_chat(self.messages(request))

    def echo_text(self, llm: LLM, request: PromptRequest) -> str:
        """Return the prompt as text, with the chat template applied."""
        return request.text() if self.raw else llm.apply_chat_template(self.messages(request))


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
    try:
        return PromptRequest(origin, prompts[0], replace(params, **fields), scheduling)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{origin}: {error}", error.field) from None


def _token_id(key: str) -> int | str:
    return int(key) if re.fullmatch("[0-9]{1,9}", key) else key


def decode(data: bytes, origin: str) -> str:
    """Decode UTF-8; raise an error with the place of the first wrong byte."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{origin} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02X}"
        ) from None


def argument_text(text: str, origin: str) -> str:
    """Check text from the command line, where Python hides bytes that are not UTF-8 in surrogates."""
    return decode(text.encode(errors="surrogateescape"), origin)


def read_file(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return a text file, byte for byte."""
    try:
        with path.open("rb") as file:
            return decode(_read(file, str(path), max_bytes), str(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InvalidRequestError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def read_stdin() -> str:
    """Return all of standard input, without the one newline that `echo` and editors put at the end."""
    return decode(_read(sys.stdin.buffer, "standard input", MAX_TEXT_BYTES), "standard input").removesuffix("\n")


def stdin_lines() -> Iterator[tuple[int, bytes]]:
    """Yield each line of standard input with its number, as soon as it is there."""
    number = 0
    while line := sys.stdin.buffer.readline(MAX_TEXT_BYTES + 1):
        number += 1
        yield number, _require_short(line, f"line {number}", MAX_TEXT_BYTES)


def _read(file: IO[bytes], origin: str, max_bytes: int) -> bytes:
    return _require_short(file.read(max_bytes + 1), origin, max_bytes)


def _require_short(data: bytes, origin: str, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise InvalidRequestError(f"{origin} is too long: at most {max_bytes >> 20} MiB are read")
    return data


def read_template(path: Path) -> str:
    """Return a chat template; an empty one is an error, it does not stand for the model's own."""
    text = read_file(path, MAX_TEMPLATE_BYTES)
    if not text.strip():
        raise InvalidRequestError(
            f"the chat template {path} is empty: leave out --chat-template to use the model's own"
        )
    return text


def read_text(argument: str | None, file: Path | None, missing: str) -> str:
    """Return the text of a command: the argument, a file (`-` is standard input), or standard input."""
    if argument is not None and file is not None:
        raise typer.BadParameter("the text is given twice: as an argument and with --file")
    if file is not None and str(file) != "-":
        return read_file(file)
    if argument is not None and argument != "-":
        return argument_text(argument, "the text")
    if file is None and argument is None and sys.stdin.isatty():
        raise typer.BadParameter(missing)
    return read_stdin()
