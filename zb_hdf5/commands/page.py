"""A page of HTML in one file: elements whose text is always escaped, its style, and bars."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from math import log10
from typing import Final

STYLE: Final = """
:root { --ink: #1c2430; --soft: #5d6b7e; --line: #dfe4ea; --card: #fff; --back: #f5f7f9; --bar: #2f6f9f;
  --mark: #b4541a; --d0: #e3eff8; --d1: #fbf0d9; --d2: #e4f3e2; --d3: #f5e6f3; --d4: #e7e8f9;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ef; --soft: #97a5b6; --line: #323c48; --card: #1c232b;
  --back: #13181e; --bar: #5fa5d6; --mark: #f0a35e; --d0: #1d3345; --d1: #3b3119; --d2: #1f3a22; --d3: #3b2439;
  --d4: #272a4c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .7rem; }
p { margin: .4rem 0; max-width: 48rem; }
.soft, figcaption, th { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem; margin: 1.4rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.35rem; font-weight: 600; line-height: 1.3; }
.card span { color: var(--soft); font-size: .85rem; }
.card.warn b { color: var(--mark); }
figure, .box { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; margin: .7rem 0;
  padding: .8rem 1rem; overflow-x: auto; }
figcaption { font-size: .85rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11px; }
svg .bar { fill: var(--bar); }
svg .bar:hover { fill: var(--mark); }
svg .grid { stroke: var(--line); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; font-weight: 500; }
th, td { padding: .22rem .8rem .22rem 0; vertical-align: top; border-top: 1px solid var(--line); }
tr:first-child > * { border-top: 0; }
.facts th { width: 9rem; white-space: nowrap; }
.facts td { overflow-wrap: anywhere; }
td:has(.share) { width: 40%; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
code, pre, .token { font: .86em/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
.token { background: var(--back); border: 1px solid var(--line); border-radius: .3rem; padding: 0 .3rem;
  white-space: pre-wrap; overflow-wrap: anywhere; display: inline-block; max-width: 100%; }
.share { background: var(--bar); height: .6rem; min-width: 1px; border-radius: .2rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: .5rem .8rem; border-radius: .4rem; }
.part { margin: .5rem 0; }
.d { background: var(--back); } .d0 { background: var(--d0); } .d1 { background: var(--d1); }
.d2 { background: var(--d2); } .d3 { background: var(--d3); } .d4 { background: var(--d4); }
.span { border-bottom: 2px solid var(--mark); }
.note { font-size: .82rem; color: var(--soft); overflow-wrap: anywhere; }
@media print { body { background: none; } figure, .box, .card { break-inside: avoid; } }
"""
WIDTH: Final = 900
HEIGHT: Final = 190
LEFT: Final = 64
BOTTOM: Final = 22
TOP: Final = 14


class Markup(str):
    """Text that is HTML already. All other text is escaped when it becomes part of a page."""

    __slots__ = ()


def tag(name: str, *children: str | Iterable[Markup], **attributes: str | float | None) -> Markup:
    """Return an element; a final underscore of an attribute's name is left out (`class_`)."""
    inner = "".join(_escaped(child) if isinstance(child, str) else "".join(child) for child in children)
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{inner}</{name}>")


def _escaped(text: str) -> str:
    return text if isinstance(text, Markup) else html.escape(text)


def page(title: str, *sections: Markup) -> str:
    """Return the whole page, which needs no other file and no network."""
    head = Markup(
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        # nothing that the data could smuggle in would run or be fetched
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    )
    body = tag("body", tag("main", "\n", *sections))
    whole = tag("html", tag("head", head, tag("title", title), tag("style", Markup(STYLE))), body, lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def section(title: str, *children: Markup) -> Markup:
    return Markup(tag("section", tag("h2", title), *children) + "\n")


def cards(*items: tuple[str, str, bool]) -> Markup:
    """Return the cards of a page: each shows a number and what it means, and may warn the reader."""
    found = [
        tag("div", tag("b", value), tag("span", name), class_="card warn" if warn else "card")
        for value, name, warn in items
    ]
    return tag("div", *found, class_="cards")


def facts(lines: Iterable[tuple[str, str]]) -> Markup:
    """Return a table of names and values."""
    rows = [tag("tr", tag("th", name), tag("td", value)) for name, value in lines]
    return tag("div", tag("table", *rows, class_="facts"), class_="box")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()) -> Markup:
    """Return a table; the columns in `numbers` are aligned to the right."""
    right = {column: "number" for column in numbers}

    def cells(kind: str, row: Sequence[str]) -> Markup:
        return tag("tr", *(tag(kind, cell, class_=right.get(column)) for column, cell in enumerate(row)))

    return tag("div", tag("table", cells("th", head), *(cells("td", row) for row in rows)), class_="box")


def share_bar(share: float) -> Markup:
    """Return a bar that fills a share of its cell."""
    return tag("div", class_="share", style=f"width:{100 * share:.1f}%")


def bars(
    values: Sequence[int], titles: Sequence[str], marks: Sequence[tuple[float, str]], *, log: bool, caption: str
) -> Markup:
    """Return a figure of a bar for each value, with a title that is seen where it is pointed at.

    `marks` are (position in units of bars, text) below them. `log`: a bar of 1 is seen next to one of a million.
    """
    height, width = HEIGHT - TOP - BOTTOM, WIDTH - LEFT
    top = max(max(values, default=0), 1)

    def level(value: float) -> float:
        return height * (log10(1 + value) / log10(1 + top) if log else value / top)

    step = width / max(len(values), 1)
    parts = []
    for line in [10**k for k in range(0, len(str(top)), max(1, len(str(top)) // 4))] if log else [top // 2, top]:
        y = f"{TOP + height - level(line):.1f}"
        parts.append(tag("line", x1=LEFT, x2=WIDTH, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", f"{line:,}", x=LEFT - 6, y=y, dy=4, text_anchor="end"))
    for number, (value, title) in enumerate(zip(values, titles, strict=True)):
        size = level(value)
        if value:
            corner = {"x": f"{LEFT + number * step:.2f}", "y": f"{TOP + height - size:.2f}"}
            parts.append(tag("rect", tag("title", title), **corner, width=f"{max(step - 1, step * 0.8):.2f}",
                             height=f"{max(size, 1):.2f}", class_="bar"))  # fmt: skip
    for place, text in marks:
        anchor = "start" if place <= 0 else "end" if place >= len(values) else "middle"
        parts.append(tag("text", text, x=f"{LEFT + place * step:.1f}", y=HEIGHT - 5, text_anchor=anchor))
    drawing = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=caption)
    return tag("figure", drawing, tag("figcaption", caption))
