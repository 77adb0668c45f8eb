"""The pieces and the documents of a store or a lone file, which are attached to a reader of its tokens."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_table import DocumentTable
from zb_hdf5.documents.pieces import Pieces, concatenate
from zb_hdf5.documents.pieces_file import PiecesFile, pieces_path
from zb_hdf5.files.open_files import OpenFiles, finding
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.store.index import ShardIndex


class StoreDocuments:
    """What a store has of documents. See `RecordDocuments`; a file is opened when it is first needed.

    Offsets and numbers count over the splits of the index, one after the other: an index of one split counts as its
    files do.
    """

    def __init__(self, folder: Path, index: ShardIndex, verify: str) -> None:
        self._folder, self._index, self._verify = folder, index, verify
        records = index.table.values["num_batches"] * index.meta.batch_size
        self._starts = np.concatenate([[0], np.cumsum(records)])
        self._edges: list[int] = self._starts.tolist()
        self._parts, bases = index.document_parts()
        self._bases = [bases.get(split, 0) for split in index.table.values["split"]]
        self._reset()

    def _reset(self) -> None:
        self._files: OpenFiles[PiecesFile] = OpenFiles("auto", far=isinstance(self._folder, RemotePath))
        self._table: DocumentTable | None = None

    @cached_property
    def has_pieces(self) -> bool:
        pieces = self._index.table.pieces
        return pieces is not None and bool((pieces["bytes"] >= 0).all())

    def read_pieces(self, records: npt.NDArray[np.int64]) -> Pieces:
        shards = self._starts.searchsorted(records, side="right") - 1
        found = np.unique(shards)
        if len(found) == 1:
            return self._read_shard(int(found[0]), records)
        order = shards.argsort(kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(shards[order])) + 1) if len(order) else []
        parts = [self._read_shard(int(shards[group[0]]), records[group]) for group in groups]
        if not parts:
            return self._read_shard(0, records)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return concatenate(parts).take(places)

    def read_run(self, start: int, stop: int) -> Pieces:
        shard = bisect_right(self._edges, start) - 1
        file = self._files.known.get(shard)
        if file is None or stop > self._edges[shard + 1]:
            return self.read_pieces(np.arange(start, stop))
        first, base = self._edges[shard], self._bases[shard]
        pieces = file.read_run(start - first, stop - first)
        return pieces.moved(base) if base else pieces

    def _read_shard(self, shard: int, records: npt.NDArray[np.int64]) -> Pieces:
        file = self._files.known.get(shard) or self._files.open(shard, self._open)
        pieces = file.read(records - self._starts[shard])
        return pieces.moved(self._bases[shard]) if self._bases[shard] else pieces

    def _open(self, shard: int) -> PiecesFile:
        entry = self._index.shards[shard]
        num_records = entry.num_batches * self._index.meta.batch_size
        sha256 = entry.pieces.sha256 if entry.pieces else ""
        seq_len, path = self._index.meta.seq_len, self._folder / entry.path
        return PiecesFile(path, num_records, seq_len, sha256=sha256, verify=self._verify)

    def documents(self) -> DocumentTable | None:
        if self._table is None and self._parts:
            self._table = DocumentTable(self._folder, self._parts, self._verify)
        return self._table

    def close(self) -> None:
        for file in self._files.files().values():
            file.close()
        if self._table is not None:
            self._table.close()
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_files", "_table")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


class LoneDocuments:
    """The pieces and the documents of a lone file of batches. See `RecordDocuments`."""

    def __init__(self, path: Path, num_records: int, seq_len: int, tokens_sha256: str | None, verify: str) -> None:
        self._path, self._facts, self._sha256, self._verify = path, (num_records, seq_len), tokens_sha256, verify
        self._pieces: PiecesFile | None = None
        self._documents: DocumentTable | None = None

    @cached_property
    def has_pieces(self) -> bool:
        return pieces_path(self._path).exists()

    def read_pieces(self, records: npt.NDArray[np.int64]) -> Pieces:
        return (self._pieces or self._open_pieces()).read(records)

    def read_run(self, start: int, stop: int) -> Pieces:
        return (self._pieces or self._open_pieces()).read_run(start, stop)

    def _open_pieces(self) -> PiecesFile:
        with finding(self):
            if self._pieces is None:
                self._pieces = PiecesFile(self._path, *self._facts, tokens_sha256=self._sha256, verify=self._verify)
            return self._pieces

    def documents(self) -> DocumentTable | None:
        if self._documents is None:
            with finding(self):
                if self._documents is None:
                    self._documents = DocumentTable.of_file(self._path, self._sha256, self._verify)
        return self._documents

    def close(self) -> None:
        for file in (self._pieces, self._documents):
            if file is not None:
                file.close()
        self._pieces = self._documents = None


def attach_documents(reader: BatchReader, verify: str) -> BatchReader:
    """Give the reader of a lone file of batches its documents, where it may have some; return it."""
    if reader.complete:
        reader.record_documents = LoneDocuments(reader.path, reader.num_records, reader.seq_len, reader.sha256, verify)
    return reader
