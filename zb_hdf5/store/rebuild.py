"""Makes a lost or damaged `shards.json` anew from the shards themselves, and the `.crc32` of a lone `.batch`."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from zb_hdf5.errors import ArgumentError, BackendError, ExistsError, FormatError, IncompleteError, Remedy, ZbError
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.formats.registry import BACKENDS, FORMATS
from zb_hdf5.formats.sidecar import ensure_crc32_file
from zb_hdf5.spec import BATCHES_LAYOUT, INDEX_NAME, SHARD_PREFIX
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.opening import open_reader
from zb_hdf5.store.streams import index_files

_NAME: Final = re.compile(
    re.escape(SHARD_PREFIX) + r"(?P<number>\d+)(-of-(?P<count>\d+))?(?P<repaired>(\.repaired)*)\.\w+"
)
#: The shuffle of an index that was made anew from the shards alone.
UNKNOWN_SHUFFLE: Final = "unknown"
#: Missing shards that a message names.
MAX_SHOWN: Final = 20
#: Of a store's meta, what files with a sidecar have no place for.
ONLY_IN_SOME_FILES: Final = ("vocab_size", "tokenizer")


def rebuild_index(folder: str | os.PathLike[str], *, force: bool = False) -> ShardIndex:
    """Write `shards.json` from the shards of `folder`, and return it.

    A `.repaired` shard replaces its original. The record shuffle and the source are stored in the index only, and so
    are the splits of shards without pieces, the vocabulary and the tokenizer of `.batch` files, and the identity of a
    store written live: they are taken from the old one if it can still be read, and else are lost with it.

    Parameters
    ----------
    force
        Replace an index that can be read; accept that shards are missing.

    Raises
    ------
    ArgumentError
        If there is no such folder.
    ExistsError
        If the index is valid.
    IncompleteError
        If shards are missing, by the numbers in their names, or one is not finished.
    FormatError
        If there are no shards, or they disagree.
    """
    folder = local_path(folder)
    if not folder.is_dir():
        raise ArgumentError(f"{folder}: expected the folder of a store, found no folder")
    old = _readable_index(folder)
    if old is not None and not force:
        raise ExistsError(f"{folder / INDEX_NAME}: exists already, and is valid")
    paths = _shard_paths(folder, force)
    known = {} if old is None else {_number(shard.path): shard.split for shard in old.shards}
    splits = {path.name: known[_number(path.name)] for path in paths if _number(path.name) in known}
    if old is None:
        index = index_files(paths, splits=splits, shuffle=UNKNOWN_SHUFFLE)
    else:
        index = index_files(paths, splits=splits, shuffle=old.shuffle, source=old.source)
        kept = {name: getattr(index.meta, name) or getattr(old.meta, name) for name in ONLY_IN_SOME_FILES}
        same = known.keys() == {_number(path.name) for path in paths}
        if same and index.meta.layout == BATCHES_LAYOUT:  # a document may lie in several shards
            kept["document_count"] = old.meta.document_count
        # with other tokens, the state of a loader that read the store live no longer names the same records
        live_id = old.live_id if index.sha256 == old.sha256 else ""
        index = replace(index, meta=replace(index.meta, **kept), live_id=live_id)
    index.save(folder)
    return index


def add_crc32_file(path: Path) -> Path | None:
    """Write the `<path>.crc32` of a file that has no place for its crc32 rows; None if it has one.

    Raises
    ------
    BackendError
        If it is no such file.
    """
    nouns = " or ".join(row.noun for row in BACKENDS.values() if row.has_sidecar)
    if not path.is_file():
        raise BackendError(f"{path}: expected {nouns}")
    with open_reader(path) as reader:
        if not FORMATS[reader.backend].has_sidecar:
            raise BackendError(f"{path}: expected {nouns}, found a {reader.backend!r} file")
        return ensure_crc32_file(reader)


def _readable_index(folder: Path) -> ShardIndex | None:
    try:
        return ShardIndex.load(folder)
    except ZbError:
        return None


def _number(name: str) -> str:
    match = _NAME.fullmatch(name)
    return match["number"] if match else name


def _shard_paths(folder: Path, force: bool) -> list[Path]:
    """Return the shards in order of their numbers."""
    suffixes = {backend.suffix for backend in BACKENDS.values()}
    found: dict[int, Path] = {}
    counts = set()
    for path in sorted(folder.iterdir(), key=lambda path: path.name.count(".repaired")):
        match = _NAME.fullmatch(path.name)
        if match is None or path.suffix not in suffixes:
            continue
        number = int(match["number"])
        if number in found and not match["repaired"]:
            raise FormatError(f"{folder}: {found[number].name} and {path.name} have one number; move one away")
        found[number] = path
        counts.add(int(match["count"] or 0))
    unfinished = sorted(path.name for path in folder.glob(f"{SHARD_PREFIX}*{PARTIAL_SUFFIX}"))
    waiting = [name for name in unfinished if not (folder / name.removesuffix(PARTIAL_SUFFIX)).exists()]
    if waiting and not force:
        raise IncompleteError(f"{folder}: {waiting[0]} is not finished", remedy=Remedy.REPAIR, at=folder / waiting[0])
    if not found:
        raise FormatError(f"{folder}: no file is called {SHARD_PREFIX}*: not a store; convert again")
    if len(counts) > 1:
        raise FormatError(f"{folder}: holds shards of stores of {sorted(counts)} shards; move those of others away")
    absent = (number for number in range(counts.pop() or max(found) + 1) if number not in found)
    missing = list(islice(absent, MAX_SHOWN + 1))  # a name with a date makes billions of them
    if missing and not force:
        numbers = ", ".join(map(str, missing[:MAX_SHOWN])) + (", and more" if len(missing) > MAX_SHOWN else "")
        raise IncompleteError(f"{folder}: shards {numbers} are missing", remedy=Remedy.DO_WITHOUT)
    return [found[number] for number in sorted(found)]
