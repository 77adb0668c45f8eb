"""The pieces and the documents of a store or a lone file, which are attached to a reader of its tokens."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_table import DocumentTable
from zb_hdf5.documents.pieces import Pieces, concatenate, ends_of, pieces_path
from zb_hdf5.files.paths import OpenFiles, RemotePath, finding
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.store.index import ShardIndex

if TYPE_CHECKING:  # h5py, which a store without documents does not need
    from zb_hdf5.documents.pieces_file import PiecesFile


class StoreDocuments:
    """The documents of the records of a store (see `RecordDocuments`), over its splits one after the other."""

    def __init__(self, folder: Path, index: ShardIndex, verify: str) -> None:
        self._index = index
        self._parts, bases = index.document_parts()
        counts = index.table.values["num_batches"] * index.meta.batch_size
        self._set(folder, verify, counts, [bases.get(split, 0) for split in index.table.values["split"]])

    def _set(self, folder: Path, verify: str, counts: npt.ArrayLike, bases: list[int]) -> None:
        """Take over the records of each file, and the first token of its split in all splits."""
        self._folder, self._verify, self._starts, self._bases = folder, verify, ends_of(np.asarray(counts)), bases
        self.__dict__.pop("_edges", None)
        self._files: OpenFiles[PiecesFile] = OpenFiles("auto", far=isinstance(folder, RemotePath))
        self._table: DocumentTable | None = None

    @cached_property
    def _edges(self) -> list[int]:
        edges: list[int] = self._starts.tolist()  # for single searches: no store without pieces needs it
        return edges

    @cached_property
    def has_pieces(self) -> bool:
        pieces = self._index.table.pieces
        return pieces is not None and bool((pieces["bytes"] >= 0).all())

    def read_pieces(self, records: npt.NDArray[np.int64]) -> Pieces:
        shards = self._starts.searchsorted(records, side="right") - 1
        first = int(shards[0]) if len(shards) else 0
        if np.count_nonzero(shards == first) == len(shards):
            return self._read_shard(first, records)
        order = shards.argsort(kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(shards[order])) + 1)
        parts = [self._read_shard(int(shards[group[0]]), records[group]) for group in groups]
        return concatenate(parts).take(order.argsort())

    def _read_shard(self, shard: int, records: npt.NDArray[np.int64]) -> Pieces:
        return self._moved(shard, self._file(shard).read_pieces(records - self._starts[shard]))

    def read_run(self, start: int, stop: int) -> Pieces:
        shard = bisect_right(self._edges, start) - 1
        if stop > self._edges[shard + 1]:
            return self.read_pieces(np.arange(start, stop))
        first = self._edges[shard]
        return self._moved(shard, self._file(shard).read_run(start - first, stop - first))

    def _moved(self, shard: int, pieces: Pieces) -> Pieces:
        return pieces.moved(self._bases[shard]) if self._bases[shard] else pieces

    def _file(self, shard: int) -> PiecesFile:
        return self._files.get(shard, self._open)

    def _open(self, shard: int) -> PiecesFile:
        from zb_hdf5.documents.pieces_file import PiecesFile

        entry, meta = self._index.shards[shard], self._index.meta
        sha256 = entry.pieces.sha256 if entry.pieces else ""
        num_records = entry.num_batches * meta.batch_size
        return PiecesFile(self._folder / entry.path, num_records, meta.seq_len, sha256=sha256, verify=self._verify)

    def documents(self) -> DocumentTable | None:
        if self._table is None:
            with finding(self):
                self._table = self._table or self._open_table()
        return self._table

    def _open_table(self) -> DocumentTable | None:
        return DocumentTable(self._folder, self._parts, self._verify) if self._parts else None

    def close(self) -> None:
        self._files.close()
        if self._table is not None:
            self._table.close()


class LoneDocuments(StoreDocuments):
    """The same of the one file of batches that a reader has."""

    def __init__(self, reader: BatchReader, verify: str) -> None:
        self._path, self._seq_len, self._sha256 = reader.path, reader.seq_len, reader.sha256
        self._set(reader.path, verify, [reader.num_records], [0])

    @cached_property
    def has_pieces(self) -> bool:
        return pieces_path(self._path).exists()

    def _open(self, shard: int) -> PiecesFile:
        from zb_hdf5.documents.pieces_file import PiecesFile

        return PiecesFile(self._path, self._edges[-1], self._seq_len, tokens_sha256=self._sha256, verify=self._verify)

    def _open_table(self) -> DocumentTable | None:
        return DocumentTable.of_file(self._path, self._sha256, self._verify)


def attach_documents(reader: BatchReader, verify: str) -> BatchReader:
    """Give the reader of a lone file of batches its documents, where it may have some; return it."""
    if reader.complete:
        reader.record_documents = LoneDocuments(reader, verify)
    return reader
