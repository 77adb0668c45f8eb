"""Pieces: the parts of documents in the columns of records, and the arrays that attention and loss need of them.

All of it follows from stored lengths, and nothing from token ids: an end-of-text id may be text. For attention a piece
is a *segment*, of a document or of padding: tokens attend to tokens of their own segment only. Each row begins one, so
a document that two rows share is two segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import Spans
from zb_hdf5.errors import ArgumentError
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.spec import NO_DOCUMENT, TokenArray

#: A target that `torch.nn.functional.cross_entropy` leaves out, as it does by default.
IGNORED_TARGET: Final = -100
#: The document id of padding.
PADDING_ID: Final = -1


@dataclass(eq=False)
class Pieces:
    """The pieces of records of equal length. Every record begins a piece at column 0, so they cover all columns.

    Not to be changed: all that follows from them is computed once.

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

    @cached_per_process
    def counts(self) -> npt.NDArray[np.int64]:
        """Pieces of each record, int64."""
        return self.ends[1:] - self.ends[:-1]

    @cached_per_process
    def rows(self) -> npt.NDArray[np.int64]:
        """The record of each piece, int64."""
        return np.arange(self.num_records).repeat(self.counts)

    @cached_per_process
    def starts(self) -> npt.NDArray[np.int64]:
        """The position of the first token of each piece in all records one after the other, int64."""
        return np.arange(0, self.num_tokens, self.seq_len).repeat(self.counts) + self.columns

    @cached_per_process
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each piece, int64."""
        starts = self.starts
        lengths = np.empty_like(starts)  # np.diff does the same in five times the time
        np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
        lengths[-1:] = self.num_tokens - starts[-1:]
        return lengths

    @cached_per_process
    def is_padding(self) -> npt.NDArray[np.bool_]:
        """Whether a piece holds no token of a document."""
        return np.equal(self.offsets, np.uint64(NO_DOCUMENT))

    def take(self, records: npt.NDArray[Any]) -> Pieces:
        """Return the pieces of some records, given by their numbers, in any order and as often as they are named."""
        counts = self.counts[records]
        ends = ends_of(counts)
        chosen = ranges(self.ends[:-1][records], counts, ends)
        return Pieces(ends, self.columns[chosen], self.offsets[chosen], self.seq_len)

    def split(self, num_records: int) -> Iterator[Pieces]:
        """Yield the pieces of the first `num_records` records, of the next ones, and so on."""
        first_rows = np.arange(self.num_records) % num_records * self.seq_len
        starts = first_rows.repeat(self.counts) + self.columns  # for all parts at once, and so are the lengths
        lengths = self.lengths
        record = 0
        for first, last in pairwise(self.ends[::num_records].tolist()):
            ends = self.ends[record : record + num_records + 1] - first
            part = Pieces(ends, self.columns[first:last], self.offsets[first:last], self.seq_len)
            part.starts = starts[first:last]
            part.lengths = lengths[first:last]
            record += num_records
            yield part

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
        if not tokens:
            return self
        shift = np.where(self.is_padding, np.uint64(0), np.uint64(tokens % 2**64))  # a negative number is a large one
        return replace(self, offsets=self.offsets + shift)

    def first_columns(self, seq_len: int) -> Pieces:
        """Return the pieces of the first `seq_len` columns of each record, as of the inputs of windows of one more."""
        kept = self.columns < seq_len
        ends = ends_of(kept)[self.ends]
        return Pieces(ends, self.columns[kept], self.offsets[kept], min(seq_len, self.seq_len))


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
    columns = np.concatenate([part.columns for part in parts])
    offsets = np.concatenate([part.offsets for part in parts])
    return Pieces(ends_of(counts), columns, offsets, lengths[0])


def ranges(
    firsts: npt.NDArray[Any], counts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Return `firsts[i], firsts[i] + 1, ...`, `counts[i]` of them, for all i, joined, with the `ends` of `counts`."""
    ends = ends_of(counts) if ends is None else ends
    found: npt.NDArray[np.int64] = np.arange(ends[-1])
    found += (firsts.astype(np.int64, copy=False) - ends[:-1]).repeat(counts)
    return found


def ends_of(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return 0 and the sums of the first 1, 2, ... of `counts`."""
    ends = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=ends[1:])
    return ends


# --- segments: boundaries, positions, numbers and targets ---------------------------------------------------------


def cu_seqlens(pieces: Pieces, capacity: int | None = None) -> npt.NDArray[np.int32]:
    """Return the start of each segment of the batch and the end of the last one, int32, as flash-attention takes them.

    After the end they are filled up to `capacity` with segments of no token; `ArgumentError` if it is too small.
    """
    count = len(pieces.columns)
    if capacity is not None and capacity <= count:
        raise ArgumentError(
            f"capacity of cu_seqlens: expected at least {count + 1:,} for this batch, found {capacity:,}"
        )
    found = np.empty(capacity or count + 1, np.int32)
    found[:count] = pieces.starts
    found[count:] = pieces.num_tokens
    return found


def max_seqlen(pieces: Pieces) -> int:
    """Return the length of the longest segment, padding included; 0 without records."""
    return int(pieces.lengths.max(initial=0))


def seq_lens(pieces: Pieces) -> npt.NDArray[np.int32]:
    """Return the length of each segment, padding included: int32."""
    return pieces.lengths.astype(np.int32)


def position_ids(pieces: Pieces) -> npt.NDArray[np.int32]:
    """Return the position of each token in its segment, int32, shape (R, S): from 0 also where a document goes on."""
    found = pieces.starts.astype(np.int32).repeat(pieces.lengths)
    return np.subtract(_counting(len(found)), found, out=found).reshape(-1, pieces.seq_len)


@lru_cache(maxsize=256)  # few have the tokens of a batch, which are its large ones
def _counting(stop: int) -> npt.NDArray[np.int32]:
    """Return 0, 1, ... up to `stop`: a third of the time of `position_ids`, and the same for each batch."""
    counting = np.arange(stop, dtype=np.int32)
    counting.flags.writeable = False
    return counting


def document_ids(pieces: Pieces) -> npt.NDArray[np.int32]:
    """Return the index of each token's segment in `cu_seqlens`: int32, shape (R, S); -1 for padding."""
    numbers = _counting(len(pieces.offsets))
    padding = pieces.is_padding
    if padding.any():
        numbers = np.where(padding, np.int32(PADDING_ID), numbers)
    return numbers.repeat(pieces.lengths).reshape(-1, pieces.seq_len)


def targets(tokens: TokenArray, pieces: Pieces) -> npt.NDArray[np.int64]:
    """Return the token that follows each token in its segment, or -100 where none does: int64, shape (R, S).

    None follows the last token of a segment, and none follows padding.
    """
    found = np.empty(pieces.num_tokens, np.int64)
    if len(found):
        found[:-1] = tokens.reshape(-1)[1:]
        found[pieces.starts - 1] = IGNORED_TARGET  # of the first segment this is the last token of all
        padding = pieces.is_padding
        if padding.any():
            found[ranges(pieces.starts[padding], pieces.lengths[padding])] = IGNORED_TARGET
    return found.reshape(-1, pieces.seq_len)


def next_tokens(tokens: TokenArray, pieces: Pieces | None) -> npt.NDArray[np.int64]:
    """Return the token that follows each token in its row; -100 for the last one, and where the next is padding."""
    found = np.full(tokens.shape, IGNORED_TARGET, np.int64)
    found[:, :-1] = tokens[:, 1:]
    if pieces is not None and (padding := pieces.is_padding).any():
        # of padding that begins a row this is the last token of the row before, which has no target
        found.reshape(-1)[ranges(pieces.starts[padding], pieces.lengths[padding]) - 1] = IGNORED_TARGET
    return found


def ignore(found: npt.NDArray[np.int64], pieces: Pieces, chosen: npt.NDArray[np.bool_]) -> None:
    """Remove the tokens of the chosen pieces from the array that `targets` or `next_tokens` returned."""
    first = pieces.columns[chosen] == 0  # its first token is the target of no token
    starts = pieces.starts[chosen] - 1
    lengths = pieces.lengths[chosen]
    found.reshape(-1)[ranges(starts + first, lengths - first)] = IGNORED_TARGET


def pieces_of_windows(doc_offsets: npt.NDArray[Any], starts: npt.NDArray[np.int64], seq_len: int, end: int) -> Pieces:
    """Return the pieces of windows of a stream.

    Parameters
    ----------
    doc_offsets
        Starts of documents, ascending: for each window the last one at or before its start, and all inside it.
        Documents may be empty.
    starts
        The first token of each window, in any order.
    seq_len
        Tokens of a window.
    end
        The end of the last document: tokens from there on count as padding.
    """
    starts = starts.astype(doc_offsets.dtype)  # searchsorted would copy all offsets to a common dtype
    first = doc_offsets.searchsorted(starts, side="right")
    counts = doc_offsets.searchsorted(starts + doc_offsets.dtype.type(seq_len), side="left") - first + 1
    ends = ends_of(counts)
    offsets = doc_offsets[ranges(first - 1, counts, ends)].astype(np.uint64)
    offsets[ends[:-1]] = starts  # a window begins in a document, the others begin in it
    kept = np.empty(len(offsets), np.bool_)
    np.not_equal(offsets[1:], offsets[:-1], out=kept[1:])  # of several that begin there, all but one are empty
    kept[ends[:-1]] = True
    columns = (offsets - starts.astype(np.uint64).repeat(counts)).astype(np.uint32)
    offsets[offsets >= np.uint64(end)] = NO_DOCUMENT
    return Pieces(ends_of(kept)[ends], columns[kept], offsets[kept], seq_len)


# --- the spans in records -----------------------------------------------------------------------------------------

#: `(starts, stops)` -> the spans that have a token in some ranges of the document stream.
ReadSpans: TypeAlias = Callable[[npt.NDArray[np.uint64], npt.NDArray[np.uint64]], Spans]


def spans_of_pieces(pieces: Pieces, read: ReadSpans) -> tuple[list[Any], npt.NDArray[np.int32]]:
    """Return the values of the spans in some records, each once, and for each token the index of its span or -1."""
    real = ~pieces.is_padding
    offsets = pieces.offsets[real].view(np.int64)
    starts = pieces.starts[real]
    lengths = pieces.lengths[real]
    found = read(*_joined_ranges(offsets, lengths))
    span_starts = found.starts.view(np.int64)
    span_stops = found.stops.view(np.int64)
    firsts = span_stops.searchsorted(offsets, side="right")
    counts = span_starts.searchsorted(offsets + lengths) - firsts
    numbers = ranges(firsts, counts)
    # their first and last tokens in the records, joined; a span may reach over both ends of a piece
    moved, low, high = (values.repeat(counts) for values in (starts - offsets, starts, starts + lengths))
    edges = np.empty(2 * len(numbers) + 2, np.int64)
    edges[0] = 0
    edges[1:-1:2] = np.maximum(span_starts[numbers] + moved, low)
    edges[2:-1:2] = np.minimum(span_stops[numbers] + moved, high)
    edges[-1] = pieces.num_tokens
    names = np.full(2 * len(numbers) + 1, -1, np.int32)  # gaps and spans in turns
    names[1::2] = numbers
    return found.values, names.repeat(edges[1:] - edges[:-1]).reshape(-1, pieces.seq_len)


def _joined_ranges(
    offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the ranges of the stream that pieces cover, joined where they touch or overlap."""
    order = offsets.argsort(kind="stable")
    starts = offsets[order]
    stops = np.maximum.accumulate(starts + lengths[order])
    is_first = np.ones(len(order), np.bool_)
    is_last = np.ones(len(order), np.bool_)
    is_first[1:] = is_last[:-1] = starts[1:] > stops[:-1]
    return starts[is_first].view(np.uint64), stops[is_last].view(np.uint64)
