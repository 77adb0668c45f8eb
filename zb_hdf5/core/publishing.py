"""Publishing: a file with its final name is whole.

Files and folders are made under `<name>.partial`, flushed to disk, and renamed. A crash leaves the `.partial`, never a
file that looks whole, and never damages the file that had the name before. The writer holds a `flock` on its partial: a
second writer of the same path gets an error, and the leftover of a dead writer is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy.typing as npt

from zb_hdf5.core.files import regular
from zb_hdf5.errors import ConvertError, ExistsError, UnavailableError
from zb_hdf5.spec import INDEX_NAME, JOURNAL_PREFIX, SHARD_PREFIX

PARTIAL_SUFFIX: Final = ".partial"
SYNC_FILE_RANGE_WRITE: Final = 2
#: flock(2) on a file system that does not support it (NFS without lockd, some Lustre mounts).
NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, 524, errno.EIO, errno.ENOSYS})


class PartialFile:
    """`<path>.partial`, locked by this process, which `publish` renames to `path`.

    Attributes
    ----------
    fd
        Open for reading and writing; closed by `publish` and `discard`.
    partial_path
        Where the bytes are until then.

    Raises
    ------
    ExistsError
        If `path` exists and `overwrite` is False.
    UnavailableError
        If another process is writing the same partial.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.partial_path = partial_path(self.path)
        self._overwrite = overwrite
        self._refuse_existing()
        self.fd = self._open()

    def _open(self) -> int:
        return _create_locked(self.partial_path)

    def _refuse_existing(self) -> None:
        if not self._overwrite:
            refuse_existing(self.path)
        if self.path.is_dir():
            raise ConvertError(f"{self.path}: is a folder; remove it yourself, or choose another output")

    @property
    def own_path(self) -> str:
        """A name for exactly this file, whatever happens to the folder: for libraries that open by name."""
        return f"/proc/self/fd/{self.fd}"

    def unlock(self) -> None:
        """Release the lock for the moment in which the HDF5 library takes its own.

        Another writer that takes the lock in this moment removes the name and makes a new file. This file then has no
        name, and `publish` raises.
        """
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def share_lock(self) -> None:
        """Take a shared lock: other writers stay out, SWMR readers may lock it too."""
        _lock(self.fd, fcntl.LOCK_SH, self.partial_path)

    def start_write_back(self) -> None:
        """Have the disk begin to write what it has: `publish` then waits for less."""
        sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if sync_file_range is not None:  # Linux; a failure is met again by fsync
            sync_file_range(self.fd, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(SYNC_FILE_RANGE_WRITE))

    def publish(self) -> None:
        """Flush to disk, rename to the final name, and make the rename itself durable. A failure discards."""
        try:
            self._refuse_existing()
            if not _is_at(self.fd, self.partial_path):
                raise UnavailableError(f"{self.partial_path}: was removed or replaced by another process")
            os.fsync(self.fd)
            os.replace(self.partial_path, self.path)
        except BaseException:
            self.discard()
            raise
        os.close(self.fd)
        fsync_directory(self.path.parent)

    def discard(self) -> None:
        """Remove the partial. A file with the final name is untouched."""
        if _is_at(self.fd, self.partial_path):
            os.unlink(self.partial_path)
        os.close(self.fd)


class ResumedFile(PartialFile):
    """A partial that keeps the content of an earlier run, and can be kept for a later one."""

    def _open(self) -> int:
        while True:
            fd = os.open(self.partial_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if _keep_locked(fd, self.partial_path):
                return fd

    def leave(self) -> None:
        """Keep the partial for a later run."""
        os.close(self.fd)


class PartialDirectory:
    """`<path>.partial/`, which leaving the `with` block turns into `path`; an exception removes it, unless it was kept.

    What an earlier process has left in it is still there.

    Parameters
    ----------
    overwrite
        Replace an existing `path`, at the end and in one step.
    shared
        Several processes fill the folder, each a part of it. Then it is kept, and published by a later one alone.

    Attributes
    ----------
    partial_path
        The folder to fill.

    Raises
    ------
    ExistsError
        If `path` exists and `overwrite` is False.
    UnavailableError
        If another process is filling the same folder, and not both of them share it.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False, shared: bool = False) -> None:
        self.path = Path(path)
        self.partial_path = partial_path(self.path)
        self._overwrite, self._shared, self._keep = overwrite, shared, shared
        self._clean_up: Callable[[Path], None] = lambda path: None
        if not overwrite:
            refuse_existing(self.path)
        elif self.path.exists():
            refuse_foreign_files(self.path)

    def __enter__(self) -> Self:
        self._fd = _make_locked_folder(self.partial_path, fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX)
        try:
            refuse_foreign_files(self.partial_path)
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def clear(self) -> None:
        """Remove the content of the folder."""
        for name in os.listdir(self.partial_path):
            remove(self.partial_path / name)

    def on_published(self, clean_up: Callable[[Path], None]) -> None:
        """Have `clean_up` called with the final path."""
        self._clean_up = clean_up

    def keep(self) -> None:
        """Have an exception leave the folder as it is, for a later process to go on with."""
        self._keep = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._shared:
                self._publish()
        finally:
            if not self._keep and _is_at(self._fd, self.partial_path):  # not if it was published
                shutil.rmtree(self.partial_path)
            os.close(self._fd)

    def _publish(self) -> None:
        if not _is_at(self._fd, self.partial_path):
            raise UnavailableError(f"{self.partial_path}: was removed or replaced by another process")
        os.fsync(self._fd)
        if not self._overwrite:
            refuse_existing(self.path)
        if self.path.exists():
            self._swap()
        else:
            os.replace(self.partial_path, self.path)
        fsync_directory(self.path.parent)
        self._clean_up(self.path)

    def _swap(self) -> None:
        """Replace the old store by the new one; both are whole at every moment.

        A kill between the two renames leaves the old store in a hidden folder beside its place.
        """
        refuse_foreign_files(self.path)
        aside = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.replaced-", dir=self.path.parent))
        old = aside / self.path.name
        try:
            os.replace(self.path, old)
            os.replace(self.partial_path, self.path)
        except BaseException:
            if old.exists() and not self.path.exists():
                os.replace(old, self.path)
            aside.rmdir()
            raise
        shutil.rmtree(aside)


class ScratchDirectory(PartialDirectory):
    """`<path>.partial/` for temporary files: removed at the end; an exception removes it, unless it was kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial_path = partial_path(path)
        self._shared = self._keep = False

    def _publish(self) -> None:
        shutil.rmtree(self.partial_path)


@contextlib.contextmanager
def scratch_directory(path: Path) -> Generator[Path]:
    """Make and lock `<path>.partial/` for temporary files; remove it at the end, also after an error."""
    with ScratchDirectory(path) as folder:
        folder.clear()  # the leftovers of a dead process
        yield folder.partial_path


@contextlib.contextmanager
def leftover_of_dead_writer(path: Path) -> Iterator[None]:
    """Raise if a writer is at work on a file or folder, and keep writers away inside the block; readers may come.

    Raises
    ------
    UnavailableError
        If a writer is at work.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path.is_dir() else regular(path)
    try:
        _lock(fd, fcntl.LOCK_EX, path)
        _lock(fd, fcntl.LOCK_SH, path)  # HDF5 takes a shared lock of its own to read
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError of a call that knows a descriptor only."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def remove(path: Path) -> None:
    """Remove a file, or a folder and all that is in it."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def partial_path(path: Path) -> Path:
    """Return where `path` is built."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def refuse_existing(path: Path) -> None:
    """Raise `ExistsError` if `path` exists."""
    if path.exists():
        raise ExistsError(f"{path}: exists already")


def refuse_foreign_files(folder: Path) -> None:
    """Raise `ConvertError` if `folder` holds anything but a store: replacing it would delete files of others."""
    if not folder.is_dir():
        raise ConvertError(f"{folder}: is not a folder; remove it yourself, or choose another output")
    for name in os.listdir(folder):
        if name not in (INDEX_NAME, INDEX_NAME + PARTIAL_SUFFIX) and not name.startswith(
            (SHARD_PREFIX, JOURNAL_PREFIX)
        ):
            raise ConvertError(
                f"{folder}: holds {name!r}, which is no part of a store; move it away, or choose another output"
            )


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the content of `path` in one step."""
    partial = PartialFile(path, overwrite=True)
    try:
        with open(partial.fd, "wb", closefd=False) as file:
            file.write(data)
    except BaseException:
        partial.discard()
        raise
    partial.publish()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an error of the system say which file it is about: a write to an open file does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_fully(fd: int, data: npt.NDArray[Any] | bytes, offset: int) -> None:
    """Write all of `data` at `offset`: one call of the kernel takes less than 2 GiB, and less on a full disk."""
    buffer = memoryview(data).cast("B")
    while buffer:
        written = os.pwrite(fd, buffer, offset)
        buffer, offset = buffer[written:], offset + written


def _create_locked(path: Path) -> int:
    """Create a file and take its exclusive lock; the leftover of a dead writer is removed, never truncated."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                leftover = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    _lock(leftover, fcntl.LOCK_EX, path)
                    if _is_at(leftover, path):
                        os.unlink(path)
                finally:
                    os.close(leftover)
        else:
            if _keep_locked(fd, path):
                return fd


def _make_locked_folder(path: Path, kind: int) -> int:
    """Make a folder, or take over that of a dead writer, and take its lock."""
    while True:
        path.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _keep_locked(fd, path, kind):
                return fd


def _keep_locked(fd: int, path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file that was just opened, and say whether it still has its name; close it if not."""
    try:
        _lock(fd, kind, path)
        if _is_at(fd, path):
            return True
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return False


def _is_at(fd: int, path: Path) -> bool:
    """Return whether `path` names what `fd` has open."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(fd: int, kind: int, path: Path) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UnavailableError(f"{path}: another process is writing it; wait, or choose another output") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def fsync_directory(path: Path) -> None:
    """Make a rename inside `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
