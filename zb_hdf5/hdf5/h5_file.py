"""HDF5 files: opened also where a cluster has no file locks, with clear errors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from zb_hdf5.errors import FormatError, IncompleteError, UnavailableError, ZbError
from zb_hdf5.files.identity import Handle, Identity, identity_of, require_identity
from zb_hdf5.files.look import Look
from zb_hdf5.files.objects import ObjectFile, RemoteObject
from zb_hdf5.files.paths import RemotePath, on_failure, require_regular
from zb_hdf5.files.publishing import NO_LOCKS, PARTIAL_SUFFIX
from zb_hdf5.hdf5.odd_types import way_of_odd_types
from zb_hdf5.packages import h5py

#: How often a growing file is opened that seems to be truncated, and the pause between two tries.
GROWING_TRIES: Final = 10
GROWING_PAUSE_S: Final = 0.005
#: The event of a file that HDF5 opens, for the audit hooks of Python: they see all other opened files.
OPEN_H5: Final = "zb_hdf5.open_h5"


def open_h5(path: Path | str, mode: str = "r", **options: Any) -> h5py.File:
    """Open an HDF5 file, or an object; if the file system has no locks, warn once and open without them."""
    file = ObjectFile(RemoteObject(path.url)) if isinstance(path, RemotePath) else None
    if file is not None:
        file.seek(0, os.SEEK_END)  # fetches the head: what waits below does so under the lock that all of HDF5 has
    elif mode == "r":
        require_regular(os.stat(path).st_mode, path)  # HDF5 would wait for ever for the other end of a FIFO
    if file is None:
        sys.audit(OPEN_H5, path)
    try:
        h5 = h5py.File(file or path, mode, **options)
    except OSError as error:
        # HDF5 tolerates only ENOSYS from flock(2) by itself; clusters answer ENOLCK, EOPNOTSUPP, 524 or EIO
        if error.errno in NO_LOCKS and "lock file" in str(error):
            warnings.warn(f"{path}: this file system has no file locks; opening without them", stacklevel=2)
            return h5py.File(path, mode, locking=False, **options)
        raise _translate(error, path) from error
    h5.source = None if file is None else file.source
    return h5


def handle_of_h5(h5: h5py.File) -> Handle:
    """Return the handle by which the size and identity of an open file are asked for."""
    handle: Handle = getattr(h5, "source", None) or h5.id.get_vfd_handle()
    return handle


def look_by_h5(h5: h5py.File, path: Path) -> Look | None:
    """Return a look at an open file of this machine, whose descriptor HDF5 leaves open; None: an object.

    HDF5 needs its lock no longer: it would stay on the file for as long as a copy of the descriptor is open.
    """
    handle = handle_of_h5(h5)
    if not isinstance(handle, int):
        return None
    fd = os.dup(handle)
    with contextlib.suppress(OSError):  # of a file system without locks
        fcntl.flock(fd, fcntl.LOCK_UN)
    return Look(path, fd)


def open_h5_for_reading(path: Path, identity: Identity | None = None, look: Look | None = None) -> h5py.File:
    """Open for reading, in SWMR mode if its writer is alive or was killed; `FormatError` if the identity differs.

    Also if there was such a `.partial` before, and it is not there any more.

    Parameters
    ----------
    look
        A look at the file, which may have a handle already, or keeps this one; None: the file is opened.
    """
    kept = None if look is None or look.handles is None else look.handles.get(os.fspath(path))
    h5 = _opened(path, identity) if kept is None else _again(kept)
    if identity is not None:
        with on_failure(h5.close):
            require_identity(handle_of_h5(h5), identity, path)
    # a file that grows, or that this process writes, is closed at once: see `HANDLES`
    if kept is None and look is not None and look.handles is not None and h5.id.get_intent() == h5py.h5f.ACC_RDONLY:
        look.handles[os.fspath(path)] = h5
        return _again(h5)
    return h5


def _again(h5: h5py.File) -> h5py.File:
    """Return another handle of an open file, which is not opened again."""
    again = h5py.File(h5.id.reopen())
    again.source = h5.source
    return again


def _opened(path: Path, identity: Identity | None) -> h5py.File:
    try:
        h5 = open_h5(path)
    except UnavailableError:
        h5 = _open_growing(path)
    except IncompleteError:
        if not path.name.endswith(PARTIAL_SUFFIX):
            raise
        h5 = _open_growing(path)
    except FileNotFoundError as error:
        if identity is None or not path.name.endswith(PARTIAL_SUFFIX):
            raise
        final = path.name.removesuffix(PARTIAL_SUFFIX)
        raise FormatError(
            f"{path}: is not there any more: its writer has finished it since it was opened, or it was renamed; "
            f"open {final}"
        ) from error
    return h5


def _open_growing(path: Path) -> h5py.File:
    """Open a file that a writer may have open. It may grow while HDF5 compares its size with what it says, and again.

    In either mode: HDF5 looks at the size first, and then finds that there is a writer.
    """
    for _ in range(GROWING_TRIES - 1):
        with contextlib.suppress(IncompleteError):
            return _open_at_once(path)
        time.sleep(GROWING_PAUSE_S)
    return _open_at_once(path)


def _open_at_once(path: Path) -> h5py.File:
    """Open a file once: in SWMR mode, or without if it has no writer any more."""
    try:
        return open_h5(path, swmr=True)
    except IncompleteError:
        raise
    except FormatError:
        return open_h5(path)


def h5_identity(h5: h5py.File, *, growing: bool) -> Identity:
    """Return the identity by which an open file differs from another one that has its name later."""
    return identity_of(handle_of_h5(h5), growing=growing)


@contextlib.contextmanager
def h5_damage(path: Path) -> Iterator[None]:
    """Turn the errors that h5py raises on damaged metadata, of many kinds, into `FormatError`; our own errors pass."""
    try:
        yield
    except (ZbError, FileNotFoundError, PermissionError):
        raise
    except (KeyError, RuntimeError, ValueError, OverflowError, TypeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's trouble, not the file's
        text = error.args[0] if error.args else error
        if isinstance(error, TypeError) and (way := _way_in(path)):
            raise FormatError(f"{path}: {way}") from error
        raise FormatError(f"{path}: HDF5 finds it damaged: {text}; restore it, or convert again") from error


def _way_in(path: Path) -> str:
    """Return the way of a file with a type that numpy lacks; "": it has none."""
    try:
        with open_h5(path) as h5:
            return way_of_odd_types(h5, path)
    except (KeyError, RuntimeError, ValueError, OverflowError, TypeError, OSError):
        return ""


def _translate(error: OSError, path: Path | str) -> Exception:
    text = str(error)
    if "already open for" in text or isinstance(error, BlockingIOError):
        return UnavailableError(f"{path}: a writer has it open, or was killed: {text}")
    if "truncated file" in text or "eof" in text.lower():
        return IncompleteError(f"{path}: truncated: {text}; restore it, or convert again")
    if error.errno is not None:
        return error
    return FormatError(f"{path}: HDF5 cannot read it: {text}")
