"""The pages of the files of a store, as those of one sequence of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress

from zb_hdf5.errors import ZbError
from zb_hdf5.files.pages import Pages
from zb_hdf5.files.tokens import Wait
from zb_hdf5.store.shard_files import ShardFiles


class ShardPages(Pages):
    """The pages of all files of a store. A file that cannot be opened is an error of the read, not of an announcement.

    Parameters
    ----------
    files
        The files, whose residency is shared by all of them.
    """

    __slots__ = ("_files",)

    def __init__(self, files: ShardFiles) -> None:
        super().__init__(files.residency, looks=files.wait is Wait.LOCAL)
        self._files = files

    def ready(self, start: int) -> bool:
        if self._files.wait is Wait.FAR:  # no server is asked for it
            return False
        try:
            file, within = self._files.locate(start)
        except (ZbError, OSError):  # its read raises this, and waits for nothing
            return True
        return file.pages.ready(within)

    def will_gather(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        edges = self._files.starts
        parts: dict[int, tuple[list[int], list[int]]] = {}
        for start, count in zip(starts, counts, strict=True):
            while count > 0:
                number = bisect_right(edges, start, hi=len(edges) - 1) - 1
                within = start - edges[number]
                take = min(count, edges[number + 1] - start)
                if take < 1:
                    break
                mine = parts.setdefault(number, ([], []))
                mine[0].append(within)
                mine[1].append(take)
                start += take
                count -= take
        with suppress(ZbError, OSError):  # raised by the read
            for number, mine in parts.items():
                self._files.open(number, edges[number] + mine[0][0]).pages.will_gather(*mine)

    def will_need(self, start: int, stop: int) -> None:
        with suppress(ZbError, OSError):  # raised by the read
            while start < stop:
                file, within = self._files.locate(start)
                take = min(stop - start, file.num_tokens - within)
                file.pages.will_need(within, within + take)
                start += take
