"""Paths of this machine and URLs of objects, and the open files of stores, as many as a process may have.

A FIFO does not block the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, Final, Generic, TypeVar, cast

from zb_hdf5.errors import ArgumentError, BackendError, FormatError, IncompleteError, Remedy
from zb_hdf5.files.bounded import require_bounded, whole_of
from zb_hdf5.files.objects import SCHEMES, ObjectFile, RemoteObject, object_exists
from zb_hdf5.files.turns import Turns
from zb_hdf5.files.urls import without_secrets

#: Suffixes of names that are objects; any other URL names a folder.
OBJECT_SUFFIXES: Final = frozenset(
    (".h5", ".hdf5", ".hdf", ".he5", ".batch", ".npy", ".json", ".crc32", ".pieces", ".documents", ".tables", ".values")
)

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class RemotePath(PosixPath):
    """The URL of an object or of a "folder" of them, with the methods of a path that readers use.

    A bucket has no folders, and no server is asked: the suffix of the name decides. Its text hides passwords, and so
    everything that shows or stores it does: `url` is for the client alone.
    """

    def __str__(self) -> str:
        return without_secrets(self.url)

    def __fspath__(self) -> str:
        return self.url

    @property
    def url(self) -> str:
        """The URL with its password, for the client: it is not printed or stored."""
        return super().__str__().replace(":/", "://", 1)

    def is_dir(self) -> bool:
        return self.suffix not in OBJECT_SUFFIXES

    def is_file(self) -> bool:
        return not self.is_dir() and self.exists()

    def exists(self) -> bool:  # type: ignore[override]
        """Ask whether there is such an object; one that may not be looked at is not there."""
        return self.is_dir() or object_exists(self.url)

    def read_bytes(self) -> bytes:
        """Return the whole object: of a small one by one request. Raises as `require_bounded`."""
        whole = RemoteObject(self.url)
        parts = []
        for part in whole.parts():
            require_bounded(whole.num_bytes, self)
            parts.append(part)
        return b"".join(parts)


def path_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a path or URL; `ArgumentError` if it is neither."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise ArgumentError(f"expected one path or URL, found {without_secrets(repr(path)):.80}") from None


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL."""
    return isinstance(path, RemotePath) or _URL.match(path_text(path)) is not None


def any_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder of this machine, or the URL of an object."""
    if isinstance(path, Path):
        return path
    text = path_text(path)
    found = _URL.match(text)
    if found is None:
        return Path(text)
    scheme = found[1].lower()
    if scheme not in SCHEMES:
        raise ArgumentError(
            f"{without_secrets(text)}: expected a path, or a URL of {', '.join(SCHEMES)}, found {found[1]!r}"
        )
    if "?" in text or "#" in text:
        raise ArgumentError(f"{without_secrets(text)}: expected a URL without a query")
    return RemotePath(scheme + text[len(scheme) :])


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder of this machine.

    A URL is refused: as a path it would lose one of its slashes, and then not be found.
    """
    if is_url(path):
        raise ArgumentError(f"{without_secrets(path_text(path))}: is a URL: expected a file or folder of this machine")
    return Path(path_text(path))


def require_remote_access(path: Path, access: str) -> None:
    """Raise `BackendError` if the access to an object is one that only a file of this machine has."""
    if isinstance(path, RemotePath) and access in ("mmap", "pread"):
        raise BackendError(f"{path}: access={access!r} needs a file of this machine; leave it at 'auto'")


def regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file, without waiting for anything; return its descriptor. Also an `opener` for `open`."""
    return regular_with_status(path, flags)[0]


def regular_with_status(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> tuple[int, os.stat_result]:
    """Open a regular file as `regular`; return its status, too."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            require_regular(os.stat(path).st_mode, path)  # a socket
        raise
    try:  # without `on_failure`, which takes as long as the open itself
        status = os.fstat(fd)
        require_regular(status.st_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def head_of(path: str | os.PathLike[str], num_bytes: int) -> tuple[bytes, int]:
    """Return the first bytes of a regular file, fewer of a shorter one, and its size. Raises as `regular` does.

    A folder has thousands of files, and a buffered file would take twice as long for each.
    """
    fd, status = regular_with_status(path)
    try:
        return os.read(fd, num_bytes), status.st_size
    finally:
        os.close(fd)


@contextlib.contextmanager
def on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block ends with an exception, which is raised again."""
    try:
        yield
    except BaseException:
        undo()
        raise


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, or an object. Raises as `regular` does."""
    if isinstance(path, RemotePath):
        return cast(BinaryIO, ObjectFile(RemoteObject(path.url)))
    return open(path, "rb", opener=regular)


def read_whole(path: str | os.PathLike[str], most: int | None = None, remedy: Remedy = Remedy.BOUND) -> bytes:
    """Return all bytes of a regular file, as `whole_of` does, or of an object."""
    if isinstance(path, RemotePath):
        return path.read_bytes()
    with open_file(path) as file:
        return whole_of(file, path, most, remedy)


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer of bytes, up to the end of a file; return the bytes that were read."""
    done = 0
    while done < len(buffer) and (count := os.preadv(fd, (buffer[done:],), offset + done)):
        done += count  # one call of the kernel reads less than 2 GiB
    return done


def size_of(handle: int | RemoteObject) -> int:
    """Return the size of an open file."""
    return os.fstat(handle).st_size if isinstance(handle, int) else handle.num_bytes


def require_regular(mode: int, path: str | os.PathLike[str]) -> None:
    """Raise as `regular` does, unless `mode` says that it is a regular file."""
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise FormatError(f"{path}: expected a file, found a FIFO, a socket or a device; copy it into a file")


def cut_short(path: Path, expected: str, found: int) -> IncompleteError:
    """Return the error of a file that has become shorter since it was opened."""
    return IncompleteError(
        f"{path}: expected {expected}, found {found:,}: the file was cut short; restore it",
        remedy=Remedy.VERIFY,
        at=path,
    )


def require_bytes(claimed: int, handle: int | RemoteObject, path: Path, what: str) -> None:
    """Raise `IncompleteError` if a file claims to hold more bytes than it has, before anything of that size is made."""
    size = size_of(handle)
    if claimed > size:
        raise IncompleteError(
            f"{path}: expected at least {claimed:,} bytes for {what}, found {size:,}: it was cut short, or is damaged; "
            "restore it, or convert again"
        )


File = TypeVar("File")
#: Descriptors that are left for everything else that the process opens.
SPARE_DESCRIPTORS: Final = 256
#: Python's mmap has a descriptor of its own.
DESCRIPTORS_PER_MAPPED_FILE: Final = 2
#: An object has no descriptor, and crc32 rows, mostly 16 KiB: so few are held that these are about 64 MiB at most.
DESCRIPTORS_PER_OBJECT: Final = 8
#: Descriptors that stores hold however low the limit is, unless they are half of it.
MIN_DESCRIPTORS: Final = 16

_LOCK = threading.RLock()  # a finalizer may close a store in the middle of all this
_STORES: weakref.WeakSet[OpenFiles[Any]] = weakref.WeakSet()


class OpenFiles(Generic[File]):
    """The open files of one store, by their numbers. Thread-safe; usable after fork; a pickled copy has none.

    `known.get(number)` is a plain look-up, which notes no time. When no more files may be open, the older half of
    `known` rests. A resting file that is asked for moves back; the others close, the oldest first. A dropped file
    closes its descriptor when the last thread that reads from it has finished.

    Parameters
    ----------
    access
        The access to the files: it decides how many descriptors a file counts.
    far
        The files are objects, of which fewer are open.
    """

    def __init__(self, access: str, *, far: bool = False) -> None:
        self.known: dict[int, File] = {}
        self.resting: dict[int, File] = {}
        if far:
            self.descriptors = DESCRIPTORS_PER_OBJECT
        else:
            self.descriptors = 1 if access == "pread" else DESCRIPTORS_PER_MAPPED_FILE
        self._access = access
        self._far = far
        self._turns = Turns()
        self.let_go: Callable[[], None] = lambda: None  # called when a file closes for others
        with _LOCK:
            _STORES.add(self)

    def get(self, number: int, open_file: Callable[[int], File]) -> File:
        """Return a file by its number, and open it if it is not open."""
        return self.known.get(number) or self.open(number, open_file)

    def open(self, number: int, open_file: Callable[[int], File]) -> File:
        """Open a file, or take it from the resting ones.

        One thread opens it, and others wait for it: if it fails, they fail too. Each would ask a server again.
        """
        with self._turns.of(number):
            with _LOCK:
                file = self.known.get(number) or self.resting.pop(number, None)
                if file is not None:
                    self.known[number] = file
                    return file
            file = open_with_room(partial(open_file, number))  # without `_LOCK`: on a network this takes a while
            with _LOCK:
                file = self.known.setdefault(number, file)
                held = _held()
                allowed = descriptor_room(held)
                if held >= allowed:
                    _make_room(allowed)
            return file

    def forget(self, number: int) -> None:
        """Drop a file, if it is open."""
        with _LOCK:
            self.known.pop(number, None)
            self.resting.pop(number, None)

    def close(self) -> None:
        """Close all files."""
        with _LOCK:
            files = self.resting | self.known
        for file in files.values():
            file.close()  # type: ignore[attr-defined]
        self.known.clear()
        self.resting.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(OpenFiles, far=self._far), (self._access,)


def open_with_room(open_file: Callable[[], File]) -> File:
    """Open a file; if the process may open no more, stores close some of theirs, and it is tried again."""
    try:
        return open_file()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    with _LOCK:  # others have taken more than was left for them
        _make_room(_held() // 2)
    return open_file()


def descriptor_room(needed: int) -> int:
    """Return how many descriptors all stores may hold; if more are needed, raise the process's soft limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed < least_room(soft):
        return least_room(soft)
    if soft != resource.RLIM_INFINITY and needed >= soft - SPARE_DESCRIPTORS and soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a system may have a lower limit than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return room_under(soft)


def room_under(limit: int) -> int:
    """Return how many descriptors all stores may hold in a process that may have `limit` of them."""
    mappings = _max_mappings() // 2  # a file may be mapped twice, and others map things too
    allowed = mappings if limit == resource.RLIM_INFINITY else min(mappings, limit - SPARE_DESCRIPTORS)
    return max(allowed, least_room(limit))


def least_room(limit: int) -> int:
    """Return how many descriptors all stores may hold however low the limit of the process is."""
    return MIN_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(MIN_DESCRIPTORS, max(2, limit // 2))


def files_at_hand(most: int) -> int:
    """Return how many files, at most `most`, a loader or a look may keep open for itself, beside the stores' files.

    Each may be mapped.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, (soft - least_room(soft)) // (4 * DESCRIPTORS_PER_MAPPED_FILE)))


def access_to_tables(access: str) -> str:
    """Return the access to tables: "pread" for a process of few descriptors, which views of mappings would hold."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return "pread" if 0 <= hard < SPARE_DESCRIPTORS else access


@cache
def _max_mappings() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65_530  # the default of Linux


def _held() -> int:
    return sum(store.descriptors * (len(store.known) + len(store.resting)) for store in _STORES)


def _make_room(allowed: int) -> None:
    """Close files until no more descriptors than `allowed` are held."""
    while True:
        stores = list(_STORES)
        resting = sum(len(store.resting) for store in stores)
        known = sum(len(store.known) for store in stores)
        if 4 * resting < known:  # before they must close: files in use have time to move back
            for store in stores:
                for number in list(store.known)[: (len(store.known) + 1) // 2]:
                    store.resting[number] = store.known.pop(number)
        if _held() <= allowed:
            return
        store = max(stores, key=lambda store: len(store.resting))
        oldest = next(iter(store.resting))
        del store.resting[oldest]
        store.let_go()


def _renew_locks() -> None:
    global _LOCK
    _LOCK = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)  # another thread of the parent may have held it
