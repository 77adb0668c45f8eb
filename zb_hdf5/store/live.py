"""Writes a store that is read while it grows: shards come one after another, and `shards.json` names each at once.

The growing shard is an ordinary `.h5.partial` in SWMR mode, whose commit marker is the truth about it. The index names
it before anyone can look for it, and changes only when a shard is finished.
"""

from __future__ import annotations

import os
import shutil
import uuid
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ClosedError, ConvertError, Remedy
from zb_hdf5.files.digests import crc32_array
from zb_hdf5.files.paths import local_path
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.batch_writer import BatchWriter, FieldArrays, FieldDigest, ShardInfo, as_batches, require_batches
from zb_hdf5.formats.hdf5.h5_writer import HDF5BatchWriter
from zb_hdf5.formats.registry import BACKENDS
from zb_hdf5.spec import CRC32_CHUNK_ROWS, NO_CODEC, NO_SHA256, SHARD_PREFIX, StoreMeta, combine_sha256
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.table import ShardEntry


class _GrowingShard(HDF5BatchWriter):
    """The writer of one shard; when it fails or is aborted, its `.partial` stays: others read what was committed."""

    def _drop_partial(self) -> None:
        self._file.keep()

    def remove(self) -> None:
        """Abort, and remove the `.partial`: nothing was committed to it."""
        self.abort()
        self._file.partial_path.unlink()


class LiveStoreWriter(BatchWriter):
    """Takes batches in order and adds them to a store that others may already read. See `BatchWriter`.

    Parameters
    ----------
    folder
        Of the store; made here.
    meta
        Shape, dtype and origin of the batches.
    shard_batches
        Batches of each shard but the last one. A finished shard costs one new `shards.json`.
    durable
        Also flush to disk at each commit, so that committed batches outlive a power loss.
    shuffle, source
        What the index says of the batches' origin; see `ShardIndex`.

    Attributes
    ----------
    index
        What `shards.json` says now.

    Raises
    ------
    ArgumentError
        If `shard_batches` is less than 1.
    ConvertError
        If `folder` exists.
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
        folder = local_path(folder)
        if meta.codec != NO_CODEC:
            raise ArgumentError(
                f"{folder}: a live store is never compressed: leave out the codec {meta.codec}, and convert the store "
                "when it is complete"
            )
        if shard_batches < 1:
            raise ArgumentError(f"{folder}: a live store needs shard_batches of at least 1, found {shard_batches}")
        try:
            folder.mkdir()
        except FileExistsError as error:
            raise ConvertError(
                f"{folder}: exists already: a live store begins in a new folder; choose another"
            ) from error
        self.folder, self.shard_batches = folder, shard_batches
        self.index = ShardIndex(meta, (), shuffle, source or {}, complete=False, live_id=uuid.uuid4().hex)
        self.meta = meta
        self._durable, self._open = durable, True
        self._crc32: list[npt.NDArray[np.uint32]] = []  # of the finished shards
        self._max_token = 0
        self._shard: _GrowingShard | None = None
        try:
            self._grow(())
        except BaseException:
            shutil.rmtree(folder)
            raise

    @property
    def num_batches(self) -> int:
        """Batches that are committed."""
        return self.index.num_batches + (0 if self._shard is None else self._shard.num_batches)

    @property
    def token_count(self) -> int:
        return self.num_batches * self.meta.batch_tokens

    @property
    def max_token(self) -> int:
        """The largest id among them."""
        return max(self._max_token, 0 if self._shard is None else self._shard.max_token)

    def write(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> None:
        """Append batches, which others may read on return. See `BatchWriter.write`."""
        self._growing()
        tokens, values = as_batches(batches, fields, self.meta, self.folder)
        start = 0
        while start < len(tokens):
            shard = self._growing()
            part = tokens[start : start + self.shard_batches - shard.num_batches]
            shard.write(part, {name: array[start : start + len(part)] for name, array in values.items()})
            start += len(part)
            self._grow_if_full(shard)

    def write_from(self, reader: BatchReader, start: int, count: int) -> int:
        """Append batches of a reader, copied by the kernel. See `BatchWriter.write_from`."""
        self._growing()
        require_batches(reader, start, count, self.meta, self.folder)
        copied = 0
        while True:
            shard = self._growing()
            wanted = min(count - copied, self.shard_batches - shard.num_batches)
            done = shard.write_from(reader, start + copied, wanted)
            copied += done
            self._grow_if_full(shard)
            if done < wanted or copied == count:
                return copied

    def sha256(self) -> str:
        """Digest of the store: over the digests of its shards, in order."""
        digests = [shard.sha256 for shard in self.index.shards if shard.complete]
        if self._shard is not None and (self._shard.num_batches or not digests):
            digests.append(self._shard.sha256())
        return combine_sha256(digests)

    def crc32(self) -> npt.NDArray[np.uint32]:
        """Return the crc32 of each batch written so far."""
        return np.concatenate([*self._crc32, crc32_array([]) if self._shard is None else self._shard.crc32()])

    def finish(self) -> ShardInfo:
        """Publish the last shard, and say in the index that the store is complete."""
        shard = self._growing()
        empty = shard.num_batches == 0 and len(self.index.shards) > 1
        shards = self._finished_before() if empty else self._finished(shard)
        self._save(replace(self.index, shards=shards, complete=True))
        if empty:  # now nobody asks for it any more
            shard.remove()
        self._open = False
        return ShardInfo(
            self.folder, self.backend, self.num_batches, self.token_count, self.max_token, self.sha256(), self.crc32()
        )

    def abort(self) -> None:
        """End without completing: all that was committed stays, readable, and the index goes on to say "growing"."""
        self._open = False
        if self._shard is not None:
            self._shard.abort()

    def _growing(self) -> _GrowingShard:
        if not self._open or self._shard is None:
            raise ClosedError(f"{self.folder}: this writer was closed or failed", remedy=Remedy.REPAIR, at=self.folder)
        return self._shard

    def _finished_before(self) -> tuple[ShardEntry, ...]:
        return tuple(self.index.shards[:-1])

    def _finished(self, shard: _GrowingShard) -> tuple[ShardEntry, ...]:
        """Publish the growing shard; return the entries of all finished ones."""
        self._shard = None  # it has failed, or is done
        info = shard.finish()
        self._crc32.append(info.crc32)
        self._max_token = max(self._max_token, info.max_token)
        return (*self._finished_before(), ShardEntry.of(info))

    def _grow_if_full(self, shard: _GrowingShard) -> None:
        if shard.num_batches == self.shard_batches:
            self._grow(self._finished(shard))

    def _grow(self, finished: tuple[ShardEntry, ...]) -> None:
        """Begin a shard, and only then name it."""
        name = f"{SHARD_PREFIX}{len(finished):05}{BACKENDS[_GrowingShard.backend].suffix}"
        expected = min(self.shard_batches, CRC32_CHUNK_ROWS)
        origin = {"source": self.index.source, "shuffle": self.index.shuffle}
        shard = _GrowingShard(
            self.folder / name, self.index.meta, expected_batches=expected, durable=self._durable, origin=origin
        )
        try:
            fields = {field.name: FieldDigest() for field in self.meta.fields}
            growing = ShardEntry(name, shard.backend, 0, 0, 0, NO_SHA256, complete=False, fields=fields)
            self._save(replace(self.index, shards=(*finished, growing)))
        except BaseException:
            shard.remove()
            raise
        self._shard = shard

    def _save(self, index: ShardIndex) -> None:
        index.save(self.folder)
        self.index = index
