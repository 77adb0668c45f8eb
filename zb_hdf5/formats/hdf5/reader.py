"""Reads HDF5 batch stores: by extents outside the HDF5 library where the layout allows, through h5py where not.

A published store is opened once, its extents are listed with one `chunk_iter`, and HDF5 is closed again. Live stores
(SWMR), compressed ones and foreign datasets have no plain extents and are read through h5py, behind the same interface.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.checked import Crc32Rows
from zb_hdf5.columns.reader import BatchReader, require_options
from zb_hdf5.columns.source import BatchSource
from zb_hdf5.columns.writer import Columns
from zb_hdf5.errors import ArgumentError, FormatError, IncompleteError, Remedy, UnverifiableError
from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.files.paths import any_path
from zb_hdf5.formats.hdf5.fields import HDF5FieldReader, fields_in
from zb_hdf5.formats.hdf5.file import (
    bytes_elsewhere,
    h5_damage,
    h5_identity,
    open_h5_for_reading,
    own_dataset,
    read_crc32,
    require_rows,
    require_stored,
    require_version,
    text_of,
)
from zb_hdf5.formats.hdf5.filters import codec_of
from zb_hdf5.formats.hdf5.places import Places, chunk_places, column_runs, compressed_tokens, plain_extents
from zb_hdf5.formats.hdf5.source import H5pySource, crc32_rows_of, open_source
from zb_hdf5.spec import (
    BATCHES,
    CODE_BY_DTYPE,
    CRC32,
    DTYPE_BY_NAME,
    HDF5_FORMAT,
    HDF5_VERSION,
    NO_CODEC,
    ROOT_ATTRIBUTES,
    STREAM_FORMAT,
    StoreMeta,
)

#: What a dataset of another origin would need to be verified.
_FOREIGN: Final = "a dataset of another origin has no digests; convert it to a store, which keeps them from then on"


class HDF5BatchReader(BatchReader):
    """Reads an HDF5 batch store. `BatchReader` describes its functions.

    Parameters
    ----------
    path
        The file; a `.partial` is followed while it grows: `refresh` shows the batches committed since.
    access
        "mmap" and "pread" use the extents of the chunks and need a published, unfiltered file; "h5py" reads anything;
        "auto" takes extents where it can.
    verify
        As for `open_reader`. What still grows is not checked.
    dataset
        Name of a 3-D integer dataset of another origin, read through h5py; an id that does not fit uint32 is an error
        when it is met.

    Raises
    ------
    FormatError, IncompleteError
        If the file is not a batch store, or is damaged.
    BackendError
        If `access` names what this file does not allow; the message says why.
    UnverifiableError
        If `verify` has no digests to compare with.
    ChecksumError
        If `verify="store"` finds other bytes.

    Notes
    -----
    Through h5py all threads share HDF5's global lock: correct, but not parallel.
    """

    backend = "hdf5"
    _source: BatchSource

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        access: str = "auto",
        verify: str = "auto",
        dataset: str | None = None,
    ) -> None:
        require_options(access, verify)
        path = any_path(path)
        with h5_damage(path), open_h5_for_reading(path) as h5:
            found = _inspect_store(h5, path) if dataset is None else _inspect_foreign(h5, path, dataset)
            self._identity = h5_identity(h5, growing=not found.complete)
            if verify in ("batch", "store") and not found.complete:
                raise UnverifiableError(f"{path}: verify={verify!r} needs all of its digests, but {found.obstacle}")
            if verify in ("batch", "store") and dataset is not None:
                raise UnverifiableError(f"{path}: cannot be verified: {_FOREIGN}")
            if verify == "batch":
                require_rows(h5, path, CRC32, found.num_batches)
        source = open_source(path, dataset or BATCHES, found.meta, found.places, found.obstacle, access, self._identity)
        super().__init__(path, found.meta, found.num_batches, source)
        self._foreign, self._has_crc32 = dataset is not None, found.has_crc32
        self.complete, self.sha256, self.columns = found.complete, found.sha256, found.columns
        self.extents, self.compressed = plain_extents(found.places), compressed_tokens(found.places)
        self._open_field = partial(HDF5FieldReader, path, access=access, verify="none" if verify == "store" else verify)
        if not self.complete:
            self.refresh()  # opens the file now: once it is published, its partial's name is gone
        if self.complete:
            self.check_reads(verify)

    def stored_crc32(self) -> npt.NDArray[np.uint32] | None:
        """Return the rows of the dataset `crc32`, or None."""
        if self._foreign:
            return None
        with h5_damage(self.path), open_h5_for_reading(self.path, self._identity) as h5:
            if self.complete and self.sha256 is None and CRC32 not in h5:
                return None
            crc32 = read_crc32(h5, self.path, self.num_batches)
            rows = len(h5[BATCHES])
            if self.complete and rows != self.num_batches:
                raise IncompleteError(f"{self.path}: expected {rows:,} batches, found {self.num_batches:,}")
            return crc32

    def crc32_rows(self) -> Crc32Rows | None:
        if self._foreign or not self._has_crc32:
            return None
        return crc32_rows_of(self, CRC32, self._identity)

    def missing_digests(self) -> str:
        return _FOREIGN if self._foreign else super().missing_digests()

    def refresh(self) -> int:
        """Show the batches that a live writer has committed since; return `num_batches`."""
        if not self.complete and isinstance(self._source, H5pySource):
            self.num_batches, self.complete, self.sha256 = self._source.refresh()
            for field in self._fields.values():  # after the tokens: they are never behind them
                field.refresh()
        return self.num_batches


class _Layout(NamedTuple):
    """The facts that are read once from an HDF5 file."""

    meta: StoreMeta
    num_batches: int
    complete: bool
    sha256: str | None
    places: Places | None  # of the chunks
    obstacle: str  # why there are no plain extents, or no digests
    has_crc32: bool = False
    columns: Columns = {}  # noqa: RUF012 - nobody changes it


def _inspect_store(h5: h5py.File, path: Path) -> _Layout:
    found = text_of(h5.attrs.get("format"))
    if found == STREAM_FORMAT:
        raise FormatError(f"{path}: is a token stream: pass batch_size and seq_len for windows over it")
    if found != HDF5_FORMAT:
        raise _foreign(h5, f"{path}: expected root attribute format={HDF5_FORMAT!r}, found {found!r}")
    require_version(h5, HDF5_VERSION, path)
    missing = [name for name in ROOT_ATTRIBUTES if name not in h5.attrs]
    if missing:
        raise FormatError(f"{path}: root attribute {missing[0]!r} is missing")
    stored = _dataset(h5, path, BATCHES)
    meta = _meta(h5, stored, path)
    if stored.shape[1:] != meta.shape:
        raise FormatError(f"{path}: {BATCHES}: expected batches of {meta.shape}, found {stored.shape[1:]}")
    state = H5pySource.read_state(stored, path)
    if state.num_batches > len(stored):
        raise FormatError(f"{path}: expected {state.num_batches:,} batches, found room for {len(stored):,}")
    require_stored(state.num_batches * meta.batch_bytes, h5, stored, path)
    if not state.complete:
        return _Layout(meta, state.num_batches, False, None, None, "its writer has not finished")
    places, obstacle = _chunk_places(stored, meta, state.num_batches, path)
    rows = own_dataset(h5, path, CRC32)
    columns = column_runs(h5, path, BATCHES, places)
    if rows is not None and len(rows) < state.num_batches:
        columns.pop(CRC32, None)  # whoever needs them is told
    found = _Layout(meta, state.num_batches, True, state.sha256, places, obstacle)
    return found._replace(has_crc32=rows is not None, columns=columns)


def _meta(h5: h5py.File, stored: h5py.Dataset, path: Path) -> StoreMeta:
    names = ("batch_size", "seq_len", "seed", "total_records", "document_count", "vocab_size")
    try:
        numbers: dict[str, Any] = {name: int(h5.attrs[name]) for name in names}
        text, fields = str(text_of(h5.attrs["tokenizer"])), fields_in(h5, path, 3)
        codec = codec_of(stored) or NO_CODEC
        return StoreMeta(dtype=stored.dtype, tokenizer=text, fields=fields, codec=codec, **numbers)
    except (ArgumentError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{path}: bad root attributes: {error}") from error


def _inspect_foreign(h5: h5py.File, path: Path, dataset: str) -> _Layout:
    stored = _dataset(h5, path, dataset)
    if stored.dtype.kind not in "iu":
        raise FormatError(f"{path}: {dataset}: expected integers, found {stored.dtype}")
    dtype: np.dtype[Any] = stored.dtype if stored.dtype in CODE_BY_DTYPE else DTYPE_BY_NAME["uint32"]
    meta = StoreMeta(stored.shape[1], stored.shape[2], dtype)
    return _Layout(meta, len(stored), True, None, None, f"{dataset!r} is a foreign dataset")


def _dataset(h5: h5py.File, path: Path, name: str) -> h5py.Dataset:
    stored = own_dataset(h5, path, name)
    if stored is None or stored.ndim != 3:
        raise _foreign(h5, f"{path}: expected a 3-D dataset {name!r}, found {stored!r}")
    return stored


def _foreign(h5: h5py.File, problem: str) -> FormatError:
    names: list[str] = []

    def visit(name: str, item: Any) -> None:
        inside = isinstance(item, h5py.Dataset) and not bytes_elsewhere(item)
        if inside and item.ndim == 3 and item.dtype.kind in "iu":
            names.append(name)

    h5.visititems(visit)
    if not names:
        return FormatError(f"{problem}; it has no 3-D integer dataset")
    found = ", ".join(sorted(names)[:5])
    return FormatError(f"{problem}; its 3-D integer datasets: {found}", remedy=Remedy.DATASET)


def _chunk_places(stored: h5py.Dataset, meta: StoreMeta, num_batches: int, path: Path) -> tuple[Places | None, str]:
    """List the chunks once; return where they lie, or None and what stands in the way."""
    if stored.chunks is None:
        base = stored.id.get_offset()
        if base is None:
            return None, "it is neither chunked nor contiguous in this file"
        return Extents([Run(base, meta.batch_bytes, num_batches)], meta.batch_bytes), ""
    if stored.chunks != (1, *meta.shape):
        return None, f"its chunks are {stored.chunks}, not one batch {(1, *meta.shape)}"
    return chunk_places(stored, meta.batch_bytes, num_batches, path)
