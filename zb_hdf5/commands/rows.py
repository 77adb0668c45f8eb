"""Rows of tokens with their documents, fields and spans, and the one printer of them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import numpy as np
import numpy.typing as npt

from zb_hdf5.console import columns_of, counted, printable
from zb_hdf5.documents.metadata import Document, row_of_source
from zb_hdf5.documents.pieces import padding
from zb_hdf5.errors import BackendError, BatchIndexError, UnavailableError
from zb_hdf5.files.paths import on_failure
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.loaders.order import GlobalOrder, IndexArray
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import INDEX_NAME, NO_DOCUMENT, TokenArray
from zb_hdf5.store.opening import open_corpus, shaped_batches
from zb_hdf5.text.readable import NEWLINE, readable, readable_runs, tokenizer_of
from zb_hdf5.text.tokenizers import Tokenizer

#: Numbers of no document.
PADDING: Final = -1
UNKNOWN: Final = -2
#: Runs of equal values of a field that are written out.
RUNS: Final = 8
#: Records whose pieces are looked at together.
RECORDS_AT_ONCE: Final = 1 << 14
#: Tokens of a record of a stream by default.
STREAM_SEQ_LEN: Final = 512
COLOURS: Final = ("cyan", "yellow", "green", "magenta", "blue")
#: Columns of a pipe or file.
PLAIN_COLUMNS: Final = 80
#: A line of text is broken at a space in this share of its end, else where it is full.
BREAKABLE: Final = 0.4

#: Text of one character of the data, and how it is drawn: "", "span" or "escape".
Cell = tuple[str, str]
#: Names and values of fields, and columns and offsets of pieces.
Values = Mapping[str, npt.NDArray[Any]]
Runs = tuple[IndexArray, npt.NDArray[np.uint64]]


class Part(NamedTuple):
    """Tokens of a row from `column` on, which are of one piece."""

    column: int
    tokens: TokenArray
    document: int
    within: int  # the tokens of its document before it
    left_out: int  # the tokens of the row between it and the part before

    @property
    def stop(self) -> int:
        return self.column + len(self.tokens)


class Row(NamedTuple):
    """Consecutive tokens with their pieces of documents, fields and spans."""

    name: str
    tokens: TokenArray
    columns: IndexArray  # the first one of each piece
    documents: IndexArray  # the number of each, or `PADDING`, or `UNKNOWN` where no documents are stored
    within: IndexArray  # the tokens of its document before each
    fields: Mapping[str, npt.NDArray[Any]] = {}  # shape (S, ...)
    spans: Sequence[tuple[int, int, Any]] = ()  # (first column, end column, value), ascending
    known: Mapping[int, Document] = {}  # by number
    ranges: Sequence[tuple[int, int]] = ()  # the first position in the corpus, and the number, of its tokens

    def parts(self, limit: int | None) -> list[Part]:
        """Return the parts to show: all of the row, or three quarters of `limit` tokens and one from its end."""
        size = len(self.tokens)
        shown = size if limit is None else min(size, limit)
        tail = shown // 4 if shown < size else 0
        columns = self.columns.tolist()
        ends = [*columns[1:], size]
        pieces = [*zip(columns, ends, self.documents.tolist(), self.within.tolist(), strict=False)]
        parts = []
        for first, last in ((0, shown - tail), (size - tail, size)):
            for column, end, document, within in pieces:
                start = max(first, column)
                stop = min(last, end)
                if start < stop:
                    left_out = size - shown if start == first > 0 else 0
                    parts.append(Part(start, self.tokens[start:stop], document, within + start - column, left_out))
        return parts

    def runs(self, part: Part) -> Iterator[tuple[TokenArray, str | None]]:
        """Yield the tokens of a part, cut where spans begin and end, with the value of their span; None: in no span."""
        at = part.column
        for span_start, span_stop, value in self.spans:
            start = max(span_start, part.column)
            stop = min(span_stop, part.stop)
            if start < stop:
                if at < start:
                    yield self.tokens[at:start], None
                yield self.tokens[start:stop], value_text(value)
                at = stop
        if at < part.stop:
            yield self.tokens[at : part.stop], None

    def title(self, part: Part, exact: bool = False) -> str:
        """Return the document of a part, `exact` with columns and offset; "" if none are known."""
        if part.document == UNKNOWN:
            title = ""
        elif part.document == PADDING:
            title = f"padding, {len(part.tokens):,} tokens"
        else:
            title = f"document {part.document:,}"
            if part.within:
                title += f", from its token {part.within:,}"
        if not exact:
            return title
        text = f"columns {part.column:,} to {part.stop:,}: {title or 'no document is known'}"
        document = self.known.get(part.document)
        if document is not None:
            text += f", offset {document.offset + part.within:,}"
        return text

    def notes(self, part: Part) -> Iterator[str]:
        """Yield the fields and spans of a part."""
        for name, values in self.fields.items():
            yield f"{printable(name)}: {summary_of_field(values[part.column : part.stop])}"
        for start, stop, value in self.spans:
            if start < part.stop and stop > part.column:
                yield f"{start:,} to {stop:,}: {value_text(value)}"


def open_to_look(
    path: Path,
    batch_size: int | None = None,
    seq_len: int | None = None,
    read_as: ReadAs = AS_STORED,
    split: str | None = None,
) -> Batches:
    """Open batches, which have a shape, or a stream as batches of windows: of one row, unless another is asked for."""
    corpus = open_corpus(path, read_as=read_as, split=split)
    with on_failure(corpus.close):
        return batches_to_look(corpus, batch_size, seq_len, read_as)


def batches_to_look(
    corpus: Corpus, batch_size: int | None = None, seq_len: int | None = None, read_as: ReadAs = AS_STORED
) -> Batches:
    """Return the batches of a corpus that is open, as `open_to_look`."""
    if corpus.is_stream:
        batch_size = batch_size or 1
        seq_len = seq_len or min(STREAM_SEQ_LEN, max(1, corpus.num_tokens))
    return shaped_batches(corpus, batch_size, seq_len, read_as=read_as)


def tokenizer_to_look(batches: Batches, asked: str | None) -> Tokenizer | None:
    """Return the tokenizer of a store: its file is looked for in its folder and the current one."""
    folder = batches.path.parent if batches.path.name == INDEX_NAME else batches.path
    return tokenizer_of(batches.meta.tokenizer, asked, (folder, folder.parent, Path()), batches.path)


def records_of_batch(batches: Batches, batch: int) -> IndexArray:
    """Return the records of a stored batch."""
    if not 0 <= batch < batches.num_batches:
        raise BatchIndexError(f"{batches.path}: no batch {batch:,}: it has {batches.num_batches:,}, counted from 0")
    return np.arange(batch * batches.batch_size, (batch + 1) * batches.batch_size)


def chosen_rows(
    batches: Batches,
    *,
    batch: int | None = None,
    document: int | None = None,
    sample: int = 0,
    seed: int = 0,
) -> list[Row]:
    """Return the rows of a batch, a document as one row, or `sample` of all rows: the same ones for the same seed."""
    if document is not None:
        return [document_row(batches, document)]
    if batch is not None:
        return rows_of(batches, records_of_batch(batches, batch))
    total = batches.num_records
    return rows_of(batches, np.sort(GlobalOrder(total, seed, 0).indices(np.arange(min(total, sample)))))


def rows_of(batches: Batches, records: IndexArray, seq_len: int | None = None) -> list[Row]:
    """Return records of a batches, of `seq_len` tokens each, with their pieces, fields and spans."""
    length = seq_len or batches.seq_len
    tokens, fields = _read(batches, first_tokens(batches, records, length), np.full(len(records), length))
    pieces = batches.read_pieces(records, length) if batches.tells_documents else padding(len(records), length)
    rows = []
    for number, (first, end) in enumerate(pairwise(pieces.ends.tolist())):
        name = _name_of(batches, int(records[number]), length)
        here = slice(number * length, (number + 1) * length)
        runs = (pieces.columns[first:end].astype(np.int64), pieces.offsets[first:end])
        row = _row(batches, name, tokens[here], runs, {each: field[here] for each, field in fields.items()})
        rows.append(row._replace(ranges=[(int(first_tokens(batches, records[number], length)), length)]))
    return rows


def first_tokens(batches: Batches, records: Any, seq_len: int) -> Any:
    """Return the positions of records of `seq_len` tokens, a divisor of the length of the batches."""
    parts = batches.seq_len // seq_len
    return records // parts * batches.stride + records % parts * seq_len


def _read(batches: Batches, starts: IndexArray, lengths: IndexArray) -> tuple[TokenArray, Values]:
    """Return the tokens of ranges, one after the other, and the values of their fields."""

    def read(tokens: Tokens, size: int) -> npt.NDArray[Any]:
        out = np.empty(int(lengths.sum()) * size, tokens.dtype)
        parts = np.split(out, lengths.cumsum()[:-1] * size)
        tokens.read(zip((starts * size).tolist(), parts, strict=False))  # of no range, `split` makes one part
        return out

    fields = {
        field.name: read(batches.field(field.name).tokens, field.size).reshape(-1, *field.shape)
        for field in batches.meta.fields
    }
    return read(batches.tokens, 1), fields


def _name_of(batches: Batches, record: int, seq_len: int) -> str:
    if batches.corpus.is_stream:
        start = first_tokens(batches, record, seq_len)
        return f"tokens {start:,} to {start + seq_len:,}"
    stored, part = divmod(record, batches.seq_len // seq_len)
    batch, row = divmod(stored, batches.batch_size)
    name = f"batch {batch:,} row {row:,}"
    return f"{name} from its token {part * seq_len:,}" if part else name


def _row(batches: Batches, name: str, tokens: TokenArray, pieces: Runs, fields: Values) -> Row:
    """Return a row of pieces: their columns, and their offsets in the document stream."""
    columns, offsets = pieces
    table = batches.corpus.document_table
    # tokens after the last document of a stream are text too: a killed writer left them there
    numbers = np.where(offsets == np.uint64(NO_DOCUMENT), PADDING if batches.has_padding else UNKNOWN, UNKNOWN)
    if table is None:
        return Row(name, tokens, columns, numbers, np.zeros_like(columns), fields)
    found = table.number_of(offsets)
    numbers[found >= 0] = found[found >= 0]
    known = {number: table.document(number) for number in np.unique(found[found >= 0]).tolist()}
    within = np.zeros_like(columns)
    spans = list[tuple[int, int, Any]]()
    ends = [*columns[1:].tolist(), len(tokens)]
    for piece in np.flatnonzero(found >= 0).tolist():
        start = int(offsets[piece])
        column = int(columns[piece])
        within[piece] = start - known[int(found[piece])].offset
        try:
            there = table.spans(start, start + ends[piece] - column)
        except (BackendError, UnavailableError):  # they cannot be decoded here: pickled ones run no code
            there = table.spans(start, start + ends[piece] - column, bytes)
        for first, end, value in zip(there.starts.tolist(), there.stops.tolist(), there.values, strict=True):
            spans.append((max(first - start, 0) + column, min(end - start + column, ends[piece]), value))
    return Row(name, tokens, columns, numbers, within, fields, spans, known)


def document_row(batches: Batches, number: int) -> Row:
    """Return the tokens of one document that are in the store; of batches, from the pieces of all records."""
    table = batches.corpus.document_table
    if table is None or not batches.has_pieces:
        raise BackendError(f"{batches.path}: holds no documents; look at a batch or sample, or convert again from text")
    name = f"document {number:,}"
    document = table.document(number)
    offsets, starts, lengths = _runs_of(batches, document)
    tokens, fields = _read(batches, starts, lengths)
    if batches.has_padding and len(starts):
        first, *others = np.unique(starts // batches.seq_len).tolist()
        place = _name_of(batches, first, batches.seq_len)
        name += f" ({place} and {counted(len(others), 'more row')})" if others else f" ({place})"
    if left := document.length - len(tokens):
        name += f", less {left:,} tokens that are not in the store"
    columns = np.cumsum(lengths) - lengths
    begins = np.append(True, np.diff(offsets - columns) != 0)[: len(offsets)]  # the others go on where one ends
    row = _row(batches, name, tokens, (columns[begins], offsets[begins].astype(np.uint64)), fields)
    return row._replace(ranges=[*zip(starts.tolist(), lengths.tolist(), strict=True)])


def _runs_of(batches: Batches, document: Document) -> IndexArray:
    """Return the offsets, positions and lengths of the stored ranges of a document, shape (3, R), by offset."""
    start = document.offset
    stop = start + document.length
    if not batches.has_padding:  # a stream holds it as one range; one of no tokens has none
        return np.array([[start], [start], [document.length]])[:, : document.length]
    found = np.concatenate([each[:, (start <= each[0]) & (each[0] < stop)] for each in scan_pieces(batches)], axis=1)
    return found[:, np.argsort(found[0], kind="stable")]


def scan_pieces(batches: Batches) -> Iterator[IndexArray]:
    """Yield the offsets (-1: padding), positions and lengths of all pieces, shape (3, P), of some records at a time."""
    for first in range(0, max(1, batches.num_records), RECORDS_AT_ONCE):
        pieces = batches.read_pieces(np.arange(first, min(first + RECORDS_AT_ONCE, batches.num_records)))
        yield np.stack([pieces.offsets.view(np.int64), first * batches.seq_len + pieces.starts, pieces.lengths])


def summary_of_field(values: npt.NDArray[Any]) -> str:
    """Return the values of a field along a row in few words: runs of equal numbers, or the range of vectors."""
    if values.ndim > 1 or not len(values):
        text = f"{values.dtype.name}{list(values.shape[1:])}"
        is_ordered = values.size and values.dtype.kind in "biuf"
        return f"{text}, {values.min()} to {values.max()}" if is_ordered else text
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    lengths = np.diff(starts, append=len(values)).tolist()
    runs = [f"{value} × {length:,}" for value, length in zip(values[starts[:RUNS]].tolist(), lengths, strict=False)]
    left = len(starts) - len(runs)
    if left:
        runs.append(f"and {left:,} runs more")
    return ", ".join(runs)


# --- the printer ---------------------------------------------------------------------------------------------


def part_json(row: Row, part: Part, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the column, the known origin and the text of a part, for programs."""
    known: dict[str, Any] = {"column": part.column}
    if part.document != UNKNOWN:
        known["document"] = None if part.document == PADDING else part.document
    if (at := row.known.get(part.document)) is not None:
        facts = {"id": at.id, "source": at.source, "source_row": at.row, "metadata": at.metadata}
        stored = {name: value for name, value in facts.items() if value not in (None, {})}
        known |= {"offset": at.offset + part.within, **stored}
    text = None if tokenizer is None else readable(tokenizer, part.tokens)
    return {**known, "first_token": part.within, "text": text}


def rows_json(rows: list[Row], tokenizer: Tokenizer | None, limit: int | None) -> list[dict[str, Any]]:
    """Return the rows for programs, with the parts that are shown."""
    return [
        {
            "name": row.name,
            "num_tokens": len(row.tokens),
            "parts": [
                {
                    **part_json(row, part, tokenizer),
                    "tokens": part.tokens.tolist(),
                    "fields": {name: value[part.column : part.stop].tolist() for name, value in row.fields.items()},
                }
                for part in row.parts(limit)
            ],
            "spans": [{"start": start, "stop": stop, "value": value} for start, stop, value in row.spans],
        }
        for row in rows
    ]


def origin_text(document: Document | None) -> str:
    """Return the known origin of a document in words."""
    if document is None:
        return ""
    facts = []
    if document.id is not None:
        facts.append(f"id {document.id}")
    if document.source is not None:
        known_row = document.row is not None
        facts.append(row_of_source(document.source, document.row) if known_row else document.source)
    return printable(", ".join(facts))


def value_text(value: object) -> str:
    """Return the value of a span, on one line and without control characters."""
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr))


def drawn_rows(rows: Iterable[Row], tokenizer: Tokenizer | None, **how: Any) -> Iterator[str]:
    """Yield rows as `row_lines` draws them, as wide as the terminal."""
    columns = max(20, shutil.get_terminal_size().columns) if sys.stdout.isatty() else PLAIN_COLUMNS
    for row in rows:
        yield ""
        yield from row_lines(row, tokenizer, columns=columns, **how)


def row_lines(
    row: Row,
    tokenizer: Tokenizer | None,
    *,
    columns: int,
    limit: int | None = None,
    lines: int | None = None,
    exact: bool = False,
) -> Iterator[str]:
    """Yield the lines that show a row; colours are their only control characters.

    Parameters
    ----------
    tokenizer
        None: ids are shown.
    columns
        Width of the lines.
    limit
        Tokens that are shown, from the beginning and the end of the row; None: all.
    lines
        Lines of text of each part; 0: its headline alone; None: all.
    exact
        Whether headlines have columns and offset.
    """

    def dim(text: str) -> str:
        return click.style(_cut(text, columns), fg="bright_black")

    yield click.style(f"{row.name} · {len(row.tokens):,} tokens", bold=True)
    told = set[int]()
    for part in row.parts(limit):
        shade = COLOURS[part.document % len(COLOURS)] if part.document >= 0 else "bright_black"
        if part.left_out:
            yield dim(f"┄┄ {part.left_out:,} tokens left out; --all shows them ┄┄")
        title = row.title(part, exact)
        if title and (part.left_out or part.column in row.columns):
            yield click.style(f"── {title} ".ljust(columns, "─"), fg=shade)
            if (document := row.known.get(part.document)) and part.document not in told:
                facts = (origin_text(document), document.metadata and value_text(document.metadata))
                yield from (dim(f"  {fact}") for fact in facts if fact)
            told.add(part.document)
        if part.document == PADDING or lines == 0:
            continue
        wrapped = _wrapped(_cells(row, part, tokenizer), columns - 2)
        for line in islice(wrapped, lines):
            yield click.style("│ ", fg=shade) + "".join(_drawn(line))
        if next(wrapped, None):
            yield dim("┄┄ the rest of its text is left out; --all shows it ┄┄")
        yield from (dim(f"  {note}") for note in row.notes(part))


def _cells(row: Row, part: Part, tokenizer: Tokenizer | None) -> Iterator[Cell]:
    for tokens, span in row.runs(part):
        style = "" if span is None else "span"
        for text, is_count in readable_runs(tokenizer, tokens):
            for each in text:
                is_plain = each.isprintable()
                shown = each if is_plain or each == "\n" else printable(each)
                yield shown, style if is_plain and not is_count else "escape"


def _wrapped(cells: Iterable[Cell], width: int) -> Iterator[list[Cell]]:
    """Cut cells into lines: after each newline of the data, and where a line is full."""
    line = list[Cell]()
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
            line = []
            used = 0
    if line:
        yield line


def _drawn(line: list[Cell]) -> Iterator[str]:
    styles: dict[str, dict[str, Any]] = {"": {}, "span": {"underline": True}, "escape": {"fg": "bright_black"}}
    for style, cells in groupby(line, key=lambda cell: cell[1]):
        yield click.style("".join(each for each, _ in cells), **styles[style])


def _cut(text: str, columns: int) -> str:
    """Return the beginning of a text that fits into a line."""
    fitting = text if columns_of(text) <= columns else text[: columns - 1] + "…"
    while columns_of(fitting) > columns:  # of wide characters
        fitting = fitting[:-2] + "…"
    return fitting
