"""The packing of documents into rows: concat, best-fit, pad. The lengths of the documents alone decide it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces, ends_of, ranges
from zb_hdf5.loaders.order import IndexArray
from zb_hdf5.spec import NO_DOCUMENT

#: Documents that best-fit considers together. Rows are filled to over 99.9 % long before this many; memory is 100 MiB.
BUFFER_DOCUMENTS: Final = 1 << 20


@dataclass(frozen=True)
class Packing:
    """Pieces of a stream of documents, and the rows that they make up.

    Piece k is the `lengths[k]` tokens from `offsets[k]` of the stream on. Row r holds the pieces `first[r]` to
    `first[r + 1]`, one after the other from column 0; the rest of the row is padding.
    """

    offsets: IndexArray
    lengths: IndexArray
    first: IndexArray

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1

    @property
    def tokens_kept(self) -> int:
        return int(self.lengths.sum())

    def documents_begun(self, document_lengths: IndexArray) -> IndexArray:
        """Return how many documents have their first token in each row; one without tokens begins in none."""
        starts = (np.cumsum(document_lengths) - document_lengths)[document_lengths > 0]
        begun = np.searchsorted(starts, self.offsets + self.lengths) - np.searchsorted(starts, self.offsets)
        return np.diff(np.concatenate([[0], np.cumsum(begun)])[self.first])


def packed_pieces(
    offsets: IndexArray, lengths: IndexArray, counts: IndexArray, edges: npt.NDArray[np.uint64], seq_len: int
) -> Pieces:
    """Return the pieces of rows: the packed ones, cut where documents begin, and the padding after them.

    Parameters
    ----------
    offsets, lengths
        The packed pieces, row after row.
    counts
        How many of them each row has.
    edges
        The starts of the documents, and the end of the last one.
    seq_len
        The tokens of a row.
    """
    stops = offsets + lengths
    first = edges.searchsorted(offsets.astype(np.uint64), side="right")
    inside = edges.searchsorted(stops.astype(np.uint64), side="left") - first  # documents that begin inside
    begins = edges[ranges(first, inside)].astype(np.int64)
    packed = np.repeat(np.arange(len(offsets)), inside)
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = np.cumsum(lengths) - lengths
    columns = columns - columns[(np.cumsum(counts) - counts)[rows]] if len(rows) else columns
    used = np.bincount(rows, lengths, len(counts)).astype(np.int64)
    padded = np.flatnonzero(used < seq_len)
    begin_positions = rows[packed] * seq_len + columns[packed] + begins - offsets[packed]
    padding_positions = padded * seq_len + used[padded]
    positions = np.concatenate([rows * seq_len + columns, begin_positions, padding_positions])
    no_documents = np.full(len(padded), NO_DOCUMENT, np.uint64)
    tokens = np.concatenate([offsets.astype(np.uint64), begins.astype(np.uint64), no_documents])
    # of several documents that begin at one position only the last has tokens
    positions, order = np.unique(positions, return_index=True)
    ends = ends_of(np.bincount(positions // seq_len, minlength=len(counts)))
    return Pieces(ends, (positions % seq_len).astype(np.uint32), tokens[order], seq_len)


def concat(document_lengths: IndexArray, seq_len: int) -> Packing:
    """Cut the stream every `seq_len` tokens: rows and documents straddle each other, only the last tokens are lost."""
    first = np.arange(int(document_lengths.sum()) // seq_len + 1)
    return Packing(first[:-1] * seq_len, np.full(len(first) - 1, seq_len), first)


def pad(document_lengths: IndexArray, seq_len: int) -> Packing:
    """Give each document a row: longer ones are cropped, shorter ones are padded, empty ones have no row."""
    kept = np.flatnonzero(document_lengths)
    offsets = (np.cumsum(document_lengths) - document_lengths)[kept]
    return Packing(offsets, np.minimum(document_lengths[kept], seq_len), np.arange(len(kept) + 1))


def best_fit(document_lengths: IndexArray, seq_len: int) -> Packing:
    """Fill rows with whole documents, best fit decreasing; no token is lost, and every row begins where a piece begins.

    Only a document that is longer than a row is split, into full rows and a last piece that is packed like a document.
    See Ding et al. 2024, "Fewer truncations improve language modeling".
    """
    starts = np.cumsum(document_lengths) - document_lengths
    windows = [
        _pack_window(starts[k : k + BUFFER_DOCUMENTS], document_lengths[k : k + BUFFER_DOCUMENTS], seq_len)
        for k in range(0, len(document_lengths), BUFFER_DOCUMENTS)
    ]
    offsets, lengths, sizes = map(np.concatenate, zip((np.empty(0, np.int64),) * 3, *windows, strict=True))
    return Packing(offsets, lengths, np.concatenate([[0], np.cumsum(sizes)]))


PACKINGS: Final[dict[str, Callable[[IndexArray, int], Packing]]] = {"concat": concat, "best-fit": best_fit, "pad": pad}


def _pack_window(starts: IndexArray, lengths: IndexArray, seq_len: int) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Return the pieces' offsets and lengths in row order, and how many pieces each row has."""
    offsets, sizes = _split(starts, lengths, seq_len)
    rows = _fit_rows(sizes, seq_len)
    order = np.lexsort((offsets, -sizes, rows))  # the longest first: every document begins as early as it can
    num_rows = int(rows.max(initial=-1)) + 1
    return offsets[order], sizes[order], np.bincount(rows, minlength=num_rows).astype(np.int64)


def _split(starts: IndexArray, lengths: IndexArray, seq_len: int) -> tuple[IndexArray, IndexArray]:
    """Cut documents into pieces of at most `seq_len` tokens, none of them empty."""
    counts = -(-lengths // seq_len)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.repeat(starts, counts) + number * seq_len
    return offsets, np.minimum(np.repeat(lengths, counts) - number * seq_len, seq_len)


def _fit_rows(sizes: IndexArray, seq_len: int) -> IndexArray:
    """Return the row of each piece: largest first, each into the fullest row that it fits.

    Pieces of one size are alike, and so are rows with the same free columns, so whole groups are placed at once: the
    loop runs a few times per distinct size, whatever the number of pieces.
    """
    rows = np.empty(len(sizes), np.int64)
    by_size = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    open_rows = _OpenRows(seq_len)
    done = 0
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        pieces = by_size[done : done + count]
        done += count
        while len(pieces):
            free, taken, each = open_rows.take(size, len(pieces))
            placed = np.repeat(taken, each)[: len(pieces)]
            rows[pieces[: len(placed)]] = placed
            short = len(taken) * each - len(placed)  # pieces that the last row could still hold
            open_rows.put(taken[:-1] if short else taken, free - each * size)
            if short:
                open_rows.put(taken[-1:], free - (each - short) * size)
            pieces = pieces[len(placed) :]
    return rows


class _OpenRows:
    """Rows by their free columns."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len
        self._num_rows = 0
        self._by_free: dict[int, list[npt.NDArray[Any]]] = {}
        self._has = np.zeros(seq_len + 1, bool)

    def take(self, size: int, count: int) -> tuple[int, IndexArray, int]:
        """Return a number of free columns, rows with so many, and how many pieces of `size` each of them holds.

        They are the fullest rows that hold one; new ones if there are none. All together hold `count` pieces, or as
        many as they can.
        """
        free = size + int(self._has[size:].argmax())
        if not self._has[free]:
            each = self._seq_len // size
            new = np.arange(self._num_rows, self._num_rows - (-count // each))
            self._num_rows += len(new)
            return self._seq_len, new, each
        each = free // size
        rows = np.concatenate(self._by_free.pop(free))
        self._has[free] = False
        wanted = -(-count // each)
        self.put(rows[wanted:], free)
        return free, rows[:wanted], each

    def put(self, rows: IndexArray, free: int) -> None:
        """Note the free columns of `rows`."""
        if len(rows) and free:
            self._by_free.setdefault(free, []).append(rows)
            self._has[free] = True
