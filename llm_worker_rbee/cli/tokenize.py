"""`llm-worker-rbee tokenize`: what a tokenizer makes of a text, whatever the architecture of the model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidRequestError
from ..progress import transfer_progress
from .options import MODEL_HELP
from .prompt_input import decode, read_text, stdin_lines
from .terminal import columns, print_json

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

MISSING = "there is no text: give one with --text TEXT, with --file FILE, or on standard input"


def tokenize(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    text: Annotated[str | None, typer.Option("--text", "-t", metavar="TEXT", help="The text.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Take the text from a file, byte for byte.")
    ] = None,
    special: Annotated[bool, typer.Option("--special", help="Recognise special tokens in the text.")] = False,
    no_bos: Annotated[
        bool, typer.Option("--no-bos", help="Add nothing before or after the text, whatever the file says.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: tokens, pieces.")] = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Read one JSON string a line, print the JSON array of its ids for each.")
    ] = False,
) -> None:
    """Show the tokens of a text: ids and pieces.

    Without --text and --file the text comes from standard input, less one final newline.

    \b
    Examples:
      llm-worker-rbee tokenize --text "Hello, world"
      llm-worker-rbee tokenize model.gguf --file notes.txt --json
      echo '"one"' | llm-worker-rbee tokenize model.gguf --jsonl
    """
    if jsonl and (text is not None or file is not None or as_json):
        raise typer.BadParameter(
            "--jsonl reads standard input and prints JSON lines: leave out --text, --file and --json"
        )
    given = None if jsonl else read_text(text, file, MISSING)
    from ..llm import open_tokenizer
    from ..weights import open_checkpoint
    from ..weights.hub import locate_model

    with transfer_progress() as progress:
        path = locate_model(model, progress=progress)
    tokenizer = open_tokenizer(open_checkpoint(path, weights=False))
    if given is None:
        _each_line(tokenizer, special, no_bos)
        return
    ids = tokenizer.encode(given, add_special=not no_bos, parse_special=special)
    if as_json:
        print_json({"tokens": ids, "pieces": [tokenizer.piece(token) for token in ids]})
    else:
        print(
            "".join(
                f"{line}\n" for line in columns([(str(token), _shown(tokenizer, token)) for token in ids], right=[0])
            ),
            end="",
        )


def _shown(tokenizer: "Tokenizer", token: int) -> str:
    """A token with its white space visible: as text, or as bytes where it is a part of a character."""
    raw = tokenizer.token_bytes(token)
    try:
        return repr(raw.decode())
    except UnicodeDecodeError:
        return repr(raw)


def _each_line(tokenizer: "Tokenizer", special: bool, no_bos: bool) -> None:
    for number, line in stdin_lines():
        try:
            ids = tokenizer.encode(_string(line), add_special=not no_bos, parse_special=special)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"line {number}: {error}") from None
        print(json.dumps(ids), flush=True)


def _string(line: bytes) -> str:
    try:
        value = json.loads(decode(line, "it"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"not a JSON string: {error}") from None
    if not isinstance(value, str):
        raise InvalidRequestError(f"not a JSON string, but {_JSON_NAMES.get(type(value), 'null')}")
    return value


_JSON_NAMES = {dict: "an object", list: "an array", int: "a number", float: "a number", bool: "a boolean"}
