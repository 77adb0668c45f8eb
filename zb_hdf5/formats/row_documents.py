"""The documents of packed rows and of streams of other programs, where a column tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces, ends_of
from zb_hdf5.errors import ConvertError
from zb_hdf5.field import Field
from zb_hdf5.files.tokens import Tokens

#: The lengths of the documents of a row, as TRL has them: as many as it has documents.
LENGTHS_COLUMN: Final = "seq_lengths"
#: The position of each id in its document, as axolotl has it: a document begins where it does not grow.
POSITIONS_COLUMN: Final = "position_ids"
#: The number of the document of each id, counted from 1, and 0 for padding; without a 2 a row is one document.
NUMBERS_COLUMN: Final = "attention_mask"
#: Batches in which a second document is looked for.
SAMPLE_BATCHES: Final = 16
#: Positions of a stream that are read at once.
STREAM_BLOCK: Final = 1 << 20
#: In the order in which they are looked for.
DOCUMENTS_COLUMNS: Final = (LENGTHS_COLUMN, POSITIONS_COLUMN, NUMBERS_COLUMN)


def documents_column(integers: set[str]) -> str:
    """Return the column that tells the documents of rows apart, of those that are lists of integers; "": none."""
    return next((name for name in DOCUMENTS_COLUMNS if name in integers), "")


def documents_field(fields: Iterable[Field], num_batches: int, read: Callable[[str, int], npt.NDArray[Any]]) -> str:
    """Return the field that tells the documents of records apart; "": none does.

    A mask of 0 and 1 alone tells none: most records of fine-tuning have one, and are not packed rows.

    Parameters
    ----------
    fields, num_batches
        The fields beside the tokens, and how many batches have values.
    read
        Returns the values of a field in one batch.
    """
    integers = {field.name for field in fields if _is_number(field)}
    name = documents_column(integers - {LENGTHS_COLUMN})
    if name != NUMBERS_COLUMN:
        return name
    sample = {number * num_batches // SAMPLE_BATCHES for number in range(min(1, num_batches) * SAMPLE_BATCHES)}
    return name if any((read(name, number) > 1).any() for number in sample) else ""


def stream_field(fields: Collection[Field]) -> str:
    """Return the field that tells the documents of a stream apart; "": none does."""
    return next((each.name for each in fields if each.name == POSITIONS_COLUMN and _is_number(each)), "")


def _is_number(field: Field) -> bool:
    """Return whether a field has one integer for each token."""
    return field.dtype.kind in "iu" and not field.shape


class RowDocuments(NamedTuple):
    """The documents of some rows.

    Attributes
    ----------
    lengths
        The ids of each document.
    rows
        The number of its row, of those that were given.
    """

    lengths: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls, name: str, values: npt.NDArray[Any], lengths: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> RowDocuments:
        """Return the documents of rows. A row that none of its values divides is one.

        Parameters
        ----------
        name
            The column that tells them apart.
        values
            Its values in all rows, one after the other.
        lengths, counts
            The ids of each row, and its values in the column: the same, but for `LENGTHS_COLUMN`.

        Raises
        ------
        DocumentsError
            If the lengths of the documents of a row do not fit its ids.
        """
        rows = np.arange(len(lengths))
        if name == LENGTHS_COLUMN:
            owners = np.repeat(rows, counts)
            _require_lengths(values, owners, lengths)
            return cls(values.astype(np.int64), owners)
        begins = _begins(name, values, np.repeat(rows, lengths), lengths)
        starts = np.cumsum(lengths) - lengths
        begins[starts[lengths > 0]] = True
        edges = np.flatnonzero(begins)
        owners = np.searchsorted(np.cumsum(lengths), edges, side="right")
        empty = rows[lengths == 0]
        found = np.concatenate([np.diff(np.append(edges, len(values))), np.zeros(len(empty), np.int64)])
        owners = np.concatenate([owners, empty])
        order = np.argsort(owners, kind="stable")
        return cls(found[order], owners[order])


def pieces_of_rows(name: str, values: npt.NDArray[Any], records: npt.NDArray[np.int64]) -> Pieces:
    """Return the pieces of packed records, whose document stream is that of all records.

    Parameters
    ----------
    name
        The field that tells their documents apart.
    values
        Its values, shape (R, S).
    records
        The numbers of the records.
    """
    num_records, seq_len = values.shape
    lengths = np.full(num_records, seq_len)
    found = RowDocuments.of(name, values.reshape(-1), lengths, lengths)
    starts = ends_of(found.lengths)[:-1]
    columns = starts - found.rows * seq_len
    offsets = (records[found.rows] * seq_len + columns).astype(np.uint64)
    return Pieces(ends_of(np.bincount(found.rows, minlength=num_records)), columns.astype(np.uint32), offsets, seq_len)


def pieces_in_stream(positions: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> Pieces:
    """Return the pieces of windows of a stream. No token of it is padding.

    Parameters
    ----------
    positions
        The position of each token in its document, shape (R, S).
    starts
        The first token of each window.
    """
    begins = np.ones(positions.shape, bool)
    begins[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    rows, columns = begins.nonzero()
    offsets = (starts[rows] + columns).astype(np.uint64)
    return Pieces(ends_of(begins.sum(axis=1)), columns.astype(np.uint32), offsets, positions.shape[1])


def edges_in_stream(positions: Tokens, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Return where each document of a file of a stream begins and the last one ends, shape (D + 1,).

    Parameters
    ----------
    positions
        The position of each token of all files in its document. They are read in blocks.
    start, stop
        The first token of the file, and its end. The edges count from there.
    """
    found = [np.zeros(1, np.uint64)]
    for first in range(start, stop, STREAM_BLOCK):
        before = max(start, first - 1)
        block = np.empty(min(first + STREAM_BLOCK, stop) - before, positions.dtype)
        positions.read([(before, block)])
        begins = np.flatnonzero(block[1:] <= block[:-1])
        found.append((begins + (before + 1 - start)).astype(np.uint64))
    return np.concatenate([*found, np.array([stop - start], np.uint64)])


def _require_lengths(values: npt.NDArray[Any], owners: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
    """Raise `DocumentsError` unless the lengths of the documents of each row fit its ids."""
    sums = np.zeros(len(lengths), np.int64)
    np.add.at(sums, owners, values.astype(np.int64))
    is_negative = values < 0
    if is_negative.any():
        place = int(np.flatnonzero(is_negative)[0])
        raise DocumentsError(int(owners[place]), f"expected lengths of at least 0, found {values[place]:,}")
    is_wrong = sums != lengths
    if is_wrong.any():
        row = int(np.flatnonzero(is_wrong)[0])
        raise DocumentsError(row, f"expected lengths of {lengths[row]:,} ids together, found {sums[row]:,}")


class DocumentsError(ConvertError):
    """The documents of a row do not fit its ids.

    Attributes
    ----------
    row
        The number of the row, of those that were given.
    """

    def __init__(self, row: int, facts: str) -> None:
        super().__init__(facts)
        self.row = row


def _begins(
    name: str, values: npt.NDArray[Any], rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return for each value whether a document begins at it, within its row.

    Parameters
    ----------
    rows
        The row of each value.
    """
    begins = np.zeros(len(values), bool)
    if name == NUMBERS_COLUMN:
        begins[1:] = values[1:] != values[:-1]
        is_numbered = np.bincount(rows[values > 1], minlength=len(lengths)) > 0
        return begins & is_numbered[rows]
    begins[1:] = values[1:] <= values[:-1]
    return begins & ~_is_padding(values, rows, lengths)


def _is_padding(
    positions: npt.NDArray[Any], rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return for each position whether it follows another 0, and zeros alone follow it: padding is one document."""
    places = np.arange(len(positions))
    last = np.cumsum(lengths) - lengths - 1  # of each row the last place that has no 0
    used = positions != 0
    np.maximum.at(last, rows[used], places[used])
    return places > last[rows] + 1
