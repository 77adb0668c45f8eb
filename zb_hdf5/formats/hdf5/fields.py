"""Fields in HDF5 files: `fields/<name>` beside the tokens, or in a file that has nothing else."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import BatchReader, require_options
from zb_hdf5.columns.source import BatchSource, CheckedSource
from zb_hdf5.core.extents import ExtentFile
from zb_hdf5.errors import ArgumentError, BackendError, FormatError, UnverifiableError
from zb_hdf5.field import Field
from zb_hdf5.formats.hdf5.file import (
    chunk_extents,
    crc32_runs,
    h5_damage,
    h5_identity,
    open_h5_for_reading,
    own_dataset,
    read_crc32,
    require_stored,
    require_version,
    text_of,
)
from zb_hdf5.formats.hdf5.source import H5pySource
from zb_hdf5.spec import (
    BATCHES,
    CRC32,
    FIELDS_FORMAT,
    FIELDS_GROUP,
    HDF5_FORMAT,
    HDF5_VERSION,
    NO_SHA256,
    StoreMeta,
    crc32_column,
    field_column,
)


class HDF5FieldReader(BatchReader):
    """Reads the values of one field of batches, as `BatchReader` reads tokens.

    Parameters
    ----------
    path
        An HDF5 batch store, or the `<shard>.fields.h5` of another file.
    name
        Of the field.
    access, verify
        As for the reader of the tokens.

    Raises
    ------
    FormatError, IncompleteError
        If the file is none of these, has no such field, or is damaged.
    """

    backend = "hdf5"
    _source: BatchSource

    def __init__(self, path: str | os.PathLike[str], name: str, *, access: str = "auto", verify: str = "none") -> None:
        require_options(access, verify)
        path = Path(path)
        column = field_column(name)
        with h5_damage(path), open_h5_for_reading(path) as h5:
            marker = marker_of(h5, path)
            stored = own_dataset(h5, path, column)
            if stored is None or stored.ndim < 3:
                raise FormatError(f"{path}: expected a field {name!r}, found {[f.name for f in fields_in(h5, path)]}")
            state = H5pySource.read_state(h5[marker], path)
            meta = _batch_meta(h5, path, stored, name)
            require_stored(state.num_batches * meta.batch_bytes, h5, stored, path)
            extents, obstacle = chunk_extents(stored, meta.batch_bytes, state.num_batches, path)
            if not state.complete:
                extents, obstacle = None, "its writer has not finished"
            self._identity = h5_identity(h5, growing=not state.complete)
            rows = crc32_runs(own_dataset(h5, path, crc32_column(column)))
            sha256 = bytes(stored.attrs["sha256"]).decode("ascii", "replace")
        source: BatchSource
        if extents is not None and access != "h5py":
            source = ExtentFile(path, extents, meta.shape, meta.dtype, access, self._identity)
        elif access in ("mmap", "pread"):
            raise BackendError(f"{path}: access={access!r} needs plain extents, but {obstacle}; use access='h5py'")
        else:
            source = H5pySource(path, column, meta, self._identity, marker)
        super().__init__(path, meta, state.num_batches, source)
        self.complete, self.extents = state.complete, extents
        self.sha256 = sha256 if state.complete and sha256 != NO_SHA256 else None
        if extents is not None:
            self.columns = {column: tuple(extents.runs)} | ({crc32_column(column): rows} if rows else {})
        if not self.complete:
            self.refresh()  # opens the file now: once it is published, its partial's name is gone
        if verify == "batch":
            crc32 = self.stored_crc32()
            if crc32 is None:
                raise UnverifiableError(f"{path}: field {name}: verify='batch' needs its digests, but {obstacle}")
            self._source = CheckedSource(source, meta, crc32, path)
        elif verify == "store":
            self.require_digests()

    def stored_crc32(self) -> npt.NDArray[np.uint32] | None:
        """Return the crc32 of each batch of values."""
        with h5_damage(self.path), open_h5_for_reading(self.path, self._identity) as h5:
            return read_crc32(h5, self.path, self.num_batches, crc32_column(self.meta.column))

    def refresh(self) -> int:
        """Show the batches that a live writer has committed since; return `num_batches`."""
        if not self.complete and isinstance(self._source, H5pySource):
            self.num_batches, self.complete, _ = self._source.refresh()
        return self.num_batches


def fields_in(h5: h5py.File, path: Path) -> tuple[Field, ...]:
    """Return the fields of a file, in the order of their names, from what its datasets are."""
    group = h5.get(FIELDS_GROUP, getlink=False) if FIELDS_GROUP in h5 else None
    if not isinstance(group, h5py.Group):
        return ()
    try:
        return tuple(
            Field(name, stored.dtype, stored.shape[len(_lead(h5)) :])
            for name, stored in sorted(group.items())
            if not name.endswith(f".{CRC32}")
        )
    except (ArgumentError, AttributeError) as error:
        raise FormatError(f"{path}: {FIELDS_GROUP}: {error}") from error


def _lead(h5: h5py.File) -> tuple[str, ...]:
    """Return the axes of the tokens, which come before those of the values."""
    return ("batch", "record", "token") if "batch_size" in h5.attrs else ("token",)


def marker_of(h5: h5py.File, path: Path) -> str:
    """Return the dataset whose attributes are the commit marker of a file of batches, or of fields only.

    Raises
    ------
    FormatError
        If the file is neither.
    """
    found = text_of(h5.attrs.get("format"))
    if found not in (HDF5_FORMAT, FIELDS_FORMAT):
        raise FormatError(f"{path}: expected root attribute format={FIELDS_FORMAT!r}, found {found!r}")
    require_version(h5, HDF5_VERSION, path)
    if found == HDF5_FORMAT:
        return BATCHES
    fields = fields_in(h5, path)
    if not fields:
        raise FormatError(f"{path}: expected fields, found none")
    return field_column(fields[0].name)


def _batch_meta(h5: h5py.File, path: Path, stored: h5py.Dataset, name: str) -> StoreMeta:
    try:
        size = int(h5.attrs["batch_size"]), int(h5.attrs["seq_len"])
        field = Field(name, stored.dtype, stored.shape[3:])
        if stored.shape[1:3] != size:
            raise FormatError(f"{path}: field {name}: expected batches of {size}, found {stored.shape[1:]}")
        return StoreMeta(*size, np.dtype("<u4"), fields=(field,)).of_field(name)
    except (ArgumentError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: field {name}: {error}") from error


def attach_fields(reader: BatchReader, beside: Path) -> None:
    """Give a reader of tokens the fields of the file beside it.

    Raises
    ------
    FormatError
        If they are not of as many batches of the same shape.
    """
    with h5_damage(beside), open_h5_for_reading(beside) as h5:
        marker = marker_of(h5, beside)
        state = H5pySource.read_state(h5[marker], beside)
        shape = tuple(int(h5.attrs[key]) for key in ("batch_size", "seq_len"))
        found = fields_in(h5, beside)
    if shape != reader.meta.shape or (state.num_batches != reader.num_batches and reader.complete):
        raise FormatError(
            f"{beside}: expected the fields of {reader.num_batches:,} batches of {reader.meta.shape}, found "
            f"{state.num_batches:,} of {shape}; it belongs to another file"
        )
    reader.meta = replace(reader.meta, fields=found)
    options: dict[str, Any] = {"access": reader.access if reader.access in ("mmap", "pread") else "auto"}
    if isinstance(reader._source, CheckedSource):
        options["verify"] = "batch"
    reader._open_field = partial(HDF5FieldReader, beside, **options)
