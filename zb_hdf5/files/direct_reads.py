"""Reads past the page cache: the kernel makes many of them at the same time for one thread, and copies nothing.

Python has no calls for them. In 16 threads such reads took three times the processor time, most of it for the
interpreter lock.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.c_library import libc
from zb_hdf5.files.file_systems import file_system
from zb_hdf5.files.forks import generation
from zb_hdf5.files.paths import files_at_hand, open_with_room
from zb_hdf5.files.ranges import LocalFile

#: Offset, length and memory of a direct read are multiples of this: the largest block of any disk.
ALIGNED: Final = 4096
#: Files that are open for the direct reads of one iteration, at most.
MAX_DIRECT_FILES: Final = 128
#: statfs(2) types of ext4, XFS and overlayfs: others may accept such reads, and make one after the other.
FILE_SYSTEMS: Final = frozenset({0xEF53, 0x58465342, 0x794C7630})
#: struct iocb of linux/aio_abi.h, where the low byte comes first. An operation of 0 is a read.
_READ: Final = np.dtype(
    {
        "names": ["slot", "fd", "address", "num_bytes", "offset"],
        "formats": ["u8", "u4", "u8", "u8", "i8"],
        "offsets": [0, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
#: struct io_event.
_EVENT: Final = np.dtype([("slot", "u8"), ("read", "u8"), ("result", "i8"), ("more", "i8")])
#: The result of a read that the kernel has not taken.
_REFUSED: Final = -1
#: The place of a read: the number of a file, its open file, and the offset of the first byte.
DirectRead: TypeAlias = tuple[int, LocalFile, int]


class _Calls(NamedTuple):
    """The numbers of the system calls."""

    setup: int
    destroy: int
    get_events: int
    submit: int


_CALLS: Final = {"x86_64": _Calls(206, 207, 208, 209), "aarch64": _Calls(0, 1, 4, 2)}


@cache
def _calls() -> _Calls:
    """Return the calls of this system; `OSError` if it has none that are known."""
    found = _CALLS.get(platform.machine())
    if found is None or sys.platform != "linux" or sys.maxsize < 2**32:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return found


def _call(number: int, *arguments: Any) -> int:
    return int(libc().syscall(ctypes.c_long(number), *arguments))


class DirectReads:
    """Reads of arrays of one shape, in the order in which they were begun. To be used by one thread.

    The child of a fork has no part in them: there each is refused. Everything else is read in the usual way, too: a
    read that is refused, fails or is short has no bytes, and from then on `is_usable` is False.

    Parameters
    ----------
    shape, dtype
        The bytes of each array.
    most
        Reads that are under way at the same time, at most.

    Raises
    ------
    OSError
        If this system has no such reads, or does not allow them.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], most: int) -> None:
        context = ctypes.c_ulong(0)
        if _call(_calls().setup, ctypes.c_long(most), ctypes.byref(context)) < 0:
            found = ctypes.get_errno()
            raise OSError(found, os.strerror(found))
        self.is_usable = True
        num_bytes = math.prod(shape) * dtype.itemsize
        self._num_bytes = num_bytes
        self._most = most
        self._process = generation()
        self._context = context
        self._begun = 0
        self._taken = 0
        self._files: dict[int, int] = {}
        self._most_files = files_at_hand(MAX_DIRECT_FILES)
        slot_bytes = -(-num_bytes // ALIGNED) * ALIGNED + ALIGNED  # the bytes may begin inside a block
        memory = mmap.mmap(-1, most * slot_bytes)  # shared: a fork would copy the pages of a private one under way
        #: Begins no read any more, waits for those under way, and closes the files.
        self.close = weakref.finalize(self, _end, self._process, context, memory, self._files)
        self._array: Callable[[int], npt.NDArray[Any]] = lambda offset: np.ndarray(shape, dtype, memory, offset)
        self._slot_bytes = slot_bytes
        self._arrays = [self._array(slot * slot_bytes) for slot in range(most)]
        self._reads = np.zeros(most, _READ)
        self._reads["slot"] = np.arange(most)
        self._reads["address"] = np.frombuffer(memory, np.uint8).ctypes.data + np.arange(most) * slot_bytes
        self._addresses = self._reads.ctypes.data + np.arange(most) * _READ.itemsize
        self._events = np.zeros(most, _EVENT)
        self._within = [0] * most
        self._results: list[int | None] = [None] * most  # None: not there yet

    def begin(self, reads: Sequence[DirectRead]) -> None:
        """Begin some reads. The bytes of the last one that was taken are lost."""
        if generation() != self._process:
            self.is_usable = False
        slots, fds, offsets = [], [], []
        for number, file, offset in reads:
            slot = self._begun % self._most
            self._begun += 1
            self._results[slot] = _REFUSED
            fd = self._descriptor(number, file) if self.is_usable else None
            if fd is not None:
                slots.append(slot)
                fds.append(fd)
                offsets.append(offset)
        for slot in slots[: self._submit(slots, fds, np.array(offsets, np.int64)) if slots else 0]:
            self._results[slot] = None

    def _submit(self, slots: list[int], fds: list[int], offsets: npt.NDArray[np.int64]) -> int:
        """Hand reads to the kernel; return how many it takes, from the first one on."""
        within = offsets % ALIGNED
        reads = self._reads
        reads["fd"][slots] = fds
        reads["offset"][slots] = offsets - within
        reads["num_bytes"][slots] = -(-(within + self._num_bytes) // ALIGNED) * ALIGNED
        for slot, skipped in zip(slots, within.tolist(), strict=True):
            self._within[slot] = skipped
        addresses = self._addresses[slots]
        count, place = ctypes.c_long(len(slots)), ctypes.c_void_p(addresses.ctypes.data)
        return max(0, _call(_calls().submit, self._context, count, place))

    def _descriptor(self, number: int, file: LocalFile) -> int | None:
        """Return a descriptor for the direct reads of a file; None if it has none."""
        try:
            return self._files.get(number) or self._open(number, file)
        except OSError:
            return None

    def _open(self, number: int, file: LocalFile) -> int:
        """Open the file of a descriptor again, whatever its name is now."""
        if file_system(file.fd) not in FILE_SYSTEMS:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        while len(self._files) >= self._most_files:  # reads under way keep theirs
            os.close(self._files.pop(next(iter(self._files))))
        name = f"/proc/self/fd/{file.fd}"
        found = self._files[number] = open_with_room(partial(os.open, name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
        return found

    def take(self) -> npt.NDArray[Any] | None:
        """Wait for the earliest read that was not taken; return its array, valid until others are begun, or None."""
        slot = self._taken % self._most
        self._taken += 1
        if generation() != self._process:  # the parent goes on to fill the memory
            self.is_usable = False
            return None
        while (result := self._results[slot]) is None:
            self._wait()
        within = self._within[slot]
        if result < within + self._num_bytes:  # the block at the end of a file is shorter
            self.is_usable = False
            return None
        return self._array(slot * self._slot_bytes + within) if within else self._arrays[slot]

    def _wait(self) -> None:
        """Wait for the end of a read, or a signal."""
        most = ctypes.c_long(self._most)
        events = ctypes.c_void_p(self._events.ctypes.data)
        count = _call(_calls().get_events, self._context, ctypes.c_long(1), most, events, None)
        if count < 0 and ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        ended = self._events[: max(0, count)]
        for slot, result in zip(ended["slot"].tolist(), ended["result"].tolist(), strict=True):
            self._results[slot] = result


def _end(process: int, context: ctypes.c_ulong, memory: mmap.mmap, files: dict[int, int]) -> None:
    """Wait for the reads under way, which fill the memory."""
    if process == generation():  # else the child of a fork, which may have such reads of its own
        _call(_calls().destroy, context)
    for fd in files.values():
        os.close(fd)
    files.clear()
