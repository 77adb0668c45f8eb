"""A file of which extents are read: views of an mmap, or positioned reads; and whether its file system is far away."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from os import SEEK_END, lseek
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.extents import Extents, FilePart
from zb_hdf5.files.identity import Identity, close_reading, cut_short, identity_of, regular, require_identity
from zb_hdf5.files.mapping import MAP_NORESERVE, Place, libc, map_side_by_side
from zb_hdf5.spec import TokenArray
from zb_hdf5.token_values import signed

#: statfs(2) type -> name, for file systems whose pages come over a network. There a page fault is a round trip
#: that holds up the whole process, and a mapping of a file that changes elsewhere is a bus error.
NETWORK_FILE_SYSTEMS: Final = {
    0x6969: "nfs", 0x0BD00BD0: "lustre", 0x47504653: "gpfs", 0x19830326: "beegfs", 0xFF534D42: "cifs",
    0xFE534D42: "smb2", 0x517B: "smb", 0x00C36400: "ceph", 0x65735546: "fuse", 0x01021997: "9p", 0xAAD7AAEA: "panfs",
    0x5346414F: "afs", 0x7461636F: "ocfs2", 0x01161970: "gfs2",
}  # fmt: skip


#: copy_file_range(2) between file systems, or on one that does not offer it, or inside a container that forbids it.
NO_COPY_RANGE: Final = frozenset(
    {errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY}
)


def read_fully(fd: int, out: npt.NDArray[Any], offset: int) -> int:
    """Fill `out`, up to the end of the file; return bytes. One call of the kernel reads less than 2 GiB."""
    buffer = memoryview(out.reshape(-1).view(np.uint8))  # a structured dtype has no simple buffer
    done = 0
    while done < len(buffer) and (count := os.preadv(fd, (buffer[done:],), offset + done)):
        done += count
    return done


def copy_range(source_fd: int, target_fd: int, num_bytes: int, source_offset: int, target_offset: int) -> bool:
    """Have the kernel copy bytes from file to file; where blocks can be shared (XFS, Btrfs) none are moved.

    Returns False if it will not, or if the source ends before: whoever reads the bytes instead will learn which.

    Raises
    ------
    OSError
        If the disk is full or fails.
    """
    while num_bytes:
        try:
            copied = os.copy_file_range(source_fd, target_fd, num_bytes, source_offset, target_offset)
        except OSError as error:
            if error.errno in NO_COPY_RANGE:
                return False
            raise
        if copied == 0:
            return False
        num_bytes, source_offset, target_offset = num_bytes - copied, source_offset + copied, target_offset + copied
    return True


def network_file_system(file: Path | int) -> str | None:
    """Return the name of the network file system that holds a path or an open file; None: a local or unknown one."""
    if not sys.platform.startswith("linux"):
        return None
    buffer = ctypes.create_string_buffer(256)  # struct statfs: f_type is its first machine word
    failed = libc().fstatfs(file, buffer) if isinstance(file, int) else libc().statfs(os.fsencode(file), buffer)
    if failed:
        return None
    kind = ctypes.c_ulong.from_buffer(buffer).value
    return NETWORK_FILE_SYSTEMS.get(kind & 0xFFFFFFFF)


class ExtentFile:
    """The batches of one immutable file, by a mapping or by positioned reads, outside any format library.

    Thread-safe (no shared file offset is used), fork-safe (descriptor and mapping are inherited), picklable (reopens by
    path and refuses a file that has changed since). `close` must not race with reads.

    Parameters
    ----------
    path
        The file; held open until `close`, so that a later rename over it changes nothing here.
    extents
        Where the batches lie.
    shape, dtype
        Of one batch.
    access
        "mmap": the file is mapped now, `read` returns views, and `read_into` copies from the mapping. "pread": `read`
        returns fresh arrays, and nothing is mapped. "auto": `read_into` reads by position, and the first call that
        needs a mapping (`read`, `read_private`, `gather_into`, `flat`) makes it, but never on a network file system.
        The size of the file is checked before mapped bytes are touched: a file cut short is an error, no bus error.
    identity
        Of the file that `extents` were found in; None: whatever has the name now.

    Raises
    ------
    IncompleteError
        If the file ends before its last batch, here or at a later read.
    FormatError
        If it is another file than the one that was looked at.
    """

    wants_threads = False
    in_flight: tuple[int, int] | None = None

    def __init__(
        self,
        path: Path,
        extents: Extents,
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        access: str,
        identity: Identity | None = None,
    ) -> None:
        self._path, self.extents, self.shape, self.dtype, self.access = path, extents, shape, dtype, access
        self._known = identity
        self._open()

    def _open(self) -> None:
        self._fd = self._descriptor()
        self._close_fd = weakref.finalize(self, close_reading, self._fd)
        self._end = self.extents.end
        self._views: list[TokenArray] = []
        self._private_views: list[TokenArray] = []
        self._mappings: dict[bool, list[TokenArray]] = {}
        self._flat: TokenArray | None = None
        self._mappable = {"mmap": True, "pread": False}.get(self.access)  # None: not asked yet
        try:
            self._check_size(os.fstat(self._fd).st_size)
            self._known = self.identity
            self._require_identity()
            if self.access == "mmap":
                self._views = self._map()
        except BaseException:
            self._close_fd()  # now, not when the last traceback that holds this object is gone
            raise

    def _descriptor(self) -> int:
        return regular(self._path)

    def _require_identity(self) -> None:
        require_identity(self._fd, self.identity, self._path)

    @property
    def identity(self) -> Identity:
        """The facts that tell this file from another one that has its name later."""
        return self._known or identity_of(self._fd)

    def _map(self, private: bool = False) -> list[TokenArray]:
        """Return a view of each run; no view where the access is not by mapping."""
        if not self._may_map():
            return []
        # a private writable mapping of a file larger than memory is refused unless it gives up its reservation
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE if private else mmap.MAP_SHARED
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
        mapping = mmap.mmap(self._fd, self._end, flags=flags, prot=protection)
        itemsize = self.dtype.itemsize
        dtype = signed(self.dtype) if private else self.dtype
        inner = (self.shape[1] * itemsize, itemsize)
        views = [
            np.ndarray((run.num_batches, *self.shape), dtype, mapping, run.base, (run.stride, *inner))
            for run in self.extents.runs
        ]
        # of two threads that map at once one keeps its mapping: no lock, which a fork could inherit in a locked state
        return self._mappings.setdefault(private, views)

    def _may_map(self) -> bool:
        """Return whether there is something to map, and it may be; the size of the file is right."""
        if self.maps and self._end:
            self._check_size(lseek(self._fd, 0, SEEK_END))
        return self.maps and self._end > 0

    @property
    def maps(self) -> bool:
        """Whether `read` and `read_private` return views of a mapping."""
        if self._mappable is None:
            self._mappable = network_file_system(self._fd) is None
        return self._mappable

    def _check_size(self, size: int) -> None:
        if size < self._end:
            raise cut_short(self._path, f"at least {self._end:,} bytes", size)

    def read(self, index: int) -> TokenArray:
        """Return batch `index`, read-only: a view that keeps the mapping alive, or a copy where nothing is mapped.

        Do not touch a view after another process has cut the file in place: that is a bus error which no check here
        can prevent. Files published by this package are only ever replaced by rename, which leaves views intact.
        """
        views = self._views
        if not views:
            views = self._views = self._map()
        if views:
            return self._view(views, index)
        tokens = np.empty(self.shape, self.dtype)
        self.read_into(index, tokens)
        tokens.flags.writeable = False
        return tokens

    def _view(self, views: list[TokenArray], index: int) -> TokenArray:
        # SEEK_END is the cheapest question for the size (0.24 µs, fstat 0.9); nobody uses the file offset
        if lseek(self._fd, 0, SEEK_END) < self._end:
            self._check_size(lseek(self._fd, 0, SEEK_END))
        if len(views) == 1:
            return views[0][index]  # type: ignore[no-any-return]
        number, within = self.extents.locate(index)
        return views[number][within]  # type: ignore[no-any-return]

    def read_into(self, index: int, out: TokenArray) -> None:
        """Fill `out` (C-contiguous, stored dtype) with batch `index`: one positioned read, or a copy ("mmap")."""
        if self.access == "mmap":
            out[...] = self._view(self._views, index)
            return
        offset = self.extents.offset(index)
        try:
            if os.preadv(self._fd, (out,), offset) == self.extents.batch_bytes:
                return
        except OSError:
            pass  # what reads it again has the words for it
        self._read_fully(out, offset)

    def read_range_into(self, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, B, S)`, with consecutive batches: one read per unpadded run they lie in."""
        for offset, part in self.extents.places_of_batches(start, out):
            self._read_fully(part, offset)

    def flat(self) -> TokenArray | None:
        """Return the tokens of all batches as one 1-D view, if they may be mapped.

        They lie one after the other in the file, or in few parts of whole pages, which are mapped side by side.
        """
        if self._flat is None:
            self._flat = self._map_flat()
            if self._flat is None:
                return None
        if (size := lseek(self._fd, 0, SEEK_END)) < self._end:
            self._check_size(size)
        return self._flat

    def _map_flat(self) -> TokenArray | None:
        if len(self.extents.stretches) == 1:
            self._views = self._views or self._map()
            return self._views[0].reshape(-1) if self._views else None
        places = self.flat_places
        tokens = map_side_by_side(places) if places else None
        return None if tokens is None else tokens.view(self.dtype)

    @property
    def flat_places(self) -> list[Place]:
        """Where `flat` lies, if it may be mapped."""
        return [(self._fd, start, stop) for start, stop in self.extents.stretches] if self._may_map() else []

    def read_tokens_into(self, start: int, out: TokenArray) -> None:
        """Fill 1-D `out` with consecutive tokens, counted over all batches."""
        for offset, part in self.extents.places_of_tokens(start, out):
            self._read_fully(part, offset)

    def gather_into(self, records: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(count, L)`, with records of L tokens (a divisor of S), numbered in batch order."""
        record_tokens = out.shape[1]
        tokens = self.flat()
        if tokens is not None:
            rows = tokens.reshape(-1, record_tokens)
            rows.take(records, axis=0, out=out, mode="clip")  # "clip" lets numpy write into `out` without a buffer
            return
        for offset, part in self.extents.places_of_records(records, out):
            self._read_fully(part, offset)

    def read_private(self, index: int) -> npt.NDArray[Any]:
        """Return batch `index` writable and signed: a view of a private mapping, or fresh where nothing is mapped.

        The file never changes. What is written into a private view stays in it: a later read of the same batch in
        this process sees it.
        """
        views = self._private_views
        if not views:
            views = self._private_views = self._map(private=True)
        if views:  # as in _view; the call would be 4 % of an int32 batch
            if lseek(self._fd, 0, SEEK_END) < self._end:
                self._check_size(lseek(self._fd, 0, SEEK_END))
            if len(views) == 1:
                return views[0][index]  # type: ignore[no-any-return]
            return self._view(views, index)
        tokens = np.empty(self.shape, self.dtype)
        self.read_into(index, tokens)
        return tokens.view(signed(self.dtype))

    def will_need(self, index: int, count: int = 1) -> None:
        """Ask the kernel to read batches into the page cache, without waiting: those that lie together at once."""
        batch_bytes = self.extents.batch_bytes
        while count:
            number, within = self.extents.locate(index)
            base, stride, num_batches = self.extents.runs[number]
            take = min(count, num_batches - within) if batch_bytes <= stride < 2 * batch_bytes else 1
            length = (take - 1) * stride + batch_bytes
            os.posix_fadvise(self._fd, base + within * stride, length, os.POSIX_FADV_WILLNEED)
            index, count = index + take, count - take

    def will_need_tokens(self, start: int, count: int) -> None:
        """Ask the kernel to read consecutive tokens, counted over all batches, into the page cache, without waiting."""
        for offset, part in self.extents.places_of_tokens(start, np.empty(count, self.dtype)):
            os.posix_fadvise(self._fd, offset, part.nbytes, os.POSIX_FADV_WILLNEED)

    def is_cached(self, index: int, token: int = 0) -> bool:
        """Return whether the page of a token of batch `index` is in the page cache: a read that may not wait."""
        offset = self.extents.offset(index) + token * self.dtype.itemsize
        try:
            return os.preadv(self._fd, (bytearray(1),), offset, os.RWF_NOWAIT) == 1
        except (OSError, AttributeError):  # it would wait, or this system cannot tell
            return False

    @property
    def num_bytes(self) -> int:
        """Size of the file now."""
        return os.fstat(self._fd).st_size

    @property
    def name(self) -> str:
        """Path of the file, in messages."""
        return str(self._path)

    def read_ranges(self, ranges: Sequence[FilePart]) -> None:
        """Fill each array with the bytes of the file from its offset on."""
        for offset, out in ranges:
            self._read_fully(out, offset)

    def read_runs_of_tokens(self, runs: Iterable[tuple[int, TokenArray]]) -> None:
        """Fill each 1-D array with consecutive tokens from its place on, counted over all batches."""
        for start, out in runs:
            self.read_tokens_into(start, out)

    def read_bytes(self, offset: int, count: int) -> bytes:
        """Return bytes of the file from an offset on."""
        try:
            data = os.pread(self._fd, count, offset)
        except OSError:  # what reads it again has the words for it
            data = b""
        if len(data) == count:
            return data
        found = np.empty(count, np.uint8)
        self._read_fully(found, offset)
        return found.tobytes()

    def _read_fully(self, out: npt.NDArray[Any], offset: int) -> None:
        try:
            found = read_fully(self._fd, out, offset)
        except OSError as error:  # the kernel knows a descriptor only
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        if found < out.nbytes:
            self._check_size(os.fstat(self._fd).st_size)
            raise cut_short(self._path, f"{out.nbytes:,} bytes at {offset:,}", found)

    def close(self) -> None:
        """Close the descriptor. Views stay valid until the last of them is dropped."""
        self._views = self._private_views = []
        self._mappings = {}
        self._flat = None
        self._mappable = False  # the number of the descriptor may soon be that of another file
        self._close_fd()

    def __getstate__(self) -> dict[str, Any]:
        here = ("_fd", "_close_fd", "_views", "_private_views", "_mappings", "_flat", "_mappable")
        return {key: value for key, value in self.__dict__.items() if key not in here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
