"""Batches of windows of a stream, widened from the mappings of its files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.paths import files_at_hand
from zb_hdf5.files.tokens import StoredIds
from zb_hdf5.formats.batches import Batches
from zb_hdf5.packages import from_numpy

if TYPE_CHECKING:
    import torch

#: Reads a batch by its number.
ReadBatch: TypeAlias = "Callable[[int], torch.Tensor]"
#: Marks that are kept together.
MARKS_OF_PAGE: Final = 1 << 15
#: Files whose mapping a block of batches keeps at hand, at most. Each of them stays open for as long.
MAX_FILES: Final = 32


class Marks:
    """Numbers that are marked: a bit for each, in pages that are made for the first mark in them."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def __contains__(self, number: int) -> bool:
        page = self._pages.get(number // MARKS_OF_PAGE)
        return page is not None and bool(page[number % MARKS_OF_PAGE >> 3] & 1 << (number & 7))

    def add(self, number: int) -> None:
        """Mark a number."""
        page = self._pages.get(number // MARKS_OF_PAGE)
        if page is None:
            page = self._pages[number // MARKS_OF_PAGE] = bytearray(MARKS_OF_PAGE // 8)
        page[number % MARKS_OF_PAGE >> 3] |= 1 << (number & 7)


class MappedWindows:
    """Reads batches of windows, which may overlap, without a copy before the one that widens them.

    The sizes of the files are asked for once in a block of batches. Ids that another program has stored are compared
    when a batch is read for the first time: their maximum alone, as that of unsigned integers.

    Parameters
    ----------
    batches
        The windows of a stream.
    dtype
        The dtype of the tensors.
    """

    def __init__(self, batches: Batches, dtype: np.dtype[Any]) -> None:
        self._batches = batches
        self._dtype = dtype
        self._compared = Marks()
        self._most_open = files_at_hand(MAX_FILES)

    def read_all(self, block: npt.NDArray[np.int64], read: ReadBatch) -> Iterator[torch.Tensor]:
        """Yield each of some batches, in order. They are in the page cache.

        Parameters
        ----------
        read
            Reads a batch by its number: one that no mapping holds, or whose ids are none. It raises the error.
        """
        numbers: list[int] = block.tolist()
        batches = self._batches
        stored = batches.tokens.stored_ids()
        if stored is None:
            return self._from_files(numbers, read)
        if self._is_view(stored):
            return map(read, numbers)
        views = batches.windows.batches_in(stored.ids, batches.num_batches)
        if stored.limit is None:
            as_tensor, dtype = from_numpy(), self._dtype  # once for all of them
            return (as_tensor(views[number].astype(dtype)) for number in numbers)
        return self._from_one(views, self._as_copied(views), stored.limit, numbers, read)

    def _is_view(self, stored: StoredIds) -> bool:
        """Return whether a batch is a view of the mapping, which is not a copy."""
        return stored.limit is None and stored.ids.itemsize >= self._dtype.itemsize

    def _as_copied(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return ids of the size of the ids of the tensors as these are: a plain copy is faster than a conversion."""
        return ids.view(self._dtype) if ids.itemsize == self._dtype.itemsize and ids.dtype.isnative else ids

    def _from_one(
        self, views: npt.NDArray[Any], copied: npt.NDArray[Any], limit: int, numbers: list[int], read: ReadBatch
    ) -> Iterator[torch.Tensor]:
        """Yield batches from one mapping of all tokens; each id is compared once."""
        as_tensor, dtype = from_numpy(), self._dtype
        for number in numbers:
            if number not in self._compared:
                if views[number].max() > limit:
                    yield read(number)  # raises the error
                    continue
                self._compared.add(number)
            yield as_tensor(copied[number].astype(dtype))

    def _from_files(self, numbers: list[int], read: ReadBatch) -> Iterator[torch.Tensor]:
        """Yield batches from the mappings of their files; one that two files share is read."""
        batches = self._batches
        windows = batches.windows
        starts = batches.tokens.files.starts
        num_tokens = windows.batch_stride + windows.overlap
        open_files: dict[int, StoredIds | None] = {}
        for number in numbers:
            start = number * windows.batch_stride
            file = bisect_right(starts, start) - 1
            within = start - starts[file]
            stored = None
            if start + num_tokens <= starts[file + 1]:
                if file not in open_files:
                    if len(open_files) >= self._most_open:
                        open_files.clear()
                    open_files[file] = self._stored_ids_of(file, start)
                stored = open_files[file]
            batch = None if stored is None else self._batch_of(stored, number, within, num_tokens)
            yield read(number) if batch is None else batch

    def _stored_ids_of(self, file: int, start: int) -> StoredIds | None:
        """Open the file of a batch that begins with token `start` of all; None if it gives no views to widen."""
        stored = self._batches.tokens.files.open(file, start).stored_ids()
        return None if stored is None or self._is_view(stored) else stored

    def _batch_of(self, stored: StoredIds, number: int, within: int, num_tokens: int) -> torch.Tensor | None:
        """Return a batch from the view of its file; None if it has values that are not ids."""
        ids = stored.ids[within : within + num_tokens]
        if stored.limit is not None and number not in self._compared:
            if stored.has_others(ids):
                return None
            self._compared.add(number)
        return from_numpy()(self._batches.windows.batches_in(self._as_copied(ids), 1)[0].astype(self._dtype))
