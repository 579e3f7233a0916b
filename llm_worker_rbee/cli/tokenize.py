"""`llm-worker-rbee tokenize`: the tokens of a text, without loading the weights."""

import json

import typer

from ..errors import InvalidRequestError
from ..progress import transfer_progress
from ..text_model import open_tokenizer
from ..tokenizer import Tokenizer
from ..weights import hub, open_checkpoint
from .commands import TokenizeCommand
from .terminal import columns, decode, print_json, read_text, stdin_lines

NO_TEXT = "there is no text: give one with --text TEXT, with --file FILE, or on standard input"
JSON_NAMES = {dict: "an object", list: "an array", int: "a number", float: "a number", bool: "a boolean"}


def tokenize(options: TokenizeCommand) -> None:
    """Tokenize the text, or each line of standard input."""
    if options.jsonl and (options.text is not None or options.file is not None or options.as_json):
        raise typer.BadParameter(
            "--jsonl reads standard input and prints JSON lines: leave out --text, --file and --json"
        )
    content = None if options.jsonl else read_text(options.text, options.file, NO_TEXT)
    with transfer_progress() as progress:
        path = hub.locate_model(options.model, progress=progress)
    tokenizer = open_tokenizer(open_checkpoint(path, weights=False))
    if content is None:
        _tokenize_lines(tokenizer, options.special, options.no_bos)
        return
    ids = tokenizer.encode(content, add_special=not options.no_bos, parse_special=options.special)
    if options.as_json:
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
