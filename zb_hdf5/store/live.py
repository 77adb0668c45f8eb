"""A store that is read while it grows: shards come one after another, and `shards.json` names each at once.

The growing shard is an ordinary `.h5.partial` in SWMR mode, whose commit marker is the truth about it. The index names
it before anyone can look for it, and changes only when a shard is finished.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ClosedError, ConvertError, FormatError, Remedy, UnavailableError
from zb_hdf5.files.checked import GroupDigest
from zb_hdf5.files.forks import OwnLock, generation
from zb_hdf5.files.paths import local_path, on_failure
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.batch_writer import BatchWriter, FieldArrays, FieldDigest, ShardInfo, as_batches
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.h5_corpus import HDF5Corpus
from zb_hdf5.formats.h5_writer import HDF5BatchWriter
from zb_hdf5.spec import (
    CRC32_CHUNK_ROWS,
    INDEX_NAME,
    NO_CODEC,
    NO_SHA256,
    SHARD_PREFIX,
    StoreMeta,
    TokenArray,
    combine_sha256,
)
from zb_hdf5.store.format_list import FORMATS
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shard_files import ShardFiles
from zb_hdf5.store.shard_table import ShardEntry
from zb_hdf5.store.store_corpus import StoreCorpus

#: Waits between the attempts to open a file that its writer may be closing or renaming.
RETRY_WAITS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


# --- the writer ------------------------------------------------------------------------------------------------------


class _GrowingShard(HDF5BatchWriter):
    """The writer of one shard; when it fails or is aborted, its `.partial` stays: others read its committed batches."""

    _keeps_partial = True

    def __init__(self, store: LiveStoreWriter, name: str, **options: Any) -> None:
        self._store = store
        super().__init__(store.folder / name, store.meta, **options)

    def _count(self, batches: TokenArray, digest: GroupDigest) -> None:
        super()._count(batches, digest)
        self._store.count(batches, digest)

    def remove(self) -> None:
        """Abort, and remove the `.partial`: nothing was committed to it."""
        self.abort()
        self._file.partial_path.unlink()


class LiveStoreWriter(BatchWriter):
    """Takes batches in order and adds them to a store that others may already read. See `BatchWriter`.

    The content of its `shards.json` is `index`.

    Parameters
    ----------
    folder
        The folder of the store; it must not exist.
    meta
        The facts that all shards share.
    shard_batches
        Batches of each shard but the last one; a shard costs one new `shards.json`.
    durable
        Whether each commit is flushed to the disk.
    shuffle
        Name of the record shuffle, or "none".
    source
        The origin of the tokens; free JSON for people.
    """

    backend: ClassVar[str] = _GrowingShard.backend

    def __init__(
        self,
        folder: str | os.PathLike[str],
        meta: StoreMeta,
        *,
        shard_batches: int,
        durable: bool = False,
        shuffle: str = "none",
        source: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        folder = local_path(folder)
        if meta.codec != NO_CODEC:
            raise ArgumentError(f"{folder}: a live store is never compressed: leave out the codec {meta.codec}")
        if shard_batches < 1:
            raise ArgumentError(f"{folder}: a live store needs shard_batches of at least 1, found {shard_batches}")
        try:
            folder.mkdir()
        except FileExistsError as error:
            raise ConvertError(f"{folder}: exists already: choose a new folder for a live store") from error
        self.folder = folder
        self.meta = meta
        self.shard_batches = shard_batches
        self.index = ShardIndex(meta, (), shuffle, source or {}, complete=False, live_id=uuid.uuid4().hex)
        self._durable = durable
        self._crc32 = array("I")
        self._shard: _GrowingShard | None = None  # None: it has failed, or is done
        with on_failure(lambda: shutil.rmtree(folder)):
            self._grow(())

    def __repr__(self) -> str:
        state = "open" if self._open else "ended"
        facts = f"dtype={self.meta.dtype.name}, token_count={self.token_count}, shard_batches={self.shard_batches}"
        return f"{type(self).__name__}({str(self.folder)!r}, {facts}, {state})"

    def count(self, batches: TokenArray, digest: GroupDigest) -> None:
        """Add batches that the growing shard has committed."""
        self.num_batches += len(batches)
        self.token_count += batches.size
        self.max_token = max(self.max_token, digest.max_token)
        self._crc32.extend(digest.crc32)

    def write(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> None:
        """Append batches, which others may read on return. See `BatchWriter.write`."""
        self._growing()
        tokens, values = as_batches(batches, fields, self.meta, self.folder)
        start = 0
        while start < len(tokens):
            shard = self._growing()
            if shard.num_batches == self.shard_batches:
                shard = self._grow(self._finished(shard))
            part = tokens[start : start + self.shard_batches - shard.num_batches]
            shard.write(part, {name: array[start : start + len(part)] for name, array in values.items()})
            start += len(part)

    def sha256(self) -> str:
        """Digest of the store: over the digests of its shards, in order."""
        self._require_own_process(self.folder)
        digests = [shard.sha256 for shard in self.index.shards if shard.complete]
        if self._shard is not None and (self._shard.num_batches or not digests):
            digests.append(self._shard.sha256())
        return combine_sha256(digests)

    def finish(self) -> ShardInfo:
        """Publish the last shard, and mark the index as complete."""
        index = replace(self.index, shards=self._finished(self._growing()), complete=True)
        self._save(index.with_max_token([self.max_token]))
        self._open = False
        return ShardInfo(
            path=self.folder,
            backend=self.backend,
            num_batches=self.num_batches,
            token_count=self.token_count,
            max_token=self.max_token,
            sha256=self.sha256(),
            crc32=self.crc32(),
        )

    def abort(self) -> None:
        """End without completing: all that was committed stays, readable, in a store that is not complete."""
        self._require_own_process(self.folder)
        self._open = False
        if self._shard is not None:
            self._shard.abort()

    def _growing(self) -> _GrowingShard:
        self._require_own_process(self.folder)
        if not self._open or self._shard is None:
            raise ClosedError(f"{self.folder}: this writer was closed or failed", remedy=Remedy.REPAIR, at=self.folder)
        return self._shard

    def _finished(self, shard: _GrowingShard) -> tuple[ShardEntry, ...]:
        """Publish the growing shard; return the entries of all finished ones."""
        self._shard = None
        return (*self.index.shards[:-1], ShardEntry.of(shard.finish()))

    def _grow(self, finished: tuple[ShardEntry, ...]) -> _GrowingShard:
        """Begin a shard, and only then name it; return it."""
        name = f"{SHARD_PREFIX}{len(finished):05}{FORMATS[self.backend].suffix}"
        expected = min(self.shard_batches, CRC32_CHUNK_ROWS)
        origin = {"source": self.index.source, "shuffle": self.index.shuffle}
        shard = _GrowingShard(self, name, expected_batches=expected, durable=self._durable, origin=origin)
        with on_failure(shard.remove):
            fields = {field.name: FieldDigest() for field in self.meta.fields}
            growing = ShardEntry(
                path=name,
                backend=shard.backend,
                num_bytes=0,
                num_batches=0,
                token_count=0,
                sha256=NO_SHA256,
                complete=False,
                fields=fields,
            )
            self._save(replace(self.index, shards=(*finished, growing)))
        self._shard = shard
        return shard

    def _save(self, index: ShardIndex) -> None:
        index.save(self.folder)
        self.index = index


# --- the corpus ------------------------------------------------------------------------------------------------------


class LiveFiles(ShardFiles):
    """The files of a growing store, whose growing shard stays open: its name `.partial` goes when it is published."""

    def _begin(self, found: Mapping[int, Column | FlatFacts]) -> None:
        super()._begin(found)
        self._lock = OwnLock()
        #: The growing shard, by process and name; for a moment also the shard before it.
        self._followed: dict[tuple[int, str], HDF5Corpus] = {}

    def follow(self, index: ShardIndex) -> int:
        """Find the tokens that were committed since, under the newest index; return the number of all.

        Only one thread may call it. Threads that read meanwhile find their batches before, between and after each of
        its lines, because the shards of an index begin with the shards of the index before it.
        """
        counts = index.table.values["token_count"].tolist()
        last = index.shards[-1]
        if not last.complete:
            counts[-1] = self._growing(last).refresh()
        self.index = index
        self.number(counts)  # a batch keeps its number
        kept = None if last.complete else self._key_of(last)
        with self._lock:  # a file that is left out closes when no thread reads from it
            self._followed = {key: file for key, file in self._followed.items() if key == kept}
        return sum(counts)

    def open(self, number: int, start: int) -> Tokens:
        entry = self.index.shards[number]
        return super().open(number, start) if entry.complete else self._growing(entry).tokens

    def _growing(self, entry: ShardEntry) -> HDF5Corpus:
        """Return the growing shard, opened once in each process."""
        key = self._key_of(entry)
        found = self._followed.get(key)
        if found is None:
            with self._lock:
                found = self._followed.get(key)
                if found is None:
                    found = self._followed[key] = self._open_growing(entry.path)
        return found

    @staticmethod
    def _key_of(entry: ShardEntry) -> tuple[int, str]:
        return generation(), entry.path

    def _open_growing(self, name: str) -> HDF5Corpus:
        """Open the growing shard of a store, or of a field of it, and compare its shape."""
        file = self._open_named(name)
        meta = self.index.meta
        if (file.meta.shape, file.dtype) != (meta.shape, meta.dtype):
            file.close()
            raise FormatError(f"{file.path}: {INDEX_NAME} has {meta.shape}, found {file.meta.shape}")
        return file

    def _open_named(self, name: str) -> HDF5Corpus:
        """Open the growing shard under the name that it has at this moment."""
        path = self.folder / name
        column = self.index.meta.field
        field = "" if column is None else column.name
        waits_s = iter(RETRY_WAITS_S)
        while True:
            try:
                with contextlib.suppress(FileNotFoundError):
                    return HDF5Corpus(partial_path(path), self.asked, field=field).with_verify(self.verify)
                return HDF5Corpus(path, self.asked, field=field).with_verify(self.verify)
            except (FormatError, UnavailableError):  # the file may be closed or renamed at this moment
                if (wait_s := next(waits_s, None)) is None:
                    raise
                time.sleep(wait_s)

    def close(self) -> None:
        with self._lock:
            followed = self._followed
            self._followed = {}
        for file in followed.values():
            file.close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("_followed", "_lock")}


class LiveCorpus(StoreCorpus):
    """The committed batches of a growing store; `refresh` shows more. See `StoreCorpus`.

    `complete` turns True when the writer has finished the store; a writer that was killed leaves it False. The
    fingerprint is the same from the first batch to the last, and in the finished store. A growing shard is read
    through h5py, and is not checked: "batch" refuses it. Threads may share it, and each may call `refresh`.

    Parameters
    ----------
    folder
        The folder of the store.
    index
        Its index, as it was just read.
    access, verify
        As for `open_corpus`.
    """

    _kind = LiveFiles

    def __init__(self, folder: Path, index: ShardIndex, access: str = "auto", verify: str = "auto") -> None:
        self._seen: tuple[int, int, int] | None = None  # the version of the index: this one may be too old
        super().__init__(folder, index, access=access, verify=verify)
        with on_failure(self.close):
            self.refresh()

    def _field_corpus(self, name: str) -> LiveCorpus:
        return LiveCorpus(self.path, self.index.of_field(name), self._shards.asked, self.verify)

    def refresh(self) -> int:
        """Show the batches that the writer has committed since; return `num_tokens`.

        Raises
        ------
        FormatError
            If the index is malformed or names a file that is not there, or this is another store now.
        """
        with self._changing:
            files = self.tokens.files  # of a corpus that was closed these are others
            if not self.complete and isinstance(files, LiveFiles):
                self._follow(files)
        return self.num_tokens

    def _follow(self, files: LiveFiles) -> None:
        """Follow the growing shard, under a new index if there is one."""
        index = self.index
        found = os.stat(self.path / INDEX_NAME)
        seen = found.st_ino, found.st_mtime_ns, found.st_size  # of a file that is replaced, never changed
        if seen != self._seen:
            index = ShardIndex.load(self.path)
            index = index if self.meta.field is None else index.of_field(self.meta.field.name)
        if index.live_id != self.index.live_id:  # its batches may have other numbers
            raise FormatError(
                f"{self.path}: was replaced or repaired: expected live_id {self.index.live_id!r}, "
                f"found {index.live_id!r}; open it again"
            )
        num_tokens = files.follow(index)
        for field in self._fields.values():  # after the tokens, and before other threads see the new number
            field.refresh()
        self.index = index
        self.num_tokens = num_tokens
        if index.complete:
            self.sha256 = index.sha256
            self.max_token = index.max_token
            self.complete = True  # last: a thread that sees it sees all batches
        self._seen = seen
