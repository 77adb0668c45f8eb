"""The place of field sets: in a store, beside the files of another program, or for both formats of a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from zb_hdf5.errors import ConvertError, NotFoundError, Remedy
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.spec import INDEX_NAME, SET_FACTS, SET_GROWN, SET_INDEX, SETS_FOLDER, SETS_SUFFIX, VALUES_PREFIX
from zb_hdf5.store.both_formats import stores_by_format
from zb_hdf5.store.index import find_index
from zb_hdf5.store.set_facts import SetFacts


def sets_folder(path: Path) -> Path:
    """Return the folder of the field sets of a path: in a store, or beside a file or folder of another program.

    A folder with a store for each format has them beside both, since the tokens of these are the same.
    """
    folder = path.parent if path.name == INDEX_NAME else path
    if isinstance(folder, RemotePath):
        return folder / SETS_FOLDER
    if find_index(folder) is None:
        return folder.with_name(folder.name + SETS_SUFFIX)
    if len(stores_by_format(folder.parent)) > 1:
        return folder.parent / SETS_FOLDER
    return folder / SETS_FOLDER


def set_folder(path: Path, name: str, split: str) -> Path:
    """Return the folder of one field set of a path."""
    return sets_folder(path) / name / split


def sets_of(path: Path) -> list[tuple[str, str]]:
    """Return the names and splits of the field sets that lie with a path, in order."""
    folder = sets_folder(path)
    if isinstance(folder, RemotePath) or not folder.is_dir():
        return []
    return sorted((found.parent.parent.name, found.parent.name) for found in folder.glob(f"*/*/{SET_FACTS}"))


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


def replaceable_names(folder: Path, names: str, dropped: Sequence[str] = ()) -> str:
    """Return a regular expression of the names that replacing a folder may remove, with those of its field sets.

    Parameters
    ----------
    folder
        The folder.
    names
        That of the names without field sets; "": those of a store alone.
    dropped
        The field sets that are removed with it.

    Raises
    ------
    ConvertError
        If it has other field sets: their values would be lost.
    """
    there = sets_of(folder)
    if not there or sets_folder(folder).parent != folder:
        return names
    if kept := sorted({name for name, _ in there} - set(dropped)):
        raise ConvertError(
            f"{folder}: has the field sets {', '.join(kept)}, whose values would be lost with its tokens",
            remedy=Remedy.DROP_SETS,
            at=",".join(kept),
        )
    folders = {each for pair in there for each in pair}
    known = (SET_FACTS, SET_INDEX, SET_GROWN, VALUES_PREFIX)
    files = rf"\.?({'|'.join(map(re.escape, known))})[.\w]*"
    of_sets = "|".join([SETS_FOLDER, *map(re.escape, folders), files])
    return f"({names})|({of_sets})" if names else of_sets
