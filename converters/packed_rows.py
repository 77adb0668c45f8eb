"""The rows of one split of a stream, packed from its documents and shuffled."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5 import FormatError, StoreMeta
from zb_hdf5.converters.conversion import LayoutOptions
from zb_hdf5.converters.packing import PACKINGS, Packing, packed_pieces
from zb_hdf5.documents.document_table import DocumentTableFile, documents_name, join_documents
from zb_hdf5.documents.pieces import Pieces, concatenate, ranges
from zb_hdf5.documents.table_writer import DocumentsWriter
from zb_hdf5.files.foreign_ids import ForeignIds
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.files.publishing import disk_errors
from zb_hdf5.files.tokens import Converted, TokenRun, Tokens
from zb_hdf5.loaders.order import IndexArray, Order, SequentialOrder, write_order
from zb_hdf5.spec import SHARD_PREFIX, TokenArray
from zb_hdf5.store.store_corpus import StoreCorpus

#: Pieces that are looked at together: each takes some 250 bytes meanwhile.
PIECES_AT_ONCE: Final = 1 << 14


class PackedRows:
    """The rows of one split of a stream, read from its documents in any order. Picklable: the plan is in `folder`.

    They are stored in this `order`, in `num_batches` batches from `first_batch` on. `table` is the file of the
    documents, and `documents` are how many of them begin in each row: it stays in this process.

    Parameters
    ----------
    store
        The documents of the split.
    split
        Its name.
    folder
        The folder of the plan and of the table.
    number
        The number of the split.
    meta
        The shape and dtype of the batches.
    options
        The packing and the shuffle.
    pad_id
        The token of padding.
    """

    def __init__(
        self,
        store: StoreCorpus,
        split: str,
        folder: Path,
        number: int,
        meta: StoreMeta,
        options: LayoutOptions,
        pad_id: int,
    ) -> None:
        self.split = split
        self.first_batch = 0
        self.num_batches = 0
        self._seq_len = meta.seq_len
        self._batch_size = meta.batch_size
        self._columns: dict[str, tuple[Tokens, int]] = {"": (_tokens_as(store, meta), 1)}
        self._padding: dict[str, Any] = {"": pad_id}
        for field in store.meta.fields:
            self._columns[field.name] = (store.field(field.name).tokens, field.size)
            self._padding[field.name] = field.padding
        self.table = folder / documents_name(number)
        _write_table(self.table, store, split)
        edges = self._table.offsets.astype(np.int64)
        document_lengths = edges[1:] - edges[:-1]
        packed = PACKINGS[options.packing](document_lengths, meta.seq_len)
        plan = {"offsets": packed.offsets, "lengths": packed.lengths, "first": packed.first}
        self._plan_paths = [folder / f"{SHARD_PREFIX}plan-{split}-{name}.npy" for name in plan]
        for path, array in zip(self._plan_paths, plan.values(), strict=True):
            _save(path, array)
        self.num_rows = packed.num_rows
        self.order: Order
        if options.shuffle:
            self.order = write_order(self.num_rows, options.seed)
        else:
            self.order = SequentialOrder(self.num_rows)
        self.tokens_kept = packed.tokens_kept
        self.tokens_cropped = store.num_tokens - packed.tokens_kept
        self.documents = packed.documents_begun(document_lengths)

    def __getstate__(self) -> dict[str, Any]:
        return {k: value for k, value in self.__dict__.items() if k not in ("documents", "_table", "_packing")}

    @cached_per_process
    def _table(self) -> DocumentTableFile:
        return DocumentTableFile(self.table)

    @cached_per_process
    def _packing(self) -> Packing:
        offsets, lengths, first = map(_load, self._plan_paths)
        return Packing(offsets, lengths, first)

    def rows_of(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the rows of some batches, by their numbers in the store; none is beyond the last row."""
        first = (start - self.first_batch) * self._batch_size
        end = (stop - self.first_batch) * self._batch_size
        return self.order.indices(np.arange(first, min(end, self.num_rows)))

    def tokens_in(self, rows: npt.NDArray[np.int64]) -> int:
        """Return how many tokens, padding aside, some rows hold."""
        pieces, _ = self._pieces_of(rows)
        return int(self._packing.lengths[pieces].sum())

    def gather_into(self, name: str, rows: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(n, seq_len, ...)`, with rows in any order, and padding: tokens (""), or a field."""
        for start, stop in self._looked_at_together(rows):
            self._gather(name, rows[start:stop], out[start:stop])
        out[len(rows) :] = self._padding[name]

    def _gather(self, name: str, rows: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out` as `gather_into` does, with all rows at once."""
        plan = self._packing
        seq_len = out.shape[1]
        pieces, counts = self._pieces_of(rows)
        lengths = plan.lengths[pieces]
        before = np.cumsum(lengths) - lengths
        in_row = np.repeat(np.arange(len(rows)), counts)
        columns = before - before[np.cumsum(counts) - counts][in_row]
        if int(lengths.sum()) < len(out) * seq_len:
            out[...] = self._padding[name]
        column, size = self._columns[name]
        starts = (in_row * seq_len + columns) * size
        _copy_runs(column, plan.offsets[pieces] * size, out.reshape(-1), starts, starts + lengths * size)

    def read_pieces(self, rows: npt.NDArray[np.int64]) -> Pieces:
        """Return the parts of documents in some rows: a packed piece is cut where a document begins."""
        plan = self._packing
        found = []
        for start, stop in self._looked_at_together(rows):
            packed, counts = self._pieces_of(rows[start:stop])
            offsets = plan.offsets[packed]
            found.append(packed_pieces(offsets, plan.lengths[packed], counts, self._table.offsets, self._seq_len))
        return concatenate(found)

    def _looked_at_together(self, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Return the (start, stop) of rows that have `PIECES_AT_ONCE`, or one more row."""
        first = self._packing.first
        ends = np.cumsum(first[rows + 1] - first[rows])
        limits = np.arange(PIECES_AT_ONCE, ends.max(initial=0), PIECES_AT_ONCE)
        cuts = np.unique(ends.searchsorted(limits) + 1)
        return pairwise([0, *cuts[cuts < len(rows)].tolist(), len(rows)])

    def _pieces_of(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the pieces of some rows, in order, and how many each row has."""
        first = self._packing.first
        begin = first[rows]
        counts = first[rows + 1] - begin
        return ranges(begin, counts), counts


def _tokens_as(store: StoreCorpus, meta: StoreMeta) -> Tokens:
    """Return the tokens of a split in the dtype of the batches, and below their vocabulary size."""
    tokens = store.tokens
    is_bounded = bool(meta.vocab_size) and meta.vocab_size != store.meta.vocab_size
    if is_bounded or meta.dtype.itemsize < tokens.dtype.itemsize:
        return ForeignIds(tokens, meta)
    if tokens.dtype != meta.dtype:
        return Converted(tokens, meta.dtype)
    return tokens


def _write_table(path: Path, store: StoreCorpus, split: str) -> None:
    """Write the documents of a split to a table of its own; `FormatError` if a token belongs to none."""
    with DocumentsWriter(path) as writer:
        table = store.document_table
        if table is not None:  # its files stay open, to be compared with their digests
            join_documents(map(table.file, range(len(table.parts))), writer)
        if writer.token_count != store.num_tokens:
            raise FormatError(
                f"the split {split!r}: expected documents of {store.num_tokens:,} tokens, found "
                f"{writer.token_count:,}: tokens belong to no document; write the stream again"
            )
        writer.publish(split=split)


def _copy_runs(column: Tokens, offsets: IndexArray, out: TokenArray, starts: IndexArray, stops: IndexArray) -> None:
    """Copy runs of a column from `offsets` on to `out`, each to its (start, stop) there.

    Documents are short: to read each by itself would take three times as long as to copy it from a mapping.
    """
    files = column.files
    firsts = files.starts
    numbers = np.searchsorted(firsts, offsets, side="right") - 1
    mapped = {number: files.open(number, firsts[number]).stored_ids() for number in np.unique(numbers).tolist()}
    waiting: list[TokenRun] = []
    runs = zip(numbers.tolist(), offsets.tolist(), starts.tolist(), stops.tolist(), strict=True)
    for number, offset, start, stop in runs:
        stored = mapped[number]
        begin = offset - firsts[number]
        ids = None if stored is None else stored.ids[begin : begin + stop - start]
        if stored is None or ids is None or len(ids) < stop - start or stored.has_others(ids):
            waiting.append((offset, out[start:stop]))
        else:
            out[start:stop] = ids
    column.read(waiting)


def _load(path: Path) -> npt.NDArray[np.int64]:
    """Map a file of `_save`."""
    found: npt.NDArray[np.int64] = np.load(path, mmap_mode="r").view(np.ndarray)
    return found


def _save(path: Path, array: npt.NDArray[np.int64]) -> None:
    """Write a `.npy` file. On a full disk numpy's own writer names neither the file nor the reason."""
    with disk_errors(path), open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array))
