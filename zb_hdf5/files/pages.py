"""The pages of files that hold tokens: looks for them in memory, and announcements of reads to the kernel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.ranges import Extents, LocalFile, page_in_memory
from zb_hdf5.files.residency import Residency

#: Tokens that are looked for ahead of their reads, at most.
LOOKED_AHEAD_AT: Final = 32


class Pages:
    """The pages of the files of some tokens. Thread-safe; not pickled: tokens make them when they are asked for.

    A subclass has `ready`, `will_need` and `will_gather`. Here nothing is known of pages, and nothing is announced.

    Parameters
    ----------
    residency
        The findings of reads about the pages.

    Attributes
    ----------
    residency
        As given.
    looks
        Reads of rows look for their pages. The pages of one file of many do not: those of all files do.
    """

    __slots__ = ("looks", "residency")

    def __init__(self, residency: Residency, *, looks: bool = False) -> None:
        self.residency = residency
        self.looks = looks

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.residency!r})"

    def ready(self, start: int) -> bool:
        """Return whether the tokens at `start` can be read without waiting, as far as the system reports it."""
        return False

    def will_need(self, start: int, stop: int) -> None:
        """Announce that consecutive tokens will be read soon; the kernel may begin to fetch them."""

    def will_gather(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Announce that tokens from each of some positions on will be read soon, in any order."""

    def share(self, residency: Residency) -> None:
        """Make these the pages of one file of many, which have a residency together."""

    def are_ready(self, starts: Sequence[int]) -> bool:
        """Return whether the tokens at all of some positions are in memory. Later reads go by that, if any."""
        return not len(starts) or self.residency.found(all(map(self.ready, starts)))

    def expect(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Look for the pages of tokens that are read next, if that is due, and announce them if they may miss."""
        residency = self.residency
        if not starts or residency.was_announced(len(starts)):
            return
        if residency.is_look_due():
            self.are_ready(starts)
        if not residency.in_memory:
            self.will_gather(starts, counts)

    def expect_rows(self, starts: npt.NDArray[np.int64], length: int) -> None:
        """Expect rows of so many tokens, from each of `starts`, int64 `(n,)`, if reads of rows look for their pages."""
        if self.looks and not self.residency.in_memory:
            self.expect(starts.tolist(), [length] * len(starts))

    def announce(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Announce tokens that will be read some steps later, unless a look at some of them finds them in memory."""
        residency = self.residency
        if residency.is_look_ahead_due() and len(starts):
            self.are_ready(starts[:: -(-len(starts) // LOOKED_AHEAD_AT)])
        if not residency.in_memory:
            residency.announce_ahead(len(starts))
            self.will_gather(starts, counts)


class ReadyPages(Pages):
    """The pages of tokens that are computed, or that reads ahead do not give earlier: they count as in memory."""

    __slots__ = ()

    def ready(self, start: int) -> bool:
        return True


class PagesWrapper(Pages):
    """Other pages, with some answers given in another way. It has the residency that they have when it is made.

    Parameters
    ----------
    pages
        The other pages.
    """

    __slots__ = ("pages",)

    def __init__(self, pages: Pages) -> None:
        super().__init__(pages.residency)
        self.pages = pages

    def ready(self, start: int) -> bool:
        return self.pages.ready(start)

    def will_need(self, start: int, stop: int) -> None:
        self.pages.will_need(start, stop)

    def will_gather(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        self.pages.will_gather(starts, counts)

    def share(self, residency: Residency) -> None:
        self.pages.share(residency)


#: The pages of tokens that no file of this machine holds as they are, and of those that count as in memory. All such
#: tokens share them: the findings matter to none.
NO_PAGES: Final = Pages(Residency(0))
READY_PAGES: Final = ReadyPages(Residency(0))


class FilePages(Pages):
    """The pages of the extents of one file of this machine.

    Parameters
    ----------
    file, extents, num_tokens
        As for `FileTokens`.
    itemsize
        The bytes of a token.
    """

    __slots__ = ("_extents", "_file", "_itemsize", "_unit")

    def __init__(self, file: LocalFile, extents: Extents, itemsize: int, num_tokens: int) -> None:
        super().__init__(Residency(num_tokens * itemsize), looks=True)
        self._file = file
        self._extents = extents
        self._itemsize = itemsize
        self._unit = extents.batch_bytes // itemsize

    def share(self, residency: Residency) -> None:
        self.residency = residency
        self.looks = False

    def ready(self, start: int) -> bool:
        return page_in_memory(self._file.fd, self._offset(start))

    def will_gather(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Announce rows, with their surroundings while these are likely to be in memory when they are needed."""
        if not len(starts):
            return
        around = self.residency.surroundings
        fd = self._file.fd
        announce = os.posix_fadvise
        itemsize = self._itemsize
        offset = 0
        for offset, count in zip(self._offsets(starts), counts, strict=True):
            first = offset - offset % around
            num_bytes = offset + count * itemsize - first
            announce(fd, first, num_bytes + -num_bytes % around, os.POSIX_FADV_WILLNEED)
        self.residency.announced(self._file, offset)

    def will_need(self, start: int, stop: int) -> None:
        batch_bytes = self._extents.batch_bytes
        while start < stop:
            number, within = self._extents.locate(start // self._unit)
            _, stride, num_units = self._extents.runs[number]
            # units with padding between them are announced together: a call for each takes four times as long
            together = num_units - within if batch_bytes <= stride < 2 * batch_bytes else 1
            end = min(stop, (start // self._unit + together) * self._unit)
            offset = self._offset(start)
            num_bytes = self._offset(end - 1) + self._itemsize - offset
            os.posix_fadvise(self._file.fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)
            start = end

    def _offsets(self, starts: Sequence[int]) -> list[int]:
        """Return the byte offset of each of some positions."""
        if len(self._extents.runs) > 1:
            return [*map(self._offset, starts)]
        base, stride, _ = self._extents.runs[0]
        itemsize = self._itemsize
        if stride == self._extents.batch_bytes:
            return [base + start * itemsize for start in starts]
        return [base + start // self._unit * stride + start % self._unit * itemsize for start in starts]

    def _offset(self, position: int) -> int:
        index, within = divmod(position, self._unit)
        return self._extents.offset(index) + within * self._itemsize
