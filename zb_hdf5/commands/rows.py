"""Rows of tokens with their documents, fields and spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document import Document
from zb_hdf5.documents.document_table import DocumentTable
from zb_hdf5.documents.pieces import Pieces, padding, ranges
from zb_hdf5.errors import ArgumentError, BackendError, BatchIndexError, UnavailableError
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.loaders.extras import FieldColumn
from zb_hdf5.loaders.order import GlobalOrder, IndexArray
from zb_hdf5.spec import INDEX_NAME, NO_DOCUMENT, TokenArray
from zb_hdf5.store.opening import is_stream, open_reader
from zb_hdf5.store.stream_documents import MmapTokenStore, WindowReader
from zb_hdf5.text.readable import tokenizer_of
from zb_hdf5.text.tokenizers import Tokenizer

#: Numbers of no document.
PADDING: Final = -1
UNKNOWN: Final = -2
#: The number of no span.
NO_SPAN: Final = -1
#: Runs of equal values of a field that are written out, and records of a document that are named.
RUNS: Final = 8
PLACES: Final = 2
#: Records whose pieces are looked at together.
RECORDS_AT_ONCE: Final = 1 << 14
#: Tokens of a record of a stream by default.
STREAM_SEQ_LEN: Final = 512


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


class Part(NamedTuple):
    """Tokens of a row from `column` on, which are of one piece; `within` tokens of its document are before them."""

    column: int
    tokens: TokenArray
    document: int
    within: int

    @property
    def stop(self) -> int:
        return self.column + len(self.tokens)


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


def records_of_batch(reader: BatchReader, batch: int) -> IndexArray:
    """Return the records of a stored batch."""
    if not 0 <= batch < reader.num_batches:
        raise BatchIndexError(f"{reader.path}: no batch {batch:,}: it has {reader.num_batches:,}")
    return np.arange(batch * reader.batch_size, (batch + 1) * reader.batch_size)


def chosen_rows(reader: BatchReader, batch: int | None, document: int | None, sample: int, seed: int) -> list[Row]:
    """Return the rows of a batch, a document, or a sample of all rows."""
    if document is not None:
        return [document_row(reader, document)]
    if batch is None:
        return rows_of(reader, sample_of(reader.num_records, sample, seed))
    return rows_of(reader, records_of_batch(reader, batch))


def sample_of(total: int, count: int, seed: int) -> IndexArray:
    """Return some of the numbers below `total`, ascending, the same ones for the same seed."""
    return np.sort(GlobalOrder(total, seed, 0).indices(np.arange(min(total, count))))


def rows_of(reader: BatchReader, records: IndexArray, seq_len: int | None = None) -> list[Row]:
    """Return records of a reader, of `seq_len` tokens each, with their pieces, fields and spans."""
    length = seq_len or reader.seq_len
    tokens, fields = _columns_of(reader, records, length)
    pieces = reader.read_pieces(records, length) if reader.has_pieces else padding(len(records), length)
    # tokens behind the last document of a stream are text too: a killed writer left them there
    filler = PADDING if reader.has_pieces and not isinstance(reader, WindowReader) else UNKNOWN
    rows = []
    for number, (a, b) in enumerate(pairwise(pieces.ends.tolist())):
        here = (pieces.columns[a:b].astype(np.int64), pieces.offsets[a:b])
        values = {name: field[number] for name, field in fields.items()}
        name = _name_of(reader, int(records[number]), length)
        rows.append(_row(name, tokens[number], here, values, reader.documents, filler))
    return rows


def _columns_of(
    reader: BatchReader, records: IndexArray, seq_len: int
) -> tuple[TokenArray, dict[str, npt.NDArray[Any]]]:
    """Return the tokens of records, shape (R, S), and their fields, shape (R, S, ...)."""
    tokens = np.empty((len(records), seq_len), reader.dtype)
    reader.read_records_into(records, tokens)
    fields = {}
    for field in reader.meta.fields:
        values = np.empty((len(records), seq_len * field.size), field.dtype)
        reader.field(field.name).read_records_into(records, values)
        fields[field.name] = values.reshape(len(records), seq_len, *field.shape)
    return tokens, fields


def _name_of(reader: BatchReader, record: int, seq_len: int) -> str:
    if isinstance(reader, WindowReader):
        start = reader.first_token(record, seq_len)
        return f"tokens {start:,} to {start + seq_len:,}"
    stored, part = divmod(record, reader.seq_len // seq_len)
    batch, row = divmod(stored, reader.batch_size)
    return f"batch {batch:,} row {row:,}" + (f" from its token {part * seq_len:,}" if part else "")


def _row(
    name: str,
    tokens: TokenArray,
    pieces: tuple[IndexArray, npt.NDArray[np.uint64]],
    fields: Mapping[str, npt.NDArray[Any]],
    table: DocumentTable | None,
    filler: int,
) -> Row:
    """Return a row of pieces: columns, and offsets in the document stream; those of no document become `filler`."""
    columns, offsets = pieces
    numbers = np.where(offsets == np.uint64(NO_DOCUMENT), filler, UNKNOWN)
    if table is None:
        return Row(name, tokens, columns, numbers, np.zeros_like(columns), fields)
    found = table.number_of(offsets)
    numbers[found >= 0] = found[found >= 0]
    known = {number: table.document(number) for number in np.unique(found[found >= 0]).tolist()}
    within, spans = np.zeros_like(columns), list[tuple[int, int, Any]]()
    ends = [*columns[1:].tolist(), len(tokens)]
    for piece in np.flatnonzero(found >= 0).tolist():
        start, column = int(offsets[piece]), int(columns[piece])
        within[piece] = start - known[int(found[piece])].offset
        try:
            there = table.spans(start, start + ends[piece] - column)
        except (BackendError, UnavailableError):  # they cannot be decoded here: pickled ones run no code
            there = table.spans(start, start + ends[piece] - column, bytes)
        edges = zip(there.starts.tolist(), there.stops.tolist(), there.values, strict=True)
        spans += [(max(a - start, 0) + column, min(b - start + column, ends[piece]), value) for a, b, value in edges]
    return Row(name, tokens, columns, numbers, within, fields, spans, known)


def document_row(reader: BatchReader, number: int) -> Row:
    """Return the tokens of one document that are in the store; of batches, from the pieces of all records."""
    table = reader.documents
    if table is None or not reader.has_pieces:
        raise BackendError(f"{reader.path}: holds no documents; look at a batch or sample, or convert again from text")
    document = table.document(number)
    if not isinstance(reader, WindowReader):
        return _gathered(reader, document, table)
    start, stop = document.offset, document.offset + document.length
    columns = {field.name: FieldColumn(reader.store.field(field.name), field.shape) for field in reader.meta.fields}
    fields = {name: column.get_slice(start, stop) for name, column in columns.items()}
    some = min(1, document.length)  # one of no tokens has no piece
    pieces = (np.zeros(some, np.int64), np.full(some, start, np.uint64))
    return _row(f"document {number:,}", reader.store.get_slice(start, stop), pieces, fields, table, UNKNOWN)


def _gathered(reader: BatchReader, document: Document, table: DocumentTable) -> Row:
    """Return a document, put together from the records that hold its pieces."""
    start, stop = np.uint64(document.offset), np.uint64(document.offset + document.length)
    offsets, held_by, firsts, lengths = find_pieces(reader, lambda found: (start <= found) & (found < stop))
    records = np.unique(held_by)
    tokens, fields = _columns_of(reader, records, reader.seq_len)
    taken = ranges(firsts + reader.seq_len * records.searchsorted(held_by), lengths)
    columns = np.cumsum(lengths) - lengths
    begins = np.append(True, np.diff(offsets - columns) != 0)[: len(offsets)]  # the others go on where one ends
    names = [_name_of(reader, record, reader.seq_len) for record in records[:PLACES].tolist()]
    more = [f"{len(records) - PLACES:,} rows more"] if len(records) > PLACES else []
    name = f"document {document.number:,}" + (f" ({', '.join(names + more)})" if names else "")
    if left := document.length - len(taken):
        name += f", less {left:,} tokens that are not in the store"
    values = {key: field.reshape(-1, *field.shape[2:])[taken] for key, field in fields.items()}
    pieces = (columns[begins], offsets[begins].astype(np.uint64))
    return _row(name, tokens.reshape(-1)[taken], pieces, values, table, PADDING)


def scan_pieces(reader: BatchReader) -> Iterator[tuple[int, Pieces]]:
    """Yield the pieces of all records, of some at a time, and the number of the first of these records."""
    for first in range(0, reader.num_records, RECORDS_AT_ONCE):
        yield first, reader.read_pieces(np.arange(first, min(first + RECORDS_AT_ONCE, reader.num_records)))


def find_pieces(
    reader: BatchReader, is_wanted: Callable[[npt.NDArray[np.uint64]], npt.NDArray[np.bool_]]
) -> IndexArray:
    """Return the offset, record, column and length of the pieces of wanted offsets, shape (4, P), by offset."""
    found = [np.empty((4, 0), np.int64)]
    for first, pieces in scan_pieces(reader):
        facts = [pieces.offsets.view(np.int64), first + pieces.rows, pieces.columns.astype(np.int64), pieces.lengths]
        found.append(np.stack(facts)[:, is_wanted(pieces.offsets)])
    every = np.concatenate(found, axis=1)
    return every[:, np.argsort(every[0], kind="stable")]


def parts_of(row: Row, limit: int | None) -> list[Part]:
    """Return the parts of a row to show: all of it, or three quarters of `limit` tokens and one from its end."""
    if limit is not None and limit < 1:
        raise ArgumentError(f"the tokens of a row to show must be at least 1, found {limit}")
    size = len(row.tokens)
    tail = 0 if limit is None or size <= limit else limit // 4
    head = size if limit is None or size <= limit else limit - tail
    ends = [*row.columns.tolist()[1:], size][: len(row.columns)]
    parts = []
    for first, last in ((0, head), (size - tail, size)):
        for column, end, document, within in zip(row.columns.tolist(), ends, row.documents, row.within, strict=True):
            a, b = max(first, column), min(last, end)
            if a < b:
                parts.append(Part(a, row.tokens[a:b], int(document), int(within) + a - column))
    return parts


def cut_by_spans(row: Row, part: Part) -> list[tuple[int, int, int]]:
    """Return the ranges (first column, end column, number of the span or `NO_SPAN`) of a part."""
    cuts, at = [], part.column
    for number, (start, stop, _) in enumerate(row.spans):
        a, b = max(start, part.column), min(stop, part.stop)
        if a < b:
            cuts += [(at, a, NO_SPAN)] * (at < a) + [(a, b, number)]
            at = b
    return cuts + [(at, part.stop, NO_SPAN)] * (at < part.stop)


def summary_of_field(values: npt.NDArray[Any]) -> str:
    """Return the values of a field along a row in few words: runs of equal numbers, or the range of vectors."""
    if values.ndim > 1 or not len(values):
        span = f", {values.min()} to {values.max()}" if values.size and values.dtype.kind in "biuf" else ""
        return f"{values.dtype.name}{list(values.shape[1:])}{span}"
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    lengths = np.diff(starts, append=len(values)).tolist()
    runs = [f"{value} × {length:,}" for value, length in zip(values[starts[:RUNS]].tolist(), lengths, strict=False)]
    left = len(starts) - len(runs)
    return ", ".join(runs) + (f", and {left:,} runs more" if left else "")
