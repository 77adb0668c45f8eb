"""What every loader that reads ahead has: the reading under way, and its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Any, Self


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
