"""Whole units compared with their crc32 as they are read, and the rows of crc32."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ChecksumError, Remedy
from zb_hdf5.files.digests import crc32_of
from zb_hdf5.files.extents import Extents, FilePart, Run
from zb_hdf5.files.paths import any_path
from zb_hdf5.files.ranges import LocalFile, Ranges
from zb_hdf5.files.tokens import TokenRun, Tokens, UnitTokens, whole_units
from zb_hdf5.spec import CRC32_CHUNK_ROWS, TokenArray

#: The reads that a reader with this `verify` compares.
VERIFIED: Final = {"auto": "whole reads", "batch": "all reads", "store": "store", "none": "none"}

#: Fills an array (1-D, "<u4") with consecutive rows from a number on. It must be picklable.
ReadRows = Callable[..., None]


class Crc32Rows:
    """The stored crc32 of each unit: a view of the mapping, else read 16 KiB at a time and kept with the open file."""

    __slots__ = ("_blocks", "_num_rows", "_place", "_read", "_view")  # one for each of perhaps 50,000 open files

    def __init__(self, num_rows: int, read: ReadRows | tuple[Ranges, tuple[Run, ...]]) -> None:
        self._num_rows, self._read = num_rows, read
        self._blocks: dict[int, array[int]] | None = None
        self._place: tuple[LocalFile, int] | None = None  # the file in which they are one array, and its offset
        self._view: npt.NDArray[np.uint32] | None = None

    @classmethod
    def placed(cls, num_rows: int, ranges: Ranges, runs: tuple[Run, ...]) -> Crc32Rows:
        """Return the rows in chunks of a file: a view where they are one array in a file that may be mapped."""
        rows = cls(num_rows, (ranges, runs))
        extents = Extents(runs, 4 * CRC32_CHUNK_ROWS)
        if isinstance(ranges, LocalFile) and num_rows and len(extents.byte_ranges) == 1:
            base = extents.runs[0].base
            rows._place = (ranges, base) if base + 4 * num_rows <= ranges.size else None
        return rows

    @classmethod
    def of(cls, rows: npt.NDArray[np.uint32]) -> Crc32Rows:
        """Return rows that were read already."""
        return cls(len(rows), partial(_copy_rows, rows))

    @property
    def view(self) -> npt.NDArray[np.uint32] | None:
        """All rows, "<u4", where they are mapped; None: they are read."""
        if self._view is None and self._place is not None:
            file, base = self._place
            data, self._place = file.flat(), None
            self._view = None if data is None else data[base : base + 4 * self._num_rows].view("<u4")
        return self._view

    def __getitem__(self, number: int) -> int:
        if (view := self._view) is not None or (view := self.view) is not None:
            return int(view[number])
        block, row = divmod(number, CRC32_CHUNK_ROWS)
        rows = (self._blocks or {}).get(block)
        if rows is None:
            start = block * CRC32_CHUNK_ROWS
            rows = self._keep(block, self._rows(start, min(start + CRC32_CHUNK_ROWS, self._num_rows)))
        return rows[row]

    def all(self, *others: FilePart) -> npt.NDArray[np.uint32]:
        """Return all rows, in as few reads as they allow, and keep them."""
        # others: parts of the file of placed rows that are read at the same time
        if self.view is not None and not others:
            return self.view
        rows = self._rows(0, self._num_rows, *others)
        for block, start in enumerate(range(0, len(rows) if self.view is None else 0, CRC32_CHUNK_ROWS)):
            self._keep(block, rows[start : start + CRC32_CHUNK_ROWS])
        return rows

    def _rows(self, start: int, stop: int, *others: FilePart) -> npt.NDArray[np.uint32]:
        rows = np.empty(stop - start, "<u4")
        if isinstance(self._read, tuple):
            _read_placed(*self._read, start, rows, *others)
        else:
            self._read(start, rows)
        return rows

    def _keep(self, block: int, rows: npt.NDArray[np.uint32]) -> array[int]:
        kept = array("I", rows.astype("u4", copy=False).tobytes())
        if self._blocks is None:
            self._blocks = {}
        self._blocks[block] = kept
        return kept

    def __getstate__(self) -> tuple[int, ReadRows | tuple[Ranges, tuple[Run, ...]]]:
        return self._num_rows, self._read

    def __setstate__(self, state: tuple[int, ReadRows]) -> None:
        Crc32Rows.__init__(self, *state)


def _read_placed(
    ranges: Ranges, runs: tuple[Run, ...], start: int, out: npt.NDArray[np.uint32], *others: FilePart
) -> None:
    ranges.read_ranges([*others, *Extents(runs, 4 * CRC32_CHUNK_ROWS).places_of_tokens(start, out)])


def _copy_rows(rows: npt.NDArray[np.uint32], start: int, out: npt.NDArray[np.uint32]) -> None:
    out[...] = rows[start : start + len(out)]


class Checked(UnitTokens):
    """Tokens of one file whose whole units are compared with their crc32, while they are in the processor's cache."""

    # not strict: units that are read whole into a buffer are compared, views and gathers pass; strict: whole units are
    # read and compared, whatever is asked for, and nothing is a view

    __slots__ = (
        "_noun", "_path", "_strict", "access", "dtype", "identity", "name", "num_tokens", "plain", "rows", "tokens",
        "unit", "wait",
    )  # fmt: skip

    def __init__(self, tokens: Tokens, rows: Crc32Rows, path: Path, noun: str, strict: bool) -> None:
        if strict:
            super().__init__()  # a buffer of each thread: 750 bytes for each of perhaps thousands of open files
        self.tokens, self.rows, self._path, self._noun, self._strict = tokens, rows, str(path), noun, strict
        self.num_tokens, self.dtype, self.unit, self.name = tokens.num_tokens, tokens.dtype, tokens.unit, tokens.name
        self.access, self.wait, self.identity, self.plain = tokens.access, tokens.wait, tokens.identity, tokens.plain
        if self.plain is not None:
            self.plain.rows = rows

    def read(self, runs: Iterable[TokenRun]) -> None:
        runs = list(runs)
        if self._strict and not all(self._is_whole(start, len(out)) for start, out in runs):
            super().read(runs)
            return
        self.tokens.read(runs)
        self.compare(runs)

    def _is_whole(self, start: int, count: int) -> bool:
        return not start % self.unit and (not count % self.unit or start + count == self.num_tokens)

    def compare(self, runs: Iterable[TokenRun]) -> None:
        unit, num_tokens = self.unit, self.num_tokens
        for start, out in runs:
            first, end = whole_units(start, len(out), unit, num_tokens)
            if first < end:
                self._compare(first, out[first - start : end - start])

    def _read_units(self, start: int, out: TokenArray) -> None:
        self.tokens.read([(start, out)])
        self._compare(start, out)

    def _compare(self, start: int, out: TokenArray) -> None:
        unit = self.unit
        number = start // unit
        for begin in range(0, len(out), unit):
            found, expected = crc32_of(out[begin : begin + unit]), self.rows[number]
            if found != expected:
                raise ChecksumError(
                    f"{self._path}: {self._noun} {number:,}: expected crc32 {expected:08x}, found {found:08x}",
                    remedy=Remedy.VERIFY,
                    at=any_path(self._path),
                )
            number += 1

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        if self._strict:
            super().gather(starts, out)
        else:
            self.tokens.gather(starts, out)

    def view(self, start: int, count: int, private: bool = False) -> TokenArray | None:
        return None if self._strict else self.tokens.view(start, count, private)

    def flat(self) -> TokenArray | None:
        return None if self._strict else self.tokens.flat()

    def unchecked(self) -> Tokens | None:
        return None if self._strict else self.tokens.unchecked()

    def ready(self, starts: npt.NDArray[np.int64]) -> bool:
        return self.tokens.ready(starts)

    def will_need(self, start: int, stop: int) -> None:
        self.tokens.will_need(start, stop)

    def close(self) -> None:
        self.tokens.close()

    def __getstate__(self) -> tuple[Any, ...]:
        return self.tokens, self.rows, self._path, self._noun, self._strict

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        Checked.__init__(self, *state)


def checked(tokens: Tokens, rows: Crc32Rows | None, path: Path, noun: str, verify: str) -> Tokens:
    """Have tokens compared as they are read: by "auto" whole units, by "batch" everything, else nothing."""
    return (
        tokens
        if rows is None or verify not in ("auto", "batch")
        else Checked(tokens, rows, path, noun, verify == "batch")
    )
