"""Pieces: which parts of documents lie in which columns of which records, from stored lengths and never from ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.spec import NO_DOCUMENT


class Pieces(NamedTuple):
    """The pieces of records of equal length. Every record begins a piece at column 0, so they cover all columns.

    Attributes
    ----------
    ends
        int64, shape (R + 1,): record r has the pieces `ends[r]` to `ends[r + 1]`; `ends[0]` is 0.
    columns
        uint32, one per piece: the column of its first token, ascending in each record.
    offsets
        uint64, one per piece: the offset of its first token in the document stream, `NO_DOCUMENT` for padding.
    seq_len
        Tokens of a record.
    """

    ends: npt.NDArray[np.int64]
    columns: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.uint64]
    seq_len: int

    @property
    def num_records(self) -> int:
        """Records."""
        return len(self.ends) - 1

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The record of each piece, int64."""
        return np.repeat(np.arange(self.num_records), np.diff(self.ends))

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The place of the first token of each piece in all records one after the other, int64."""
        return self.rows * self.seq_len + self.columns

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each piece, int64."""
        return np.diff(self.starts, append=self.num_records * self.seq_len)

    @property
    def is_padding(self) -> npt.NDArray[np.bool_]:
        """Whether a piece holds no token of a document."""
        return np.equal(self.offsets, np.uint64(NO_DOCUMENT))

    def take(self, records: npt.NDArray[np.int64]) -> Pieces:
        """Return the pieces of some of the records, in any order."""
        counts = np.diff(self.ends)[records]
        index = ranges(self.ends[records], counts)
        return Pieces(ends_of(counts), self.columns[index], self.offsets[index], self.seq_len)

    def cut(self, columns: npt.NDArray[np.int64], seq_len: int) -> Pieces:
        """Return the pieces of a part of each record: of the `seq_len` columns from `columns[r]` on."""
        first, rows = self.columns.astype(np.int64), self.rows
        low = columns[rows]
        start, stop = np.maximum(first, low), np.minimum(first + self.lengths, low + seq_len)
        kept = np.flatnonzero(start < stop)
        skipped = np.where(self.is_padding, 0, start - first).astype(np.uint64)
        counts = np.bincount(rows[kept], minlength=self.num_records)
        inside = (start - low)[kept].astype(np.uint32)
        return Pieces(ends_of(counts), inside, (self.offsets + skipped)[kept], seq_len)


def padding(num_records: int, seq_len: int) -> Pieces:
    """Return the pieces of records that hold nothing but padding."""
    counts = np.ones(num_records, np.int64)
    return Pieces(
        ends_of(counts), np.zeros(num_records, np.uint32), np.full(num_records, NO_DOCUMENT, np.uint64), seq_len
    )


def joined(parts: Sequence[Pieces]) -> Pieces:
    """Return the pieces of the records of several parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Pieces(
        ends_of(np.concatenate([np.diff(part.ends) for part in parts])),
        np.concatenate([part.columns for part in parts]),
        np.concatenate([part.offsets for part in parts]),
        parts[0].seq_len,
    )


def ends_of(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where each record's pieces begin and the last one's end, from how many each has."""
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def ranges(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return `counts[k]` consecutive numbers from `starts[k]` on, for each k."""
    return np.repeat(starts - ends_of(counts)[:-1], counts) + np.arange(counts.sum())
