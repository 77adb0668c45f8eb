"""A loader that reads a store while it grows, and waits for new batches."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any, Final

from zb_hdf5.errors import ArgumentError, Remedy, StateError, UnavailableError
from zb_hdf5.files.paths import local_path
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.states import MAX_COUNT
from zb_hdf5.loaders.steps import StepPlan

#: A waiting loader looks again after the first of these times, and then after twice as long, up to the second.
POLL_S: Final = (0.01, 1.0)


class FollowingLoader(Loader[Any]):
    """Iterates over a store, or a lone `.h5.partial`, while its writer adds to it: one epoch, in stored order.

    A step is given out when the records of all ranks are committed, so all ranks make the same steps, however far
    apart they look. The iteration ends with the store, where `drop_last` decides about the rest. No step is read ahead.

    A state taken here goes on in any loader over the same store, growing or finished. One of a lone file is of no use
    after the file has grown: such a file has no digest of its final content.

    Parameters
    ----------
    source, options
        As for `Loader`, but for `shuffle`, which is "sequential", and `epoch`, which is 0.
    timeout_s
        How long to wait without a new batch.

    Raises
    ------
    ArgumentError
        If an option asks for another order, or for reading ahead.
    UnavailableError
        From the iteration, if nothing came for `timeout_s`.
    """

    _last_epoch = 0

    def __init__(
        self,
        source: str | os.PathLike[str] | BatchReader,
        *,
        timeout_s: float = 600.0,
        shuffle: str = "sequential",
        prefetch: int | str = "auto",
        device: Any = None,
        **options: Any,
    ) -> None:
        if shuffle != "sequential":
            raise ArgumentError(
                f'a FollowingLoader needs shuffle="sequential", found {shuffle!r}: '
                "batches that are not written yet cannot be shuffled"
            )
        if not isinstance(source, BatchReader):
            source = local_path(source)  # a store that grows is read on its own machine only
        if prefetch not in (0, "auto") or device is not None:
            raise ArgumentError("a FollowingLoader reads nothing ahead: leave out prefetch and device")
        self.timeout_s = timeout_s
        super().__init__(source, shuffle=shuffle, prefetch=0, **options)

    def set_epoch(self, epoch: int) -> None:
        """Accept epoch 0: the store grows once."""
        if epoch != 0:
            raise ArgumentError(
                f"a FollowingLoader makes one epoch, 0, found {epoch}; open the finished store for more"
            )
        super().set_epoch(epoch)

    def get_batch(self) -> Any:
        """Return the next batch. Behind the last one of a complete store this is an ArgumentError."""
        batch = self._next_of_epoch()
        if batch is None:
            raise ArgumentError(
                f"{self.reader.path}: its one epoch has ended, after {self.num_records:,} records; open the finished "
                "store with a Loader for more"
            )
        return batch

    def __next__(self) -> Any:
        """Return the next batch; the end of a complete store ends the iteration."""
        batch = self._next_of_epoch()
        if batch is None:
            raise StopIteration
        return batch

    def set_batch_size(self, batch_size: int) -> None:
        """Change the batch size from the next step on, also in the middle of an iteration: nothing is skipped."""
        if batch_size < 1:
            raise ArgumentError(f"batch_size must be at least 1, found {batch_size}")
        if batch_size != self.batch_size:
            self.batch_size, self.plan = batch_size, replace(self.plan, batch_size=batch_size)
            self._go_to(min(self._position, self._end_of_epoch(self.epoch)))  # if it was filled up

    def __len__(self) -> int:
        # not a ZbError: list() asks for a length, and goes on without one after a TypeError only
        raise TypeError(f"{self.reader.path}: a FollowingLoader has no length: the store still grows")

    def plan_of_epoch(self, epoch: int) -> StepPlan:
        """Return the steps that are there now: the last one is filled up when the store is complete."""
        return replace(super().plan_of_epoch(epoch), drop_last=self.drop_last or not self.reader.complete)

    def _end_of_epoch(self, epoch: int) -> int:
        if not self.reader.complete:
            return MAX_COUNT  # the batches of the state may not be visible here yet
        return self.reader.num_batches * self.plan.records_per_batch

    def _read_from(self, position: int) -> Generator[tuple[Any, int]]:
        start = position
        while self._wait(position):
            for request in self.plan.requests_from(position):
                position = self.plan.position_after(position)  # the plan grows with the store
                yield self._steps.read(request), position
        if start > self.num_records:
            raise StateError(
                f"{self.reader.path}: state: expected position in 0..{self.num_records:,}, the records of the store "
                f"that is complete now, found {start:,}"
            )

    def _wait(self, position: int) -> bool:
        """Wait until there is a step at `position`; return False if there will be none."""
        pause_s, last = POLL_S[0], time.monotonic()
        while not self.plan.steps_from(position):
            if self.reader.complete:
                return False
            before = self.num_records
            self.reader.refresh()
            self.plan = self.plan_of_epoch(self.epoch)
            if self.num_records > before:
                pause_s, last = POLL_S[0], time.monotonic()
            elif not self.reader.complete:
                self._pause(pause_s, time.monotonic() - last)
                pause_s = min(2 * pause_s, POLL_S[1])
        return True

    def _pause(self, pause_s: float, waited_s: float) -> None:
        if waited_s >= self.timeout_s:
            raise UnavailableError(
                f"{self.reader.path}: no new batch for {self.timeout_s:g} s after {self.reader.num_batches:,} batches: "
                "its writer may have died, or timeout_s is too small",
                remedy=Remedy.REPAIR,
                at=self.reader.path,
            )
        time.sleep(min(pause_s, self.timeout_s - waited_s))
