"""The protocol of every loader, and the base of those that read ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

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
                    if self._closed:
                        return
                    if self._reading is not reading:  # a change, or another iteration
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
