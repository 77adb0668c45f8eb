"""The rows of a dataset that a program has written: for all others HDF5 returns a value that nobody has written."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from zb_hdf5.errors import FormatError, Remedy
from zb_hdf5.packages import h5py

#: Rows along the first axis, as runs (first, stop) that ascend and do not touch.
RowRuns: TypeAlias = tuple[tuple[int, int], ...]
#: Runs that a message names.
RUNS_SHOWN: Final = 3


def written_rows(stored: h5py.Dataset, num_rows: int, channel: int | None = None) -> RowRuns | None:
    """Return the rows whose values were all written, as far as the file has a place for it; None: all are.

    A dataset whose bytes have one place is written as a whole: within it nobody can tell.

    Parameters
    ----------
    num_rows
        Rows along the first axis that count.
    channel
        The entry of the second axis that alone counts; None: a row has all entries.
    """
    if not num_rows or not stored.size:
        return None
    if stored.chunks is None:
        is_contiguous = stored.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
        return () if is_contiguous and stored.id.get_offset() is None else None
    grid = [-(-length // size) for length, size in zip(stored.shape, stored.chunks, strict=True)]
    if stored.id.get_num_chunks() >= prod(grid):  # without a list, which takes ten times as long
        return None
    found: list[int] = []
    chunk_rows = stored.chunks[0]
    if channel is None:
        parts = prod(grid[1:])
        stored.id.chunk_iter(lambda chunk: found.append(chunk.chunk_offset[0]))
    else:
        parts = prod(grid[2:])
        place = channel // stored.chunks[1] * stored.chunks[1]
        entries: list[tuple[int, int]] = []
        stored.id.chunk_iter(lambda chunk: entries.append(chunk.chunk_offset[:2]))
        found = [row for row, entry in entries if entry == place]
    rows, counts = np.unique(np.array(found, np.int64), return_counts=True)
    whole = rows[(counts == parts) & (rows < num_rows)]
    if len(whole) == -(-num_rows // chunk_rows):
        return None
    breaks = np.flatnonzero(np.diff(whole) != chunk_rows) + 1
    groups = [group for group in np.split(whole, breaks) if len(group)]
    return tuple((int(group[0]), min(int(group[-1]) + chunk_rows, num_rows)) for group in groups)


def rows_in_both(one: RowRuns | None, other: RowRuns | None) -> RowRuns | None:
    """Return the rows that are in both; None stands for all."""
    if one is None or other is None:
        return other if one is None else one
    found: list[tuple[int, int]] = []
    rest = list(other)
    for first, stop in one:
        found += [(max(first, a), min(stop, b)) for a, b in rest if max(first, a) < min(stop, b)]
        rest = [(a, b) for a, b in rest if b > stop]
    return tuple(found)


def count_of(runs: RowRuns) -> int:
    """Return the number of rows."""
    return sum(stop - first for first, stop in runs)


def is_prefix(runs: RowRuns) -> bool:
    """Return whether the rows are the first ones."""
    return not runs or (len(runs) == 1 and runs[0][0] == 0)


def never_written(path: Path, stored: h5py.Dataset, runs: RowRuns, num_rows: int, remedy: Remedy) -> FormatError:
    """Return the error of a dataset where only the rows in runs were written."""
    noun = "tokens" if stored.ndim == 1 else "rows"
    name = stored.name.removeprefix("/")
    fill = stored.fillvalue if stored.dtype.kind in "biuf" else "of no ids"
    return FormatError(
        f"{path}: {name}: expected {num_rows:,} {noun}, found that {noun} {lacking(runs, num_rows)} were never written",
        remedy=remedy,
        at=fill,
    )


def lacking(runs: RowRuns, num_rows: int) -> str:
    """Return the rows that are not in runs, in words."""
    edges = [0, *chain.from_iterable(runs), num_rows]
    gaps = [(first, stop) for first, stop in zip(edges[::2], edges[1::2], strict=True) if first < stop]
    shown = [f"{first:,} to {stop - 1:,}" if stop - first > 1 else f"{first:,}" for first, stop in gaps[:RUNS_SHOWN]]
    more = len(gaps) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more runs" if more else "")


def runs_between(runs: RowRuns, ends: list[int], first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of the rows that are number `first` to `stop` among the rows of other runs.

    Parameters
    ----------
    ends
        The number of rows in the runs up to each.
    """
    number = bisect_right(ends, first)
    while first < stop:
        begin, end = runs[number]
        skipped = first - (ends[number - 1] if number else 0)
        take = min(stop - first, end - begin - skipped)
        yield begin + skipped, begin + skipped + take
        first += take
        number += 1
