"""The protocol of every loader, and the class that most of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Any, Protocol, Self, runtime_checkable


@runtime_checkable
class TokenLoader(Protocol):
    """Gives batches, and knows where it stands. A loader with epochs has a length too; an endless one has none.

    Notes
    -----
    `iter(loader)` yields one epoch, or, where there are no epochs or the end is not known, the rest. `next(loader)` and
    `get_batch()` give the next batch without it.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def get_batch(self) -> Any:
        """Return the next batch, for ever: behind an epoch comes the next one."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. A position in this epoch is kept."""

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands, in plain JSON values. `kind` says what takes it."""

    def load_state_dict(self, state_dict: dict[str, Any], *, force: bool = False) -> None:
        """Continue exactly where `state_dict` was taken. `force`: even if it is of other data or another order."""

    def close(self) -> None:
        """End threads and release files. May be called again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class ReadingLoader(ABC):
    """A loader with a reading under way: a generator of steps, whose threads end when it is closed.

    Not thread-safe. A pickled loader reads nothing: its copy begins anew from the same position.
    """

    _reading: Generator[Any] | None = None
    #: The iteration that `get_batch` goes on with, in loaders that have one.
    _forever: Iterator[Any] | None = None

    @abstractmethod
    def get_batch(self) -> Any:
        """Return the next batch."""

    @abstractmethod
    def close(self) -> None:
        """End the reading threads, and close what is read."""

    def __next__(self) -> Any:
        """Return the next batch, as `get_batch` does."""
        return self.get_batch()

    def _stop_reading(self) -> None:
        """End the reading threads, and drop what was read ahead."""
        if self._reading is not None:
            self._reading.close()
        self._reading = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None, "_forever": None}
