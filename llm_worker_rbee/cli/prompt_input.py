"""Text from outside (arguments, files, standard input), and what `run` is asked: one prompt or all of a file."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from ..engine.request import SamplingParams
from ..errors import InvalidRequestError
from .terminal import cell

if TYPE_CHECKING:
    from ..llm import LLM

# What is read whole is bounded, so that a wrong path (a disk image, /dev/zero) cannot fill the memory.
LONGEST_TEXT, LONGEST_TEMPLATE = 64 << 20, 1 << 20
PROMPT_PANEL = "Prompt"
MISSING = "there is no prompt: give one as an argument, with --file FILE, or on standard input"
JSON_LINE = re.compile(r'\s*\{\s*["}]')  # how the first line of JSON Lines begins
JSON_SUFFIXES = {".jsonl", ".ndjson"}
SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__)
SCHEDULING_FIELDS = ("priority", "timeout")
LONGEST_HEADING = 60


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt (text, or the messages of a conversation), where it stands, and how it is answered."""

    origin: str  # "line 3", or nothing for the only one
    prompt: str | list[Any]
    params: SamplingParams
    scheduling: dict[str, Any] = field(default_factory=dict)  # what it says itself of SCHEDULING_FIELDS

    def messages(self) -> list[Any]:
        """For a chat template."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt

    def text(self) -> str:
        """As it is."""
        if not isinstance(self.prompt, str):
            raise InvalidRequestError("messages need the chat template, which --raw leaves out", "messages")
        return self.prompt

    def heading(self) -> str:
        """The beginning of what was asked."""
        from ..tokenizer.chat_template import validate_messages

        last = validate_messages(self.messages())[-1].get("content") or ""
        said = cell(" ".join(last.split()))
        return said if len(said) <= LONGEST_HEADING else said[: LONGEST_HEADING - 3] + "..."


def _prompt_option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PROMPT_PANEL, **more)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What is asked, and how it is put to the model."""

    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to say to the model; - or nothing: standard input.")
    ] = None
    file: Annotated[
        Path | None, _prompt_option("--file", "-f", metavar="FILE", help="Take the prompt from a file.")
    ] = None
    prompts: Annotated[
        Path | None,
        _prompt_option("--prompts", metavar="FILE", help="Answer all prompts of a file together: one a line, or "
                       'JSON Lines {"prompt" or "messages", "max_tokens", "priority", ...}; - is standard input.'),
    ] = None  # fmt: skip
    system: Annotated[
        str | None, _prompt_option("--system", "-s", metavar="TEXT", help="A system message before the prompt.")
    ] = None
    raw: Annotated[bool, _prompt_option("--raw", help="No chat template: go on where this text ends.")] = False
    special: Annotated[bool, _prompt_option("--special", help="With --raw: recognise special tokens.")] = False

    def questions(self, params: SamplingParams) -> list[Question]:
        """What is asked: one prompt, or all of a file."""
        if self.special and not self.raw:
            raise typer.BadParameter("--special goes with --raw: a chat message is always text")
        if self.raw and self.system is not None:
            raise typer.BadParameter("--system goes into the chat template, which --raw leaves out")
        argument_text(self.system or "", "--system")
        if self.prompts is None:
            return [Question("", self.read(), params)]
        if self.prompt is not None or self.file is not None:
            raise typer.BadParameter("--prompts brings all prompts: leave out PROMPT and --file")
        return read_questions(self.prompts, params)

    def read(self) -> str:
        """The text of the prompt. As a message, a file has no final newline either; raw, it is used as it is."""
        text = read_text(self.prompt, self.file, MISSING)
        if self.raw:
            return text
        text = text if self.file is None else text.removesuffix("\n")
        if not text:
            raise typer.BadParameter(MISSING)
        return text

    def messages(self, question: Question) -> list[Any]:
        """The conversation that the template gets."""
        if self.system is None:
            return question.messages()
        if not isinstance(question.prompt, str):
            raise InvalidRequestError("messages bring their own system message: leave out --system", "messages")
        return [{"role": "system", "content": self.system}, *question.messages()]

    def encode(self, llm: "LLM", question: Question) -> list[int]:
        """What the model reads: the text itself, or the conversation that the template makes of it."""
        if self.raw:
            return llm.tokenize(question.text(), parse_special=self.special)
        return llm.tokenize_chat(self.messages(question))

    def shown(self, llm: "LLM", question: Question) -> str:
        """The same, for people."""
        return question.text() if self.raw else llm.apply_chat_template(self.messages(question))


def read_questions(path: Path, params: SamplingParams) -> list[Question]:
    """The prompts of a file, blank lines left out; `-` is standard input."""
    text = read_stdin() if str(path) == "-" else read_file(path)
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise typer.BadParameter(f"--prompts: there is no prompt in {'standard input' if str(path) == '-' else path}")
    if path.suffix.lower() in JSON_SUFFIXES or JSON_LINE.match(lines[0][1]):
        return [_from_json(f"line {number}", line, params) for number, line in lines]
    return [Question(f"line {number}", line, params) for number, line in lines]


def _from_json(origin: str, line: str, params: SamplingParams) -> Question:
    """`{"prompt" or "messages": ..., SCHEDULING_FIELDS, fields of SamplingParams}`; others are refused by name."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{origin} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"{origin} is not a JSON object")
    asked = [fields.pop(name) for name in ("prompt", "messages") if name in fields]
    scheduling = {name: fields.pop(name) for name in SCHEDULING_FIELDS if name in fields}
    unknown = fields.keys() - SAMPLING_FIELDS
    if unknown:
        raise InvalidRequestError(f"{origin}: unknown field {min(unknown)!r}", min(unknown))
    if len(asked) != 1 or not asked[0] or not isinstance(asked[0], (str, list)):
        raise InvalidRequestError(f'{origin} must have either a "prompt" (text) or "messages" (a list)', "prompt")
    if isinstance(fields.get("logit_bias"), dict):  # JSON has no numbers for keys
        fields["logit_bias"] = {_token(key): value for key, value in fields["logit_bias"].items()}
    try:
        return Question(origin, asked[0], replace(params, **fields), scheduling)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{origin}: {error}", error.field) from None


def _token(key: str) -> int | str:
    return int(key) if re.fullmatch("[0-9]{1,9}", key) else key


def decode(data: bytes, origin: str) -> str:
    """Bytes from outside as text; what is not UTF-8 is refused with its place."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{origin} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02X}"
        ) from None


def argument_text(given: str, origin: str) -> str:
    """Text from the command line, where Python hides bytes that are not UTF-8 in surrogates."""
    return decode(given.encode(errors="surrogateescape"), origin)


def read_file(path: Path, longest: int = LONGEST_TEXT) -> str:
    """A text file, byte for byte."""
    try:
        with path.open("rb") as file:
            return decode(_read(file, str(path), longest), str(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InvalidRequestError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def read_stdin() -> str:
    """All of standard input, without the one newline that `echo` and editors put at the end."""
    return decode(_read(sys.stdin.buffer, "standard input", LONGEST_TEXT), "standard input").removesuffix("\n")


def stdin_lines() -> Iterator[tuple[int, bytes]]:
    """Each line of standard input with its number, as soon as it is there."""
    number = 0
    while line := sys.stdin.buffer.readline(LONGEST_TEXT + 1):
        number += 1
        yield number, _bounded(line, f"line {number}", LONGEST_TEXT)


def _read(file: IO[bytes], origin: str, longest: int) -> bytes:
    return _bounded(file.read(longest + 1), origin, longest)


def _bounded(data: bytes, origin: str, longest: int) -> bytes:
    if len(data) > longest:
        raise InvalidRequestError(f"{origin} is too long: at most {longest >> 20} MiB are read")
    return data


def read_template(path: Path) -> str:
    """A chat template; an empty one is a mistake, not a wish for the model's own."""
    text = read_file(path, LONGEST_TEMPLATE)
    if not text.strip():
        raise InvalidRequestError(
            f"the chat template {path} is empty: leave out --chat-template to use the model's own"
        )
    return text


def read_text(given: str | None, file: Path | None, missing: str) -> str:
    """The text that a command works on: given, in a file (`-` is standard input), or on standard input."""
    if given is not None and file is not None:
        raise typer.BadParameter("the text is given twice: as an argument and with --file")
    if file is not None and str(file) != "-":
        return read_file(file)
    if given is not None and given != "-":
        return argument_text(given, "the text")
    if file is None and given is None and sys.stdin.isatty():
        raise typer.BadParameter(missing)
    return read_stdin()
