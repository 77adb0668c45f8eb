"""Opening HDF5 files: file locking as clusters have it, and HDF5's messages turned into ours."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError, IncompleteError, UnavailableError, ZbError
from zb_hdf5.publish import NO_LOCKS
from zb_hdf5.spec import HDF5_ALIGNMENT, HDF5_LIBVER

CREATOR: Final = f"zb_hdf5 (h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version})"


def open_h5(path: Path | str, mode: str = "r", **options: Any) -> h5py.File:
    """Open an HDF5 file; where the file system has no locks, warn once and open without them.

    HDF5 tolerates only ENOSYS from flock(2) by itself; clusters answer ENOLCK, EOPNOTSUPP, 524 or EIO.

    Raises
    ------
    UnavailableError
        If another process holds the file's lock.
    IncompleteError, FormatError
        If HDF5 finds the file truncated, or cannot read it at all.
    """
    try:
        return h5py.File(path, mode, **options)
    except OSError as error:
        if error.errno in NO_LOCKS and "lock file" in str(error):
            warnings.warn(f"{path}: this file system has no file locks; opening without them", stacklevel=2)
            return h5py.File(path, mode, locking=False, **options)
        raise _translate(error, path) from error


def open_h5_for_reading(path: Path) -> h5py.File:
    """Open for reading; a file whose writer is alive or was killed is opened in SWMR mode."""
    try:
        return open_h5(path)
    except UnavailableError:
        if not is_marked_open(path):
            raise
        return open_h5(path, swmr=True)


@contextlib.contextmanager
def h5_damage(path: Path) -> Iterator[None]:
    """Turn what h5py raises on damaged metadata into `FormatError`; our own errors pass.

    HDF5 checks the checksums of its metadata and reports a mismatch as a KeyError, RuntimeError, OSError or ValueError,
    depending on what it was asked for.
    """
    try:
        yield
    except (ZbError, FileNotFoundError, PermissionError):
        raise
    except (KeyError, RuntimeError, ValueError, OverflowError, TypeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's trouble, not the file's
        text = error.args[0] if error.args else error
        raise FormatError(f"{path}: HDF5 finds it damaged: {text}; restore it, or convert again") from error


def chunk_offsets(stored: h5py.Dataset) -> npt.NDArray[np.int64]:
    """Return the byte offset of each chunk along the first axis, -1 where there is none.

    One `chunk_iter`: asking for the chunks one by one takes a time that grows with their square.
    """
    rows = stored.chunks[0]
    offsets = np.full(-(-len(stored) // rows), -1, dtype=np.int64)

    def record(chunk: Any) -> None:
        offsets[chunk.chunk_offset[0] // rows] = chunk.byte_offset

    stored.id.chunk_iter(record)
    return offsets


def is_marked_open(path: Path) -> bool:
    """Return whether the superblock says that a writer has the file open (or was killed). Byte 11 of version 3."""
    with open(path, "rb") as file:
        superblock = file.read(12)
    return len(superblock) == 12 and superblock[8] == 3 and superblock[11] != 0


def create_for_swmr(own_path: str, meta_bytes: int) -> h5py.File:
    """Create a file whose chunks will lie in one run of constant stride, and which can enter SWMR mode."""
    return open_h5(
        own_path,
        "w",
        libver=HDF5_LIBVER,
        alignment_threshold=HDF5_ALIGNMENT,
        alignment_interval=HDF5_ALIGNMENT,
        meta_block_size=meta_bytes,
    )


def create_texts(h5: h5py.File, **texts: str) -> None:
    """Create root attributes of fixed length.

    The heap of variable-length texts has no checksum, and one flipped bit there can send HDF5 2.0 into an endless loop.
    """
    for name, text in texts.items():
        data = text.encode("utf-8")
        h5.attrs.create(name, data, dtype=h5py.string_dtype("utf-8", max(1, len(data))))


def _translate(error: OSError, path: Path | str) -> Exception:
    text = str(error)
    if "already open for" in text or isinstance(error, BlockingIOError):
        return UnavailableError(f"{path}: a writer has it open, or was killed: {text}")
    if "truncated file" in text or "eof" in text.lower():
        return IncompleteError(f"{path}: truncated: {text}; restore it, or convert again")
    if error.errno is not None:
        return error
    return FormatError(f"{path}: HDF5 cannot read it: {text}")
