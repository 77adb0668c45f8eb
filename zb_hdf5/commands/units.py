"""The units of a store that can be compared: documents, `.npy` files or records, and how to read them all in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import GROUP_BYTES, BatchReader
from zb_hdf5.commands.rows import scan_pieces
from zb_hdf5.documents.pieces import Pieces, ranges
from zb_hdf5.formats.documents import DocumentTable
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.tokens import MmapTokenStore

Counts = npt.NDArray[np.int64]

#: Tokens of a stream that are looked at together; the "batch" of its sample.
STRETCH_TOKENS: Final = 1 << 18


class Packing(NamedTuple):
    """How the documents lie in all records of a batch store.

    Attributes
    ----------
    padding
        Tokens of no document.
    split
        Documents that lie in several pieces.
    cropped, absent
        Documents of which some tokens, or all, are not in the store.
    lost
        The tokens of documents that are not in the store.
    """

    padding: int
    split: int
    cropped: int
    absent: int
    lost: int


class Part(NamedTuple):
    """Tokens, and the runs that they consist of: where each begins, its unit (-1: none) and its place in the unit."""

    tokens: TokenArray
    starts: Counts
    units: Counts
    within: Counts

    @property
    def lengths(self) -> Counts:
        return np.diff(self.starts, append=len(self.tokens))


class Units(Protocol):
    """Tokens, and the units in them, of which `sizes` has the tokens of each."""

    unit: str
    num_tokens: int
    sizes: Counts
    lengths: Counts | None
    table: DocumentTable | None
    packing: Packing | None

    def groups(self, sampled: bool) -> Counts:
        """Return where groups of tokens begin, and where the last one ends; a unit of a stream is never cut."""

    def read(self, start: int, stop: int) -> Iterator[Part]:
        """Yield the tokens of a group, in parts that fit into memory."""

    def find(self, units: Counts) -> None:
        """Find out where units lie; they ascend. Only their tokens may be asked for."""

    def tokens_of(self, unit: int) -> Iterator[TokenArray]:
        """Yield the tokens of a unit, in parts. Two units of the same size are cut at the same places."""


class Records:
    """Batches of which no documents are known: each record is a unit."""

    unit = "record"
    table: DocumentTable | None = None
    packing: Packing | None = None
    lengths: Counts | None = None

    def __init__(self, reader: BatchReader) -> None:
        self._reader, self._row = reader, reader.seq_len
        self.num_tokens = reader.num_records * self._row
        self.sizes: Counts = np.broadcast_to(np.int64(self._row), reader.num_records)

    def groups(self, sampled: bool) -> Counts:
        batches = 1 if sampled else max(1, GROUP_BYTES // self._reader.meta.batch_bytes)
        return np.append(np.arange(0, self.num_tokens, batches * self._reader.meta.batch_tokens), self.num_tokens)

    def read(self, start: int, stop: int) -> Iterator[Part]:
        meta = self._reader.meta
        tokens = np.empty(((stop - start) // meta.batch_tokens, *meta.shape), meta.dtype)
        self._reader.read_batches_into(start // meta.batch_tokens, tokens)
        yield self._part(tokens.reshape(-1), np.arange(start // self._row, stop // self._row))

    def _part(self, tokens: TokenArray, records: Counts) -> Part:
        return Part(tokens, np.arange(0, len(tokens), self._row), records, np.zeros_like(records))

    def find(self, units: Counts) -> None:
        """A record lies where its number says."""

    def tokens_of(self, unit: int) -> Iterator[TokenArray]:
        yield self._reader.read_record(unit)


class Packed(Records):
    """Batches with documents: each document is a unit, wherever its pieces lie."""

    unit = "document"

    def __init__(self, reader: BatchReader, table: DocumentTable) -> None:
        super().__init__(reader)
        self.table, self._numbers_of = table, table.number_of
        self._offsets = table.offsets.view(np.int64)
        self.sizes = self.lengths = np.diff(self._offsets)
        self.packing = self._packing()

    def _packing(self) -> Packing:
        held, cuts, padding = np.zeros_like(self.sizes), np.zeros(len(self.sizes), np.int32), 0
        for _, pieces in scan_pieces(self._reader):
            (units, _), lengths = self._places(pieces), pieces.lengths
            is_text = units >= 0
            padding += int(lengths[~is_text].sum())
            np.add.at(held, units[is_text], lengths[is_text])
            np.add.at(cuts, units[is_text], 1)
        missing = np.maximum(self.sizes - held, 0)
        absent = int(np.count_nonzero((held == 0) & (missing > 0)))
        return Packing(
            padding,
            int(np.count_nonzero(cuts > 1)),
            int(np.count_nonzero(missing)) - absent,
            absent,
            int(missing.sum()),
        )

    def _places(self, pieces: Pieces) -> tuple[Counts, Counts]:
        """Return the unit of each piece, and its place in the unit."""
        units = self._numbers_of(pieces.offsets)
        return units, np.where(units < 0, 0, pieces.offsets.view(np.int64) - self._offsets[units])

    def _part(self, tokens: TokenArray, records: Counts) -> Part:
        pieces = self._reader.read_pieces(records)
        return Part(tokens, pieces.starts, *self._places(pieces))

    def find(self, units: Counts) -> None:
        found = [np.empty((5, 0), np.int64)]
        for first, pieces in scan_pieces(self._reader):
            numbers, within = self._places(pieces)
            places = np.minimum(units.searchsorted(numbers), len(units) - 1)
            facts = np.stack([numbers, within, first + pieces.rows, pieces.columns.astype(np.int64), pieces.lengths])
            found.append(facts[:, units[places] == numbers])
        every = np.concatenate(found, axis=1)
        self._found = every[:, np.lexsort(every[1::-1])]

    def tokens_of(self, unit: int) -> Iterator[TokenArray]:
        first, last = np.searchsorted(self._found[0], [unit, unit + 1]).tolist()
        _, _, records, columns, lengths = self._found[:, first:last]
        rows = np.empty((len(records), self._row), self._reader.dtype)
        self._reader.read_records_into(records, rows)
        yield rows.reshape(-1)[ranges(np.arange(len(records)) * self._row + columns, lengths)]


class Stream:
    packing: Packing | None = None

    def __init__(self, store: MmapTokenStore) -> None:
        self._store, self._offsets = store, store.doc_offsets.view(np.int64)
        if self._offsets[-1] < store.num_tokens:  # a killed writer left tokens behind its last document
            self._offsets = np.append(self._offsets, store.num_tokens)
        is_npy = store.paths[0].suffix == ".npy"
        self.unit = "file" if is_npy else "document"
        self.table: DocumentTable | None = None if is_npy else store.documents
        self.sizes = np.diff(self._offsets)
        self.lengths: Counts | None = self.sizes
        self.num_tokens = store.num_tokens

    def groups(self, sampled: bool) -> Counts:
        places = np.searchsorted(self._offsets, np.arange(0, self.num_tokens, STRETCH_TOKENS), side="left")
        return np.unique(np.append(self._offsets[places], self.num_tokens))

    def read(self, start: int, stop: int) -> Iterator[Part]:
        for at in range(start, stop, STRETCH_TOKENS):
            end = min(at + STRETCH_TOKENS, stop)
            first = int(self._offsets.searchsorted(at, side="right")) - 1
            units = np.arange(first, int(self._offsets.searchsorted(end)))
            units = units[self.sizes[units] > 0]
            begins = self._offsets[units]
            tokens = np.ascontiguousarray(self._store.get_slice(at, end))
            yield Part(tokens, np.maximum(begins - at, 0), units, np.maximum(at - begins, 0))

    def find(self, units: Counts) -> None:
        """A document lies where its offset says."""

    def tokens_of(self, unit: int) -> Iterator[TokenArray]:
        start, stop = self._offsets[unit : unit + 2].tolist()
        for at in range(start, stop, STRETCH_TOKENS):
            yield self._store.get_slice(at, min(at + STRETCH_TOKENS, stop))
