"""The agreement of a shard with its entry in the index."""

from __future__ import annotations

from typing import Any

from zb_hdf5.errors import FormatError, Remedy
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.spec import INDEX_NAME, NO_SHA256, STREAM_LAYOUT, extents_column
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shard_table import ShardEntry


def require_agreement(index: ShardIndex, entry: ShardEntry, reader: BatchReader, *, has_extents: bool = True) -> None:
    """Raise `FormatError` if a shard differs from its entry.

    Parameters
    ----------
    index
        The index of the store.
    entry
        The entry of the shard in it.
    reader
        The reader of the shard.
    has_extents
        Whether its batches must be at the offsets that the entry has.
    """
    num_batches = reader.num_batches
    token_count = reader.token_count
    if not entry.complete:  # its writer may have gone on since
        num_batches = min(num_batches, entry.num_batches)
        token_count = min(token_count, entry.token_count)
    expected: dict[str, tuple[Any, Any]] = {
        "num_batches": (entry.num_batches, num_batches),
        "shape": (index.meta.shape, reader.meta.shape),
        "dtype": (index.meta.dtype, reader.dtype),
    }
    if reader.sha256 is not None and entry.sha256 != NO_SHA256:
        expected["sha256"] = (entry.sha256, reader.sha256)
    expected["token_count"] = (entry.token_count, token_count)
    if index.meta.layout == STREAM_LAYOUT and entry.complete and entry.document_count >= 0:
        expected["document_count"] = (entry.document_count, reader.meta.document_count)
    for name, (in_index, in_shard) in expected.items():
        if in_index != in_shard:
            raise FormatError(f"{reader.path}: its index has {name} {in_index}, the file has {in_shard}")
    if has_extents:
        _require_places(index, entry, reader)


def _require_places(index: ShardIndex, entry: ShardEntry, reader: BatchReader) -> None:
    """Raise `FormatError` if the batches of a shard are not at the offsets that its entry has."""
    column = index.meta.column
    for name in (column, extents_column(column)):
        if name in entry.columns and entry.columns[name] != reader.columns.get(name):
            found = "have no plain extents" if reader.extents is None else "are at other offsets"
            raise FormatError(
                f"{reader.path}: expected its batches at the offsets that {INDEX_NAME} has, they {found}: the file was "
                "repacked or compressed after the index was written",
                remedy=Remedy.REBUILD_FORCE,
                at=reader.path.parents[entry.path.count("/")],
            )
