"""The error for a path without an index: a lost one, a conversion that is not finished, or no store at all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from zb_hdf5.errors import FormatError, IncompleteError, Remedy, counted
from zb_hdf5.files.objects import names_below
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.spec import INDEX_NAME, JOURNAL_PREFIX, SHARD_PREFIX

#: Names of a folder that a message shows.
NAMES_SHOWN: Final = 5


def no_index(folder: Path) -> FormatError:
    """Return the error for a folder that has no `shards.json`; it describes the content of the folder."""
    if folder.name.endswith(PARTIAL_SUFFIX):
        has_journal = not isinstance(folder, RemotePath) and any(folder.glob(f"{JOURNAL_PREFIX}*"))
        remedy = Remedy.RESUME if has_journal else Remedy.RESUME_WHOLE  # without one there is no progress to show
        return IncompleteError(f"{folder}: its conversion is not finished", remedy=remedy, at=folder)
    if isinstance(folder, RemotePath):
        return _no_index_in_a_bucket(folder)
    if not folder.is_dir():
        return FormatError(f"{folder}: no {INDEX_NAME}: there is no such folder")
    with os.scandir(folder) as entries:
        is_folder = {entry.name: entry.is_dir() for entry in entries}
    if any(name.startswith(SHARD_PREFIX) for name in is_folder):
        return _lost_index(folder)
    facts = f"{folder}: no {INDEX_NAME} and no shards: not a store, but {_content(folder, is_folder)}"
    return FormatError(facts, remedy=Remedy.CONVERT, at=folder)


def _lost_index(folder: Path) -> FormatError:
    return FormatError(f"{folder}: no {INDEX_NAME}: its index was lost", remedy=Remedy.REBUILD, at=folder)


def _no_index_in_a_bucket(folder: Path) -> FormatError:
    """Return the error for a URL, in which a mistake is more frequent than an index that was lost."""
    names = names_below(os.fspath(folder))
    if names is None:  # a web server, or a bucket that does not list
        return FormatError(f"{folder}: no {INDEX_NAME}: the URL has a mistake, or the index was lost")
    if not names:
        return FormatError(f"{folder}: no {INDEX_NAME}, and nothing else: look for a mistake in the URL")
    if any(name.startswith(SHARD_PREFIX) for name in names):
        return _lost_index(folder)
    return FormatError(f"{folder}: no {INDEX_NAME} and no shards: not a store, but {_listed(names)}")


def _content(folder: Path, is_folder: Mapping[str, bool]) -> str:
    """Describe a folder that is not a store by the stores in it, or by its files; `is_folder` is by name."""
    if not is_folder:
        return "an empty folder"
    stores = sorted(name for name, inner in is_folder.items() if inner and (folder / name / INDEX_NAME).exists())
    if stores:
        return f"a folder with the store{'s' if len(stores) > 1 else ''} {_listed(stores)}"
    kinds = Counter("folder" if inner else f"{Path(name).suffix} file".strip() for name, inner in is_folder.items())
    return f"a folder with {_listed([counted(count, kind) for kind, count in sorted(kinds.items())])}"


def _listed(names: list[str]) -> str:
    """Return the first names of a folder, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
