"""Whole stored batches of plain files, read without another layer: one check and one widening each."""

from __future__ import annotations

import contextlib
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import repeat
from operator import getitem
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ZbError
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.paths import files_at_hand
from zb_hdf5.files.ranges import LocalFile
from zb_hdf5.files.tokens import FileTokens, Wait
from zb_hdf5.formats.batches import Batches
from zb_hdf5.packages import from_numpy

if TYPE_CHECKING:
    import torch

#: Single batches for which one sample of the store holds.
SINGLE_READS: Final = 4096
#: Batches of that sample.
SINGLE_SAMPLE: Final = 32
#: Single batches for which the size of a file holds.
SIZE_READS: Final = 64
#: Files whose mapping a block keeps at hand, at most. Each of them stays open for as long.
MAX_OPEN: Final = 32
#: A file: its batches as an array (count, B, S); their crc32 by number; its tokens, if it is not mapped. Each may
#: be None. Without array and tokens, its batches are read one by one.
OpenFile: TypeAlias = tuple[npt.NDArray[Any] | None, Callable[[int], int] | None, FileTokens | None]
_local = threading.local()


class BatchPlace(NamedTuple):
    """A stored batch: its number, that of its file, its number there, and the tokens of the file.

    Without tokens it has no place in a plain file: it is read as `Batches` reads it.
    """

    number: int
    file: int
    within: int
    plain: FileTokens | None


class WholeBatches:
    """Widens stored batches of plain files, from their mappings, or by one positioned read or request each.

    Batches of other files, and those whose crc32 differs, are read as `Batches` reads them, which raises the errors.
    The size of a mapped file is asked for once in a block: a file that is cut short inside it is a bus error. With
    verify="batch" a batch is copied first, and the copy is compared: a file that changes meanwhile changes nothing that
    was compared.
    The file of a cache is not mapped.

    Parameters
    ----------
    batches
        Those of a store that `serves`.
    narrow
        The tensors are of int32, else of int64.
    """

    def __init__(self, batches: Batches, narrow: bool) -> None:
        self._batches = batches
        self._read = batches.read_batch_int32 if narrow else batches.read_batch_torch
        self._dtype = np.dtype(np.int32 if narrow else np.int64)
        #: The shape of a batch.
        self.shape = batches.meta.shape
        self._is_far = batches.tokens.wait is Wait.FAR and not batches.corpus.is_cached
        is_plain_view = narrow and batches.dtype == np.uint32
        #: The dtype of a batch before it is widened; one that needs no more is given as it was read.
        self.stored = self._dtype if is_plain_view else batches.dtype
        self._copies = batches.verified == "all reads"
        #: The pages of a batch are touched by whoever uses it.
        self.gives_views = is_plain_view and not (self._copies or self._is_far or batches.corpus.is_cached)
        self._most_open = files_at_hand(MAX_OPEN)
        self._is_ready = False
        self._open_files: dict[int, OpenFile] = {}
        self._reads_left = 0
        self._looks_left = 0
        self._unit = batches.meta.batch_tokens
        self._starts = batches.tokens.files.starts
        #: Batches are read by their positions.
        self._has_places = not self._is_far and (batches.tokens.access != "mmap" or batches.corpus.is_cached)

    @staticmethod
    def serves(batches: Batches) -> bool:
        """Return whether batches are stored one by one in plain files that do not grow, or in a cache."""
        tokens = batches.tokens
        unit = batches.meta.batch_tokens
        is_plain = tokens.wait is not Wait.DECODE and tokens.access in ("auto", "mmap", "pread", "remote")
        if not batches.complete or not (is_plain or batches.corpus.is_cached):
            return False
        files = tokens.files
        if any(file.unit != unit for file in files.known.values()):  # a file of another trainer is one unit
            return False
        follow = tokens.unit == unit and batches.windows.stride == batches.windows.length
        return follow and not any(start % unit for start in files.starts[:-1])

    def read_all(self, block: npt.NDArray[np.int64]) -> Iterator[torch.Tensor]:
        """Yield each of some batches, in order. They are in the page cache."""
        starts = np.array(self._starts) // self._unit
        numbers = starts[1:].searchsorted(block, side="right")
        files = numbers.tolist()
        indices = (block - starts[numbers]).tolist()
        known = dict.fromkeys(files)
        if self.gives_views and len(known) <= self._most_open:
            with contextlib.suppress(ZbError, OSError):  # raised again at its own step
                views: dict[int, Any] = {file: self._open_file(file, int(starts[file]))[0] for file in known}
                if all(view is not None for view in views.values()):  # a loop of Python takes half as long as a batch
                    return map(from_numpy(), map(getitem, map(views.__getitem__, files), indices))
        return map(self._read_at, block.tolist(), files, indices, repeat({}))

    def read(self, number: int) -> torch.Tensor:
        """Return one batch, in any order of the numbers."""
        is_ready = self.is_ready()
        self._reads_left -= 1
        if not is_ready:
            return self.read_by_position(number)
        file = bisect_right(self._starts, number * self._unit) - 1
        return self._read_at(number, file, number - self._starts[file] // self._unit, self._open_files)

    def is_ready(self) -> bool:
        """Return whether single batches are in memory, as far as a sample of the store shows it."""
        if self._reads_left <= 0:  # below 0 where threads meet
            self._renew_sizes()
        return self._is_ready

    def _renew_sizes(self) -> None:
        """Ask again for the sizes of files that single batches are read from, and sometimes for the page cache."""
        self._open_files = {}
        self._reads_left = SIZE_READS
        if self._looks_left <= 0:
            self._looks_left = SINGLE_READS // SIZE_READS
            sample = np.linspace(0, self._batches.num_batches - 1, SINGLE_SAMPLE).astype(int).tolist()
            self._is_ready = self._is_far or all(map(self._batches.is_ready, sample))
        self._looks_left -= 1

    def _read_at(self, number: int, file: int, index: int, open_files: dict[int, OpenFile]) -> torch.Tensor:
        """Return batch `number`, which is batch `index` of a file; `open_files` has the files of the batches before."""
        known = open_files.get(file)
        if known is None:
            if len(open_files) >= self._most_open:
                open_files.clear()
            known = open_files[file] = self._open_file(file, number)
        views, crc32, plain = known
        expected = None if crc32 is None else crc32(index)
        if expected is not None and expected < 0:  # the cache lacks it
            return self._read(number)
        batch: npt.NDArray[Any] | None = None
        if views is not None:
            batch = self._copied(views[index]) if self._copies else views[index]
        elif plain is not None:
            batch = self._filled(plain, index)
        if batch is None or (expected is not None and crc32_of(batch) != expected):  # `compared` is one call more
            return self._read(number)
        return from_numpy()(batch.astype(self._dtype, copy=False))

    def compared(
        self, number: int, batch: npt.NDArray[Any] | None, expected: int | None, *, copy: bool = False
    ) -> torch.Tensor:
        """Return batch `number` as it was read, if its crc32 is the expected one; else as `Batches` reads it.

        Parameters
        ----------
        batch
            The batch in the dtype that is stored; None: the read failed.
        expected
            Its crc32; None: it is not compared.
        copy
            Also a batch that needs no widening is copied: others fill its memory.
        """
        if batch is None or (expected is not None and crc32_of(batch) != expected):
            return self._read(number)  # which raises the error
        return from_numpy()(batch.astype(self._dtype, copy=copy))

    @property
    def outruns_memory(self) -> bool:
        """Whether memory cannot keep the batches until they are read again, and each has a place in a file."""
        batches = self._batches
        return self._has_places and not batches.corpus.is_cached and batches.tokens.pages.residency.outruns_memory

    def place(self, number: int) -> BatchPlace:
        """Return the place of a batch, without its mapping. Raises as the read does."""
        start = number * self._unit
        file = bisect_right(self._starts, start) - 1
        return BatchPlace(number, file, number - self._starts[file] // self._unit, self._plain(file, start))

    def _plain(self, file: int, start: int) -> FileTokens | None:
        """Return the tokens of a file whose units are batches at a constant stride; else None."""
        files = self._batches.tokens.files  # each time: the tokens of a corpus that was closed have no places
        plain = files.open(file, start).resolve()
        return plain if plain is not None and plain.unit == self._unit and len(plain.extents.runs) == 1 else None

    def read_by_position(self, number: int) -> torch.Tensor:
        """Return one batch by a positioned read, wherever it is."""
        if not self._has_places:
            return self._read(number)
        place = self.place(number)
        plain = place.plain
        batch = None if plain is None else self._filled(plain, place.within)
        # after the read: its crc32 may be mapped, and a file that was cut short gives no batch
        crc32_lookup = None if batch is None or plain is None else plain.crc32_lookup
        return self.compared(number, batch, None if crc32_lookup is None else crc32_lookup()(place.within))

    def crc32_at(self, place: BatchPlace) -> int | None:
        """Return the stored crc32 of a batch; None if it is not compared.

        Raises `IncompleteError` if the file has become shorter: its crc32 may be mapped.
        """
        plain = place.plain
        if plain is None or plain.crc32_lookup is None or not isinstance(plain.file, LocalFile):
            return None
        plain.file.require_whole()
        return plain.crc32_lookup()(place.within)

    def _open_file(self, file: int, number: int) -> OpenFile:
        """Open the file of a batch that is about to be read, and ask for its size."""
        plain = self._plain(file, number * self._unit)
        if plain is None:
            return None, None, None
        views, crc32, _, _ = plain.unit_access(self.gives_views)
        if views is None:
            return None, crc32, None if self.gives_views else plain
        return views.reshape(-1, *self.shape).view(self.stored), crc32, None

    def _buffer(self) -> npt.NDArray[Any]:
        """Return an array for a batch: one of this thread, which the next batch fills again, if it is widened then.

        A new array for each costs 24 page faults for 64 KiB: the C library gives its memory back in between.
        """
        shape = self.shape
        if self.stored == self._dtype:
            return np.empty(shape, self._dtype)
        found: npt.NDArray[Any] | None = getattr(_local, "batch", None)
        if found is None or found.shape != shape or found.dtype != self.stored:
            found = _local.batch = np.empty(shape, self.stored)
        return found

    def _copied(self, batch: npt.NDArray[Any]) -> npt.NDArray[Any]:
        copy = self._buffer()
        copy[...] = batch
        return copy

    def _filled(self, plain: FileTokens, index: int) -> npt.NDArray[Any] | None:
        """Read a batch by its position; None if the read failed: `Batches` has the message."""
        if self._is_far:
            return plain.unit_of_object(index).reshape(self.shape)
        batch = self._buffer()
        run = plain.extents.runs[0]
        try:
            num_bytes = os.preadv(plain.file.fd, (batch,), run.base + index * run.stride)
        except OSError:
            return None
        return batch if num_bytes == batch.nbytes else None

    def close(self) -> None:
        """Let go of the files of the last single batches."""
        self._open_files = {}
        self._reads_left = 0
        self._looks_left = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_files": {}, "_reads_left": 0, "_looks_left": 0}
