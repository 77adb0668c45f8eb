"""Writes the HDF5 batch store: one batch = one chunk = one extent, committed in an order that survives a kill.

Every rule here was paid for with an experiment: all objects and attributes exist before SWMR starts and are only
modified after; data goes through `write_direct_chunk` (dirty data in HDF5's chunk cache turns a full disk into a
segmentation fault); all datasets are extended, and room is reserved, before the data are written, so that a commit
modifies the marker `num_batches` only; `file.flush()`, never the dataset's own, brings the superblock along.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import h5py
import numpy as np

from zb_hdf5.columns.writer import Columns, FileWriter, ShardInfo
from zb_hdf5.errors import ConvertError
from zb_hdf5.formats.hdf5.file import CREATOR, chunk_runs, create_for_swmr, create_texts
from zb_hdf5.formats.hdf5.room import Room, early_allocation, hdf5_writes
from zb_hdf5.spec import (
    BATCHES,
    BATCHES_ATTRIBUTES,
    CRC32,
    CRC32_CHUNK_ROWS,
    HDF5_FORMAT,
    HDF5_VERSION,
    NO_SHA256,
    StoreMeta,
    TokenArray,
    batches_ahead,
    meta_block_bytes,
)

if TYPE_CHECKING:
    from zb_hdf5.core.digests import GroupDigest, PendingDigest


class HDF5BatchWriter(FileWriter):
    """Writes a `.h5` batch store in SWMR mode: other processes may open `<path>.partial` and follow.

    Committed means: after `write` returns, a kill of this process loses nothing of it (`durable=True`: nor does a
    power loss). See `FileWriter` for the parameters.
    """

    backend: ClassVar[str] = "hdf5"

    def _begin(self) -> None:
        self._h5: Any = None
        self._failure: OSError | None = None
        self._file.unlock()
        with self._hdf5():
            self._h5 = create_for_swmr(self._file.own_path, meta_block_bytes(self._expected_batches))
            self._create_objects(self._h5)
            self._room = Room(self._h5, self._batches, self._file.fd)
            self._extend(self._expected_batches)
            self._h5.swmr_mode = True
        self._file.share_lock()  # from here on HDF5 holds no lock, and another "r+" would get in

    def _create_objects(self, h5: h5py.File) -> None:
        meta = self.meta
        create_root_attributes(h5, meta)
        self._batches = h5.create_dataset(
            BATCHES, shape=(0, *meta.shape), maxshape=(None, *meta.shape), chunks=(1, *meta.shape), dtype=meta.dtype,
            fill_time="never", dcpl=early_allocation(),
        )  # fmt: skip
        for name, dtype in BATCHES_ATTRIBUTES.items():
            self._batches.attrs.create(name, NO_SHA256.encode() if name == "sha256" else 0, dtype=dtype)
        self._crc_dataset = h5.create_dataset(
            CRC32, shape=(0,), maxshape=(None,), chunks=(CRC32_CHUNK_ROWS,), dtype="<u4",
            fill_time="never", dcpl=early_allocation(),
        )  # fmt: skip

    @contextlib.contextmanager
    def _hdf5(self) -> Iterator[None]:
        """Make what fails inside HDF5 one OSError, and remember it: HDF5 cannot go on with such a file."""
        try:
            with hdf5_writes(self._file.partial_path):
                yield
        except OSError as error:
            self._failure = error
            raise

    def _require_open(self) -> None:
        super()._require_open()
        if self._failure is not None:
            raise ConvertError(
                f"{self._file.path}: an earlier write failed ({self._failure}); the {self.num_batches:,} batches that "
                f"were committed before it are in {self._file.partial_path}: keep them with 'zb repair', or write again"
            )

    def _extend(self, num_batches: int) -> None:
        """Make room for batches and their crc32, which lie in front of them, so that they never part their run."""
        self._room.extend({self._crc_dataset: num_batches, self._batches: num_batches})

    def _make_room(self, stop: int) -> None:
        there = self._room.num_chunks
        if stop > there:
            self._room.require_metadata_space()
            with self._hdf5():
                self._extend(max(stop, there + batches_ahead(there, self.meta)))

    def _append(self, batches: TokenArray, digest: PendingDigest) -> None:
        first, stop = self.num_batches, self.num_batches + len(batches)
        self._make_room(stop)
        self._room.reserve(stop)
        with self._hdf5():
            for index, batch in enumerate(batches, first):
                self._batches.id.write_direct_chunk((index, 0, 0), batch)
        self._commit(batches, digest.result())

    def _room_for(self, first: int, count: int) -> int | None:
        self._make_room(first + count)
        return self._room.place(first, count, self.meta.padded_batch_bytes)

    def _commit(self, batches: TokenArray, group: GroupDigest) -> None:
        first, stop = self.num_batches, self.num_batches + len(batches)
        with self._hdf5():
            for start in range(first - first % CRC32_CHUNK_ROWS, stop, CRC32_CHUNK_ROWS):
                self._write_crc_chunk(start, group.crc32)
        if self._durable:
            os.fdatasync(self._file.fd)
        token_count, max_token = self.token_count + batches.size, max(self.max_token, group.max_token)
        self._modify(num_batches=stop, token_count=token_count, max_token=max_token)
        self._count(batches, group)

    def _write_crc_chunk(self, start: int, new: list[int]) -> None:
        """Write one chunk of crc rows: those of committed batches, then those of the group that is being written."""
        chunk = np.zeros(CRC32_CHUNK_ROWS, dtype="<u4")
        before = len(self._crc32)
        values = [*self._crc32[start:], *new[max(0, start - before) :]][:CRC32_CHUNK_ROWS]
        chunk[: len(values)] = values
        self._crc_dataset.id.write_direct_chunk((start,), chunk)

    def _modify(self, **attributes: int | bytes) -> None:
        with self._hdf5():
            for name, value in attributes.items():
                self._batches.attrs.modify(name, np.array(value, dtype=BATCHES_ATTRIBUTES[name]))
            self._h5.flush()
        if self._durable:
            os.fdatasync(self._file.fd)

    def _complete(self, info: ShardInfo) -> Columns:
        with self._hdf5():
            for dataset in (self._batches, self._crc_dataset):
                dataset.resize(info.num_batches, axis=0)
            self._h5.flush()  # before the file says that it is complete
            self._modify(sha256=info.sha256.encode(), complete=1)
            columns = {dataset.name.strip("/"): chunk_runs(dataset) for dataset in (self._batches, self._crc_dataset)}
            self._h5.close()
        self._room.cut_off(info.num_batches)
        return columns

    def _release(self) -> None:
        if self._h5 is not None:
            with contextlib.suppress(OSError, RuntimeError):  # HDF5 after a failed write; what was committed is on disk
                self._h5.close()


def create_root_attributes(h5: h5py.File, meta: StoreMeta) -> None:
    """Write what all batches of a file have in common."""
    create_texts(h5, format=HDF5_FORMAT, creator=CREATOR, tokenizer=meta.tokenizer)
    h5.attrs.create("format_version", HDF5_VERSION, dtype="<u4")
    for name in ("batch_size", "seq_len", "seed", "total_records", "document_count", "vocab_size"):
        h5.attrs.create(name, getattr(meta, name), dtype="<u8")
