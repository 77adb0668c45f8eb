"""Documents of a stream as batches of variable length: which of them, in which order, and where in the batch each lies.

A batch is described by its pieces, and everything else follows from them (see `zb_hdf5.documents.segments`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain, islice, repeat
from math import prod
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces, ends_of
from zb_hdf5.errors import ArgumentError
from zb_hdf5.loaders.order import GlobalOrder, IndexArray, Order
from zb_hdf5.spec import NO_DOCUMENT
from zb_hdf5.store.tokens import TokenStore

#: What to do with a document that is longer than `max_tokens`.
TOO_LONG: Final = ("refuse", "truncate", "drop")
#: Steps of padded batches whose order is computed at once.
STEPS_AT_ONCE: Final = 128
#: Documents whose order is computed at once for packing.
DOCUMENTS_AT_ONCE: Final = 4096
#: The batches of a bucket are shuffled as in an "epoch" that no epoch of documents is.
BUCKET_EPOCH: Final = 2**32


class Column(Protocol):
    """Values of consecutive tokens of a stream: `TokenStore` is one."""

    def get_slice(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return those of tokens `start` to `stop`, shape (stop - start, ...)."""


class FieldColumn(NamedTuple):
    """The values of a field, counted by tokens.

    Attributes
    ----------
    values
        As `TokenStore.field` gives them: a token counts as all the values that it has.
    shape
        Of the values of one token.
    """

    values: TokenStore
    shape: tuple[int, ...]

    def get_slice(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return those of tokens `start` to `stop`, shape (stop - start, *shape)."""
        size = prod(self.shape)
        return self.values.get_slice(start * size, stop * size).reshape(stop - start, *self.shape)


class Documents:
    """The documents of a stream that are read, numbered from 0: none that is empty, each to `max_tokens` at most.

    `doc_offsets`, uint64 (D + 1,), begin each and end the last one. One longer than `max_tokens` is an error
    ("refuse"), cut ("truncate") or left out ("drop").

    Attributes
    ----------
    count
        Those that are read.
    truncated_documents, truncated_tokens, dropped_documents
        What is lost to `max_tokens` in each epoch.

    Raises
    ------
    ArgumentError
        If one is too long and must not be.
    """

    def __init__(self, doc_offsets: npt.NDArray[np.uint64], max_tokens: int | None, too_long: str) -> None:
        self._offsets, self._max_tokens = doc_offsets, max_tokens
        lengths = np.diff(doc_offsets)
        is_long = lengths > np.uint64(max_tokens) if max_tokens else np.zeros(len(lengths), np.bool_)
        if too_long == "refuse" and is_long.any():
            raise ArgumentError(
                f"expected documents of at most max_tokens={max_tokens:,} tokens, found {int(is_long.sum()):,} longer "
                f"ones, up to {int(lengths.max()):,}; pass a larger max_tokens, or too_long='truncate' or 'drop'"
            )
        self.dropped_documents = int(is_long.sum()) if too_long == "drop" else 0
        self.truncated_documents = int(is_long.sum()) - self.dropped_documents
        self.truncated_tokens = 0
        if self.truncated_documents and max_tokens:
            self.truncated_tokens = int((lengths[is_long] - np.uint64(max_tokens)).sum())
        read = (lengths > 0) & ~is_long if too_long == "drop" else lengths > 0
        self._numbers = None if read.all() else np.flatnonzero(read)
        self.count = len(lengths) if self._numbers is None else len(self._numbers)

    def numbers(self, documents: IndexArray) -> IndexArray:
        """Return their numbers in the stream."""
        return documents if self._numbers is None else self._numbers[documents]

    def starts(self, documents: IndexArray) -> npt.NDArray[np.uint64]:
        """Return the offset of the first token of each."""
        return self._offsets[self.numbers(documents)]

    def whole_lengths(self, documents: IndexArray) -> npt.NDArray[np.int64]:
        """Return how many tokens each has in the stream."""
        numbers = self.numbers(documents)
        return (self._offsets[numbers + 1] - self._offsets[numbers]).astype(np.int64)

    def lengths(self, documents: IndexArray) -> npt.NDArray[np.int64]:
        """Return how many tokens of each are read."""
        lengths = self.whole_lengths(documents)
        return lengths if self._max_tokens is None else np.minimum(lengths, self._max_tokens)


class LengthOrder(Order):
    """An order in which the documents of a batch are of similar length, and which is still random.

    A uniform permutation is cut into buckets of `bucket_batches` batches. Each is sorted by length and cut into
    batches, and these are shuffled; what does not fill a batch stays at the end. So a position is computed from its
    bucket alone.
    """

    def __init__(self, documents: Documents, batch_size: int, bucket_batches: int, *, seed: int, epoch: int) -> None:
        self.n = documents.count
        self._documents, self._batch_size, self._seed, self._epoch = documents, batch_size, seed, epoch
        self._bucket_size = batch_size * bucket_batches
        self._order = GlobalOrder(self.n, seed, epoch)

    def indices(self, positions: npt.NDArray[Any]) -> IndexArray:
        found = np.empty(positions.shape, np.int64)
        buckets, places = np.divmod(positions, self._bucket_size)
        for bucket in np.unique(buckets).tolist():
            here = buckets == bucket
            found[here] = self._bucket(bucket)[places[here]]
        return found

    def _bucket(self, number: int) -> IndexArray:
        first = number * self._bucket_size
        documents = self._order.indices(np.arange(first, min(first + self._bucket_size, self.n)))
        documents = documents[np.argsort(self._documents.whole_lengths(documents), kind="stable")]
        whole = len(documents) // self._batch_size
        shuffled = GlobalOrder(whole, self._seed, (self._epoch + 1) * BUCKET_EPOCH + number).indices(np.arange(whole))
        full = documents[: whole * self._batch_size]
        full[...] = full.reshape(whole, self._batch_size)[shuffled].reshape(-1)
        return documents


# --- which documents a step takes: those of a rank, and the position behind those of all ranks ---------------------


def padded_steps(
    order: Order, position: int, batch_size: int, rank: int, world_size: int, drop_last: bool
) -> Iterator[tuple[IndexArray, int]]:
    """Yield the `batch_size` documents of a rank at each step from a position on, and the position behind the step."""
    step = batch_size * world_size
    left = max(0, order.n - position)
    steps = left // step if drop_last else -(-left // step)
    for first in range(0, steps, STEPS_AT_ONCE):
        starts = position + np.arange(first, min(first + STEPS_AT_ONCE, steps)) * step
        positions = starts[:, np.newaxis] + rank * batch_size + np.arange(batch_size)
        for start, documents in zip(starts.tolist(), order.indices(positions % order.n), strict=True):
            yield documents, min(start + step, order.n)


def packed_steps(
    order: Order, documents: Documents, position: int, max_tokens: int, rank: int, world_size: int, drop_last: bool
) -> Iterator[tuple[IndexArray, int]]:
    """Yield the documents of a rank at each step from a position on, and the position behind the step.

    The batches do not depend on the ranks: the order is cut into them from `position` on, each as long as it fits into
    `max_tokens`, and they are dealt out in turn. So every rank computes the lengths of the documents of all.
    """
    batches = _cut(order, documents, position, max_tokens)
    while step := list(islice(batches, world_size)):
        position += sum(map(len, step))
        if len(step) < world_size:
            if drop_last:
                return
            again = chain.from_iterable(_cut(order, documents, 0, max_tokens) for _ in repeat(None))
            step += islice(again, world_size - len(step))
        yield step[rank], position


def _cut(order: Order, documents: Documents, position: int, max_tokens: int) -> Iterator[IndexArray]:
    """Yield the documents of each batch, in order."""
    waiting = np.empty(0, np.int64)
    for first in range(position, order.n, DOCUMENTS_AT_ONCE):
        stop = min(first + DOCUMENTS_AT_ONCE, order.n)
        waiting = np.concatenate([waiting, order.indices(np.arange(first, stop))])
        ends = np.cumsum(documents.lengths(waiting)).tolist()
        begin = tokens = 0
        while (end := bisect_right(ends, tokens + max_tokens)) < len(ends) or (stop == order.n and begin < end):
            yield waiting[begin:end]
            begin, tokens = end, ends[end - 1]
        waiting = waiting[begin:]


# --- where the documents lie in a batch, and its values ------------------------------------------------------------


def padded_pieces(starts: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], multiple: int) -> Pieces:
    """Return the pieces of documents that have a record each, as long as the longest, rounded up to a multiple."""
    seq_len = _rounded_up(int(lengths.max()), multiple)
    is_short = lengths < seq_len
    ends = ends_of(1 + is_short)
    columns, offsets = np.zeros(ends[-1], np.uint32), np.full(ends[-1], NO_DOCUMENT, np.uint64)
    offsets[ends[:-1]] = starts
    columns[ends[1:][is_short] - 1] = lengths[is_short]
    return Pieces(ends, columns, offsets, seq_len)


def packed_pieces(starts: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], multiple: int) -> Pieces:
    """Return the pieces of documents one after the other in one record, its length rounded up to a multiple."""
    columns = ends_of(lengths)
    seq_len = _rounded_up(int(columns[-1]), multiple)
    count = len(starts) + int(columns[-1] < seq_len)
    offsets = np.append(starts, np.uint64(NO_DOCUMENT))[:count]
    return Pieces(np.array([0, count]), columns[:count].astype(np.uint32), offsets, seq_len)


def _rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def gather(column: Column, pieces: Pieces, fill: int = 0, dtype: Any = None) -> npt.NDArray[Any]:
    """Return the values of the tokens of a stream that lie in some pieces, shape (R, S, ...).

    Parameters
    ----------
    column
        Where they are read.
    pieces
        Offsets are token numbers of the column.
    fill
        The value of padding.
    dtype
        Of the result; by default that of the column.
    """
    kind = column.get_slice(0, 0)
    values = np.zeros((pieces.num_tokens, *kind.shape[1:]), dtype or kind.dtype)
    if fill:  # only then: filling bytes with 0 gives the text "0"
        values.fill(fill)
    is_text = ~pieces.is_padding
    places = (part[is_text].tolist() for part in (pieces.starts, pieces.offsets, pieces.lengths))
    for place, offset, length in zip(*places, strict=True):
        values[place : place + length] = column.get_slice(offset, offset + length)
    return values.reshape(-1, pieces.seq_len, *kind.shape[1:])
