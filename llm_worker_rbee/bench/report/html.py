"""HTML by small functions: tables, bars, tiles, figures, a whole page that needs no other file.

Text is escaped unless it is `Html`, which only these functions make. The page runs no script and loads nothing: its
own policy forbids both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

STYLE = Path(__file__).with_name("report.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
TONES = {
    "improved": "good", "regressed": "bad", "within noise": "calm", "confirmed": "good", "refuted": "bad",
    "critical": "bad", "moderate": "warn", "minor": "calm",
}  # fmt: skip
CONTROL = {i: 0xFFFD for i in range(32) if chr(i) not in "\t\n"}  # what HTML does not allow


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def html(text: object) -> Html:
    """The HTML that shows a text; HTML stays as it is."""
    return text if isinstance(text, Html) else Html(escape(str(text).translate(CONTROL)))


def joined(parts: Iterable[object], between: str = "\n") -> Html:
    """Several pieces one after the other."""
    return Html(between.join(html(part) for part in parts))


class Table(NamedTuple):
    """What a table holds: the first cell of a row heads it; `numbers` are columns that end under each other."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    numbers: Sequence[int] = ()
    first: frozenset[int] = frozenset()  # rows that begin a group
    wide: frozenset[int] = frozenset()  # columns of long text, which may wrap


def table(table: Table) -> Html:
    """In a box of its own, which scrolls where the page is too narrow."""
    kinds = ["num" if i in table.numbers else "wrap" if i in table.wide else "" for i in range(len(table.head))]
    classes = [f' class="{kind}"' if kind else "" for kind in kinds]
    head = "".join(f'<th scope="col"{c}>{html(cell)}</th>' for c, cell in zip(classes, table.head, strict=True))
    body = []
    for number, row in enumerate(table.rows):
        cells = "".join(f"<td{c}>{html(cell)}</td>" for c, cell in zip(classes[1:], row[1:], strict=True))
        start = ' class="first"' if number in table.first else ""
        body.append(f'<tr{start}><th scope="row" title="{html(row[0])}">{html(row[0])}</th>{cells}</tr>')
    label = html(table.caption)
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table><caption>{label}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody></table></div>"
    )


def bar(part: float, text: str, tone: str = "") -> Html:
    """A part of the whole as a bar, with its figure."""
    width = min(max(part, 0.0), 1.0)
    mark = f' class="{html(tone)}"' if tone else ""
    return Html(f'<span class="bar" aria-hidden="true"><i{mark} style="width:{width:.1%}"></i></span>{html(text)}')


def badge(text: str) -> Html:
    """A verdict or a class, in its tone."""
    return Html(f'<span class="badge {TONES.get(text, "calm")}">{html(text)}</span>')


class Tile(NamedTuple):
    """A key figure."""

    name: str
    value: str
    more: str = ""


def tiles(found: Sequence[Tile]) -> Html:
    """Key figures side by side."""
    made = [
        f'<div class="tile"><span class="name">{html(t.name)}</span><b>{html(t.value)}</b>'
        + (f'<span class="more">{html(t.more)}</span>' if t.more else "")
        + "</div>"
        for t in found
    ]
    return Html('<div class="cards">' + "".join(made) + "</div>") if made else Html()


def figure(svg: str, told: str, *, wide: bool = False) -> Html:
    """A drawing; `told` is what it shows, for those who do not see it."""
    kind = "drawing wide" if wide else "drawing"
    return Html(f'<figure><div class="{kind}" role="img" aria-label="{html(told)}">{svg}</div></figure>')


def gallery(title: str, told: str, figures: Sequence[Html], *, uneven: bool = False) -> Html:
    """Small drawings side by side under one heading; uneven ones in columns, so that no gaps are left."""
    if not figures:
        return Html()
    drawn = Html(f'<div class="plots{" uneven" * uneven}">{"".join(figures)}</div>')
    return joined([heading(title), soft(told), drawn])


def soft(text: object) -> Html:
    """A line of explanation."""
    return Html(f'<p class="soft">{html(text)}</p>')


def notice(text: object) -> Html:
    """Something the reader must know."""
    return Html(f'<p class="notice">{html(text)}</p>')


def heading(text: object) -> Html:
    """Inside a section."""
    return Html(f"<h3>{html(text)}</h3>")


def folded(title: str, inner: object) -> Html:
    """Something to open on demand."""
    return Html(f"<details><summary>{html(title)}</summary>{html(inner)}</details>")


def facts(found: Mapping[str, object]) -> Html:
    """Names and values."""
    return Html(
        "<dl>" + "".join(f"<dt>{html(key)}</dt><dd>{html(value)}</dd>" for key, value in found.items()) + "</dl>"
    )


class Section(NamedTuple):
    """A part of the page with its anchor."""

    title: str
    body: Html


def page(title: str, subtitle: str, sections: Sequence[Section], footer: str) -> str:
    """The whole page, with a table of contents where it is long."""
    anchors = [
        f"{re.sub('[^a-z0-9]+', '-', s.title.lower()).strip('-') or 'part'}-{i + 1}" for i, s in enumerate(sections)
    ]
    links = [f'<li><a href="#{a}">{html(s.title)}</a></li>' for a, s in zip(anchors, sections, strict=True)]
    contents = f'<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav>' if len(sections) > 2 else ""
    parts = [
        f'<section id="{a}" aria-labelledby="{a}-title"><h2 id="{a}-title">{html(s.title)}</h2>\n{s.body}\n</section>'
        for a, s in zip(anchors, sections, strict=True)
    ]
    style = re.sub(r"/\*.*?\*/\s*", "", STYLE.read_text(encoding="utf-8"), flags=re.S)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{html(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{html(title)}</h1>{soft(subtitle)}</header>\n{contents}\n"
        + "\n".join(parts)
        + f"\n<footer>{html(footer)}</footer>\n</main>\n</body>\n</html>\n"
    )
