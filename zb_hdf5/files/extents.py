"""The ranges of batches in a file.

A batch is an extent: `(file, byte offset, byte count)`. A `.batch` file finds the offset by arithmetic, an HDF5 file in
its chunk index; from here on both are the same.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import BatchIndexError
from zb_hdf5.spec import TokenArray

#: Parts of a file that are mapped one by one: a process may have 65,530 mappings.
MAX_STRETCHES: Final = 512


#: A byte offset, and the array that the bytes from there on fill.
FilePart: TypeAlias = tuple[int, npt.NDArray[Any]]


class Run(NamedTuple):
    """`num_batches` batches at `base`, `base + stride`, ... (byte offsets)."""

    base: int
    stride: int
    num_batches: int


@dataclass(slots=True)
class Extents:
    """Byte offsets of consecutive batches, kept as runs of constant stride."""

    runs: Sequence[Run]
    batch_bytes: int
    _firsts: Sequence[int] = field(init=False, repr=False)
    _byte_ranges: list[tuple[int, int]] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not all(run.num_batches for run in self.runs):
            self.runs = [run for run in self.runs if run.num_batches]
        self._firsts = (0,)  # of perhaps 50,000 open files, nearly all have one run
        if len(self.runs) != 1:
            self._firsts = [0, *accumulate(run.num_batches for run in self.runs)][: len(self.runs)]

    @classmethod
    def from_offsets(cls, offsets: npt.NDArray[np.int64], batch_bytes: int) -> Extents:
        """Compress a list of byte offsets, one per batch in order, into runs."""
        steps = np.diff(offsets)
        changes = (np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist()
        runs: list[Run] = []
        start, n = 0, len(offsets)
        while start < n:
            stride = int(steps[start]) if start < n - 1 else batch_bytes
            next_change = bisect_right(changes, start)
            last = changes[next_change] if next_change < len(changes) else n - 1
            runs.append(Run(int(offsets[start]), stride, last - start + 1))
            start = last + 1
        return cls(runs, batch_bytes)

    @property
    def num_batches(self) -> int:
        return sum(run.num_batches for run in self.runs)

    @property
    def end(self) -> int:
        """First byte offset behind every batch."""
        return max(
            (max(r.base, r.base + (r.num_batches - 1) * r.stride) + self.batch_bytes for r in self.runs), default=0
        )

    @property
    def byte_ranges(self) -> list[tuple[int, int]]:
        """Ranges of batches without a gap between them, in batch order: first byte, and the one behind the last."""
        # none where there are more than MAX_STRETCHES, or several that do not fill whole pages
        if self._byte_ranges is None:
            self._byte_ranges = self._found_byte_ranges()
        return self._byte_ranges

    def _found_byte_ranges(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for base, stride, num_batches in self.runs:
            parts = 1 if stride == self.batch_bytes else num_batches
            if len(found) + parts > MAX_STRETCHES:
                return []
            size = num_batches // parts * self.batch_bytes
            found += [(base + part * stride, base + part * stride + size) for part in range(parts)]
        return found if len(found) == 1 or not any(edge % mmap.PAGESIZE for part in found for edge in part) else []

    def locate(self, index: int) -> tuple[int, int]:
        """Return (run number, index within that run) of a batch, in O(log runs)."""
        number = bisect_right(self._firsts, index) - 1
        return number, index - self._firsts[number]

    def offset(self, index: int) -> int:
        number, within = self.locate(index)
        base, stride, _ = self.runs[number]
        return base + within * stride

    def places_of_tokens(self, start: int, out: TokenArray) -> Iterator[FilePart]:
        """Yield where consecutive tokens, counted over all batches, lie, and the part of 1-D `out` for them."""
        batch_tokens, itemsize = self.batch_bytes // out.itemsize, out.itemsize
        done = 0
        while done < len(out):
            batch, token = divmod(start + done, batch_tokens)
            number, within = self.locate(batch)
            run = self.runs[number]
            rest = run.num_batches - within
            whole = rest if run.stride == self.batch_bytes else min(rest, 1)
            take = min(len(out) - done, whole * batch_tokens - token)
            if take < 1:
                raise BatchIndexError(f"expected tokens within the extents, found {start + done:,} after the last one")
            yield run.base + within * run.stride + token * itemsize, out[done : done + take]
            done += take

    def places_of_rows(self, starts: npt.NDArray[np.int64], out: TokenArray) -> Iterator[FilePart]:
        """Yield where rows of tokens lie, and the part of `out` for those that follow each other."""
        follows = np.diff(starts) == out.shape[1]
        firsts = [0, *(np.flatnonzero(~follows) + 1).tolist()] if len(starts) else []
        for first, stop in zip(firsts, [*firsts[1:], len(starts)], strict=True):
            yield from self.places_of_tokens(int(starts[first]), out[first:stop].reshape(-1))
