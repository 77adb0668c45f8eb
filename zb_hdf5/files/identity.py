"""The identity of a file, by which another file that has its name later is refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeAlias, TypeVar

from zb_hdf5.errors import FormatError
from zb_hdf5.files.file_systems import network_file_system
from zb_hdf5.files.objects import RemoteObject
from zb_hdf5.files.paths import require_regular
from zb_hdf5.files.this_host import mounts

#: The size and the time of a file that is still written: they change.
GROWING: Final = -1


class Device(NamedTuple):
    """The device of a file system.

    Attributes
    ----------
    number
        Its number.
    mounts
        The mounts among which it has this number: see `mounts`.
    """

    number: int
    mounts: str


class FileIdentity(NamedTuple):
    """The identity of a file of this machine. A pickled one is compared on other hosts, too.

    Attributes
    ----------
    num_bytes, modified_ns
        The size, and the time of the last change, which a published file keeps; `GROWING`: it is still written.
    inode
        The number of its inode.
    device
        The device of its file system.
    """

    num_bytes: int
    modified_ns: int
    inode: int
    device: Device

    @classmethod
    def of(cls, status: os.stat_result, *, growing: bool = False) -> Self:
        """Return the identity of a file by its status."""
        device = _device(status.st_dev)
        if growing:
            return cls(GROWING, GROWING, status.st_ino, device)
        facts = status.st_size, status.st_mtime_ns, status.st_ino, device
        return tuple.__new__(cls, facts)  # as `cls` does in twice the time: a folder has thousands of files

    @property
    def is_growing(self) -> bool:
        """Whether the file is still written."""
        return self.modified_ns == GROWING


#: The facts that differ for a later file of the same name: of an object its size and its ETag.
Identity: TypeAlias = FileIdentity | tuple[Any, ...]
#: An open file: its descriptor, or an object.
Handle: TypeAlias = int | RemoteObject
_Block = TypeVar("_Block")


@cache
def _device(number: int) -> Device:
    return Device(number, mounts())  # one for all files, which may be 100,000


def identity_of(handle: Handle, *, growing: bool = False) -> Identity:
    """Return the identity of an open file.

    Parameters
    ----------
    growing
        The file is still written.
    """
    return FileIdentity.of(os.fstat(handle), growing=growing) if isinstance(handle, int) else handle.identity


def difference(expected: Identity, found: Identity, file: int | str | Path) -> str:
    """Return how a file that was found under the name of another differs, in words; "": it is the same file.

    Device and inode are compared among the same mounts alone: on another host, or in another container, the same file
    may have others. On a network they may change with each mount, and FUSE may number a file anew at each look.

    Parameters
    ----------
    expected, found
        The identity of the file that was there, and that of the file that is there now.
    file
        The descriptor or the path of the latter.
    """
    if found == expected:
        return ""
    if not isinstance(expected, FileIdentity) or not isinstance(found, FileIdentity):
        return f"expected (size, ETag) {expected}, found {found}"
    if found[:2] != expected[:2]:
        return f"expected (size, mtime_ns) {expected[:2]}, found {found[:2]}"
    if expected.is_growing and found.inode != expected.inode:
        return f"expected inode {expected.inode}, found {found.inode}"
    places = [(each.device.number, each.inode) for each in (expected, found)]
    if found.device.mounts != expected.device.mounts or places[0] == places[1] or network_file_system(file) is not None:
        return ""
    return f"expected (device, inode) {places[0]}, found {places[1]}"


def require_identity(handle: Handle, expected: Identity | None, path: Path) -> Identity:
    """Return the identity of a file that was opened again, as it is here and now.

    Parameters
    ----------
    expected
        The identity that it must have; None: any.

    Raises
    ------
    FormatError
        If it is not the file that was opened first.
    """
    found = identity_of(handle, growing=_is_growing(expected))
    if expected is not None:
        _refuse(difference(expected, found, handle if isinstance(handle, int) else path), path)
    return found


def require_unreplaced(path: str | Path, expected: Identity | None) -> FileIdentity:
    """Return the identity of a file of this machine that is not opened. Takes and raises as `require_identity`."""
    status = os.stat(path)
    require_regular(status.st_mode, path)
    return require_status(status, expected, path, path)


def require_status(
    status: os.stat_result, expected: Identity | None, file: int | str | Path, path: str | Path
) -> FileIdentity:
    """Return the identity of a file by its status. Takes `file` as `difference`, and raises as `require_identity`."""
    found = FileIdentity.of(status, growing=_is_growing(expected))
    if expected is not None:
        _refuse(difference(expected, found, file), path)
    return found


def read_unreplaced(path: Path, expected: FileIdentity, blocks: Iterable[_Block]) -> Iterator[_Block]:
    """Yield the blocks of a file of this machine, which may be opened by its name for the first of them.

    The file is compared before and after it is opened: it may be replaced in between. One that was written in place is
    the same file: a conversion compares sizes and times when it ends.

    Parameters
    ----------
    path, expected
        The file, and the identity that it must have.
    blocks
        Opens the file when the first block is taken, if it is not open.

    Raises
    ------
    FormatError
        If another file has its name now.
    """
    require_same_place(os.stat(path), expected, path)
    is_compared = False
    for block in blocks:
        if not is_compared:
            require_same_place(os.stat(path), expected, path)
            is_compared = True
        yield block
    if not is_compared:
        require_same_place(os.stat(path), expected, path)


def require_same_place(status: os.stat_result, expected: FileIdentity, path: Path) -> None:
    """Raise `FormatError` unless a status is that of a file that was opened first, or of one written in its place.

    Parameters
    ----------
    status
        That of the file that has its name now.
    expected
        The identity of the file that was opened first.
    path
        Its path.
    """
    found = FileIdentity.of(status)
    if (found.device, found.inode) != (expected.device, expected.inode):
        _refuse(difference(expected, found, path), path)


def _is_growing(identity: Identity | None) -> bool:
    return isinstance(identity, FileIdentity) and identity.is_growing


def _refuse(words: str, path: str | Path) -> None:
    if words:
        raise FormatError(f"{path}: changed since it was opened: {words}; open it again")
