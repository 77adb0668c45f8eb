"""Writes the HDF5 batch store: one batch = one chunk = one extent, committed in an order that survives a kill.

Every rule here was paid for with an experiment: all objects and attributes exist before SWMR starts and are only
modified after; data goes through `write_direct_chunk` (dirty data in HDF5's chunk cache turns a full disk into a
segmentation fault); room is reserved before HDF5 is touched; the commit marker `num_batches` is modified after the
data; `file.flush()`, never the dataset's own, brings the superblock along.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, ClassVar

import h5py
import numpy as np

from zb_hdf5.extents import Extents, Run
from zb_hdf5.h5file import (
    CREATOR,
    chunk_offsets,
    create_for_swmr,
    create_texts,
    end_of_file_address,
    reserve_space,
)
from zb_hdf5.spec import (
    BATCHES,
    BATCHES_ATTRIBUTES,
    CRC32,
    CRC32_CHUNK_ROWS,
    HDF5_ALIGNMENT,
    HDF5_FORMAT,
    HDF5_VERSION,
    NO_SHA256,
    StoreMeta,
    TokenArray,
    meta_block_bytes,
)
from zb_hdf5.writer import FileWriter, ShardInfo

if TYPE_CHECKING:
    from zb_hdf5.digest import GroupDigest, PendingDigest


class HDF5BatchWriter(FileWriter):
    """Writes a `.h5` batch store in SWMR mode: other processes may open `<path>.partial` and follow.

    Committed means: after `write` returns, a kill of this process loses nothing of it (`durable=True`: nor does a
    power loss). See `FileWriter` for the parameters.
    """

    backend: ClassVar[str] = "hdf5"

    def _begin(self) -> None:
        self._h5: Any = None
        self._file.unlock()
        self._h5 = create_for_swmr(self._file.own_path, meta_block_bytes(self._expected_batches))
        self._reserve(meta_block_bytes(self._expected_batches))
        self._create_objects(self._h5)
        self._h5.flush()
        self._h5.swmr_mode = True
        self._file.share_lock()  # from here on HDF5 holds no lock, and another "r+" would get in

    def _create_objects(self, h5: h5py.File) -> None:
        meta = self.meta
        create_root_attributes(h5, meta)
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)  # a batch has its extent before it has bytes: `_room_for`
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        self._batches = h5.create_dataset(
            BATCHES, shape=(0, *meta.shape), maxshape=(None, *meta.shape), chunks=(1, *meta.shape), dtype=meta.dtype,
            fill_time="never", dcpl=early,
        )  # fmt: skip
        for name, dtype in BATCHES_ATTRIBUTES.items():
            self._batches.attrs.create(name, NO_SHA256.encode() if name == "sha256" else 0, dtype=dtype)
        # the crc rows of all expected batches lie before the first batch, so that they never part its run
        rows = self._expected_batches
        self._crc_dataset = h5.create_dataset(
            CRC32, shape=(rows,), maxshape=(None,), chunks=(CRC32_CHUNK_ROWS,), dtype="<u4"
        )
        for start in range(0, rows, CRC32_CHUNK_ROWS):
            self._write_crc_chunk(start, [])

    def _append(self, batches: TokenArray, digest: PendingDigest) -> None:
        first, stop = self.num_batches, self.num_batches + len(batches)
        self._reserve(len(batches) * (self.meta.padded_batch_bytes + HDF5_ALIGNMENT))
        if stop > self._batches.shape[0]:
            self._batches.resize(stop, axis=0)
        for index, batch in enumerate(batches, first):
            self._batches.id.write_direct_chunk((index, 0, 0), batch)
        self._commit(batches, digest.result())

    def _room_for(self, first: int, count: int) -> int | None:
        stop = first + count
        if stop > self._expected_batches:  # metadata may come to lie between them
            return None
        self._reserve(0)
        if stop > self._batches.shape[0]:
            self._batches.resize(stop, axis=0)
        self._h5.flush()
        end = max(os.fstat(self._file.fd).st_size, end_of_file_address(self._file.fd))
        os.ftruncate(self._file.fd, end)  # HDF5 refuses to follow a file that is shorter than it should be
        # two questions, not one for each batch: HDF5 looks at all chunks to answer one
        begin, last = (self._batches.id.get_chunk_info_by_coord((k, 0, 0)).byte_offset for k in (first, stop - 1))
        return begin if last - begin == (count - 1) * self.meta.padded_batch_bytes else None

    def _commit(self, batches: TokenArray, group: GroupDigest) -> None:
        first, stop = self.num_batches, self.num_batches + len(batches)
        if stop > self._crc_dataset.shape[0]:
            self._crc_dataset.resize(stop, axis=0)
        for start in range(first - first % CRC32_CHUNK_ROWS, stop, CRC32_CHUNK_ROWS):
            self._write_crc_chunk(start, group.crc32)
        if self._durable:
            os.fdatasync(self._file.fd)
        token_count, max_token = self.token_count + batches.size, max(self.max_token, group.max_token)
        self._modify(num_batches=stop, token_count=token_count, max_token=max_token)
        self._count(batches, group)

    def _reserve(self, data_bytes: int) -> None:
        """Take the disk space of the next group, and of the metadata with it, before HDF5 is touched."""
        reserve_space(self._file.fd, data_bytes + meta_block_bytes(self._expected_batches))

    def _write_crc_chunk(self, start: int, new: list[int]) -> None:
        """Write one chunk of crc rows: those of committed batches, then those of the group that is being written."""
        chunk = np.zeros(CRC32_CHUNK_ROWS, dtype="<u4")
        before = len(self._crc32)
        values = [*self._crc32[start:], *new[max(0, start - before) :]][:CRC32_CHUNK_ROWS]
        chunk[: len(values)] = values
        self._crc_dataset.id.write_direct_chunk((start,), chunk)

    def _modify(self, **attributes: int | bytes) -> None:
        for name, value in attributes.items():
            self._batches.attrs.modify(name, np.array(value, dtype=BATCHES_ATTRIBUTES[name]))
        self._h5.flush()
        if self._durable:
            os.fdatasync(self._file.fd)

    def _complete(self, info: ShardInfo) -> tuple[Run, ...]:
        for dataset in (self._batches, self._crc_dataset):
            dataset.resize(info.num_batches, axis=0)
        self._modify(sha256=info.sha256.encode(), complete=1)
        offsets = chunk_offsets(self._batches)
        self._h5.close()
        os.ftruncate(self._file.fd, end_of_file_address(self._file.fd))  # give back what was reserved
        return tuple(Extents.from_offsets(offsets, self.meta.batch_bytes).runs)

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
