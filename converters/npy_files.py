"""Reads at any place of many files, with a bounded number of them open."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from zb_hdf5 import IncompleteError
from zb_hdf5.files.identity import regular
from zb_hdf5.files.ranges import read_fully

#: A process may have 1,024 by default.
MAX_OPEN_FILES: Final = 256


class OpenFiles:
    """Files that are read at any place. Picklable; not thread-safe.

    Reads, no mappings: where the page cache has large pages, one record that is touched counts 2 MiB as this process's
    memory.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._fds: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._fds)

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[list[Path]]]:
        return OpenFiles, (self._paths,)

    def read_into(self, number: int, byte_offset: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` with the bytes of one file.

        Raises
        ------
        IncompleteError
            If the file has become shorter.
        """
        if read_fully(self.fd(number), out, byte_offset) != out.nbytes:
            raise IncompleteError(f"{self._paths[number]}: became shorter while it was read; convert again")

    def gather_into(self, number: int, byte_offsets: list[int], rows: npt.NDArray[Any]) -> None:
        """Fill each row of a C-contiguous array with the bytes at one place of a file. Raises as `read_into`."""
        fd = self.fd(number)
        for row, byte_offset in zip(rows, byte_offsets, strict=True):
            if os.preadv(fd, (row,), byte_offset) != row.nbytes:
                self.read_into(number, byte_offset, row)

    def fd(self, number: int) -> int:
        """Return the descriptor of one file, good until the next call."""
        fd = self._fds.get(number)
        if fd is None:
            if len(self._fds) == MAX_OPEN_FILES:
                os.close(self._fds.pop(next(iter(self._fds))))
            fd = self._fds[number] = regular(self._paths[number])
        return fd


def _close_all(fds: dict[int, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])
