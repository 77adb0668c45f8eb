"""Where the chunks of a dataset lie in its file: asked of HDF5 once, and what an index says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError
from zb_hdf5.files.codecs import CompressedTokens
from zb_hdf5.files.decoded import CodedChunks
from zb_hdf5.files.extents import Extents, Run
from zb_hdf5.formats.hdf5.file import own_dataset
from zb_hdf5.formats.hdf5.filters import codec_of
from zb_hdf5.spec import (
    CRC32_CHUNK_ROWS,
    EXTENTS_CHUNK_ROWS,
    NO_CODEC,
    crc32_column,
    extents_column,
)


def chunk_offsets(stored: h5py.Dataset) -> npt.NDArray[np.int64]:
    """Return the byte offset of each chunk along the first axis, -1 where there is none."""
    return chunk_table(stored, -(-len(stored) // stored.chunks[0]))[:, 0]


def chunk_table(stored: h5py.Dataset, num_chunks: int) -> npt.NDArray[np.int64]:
    """Return where the first chunks along the first axis lie, shape (N, 3).

    The columns: the byte offset, the bytes in the file, and the filter mask, of which each bit is a filter that the
    chunk was not sent through; -1 where there is no chunk. One `chunk_iter`: asking for the chunks one by one takes a
    time that grows with their square.
    """
    found: list[tuple[int, int, int, int]] = []

    def record(chunk: Any) -> None:
        found.append((chunk.chunk_offset[0], chunk.byte_offset, chunk.size, chunk.filter_mask))

    stored.id.chunk_iter(record)
    chunks = np.array(found, np.int64).reshape(-1, 4)
    numbers = chunks[:, 0] // stored.chunks[0]
    table = np.full((num_chunks, 3), -1, dtype=np.int64)
    table[numbers[numbers < num_chunks]] = chunks[numbers < num_chunks, 1:]
    return table


#: Where the chunks of a dataset lie.
Places: TypeAlias = Extents | CodedChunks


def chunk_places(stored: h5py.Dataset, chunk_bytes: int, num_chunks: int, path: Path) -> tuple[Places | None, str]:
    """List the chunks once; return where the first ones lie, or None and what stands in the way.

    Raises
    ------
    FormatError
        If one has no place.
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


def plain_extents(places: Places | None) -> Extents | None:
    """Return the extents of chunks that are stored as they are."""
    return places if isinstance(places, Extents) else None


def compressed_tokens(places: Places | None) -> CompressedTokens | None:
    """Return what chunks take that are compressed."""
    return CompressedTokens(places.codec, places.num_bytes) if isinstance(places, CodedChunks) else None


def extents_runs(h5: h5py.File, path: Path, column: str, chunks: CodedChunks) -> tuple[Run, ...]:
    """Return where the table of the extents of a column lies; nothing if there is none, or that of another file."""
    stored = own_dataset(h5, path, extents_column(column))
    plain = stored is not None and stored.chunks == (EXTENTS_CHUNK_ROWS, 2) and stored.dtype == np.dtype("<u8")
    if stored is None or not plain or stored.shape != chunks.table.shape or codec_of(stored) != NO_CODEC:
        return ()
    return chunk_runs(stored) if np.array_equal(stored[:], chunks.table) else ()


def column_runs(h5: h5py.File, path: Path, column: str, places: Places | None) -> dict[str, tuple[Run, ...]]:
    """Return where the chunks of a column and the rows of its crc32 lie, as far as a reader needs no HDF5."""
    if places is None:
        return {}
    found = {column: tuple(places.runs)} if isinstance(places, Extents) else {}
    beside = {crc32_column(column): crc32_runs(own_dataset(h5, path, crc32_column(column)))}
    if isinstance(places, CodedChunks):
        beside[extents_column(column)] = extents_runs(h5, path, column, places)
    return found | {name: runs for name, runs in beside.items() if runs}


def chunk_runs(stored: h5py.Dataset) -> tuple[Run, ...]:
    """Return where the chunks of an unfiltered dataset lie, each of them whole; nothing if one has no place."""
    offsets = chunk_offsets(stored)
    if (offsets < 0).any():
        return ()
    chunk_bytes = int(np.prod(stored.chunks)) * stored.dtype.itemsize
    return tuple(Extents.from_offsets(offsets, chunk_bytes).runs)


def crc32_runs(rows: h5py.Dataset | None) -> tuple[Run, ...]:
    """Return where the rows of crc32 lie, if they do so in the chunks that we write; else nothing."""
    plain = rows is not None and rows.chunks == (CRC32_CHUNK_ROWS,) and rows.dtype == np.dtype("<u4")
    if rows is None or not plain or rows.id.get_create_plist().get_nfilters():
        return ()
    return chunk_runs(rows)
