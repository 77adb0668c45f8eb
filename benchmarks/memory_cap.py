"""A cap on the memory of one process, page cache included: a control group below its own one, for as long as it runs.

Only a process that enters the group is capped, and the group is removed with it. A limit of the address space is no
substitute: it counts each mapped file whole, and the page cache not at all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple, NoReturn

PREFIX: Final = "zb-benchmarks-"
#: The kernel answers at once; a machine that does not is left alone.
PATIENCE_S: Final = 5.0
MIB: Final = 1 << 20


class NoCapError(Exception):
    """The memory of a process cannot be capped on this machine; the message is the reason."""


class Kind(NamedTuple):
    """The files of a version of control groups.

    Attributes
    ----------
    file_system
        The type of its file system.
    limit
        The file of the limit, in bytes.
    peak
        The file of the largest use so far, in bytes.
    swap, swap_limit
        The file of a limit of swapped memory, and what to write there: a number, or "" for the limit itself.
    """

    file_system: str
    limit: str
    peak: str
    swap: str
    swap_limit: str


V1: Final = Kind("cgroup", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.memsw.limit_in_bytes", "")
V2: Final = Kind("cgroup2", "memory.max", "memory.peak", "memory.swap.max", "0")


class Place(NamedTuple):
    """A folder below which a group may be made.

    Attributes
    ----------
    folder
        The folder.
    kind
        The version of its control groups.
    """

    folder: Path
    kind: Kind


def places(groups: str, mounts: str) -> list[Place]:
    """Return the folders below which a group with a limit of memory may be made.

    Version 2 lets no group have both processes and groups with limits, so that the folder above is one as well.

    Parameters
    ----------
    groups
        The text of `/proc/self/cgroup`.
    mounts
        The text of `/proc/self/mountinfo`.
    """
    found = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return [Place(folder, V1) for folder in _folders(path, V1, mounts)[:1]]
        if not controllers:
            found = [Place(folder, V2) for folder in _folders(path, V2, mounts)]
    return found


def _folders(path: str, kind: Kind, mounts: str) -> list[Path]:
    """Return the folder of a group and the one above, if it has one, where they are mounted."""
    for line in mounts.splitlines():
        words, _, rest = line.partition(" - ")
        root, point = words.split()[3:5]
        file_system, _, options = rest.split()[:3]
        if file_system != kind.file_system or (kind is V1 and "memory" not in options.split(",")):
            continue
        relative = os.path.relpath(path, root)
        if not relative.startswith(".."):
            folder = Path(point, relative)
            return [folder] if relative == "." else [folder, folder.parent]
    return []


class Group:
    """A control group that is empty until a process enters it.

    Parameters
    ----------
    place
        Where it is made.
    num_bytes
        The limit.
    """

    def __init__(self, place: Place, num_bytes: int) -> None:
        self._place = place
        self.folder = place.folder / f"{PREFIX}{os.getpid()}"
        self.folder.mkdir()
        try:
            self._write(place.kind.limit, str(num_bytes))
            with contextlib.suppress(OSError):  # a kernel without swap has no such file
                self._write(place.kind.swap, place.kind.swap_limit or str(num_bytes))
        except BaseException:
            self.close()
            raise

    def _write(self, name: str, text: str) -> None:
        with open(os.open(self.folder / name, os.O_WRONLY), "w") as file:  # creates nothing
            file.write(text)

    @property
    def entrance(self) -> Path:
        """Return the file to which a process writes its own number."""
        return self.folder / "cgroup.procs"

    def peak_mib(self) -> float:
        """Return the most memory that its processes had, or 0 where the kernel does not tell."""
        try:
            return int((self.folder / self._place.kind.peak).read_text()) / MIB
        except OSError:
            return 0.0

    def close(self) -> None:
        """End the processes of the group, and remove it."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                for pid in self.entrance.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # a process of it has not quite ended
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.01)
            else:
                return


@contextlib.contextmanager
def group(place: Place, num_bytes: int) -> Iterator[Group]:
    """Make a group, and remove it at the end, also when SIGTERM ends this process."""
    made = None
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        made = Group(place, num_bytes)
        yield made
    finally:
        if made is not None:
            made.close()
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


#: A process that enters a group, and shows in which groups it is.
TRIAL: Final = """\
import os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
print(open("/proc/self/cgroup").read())
"""


def usable_place(num_bytes: int) -> Place:
    """Return a place that holds what it promises: a process has entered a group there.

    Groups that a killed run has left are removed.

    Raises
    ------
    NoCapError
        There is none.
    """
    reasons = []
    groups = Path("/proc/self/cgroup").read_text()
    mounts = Path("/proc/self/mountinfo").read_text()
    for place in places(groups, mounts):
        _remove_left(place.folder)
        try:
            _try(place, num_bytes)
        except (OSError, subprocess.SubprocessError, NoCapError) as error:
            reasons.append(f"{place.folder}: {error}")
        else:
            return place
    found = "; ".join(reasons) or "no control groups of memory are mounted for this process"
    raise NoCapError(f"the memory of one process cannot be capped here ({found})")


def _remove_left(folder: Path) -> None:
    for left in folder.glob(f"{PREFIX}*"):
        if not Path("/proc", left.name.removeprefix(PREFIX)).exists():
            with contextlib.suppress(OSError):
                left.rmdir()


def _try(place: Place, num_bytes: int) -> None:
    with group(place, num_bytes) as made:
        command = [sys.executable, "-c", TRIAL, str(made.entrance)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if made.folder.name not in done.stdout:
            raise NoCapError(f"a process could not enter a group: {done.stderr.strip()}")
