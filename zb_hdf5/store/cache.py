"""A cache on a fast local disk, in front of the source of any reader: batches are kept when they are first read.

It may only ever make things faster. What it gives was compared with the crc32 that was taken when it was fetched, and
whatever goes wrong with its files is a read of the source. `cache_folder.py` has those files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.columns.source import BatchSource, CopyingSource
from zb_hdf5.errors import ArgumentError, IncompleteError, UnavailableError
from zb_hdf5.files.paths import RemotePath, local_path
from zb_hdf5.files.sizes import parse_size
from zb_hdf5.spec import StoreMeta, TokenArray
from zb_hdf5.store.cache_folder import CachedColumn, free_bytes, make_room, occupied_bytes

#: Batches that one gather fetches at the same time.
FETCHES: Final = 8
#: Of what is free on the disk, the percentage that a cache takes where nobody says how much.
FREE_PERCENT: Final = 90


@dataclass(frozen=True)
class Cache:
    """A cache folder. Several readers, processes and jobs may share one.

    Attributes
    ----------
    folder
        On a disk of this machine.
    max_bytes
        What all columns of all stores in it may occupy. Processes do not wait for each other, so each may exceed
        this by up to 64 MiB.
    """

    folder: Path
    max_bytes: int

    @classmethod
    def of(cls, folder: str | os.PathLike[str], max_bytes: int | str | None) -> Cache:
        """Make the folder; `max_bytes` is a number, a text such as "200GiB", or None.

        None: what the columns in it occupy already, and nine tenths of what is free on the disk.

        Raises
        ------
        ArgumentError
            If it cannot be made, or the size is none.
        """
        root = local_path(folder)
        size = parse_size(max_bytes) if isinstance(max_bytes, str) else max_bytes
        if size is not None and size < 1:
            raise ArgumentError(f"cache_bytes must be at least 1, found {size}")
        try:
            root.mkdir(parents=True, exist_ok=True)
            return cls(root, size or occupied_bytes(root) + free_bytes(root) * FREE_PERCENT // 100)
        except OSError as error:
            raise _unusable(root, error) from error

    def attach(self, reader: BatchReader) -> None:
        """Put this cache in front of a reader's batches, and of those of its fields once they are opened.

        A reader with verify="none" reads the batches that are there, and adds none, which nobody would have compared.

        Raises
        ------
        ArgumentError
            If the reader still grows, nothing identifies its content, or the folder cannot be written.
        """
        if not reader.complete:
            raise ArgumentError(f"{reader.path}: still grows: expected a finished store for a cache; leave out cache")
        name, size = self._name_of(reader), reader.num_batches * reader.meta.batch_bytes
        if reader.verify == "none":
            warnings.warn(f"{reader.path}: verify='none' adds nothing to the cache {self.folder}", stacklevel=2)
            if not (self.folder / name).exists():
                return
        try:
            column = CachedColumn(self.folder, name, reader.meta, reader.num_batches, self.max_bytes)
        except (OSError, UnavailableError, IncompleteError) as error:
            raise _unusable(self.folder, error) from error
        column.full = reader.verify == "none"
        with contextlib.suppress(OSError):
            make_room(self.folder, min(self.max_bytes, size - column.occupied_bytes), self.max_bytes)
        reader._source = CachedSource(reader._source, reader.meta, column)
        reader.in_front = self.attach

    def _name_of(self, reader: BatchReader) -> str:
        """Return the name of the column of a reader; with verify="none" that of compared batches if it exists."""
        if reader.verify == "none":
            name = _column_name(reader, compared=True)
            return name if (self.folder / name).exists() else _column_name(reader, compared=False)
        return _column_name(reader, compared=reader.verified in ("whole reads", "all reads"))


def _unusable(folder: Path, error: Exception) -> ArgumentError:
    return ArgumentError(f"{folder}: expected a cache folder that can be written: {error}; choose another, or none")


def _column_name(reader: BatchReader, *, compared: bool) -> str:
    """Return the name of a column's folder: another content has another name.

    The files count too where a fingerprint is only a sample, or where nobody compares the batches that are kept: those
    of a damaged file must not outlive it, and no reader with verify="batch" may find them.
    """
    meta, identity = reader.meta, reader.fingerprint
    if not compared:
        identity = f"unchecked:{identity}"
    if identity.startswith(("sampled:", "unchecked:")):
        identity += _files_of(reader)
    text = f"{identity}|{meta.column}|{reader.num_batches}x{meta.batch_size}x{meta.seq_len}|{meta.dtype!r}"
    return f"zb-cache-{hashlib.sha256(text.encode()).hexdigest()}"


def _files_of(reader: BatchReader) -> str:
    """Return what tells the file that is open, or the files of a folder, from others of the same size."""
    path = reader.path if isinstance(reader.path, RemotePath) else reader.path.absolute()
    identity = getattr(getattr(reader._source, "unchecked", reader._source), "identity", None)
    if identity is not None:
        return f"{path}:{identity}"
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [(file.name, os.stat(file)) for file in files]
    except OSError as error:
        raise ArgumentError(
            f"{path}: expected a store with digests, or a file of this machine, to keep it in a cache; leave out cache"
        ) from error
    return f"{path}:{[(name, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in found]}"


def column_of(reader: BatchReader) -> CachedColumn:
    """Return what a reader's cache holds.

    Raises
    ------
    ArgumentError
        If it has no cache.
    """
    if not isinstance(reader._source, CachedSource):
        raise ArgumentError(f"{reader.path}: expected a reader with a cache")
    return reader._source.column


class CachedSource(CopyingSource):
    """A source that keeps whole batches in a cache, and reads them there the next time. See `BatchSource`.

    A batch that is missing is fetched whole, also where only some rows of it are asked for, and at most once by a
    process whose threads all miss it. Once the cache is full, the rest is read as if there was no cache.

    Rows of a batch are compared with its crc32 when this process needs the first of them; whole batches each time.
    """

    def __init__(self, source: BatchSource, meta: StoreMeta, column: CachedColumn) -> None:
        self._source, self._meta, self.column = source, meta, column
        self.access, self.wants_threads = source.access, source.wants_threads
        self.in_flight = source.in_flight
        self._fetching: dict[tuple[int, int], threading.Event] = {}

    def read_into(self, index: int, out: TokenArray) -> None:
        if not self.column.read_into(index, out):
            self._fetch(index, out)

    def _fetch(self, index: int, out: TokenArray) -> None:
        """Read a batch from the source and keep it, unless another thread does so at this moment."""
        key, done = (os.getpid(), index), threading.Event()  # those of the parent of a fork are never set
        others = self._fetching.setdefault(key, done)
        if others is not done:
            others.wait()
        try:
            if not self.column.read_into(index, out):  # another one has been here since
                self._source.read_into(index, out)
                self.column.put(index, out)
        finally:
            if others is done:
                del self._fetching[key]
                done.set()

    def read_range_into(self, start: int, out: TokenArray) -> None:
        """Fill `out` with consecutive batches: those that are missing by reads as large as can be."""
        here = [self.column.read_into(start + number, batch) for number, batch in enumerate(out)]
        for is_here, run in groupby(range(len(out)), here.__getitem__):
            if not is_here:
                numbers = list(run)
                batches = out[numbers[0] : numbers[-1] + 1]
                self._source.read_range_into(start + numbers[0], batches)
                for number, batch in zip(numbers, batches, strict=True):
                    self.column.put(start + number, batch)

    def read(self, index: int) -> TokenArray:
        """Return batch `index`, read-only: from its second read on a view of the cache, where its disk is local."""
        if self.column.seen[index]:
            try:
                return self.column.rows.read(index)
            except (OSError, IncompleteError):
                self.column.mend()
        return super().read(index)

    def read_private(self, index: int) -> npt.NDArray[Any]:
        if self.column.seen[index]:
            try:
                return self.column.rows.read_private(index)
            except (OSError, IncompleteError):
                self.column.mend()
        return super().read_private(index)

    def gather_into(self, records: npt.NDArray[np.int64], out: TokenArray) -> None:
        batches = records // (self._meta.batch_tokens // out.shape[1])
        here = self.column.seen.take(batches)
        if 0 in here.tobytes() and not self._see(np.unique(batches[~here]).tolist()):  # all() takes longer
            self._gather_parts(records, out, self.column.seen[batches])
            return
        try:
            self.column.rows.gather_into(records, out)
        except (OSError, IncompleteError):
            self.column.mend()
            self._source.gather_into(records, out)

    def _see(self, batches: list[int]) -> bool:
        """Have batches in the cache, and compared with their crc32; return False if there was no room for all."""
        missing = [index for index in batches if not self.column.read_into(index, self._buffer())]
        if len(missing) > 1 and not self.column.full:
            # threads of this call only: those of a pool would be missing after a fork
            with ThreadPoolExecutor(min(FETCHES, len(missing)), thread_name_prefix="zb-cache") as pool:
                list(pool.map(self._bring, missing))
        elif missing:
            self._bring(missing[0])
        return all(self.column.seen[index] for index in batches)

    def _buffer(self) -> TokenArray:
        return np.empty(self._meta.shape, self._meta.dtype)

    def _bring(self, index: int) -> None:
        if not self.column.full:
            self._fetch(index, self._buffer())

    def _gather_parts(self, records: npt.NDArray[np.int64], out: TokenArray, here: npt.NDArray[np.bool_]) -> None:
        """Gather the rows of batches that are in the cache there, and the others from the source."""
        for chosen, gather in ((~here, self._source.gather_into), (here, self.gather_into)):
            if chosen.any():
                rows = np.empty((int(chosen.sum()), out.shape[1]), out.dtype)
                gather(records[chosen], rows)
                out[chosen] = rows

    def is_cached(self, index: int) -> bool:
        if self.column.has(index):
            return self.column.rows.is_cached(index)
        return self.in_flight is None and not self.wants_threads and self._source.is_cached(index)

    def will_need(self, index: int, count: int = 1) -> None:
        for is_here, run in groupby(range(index, index + count), self.column.has):
            numbers = list(run)
            (self.column.rows if is_here else self._source).will_need(numbers[0], len(numbers))

    def close(self) -> None:
        self.column.close()
        self._source.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_fetching": {}}
