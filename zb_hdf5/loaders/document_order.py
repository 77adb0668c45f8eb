"""The documents of a stream, numbered for a loader; their order by length; and the steps of packed documents."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain, islice, repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError
from zb_hdf5.loaders.order import WIDE_VERSION, GlobalOrder, IndexArray, Order, StepPlan
from zb_hdf5.loaders.state import MAX_COUNT

#: The batches of a bucket are shuffled as in an "epoch" that no epoch of documents is.
BUCKET_EPOCH: Final = 2**32
#: Documents whose order is computed at once for packing.
PACKED_AT_ONCE: Final = 4096


class Documents:
    """The non-empty documents of a stream, at most `max_tokens` long, renumbered from 0.

    Parameters
    ----------
    doc_offsets
        The offset of the first token of each document, and the end of the last one.
    max_tokens
        The longest document; None: any.
    too_long
        Treatment of a longer document: "refuse" them all, "truncate" it, or "drop" it.
    path
        The stream, for messages.

    Attributes
    ----------
    count
        The number of documents.
    truncated_documents, truncated_tokens, dropped_documents
        The losses to `max_tokens`.
    """

    def __init__(
        self,
        doc_offsets: npt.NDArray[np.uint64],
        max_tokens: int | None,
        too_long: str,
        path: object = "documents",
    ) -> None:
        self._offsets = doc_offsets
        self._max_tokens = max_tokens
        lengths = np.diff(doc_offsets).view(np.int64)
        longest = max_tokens or MAX_COUNT
        is_long = lengths > longest
        num_long = int(is_long.sum())
        if too_long == "refuse" and num_long:
            raise ArgumentError(
                f"{path}: expected documents of at most max_tokens={max_tokens:,} tokens, found {num_long:,} longer "
                f"ones, up to {lengths.max():,}; pass a larger max_tokens, or a pair of it and 'truncate' or 'drop'"
            )
        is_read = lengths > 0
        if too_long == "drop":
            is_read &= ~is_long
            self.dropped_documents = num_long
            self.truncated_documents = 0
            self.truncated_tokens = 0
        else:
            self.dropped_documents = 0
            self.truncated_documents = num_long
            self.truncated_tokens = int((lengths[is_long] - longest).sum())
        self._numbers = None if is_read.all() else np.flatnonzero(is_read)
        self.count = len(lengths) if self._numbers is None else len(self._numbers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count:,} documents)"

    def numbers(self, documents: IndexArray) -> IndexArray:
        """Return the numbers that some documents have in the stream."""
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
    """A uniform permutation in which each bucket of batches is sorted by length, and its batches are shuffled.

    Documents that do not fill a batch stay at the end of their bucket: a position follows from its bucket alone.

    Parameters
    ----------
    documents, batch_size
        The documents, and how many of them are in a batch.
    bucket_batches
        The batches of a bucket.
    seed, epoch
        The order depends on them.
    version
        As for `GlobalOrder`.
    """

    def __init__(
        self,
        documents: Documents,
        batch_size: int,
        bucket_batches: int,
        *,
        seed: int,
        epoch: int,
        version: int = WIDE_VERSION,
    ) -> None:
        self.n = documents.count
        self._documents = documents
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = epoch
        self._bucket_size = batch_size * bucket_batches
        self._version = version
        self._order = GlobalOrder(self.n, seed, epoch, version)
        buckets = {0, self.n // self._bucket_size}  # all others are as the first one
        self.version = max(self._order.version, *(self._batches_of(each).version for each in buckets))

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
        order = self._batches_of(number)
        whole = order.n
        shuffled = order.indices(np.arange(whole))
        full = documents[: whole * self._batch_size]
        full[...] = full.reshape(whole, self._batch_size)[shuffled].reshape(-1)
        return documents

    def _batches_of(self, number: int) -> GlobalOrder:
        """Return the order of the whole batches of a bucket."""
        left = max(0, self.n - number * self._bucket_size)
        whole = min(left, self._bucket_size) // self._batch_size
        return GlobalOrder(whole, self._seed, (self._epoch + 1) * BUCKET_EPOCH + number, self._version)


def packed_steps(
    plan: StepPlan,
    documents: Documents,
    position: int,
    max_tokens: int,
) -> Iterator[tuple[IndexArray, int]]:
    """Yield the documents of a rank at each step, packed into `max_tokens`, and the position after the step.

    The batches do not depend on the ranks, which take them in turn: each rank computes the lengths of all documents.
    """
    live = plan.skip.live(position)
    batches = _cut(plan, documents, live, max_tokens)
    while step := list(islice(batches, plan.world_size)):
        live += sum(map(len, step))
        if len(step) < plan.world_size:
            if plan.last == "drop":
                return
            again = chain.from_iterable(_cut(plan, documents, 0, max_tokens) for _ in repeat(None))
            step += islice(again, plan.world_size - len(step))
        yield step[plan.rank], int(plan.skip.positions_of(np.array(live)))


def _cut(plan: StepPlan, documents: Documents, live: int, max_tokens: int) -> Iterator[IndexArray]:
    """Yield the documents of each batch, in order."""
    waiting = np.empty(0, np.int64)
    end_of_epoch = plan.num_live
    for first in range(live, end_of_epoch, PACKED_AT_ONCE):
        stop = min(first + PACKED_AT_ONCE, end_of_epoch)
        waiting = np.concatenate([waiting, plan.indices(np.arange(first, stop))])
        ends = np.cumsum(documents.lengths(waiting)).tolist()
        begin = tokens = 0
        while (end := bisect_right(ends, tokens + max_tokens)) < len(ends) or (stop == end_of_epoch and begin < end):
            yield waiting[begin:end]
            begin = end
            tokens = ends[end - 1]
        waiting = waiting[begin:]
