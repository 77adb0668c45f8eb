"""Uploads a finished store: every file under a new name, the index last, and nothing is overwritten."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zb_hdf5.errors import ArgumentError, ExistsError
from zb_hdf5.files.objects import delete_object, object_size, put_object
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.table import ShardTable

#: Digits of the digest of a store that its objects are named after.
TAG_CHARS = 8


def require_new(place: RemotePath, *, overwrite: bool) -> None:
    """Raise an error unless a store may be written to a URL."""
    if str(place).startswith("http") or not place.is_dir():
        raise ArgumentError(f"{place}: expected a folder in a bucket, such as s3://bucket/train-h5")
    if not overwrite and object_size(str(place / INDEX_NAME)) is not None:
        raise ExistsError(f"{place}: has a {INDEX_NAME} already")


def upload_store(
    folder: Path, place: RemotePath, *, overwrite: bool, progress: Callable[[int], None] = lambda count: None
) -> ShardIndex:
    """Upload a store of this machine, and return its index there."""
    # objects are named after the digest of the index, so that no other store has their names: an interrupted upload
    # goes on with what is missing; with `overwrite` the old shards stay, for whoever reads them
    require_new(place, overwrite=overwrite)
    index = ShardIndex.load(folder)
    # of the whole index: stores of the same tokens may differ in their codec, fields and documents
    tag = hashlib.sha256(index.to_json().encode("utf-8")).hexdigest()[:TAG_CHARS]

    def named(path: str) -> str:
        before, _, name = path.rpartition("/")
        return f"{before}/{tag}-{name}" if before else f"{tag}-{name}"

    if overwrite:
        delete_object(str(place / INDEX_NAME))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if name == INDEX_NAME:
            continue
        url, size = f"{place}/{named(name)}", path.stat().st_size
        found = object_size(url)
        if found is None:
            put_object(url, path)
        elif found != size:
            raise ExistsError(f"{url}: expected no object, or one of {size:,} bytes, found {found:,}; remove it")
        progress(size)
    values = {**index.table.values, "path": list(map(named, index.table.values["path"]))}
    table = ShardTable(values, index.table.columns, index.table.fields, index.table.pieces, index.table.codecs)
    documents = tuple(part._replace(path=named(part.path)) for part in index.documents)
    uploaded = replace(index, shards=table, documents=documents)
    put_object(f"{place}/{INDEX_NAME}", uploaded.to_json().encode("utf-8"), new=True)
    return uploaded
