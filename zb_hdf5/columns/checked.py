"""Whole chunks compared with their crc32 as they are read, and the rows of crc32, read when they are first needed."""

from __future__ import annotations

import os
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.ranges import ReadsRanges
from zb_hdf5.columns.source import BatchSource, gather_from_batches
from zb_hdf5.errors import ChecksumError, Remedy
from zb_hdf5.files.digests import crc32_of
from zb_hdf5.files.extent_file import ExtentFile
from zb_hdf5.files.extents import Extents, FilePart, Run
from zb_hdf5.spec import BATCHES_LAYOUT, CRC32_CHUNK_ROWS, StoreMeta, TokenArray

#: Rows that a process keeps, of all files together: those of 4 TiB in batches of 64 KiB. Older ones are read again.
MAX_KEPT_BYTES: Final = 256 << 20
#: Bytes that a block takes besides its rows. A file of one batch has 4 bytes of rows, so that these would not count.
KEPT_OVERHEAD_BYTES: Final = 256

#: What is compared, of a reader with this `verify`.
VERIFIED: Final = {"auto": "whole reads", "batch": "all reads", "store": "store", "none": "none"}

#: Fills an array (1-D, "<u4") with consecutive rows from a number on. It must be picklable.
ReadRows = Callable[..., None]


class Crc32Rows:
    """The stored crc32 of each chunk of a column, read 16 KiB at a time when they are first needed.

    Thread-safe; usable after fork; picklable, without what was read.

    Parameters
    ----------
    num_rows
        How many chunks there are.
    read
        Reads some of the rows. What it raises, `rows[number]` raises.

    Attributes
    ----------
    blocks
        Those that are kept, each of 4,096 rows, by their numbers.
    """

    __slots__ = ("__weakref__", "_num_rows", "_read", "blocks")  # one for each of perhaps 50,000 open files

    def __init__(self, num_rows: int, read: ReadRows) -> None:
        self._num_rows, self._read = num_rows, read
        self.blocks: dict[int, array[int]] = {}

    @classmethod
    def placed(cls, num_rows: int, ranges: ReadsRanges, runs: tuple[Run, ...]) -> Crc32Rows:
        """Return the rows that lie in chunks of a file."""
        return cls(num_rows, partial(_read_placed, ranges, runs))

    @classmethod
    def of(cls, rows: npt.NDArray[np.uint32]) -> Crc32Rows:
        """Return rows that were read already."""
        return cls(len(rows), partial(_copy_rows, rows))

    def __getitem__(self, number: int) -> int:
        block = number // CRC32_CHUNK_ROWS
        rows = self.blocks.get(block) or self._read_block(block)
        found: int = rows[number % CRC32_CHUNK_ROWS]
        return found

    def all(self, *beside: FilePart) -> npt.NDArray[np.uint32]:
        """Return all rows, in as few reads as they allow, and keep them.

        Parameters
        ----------
        beside
            Of rows that are `placed`: other parts of the file, which are read at the same time.
        """
        rows = self._rows(0, self._num_rows, *beside)
        for block, start in enumerate(range(0, len(rows), CRC32_CHUNK_ROWS)):
            self._keep(block, rows[start : start + CRC32_CHUNK_ROWS])
        return rows

    def _read_block(self, block: int) -> array[int]:
        start = block * CRC32_CHUNK_ROWS
        return self._keep(block, self._rows(start, min(start + CRC32_CHUNK_ROWS, self._num_rows)))

    def _rows(self, start: int, stop: int, *beside: FilePart) -> npt.NDArray[np.uint32]:
        rows = np.empty(stop - start, "<u4")
        self._read(start, rows, *beside)
        return rows

    def _keep(self, block: int, rows: npt.NDArray[np.uint32]) -> array[int]:
        kept = self.blocks[block] = array("I", rows.astype("u4", copy=False).tobytes())
        _KEPT.add(self, block, rows.nbytes + KEPT_OVERHEAD_BYTES)
        return kept

    def forget(self, block: int) -> None:
        """Drop what was read of the rows; they are read again when they are needed."""
        self.blocks.pop(block, None)

    def __getstate__(self) -> tuple[int, ReadRows]:
        return self._num_rows, self._read

    def __setstate__(self, state: tuple[int, ReadRows]) -> None:
        Crc32Rows.__init__(self, *state)


class _KeptBlocks:
    """The blocks of rows that a process holds, of all stores: the oldest go when there are too many bytes of them."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[weakref.ref[Crc32Rows], int, int]] = deque()
        self._num_bytes = 0
        self.renew()

    def renew(self) -> None:
        """Make the lock anew in a forked child: another thread of the parent may have held it."""
        self._lock = threading.Lock()

    def add(self, rows: Crc32Rows, block: int, num_bytes: int) -> None:
        with self._lock:
            self._blocks.append((weakref.ref(rows), block, num_bytes))
            self._num_bytes += num_bytes
            while self._num_bytes > MAX_KEPT_BYTES:
                oldest, number, size = self._blocks.popleft()
                self._num_bytes -= size
                if (kept := oldest()) is not None:
                    kept.forget(number)


_KEPT: Final = _KeptBlocks()
os.register_at_fork(after_in_child=_KEPT.renew)


def _read_placed(
    ranges: ReadsRanges, runs: tuple[Run, ...], start: int, out: npt.NDArray[np.uint32], *beside: FilePart
) -> None:
    """Read rows from the chunks that they lie in: those that follow each other at once."""
    extents = Extents(list(runs), 4 * CRC32_CHUNK_ROWS)
    parts: list[FilePart] = [*beside]
    done = 0
    while done < len(out):
        chunk, within = divmod(start + done, CRC32_CHUNK_ROWS)
        number, chunk = extents.locate(chunk)
        base, stride, num_chunks = extents.runs[number]
        chunks = max(1, num_chunks - chunk) if stride == extents.batch_bytes else 1
        part = out[done : done + chunks * CRC32_CHUNK_ROWS - within]
        parts.append((base + chunk * stride + 4 * within, part))
        done += len(part)
    ranges.read_ranges(parts)


def _copy_rows(rows: npt.NDArray[np.uint32], start: int, out: npt.NDArray[np.uint32]) -> None:
    out[...] = rows[start : start + len(out)]


class CheckedSource:
    """Compares whole chunks that are read into a buffer with their crc32, while they are in the processor's cache.

    Views of a mapping and records pass by unseen, without another call. See `BatchSource`.

    Parameters
    ----------
    source
        Of the chunks; closed with this one.
    rows
        Their crc32.
    path
        What to name in a message.
    num_tokens
        Of all chunks together: the last one of a stream may hold fewer than the others. None: all are full.
    """

    def __init__(
        self, source: BatchSource, meta: StoreMeta, rows: Crc32Rows, path: Path, num_tokens: int | None = None
    ) -> None:
        self.unchecked, self._meta, self._rows, self._path = source, meta, rows, path
        self._short, self._rest = divmod(num_tokens, meta.batch_tokens) if num_tokens else (-1, 0)
        self._bind()

    def _bind(self) -> None:
        """Take what is said of the source, and what passes by without a check."""
        self._blocks, source = self._rows.blocks, self.unchecked
        self.access, self.wants_threads = source.access, source.wants_threads
        self.in_flight = source.in_flight
        self._pass_by(source)

    def _pass_by(self, source: BatchSource) -> None:
        self.gather_into = source.gather_into  # type: ignore[method-assign]
        if isinstance(source, ExtentFile) and source.maps:
            self.read, self.read_private = source.read, source.read_private  # type: ignore[method-assign]

    def read(self, index: int) -> TokenArray:
        tokens = self.unchecked.read(index)
        self._compare(index, tokens)
        return tokens

    def read_private(self, index: int) -> npt.NDArray[Any]:
        tokens = self.unchecked.read_private(index)
        self._compare(index, tokens)
        return tokens

    def gather_into(self, records: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(count, L)`, with records of L tokens, from whole chunks."""
        gather_from_batches(self.read, self._meta, records, out)

    def read_into(self, index: int, out: TokenArray) -> None:
        """Fill `out`, of the stored shape and dtype."""
        self.unchecked.read_into(index, out)
        # a call for the row would be a tenth of the check
        rows = self._blocks.get(index // CRC32_CHUNK_ROWS)
        if rows is None or crc32_of(out) != rows[index % CRC32_CHUNK_ROWS]:
            self._compare(index, out)

    def read_range_into(self, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, B, S)`, with consecutive batches."""
        self.unchecked.read_range_into(start, out)
        for number, chunk in enumerate(out, start):
            self._compare(number, chunk)

    def _compare(self, index: int, chunk: TokenArray) -> None:
        if index == self._short:
            chunk = chunk.reshape(-1)[: self._rest]
        found, expected = crc32_of(chunk), self._rows[index]
        if found != expected:
            kind = "batch" if self._meta.layout == BATCHES_LAYOUT else "chunk"
            raise ChecksumError(
                f"{self._path}: {kind} {index:,}: expected crc32 {expected:08x}, found {found:08x}",
                remedy=Remedy.VERIFY,
                at=self._path,
            )

    def will_need(self, index: int, count: int = 1) -> None:
        self.unchecked.will_need(index, count)

    def is_cached(self, index: int) -> bool:
        return self.unchecked.is_cached(index)

    def close(self) -> None:
        self.unchecked.close()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("unchecked", "_meta", "_rows", "_path", "_short", "_rest")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()


class StrictSource(CheckedSource):
    """Compares every read: views too, and records, for which it reads the whole chunks that they lie in."""

    def _pass_by(self, source: BatchSource) -> None:
        """Let nothing pass by."""


def checked(
    source: BatchSource, rows: Crc32Rows | None, meta: StoreMeta, path: Path, verify: str, num_tokens: int | None = None
) -> BatchSource:
    """Have a source compare what it reads: "auto" what is read whole, "batch" everything, else nothing."""
    kind = {"auto": CheckedSource, "batch": StrictSource}.get(verify)
    return source if kind is None or rows is None else kind(source, meta, rows, path, num_tokens)


def unchecked_gather(source: BatchSource) -> BatchSource:
    """Return what a source gathers records from without a check of them; itself where it checks them."""
    return source.unchecked if isinstance(source, CheckedSource) and not isinstance(source, StrictSource) else source
