"""Paths: of this machine, and URLs of objects, which look like paths to those who only read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any, Final

from zb_hdf5.errors import ArgumentError, BackendError
from zb_hdf5.files.objects import SCHEMES, ObjectFile, RemoteObject, object_exists

#: Of names that are objects; any other URL is that of a folder.
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
        """Yield nothing: what is there says the index."""
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
