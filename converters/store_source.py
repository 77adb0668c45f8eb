"""Batch stores as a source: `.batch` and `.h5` files and folders with a `shards.json`, through `open_reader`."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from zb_hdf5 import ArgumentError, BatchReader, ConvertError, IncompleteError, open_reader
from zb_hdf5.converters.source import MAX_TOKEN, Source, TokenCounts
from zb_hdf5.documents.document_table import documents_name, documents_path, part_of
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.documents.pieces_file import PiecesFile
from zb_hdf5.errors import Remedy
from zb_hdf5.files.paths import RemotePath, any_path
from zb_hdf5.loaders.order import GlobalOrder
from zb_hdf5.spec import NO_CODEC, TokenArray, stored_dtype
from zb_hdf5.store.shards import ShardedReader
from zb_hdf5.store.stream_documents import WindowReader, require_digests
from zb_hdf5.token_values import find_bad_token


class StoreSource(Source):
    """The batches of a store, in their order, byte for byte or in another dtype; or a stream of others, cut into rows.

    Parameters
    ----------
    path
        Arguments of `open_reader`.
    backend
        The format that the command names.
    dataset
        Name of a dataset in an HDF5 file of another origin.
    dtype
        "keep", "uint32" or "uint16": the stored dtype. In another dtype nothing is copied byte for byte.
    windows
        Batch size and sequence length, of a stream without documents.

    Raises
    ------
    IncompleteError
        If its writer has not finished.
    """

    shuffle = "none"
    reorders = False
    order: GlobalOrder | None = None

    def __init__(
        self, path: str | os.PathLike[str], backend: str, dataset: str | None = None, dtype: str = "keep",
        windows: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        path = any_path(path)
        self.paths = [path]
        self._path, self._backend = path, backend
        batch_size, seq_len = windows or (None, None)
        self._reader = open_reader(path, backend=backend, dataset=dataset, batch_size=batch_size, seq_len=seq_len)
        if isinstance(self._reader, WindowReader) and self._reader.store.has_documents:
            raise ArgumentError(f"{path}: is a stream of documents, which stream-to-hdf5 and stream-to-batch pack")
        if not self._reader.complete:
            raise IncompleteError(
                f"{path}: its writer has not finished: {self._reader.num_batches:,} batches are committed"
            )
        self.meta = replace(self._reader.meta, codec=NO_CODEC)  # the target has its own, or none
        if dtype != "keep":
            self.meta = replace(self.meta, dtype=stored_dtype(dtype))
        self._keeps_bytes = self.meta.dtype == self._reader.dtype
        self.num_batches = self._reader.num_batches
        if self.num_batches == 0:
            raise ConvertError(f"{path}: holds no batches")
        dropped = self._reader.dropped_tokens if isinstance(self._reader, WindowReader) else 0
        self.token_counts = TokenCounts(self.num_batches * self.meta.batch_tokens + dropped)
        self.token_counts.drop("remainder", dropped)
        self.shard_batches: list[int] = []
        self.shard_splits: list[str] = []
        self.shard_records: list[int] = []
        self.shard_documents: list[int | None] = []
        self.description: dict[str, Any] = {"format": backend, "path": str(path)}
        self.identity = {"fingerprint": self._reader.fingerprint, "dataset": dataset}
        self._sha256: dict[tuple[int, int], str | None] = {(0, self.num_batches): self._reader.sha256}
        is_own = not (dataset or windows)
        self._shard_path = {(0, self.num_batches): self._reader.path} if is_own else {}
        self._token_bases: dict[str, int] = {}
        self._checked: set[tuple[int, int]] = set()  # whose pieces were compared with their digests
        if isinstance(self._reader, ShardedReader):
            index = self._reader.index
            self.shuffle = index.shuffle
            self.description = {key: value for key, value in index.source.items() if key != MAX_TOKEN}
            self.shard_batches = [shard.num_batches for shard in index.shards]
            self.shard_splits = [shard.split for shard in index.shards]
            self.shard_documents = [
                documents if documents >= 0 else None for documents in index.table.values["document_count"].tolist()
            ]
            stops = list(accumulate(self.shard_batches))
            cuts = list(zip([0, *stops], stops, strict=False))
            self._sha256 = {cut: shard.sha256 for cut, shard in zip(cuts, index.shards, strict=True)}
            self._shard_path = {cut: self._reader.path / s.path for cut, s in zip(cuts, index.shards, strict=True)}
            padding = self.num_batches * self.meta.batch_size - self.meta.total_records
            if len(set(self.shard_splits)) > 1 and 0 < padding < self.num_batches * self.meta.batch_size:
                self.shard_records = [self._records_of(cut) for cut in cuts]  # padding ends each split, not the store
            self._token_bases = index.document_parts()[1]
            self.document_files = [self._reader.path / part.path for part in index.documents]
            self.document_parts = index.documents
        elif is_own:
            self.origin = self._reader.origin
        if not isinstance(self._reader, ShardedReader) and is_own and documents_path(path).exists():
            self.document_files, self.document_parts = [documents_path(path)], (part_of(documents_path(path)),)
        self.document_parts = tuple(
            part._replace(path=documents_name(number)) for number, part in enumerate(self.document_parts)
        )
        self.has_pieces = self._reader.has_pieces and is_own

    def _records_of(self, cut: tuple[int, int]) -> int:
        with open_reader(self._shard_path[cut]) as shard:
            return shard.meta.total_records

    def read_into(self, start: int, out: TokenArray) -> None:
        """Read consecutive batches.

        Raises
        ------
        ConvertError
            If a token does not fit the dtype.
        """
        if self._keeps_bytes:
            self._reader.read_batches_into(start, out)
            return
        stored = np.empty(out.shape, self._reader.dtype)
        self._reader.read_batches_into(start, stored)
        bad = find_bad_token(stored, int(np.iinfo(self.meta.dtype).max))
        if bad is not None:
            number, index = start + bad // self._reader.meta.batch_tokens, bad % self._reader.meta.batch_tokens
            raise ConvertError(
                f"{self._path}: token id {stored.reshape(-1)[bad]} at index {index:,} of batch {number:,} does not fit "
                f"{self.meta.dtype.name}",
                remedy=Remedy.KEEP_DTYPE,
            )
        out[...] = stored

    def read_pieces(self, start: int, stop: int) -> Pieces:
        """Return the pieces of consecutive batches of one split, whose offsets count in that split alone.

        Raises
        ------
        ChecksumError
            If a file of pieces is not as it was written: copying would hide the damage.
        """
        self._check_pieces(start, stop)
        pieces = self._reader.read_pieces(np.arange(start * self.meta.batch_size, stop * self.meta.batch_size))
        shard = int(np.searchsorted(np.cumsum(self.shard_batches), start, side="right"))
        base = self._token_bases.get(self.shard_splits[shard], 0) if self.shard_splits else 0
        return pieces.moved(-base) if base else pieces

    def _check_pieces(self, start: int, stop: int) -> None:
        for cut in self._shard_path.keys() - self._checked:
            if cut[0] < stop and start < cut[1]:
                file = PiecesFile(self._shard_path[cut], None, self._reader.seq_len)
                try:
                    file.check()
                finally:
                    file.close()
                self._checked.add(cut)

    def read_field_into(self, name: str, start: int, out: TokenArray) -> None:
        field = self._reader.field(name)
        field.read_batches_into(start, out.reshape(len(out), *field.meta.shape))

    def sha256_of(self, start: int, stop: int) -> str | None:
        """Return the stored digest of one whole shard, where it stays the same."""
        return self._sha256.get((start, stop)) if self._keeps_bytes else None

    def shard_of(self, start: int, stop: int) -> BatchReader | None:
        """Open one whole shard, where it can be copied."""
        path = self._shard_path.get((start, stop)) if self._keeps_bytes else None
        if path is None or isinstance(path, RemotePath):
            return None
        return open_reader(path, verify="none")  # whoever copies it compares the crc32

    def check_reads(self) -> None:
        """Read with `verify="batch"`. A lone `.batch` and a foreign dataset have nothing to compare with.

        A stream of others is compared with its sha256 once: rows are cut from it anywhere.
        """
        if isinstance(self._reader, WindowReader):
            if self.identity["dataset"] is None:
                require_digests(self._path)
        elif self._reader.sha256 is not None:
            self._reader.close()
            self._reader = open_reader(self._path, backend=self._backend, verify="batch")
