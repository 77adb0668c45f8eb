"""The files of a cache on a local disk: the units of a column that are there, and the room for more.

A store has a folder, and each column of it two files there. The data file is sparse, with unit i at i times the bytes
of a unit. The `.marks` file has 8 bytes for each unit: a mark, and the crc32 of its bytes. The bytes are written first,
and then the mark; bytes that differ from their crc32 count as absent. So processes share the files without a lock, and
a kill at any moment, a full disk, a flipped bit or a file that is cut short costs a read of the store and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import IncompleteError
from zb_hdf5.files.digests import crc32_of
from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.files.file_tokens import FileTokens
from zb_hdf5.files.publishing import write_fully
from zb_hdf5.files.ranges import LocalFile, read_fully
from zb_hdf5.files.sizes import format_bytes
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.spec import U32_MAX, TokenArray

#: The folder of a store; nothing else in a cache folder is ever touched.
STORE_NAME: Final = re.compile(r"zb-cache-[0-9a-f]{64}")
#: The file that has the path or URL of the store.
SOURCE: Final = "source"
#: The upper half of a mark; the lower half is the crc32.
MARK: Final = 0x7A626331
MARK_BYTES: Final = 8
#: Marks that are read together: a block of steps needs many of them.
MARKS_AT_ONCE: Final = 1 << 14
#: Bytes that a process writes before it measures the folder again: a share of what is left, and at most so many.
GRANT_SHARE, GRANT_BYTES = 64, 64 << 20


class CachedColumn:
    """The units of one column in a cache folder, of which any may be absent."""

    # once it is open no error of the disk is raised: units that cannot be read are absent, and those that cannot be
    # written are left out, with one warning; `seen`: the units that this process has compared

    def __init__(self, folder: Path, name: str, tokens: Tokens, max_bytes: int) -> None:
        self._path, self._max_bytes = folder / name, max_bytes
        self._unit, self._dtype, self._num_tokens = tokens.unit, tokens.dtype, tokens.num_tokens
        self._bytes, self._num_units = tokens.unit * tokens.dtype.itemsize, -(-tokens.num_tokens // tokens.unit)
        self._reset()
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / SOURCE, "wb", opener=lambda path, flags: _open_file(Path(path))) as file:
            file.write(os.fsencode(tokens.name))
            file.truncate()
        self._open()

    def _reset(self) -> None:
        self.full = False
        self.seen: npt.NDArray[np.bool_] = np.zeros(self._num_units, bool)
        self._granted = self._written = 0
        self._fd = self._marks_fd = -1

    def _open(self) -> None:
        self._fd = fd = _open_file(self._path)
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._marks_fd = _open_file(self._path.with_name(self._path.name + ".marks"))
        self._close_marks = weakref.finalize(self, os.close, self._marks_fd)
        self._mend_size()
        extents = Extents([Run(0, self._bytes, self._num_units)], self._bytes)
        file = LocalFile(self._path, (os.fstat(fd).st_ino,))
        self.rows = FileTokens(file, extents, self._dtype, self._num_units * self._unit)

    def _mend_size(self) -> None:
        size = self._num_units * self._bytes
        if os.fstat(self._fd).st_size < size:
            os.ftruncate(self._fd, size)

    def mark(self, number: int) -> int:
        """Return the mark of a unit, whose lower half is its crc32; 0 where it is absent."""
        try:
            mark = int.from_bytes(os.pread(self._marks_fd, MARK_BYTES, number * MARK_BYTES), "little")
        except OSError:
            return 0
        return mark if mark >> 32 == MARK else 0

    def crc32s(self) -> npt.NDArray[np.int64] | None:
        """Return the crc32 of each unit, -1 where it is absent; None where so many marks take too long to read."""
        if self._num_units > MARKS_AT_ONCE:
            return None
        size = self._num_units * MARK_BYTES
        try:
            marks = np.frombuffer(os.pread(self._marks_fd, size, 0).ljust(size, b"\0"), "<i8")
        except OSError:
            marks = np.zeros(self._num_units, np.int64)
        return np.where(marks >> 32 == MARK, marks & U32_MAX, -1)

    def has(self, number: int) -> bool:
        """Return whether a unit has a mark."""
        return self.mark(number) != 0

    def read_into(self, number: int, out: TokenArray) -> bool:
        """Fill 1-D `out` with a unit and compare it with its crc32; return False if it is absent or damaged."""
        mark = self.mark(number)
        if not mark:
            return False
        try:
            read_fully(self._fd, out, number * self._bytes)
        except OSError:
            return False
        good = self.seen[number] = crc32_of(out) == mark & U32_MAX
        return good

    def put(self, number: int, tokens: TokenArray) -> None:
        """Keep a unit if there is room."""
        data = tokens.view(np.uint8)  # a structured dtype has no simple buffer
        mark = (MARK << 32 | crc32_of(data)).to_bytes(MARK_BYTES, "little")
        was_full = self.full
        try:
            self.full = was_full or not self._take_room()
            if not self.full:
                write_fully(self._fd, data, number * self._bytes)
                write_fully(self._marks_fd, mark, number * MARK_BYTES)
        except OSError:  # such as a full disk
            self.full = True
        if self.full and not was_full:
            warnings.warn(self._contents(), stacklevel=2)
        self.seen[number] = not self.full

    def _take_room(self) -> bool:
        """Return whether one more unit may be written."""
        if self._granted < self._bytes:
            # the disk counts all processes; where a file system does not tell, our own share does
            left = self._max_bytes - max(occupied_bytes(self._path.parent.parent), self._written)
            if left < self._bytes:
                return False
            self._granted = max(self._bytes, min(left // GRANT_SHARE, GRANT_BYTES))
        self._granted -= self._bytes
        self._written += self._bytes
        return True

    def _contents(self) -> str:
        """Return a message that names the stores in a full cache folder."""
        root = self._path.parent.parent
        held = [f"{format_bytes(size)} of {source}" for _, source, size in stores_in(root)]
        return f"{root}: the cache is full, or its disk, by {', '.join(held)}: further reads keep nothing"

    def mend(self) -> None:
        """Forget the units that were seen: the file was cut short, or cannot be read."""
        self.seen[:] = False
        with contextlib.suppress(OSError):
            self._mend_size()

    def close(self) -> None:
        """Close the files."""
        rows = self.__dict__.pop("rows", None)  # there is none if the files could not be opened
        if rows is not None:
            rows.close()
        for name in ("_close_fd", "_close_marks"):
            self.__dict__.get(name, int)()
        self._reset()
        self.full = True

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_path", "_max_bytes", "_unit", "_dtype", "_num_tokens", "_bytes", "_num_units")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        try:
            self._open()
        except (OSError, IncompleteError):
            self.close()


def _open_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def stores_in(root: Path) -> list[tuple[Path, str, int]]:
    """Return the folder of each store in a cache folder, its path or URL, and the bytes that it occupies."""
    found = []
    with os.scandir(root) as entries:
        folders = sorted(Path(entry.path) for entry in entries if STORE_NAME.fullmatch(entry.name))
    for folder in folders:
        with contextlib.suppress(OSError):  # removed at this moment
            size = sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))
            found.append((folder, (folder / SOURCE).read_text(encoding="utf-8", errors="replace"), size))
    return found


def occupied_bytes(root: Path) -> int:
    """Return the bytes that all stores in a cache folder occupy on the disk."""
    return sum(size for *_, size in stores_in(root))
