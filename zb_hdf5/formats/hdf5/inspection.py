"""One look into an HDF5 file: the dataset of its batches, of a stream, of a field, or one that others have written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from zb_hdf5.errors import ArgumentError, FormatError, Remedy
from zb_hdf5.field import Field
from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.files.identity import Identity
from zb_hdf5.formats.hdf5.chunks import Places, chunk_places, codec_of, column_runs
from zb_hdf5.formats.hdf5.file import (
    bytes_elsewhere,
    h5_damage,
    h5_identity,
    open_h5_for_reading,
    own_dataset,
    read_origin,
    read_root,
    require_rows,
    require_stored,
    require_version,
    stored_sha256,
    text_of,
)
from zb_hdf5.formats.hdf5.h5_tokens import Column, read_state
from zb_hdf5.spec import (
    BATCHES,
    BATCHES_LAYOUT,
    CODE_BY_DTYPE,
    CRC32,
    DOC_OFFSETS,
    DTYPE_BY_NAME,
    EXTENTS,
    FIELDS_GROUP,
    HDF5_FORMAT,
    HDF5_VERSION,
    NO_CODEC,
    NO_SHA256,
    STREAM_FORMAT,
    STREAM_LAYOUT,
    TOKENS,
    TOKENS_ATTRIBUTES,
    StoreMeta,
    field_column,
)

#: Tokens of a foreign stream that are read at once.
FOREIGN_CHUNK_TOKENS = 1 << 16
#: The obstacle of a file that grows.
UNFINISHED = "its writer has not finished"


@contextmanager
def _opened(path: Path, identity: Identity | None = None) -> Iterator[h5py.File]:
    with h5_damage(path), open_h5_for_reading(path, identity) as h5:
        yield h5


def is_stream_file(path: Path) -> bool:
    """Return whether an HDF5 file is a token stream."""
    with _opened(path) as h5:
        return text_of(h5.attrs.get("format")) == STREAM_FORMAT


# --- batches ---------------------------------------------------------------------------------------------------------


def look_at_batches(path: Path, identity: Identity | None = None) -> Column:
    """Return the column of the batches; `FormatError` if the file is none of this version, or contradicts itself."""
    with _opened(path, identity) as h5:
        return _batches(h5, path)


def _batches(h5: h5py.File, path: Path) -> Column:
    found = text_of(h5.attrs.get("format"))
    if found == STREAM_FORMAT:
        raise FormatError(f"{path}: is a token stream: pass batch_size and seq_len for windows over it")
    if found != HDF5_FORMAT:
        raise _foreign(h5, f"{path}: expected root attribute format={HDF5_FORMAT!r}, found {found!r}")
    require_version(h5, HDF5_VERSION, path)
    if missing := [name for name in ("batch_size", "seq_len") if name not in h5.attrs]:
        raise FormatError(f"{path}: root attribute {missing[0]!r} is missing")
    stored = _dataset(h5, path, BATCHES)
    meta = _batches_meta(h5, stored, path)
    if stored.shape[1:] != meta.shape:
        raise FormatError(f"{path}: {BATCHES}: expected batches of {meta.shape}, found {stored.shape[1:]}")
    state = read_state(stored, path)
    if state.num_batches > len(stored):
        raise FormatError(f"{path}: expected {state.num_batches:,} batches, found room for {len(stored):,}")
    require_stored(state.num_batches * meta.batch_bytes, h5, stored, path)
    column = Column(
        path, BATCHES, meta, state.num_batches * meta.batch_tokens, h5_identity(h5, growing=not state.complete),
        state.complete, state.sha256, marker=BATCHES, obstacle=UNFINISHED, origin=read_origin(h5),
    )  # fmt: skip
    if not state.complete:
        return column
    places, obstacle = _batch_places(stored, meta, state.num_batches, path)
    rows = own_dataset(h5, path, CRC32)
    columns = column_runs(h5, path, BATCHES, places)
    if rows is not None and len(rows) < state.num_batches:
        columns.pop(CRC32, None)  # whoever needs them is told
    return column._replace(places=places, obstacle=obstacle, columns=columns, has_crc32=rows is not None)


def _batches_meta(h5: h5py.File, stored: h5py.Dataset, path: Path) -> StoreMeta:
    try:
        shape, root = (int(h5.attrs["batch_size"]), int(h5.attrs["seq_len"])), read_root(h5)
        fields, codec = fields_in(h5, path, 3), codec_of(stored) or NO_CODEC
        return StoreMeta(*shape, dtype=stored.dtype, fields=fields, codec=codec, **root)
    except (ArgumentError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{path}: bad root attributes: {error}") from error


def _batch_places(stored: h5py.Dataset, meta: StoreMeta, num_batches: int, path: Path) -> tuple[Places | None, str]:
    """List the chunks once; return their extents, or None and the obstacle."""
    if stored.chunks is None:
        base = stored.id.get_offset()
        if base is None:
            return None, "it is neither chunked nor contiguous in this file"
        return Extents([Run(base, meta.batch_bytes, num_batches)], meta.batch_bytes), ""
    if stored.chunks != (1, *meta.shape):
        return None, f"its chunks are {stored.chunks}, not one batch {(1, *meta.shape)}"
    return chunk_places(stored, meta.batch_bytes, num_batches, path)


# --- datasets of another origin --------------------------------------------------------------------------------------


def look_at_foreign(path: Path, dataset: str) -> tuple[Column, int]:
    """Return the column of integers that others have written, and its axes.

    Of three axes a unit is one batch, of two one record, of one 65,536 tokens.
    """
    with _opened(path) as h5:
        stored = own_dataset(h5, path, dataset)
        if stored is None or stored.ndim not in (1, 2, 3):
            raise _foreign(h5, f"{path}: expected a dataset {dataset!r} of one, two or three axes, found {stored!r}")
        if stored.dtype.kind not in "iu":
            raise FormatError(f"{path}: {dataset}: expected integers, found {stored.dtype}")
        dtype: np.dtype[Any] = stored.dtype if stored.dtype in CODE_BY_DTYPE else DTYPE_BY_NAME["uint32"]
        layout = STREAM_LAYOUT if stored.ndim == 1 else BATCHES_LAYOUT
        rows, length = {1: (1, FOREIGN_CHUNK_TOKENS), 2: (1, stored.shape[-1])}.get(stored.ndim, stored.shape[1:])
        meta = StoreMeta(rows, length, dtype, layout=layout)
        identity, obstacle = h5_identity(h5, growing=False), f"{dataset!r} is a foreign dataset"
        return Column(path, dataset, meta, math.prod(stored.shape), identity, obstacle=obstacle), stored.ndim


def _dataset(h5: h5py.File, path: Path, name: str) -> h5py.Dataset:
    stored = own_dataset(h5, path, name)
    if stored is None or stored.ndim != 3:
        raise _foreign(h5, f"{path}: expected a 3-D dataset {name!r}, found {stored!r}")
    return stored


def _foreign(h5: h5py.File, problem: str) -> FormatError:
    names: list[str] = []

    def visit(name: str, item: Any) -> None:
        inside = isinstance(item, h5py.Dataset) and not bytes_elsewhere(item)
        if inside and item.ndim in (1, 2, 3) and item.dtype.kind in "iu":
            names.append(name)

    h5.visititems(visit)
    if not names:
        return FormatError(f"{problem}; it has no integer dataset of one to three axes")
    found = ", ".join(sorted(names)[:5])
    return FormatError(f"{problem}; its integer datasets: {found}", remedy=Remedy.DATASET)


# --- streams ---------------------------------------------------------------------------------------------------------


def look_at_stream(path: Path, identity: Identity | None = None) -> Column:
    """Return the column of the tokens of a stream, of the identity that it had if it was open before."""
    with _opened(path, identity) as h5:
        stored = checked_tokens(h5, path)
        found = {name: stored.attrs[name] for name in TOKENS_ATTRIBUTES}
        token_count, complete = int(found["token_count"]), bool(found["complete"])
        if token_count > len(stored):
            raise FormatError(f"{path}: expected {token_count:,} tokens, found room for {len(stored):,}")
        require_stored(token_count * stored.dtype.itemsize, h5, stored, path)
        chunk_tokens = int(found["chunk_tokens"])
        if chunk_tokens < 1 or (stored.chunks and stored.chunks[0] != chunk_tokens):
            raise FormatError(f"{path}: expected chunks of {chunk_tokens:,} tokens, found {stored.chunks}")
        require_rows(h5, path, DOC_OFFSETS, int(found["document_count"]) + 1)
        meta, sha256 = _stream_meta(h5, stored, path), stored_sha256(found["sha256"], path)
        column = Column(
            path, TOKENS, meta, token_count, h5_identity(h5, growing=not complete), complete,
            sha256 if complete else None, obstacle=UNFINISHED, marker=TOKENS, has_crc32=complete,
        )  # fmt: skip
        if not complete or not stored.chunks:
            return column._replace(obstacle="it is not chunked") if complete else column
        places, obstacle = chunk_places(stored, meta.batch_bytes, column.num_units, path)
        return column._replace(places=places, obstacle=obstacle, columns=column_runs(h5, path, TOKENS, places))


def _stream_meta(h5: h5py.File, stored: h5py.Dataset, path: Path) -> StoreMeta:
    names = ("chunk_tokens", "document_count", "boundary_token_id")
    try:
        chunk_tokens, documents, boundary = (int(stored.attrs[name]) for name in names)
        return StoreMeta(
            1, chunk_tokens, stored.dtype, document_count=documents, boundary_token_id=boundary,
            layout=STREAM_LAYOUT, fields=fields_in(h5, path, 1), codec=codec_of(stored) or NO_CODEC,
            **read_root(h5, ("vocab_size",)),
        )  # fmt: skip
    except ArgumentError as error:
        raise FormatError(f"{path}: bad attributes: {error}") from error


def checked_tokens(h5: h5py.File, path: Path) -> h5py.Dataset:
    """Return the dataset of the tokens; `FormatError` if the file is no stream of this version."""
    found = text_of(h5.attrs.get("format"))
    if found != STREAM_FORMAT:
        raise FormatError(f"{path}: expected root attribute format={STREAM_FORMAT!r}, found {found!r}")
    require_version(h5, HDF5_VERSION, path)
    stored = own_dataset(h5, path, TOKENS)
    if stored is None or stored.ndim != 1 or stored.dtype not in CODE_BY_DTYPE:
        raise FormatError(f"{path}: expected a 1-D dataset {TOKENS!r} of uint16 or uint32, found {stored!r}")
    if missing := [name for name in TOKENS_ATTRIBUTES if name not in stored.attrs]:
        raise FormatError(f"{path}: attribute {TOKENS}/{missing[0]} is missing")
    return stored


# --- fields ----------------------------------------------------------------------------------------------------------


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


def look_at_field(path: Path, name: str, identity: Identity | None = None) -> Column:
    """Return the column of one field of batches, or of a stream; `FormatError` if the file has no such field."""
    column = field_column(name)
    with _opened(path, identity) as h5:
        tokens, count, complete = _tokens_beside(h5, path)
        stored = own_dataset(h5, path, column)
        if stored is None or name not in {field.name for field in tokens.fields}:
            raise FormatError(f"{path}: expected a field {name!r}, found {[field.name for field in tokens.fields]}")
        meta = tokens.of_field(name)
        values = count * meta.batch_tokens // tokens.batch_tokens
        require_stored(values * meta.dtype.itemsize, h5, stored, path)
        found = Column(
            path, column, meta, values, h5_identity(h5, growing=not complete), complete, obstacle=UNFINISHED,
            marker=TOKENS if tokens.layout == STREAM_LAYOUT else BATCHES, has_crc32=True,
        )  # fmt: skip
        sha256 = stored_sha256(stored.attrs["sha256"], f"{path}: {column}")
        if not complete:
            return found
        places, obstacle = chunk_places(stored, meta.batch_bytes, found.num_units, path)
        sha256_known = None if sha256 == NO_SHA256 else sha256
        columns = column_runs(h5, path, column, places)
        return found._replace(places=places, obstacle=obstacle, sha256=sha256_known, columns=columns)


def _tokens_beside(h5: h5py.File, path: Path) -> tuple[StoreMeta, int, bool]:
    """Return shape and fields of the tokens of a file, how many there are, and whether it is complete."""
    is_stream = text_of(h5.attrs.get("format")) == STREAM_FORMAT
    try:
        if is_stream:
            stored = checked_tokens(h5, path)
            meta = _stream_meta(h5, stored, path)
            count, complete = int(stored.attrs["token_count"]), bool(stored.attrs["complete"])
        else:
            require_version(h5, HDF5_VERSION, path)
            stored = _dataset(h5, path, BATCHES)
            meta, state = _batches_meta(h5, stored, path), read_state(stored, path)
            count, complete = state.num_batches * meta.batch_tokens, state.complete
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: bad attributes: {error}") from error
    for field in meta.fields:
        chunk = ((meta.seq_len,) if is_stream else (1, *meta.shape)) + field.shape
        chunks = h5[field_column(field.name)].chunks
        if chunks != chunk:
            raise FormatError(f"{path}: field {field.name}: expected chunks of {chunk}, found {chunks}")
    return meta, count, complete
