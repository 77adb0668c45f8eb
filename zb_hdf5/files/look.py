"""One look at a path: its first bytes, size and identity, from one open, or its listing; and the looks beside it."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from zb_hdf5.files.bounded import require_bounded
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.files.identity import (
    FileIdentity,
    Identity,
    require_identity,
    require_same_place,
    require_unreplaced,
)
from zb_hdf5.files.objects import RemoteObject
from zb_hdf5.files.paths import RemotePath, cut_short, files_at_hand, read_into, regular_with_status, require_regular

#: The bytes at the beginning of a file that are read with it: the magic bytes of nearly every format are in them.
HEAD_BYTES: Final = 4096
#: Looks that stay open for others in a process, at most: a folder may have 100,000 files.
MAX_KEPT: Final = 1024
#: So many of them are kept before the limit of the process is asked for again: that takes as long as a read.
KEPT_AT_ONCE: Final = 32


class _KeptOpen(set[int]):
    """The descriptors of the looks that are kept open for others."""

    _room = 0

    def has_room(self) -> bool:
        """Return whether one more may stay open."""
        count = len(self)
        if count >= self._room or count % KEPT_AT_ONCE == 0:
            self._room = files_at_hand(MAX_KEPT)
        return count < self._room


_KEPT: Final = _KeptOpen()


class Look:
    """One look at a path, from which all formats recognise it. A file is opened when its bytes are first asked for.

    It stays open until `close`, which closes the looks at other files too, or `release`; what was read is kept. A URL
    is asked for its first bytes, once. Not thread-safe, but for `read` of a file that is open. Usable after fork; a
    pickled copy is not open. Raises as `regular` does when its bytes are read.

    Parameters
    ----------
    path
        A file or folder of this machine, or a URL. Of a file its name is enough: a folder has thousands of them.
    fd
        An open descriptor of the file, which is taken; None: the file is not open.

    Attributes
    ----------
    text
        The text of the path.
    is_far
        Whether the path is a URL.
    handles
        The open handles that a library has of this file and those beside it, by their paths; None: none is kept.
    tree
        The files in and below the folder, as `listing` has walked it; None: nobody has asked for them.
    """

    # a folder has thousands of looks: most of them have these values, and set none of them
    is_far: bool = False
    handles: dict[str, Any] | None = None
    tree: Any = None
    _fd: int | None = None

    def __init__(self, path: str | Path, fd: int | None = None) -> None:
        self.text = os.fspath(path)
        if isinstance(path, Path):
            self.path = path
            self.is_far = isinstance(path, RemotePath)
        if fd is not None:
            self._fd = fd
        self._others: dict[str, Look] = {}

    @cached_per_process
    def path(self) -> Path:
        """The path."""
        return Path(self.text)

    def of(self, path: str | os.PathLike[str]) -> Look:
        """Return the look at another file that belongs to this path: one in the folder, or beside the file."""
        key = os.fspath(path)
        if key == self.text:
            return self
        found = self._others.get(key)
        if found is None:
            found = self._others[key] = Look(path if isinstance(path, Path) else key)
        if found.handles is not self.handles:
            found.handles = self.handles
        return found

    def each(self, paths: Iterable[str | Path]) -> Iterator[Look]:
        """Yield the look at each of many files: one that is not known yet is closed before the next one."""
        for path in paths:
            one = Look(path)
            if one.text in self._others or one.text == self.text:
                yield self.of(path)
            else:
                try:
                    yield one
                finally:
                    one.close()

    @cached_per_process
    def is_dir(self) -> bool:
        """Whether the path is a folder: of a URL its suffix tells."""
        return self.path.is_dir()

    @cached_per_process
    def start(self) -> bytes:
        """The first bytes of the file, at most `HEAD_BYTES`."""
        if self.is_far:
            source = RemoteObject(self.text)
            found = bytes(source.read(0, HEAD_BYTES, whole=False))
            self.identity = source.identity  # the answer has it
            return found
        return os.pread(self._opened(), HEAD_BYTES, 0)

    def read(self, num_bytes: int, offset: int) -> bytes:
        """Return bytes of a file of this machine, fewer at its end."""
        if offset + num_bytes <= HEAD_BYTES:
            return self.start[offset : offset + num_bytes]
        return self.read_anew(num_bytes, offset)

    def read_anew(self, num_bytes: int, offset: int) -> bytes:
        """Return bytes of a file of this machine as `read`, which are not those of an earlier read."""
        fd = self._opened()
        found = os.pread(fd, num_bytes, offset)
        while 0 < len(found) < num_bytes:  # one call of the kernel reads less than 2 GiB
            more = os.pread(fd, num_bytes - len(found), offset + len(found))
            if not more:
                break
            found += more
        return found

    def last(self, num_bytes: int) -> bytes:
        """Return the last bytes of a file of this machine, fewer of a shorter one: the open tells its size, too."""
        self._opened()
        start = max(0, self.num_bytes - num_bytes)
        return self.read(self.num_bytes - start, start)

    def whole(self) -> bytes:
        """Return all bytes of a file of this machine. Raises as `require_bounded`."""
        self._opened()
        require_bounded(self.num_bytes, self.path)
        return self.read(self.num_bytes, 0)

    def read_into(self, buffer: Any, offset: int) -> int:
        """Fill a buffer, up to the end of the file, as `read_anew`; return its bytes."""
        return read_into(self._opened(), memoryview(buffer), offset)

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        found: int = self.identity[0]
        return found

    @cached_per_process
    def identity(self) -> Identity:
        """The identity of the file, with which a later open of it is compared."""
        if self.is_far:
            return RemoteObject(self.text).identity
        status = os.stat(self.text)
        require_regular(status.st_mode, self.text)
        return FileIdentity.of(status)

    def _opened(self) -> int:
        """Return the descriptor of the file."""
        if self._fd is None:
            self._fd, status = regular_with_status(self.text)
            self.identity = FileIdentity.of(status)
        return self._fd

    @contextmanager
    def keeping_handles(self) -> Iterator[None]:
        """Open a file once by a library, such as HDF5, in a block: all that look into it share the handle.

        The handles of a block in another one are kept until the end of the outer one.
        """
        if self.handles is not None:
            yield
            return
        handles = self.handles = {}
        try:
            yield
        finally:
            for look in (self, *self._others.values()):
                look.handles = None
            with ExitStack() as stack:  # each is closed, also if another one cannot be
                for handle in handles.values():
                    stack.callback(handle.close)

    def require(self, known: Identity | None) -> None:
        """Open the file; `FormatError` unless it is the one of a look before. None: any."""
        require_identity(self._opened(), known, self.path)

    def require_unreplaced(self) -> None:
        """Raise `FormatError` if another file has the name of one whose identity is known here."""
        for look in (self, *self._others.values()):
            if "identity" in look.__dict__:
                require_unreplaced(look.path, look.identity)

    def require_same_place(self, known: FileIdentity) -> None:
        """Open the file; `FormatError` unless it is the one of a look before, or was written in its place."""
        require_same_place(os.fstat(self._opened()), known, self.path)

    def stream(self) -> LookStream:
        """Return the bytes of the file from its first one on; one that is open is not opened again."""
        return LookStream(self)

    def mapped(self) -> mmap.mmap:
        """Return a mapping of a file that is not empty; `IncompleteError` if it is shorter now."""
        fd = self._opened()
        found = os.fstat(fd).st_size
        if found < self.num_bytes:
            raise cut_short(self.path, f"at least {self.num_bytes:,} bytes", found)
        return mmap.mmap(fd, self.num_bytes, access=mmap.ACCESS_READ)

    @property
    def is_open(self) -> bool:
        """Whether the file is open."""
        return self._fd is not None

    def kept_open(self) -> Look | None:
        """Return this look for others, who read the file later: the look to which it belongs leaves it open.

        It is closed with the last reference to it. None: it is not open, or the process may have no more files.
        """
        if self._fd is None or not _KEPT.has_room():
            return None
        _KEPT.add(self._fd)
        return self

    def kept_unread(self) -> Look | None:
        """Return this look as `kept_open` does, without the bytes that were read: a folder has thousands of them."""
        kept = self.kept_open()
        if kept is not None:
            self.__dict__.pop("start", None)
        return kept

    def again(self) -> Look | None:
        """Return another look by a copy of the descriptor; None: the file is not open. Not beside a `release`."""
        return None if self._fd is None else Look(self.path, os.dup(self._fd))

    def release(self, kept: set[int] = _KEPT) -> int | None:
        """Return the open descriptor, which the caller closes from now on; None: the file is not open."""
        fd: int | None = self.__dict__.pop("_fd", None)  # of two threads one takes it
        if fd is not None:
            kept.discard(fd)
        return fd

    def close(self) -> None:
        """Close the files that are open."""
        for other in self._others.values():
            if other._fd not in _KEPT:
                other.close()
        if self._fd is not None and self._fd not in _KEPT:
            self._close_file()

    def _close_file(self, close: Callable[[int], None] = os.close) -> None:
        """Close the file. `close` is bound: when the interpreter ends, no module has its names any more."""
        fd = self.release()
        if fd is not None:
            close(fd)

    def __del__(self) -> None:
        if self._fd is not None:
            self._close_file()

    def __reduce__(self) -> tuple[Any, ...]:
        return Look, (self.path,)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class LookStream(io.RawIOBase):
    """The bytes of the file of a look, at a position of its own: several may be read at the same time.

    The file closes with the look.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._look.num_bytes}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = max(0, self._look.num_bytes - self._position)
        found = self._look.read_anew(size, self._position)
        self._position += len(found)
        return found

    def readinto(self, buffer: Any, /) -> int:
        count = self._look.read_into(buffer, self._position)
        self._position += count
        return count
