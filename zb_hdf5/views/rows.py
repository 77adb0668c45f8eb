"""Rows to look at: tokens, and all that is known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.core.order import GlobalOrder
from zb_hdf5.errors import ArgumentError, BackendError
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.tokens import MmapTokenStore
from zb_hdf5.views.windows import WindowReader

IndexArray = npt.NDArray[np.int64]

#: In place of the number of a document.
PADDING: Final = -1
UNKNOWN: Final = -2
#: The span of a stretch that belongs to none.
NO_SPAN: Final = -1
#: Runs of equal values of a field that are written out.
RUNS: Final = 8


class Row(NamedTuple):
    """Consecutive tokens, and what is known of them.

    Attributes
    ----------
    name
        What this is, for people.
    tokens
        Shape (S,).
    columns
        int64, one per piece of a document: the column of its first token, ascending from 0.
    documents
        int64, one per piece: the number of the document, `PADDING`, or `UNKNOWN` where no documents are stored.
    within
        int64, one per piece: how many tokens of its document lie before it.
    fields
        Name -> values, shape (S, ...).
    spans
        (first column, column behind the last, value), ascending, without overlap.
    """

    name: str
    tokens: TokenArray
    columns: IndexArray
    documents: IndexArray
    within: IndexArray
    fields: Mapping[str, npt.NDArray[Any]] = {}
    spans: Sequence[tuple[int, int, Any]] = ()


class Part(NamedTuple):
    """A stretch of a row, of one piece.

    Attributes
    ----------
    column
        Of the first token.
    tokens
        Shape (L,).
    document, within
        As in `Row`, for the first token.
    """

    column: int
    tokens: TokenArray
    document: int
    within: int

    @property
    def stop(self) -> int:
        """The column behind the last token."""
        return self.column + len(self.tokens)


def rows_of(reader: BatchReader, records: IndexArray) -> list[Row]:
    """Return records of a reader, with the pieces, fields and spans that are stored with them."""
    tokens = np.empty((len(records), reader.seq_len), reader.dtype)
    reader.read_records_into(records, tokens)
    rows = []
    for record, row in zip(records.tolist(), tokens, strict=True):
        if isinstance(reader, WindowReader):
            start = record * reader.stride
            name = f"tokens {start:,} to {start + len(row):,}"
            rows.append(Row(name, row, *_pieces_of_stretch(reader.store.doc_offsets, start, start + len(row))))
        else:
            batch, number = divmod(record, reader.batch_size)
            unknown = (np.zeros(1, np.int64), np.array([UNKNOWN]), np.zeros(1, np.int64))
            rows.append(Row(f"batch {batch:,} row {number:,}", row, *unknown))
    return rows


def document_row(store: MmapTokenStore, number: int) -> Row:
    """Return one document of a stream.

    Raises
    ------
    BatchIndexError
        If there is no such document.
    """
    tokens = store.document(number)
    zero = np.zeros(1, np.int64)
    return Row(f"document {number:,}", tokens, zero, np.array([number]), zero)


def require_documents(reader: BatchReader) -> MmapTokenStore:
    """Return the stream whose documents can be had by number.

    Raises
    ------
    BackendError
        If these are batches: no table of documents is stored with them.
    """
    if isinstance(reader, WindowReader):
        return reader.store
    raise BackendError(
        f"{reader.path}: documents are shown by number of token streams, found batches, with which no table of "
        "documents is stored; look at a --batch or a --sample"
    )


def _pieces_of_stretch(
    doc_offsets: npt.NDArray[np.uint64], start: int, stop: int
) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Return columns, documents and tokens before each piece of a stretch of a stream."""
    first = int(np.searchsorted(doc_offsets, start, side="right")) - 1
    last = int(np.searchsorted(doc_offsets, stop, side="left"))
    offsets = doc_offsets[first : last + 1].astype(np.int64)
    if offsets[-1] < stop:
        offsets = np.append(offsets, stop)  # a killed writer left tokens behind its last document
    documents = np.arange(first, first + len(offsets) - 1)
    documents[documents >= len(doc_offsets) - 1] = UNKNOWN
    begins = offsets[:-1]
    columns = np.maximum(begins - start, 0)
    some = np.diff(offsets) > 0  # those of no tokens have no piece
    return columns[some], documents[some], (start + columns - begins)[some]


def parts_of(row: Row, limit: int | None) -> list[Part]:
    """Return the stretches of a row to show: all of it, or three quarters of `limit` tokens and one from its end.

    Raises
    ------
    ArgumentError
        If `limit` is no positive number.
    """
    if limit is not None and limit < 1:
        raise ArgumentError(f"the tokens of a row to show must be at least 1, found {limit}")
    size = len(row.tokens)
    tail = 0 if limit is None or size <= limit else limit // 4
    head = size if limit is None or size <= limit else limit - tail
    ends = [*row.columns.tolist()[1:], size]
    parts = []
    for first, last in ((0, head), (size - tail, size)):
        for column, end, document, within in zip(row.columns.tolist(), ends, row.documents, row.within, strict=True):
            a, b = max(first, column), min(last, end)
            if a < b:
                parts.append(Part(a, row.tokens[a:b], int(document), int(within) + a - column))
    return parts


def cut_by_spans(row: Row, part: Part) -> list[tuple[int, int, int]]:
    """Return the stretches (first column, column behind the last, number of the span or `NO_SPAN`) of a part."""
    cuts, at = [], part.column
    for number, (start, stop, _) in enumerate(row.spans):
        a, b = max(start, part.column), min(stop, part.stop)
        if a < b:
            cuts += [(at, a, NO_SPAN)] * (at < a) + [(a, b, number)]
            at = b
    return cuts + [(at, part.stop, NO_SPAN)] * (at < part.stop)


def sample_of(total: int, count: int, seed: int) -> IndexArray:
    """Return some of the numbers below `total`, ascending, the same ones for the same seed."""
    return np.sort(GlobalOrder(total, seed, 0).indices(np.arange(min(total, count))))


def summary_of_field(values: npt.NDArray[Any]) -> str:
    """Return the values of a field along a row in few words: runs of equal numbers, or the range of vectors."""
    if values.ndim > 1 or not len(values):
        span = f", {values.min()} to {values.max()}" if values.size else ""
        return f"{values.dtype.name}{list(values.shape[1:])}{span}"
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    lengths = np.diff(starts, append=len(values)).tolist()
    runs = [f"{value} × {length:,}" for value, length in zip(values[starts[:RUNS]].tolist(), lengths, strict=False)]
    left = len(starts) - len(runs)
    return ", ".join(runs) + (f", and {left:,} runs more" if left else "")
