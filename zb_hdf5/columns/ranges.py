"""Bytes by their places: the one interface under every source that is not a mapping, and the local file behind it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.source import CopyingSource
from zb_hdf5.core.extents import Extents, read_fully
from zb_hdf5.core.files import Identity, identity_of, regular, require_identity
from zb_hdf5.errors import IncompleteError, Remedy
from zb_hdf5.spec import StoreMeta, TokenArray


class Ranges(Protocol):
    """The bytes of one file that never changes: on a disk, or in an object store.

    Thread-safe; usable after fork; picklable (a copy reopens the file, and refuses another one).

    Attributes
    ----------
    name
        Path or URL, in messages.
    num_bytes
        Size of the file.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    def read_ranges(self, ranges: Sequence[tuple[int, npt.NDArray[Any]]]) -> None:
        """Fill each array (C-contiguous, writable) with the bytes of the file from its offset on.

        Raises
        ------
        IncompleteError
            If the file ends before.
        FormatError
            If it is another file than the one that was opened first.
        OSError
            If it cannot be read.
        """

    def close(self) -> None:
        """Close what is open."""


class FileRanges:
    """The bytes of a local file, by positioned reads. See `Ranges`.

    Parameters
    ----------
    identity
        Of the file that was looked at; None: whatever has the name now.
    """

    def __init__(self, path: Path, identity: Identity | None = None) -> None:
        self._path, self._known = path, identity
        self._open()

    def _open(self) -> None:
        self._fd = regular(self._path)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._known = self._known or identity_of(self._fd)
        try:
            require_identity(self._fd, self._known, self._path)
        except BaseException:
            self._close_fd()
            raise

    @property
    def identity(self) -> Identity:
        """What tells this file from another one that has its name later."""
        return self._known or identity_of(self._fd)

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def read_ranges(self, ranges: Sequence[tuple[int, npt.NDArray[Any]]]) -> None:
        for offset, out in ranges:
            found = read_fully(self._fd, out, offset)
            if found < out.nbytes:
                raise IncompleteError(
                    f"{self._path}: expected {out.nbytes:,} bytes at {offset:,}, found {found:,}: the file was cut "
                    "short; restore it",
                    remedy=Remedy.VERIFY,
                    at=self._path,
                )

    def close(self) -> None:
        self._close_fd()

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_known": self._known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class RangeSource(CopyingSource):
    """Batches that lie as they are in a file of which only ranges can be read.

    Parameters
    ----------
    ranges
        The file; closed with this source.
    extents
        Where the batches lie.
    meta
        Shape and dtype of one batch.
    access
        What a reader says of it.
    """

    def __init__(self, ranges: Ranges, extents: Extents, meta: StoreMeta, access: str) -> None:
        self._ranges, self.extents, self._meta, self.access = ranges, extents, meta, access

    def read_range_into(self, start: int, out: TokenArray) -> None:
        """Fill `out` with consecutive batches: one range for each unpadded run that they lie in."""
        parts: list[tuple[int, npt.NDArray[Any]]] = []
        done = 0
        while done < len(out):
            number, within = self.extents.locate(start + done)
            run = self.extents.runs[number]
            packed = run.stride == self.extents.batch_bytes
            take = min(len(out) - done, run.num_batches - within) if packed else 1
            parts.append((run.base + within * run.stride, out[done : done + take]))
            done += take
        self._ranges.read_ranges(parts)

    def gather_into(self, records: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(count, L)`, with records of L tokens: one range for those that follow each other."""
        per_batch, row_bytes = self._meta.batch_tokens // out.shape[1], out[:1].nbytes
        batches, rows = np.divmod(records, per_batch)
        follows = (np.diff(records) == 1) & (np.diff(batches) == 0)
        starts = [0, *(np.flatnonzero(~follows) + 1).tolist()]
        self._ranges.read_ranges(
            [
                (self.extents.offset(int(batches[start])) + int(rows[start]) * row_bytes, out[start:stop])
                for start, stop in zip(starts, [*starts[1:], len(records)], strict=True)
            ]
        )

    def will_need(self, index: int, count: int = 1) -> None:
        """Do nothing: whoever reads ahead reads in threads."""

    def is_cached(self, index: int) -> bool:
        """Say no: nobody knows."""
        return False

    def close(self) -> None:
        self._ranges.close()
