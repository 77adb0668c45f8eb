"""Whole stored batches that memory cannot keep, read past the page cache some steps before they are given."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from zb_hdf5.errors import ZbError
from zb_hdf5.files.direct_reads import DirectReads
from zb_hdf5.files.ranges import LocalFile
from zb_hdf5.loaders.ahead import HINTED_AHEAD, HINTED_TOGETHER
from zb_hdf5.loaders.whole_batches import WholeBatches

if TYPE_CHECKING:
    import torch

#: Bytes of the batches that are under way, about; of larger batches, one.
UNDER_WAY_BYTES: Final = 16 << 20


class DirectBatches:
    """Reads batches in the order in which they were announced. To be used by one thread.

    Each read that is refused or fails is made in the usual way, which raises the error; batches that are announced
    from then on are announced to the kernel, as are all where this system has no such reads, or does not allow them.

    Parameters
    ----------
    whole
        The batches.
    announce
        Announces batches to the kernel, by their numbers.

    Attributes
    ----------
    depth
        Batches between the announcement and the read, about.
    """

    def __init__(self, whole: WholeBatches, announce: Callable[[Sequence[int]], None]) -> None:
        batch_bytes = math.prod(whole.shape) * whole.stored.itemsize
        self.depth = max(1, min(HINTED_AHEAD, UNDER_WAY_BYTES // batch_bytes))
        self._whole = whole
        self._reads: DirectReads | None = None
        try:
            self._reads = DirectReads(whole.shape, whole.stored, self.depth + min(self.depth, HINTED_TOGETHER))
        except OSError:
            self.depth = HINTED_AHEAD
        self._announce = announce
        #: Number and crc32, but no file: each would stay open for as long.
        self._begun = deque[tuple[int, int | None]]()

    def announce(self, numbers: Sequence[int]) -> None:
        """Begin to read batches."""
        if self._reads is None or not self._reads.is_usable:
            self._announce(numbers)
            return
        reads = []
        for number in numbers:
            try:
                place = self._whole.place(number)
                expected = self._whole.crc32_at(place)
            except (ZbError, OSError):  # raised again by its read
                continue
            plain = place.plain
            if plain is not None and isinstance(plain.file, LocalFile):
                self._begun.append((number, expected))
                base, stride, _ = plain.extents.runs[0]
                reads.append((place.file, plain.file, base + place.within * stride))
        self._reads.begin(reads)

    def read(self, number: int) -> torch.Tensor:
        """Return a batch."""
        if self._reads is None or not self._begun or self._begun[0][0] != number:
            return self._whole.read_by_position(number)
        _, expected = self._begun.popleft()
        return self._whole.compared(number, self._reads.take(), expected, copy=True)

    def close(self) -> None:
        """Wait for the reads under way."""
        if self._reads is not None:
            self._reads.close()
