"""The places of field sets: in a store, beside the files of another program, or for both formats of a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from zb_hdf5.errors import ConvertError, NotFoundError, Remedy
from zb_hdf5.files.objects import names_below
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.spec import INDEX_NAME, SET_FACTS, SET_GROWN, SET_INDEX, SETS_FOLDER, SETS_SUFFIX, VALUES_PREFIX
from zb_hdf5.store.both_formats import stores_by_format
from zb_hdf5.store.index import find_index
from zb_hdf5.store.set_facts import SetFacts


def sets_folders(path: Path) -> list[Path]:
    """Return the folders that may have the field sets of a path; the last one gets new sets.

    They are in a store, or beside a file or folder of another program. A folder with a store for each format has them
    beside both, since the tokens of these are the same; a store that was alone there before has its own, too.
    """
    folder = path.parent if path.name == INDEX_NAME else path
    own = folder / SETS_FOLDER
    if isinstance(folder, RemotePath):
        return [own]
    if stores := stores_by_format(folder):
        return [*(store / SETS_FOLDER for store in stores.values()), own]
    if find_index(folder) is None:
        named = folder if folder.name not in ("", "..") else Path(os.path.realpath(folder))
        return [named.parent / f"{named.name}{SETS_SUFFIX}"]
    return [own, folder.parent / SETS_FOLDER] if len(stores_by_format(folder.parent)) > 1 else [own]


def set_folder(path: Path, name: str, split: str) -> Path:
    """Return the folder of one field set of a path; of one that is not there the place where it would be made."""
    *others, newest = (folder / name / split for folder in sets_folders(path))
    return next((folder for folder in others if (folder / SET_FACTS).exists()), newest)


def sets_of(path: Path) -> list[tuple[str, str]]:
    """Return the names and splits of the field sets that lie with a path, in order."""
    return sorted({found for folder in sets_folders(path) for found in sets_in(folder)})


def sets_in(folder: Path) -> list[tuple[str, str]]:
    """Return the names and splits of the field sets in a folder of these, in order; none if there is no such folder."""
    if isinstance(folder, RemotePath):
        return [(name, split) for name in _folders_in(folder) for split in _folders_in(folder / name)]
    return sorted((found.parent.parent.name, found.parent.name) for found in folder.glob(f"*/*/{SET_FACTS}"))


def _folders_in(place: RemotePath) -> list[str]:
    """Return the names of the folders in a folder of a bucket; none where the server lists nothing."""
    return [name[:-1] for name in names_below(place.url) or () if name.endswith("/")]


def set_names(path: Path) -> list[str]:
    """Return the names of the field sets that lie with a path, in order."""
    return list(dict.fromkeys(name for name, _ in sets_of(path)))


def facts_at(folder: Path, name: str, path: Path) -> SetFacts:
    """Read the facts of the field set in a folder.

    Parameters
    ----------
    folder
        The folder.
    name, path
        The name of the set, and the path of its tokens, for the message.

    Raises
    ------
    NotFoundError
        If there is none.
    """
    if not (folder / SET_FACTS).exists():
        there = ", ".join(f"{each} ({split})" for each, split in sets_of(path)) or "none"
        raise NotFoundError(f"{folder}: there is no field set {name!r}; of {path} there are: {there}")
    return SetFacts.load(folder)


def replaceable_names(folder: Path, names: str, dropped: Sequence[str] = (), *, brings_sets: bool = False) -> str:
    """Return a regular expression of the names that replacing a folder may remove, with those of its field sets.

    Parameters
    ----------
    folder
        The folder.
    names
        The expression for the names without field sets; "": the names of a store alone.
    dropped
        The field sets that are removed with it.
    brings_sets
        Whether the new folder has field sets, too.

    Raises
    ------
    ConvertError
        If it has other field sets: their values would be lost.
    """
    own = folder / SETS_FOLDER
    there = sets_in(own)
    refuse_lost_sets(folder, there, dropped)
    if not (there or brings_sets or sets_in(partial_path(folder) / SETS_FOLDER)):
        return names
    known = (SET_FACTS, SET_INDEX, SET_GROWN, VALUES_PREFIX)
    of_sets = rf"\.?({'|'.join(map(re.escape, known))})[.\w]*"
    return f"({names})|({of_sets})" if names else of_sets


def refuse_lost_sets(path: Path, there: Iterable[tuple[str, str]], dropped: Sequence[str]) -> None:
    """Raise `ConvertError` if a path that is replaced has field sets that nobody has named: their values would be lost.

    Parameters
    ----------
    path
        The path.
    there
        The names and splits of its sets.
    dropped
        The names of those that are removed with it.
    """
    if kept := sorted({name for name, _ in there} - set(dropped)):
        raise ConvertError(
            f"{path}: has the field sets {', '.join(kept)}, whose values would be lost with its tokens",
            remedy=Remedy.DROP_SETS,
            at=",".join(kept),
        )
