"""A task, the engines that run tasks, and the progress of the work."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from zb_hdf5.files.publishing import partial_path

#: Is called with the amount that was done since the last call: tokens, or bytes of documents.
Progress = Callable[[int], None]
Result = TypeVar("Result")


def no_progress(amount: int) -> None:
    """Show nothing, as in a worker, whose progress is seen from its files."""


class Shown(Protocol):
    """Shows the progress of one phase after the other, as `console.Progress` does."""

    def begin(self, label: str, total: int, unit: str = "tok") -> None:
        """Begin a phase."""

    def advance(self, amount: int) -> None:
        """Count an amount as done."""

    def keep(self, amount: int) -> None:
        """Count an amount as done that was there before."""


class TokensShown:
    """Calls a function with the tokens that are written, and with nothing else."""

    def __init__(self, progress: Progress = no_progress) -> None:
        self._progress, self._unit = progress, "tok"

    def begin(self, label: str, total: int, unit: str = "tok") -> None:
        self._unit = unit

    def advance(self, amount: int) -> None:
        if self._unit == "tok":
            self._progress(amount)

    def keep(self, amount: int) -> None:
        return


def tokens_written(path: Path, dtype: np.dtype[Any]) -> int:
    """Return how far the process is that writes a file of tokens, by the size of the file."""
    for there in (path, partial_path(path)):
        with suppress(OSError):
            return there.stat().st_size // dtype.itemsize
    return 0


class Task(Protocol):
    """The work of one process."""

    @property
    def amount(self) -> int:
        """All of it, in the unit of the progress."""

    def amount_done(self) -> int:
        """Return the part that is done, as any other process can see it."""


class Engine(Protocol):
    """Runs tasks.

    Attributes
    ----------
    workers
        How many run at the same time.
    workers_per_node
        How many of them share the memory of one node, at most.
    """

    workers: int
    workers_per_node: int

    def run(
        self, function: Callable[[Any, Progress], Result], tasks: Iterable[Task], progress: Progress
    ) -> Generator[tuple[int, Result]]:
        """Yield (number of the task, its result) as they finish; close the generator when done with it.

        An exception, or closing early, ends the tasks that are still at work.
        """


class Workers(NamedTuple):
    """Who does the work of a conversion: an engine, the threads of each process, and who shows the progress."""

    engine: Engine
    num_threads: int
    shown: Shown
