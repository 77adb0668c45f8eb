"""Shuffled records on their way from the source to their shards: gathered one by one, or in two sequential passes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, cast

import numpy as np

from zb_hdf5 import ArgumentError
from zb_hdf5.console import format_bytes
from zb_hdf5.converters.scatter import BucketReader, ScatterPlan, scatter_run
from zb_hdf5.converters.shard import GROUPS
from zb_hdf5.converters.source import ShuffledSource, Source
from zb_hdf5.converters.task import Engine, Progress
from zb_hdf5.files.publishing import scratch_directory
from zb_hdf5.formats.batch_reader import GROUP_BYTES, require_choice
from zb_hdf5.spec import TokenArray

SHUFFLE_METHODS: Final = ("auto", "direct", "two-pass")
PROBES: Final = 64
#: What each process takes that gathers directly, measured: one 39 MiB; two, and what starts them, 119 MiB.
DIRECT_BYTES: Final = 60 << 20
#: Sources of which a smaller share is in the page cache count as cold.
WARM_SHARE: Final = 0.9
#: Disks that answer a random read faster are better read at random than written and read once more.
FAST_READ_S: Final = 1e-3


@dataclass(frozen=True)
class Shuffle:
    """The chosen method, and the reason.

    Attributes
    ----------
    plan
        Of the two passes; None where records are gathered directly, or are not shuffled.
    """

    method: str
    reason: str
    plan: ScatterPlan | None = None

    @property
    def temp_bytes(self) -> int:
        return self.plan.temp_bytes if self.plan else 0

    def __str__(self) -> str:
        temp = f", {format_bytes(self.temp_bytes)} of temporary files" if self.plan else ""
        return f"{self.method}: {self.reason}{temp}"


#: What is written in the order in which it lies.
UNSHUFFLED: Final = Shuffle("none", "batches are written in the order of the source")


def choose_shuffle(
    source: Source, method: str, ranges: list[tuple[int, int]], memory_bytes: int, workers: int
) -> Shuffle:
    """Choose how to read the records, and prepare the source for it.

    Parameters
    ----------
    method
        A name in `SHUFFLE_METHODS`; "auto" looks at the page cache and times some random reads.
    ranges
        (start, stop) of the batches to write, per shard.
    memory_bytes
        For all processes of one node together.

    Raises
    ------
    ArgumentError
        If the memory is too little for two passes.
    """
    require_choice("--shuffle-method", method, SHUFFLE_METHODS)
    if not source.reorders:
        return UNSHUFFLED
    if source.order is None:
        return Shuffle("direct", "the source gathers its rows itself")
    shuffled = cast(ShuffledSource, source)
    own_bytes = memory_bytes // min(workers, len(ranges)) - GROUPS * max(GROUP_BYTES, source.meta.batch_bytes)
    reason = "as asked"
    if method == "auto":
        method, reason = _probe(shuffled)
    if method == "direct":
        return Shuffle(method, reason)
    meta = source.meta
    in_records = [(start * meta.batch_size, min(stop * meta.batch_size, source.order.n)) for start, stop in ranges]
    return Shuffle(method, reason, ScatterPlan.fit(source.order, meta.seq_len, meta.dtype, in_records, own_bytes))


def require_memory(memory_bytes: int, workers: int, batch_bytes: int) -> None:
    """Raise `ArgumentError` if some processes take more than they may together, even if they only gather directly."""
    needed = workers * (DIRECT_BYTES + GROUPS * max(0, batch_bytes - GROUP_BYTES))
    if memory_bytes < needed:
        raise ArgumentError(
            f"--memory: {format_bytes(memory_bytes)} are too little for {workers} processes, which take "
            f"{format_bytes(needed)} together; give them more, or use fewer --workers"
        )


def _probe(source: ShuffledSource) -> tuple[str, str]:
    """Return (method, reason) by what some reads tell."""
    records = np.linspace(0, source.order.n - 1, PROBES, dtype=np.int64)
    waits_s = [source.probe(record) for record in np.unique(records).tolist()]
    cold_s = [wait for wait in waits_s if wait is not None]
    warm_share = 1 - len(cold_s) / len(waits_s)
    if warm_share >= WARM_SHARE:
        return "direct", f"{warm_share:.0%} of a sample of the source are in the page cache"
    read_s = median(cold_s)
    source.cold = True
    text = f"{1 - warm_share:.0%} of a sample are not in the page cache, and a random read takes {1000 * read_s:.2f} ms"
    return ("direct" if read_s < FAST_READ_S else "two-pass"), text


class ScatteredSource(Source):
    """A source whose records were scattered to run files: reads consecutive batches from them."""

    def __init__(self, source: Source, plan: ScatterPlan, folder: Path, pad_id: int) -> None:
        for name in Source.__annotations__:
            setattr(self, name, getattr(source, name))
        self._pad_id, self._num_records = pad_id, plan.order.n
        self._buckets = BucketReader(plan, folder)

    def read_into(self, start: int, out: TokenArray) -> None:
        """Read consecutive batches; the rows behind the last record are padding."""
        rows = out.reshape(-1, self.meta.seq_len)
        first = start * self.meta.batch_size
        count = min(len(rows), self._num_records - first)
        self._buckets.read_into(first, rows[:count])
        rows[count:] = self._pad_id


@dataclass(frozen=True)
class RunTask:
    """A run of the first pass, picklable."""

    source: ShuffledSource
    plan: ScatterPlan
    run: int
    folder: Path

    @property
    def amount(self) -> int:
        return self.plan.records_in(self.run) * self.plan.record_tokens

    def amount_done(self) -> int:
        """Count the tokens of a run that another process has begun to write."""
        return self.amount if self.plan.run_path(self.folder, self.run).exists() else 0


def run_task(task: RunTask, progress: Progress) -> None:
    scatter_run(task.plan, task.run, task.source.read_records, task.folder)
    progress(task.amount)


def scatter_path(destination: Path) -> Path:
    """Return the name, without ".partial", of the folder for the run files of a destination."""
    return destination.with_name(destination.name + ".scatter")


@contextmanager
def scattered(
    source: Source, shuffle: Shuffle, destination: Path, engine: Engine, progress: Progress
) -> Generator[Source]:
    """Do the first pass, if there is one: give the source to write from, and remove its run files at the end.

    Parameters
    ----------
    destination
        The run files lie beside it, in a folder of the same name and ".scatter.partial".
    """
    plan = shuffle.plan
    if plan is None:
        yield source
        return
    shuffled = cast(ShuffledSource, source)
    with scratch_directory(scatter_path(destination)) as folder:
        tasks = [RunTask(shuffled, plan, run, folder) for run in range(plan.num_runs)]
        with closing(engine.run(run_task, tasks, progress)) as results:
            for _ in results:
                pass
        yield ScatteredSource(source, plan, folder, shuffled.pad_id)


def halved(progress: Progress, shuffle: Shuffle) -> Progress:
    """Return progress of which each of two passes makes one half."""
    if shuffle.plan is None:
        return progress
    rest = [0]

    def half(tokens: int) -> None:
        rest[0] += tokens
        done, rest[0] = divmod(rest[0], 2)
        progress(done)

    return half
