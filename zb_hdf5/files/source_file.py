"""A file of a source: each process opens it once, however often it reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from zb_hdf5.files.identity import FileIdentity, read_unreplaced, require_unreplaced
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import OpenFiles

_Block = TypeVar("_Block")
#: The open files of all sources of this process, by the ids of the `SourceFile`s: those that were read last.
_OPEN: Final[OpenFiles[Look]] = OpenFiles("pread")


class SourceFile:
    """A file of this machine that is read more than once: looked at, and then read in parts.

    It stays open until `close`, or until the process may have no more files. Thread-safe; usable after fork. Picklable:
    a copy is not open.

    Parameters
    ----------
    path
        The file.
    identity
        Its identity; None: it is looked up.
    look
        A look at the file, whose open descriptor is read from now on; None: the file is opened when it is read.

    Attributes
    ----------
    path
        The file.
    """

    def __init__(self, path: Path, identity: FileIdentity | None = None, look: Look | None = None) -> None:
        self.path = path
        if look is not None and look.is_open:
            _OPEN.get(id(self), lambda _: look)
            identity = FileIdentity(*look.identity)
        # pickled in a tenth of the time
        self._identity: tuple[Any, ...] = tuple(require_unreplaced(path, None) if identity is None else identity)

    @property
    def identity(self) -> FileIdentity:
        """The identity of the file: another one that has its name later is refused, in other processes too."""
        return FileIdentity(*self._identity)

    def opened(self) -> Look:
        """Return the look at the open file, by which it is read. It closes with the last reference to it.

        Raises
        ------
        FormatError
            If another file has its name now.
        """
        return _OPEN.get(id(self), self._open_look)

    def _open_look(self, _: int) -> Look:
        look = Look(self.path)
        look.require_same_place(self.identity)
        return look

    def unreplaced(self, blocks: Iterable[_Block]) -> Iterator[_Block]:
        """Yield the blocks that are read of the file; `FormatError` if another file has its name now."""
        return read_unreplaced(self.path, self.identity, blocks)

    def close(self) -> None:
        """Close the file. It is opened again if it is read again."""
        _OPEN.forget(id(self))

    def __del__(self, forget: Callable[[int], None] = _OPEN.forget) -> None:
        # `forget` is bound: when the interpreter ends, no module has its names any more
        forget(id(self))
