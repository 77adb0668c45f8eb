"""The room on the disk of a result: the bytes and inodes that are free, and those that a conversion needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zb_hdf5 import ConvertError
from zb_hdf5.console import format_bytes
from zb_hdf5.converters.settings import Settings
from zb_hdf5.files.publishing import partial_path


def require_room(folder: Path, needed_bytes: int, num_inodes: int, of_sets: int = 0) -> None:
    """Raise `ConvertError` unless the file system of `folder` has space for the bytes that will be written."""
    if lack := lack_of_room(folder, free_room(folder), needed_bytes, num_inodes, of_sets):
        raise ConvertError(lack)


def lack_of_room(folder: Path, free: dict[str, Any], needed_bytes: int, num_inodes: int, of_sets: int = 0) -> str:
    """Return the message for a file system that is too small for the files of a conversion; "": it has room.

    Parameters
    ----------
    folder, free
        The place, and its free room.
    needed_bytes, num_inodes
        The bytes and the files of the conversion.
    of_sets
        The bytes of the field sets among them.
    """
    folder = folder.resolve()
    if needed_bytes > free["bytes"]:
        needed = format_bytes(needed_bytes)
        if of_sets:
            needed += f", {format_bytes(of_sets)} of it for field sets"
        return (
            f"{folder}: needs {needed}, only {format_bytes(free['bytes'])} are free; free some, or choose another "
            "output"
        )
    if free["inodes"] is not None and num_inodes > free["inodes"]:
        return f"{folder}: needs {num_inodes:,} inodes, only {free['inodes']:,} are free; use fewer shards"
    return ""


def kept_of(settings: Settings) -> int:
    """Return the bytes on the disk that an interrupted conversion has written, which `resume` keeps."""
    partial = partial_path(settings.target.path)
    if not settings.work.resume or not partial.is_dir():
        return 0
    return sum(file.stat().st_blocks * 512 for file in partial.rglob("*"))


def free_room(folder: Path) -> dict[str, Any]:
    """Return free bytes and inodes for this user; None where the file system does not count inodes."""
    status = os.statvfs(folder)
    return {"bytes": status.f_bavail * status.f_frsize, "inodes": status.f_favail if status.f_files else None}
