"""Several files as one array: their mappings lie side by side in one range of addresses.

A gather of records that lie in many files is then one call of numpy, as if they lay in one file.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Sequence
from os import SEEK_END, lseek
from typing import Any, Final, TypeAlias

import numpy as np

from zb_hdf5.core.extents import MAP_NORESERVE, ExtentFile, libc
from zb_hdf5.spec import TokenArray

MAP_FIXED: Final = 0x10  # Linux on x86 and Arm
PROT_NONE: Final = 0

#: A descriptor, the first byte, and the one behind the last.
Place: TypeAlias = tuple[int, int, int]


class JoinedFiles:
    """The tokens of several files, in the order of the files. Thread-safe; usable after fork; not to be pickled.

    The files stay open for as long as this lives, the mapping for as long as an array of it does.
    """

    def __init__(self, files: Sequence[ExtentFile], places: Sequence[Place], tokens: TokenArray) -> None:
        self._rows = tokens.reshape(1, -1)
        self._ends = [(file, fd, stop) for file, (fd, _, stop) in zip(files, places, strict=True)]

    def rows(self, length: int) -> TokenArray:
        """Return all tokens as rows of `length`, read-only.

        Raises
        ------
        IncompleteError
            If a file was cut short since: to touch its mapping would be a bus error.
        """
        for file, fd, end in self._ends:
            if lseek(fd, 0, SEEK_END) < end:
                file.flat()  # says so
        rows = self._rows
        if rows.shape[1] != length:
            rows = self._rows = rows.reshape(-1, length)
        return rows


def join(files: Sequence[ExtentFile], dtype: np.dtype[Any]) -> JoinedFiles | None:
    """Map files side by side; None where one may not be mapped, has gaps, or does not lie in whole pages."""
    places = [place for file in files if (place := file.flat_place) is not None]
    if len(places) < len(files) or not sys.platform.startswith("linux"):
        return None
    inner = [start for _, start, _ in places] + [stop for *_, stop in places[:-1]]  # the last file may end anywhere
    if any(offset % mmap.PAGESIZE for offset in inner):
        return None
    tokens = _map_side_by_side(places)
    return None if tokens is None else JoinedFiles(files, places, tokens.view(dtype))


def _map_side_by_side(places: Sequence[Place]) -> TokenArray | None:
    """Return the bytes of all places as one read-only array; None if the system will not."""
    map_memory, unmap = libc().mmap, libc().munmap
    map_memory.restype, unmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t)
    map_memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    failed = ctypes.c_void_p(-1).value
    total = sum(stop - start for _, start, stop in places)
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    address = map_memory(None, total, PROT_NONE, anonymous, -1, 0)
    if address == failed:
        return None
    memory = (ctypes.c_ubyte * total).from_address(address)
    owner = weakref.finalize(memory, unmap, address, total)
    owner.atexit = False  # a thread may still read when the interpreter goes, and the system unmaps all
    done = 0
    for fd, start, stop in places:
        shared = mmap.MAP_SHARED | MAP_FIXED
        if map_memory(address + done, stop - start, mmap.PROT_READ, shared, fd, start) == failed:
            return None
        done += stop - start
    tokens = np.frombuffer(memory, np.uint8)
    tokens.flags.writeable = False
    return tokens
