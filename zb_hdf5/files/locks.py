"""Locks of files and folders that one process writes: a rival is told, and the leftover of a dead one is replaced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from zb_hdf5.errors import UnavailableError

#: flock(2) on a file system that does not support it (NFS without lockd, some Lustre mounts).
NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, 524, errno.EIO, errno.ENOSYS})


def create_locked(path: Path) -> int:
    """Create a file and take its exclusive lock; the leftover of a dead writer is removed, never truncated."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                leftover = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    lock(leftover, fcntl.LOCK_EX, path)
                    if is_at(leftover, path):
                        os.unlink(path)
                finally:
                    os.close(leftover)
        else:
            if keep_locked(fd, path):
                return fd


def make_locked_folder(path: Path, kind: int) -> int:
    """Make a folder, or take over that of a dead writer, and take its lock."""
    while True:
        path.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if keep_locked(fd, path, kind):
                return fd


def keep_locked(fd: int, path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock what was just opened, and say whether it still has its name; close it if not."""
    try:
        lock(fd, kind, path)
        if is_at(fd, path):
            return True
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return False


def is_at(fd: int, path: Path) -> bool:
    """Return whether `path` names what `fd` has open."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def require_at(fd: int, path: Path) -> None:
    """Raise `UnavailableError` unless `path` names what `fd` has open."""
    if not is_at(fd, path):
        raise UnavailableError(f"{path}: was removed or replaced by another process")


def lock(fd: int, kind: int, path: Path) -> None:
    """Take a lock where the file system has locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UnavailableError(f"{path}: another process is writing it; wait, or choose another output") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
