"""Bytes of one file or object by ranges, and extents: the byte offsets of consecutive batches in it.

A batch is an extent: `(file, byte offset, byte count)`. A `.batch` file finds the offset by arithmetic, an HDF5 file in
its chunk index; from here on both are the same.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from os import SEEK_END, lseek
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import BatchIndexError, ClosedError
from zb_hdf5.files.forks import generation
from zb_hdf5.files.objects import RemoteObject
from zb_hdf5.files.paths import (
    Identity,
    RemotePath,
    any_path,
    cut_short,
    identity_of,
    on_failure,
    open_with_room,
    regular,
    require_identity,
)
from zb_hdf5.files.threads import Readers, result_of
from zb_hdf5.spec import TokenArray

Key = TypeVar("Key")
Result = TypeVar("Result")
#: More threads than this do not make one process read faster: the calls between the reads hold the interpreter lock.
MAX_THREADS: Final = 4
#: Parts of a file that are mapped one by one: a process may have 65,530 mappings.
MAX_STRETCHES: Final = 512


#: A byte offset, and the array that the bytes from there on fill.
Range: TypeAlias = tuple[int, npt.NDArray[Any]]


class Run(NamedTuple):
    """`num_batches` batches at `base`, `base + stride`, ... (byte offsets)."""

    base: int
    stride: int
    num_batches: int


@dataclass(slots=True)
class Extents:
    """Byte offsets of consecutive batches, kept as runs of constant stride."""

    runs: Sequence[Run]
    batch_bytes: int
    _firsts: Sequence[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not all(run.num_batches for run in self.runs):
            self.runs = [run for run in self.runs if run.num_batches]
        # of perhaps 50,000 open files, nearly all have one run, and share this tuple
        several = len(self.runs) != 1
        self._firsts = [0, *accumulate(r.num_batches for r in self.runs)][: len(self.runs)] if several else (0,)

    @classmethod
    def from_offsets(cls, offsets: npt.NDArray[np.int64], batch_bytes: int) -> Extents:
        """Compress a list of byte offsets, one per batch in order, into runs."""
        steps = np.diff(offsets)
        changes = (np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist()
        runs: list[Run] = []
        start, n = 0, len(offsets)
        while start < n:
            stride = int(steps[start]) if start < n - 1 else batch_bytes
            next_change = bisect_right(changes, start)
            last = changes[next_change] if next_change < len(changes) else n - 1
            runs.append(Run(int(offsets[start]), stride, last - start + 1))
            start = last + 1
        return cls(runs, batch_bytes)

    @property
    def num_batches(self) -> int:
        return sum(run.num_batches for run in self.runs)

    @property
    def end(self) -> int:
        """First byte offset behind every batch."""
        return max(
            (max(r.base, r.base + (r.num_batches - 1) * r.stride) + self.batch_bytes for r in self.runs), default=0
        )

    @property
    def byte_ranges(self) -> list[tuple[int, int]]:
        """Ranges of batches without a gap between them, in batch order: first byte, and the one behind the last."""
        # none where there are more than MAX_STRETCHES, or several that do not fill whole pages
        found: list[tuple[int, int]] = []
        for base, stride, num_batches in self.runs:
            parts = 1 if stride == self.batch_bytes else num_batches
            if len(found) + parts > MAX_STRETCHES:
                return []
            size = num_batches // parts * self.batch_bytes
            found += [(base + part * stride, base + part * stride + size) for part in range(parts)]
        return found if len(found) == 1 or not any(edge % mmap.PAGESIZE for part in found for edge in part) else []

    def locate(self, index: int) -> tuple[int, int]:
        """Return (run number, index within that run) of a batch, in O(log runs)."""
        number = bisect_right(self._firsts, index) - 1
        return number, index - self._firsts[number]

    def offset(self, index: int) -> int:
        number, within = self.locate(index)
        base, stride, _ = self.runs[number]
        return base + within * stride

    def places_of_tokens(self, start: int, out: TokenArray) -> Iterator[Range]:
        """Yield where consecutive tokens, counted over all batches, lie, and the part of 1-D `out` for them."""
        batch_tokens, itemsize = self.batch_bytes // out.itemsize, out.itemsize
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

    def places_of_rows(self, starts: npt.NDArray[np.int64], out: TokenArray) -> Iterator[Range]:
        """Yield where rows of tokens lie, and the part of `out` for those that follow each other."""
        firsts = [0, *(np.flatnonzero(np.diff(starts) != out.shape[1]) + 1).tolist()] if len(starts) else []
        for first, stop in zip(firsts, [*firsts[1:], len(starts)], strict=True):
            yield from self.places_of_tokens(int(starts[first]), out[first:stop].reshape(-1))


MAP_NORESERVE: Final = 0x4000  # Linux on x86 and Arm; the mmap module has it from Python 3.13 on
MAP_FIXED: Final = 0x10  # Linux on x86 and Arm
PROT_NONE: Final = 0

#: A descriptor, the first byte, and the one behind the last.
Place: TypeAlias = tuple[int, int, int]


@cache
def libc() -> ctypes.CDLL:
    """Return the C library of this process, for the calls that Python lacks."""
    return ctypes.CDLL(None, use_errno=True)


def map_side_by_side(places: Sequence[Place]) -> TokenArray | None:
    """Return the bytes of all places as one read-only array, shape (N,) uint8. It is unmapped with its last view."""
    # None elsewhere than on Linux, and where a place does not begin, or one but the last end, with a page
    edges = [start for _, start, _ in places] + [stop for *_, stop in places[:-1]]
    if not sys.platform.startswith("linux") or any(edge % mmap.PAGESIZE for edge in edges):
        return None
    map_memory, unmap = libc().mmap, libc().munmap
    map_memory.restype, unmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t)
    map_memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    failed = ctypes.c_void_p(-1).value
    total = sum(stop - start for _, start, stop in places)
    address = map_memory(None, total, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
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


#: statfs(2) type -> name, for file systems whose pages come over a network. There a page fault is a round trip
#: that holds up the whole process, and a mapping of a file that changes elsewhere is a bus error.
NETWORK_FILE_SYSTEMS: Final[dict[int | None, str]] = {
    -1: "unreachable",  # mapped pages of a file system that does not answer would be bus errors
    0x6969: "nfs", 0x0BD00BD0: "lustre", 0x47504653: "gpfs", 0x19830326: "beegfs", 0xFF534D42: "cifs",
    0xFE534D42: "smb2", 0x517B: "smb", 0x00C36400: "ceph", 0x65735546: "fuse", 0x01021997: "9p", 0xAAD7AAEA: "panfs",
    0x5346414F: "afs", 0x7461636F: "ocfs2", 0x01161970: "gfs2",
}  # fmt: skip


class LocalFile:
    """One immutable file of this machine, or a small object, which is fetched into a temporary file without a name."""

    # held open until `close`, so that a later rename over it changes nothing; a mapping stays valid after `close`,
    # which must not race with reads. "auto" maps unless the file system is far away.

    __slots__ = ("__weakref__", "_mappings", "_maps", "access", "fd", "identity", "name", "size")

    def __init__(self, path: Path, identity: Identity | None = None, access: str = "auto") -> None:
        self.name, self.access, self.fd = str(path), access, -1
        self.fd = self._descriptor(path, identity)
        self._mappings: dict[bool, mmap.mmap] = {}
        self._maps = {"mmap": True, "pread": False}.get(self.access)  # None: not asked yet
        with on_failure(self.__del__):  # now, not when the last traceback that holds this object is gone
            self.size = os.fstat(self.fd).st_size
            if identity and len(identity) == 2 and self.size < identity[0]:
                raise cut_short(path, f"at least {identity[0]:,} bytes", self.size)
            #: The facts that differ for a later file of the same name.
            self.identity: Identity = identity or identity_of(self.fd)
            if identity and not isinstance(path, RemotePath):  # those of an object were compared when it was fetched
                require_identity(self.fd, identity, path)

    def _descriptor(self, path: Path, identity: Identity | None) -> int:
        if not isinstance(path, RemotePath):
            return regular(path)
        source, free = RemoteObject(self.name, identity), shutil.disk_usage(tempfile.gettempdir()).free
        with tempfile.TemporaryFile(prefix="zb-") as file:
            for part in source.parts(max_bytes=free):
                file.write(part)
            file.flush()
            return os.dup(file.fileno())

    @property
    def path(self) -> Path:
        """Path of the file; an object of its own would take 200 bytes."""
        return any_path(self.name)

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

    def mapping(self, private: bool = False) -> mmap.mmap | None:
        """Return a mapping of all bytes; None where the file may not be mapped, or is empty."""
        # to touch the mapping of a file that was cut short would be a bus error; a cut while a view is in use cannot be
        # noticed, and this package only ever replaces files by rename
        found = self._mappings.get(private)
        if found is None:
            if not self.size or not self.maps:
                return None
            # a private writable mapping of a file larger than memory is refused unless it gives up its reservation
            flags = mmap.MAP_PRIVATE | MAP_NORESERVE if private else mmap.MAP_SHARED
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
            self.require_whole()
            made = open_with_room(partial(mmap.mmap, self.fd, self.size, flags=flags, prot=protection))
            # of two threads one keeps its mapping: no lock, which a fork could inherit locked
            found = self._mappings.setdefault(private, made)
        self.require_whole()
        return found

    def require_whole(self) -> None:
        """Raise `IncompleteError` if the file has become shorter."""
        # SEEK_END is the cheapest question for the size (0.24 µs, fstat 0.9); nobody uses the file offset
        if lseek(self.fd, 0, SEEK_END) < self.size:
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
        self.__del__()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close the descriptor. A finalizer would take 300 bytes of each of perhaps 50,000 open files."""
        # also when the interpreter ends, and no module has its names any more: `close` is bound
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:
                close(fd)
            except OSError:  # of a file system that is gone: it was only read
                pass

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFile, (self.path, self.identity, self.access)


#: The bytes of one file or object that never changes: their name, size and identity, and reads of ranges.
Ranges: TypeAlias = LocalFile | RemoteObject


def open_ranges(
    path: Path, identity: Identity | None = None, num_bytes: int | None = None, access: str = "auto"
) -> Ranges:
    """Open a file of this machine, or an object."""
    if isinstance(path, RemotePath):
        return RemoteObject(str(path), identity, num_bytes)
    return LocalFile(path, identity, access)


def read_fully(fd: int, out: npt.NDArray[Any], offset: int) -> int:
    """Fill `out`, up to the end of the file; return bytes. One call of the kernel reads less than 2 GiB."""
    buffer = memoryview(out.reshape(-1).view(np.uint8))  # a structured dtype has no simple buffer
    done = 0
    while done < len(buffer) and (count := os.preadv(fd, (buffer[done:],), offset + done)):
        done += count
    return done


def file_system(file: Path | int) -> int | None:
    """Return the magic number of the file system of a path or an open file; -1: it does not answer; None: unknown."""
    if not sys.platform.startswith("linux"):
        return None
    buffer = ctypes.create_string_buffer(256)  # struct statfs: f_type is its first machine word
    failed = libc().fstatfs(file, buffer) if isinstance(file, int) else libc().statfs(os.fsencode(file), buffer)
    if failed:
        return None if ctypes.get_errno() == errno.ENOENT else -1
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF


def network_file_system(file: Path | int) -> str | None:
    """Return the name of the network file system that holds a path or an open file; None: a local or unknown one."""
    return NETWORK_FILE_SYSTEMS.get(file_system(file))


def in_memory(file: Path | int) -> bool:
    """Return whether a path or an open file lies in a tmpfs or ramfs, of which no read waits."""
    return file_system(file) in (0x01021994, 0x858458F6)


def require_process(process: int) -> None:
    """Raise `ClosedError` unless this process has this number: see `generation`."""
    if process != generation():
        raise ClosedError("this iteration reads ahead in threads of the parent process: begin another one in its child")


def read_ahead(
    read: Callable[[Key], Result], requests: Iterator[Key], depth: int, *, threads: int = MAX_THREADS,
    size: Callable[[Key], int] = lambda request: 1,
) -> Generator[Result]:  # fmt: skip
    """Yield `read(request)` in order, with requests of up to `depth` in all read ahead in threads; 0: without."""
    # The threads end with the iterator: a read of this machine that has begun is waited for, a wait for a server is
    # left, and no other read begins, nor does any behind one that failed, which may have waited for a server. The child
    # of a fork has none of the threads, and would wait for ever.
    if not depth:
        yield from map(read, requests)
        return
    failed = math.inf  # the number of the first one

    def read_unless_failed(number: int, request: Key) -> Result:
        nonlocal failed
        if number > failed:
            raise CancelledError
        try:
            return read(request)
        except BaseException:
            failed = min(failed, number)
            raise

    pending: deque[tuple[int, Future[Result]]] = deque()
    ahead, process = 0, generation()
    with Readers(min(depth, threads), "zb-prefetch") as readers:
        for number, request in enumerate(requests):
            pending.append((size(request), readers.submit(read_unless_failed, number, request)))
            ahead += pending[-1][0]
            while ahead > depth:
                count, future = pending.popleft()
                ahead -= count
                yield result_of(future)
                require_process(process)
        while pending:
            yield result_of(pending.popleft()[1])
            require_process(process)
