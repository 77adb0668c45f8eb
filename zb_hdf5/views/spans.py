"""The spans behind pieces: a list of their values, and for each token the place of its span in that list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.core.documents import Spans
from zb_hdf5.core.pieces import Pieces, ends_of, ranges
from zb_hdf5.spec import NO_DOCUMENT


def spans_of_pieces(pieces: Pieces, read: Callable[[int, int], Spans]) -> tuple[list[Any], npt.NDArray[np.int32]]:
    """Return the values of the spans that have a token in some records, and which token has which.

    Parameters
    ----------
    pieces
        Of R records of S tokens.
    read
        `(start, stop)` -> the spans that have a token in a stretch of the document stream: called once for each
        stretch, however many spans it has. Pieces that follow each other in the stream are one stretch.

    Returns
    -------
    (values, index)
        The values in the order of the document stream, each span once; and int32, shape (R, S): the place in `values`
        of the span of each token, -1 for a token without one.
    """
    if _is_one_stretch(pieces):
        start = int(pieces.offsets[0])
        found = read(start, start + pieces.num_tokens)
        return found.values, _labels(found, start, start + pieces.num_tokens, 0).reshape(-1, pieces.seq_len)
    order = np.flatnonzero(~pieces.is_padding)
    order = order[pieces.offsets[order].argsort(kind="stable")]
    starts, lengths = pieces.offsets[order].astype(np.int64), pieces.lengths[order]
    stretch_starts, stretch_stops, stretch_of = _stretches(starts, lengths)
    values: list[Any] = []
    labels: list[npt.NDArray[np.int32]] = []
    last_start = -1
    for start, stop in zip(stretch_starts.tolist(), stretch_stops.tolist(), strict=True):
        found = read(start, stop)
        again = int(bool(len(found.starts)) and int(found.starts[0]) == last_start)  # it began in the stretch before
        labels.append(_labels(found, start, stop, len(values) - again))
        values += found.values[again:]
        last_start = int(found.starts[-1]) if len(found.starts) else last_start
    index = np.full(pieces.num_tokens, -1, np.int32)
    if labels:
        firsts = ends_of(stretch_stops - stretch_starts)[:-1] - stretch_starts
        index[ranges(pieces.starts[order], lengths)] = np.concatenate(labels)[
            ranges(firsts[stretch_of] + starts, lengths)
        ]
    return values, index.reshape(-1, pieces.seq_len)


def _is_one_stretch(pieces: Pieces) -> bool:
    """Return whether the records are one window of a stream, or several that follow each other."""
    if not len(pieces.offsets) or pieces.offsets[0] == np.uint64(NO_DOCUMENT):
        return False
    if len(pieces.offsets) == 1:
        return True
    return bool((pieces.offsets - pieces.starts.view(np.uint64) == pieces.offsets[0]).all())


def _stretches(
    starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Join pieces, ascending by their start, that touch or overlap; return starts, stops, and the stretch of each."""
    if not len(starts):
        return starts, starts, starts
    stops = np.maximum.accumulate(starts + lengths)
    begins = np.append(True, starts[1:] > stops[:-1])
    first = np.flatnonzero(begins)
    return starts[first], stops[np.append(first[1:], len(starts)) - 1], np.cumsum(begins) - 1


def _labels(found: Spans, start: int, stop: int, base: int) -> npt.NDArray[np.int32]:
    """Return the number of the span of each token of a stretch, from `base` on, -1 where there is none."""
    count = len(found.starts)
    edges = np.empty(2 * count + 2, np.int64)
    edges[1:-1:2], edges[2:-1:2] = found.starts, found.stops
    edges[0], edges[-1] = start, stop
    if count:  # the first one may begin before the stretch, and the last one end behind it
        edges[1], edges[-2] = max(int(edges[1]), start), min(int(edges[-2]), stop)
    names = np.empty(2 * count + 1, np.int32)
    names[::2], names[1::2] = -1, np.arange(base, base + count)
    return names.repeat(edges[1:] - edges[:-1])
