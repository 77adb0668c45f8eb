"""The superblock of an HDF5 file, version 3: its end of file, which HDF5 cannot move back in SWMR mode."""

from __future__ import annotations

import os

import numpy as np

from zb_hdf5.files.publishing import write_fully

#: Ranges of the superblock at byte 0: the end of file, the bytes that the checksum covers, and their total.
_END_OF_FILE, _CHECKED, _SUPERBLOCK_BYTES = slice(28, 36), slice(0, 44), 48


def end_of_file(fd: int) -> int:
    """Return the end of the file as the superblock has it."""
    return int.from_bytes(os.pread(fd, _SUPERBLOCK_BYTES, 0)[_END_OF_FILE], "little")


def set_end_of_file(fd: int, end: int) -> None:
    """Change the end of a closed file in its superblock: one write, checksum included."""
    superblock = bytearray(os.pread(fd, _SUPERBLOCK_BYTES, 0))
    superblock[_END_OF_FILE] = end.to_bytes(8, "little")
    superblock[_CHECKED.stop :] = lookup3(superblock[_CHECKED]).to_bytes(4, "little")
    write_fully(fd, bytes(superblock), 0)


def lookup3(data: bytes | bytearray) -> int:
    """Return HDF5's checksum of metadata: Bob Jenkins' lookup3, `hashlittle` with the initial value 0."""
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    words = np.frombuffer(bytes(data).ljust(-(-len(data) // 12) * 12, b"\0"), "<u4").tolist()
    for start in range(0, len(words), 3):
        x, y, z = words[start : start + 3]
        a, b, c = (a + x) & 0xFFFFFFFF, (b + y) & 0xFFFFFFFF, (c + z) & 0xFFFFFFFF
        a, b, c = _final(a, b, c) if start + 3 == len(words) else _mix(a, b, c)
    return c


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    for turn in (4, 6, 8, 16, 19, 4):
        a = ((a - c) & 0xFFFFFFFF) ^ _rotated(c, turn)
        c = (c + b) & 0xFFFFFFFF
        a, b, c = b, c, a
    return a, b, c


def _final(a: int, b: int, c: int) -> tuple[int, int, int]:
    for turn in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotated(b, turn)) & 0xFFFFFFFF
        a, b, c = b, c, a
    return c, a, b


def _rotated(x: int, turn: int) -> int:
    return (x << turn | x >> (32 - turn)) & 0xFFFFFFFF
