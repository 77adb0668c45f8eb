"""`zb show`: rows of tokens as text, with their documents, fields and spans."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import numpy.typing as npt

from zb_hdf5.commands.rows import (
    NO_SPAN,
    PADDING,
    UNKNOWN,
    Part,
    Row,
    cut_by_spans,
    document_row,
    parts_of,
    rows_of,
    sample_of,
    summary_of_field,
)
from zb_hdf5.console import columns_of, printable
from zb_hdf5.documents.document import Document
from zb_hdf5.errors import BatchIndexError
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.store.opening import is_stream, open_reader
from zb_hdf5.store.stream_documents import MmapTokenStore
from zb_hdf5.text.corpus import row_of_source
from zb_hdf5.text.readable import NEWLINE, readable, readable_runs, tokenizer_of
from zb_hdf5.text.tokenizers import Tokenizer

#: Tokens of a record of a stream by default.
STREAM_SEQ_LEN: Final = 512
COLOURS: Final = ("cyan", "yellow", "green", "magenta", "blue")
#: A line of text is broken at a space in this share of its end, else where it is full.
BREAKABLE: Final = 0.4

#: Text of one character of the data, and how it is drawn: "", "span" or "escape".
Cell = tuple[str, str]


def open_to_look(path: Path, batch_size: int | None = None, seq_len: int | None = None) -> BatchReader:
    """Open batches, which have a shape, or a stream as batches of windows: of one row, unless another is asked for."""
    if not is_stream(path):
        return open_reader(path, batch_size=batch_size or seq_len, seq_len=seq_len or batch_size)
    with MmapTokenStore(path) as store:
        length = min(STREAM_SEQ_LEN, max(1, store.num_tokens))
    return open_reader(path, batch_size=batch_size or 1, seq_len=seq_len or length)


def tokenizer_to_look(reader: BatchReader, asked: str | None) -> Tokenizer | None:
    """Return the tokenizer of a store: its file is looked for in its folder and the current one."""
    folder = reader.path.parent if reader.path.name == INDEX_NAME else reader.path
    return tokenizer_of(reader.meta.tokenizer, asked, (folder, folder.parent, Path()), reader.path)


def chosen_rows(reader: BatchReader, batch: int | None, document: int | None, sample: int, seed: int) -> list[Row]:
    """Return the rows of a batch, a document, or a sample of all rows."""
    if document is not None:
        return [document_row(reader, document)]
    if batch is None:
        return rows_of(reader, sample_of(reader.num_records, sample, seed))
    return rows_of(reader, records_of_batch(reader, batch))


def records_of_batch(reader: BatchReader, batch: int) -> npt.NDArray[np.int64]:
    """Return the records of a stored batch; raise `BatchIndexError` if there is none of that number."""
    if not 0 <= batch < reader.num_batches:
        raise BatchIndexError(f"{reader.path}: no batch {batch:,}: it has {reader.num_batches:,}")
    return np.arange(batch * reader.batch_size, (batch + 1) * reader.batch_size)


def rows_json(rows: list[Row], tokenizer: Tokenizer | None, limit: int | None) -> list[dict[str, Any]]:
    """Return the rows for programs: of each, the parts that are shown."""
    return [
        {
            "name": row.name,
            "num_tokens": len(row.tokens),
            "parts": [_part_json(row, part, tokenizer) for part in parts_of(row, limit)],
            "spans": [{"start": start, "stop": stop, "value": _plain(value)} for start, stop, value in row.spans],
        }
        for row in rows
    ]


def _part_json(row: Row, part: Part, tokenizer: Tokenizer | None) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if part.document != UNKNOWN:
        known["document"] = None if part.document == PADDING else part.document
    if part.document in row.known:
        known |= document_json(row.known[part.document])
    return {
        "column": part.column,
        **known,
        "first_token": part.within,
        "tokens": part.tokens.tolist(),
        "text": None if tokenizer is None else readable(tokenizer, part.tokens),
        "fields": {name: _plain(values[part.column : part.stop].tolist()) for name, values in row.fields.items()},
    }


def document_json(document: Document) -> dict[str, Any]:
    """Return the known origin of a document, for programs."""
    found = {"id": document.id, "source": document.source, "source_row": document.row, "metadata": document.metadata}
    return {name: value for name, value in found.items() if value not in (None, {})}


def origin_text(known: Mapping[str, Any]) -> str:
    """Return the origin of a document, given as `document_json`; "" if it is not known."""
    found = [f"id {known['id']}"] if "id" in known else []
    if "source" in known:
        source = known["source"]
        found.append(row_of_source(source, known["source_row"]) if "source_row" in known else source)
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


def row_lines(row: Row, tokenizer: Tokenizer | None, *, limit: int | None, columns: int, colour: bool) -> Iterator[str]:
    """Yield the lines that show `limit` tokens of a row; without `colour` no line has a control character."""
    paint: Any = click.style if colour else lambda text, **_: text
    left = 0 if limit is None else max(0, len(row.tokens) - limit)
    yield paint(f"{row.name} · {len(row.tokens):,} tokens", bold=True)
    at, told = 0, set[int]()
    for part in parts_of(row, limit):
        shade = COLOURS[part.document % len(COLOURS)] if part.document >= 0 else "bright_black"
        if part.column > at:
            yield paint(f"┄┄ {left:,} tokens left out; --all shows them ┄┄", fg="bright_black")
        if (title := part_title(part)) and (part.column > at or part.column in row.columns):
            document = None if part.document in told else row.known.get(part.document)
            told.add(part.document)
            yield from _headline(title, document, columns, paint, shade)
        at = part.stop
        if part.document == PADDING:
            continue
        for line in _wrapped(_cells(row, part, tokenizer), columns - 2):
            yield paint("│ ", fg=shade) + "".join(_drawn(line, paint))
        yield from (paint(_cut(f"  {note}", columns), fg="bright_black") for note in notes_of(row, part))


def _headline(title: str, document: Document | None, columns: int, paint: Any, shade: str) -> Iterator[str]:
    """Yield the first line of a part, and the origin of its document: on the same line if it fits there."""
    known = {} if document is None else document_json(document)
    origin = origin_text(known)
    if columns_of(origin) > columns - 2 and "source" in known:
        origin = origin_text(known | {"source": f"…/{Path(known['source']).name}"})
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
            cut = _break_of(line)
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


def _break_of(line: list[Cell]) -> int:
    """Return the cell before which a full line is broken."""
    for at in range(len(line), round(len(line) * (1 - BREAKABLE)), -1):
        if line[at - 1][0] == " ":
            return at
    return len(line)


def _drawn(line: list[Cell], paint: Any) -> Iterator[str]:
    styles: dict[str, dict[str, Any]] = {"": {}, "span": {"underline": True}, "escape": {"fg": "bright_black"}}
    for style, cells in groupby(line, key=lambda cell: cell[1]):
        text = "".join(each for each, _ in cells)
        yield paint(text, **styles[style]) if style else text


def notes_of(row: Row, part: Part) -> Iterator[str]:
    """Yield the fields and spans of a part."""
    for name, values in row.fields.items():
        yield f"{printable(name)}: {summary_of_field(values[part.column : part.stop])}"
    for start, stop, value in row.spans:
        if start < part.stop and stop > part.column:
            yield f"{start:,} to {stop:,}: {value_text(value)}"


def _cut(text: str, columns: int) -> str:
    """Return the beginning of a text that fits into a line."""
    if columns_of(text) <= columns:
        return text
    end = columns - 1
    while columns_of(text[:end]) >= columns:
        end -= 1
    return text[:end] + "…"
