"""The kinds of file systems: on a network, and in memory."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from zb_hdf5.files.c_library import libc

#: statfs(2) type -> name, for file systems whose pages come over a network. There a page fault is a round trip
#: that holds up the whole process, and a mapping of a file that changes elsewhere is a bus error.
NETWORK_FILE_SYSTEMS: Final[dict[int | None, str]] = {
    -1: "unreachable",  # mapped pages of a file system that does not answer would be bus errors
    0x6969: "nfs",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x517B: "smb",
    0x00C36400: "ceph",
    0x65735546: "fuse",
    0x01021997: "9p",
    0xAAD7AAEA: "panfs",
    0x5346414F: "afs",
    0x7461636F: "ocfs2",
    0x01161970: "gfs2",
}
#: statfs(2) types of tmpfs and ramfs.
MEMORY_FILE_SYSTEMS: Final = frozenset({0x01021994, 0x858458F6})


def file_system(file: str | Path | int) -> int | None:
    """Return the magic number of the file system of a path or an open file; -1: it does not answer; None: unknown."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs: f_type is its first machine word
    if isinstance(file, int):
        failed = libc().fstatfs(file, buffer)
    else:
        failed = libc().statfs(os.fsencode(file), buffer)
    if failed:
        return None if ctypes.get_errno() == errno.ENOENT else -1
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF


def network_file_system(file: str | Path | int) -> str | None:
    """Return the name of the network file system that holds a path or an open file; None: a local or unknown one."""
    return NETWORK_FILE_SYSTEMS.get(file_system(file))


def is_on_network(file: str | Path | int) -> bool:
    """Return whether a network file system holds a path or an open file."""
    return network_file_system(file) is not None


def in_memory(file: str | Path | int) -> bool:
    """Return whether a path or an open file is in a tmpfs or ramfs: no read waits there."""
    return file_system(file) in MEMORY_FILE_SYSTEMS
