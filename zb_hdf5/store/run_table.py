"""The runs of one column in all shards of an index, as flat arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import ends_of
from zb_hdf5.errors import FormatError
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.files.ranges import Run
from zb_hdf5.spec import INDEX_COLUMN_KEYS
from zb_hdf5.store.parsed_arrays import require_array


class RunTable:
    """The runs of one column in all shards, as flat arrays.

    Parameters
    ----------
    counts
        The number of runs of each shard, shape (shards,); -1: not known.
    runs
        The runs of all shards, shape (runs, 3).
    """

    def __init__(self, counts: npt.NDArray[np.int64], runs: npt.NDArray[np.int64]) -> None:
        self._counts = counts
        self._runs = runs

    @cached_per_process
    def _firsts(self) -> npt.NDArray[np.int64]:
        """The first run of each shard, and the end of the last one's."""
        return ends_of(np.maximum(self._counts, 0))

    @classmethod
    def of(cls, runs_of_shards: list[tuple[Run, ...] | None]) -> Self:
        counts = [-1 if runs is None else len(runs) for runs in runs_of_shards]
        flat = [run for runs in runs_of_shards for run in runs or ()]
        return cls(np.array(counts, np.int64), np.array(flat, np.int64).reshape(-1, 3))

    def __reduce__(self) -> tuple[Any, ...]:
        return RunTable, (self._counts, self._runs)

    def of_shard(self, number: int) -> tuple[Run, ...] | None:
        """Return the runs of a shard; None: not known."""
        if self._counts[number] < 0:
            return None
        return _equal_runs(self._runs[self._firsts[number] : self._firsts[number + 1]].tobytes())

    def overlaps(self, chunk_bytes: int) -> bool:
        """Return whether chunks of this size would overlap in a run."""
        return bool(((self._runs[:, 1] < chunk_bytes) & (self._runs[:, 2] > 1)).any())

    def to_json(self) -> dict[str, list[int]]:
        arrays = (self._counts, *self._runs.T)
        return {key: array.tolist() for key, array in zip(INDEX_COLUMN_KEYS, arrays, strict=True)}

    @classmethod
    def from_json(cls, value: Any, num_shards: int, chunks: npt.NDArray[np.int64] | None, where: str) -> Self:
        """Check and take one element of `columns`.

        Parameters
        ----------
        value
            The parsed element.
        num_shards
            The shards of the index.
        chunks
            The number of chunks that the runs of each shard hold; None: any.
        where
            Begins the message of an error.
        """
        counts, *arrays = (require_array(value, key, int, where) for key in INDEX_COLUMN_KEYS)
        num_runs = int(np.maximum(counts, 0).sum())
        if len(counts) != num_shards or {len(array) for array in arrays} != {num_runs}:
            raise FormatError(f"{where}: expected the runs of each of {num_shards:,} shards")
        found = cls(counts, np.array(arrays).T)
        if counts.min(initial=0) < -1 or found._runs.min(initial=0) < 0:
            raise FormatError(f"{where}: expected natural numbers")
        if chunks is None:
            return found
        before = ends_of(found._runs[:, 2])  # chunks before each run
        sums = np.diff(before[found._firsts])
        differs = (sums != chunks) & (counts >= 0)
        if differs.any():
            shard = int(differs.argmax())
            raise FormatError(
                f"{where}: expected runs of {chunks[shard]:,} batches in shard {shard:,}, found {sums[shard]:,}"
            )
        return found


@lru_cache(64)
def _equal_runs(rows: bytes) -> tuple[Run, ...]:
    """Return the runs of these rows: one object for all shards of a conversion: thousands may be open."""
    return tuple(Run(*run) for run in np.frombuffer(rows, np.int64).reshape(-1, 3).tolist())
