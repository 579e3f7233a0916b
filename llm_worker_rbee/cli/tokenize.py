"""`llm-worker-rbee tokenize`: the tokens of a text, without loading the weights."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InvalidRequestError
from ..llm import open_tokenizer
from ..progress import transfer_progress
from ..tokenizer import Tokenizer
from ..weights import hub, open_checkpoint
from .options import MODEL_HELP
from .terminal import columns, decode, print_json, read_text, stdin_lines

NO_TEXT = "there is no text: give one with --text TEXT, with --file FILE, or on standard input"
JSON_NAMES = {dict: "an object", list: "an array", int: "a number", float: "a number", bool: "a boolean"}


def tokenize(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    text: Annotated[str | None, typer.Option("--text", "-t", metavar="TEXT", help="The text to tokenize.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the text from a file, byte for byte.")
    ] = None,
    special: Annotated[bool, typer.Option("--special", help="Recognise special tokens in the text.")] = False,
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Add no special tokens before or after the text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: tokens, pieces.")] = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Read one JSON string per line; print a JSON array of ids for each.")
    ] = False,
) -> None:
    """Show the tokens of a text: ids and pieces.

    Without --text and --file the text comes from standard input, without one final newline.

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
    content = None if jsonl else read_text(text, file, NO_TEXT)
    with transfer_progress() as progress:
        path = hub.locate_model(model, progress=progress)
    tokenizer = open_tokenizer(open_checkpoint(path, weights=False))
    if content is None:
        _tokenize_lines(tokenizer, special, no_bos)
        return
    ids = tokenizer.encode(content, add_special=not no_bos, parse_special=special)
    if as_json:
        print_json({"tokens": ids, "pieces": [tokenizer.piece(token) for token in ids]})
    else:
        for line in columns([(str(token), _visible_token(tokenizer, token)) for token in ids], right=[0]):
            print(line)


def _visible_token(tokenizer: Tokenizer, token: int) -> str:
    """Return a token with its white space visible: as text, or as bytes where it is part of a character."""
    raw = tokenizer.token_bytes(token)
    try:
        return repr(raw.decode())
    except UnicodeDecodeError:
        return repr(raw)


def _tokenize_lines(tokenizer: Tokenizer, special: bool, no_bos: bool) -> None:
    for number, line in stdin_lines():
        try:
            ids = tokenizer.encode(_parse_string(line), add_special=not no_bos, parse_special=special)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"line {number}: {error}") from None
        print(json.dumps(ids), flush=True)


def _parse_string(line: bytes) -> str:
    try:
        value = json.loads(decode(line, "it"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"not a JSON string: {error}") from None
    if not isinstance(value, str):
        raise InvalidRequestError(f"not a JSON string, but {JSON_NAMES.get(type(value), 'null')}")
    return value
