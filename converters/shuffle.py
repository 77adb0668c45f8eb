"""Shuffled records on their way from the source to their shards: gathered one by one, or in two sequential passes.

In two passes, stored position p gets source record `order.indices(p)`. The positions are cut into buckets, the source
into runs; a bucket and a run each fit in memory. The first pass reads a run, groups its records by bucket, and writes
them to a run file. The second pass reads a bucket's segment from every run file. In run order those records come by
increasing source number, so the row of a position is the rank of its source number in the bucket: nothing
else is stored. Runs and buckets are independent: any process can do any of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError
from zb_hdf5.console import counted, format_bytes
from zb_hdf5.converters.batch_source import GROUPS, BatchSource, batch_bytes
from zb_hdf5.converters.engines import OnProgress, Workers, no_progress
from zb_hdf5.errors import BatchIndexError, ChecksumError, IncompleteError
from zb_hdf5.field import Field
from zb_hdf5.files.checked import GROUP_BYTES, crc32_of
from zb_hdf5.files.publishing import scratch_directory, write_fully
from zb_hdf5.files.ranges import LocalFile
from zb_hdf5.loaders.order import Permutation
from zb_hdf5.spec import SHARD_PREFIX, TokenArray

PROBES: Final = 64
#: Memory of each process that gathers directly, measured: one 39 MiB; two, and what starts them, 119 MiB.
DIRECT_BYTES: Final = 60 << 20
#: Sources with a smaller share in the page cache count as cold.
WARM_SHARE: Final = 0.9
#: Disks that answer a random read faster are better read at random than written and read once more.
FAST_READ_S: Final = 1e-3
#: Memory of a process besides its run or bucket: Python, numpy and h5py, groups on their way, the order's own arrays.
PROCESS_BYTES: Final = 96 << 20
#: Records that come with a run or bucket: number, rank and bucket of each, and what numpy needs to sort them.
BYTES_PER_RECORD: Final = 48


def _token_bytes(dtype: np.dtype[Any], fields: Sequence[Field]) -> int:
    """Return the bytes of a token with its values."""
    return dtype.itemsize + sum(each.dtype.itemsize * each.size for each in fields)


@dataclass(frozen=True)
class ScatterPlan:
    """The runs and buckets of records."""

    order: Permutation  # stored position -> source record
    record_tokens: int
    dtype: np.dtype[Any]
    run_records: int  # source records in a run; the last one has fewer
    buckets: tuple[tuple[int, int], ...]  # ascending (start, stop) of stored positions; all other records are left out
    fields: tuple[Field, ...] = ()  # whose values follow the tokens of each record

    @classmethod
    def fit(
        cls,
        order: Permutation,
        record_tokens: int,
        dtype: np.dtype[Any],
        ranges: list[tuple[int, int]],
        memory_bytes: int,
        fields: tuple[Field, ...] = (),
    ) -> ScatterPlan:
        """Return the plan with the largest runs and buckets with which one process stays within its memory.

        Parameters
        ----------
        order
            Stored position -> source record.
        record_tokens, dtype
            The size of a record.
        ranges
            Ascending (start, stop) of stored positions; each bucket is inside of one of them.
        memory_bytes
            Memory of the process.
        fields
            The fields of the tokens.
        """
        record_bytes = record_tokens * _token_bytes(dtype, fields)
        fitting = (memory_bytes - PROCESS_BYTES) // (record_bytes + BYTES_PER_RECORD)
        # no more than lets each bucket read a group from each run: touching memory for the first time takes long
        fitting = min(fitting, math.isqrt(order.n * max(1, GROUP_BYTES // record_bytes)) + 1)
        if fitting < 1:
            raise ArgumentError(
                f"memory: {format_bytes(memory_bytes)} per process is too little: the program itself takes "
                f"{format_bytes(PROCESS_BYTES)}, and a record has to fit; give it more memory, or use fewer processes",
                options=["memory"],
            )
        buckets: list[tuple[int, int]] = []
        for start, stop in ranges:
            number = -(-(stop - start) // fitting)
            buckets += pairwise(start + k * (stop - start) // number for k in range(number + 1))
        return cls(order, record_tokens, dtype, min(fitting, order.n), tuple(buckets), fields)

    @property
    def num_runs(self) -> int:
        return -(-self.order.n // self.run_records)

    @property
    def record_bytes(self) -> int:
        return self.record_tokens * _token_bytes(self.dtype, self.fields)

    @property
    def columns(self) -> dict[str, tuple[np.dtype[Any], slice]]:
        """The dtype of the tokens ("") and of each field, and the place of its values in the bytes of a record."""
        found = {}
        end = 0
        for name, dtype, size in (("", self.dtype, 1), *((each.name, each.dtype, each.size) for each in self.fields)):
            start = end
            end += self.record_tokens * size * dtype.itemsize
            found[name] = dtype, slice(start, end)
        return found

    @property
    def temp_bytes(self) -> int:
        """Bytes of all run files."""
        num_records = sum(stop - start for start, stop in self.buckets)
        return num_records * self.record_bytes + self.num_runs * 8 * (2 * len(self.buckets) + 1)

    def records_in(self, run: int) -> int:
        """Return how many source records a run has."""
        return min(self.run_records, self.order.n - run * self.run_records)

    def run_path(self, folder: Path, run: int) -> Path:
        """Return the file of a run: its records by bucket, where each bucket begins and the crc32 of each (u64)."""
        return folder / f"{SHARD_PREFIX}run-{run:06}"


@dataclass(frozen=True)
class RunTask:
    """A run of the first pass, picklable."""

    source: BatchSource
    plan: ScatterPlan
    run: int
    path: Path

    @property
    def amount(self) -> int:
        return self.plan.records_in(self.run) * self.plan.record_bytes

    def amount_done(self) -> int:
        """Count the bytes of a run that another process has begun to write."""
        return self.amount if self.path.exists() else 0


def scatter_run(task: RunTask, progress: OnProgress = no_progress) -> None:
    """Read a run of the source, and write its records to a file, grouped by bucket."""
    plan = task.plan
    first = task.run * plan.run_records
    count = plan.records_in(task.run)
    records = np.empty((count, plan.record_bytes), np.uint8)
    step = max(1, GROUP_BYTES // plan.record_bytes)
    for start in range(0, count, step):
        _read_run(task, first + start, records[start : start + step])
    positions = plan.order.positions(np.arange(first, first + count))
    limits = np.array(plan.buckets)
    buckets = limits[:, 0].searchsorted(positions, side="right") - 1
    buckets[positions >= limits[buckets, 1]] = -1  # in none
    by_bucket = np.argsort(buckets, kind="stable")[np.count_nonzero(buckets < 0) :]
    starts = np.zeros(len(plan.buckets) + 1, "<u8")
    crc32 = np.zeros(len(plan.buckets), "<u8")
    np.cumsum(np.bincount(buckets[by_bucket], minlength=len(plan.buckets)), out=starts[1:])
    group = np.empty((min(len(by_bucket), step), plan.record_bytes), np.uint8)
    with open(task.path, "wb", buffering=0) as file:
        for bucket, (begin, end) in enumerate(pairwise(starts.tolist())):
            for start in range(begin, end, step):
                chosen = by_bucket[start : min(start + step, end)]
                # "clip" lets numpy write into `out` without a buffer
                ordered = records.take(chosen, axis=0, out=group[: len(chosen)], mode="clip")
                crc32[bucket] = crc32_of(ordered, int(crc32[bucket]))
                write_fully(file.fileno(), ordered, start * plan.record_bytes)
        write_fully(file.fileno(), np.concatenate([starts, crc32]), len(by_bucket) * plan.record_bytes)
    progress(task.amount)


def _read_run(task: RunTask, first: int, records: npt.NDArray[np.uint8]) -> None:
    """Read consecutive records of the source, the values of their fields after the tokens of each."""
    for name, (dtype, place) in task.plan.columns.items():
        if not task.plan.fields:  # in place
            task.source.read_records(first, records.view(dtype))
            return
        values = np.empty((len(records), (place.stop - place.start) // dtype.itemsize), dtype)
        task.source.read_records(first, values, name)
        records[:, place] = values.view(np.uint8)


class ScatteredBatches(BatchSource):
    """A step of a conversion: the batches of a source, from the run files of its records, a bucket at a time.

    Parameters
    ----------
    source
        The source that was scattered.
    plan
        Its runs and buckets.
    folder
        The folder of the run files.
    """

    def __init__(self, source: BatchSource, plan: ScatterPlan, folder: Path) -> None:
        for name in BatchSource.__annotations__:
            setattr(self, name, getattr(source, name))
        self._plan = plan
        self._folder = folder
        self._number = -1  # of the bucket in memory
        self._ranks = np.empty(0, np.int64)
        self._records = np.empty((0, plan.record_bytes), np.uint8)

    def read_into(self, start: int, out: TokenArray) -> None:
        self.read_batches(start, out, {})

    def read_batches(self, start: int, tokens: TokenArray, fields: Mapping[str, TokenArray]) -> None:
        paddings = {"": np.asarray(self.pad_id)} | {each.name: each.padding for each in self.meta.fields}
        first = start * self.meta.batch_size
        num_rows = len(tokens) * self.meta.batch_size
        count = min(num_rows, self._plan.order.n - first)
        rows = {
            name: values.reshape(num_rows, math.prod(values.shape[2:]))
            for name, values in {"": tokens, **fields}.items()
        }
        for name, values in rows.items():
            values[count:] = paddings[name]
        done = 0
        while done < count:
            ranks = self._ranks_from(first + done)[: count - done]
            for name, values in rows.items():
                self._take(name, ranks, values[done : done + len(ranks)])
            done += len(ranks)

    def _ranks_from(self, position: int) -> npt.NDArray[np.int64]:
        """Load the bucket of a position, and return the ranks of its records from there on."""
        buckets = self._plan.buckets
        bucket = bisect_right(buckets, (position, self._plan.order.n + 1)) - 1
        if bucket < 0 or position >= buckets[bucket][1]:
            raise BatchIndexError(f"{self._folder}: no bucket has position {position:,}")
        if self._number != bucket:
            self._load(bucket)
        return self._ranks[position - buckets[bucket][0] :]

    def _take(self, name: str, ranks: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out` with the values of records of the bucket."""
        dtype, place = self._plan.columns[name]
        if self._plan.fields:
            out[...] = self._records[ranks, place].view(dtype)
        else:  # "clip" lets numpy write into `out` without a buffer
            self._records.view(dtype).take(ranks, axis=0, out=out, mode="clip")

    def _load(self, bucket: int) -> None:
        """Read a bucket, into the buffer of the one before it, and rank its records by their source numbers."""
        plan = self._plan
        start, stop = plan.buckets[bucket]
        self._number = -1
        done = 0
        if not len(self._records):
            largest = max(stop - start for start, stop in plan.buckets)
            self._records = np.empty((largest, plan.record_bytes), np.uint8)
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
        plan = self._plan
        num_buckets = len(plan.buckets)
        table = np.empty(2 * num_buckets + 1, "<u8")
        with closing(LocalFile(path, access="pread")) as file:
            file.read_ranges([(max(0, file.size - table.nbytes), table)])
            first, stop = map(int, table[bucket : bucket + 2])
            whole = int(table[num_buckets]) * plan.record_bytes + table.nbytes == file.size
            if not (whole and 0 <= stop - first <= len(rows)):
                raise IncompleteError(f"{path}: cut short or damaged: {file.size:,} bytes; run the conversion again")
            part = rows[: stop - first]
            file.read_ranges([(first * plan.record_bytes, part)])
        if crc32_of(part) != table[num_buckets + 1 + bucket]:
            raise ChecksumError(
                f"{path}: the disk did not keep the records of bucket {bucket}; run the conversion again"
            )
        return stop - first

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_number": -1, "_records": self._records[:0]}


@dataclass(frozen=True)
class Shuffle:
    """The chosen method, and the reason."""

    method: str
    reason: str
    plan: ScatterPlan | None = None  # of the two passes; None where records are gathered directly, or not shuffled

    @property
    def temp_bytes(self) -> int:
        return self.plan.temp_bytes if self.plan else 0

    def __str__(self) -> str:
        temp = f", {format_bytes(self.temp_bytes)} of temporary files" if self.plan else ""
        return f"{self.method}: {self.reason}{temp}"


UNSHUFFLED: Final = Shuffle("none", "batches are written in the order of the source")


def choose_shuffle(
    source: BatchSource, method: str, ranges: list[tuple[int, int]], memory_bytes: int, workers: int
) -> Shuffle:
    """Choose how to read the batches of some shards.

    Parameters
    ----------
    source
        The batches.
    method
        "direct" or "two-pass"; "auto": the faster one.
    ranges
        The batches of each shard, (start, stop).
    memory_bytes
        Memory of all processes of a node together.
    workers
        The processes of a node.
    """
    meta = source.meta
    if not source.reorders:
        return UNSHUFFLED
    if source.order is None:
        return Shuffle("direct", "the source gives the rows in their final order")
    _require_memory(memory_bytes, workers, batch_bytes(meta))
    reason = "as asked"
    if method == "auto":
        method, reason = _probe(source, source.order.n)
    if method == "direct":
        return Shuffle(method, reason)
    own_bytes = memory_bytes // min(workers, len(ranges)) - GROUPS * max(GROUP_BYTES, batch_bytes(meta))
    in_records = [(start * meta.batch_size, min(stop * meta.batch_size, source.order.n)) for start, stop in ranges]
    plan = ScatterPlan.fit(source.order, meta.seq_len, meta.dtype, in_records, own_bytes, meta.fields)
    return Shuffle(method, reason, plan)


def _require_memory(memory_bytes: int, workers: int, one_batch: int) -> None:
    """Raise `ArgumentError` if some processes take more than they may together, even if they only gather directly."""
    needed = workers * (DIRECT_BYTES + GROUPS * max(0, one_batch - GROUP_BYTES))
    if memory_bytes < needed:
        raise ArgumentError(
            f"memory: {format_bytes(memory_bytes)} is too little for {counted(workers, 'process', 'processes')}: it "
            f"takes {format_bytes(needed)}; give more, or use fewer workers",
            options=["memory", "workers"],
        )


def _probe(source: BatchSource, num_records: int) -> tuple[str, str]:
    """Return (method, reason) by the page cache and the time of some random reads."""
    if not source.reads_alone:
        return "two-pass", "a record of a compressed chunk is read with the whole chunk"
    records = np.linspace(0, num_records - 1, PROBES, dtype=np.int64)
    waits_s = [source.probe(record) for record in sorted(set(records.tolist()))]
    cold_s = [wait for wait in waits_s if wait is not None]
    warm_share = 1 - len(cold_s) / len(waits_s)
    if warm_share >= WARM_SHARE:
        return "direct", f"{warm_share:.0%} of a sample of the source are in the page cache"
    read_s = median(cold_s)
    source.cold = True
    text = f"{1 - warm_share:.0%} of a sample are not in the page cache, and a random read takes {1000 * read_s:.2f} ms"
    return ("direct" if read_s < FAST_READ_S else "two-pass"), text


def scatter_path(destination: Path) -> Path:
    """Return the name, without ".partial", of the folder for the run files of a destination."""
    return destination.with_name(destination.name + ".scatter")


@contextmanager
def scattered(source: BatchSource, shuffle: Shuffle, destination: Path, workers: Workers) -> Generator[BatchSource]:
    """Do the first pass, if there is one: yield the source to write from, and remove its run files at the end."""
    plan = shuffle.plan
    if plan is None:
        yield source
        return
    with scratch_directory(scatter_path(destination)) as folder:
        tasks = [RunTask(source, plan, run, plan.run_path(folder, run)) for run in range(plan.num_runs)]
        workers.shown.begin("scattering", sum(task.amount for task in tasks), "B")
        with closing(workers.engine.run(scatter_run, tasks, workers.shown.advance)) as results:
            list(results)
        yield ScatteredBatches(source, plan, folder)
