"""Pieces: which parts of documents lie in which columns of which records, from stored lengths and never from ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError
from zb_hdf5.spec import NO_DOCUMENT, PIECES_SUFFIX


@dataclass(eq=False)
class Pieces:
    """The pieces of records of equal length. Every record begins a piece at column 0, so they cover all columns.

    Not to be changed: what follows from them is computed once.

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
        return len(self.ends) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all records, padding included."""
        return self.num_records * self.seq_len

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """Pieces of each record, int64."""
        return self.ends[1:] - self.ends[:-1]

    @cached_property
    def rows(self) -> npt.NDArray[np.int64]:
        """The record of each piece, int64."""
        return np.arange(self.num_records).repeat(self.counts)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """The position of the first token of each piece in all records one after the other, int64."""
        if len(self.ends) == 2:
            return self.columns.astype(np.int64)
        return _row_starts(self.num_records, self.seq_len).repeat(self.counts) + self.columns

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each piece, int64."""
        starts = self.starts
        lengths = np.empty_like(starts)  # np.diff does the same in five times the time
        np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
        lengths[-1:] = self.num_tokens - starts[-1:]
        return lengths

    @cached_property
    def is_padding(self) -> npt.NDArray[np.bool_]:
        """Whether a piece holds no token of a document."""
        return np.equal(self.offsets, np.uint64(NO_DOCUMENT))

    def take(self, records: npt.NDArray[Any]) -> Pieces:
        """Return the pieces of some records, given by their numbers, in any order and as often as they are named."""
        counts = self.counts[records]
        ends = ends_of(counts)
        chosen = ranges(self.ends[:-1][records], counts, ends)
        return Pieces(ends, self.columns[chosen], self.offsets[chosen], self.seq_len)

    def cut(self, seq_len: int) -> Pieces:
        """Return the pieces of the same tokens in shorter records: pieces are cut where records now end.

        Raises
        ------
        ArgumentError
            If `seq_len` does not divide the length of the records.
        """
        if seq_len < 1 or self.seq_len % seq_len:
            raise ArgumentError(f"seq_len must divide the {self.seq_len} of the pieces, found {seq_len}")
        begins = np.arange(0, self.num_tokens, seq_len)
        old = self.starts
        starts = np.union1d(old, begins)
        piece = old.searchsorted(starts, side="right") - 1
        offsets = self.offsets[piece]
        is_text = ~self.is_padding[piece]
        offsets[is_text] += (starts - old[piece])[is_text].astype(np.uint64)
        ends = np.append(starts.searchsorted(begins), len(starts))
        return Pieces(ends, (starts % seq_len).astype(np.uint32), offsets, seq_len)

    def moved(self, tokens: int) -> Pieces:
        """Return the same pieces of a document stream that begins so many tokens earlier; padding stays padding."""
        shift = np.where(self.is_padding, np.uint64(0), np.uint64(tokens % 2**64))  # a negative number is a large one
        return replace(self, offsets=self.offsets + shift)

    def first_columns(self, seq_len: int) -> Pieces:
        """Return the pieces of the first `seq_len` columns of each record, as of the inputs of windows of one more."""
        kept = self.columns < seq_len
        ends = ends_of(kept)[self.ends]
        return Pieces(ends, self.columns[kept], self.offsets[kept], min(seq_len, self.seq_len))


def pieces_path(path: Path) -> Path:
    """Return the path of the table of the pieces of a file of batches."""
    return path.with_name(path.name + PIECES_SUFFIX)


@lru_cache(maxsize=16)
def _row_starts(num_records: int, seq_len: int) -> npt.NDArray[np.int64]:
    """Return the position of the first token of each record, the same for each batch. Not to be changed."""
    return np.arange(0, num_records * seq_len, seq_len)


def padding(num_records: int, seq_len: int) -> Pieces:
    """Return the pieces of records that hold nothing but padding."""
    ends = np.arange(num_records + 1)
    return Pieces(ends, np.zeros(num_records, np.uint32), np.full(num_records, NO_DOCUMENT, np.uint64), seq_len)


def concatenate(parts: Sequence[Pieces]) -> Pieces:
    """Return the pieces of the records of all `parts`, at least one, in their order: records of one length."""
    lengths = sorted({part.seq_len for part in parts})
    if len(lengths) != 1:
        raise ArgumentError(f"expected pieces of records of one length, found lengths {lengths}")
    counts = np.concatenate([part.counts for part in parts])
    columns, offsets = (np.concatenate([getattr(part, name) for part in parts]) for name in ("columns", "offsets"))
    return Pieces(ends_of(counts), columns, offsets, lengths[0])


def ranges(
    firsts: npt.NDArray[Any], counts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Return `firsts[i], firsts[i] + 1, ...`, `counts[i]` of them, for all i, joined; `ends` are those of `counts`."""
    ends = ends_of(counts) if ends is None else ends
    found: npt.NDArray[np.int64] = np.arange(ends[-1])
    found += (firsts.astype(np.int64, copy=False) - ends[:-1]).repeat(counts)
    return found


def ends_of(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return 0 and the sums of the first 1, 2, ... of `counts`."""
    ends = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=ends[1:])
    return ends
