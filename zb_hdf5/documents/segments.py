"""The facts of documents for attention and loss: boundaries, positions, numbers and targets, from pieces.

All of it follows from the stored pieces, and nothing from token ids: an end-of-text id may be text.
A *segment* is a piece, of a document or of padding: tokens attend to those of their own segment only. Each row begins
a segment, so a document that two rows share is two segments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces, ends_of, ranges
from zb_hdf5.errors import ArgumentError
from zb_hdf5.spec import NO_DOCUMENT, TokenArray

#: A target that `torch.nn.functional.cross_entropy` leaves out, as it does by default.
IGNORED_TARGET: Final = -100
#: The document id of padding.
PADDING_ID: Final = -1


def cu_seqlens(pieces: Pieces, capacity: int | None = None) -> npt.NDArray[np.int32]:
    """Return the start of each segment of the batch and the end of the last one, int32, as flash-attention takes them.

    Behind the end they are filled up to `capacity` with segments of no token; `ArgumentError` if it is too small.
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
    lengths = pieces.lengths
    return int(lengths.max()) if len(lengths) else 0


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
    numbers, padding = _counting(len(pieces.offsets)), pieces.is_padding
    if padding.any():
        numbers = np.where(padding, np.int32(PADDING_ID), numbers)
    return numbers.repeat(pieces.lengths).reshape(-1, pieces.seq_len)


def targets(tokens: TokenArray, pieces: Pieces, mask: npt.NDArray[Any] | None = None) -> npt.NDArray[np.int64]:
    """Return the token that follows each token in its segment, or -100 where none does: int64, shape (R, S).

    None follows the last token of a segment, and none follows padding. A token whose `mask` is 0 is no target.
    """
    found = np.empty(pieces.num_tokens, np.int64)
    if len(found):
        found[:-1] = tokens.reshape(-1)[1:]
        if mask is not None:
            found[:-1][mask.reshape(-1)[1:] == 0] = IGNORED_TARGET
        found[pieces.starts - 1] = IGNORED_TARGET  # the first segment begins behind the last token
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
    """Take the targets away that are tokens of the chosen pieces. `found` is what `targets` or `next_tokens` gave."""
    first = pieces.columns[chosen] == 0  # its first token is nobody's target
    starts, lengths = pieces.starts[chosen] - 1, pieces.lengths[chosen]
    found.reshape(-1)[ranges(starts + first, lengths - first)] = IGNORED_TARGET


def pieces_of_windows(doc_offsets: npt.NDArray[Any], starts: npt.NDArray[np.int64], seq_len: int, end: int) -> Pieces:
    """Return the pieces of windows of a stream, which begin at `starts`, in any order.

    `doc_offsets` ascend: of each window the last start of a document at or before its own, and all inside it. Documents
    may be empty; tokens from `end` on, where the last document ends, count as padding.
    """
    starts = starts.astype(doc_offsets.dtype)  # searchsorted would copy all offsets to a common dtype
    if len(starts) == 1:
        return _pieces_of_window(doc_offsets, starts[0], seq_len, end)
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
    if kept.all():
        return Pieces(ends, columns, offsets, seq_len)
    return Pieces(ends_of(kept)[ends], columns[kept], offsets[kept], seq_len)


def _pieces_of_window(doc_offsets: npt.NDArray[Any], start: Any, seq_len: int, end: int) -> Pieces:
    """Return the pieces of one window, in a third of the time."""
    first = int(doc_offsets.searchsorted(start, side="right")) - 1
    stop = int(doc_offsets.searchsorted(start + doc_offsets.dtype.type(seq_len)))
    offsets = doc_offsets[first:stop].astype(np.uint64)
    offsets[0] = start
    if len(offsets) > 1:
        kept = np.append(True, offsets[1:] != offsets[:-1])  # as above
        offsets = offsets if kept.all() else offsets[kept]
    columns = (offsets - offsets[0]).astype(np.uint32)
    if stop == len(doc_offsets):
        offsets[offsets >= np.uint64(end)] = NO_DOCUMENT
    return Pieces(np.array([0, len(offsets)]), columns, offsets, seq_len)
