"""The reader over a store's shards: one sequence of batches, whichever file they lie in."""

from __future__ import annotations

import os
import pickle
import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.checked import VERIFIED, checked, unchecked_gather
from zb_hdf5.columns.ranges import REMOTE, RangeSource, gather_together
from zb_hdf5.columns.reader import BatchReader, require_options
from zb_hdf5.columns.source import BatchSource
from zb_hdf5.errors import BackendError, IncompleteError, UnverifiableError
from zb_hdf5.files.extent_file import ExtentFile
from zb_hdf5.files.joined import JoinedFiles, join
from zb_hdf5.files.objects import IN_FLIGHT
from zb_hdf5.files.open_files import OpenFiles
from zb_hdf5.files.paths import RemotePath, any_path, require_remote_access
from zb_hdf5.formats.registry import BACKENDS
from zb_hdf5.spec import (
    NO_CODEC,
    NOT_KNOWN,
    TokenArray,
    content_fingerprint,
    live_fingerprint,
)
from zb_hdf5.store.index import ShardIndex, require_files
from zb_hdf5.store.proof import open_proved, require_proof, tokens_of
from zb_hdf5.store.store_documents import StoreDocuments
from zb_hdf5.store.table import ShardEntry

#: Shards that are mapped side by side at most: the size of each is asked for before each gather.
MAX_JOINED: Final = 64


class ShardedReader(BatchReader):
    """Reads a store as one sequence of batches. See `BatchReader` for what it offers.

    Opening reads `shards.json` and the first shard; every other shard is opened when it is first read. Of a growing
    store this shows the finished shards; `LiveReader` follows it.

    Parameters
    ----------
    path
        The folder, or its `shards.json`.
    backend
        "auto", or the backend that every shard must have.
    access
        As for `open_reader`.
    verify
        As for `open_reader`, but for "store"; `verify_store` checks a whole store at once.
    split
        Read the shards of this split only; None: all shards.
    index
        The content of its `shards.json`, where it was read already.

    Raises
    ------
    ArgumentError
        If there is no such split.
    FormatError
        If the index is malformed or names a file that is not there; also when a shard, at its first read, is not
        what the index says.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        backend: str = "auto",
        access: str = "auto",
        verify: str = "auto",
        split: str | None = None,
        index: ShardIndex | None = None,
    ) -> None:
        require_options(access, verify)
        path = any_path(path)
        require_remote_access(path, access)
        index = (index or ShardIndex.load(path)).of_split(split)
        folder = path if path.is_dir() else path.parent
        if not isinstance(folder, RemotePath):  # of objects each would be asked for
            require_files(folder, index)
        backends = dict.fromkeys(index.table.values["backend"])
        if backend != "auto" and list(backends) != [backend]:
            other = next(shard for shard in index.shards if shard.backend != backend)
            raise BackendError(f"{folder / other.path}: asked for backend {backend!r}, found {other.backend!r}")
        if verify == "batch" and index.complete and (unknown := index.without_crc32()):
            raise UnverifiableError(f"{folder / unknown}: cannot be verified: the index knows no crc32 of its batches")
        source = self._open_source(folder, index, access, verify)
        super().__init__(folder, index.meta, index.num_batches, source)
        self.index, self.complete = index, index.complete
        if index.complete:
            self.record_documents = StoreDocuments(folder, index, verify)
        self.backend = " and ".join(sorted(backends))
        self.sha256 = index.sha256 if index.complete else None
        self.verify = verify
        self._options: dict[str, Any] = {"access": access, "verify": verify}

    @staticmethod
    def _open_source(folder: Path, index: ShardIndex, access: str, verify: str) -> ShardedSource:
        return ShardedSource(folder, index, access, verify)

    @property
    def verified(self) -> str:
        """See `BatchReader`. Of a store in which one shard has no crc32, or still grows: "none"."""
        return "none" if self.index.without_crc32() else VERIFIED[self.verify]

    def _field_reader(self, name: str) -> BatchReader:
        """Read the values of a field as a store of its own, whose shards are the files that hold them."""
        return type(self)(self.path, index=self.index.of_field(name), **self._options)

    def _compute_fingerprint(self) -> str:
        if self.index.live_id:
            return live_fingerprint(self.index.live_id, self.meta)
        return content_fingerprint(self.index.table.values["sha256"], self.meta)


class ShardedSource:
    """Finds the shard of a batch in O(log shards), and keeps as many shards open as the process may.

    A hit takes no lock. The layout of a shard that had to make room is kept: opening it again needs no look into HDF5.
    """

    def __init__(self, folder: Path, index: ShardIndex, access: str, verify: str) -> None:
        self._folder, self._index, self._access, self._verify = folder, index, access, verify
        self._number(index.table.values["num_batches"].tolist())
        self._parked: dict[int, bytes] = {}
        self._reset()
        # what the index knows is opened when it is first read; else the first shard says how it can be read
        is_remote = isinstance(folder, RemotePath)
        first = next((k for k, count in enumerate(index.table.values["num_batches"].tolist()) if count), 0)
        known = index.meta.column in index.shards[first].columns and access != "h5py"
        self.access = REMOTE if known and is_remote else access if known else self._source(first, 0).access
        self.in_flight = IN_FLIGHT if is_remote else None
        self.wants_threads = index.meta.codec != NO_CODEC

    def _number(self, counts: Sequence[int]) -> None:
        """Give every batch its number, from the counts of the shards."""
        self._starts = [0, *accumulate(counts)]
        self._firsts = np.array(self._starts[:-1])

    def _reset(self) -> None:
        self._lock = threading.Lock()
        parked = self._parked  # not self: a reader that is dropped closes its files at once
        joined = self._joined = dict[int, JoinedFiles | None]()  # by the number of shards, of a store that grows

        def park(shard: int, source: BatchSource) -> None:
            parked[shard] = pickle.dumps(source)
            joined.update(dict.fromkeys(joined))  # it would keep the file open

        self._files: OpenFiles[BatchSource] = OpenFiles(self._access, park, far=isinstance(self._folder, RemotePath))
        self._sources = self._files.known

    def read(self, index: int) -> TokenArray:
        shard = bisect_right(self._starts, index) - 1
        within = index - self._starts[shard]
        return (self._sources.get(shard) or self._source(shard, within)).read(within)

    def read_into(self, index: int, out: TokenArray) -> None:
        shard = bisect_right(self._starts, index) - 1
        within = index - self._starts[shard]
        (self._sources.get(shard) or self._source(shard, within)).read_into(within, out)

    def read_range_into(self, start: int, out: TokenArray) -> None:
        done = 0
        while done < len(out):
            shard = bisect_right(self._starts, start + done) - 1
            take = min(len(out) - done, self._starts[shard + 1] - start - done)
            first = start + done - self._starts[shard]
            self._source(shard, first).read_range_into(first, out[done : done + take])
            done += take

    def gather_into(self, records: npt.NDArray[np.int64], out: TokenArray) -> None:
        per_batch, count = self._index.meta.batch_tokens // out.shape[1], len(self._firsts)
        if count == 1:
            (self._sources.get(0) or self._source(0, int(records[0]) // per_batch)).gather_into(records, out)
            return
        joined = self._joined.get(count)
        if joined is not None:
            joined.rows(out.shape[1]).take(records, axis=0, out=out, mode="clip")
            return
        self._gather_by_shard(records, out, per_batch)
        if count <= MAX_JOINED and len(self._sources) == count and count not in self._joined:
            self._joined[count] = self._join(count)

    def _join(self, count: int) -> JoinedFiles | None:
        """Map the shards side by side, now that all are open; None if one is no plain file."""
        sources = [unchecked_gather(source) for source in map(self._sources.get, range(count)) if source]
        files = [source for source in sources if isinstance(source, ExtentFile)]
        return join(files, self._index.meta.dtype) if len(files) == count else None

    def _gather_by_shard(self, records: npt.NDArray[np.int64], out: TokenArray, per_batch: int) -> None:
        firsts = self._firsts * per_batch
        order = records.argsort()  # the records of one shard then follow each other
        ascending = records[order]
        shards = firsts.searchsorted(ascending, side="right") - 1
        within = ascending - firsts[shards]
        rows = np.empty_like(out)
        reads: list[tuple[Any, npt.NDArray[np.int64], TokenArray]] = []
        stop = 0
        for shard, group in groupby(shards.tolist()):
            start, stop = stop, stop + len(list(group))
            source = self._sources.get(shard) or self._source(shard, int(within[start]) // per_batch)
            reads.append((unchecked_gather(source), within[start:stop], rows[start:stop]))
        if all(isinstance(source, RangeSource) for source, _, _ in reads):
            gather_together(reads)
        else:
            for source, numbers, part in reads:
                source.gather_into(numbers, part)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        rows.take(places, axis=0, out=out, mode="clip")

    def read_private(self, index: int) -> npt.NDArray[Any]:
        shard = bisect_right(self._starts, index) - 1
        within = index - self._starts[shard]
        return (self._sources.get(shard) or self._source(shard, within)).read_private(within)

    def will_need(self, index: int, count: int = 1) -> None:
        while count:
            shard = bisect_right(self._starts, index) - 1
            take, within = min(count, self._starts[shard + 1] - index), index - self._starts[shard]
            self._source(shard, within).will_need(within, take)
            index, count = index + take, count - take

    def is_cached(self, index: int) -> bool:
        shard = bisect_right(self._starts, index) - 1
        within = index - self._starts[shard]
        return self._source(shard, within).is_cached(within)

    def _source(self, shard: int, batch: int) -> BatchSource:
        """Return the source of a shard, of which `batch` is about to be read."""
        return self._files.open(shard, lambda number: self._open_again(number, batch))

    def _open_again(self, shard: int, batch: int) -> BatchSource:
        parked = self._parked.get(shard)
        return pickle.loads(parked) if parked else self._open_shard(shard, batch)

    def _open_shard(self, shard: int, batch: int) -> BatchSource:
        """Open a shard by what the index says of it, without HDF5, if that is so; else by what the file says."""
        entry, path = self._index.shards[shard], self._folder / self._index.table.values["path"][shard]
        meta = self._index.meta
        by_index = entry.complete and self._access != "h5py" and entry.is_placed(meta.column)
        by_index = by_index and entry.crc32 != NOT_KNOWN
        found = open_proved(path, entry, meta, self._access, batch) if by_index else None
        if found is not None:
            return checked(*found, meta, path, self._verify)
        reader = self._open_file(path, entry)
        if not (entry.complete and reader.complete):
            raise IncompleteError(f"{reader.path}: its writer has not finished; convert again")
        self._index.require_agreement(reader, entry)
        if by_index:
            self._index.require_extents(reader, entry)
        if by_index or (reader.sha256 is None and entry.crc32 != NOT_KNOWN):
            tokens = tokens_of(reader._source, entry, reader.meta, batch)
            require_proof(reader.path, entry, reader.meta, reader.stored_crc32(), batch, tokens)
        reader.check_reads(self._verify)
        return reader._source

    def _open_file(self, path: Path, entry: ShardEntry) -> BatchReader:
        """Open a shard by what its file says, and check no read yet."""
        if (field := self._index.meta.field) is not None:
            from zb_hdf5.formats.hdf5.fields import HDF5FieldReader  # h5py, which whoever has an index does not need

            return HDF5FieldReader(path, field.name, access=self._access, verify="none")
        return BACKENDS[entry.backend].open(path, access=self._access, verify="none")

    def close(self) -> None:
        for source in self._files.files().values():
            source.close()
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        parked = self._parked | {shard: pickle.dumps(source) for shard, source in self._files.files().items()}
        kept = {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_files", "_sources", "_joined")}
        return kept | {"_parked": parked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
