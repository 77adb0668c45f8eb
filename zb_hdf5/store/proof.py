"""A shard is opened where its index says that it lies, and proved to be that shard by the chunk that is read anyway."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.checked import Crc32Rows
from zb_hdf5.columns.decoded import CodedChunks, DecodedSource, read_extents
from zb_hdf5.columns.ranges import RangeSource, open_extents, open_ranges
from zb_hdf5.columns.source import BatchSource
from zb_hdf5.errors import ChecksumError, FormatError, IncompleteError, Remedy, UnverifiableError
from zb_hdf5.files.digests import crc32_of
from zb_hdf5.files.extent_file import ExtentFile
from zb_hdf5.files.identity import Identity
from zb_hdf5.formats.sidecar import sidecar_rows
from zb_hdf5.spec import BATCHES_LAYOUT, CRC32, INDEX_NAME, NOT_KNOWN, StoreMeta, TokenArray, extents_column
from zb_hdf5.store.table import ShardEntry


def open_proved(
    path: Path, entry: ShardEntry, meta: StoreMeta, access: str, batch: int, identity: Identity | None = None
) -> tuple[ExtentFile | RangeSource | DecodedSource, Crc32Rows] | None:
    """Open a shard by what its index says of it, without HDF5, and prove it by `batch`, or by the identity it had.

    Returns None if the index does not say enough, or the file is not what it says; else the file and the crc32 of its
    batches, which the proof has read.

    Raises
    ------
    FormatError, OSError
        If there is no such file, or it is none.
    """
    compressed = extents_column(meta.column) in entry.columns
    source = (_open_compressed if compressed else _open_by_index)(path, entry, meta, access, identity)
    if source is None:
        return None
    rows = _crc32_rows(source, path, entry)
    if identity is not None:
        return source, rows
    tokens = np.empty(meta.shape, meta.dtype)
    known = _read_proof(source, rows, entry, batch, tokens)
    if _problem(entry, meta, known, batch, _stored_part(tokens, entry, meta, batch)):
        source.close()
        return None
    if isinstance(source, RangeSource):
        source.remember(batch, tokens)
    return source, rows


def require_proof(
    path: Path, entry: ShardEntry, meta: StoreMeta, rows: npt.NDArray[np.uint32] | None, batch: int, tokens: TokenArray
) -> None:
    """Raise `ChecksumError` unless the crc32 rows of a file are those of its entry, and `batch` is what they say."""
    problem = _problem(entry, meta, rows, batch, tokens)
    if problem:
        raise ChecksumError(
            f"{path}: {problem}: the file is damaged, or belongs elsewhere",
            remedy=Remedy.VERIFY,
            at=path.parents[entry.path.count("/")],
        )


def _problem(
    entry: ShardEntry, meta: StoreMeta, rows: npt.NDArray[np.uint32] | None, batch: int, tokens: TokenArray
) -> str:
    """Say what is not as in the index; "" if the file is proved."""
    if rows is None or crc32_of(rows) != entry.crc32:
        return f"its rows of crc32 are not those that {INDEX_NAME} knows of"
    found, expected = crc32_of(tokens), int(rows[batch])
    kind = "batch" if meta.layout == BATCHES_LAYOUT else "chunk"
    return "" if found == expected else f"{kind} {batch:,}: expected crc32 {expected:08x}, found {found:08x}"


def tokens_of(source: BatchSource, entry: ShardEntry, meta: StoreMeta, batch: int) -> TokenArray:
    """Return the tokens that the crc32 of a batch is taken of: the last chunk of a stream may hold fewer."""
    tokens = np.empty(meta.shape, meta.dtype)
    source.read_into(batch, tokens)
    return _stored_part(tokens, entry, meta, batch)


def _stored_part(tokens: TokenArray, entry: ShardEntry, meta: StoreMeta, batch: int) -> TokenArray:
    return tokens.reshape(-1)[: entry.token_count - batch * meta.batch_tokens]


def _open_by_index(
    path: Path, entry: ShardEntry, meta: StoreMeta, access: str, identity: Identity | None
) -> ExtentFile | RangeSource | None:
    """Open a shard where the index says that its batches lie; None if it does not say, or they cannot be there."""
    extents = entry.extents(meta.column, meta.batch_bytes)
    if extents is None or entry.crc32 == NOT_KNOWN:
        return None
    if any(
        run.stride not in (meta.batch_bytes, meta.padded_batch_bytes) for run in extents.runs if run.num_batches > 1
    ):
        return None  # one batch proves the places of all only where they follow each other as ours do
    try:
        source = open_extents(path, extents, meta, access, identity, entry.num_bytes)
    except IncompleteError:
        return None
    if isinstance(source, RangeSource) or source.num_bytes == entry.num_bytes:
        return source
    source.close()
    return None


def _open_compressed(
    path: Path, entry: ShardEntry, meta: StoreMeta, access: str, identity: Identity | None
) -> DecodedSource | None:
    """Open a compressed shard where the index says that its extents are; None as above."""
    if entry.compressed is None or entry.crc32 == NOT_KNOWN or access == "mmap":
        return None
    ranges = open_ranges(path, identity, entry.num_bytes)
    try:
        if ranges.num_bytes == entry.num_bytes:
            table = read_extents(ranges, entry.columns[extents_column(meta.column)], entry.num_batches)
            chunks = CodedChunks(entry.compressed.codec, table)
            return DecodedSource(ranges, chunks, meta, "pread", ranges.identity)
    except FormatError:
        pass
    except BaseException:
        ranges.close()
        raise
    ranges.close()
    return None


def _crc32_rows(source: ExtentFile | RangeSource | DecodedSource, path: Path, entry: ShardEntry) -> Crc32Rows:
    """Return the crc32 of each batch, where the index says that they lie, or of the file beside the shard."""
    if CRC32 not in entry.columns:
        return sidecar_rows(path, entry.num_batches)
    return Crc32Rows.placed(entry.num_batches, source, entry.columns[CRC32])


def _read_proof(
    source: ExtentFile | RangeSource | DecodedSource,
    rows: Crc32Rows,
    entry: ShardEntry,
    batch: int,
    tokens: TokenArray,
) -> npt.NDArray[np.uint32] | None:
    """Fill `tokens` with a batch, and return the crc32 of all; None: they cannot be read.

    An error from a server is raised as it is. Where too many files are open, the caller closes some and tries again.
    """
    try:
        if isinstance(source, RangeSource) and CRC32 in entry.columns:  # one wait for both
            return rows.all((source.extents.offset(batch), tokens))
        source.read_into(batch, tokens)
        return rows.all()
    except (OSError, ChecksumError, FormatError, UnverifiableError, IndexError) as error:
        if isinstance(source, RangeSource) or getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE):
            source.close()
            raise
        return None
