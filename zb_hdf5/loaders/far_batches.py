"""Whole batches of a server, several by one request, and many requests at the same time."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zb_hdf5.errors import ZbError
from zb_hdf5.files.objects import reads_at_once
from zb_hdf5.files.threads import read_ahead
from zb_hdf5.files.tokens import Wait
from zb_hdf5.formats.batches import Batches
from zb_hdf5.loaders.step_values import REREAD_S
from zb_hdf5.packages import from_numpy
from zb_hdf5.spec import NO_CODEC

if TYPE_CHECKING:
    import torch

#: Batches read ahead are at least so many requests.
MIN_REQUESTS: Final = 16
#: Batches read ahead are at least so many turns of all threads.
MIN_REQUEST_ROUNDS: Final = 8


def _parts(numbers: Iterable[int], least: int, most: int) -> Iterator[list[int]]:
    """Yield numbers in order, `least` of them together, and up to `most` that follow each other."""
    part: list[int] = []
    for number in numbers:
        limit = most if part and number == part[-1] + 1 else least
        if len(part) >= limit:
            yield part
            part = []
        part.append(number)
    if part:
        yield part


class FarBatches:
    """Reads whole batches ahead of their steps; an error is raised at its own step.

    Parameters
    ----------
    batches
        Batches that it `serves`.
    dtype
        The dtype of the tensors.
    read
        Reads one batch by its number.
    """

    def __init__(self, batches: Batches, dtype: np.dtype[Any], read: Callable[[int], torch.Tensor]) -> None:
        self._batches = batches
        self._dtype = dtype
        self._read = read

    @staticmethod
    def serves(batches: Batches) -> bool:
        """Return whether batches that follow each other are one range of an object."""
        return batches.tokens.wait is Wait.FAR and batches.meta.codec == NO_CODEC and batches.overlap == 0

    def read_all(self, numbers: Iterator[int], depth: int) -> Generator[torch.Tensor]:
        """Yield each of some batches, in order, and read so many later ones meanwhile."""
        files = self._batches.tokens.files
        first = next(numbers)
        start = first * self._batches.meta.batch_tokens
        files.open(bisect_right(files.starts, start) - 1, start)  # and time an answer
        threads = reads_at_once(os.fspath(self._batches.path))
        least = max(1, depth // MIN_REQUEST_ROUNDS // threads)
        most = max(1, depth // MIN_REQUESTS)
        parts = _parts(chain([first], numbers), least, most)
        for part, found in read_ahead(self._read_part, parts, depth, threads=threads, size=len):
            yield from map(self._read, part) if found is None else found

    def _read_part(self, part: list[int]) -> tuple[list[int], list[torch.Tensor] | None]:
        """Return some batches with their numbers; None if one cannot be read, unless that took long."""
        begun_s = time.monotonic()
        batches = self._batches
        unit = batches.meta.batch_tokens
        try:
            if len(part) == 1 or part != [*range(part[0], part[0] + len(part))]:
                return part, [*map(self._read, part)]
            tokens = np.empty((len(part), *batches.meta.shape), batches.dtype)
            starts = range(part[0] * unit, (part[-1] + 1) * unit, unit)
            batches.tokens.read(zip(starts, tokens.reshape(len(part), -1), strict=True))
        except (ZbError, OSError):
            if time.monotonic() - begun_s > REREAD_S:
                raise
            return part, None
        return part, [from_numpy()(batch.astype(self._dtype)) for batch in tokens]
