"""The tokens of many files as one sequence; a file is opened when it is first read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.file_tokens import FileTokens, ObjectTokens
from zb_hdf5.files.mapping import map_side_by_side
from zb_hdf5.files.objects import read_objects
from zb_hdf5.files.open_files import OpenFiles
from zb_hdf5.files.tokens import TokenRun, Tokens, Wait, gather_from
from zb_hdf5.spec import TokenArray

#: Files that are mapped side by side at most: the size of each is asked for before each gather.
MAX_JOINED: Final = 64

#: Opens a file by its number; the second argument is a position in it that is about to be read. Picklable.
OpenTokens = Callable[[int, int], Tokens]


class Sharded(Tokens):
    """The tokens of many files, one after the other. See `Tokens`."""

    def __init__(
        self,
        counts: Iterable[int],
        open_file: OpenTokens,
        *,
        dtype: np.dtype[Any],
        unit: int,
        name: str,
        access: str | None,
        wait: Wait,
    ) -> None:
        self._open_file = open_file
        self.dtype, self.unit, self.name, self._access, self.wait, self.identity = dtype, unit, name, access, wait, ()
        self.number(counts)
        self._reset()

    def number(self, counts: Iterable[int]) -> None:
        """Give every token its position, from the counts of the files; a store that grows does so again."""
        self._starts = [0, *accumulate(counts)]
        self._firsts = np.array(self._starts[:-1], np.int64)
        self.num_tokens = self._starts[-1]

    def _reset(self) -> None:
        joined = self._joined = dict[int, tuple[TokenArray, list[FileTokens]] | None]()  # by the number of files
        far = self.wait is Wait.FAR
        # a file that was let go would stay open in a mapping of all
        self._files: OpenFiles[Tokens] = OpenFiles(self._access or "auto", lambda *_: joined.clear(), far=far)
        self._known = self._files.known

    @property
    def access(self) -> str:  # type: ignore[override]
        if self._access is None:
            first = next((k for k in range(len(self._firsts)) if self._starts[k] < self._starts[k + 1]), 0)
            self._access = self.open_file(first, self._starts[first]).access
        return self._access

    @property
    def starts(self) -> list[int]:
        return self._starts

    @property
    def known(self) -> dict[int, Tokens]:
        return self._known

    def open_file(self, number: int, start: int) -> Tokens:
        """Return a file, of which the token at position `start` of all is about to be read."""
        known = self._known.get(number)
        return known or self._files.open(number, lambda number: self._open_file(number, start - self._starts[number]))

    def _locate(self, start: int) -> tuple[Tokens, int]:
        """Return the file of a token, and its position there."""
        number = bisect_right(self._starts, start, hi=len(self._starts) - 1) - 1
        return self.open_file(number, start), start - self._starts[number]

    def read(self, runs: Iterable[TokenRun]) -> None:
        runs = list(runs)
        if len(runs) == 1:  # a batch of one file: a third of the time
            start, out = runs[0]
            number = bisect_right(self._starts, start) - 1
            if start < self._starts[-1] and start + len(out) <= self._starts[number + 1]:
                file = self._known.get(number) or self.open_file(number, start)
                file.read([(start - self._starts[number], out)])
                return
        parts: dict[int, list[TokenRun]] = {}
        firsts: dict[int, int] = {}
        for start, out in runs:
            done = 0
            while done < len(out):
                number = bisect_right(self._starts, start + done) - 1
                within, room = start + done - self._starts[number], self._starts[number + 1] - start - done
                parts.setdefault(number, []).append((within, out[done : done + room]))
                firsts.setdefault(number, start + done)
                done += min(room, len(out) - done)
        found = [(self.open_file(number, firsts[number]), mine) for number, mine in parts.items()]
        self._read_files(found)

    def _read_files(self, reads: Sequence[tuple[Tokens, list[TokenRun]]]) -> None:
        """Read from several files; from several objects at the same time."""
        objects = [file for file in (each.unchecked() for each, _ in reads) if isinstance(file, ObjectTokens)]
        if len(reads) > 1 and len(objects) == len(reads):
            read_objects([file.ranges_of(runs) for file, (_, runs) in zip(objects, reads, strict=True)])
            for file, runs in reads:
                file.compare(runs)
            return
        for file, runs in reads:
            file.read(runs)

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        if len(self._firsts) == 1:
            self.open_file(0, int(starts[0]) if len(starts) else 0).gather(starts, out)
            return
        flat = self.flat()
        if flat is not None:
            gather_from(flat, starts, out)
            return
        order = starts.argsort()  # the rows of one file then follow each other
        ascending, rows, length = starts[order], np.empty_like(out), out.shape[1]
        numbers = self._firsts.searchsorted(ascending, side="right") - 1
        crossing = ascending + length > np.array(self._starts)[numbers + 1]
        reads: list[tuple[Tokens, npt.NDArray[np.int64], TokenArray]] = []
        stop = 0
        for (number, crosses), group in groupby(zip(numbers.tolist(), crossing.tolist(), strict=True)):
            start, stop = stop, stop + len(list(group))
            if crosses:
                self.read(zip(ascending[start:stop].tolist(), rows[start:stop], strict=True))
            else:
                file = self.open_file(number, int(ascending[start]))
                reads.append((file, ascending[start:stop] - self._starts[number], rows[start:stop]))
        self._gather_files(reads)
        out[order] = rows
        self.flat()  # for the next gather

    @staticmethod
    def _gather_files(reads: list[tuple[Tokens, npt.NDArray[np.int64], TokenArray]]) -> None:
        objects = [file for file in (each.unchecked() for each, _, _ in reads) if isinstance(file, ObjectTokens)]
        if len(objects) == len(reads):
            runs = (zip(starts.tolist(), rows, strict=True) for _, starts, rows in reads)
            read_objects([file.ranges_of(mine) for file, mine in zip(objects, runs, strict=True)])
            return
        for file, starts, rows in reads:
            file.gather(starts, rows)

    def flat(self) -> TokenArray | None:
        """Return all tokens of few files as one view: mapped side by side, once all are open; else None."""
        count = len(self._firsts)
        if count == 1 or count > MAX_JOINED or len(self._known) < count:
            return super().flat() if count == 1 else None
        if count not in self._joined:
            self._joined[count] = self._join([self._known[number] for number in range(count)])
        joined = self._joined[count]
        if joined is None:
            return None
        for file in joined[1]:
            file.file.require_whole()
        return joined[0]

    def _join(self, known: Sequence[Tokens]) -> tuple[TokenArray, list[FileTokens]] | None:
        """Map the files side by side; None if one may not be mapped, or is no whole pages."""
        files = [file for file in (each.unchecked() for each in known) if isinstance(file, FileTokens)]
        places = [file.places() for file in files]
        if len(files) < len(known) or not all(places) or any(file.dtype != self.dtype for file in files):
            return None
        tokens = map_side_by_side(list(chain.from_iterable(places)))
        if tokens is None or tokens.nbytes != self.num_tokens * self.dtype.itemsize:
            return None
        return tokens.view(self.dtype), files

    def view(self, start: int, count: int, private: bool = False) -> TokenArray | None:
        if start >= self.num_tokens:
            return None
        file, within = self._locate(start)
        return file.view(within, count, private) if within + count <= file.num_tokens else None

    def ready(self, starts: npt.NDArray[np.int64]) -> bool:
        located = map(self._locate, starts.tolist())
        return all(file.ready(np.array([within])) for file, within in located)

    def will_need(self, start: int, stop: int) -> None:
        while start < stop:
            file, within = self._locate(start)
            take = min(stop - start, file.num_tokens - within)
            file.will_need(within, within + take)
            start += take

    def close(self) -> None:
        for file in self._files.files().values():
            file.close()
        self._access = self._access or "auto"  # nothing is opened any more to tell
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_files", "_known", "_joined")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
