"""Tokens through the HDF5 library, of files that are still written or of another origin; and what opens a dataset."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from zb_hdf5.errors import BackendError, FormatError, UnavailableError
from zb_hdf5.files.codecs import CodedChunks, Decoded
from zb_hdf5.files.extents import Extents
from zb_hdf5.files.file_tokens import open_extents
from zb_hdf5.files.paths import Handle, Identity, cut_short, size_of
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.files.ranges import open_ranges
from zb_hdf5.files.tokens import Tokens, UnitTokens, Wait
from zb_hdf5.formats.hdf5.chunks import Places, lacking_filters, load_filters
from zb_hdf5.formats.hdf5.file import h5_damage, handle_of_h5, open_h5_for_reading, stored_sha256
from zb_hdf5.spec import BATCHES_ATTRIBUTES, BATCHES_LAYOUT, NO_SHA256, StoreMeta, TokenArray
from zb_hdf5.token_values import as_stored


class WriterState(NamedTuple):
    """The progress of the writer of a store."""

    num_batches: int
    complete: bool
    sha256: str | None


class Column(NamedTuple):
    """One dataset of an HDF5 file, as a look into the file has found it."""

    path: Path
    name: str
    meta: StoreMeta  # shape and dtype of a unit, and the origin of the tokens
    num_tokens: int  # values that are committed
    identity: Identity
    complete: bool = True
    sha256: str | None = None  # until its writer has finished, and where none is stored
    places: Places | None = None  # the extents of the units; None: only HDF5 can read them
    obstacle: str = ""  # the reason why there are no plain extents, or no digests
    columns: dict[str, Any] = {}  # noqa: RUF012 - the extents of each column; nobody changes it
    marker: str = ""  # the dataset whose attributes are the commit marker
    has_crc32: bool = False
    origin: dict[str, Any] = {}  # noqa: RUF012 - see `create_root`

    @property
    def num_units(self) -> int:
        """Batches, or chunks of a stream."""
        return -(-self.num_tokens // self.meta.batch_tokens)

    @property
    def noun(self) -> str:
        """The name of a unit in messages."""
        return noun_of(self.meta)

    def open(self, access: str) -> Tokens:
        """Open the values by their extents, or through h5py where those are not known."""
        meta, places = self.meta, self.places
        if isinstance(places, Extents) and access != "h5py":
            return open_extents(self.path, places, meta.dtype, self.num_tokens, access, self.identity)
        if isinstance(places, CodedChunks) and access in ("auto", "pread"):
            ranges = open_ranges(self.path, self.identity)
            return Decoded(ranges, places, meta.dtype, meta.batch_tokens, self.num_tokens, self.noun)
        if access in ("mmap", "pread"):
            others = "'h5py' or 'auto'" if places is None else "'pread', 'h5py' or 'auto'"
            raise BackendError(
                f"{self.path}: access={access!r} needs plain extents, but {self.obstacle}; use access={others}"
            )
        return H5pyTokens(self)


def noun_of(meta: StoreMeta) -> str:
    """Return the name of a unit in messages."""
    return "batch" if meta.layout == BATCHES_LAYOUT else "chunk"


class H5pyTokens(UnitTokens):
    """The values of one dataset through the HDF5 library. See `Tokens`."""

    # opened at the first read of each process, for forks and pickles; all threads share the lock of HDF5

    __slots__ = (
        "_column", "_direct", "_h5", "_handle", "_lock", "_pid", "_row_values", "_size", "_stored", "dtype",
        "num_tokens", "unit",
    )  # fmt: skip
    access, wait = "h5py", Wait.LOCAL

    def __init__(self, column: Column) -> None:
        super().__init__()
        self._column = column
        self.dtype, self.unit, self.num_tokens = column.meta.dtype, column.meta.batch_tokens, column.num_tokens
        self._lock = threading.Lock()
        self._pid = 0
        self._h5: h5py.File = None
        self._stored: h5py.Dataset = None
        self._direct = False
        self._row_values = 1
        self._handle: Handle = -1
        self._size = 0

    @property
    def name(self) -> str:  # type: ignore[override]
        return str(self._column.path)

    @property
    def identity(self) -> Identity:  # type: ignore[override]
        return self._column.identity

    def dataset(self) -> h5py.Dataset:
        """Return the dataset, opened in this process."""
        if self._pid == os.getpid():
            return self._stored
        with self._lock:
            if self._pid != os.getpid():
                path, meta = self._column.path, self._column.meta
                self._h5 = open_h5_for_reading(path, self._column.identity)
                self._stored = stored = self._h5[self._column.name]
                load_filters(stored)
                self._row_values = math.prod(stored.shape[1:])
                # an unfiltered chunk that is one unit is read past HDF5's chunk cache: 6 µs instead of 9 for 64 KiB
                rows = max(1, self.unit // max(1, self._row_values))
                plain = stored.chunks == (rows, *stored.shape[1:]) and rows * self._row_values == self.unit
                plain = plain and not stored.id.get_create_plist().get_nfilters()
                self._direct = plain and stored.dtype == meta.dtype
                self._handle = handle_of_h5(self._h5)
                # a growing file may end up shorter: its writer gives back the bytes that it had reserved, after it
                # has closed the file and before it renames it
                grows = self._h5.swmr_mode or path.name.endswith(PARTIAL_SUFFIX)
                self._size = 0 if grows else size_of(self._handle)
                self._pid = os.getpid()
        return self._stored

    def _read_units(self, start: int, out: TokenArray) -> None:
        stored, name = self.dataset(), self._column.name
        self._check_size()
        try:
            with h5_damage(self._column.path):
                if self._direct and len(out) % self.unit == 0:
                    self._read_chunks(stored, start, out)
                    return
                values = self._row_values
                first, stop = start // values, -(-(start + len(out)) // values)
                found = stored[first:stop].reshape(-1)[start - first * values :][: len(out)]
                if self._column.meta.field is None:
                    what = f"{self.name}: {name} ({self._column.noun} {start // self.unit:,})"
                    found = as_stored(found, self._column.meta, what)
                out[...] = found
        except (OSError, FormatError) as error:
            if lacking := lacking_filters(stored):
                raise UnavailableError(
                    f"{self.name}: this HDF5 installation lacks a filter that the file needs: {lacking[0]}; "
                    "pip install '.[codecs]' has the common ones"
                ) from error
            where = f"{self._column.noun} {start // self.unit:,}"
            raise FormatError(f"{self.name}: {where}: HDF5 cannot read it: {error}") from error

    def _read_chunks(self, stored: h5py.Dataset, start: int, out: TokenArray) -> None:
        rows, zeros = self.unit // self._row_values, (0,) * (stored.ndim - 1)
        for number, unit in enumerate(out.reshape(-1, self.unit), start // self.unit):
            stored.id.read_direct_chunk((number * rows, *zeros), out=unit.view(np.uint8))

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

    def ready(self, starts: Any) -> bool:
        """Say yes: HDF5's global lock leaves nothing to gain from reading ahead in several threads."""
        return True

    def refresh(self) -> WriterState:
        """Return the progress that the writer has committed by now."""
        # a field shares one open file with the reader of the tokens, whose dataset must not be refreshed here: that
        # would break its chunk index; so a field sees as much as that reader has seen
        stored, column = self.dataset(), self._column
        marker = stored if column.marker == column.name else self._h5[column.marker]
        with h5_damage(column.path):
            stored.refresh()  # the low-level refresh leaves h5py's cached shape stale
            state = read_state(marker, column.path)
            if state.complete:
                stored.refresh()  # a finish may have come between the parts of that look; now nothing changes any more
                state = read_state(marker, column.path)
        self.num_tokens = state.num_batches * self.unit
        return state

    def close(self) -> None:
        if self._h5 is not None and self._pid == os.getpid():
            self._h5.close()
        H5pyTokens.__init__(self, self._column._replace(num_tokens=self.num_tokens))

    def __getstate__(self) -> Column:
        return self._column._replace(num_tokens=self.num_tokens)

    def __setstate__(self, state: Column) -> None:
        H5pyTokens.__init__(self, state)


def read_state(stored: h5py.Dataset, path: Path) -> WriterState:
    """Read the commit marker and completion mark of a batch store."""
    found: dict[str, Any] = {}
    for name, dtype in BATCHES_ATTRIBUTES.items():
        value = stored.attrs.get(name)
        if value is None or np.asarray(value).dtype.kind != dtype.kind or np.ndim(value) != 0:
            raise FormatError(f"{path}: {stored.name}: expected attribute {name!r} of {dtype}, found {value!r}")
        found[name] = value
    sha256 = stored_sha256(found["sha256"], f"{path}: {stored.name}")
    complete = bool(found["complete"])
    return WriterState(int(found["num_batches"]), complete, sha256 if complete and sha256 != NO_SHA256 else None)
