"""The statistics of a loader: the batches that it gave, and how long its caller has waited for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from zb_hdf5.errors import counted


@dataclass(frozen=True)
class LoaderStats:
    """The batches that a loader has given, and the time that its caller has waited for them.

    Its text is one line for a training log: `print(loader.stats())`.

    Attributes
    ----------
    batches
        The batches.
    num_bytes
        The bytes of their tensors and arrays.
    waited_s
        Seconds in which the caller has waited for batches.
    elapsed_s
        Seconds since the first of them was asked for.
    fetched
        Units that were fetched into the cache, as the store has not been read there before: batches, or chunks of a
        stream. None: the loader has no cache.
    """

    batches: int
    num_bytes: int
    waited_s: float
    elapsed_s: float
    fetched: int | None = None

    @property
    def waited_share(self) -> float:
        """The share of the time that was waited, 0 to 1."""
        return self.waited_s / self.elapsed_s if self.elapsed_s else 0.0

    def since(self, earlier: LoaderStats) -> Self:
        """Return the statistics of the time after an earlier look at the same loader."""
        fetched = None if self.fetched is None else self.fetched - (earlier.fetched or 0)
        return type(self)(
            self.batches - earlier.batches,
            self.num_bytes - earlier.num_bytes,
            self.waited_s - earlier.waited_s,
            self.elapsed_s - earlier.elapsed_s,
            fetched,
        )

    def __str__(self) -> str:
        rate = self.num_bytes / self.elapsed_s / 1e6 if self.elapsed_s else 0.0
        waited = f"waited {self.waited_s:.2f} of {self.elapsed_s:.2f} s for data ({self.waited_share:.1%})"
        fetched = "" if self.fetched is None else f", {self.fetched:,} fetched into the cache"
        return f"{counted(self.batches, 'batch')}, {rate:,.1f} MB/s, {waited}{fetched}"


def bytes_of(batch: Any) -> int:
    """Return the bytes of a batch: a tensor or an array, a pair of them, or a dictionary; other values have none."""
    if isinstance(batch, tuple):
        parts: Iterable[Any] = batch
    elif isinstance(batch, (dict, Mapping)):  # a dictionary is told ten times as fast as by `Mapping` alone
        parts = batch.values()
    else:
        return int(getattr(batch, "nbytes", 0))
    total = 0
    for part in parts:
        num_bytes = getattr(part, "nbytes", None)
        total += bytes_of(part) if num_bytes is None else num_bytes
    return total
