"""One file that is both: HDF5 metadata in the reserved header bytes of a `.batch` file.

The metadata describe the slots as one HDF5 dataset, `batches`: contiguous where batches fill their pages, else one
chunk per slot. Beyond the header, they hold the origin of the tokens. No token is moved or read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np

from zb_hdf5.columns.writer import Columns, ShardInfo
from zb_hdf5.errors import (
    ArgumentError,
    BackendError,
    ChecksumError,
    FormatError,
    IncompleteError,
    Remedy,
    UnavailableError,
)
from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.files.locks import NO_LOCKS
from zb_hdf5.files.publishing import write_fully
from zb_hdf5.formats.batch_header import batch_file_bytes
from zb_hdf5.formats.hdf5.reader import HDF5BatchReader
from zb_hdf5.formats.hdf5.writer import create_root_attributes
from zb_hdf5.formats.native import BatchFileWriter, Face, face_of, read_header
from zb_hdf5.spec import (
    BATCHES,
    BATCHES_ATTRIBUTES,
    FACE_BYTES,
    HDF5_LIBVER,
    HDF5_MAGIC,
    HEADER_BYTES,
    NO_SHA256,
    USER_BLOCK_BYTES,
    StoreMeta,
)


class DualFileWriter(BatchFileWriter):
    """Writes a `.batch` file that has its HDF5 metadata when it gets its name."""

    def _begin(self) -> None:
        require_whole_records(self.meta, self._file.path)
        super()._begin()

    def _complete(self, info: ShardInfo) -> Columns:
        columns = super()._complete(info)
        write_fully(self._file.fd, build_face(self.meta, info.num_batches, self._file.path), USER_BLOCK_BYTES)
        return columns


def stamp(path: str | os.PathLike[str]) -> None:
    """Write the HDF5 metadata, the signature last: after a kill the file is a `.batch` file and not an HDF5 file.

    Raises
    ------
    ArgumentError
        If it is stamped already, or HDF5 cannot describe its slots; see `require_whole_records`.
    FormatError, IncompleteError
        If it is no whole `.batch` file.
    UnavailableError
        If another process holds the file's lock.
    """
    path = Path(path)
    with _locked(path) as fd:
        meta, num_batches = read_header(path)
        if face_of(path) is Face.HDF5:
            raise ArgumentError(f"{path}: is stamped already")
        face = build_face(meta, num_batches, path)
        write_fully(fd, face[len(HDF5_MAGIC) :], USER_BLOCK_BYTES + len(HDF5_MAGIC))
        os.fsync(fd)
        write_fully(fd, face[: len(HDF5_MAGIC)], USER_BLOCK_BYTES)
        os.fsync(fd)


def unstamp(path: str | os.PathLike[str]) -> None:
    """Put the zeros back, those of the signature first; the file then has the bytes from before `stamp`.

    What a killed `stamp` or `unstamp` has left is removed as well. Raises as `stamp` does.
    """
    path = Path(path)
    with _locked(path) as fd:
        read_header(path)
        if face_of(path) is Face.NONE:
            raise ArgumentError(f"{path}: is not stamped")
        write_fully(fd, bytes(len(HDF5_MAGIC)), USER_BLOCK_BYTES)
        os.fsync(fd)
        write_fully(fd, bytes(FACE_BYTES), USER_BLOCK_BYTES)
        os.fsync(fd)


def check(path: str | os.PathLike[str]) -> None:
    """Compare what HDF5 says of a stamped file with what its header says.

    Raises
    ------
    ChecksumError
        If HDF5 finds the metadata incomplete or damaged, or they describe other batches or offsets than the header.
    """
    path = Path(path)
    meta, num_batches = read_header(path)
    if face_of(path) is Face.TORN:
        raise ChecksumError(f"{path}: a stamp was interrupted: valid .batch, not HDF5", remedy=Remedy.STAMP, at=path)
    try:
        with HDF5BatchReader(path, access="pread") as face:
            # a header has no room for the rest of `meta`: only the HDF5 metadata hold it
            found = (replace(face.meta, document_count=0, vocab_size=0, tokenizer=""), face.num_batches, face.extents)
    except (FormatError, IncompleteError, BackendError) as error:
        raise ChecksumError(
            f"{path}: its HDF5 metadata are damaged: {error.facts}", remedy=Remedy.STAMP, at=path
        ) from error
    stride = meta.padded_batch_bytes if num_batches > 1 else meta.batch_bytes  # one batch has no next one
    expected = (meta, num_batches, Extents([Run(HEADER_BYTES, stride, num_batches)], meta.batch_bytes))
    if found != expected:
        raise ChecksumError(
            f"{path}: its HDF5 metadata contradict its header: expected {expected}, found {found}",
            remedy=Remedy.STAMP,
            at=path,
        )


def require_whole_records(meta: StoreMeta, path: Path) -> int:
    """Return how many records a slot has room for.

    Raises
    ------
    ArgumentError
        If the padding of a slot is no whole number of records: HDF5 has no dataset with such gaps that fits a header.
    """
    record_bytes = meta.batch_bytes // meta.batch_size
    slot_records, rest = divmod(meta.padded_batch_bytes, record_bytes)
    if rest or meta.padded_batch_bytes == 2**32:  # HDF5 chunks end below 4 GiB
        raise ArgumentError(
            f"{path}: HDF5 cannot describe its slots: expected {meta.padded_batch_bytes:,} bytes to be whole "
            f"records of {record_bytes:,} bytes; choose a seq_len that is a power of 2, or convert to hdf5"
        )
    return slot_records


def build_face(meta: StoreMeta, num_batches: int, path: Path) -> bytes:
    """Return bytes 512..4095: what HDF5 writes before the data of a sparse scratch file of the same shape.

    Raises
    ------
    ArgumentError
        If there is no batch, or as `require_whole_records` says.
    """
    slot_records = require_whole_records(meta, path)
    if num_batches == 0:
        raise ArgumentError(f"{path}: holds no batches, and HDF5 allocates no bytes for an empty dataset")
    # A named file: HDF5 wants a real path, and its drivers for memory either allocate it all or align otherwise. Disks
    # have a largest file size (16 TiB for ext4), and memory has not: only the few pages that are written are there.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(prefix="zb-face-", dir=memory, delete=False) as scratch:
        options = {"userblock_size": USER_BLOCK_BYTES, "meta_block_size": FACE_BYTES, "libver": HDF5_LIBVER}
        try:
            file = h5py.File(scratch.name, "w", locking=False, **options)
        finally:
            os.unlink(scratch.name)  # now, so that a kill leaves nothing behind
        with file:
            create_root_attributes(file, meta)
            stored = _create_batches(file, meta, num_batches, slot_records)
            offset = stored.id.get_offset() if stored.chunks is None else stored.id.get_chunk_info(0).byte_offset
        if offset != HEADER_BYTES or os.fstat(scratch.fileno()).st_size != batch_file_bytes(meta, num_batches):
            raise FormatError(f"{path}: this HDF5 library writes another layout: data at byte {offset}")
        return os.pread(scratch.fileno(), FACE_BYTES, USER_BLOCK_BYTES)


def _create_batches(file: h5py.File, meta: StoreMeta, num_batches: int, slot_records: int) -> h5py.Dataset:
    """Create `batches` over the slots, which HDF5 places at once and does not fill.

    Chunks of fixed number and size that are placed at once need no index: they follow each other, as slots do.
    """
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if slot_records == meta.batch_size:
        layout.set_layout(h5py.h5d.CONTIGUOUS)
    else:
        layout.set_chunk((1, slot_records, meta.seq_len))
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    space = h5py.h5s.create_simple((num_batches, *meta.shape), (num_batches, slot_records, meta.seq_len))
    dtype = h5py.h5t.py_create(meta.dtype)
    stored = h5py.Dataset(h5py.h5d.create(file.id, BATCHES.encode(), dtype, space, layout))
    values = {
        "num_batches": num_batches,
        "token_count": num_batches * meta.batch_tokens,
        "max_token": 0,  # not known: nothing was read
        "sha256": NO_SHA256.encode(),
        "complete": 1,
    }
    for name, kind in BATCHES_ATTRIBUTES.items():
        stored.attrs.create(name, np.array(values[name], dtype=kind), dtype=kind)
    return stored


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    with open(path, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(f"{path}: another process has locked it; wait until it is done") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(f"{path}: this file system has no file locks; going on without them", stacklevel=3)
        yield file.fileno()
