"""Parts of files that are mapped for reads in any order, one after the other as one array.

A page that is not in memory is read alone; of other mappings, megabytes around it may be read. These are calls of the C
library that Python lacks, and no mapping keeps a descriptor.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5.files.c_library import libc
from zb_hdf5.files.ranges import MAP_NORESERVE
from zb_hdf5.spec import TokenArray

MAP_FIXED: Final = 0x10  # Linux on x86 and Arm
PROT_NONE: Final = 0
#: The address of a mapping that was refused.
FAILED: Final = ctypes.c_void_p(-1).value
#: Bytes of a huge page. Data at the same place of one in a file and in memory are mapped in larger pieces.
HUGE_PAGE: Final = 2 << 20


class FilePart(NamedTuple):
    """A part of an open file."""

    fd: int
    start: int  # its first byte
    stop: int  # the byte after its last one


class _Memory:
    """Bytes at an address, for numpy: an array of them keeps it.

    Parameters
    ----------
    address, num_bytes
        The bytes, which are not written.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (num_bytes,), "data": (address, True)}


@cache
def _calls() -> tuple[Any, Any, Any]:
    """Return mmap, munmap and madvise of the C library."""
    calls = libc()
    calls.mmap.restype = ctypes.c_void_p
    calls.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    calls.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    calls.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return calls.mmap, calls.munmap, calls.madvise


def map_side_by_side(parts: Sequence[FilePart]) -> TokenArray | None:
    """Return the bytes of parts of files as one read-only array, shape (N,) uint8. It is unmapped with its last view.

    None unless each part but the first begins with a page and each but the last ends with one, or if it is refused.
    """
    if not parts:
        return None
    first, *others = parts
    before = first.start % mmap.PAGESIZE
    parts = [FilePart(first.fd, first.start - before, first.stop), *others]
    if any(part.start % mmap.PAGESIZE for part in parts) or any(part.stop % mmap.PAGESIZE for part in parts[:-1]):
        return None
    map_memory, unmap, advise = _calls()
    total = sum(part.stop - part.start for part in parts)
    reserved = total + HUGE_PAGE
    place = map_memory(None, reserved, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if place == FAILED:
        return None
    address = place + (parts[0].start - place) % HUGE_PAGE  # else the pages of large folios are mapped one by one
    memory = _Memory(address, total)
    owner = weakref.finalize(memory, unmap, place, reserved)
    owner.atexit = False  # a thread may still read when the interpreter goes, and the system unmaps all
    done = 0
    for fd, start, stop in parts:
        shared = mmap.MAP_SHARED | MAP_FIXED
        if map_memory(address + done, stop - start, mmap.PROT_READ, shared, fd, start) == FAILED:
            return None
        done += stop - start
    advise(address, total, mmap.MADV_RANDOM)
    return np.asarray(memory)[before:]
