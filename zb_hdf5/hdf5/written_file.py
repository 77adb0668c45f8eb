"""A file that HDF5 writes, and its end when the disk fails."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import weakref
from collections.abc import Iterator
from errno import EIO
from pathlib import Path
from typing import Final

from zb_hdf5.packages import h5py

_ERRNO: Final = re.compile(r"errno = (\d+)")


class WriteFailure(OSError):
    """HDF5 failed to write a file: it can neither go on with it nor close it. See `WrittenFile`."""


@contextlib.contextmanager
def hdf5_writes(path: Path) -> Iterator[None]:
    """Turn the errors that h5py raises when the disk fails under HDF5 into one OSError with path and cause."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if getattr(error, "filename", None) is not None:
            raise
        found = _ERRNO.search(str(error))
        code = int(found[1]) if found else getattr(error, "errno", None) or EIO
        raise WriteFailure(code, f"{os.strerror(code)}, while HDF5 was writing", str(path)) from error


class WrittenFile:
    """A file that HDF5 writes: closed once at most, and never after HDF5 has failed to write it.

    HDF5 ends in a segmentation fault when a file whose close has failed is closed again, or its objects are. Python
    closes each object that it frees, so they are kept to the end of the process.
    """

    def __init__(self, h5: h5py.File) -> None:
        self.h5 = h5
        self.objects = list[object]()  # that stay open
        self._fd: int = h5.id.get_vfd_handle()  # to ask later may be a segmentation fault
        self._file = os.fstat(self._fd)
        _written.add(self)

    def close(self, *, has_failed: bool = False) -> None:
        """Close the file, unless HDF5 has failed to write it, or fails now."""
        if not self.h5.id.valid:
            return
        if not has_failed:
            with contextlib.suppress(OSError, RuntimeError):
                self.h5.close()
                return
        self._keep_open()
        self._let_go()

    def leave_to_parent(self) -> None:
        """In the child of a fork, have HDF5 read the file only; it closes it when the child ends, and would write."""
        if self.h5.id.valid:
            self._keep_open()
            with contextlib.suppress(OSError):
                reading = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
                os.dup2(reading, self._fd, inheritable=False)
                os.close(reading)
            atexit.register(self._let_go)  # a write that fails would be noise

    def _keep_open(self) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object([self.h5, self.objects]))

    def _let_go(self) -> None:
        """Make the descriptor of HDF5 one of memory: its later writes do not reach the committed data."""
        with contextlib.suppress(OSError):
            if not os.path.samestat(os.fstat(self._fd), self._file):
                return  # HDF5 has closed it
            # HDF5 takes a later file with the same inode for this one: the inode is kept, and with it the disk space
            os.open(f"/proc/self/fd/{self._fd}", os.O_PATH | os.O_CLOEXEC)
            memory = os.memfd_create("zb-failed-file", os.MFD_CLOEXEC)
            try:
                os.dup2(memory, self._fd, inheritable=False)
            finally:
                os.close(memory)


_written: Final = weakref.WeakSet[WrittenFile]()


def _leave_all_to_parent() -> None:
    for file in list(_written):
        file.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
