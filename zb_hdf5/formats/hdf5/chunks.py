"""The chunks of a dataset: their extents, asked of HDF5 once, their codec, and the filters that this HDF5 lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError, UnavailableError
from zb_hdf5.files.codecs import CodedChunks, CompressedTokens, require_codec
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.formats.hdf5.file import open_h5_for_reading, own_dataset
from zb_hdf5.spec import (
    BATCHES,
    CODECS,
    CRC32_CHUNK_ROWS,
    EXTENTS_CHUNK_ROWS,
    NO_CODEC,
    TOKENS,
    crc32_column,
    extents_column,
)

#: The extents of the chunks of a dataset.
Places: TypeAlias = Extents | CodedChunks


def chunk_offsets(stored: h5py.Dataset) -> npt.NDArray[np.int64]:
    """Return the byte offset of each chunk along the first axis, -1 where there is none."""
    return chunk_table(stored, -(-len(stored) // stored.chunks[0]))[:, 0]


def chunk_table(stored: h5py.Dataset, num_chunks: int) -> npt.NDArray[np.int64]:
    """Return byte offset, bytes and filter mask of the first chunks along the first axis, shape (N, 3); -1: no chunk.

    Each bit of the mask is a filter that the chunk was not sent through.
    """
    found: list[tuple[int, int, int, int]] = []  # by one `chunk_iter`: single questions take the square of the time

    def record(chunk: Any) -> None:
        found.append((chunk.chunk_offset[0], chunk.byte_offset, chunk.size, chunk.filter_mask))

    stored.id.chunk_iter(record)
    chunks = np.array(found, np.int64).reshape(-1, 4)
    numbers = chunks[:, 0] // stored.chunks[0]
    table = np.full((num_chunks, 3), -1, dtype=np.int64)
    table[numbers[numbers < num_chunks]] = chunks[numbers < num_chunks, 1:]
    return table


def chunk_places(stored: h5py.Dataset, chunk_bytes: int, num_chunks: int, path: Path) -> tuple[Places | None, str]:
    """List the chunks once; return the extents of the first ones, or None and the obstacle."""
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
    """Return the codec of compressed chunks, and their bytes."""
    return CompressedTokens(places.codec, places.num_bytes) if isinstance(places, CodedChunks) else None


def column_runs(h5: h5py.File, path: Path, column: str, places: Places | None) -> dict[str, tuple[Run, ...]]:
    """Return the runs of the chunks of a column and of its crc32 rows, as far as a reader needs no HDF5."""
    if places is None:
        return {}
    found = {column: tuple(places.runs)} if isinstance(places, Extents) else {}
    rows = own_dataset(h5, path, crc32_column(column))
    if _is_table(rows, "<u4", (CRC32_CHUNK_ROWS,)):
        found[crc32_column(column)] = chunk_runs(rows)
    if isinstance(places, CodedChunks):
        extents: Any = own_dataset(h5, path, extents_column(column))
        own = _is_table(extents, "<u8", (EXTENTS_CHUNK_ROWS, 2)) and extents.shape == places.table.shape
        if own and np.array_equal(extents[:], places.table):
            found[extents_column(column)] = chunk_runs(extents)
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
    chunk_bytes = int(np.prod(stored.chunks)) * stored.dtype.itemsize
    return tuple(Extents.from_offsets(offsets, chunk_bytes).runs)


def codec_of(stored: h5py.Dataset) -> str | None:
    """Return the codec of a dataset; None if it has filters that are no codec of ours."""
    creation: Any = stored.id.get_create_plist()
    if creation.get_nfilters() == 0:
        return NO_CODEC
    code, _, values, _ = creation.get_filter(0)
    names = [name for name, facts in CODECS.items() if facts.filter_id == code]
    if creation.get_nfilters() > 1 or not names:
        return None
    return f"{names[0]}:{values[0] if values else CODECS[names[0]].default_level}"


def missing_filters(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (problem, remedy) for each filter that the tokens of a file need and this machine lacks."""
    with open_h5_for_reading(path) as h5:
        stored = own_dataset(h5, path, BATCHES) or own_dataset(h5, path, TOKENS)
        codec = codec_of(stored) if stored else NO_CODEC
        if codec is not None:  # read past HDF5
            try:
                require_codec(codec, path)
            except UnavailableError as error:
                yield str(error), "pip install '.[codecs]'"
            return
        load_filters(stored)
        for name in lacking_filters(stored):
            yield f"{path}: {name} is not available", "pip install '.[codecs]', or the plugin of that filter"


def load_filters(stored: h5py.Dataset) -> None:
    """Register the common filters, if they are installed and a dataset needs one that HDF5 lacks."""
    if lacking_filters(stored):
        with contextlib.suppress(ImportError):
            import_module("hdf5plugin")  # registers them as it is imported


def lacking_filters(stored: h5py.Dataset) -> list[str]:
    """Name the filters that a dataset needs and this HDF5 library lacks."""
    creation: Any = stored.id.get_create_plist()
    found = (creation.get_filter(number) for number in range(creation.get_nfilters()))
    return [
        f"filter {code} ({name.decode('utf-8', 'replace')})"
        for code, _, _, name in found
        if not h5py.h5z.filter_avail(code)
    ]
