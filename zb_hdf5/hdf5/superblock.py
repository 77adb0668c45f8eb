"""The superblock of an HDF5 file: the end of the file, which HDF5 cannot move back in SWMR mode."""

from __future__ import annotations

import os
import shlex
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5.errors import FormatError
from zb_hdf5.files.publishing import PARTIAL_SUFFIX, write_fully
from zb_hdf5.hdf5.h5_file import handle_of_h5
from zb_hdf5.notes import note
from zb_hdf5.packages import h5py

#: The first bytes of a superblock, which lies at byte 0, or behind a user block of 512 bytes times a power of 2.
_SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"
_LEAST_USER_BLOCK: Final = 512
#: Bytes of the longest superblock.
_MOST_BYTES: Final = 100
#: An address that leads nowhere.
_UNDEFINED: Final = 2**64 - 1

#: Bytes of the superblock, version 3.
_SUPERBLOCK_BYTES: Final = 48
#: The range that has the end of the file.
_END_OF_FILE: Final = slice(28, 36)
#: The range that the checksum covers, which follows it.
_CHECKED: Final = slice(0, 44)


def end_of_file(fd: int) -> int:
    """Return the end of the file as the superblock has it."""
    return int.from_bytes(os.pread(fd, _SUPERBLOCK_BYTES, 0)[_END_OF_FILE], "little")


def set_end_of_file(fd: int, end: int) -> None:
    """Change the end of a closed file in its superblock, in one write: HDF5 cannot move it back in SWMR mode."""
    superblock = bytearray(os.pread(fd, _SUPERBLOCK_BYTES, 0))
    superblock[_END_OF_FILE] = end.to_bytes(8, "little")
    superblock[_CHECKED.stop :] = _lookup3(superblock[_CHECKED]).to_bytes(4, "little")
    write_fully(fd, bytes(superblock), 0)


class _Superblock(NamedTuple):
    """The facts of a superblock of any version whose addresses have 8 bytes."""

    end: int
    #: The address that counts as 0, and the place of the superblock, which differ once a user block was put before it.
    base: int
    place: int
    #: A writer has the file open, or was killed, or the file is a part of one that several files make up.
    is_open_or_part: bool


def _superblock_of(fd: int) -> _Superblock | None:
    """Return the superblock of an open file; None: it has none with addresses of 8 bytes."""
    place = 0
    while (head := os.pread(fd, _MOST_BYTES, place))[:8] != _SIGNATURE:
        if not head:
            return None
        place = 2 * place or _LEAST_USER_BLOCK
    version = head[8]
    if head[9 if version >= 2 else 13] != 8:
        return None
    if version >= 2:
        base, _, end = struct.unpack_from("<3Q", head, 12)
        return _Superblock(end, base, place, head[11] != 0)
    base, _, end, driver = struct.unpack_from("<4Q", head, 28 if version else 24)
    return _Superblock(end, base, place, driver != _UNDEFINED)


def _surplus(h5: h5py.File) -> tuple[int, int] | None:
    """Return the end of a closed file of this machine and the bytes behind it; None: there are none."""
    fd: Any = handle_of_h5(h5)
    found = _superblock_of(fd) if isinstance(fd, int) else None
    if found is None or found.is_open_or_part:
        return None
    end = found.end - found.base + found.place
    size = os.fstat(fd).st_size
    return (end, size - end) if size > end else None


def require_no_surplus(h5: h5py.File, path: Path) -> None:
    """Raise `FormatError` if a finished file of ours has bytes behind the end that its superblock has.

    One that is still to get its final name may have room behind it.
    """
    surplus = None if path.name.endswith(PARTIAL_SUFFIX) else _surplus(h5)
    if surplus is not None:
        end, count = surplus
        raise FormatError(
            f"{path}: expected {end:,} bytes, the end that its superblock has, found {count:,} more: something was "
            f"appended to it; restore it, or type: truncate -s {end} {shlex.quote(str(path))}"
        )


def note_surplus(h5: h5py.File, path: Path) -> None:
    """Print a note if a file of another program has bytes behind the end that its superblock has.

    HDF5 reads such files: a program may have been killed, and may go on. From two files in one it reads the first.
    """
    surplus = _surplus(h5)
    if surplus is not None:
        end, count = surplus
        note(f"{path}: left out: {count:,} bytes behind its end, which is {end:,} as its superblock has it")


def _lookup3(data: bytes | bytearray) -> int:
    """Return HDF5's checksum of metadata: Bob Jenkins' lookup3, `hashlittle` with the initial value 0."""
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    words = np.frombuffer(bytes(data).ljust(-(-len(data) // 12) * 12, b"\0"), "<u4").tolist()
    for start in range(0, len(words), 3):
        a, b, c = ((x + word) & 0xFFFFFFFF for x, word in zip((a, b, c), words[start : start + 3], strict=True))
        if start + 3 < len(words):
            for turn in (4, 6, 8, 16, 19, 4):
                a = ((a - c) & 0xFFFFFFFF) ^ _rotated(c, turn)
                c = (c + b) & 0xFFFFFFFF
                a, b, c = b, c, a
    for turn in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotated(b, turn)) & 0xFFFFFFFF
        a, b, c = b, c, a
    return b  # the last one that was mixed


def _rotated(x: int, turn: int) -> int:
    return (x << turn | x >> (32 - turn)) & 0xFFFFFFFF
