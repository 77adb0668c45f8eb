"""The loader of a store that grows: it waits for the batches of a live writer."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any, Final

from zb_hdf5.errors import ArgumentError, Remedy, StateError, UnavailableError
from zb_hdf5.files.paths import local_path
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.order import StepPlan
from zb_hdf5.loaders.state import MAX_COUNT

#: Seconds after which it looks again at first.
FIRST_LOOK_S: Final = 0.01
#: Seconds between two looks, at most: each pause is twice as long as the one before.
LAST_LOOK_S: Final = 1.0


class FollowingLoader(Loader):
    """Iterates over a store, or a lone `.h5.partial`, while its writer adds to it: one epoch, in stored order.

    A step is given out when the records of all ranks are committed, so all ranks make the same steps, however far
    apart they look. The iteration ends with the store, where `last` decides about the rest. No step is read ahead.

    A state taken here goes on in any loader over the same store, growing or finished. One of a lone file is of no use
    after the file has grown: such a file has no digest of its final content.

    Parameters
    ----------
    source, options
        As for `Loader`, but for `shuffle`, which is "sequential".
    timeout_s
        How long to wait without a new batch.

    Raises
    ------
    ArgumentError
        If an option asks for another order, or for reading ahead.
    UnavailableError
        From the iteration, if nothing came for `timeout_s`.
    """

    _last_epoch = _least_steps = 0

    def __init__(
        self,
        source: str | os.PathLike[str] | Corpus | Batches,
        *,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        only: dict[str, Any] = {"shuffle": "sequential", "prefetch": 0, "device": None}
        found = {name: options.pop(name, value) for name, value in only.items()}
        if found not in (only, {**only, "prefetch": "auto"}):
            raise ArgumentError(
                f"a FollowingLoader reads in stored order, and nothing ahead: expected {only}, found {found}"
            )
        if not isinstance(source, Corpus | Batches):
            source = local_path(source)  # a store that grows is read on its own machine only
        self.timeout_s = timeout_s
        super().__init__(source, **only, **options)

    def _start(self, epoch: int) -> int:
        if epoch != 0:  # also from `get_batch` after the last batch
            raise ArgumentError(
                f"{self.path}: a FollowingLoader makes one epoch, 0, found {epoch}; open the finished store with a "
                "Loader for more"
            )
        return super()._start(epoch)

    def __next__(self) -> Any:
        """Return the next batch; the end of a complete store ends the iteration."""
        batch = self._next_of_epoch()
        if batch is None:
            raise StopIteration
        return batch

    def __len__(self) -> int:
        # not a ZbError: list() asks for a length, and goes on without one after a TypeError only
        raise TypeError(f"{self.path}: a FollowingLoader has no length: the store still grows")

    def plan_of_epoch(self, epoch: int) -> StepPlan:
        """Return the steps that are there now: the last one may be incomplete when the store is complete."""
        complete = self.batches.complete  # asked first: the plan then has all batches, whoever else refreshes it
        plan = super().plan_of_epoch(epoch)
        return plan if complete else replace(plan, last="drop")

    def _end_of_epoch(self, epoch: int) -> int:
        if not self.batches.complete:
            return MAX_COUNT  # the batches of the state may not be visible here yet
        return self.batches.num_records * (self.batches.seq_len // self._length)

    def _read_from(self, position: int) -> Generator[tuple[Any, int]]:
        start = position
        while self._wait(position):
            steps = zip(self.plan.requests_from(position), self.plan.positions_from(position), strict=False)
            for request, position in steps:  # the plan grows with the store
                yield self.steps.read(request), position
        if start > self.num_records:
            raise StateError(
                f"{self.path}: state: position {start:,} is past the end: the finished store has "
                f"{self.num_records:,} records"
            )

    def _wait(self, position: int) -> bool:
        """Wait until there is a step at `position`; return False if there will be none."""
        pause_s = FIRST_LOOK_S
        grown_s = time.monotonic()
        while not self.plan.steps_from(position):
            complete = self.batches.complete  # asked first, as in `plan_of_epoch`
            before = self.num_records
            self.batches.refresh()
            self.plan = self.plan_of_epoch(self.epoch)
            if complete:
                return self.plan.steps_from(position) > 0
            if self.num_records > before:
                pause_s = FIRST_LOOK_S
                grown_s = time.monotonic()
            elif not self.batches.complete:
                waited_s = time.monotonic() - grown_s
                if waited_s >= self.timeout_s:
                    raise UnavailableError(
                        f"{self.path}: no new batch for {self.timeout_s:g} s after {self.batches.num_batches:,} "
                        "batches: its writer may have died, or timeout_s is too small",
                        remedy=Remedy.REPAIR,
                        at=self.path,
                    )
                time.sleep(min(pause_s, self.timeout_s - waited_s))
                pause_s = min(2 * pause_s, LAST_LOOK_S)
        return True
