"""Writes the HDF5 batch store: one batch = one chunk = one extent, committed in an order that survives a kill.

Every rule here was paid for with an experiment: all objects and attributes exist before SWMR starts and are only
modified after; data goes through `write_direct_chunk` (dirty data in HDF5's chunk cache turns a full disk into a
segmentation fault); room is reserved before HDF5 is touched; the commit marker `num_batches` is modified after the
data; `file.flush()`, never the dataset's own, brings the superblock along.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, ClassVar, Final

import h5py
import numpy as np

from zb_hdf5.extents import Extents, Run
from zb_hdf5.h5file import chunk_offsets, end_of_file_address, open_h5
from zb_hdf5.spec import (
    BATCHES,
    BATCHES_ATTRIBUTES,
    CRC32,
    CRC32_CHUNK_ROWS,
    HDF5_ALIGNMENT,
    HDF5_FORMAT,
    HDF5_LIBVER,
    HDF5_VERSION,
    NO_SHA256,
    TokenArray,
    meta_block_bytes,
)
from zb_hdf5.writer import BatchWriter, ShardInfo

if TYPE_CHECKING:
    from zb_hdf5.digest import PendingDigest

#: Disk space that is reserved ahead: reserving for each group takes a tenth of the time of a conversion.
RESERVE_BYTES: Final = 64 << 20
CREATOR = f"zb_hdf5 (h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version})"


class HDF5BatchWriter(BatchWriter):
    """Writes a `.h5` batch store in SWMR mode: other processes may open `<path>.partial` and follow.

    Committed means: after `write` returns, a kill of this process loses nothing of it (`durable=True`: nor does a
    power loss). See `BatchWriter` for the parameters.
    """

    backend: ClassVar[str] = "hdf5"

    def _begin(self) -> None:
        self._h5: Any = None
        self._file.unlock()
        self._h5 = open_h5(
            self._file.own_path,
            "w",
            libver=HDF5_LIBVER,
            alignment_threshold=HDF5_ALIGNMENT,
            alignment_interval=HDF5_ALIGNMENT,
            meta_block_size=meta_block_bytes(self._expected_batches),
        )
        self._reserve(meta_block_bytes(self._expected_batches))
        self._create_objects(self._h5)
        self._h5.flush()
        self._h5.swmr_mode = True
        self._file.share_lock()  # from here on HDF5 holds no lock, and another "r+" would get in

    def _create_objects(self, h5: h5py.File) -> None:
        meta = self.meta
        for name, text in (("format", HDF5_FORMAT), ("creator", CREATOR), ("tokenizer", meta.tokenizer)):
            # of fixed length: the heap of variable-length texts has no checksum, and one flipped bit there can send
            # HDF5 2.0 into an endless loop
            data = text.encode("utf-8")
            h5.attrs.create(name, data, dtype=h5py.string_dtype("utf-8", max(1, len(data))))
        h5.attrs.create("format_version", HDF5_VERSION, dtype="<u4")
        for name in ("batch_size", "seq_len", "seed", "total_records", "document_count", "vocab_size"):
            h5.attrs.create(name, getattr(meta, name), dtype="<u8")
        self._batches = h5.create_dataset(
            BATCHES, shape=(0, *meta.shape), maxshape=(None, *meta.shape), chunks=(1, *meta.shape), dtype=meta.dtype
        )
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
        self._batches.resize(stop, axis=0)
        for index, batch in enumerate(batches, first):
            self._batches.id.write_direct_chunk((index, 0, 0), batch)
        group = digest.result()
        if stop > self._crc_dataset.shape[0]:
            self._crc_dataset.resize(stop, axis=0)
        for start in range(first - first % CRC32_CHUNK_ROWS, stop, CRC32_CHUNK_ROWS):
            self._write_crc_chunk(start, group.crc32)
        if self._durable:
            os.fdatasync(self._file.fd)
        token_count, max_token = self.token_count + batches.size, max(self.max_token, group.max_token)
        self._commit(num_batches=stop, token_count=token_count, max_token=max_token)
        self._count(batches, group)

    def _reserve(self, data_bytes: int) -> None:
        """Take the disk space of the next group, and of the metadata with it, before HDF5 is touched."""
        used = end_of_file_address(self._file.fd)
        end = used + data_bytes + meta_block_bytes(self._expected_batches)
        if end <= os.fstat(self._file.fd).st_size:  # HDF5 may have cut off what was reserved before
            return
        try:
            os.posix_fallocate(self._file.fd, used, end - used + RESERVE_BYTES)
        except OSError:  # a disk that is nearly full may still hold this group
            os.posix_fallocate(self._file.fd, used, end - used)

    def _write_crc_chunk(self, start: int, new: list[int]) -> None:
        """Write one chunk of crc rows: those of committed batches, then those of the group that is being written."""
        chunk = np.zeros(CRC32_CHUNK_ROWS, dtype="<u4")
        before = len(self._crc32)
        values = [*self._crc32[start:], *new[max(0, start - before) :]][:CRC32_CHUNK_ROWS]
        chunk[: len(values)] = values
        self._crc_dataset.id.write_direct_chunk((start,), chunk)

    def _commit(self, **attributes: int | bytes) -> None:
        for name, value in attributes.items():
            self._batches.attrs.modify(name, np.array(value, dtype=BATCHES_ATTRIBUTES[name]))
        self._h5.flush()
        if self._durable:
            os.fdatasync(self._file.fd)

    def _complete(self, info: ShardInfo) -> tuple[Run, ...]:
        self._crc_dataset.resize(info.num_batches, axis=0)
        self._commit(sha256=info.sha256.encode(), complete=1)
        offsets = chunk_offsets(self._batches)
        self._h5.close()
        os.ftruncate(self._file.fd, end_of_file_address(self._file.fd))  # give back what was reserved
        return tuple(Extents.from_offsets(offsets, self.meta.batch_bytes).runs)

    def _release(self) -> None:
        if self._h5 is not None:
            with contextlib.suppress(OSError, RuntimeError):  # HDF5 after a failed write; what was committed is on disk
                self._h5.close()
