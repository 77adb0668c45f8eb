"""The index of a corpus of another program: rows with path, token_count and sha256 of HDF5 files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zb_hdf5.errors import FormatError
from zb_hdf5.formats.inspection import find_column
from zb_hdf5.spec import NOT_COUNTED, NOT_KNOWN, STREAM_LAYOUT, StoreMeta, is_sha256
from zb_hdf5.store.parsed_arrays import require_field, require_paths
from zb_hdf5.store.shard_table import ShardEntry


def foreign_shards(value: dict[str, Any], path: Path) -> tuple[StoreMeta, list[ShardEntry]]:
    """Check and take a parsed index of token streams, whose key "shards" has one object for each file.

    Parameters
    ----------
    value
        The parsed text.
    path
        The path of the index; the first of its files is opened, for the facts that all share.
    """
    kinds: dict[str, type[Any]] = {"path": str, "token_count": int, "sha256": str}
    rows = [[require_field(row, key, kind, str(path)) for key, kind in kinds.items()] for row in value["shards"]]
    if not rows:
        raise FormatError(f"{path}: lists no shards")
    names = [name.rpartition("/")[2] for name, *_ in rows]  # the folder may have moved since it was written
    require_paths(names, str(path))
    for name, token_count, sha256 in rows:
        if token_count < 0 or not is_sha256(sha256):
            raise FormatError(f"{path}: {name}: expected a token_count and a sha256, found {token_count}, {sha256!r}")
    column = find_column(path.parent / names[0], STREAM_LAYOUT)
    meta = column.meta
    entries = [
        ShardEntry(
            path=name,
            backend="hdf5",
            num_bytes=0,
            num_batches=-(-token_count // meta.chunk_tokens),
            token_count=token_count,
            sha256=sha256,
            document_count=NOT_COUNTED if column.told_by else NOT_KNOWN,
        )
        for name, (_, token_count, sha256) in zip(names, rows, strict=True)
    ]
    return meta, entries
