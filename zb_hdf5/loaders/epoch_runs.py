"""The records that some steps of all ranks take: runs of positions in epochs, by arithmetic, without a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, counted

if TYPE_CHECKING:
    from zb_hdf5.loaders.loader import Loader

#: Positions whose records are computed at once.
POSITIONS_AT_ONCE: Final = 1 << 18


class EpochRun(NamedTuple):
    """Positions of an epoch that follow each other: live ones, where the epoch jumps over some."""

    epoch: int
    start: int
    stop: int


def runs_of_records(start: int, count: int, records: int) -> Iterator[EpochRun]:
    """Yield the runs of some records of epochs that follow each other without a gap.

    Parameters
    ----------
    start
        The records of all epochs before them.
    count
        How many they are.
    records
        The records of an epoch.
    """
    while count:
        epoch, first = divmod(start, records)
        size = min(count, records - first)
        yield EpochRun(epoch, first, first + size)
        start += size
        count -= size


def runs_in_epoch(loader: Loader, first: int, stop: int, world_size: int) -> list[EpochRun]:
    """Return the run of some steps of a loader's epoch, counted from its start, on all ranks together.

    Raises
    ------
    ArgumentError
        If the epoch has fewer steps.
    """
    plan = replace(loader.plan, world_size=world_size)
    if stop > plan.steps_from(0):
        raise ArgumentError(
            f"{loader.path}: expected steps up to {plan.steps_from(0):,}, as many as the epoch has on "
            f"{counted(world_size, 'rank')} with batches of {loader.batch_size:,}, found {stop:,}"
        )
    return [EpochRun(loader.epoch, first * plan.step, stop * plan.step)]


def runs_before(loader: Loader, steps: int, world_size: int) -> list[EpochRun]:
    """Return the run of the last steps of all ranks before the position of a loader.

    Raises
    ------
    ArgumentError
        If its epoch has fewer before it.
    """
    step = loader.batch_size * world_size
    end = loader.plan.skip.live(loader.state_dict()["position"])
    if steps * step > end:
        raise ArgumentError(
            f"{loader.path}: expected at most {end // step:,} steps before the state in its epoch, on "
            f"{counted(world_size, 'rank')} with batches of {loader.batch_size:,}, found {steps:,}"
        )
    return [EpochRun(loader.epoch, end - steps * step, end)]


def runs_after(loader: Loader, steps: int, world_size: int) -> Iterator[EpochRun]:
    """Yield the runs of the next steps of all ranks after the position of a loader, over as many epochs as they take.

    Raises
    ------
    ArgumentError
        If an epoch has no step.
    """
    size = loader.batch_size * world_size
    if loader.num_records < size:
        raise ArgumentError(
            f"{loader.path}: {loader.num_records:,} records are too few for {counted(world_size, 'rank')} with "
            f"batches of {loader.batch_size:,}"
        )
    epoch = loader.epoch
    start = loader.plan.skip.live(loader.state_dict()["position"])
    while steps:
        taken = min(steps, (loader.plan_of_epoch(epoch).num_live - start) // size)
        yield EpochRun(epoch, start, start + taken * size)
        steps -= taken
        epoch += 1
        start = 0


def times_taken(loader: Loader, runs: Iterable[EpochRun]) -> npt.NDArray[np.uint32]:
    """Return how often some runs take each record of a loader."""
    times = np.zeros(loader.num_records, np.uint32)
    for epoch, start, stop in runs:
        plan = loader.plan_of_epoch(epoch)
        for first in range(start, stop, POSITIONS_AT_ONCE):
            times[plan.indices(np.arange(first, min(first + POSITIONS_AT_ONCE, stop)))] += 1  # each is there once
    return times
