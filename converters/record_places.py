"""The places of records in arrays that follow each other: a record of streams has tokens of several files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class RecordPart(NamedTuple):
    """The tokens of a record that lie in one file: their first one there, and their places in the record."""

    file_number: int
    start: int
    inside: slice


class RecordPlaces:
    """The places of the records of arrays.

    Streams beside each other are one stream, from which records are cut; an array of records has its own.

    Parameters
    ----------
    shapes
        The shape of each array: (tokens,) of a stream, (records, tokens of each) of records.
    seq_len
        Tokens of a record.
    begins
        The numbers of arrays that no record shares with the array before them, such as the first one of a split.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], seq_len: int, begins: Sequence[int] = ()) -> None:
        self.seq_len = seq_len
        self._file_ends = np.cumsum([*map(math.prod, shapes)])
        self._file_starts = np.concatenate([[0], self._file_ends[:-1]])
        is_begun = np.array([True, *(len(before) == 2 or len(shape) == 2 for before, shape in pairwise(shapes))])
        is_begun[[*begins]] = True
        self._runs = np.cumsum(is_begun) - 1
        self._starts = self._file_starts[is_begun]  # of each run of files that are cut together
        tokens = np.diff([*self._starts, self._file_ends[-1]])
        counts = tokens // seq_len
        self._ends = np.cumsum(counts)
        self._firsts = self._ends - counts
        self.total = int(self._ends[-1])
        self.num_left_over = int((tokens - counts * seq_len).sum())
        counts_alone = np.diff([*self._file_starts, self._file_ends[-1]]) // seq_len
        skips = self._file_starts - self._starts[self._runs]
        is_shifted = bool((skips[counts_alone > 0] % seq_len).any())
        self.cuts_files = is_shifted or int(counts_alone.sum()) < self.total

    def first_record(self, file_number: int) -> int:
        """Return the first record of the files that are cut together with this one."""
        return int(self._firsts[self._runs[file_number]])

    def starts(self, records: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the first token of each record, counted over all files."""
        runs = np.searchsorted(self._ends, records, side="right")
        found: npt.NDArray[np.int64] = self._starts[runs] + (records - self._firsts[runs]) * self.seq_len
        return found

    def files(self, starts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the number of the file of each of some tokens, and its position there."""
        numbers = np.searchsorted(self._file_ends, starts, side="right")
        return numbers, starts - self._file_starts[numbers]

    def are_whole(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether each of some records lies in one file."""
        numbers = np.searchsorted(self._file_ends, starts, side="right")
        whole: npt.NDArray[np.bool_] = starts + self.seq_len <= self._file_ends[numbers]
        return whole

    def parts(self, start: int) -> Iterator[RecordPart]:
        """Yield the parts of a record, by its first token."""
        done = 0
        number = int(np.searchsorted(self._file_ends, start, side="right"))
        while done < self.seq_len:
            count = min(self.seq_len - done, int(self._file_ends[number]) - start - done)
            if count:
                yield RecordPart(number, start + done - int(self._file_starts[number]), slice(done, done + count))
            done += count
            number += 1
