"""Paths: of this machine, and URLs of objects; and the files behind them, which keep their identity.

A FIFO does not block the process, and another file does not pass for the expected one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, Final, TypeAlias, cast

from zb_hdf5.errors import ArgumentError, BackendError, FormatError, IncompleteError, Remedy
from zb_hdf5.files.objects import SCHEMES, ObjectFile, RemoteObject, object_exists

#: Suffixes of names that are objects; any other URL is that of a folder.
OBJECT_SUFFIXES: Final = frozenset(
    (".h5", ".hdf5", ".hdf", ".he5", ".batch", ".npy", ".json", ".crc32", ".pieces", ".documents", ".tables")
)

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class RemotePath(PosixPath):
    """The URL of an object or of a "folder" of them, with what readers ask of a path."""

    # there are no folders behind a URL, and nothing is asked to find out: the suffix of a name tells

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)

    def is_dir(self) -> bool:
        return self.suffix not in OBJECT_SUFFIXES

    def is_file(self) -> bool:
        return not self.is_dir() and self.exists()

    def glob(self, *args: Any, **options: Any) -> Iterator[Path]:  # type: ignore[override]
        """Yield nothing: the index names the objects."""
        return iter(())

    def exists(self) -> bool:  # type: ignore[override]
        """Ask whether there is such an object; one that may not be looked at is not there."""
        return self.is_dir() or object_exists(str(self))

    def read_bytes(self) -> bytes:
        """Return the whole object, by one request."""
        return bytes(RemoteObject(str(self)).read_all())

    def open_object(self) -> ObjectFile:
        """Return the object as a file."""
        return ObjectFile(RemoteObject(str(self)))


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL."""
    return isinstance(path, RemotePath) or _URL.match(os.fspath(path)) is not None


def any_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder of this machine, or the URL of an object."""
    if isinstance(path, Path):
        return path
    text = os.fspath(path)
    found = _URL.match(text)
    if found is None:
        return Path(path)
    if found[1].lower() not in SCHEMES:
        raise ArgumentError(f"{path}: expected a path, or a URL of {', '.join(SCHEMES)}, found {found[1]!r}")
    if "?" in text or "#" in text:
        raise ArgumentError(f"{path}: expected a URL without a query")
    return RemotePath(text)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder of this machine."""
    # the path of a URL would lose one of its slashes, and then not be found
    if is_url(path):
        raise ArgumentError(f"{path}: is a URL: expected a file or folder of this machine")
    return Path(path)


def require_remote_access(path: Path, access: str) -> None:
    """Raise `BackendError` if an object shall be read as only a file of this machine can be."""
    if isinstance(path, RemotePath) and access in ("mmap", "pread"):
        raise BackendError(f"{path}: access={access!r} needs a file of this machine; leave it at 'auto'")


#: The facts that differ for a later file of the same name; see `identity_of`.
Identity: TypeAlias = tuple[Any, ...]
#: An open file: its descriptor, or an object.
Handle: TypeAlias = int | RemoteObject

_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file, without waiting for anything; return its descriptor. Also an `opener` for `open`."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            require_regular(os.stat(path).st_mode, path)  # a socket
        raise
    try:
        require_regular(os.fstat(fd).st_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, or an object. Raises as `regular` does."""
    if isinstance(path, RemotePath):
        return cast(BinaryIO, path.open_object())
    return open(path, "rb", opener=regular)


def handle_of(file: BinaryIO) -> Handle:
    """Return what the functions below take of a file that `open_file` has opened."""
    return file.source if isinstance(file, ObjectFile) else file.fileno()


def size_of(handle: Handle) -> int:
    """Return the size of an open file."""
    return os.fstat(handle).st_size if isinstance(handle, int) else handle.num_bytes


def close_reading(fd: int) -> None:
    """Close a descriptor that was only read: an error of a file system that is gone loses nothing."""
    with contextlib.suppress(OSError):
        os.close(fd)


def require_regular(mode: int, path: str | os.PathLike[str]) -> None:
    """Raise as `regular` does, unless `mode` is that of a regular file."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise FormatError(f"{path}: expected a file, found {kind}; give the name of a file, or copy it into one")


def identity_of(handle: Handle, *, growing: bool = False) -> Identity:
    """Return (size, mtime_ns) of a published file, which never change, or (inode,) of one that is being written."""
    if not isinstance(handle, int):
        return handle.identity
    status = os.fstat(handle)
    return (status.st_ino,) if growing else (status.st_size, status.st_mtime_ns)


def require_identity(handle: Handle, expected: Identity, path: Path) -> None:
    """Raise `FormatError` if the file that was opened now is not the file that was opened first."""
    found = identity_of(handle, growing=len(expected) == 1)
    if found != expected:
        what = "inode" if len(expected) == 1 else "(size, mtime_ns)" if isinstance(handle, int) else "(size, ETag)"
        raise FormatError(
            f"{path}: changed since this reader was made: expected {what} {expected}, found {found}; open it again"
        )


def cut_short(path: Path, expected: str, found: int) -> IncompleteError:
    """Return the error of a file that has become shorter since it was opened."""
    return IncompleteError(
        f"{path}: expected {expected}, found {found:,}: the file was cut short; restore it",
        remedy=Remedy.VERIFY,
        at=path,
    )


def require_bytes(claimed: int, handle: Handle, path: Path, what: str) -> None:
    """Raise `IncompleteError` if a file claims to hold more bytes than it has, before anything of that size is made."""
    size = size_of(handle)
    if claimed > size:
        raise IncompleteError(
            f"{path}: expected at least {claimed:,} bytes for {what}, found {size:,}: it was cut short, or is damaged; "
            "restore it, or convert again"
        )
