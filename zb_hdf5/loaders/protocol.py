"""The protocol of every loader, and the bases of those that read ahead, and of those that have epochs."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

from zb_hdf5.errors import StateError, ZbError
from zb_hdf5.loaders.states import (
    MAX_COUNT,
    chosen,
    chosen_in,
    require_count,
    require_epoch,
    require_kind,
    require_state,
)
from zb_hdf5.loaders.steps import StepPlan, checked_skip

BatchT = TypeVar("BatchT")


@runtime_checkable
class TokenLoader(Protocol):
    """Gives batches, and counts those that it gave. A loader with epochs has a length too; an endless one has none.

    Notes
    -----
    `iter(loader)` yields one epoch, or, without epochs, all that follows. `next(loader)` and `get_batch()` give the
    next batch without it.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def get_batch(self) -> Any:
        """Return the next batch, for ever: after an epoch comes the next one."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. A position in this epoch is kept."""

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands, in plain JSON values. `kind` names the loader that takes it."""

    def load_state_dict(self, state_dict: dict[str, Any], *, force: bool = False) -> None:
        """Continue exactly where `state_dict` was taken. `force`: even if it is of other data or another order."""

    def close(self) -> None:
        """End threads and release files. May be called again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class ReadingLoader(ABC, Generic[BatchT]):
    """A loader with a reading under way: a generator of batches, each with the position behind it.

    So a state counts yielded batches, never those that were read ahead. A change of the epoch, the position or the
    shape ends the reading, and the next batch begins another one; `__iter__`, `next` and `get_batch` share it.

    Not thread-safe. A pickled loader reads nothing: its copy continues at the same position.
    """

    epoch: int
    _position: Any
    _reading: Generator[tuple[BatchT, Any]] | None = None
    #: The next iteration continues at the position.
    _resumed = False
    _closed = False
    _endless = False

    @abstractmethod
    def _read_from(self, position: Any) -> Generator[tuple[BatchT, Any]]:
        """Return a reading, which does not refer to the loader if it has threads: they end with the loader."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""

    def __iter__(self) -> Iterator[BatchT]:
        """Yield the batches of one epoch; those of an endless loader from the current position on."""
        if not self._resumed and not self._endless:
            self._go_to(0)
        reading = None
        try:
            while True:
                reading = self._reading or self._begin()
                for batch, self._position in reading:
                    yield batch
                    if self._reading is not reading:  # a change, or another iteration
                        if self._closed:
                            return
                        break
                else:
                    return
        finally:
            if self._reading is reading:
                self._stop_reading()

    def __next__(self) -> BatchT:
        """Return the next batch, as `get_batch` does."""
        return self.get_batch()

    def get_batch(self) -> BatchT:
        """Return the next batch, for ever: after the last one of an epoch comes the first one of the next epoch."""
        while (batch := self._next_of_epoch()) is None:
            self.set_epoch(self.epoch + 1)
        return batch

    def _next_of_epoch(self) -> BatchT | None:
        """Return the next batch, or None at the end of the epoch. After an error the next call tries again."""
        reading = self._reading or self._begin()
        try:
            batch, self._position = next(reading)
        except BaseException as error:
            self._reading = None
            if isinstance(error, StopIteration):
                return None
            raise
        return batch

    def _begin(self) -> Generator[tuple[BatchT, Any]]:
        reading = self._reading = self._read_from(self._position)
        self._resumed = False
        return reading

    def _go_to(self, position: Any, *, resumed: bool = False) -> None:
        """Continue at a position with the next batch."""
        self._stop_reading()
        self._position, self._resumed = position, resumed

    def _stop_reading(self) -> None:
        """End the reading threads, and drop what was read ahead."""
        if self._reading is not None:
            self._reading.close()
        self._reading = None

    def close(self) -> None:
        """End the reading threads, and close what is read."""
        self._closed = True
        self._stop_reading()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_resumed": self._resumed or self._reading is not None}


class EpochLoader(ReadingLoader[BatchT]):
    """A loader of epochs. A position counts what all ranks together have consumed in the epoch: records, documents."""

    path: str | os.PathLike[str]
    plan: StepPlan
    skip: tuple[tuple[int, int, int], ...]
    mask_documents: tuple[int, ...]
    _last_epoch = MAX_COUNT
    _counts = "records"

    @abstractmethod
    def plan_of_epoch(self, epoch: int) -> StepPlan:
        """Return what this rank reads at each step of an epoch. `plan` is that of the current one."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the fields that must agree for a position to mean the same."""

    @abstractmethod
    def _mask(self) -> None:
        """Take over `mask_documents`."""

    def _serve(self, fingerprint: object) -> None:
        """Go on with a reader of the same content that has the fingerprint of a state, if there is one."""

    def _remedies(self, state: Any) -> dict[str, str]:
        return dict.fromkeys(self.identity(), "; force=True takes the position all the same")

    def _end_of_epoch(self, epoch: int) -> int:
        return self.plan.order.n

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over. A resumed position is kept if it belongs to this epoch."""
        require_epoch(epoch)
        if self.epoch != epoch:
            self.epoch, self.plan = epoch, self.plan_of_epoch(epoch)
            self._go_to(0)

    def _choose(self, skip: Collection[tuple[int, int, int]], mask_documents: Collection[int]) -> None:
        """Jump over these positions, and mask these documents, from the next step on."""
        if set(skip) != set(self.skip):
            self.skip = checked_skip(skip)
            self.plan = self.plan_of_epoch(self.epoch)
        if set(mask_documents) != set(self.mask_documents):
            self.mask_documents = tuple(sorted(mask_documents))
            self._mask()

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: it counts what was yielded, never what was read ahead.

        Plain JSON values, under 1 KB, the same on every rank after the same step. `position` counts records, or
        documents, of all ranks in this epoch, so that it is valid for any other world size and batch size; those that
        filled up the last step (`drop_last=False`) are not counted again.
        """
        position = min(self._position, self._end_of_epoch(self.epoch))
        return {**self.identity(), "epoch": self.epoch, "position": position, **chosen(self.skip, self.mask_documents)}

    def load_state_dict(self, state_dict: dict[str, Any], *, force: bool = False) -> None:
        """Continue exactly where `state_dict` was taken, in O(1), whatever the ranks, batch size or backend were then.

        Parameters
        ----------
        force
            Take epoch and position even if they are of other data, another seed or another order.

        Raises
        ------
        StateError
            If the state is of other data, another seed or another order, of another kind of loader, or no state at
            all; the message names the field. Nothing is taken over then.
        """
        where, before = self.path, dict(self.__dict__)
        state = dict(require_kind(where, state_dict, self.identity()["kind"]))
        skip, masked = chosen_in(where, state)
        try:
            if not force:
                self._serve(state.get("fingerprint"))
                require_state(where, state, self.identity(), ("epoch", "position"), self._remedies(state))
            epoch = require_count(where, state, "epoch", self._last_epoch)
            end = self._end_of_epoch(epoch)
            position = require_count(where, state, "position", end, f"the {self._counts} of an epoch")
            self._choose({*self.skip, *skip}, {*self.mask_documents, *masked})
            self.set_epoch(epoch)
        except ZbError as error:  # such as documents to mask that are not there
            self.__dict__.update(before, _reading=self._reading)
            if isinstance(error, StateError):
                raise
            raise StateError(f"{where}: state: {error}") from error
        self._go_to(position, resumed=True)
