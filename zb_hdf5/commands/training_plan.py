"""The figures of a training before it runs: counted by the loader itself, computed from its counts, or measured."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.commands.file_calls import FileCalls, file_calls
from zb_hdf5.errors import counted, format_bytes
from zb_hdf5.files.memory_limit import memory_limit
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.order import StepPlan
from zb_hdf5.spec import CRC32, NOT_KNOWN
from zb_hdf5.store.shard_files import ShardFiles

#: Ranks whose files are counted, at most: evenly over all. Those of the others are as many on average.
COUNTED_RANKS: Final = 64
#: Steps of a rank whose files are counted, unless it has met all files before.
COUNTED_STEPS: Final = 1 << 16
#: Steps that are timed after the first one, at most, and the seconds that they may take together.
TIMED_STEPS: Final = 32
TIMED_S: Final = 1.0
#: Bytes of the crc32 of a batch.
CRC32_BYTES: Final = 4


class Figure(NamedTuple):
    """A figure of a plan.

    Attributes
    ----------
    value
        The number, for programs.
    how
        "counted" from the data as a loader reads them, "arithmetic" on counts, or "measured" here and now.
    text
        It in words.
    """

    value: float
    how: str
    text: str


@dataclass(frozen=True)
class Job:
    """A training as it is planned.

    Attributes
    ----------
    ranks, ranks_per_node
        Its processes.
    steps
        The steps that it is to make; None: an epoch.
    step_time_s
        The seconds that a step takes; None: not known.
    """

    ranks: int
    ranks_per_node: int
    steps: int | None
    step_time_s: float | None

    @property
    def nodes(self) -> int:
        """The nodes; the last one may have fewer ranks."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def ranks_of_a_node(self) -> int:
        """The ranks of the fullest node."""
        return min(self.ranks, self.ranks_per_node)


# --- files of the steps -----------------------------------------------------------------------------------------------


def files_of_rank(plan: StepPlan, batches: Batches) -> tuple[set[int], bool]:
    """Return the files that hold the tokens of a rank in an epoch, and whether all of its steps were looked at."""
    num_files = len(batches.tokens.files.starts) - 1
    found: set[int] = set()
    steps = 0
    for block in plan.blocks_from(0):
        if steps >= COUNTED_STEPS or len(found) == num_files:
            return found, len(found) == num_files
        found |= _files_of_reads(plan, batches, block)
        steps += len(block)
    return found, True


def _files_of_reads(plan: StepPlan, batches: Batches, reads: npt.NDArray[np.int64]) -> set[int]:
    """Return the files of some reads: numbers of stored batches, 1-D, or of records."""
    windows = batches.windows
    parts = plan.records_per_batch // windows.size
    length = windows.length // parts
    if reads.ndim == 1:
        first, count = reads * windows.batch_stride, windows.batch_stride + windows.overlap
    else:
        first, count = windows.starts(reads.reshape(-1), length), length
    edges = np.array(batches.tokens.files.starts)
    low = edges.searchsorted(first, side="right") - 1
    high = edges.searchsorted(np.minimum(first + count, edges[-1]) - 1, side="right") - 1
    found: set[int] = set()
    for begin, end in set(zip(low.tolist(), high.tolist(), strict=True)):
        found.update(range(begin, end + 1))
    return found


# --- the figures -----------------------------------------------------------------------------------------------------


def planned(path: Path, job: Job, options: dict[str, Any]) -> dict[str, Figure]:
    """Open the data as rank 0 of a job, read its first steps, and return all figures by their names.

    Parameters
    ----------
    options
        Those of the loader, without ranks.
    """
    begun_s = time.perf_counter()
    with file_calls(path) as opening:
        loader: Loader = Loader(path, rank=0, world_size=job.ranks, **options)
    opening_s = time.perf_counter() - begun_s
    with loader:
        at_hand = set(loader.batches.tokens.files.known)  # the files that are open now are not opened again
        figures = _figures_of_steps(loader, job)
        figures |= _figures_of_bytes(loader, job)
        if not isinstance(path, RemotePath):
            figures |= _figures_of_opening(opening, job)
            figures |= _figures_of_files(loader, job, opening.opens, at_hand)
        figures |= _figures_of_time(loader, opening_s)
    return figures


def _figures_of_steps(loader: Loader, job: Job) -> dict[str, Figure]:
    steps = len(loader)
    left_out = loader.plan.num_left_out
    tokens = loader.batch_size * loader.seq_len * job.ranks
    made = steps if job.steps is None else job.steps
    figures = {
        "records": Figure(loader.num_records, "counted", f"{loader.num_records:,} of {loader.seq_len:,} tokens"),
        "steps": Figure(steps, "counted", f"{steps:,} in an epoch"),
        "left_out": Figure(left_out, "counted", f'{counted(left_out, "record")} of an epoch, by last="drop"'),
        "tokens_per_step": Figure(tokens, "arithmetic", f"{tokens:,} of all ranks"),
        "epochs": Figure(made / steps, "arithmetic", f"{made / steps:,.2f} in {counted(made, 'step')}"),
    }
    if job.step_time_s is not None:
        hours = made * job.step_time_s / 3600
        figures["hours"] = Figure(hours, "arithmetic", f"{hours:,.2f} for {counted(made, 'step')}")
    return figures


def _figures_of_bytes(loader: Loader, job: Job) -> dict[str, Figure]:
    batches = loader.batches
    of_rank = loader.batch_size * loader.seq_len * batches.dtype.itemsize
    of_node = of_rank * job.ranks_of_a_node
    whole = batches.tokens.num_tokens * batches.dtype.itemsize
    share = min(whole, of_node * len(loader))
    memory = memory_limit()
    fits = "fits" if share <= memory else "does not fit"
    figures = {
        "reads_per_step": _counted(loader.plan.reads_per_step, "read", "of a rank"),
        "bytes_per_step": Figure(of_rank, "arithmetic", f"{format_bytes(of_rank)} of a rank, before any compression"),
        "node_bytes_per_step": Figure(
            of_node, "arithmetic", f"{format_bytes(of_node)} of {counted(job.ranks_of_a_node, 'rank')}"
        ),
        "node_bytes_per_epoch": Figure(
            share,
            "arithmetic",
            f"{format_bytes(share)} of {format_bytes(whole)}, as a cache of a node would have: {fits} into the "
            f"{format_bytes(memory)} of memory here",
        ),
    }
    if job.step_time_s is not None:
        rate = of_node / job.step_time_s
        total = of_rank * job.ranks / job.step_time_s
        figures["node_bytes_per_s"] = Figure(rate, "arithmetic", f"{format_bytes(rate)}/s of a node")
        figures["bytes_per_s"] = Figure(
            total, "arithmetic", f"{format_bytes(total)}/s of {counted(job.nodes, 'node')} together"
        )
    return figures


def _counted(value: int, noun: str, rest: str) -> Figure:
    return Figure(value, "counted", f"{counted(value, noun)} {rest}")


def _figures_of_opening(opening: FileCalls, job: Job) -> dict[str, Figure]:
    """Return the calls of a rank before its first step, and the calls of all ranks of a node."""
    ranks = job.ranks_of_a_node
    of_node = f"of {counted(ranks, 'rank')}"

    def of_all(value: int, noun: str) -> Figure:
        return Figure(value * ranks, "arithmetic", f"{counted(value * ranks, noun)} {of_node}")

    figures = {
        "opens_at_opening": _counted(opening.opens, "open", "of a rank, files and folders"),
        "node_opens_at_opening": of_all(opening.opens, "open"),
        "looks_at_opening": _counted(opening.looks, "look", "of a rank at files and folders, by their paths"),
        "node_looks_at_opening": of_all(opening.looks, "look"),
    }
    if not opening.opens_by_hdf5:  # HDF5 does not tell what it reads
        of_rank = format_bytes(opening.num_bytes)
        every = opening.num_bytes * ranks
        figures["opening_bytes"] = Figure(
            opening.num_bytes, "counted", f"{of_rank} of a rank, at opening: index, headers and samples"
        )
        figures["node_opening_bytes"] = Figure(
            every, "arithmetic", f"{format_bytes(every)} {of_node}, {of_rank} of them from the file system"
        )
    if opening.index_bytes:
        every = opening.index_bytes * job.nodes
        text = (
            f"{format_bytes(opening.index_bytes)} of these bytes; {format_bytes(every)} of {counted(job.nodes, 'node')}"
        )
        figures["index_bytes"] = Figure(opening.index_bytes, "counted", text)
    return figures


def _figures_of_files(loader: Loader, job: Job, at_opening: int, at_hand: set[int]) -> dict[str, Figure]:
    """Return the files that are opened: all of a rank's at opening, and each once, and proved, when it is read."""
    is_of_all = job.ranks <= COUNTED_RANKS
    chosen = sorted({number * job.ranks // COUNTED_RANKS for number in range(COUNTED_RANKS)})
    chosen = [*range(job.ranks)] if is_of_all else chosen
    opens, proofs = [], []
    tokens = loader.batches.tokens
    is_whole = not _reads_sidecars(tokens, at_hand)
    proof_bytes = _bytes_of_proofs(tokens)
    opens_of_file = _opens_of_file(tokens)
    for rank in chosen:
        files, all_steps = files_of_rank(replace(loader.plan, rank=rank), loader.batches)
        is_whole = is_whole and all_steps
        opens.append(at_opening + opens_of_file * len(files - at_hand))
        proofs.append(int(proof_bytes[[*files - at_hand]].sum()))
    how = "counted" if is_of_all else "arithmetic"
    least = "" if is_whole else "at least "
    of_rank, total = max(opens), round(sum(opens) * job.ranks / len(chosen))
    of_node = _most_of_a_node(opens, job)
    figures = {
        "opens_per_epoch": Figure(of_rank, "counted", f"{least}{counted(of_rank, 'open')} of the rank with most"),
        "node_opens_per_epoch": Figure(of_node, how, f"{least}{counted(of_node, 'open')} of the node with most"),
        "opens_of_all": Figure(total, how, f"{least}{counted(total, 'open')} of {counted(job.ranks, 'rank')}"),
    }
    if any(proofs):
        proof, of_node = max(proofs), _most_of_a_node(proofs, job)
        text = f"{format_bytes(proof)} of a rank in an epoch: a batch or chunk and the crc32 values of each shard"
        figures["proof_bytes"] = Figure(proof, "arithmetic", text)
        figures["node_proof_bytes"] = Figure(of_node, "arithmetic", f"{format_bytes(of_node)} of the node with most")
    return figures


def _most_of_a_node(values: list[int], job: Job) -> int:
    """Return the largest sum of a node: of the values of all ranks, or of some that stand for the others."""
    if len(values) < job.ranks:
        return max(values) * job.ranks_of_a_node
    size = job.ranks_per_node
    return max(sum(values[first : first + size]) for first in range(0, job.ranks, size))


def _opens_of_file(tokens: Tokens) -> int:
    """Return how often each file is opened: of `.batch` shards the crc32 values are in a file beside each one."""
    files = tokens.files
    if not isinstance(files, ShardFiles) or files.index.without_crc32():
        return 1
    return 1 if CRC32 in files.index.table.columns else 2


def _reads_sidecars(tokens: Tokens, at_hand: set[int]) -> bool:
    """Return whether files that are met in steps have others beside them, which their format may read then."""
    files = tokens.files
    found = files.found.items() if isinstance(files, ShardFiles) else ()
    later = (facts for number, facts in found if number not in at_hand)
    return any(isinstance(facts, FlatFacts) and facts.documents_identity is not None for facts in later)


def _bytes_of_proofs(tokens: Tokens) -> npt.NDArray[np.int64]:
    """Return the bytes by which a rank proves each file at its first read: a unit of it, and the crc32 of all units."""
    files = tokens.files
    lengths = np.diff(files.starts)
    if not isinstance(files, ShardFiles):
        return np.zeros_like(lengths)
    num_units = -(-lengths // tokens.unit)
    proofs = np.minimum(lengths, tokens.unit) * tokens.dtype.itemsize + CRC32_BYTES * num_units
    return np.where(files.index.table.values["crc32"] == NOT_KNOWN, 0, proofs)


def _figures_of_time(loader: Loader, opening_s: float) -> dict[str, Figure]:
    """Read the first step, and a few more for as long as a second, and return their times."""
    clock = time.perf_counter
    before_s = begun_s = clock()
    taken: list[float] = []
    for _ in islice(loader, TIMED_STEPS + 1):
        now_s = clock()
        taken.append(now_s - before_s)
        before_s = now_s
        if now_s - begun_s > TIMED_S:
            break
    first_s = opening_s + taken[0]
    figures = {
        "first_batch_s": Figure(
            first_s,
            "measured",
            f"{first_s:.3f} s by one process here, {opening_s:.3f} s of it to open",
        )
    }
    if len(taken) > 1:
        step_s = median(taken[1:])
        figures["read_s"] = Figure(
            step_s, "measured", f"{1e3 * step_s:.2f} ms for a later batch, the median of {len(taken) - 1}"
        )
    return figures
