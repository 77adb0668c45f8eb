"""Finds the tokens inside an HDF5 file: batches, a stream, a field, or a dataset of another program."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5.documents.document_offsets import StoredOffsets, stored_offsets
from zb_hdf5.errors import ArgumentError, FormatError, Remedy
from zb_hdf5.field import Field
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.look import Look
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.formats.foreign import (
    can_be_field,
    dataset_not_chosen,
    integer_datasets,
    lengths_in_group,
    no_such_axes,
    require_axes,
    require_channels,
    token_name,
    unfit_targets,
    values_in_group,
)
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.hdf5.h5_attributes import (
    attribute,
    read_marker,
    read_origin,
    read_root,
    stored_sha256,
    text_attribute,
    text_of,
)
from zb_hdf5.hdf5.h5_chunks import ChunkExtents, chunk_extents, codec_of, column_runs, row_extents
from zb_hdf5.hdf5.h5_dataset import our_tokens, own_dataset, require_rows, require_stored
from zb_hdf5.hdf5.h5_file import h5_damage, h5_identity, open_h5_for_reading
from zb_hdf5.hdf5.open_dataset import HANDLES
from zb_hdf5.hdf5.superblock import note_surplus, require_no_surplus
from zb_hdf5.hdf5.written_rows import RowRuns, count_of, is_prefix, lacking, never_written, rows_in_both, written_rows
from zb_hdf5.notes import note
from zb_hdf5.packages import h5py
from zb_hdf5.read_as import AS_STORED, FILL, ReadAs
from zb_hdf5.spec import (
    BATCHES,
    BATCHES_LAYOUT,
    CRC32,
    DOC_OFFSETS,
    DOCUMENTS_SHA256,
    DTYPE_BY_NAME,
    EXTENTS,
    FIELDS_GROUP,
    HDF5_FORMAT,
    NO_CODEC,
    NO_SHA256,
    STREAM_FORMAT,
    STREAM_LAYOUT,
    TOKENS,
    StoreMeta,
    field_column,
)

#: Tokens of a foreign stream that are read at once.
FOREIGN_CHUNK_TOKENS: Final = 1 << 16
#: Dtypes of other programs whose sha256 is that of their tokens. Ids of one byte have none: they were read as larger
#: ones before, without it, and its fingerprint would be another one than that in states.
WITH_SHA256: Final = (DTYPE_BY_NAME["uint32"], DTYPE_BY_NAME["uint16"], np.dtype("<i4"))
#: Chunks of fields that are listed when the tokens are: 2 µs for each.
FEW_CHUNKS: Final = 1024
#: The obstacle of a file that grows.
GROWS: Final = "its writer has not finished"


def is_own_file(h5: h5py.File) -> bool:
    """Return whether this project has written a file, also one whose attributes are damaged."""
    return str(text_of(attribute(h5, "format"))).startswith("zb-") or CRC32 in h5


def is_ours(look: Look) -> bool:
    """Return whether this project has written an HDF5 file. Raises as `find_column`."""
    path = look.path
    with h5_damage(path):
        h5 = open_h5_for_reading(path, look=look)
    with h5_damage(path), h5:
        return is_own_file(h5)


def _foreign_tokens(h5: h5py.File, path: Path, read_as: ReadAs) -> str | None:
    """Return the name of the tokens in a file of another program, as it is chosen, or as the file tells it; or None."""
    if read_as.dataset is not None:
        return read_as.dataset
    if _is_corpus(h5, path):
        return TOKENS
    return None if is_own_file(h5) else token_name(integer_datasets(h5))


def _is_corpus(h5: h5py.File, path: Path) -> bool:
    """Return whether others have written 1-D `tokens` here, with their count and their sha256 as attributes."""
    stored = own_dataset(h5, path, TOKENS) if attribute(h5, "format") is None else None
    if stored is None or stored.ndim != 1 or stored.dtype not in WITH_SHA256:
        return False
    return "token_count" in stored.attrs and "sha256" in stored.attrs


# --- batches and streams ---------------------------------------------------------------------------------------------


def find_column(
    path: Path,
    layout: str | None = BATCHES_LAYOUT,
    *,
    field: str = "",
    read_as: ReadAs = AS_STORED,
    identity: Identity | None = None,
    look: Look | None = None,
) -> Column:
    """Look into an HDF5 file, and return the column of its tokens or of a field.

    Parameters
    ----------
    layout
        "batches" or "stream": a file of the other layout is refused. None: any.
    field
        The field whose values are the column; "": the tokens.
    read_as
        The dataset of another program; none: the tokens of a file of ours, or the only integer dataset of another one,
        or one of a known name with fields beside it.
    identity
        The identity that the file had before; another file of this name is refused. None: any file.
    look
        The look at the file, as `open_h5_for_reading` takes it.
    """
    with h5_damage(path):
        h5 = open_h5_for_reading(path, identity, look)
    with h5_damage(path), HANDLES, h5:
        name = _foreign_tokens(h5, path, read_as)
        if name is not None:
            column = _of_layout(layout, _foreign_column(h5, path, name, read_as))
            return _field_of(column, field) if field else column
        _refuse_what_ours_says(path, read_as)
        if layout is None:
            layout = STREAM_LAYOUT if text_of(attribute(h5, "format")) == STREAM_FORMAT else BATCHES_LAYOUT
        own = _own_datasets(h5, path, layout)
        column = _own_column(h5, path, own)
        if field:
            return _field_column(h5, path, own, column, field)
        if not column.complete:
            return column
        require_no_surplus(h5, path)
        found = _with_extents(h5, column, own.tokens)
        has_few = found.num_units * len(found.meta.fields) <= FEW_CHUNKS
        fields = _own_fields(h5, path, own, column) if has_few else {}
        return found._replace(fields=fields, offsets=_own_offsets(path, own))


def _refuse_what_ours_says(path: Path, read_as: ReadAs) -> None:
    """Raise `ArgumentError` for facts about a file that a file of ours tells by itself."""
    if read_as.unwritten is not None:
        raise ArgumentError(
            f"{path}: unwritten={read_as.unwritten!r} needs a dataset that another program has written",
            options=["unwritten"],
        )
    if read_as.channel is not None:
        raise ArgumentError(
            f"{path}: channel={read_as.channel} needs a dataset of three axes that another program has written",
            options=["channel"],
        )
    if read_as.axes is not None:
        raise no_such_axes(path, read_as.axes)


def find_foreign_column(path: Path, read_as: ReadAs, look: Look | None = None) -> Column:
    """Look into an HDF5 file of another program, and return the column of its tokens.

    Parameters
    ----------
    read_as, look
        As for `find_column`.

    Raises
    ------
    FormatError
        If the file is one of this project, has no such dataset, or its second axis may have anything but records.
    """
    with h5_damage(path):
        h5 = open_h5_for_reading(path, look=look)
    with h5_damage(path), HANDLES, h5:
        if is_own_file(h5):
            raise FormatError(
                f"{path}: expected an HDF5 file of another program, found a file of this one: read or convert it by "
                "itself"
            )
        name = _foreign_tokens(h5, path, read_as)
        if name is None:
            raise dataset_not_chosen(h5, path, "is an HDF5 file of another program")
        return _foreign_column(h5, path, name, read_as)


def column_with_fields(column: Column) -> Column:
    """Return a column of tokens with the columns of its fields, for which a file of many chunks is looked into again.

    To list these takes as long as to open the file, and most readers want no field.
    """
    path = column.path
    if column.is_foreign or column.fields or not column.complete or not column.meta.fields:
        return column
    with h5_damage(path):
        h5 = open_h5_for_reading(path, column.identity)
    with h5_damage(path), HANDLES, h5:
        own = _own_datasets(h5, path, column.meta.layout)
        return column._replace(fields=_own_fields(h5, path, own, column))


class _OwnDatasets(NamedTuple):
    """The datasets of a file of ours, each found once.

    Attributes
    ----------
    layout
        "batches" or "stream".
    tokens, marker
        The tokens, and their attributes, as `read_marker` returns them.
    offsets
        The offsets of the documents of a stream.
    values
        The values of each field, in the order of the names.
    """

    layout: str
    tokens: h5py.Dataset
    marker: Mapping[str, Any]
    offsets: h5py.Dataset | None
    values: Mapping[str, h5py.Dataset]


def _own_datasets(h5: h5py.File, path: Path, layout: str) -> _OwnDatasets:
    """Find the datasets of a file of ours; `FormatError` if it has another layout, or lacks one."""
    tokens = token_dataset(h5, path, layout)
    marker = read_marker(tokens, path)
    offsets: h5py.Dataset | None = None
    if layout == STREAM_LAYOUT:
        offsets = require_rows(h5, path, DOC_OFFSETS, marker["document_count"] + 1)
    return _OwnDatasets(layout, tokens, marker, offsets, _field_datasets(h5, path))


def _own_fields(h5: h5py.File, path: Path, own: _OwnDatasets, column: Column) -> dict[str, Column]:
    """Return the columns of the fields of some tokens, by their names.

    A field that is damaged is left out: whoever opens it looks at it alone, and gets the error.
    """
    fields: dict[str, Column] = {}
    for name in own.values:
        with suppress(FormatError), h5_damage(path):
            fields[name] = _field_column(h5, path, own, column, name)
    return fields


def _own_offsets(path: Path, own: _OwnDatasets) -> StoredOffsets | None:
    """Return the place of the offsets of documents, as `stored_offsets`; None also if they are damaged."""
    if own.offsets is None:
        return None
    with suppress(FormatError), h5_damage(path):
        return stored_offsets(own.offsets, own.marker, path)
    return None


def token_dataset(h5: h5py.File, path: Path, layout: str) -> h5py.Dataset:
    """Return the dataset of the tokens; `FormatError` if the file has another layout or version."""
    found = text_of(attribute(h5, "format"))
    if layout == BATCHES_LAYOUT and found == STREAM_FORMAT:
        raise _is_no_batches(path)
    expected = STREAM_FORMAT if layout == STREAM_LAYOUT else HDF5_FORMAT
    if found != expected:
        if is_own_file(h5):
            raise FormatError(f"{path}: expected root attribute format={expected!r}, found {found!r}")
        raise dataset_not_chosen(h5, path, "is an HDF5 file of another program")
    return our_tokens(h5, path, layout)


def _is_no_batches(path: Path) -> FormatError:
    return FormatError(f"{path}: is a token stream: pass batch_size and seq_len for windows over it")


def _own_column(h5: h5py.File, path: Path, own: _OwnDatasets) -> Column:
    """Return the column of the tokens of a file of ours, without their extents."""
    stored = own.tokens
    marker = own.marker
    try:
        meta = _own_meta(h5, path, own)
    except (ArgumentError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{path}: bad attributes: {error}") from error
    num_tokens = _tokens_in(path, stored, meta, marker)
    require_stored(num_tokens * meta.dtype.itemsize, h5, stored, path)
    is_stream = own.layout == STREAM_LAYOUT
    has_crc32 = is_stream or own_dataset(h5, path, CRC32) is not None
    complete = bool(marker["complete"])
    return Column(
        path,
        meta.column,
        meta,
        num_tokens,
        h5_identity(h5, growing=not complete),
        complete,
        marker["sha256"],
        max_token=marker["max_token"] if complete else None,
        obstacle=GROWS,
        marker=meta.column,
        has_crc32=complete and has_crc32,
        origin=read_origin(h5),
        num_rows=None if is_stream else len(stored),
        documents_sha256=text_attribute(h5, DOCUMENTS_SHA256),
    )


def _tokens_in(path: Path, stored: h5py.Dataset, meta: StoreMeta, marker: Mapping[str, Any]) -> int:
    """Return the number of committed tokens; `FormatError` if the dataset has other units, or no space for them."""
    if meta.layout == STREAM_LAYOUT:
        noun = "tokens"
        count = marker["token_count"]
        num_tokens = count
        unit = (1, *(stored.chunks or (meta.seq_len,)))
    else:
        noun = "batches"
        count = marker.get("num_batches", 0)
        num_tokens = count * meta.batch_tokens
        unit = stored.shape[1:]
    if unit != meta.shape:
        raise FormatError(f"{path}: {stored.name}: expected {noun} of {meta.shape}, found {unit}")
    if count > len(stored):
        raise FormatError(f"{path}: expected {count:,} {noun}, found space for {len(stored):,}")
    return int(num_tokens)


def _own_meta(h5: h5py.File, path: Path, own: _OwnDatasets) -> StoreMeta:
    """Return the shape and the origin of the tokens of a file of ours."""
    more = read_root(h5)
    if own.layout == STREAM_LAYOUT:
        batch_size = 1
        seq_len = own.marker["chunk_tokens"]
        more |= {name: own.marker[name] for name in ("document_count", "boundary_token_id")}
    else:
        batch_size, seq_len = (_size_of(h5, path, name) for name in ("batch_size", "seq_len"))
    dtype = own.tokens.dtype
    fields = _fields_of(path, own)
    codec = codec_of(own.tokens) or NO_CODEC
    return StoreMeta(batch_size, seq_len, dtype, layout=own.layout, fields=fields, codec=codec, **more)


def _size_of(h5: h5py.File, path: Path, name: str) -> int:
    """Return a size of the batches of a file; `FormatError` if it does not tell it."""
    found = attribute(h5, name)
    if found is None:
        raise FormatError(f"{path}: expected a root attribute {name!r}, found none")
    return int(found)


def _with_extents(h5: h5py.File, column: Column, stored: h5py.Dataset) -> Column:
    """Add the extents of the units, from one list of the chunks, or the obstacle to reading them without HDF5."""
    meta = column.meta
    count = column.num_units
    extents: ChunkExtents | None = None
    if stored.chunks is None and stored.ndim == 3:
        obstacle = "it is neither chunked nor contiguous in this file"
        base = stored.id.get_offset()
        if base is not None:
            obstacle = ""
            extents = Extents([Run(base, meta.batch_bytes, count)], meta.batch_bytes)
    elif stored.chunks is None:
        obstacle = "it is not chunked"
    elif column.name == BATCHES and stored.chunks != (1, *meta.shape):
        obstacle = f"its chunks are {stored.chunks}, not one batch {(1, *meta.shape)}"
    else:
        extents, obstacle = chunk_extents(stored, meta.batch_bytes, count, column.path)
    columns = column_runs(h5, column.path, column.name, extents, count)
    return column._replace(extents=extents, obstacle=obstacle, columns=columns)


# --- datasets of another origin --------------------------------------------------------------------------------------


def _of_layout(layout: str | None, column: Column) -> Column:
    """Return a column if it has this layout (None: any); else raise `FormatError`."""
    if layout in (None, column.meta.layout):
        return column
    if layout == BATCHES_LAYOUT:
        raise _is_no_batches(column.path)
    raise FormatError(f"{column.path}: {column.name}: expected a 1-D stream, found batches of {column.meta.shape}")


def _foreign_column(h5: h5py.File, path: Path, dataset: str, read_as: ReadAs) -> Column:
    """Return a column of integers: a unit is one batch of three axes, one record of two, 65,536 tokens of one."""
    note_surplus(h5, path)
    stored = own_dataset(h5, path, dataset)
    if stored is None or stored.ndim not in (1, 2, 3):
        raise dataset_not_chosen(
            h5, path, f"expected a dataset {dataset!r} of one, two or three axes, found {stored!r}"
        )
    if stored.dtype.kind not in "iu":
        raise FormatError(f"{path}: {dataset}: expected integers, found {stored.dtype}")
    require_channels(path, dataset, stored, read_as)
    require_axes(path, dataset, stored, read_as)
    channel = read_as.channel
    dtype: np.dtype[Any] = DTYPE_BY_NAME["uint32"]
    if stored.dtype in DTYPE_BY_NAME.values():
        dtype = stored.dtype
    neighbours = values_in_group(h5, dataset, stored) if channel is None else {}
    # of each field its dataset, and its entry of the second axis
    values: dict[str, tuple[h5py.Dataset, int | None]] = {}
    for name, each in neighbours.items():
        if can_be_field(name, each):
            values[name] = (each, None)
    for name, number in read_as.field_channels.items():
        values[name] = (stored, number)
    fields = tuple(Field(name, each.dtype.newbyteorder("=")) for name, (each, _) in sorted(values.items()))
    layout = BATCHES_LAYOUT
    sha256: str | None = None
    if stored.ndim == 1:
        layout = STREAM_LAYOUT
        rows = 1
        length = FOREIGN_CHUNK_TOKENS
        count, sha256 = _end_of_stream(stored, f"{path}: {dataset}")
    else:
        rows = 1 if stored.ndim == 2 or channel is not None else stored.shape[1]
        length = stored.shape[-1]
        count = len(stored) * rows * length
    unfit = unfit_targets(h5, dataset, values)
    meta = StoreMeta(rows, length, dtype, layout=layout, fields=fields, unfit=unfit)
    tokens = Column(path, dataset, meta, count, h5_identity(h5, growing=False), sha256=sha256)
    kept = _rows_to_read(path, {dataset: (stored, channel), **values}, stored.ndim == 1, count, read_as)
    if kept is not None:
        tokens = tokens._replace(kept=kept, num_tokens=count_of(kept) * _row_values(tokens), sha256=None)
    columns: dict[str, Column] = {}
    for name, (each, entry) in values.items():
        columns[name] = _with_values(h5, _named_field(tokens, name, each), each, entry)
    left_out = tuple(sorted({*neighbours, *lengths_in_group(h5, dataset, stored)} - values.keys()))
    return _with_values(h5, tokens, stored, channel)._replace(fields=columns, left_out=left_out)


def _row_values(tokens: Column) -> int:
    """Return the tokens of a row along the first axis of a dataset of another program."""
    return 1 if tokens.meta.layout == STREAM_LAYOUT else tokens.meta.batch_tokens


def _rows_to_read(
    path: Path,
    datasets: Mapping[str, tuple[h5py.Dataset, int | None]],
    is_stream: bool,
    num_tokens: int,
    read_as: ReadAs,
) -> RowRuns | None:
    """Return the rows to read of tokens and of their fields, where some were never written; None: all were.

    Parameters
    ----------
    datasets
        The dataset of the tokens, the first one, and the datasets of fields: each with its entry of the second axis.
    is_stream, num_tokens
        Whether the tokens have one axis, and how many of them count.
    """
    (name, (stored, _)), *_ = datasets.items()
    num_rows = num_tokens if is_stream else len(stored)
    written = {each: written_rows(found, num_rows, entry) for each, (found, entry) in datasets.items()}
    kept = functools.reduce(rows_in_both, written.values())
    if kept is None:
        return None
    if read_as.unwritten == FILL:
        return ((0, num_rows),)
    if read_as.unwritten is None and not (is_stream and kept and is_prefix(kept)):
        first, runs = next((each, runs) for each, runs in written.items() if runs is not None)
        raise never_written(path, datasets[first][0], runs, num_rows, Remedy.UNWRITTEN)
    if read_as.unwritten is None:
        note(f"{path}: {name}: tokens {lacking(kept, num_rows)} were never written: the stream ends before them")
    return kept


def _end_of_stream(stored: h5py.Dataset, what: str) -> tuple[int, str | None]:
    """Return the number of tokens of a stream, whose last chunk may be filled up, and the digest of these, or None."""
    count = len(stored)
    if "token_count" not in stored.attrs:
        return count, None
    found = int(stored.attrs["token_count"])
    if not 0 <= found <= count:
        raise FormatError(f"{what}: expected token_count from 0 to {count:,}, found {found:,}")
    has_digest = "sha256" in stored.attrs and stored.dtype in WITH_SHA256
    return found, stored_sha256(stored.attrs["sha256"], what) if has_digest else None


def _named_field(tokens: Column, name: str, stored: h5py.Dataset) -> Column:
    """Return the column of a field of a dataset of another program, without its extents."""
    meta = tokens.meta.of_field(name)
    return tokens._replace(name=stored.name.removeprefix("/"), meta=meta, sha256=None)


def _with_values(h5: h5py.File, column: Column, stored: h5py.Dataset, channel: int | None) -> Column:
    """Add the extents of a dataset of another program, or the obstacle to reading it without HDF5."""
    is_stream = stored.ndim == 1
    unit_values = column.num_tokens if is_stream else column.meta.batch_tokens
    extents: Extents | None = None
    obstacle = "some of its rows were never written"
    if column.kept is None:
        values = column.num_tokens if channel is None else column.num_tokens * stored.shape[1]
        require_stored(values * stored.dtype.itemsize, h5, stored, column.path)
    if column.kept is None or (is_prefix(column.kept) and written_rows(stored, count_of(column.kept), channel) is None):
        num_rows = column.num_tokens if is_stream else count_of(column.kept or ((0, len(stored)),))
        extents, obstacle = row_extents(stored, num_rows, unit_values * stored.dtype.itemsize, channel)
    return column._replace(extents=extents, obstacle=obstacle, stored_dtype=stored.dtype, channel=channel)


def _field_of(column: Column, name: str) -> Column:
    """Return the column of a field of a dataset of another program."""
    if name not in column.fields:
        raise FormatError(f"{column.path}: expected a field {name!r}, found {sorted(column.fields)}")
    return column.fields[name]


# --- fields ----------------------------------------------------------------------------------------------------------


def _field_datasets(h5: h5py.File, path: Path) -> dict[str, h5py.Dataset]:
    """Return the values of the fields of a file, in the order of their names."""
    if not isinstance(h5.get(FIELDS_GROUP, getlink=True), h5py.HardLink):
        return {}
    group = h5[FIELDS_GROUP]
    if not isinstance(group, h5py.Group):
        return {}
    names = [name for name in sorted(group) if not name.endswith((f".{CRC32}", f".{EXTENTS}"))]
    found = {name: own_dataset(h5, path, field_column(name)) for name in names}
    return {name: stored for name, stored in found.items() if stored is not None}


def _fields_of(path: Path, own: _OwnDatasets) -> tuple[Field, ...]:
    """Return the fields of a file; the first axes of each are the axes of the tokens."""
    axes = own.tokens.ndim
    try:
        return tuple(Field(name, stored.dtype, stored.shape[axes:]) for name, stored in own.values.items())
    except ArgumentError as error:
        raise FormatError(f"{path}: {error}") from error


def _field_column(h5: h5py.File, path: Path, own: _OwnDatasets, tokens: Column, name: str) -> Column:
    """Return the column of one field of some tokens; its extents are those of a finished file."""
    stored = own.values.get(name)
    if stored is None:
        raise FormatError(f"{path}: expected a field {name!r}, found {[*own.values]}")
    meta = tokens.meta.of_field(name)
    unit = (tokens.meta.seq_len,) if own.layout == STREAM_LAYOUT else (1, *tokens.meta.shape)
    expected = unit + stored.shape[own.tokens.ndim :]
    if stored.chunks != expected:
        raise FormatError(f"{path}: field {name}: expected chunks of {expected}, found {stored.chunks}")
    values = tokens.num_tokens * meta.batch_tokens // tokens.meta.batch_tokens
    require_stored(values * meta.dtype.itemsize, h5, stored, path)
    sha256 = stored_sha256(attribute(stored, "sha256"), f"{path}: {meta.column}")
    column = tokens._replace(
        name=meta.column,
        meta=meta,
        num_tokens=values,
        sha256=sha256 if tokens.complete and sha256 != NO_SHA256 else None,
        max_token=None,
        has_crc32=tokens.complete,
        origin={},
        num_rows=None if tokens.num_rows is None else len(stored),
    )
    return _with_extents(h5, column, stored) if tokens.complete else column
