"""One file that is both: an HDF5 face in the reserved header bytes of a `.batch` file.

The face describes the slots as one contiguous HDF5 dataset, `batches`. No token is moved or read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import h5py

from zb_hdf5.errors import ArgumentError, FormatError, UnavailableError
from zb_hdf5.native import read_header
from zb_hdf5.publish import NO_LOCKS, write_fully
from zb_hdf5.spec import (
    BATCHES,
    HDF5_LIBVER,
    HDF5_MAGIC,
    HEADER_BYTES,
    USER_BLOCK_BYTES,
    StoreMeta,
    batch_file_bytes,
)

FACE_BYTES = HEADER_BYTES - USER_BLOCK_BYTES


def is_stamped(path: Path) -> bool:
    """Return whether the HDF5 signature stands at byte 512."""
    with open(path, "rb") as file:
        return os.pread(file.fileno(), len(HDF5_MAGIC), USER_BLOCK_BYTES) == HDF5_MAGIC


def stamp(path: Path) -> None:
    """Write the HDF5 face; the signature goes last, so that a torn stamp is a `.batch` file and not an HDF5 file.

    Raises
    ------
    ArgumentError
        If it is stamped already, or HDF5 cannot describe its slots (padded or no batches).
    UnavailableError
        If another process holds the file's lock.
    """
    meta, num_batches = read_header(path)
    if is_stamped(path):
        raise ArgumentError(f"{path}: is stamped already")
    face = build_face(meta, num_batches, path)
    with _locked(path) as fd:
        write_fully(fd, face[len(HDF5_MAGIC) :], USER_BLOCK_BYTES + len(HDF5_MAGIC))
        os.fsync(fd)
        write_fully(fd, face[: len(HDF5_MAGIC)], USER_BLOCK_BYTES)
        os.fsync(fd)


def unstamp(path: Path) -> None:
    """Put the zeros back, the signature's first; the file is then what it was before `stamp`.

    Raises
    ------
    ArgumentError
        If it is not stamped.
    """
    read_header(path)
    if not is_stamped(path):
        raise ArgumentError(f"{path}: is not stamped")
    with _locked(path) as fd:
        write_fully(fd, bytes(len(HDF5_MAGIC)), USER_BLOCK_BYTES)
        os.fsync(fd)
        write_fully(fd, bytes(FACE_BYTES), USER_BLOCK_BYTES)
        os.fsync(fd)


def check(path: Path) -> None:
    """Raise `FormatError` unless the face is, byte for byte, the one that the header's batches have."""
    meta, num_batches = read_header(path)
    with open(path, "rb") as file:
        found = os.pread(file.fileno(), FACE_BYTES, USER_BLOCK_BYTES)
    if found != build_face(meta, num_batches, path):
        raise FormatError(f"{path}: its HDF5 face does not describe the batches of its header")


def build_face(meta: StoreMeta, num_batches: int, path: Path) -> bytes:
    """Return bytes 512..4095: what HDF5 writes before the data of a sparse scratch file of the same shape."""
    if num_batches == 0 or meta.batch_bytes != meta.padded_batch_bytes:
        raise ArgumentError(
            f"{path}: only batches of whole pages can be stamped: expected a multiple of {HEADER_BYTES} bytes and at "
            f"least one batch, found {num_batches:,} batches of {meta.batch_bytes:,} bytes; convert it to hdf5 instead"
        )
    # A named file: HDF5 wants a real path, and its drivers for memory either allocate it all or align otherwise.
    with tempfile.NamedTemporaryFile(prefix="zb-face-") as scratch:
        options = {"userblock_size": USER_BLOCK_BYTES, "meta_block_size": FACE_BYTES, "libver": HDF5_LIBVER}
        with h5py.File(scratch.name, "w", locking=False, **options) as file:
            layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            layout.set_layout(h5py.h5d.CONTIGUOUS)
            layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            layout.set_obj_track_times(False)
            space = h5py.h5s.create_simple((num_batches, *meta.shape))
            dtype = h5py.h5t.py_create(meta.dtype)
            offset = h5py.h5d.create(file.id, BATCHES.encode(), dtype, space, layout).get_offset()
        if offset != HEADER_BYTES or os.fstat(scratch.fileno()).st_size != batch_file_bytes(meta, num_batches):
            raise FormatError(f"{path}: this HDF5 library lays the face out otherwise: data at byte {offset}")
        return os.pread(scratch.fileno(), FACE_BYTES, USER_BLOCK_BYTES)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    with open(path, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(f"{path}: another process holds its lock") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield file.fileno()
