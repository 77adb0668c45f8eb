"""The values of a column of an HDF5 file: by their extents, or through the HDF5 library."""

from __future__ import annotations

import math
import os
import threading
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import BackendError, FormatError, UnavailableError
from zb_hdf5.files.checked import UnitTokens
from zb_hdf5.files.codecs import CodedChunks, Decoded
from zb_hdf5.files.foreign_ids import ForeignIds
from zb_hdf5.files.forks import OwnLock
from zb_hdf5.files.identity import Handle
from zb_hdf5.files.look import Look
from zb_hdf5.files.pages import READY_PAGES
from zb_hdf5.files.paths import cut_short, size_of
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.files.ranges import Extents, open_ranges
from zb_hdf5.files.tokens import Converted, Tokens, Wait, open_extents
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.hdf5.h5_attributes import read_marker
from zb_hdf5.hdf5.h5_chunks import codec_of, register_filters, unreadable
from zb_hdf5.hdf5.h5_dataset import is_plain
from zb_hdf5.hdf5.h5_file import h5_damage, handle_of_h5
from zb_hdf5.hdf5.open_dataset import HANDLES, OpenDataset, close_others, open_dataset
from zb_hdf5.hdf5.written_rows import runs_between
from zb_hdf5.packages import h5py
from zb_hdf5.spec import NO_CODEC, TokenArray, as_stored


def open_column(column: Column, access: str, look: Look | None = None) -> Tokens:
    """Open the values of a column by their extents, or through h5py where they are not known.

    Parameters
    ----------
    access
        As for `open_reader`; `BackendError` if the column cannot be read in this way.
    look
        A look at its file, whose open descriptor is taken; None: the file is opened.
    """
    tokens = open_stored(column, access, look)
    if column.dtype == column.meta.dtype:
        return tokens
    if column.meta.field is not None:
        return Converted(tokens, column.meta.dtype)
    return ForeignIds(tokens, column.meta, f"{column.path}: {column.name}")


def open_stored(column: Column, access: str, look: Look | None = None) -> Tokens:
    """Open the values of a column as `open_column` does, of the dtype that they have in the file."""
    require_access(column, access)
    meta = column.meta
    extents = column.extents
    if isinstance(extents, Extents) and access != "h5py":
        count = column.num_tokens
        return open_extents(column.path, extents, column.dtype, count, access, column.identity, look=look)
    if isinstance(extents, CodedChunks) and access in ("auto", "pread"):
        ranges = open_ranges(column.path, column.identity, access=access, look=look)
        return Decoded(ranges, extents, meta.dtype, meta.batch_tokens, column.num_tokens, meta.noun)
    return H5pyTokens(column)


def require_access(column: Column, access: str) -> None:
    """Raise `BackendError` if a column cannot be read in this way."""
    extents = column.extents
    lacks_place = access == "mmap" and not isinstance(extents, Extents)
    if lacks_place or (access == "pread" and extents is None):
        others = "'h5py' or 'auto'" if extents is None else "'pread', 'h5py' or 'auto'"
        raise BackendError(
            f"{column.path}: access={access!r} needs plain extents, but {column.obstacle}; use access={others}"
        )


class H5pyTokens(UnitTokens):
    """The values of one dataset through the HDF5 library. See `Tokens`.

    The file is opened at the first read of each process, for forks and pickles; all threads share the lock of HDF5.
    """

    access = "h5py"
    wait = Wait.LOCAL
    pages = READY_PAGES  # HDF5's global lock leaves nothing to gain from reading ahead in several threads

    def __init__(self, column: Column) -> None:
        super().__init__()
        self.name = str(column.path)
        self.identity = column.identity
        self.dtype = column.dtype
        self.unit = column.meta.batch_tokens
        self.num_tokens = column.num_tokens
        self._column = column
        self._ends = [*accumulate(stop - first for first, stop in column.kept or ())]
        self._lock = OwnLock()
        self._pid = 0  # of the process that has opened the file
        self._open: OpenDataset | None = None
        self._stored: h5py.Dataset = None
        self._handle: Handle = -1
        self._row_values = 1
        self._is_direct = False  # whether a unit is one plain chunk
        self._size = 0  # the least size of the file

    def dataset(self) -> h5py.Dataset:
        """Return the dataset, opened in this process."""
        if self._pid == os.getpid():
            return self._stored
        with self._lock:
            if self._pid != os.getpid():
                self._open_here()
                self._pid = os.getpid()
        return self._stored

    def _open_here(self) -> None:
        column = self._column
        opened = open_dataset(column.path, column.name, column.identity, growing=not column.complete)
        stored = opened.stored
        self._open = opened
        self._stored = stored
        register_filters(stored)
        axes = stored.shape if self._column.channel is None else (len(stored), *stored.shape[2:])
        self._row_values = math.prod(axes[1:])
        # an unfiltered chunk that is one unit is read past HDF5's chunk cache: 6 µs instead of 9 for 64 KiB
        rows = max(1, self.unit // max(1, self._row_values))
        is_unit = stored.chunks == (rows, *axes[1:]) and rows * self._row_values == self.unit
        is_plain_chunk = is_unit and codec_of(stored) == NO_CODEC and column.kept is None
        self._is_direct = is_plain_chunk and stored.dtype == self.dtype and is_plain(stored)
        self._handle = handle_of_h5(opened.h5)
        # a growing file may end up shorter: its writer gives back the bytes that it had reserved, after it has closed
        # the file and before it renames it
        grows = opened.h5.swmr_mode or column.path.name.endswith(PARTIAL_SUFFIX)
        self._size = 0 if grows else size_of(self._handle)

    def _read_units(self, start: int, out: TokenArray) -> None:
        stored = self.dataset()
        meta = self._column.meta
        number = start // self.unit
        self._check_size()
        try:
            with h5_damage(self._column.path):
                if self._is_direct and len(out) % self.unit == 0:
                    self._read_chunks(number, out)
                    return
                values = self._row_values
                first = start // values
                stop = -(-(start + len(out)) // values)
                found = self._rows(first, stop).reshape(-1)[start - first * values :][: len(out)]
                if meta.field is None and not self._column.is_foreign:
                    found = as_stored(found, meta, f"{self.name}: {self._column.name} ({meta.noun} {number:,})")
                out[...] = found
        except (OSError, FormatError) as error:
            raise unreadable(self.name, f"{meta.noun} {number:,}", stored, error) from error

    def _rows(self, first: int, stop: int) -> npt.NDArray[Any]:
        """Return the values of rows, numbered among those that are kept."""
        column = self._column
        kept = column.kept
        runs = [(first, stop)] if kept is None else runs_between(kept, self._ends, first, stop)
        chosen = () if column.channel is None else (column.channel,)
        parts = [self._stored[(slice(begin, end), *chosen)] for begin, end in runs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_chunks(self, first: int, out: TokenArray) -> None:
        """Read whole plain chunks, one for each unit."""
        rows = self.unit // self._row_values
        zeros = (0,) * (self._stored.ndim - 1)
        for number, unit in enumerate(out.reshape(-1, self.unit), first):
            self._stored.id.read_direct_chunk((number * rows, *zeros), out=unit.view(np.uint8))

    def _check_size(self) -> None:
        """Refuse a file that has become shorter: HDF5 returns zeros for missing bytes."""
        try:
            size = size_of(self._handle)
        except OSError as error:
            raise UnavailableError(
                f"{self.name}: the file system has lost the open file: {error.strerror}; if another node renamed it, "
                "follow a growing store on the node of its writer, or on a parallel file system"
            ) from error
        if size < self._size:
            raise cut_short(self._column.path, f"at least {self._size:,} bytes", size)

    def refresh(self) -> dict[str, Any]:
        """Return the commit marker by now: see `read_marker`.

        The marker of a field is that of the tokens, whose dataset is not refreshed here: a field sees as much as their
        reader has seen.
        """
        stored = self.dataset()
        column = self._column
        with h5_damage(column.path), HANDLES:
            close_others(stored)
            stored.refresh()  # the low-level refresh leaves h5py's cached shape stale
            state = read_marker(stored.file[column.marker], column.path)
            if state["complete"]:
                stored.refresh()  # a finish may have come between the parts of that look; now nothing changes any more
                state = read_marker(stored.file[column.marker], column.path)
            self.num_tokens = state["num_batches"] * self.unit  # here: of two looks the later one is never overwritten
        return state

    def close(self) -> None:
        """Let the file go; a later read opens it again."""
        self._pid = 0
        self._open = None
        self._stored = None
        self._local = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return H5pyTokens, (self._column._replace(num_tokens=self.num_tokens),)
