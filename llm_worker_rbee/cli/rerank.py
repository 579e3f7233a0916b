"""`llm-worker-rbee rerank`: the lines of a file in the order of their scores for a query."""

from typing import Annotated

import typer

from ..embedder import RankResult, Reranker
from ..errors import InvalidRequestError, counted
from .embed import TextFileFlags, TextLine, lines_in_errors
from .options import PoolingFlags, gather, shown_loading
from .terminal import Status, argument_text, cell, columns, note, print_json

MAX_TEXT_CHARS = 100  # of a document in the table
MAX_DOCUMENTS = 100_000


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
      llm-worker-rbee rerank passages.txt --query "Who wrote it?" -m bge-reranker-v2-m3.gguf
      llm-worker-rbee rerank found.jsonl --query "Who wrote it?" -m folder --top-n 3 --json
    """
    argument_text(query, "--query")
    if computing.model is None:
        raise typer.BadParameter("no reranker is built in: name one with --model, such as a GGUF of bge-reranker-v2-m3")
    texts.validate()
    lines = _read(texts)
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


def _read(texts: TextFileFlags) -> list[TextLine]:
    """Return the texts without empty lines."""
    lines: list[TextLine] = []
    for line in texts.read():
        if line.text.strip():
            lines.append(line)
        if len(lines) > MAX_DOCUMENTS:
            raise InvalidRequestError(f"{texts.file} has more than {counted(MAX_DOCUMENTS, 'text')}: rank fewer")
    if not lines:
        raise InvalidRequestError(f"there is no text in {texts.file}")
    return lines


def _result_json(result: RankResult, line: TextLine) -> dict[str, object]:
    named = {} if line.id is None else {"id": line.id}
    return {
        "index": result.index,
        **named,
        "line": line.number,
        "score": result.score,
        "document": result.document,
    }


def _shorten(text: str) -> str:
    shown = cell(text)
    return shown if len(shown) <= MAX_TEXT_CHARS else shown[: MAX_TEXT_CHARS - 3] + "..."
