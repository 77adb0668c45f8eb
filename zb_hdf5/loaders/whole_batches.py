"""Whole stored batches of plain local files, straight from mapping or descriptor: one check and one widening each."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from operator import getitem
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.digests import crc32_of
from zb_hdf5.files.tokens import PlainFile, Wait
from zb_hdf5.formats.batch_reader import BatchReader, from_numpy

if TYPE_CHECKING:
    import torch

#: Single batches for which one sample of the store holds, and its size; those for which the size of a file holds.
SINGLE_READS, SINGLE_SAMPLE, MET_READS = 4096, 32, 64
#: Files whose mapping a block keeps at hand. Each of them stays open for as long.
MAX_MET: Final = 32

#: The batches of a file as an array (count, B, S), their crc32 by number, and the file if it is not mapped. None: the
#: batches are read by position or by the reader, and not checked.
Met: TypeAlias = tuple[npt.NDArray[Any] | None, Callable[[int], int] | None, PlainFile | None]


class WholeBatches:
    """Widens the stored batches of a reader from the mappings of its files, or by one positioned read each.

    Batches of files that are not plain, and those whose crc32 differs, are read by the reader, which raises the
    errors. The size of a mapped file is asked for once in a block: a file that is cut short inside it is a bus error.
    `narrow`: tensors of int32, views of a private mapping where uint32 is stored. As thread-safe as the reader;
    picklable.
    """

    def __init__(self, reader: BatchReader, narrow: bool) -> None:
        self._reader = reader
        self._read = reader.read_batch_int32 if narrow else reader.read_batch_torch
        self._dtype = np.dtype(np.int32 if narrow else np.int64)
        self._is_view = narrow and reader.dtype == np.uint32
        self._checks = reader.verified == "all reads" or not self._is_view or reader.in_front is not None
        self._single_reads_left, self._is_ready, self._met = 0, False, dict[int, Met]()
        #: The first batch of each file, and the end of the last one.
        self._starts = [start // reader.meta.batch_tokens for start in reader.tokens.starts]

    @staticmethod
    def serves(reader: BatchReader) -> bool:
        """Return whether batches are stored one by one in plain local files that do not grow, or in a cache."""
        tokens, unit = reader.tokens, reader.meta.batch_tokens
        is_local = tokens.wait is Wait.LOCAL and tokens.access in ("auto", "mmap", "pread")
        if not reader.complete or not (is_local or reader.in_front is not None):
            return False
        follow = tokens.unit == unit and reader.stride == reader.seq_len
        return follow and not any(start % unit for start in tokens.starts[:-1])

    def read_all(self, batches: npt.NDArray[np.int64]) -> Iterator[torch.Tensor]:
        """Yield each of some batches, in order. They are in the page cache."""
        starts = np.array(self._starts)
        numbers = starts[1:].searchsorted(batches, side="right")
        files, indices = numbers.tolist(), (batches - starts[numbers]).tolist()
        known = dict.fromkeys(files)
        if self._is_view and not self._checks and len(known) <= MAX_MET:
            views: dict[int, Any] = {file: self._meet(file, int(starts[file]))[0] for file in known}
            if all(view is not None for view in views.values()):  # a loop of Python takes half as long as such a batch
                return map(from_numpy(), map(getitem, map(views.__getitem__, files), indices))
        return self._read_at(zip(batches.tolist(), files, indices, strict=True), {})

    def read(self, number: int) -> torch.Tensor:
        """Return one batch, in any order of the numbers."""
        if not self._single_reads_left % MET_READS:
            self._met = {}
        if not self._single_reads_left:
            self._single_reads_left = SINGLE_READS
            sample = np.linspace(0, self._reader.num_batches - 1, SINGLE_SAMPLE).astype(int).tolist()
            self._is_ready = all(map(self._reader.is_cached, sample))
        self._single_reads_left -= 1
        if not self._is_ready:
            return self._read(number)
        starts = self._starts
        file = bisect_right(starts, number, hi=len(starts) - 1) - 1
        return next(self._read_at([(number, file, number - starts[file])], self._met))

    def _read_at(self, steps: Iterable[tuple[int, int, int]], met: dict[int, Met]) -> Iterator[torch.Tensor]:
        """Yield the batches with these numbers, each of which is one of the batches of a file."""
        as_tensor, is_view, dtype = from_numpy(), self._is_view, self._dtype
        for number, file, index in steps:
            known = met.get(file)
            if known is None:
                if len(met) == MAX_MET:
                    met.clear()
                known = met[file] = self._meet(file, number)
            batches_of_file, crc32, plain = known
            if batches_of_file is not None:
                batch = batches_of_file[index]
            elif plain is None or (batch := self._filled(plain, index)) is None:
                yield self._read(number)
                continue
            if crc32 is None or crc32_of(batch) == crc32(index):
                yield as_tensor(batch if is_view else batch.astype(dtype))
            else:
                yield self._read(number)

    def _meet(self, file: int, number: int) -> Met:
        """Open a file of which a batch is about to be read, and ask for its size."""
        tokens = self._reader.tokens
        known = tokens.known.get(file) or tokens.open_file(file, number * self._reader.meta.batch_tokens)
        plain = known.plain
        if plain is None or (self._is_view and not plain.file.maps):
            return None, None, None
        rows = plain.rows if self._checks else None
        crc32 = None if rows is None else rows.__getitem__ if rows.view is None else rows.view.item
        if not plain.file.maps:
            return None, crc32, plain
        plain.file.require_whole()
        return plain.units(self._is_view).reshape(-1, *self._reader.meta.shape), crc32, None

    def _filled(self, plain: PlainFile, index: int) -> npt.NDArray[Any] | None:
        """Read a batch by its position; None where the reader has the words for what went wrong."""
        batch = np.empty(self._reader.meta.shape, self._reader.dtype)
        try:
            read = os.preadv(plain.fd, (batch,), plain.base + index * plain.stride)
        except OSError:
            return None
        return batch if read == plain.unit_bytes else None

    def close(self) -> None:
        """Let go of the files of the last single batches."""
        self._met, self._single_reads_left = {}, 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_met": {}, "_single_reads_left": 0}
