"""The old folder of a store that is replaced: aside in a hidden folder beside it, until it is removed.

`renameat2` exchanges the two folders where the file system can: both names have a whole folder at each moment. The
hidden folder has the inode of the old one in its name, and so the next run tells how far a killed one came.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from glob import escape
from pathlib import Path
from typing import Final

from zb_hdf5.files.c_library import libc
from zb_hdf5.files.paths import on_failure
from zb_hdf5.files.replaced_files import REPLACED_SUFFIX, hidden_path
from zb_hdf5.notes import note

AT_FDCWD: Final = -100
RENAME_EXCHANGE: Final = 2
#: The errors of a kernel or a file system that cannot exchange two names.
NO_EXCHANGE: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def exchanged(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step, and return whether this file system can."""
    renameat2 = getattr(libc(), "renameat2", None)
    if renameat2 is None:  # of an old C library
        return False
    if not renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), ctypes.c_uint(RENAME_EXCHANGE)):
        return True
    number = ctypes.get_errno()
    if number in NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def replace_folder(made: Path, path: Path) -> Path:
    """Give a folder the name of another one, and return the hidden folder that has the other one now.

    Parameters
    ----------
    made
        The new folder.
    path
        The name, which the old one has.
    """
    aside = hidden_path(path, f"{REPLACED_SUFFIX}-{path.stat().st_ino}")
    aside.mkdir()
    with on_failure(lambda: _settle(made, path, aside)):
        if exchanged(made, path):
            with on_failure(lambda: exchanged(made, path)):  # a run that fails replaces nothing
                os.replace(made, aside / path.name)
        else:
            os.replace(path, aside / path.name)
            os.replace(made, path)
    return aside


def settle_replaced(made: Path, path: Path) -> None:
    """Put back or remove the old folders that killed runs have left; nobody else is at work on either name.

    Parameters
    ----------
    made, path
        As for `replace_folder`.
    """
    for aside in left_aside(path):
        was_there = path.exists()
        _settle(made, path, aside)
        if aside.exists():
            remove_aside(aside)
            note(f"{aside}: was removed: the old folder that a killed run has replaced")
        elif not was_there:
            note(f"{path}: is the old folder again: a run that replaced it was killed")


def left_aside(path: Path) -> list[Path]:
    """Return the hidden folders with an old folder of this name."""
    found = path.parent.glob(f"{escape(hidden_path(path, REPLACED_SUFFIX).name)}-*")
    return sorted(each for each in found if each.is_dir() and not each.is_symlink())


def remove_aside(aside: Path) -> None:
    """Remove a hidden folder with all that is in it."""
    shutil.rmtree(aside)


def _settle(made: Path, path: Path, aside: Path) -> None:
    """Keep the old folder aside if the new one is whole under its name; else put it back, and end the hidden folder."""
    old = aside / path.name
    is_exchanged = made.is_dir() and aside.name.endswith(f"-{made.stat().st_ino}")
    if is_exchanged:
        os.replace(made, old)
    elif old.exists() and not path.exists():
        os.replace(old, path)
    if not old.exists():
        aside.rmdir()
