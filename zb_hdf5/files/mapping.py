"""Parts of files side by side in one range of addresses, so that they are one array."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Final, TypeAlias

import numpy as np

from zb_hdf5.spec import TokenArray

MAP_NORESERVE: Final = 0x4000  # Linux on x86 and Arm; the mmap module has it from Python 3.13 on
MAP_FIXED: Final = 0x10  # Linux on x86 and Arm
PROT_NONE: Final = 0

#: A descriptor, the first byte, and the one behind the last.
Place: TypeAlias = tuple[int, int, int]


@cache
def libc() -> ctypes.CDLL:
    """Return the C library of this process, for what Python has no name for."""
    return ctypes.CDLL(None, use_errno=True)


def map_side_by_side(places: Sequence[Place]) -> TokenArray | None:
    """Return the bytes of all places as one read-only array, shape (N,) uint8. It is unmapped with its last view."""
    # None elsewhere than on Linux, and where a place does not begin, or one but the last end, with a page
    # None elsewhere than on Linux, and where a place does not begin, or one but the last end, with a page
    edges = [start for _, start, _ in places] + [stop for *_, stop in places[:-1]]
    if not sys.platform.startswith("linux") or any(edge % mmap.PAGESIZE for edge in edges):
        return None
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
