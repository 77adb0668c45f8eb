"""The records that one rank reads at each step: an order, a rank's share of it, and a batch size."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, count, islice, repeat
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError
from zb_hdf5.loaders.order import Documents, IndexArray, Order

#: The variables of torchrun.
LAUNCHER_VARIABLES: Final = (("RANK", "WORLD_SIZE"),)
#: The variables of a Slurm step, for its tasks only: a batch script is rank 0 of SLURM_NTASKS too, of which no other
#: runs, and the shell of `salloc` can be a step of one task in a job of many.
STEP_VARIABLES: Final = (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("SLURM_PROCID", "SLURM_NTASKS"))
STEP_VARIABLE: Final = "SLURM_STEP_ID"

#: The reads of one step: a whole stored batch, or the numbers of its records.
Request: TypeAlias = int | npt.NDArray[np.int64]


#: Steps of a reading that are resolved at once: first, and at most.
FIRST_BLOCK, LAST_BLOCK = 64, 4096
#: Positions of an epoch whose order is computed as a whole where single steps are asked for: 1 MiB of numbers.
TABLE_POSITIONS: Final = 1 << 17
#: Steps whose records are computed at once where single steps of a longer epoch are asked for.
STEPS_AT_ONCE: Final = 64
#: Documents whose order is computed at once for packing.
DOCUMENTS_AT_ONCE: Final = 4096


@dataclass(frozen=True)
class Skip:
    """Ranges (start, stop) of positions that an epoch jumps over. The others are live, and counted from 0."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, triples: Iterable[tuple[int, int, int]], epoch: int, end: int) -> Skip:
        """Join those of (epoch, start, stop) in an epoch, before its `end`, that touch or overlap."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted((start, min(stop, end)) for number, start, stop in triples if number == epoch):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            elif start < stop:
                joined.append((start, stop))
        return cls(tuple(joined))

    def live(self, position: int) -> int:
        """Return how many live positions are before one."""
        return position - sum(min(position, stop) - start for start, stop in self.ranges if start < position)

    def positions_of(self, live: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions of live ones."""
        if not self.ranges:
            return live
        starts, stops = np.array(self.ranges, np.int64).T
        skipped = np.concatenate([[0], np.cumsum(stops - starts)])
        found: npt.NDArray[np.int64] = live + skipped[(starts - skipped[:-1]).searchsorted(live, side="right")]
        return found


@dataclass(frozen=True)
class StepPlan:
    """The steps of one rank in one epoch: a step of all ranks takes the next `batch_size * world_size` positions."""

    order: Order  # position -> record
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool  # False: the last step is filled up from the start of the order
    records_per_batch: int  # of a stored batch
    scattered: bool  # the order parts the records of a stored batch
    whole_records: bool  # a record is a stored record, not a part of one
    skip: Skip = Skip()

    @property
    def step(self) -> int:
        """Positions that one step of all ranks takes."""
        return self.batch_size * self.world_size

    @property
    def live_order(self) -> Order:
        """The order of the live positions."""
        return SkippedOrder(self.order, self.skip) if self.skip.ranges else self.order

    def steps_from(self, position: int) -> int:
        """Return how many steps there are from `position` to the end of the epoch."""
        left = max(0, self.skip.live(self.order.n) - self.skip.live(position))
        return left // self.step if self.drop_last else -(-left // self.step)

    def position_after(self, position: int) -> int:
        """Return the position behind the step that begins at one."""
        if not self.skip.ranges:
            return position + self.step
        return int(self.skip.positions_of(np.array(self.skip.live(position) + self.step)))

    def requests_from(self, position: int) -> Iterator[Request]:
        """Yield the reads of this rank from `position` to the end of the epoch."""
        return chain.from_iterable(map(requests_in, self.blocks_from(position)))

    def blocks_from(self, position: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the reads of this rank from `position` to the end of the epoch, in growing blocks."""
        steps, start = self.steps_from(position), self.skip.live(position)
        most = min(LAST_BLOCK, max(FIRST_BLOCK, TABLE_POSITIONS // (1 if self.is_whole else self.batch_size)))
        first, size = 0, FIRST_BLOCK
        while first < steps:
            yield self._block_at(start + np.arange(first, min(first + size, steps)) * self.step)
            first, size = first + size, min(2 * size, most)

    def positions_from(self, position: int) -> Iterator[int]:
        """Yield the position behind each step from a position on, without an end."""
        if not self.skip.ranges:
            return count(position + self.step, self.step)
        after = self.position_after
        return accumulate(repeat(0), lambda found, _: after(found), initial=after(position))

    def requests_of_steps(self, steps: npt.NDArray[np.int64]) -> list[Request]:
        """Return the reads of this rank at steps that are counted from the start of the epoch."""
        return requests_in(self._block_at(steps * self.step))

    @property
    def is_whole(self) -> bool:
        """Whether steps that begin at a multiple of `batch_size` are whole stored batches."""
        unparted = self.whole_records and not self.scattered and not self.skip.ranges
        return unparted and self.batch_size == self.records_per_batch

    def _block_at(self, live: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the reads at steps that begin at live positions: stored batches, 1-D, or the records of each, 2-D."""
        order, size = self.live_order, self.batch_size
        starts = live + self.rank * size
        if self.is_whole and not np.any(starts % size):
            return order.indices(starts % order.n) // size
        return order.indices((starts[:, np.newaxis] + np.arange(size)) % order.n)


def packed_steps(
    plan: StepPlan, documents: Documents, position: int, max_tokens: int
) -> Iterator[tuple[IndexArray, int]]:
    """Yield the documents of a rank at each step, packed into `max_tokens`, and the position behind the step."""
    # the batches do not depend on the ranks, which take them in turn: each rank computes the lengths of all documents
    order, live = plan.live_order, plan.skip.live(position)
    batches = _cut(order, documents, live, max_tokens)
    while step := list(islice(batches, plan.world_size)):
        live += sum(map(len, step))
        if len(step) < plan.world_size:
            if plan.drop_last:
                return
            again = chain.from_iterable(_cut(order, documents, 0, max_tokens) for _ in repeat(None))
            step += islice(again, plan.world_size - len(step))
        yield step[plan.rank], int(plan.skip.positions_of(np.array(live)))


def _cut(order: Order, documents: Documents, position: int, max_tokens: int) -> Iterator[IndexArray]:
    """Yield the documents of each batch, in order."""
    waiting = np.empty(0, np.int64)
    for first in range(position, order.n, DOCUMENTS_AT_ONCE):
        stop = min(first + DOCUMENTS_AT_ONCE, order.n)
        waiting = np.concatenate([waiting, order.indices(np.arange(first, stop))])
        ends = np.cumsum(documents.lengths(waiting)).tolist()
        begin = tokens = 0
        while (end := bisect_right(ends, tokens + max_tokens)) < len(ends) or (stop == order.n and begin < end):
            yield waiting[begin:end]
            begin, tokens = end, ends[end - 1]
        waiting = waiting[begin:]


def requests_in(block: npt.NDArray[np.int64]) -> list[Request]:
    """Return the requests of a block: numbers of stored batches, or an array of records for each step."""
    return block.tolist() if block.ndim == 1 else list(block)


class StepRequests:
    """The reads of one rank at single steps of a plan, in any order: from a table, unless the epoch is long."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan, self.count = plan, plan.steps_from(0)
        positions = self.count * (1 if plan.is_whole else plan.batch_size)
        self._is_table = positions <= TABLE_POSITIONS
        self._block, self._requests = -1, plan.requests_of_steps(np.arange(self.count if self._is_table else 0))

    def __getitem__(self, step: int) -> Request:
        if self._is_table:
            return self._requests[step]
        if not -self.count <= step < self.count:
            raise IndexError(step)
        step, plan = step % self.count, self.plan
        if plan.is_whole:
            start = step * plan.step + plan.rank * plan.batch_size
            return plan.order.index(start % plan.order.n) // plan.batch_size
        block, within = divmod(step, STEPS_AT_ONCE)
        if block != self._block:
            first = block * STEPS_AT_ONCE
            steps = np.arange(first, min(first + STEPS_AT_ONCE, self.count))
            self._requests, self._block = plan.requests_of_steps(steps), block
        return self._requests[within]


class SkippedOrder(Order):
    """An order without the positions that are jumped over."""

    def __init__(self, order: Order, skip: Skip) -> None:
        self.n, self._order, self._skip = skip.live(order.n), order, skip

    def indices(self, positions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        return self._order.indices(self._skip.positions_of(positions))


def checked_skip(skip: Collection[Any]) -> tuple[tuple[int, int, int], ...]:
    """Return triples (epoch, start, stop), ascending; raise `ArgumentError` if one is none."""
    try:
        found = sorted({(int(epoch), int(start), int(stop)) for epoch, start, stop in skip})
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"skip: expected (epoch, start, stop) of positions, found {skip!r}") from error
    for epoch, start, stop in found:
        if epoch < 0 or not 0 <= start <= stop:
            raise ArgumentError(f"skip: expected epoch >= 0 and 0 <= start <= stop, found {(epoch, start, stop)}")
    return tuple(found)


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world_size) from the arguments or, where both are None, from the job's environment."""
    if (rank is None) != (world_size is None):
        raise ArgumentError(f"pass both rank and world_size or neither, found rank={rank}, world_size={world_size}")
    if rank is None or world_size is None:
        rank, world_size = _rank_of_job()
    if not 0 <= rank < world_size:
        raise ArgumentError(f"expected 0 <= rank < world_size, found rank {rank} of {world_size}")
    return rank, world_size


def _rank_of_job() -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")  # not loaded means not initialised
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    step = STEP_VARIABLES if STEP_VARIABLE in os.environ else ()
    for rank, world_size in (*LAUNCHER_VARIABLES, *step):
        if rank in os.environ and world_size in os.environ:
            try:
                return int(os.environ[rank]), int(os.environ[world_size])
            except ValueError as error:
                raise ArgumentError(f"environment variables {rank} and {world_size} are no numbers: {error}") from error
    return 0, 1
