"""Publishing: a file with its final name is whole.

Files and folders are made under `<name>.partial`, flushed to disk, and renamed. A crash leaves the `.partial`, never a
file that looks whole, and never damages the file that had the name before. The writer holds a `flock` on its partial,
so that a second writer of the same path is refused, while the leftover of a dead one is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ConvertError, ExistsError, NotFoundError, Remedy, UnavailableError
from zb_hdf5.files.c_library import libc
from zb_hdf5.files.paths import RemotePath, local_path, on_failure, open_file, regular
from zb_hdf5.files.replaced_files import ReplacedFiles, owner_of
from zb_hdf5.files.replaced_folder import left_aside, remove_aside, replace_folder, settle_replaced
from zb_hdf5.files.urls import without_secrets
from zb_hdf5.signals import deferred_signals
from zb_hdf5.spec import (
    DOCUMENTS_PREFIX,
    DOCUMENTS_STORE_SUFFIX,
    INDEX_NAME,
    JOURNAL_PREFIX,
    SHARD_PREFIX,
    UPLOAD_DIGEST,
)

#: Names that a message shows beside one that is not there.
NAMES_ALIKE: Final = 3
#: flock(2) on a file system that does not support it (NFS without lockd, some Lustre mounts).
NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, 524, errno.EIO, errno.ENOSYS})


def keep_locked(fd: int, path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file that was just opened, and return whether it still has its name; close it if not.

    Parameters
    ----------
    fd, path
        The open file, and the name by which it was opened.
    kind
        As for `fcntl.flock`.
    """
    with on_failure(lambda: os.close(fd)):
        lock(fd, kind, path)
        if is_at(fd, path):
            return True
    os.close(fd)
    return False


def is_at(fd: int, path: Path) -> bool:
    """Return whether `path` names the file or folder that `fd` has open."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def require_at(fd: int, path: Path) -> None:
    """Raise `UnavailableError` unless `path` names the file or folder that `fd` has open."""
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


PARTIAL_SUFFIX: Final = ".partial"
SYNC_FILE_RANGE_WRITE: Final = 2
SYNC_FILE_RANGE_WAIT: Final = 1 | SYNC_FILE_RANGE_WRITE | 4
#: Bytes that are flushed between two signs of progress.
FLUSH_BYTES: Final = 64 << 20
#: Bytes of one call of the kernel. For more it looks for larger pages: 4 MiB at once took twice as long on ext4.
WRITE_BYTES: Final = 512 << 10
#: Bytes that are read at once of a file that is copied.
COPIED_BYTES: Final = 4 << 20
_DOCUMENTS: Final = re.compile(
    rf"{DOCUMENTS_PREFIX}\d{{5}}{UPLOAD_DIGEST}{re.escape(DOCUMENTS_STORE_SUFFIX)}(\.partial)?"
)


class PartialFile:
    """`<path>.partial`, ours alone until one of three calls ends that: `publish`, `discard` or `keep`.

    Parameters
    ----------
    path
        The final name.
    overwrite
        A file of this name may exist, and is replaced by `publish`.
    resume
        The partial begins with the bytes that an earlier run left in it. Else the leftover of a dead writer is removed,
        and never truncated.
    sidecars
        All files that may belong to this one: they are replaced with it, and as a kill may have left them, they are put
        back now. See `ReplacedFiles`.

    Raises
    ------
    ExistsError
        If the file exists, and may not be replaced.
    UnavailableError
        If another process writes it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        resume: bool = False,
        sidecars: Iterable[Path] = (),
    ) -> None:
        self.path = local_path(path)
        self._overwrite = overwrite
        self._old = ReplacedFiles(self.path, sidecars)
        self.partial_path = partial_path(self.path)
        self._refuse_existing()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = self._open(flags if resume else flags | os.O_EXCL)
        self._is_open = True
        with on_failure(self.discard), deferred_signals():
            self._old.put_back()
            self._refuse_existing()

    def _open(self, flags: int) -> int:
        path = self.partial_path
        while True:
            try:
                fd = os.open(path, flags, 0o666)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    refuse_link(path)
                if error.errno != errno.EEXIST:
                    raise
                if path.exists() and not path.is_file():
                    raise _of_other_kind(path, "file") from error
                with contextlib.suppress(FileNotFoundError), leftover_of_dead_writer(path) as leftover:
                    if is_at(leftover, path):
                        os.unlink(path)
            else:
                if keep_locked(fd, path):
                    return fd

    def _refuse_existing(self) -> None:
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):  # /dev/null would become a file
            raise ConvertError(f"{self.path}: is a FIFO, a socket or a device; choose another output")
        if not self._overwrite:
            refuse_result(self.path)
        if self.path.is_dir():
            raise ConvertError(f"{self.path}: is a folder; remove it yourself, or choose another output")

    @property
    def own_path(self) -> str:
        """A name for exactly this file, whatever happens to the folder: for libraries that open by name."""
        name = f"/proc/self/fd/{self.fd}"
        # HDF5 follows the text of this link. After another process has looked the name up, some network file
        # systems have it as "(deleted)", although the file is where it was.
        moved = not os.path.exists(os.readlink(name))
        return str(self.partial_path) if moved and is_at(self.fd, self.partial_path) else name

    @contextlib.contextmanager
    def unlocked(self) -> Iterator[None]:
        """Release the lock for the moment in which the HDF5 library takes its own; it is a shared one afterwards.

        A writer that takes the lock in this moment makes a new file, and this one has no name then: HDF5 fails at that
        with an error of its own, or `publish` raises.
        """
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        try:
            yield
        except Exception:
            require_at(self.fd, self.partial_path)
            raise
        lock(self.fd, fcntl.LOCK_SH, self.partial_path)  # other writers stay out, SWMR readers may lock it too

    def start_write_back(self) -> None:
        """Ask the kernel to begin writing the pages of the file to disk: `publish` then waits for less."""
        sync_file_range = getattr(libc(), "sync_file_range", None)
        if sync_file_range is not None:  # Linux; a failure is met again by fsync
            sync_file_range(self.fd, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(SYNC_FILE_RANGE_WRITE))

    def publish(self, others: Sequence[PartialFile] = ()) -> None:
        """Flush to disk, rename to the final name, and make the rename itself durable.

        Parameters
        ----------
        others
            Whole files that belong to this one, and get their names with it: readers meet all of them, or none.
        """
        files = [*others, self]  # in the order of their renames
        for file in files:
            file._refuse_existing()
            require_at(file.fd, file.partial_path)
            with disk_errors(file.partial_path):
                os.fsync(file.fd)
        with deferred_signals():
            is_alone = not others and not self._old.has_sidecars
            with contextlib.nullcontext() if is_alone else self._old.aside():
                for file in files:
                    os.replace(file.partial_path, file.path)
                fsync_directory(self.path.parent)
            for file in files:
                file.keep()

    def discard(self) -> None:
        """Remove the partial. A file with the final name is untouched."""
        if self._is_open and is_at(self.fd, self.partial_path):
            os.unlink(self.partial_path)
        self.keep()

    def keep(self) -> None:
        """Leave the partial as it is, for a later process or for readers."""
        if self._is_open:
            self._is_open = False
            os.close(self.fd)


class LockedFolder:
    """`<path>.partial/`, ours alone inside the `with` block, which removes it at its end, unless it was kept.

    Parameters
    ----------
    path
        The final name of the folder.
    shared
        Several processes fill the folder, each a part of it, and it is kept.
    names
        A regular expression of the names of its files, besides the files of a store; "": it has no others.
    """

    def __init__(self, path: str | os.PathLike[str], *, shared: bool = False, names: str = "") -> None:
        self.path = local_path(path)
        self.partial_path = partial_path(self.path)
        self._shared = shared
        self._keep = shared
        self._names = names

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo, deferred_signals():
            self._fd = self._open(fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX)
            undo.enter_context(on_failure(self._leave))
            refuse_foreign_files(self.partial_path, self._names)
            self._refuse_existing()
        return self

    def _leave(self) -> None:
        """Give the folder up, and remove it if it is empty: it is then no leftover that somebody could go on with."""
        if is_at(self._fd, self.partial_path):
            with contextlib.suppress(OSError):
                self.partial_path.rmdir()
        os.close(self._fd)

    def _refuse_existing(self) -> None:
        """Raise `ExistsError` if the final name is taken and must stay; called while the folder is locked."""

    def _open(self, kind: int) -> int:
        """Make the folder, or take over the folder of a dead writer, and take its lock."""
        while True:
            refuse_link(self.partial_path)
            try:
                self.partial_path.mkdir(exist_ok=True)
            except FileExistsError as error:
                raise _of_other_kind(self.partial_path, "folder") from error
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(self.partial_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
                if keep_locked(fd, self.partial_path, kind):
                    return fd

    def keep(self) -> None:
        """Keep the folder if the block raises an exception, so that a later run can resume."""
        self._keep = True

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None and not self._shared:
                self._finish()
        finally:
            if not self._keep and is_at(self._fd, self.partial_path):  # not if it was published
                shutil.rmtree(self.partial_path)
            os.close(self._fd)

    def _finish(self) -> None:
        """End the block that has met no error."""
        shutil.rmtree(self.partial_path)


class PartialDirectory(LockedFolder):
    """A folder that gets its final name at the end of the `with` block. See `LockedFolder`.

    Parameters
    ----------
    path, shared, names
        As for `LockedFolder`.
    overwrite
        A store of this name may exist, and is replaced; no other folder is.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, overwrite: bool = False, shared: bool = False, names: str = ""
    ) -> None:
        super().__init__(path, shared=shared, names=names)
        self._overwrite = overwrite
        refuse_link(self.path)
        if not shared and left_aside(self.path):
            with _no_writer_of(self.path), _no_writer_of(self.partial_path):
                settle_replaced(self.partial_path, self.path)
        self._refuse_existing()
        if self.path.exists():
            refuse_foreign_files(self.path, names)

    def _refuse_existing(self) -> None:
        if not self._overwrite:
            refuse_existing(self.path)

    def _finish(self) -> None:
        require_at(self._fd, self.partial_path)
        os.fsync(self._fd)
        self._refuse_existing()
        if self.path.exists():
            self._swap()
        else:
            os.replace(self.partial_path, self.path)
        fsync_directory(self.path.parent)
        remove_journals(self.path)  # under the final name: a kill just before loses no shard

    def _swap(self) -> None:
        """Replace the old store by the new one; both are whole at every moment. See `replace_folder`."""
        refuse_foreign_files(self.path, self._names)
        with deferred_signals():
            aside = replace_folder(self.partial_path, self.path)
            fsync_directory(self.path.parent)
        remove_aside(aside)


@contextlib.contextmanager
def scratch_directory(path: Path) -> Generator[Path]:
    """Make and lock `<path>.partial/` for temporary files; remove it at the end, also after an error."""
    with LockedFolder(path) as folder:
        for name in os.listdir(folder.partial_path):  # the leftovers of a dead process
            remove(folder.partial_path / name)
        yield folder.partial_path


@contextlib.contextmanager
def leftover_of_dead_writer(path: Path) -> Iterator[int]:
    """Raise if a writer is at work on a file or folder, and keep writers away inside the block; readers may come."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path.is_dir() else regular(path)
    try:
        lock(fd, fcntl.LOCK_EX, path)
        lock(fd, fcntl.LOCK_SH, path)  # HDF5 takes a shared lock of its own to read
        yield fd
    finally:
        os.close(fd)


def _no_writer_of(folder: Path) -> contextlib.AbstractContextManager[object]:
    """Raise if a writer is at work on a folder, if it exists, and keep writers away inside the block."""
    return leftover_of_dead_writer(folder) if folder.exists() else contextlib.nullcontext()


def refuse_link(path: Path) -> None:
    """Raise `ConvertError` if a path to be written is a link: it may lead to other people's data."""
    if path.is_symlink():
        raise ConvertError(
            f"{path}: expected a file or folder to write, found a link to {path.readlink()}; name that, or remove the "
            "link"
        )


def _of_other_kind(path: Path, expected: str) -> ConvertError:
    """Return the error of a name of unfinished data that something else has."""
    if path.is_dir():
        found = "a folder"
    elif path.is_file():
        found = "a file"
    else:
        found = "a FIFO, a socket or a device"
    return ConvertError(f"{path}: expected an unfinished {expected} or none, found {found}; remove it")


def fresh_file(path: Path) -> int:
    """Make an empty file, and return its descriptor. A file or link of this name is removed, and never followed."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError of a call that has a descriptor only."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def flush_in_parts(path: Path) -> Iterator[float]:
    """Flush a file to disk in parts, and yield the share that is flushed: `publish` then waits for the rest only."""
    sync_file_range = getattr(libc(), "sync_file_range", None)
    if sync_file_range is None:  # not Linux
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # one of its own: the writer's meets a failure again, by fsync
    try:
        size = os.fstat(fd).st_size
        for start in range(0, size, FLUSH_BYTES):
            sync_file_range(
                fd,
                ctypes.c_int64(start),
                ctypes.c_int64(FLUSH_BYTES),
                ctypes.c_uint(SYNC_FILE_RANGE_WAIT),
            )
            yield min(1.0, (start + FLUSH_BYTES) / size)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file, or a folder and all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_journals(folder: Path) -> None:
    """Remove the journals of a store that is whole."""
    for path in folder.glob(f"{JOURNAL_PREFIX}*"):
        path.unlink()


def partial_path(path: Path) -> Path:
    """Return the path under which a file or folder is made, before it gets its final name."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def require_name(path: Path) -> None:
    """Raise `ArgumentError` if a path to write has no name: `.` and `/` have none."""
    if not path.name:
        raise ArgumentError(f"{path}: has no name of its own; give the folder or file to write")


def require_present(path: Path) -> None:
    """Raise `NotFoundError` if there is no such file or folder on this machine; a server is not asked."""
    folder = path.parent if path.name == INDEX_NAME else path  # an index may be lost
    if isinstance(path, RemotePath) or folder.exists():
        return
    if path.name and (partial := partial_path(path)).exists():
        raise NotFoundError(
            f"{path} is not finished: {path.name}{PARTIAL_SUFFIX} in its folder is being written, or its writer died"
            f"{old_one_aside(path)}",
            remedy=Remedy.RESUME if partial.is_dir() else Remedy.REPAIR,
            at=partial,
        )
    where = ("" if path.is_absolute() else f" in {Path.cwd()}") + named_alike(path) + old_one_aside(path)
    shown = without_secrets(str(path))  # a URL that became a path has lost a slash
    raise NotFoundError(f"{shown}: there is no such file or folder{where}; look for a mistake in the path")


def named_alike(path: Path) -> str:
    """Return the names beside a path that is not there which add a suffix to it, as Megatron does; "": none."""
    try:
        names = sorted(name for name in os.listdir(path.parent) if path.name and name.startswith(f"{path.name}."))
    except OSError:
        return ""
    return f", but {' and '.join(names[:NAMES_ALIKE])}" if names else ""


def old_one_aside(path: Path) -> str:
    """Return where the old file or folder of a name is that a killed run was about to replace; "": nowhere."""
    if not path.name:
        return ""
    hidden = [*ReplacedFiles(path, ()).folders, *left_aside(path)]
    for folder in (each for each in hidden if (each / path.name).exists()):
        return f"; the old one is in {folder.name}: run the command again that was to replace it, which puts it back"
    return ""


def refuse_existing(path: Path) -> None:
    """Raise `ExistsError` if `path` exists."""
    if path.exists():
        raise ExistsError(f"{path}: exists already")


def refuse_result(path: Path) -> None:
    """Raise `ExistsError` if a result exists, and remove the old files that a killed run has left aside for it."""
    if path.exists():
        ReplacedFiles(path, ()).remove()
    refuse_existing(path)


def is_part_of_store(name: str) -> bool:
    """Return whether a file or object of this name is a part of a store, which is replaced with it."""
    is_index = name in (INDEX_NAME, INDEX_NAME + PARTIAL_SUFFIX)
    return is_index or name.startswith((SHARD_PREFIX, JOURNAL_PREFIX)) or _DOCUMENTS.fullmatch(name) is not None


def refuse_foreign_files(folder: Path, names: str = "") -> None:
    """Raise `ConvertError` if `folder` holds anything but a store: replacing it would delete other people's files.

    `names` is a regular expression of more names that belong to it, and to folders in it.
    """
    if not folder.is_dir():
        raise ConvertError(f"{folder}: is not a folder; remove it yourself, or choose another output")
    for name in os.listdir(folder):
        if names and (folder / name).is_dir():
            refuse_foreign_files(folder / name, names)
        elif not is_part_of_store(owner_of(name)) and not re.fullmatch(names, owner_of(name)):
            raise ConvertError(
                f"{folder}: holds {name!r}, which is not part of a store; move it away, or choose another output"
            )


@contextlib.contextmanager
def published(path: Path, *, overwrite: bool) -> Generator[PartialFile]:
    """Give a file that gets the name `path` in one step, at the end of the block; an exception removes it.

    Parameters
    ----------
    path, overwrite
        As for `PartialFile`, which raises as this does.
    """
    with published_together(path, (), overwrite=overwrite) as [file], disk_errors(file.partial_path):
        yield file


@contextlib.contextmanager
def published_together(path: Path, others: Sequence[Path], *, overwrite: bool) -> Generator[tuple[PartialFile, ...]]:
    """Give the files of one result, which get their names at the end of the block; an exception removes them.

    Parameters
    ----------
    path
        The file without which there is no result.
    others
        The others.
    overwrite
        As for `PartialFile`, which raises as this does.
    """
    with contextlib.ExitStack() as undo:
        with deferred_signals():  # one that comes with a file is met when an exception would remove it
            files = [PartialFile(path, overwrite=overwrite, sidecars=others)]
            undo.enter_context(on_failure(files[0].discard))
            for each in others:
                files.append(PartialFile(each, overwrite=overwrite))
                undo.enter_context(on_failure(files[-1].discard))
        yield tuple(files)
        files[0].publish(files[1:])


def replaced(path: Path) -> contextlib.AbstractContextManager[PartialFile]:
    """Give a file that replaces `path` in one step, at the end of the block; other writers are kept away."""
    return published(path, overwrite=True)


def copy_published(source: Path, target: Path) -> None:
    """Copy a published file, or an object, whole; a file that has the name of the target is replaced."""
    with open_file(source) as original, replaced(target) as file:
        done = 0 if isinstance(source, RemotePath) else _copied_by_kernel(original.fileno(), file.fd)
        original.seek(done)
        while data := original.read(COPIED_BYTES):
            write_fully(file.fd, data, done)
            done += len(data)


def _copied_by_kernel(source: int, target: int) -> int:
    """Copy a file without its bytes in this process, where the file systems can; return the bytes that were copied.

    A file system that shares blocks between files makes no second copy of them.
    """
    done = 0
    with contextlib.suppress(OSError, AttributeError):  # of two file systems, or no Linux
        while count := os.copy_file_range(source, target, COPIED_BYTES, done, done):
            done += count
    return done


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the content of `path` in one step."""
    with replaced(path) as file:
        write_fully(file.fd, data, 0)


def write_fully(fd: int, data: npt.NDArray[Any] | bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`: one call of the kernel may write less, as on a full disk."""
    buffer = memoryview(data).cast("B")
    while buffer:
        written = os.pwrite(fd, buffer[:WRITE_BYTES], offset)
        buffer = buffer[written:]
        offset += written


def fsync_directory(path: Path) -> None:
    """Make a rename inside `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
