"""Parts of files that are mapped for reads in any order, one after the other as one array.

A page that is not in memory is read alone; of other mappings, megabytes around it may be read. These are calls of the C
library that Python lacks, and no mapping keeps a descriptor.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from zb_hdf5.files.ranges import MAP_NORESERVE, libc
from zb_hdf5.spec import TokenArray

MAP_FIXED: Final = 0x10  # Linux on x86 and Arm
PROT_NONE: Final = 0
#: Bytes of a huge page. What begins at the same place of one in a file and in memory is mapped in larger pieces.
HUGE_PAGE: Final = 2 << 20


class FilePart(NamedTuple):
    """A part of an open file."""

    fd: int
    start: int  # its first byte
    stop: int  # the byte after its last one


def map_side_by_side(parts: Sequence[FilePart]) -> TokenArray | None:
    """Return the bytes of parts of files as one read-only array, shape (N,) uint8. It is unmapped with its last view.

    None unless each part but the first begins with a page and each but the last ends with one, or if it is refused.
    """
    before = parts[0].start % mmap.PAGESIZE if parts else 0
    parts = [FilePart(part.fd, part.start - before * (not number), part.stop) for number, part in enumerate(parts)]
    edges = [part.start for part in parts] + [part.stop for part in parts[:-1]]
    if any(edge % mmap.PAGESIZE for edge in edges):
        return None
    map_memory = libc().mmap
    map_memory.restype = ctypes.c_void_p
    map_memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    unmap = libc().munmap
    unmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    failed = ctypes.c_void_p(-1).value
    total = sum(part.stop - part.start for part in parts)
    reserved = total + HUGE_PAGE
    place = map_memory(None, reserved, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if place == failed:
        return None
    address = place + (parts[0].start - place) % HUGE_PAGE  # else the pages of large folios are mapped one by one
    memory = (ctypes.c_ubyte * total).from_address(address)
    owner = weakref.finalize(memory, unmap, place, reserved)
    owner.atexit = False  # a thread may still read when the interpreter goes, and the system unmaps all
    done = 0
    for fd, start, stop in parts:
        shared = mmap.MAP_SHARED | MAP_FIXED
        if map_memory(address + done, stop - start, mmap.PROT_READ, shared, fd, start) == failed:
            return None
        done += stop - start
    libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(total), mmap.MADV_RANDOM)
    tokens = np.frombuffer(memory, np.uint8)[before:]
    tokens.flags.writeable = False
    return tokens
