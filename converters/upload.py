"""The upload of a store to a bucket, where it takes the place of another one in one step: when its index is put.

The name of each object has the digest of its store, so no upload writes to an object of another store. Until the new
index is there, the old one and all that it names are as they were; the old objects are deleted after that.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from zb_hdf5 import ArgumentError, ShardIndex
from zb_hdf5.converters.conversion import WorkOptions
from zb_hdf5.converters.engines import Workers
from zb_hdf5.converters.journal import how_to_go_on
from zb_hdf5.errors import ExistsError, Remedy
from zb_hdf5.field_sets.set_upkeep import upload_set
from zb_hdf5.files.objects import Version, delete_objects, list_objects, object_version, put_object
from zb_hdf5.files.paths import RemotePath, any_path
from zb_hdf5.files.publishing import is_part_of_store, leftover_of_dead_writer, partial_path, require_at
from zb_hdf5.spec import INDEX_NAME, SETS_FOLDER, UPLOAD_DIGITS
from zb_hdf5.store.set_facts import SetFacts
from zb_hdf5.store.set_place import refuse_lost_sets, sets_in, sets_of


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:UPLOAD_DIGITS]


def require_new(place: RemotePath, staging: Path, work: WorkOptions) -> None:
    """Raise an error unless a store may be written to a URL, and to the folder from which it is uploaded.

    Parameters
    ----------
    place
        The URL.
    staging
        The folder.
    work
        Whether the conversion goes on, or replaces a store.
    """
    if str(place).startswith("http") or not place.is_dir():
        raise ArgumentError(f"{place}: expected a folder in a bucket, such as s3://bucket/train-h5")
    if staging.exists():
        with leftover_of_dead_writer(staging):  # raises if another process uploads it
            pass
        if not (work.resume or work.force):
            raise ExistsError(f"{place}: an interrupted upload of it is in {staging}", remedy=Remedy.RESUME_OR_RESTART)
    if not work.resume and work.force:
        refuse_lost_sets(place, sets_of(place), work.drop_field_set)
    # with `resume` the one there may be that of this upload: it is compared once the folder is whole
    is_looked_at_later = work.force or (work.resume and staging.exists())
    if not is_looked_at_later and INDEX_NAME in list_objects(place.url):  # which fails without a bucket
        raise ExistsError(f"{place}: has a {INDEX_NAME} already")


def upload_and_remove(staging: Path, place: RemotePath, work: WorkOptions, workers: Workers) -> None:
    """Upload a store of this machine, and remove it here. With `resume` the objects that are there stay."""
    try:
        with leftover_of_dead_writer(staging) as fd:
            _upload(staging, place, work, workers, lambda: require_at(fd, staging))
            # under this name a kill leaves what the next conversion removes
            os.replace(staging, partial_path(staging))
            shutil.rmtree(partial_path(staging))
    except BaseException as error:
        if staging.exists():
            error.add_note(f"the store to upload is kept in {staging}: {how_to_go_on(work.force)}")
        raise


def _upload(
    staging: Path,
    place: RemotePath,
    work: WorkOptions,
    workers: Workers,
    require_unreplaced: Callable[[], None],
) -> None:
    """Put all objects, then the index, and then delete the objects that a replaced store has left."""
    index_url = (place / INDEX_NAME).url
    index = ShardIndex.load(staging)
    # of the whole index: stores of the same tokens may differ in their codec, fields and documents
    digest = _digest(index.to_json())
    data = _with_object_names(index, digest).to_json().encode("utf-8")
    version = object_version(index_url)
    is_there = version is not None and (place / INDEX_NAME).read_bytes() == data
    if version is not None and not is_there and not work.force:
        raise ExistsError(f"{place}: has a {INDEX_NAME} already")
    # only what is there now is ever deleted: another upload may begin once the index is replaced
    before = list_objects(place.url)
    here = (path for path in staging.iterdir() if path.name not in (INDEX_NAME, SETS_FOLDER))
    files = {_object_name(path.name, digest): path for path in here}
    _put_files(files, place, before if work.resume else {}, workers)
    require_unreplaced()
    if not is_there:
        _put_index(index_url, data, version)
    if work.force:
        kept = {INDEX_NAME, *files}
        delete_objects(place.url, [name for name in before if is_part_of_store(name) and name not in kept])
    _replace_sets(staging / SETS_FOLDER, place / SETS_FOLDER, work, workers)


def _replace_sets(folder: Path, place: RemotePath, work: WorkOptions, workers: Workers) -> None:
    """Upload the field sets in a folder, which belong to the index that was put, in place of those that were there."""
    for name, split in sets_in(place):
        if name in work.drop_field_set:
            url = (place / name / split).url
            delete_objects(url, list(list_objects(url)))
    for name, split in sets_in(folder):
        here = folder / name / split
        workers.shown.begin("uploading field sets", sum(path.stat().st_size for path in here.iterdir()), "B")
        url = (place / name / split).url
        upload_set(here, SetFacts.load(here), url, lambda done, _: workers.shown.advance(done))


def _object_name(name: str, digest: str) -> str:
    """Return the name of the object of a file: of shard-00000-of-00002.h5 it is shard-00000-of-00002.3fa1b2c3.h5."""
    stem, _, suffixes = name.partition(".")
    return f"{stem}.{digest}.{suffixes}"


def _with_object_names(index: ShardIndex, digest: str) -> ShardIndex:
    """Return an index that names the objects in place of the files."""
    values = index.table.values
    paths = [_object_name(path, digest) for path in values["path"]]
    documents = tuple(part._replace(path=_object_name(part.path, digest)) for part in index.documents)
    return replace(index, shards=replace(index.table, values={**values, "path": paths}), documents=documents)


def _put_files(files: Mapping[str, Path], place: RemotePath, present: Mapping[str, int], workers: Workers) -> None:
    """Put the files whose objects are not there with all their bytes."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    workers.shown.begin("uploading", sum(sizes.values()), "B")
    for name, path in sorted(files.items()):
        if present.get(name) == sizes[name]:
            workers.shown.keep(sizes[name])
        else:
            put_object(f"{place.url}/{name}", path)
            workers.shown.advance(sizes[name])


def _put_index(url: str, data: bytes, version: Version | None) -> None:
    """Put the index of a store, unless another process has put or replaced it since its version was looked up."""
    try:
        put_object(url, data, instead_of=version)
    except ExistsError:
        if any_path(url).read_bytes() != data:  # it is ours if an answer was lost, and the request sent again
            raise
