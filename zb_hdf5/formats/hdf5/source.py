"""Batches through h5py: for files that are still written, compressed, or of another origin."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.checked import Crc32Rows
from zb_hdf5.columns.decoded import CodedChunks, DecodedSource
from zb_hdf5.columns.ranges import RangeSource, open_extents, open_ranges
from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.columns.source import CopyingSource, gather_from_batches
from zb_hdf5.errors import BackendError, FormatError, UnavailableError
from zb_hdf5.files.extent_file import ExtentFile
from zb_hdf5.files.extents import Extents
from zb_hdf5.files.identity import Handle, Identity, cut_short, size_of
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.formats.hdf5.file import h5_damage, handle_of_h5, open_h5_for_reading, rows_by_library, stored_sha256
from zb_hdf5.formats.hdf5.filters import lacking_filters, load_filters
from zb_hdf5.formats.hdf5.places import Places
from zb_hdf5.spec import BATCHES_ATTRIBUTES, BATCHES_LAYOUT, NO_SHA256, StoreMeta, TokenArray
from zb_hdf5.token_values import as_stored


class WriterState(NamedTuple):
    """The progress of the writer of a store."""

    num_batches: int
    complete: bool
    sha256: str | None


#: What reads the chunks of one HDF5 file.
FileSource: TypeAlias = "ExtentFile | RangeSource | DecodedSource | H5pySource"


def open_source(
    path: Path,
    dataset: str,
    meta: StoreMeta,
    places: Places | None,
    obstacle: str,
    access: str,
    identity: Identity,
    marker: str | None = None,
) -> FileSource:
    """Open the batches of a dataset where its chunks lie, or through h5py where that is not known.

    Parameters
    ----------
    obstacle
        Why there are no plain extents.
    marker
        The dataset whose attributes are the commit marker, where it is another one.

    Raises
    ------
    BackendError
        If `access` needs extents, and there are none.
    UnavailableError
        If the library of their codec is not installed.
    """
    if isinstance(places, Extents) and access != "h5py":
        return open_extents(path, places, meta, access, identity)
    if isinstance(places, CodedChunks) and access in ("auto", "pread"):
        return DecodedSource(open_ranges(path, identity), places, meta, "pread", identity)
    if access in ("mmap", "pread"):
        others = "'h5py' or 'auto'" if places is None else "'pread', 'h5py' or 'auto'"
        raise BackendError(f"{path}: access={access!r} needs plain extents, but {obstacle}; use access={others}")
    return H5pySource(path, dataset, meta, identity, marker)


def crc32_rows_of(reader: BatchReader, name: str, identity: Identity) -> Crc32Rows:
    """Return the rows of crc32 of a column from the places that its reader knows, else through HDF5."""
    source, runs = reader._source, reader.columns.get(name)
    if runs and isinstance(source, ExtentFile | RangeSource | DecodedSource):
        return Crc32Rows.placed(reader.num_batches, source, runs)
    return rows_by_library(reader.path, reader.num_batches, identity, name)


class H5pySource(CopyingSource):
    """Reads the batches of one 3-D dataset, or the chunks of a 1-D one, through the HDF5 library.

    The file is opened at the first read of each process, so an instance may be pickled, or inherited by a fork. It is
    refused if another one has its name by then.
    """

    access = "h5py"

    def __init__(
        self, path: Path, dataset: str, meta: StoreMeta, identity: Identity, marker: str | None = None
    ) -> None:
        self._path, self._name, self._meta, self._identity = path, dataset, meta, identity
        self._marker = marker or dataset  # the dataset whose attributes are the commit marker
        self._reset()

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._meta.dtype

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._h5: h5py.File = None
        self._stored: h5py.Dataset = None
        self._direct = False
        self._handle: Handle = -1
        self._size = 0

    def dataset(self) -> h5py.Dataset:
        """Return the dataset, opened in this process."""
        if self._pid == os.getpid():
            return self._stored
        with self._lock:
            if self._pid != os.getpid():
                self._h5 = open_h5_for_reading(self._path, self._identity)
                self._stored = stored = self._h5[self._name]
                load_filters(stored)
                values = 1 if self._meta.field is None else self._meta.field.size  # of a row
                self._rows = (
                    1 if self._meta.layout == BATCHES_LAYOUT else self._meta.batch_tokens // values
                )  # of a chunk
                # an unfiltered chunk that is one batch is read past HDF5's chunk cache: 6 µs instead of 9 for 64 KiB
                plain = stored.chunks == (self._rows, *stored.shape[1:])
                plain = plain and not stored.id.get_create_plist().get_nfilters()
                self._direct = plain and stored.dtype == self._meta.dtype
                self._handle = handle_of_h5(self._h5)
                # a growing file may end up shorter: its writer gives back the room that it had reserved, after it
                # has closed the file and before it renames it
                grows = self._h5.swmr_mode or self._path.name.endswith(PARTIAL_SUFFIX)
                self._size = 0 if grows else size_of(self._handle)
                self._pid = os.getpid()
        return self._stored

    def read_range_into(self, start: int, out: TokenArray) -> None:
        """Fill `out` with consecutive batches."""
        stored, rows = self.dataset(), self._rows
        self._check_size()
        try:
            if self._direct:
                zeros = (0,) * (stored.ndim - 1)
                for index, batch in enumerate(out, start):
                    stored.id.read_direct_chunk((index * rows, *zeros), out=batch.reshape(-1).view(np.uint8))
            else:
                values = stored[start * rows : (start + len(out)) * rows]
                if self._meta.field is None:
                    values = as_stored(values, self._meta, f"{self._path}: {self._name} (batch {start:,})")
                out.reshape(-1)[: values.size] = values.reshape(-1)  # the last chunk of a stream may hold fewer
        except OSError as error:
            if lacking := lacking_filters(stored):
                raise UnavailableError(
                    f"{self._path}: this HDF5 installation lacks a filter that the file needs: {lacking[0]}; "
                    "pip install 'zb_hdf5[codecs]' has the common ones"
                ) from error
            raise FormatError(f"{self._path}: batch {start:,}: HDF5 cannot read it: {error}") from error

    def _check_size(self) -> None:
        """Refuse a file that has become shorter: HDF5 returns zeros for missing bytes."""
        try:
            size = size_of(self._handle)
        except OSError as error:
            raise UnavailableError(
                f"{self._path}: the file system has lost the open file: {error.strerror}; if another node renamed it, "
                "follow a growing store on the node of its writer, or on a parallel file system"
            ) from error
        if size < self._size:
            raise cut_short(self._path, f"at least {self._size:,} bytes", size)

    def gather_into(self, records: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(count, L)`, with records of L tokens."""
        gather_from_batches(self.read, self._meta, records, out)

    def will_need(self, index: int, count: int = 1) -> None:
        """Do nothing: where the bytes lie is known to HDF5 only."""

    def is_cached(self, index: int) -> bool:
        """Say yes: HDF5's global lock leaves nothing to gain from reading ahead in several threads."""
        return True

    def refresh(self) -> WriterState:
        """Return the progress that the writer has committed by now.

        Of a field: as far as the reader of the tokens has seen it. Both readers share one open file in HDF5, and to
        refresh here the dataset of the tokens, which the other reads, would break its chunk index.
        """
        stored = self.dataset()
        marker = stored if self._marker == self._name else self._h5[self._marker]
        with h5_damage(self._path):
            stored.refresh()  # the low-level refresh leaves h5py's cached shape stale
            state = self.read_state(marker, self._path)
            if not state.complete:
                return state
            stored.refresh()  # a finish may have come between the parts of that look; now nothing changes any more
            return self.read_state(marker, self._path)

    @staticmethod
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
        digested = complete and sha256 != NO_SHA256
        return WriterState(int(found["num_batches"]), complete, sha256 if digested else None)

    def close(self) -> None:
        if self._h5 is not None and self._pid == os.getpid():
            self._h5.close()
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_path", "_name", "_meta", "_identity", "_marker")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
