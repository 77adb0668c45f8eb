"""The chunks of a dataset: their extents, asked of HDF5 once; their codec, and the filters that this HDF5 lacks."""

from __future__ import annotations

import contextlib
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError, UnavailableError, ZbError
from zb_hdf5.files.codecs import CodedChunks
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.hdf5.h5_dataset import is_plain, own_dataset
from zb_hdf5.packages import h5py
from zb_hdf5.spec import CODECS, CRC32_CHUNK_ROWS, EXTENTS_CHUNK_ROWS, NO_CODEC, crc32_column, extents_column


def creation_of(codec: str = NO_CODEC) -> Any:
    """Return the creation properties of a dataset: its chunks are allocated before they are written, or compressed."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if codec == NO_CODEC:
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    else:  # by us: HDF5 itself need not have the filter
        name, _, level = codec.partition(":")
        properties.set_filter(CODECS[name].filter_id, h5py.h5z.FLAG_OPTIONAL, (int(level),))
    return properties


#: The extents of the chunks of a dataset.
ChunkExtents: TypeAlias = Extents | CodedChunks


def chunk_offsets(stored: h5py.Dataset) -> npt.NDArray[np.int64]:
    """Return the byte offset of each chunk along the first axis, -1 where there is none."""
    return chunk_table(stored, -(-len(stored) // stored.chunks[0]))[:, 0]


def chunk_table(stored: h5py.Dataset, num_chunks: int) -> npt.NDArray[np.int64]:
    """Return byte offset, bytes and skipped filters of the first chunks along the first axis, (N, 3); -1: no chunk."""
    found: list[tuple[int, int, int, int]] = []  # by one `chunk_iter`: single questions take the square of the time
    stored.id.chunk_iter(lambda c: found.append((c.chunk_offset[0], c.byte_offset, c.size, c.filter_mask)))
    chunks = np.array(found, np.int64).reshape(-1, 4)
    numbers = chunks[:, 0] // stored.chunks[0]
    table = np.full((num_chunks, 3), -1, dtype=np.int64)
    table[numbers[numbers < num_chunks]] = chunks[numbers < num_chunks, 1:]
    return table


def chunk_extents(
    stored: h5py.Dataset, chunk_bytes: int, num_chunks: int, path: Path
) -> tuple[ChunkExtents | None, str]:
    """List the chunks once; return the extents of the first ones, or None and the obstacle.

    Parameters
    ----------
    chunk_bytes
        Bytes of a chunk that is not compressed.
    num_chunks
        Chunks that are committed.
    """
    codec = codec_of(stored)
    if codec is None:
        return None, "it is compressed or filtered"
    table = chunk_table(stored, num_chunks)
    missing = np.flatnonzero(table[:, 0] < 0)
    if len(missing):
        raise FormatError(f"{path}: batch {missing[0]:,} is committed but has no chunk; restore the file")
    if codec == NO_CODEC:
        return Extents.from_offsets(table[:, 0], chunk_bytes), ""
    own = int(np.prod(stored.chunks)) * stored.dtype.itemsize == chunk_bytes
    if not own or ((table[:, 2] != 0) != (table[:, 1] == chunk_bytes)).any():  # as no writer of ours leaves it
        return None, "it is compressed or filtered"
    return CodedChunks(codec, table[:, :2].copy()), "it is compressed"


def row_extents(
    stored: h5py.Dataset, num_rows: int, unit_bytes: int, channel: int | None = None
) -> tuple[Extents | None, str]:
    """Return the extents of the first rows of a dataset of any program, or None and the obstacle.

    Parameters
    ----------
    num_rows
        Rows along the first axis. Their bytes are known to fit the file.
    unit_bytes
        The unit of contiguous rows: all of them are a multiple of it. The unit of chunked ones is a chunk.
    channel
        The entry of the second axis that is the whole of a row, and a unit; None: a row has all entries.
    """
    if codec_of(stored) != NO_CODEC:
        return None, "it is compressed or filtered"
    if not is_plain(stored):
        return None, "HDF5 has to convert its values"
    if not num_rows:
        return Extents([], unit_bytes), ""
    row_bytes = int(np.prod(stored.shape[1:])) * stored.dtype.itemsize
    if stored.chunks is None:
        base = stored.id.get_offset()
        if base is None:
            return None, "it has no place of its own in this file"
        if channel is not None:
            return _channel_extents(np.array([base]), num_rows, num_rows, row_bytes, unit_bytes, channel), ""
        return Extents([Run(base, unit_bytes, num_rows * row_bytes // unit_bytes)], unit_bytes), ""
    if stored.chunks[1:] != stored.shape[1:]:
        return None, f"its chunks {stored.chunks} have parts of its rows {stored.shape[1:]}"
    table = chunk_table(stored, -(-num_rows // stored.chunks[0]))
    if (table[:, 0] < 0).any():
        return None, "some of its chunks were never written"
    if channel is not None:
        rows = stored.chunks[0]
        return _channel_extents(table[:, 0], rows, num_rows, row_bytes, unit_bytes, channel), ""
    return Extents.from_offsets(table[:, 0], stored.chunks[0] * row_bytes), ""


def _channel_extents(
    offsets: npt.NDArray[np.int64], chunk_rows: int, num_rows: int, row_bytes: int, unit_bytes: int, channel: int
) -> Extents:
    """Return the extents of one entry of each row.

    Parameters
    ----------
    offsets, chunk_rows
        The byte offset of each chunk of rows, and its rows.
    num_rows, row_bytes
        All rows: the last chunk may have more; and the bytes of one, all entries together.
    unit_bytes, channel
        The bytes of an entry, and its number.
    """
    begins = np.flatnonzero(np.diff(offsets) != chunk_rows * row_bytes) + 1  # chunks that do not follow the one before
    runs: list[Run] = []
    for first, stop in pairwise([0, *begins.tolist(), len(offsets)]):
        rows = min(stop * chunk_rows, num_rows) - first * chunk_rows
        runs.append(Run(int(offsets[first]) + channel * unit_bytes, row_bytes, rows))
    return Extents(runs, unit_bytes)


def column_runs(
    h5: h5py.File, path: Path, column: str, extents: ChunkExtents | None, num_chunks: int
) -> dict[str, tuple[Run, ...]]:
    """Return the runs of the chunks of a column and of its crc32 rows, as far as a reader needs no HDF5.

    Parameters
    ----------
    column
        The name of the dataset.
    extents
        The extents of its chunks; None: only HDF5 can read them.
    num_chunks
        Chunks that are committed.
    """
    if extents is None:
        return {}
    found = {column: tuple(extents.runs)} if isinstance(extents, Extents) else {}
    rows = own_dataset(h5, path, crc32_column(column))
    if rows is not None and len(rows) >= num_chunks and _is_table(rows, "<u4", (CRC32_CHUNK_ROWS,)):
        found[crc32_column(column)] = chunk_runs(rows)
    if isinstance(extents, CodedChunks):
        table: Any = own_dataset(h5, path, extents_column(column))
        own = _is_table(table, "<u8", (EXTENTS_CHUNK_ROWS, 2)) and table.shape == extents.table.shape
        if own and np.array_equal(table[:], extents.table):
            found[extents_column(column)] = chunk_runs(table)
    return {name: runs for name, runs in found.items() if runs or name == column}


def _is_table(stored: h5py.Dataset | None, dtype: str, chunks: tuple[int, ...]) -> bool:
    """Return whether a dataset has the chunks that we write, and no filters."""
    own = stored is not None and stored.chunks == chunks and stored.dtype == np.dtype(dtype)
    return own and codec_of(stored) == NO_CODEC


def chunk_runs(stored: h5py.Dataset) -> tuple[Run, ...]:
    """Return the runs of the chunks of an unfiltered dataset; nothing if one is not allocated."""
    offsets = chunk_offsets(stored)
    if (offsets < 0).any():
        return ()
    return tuple(Extents.from_offsets(offsets, int(np.prod(stored.chunks)) * stored.dtype.itemsize).runs)


def codec_of(stored: h5py.Dataset) -> str | None:
    """Return the codec of a dataset; None if it has other filters than our codecs."""
    creation: Any = stored.id.get_create_plist()
    if creation.get_nfilters() == 0:
        return NO_CODEC
    code, _, values, _ = creation.get_filter(0)
    names = [name for name, facts in CODECS.items() if facts.filter_id == code]
    if creation.get_nfilters() > 1 or not names:
        return None
    return f"{names[0]}:{values[0] if values else CODECS[names[0]].default_level}"


def register_filters(stored: h5py.Dataset) -> None:
    """Import the plugin that has the common filters, where a dataset needs one that HDF5 lacks."""
    if lacking_filters(stored):
        with contextlib.suppress(ImportError):
            import_module("hdf5plugin")  # registers them as it is imported


def unreadable(path: Path | str, what: str, stored: h5py.Dataset, error: Exception) -> ZbError:
    """Return the error of a failed read of a dataset: a filter is lacking, or `what` is damaged."""
    if lacking := lacking_filters(stored):
        return UnavailableError(
            f"{path}: this HDF5 installation lacks a filter that the file needs: {lacking[0]}; "
            "pip install 'zb_hdf5[codecs]' has the common ones"
        )
    return FormatError(f"{path}: {what}: HDF5 cannot read it: {error}")


def lacking_filters(stored: h5py.Dataset) -> list[str]:
    """Name the filters that a dataset needs and this HDF5 library lacks."""
    creation: Any = stored.id.get_create_plist()
    found = (creation.get_filter(number) for number in range(creation.get_nfilters()))
    return [
        f"filter {code} ({name.decode('utf-8', 'replace')})"
        for code, _, _, name in found
        if not h5py.h5z.filter_avail(code)
    ]
