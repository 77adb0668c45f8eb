"""The agreement of a shard with its entry in the index."""

from __future__ import annotations

from typing import Any

from zb_hdf5.errors import FormatError, Remedy
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.spec import INDEX_NAME, NO_SHA256, STREAM_LAYOUT, extents_column
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shard_table import ShardEntry


def require_agreement(index: ShardIndex, entry: ShardEntry, file: Corpus, *, has_extents: bool = True) -> None:
    """Raise `FormatError` if a shard differs from its entry.

    Parameters
    ----------
    index
        The index of the store.
    entry
        The entry of the shard in it.
    file
        The shard.
    has_extents
        Whether its batches must be at the offsets that the entry has.
    """
    num_batches = file.num_units
    token_count = file.num_tokens
    if not entry.complete:  # its writer may have gone on since
        num_batches = min(num_batches, entry.num_batches)
        token_count = min(token_count, entry.token_count)
    expected: dict[str, tuple[Any, Any]] = {
        "num_batches": (entry.num_batches, num_batches),
        "shape": (index.meta.shape, file.meta.shape),
        "dtype": (index.meta.dtype, file.dtype),
    }
    if file.sha256 is not None and entry.sha256 != NO_SHA256:
        expected["sha256"] = (entry.sha256, file.sha256)
    expected["token_count"] = (entry.token_count, token_count)
    if index.meta.layout == STREAM_LAYOUT and entry.complete and entry.document_count >= 0:
        expected["document_count"] = (entry.document_count, file.document_count)
    for name, (in_index, in_shard) in expected.items():
        if in_index != in_shard:
            raise FormatError(f"{file.path}: its index has {name} {in_index}, the file has {in_shard}")
    if has_extents:
        _require_places(index, entry, file)


def _require_places(index: ShardIndex, entry: ShardEntry, file: Corpus) -> None:
    """Raise `FormatError` if the batches of a shard are not at the offsets that its entry has."""
    column = index.meta.column
    for name in (column, extents_column(column)):
        if name in entry.columns and entry.columns[name] != file.columns.get(name):
            found = "have no plain extents" if file.extents is None else "are at other offsets"
            raise FormatError(
                f"{file.path}: expected its batches at the offsets that {INDEX_NAME} has, they {found}: the file was "
                "repacked or compressed after the index was written",
                remedy=Remedy.REBUILD_FORCE,
                at=file.path.parents[entry.path.count("/")],
            )
