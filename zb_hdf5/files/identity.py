"""Opens files by name: a FIFO must not block the process, and another file must not pass for the expected one."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias, cast

from zb_hdf5.errors import FormatError, IncompleteError, Remedy
from zb_hdf5.files.objects import ObjectFile, RemoteObject
from zb_hdf5.files.paths import RemotePath

#: What tells a file from the one that has its name later; see `identity_of`.
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
