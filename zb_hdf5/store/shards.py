"""The tokens of a store, whose files are read as one sequence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import BatchIndexError
from zb_hdf5.files.checked import Checked, take_units
from zb_hdf5.files.paths import files_at_hand
from zb_hdf5.files.tokens import StoredIds, TokenRun, Tokens, Wait, gather_from, read_together
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.shard_files import ShardFiles
from zb_hdf5.store.shard_pages import ShardPages

#: The part of a read that is in one file.
_Part = TypeVar("_Part")
#: A row of so many bytes is read into its place by a call of its own: to put rows into order would copy them once more.
LARGE_ROW_BYTES: Final = 32 << 10


class Sharded(Tokens):
    """The tokens of the files of a store, or the values of a field, one file after the other. See `Tokens`.

    Parameters
    ----------
    files
        The files, which close with these tokens.
    """

    __slots__ = ("dtype", "files", "name", "pages", "unit", "wait")
    files: ShardFiles
    identity = ()

    def __init__(self, files: ShardFiles) -> None:
        meta = files.index.meta
        self.files = files
        self.dtype = meta.dtype
        self.unit = meta.batch_tokens
        self.name = files.name
        self.wait = files.wait
        self.pages = ShardPages(files)

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self.files.starts[-1]  # more than before, in a store that grows

    @property
    def access(self) -> str:  # type: ignore[override]
        return self.files.access

    def read(self, runs: Iterable[TokenRun]) -> None:
        runs = list(runs)
        files = self.files
        starts = files.starts
        if len(runs) == 1:  # a batch of one file: a third of the time
            start, out = runs[0]
            number = bisect_right(starts, start) - 1
            if start < starts[-1] and start + len(out) <= starts[number + 1]:
                file = files.known.get(number) or files.open(number, start)
                file.read([(start - starts[number], out)])
                return
        parts: dict[int, list[TokenRun]] = {}
        firsts: dict[int, int] = {}
        for start, out in runs:
            if not 0 <= start <= starts[-1] - len(out):
                raise BatchIndexError(
                    f"{self.name}: expected tokens up to {starts[-1]:,}, found {start:,} to {start + len(out):,}"
                )
            done = 0
            while done < len(out):
                number = bisect_right(starts, start + done) - 1
                within = start + done - starts[number]
                left = starts[number + 1] - start - done
                parts.setdefault(number, []).append((within, out[done : done + left]))
                firsts.setdefault(number, start + done)
                done += min(left, len(out) - done)
        for some in self._groups([*parts]):
            self._read_parts([(files.open(number, firsts[number]), parts[number]) for number in some])

    def _read_parts(self, reads: Sequence[tuple[Tokens, list[TokenRun]]]) -> None:
        """Read runs of some files, of objects at the same time."""
        is_done = len(reads) > 1 and not self.files.compares_all and read_together(reads)
        for file, runs in reads:
            if not is_done:
                file.read(runs)
            elif isinstance(file, Checked):
                file.compare(runs)

    def _groups(self, parts: Sequence[_Part]) -> Iterator[Sequence[_Part]]:
        """Yield the parts of a read, one of each file, whose files are open together: all, if these are objects."""
        most = len(parts) if self.wait is Wait.FAR else files_at_hand(len(parts))
        for start in range(0, len(parts), max(1, most)):
            yield parts[start : start + most]

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        self.pages.expect_rows(starts, out.shape[1])
        files = self.files
        if len(files.firsts) == 1:
            files.open(0, int(starts[0]) if len(starts) else 0).gather(starts, out)
            return
        is_compared = files.compares_all and out.shape[1] == self.unit and self._are_units(starts)
        flat = files.side_by_side() if is_compared else self.flat()
        if flat is not None:
            files.residency.watch_some(self._take_units if is_compared else gather_from, flat, starts, out)
            return
        order = starts.argsort()  # the rows of one file then follow each other
        ascending = starts[order]
        if files.compares_all and self.wait is Wait.LOCAL and out.itemsize * out.shape[1] >= LARGE_ROW_BYTES:
            self.read(zip(ascending.tolist(), map(out.__getitem__, order.tolist()), strict=True))
            return
        rows = np.empty_like(out)
        numbers = files.firsts.searchsorted(ascending, side="right") - 1
        crossing = ascending + out.shape[1] > np.array(files.starts)[numbers + 1]
        parts: list[tuple[int, int, int]] = []
        stop = 0
        for (number, crosses), group in groupby(zip(numbers.tolist(), crossing.tolist(), strict=True)):
            start = stop
            stop += len(list(group))
            if crosses:
                self.read(zip(ascending[start:stop].tolist(), rows[start:stop], strict=True))
            else:
                parts.append((number, start, stop))
        for together in self._groups(parts):
            self._gather_parts(together, ascending, rows)
        out[order] = rows
        self.flat()  # for the next gather

    def _are_units(self, starts: npt.NDArray[np.int64]) -> bool:
        """Return whether positions, and all files, begin with a unit."""
        return not ((starts % self.unit).any() or (self.files.firsts % self.unit).any())

    def _take_units(self, flat: TokenArray, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Copy units from the mapping of all files, and compare each as its file does it."""
        take_units(flat, starts // self.unit, out, self._compare_crc32)

    def _compare_crc32(self, numbers: npt.NDArray[np.int64], found: Sequence[int]) -> None:
        """Compare the crc32 of units that were read, which have these numbers among all."""
        crc32 = np.array(found, np.uint32)
        firsts = self.files.firsts // self.unit
        of_files = firsts.searchsorted(numbers, side="right") - 1
        for number in np.unique(of_files).tolist():
            file = self.files.open(number, self.files.starts[number])
            if isinstance(file, Checked):
                mine = of_files == number
                file.compare_crc32(numbers[mine] - firsts[number], crc32[mine].tolist())

    def _gather_parts(
        self, parts: Iterable[tuple[int, int, int]], starts: npt.NDArray[np.int64], rows: TokenArray
    ) -> None:
        """Fill rows from some files: a part is the number of a file, and the first row and the end of its rows."""
        files = self.files
        reads = [
            (files.open(number, int(starts[first])), starts[first:stop] - files.starts[number], rows[first:stop])
            for number, first, stop in parts
        ]
        rows_of = [(file, zip(within.tolist(), some, strict=True)) for file, within, some in reads]
        if files.compares_all or not read_together(rows_of):
            for file, within, some in reads:
                file.gather(within, some)

    def flat(self) -> TokenArray | None:
        """Return all tokens of few files as one view: mapped side by side, once all are open; else None."""
        if len(self.files.firsts) == 1:
            return self.files.open(0, 0).flat() if self.num_tokens else None
        return None if self.files.compares_all else self.files.side_by_side()

    def stored_ids(self) -> StoredIds | None:
        return self.files.open(0, 0).stored_ids() if len(self.files.firsts) == 1 else super().stored_ids()

    def view(self, start: int, count: int, private: bool = False) -> TokenArray | None:
        files = self.files
        starts = files.starts
        if start >= starts[-1]:
            return None
        number = bisect_right(starts, start) - 1
        if start + count > starts[number + 1]:
            return None
        file = files.known.get(number) or files.open(number, start)
        return file.view(start - starts[number], count, private)

    def close(self) -> None:
        self.files.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Sharded, (self.files,)
