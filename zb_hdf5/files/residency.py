"""Residency: whether the tokens of a reader are in memory, and whether pages that were read stay there.

Rows in any order are taken from a mapping where their pages are in memory. Elsewhere a fault would wait for each page,
and nothing could be read meanwhile: there the rows are announced to the kernel, which reads many at the same time, and
read by position.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Callable
from typing import Final, TypeVar

from zb_hdf5.files.memory_limit import memory_limit
from zb_hdf5.files.ranges import LocalFile, page_in_memory

_Result = TypeVar("_Result")
#: Bytes around a row that are read with it, as long as they stay in memory until the rows beside it are asked for.
SURROUNDINGS: Final = 1 << 16
#: Reads by position until the next look for their pages in memory.
READS_UNTIL_LOOK: Final = 64
#: Announcements, each of the reads of several steps, until the next look.
ANNOUNCEMENTS_UNTIL_LOOK: Final = 4
#: One mapped read in so many is watched.
WATCHED_ONE_IN: Final = 32
#: Places of earlier reads that are remembered, at most.
MAX_PLACES: Final = 512
#: Places that are remembered from one look back to the next.
LOOK_BACK_EVERY: Final = 64
#: Places of one look back, the earliest ones. Each is looked at once: newer kernels read the page they are asked for.
LOOKED_BACK_AT: Final = 8
_OF_THIS_THREAD: Final = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


def major_faults() -> int:
    """Return how many page faults of this thread have waited for a disk."""
    return resource.getrusage(_OF_THIS_THREAD).ru_majflt


class Residency:
    """The findings of reads about the pages of some tokens. Threads may share it: a lost count does no harm.

    Parameters
    ----------
    num_bytes
        The bytes of the tokens.

    Attributes
    ----------
    in_memory
        Reads take a mapping: a look has found all of its places in memory, and no watched read has met a page that was
        not there.
    waits
        Watched reads that had to wait for a disk.
    """

    __slots__ = (
        "_ahead",
        "_announced",
        "_announcements_until_look",
        "_keeps",
        "_num_bytes",
        "_places",
        "_reads_until_look",
        "_reads_until_watch",
        "_step",
        "in_memory",
        "waits",
    )

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.waits = 0
        self._begin(False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(in_memory={self.in_memory}, waits={self.waits})"

    def _begin(self, in_memory: bool) -> None:
        self.in_memory = in_memory
        #: Whether pages that were read stay in memory; None: not known yet.
        self._keeps: bool | None = None
        self._announcements_until_look = 0
        self._reads_until_look = 0
        self._reads_until_watch = 0
        self._ahead = 0
        self._announced = 0
        self._step = 1
        self._places: list[tuple[weakref.ref[LocalFile], int]] = []

    @property
    def surroundings(self) -> int:
        """A read from the disk takes whole blocks of so many bytes. 1: the bytes that are asked for alone.

        That is so if memory cannot hold the tokens, or pages that were read are lost before they are needed.
        """
        if self._keeps is None:
            self._keeps = self._num_bytes <= memory_limit()
        return SURROUNDINGS if self._keeps else 1

    @property
    def outruns_memory(self) -> bool:
        """Whether memory can hold less than half of the tokens: then few pages are there when they are read again.

        With pages in random order these are 15 of 100, if half of the tokens fit, and 3 of 100, if a quarter does.
        """
        return self._num_bytes > 2 * memory_limit()

    def found(self, in_memory: bool) -> bool:
        """Note and return the result of a look."""
        if in_memory != self.in_memory:
            if in_memory:
                self._begin(True)
            self.in_memory = in_memory
        return in_memory

    def is_look_due(self) -> bool:
        """Return whether a read that was not announced is to look for its pages: the first one, and then a few."""
        if self.in_memory:
            return False
        self._reads_until_look -= 1
        if self._reads_until_look >= 0:
            return False
        self._reads_until_look = READS_UNTIL_LOOK
        return True

    def announce_ahead(self, count: int) -> None:
        """Note that so many runs of tokens were announced some time before they are read."""
        self._ahead += count

    def was_announced(self, count: int) -> bool:
        """Return whether so many runs that are read now were announced before: their pages then prove nothing."""
        if self._ahead < count:
            return False
        self._ahead -= count
        return True

    def is_look_ahead_due(self) -> bool:
        """Return whether an announcement is to look for the pages before."""
        if self.in_memory:
            return False
        self._announcements_until_look -= 1
        if self._announcements_until_look >= 0:
            return False
        self._announcements_until_look = ANNOUNCEMENTS_UNTIL_LOOK
        return True

    def watch(self, read: Callable[..., _Result], *arguments: object) -> _Result:
        """Make a mapped read; if it has to wait for a disk, later ones are not mapped."""
        before = major_faults()
        result = read(*arguments)
        if major_faults() != before:
            self.waits += 1
            self.in_memory = False
        return result

    def watch_some(self, read: Callable[..., _Result], *arguments: object) -> _Result:
        """Make one of many mapped reads; a few of them are watched."""
        self._reads_until_watch -= 1
        if self._reads_until_watch > 0:
            return read(*arguments)
        self._reads_until_watch = WATCHED_ONE_IN
        return self.watch(read, *arguments)

    def announced(self, file: LocalFile, offset: int) -> None:
        """Note that reads of a file were announced, one of them at this offset."""
        self._announced += 1
        if not self._keeps or self._announced % self._step:
            return
        self._places.append((weakref.ref(file), offset))
        if self._announced % (LOOK_BACK_EVERY * self._step) == 0 and len(self._places) > LOOK_BACK_EVERY:
            self._look_back()
        if len(self._places) > MAX_PLACES:  # from the whole time, ever further apart
            del self._places[::2]
            self._step *= 2

    def _look_back(self) -> None:
        """Leave surroundings alone from now on if most of the earliest pages are lost from memory."""
        places = self._places[:LOOKED_BACK_AT]
        del self._places[:LOOKED_BACK_AT]
        lost = sum(not page_in_memory(found.fd, offset) for file, offset in places if (found := file()) is not None)
        if 2 * lost > len(places):
            self._keeps = False
            self._places = []
