"""HTML by small functions: tables, bars, tiles, figures, a whole page that needs no other file.

Text is escaped unless it is `Html`. The page's own policy forbids requests and, unless it says otherwise, scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

STYLE = Path(__file__).with_name("report.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SCRIPT_POLICY = "; script-src 'unsafe-inline'"
TONES = {
    "improved": "good",
    "regressed": "bad",
    "within noise": "calm",
    "confirmed": "good",
    "refuted": "bad",
    "critical": "bad",
    "moderate": "warn",
    "minor": "calm",
}
REPLACED_CONTROLS = {i: 0xFFFD for i in range(32) if chr(i) not in "\t\n"}  # not allowed in HTML


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def html(text: object) -> Html:
    """Return text as escaped HTML; HTML stays as it is."""
    return text if isinstance(text, Html) else Html(escape(str(text).translate(REPLACED_CONTROLS)))


def joined(parts: Iterable[object]) -> Html:
    """Join pieces of text and HTML, without empty ones."""
    return Html("\n".join(html(part) for part in parts if part))


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: Sequence[int] = (),
    group_starts: Sequence[int] = (),
) -> Html:
    """Return a table in a box that scrolls; a row's first cell is its header, `numbers` are right-aligned columns."""
    classes = [' class="num"' if i in numbers else "" for i in range(len(head))]
    heads = "".join(f'<th scope="col"{c}>{html(cell)}</th>' for c, cell in zip(classes, head, strict=True))
    body = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td{c}>{html(cell)}</td>" for c, cell in zip(classes[1:], row[1:], strict=True))
        start = ' class="first"' if number in group_starts else ""
        body.append(f'<tr{start}><th scope="row" title="{html(row[0])}">{html(row[0])}</th>{cells}</tr>')
    label = html(caption)
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table><caption>{label}</caption>'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody></table></div>"
    )


def bar(part: float, text: str, tone: str = "") -> Html:
    """Return a fraction as a bar, with a text."""
    width = min(max(part, 0.0), 1.0)
    mark = f' class="{html(tone)}"' if tone else ""
    return Html(f'<span class="bar" aria-hidden="true"><i{mark} style="width:{width:.1%}"></i></span>{html(text)}')


def badge(text: str) -> Html:
    """Return a verdict or a class in its colour."""
    return Html(f'<span class="badge {TONES.get(text, "calm")}">{html(text)}</span>')


class Tile(NamedTuple):
    """A key number."""

    name: str
    value: str
    more: str = ""


def tiles(entries: Sequence[Tile]) -> Html:
    """Return key numbers side by side."""
    cells = []
    for tile in entries:
        name, value, note = map(html, tile)
        shown = f'<span class="more">{note}</span>' if note else ""
        cells.append(f'<div class="tile"><span class="name">{name}</span><b>{value}</b>{shown}</div>')
    return Html(f'<div class="cards">{"".join(cells)}</div>') if cells else Html()


def figure(svg: str, description: str, *, wide: bool = False) -> Html:
    """Return a chart; the description is for screen readers."""
    kind = "drawing wide" if wide else "drawing"
    return Html(f'<figure><div class="{kind}" role="img" aria-label="{html(description)}">{svg}</div></figure>')


def soft(text: object) -> Html:
    """Return a line of explanation."""
    return Html(f'<p class="soft">{html(text)}</p>')


def notice(text: object) -> Html:
    """Return an emphasized line."""
    return Html(f'<p class="notice">{html(text)}</p>')


def heading(text: object) -> Html:
    """Return a heading inside a section."""
    return Html(f"<h3>{html(text)}</h3>")


def folded(title: str, inner: object) -> Html:
    """Return content that opens on demand."""
    return Html(f"<details><summary>{html(title)}</summary>{html(inner)}</details>")


def facts(values: Mapping[str, object]) -> Html:
    """Return names and values."""
    rows = (f"<dt>{html(key)}</dt><dd>{html(value)}</dd>" for key, value in values.items())
    return Html(f"<dl>{''.join(rows)}</dl>")


def bullets(items: Iterable[object], *, ordered: bool = False) -> Html:
    """Return a list."""
    tag = "ol" if ordered else "ul"
    return Html(f"<{tag}>" + "".join(f"<li>{html(item)}</li>" for item in items) + f"</{tag}>")


class Section(NamedTuple):
    """A part of the page."""

    title: str
    body: Html


def page(title: str, subtitle: str, sections: Sequence[Section], footer: str, *, has_script: bool = False) -> str:
    """Return the whole page, with a table of contents if it is long."""
    words = (re.sub("[^a-z0-9]+", "-", s.title.lower()).strip("-") or "part" for s in sections)
    anchors = [f"{name}-{i}" for i, name in enumerate(words, 1)]
    links = [f'<li><a href="#{a}">{html(s.title)}</a></li>' for a, s in zip(anchors, sections, strict=True)]
    contents = f'<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav>' if len(sections) > 2 else ""
    parts = [
        f'<section id="{a}" aria-labelledby="{a}-title"><h2 id="{a}-title">{html(s.title)}</h2>\n{s.body}\n</section>'
        for a, s in zip(anchors, sections, strict=True)
    ]
    style = re.sub(r"/\*.*?\*/\s*", "", STYLE.read_text(encoding="utf-8"), flags=re.S)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}{SCRIPT_POLICY * has_script}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{html(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{html(title)}</h1>{soft(subtitle)}</header>\n{contents}\n"
        + "\n".join(parts)
        + f"\n<footer>{html(footer)}</footer>\n</main>\n</body>\n</html>\n"
    )
