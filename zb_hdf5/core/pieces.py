"""Pieces: which parts of documents lie in which columns of which records, from stored lengths and never from ids."""

from __future__ import annotations

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
