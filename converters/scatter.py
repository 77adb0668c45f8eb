"""A permutation of more records than memory holds, in two sequential passes.

Stored position p gets source record `order.indices(p)`. The positions are cut into buckets, the source into runs; a
bucket and a run each fit in memory. The first pass reads a run, groups its records by bucket, and writes them to a run
file. The second pass reads a bucket's segment from every run file. In run order those records come by increasing source
number, so the row of a position is the rank of its source number among those of the bucket: nothing else is stored.

Runs and buckets are independent: any process can do any of them. Run files live within one run of one program and are
made again after a kill.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, BatchIndexError, ChecksumError, IncompleteError
from zb_hdf5.files.digests import crc32_of
from zb_hdf5.files.publishing import write_fully
from zb_hdf5.files.ranges import read_fully
from zb_hdf5.loaders.order import GlobalOrder
from zb_hdf5.spec import SHARD_PREFIX, TokenArray

#: What is ordered and written at once.
GROUP_BYTES: Final = 4 << 20
#: Memory of a process besides its run or bucket: Python, numpy and h5py, groups on their way, the order's own arrays.
PROCESS_BYTES: Final = 96 << 20
#: Records that come with a run or bucket: number, rank and bucket of each, and what numpy needs to sort them.
BYTES_PER_RECORD: Final = 48

#: Fills its second argument with source records, from the number in its first.
ReadRecords = Callable[[int, TokenArray], None]


@dataclass(frozen=True)
class ScatterPlan:
    """How records are cut into runs and buckets.

    Attributes
    ----------
    order
        Stored position -> source record.
    record_tokens, dtype
        Of one record as stored.
    run_records
        Source records in a run; the last one has fewer.
    buckets
        (start, stop) in stored positions, ascending. Records of other positions are left out.
    """

    order: GlobalOrder
    record_tokens: int
    dtype: np.dtype[Any]
    run_records: int
    buckets: tuple[tuple[int, int], ...]

    @classmethod
    def fit(
        cls,
        order: GlobalOrder,
        record_tokens: int,
        dtype: np.dtype[Any],
        ranges: list[tuple[int, int]],
        memory_bytes: int,
    ) -> ScatterPlan:
        """Cut so that one process stays within `memory_bytes`.

        Parameters
        ----------
        ranges
            (start, stop) of stored positions, ascending, such as shards: a bucket lies in one of them.

        Raises
        ------
        ArgumentError
            If there is no room for one record beside the program itself.
        """
        record_bytes = record_tokens * dtype.itemsize
        fitting = (memory_bytes - PROCESS_BYTES) // (record_bytes + BYTES_PER_RECORD)
        if fitting < 1:
            raise ArgumentError(
                f"memory: {memory_bytes:,} bytes per process are too little: the program itself takes "
                f"{PROCESS_BYTES:,}; give it more memory, or use fewer processes"
            )
        buckets: list[tuple[int, int]] = []
        for start, stop in ranges:
            number = -(-(stop - start) // fitting)
            buckets += pairwise(start + k * (stop - start) // number for k in range(number + 1))
        return cls(order, record_tokens, dtype, min(fitting, order.n), tuple(buckets))

    @property
    def num_runs(self) -> int:
        return -(-self.order.n // self.run_records)

    @property
    def record_bytes(self) -> int:
        return self.record_tokens * self.dtype.itemsize

    @property
    def temp_bytes(self) -> int:
        """Bytes of all run files."""
        num_records = sum(stop - start for start, stop in self.buckets)
        return num_records * self.record_bytes + self.num_runs * self.table_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the table at the end of a run file."""
        return 8 * (2 * len(self.buckets) + 1)

    def records_in(self, run: int) -> int:
        """Return how many source records a run has."""
        return min(self.run_records, self.order.n - run * self.run_records)

    @cached_property
    def bucket_records(self) -> int:
        """Records of the largest bucket."""
        return max(stop - start for start, stop in self.buckets)

    def run_path(self, folder: Path, run: int) -> Path:
        """Return the file of a run: its records by bucket, where each bucket begins and the crc32 of each (u64)."""
        return folder / f"{SHARD_PREFIX}run-{run:06}"


#: The records of a run, which of them to write one after the other, and where each bucket begins there.
_Run: TypeAlias = tuple[TokenArray, npt.NDArray[np.int64], npt.NDArray[np.uint64]]


def scatter_run(plan: ScatterPlan, run: int, read: ReadRecords, folder: Path) -> None:
    """Read a run of the source, and write its records to a file, grouped by bucket."""
    _write_run(plan.run_path(folder, run), plan, *_read_run(plan, run, read))


def _read_run(plan: ScatterPlan, run: int, read: ReadRecords) -> _Run:
    first, count = run * plan.run_records, plan.records_in(run)
    records = np.empty((count, plan.record_tokens), plan.dtype)
    step = max(1, GROUP_BYTES // plan.record_bytes)
    for start in range(0, count, step):
        read(first + start, records[start : start + step])
    buckets = _buckets_of(plan, plan.order.positions(np.arange(first, first + count)))
    by_bucket = np.argsort(buckets, kind="stable")[np.count_nonzero(buckets < 0) :]
    starts = np.zeros(len(plan.buckets) + 1, dtype="<u8")
    np.cumsum(np.bincount(buckets[by_bucket], minlength=len(plan.buckets)), out=starts[1:])
    return records, by_bucket, starts


def _write_run(
    path: Path, plan: ScatterPlan, records: TokenArray, by_bucket: npt.NDArray[np.int64], starts: npt.NDArray[np.uint64]
) -> None:
    step = max(1, GROUP_BYTES // plan.record_bytes)
    group = np.empty((min(len(by_bucket), step), plan.record_tokens), plan.dtype)
    crc32 = np.zeros(len(plan.buckets), dtype="<u8")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for bucket, (first, stop) in enumerate(pairwise(starts.tolist())):
            for start in range(first, stop, step):
                chosen = by_bucket[start : min(start + step, stop)]
                # "clip" lets numpy write into `out` without a buffer
                ordered = records.take(chosen, axis=0, out=group[: len(chosen)], mode="clip")
                crc32[bucket] = crc32_of(ordered, int(crc32[bucket]))
                write_fully(fd, ordered, start * plan.record_bytes)
        write_fully(fd, np.concatenate([starts, crc32]), len(by_bucket) * plan.record_bytes)
    finally:
        os.close(fd)


def _buckets_of(plan: ScatterPlan, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bucket of each stored position, -1 for none."""
    limits = np.array(plan.buckets)
    buckets: npt.NDArray[np.int64] = np.searchsorted(limits[:, 0], positions, side="right") - 1
    buckets[positions >= limits[buckets, 1]] = -1
    return buckets


class BucketReader:
    """Reads records in stored order from the run files, a bucket at a time. Not thread-safe; picklable.

    Raises
    ------
    IncompleteError
        If a run file is not as long as it says, or lacks records.
    """

    def __init__(self, plan: ScatterPlan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._number, self._ranks = -1, np.empty(0, np.int64)
        self._records = np.empty((0, plan.record_tokens), plan.dtype)

    def read_into(self, first: int, rows: TokenArray) -> None:
        """Fill `rows`, shape `(count, L)`, with the records of consecutive stored positions."""
        done = 0
        while done < len(rows):
            position = first + done
            bucket = bisect_right(self._plan.buckets, (position, self._plan.order.n + 1)) - 1
            if bucket < 0 or position >= self._plan.buckets[bucket][1]:
                raise BatchIndexError(f"{self._folder}: no bucket has position {position:,}")
            if self._number != bucket:
                self._load(bucket)
            start = position - self._plan.buckets[bucket][0]
            ranks = self._ranks[start : start + len(rows) - done]
            # "clip" lets numpy write into `out` without a buffer
            self._records.take(ranks, axis=0, out=rows[done : done + len(ranks)], mode="clip")
            done += len(ranks)

    def _load(self, bucket: int) -> None:
        """Read a bucket, into the buffer of the one before it, and rank its records by their source numbers."""
        plan = self._plan
        start, stop = plan.buckets[bucket]
        self._number, done = -1, 0
        if not len(self._records):
            self._records = np.empty((plan.bucket_records, plan.record_tokens), plan.dtype)
        for run in range(plan.num_runs):
            done += self._read_segment(plan.run_path(self._folder, run), bucket, self._records[done : stop - start])
        if done != stop - start:
            raise IncompleteError(
                f"{self._folder}: expected {stop - start:,} records in bucket {bucket}, found {done:,}"
            )
        sources = plan.order.indices(np.arange(start, stop))
        self._ranks = np.empty(len(sources), np.int64)
        self._ranks[np.argsort(sources)] = np.arange(len(sources))
        self._number = bucket

    def _read_segment(self, path: Path, bucket: int, rows: TokenArray) -> int:
        """Read the records of a run for one bucket into the first of `rows`, and return their number."""
        plan, num_buckets = self._plan, len(self._plan.buckets)
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            table_offset = size - plan.table_bytes
            if table_offset < 0:
                raise IncompleteError(f"{path}: cut short: {size:,} bytes; run the conversion again")

            def entry(number: int) -> int:
                return int.from_bytes(os.pread(file.fileno(), 8, table_offset + 8 * number), "little")

            num_records, first, stop = entry(num_buckets), entry(bucket), entry(bucket + 1)
            crc32 = entry(num_buckets + 1 + bucket)
            if num_records * plan.record_bytes != table_offset:
                raise IncompleteError(f"{path}: cut short or damaged: {size:,} bytes; run the conversion again")
            if not 0 <= stop - first <= len(rows):
                raise IncompleteError(f"{path}: damaged: {stop - first:,} records for bucket {bucket}; run it again")
            part = rows[: stop - first]
            if read_fully(file.fileno(), part, first * plan.record_bytes) < part.nbytes:
                raise IncompleteError(f"{path}: became shorter while it was read; run the conversion again")
        if crc32_of(rows[: stop - first]) != crc32:
            raise ChecksumError(
                f"{path}: the disk did not keep the records of bucket {bucket}; run the conversion again"
            )
        return stop - first

    def __reduce__(self) -> tuple[type[BucketReader], tuple[ScatterPlan, Path]]:
        return BucketReader, (self._plan, self._folder)
