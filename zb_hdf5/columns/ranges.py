"""Bytes by their places: the one interface under every source that is not a mapping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.source import CopyingSource
from zb_hdf5.files.extent_file import ExtentFile
from zb_hdf5.files.extents import Extents, FilePart
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.objects import IN_FLIGHT, RemoteObject, read_objects
from zb_hdf5.files.paths import RemotePath, require_remote_access
from zb_hdf5.spec import StoreMeta, TokenArray

#: What a reader says of objects: the access that is left there.
REMOTE: Final = "remote"


class ReadsRanges(Protocol):
    """What reads bytes of a file by their places."""

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


class Ranges(ReadsRanges, Protocol):
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

    @property
    def identity(self) -> Identity:
        """The facts that tell this file from another one that has its name later."""

    def close(self) -> None:
        """Close what is open."""


class RangesReader(CopyingSource):
    """What sources over the ranges of a file have in common. See `BatchSource`."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self.in_flight = IN_FLIGHT if isinstance(ranges, RemoteObject) else None

    @property
    def name(self) -> str:
        return self._ranges.name

    @property
    def num_bytes(self) -> int:
        return self._ranges.num_bytes

    def read_ranges(self, ranges: Sequence[FilePart]) -> None:
        """Fill each array with the bytes of the file from its offset on; all at once."""
        self._ranges.read_ranges(ranges)

    def flat(self) -> None:
        """Return nothing: no mapping holds the tokens."""

    def will_need(self, index: int, count: int = 1) -> None:
        """Do nothing: whoever reads ahead reads in threads."""

    def is_cached(self, index: int) -> bool:
        """Say no: nobody knows, or unpacking takes longer than most disks."""
        return False

    def close(self) -> None:
        self._ranges.close()


class RangeSource(RangesReader):
    """Batches that lie as they are in an object.

    Parameters
    ----------
    ranges
        The object; closed with this source.
    extents
        Where the batches lie.
    meta
        Shape and dtype of one batch.
    access
        What a reader says of it.
    """

    _ranges: RemoteObject

    def __init__(self, ranges: RemoteObject, extents: Extents, meta: StoreMeta, access: str) -> None:
        super().__init__(ranges)
        self.extents, self._meta, self.access = extents, meta, access
        self.shape, self.dtype = meta.shape, meta.dtype
        self._read_before: dict[int, TokenArray] = {}

    @property
    def identity(self) -> Identity:
        """The facts that tell this file from another one that has its name later."""
        return self._ranges.identity

    def read(self, index: int) -> TokenArray:
        """Return batch `index`, read-only, in the buffer that it came in."""
        if self._read_before and (known := self._read_before.pop(index, None)) is not None:
            known.flags.writeable = False
            return known
        start = self.extents.offset(index)
        data = self._ranges.read(start, start + self.extents.batch_bytes)
        return np.frombuffer(data, self.dtype).reshape(self.shape)

    def read_range_into(self, start: int, out: TokenArray) -> None:
        """Fill `out` with consecutive batches: one range for each unpadded run that they lie in."""
        if self._read_before and len(out) == 1 and (known := self._read_before.pop(start, None)) is not None:
            out[0] = known
            return
        self._ranges.read_ranges(list(self.extents.places_of_batches(start, out)))

    def gather_into(self, records: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(count, L)`, with records of L tokens: one range for those that follow each other."""
        gather_together([(self, records, out)])

    def remember(self, index: int, tokens: TokenArray) -> None:
        """Keep a batch that was read to prove the file, for its next read."""
        self._read_before[index] = tokens

    def read_runs_of_tokens(self, runs: Iterable[tuple[int, TokenArray]]) -> None:
        """Fill each 1-D array with consecutive tokens from its place on, counted over all batches; all at once."""
        self._read_before.clear()
        self._ranges.read_ranges([p for start, out in runs for p in self.extents.places_of_tokens(start, out)])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read_before": {}}


def gather_together(reads: Sequence[tuple[RangeSource, npt.NDArray[np.int64], TokenArray]]) -> None:
    """Gather records of several objects, all at the same time."""
    for source, *_ in reads:
        source._read_before.clear()  # records do not take these batches up: they would be kept for ever
    read_objects(
        [(source._ranges, list(source.extents.places_of_records(records, out))) for source, records, out in reads]
    )


def open_ranges(
    path: Path, identity: Identity | None = None, num_bytes: int | None = None
) -> ExtentFile | RemoteObject:
    """Open a file of this machine, or an object. The arguments are those of `open_extents`."""
    if isinstance(path, RemotePath):
        return RemoteObject(str(path), identity, num_bytes)
    return ExtentFile(path, Extents([], 1), (1, 1), np.dtype("u1"), "pread", identity)


def open_extents(
    path: Path,
    extents: Extents,
    meta: StoreMeta,
    access: str,
    identity: Identity | None = None,
    num_bytes: int | None = None,
) -> ExtentFile | RangeSource:
    """Open what reads the extents of a file of this machine, or of an object. See `ExtentFile`.

    Parameters
    ----------
    num_bytes
        The size that an object is expected to have, where it is known: its first answer tells.

    Raises
    ------
    BackendError
        If `access` needs a file of this machine.
    """
    if not isinstance(path, RemotePath):
        return ExtentFile(path, extents, meta.shape, meta.dtype, access, identity)
    require_remote_access(path, access)
    return RangeSource(RemoteObject(str(path), identity, num_bytes), extents, meta, REMOTE)
