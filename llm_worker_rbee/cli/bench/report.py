"""`llm-worker-rbee bench report`: saved runs as one HTML page."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ...bench import baseline
from ...bench.report import RunFile, render
from ...bench.results import write_atomically
from ...errors import InvalidRequestError
from ...progress import step_progress
from ..terminal import note
from .common import quantity


def report(
    results: Annotated[list[str], typer.Argument(metavar="RESULTS", help="Files that --save wrote, or baselines.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.")
    ] = Path("report.html"),
    title: Annotated[
        str | None, typer.Option("--title", metavar="TEXT", show_default="what was measured", help="The page's title.")
    ] = None,
) -> None:  # fmt: skip
    """Write one HTML page with tables and plots of saved runs.

    The page needs no other file and no network: send it as it is.

    Several runs of one kind make a history and a comparison. Plots need matplotlib (the extra `bench`).

    \b
    Examples:
      llm-worker-rbee bench report micro.json e2e.json -o report.html
      llm-worker-rbee bench report before after --title "Faster attention"
    """
    if not output.name or os.path.isdir(output):
        raise InvalidRequestError(f"cannot write {output}: it is a folder, give the name of a file", "output")
    files = [RunFile(Path(name).name, baseline.load(name)) for name in results]
    with step_progress() as progress:
        page = render(files, title, progress)
    write_atomically(output, page.encode(errors="replace"))
    note(f"saved {output} ({quantity(output.stat().st_size, 'B')})")
