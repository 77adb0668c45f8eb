"""The memory that a process may use, page cache included: of the machine, or of a control group as Slurm makes one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: The folders of control groups, where every distribution mounts them: version 2, and the memory of version 1.
CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")
CONTROL_GROUPS_V1: Final = CONTROL_GROUPS / "memory"
#: The control groups of this process.
OWN_GROUPS: Final = Path("/proc/self/cgroup")


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: the least of the limits that can be read."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()])


def _limits() -> Iterator[int]:
    """Yield the limits of the control groups of this process; none is a text, or a number beyond all memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _numbers(CONTROL_GROUPS, path, "memory.max")
            elif "memory" in controllers.split(","):
                yield from _numbers(CONTROL_GROUPS_V1, path, "memory.limit_in_bytes")


def _numbers(mount: Path, path: str, name: str) -> Iterator[int]:
    """Yield the numbers in the files of one name, from the folder of a group up to that of all groups.

    In a container the folder may be missing: the group is then mounted as that of all.
    """
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            return
        with contextlib.suppress(OSError, ValueError):
            yield int((folder / name).read_text())
