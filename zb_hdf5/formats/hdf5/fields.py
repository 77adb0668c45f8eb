"""Fields in HDF5 files: the datasets `fields/<name>`, aligned with the tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.checked import Crc32Rows
from zb_hdf5.columns.reader import BatchReader, require_options
from zb_hdf5.columns.source import BatchSource
from zb_hdf5.errors import ArgumentError, FormatError, UnverifiableError
from zb_hdf5.field import Field
from zb_hdf5.files.paths import any_path
from zb_hdf5.formats.hdf5.file import (
    h5_damage,
    h5_identity,
    open_h5_for_reading,
    own_dataset,
    read_crc32_of,
    require_stored,
    require_version,
    stored_sha256,
    text_of,
)
from zb_hdf5.formats.hdf5.places import chunk_places, column_runs, compressed_tokens, plain_extents
from zb_hdf5.formats.hdf5.source import H5pySource, crc32_rows_of, open_source
from zb_hdf5.spec import (
    BATCHES,
    BATCHES_LAYOUT,
    CRC32,
    DTYPE_BY_NAME,
    EXTENTS,
    FIELDS_GROUP,
    HDF5_FORMAT,
    HDF5_VERSION,
    NO_SHA256,
    STREAM_FORMAT,
    STREAM_LAYOUT,
    TOKENS,
    StoreMeta,
    crc32_column,
    field_column,
)


class HDF5FieldReader(BatchReader):
    """Reads the values of one field of batches, as `BatchReader` reads tokens.

    Parameters
    ----------
    path
        An HDF5 batch store or stream.
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

    def __init__(self, path: str | os.PathLike[str], name: str, *, access: str = "auto", verify: str = "auto") -> None:
        require_options(access, verify)
        path = any_path(path)
        column = field_column(name)
        with h5_damage(path), open_h5_for_reading(path) as h5:
            tokens = tokens_in(h5, path)
            stored = own_dataset(h5, path, column)
            if stored is None or name not in {field.name for field in tokens.meta.fields}:
                raise FormatError(f"{path}: expected a field {name!r}, found {[f.name for f in tokens.meta.fields]}")
            meta, num_batches = tokens.meta.of_field(name), -(-tokens.token_count // tokens.meta.batch_tokens)
            self._token_count = tokens.token_count * meta.batch_tokens // tokens.meta.batch_tokens
            require_stored(self._token_count * meta.dtype.itemsize, h5, stored, path)
            places, obstacle = chunk_places(stored, meta.batch_bytes, num_batches, path)
            if not tokens.complete:
                places, obstacle = None, "its writer has not finished"
            self.identity = h5_identity(h5, growing=not tokens.complete)
            columns = column_runs(h5, path, column, places)
            sha256 = stored_sha256(stored.attrs["sha256"], f"{path}: {column}")
        source = open_source(path, column, meta, places, obstacle, access, self.identity, tokens.marker)
        super().__init__(path, meta, num_batches, source)
        self.complete, self.columns = tokens.complete, columns
        self.extents, self.compressed = plain_extents(places), compressed_tokens(places)
        self.sha256 = sha256 if tokens.complete and sha256 != NO_SHA256 else None
        if not self.complete and isinstance(source, H5pySource):
            source.dataset()  # opens the file now: once it is published, its partial's name is gone
            self.refresh()
        if self.complete:
            self.check_reads(verify)
        elif verify in ("batch", "store"):
            raise UnverifiableError(f"{path}: field {name}: verify={verify!r} needs its digests, but {obstacle}")

    @property
    def token_count(self) -> int:
        """Values that are committed: those behind them fill up the last chunk of a stream."""
        return self._token_count

    def stored_crc32(self) -> npt.NDArray[np.uint32] | None:
        """Return the crc32 of each batch of values."""
        return read_crc32_of(self.path, self.identity, self.num_batches, crc32_column(self.meta.column))

    def crc32_rows(self) -> Crc32Rows:
        return crc32_rows_of(self, crc32_column(self.meta.column), self.identity)

    def refresh(self) -> int:
        """Show the batches that a live writer has committed since; return `num_batches`. A stream stays as it is."""
        if not self.complete and isinstance(self._source, H5pySource) and self.meta.layout == BATCHES_LAYOUT:
            self.num_batches, self.complete, _ = self._source.refresh()
            self._token_count = self.num_batches * self.meta.batch_tokens
        return self.num_batches


class TokensOfFile(NamedTuple):
    """What a file says of the tokens that its fields are aligned with.

    Attributes
    ----------
    meta
        Their shape, and the fields in the file; the dtype is not that of the tokens.
    marker
        The dataset whose attributes are the commit marker.
    """

    meta: StoreMeta
    token_count: int
    complete: bool
    marker: str


def fields_in(h5: h5py.File, path: Path, axes: int) -> tuple[Field, ...]:
    """Return the fields of a file, in the order of their names; the first axes of each are those of the tokens."""
    group = h5[FIELDS_GROUP] if isinstance(h5.get(FIELDS_GROUP, getlink=True), h5py.HardLink) else None
    if not isinstance(group, h5py.Group):
        return ()
    names = [name for name in sorted(group) if not name.endswith((f".{CRC32}", f".{EXTENTS}"))]
    found = [(name, own_dataset(h5, path, field_column(name))) for name in names]
    try:
        return tuple(Field(name, stored.dtype, stored.shape[axes:]) for name, stored in found if stored is not None)
    except ArgumentError as error:
        raise FormatError(f"{path}: {error}") from error


def tokens_in(h5: h5py.File, path: Path) -> TokensOfFile:
    """Return the facts about the tokens of a file of batches or of a stream.

    Raises
    ------
    FormatError
        If it is none of these, or its fields are of another shape.
    """
    found = text_of(h5.attrs.get("format"))
    if found not in (HDF5_FORMAT, STREAM_FORMAT):
        raise FormatError(f"{path}: expected root attribute format={HDF5_FORMAT!r}, found {found!r}")
    require_version(h5, HDF5_VERSION, path)
    is_stream = found == STREAM_FORMAT
    fields = fields_in(h5, path, 1 if is_stream else 3)
    if not fields:
        raise FormatError(f"{path}: expected fields, found none")
    try:
        if is_stream:
            attributes = h5[TOKENS].attrs
            size, layout, marker = (1, int(attributes["chunk_tokens"])), STREAM_LAYOUT, TOKENS
            count, complete = int(attributes["token_count"]), bool(attributes["complete"])
        else:
            size, layout = (int(h5.attrs["batch_size"]), int(h5.attrs["seq_len"])), BATCHES_LAYOUT
            marker = BATCHES
            state = H5pySource.read_state(h5[marker], path)
            count, complete = state.num_batches * size[0] * size[1], state.complete
        meta = StoreMeta(*size, DTYPE_BY_NAME["uint32"], layout=layout, fields=fields)
    except (ArgumentError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: bad attributes: {error}") from error
    for field in fields:
        chunk = ((size[1],) if is_stream else (1, *size)) + field.shape
        stored = h5[field_column(field.name)]
        if stored.chunks != chunk:
            raise FormatError(f"{path}: field {field.name}: expected chunks of {chunk}, found {stored.chunks}")
    return TokensOfFile(meta, count, complete, marker)
