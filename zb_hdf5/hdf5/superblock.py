"""The superblock of an HDF5 file: the end of the file, which HDF5 cannot move back in SWMR mode."""

from __future__ import annotations

import os
from typing import Final

import numpy as np

from zb_hdf5.files.publishing import write_fully

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
