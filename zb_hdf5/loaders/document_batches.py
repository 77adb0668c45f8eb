"""Documents of a stream as batches of variable length: which of them, in which order, and where in the batch each lies.

A batch is described by its pieces, and everything else follows from them (see `zb_hdf5.documents.segments`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, repeat
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces, ends_of
from zb_hdf5.documents.segments import PADDING_ID, cu_seqlens, ignore, max_seqlen, position_ids, targets
from zb_hdf5.documents.spans import WantedSpans, spans_of_pieces
from zb_hdf5.errors import ArgumentError
from zb_hdf5.loaders.extras import as_tensor
from zb_hdf5.loaders.order import GlobalOrder, IndexArray, Order
from zb_hdf5.loaders.steps import StepPlan
from zb_hdf5.spec import NO_DOCUMENT
from zb_hdf5.store.stream_documents import MmapTokenStore
from zb_hdf5.store.token_store import TokenStore

#: What to do with a document that is longer than `max_tokens`.
TOO_LONG: Final = ("refuse", "truncate", "drop")
#: Documents whose order is computed at once for packing.
DOCUMENTS_AT_ONCE: Final = 4096
#: The batches of a bucket are shuffled as in an "epoch" that no epoch of documents is.
BUCKET_EPOCH: Final = 2**32


class FieldColumn(NamedTuple):
    """The values of a field, counted by tokens: `values` counts each value, `shape` is that of one token."""

    values: TokenStore
    shape: tuple[int, ...]

    def get_slice(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return those of tokens `start` to `stop`, shape (stop - start, *shape)."""
        size = prod(self.shape)
        return self.values.get_slice(start * size, stop * size).reshape(stop - start, *self.shape)


class Documents:
    """The documents of a stream that are read, numbered from 0: none that is empty, each to `max_tokens` at most.

    `doc_offsets`, uint64 (D + 1,), begin each and end the last one. One longer than `max_tokens` is an `ArgumentError`
    ("refuse"), cut ("truncate") or left out ("drop"). `count` are read; the other attributes count the loss.
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


def packed_steps(
    plan: StepPlan, documents: Documents, position: int, max_tokens: int
) -> Iterator[tuple[IndexArray, int]]:
    """Yield the documents of a rank at each step from a position on, and the position behind the step.

    The batches do not depend on the ranks: the order is cut into them from `position` on, each as long as it fits into
    `max_tokens`, and they are dealt out in turn. So every rank computes the lengths of the documents of all.
    """
    order, live = plan.live_order, plan.skip.live(position)
    batches = _cut(order, documents, live, max_tokens)
    while step := list(islice(batches, plan.world_size)):
        live += sum(map(len, step))
        if len(step) < plan.world_size:
            if plan.drop_last:
                return
            again = chain.from_iterable(_cut(order, documents, 0, max_tokens) for _ in repeat(None))
            step += islice(again, plan.world_size - len(step))
        yield step[plan.rank], int(plan.skip.positions_of(np.array(live)))


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


def gather(column: TokenStore | FieldColumn, pieces: Pieces, fill: int = 0, dtype: Any = None) -> npt.NDArray[Any]:
    """Return the values of the tokens that lie in some pieces, and `fill` for padding, shape (R, S, ...)."""
    kind = column.get_slice(0, 0)
    values = np.zeros((pieces.num_tokens, *kind.shape[1:]), dtype or kind.dtype)
    if fill:  # only then: filling bytes with 0 gives the text "0"
        values.fill(fill)
    is_text = ~pieces.is_padding
    places = (part[is_text].tolist() for part in (pieces.starts, pieces.offsets, pieces.lengths))
    for place, offset, length in zip(*places, strict=True):
        values[place : place + length] = column.get_slice(offset, offset + length)
    return values.reshape(-1, pieces.seq_len, *kind.shape[1:])


@dataclass(frozen=True)
class DocumentBatches:
    """Reads batches, as `DocumentLoader` says. Knows no loader, so that threads that read ahead end with it."""

    store: MmapTokenStore
    documents: Documents
    collate: str
    multiple: int
    pad_token_id: int
    targets: bool
    loss_mask: str | None
    fields: tuple[str, ...]
    spans: WantedSpans
    dtype: np.dtype[Any]
    #: Offsets of the documents whose tokens are no targets.
    masked: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    columns: dict[str, FieldColumn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Open the fields; `ArgumentError` if one is not there, or is no mask."""
        mask = self.loss_mask
        if mask is not None and not self.targets:
            raise ArgumentError(f"loss_mask={mask!r} tells which targets count; pass targets=True too")
        shapes = {each.name: each.shape for each in self.store.fields}
        wanted = dict.fromkeys(self.fields if mask is None else (*self.fields, mask))
        for name in [name for name in wanted if name not in self.columns]:
            self.columns[name] = column = FieldColumn(self.store.field(name), shapes[name])
            if name == mask and (column.shape or column.values.dtype.kind not in "biuf"):
                raise ArgumentError(
                    f"{self.store.path}: expected loss_mask to name a field of one number for each token, found "
                    f"{name!r}, {column.values.dtype} of shape {column.shape}"
                )

    def read(self, documents: IndexArray) -> dict[str, Any]:
        """Return the batch of these documents, numbered as in `Documents`."""
        starts, lengths = self.documents.starts(documents), self.documents.lengths(documents)
        packed = self.collate == "pack"
        pieces = (packed_pieces if packed else padded_pieces)(starts, lengths, self.multiple)
        read = {name: gather(column, pieces) for name, column in self.columns.items()}
        values = {"tokens": gather(self.store, pieces, self.pad_token_id, self.dtype)}
        if self.targets:
            mask = None if self.loss_mask is None else read[self.loss_mask]
            values["targets"] = targets(values["tokens"], pieces, mask)
            if len(self.masked):
                ignore(values["targets"], pieces, np.isin(pieces.offsets, self.masked))
        values |= {name: read[name] for name in self.fields}
        others: dict[str, Any] = {}
        if self.spans:
            others["spans"], values["span_index"] = spans_of_pieces(
                pieces, partial(self.store.documents.spans_of, codec=self.spans)
            )
        if packed:
            values["position_ids"] = position_ids(pieces)
            values = {name: rows[0] for name, rows in values.items()} | {"cu_seqlens": cu_seqlens(pieces)}
            others["max_seqlen"] = max_seqlen(pieces)
            lengths = pieces.lengths
        padding = np.full(len(lengths) - len(documents), PADDING_ID)
        values["documents"] = np.concatenate([self.documents.numbers(documents), padding])
        values["seq_lens"] = lengths.astype(np.int32)
        return {name: as_tensor(array) for name, array in values.items()} | others

    def close(self) -> None:
        """Release the files."""
        for store in (self.store, *(column.values for column in self.columns.values())):
            store.close()
