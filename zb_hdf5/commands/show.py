"""The one printer of rows, for `zb show` and `zb which`, and the words for documents, fields and spans."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final

import click

from zb_hdf5.commands.rows import NO_SPAN, PADDING, UNKNOWN, Part, Row, cut_by_spans, parts_of, summary_of_field
from zb_hdf5.console import columns_of, printable
from zb_hdf5.documents.document import Document
from zb_hdf5.text.corpus import row_of_source
from zb_hdf5.text.readable import NEWLINE, readable, readable_runs
from zb_hdf5.text.tokenizers import Tokenizer

COLOURS: Final = ("cyan", "yellow", "green", "magenta", "blue")
#: Columns of a pipe or file.
PLAIN_COLUMNS: Final = 80
#: A line of text is broken at a space in this share of its end, else where it is full.
BREAKABLE: Final = 0.4

#: Text of one character of the data, and how it is drawn: "", "span" or "escape".
Cell = tuple[str, str]


def part_json(row: Row, part: Part) -> dict[str, Any]:
    """Return the column and the known origin of a part, for programs."""
    known: dict[str, Any] = {"column": part.column}
    if part.document != UNKNOWN:
        known["document"] = None if part.document == PADDING else part.document
    if (document := row.known.get(part.document)) is not None:
        known |= {"offset": document.offset + part.within, **document_json(document)}
    return {**known, "first_token": part.within}


def rows_json(rows: list[Row], tokenizer: Tokenizer | None, limit: int | None) -> list[dict[str, Any]]:
    """Return the rows for programs, with the parts that are shown."""
    found = []
    for row in rows:
        parts = [
            {
                **part_json(row, part),
                "tokens": part.tokens.tolist(),
                "text": None if tokenizer is None else readable(tokenizer, part.tokens),
                "fields": {name: _plain(value[part.column : part.stop].tolist()) for name, value in row.fields.items()},
            }
            for part in parts_of(row, limit)
        ]
        spans = [{"start": start, "stop": stop, "value": _plain(value)} for start, stop, value in row.spans]
        found.append({"name": row.name, "num_tokens": len(row.tokens), "parts": parts, "spans": spans})
    return found


def document_json(document: Document) -> dict[str, Any]:
    """Return the known origin of a document, for programs."""
    found = {"id": document.id, "source": document.source, "source_row": document.row, "metadata": document.metadata}
    return {name: value for name, value in found.items() if value not in (None, {})}


def origin_text(document: Document | None, *, short: bool = False) -> str:
    """Return the known origin of a document in words; `short`: without the folder of its source."""
    if document is None:
        return ""
    found = [] if document.id is None else [f"id {document.id}"]
    if document.source is not None:
        source = f"…/{Path(document.source).name}" if short else document.source
        found.append(source if document.row is None else row_of_source(source, document.row))
    return printable(", ".join(found))


def value_text(value: object) -> str:
    """Return the value of a span, on one line and without control characters."""
    return printable(value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False))


def _plain(value: object) -> object:
    """Return a value as JSON has it, or else as Python prints it."""
    try:
        return json.loads(json.dumps(value, default=repr))
    except (TypeError, ValueError):
        return repr(value)


def part_title(part: Part) -> str:
    """Return the document of a part; "" if none are known."""
    if part.document == UNKNOWN:
        return ""
    if part.document == PADDING:
        return f"padding, {len(part.tokens):,} tokens"
    return f"document {part.document:,}" + (f", from its token {part.within:,}" if part.within else "")


def notes_of(row: Row, part: Part) -> Iterator[str]:
    """Yield the fields and spans of a part."""
    for name, values in row.fields.items():
        yield f"{printable(name)}: {summary_of_field(values[part.column : part.stop])}"
    for start, stop, value in row.spans:
        if start < part.stop and stop > part.column:
            yield f"{start:,} to {stop:,}: {value_text(value)}"


def drawn_rows(rows: Iterable[Row], tokenizer: Tokenizer | None, **how: Any) -> Iterator[str]:
    """Yield rows as `row_lines` draws them: as wide as the terminal, and in colours there unless NO_COLOR is set."""
    terminal = sys.stdout.isatty()
    columns = max(20, shutil.get_terminal_size().columns) if terminal else PLAIN_COLUMNS
    for row in rows:
        yield ""
        yield from row_lines(row, tokenizer, columns=columns, colour=terminal and not os.environ.get("NO_COLOR"), **how)


def row_lines(
    row: Row,
    tokenizer: Tokenizer | None,
    *,
    columns: int,
    colour: bool,
    limit: int | None = None,
    lines: int | None = None,
    exact: bool = False,
) -> Iterator[str]:
    """Yield the lines that show `limit` tokens of a row; without `colour` no line has a control character.

    Each part has at most `lines` lines of text; 0: its headline alone. `exact` headlines have columns and offset.
    """
    paint: Any = click.style if colour else lambda text, **_: text
    left = 0 if limit is None else max(0, len(row.tokens) - limit)
    yield paint(f"{row.name} · {len(row.tokens):,} tokens", bold=True)
    at, told = 0, set[int]()
    for part in parts_of(row, limit):
        shade = COLOURS[part.document % len(COLOURS)] if part.document >= 0 else "bright_black"
        if part.column > at:
            yield paint(f"┄┄ {left:,} tokens left out; --all shows them ┄┄", fg="bright_black")
        document, title = row.known.get(part.document), part_title(part)
        if exact:
            offset = f", offset {document.offset + part.within:,}" if document else ""
            title = f"columns {part.column:,} to {part.stop:,}: {title or 'no document is known'}{offset}"
        if title and (part.column > at or part.column in row.columns):
            yield from _headline(title, None if part.document in told else document, columns, paint, shade)
            told.add(part.document)
        at = part.stop
        if part.document == PADDING or lines == 0:
            continue
        wrapped = _wrapped(_cells(row, part, tokenizer), columns - 2)
        for line in islice(wrapped, lines):
            yield paint("│ ", fg=shade) + "".join(_drawn(line, paint))
        if next(wrapped, None):
            yield paint("┄┄ the rest of its text is left out; --all shows it ┄┄", fg="bright_black")
        yield from (paint(_cut(f"  {note}", columns), fg="bright_black") for note in notes_of(row, part))


def _headline(title: str, document: Document | None, columns: int, paint: Any, shade: str) -> Iterator[str]:
    """Yield the first line of a part, and the origin of its document: on the same line if it fits there."""
    origin = origin_text(document)
    if columns_of(origin) > columns - 2:
        origin = origin_text(document, short=True)
    together = f"── {title} · {origin} "
    fits = bool(origin) and columns_of(together) <= columns
    line = together if fits else f"── {title} "
    yield paint(line + "─" * (columns - columns_of(line)), fg=shade)
    notes = [] if fits or not origin else [origin]
    for note in [*notes, *([value_text(document.metadata)] if document and document.metadata else [])]:
        yield paint(_cut(f"  {note}", columns), fg="bright_black")


def _cells(row: Row, part: Part, tokenizer: Tokenizer | None) -> Iterator[Cell]:
    for first, last, span in cut_by_spans(row, part):
        style = "" if span == NO_SPAN else "span"
        for text, is_count in readable_runs(tokenizer, row.tokens[first:last]):
            for each in text:
                plain = each.isprintable()
                yield each if plain or each == "\n" else printable(each), style if plain and not is_count else "escape"


def _wrapped(cells: Iterable[Cell], width: int) -> Iterator[list[Cell]]:
    """Cut cells into lines: behind each newline of the data, and where a line is full."""
    line: list[Cell] = []
    used = 0
    for text, style in cells:
        size = 1 if text == "\n" else columns_of(text)
        if used + size > width:
            breaks = range(len(line), round(len(line) * (1 - BREAKABLE)), -1)
            cut = next((at for at in breaks if line[at - 1][0] == " "), len(line))
            yield line[:cut]
            line = line[cut:]
            used = sum(columns_of(each) for each, _ in line)
        line.append((NEWLINE if text == "\n" else text, style))
        used += size
        if text == "\n":
            yield line
            line, used = [], 0
    if line:
        yield line


def _drawn(line: list[Cell], paint: Any) -> Iterator[str]:
    styles: dict[str, dict[str, Any]] = {"": {}, "span": {"underline": True}, "escape": {"fg": "bright_black"}}
    for style, cells in groupby(line, key=lambda cell: cell[1]):
        text = "".join(each for each, _ in cells)
        yield paint(text, **styles[style]) if style else text


def _cut(text: str, columns: int) -> str:
    """Return the beginning of a text that fits into a line."""
    if columns_of(text) <= columns:
        return text
    end = columns - 1
    while columns_of(text[:end]) >= columns:
        end -= 1
    return text[:end] + "…"
