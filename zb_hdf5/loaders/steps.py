"""Which records one rank reads at each step: an order, a share of it, and a batch size. Knows no reader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.core.order import ORDER_STEPS, Order

#: What to read for one step: a whole stored batch, or the numbers of its records.
Request: TypeAlias = int | npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepPlan:
    """The steps of one rank in one epoch. A step of all ranks takes the next `batch_size * world_size` positions.

    Thread-safe and picklable: it holds only its arguments.

    Attributes
    ----------
    order
        Position -> record.
    drop_last
        False: the last step is filled up from the start of the order.
    records_per_batch
        Records in a stored batch.
    scattered
        True: the order parts the records of a stored batch.
    whole_records
        True: a record is a stored record. False: a part of one.
    """

    order: Order
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    records_per_batch: int
    scattered: bool
    whole_records: bool

    @property
    def step(self) -> int:
        """Positions that one step of all ranks takes."""
        return self.batch_size * self.world_size

    def steps_from(self, position: int) -> int:
        """Return how many steps there are from `position` to the end of the epoch."""
        left = max(0, self.order.n - position)
        return left // self.step if self.drop_last else -(-left // self.step)

    def requests_from(self, position: int) -> Iterator[Request]:
        """Yield what this rank reads at each step from `position` to the end of the epoch."""
        steps = self.steps_from(position)
        for first in range(0, steps, ORDER_STEPS):
            numbers = np.arange(first, min(first + ORDER_STEPS, steps))
            yield from self._requests_at(position + numbers * self.step)

    def requests_of_steps(self, steps: npt.NDArray[np.int64]) -> list[Request]:
        """Return what this rank reads at these steps, counted from the start of the epoch."""
        return self._requests_at(steps * self.step)

    def _requests_at(self, positions: npt.NDArray[np.int64]) -> list[Request]:
        """Return what this rank reads at the steps that begin at these positions."""
        order, batch_size = self.order, self.batch_size
        starts = positions + self.rank * batch_size
        whole = self.whole_records and not self.scattered and batch_size == self.records_per_batch
        if whole and not np.any(starts % batch_size):
            batches: list[Request] = (order.indices(starts % order.n) // batch_size).tolist()
            return batches
        return list(order.indices((starts[:, np.newaxis] + np.arange(batch_size)) % order.n))
