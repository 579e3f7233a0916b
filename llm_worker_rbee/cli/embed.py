"""`llm-worker-rbee embed`: the embeddings of the lines of a file, as an array or as JSON Lines; and `llm-worker-rbee
rerank`: the lines of a file in the order of their scores for a query.

Embeddings are read, computed and written in chunks, so that the size of the file does not matter. The output has
another name until it is complete: a failed or stopped run leaves none.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import typer
from numpy.typing import NDArray

from ..embedder import Embedder, RankResult, Reranker
from ..errors import InvalidRequestError, counted
from ..progress import Advance, request_progress
from ..weights.hub import DEFAULT_EMBEDDING_MODEL
from .commands import STREAM, EmbedCommand, RerankCommand, TextFileFlags
from .loading import option_names_in_errors, set_up, shown_loading
from .terminal import Status, argument_text, cell, columns, decode, note, numbered_lines, print_json, require_writable

JSON_SUFFIXES = {".jsonl", ".ndjson"}
MAX_CHUNK_TEXTS, MAX_CHUNK_CHARS = 4_096, 8 << 20
MAX_SHOWN_CHARS = 100  # of a ranked text in the table
MAX_RANKED_TEXTS = 100_000
BOM = b"\xef\xbb\xbf"


class TextLine(NamedTuple):
    """A text, the number of its line, and its id, if it has one."""

    number: int
    text: str
    id: Any = None


def _validate_texts(texts: TextFileFlags) -> None:
    if texts.input_format not in ("auto", "lines", "jsonl"):
        raise typer.BadParameter(f"--input-format {texts.input_format}: use one of auto, lines, jsonl")
    if texts.file == STREAM and sys.stdin.isatty():
        raise typer.BadParameter("there is no text: give the name of a file, or texts on standard input")


def _is_json(texts: TextFileFlags) -> bool:
    return texts.input_format == "jsonl" or (texts.input_format == "auto" and texts.file.suffix in JSON_SUFFIXES)


def _read_texts(texts: TextFileFlags) -> Iterator[TextLine]:
    """Yield the texts. Each line is one, an empty line too; of JSON Lines, empty ones are left out."""
    with _opened(texts) as file:
        for number, line in numbered_lines(file):
            text = decode(line.removeprefix(BOM) if number == 1 else line, f"line {number}").rstrip("\r\n")
            if not _is_json(texts):
                yield TextLine(number, text)
            elif text.strip():
                yield _parse_text(texts, number, text)


def _count_texts(texts: TextFileFlags) -> int:
    """Return the number of texts for the progress bar; 0 where it is not known before the end."""
    if texts.file == STREAM or not texts.file.is_file():
        return 0
    with _opened(texts) as file:
        return sum(not _is_json(texts) or bool(line.strip()) for line in file)


@contextmanager
def _opened(texts: TextFileFlags) -> Iterator[IO[bytes]]:
    if texts.file == STREAM:
        yield sys.stdin.buffer
        return
    try:
        file = texts.file.open("rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequestError(f"cannot read {texts.file}: {reason}") from None
    with file:
        yield file


def _parse_text(texts: TextFileFlags, number: int, line: str) -> TextLine:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"line {number} is not JSON: {error}") from None
    if isinstance(value, str):
        return TextLine(number, value)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"line {number} is neither a JSON object nor a JSON string")
    if not isinstance(value.get(texts.field), str):
        raise InvalidRequestError(f"line {number} has no text in the field {texts.field!r}: --field names another")
    return TextLine(number, value[texts.field], value.get("id"))


def _validate(options: EmbedCommand) -> None:
    """Raise before anything is loaded."""
    if options.dtype not in ("float32", "float16"):
        raise typer.BadParameter(f"--dtype {options.dtype}: use float32 or float16")
    if options.prompt is not None and options.prompt_name is not None:
        raise typer.BadParameter("--prompt and --prompt-name exclude each other: give one of them")
    argument_text(options.prompt or "", "--prompt")
    if options.output == STREAM:
        return
    if options.output.suffix not in {".npy", *JSON_SUFFIXES}:
        raise typer.BadParameter(f"--output {options.output}: give a name that ends in .npy or .jsonl, or -")
    require_writable(options.output, options.force)


def embed(options: EmbedCommand) -> None:
    """Embed the texts chunk by chunk."""
    texts, computing = options.texts, options.computing
    _validate_texts(texts)
    _validate(options)
    if texts.file.exists() and options.output.exists() and options.output.samefile(texts.file):
        raise InvalidRequestError(f"{options.output} is the input itself: give another name", "output")
    total = _count_texts(texts)
    set_up(computing)
    name = computing.model or DEFAULT_EMBEDDING_MODEL
    with shown_loading(name, Status(), max_step_tokens="--batch-tokens") as progress:
        embedder = Embedder(name, progress=progress, **computing.arguments())
    for text in embedder.notes:
        note(text)
    width = options.dimensions or embedder.dimension
    start = time.perf_counter()
    with _written(options, width) as writer:
        shown = not options.quiet and (None if options.output == STREAM else True)
        with request_progress(total, shown, last_line=False, what="embedding", noun="texts") as advance:
            for chunk in _chunks(_read_texts(texts)):
                writer.write(chunk, _embed_chunk(embedder, chunk, options, advance))
    if not options.quiet:
        note(_totals(embedder, time.perf_counter() - start, width))
    if options.output != STREAM:
        print(options.output)


def _embed_chunk(
    embedder: Embedder, chunk: list[TextLine], options: EmbedCommand, advance: Advance
) -> NDArray[np.float32]:
    done = num_tokens = 0

    def report(finished: int, total: int, tokens: int) -> None:
        nonlocal done, num_tokens
        advance(requests=finished - done, tokens=tokens - num_tokens)
        done, num_tokens = finished, tokens

    def encode(lines: list[TextLine]) -> Any:
        prompts = {"prompt": options.prompt, "prompt_name": options.prompt_name}
        return embedder.encode([line.text for line in lines], truncate=options.texts.truncate, **prompts)

    with option_names_in_errors():
        try:
            ids = encode(chunk)
        except InvalidRequestError:
            for line in chunk:
                with lines_in_errors([line]):
                    encode([line])
            raise
        return embedder.embed(ids, dimensions=options.dimensions, normalize=options.normalize, progress=report)


@contextmanager
def lines_in_errors(lines: list[TextLine]) -> Iterator[None]:
    """Name the line of the file, and the option, in an error about an input."""
    try:
        yield
    except InvalidRequestError as error:
        message = str(error).replace("set truncate", "give --truncate")
        for what in ("input", "documents"):
            for i, line in enumerate(lines):
                message = message.replace(f"{what} {i} has", f"line {line.number} has")
        error.args = (message, *error.args[1:])
        raise


def _chunks(lines: Iterable[TextLine]) -> Iterator[list[TextLine]]:
    chunk: list[TextLine] = []
    size = 0
    for line in lines:
        chunk.append(line)
        size += len(line.text)
        if len(chunk) == MAX_CHUNK_TEXTS or size >= MAX_CHUNK_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Writer(Protocol):
    def write(self, lines: list[TextLine], rows: NDArray[np.float32]) -> None: ...


class _ArrayWriter:
    """An array that grows by rows. Its header, which has the shape, is written again at the end."""

    def __init__(self, file: IO[bytes], width: int, dtype: str) -> None:
        self._file, self._width, self._dtype, self._rows = file, width, np.dtype(dtype).newbyteorder("<"), 0
        self._write_header()
        self._start = file.tell()

    def write(self, lines: list[TextLine], rows: NDArray[np.float32]) -> None:
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(rows, self._dtype)
        if not np.isfinite(values).all():
            raise InvalidRequestError(f"a value is too large for {self._dtype.name}: write float32, or --normalize")
        self._file.write(values.tobytes())
        self._rows += len(rows)

    def finish(self) -> None:
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._start, "the header has grown over the first row"

    def _write_header(self) -> None:
        shape = (self._rows, self._width)
        described = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, described)


class _LineWriter:
    """JSON Lines; values have as many digits as float32 needs."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._rows = file, 0

    def write(self, lines: list[TextLine], rows: NDArray[np.float32]) -> None:
        for line, row in zip(lines, rows, strict=True):
            name = "" if line.id is None else f'"id": {json.dumps(line.id, ensure_ascii=False)}, '
            values = ", ".join(map(str, row))
            self._file.write(f'{{"index": {self._rows}, {name}"embedding": [{values}]}}\n'.encode())
            self._rows += 1
        self._file.flush()


@contextmanager
def _written(options: EmbedCommand, width: int) -> Iterator[_Writer]:
    """Yield the writer of the output; the file gets its name at the end of the block."""
    if options.output == STREAM:
        yield _LineWriter(sys.stdout.buffer)
        return
    partial = options.output.with_name(options.output.name + ".part")
    try:
        with partial.open("wb") as file:
            if options.output.suffix == ".npy":
                array = _ArrayWriter(file, width, options.dtype)
                yield array
                array.finish()
            else:
                yield _LineWriter(file)
        os.replace(partial, options.output)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def _totals(embedder: Embedder, seconds: float, width: int) -> str:
    """Return `1,000 texts · 98,012 tokens · 12.30 s · 81.3 texts/s · 7,968.5 tokens/s · 384 values each`."""
    texts, tokens = embedder.engine.num_sequences, embedder.engine.num_tokens
    rates = f"{texts / seconds:,.1f} texts/s · {tokens / seconds:,.1f} tokens/s"
    return f"{counted(texts, 'text')} · {counted(tokens, 'token')} · {seconds:.2f} s · {rates} · {width} values each"


def rerank(options: RerankCommand) -> None:
    """Score all texts, and print them in order."""
    texts, computing, query = options.texts, options.computing, options.query
    argument_text(query, "--query")
    if computing.model is None:
        raise typer.BadParameter("no reranker is built in: name one with --model, such as a GGUF of bge-reranker-v2-m3")
    _validate_texts(texts)
    lines = _read_ranked(texts)
    set_up(computing)
    with shown_loading(computing.model, Status(), max_step_tokens="--batch-tokens") as progress:
        reranker = Reranker(computing.model, progress=progress, **computing.arguments())
    for text in reranker.notes:
        note(text)
    with lines_in_errors(lines):
        ranking = reranker.rank(query, [line.text for line in lines], top_n=options.top_n, truncate=texts.truncate)
    if options.as_json:
        results = [_result_json(result, lines[result.index]) for result in ranking]
        tokens = reranker.engine.num_tokens
        print_json({"model": computing.model, "query": query, "results": results, "tokens": tokens})
        return
    rows = [(f"{r.score:.4f}", str(lines[r.index].number), _shorten(r.document)) for r in ranking]
    print("\n".join(columns([("SCORE", "LINE", "TEXT"), *rows], right=[0, 1])))


def _read_ranked(texts: TextFileFlags) -> list[TextLine]:
    """Return the texts without empty lines."""
    lines: list[TextLine] = []
    for line in _read_texts(texts):
        if line.text.strip():
            lines.append(line)
        if len(lines) > MAX_RANKED_TEXTS:
            raise InvalidRequestError(f"{texts.file} has more than {counted(MAX_RANKED_TEXTS, 'text')}: rank fewer")
    if not lines:
        raise InvalidRequestError(f"there is no text in {texts.file}")
    return lines


def _result_json(result: RankResult, line: TextLine) -> dict[str, object]:
    named = {} if line.id is None else {"id": line.id}
    return {"index": result.index, **named, "line": line.number, "score": result.score, "document": result.document}


def _shorten(text: str) -> str:
    shown = cell(text)
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[: MAX_SHOWN_CHARS - 3] + "..."
