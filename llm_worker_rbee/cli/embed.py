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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, Protocol

import numpy as np
import typer
from numpy.typing import NDArray

from ..embedder import Embedder, RankResult, Reranker
from ..errors import InvalidRequestError, counted
from ..progress import Advance, request_progress
from ..weights.hub import DEFAULT_EMBEDDING_MODEL
from .options import PoolingFlags, gather, option_fields, option_names_in_errors, shown_loading
from .terminal import (
    Status,
    argument_text,
    cell,
    columns,
    decode,
    note,
    numbered_lines,
    print_json,
    require_writable,
)

JSON_SUFFIXES = {".jsonl", ".ndjson"}
MAX_CHUNK_TEXTS, MAX_CHUNK_CHARS = 4_096, 8 << 20
MAX_SHOWN_CHARS = 100  # of a ranked text in the table
MAX_RANKED_TEXTS = 100_000
BOM = b"\xef\xbb\xbf"
STREAM = Path("-")

_input, _output = option_fields("Input"), option_fields("Output")


class TextLine(NamedTuple):
    """A text, the number of its line, and its id, if it has one."""

    number: int
    text: str
    id: Any = None


@dataclass(frozen=True, kw_only=True)
class TextFileFlags:
    """A file with a text on each line."""

    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A text per line, or JSON Lines; - is standard input.")
    ] = STREAM
    input_format: str = _input(
        "auto", "auto|lines|jsonl", "What a line is: a text, or JSON. auto: JSON if the name ends in .jsonl."
    )
    field: str = _input("text", "NAME", "The field of a JSON object that holds the text.")
    truncate: bool = _input(False, None, "Cut a text that is too long at its end; otherwise it is an error.")

    def validate(self) -> None:
        if self.input_format not in ("auto", "lines", "jsonl"):
            raise typer.BadParameter(f"--input-format {self.input_format}: use one of auto, lines, jsonl")
        if self.file == STREAM and sys.stdin.isatty():
            raise typer.BadParameter("there is no text: give the name of a file, or texts on standard input")

    @property
    def is_json(self) -> bool:
        return self.input_format == "jsonl" or (self.input_format == "auto" and self.file.suffix in JSON_SUFFIXES)

    def read(self) -> Iterator[TextLine]:
        """Yield the texts. Each line is one, an empty line too; of JSON Lines, empty ones are left out."""
        with self._opened() as file:
            for number, line in numbered_lines(file):
                text = decode(line.removeprefix(BOM) if number == 1 else line, f"line {number}").rstrip("\r\n")
                if not self.is_json:
                    yield TextLine(number, text)
                elif text.strip():
                    yield self._parse(number, text)

    def count(self) -> int:
        """Return the number of texts for the progress bar; 0 where it is not known before the end."""
        if self.file == STREAM or not self.file.is_file():
            return 0
        with self._opened() as file:
            return sum(not self.is_json or bool(line.strip()) for line in file)

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        if self.file == STREAM:
            yield sys.stdin.buffer
            return
        try:
            file = self.file.open("rb")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidRequestError(f"cannot read {self.file}: {reason}") from None
        with file:
            yield file

    def _parse(self, number: int, line: str) -> TextLine:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"line {number} is not JSON: {error}") from None
        if isinstance(value, str):
            return TextLine(number, value)
        if not isinstance(value, dict):
            raise InvalidRequestError(f"line {number} is neither a JSON object nor a JSON string")
        if not isinstance(value.get(self.field), str):
            raise InvalidRequestError(f"line {number} has no text in the field {self.field!r}: --field names another")
        return TextLine(number, value[self.field], value.get("id"))


@dataclass(frozen=True, kw_only=True)
class EmbedFlags:
    """The prompt before a text, and the form of its embedding."""

    output: Path = _output(..., "OUT", "The file to write: .npy or .jsonl; - prints JSON Lines.", "-o")
    prompt: str | None = _input(None, "TEXT", "Text before each text.")
    prompt_name: str | None = _input(None, "NAME", "One of the model's own prompts; inspect lists them.")
    dimensions: int | None = _output(
        None, "N", "Keep the first N values of each embedding (Matryoshka).", min=1, show_default="all"
    )
    normalize: bool | None = _output(
        None,
        None,
        "Make the length of each embedding 1, or leave it.",
        "--normalize/--no-normalize",
        show_default="as the model says",
    )
    dtype: str = _output("float32", "float32|float16", "The type of the values in a .npy file.")
    force: bool = _output(False, None, "Replace OUT if it exists.")
    quiet: bool = _output(False, None, "Print neither progress nor statistics.", "-q")

    def validate(self) -> None:
        """Raise before anything is loaded."""
        if self.dtype not in ("float32", "float16"):
            raise typer.BadParameter(f"--dtype {self.dtype}: use float32 or float16")
        if self.prompt is not None and self.prompt_name is not None:
            raise typer.BadParameter("--prompt and --prompt-name exclude each other: give one of them")
        argument_text(self.prompt or "", "--prompt")
        if self.output == STREAM:
            return
        if self.output.suffix not in {".npy", *JSON_SUFFIXES}:
            raise typer.BadParameter(f"--output {self.output}: give a name that ends in .npy or .jsonl, or -")
        require_writable(self.output, self.force)

    @property
    def is_array(self) -> bool:
        return self.output.suffix == ".npy"


@gather(texts=TextFileFlags, computing=PoolingFlags, options=EmbedFlags)
def embed(texts: TextFileFlags, computing: PoolingFlags, options: EmbedFlags) -> None:
    """Write the embeddings of the texts of a file.

    Row n of a .npy file is the embedding of text n; a line of JSON Lines has index, id (if the text has one) and
    embedding. A text that is too long is an error that names its line, unless --truncate is given.

    \b
    Examples:
      llm-worker-rbee embed sentences.txt --output vectors.npy
      llm-worker-rbee embed talks.jsonl --field body --truncate -o vectors.jsonl
      llm-worker-rbee embed - -o - -m model.gguf --prompt-name query < queries.txt
      llm-worker-rbee embed notes.txt -o a.npy --dimensions 128 --dtype float16
    """
    texts.validate()
    options.validate()
    if texts.file.exists() and options.output.exists() and options.output.samefile(texts.file):
        raise InvalidRequestError(f"{options.output} is the input itself: give another name", "output")
    total = texts.count()
    computing.set_up()
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
            for chunk in _chunks(texts.read()):
                writer.write(chunk, _embed_chunk(embedder, chunk, texts, options, advance))
    if not options.quiet:
        note(_totals(embedder, time.perf_counter() - start, width))
    if options.output != STREAM:
        print(options.output)


def _embed_chunk(
    embedder: Embedder, chunk: list[TextLine], texts: TextFileFlags, options: EmbedFlags, advance: Advance
) -> NDArray[np.float32]:
    done = num_tokens = 0

    def report(finished: int, total: int, tokens: int) -> None:
        nonlocal done, num_tokens
        advance(requests=finished - done, tokens=tokens - num_tokens)
        done, num_tokens = finished, tokens

    def encode(lines: list[TextLine]) -> Any:
        prompts = {"prompt": options.prompt, "prompt_name": options.prompt_name}
        return embedder.encode([line.text for line in lines], truncate=texts.truncate, **prompts)

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
def _written(options: EmbedFlags, width: int) -> Iterator[_Writer]:
    """Yield the writer of the output; the file gets its name at the end of the block."""
    if options.output == STREAM:
        yield _LineWriter(sys.stdout.buffer)
        return
    partial = options.output.with_name(options.output.name + ".part")
    try:
        with partial.open("wb") as file:
            if options.is_array:
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


@gather(texts=TextFileFlags, computing=PoolingFlags)
def rerank(
    texts: TextFileFlags,
    computing: PoolingFlags,
    query: Annotated[str, typer.Option("--query", metavar="TEXT", help="What the texts should answer.")],
    top_n: Annotated[
        int | None, typer.Option("--top-n", metavar="N", min=1, help="Show the best N only.", show_default="all")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: model, query, results, tokens.")
    ] = False,
) -> None:
    """Order the texts of a file by how well they answer a query.

    A reranker reads query and text together, so it is better than the similarity of embeddings, and slower.

    \b
    Examples:
      llm-worker-rbee rerank passages.txt --query "Who wrote it?" -m reranker.gguf
      llm-worker-rbee rerank found.jsonl --query "Who?" -m folder --top-n 3 --json
    """
    argument_text(query, "--query")
    if computing.model is None:
        raise typer.BadParameter("no reranker is built in: name one with --model, such as a GGUF of bge-reranker-v2-m3")
    texts.validate()
    lines = _read_ranked(texts)
    computing.set_up()
    with shown_loading(computing.model, Status(), max_step_tokens="--batch-tokens") as progress:
        reranker = Reranker(computing.model, progress=progress, **computing.arguments())
    for text in reranker.notes:
        note(text)
    with lines_in_errors(lines):
        ranking = reranker.rank(query, [line.text for line in lines], top_n=top_n, truncate=texts.truncate)
    if as_json:
        results = [_result_json(result, lines[result.index]) for result in ranking]
        tokens = reranker.engine.num_tokens
        print_json({"model": computing.model, "query": query, "results": results, "tokens": tokens})
        return
    rows = [(f"{r.score:.4f}", str(lines[r.index].number), _shorten(r.document)) for r in ranking]
    print("\n".join(columns([("SCORE", "LINE", "TEXT"), *rows], right=[0, 1])))


def _read_ranked(texts: TextFileFlags) -> list[TextLine]:
    """Return the texts without empty lines."""
    lines: list[TextLine] = []
    for line in texts.read():
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
