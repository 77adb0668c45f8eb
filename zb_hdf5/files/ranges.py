"""The bytes of one file or object by ranges, and extents: the byte offsets of consecutive batches in it.

A batch is an extent: `(file, byte offset, byte count)`. A `.batch` file finds the offset by arithmetic, an HDF5 file in
its chunk index; from here on both are the same.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from os import SEEK_END, lseek
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import BatchIndexError
from zb_hdf5.files.file_systems import in_memory, network_file_system
from zb_hdf5.files.identity import Identity, require_status
from zb_hdf5.files.look import Look
from zb_hdf5.files.objects import RemoteObject
from zb_hdf5.files.paths import RemotePath, any_path, cut_short, on_failure, open_with_room, read_into, regular
from zb_hdf5.files.urls import without_secrets
from zb_hdf5.spec import TokenArray

#: Byte ranges of one file that are mapped one by one, at most: a process may have 65,530 mappings.
MAX_MAPPED_RANGES: Final = 512

#: A byte offset, and the array that the bytes from there on fill.
Range: TypeAlias = tuple[int, npt.NDArray[Any]]


class Run(NamedTuple):
    """`num_batches` batches at `base`, `base + stride`, ... (byte offsets)."""

    base: int
    stride: int
    num_batches: int


@dataclass(slots=True)
class Extents:
    """The byte offsets of consecutive batches, kept as runs of constant stride.

    Attributes
    ----------
    runs
        The batches in their order, each run as long as its stride stays the same; empty runs are left out.
    batch_bytes
        Bytes of one batch, without the padding that may follow it.
    """

    runs: Sequence[Run]
    batch_bytes: int
    _firsts: Sequence[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not all(run.num_batches for run in self.runs):
            self.runs = [run for run in self.runs if run.num_batches]
        if len(self.runs) == 1:
            self._firsts = (0,)  # of perhaps 50,000 open files, nearly all have one run, and share this tuple
        else:
            ends = accumulate(run.num_batches for run in self.runs)
            self._firsts = [0, *ends][: len(self.runs)]

    def __reduce__(self) -> tuple[Any, ...]:
        return Extents, (self.runs, self.batch_bytes)

    @classmethod
    def from_offsets(cls, offsets: npt.NDArray[np.int64], batch_bytes: int) -> Extents:
        """Compress a list of byte offsets, one per batch in order, into runs."""
        steps = np.diff(offsets)
        changes = (np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist()
        last_batch = len(offsets) - 1
        runs: list[Run] = []
        start = 0
        while start <= last_batch:
            stride = int(steps[start]) if start < last_batch else batch_bytes
            next_change = bisect_right(changes, start)
            last = changes[next_change] if next_change < len(changes) else last_batch
            runs.append(Run(int(offsets[start]), stride, last - start + 1))
            start = last + 1
        return cls(runs, batch_bytes)

    @property
    def num_batches(self) -> int:
        return sum(run.num_batches for run in self.runs)

    @property
    def end(self) -> int:
        """The first byte offset after all batches."""
        last_offsets = (max(run.base, run.base + (run.num_batches - 1) * run.stride) for run in self.runs)
        return max((offset + self.batch_bytes for offset in last_offsets), default=0)

    @property
    def byte_ranges(self) -> list[tuple[int, int]]:
        """Ranges (start, stop) of batches that follow each other without a gap, in batch order.

        Empty if there are more than `MAX_MAPPED_RANGES`, or several that do not fill whole pages.
        """
        found: list[tuple[int, int]] = []
        for base, stride, num_batches in self.runs:
            parts = 1 if stride == self.batch_bytes else num_batches
            if len(found) + parts > MAX_MAPPED_RANGES:
                return []
            size = num_batches // parts * self.batch_bytes
            found += [(base + part * stride, base + part * stride + size) for part in range(parts)]
        if len(found) > 1 and any(edge % mmap.PAGESIZE for part in found for edge in part):
            return []
        return found

    def locate(self, index: int) -> tuple[int, int]:
        """Return (run number, index within that run) of a batch, in O(log runs)."""
        number = bisect_right(self._firsts, index) - 1
        return number, index - self._firsts[number]

    def offset(self, index: int) -> int:
        number, within = self.locate(index)
        base, stride, _ = self.runs[number]
        return base + within * stride

    def ranges_of_tokens(self, start: int, out: TokenArray) -> Iterator[Range]:
        """Yield the byte ranges of consecutive tokens.

        Parameters
        ----------
        start
            The first token, counted over all batches.
        out
            1-D: as many tokens as are wanted, of the stored dtype. Each range fills a part of it.
        """
        itemsize = out.itemsize
        batch_tokens = self.batch_bytes // itemsize
        done = 0
        while done < len(out):
            batch, token = divmod(start + done, batch_tokens)
            number, within = self.locate(batch)
            run = self.runs[number]
            rest = run.num_batches - within
            whole = rest if run.stride == self.batch_bytes else min(rest, 1)
            take = min(len(out) - done, whole * batch_tokens - token)
            if take < 1:
                raise BatchIndexError(f"expected tokens within the extents, found {start + done:,} after the last one")
            yield run.base + within * run.stride + token * itemsize, out[done : done + take]
            done += take

    def ranges_of_rows(self, starts: npt.NDArray[np.int64], out: TokenArray) -> Iterator[Range]:
        """Yield the byte ranges of rows of tokens: one for rows that follow each other.

        Parameters
        ----------
        starts
            The first token of each row, counted over all batches.
        out
            Shape (rows, tokens of a row), of the stored dtype. Each range fills a part of it.
        """
        if not len(starts):
            return
        offsets = self._offsets_of_rows(starts, out)
        if offsets is not None:
            yield from zip(offsets.tolist(), out, strict=True)
            return
        breaks = (np.flatnonzero(np.diff(starts) != out.shape[1]) + 1).tolist()
        for first, stop in pairwise([0, *breaks, len(starts)]):
            yield from self.ranges_of_tokens(int(starts[first]), out[first:stop].reshape(-1))

    def _offsets_of_rows(self, starts: npt.NDArray[np.int64], out: TokenArray) -> npt.NDArray[np.int64] | None:
        """Return the byte offset of each row, where few rows follow each other; None where a row is not in one piece.

        With one range for each row no time is spent on it in Python: shuffled records are a read each.
        """
        if len(self.runs) != 1 or np.count_nonzero(np.diff(starts) == out.shape[1]) > len(starts) // 16:
            return None
        base, stride, num_batches = self.runs[0]
        batches, within = np.divmod(starts, self.batch_bytes // out.itemsize)
        offsets = base + batches * stride + within * out.itemsize
        ends = offsets + out.shape[1] * out.itemsize
        is_packed = stride == self.batch_bytes
        limits = base + num_batches * stride if is_packed else base + batches * stride + self.batch_bytes
        fits = int(starts.min()) >= 0 and int(batches.max()) < num_batches and bool((ends <= limits).all())
        return offsets if fits else None


MAP_NORESERVE: Final = 0x4000  # Linux on x86 and Arm; the mmap module has it from Python 3.13 on


class LocalFile:
    """One immutable file of this machine, or a small object, which is fetched into a temporary file without a name.

    The file is open until `close`, so that a later rename over it changes nothing. A mapping stays valid after
    `close`, which must not race with reads.

    Parameters
    ----------
    path
        The path of the file, or the URL of the object.
    identity
        The identity that the file must have; None: any.
    access
        "mmap": it may be mapped. "pread": it is not mapped. "auto": it is mapped unless its file system is a network.
    look
        A look at it, whose open descriptor is taken; None: it is opened.
    """

    __slots__ = ("__weakref__", "_mappings", "_maps", "_text", "access", "fd", "identity", "size")

    def __init__(
        self, path: Path, identity: Identity | None = None, access: str = "auto", look: Look | None = None
    ) -> None:
        self._text = os.fspath(path)
        self.access = access
        self.fd = -1  # `__del__` may run before the file is open
        opened = None if look is None else look.release()
        self.fd = self._descriptor(path, identity) if opened is None else opened
        self._mappings: dict[bool, mmap.mmap] = {}
        self._maps = {"mmap": True, "pread": False}.get(self.access)  # None: not asked yet
        with on_failure(self._close_descriptor):  # now, not when the last traceback that holds this object is gone
            status = os.fstat(self.fd)
            self.size = status.st_size
            if identity and self.size < identity[0]:
                raise cut_short(path, f"at least {identity[0]:,} bytes", self.size)
            known = identity if isinstance(path, RemotePath) else None  # it was compared when it was fetched
            #: The facts that differ for a later file of the same name.
            self.identity: Identity = known or require_status(status, identity, self.fd, path)

    def _descriptor(self, path: Path, identity: Identity | None) -> int:
        if not isinstance(path, RemotePath):
            return regular(path)
        free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
        with tempfile.TemporaryFile(prefix="zb-") as file:
            for part in RemoteObject(path.url, identity).parts(max_bytes=free_bytes):
                file.write(part)
            file.flush()
            return os.dup(file.fileno())

    @property
    def path(self) -> Path:
        """Path of the file; an object of its own would take 200 bytes."""
        return any_path(self._text)

    @property
    def name(self) -> str:
        """The path, for messages."""
        return without_secrets(self._text)

    @property
    def num_bytes(self) -> int:
        """Size of the file now."""
        return os.fstat(self.fd).st_size

    @property
    def maps(self) -> bool:
        """Whether it may be mapped."""
        if self._maps is None:
            self._maps = network_file_system(self.fd) is None
        return self._maps

    def begin_look(self) -> Look:
        """Return a look at the file by a copy of its descriptor, for others who read it: it is not opened again."""
        return Look(self.path, os.dup(self.fd))

    def mapping(self, private: bool = False) -> mmap.mmap | None:
        """Return a mapping of all bytes; None if the file may not be mapped, or is empty.

        To touch the mapping of a file that was cut short would be a bus error, so the size is asked for each time. A
        cut while a view is in use cannot be noticed; this package only ever replaces files by rename.

        Parameters
        ----------
        private
            The mapping is writable, and the file never changes.
        """
        found = self._mappings.get(private)
        if found is None:
            if not self.size or not self.maps:
                return None
            if private:
                # a private writable mapping of a file larger than memory is refused unless it gives up its reservation
                flags = mmap.MAP_PRIVATE | MAP_NORESERVE
                protection = mmap.PROT_READ | mmap.PROT_WRITE
            else:
                flags = mmap.MAP_SHARED
                protection = mmap.PROT_READ
            self.require_whole()
            made = open_with_room(partial(mmap.mmap, self.fd, self.size, flags=flags, prot=protection))
            # of two threads one keeps its mapping: no lock, which a fork could inherit locked
            found = self._mappings.setdefault(private, made)
        self.require_whole()
        return found

    def require_whole(self) -> None:
        """Raise `IncompleteError` if the file has become shorter."""
        if lseek(self.fd, 0, SEEK_END) < self.size:  # 0.24 µs, fstat takes 0.9; the file offset is not used
            raise cut_short(self.path, f"at least {self.size:,} bytes", os.fstat(self.fd).st_size)

    def read_ranges(self, ranges: Iterable[Range]) -> None:
        """Fill each array with the bytes of the file from its offset on."""
        for offset, out in ranges:
            try:
                if os.preadv(self.fd, (out,), offset) == out.nbytes:
                    continue
            except (OSError, ValueError):  # what reads it again has the words for it; a structured dtype has no buffer
                pass
            self._read_fully(out, offset)

    def _read_fully(self, out: npt.NDArray[Any], offset: int) -> None:
        try:
            found = read_fully(self.fd, out, offset)
        except OSError as error:  # the kernel has a descriptor only
            raise OSError(error.errno, error.strerror, self.name) from error
        if found < out.nbytes:
            self.require_whole()
            raise cut_short(self.path, f"{out.nbytes:,} bytes at {offset:,}", found)

    def close(self) -> None:
        """Close the descriptor. Views stay valid until the last of them is dropped."""
        self._mappings = {}
        self._maps = False
        self._close_descriptor()

    def _close_descriptor(self, close: Callable[[int], None] = os.close) -> None:
        """Close the descriptor. `close` is bound: when the interpreter ends, no module has its names any more."""
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            try:
                close(fd)
            except OSError:  # of a file system that is gone: it was only read
                pass

    def __del__(self) -> None:
        # a finalizer would take 300 bytes of each of perhaps 50,000 open files
        self._close_descriptor()

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFile, (self.path, self.identity, self.access)


#: The bytes of one file or object that never changes: their name, size and identity, and reads of ranges.
Ranges: TypeAlias = LocalFile | RemoteObject


def open_ranges(
    path: Path,
    identity: Identity | None = None,
    num_bytes: int | None = None,
    access: str = "auto",
    look: Look | None = None,
) -> Ranges:
    """Open a file of this machine, or an object.

    Parameters
    ----------
    path
        The path of the file, or the URL of the object.
    identity
        The identity that it must have; None: any.
    num_bytes
        The size that an object must have; None: any.
    access, look
        As for `LocalFile`.
    """
    if isinstance(path, RemotePath):
        return RemoteObject(path.url, identity, num_bytes)
    return LocalFile(path, identity, access, look)


def look_by(file: Ranges | None) -> AbstractContextManager[Look | None]:
    """Return a look at an open file, as `LocalFile.begin_look`; None: no file is open, or it is an object."""
    return file.begin_look() if isinstance(file, LocalFile) else nullcontext()


def read_fully(fd: int, out: npt.NDArray[Any], offset: int) -> int:
    """Fill an array, up to the end of the file; return the bytes that were read."""
    return read_into(fd, memoryview(out.reshape(-1).view(np.uint8)), offset)  # a structured dtype has no simple buffer


def page_in_memory(fd: int, offset: int) -> bool:
    """Return whether the page of an offset can be read without waiting, as far as the system reports it."""
    try:
        return os.preadv(fd, (bytearray(1),), offset, os.RWF_NOWAIT) == 1
    except OSError as error:  # it would wait, or cannot answer
        return error.errno == errno.EOPNOTSUPP and in_memory(fd)
    except AttributeError:  # the system cannot answer
        return False
