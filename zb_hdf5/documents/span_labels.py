"""The spans behind pieces: a list of their values, and for each token the place of its span in that list."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document import Documents, Spans
from zb_hdf5.documents.pieces import Pieces, ranges

#: `(starts, stops)` -> the spans that have a token in some stretches of the document stream.
ReadSpans: TypeAlias = Callable[[npt.NDArray[np.uint64], npt.NDArray[np.uint64]], Spans]

#: A bool says whether a loader yields spans; a codec says it too, and decodes values that need one.
WantedSpans: TypeAlias = bool | str | Callable[[bytes], Any]


def reading(table: Documents, wanted: WantedSpans) -> ReadSpans:
    """Return what reads the spans of a table, with their values decoded as a loader is asked to."""
    return table.spans_of if isinstance(wanted, bool) else partial(table.spans_of, codec=wanted)


def spans_of_pieces(pieces: Pieces, read: ReadSpans) -> tuple[list[Any], npt.NDArray[np.int32]]:
    """Return the values of the spans that have a token in some records, and which token has which.

    Parameters
    ----------
    pieces
        Of R records of S tokens.
    read
        Called once, with stretches that ascend and lie apart: pieces that follow each other in the stream are one.

    Returns
    -------
    (values, index)
        The values in the order of the document stream, each span once; and int32, shape (R, S): the place in `values`
        of the span of each token, -1 for a token without one.
    """
    real = ~pieces.is_padding
    offsets, starts, lengths = pieces.offsets[real].view(np.int64), pieces.starts[real], pieces.lengths[real]
    found = read(*_stretches(offsets, lengths))
    span_starts, span_stops = found.starts.view(np.int64), found.stops.view(np.int64)
    firsts = span_stops.searchsorted(offsets, side="right")
    counts = span_starts.searchsorted(offsets + lengths) - firsts
    numbers = ranges(firsts, counts)
    # where they begin and end in the records, one behind the other; a span may reach over both ends of a piece
    moved, low, high = (values.repeat(counts) for values in (starts - offsets, starts, starts + lengths))
    begins = np.maximum(span_starts[numbers] + moved, low)
    ends = np.minimum(span_stops[numbers] + moved, high)
    names = np.full(2 * len(numbers) + 1, -1, np.int32)
    names[1::2] = numbers
    return found.values, _labels(0, begins, ends, pieces.num_tokens, names).reshape(-1, pieces.seq_len)


def spans_of_stretch(start: int, stop: int, seq_len: int, read: ReadSpans) -> tuple[list[Any], npt.NDArray[np.int32]]:
    """Return what `spans_of_pieces` does, of records of `seq_len` tokens that are `start` to `stop` of the stream."""
    edges = np.array([start, stop], np.uint64)
    found = read(edges[:1], edges[1:])
    names = _names(len(found.starts))
    return found.values, _labels(start, found.starts, found.stops, stop, names).reshape(-1, seq_len)


def _stretches(
    offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return where the stretches of the stream begin and end that pieces cover, joined where they touch or overlap."""
    order = offsets.argsort(kind="stable")
    starts = offsets[order]
    stops = np.maximum.accumulate(starts + lengths[order])
    is_first, is_last = np.ones(len(order), np.bool_), np.ones(len(order), np.bool_)
    is_first[1:] = is_last[:-1] = starts[1:] > stops[:-1]
    return starts[is_first].view(np.uint64), stops[is_last].view(np.uint64)


def _labels(
    start: int, begins: npt.NDArray[Any], ends: npt.NDArray[Any], stop: int, names: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Return the number of the span of each token from `start` to `stop`; `names` has those of gaps and spans in turn.

    The first span may begin before `start`, and the last one end behind `stop`.
    """
    edges = np.empty(2 * len(begins) + 2, np.int64)
    edges[1:-1:2], edges[2:-1:2] = begins, ends
    edges[1], edges[-2] = max(edges[1], start), min(edges[-2], stop)
    edges[0], edges[-1] = start, stop
    return names.repeat(edges[1:] - edges[:-1])


def _names(count: int) -> npt.NDArray[np.int32]:
    """Return the numbers from 0 on, each between two -1. Not to be changed."""
    return _names_below(count.bit_length())[: 2 * count + 1]


@lru_cache  # a few sizes serve all batches: one for each number of spans would fill the memory
def _names_below(num_bits: int) -> npt.NDArray[np.int32]:
    names = np.full((2 << num_bits) + 1, -1, np.int32)
    names[1::2] = np.arange(1 << num_bits)
    return names
