"""The files of a cache on a local disk: which chunks of a column are there, and how many more there may be.

A column has a folder of its own, with two files. `data` is sparse, and has chunk i at i times the bytes of a chunk.
`marks` has 8 bytes for each chunk: a mark, and the crc32 of the bytes. The bytes are written first, and then the mark;
bytes that are not what the mark says count as absent. So processes share the files without a word to each other, and a
kill at any moment, a full disk, a bit that flips or a file that is cut short costs nothing but a read of the source.

Nobody waits for a lock. A process that uses a column has a shared lock of its `data`, which the system takes back
whatever ends the process: a column whose exclusive lock is free for the taking is used by nobody, and may be removed.
(A file that each process touches now and then would need a thread, and a stopped process would seem dead.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import IncompleteError, UnavailableError
from zb_hdf5.files.digests import crc32_of
from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.files.file_tokens import FileTokens
from zb_hdf5.files.locks import is_at, keep_locked
from zb_hdf5.files.publishing import write_fully
from zb_hdf5.files.ranges import LocalFile, read_fully
from zb_hdf5.spec import U32_MAX, StoreMeta, TokenArray

#: The folder of a column; nothing else in a cache folder is ever touched.
COLUMN_NAME: Final = re.compile(r"zb-cache-[0-9a-f]{64}")
DATA, MARKS = "data", "marks"
#: The upper half of a mark; the lower half is the crc32.
MARK: Final = 0x7A626331
MARK_BYTES: Final = 8
#: Marks that are read at once: a page of memory.
BLOCK_MARKS: Final = 512
#: Blocks of marks that a process keeps: 64 MiB.
KEPT_BLOCKS: Final = 1 << 14
#: What a process may write before it looks again how much is left: a share of that, and at most so many bytes.
GRANT_SHARE, GRANT_BYTES = 64, 64 << 20
#: Another process that removes a column is done within this time.
REMOVAL_S: Final = 2.0


class CachedColumn:
    """The chunks of one column in a cache folder, of which any may be absent.

    Thread-safe; usable after fork; picklable (a copy opens the files anew, or does without). Once it is open nothing
    here raises for what the disk does: what cannot be read is absent, and what cannot be written is left out.

    Parameters
    ----------
    root
        The cache folder.
    name
        Of the column's folder: whatever has another content has another name.
    meta, num_batches
        Shape and number of its chunks.
    max_bytes
        What all columns in `root` may occupy.

    Attributes
    ----------
    full
        Whether nothing more is written.
    seen
        For each chunk, whether this process has compared it with its crc32 and found it good, shape (N,).
    rows
        Reads what was seen, from a mapping where the disk is local.

    Raises
    ------
    OSError
        If the files cannot be made.
    """

    def __init__(self, root: Path, name: str, meta: StoreMeta, num_batches: int, max_bytes: int) -> None:
        self._root, self._folder, self._meta, self._max_bytes = root, root / name, meta, max_bytes
        self._num_batches, self._bytes = num_batches, meta.batch_bytes
        self._reset()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _reset(self) -> None:
        self.full = False
        self.seen: npt.NDArray[np.bool_] = np.zeros(self._num_batches, bool)
        self._blocks: dict[int, memoryview] = {}
        self._granted = self._written = 0
        self._fd = self._marks_fd = -1

    def _open(self) -> None:
        self._fd = _open_in_use(self._folder)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        marks_fd = _open_file(self._folder / MARKS)
        self._close_marks = weakref.finalize(self, os.close, marks_fd)
        os.utime(self._fd)  # from now on it is the youngest
        self._mend_size()
        extents, identity = Extents([Run(0, self._bytes, self._num_batches)], self._bytes), (os.fstat(self._fd).st_ino,)
        file = LocalFile(self._folder / DATA, identity)
        self.rows = FileTokens(file, extents, self._meta.dtype, self._num_batches * self._meta.batch_tokens)
        self._marks_fd = marks_fd

    def _mend_size(self) -> None:
        size = self._num_batches * self._bytes
        if os.fstat(self._fd).st_size < size:
            os.ftruncate(self._fd, size)

    @property
    def occupied_bytes(self) -> int:
        """What its chunks occupy on the disk."""
        return os.fstat(self._fd).st_blocks * 512

    def has(self, index: int) -> bool:
        """Return whether a chunk has a mark."""
        block = self._blocks.get(index // BLOCK_MARKS)
        return bool((block and block[index % BLOCK_MARKS]) or self._look_up(index))

    def read_into(self, index: int, out: TokenArray) -> bool:
        """Fill `out` with a chunk and compare it with its crc32; return False if it is not here, or not whole."""
        block = self._blocks.get(index // BLOCK_MARKS)
        mark = (block and block[index % BLOCK_MARKS]) or self._look_up(index)
        if not mark:
            return False
        offset = index * self._bytes
        try:
            if os.preadv(self._fd, (out,), offset) != self._bytes:  # the end, or more than one call reads
                read_fully(self._fd, out, offset)
        except OSError:
            return False
        good = self.seen[index] = crc32_of(out) == mark & U32_MAX
        return good

    def _look_up(self, index: int) -> int:
        """Read the marks around a chunk anew: another process may have added it. Return that of the chunk, or 0."""
        number, place = divmod(index, BLOCK_MARKS)
        block = bytearray(BLOCK_MARKS * MARK_BYTES)
        with contextlib.suppress(OSError):
            os.preadv(self._marks_fd, (block,), number * len(block))
        marks = np.frombuffer(block, np.uint64)
        marks[marks >> 32 != MARK] = 0
        if len(self._blocks) >= KEPT_BLOCKS:
            self._blocks.clear()
        self._blocks[number] = memoryview(block).cast("Q")
        return int(marks[place])

    def put(self, index: int, batch: TokenArray) -> None:
        """Keep a chunk if there is room."""
        data = batch.reshape(-1).view(np.uint8)  # a structured dtype has no simple buffer
        mark = np.array([MARK << 32 | crc32_of(data)], np.uint64)
        try:
            self.full = self.full or not self._take_room()
            if not self.full:
                write_fully(self._fd, data, index * self._bytes)
                write_fully(self._marks_fd, mark, index * MARK_BYTES)
        except OSError:  # such as a full disk
            self.full = True
        number, place = divmod(index, BLOCK_MARKS)
        if not self.full and (block := self._blocks.get(number)):
            block[place] = int(mark[0])
        self.seen[index] = not self.full

    def _take_room(self) -> bool:
        """Return whether one more chunk may be written."""
        if self._granted < self._bytes:
            # what is on the disk counts all processes; where a file system does not tell, our own share does
            left = self._max_bytes - max(occupied_bytes(self._root), self._written)
            if left < self._bytes:
                return False
            self._granted = max(self._bytes, min(left // GRANT_SHARE, GRANT_BYTES))
        self._granted -= self._bytes
        self._written += self._bytes
        return True

    def mend(self) -> None:
        """Forget what was seen: the file was cut short, or cannot be read."""
        self.seen[:] = False
        with contextlib.suppress(OSError):
            self._mend_size()

    def close(self) -> None:
        """Close the files; other processes may then remove them."""
        rows = self.__dict__.pop("rows", None)  # of what was never open there is none
        if rows is not None:
            rows.close()
        for name in ("_close_fd", "_close_marks"):
            self.__dict__.get(name, int)()
        self._reset()
        self.full = True

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_root", "_folder", "_meta", "_max_bytes", "_num_batches", "_bytes")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        try:
            self._open()
        except (OSError, UnavailableError, IncompleteError):
            self.close()


def _open_in_use(folder: Path) -> int:
    """Make a column's folder and its data, and keep others from removing them; return the descriptor.

    Raises
    ------
    UnavailableError
        If others remove it again and again.
    """
    deadline_s = time.monotonic() + REMOVAL_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(FileNotFoundError, UnavailableError):  # it is being removed at this moment
            folder.mkdir(parents=True, exist_ok=True)
            fd = _open_file(folder / DATA)
            if keep_locked(fd, folder / DATA, fcntl.LOCK_SH):
                return fd
        time.sleep(0.01)
    raise UnavailableError(f"{folder}: is being removed by another process")


def _open_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def _columns(root: Path) -> list[Path]:
    with os.scandir(root) as found:
        return [Path(entry.path) for entry in found if COLUMN_NAME.fullmatch(entry.name)]


def occupied_bytes(root: Path) -> int:
    """Return what all columns in a cache folder occupy on the disk."""
    total = 0
    for folder in _columns(root):
        for name in (DATA, MARKS):
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(folder / name).st_blocks * 512
    return total


def free_bytes(root: Path) -> int:
    """Return how much may still be written on the disk of a folder."""
    return shutil.disk_usage(root).free


def make_room(root: Path, wanted: int, max_bytes: int) -> None:
    """Remove columns that nobody uses, those first that were opened or filled longest ago, until `wanted` bytes fit."""
    ages = []
    for folder in _columns(root):
        with contextlib.suppress(FileNotFoundError):
            ages.append((os.stat(folder / DATA).st_mtime_ns, folder))
    for _, folder in sorted(ages):
        if min(max_bytes - occupied_bytes(root), free_bytes(root)) >= wanted:
            return
        with contextlib.suppress(OSError):  # in use, gone, or not ours
            _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    """Remove a column. Where the system cannot say whether it is used, it stays.

    Raises
    ------
    OSError
        If it is used, or cannot be removed.
    """
    fd = os.open(folder / DATA, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(fd, folder / DATA):
            (folder / MARKS).unlink(missing_ok=True)  # first: without marks the data mean nothing
            (folder / DATA).unlink()
            folder.rmdir()
    finally:
        os.close(fd)
