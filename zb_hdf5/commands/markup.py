"""Elements of a page of HTML: everything that is not markup yet is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import log10
from typing import Final, NamedTuple

from zb_hdf5.console import format_count, printable

#: The height of a figure, in the units of its drawing; its width is the number of its bars.
HEIGHT: Final = 100
#: Pixels of the axis below a figure on a desk, and on a phone; of a character of its labels, and between two labels.
AXIS_PX: Final = {"": 250, "wide": 540}
CHARACTER_PX: Final = 7.0
GAP_PX: Final = 10.0


class Markup(str):
    """Text that is HTML already. All other text is escaped when it becomes part of a page."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """Return an element; a final underscore of an attribute's name is left out (`class_`)."""
    inner = "".join(child if isinstance(child, Markup) else html.escape(child) for child in children)
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    words = "".join(f' {key}="{html.escape(str(value))}"' for key, value in given.items())
    return Markup(f"<{name}{words}>{inner}</{name}>")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table; a column whose name begins with "#" has numbers, which are aligned to the right."""
    classes = ["number" if name.startswith("#") else None for name in head]

    def cells(kind: str, row: Sequence[str]) -> Markup:
        return tag("tr", *(tag(kind, cell, class_=each) for cell, each in zip(row, classes, strict=True)))

    names = [name.removeprefix("#") for name in head]
    return tag("div", tag("table", cells("th", names), *(cells("td", row) for row in rows)), class_="box")


def facts(lines: Iterable[tuple[str, str]]) -> Markup:
    """Return a table of names and values."""
    rows = [tag("tr", tag("th", printable(name)), tag("td", printable(value))) for name, value in lines]
    return tag("div", tag("table", *rows, class_="facts"), class_="box")


def shares(count: int, total: int, most: int | None = None) -> list[str]:
    """Return cells: a count, its share of a total, and a bar that is full at `most`, by default the total."""
    bar = tag("div", class_="share", style=f"width:{100 * count / (most or total):.1f}%")
    return [f"{count:,}", f"{count / total:.2%}", bar]


class Mark(NamedTuple):
    """A label of the axis below a figure."""

    position: float  # in bars
    text: str


def bars(values: list[int], edges: list[int], marks: list[Mark], *, log: bool, caption: str) -> Markup:
    """Return a figure of bars, which is as wide as the page; its labels keep their size.

    Parameters
    ----------
    edges
        The first value of each bar, and the end of the last one.
    marks
        The labels below, ascending; where they would overlap, some are left out.
    log
        Whether heights are logarithmic, so that small ones are seen too.
    """
    top = max(1, *values)

    def level(value: float) -> float:
        return HEIGHT * (log10(1 + value) / log10(1 + top) if log else value / top)

    digits = len(str(top))
    lines = [10**k for k in range(0, digits, max(1, digits // 4))] if log else sorted({top // 2, top} - {0})
    parts = [tag("line", x1=0, x2=len(values), y1=y, y2=y, class_="grid") for y in (HEIGHT - level(v) for v in lines)]
    for number, (value, (first, end)) in enumerate(zip(values, pairwise(edges), strict=True)):
        if value:
            title = tag("title", f"{first:,} to {max(first, end - 1):,}: {value:,}")
            size = max(level(value), 0.7)
            y = f"{HEIGHT - size:.2f}"
            parts.append(tag("rect", title, x=number, y=y, width=0.9, height=f"{size:.2f}", class_="bar"))
    box = f"0 0 {len(values)} {HEIGHT}"
    drawing = tag("svg", *parts, viewBox=box, preserveAspectRatio="none", role="img", aria_label=caption)
    ups = [tag("span", format_count(line).strip(), style=f"bottom:{level(line):.1f}%") for line in lines]
    plot = tag("div", tag("div", *ups, class_="ups"), drawing, class_="plot")
    return tag("figure", plot, _axis(marks, len(values)), tag("figcaption", caption))


def _axis(marks: list[Mark], length: int) -> Markup:
    """Return the labels below a figure: those that fit on a phone, and more of them on a desk."""
    shown: dict[Mark, str] = {}
    for kind, width_px in AXIS_PX.items():
        for mark in fitting(marks, length, width_px):
            shown.setdefault(mark, kind)
    labels = []
    for mark in marks:
        if mark in shown:
            side = {0.0: "first", float(length): "last"}.get(float(mark.position), "")
            kinds = " ".join(filter(None, [side, shown[mark]])) or None
            labels.append(tag("span", mark.text, class_=kinds, style=f"left:{100 * mark.position / length:.2f}%"))
    return tag("div", *labels, class_="axis")


def fitting(marks: list[Mark], length: int, width_px: float) -> list[Mark]:
    """Return labels that do not overlap on an axis of some width: the first, the last, and those between that fit."""
    ends: list[Mark] = []
    for mark in [marks[0], *reversed(marks[1:])]:
        spans = [_span(each, length, width_px) for each in ends]
        left, right = _span(mark, length, width_px)
        if all(right + GAP_PX <= begin or end + GAP_PX <= left for begin, end in spans):
            ends.append(mark)
    return sorted(ends)


def _span(mark: Mark, length: int, width_px: float) -> tuple[float, float]:
    """Return the pixels where a label begins and ends: it is centred, but for those at the ends of the axis."""
    size = CHARACTER_PX * len(mark.text)
    at = width_px * mark.position / length
    if mark.position <= 0:
        return at, at + size
    if mark.position >= length:
        return at - size, at
    return at - size / 2, at + size / 2
