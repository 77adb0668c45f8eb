"""A folder that has a store of the same tokens for each format, named by it: `books/hdf5/` and `books/batch/`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from zb_hdf5.errors import ArgumentError, FormatError
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.spec import INDEX_NAME, SHARD_PREFIX, content_fingerprint
from zb_hdf5.store.format_list import backends
from zb_hdf5.store.index import ShardIndex, find_index


def stores_by_format(folder: Path) -> dict[str, Path]:
    """Return format -> store; empty for any other path. A store whose index was lost counts."""
    if isinstance(folder, RemotePath) or not folder.is_dir():
        return {}
    places = {name: folder / name for name in backends()}
    found = {name: place for name, place in places.items() if place.is_dir() and _has_shards(place)}
    return {} if found and find_index(folder) else found


def _has_shards(folder: Path) -> bool:
    return (folder / INDEX_NAME).exists() or any(folder.glob(f"{SHARD_PREFIX}*"))


def require_same_tokens(folder: Path, stores: Mapping[str, ShardIndex]) -> None:
    """Raise `FormatError` unless the stores of a folder, by their formats, have the same tokens, shards and shape."""
    known = {name: content_fingerprint(index.table.values["sha256"], index.meta) for name, index in stores.items()}
    for name, other in pairwise(known):
        if known[name] != known[other]:
            raise FormatError(
                f"{folder}: expected the same tokens in {name} and {other}, found fingerprints {known[name]} and "
                f"{known[other]}; convert one of them again"
            )


def require_one_store(folder: Path, advice: str) -> None:
    """Raise `ArgumentError` for a folder that has a store for each format; `advice` is the end of the message."""
    if stores := stores_by_format(folder):
        places = " and ".join(map(str, stores.values()))
        raise ArgumentError(f"{folder}: has a store for each format: {places}; {advice}")
