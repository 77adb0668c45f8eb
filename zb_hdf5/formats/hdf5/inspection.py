"""One look into an HDF5 file: the dataset of its batches, of a stream, of a field, or one that others have written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np

from zb_hdf5.errors import ArgumentError, FormatError, Remedy
from zb_hdf5.field import Field
from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.files.paths import Identity
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
#: Dtypes of others whose bytes are those of the tokens that are read.
SAME_BYTES: Final = (*CODE_BY_DTYPE, np.dtype("<i4"))
#: The obstacle of a file that grows.
UNFINISHED = "its writer has not finished"


@contextmanager
def _opened(path: Path, identity: Identity | None = None) -> Iterator[h5py.File]:
    with h5_damage(path), open_h5_for_reading(path, identity) as h5:
        yield h5


def is_stream_file(path: Path) -> bool:
    """Return whether an HDF5 file is a token stream, of ours or a corpus of others."""
    with _opened(path) as h5:
        return text_of(h5.attrs.get("format")) == STREAM_FORMAT or _is_corpus(h5, path)


def _is_corpus(h5: h5py.File, path: Path) -> bool:
    """Return whether others have written 1-D `tokens` here, with their count and their sha256 as attributes."""
    stored = own_dataset(h5, path, TOKENS) if "format" not in h5.attrs else None
    if stored is None or stored.ndim != 1 or stored.dtype not in SAME_BYTES:
        return False
    return "token_count" in stored.attrs and "sha256" in stored.attrs


# --- batches ---------------------------------------------------------------------------------------------------------


def look_at_batches(path: Path, identity: Identity | None = None) -> Column:
    """Return the column of the batches; `FormatError` if the file is none of this version, or contradicts itself."""
    with _opened(path, identity) as h5:
        column, stored = _batches(h5, path)
        if not column.complete:
            return column
        rows = own_dataset(h5, path, CRC32)
        column = _with_places(h5, column, stored)._replace(has_crc32=rows is not None)
        if rows is not None and len(rows) < column.num_units:
            column.columns.pop(CRC32, None)  # whoever needs them gets an error
        return column


def _batches(h5: h5py.File, path: Path) -> tuple[Column, h5py.Dataset]:
    """Return the column of the batches, without their extents, and its dataset."""
    found = text_of(h5.attrs.get("format"))
    if found == STREAM_FORMAT or _is_corpus(h5, path):
        raise FormatError(f"{path}: is a token stream: pass batch_size and seq_len for windows over it")
    if found != HDF5_FORMAT:
        problem = f"{path}: expected root attribute format={HDF5_FORMAT!r}, found {found!r}"
        raise FormatError(problem) if CRC32 in h5 or str(found).startswith("zb-") else _foreign(h5, problem)
    require_version(h5, HDF5_VERSION, path)
    if missing := [name for name in ("batch_size", "seq_len") if name not in h5.attrs]:
        raise FormatError(f"{path}: root attribute {missing[0]!r} is missing")
    stored = own_dataset(h5, path, BATCHES)
    if stored is None or stored.ndim != 3:
        raise FormatError(f"{path}: expected a 3-D dataset {BATCHES!r}, found {stored!r}")
    try:
        shape, root = (int(h5.attrs["batch_size"]), int(h5.attrs["seq_len"])), read_root(h5)
        fields, codec = fields_in(h5, path, 3), codec_of(stored) or NO_CODEC
        meta = StoreMeta(*shape, dtype=stored.dtype, fields=fields, codec=codec, **root)
    except (ArgumentError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{path}: bad root attributes: {error}") from error
    if stored.shape[1:] != meta.shape:
        raise FormatError(f"{path}: {BATCHES}: expected batches of {meta.shape}, found {stored.shape[1:]}")
    state = read_state(stored, path)
    if state.num_batches > len(stored):
        raise FormatError(f"{path}: expected {state.num_batches:,} batches, found space for {len(stored):,}")
    require_stored(state.num_batches * meta.batch_bytes, h5, stored, path)
    column = Column(
        path, BATCHES, meta, state.num_batches * meta.batch_tokens, h5_identity(h5, growing=not state.complete),
        state.complete, state.sha256, marker=BATCHES, obstacle=UNFINISHED, origin=read_origin(h5),
    )  # fmt: skip
    return column, stored


def _with_places(h5: h5py.File, column: Column, stored: h5py.Dataset) -> Column:
    """Add the extents of the units, from one list of the chunks, or the obstacle to reading them without HDF5."""
    meta, count = column.meta, column.num_units
    places: Places | None = None
    if stored.chunks is None and stored.ndim == 3:
        base = stored.id.get_offset()
        places = None if base is None else Extents([Run(base, meta.batch_bytes, count)], meta.batch_bytes)
        obstacle = "it is neither chunked nor contiguous in this file" if base is None else ""
    elif stored.chunks is None:
        obstacle = "it is not chunked"
    elif column.name == BATCHES and stored.chunks != (1, *meta.shape):
        obstacle = f"its chunks are {stored.chunks}, not one batch {(1, *meta.shape)}"
    else:
        places, obstacle = chunk_places(stored, meta.batch_bytes, count, column.path)
    columns = column_runs(h5, column.path, column.name, places)
    return column._replace(places=places, obstacle=obstacle, columns=columns)


# --- datasets of another origin --------------------------------------------------------------------------------------


def look_at_foreign(path: Path, dataset: str) -> tuple[Column, int]:
    """Look at integers that others have written, of any axes; return them, and the number of axes."""
    with _opened(path) as h5:
        return _foreign_column(h5, path, dataset)


def _foreign_column(h5: h5py.File, path: Path, dataset: str) -> tuple[Column, int]:
    """Return a dataset and its axes: of three a unit is one batch, of two one record, of one 65,536 tokens."""
    stored = own_dataset(h5, path, dataset)
    if stored is None or stored.ndim not in (1, 2, 3):
        raise _foreign(h5, f"{path}: expected a dataset {dataset!r} of one, two or three axes, found {stored!r}")
    if stored.dtype.kind not in "iu":
        raise FormatError(f"{path}: {dataset}: expected integers, found {stored.dtype}")
    dtype: np.dtype[Any] = stored.dtype if stored.dtype in CODE_BY_DTYPE else DTYPE_BY_NAME["uint32"]
    layout = STREAM_LAYOUT if stored.ndim == 1 else BATCHES_LAYOUT
    rows, length = {1: (1, FOREIGN_CHUNK_TOKENS), 2: (1, stored.shape[-1])}.get(stored.ndim, stored.shape[1:])
    count, sha256 = math.prod(stored.shape), None
    if stored.ndim == 1 and "token_count" in stored.attrs:  # the last chunk may be filled up
        found = int(stored.attrs["token_count"])
        if not 0 <= found <= count:
            raise FormatError(f"{path}: {dataset}: expected token_count from 0 to {count:,}, found {found:,}")
        count = found
        if "sha256" in stored.attrs and stored.dtype in SAME_BYTES:
            sha256 = stored_sha256(stored.attrs["sha256"], f"{path}: {dataset}")
    require_stored(count * stored.dtype.itemsize, h5, stored, path)
    identity, obstacle = h5_identity(h5, growing=False), f"{dataset!r} is a foreign dataset"
    meta = StoreMeta(rows, length, dtype, layout=layout)
    return Column(path, dataset, meta, count, identity, sha256=sha256, obstacle=obstacle), stored.ndim


def _foreign(h5: h5py.File, problem: str) -> FormatError:
    names: list[str] = []

    def visit(name: str, item: Any) -> None:
        inside = isinstance(item, h5py.Dataset) and not bytes_elsewhere(item)
        if inside and item.ndim in (1, 2, 3) and item.dtype.kind in "iu":
            names.append(name)

    h5.visititems(visit)
    if not names:
        return FormatError(f"{problem}; it has no integer dataset of one to three axes", remedy=Remedy.CONVERT)
    found = ", ".join(sorted(names)[:5])
    return FormatError(f"{problem}; its integer datasets: {found}", remedy=Remedy.DATASET)


# --- streams ---------------------------------------------------------------------------------------------------------


def look_at_stream(path: Path, identity: Identity | None = None, dataset: str | None = None) -> Column:
    """Return the column of the tokens of a stream, of the identity that it had; `dataset`: one of another origin."""
    with _opened(path, identity) as h5:
        if dataset is not None or _is_corpus(h5, path):
            column, axes = _foreign_column(h5, path, dataset or TOKENS)
            if axes != 1:
                raise FormatError(f"{path}: {dataset}: expected a 1-D stream, found {axes} axes")
            return column
        column, stored = _stream(h5, path)
        return _with_places(h5, column, stored) if column.complete else column


def _stream(h5: h5py.File, path: Path) -> tuple[Column, h5py.Dataset]:
    """Return the column of the tokens, without the extents of its chunks, and its dataset."""
    stored = checked_tokens(h5, path)
    found = {name: stored.attrs[name] for name in TOKENS_ATTRIBUTES}
    token_count, complete, chunk_tokens = int(found["token_count"]), bool(found["complete"]), int(found["chunk_tokens"])
    if token_count > len(stored):
        raise FormatError(f"{path}: expected {token_count:,} tokens, found space for {len(stored):,}")
    require_stored(token_count * stored.dtype.itemsize, h5, stored, path)
    if chunk_tokens < 1 or (stored.chunks and stored.chunks[0] != chunk_tokens):
        raise FormatError(f"{path}: expected chunks of {chunk_tokens:,} tokens, found {stored.chunks}")
    require_rows(h5, path, DOC_OFFSETS, int(found["document_count"]) + 1)
    try:
        meta = StoreMeta(
            1, chunk_tokens, stored.dtype, document_count=int(found["document_count"]),
            boundary_token_id=int(found["boundary_token_id"]), layout=STREAM_LAYOUT, fields=fields_in(h5, path, 1),
            codec=codec_of(stored) or NO_CODEC, **read_root(h5, ("vocab_size",)),
        )  # fmt: skip
    except ArgumentError as error:
        raise FormatError(f"{path}: bad attributes: {error}") from error
    sha256 = stored_sha256(found["sha256"], path)
    column = Column(
        path, TOKENS, meta, token_count, h5_identity(h5, growing=not complete), complete, sha256 if complete else None,
        obstacle=UNFINISHED, marker=TOKENS, has_crc32=complete, origin=read_origin(h5),
    )  # fmt: skip
    return column, stored


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
    with _opened(path, identity) as h5:
        is_stream = text_of(h5.attrs.get("format")) == STREAM_FORMAT
        tokens, _ = (_stream if is_stream else _batches)(h5, path)
        names, stored = [field.name for field in tokens.meta.fields], own_dataset(h5, path, field_column(name))
        if stored is None or name not in names:
            raise FormatError(f"{path}: expected a field {name!r}, found {names}")
        for field in tokens.meta.fields:
            chunk = ((tokens.meta.seq_len,) if is_stream else (1, *tokens.meta.shape)) + field.shape
            if (chunks := h5[field_column(field.name)].chunks) != chunk:
                raise FormatError(f"{path}: field {field.name}: expected chunks of {chunk}, found {chunks}")
        meta = tokens.meta.of_field(name)
        values = tokens.num_tokens * meta.batch_tokens // tokens.meta.batch_tokens
        require_stored(values * meta.dtype.itemsize, h5, stored, path)
        sha256 = stored_sha256(stored.attrs["sha256"], f"{path}: {meta.column}")
        column = tokens._replace(name=meta.column, meta=meta, num_tokens=values, sha256=None, has_crc32=True, origin={})
        if not column.complete:
            return column
        return _with_places(h5, column, stored)._replace(sha256=None if sha256 == NO_SHA256 else sha256)
