"""The splits of files, as their names tell: `train.bin` beside `val.bin`, `fineweb_train_000001.bin`, `test/0.npy`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Generic, NamedTuple, Self, TypeVar

from zb_hdf5.errors import ArgumentError, counted
from zb_hdf5.notes import note
from zb_hdf5.spec import DEFAULT_SPLIT

#: The path of a file, or its text: a folder has thousands of files.
AnyPath = TypeVar("AnyPath", bound=str | os.PathLike[str])
#: Words of names, and the split of each. A word is a run of letters.
SPLIT_OF_WORD: Final = {
    "train": DEFAULT_SPLIT,
    "training": DEFAULT_SPLIT,
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "eval": "val",
    "evaluation": "val",
    "test": "test",
    "testing": "test",
}
#: Stands for the files of all splits; the library takes None too.
ALL_SPLITS: Final = "all"
#: Stands for the split that is read where none was named.
AUTO_SPLIT: Final = "auto"
_WORD: Final = re.compile(rf"(?<![^\W\d_])({'|'.join(SPLIT_OF_WORD)})(?![^\W\d_])", re.IGNORECASE)
#: Each word has one of these in it.
_PARTS: Final = ("train", "val", "dev", "test")
#: The end of the message for names that tell no split for sure.
_CURE: Final = "name the file or the folder to read, or pass split='all' to read all as one"


def split_named(word: str | None) -> str | None:
    """Return the split that a user names by any of its words: "validation" is "val"; None stands for all."""
    if word is None or word == ALL_SPLITS:
        return None
    return SPLIT_OF_WORD.get(word.lower(), word)


def named_splits(files: Sequence[str | os.PathLike[str]], paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the split of each of some files; "" for all of them where no name tells one.

    Parameters
    ----------
    files
        The files.
    paths
        The paths, as the user has named them, which stand for the files. Nothing above a path tells a split, and
        neither does the name of a lone one.

    Raises
    ------
    ArgumentError
        If some names tell a split and others none, or a name tells two.
    """
    names = telling_parts(files, paths)
    if not _splits_in("/".join(names)):  # the usual case, of all names at once
        return [""] * len(names)
    told = [_splits_in(name) for name in names]
    if not any(told) or len(names) == 1:
        return [each.pop() if len(each) == 1 else "" for each in told]
    for file, found in zip(files, told, strict=True):
        if len(found) > 1:
            raise ArgumentError(
                f"{os.fspath(file)}: expected a name of one split, found {' and '.join(sorted(found))}: {_CURE}",
                options=["split"],
            )
    if not all(told):
        without = os.fspath(files[told.index(set())])
        named = next(number for number, found in enumerate(told) if found)
        raise ArgumentError(
            f"{without}: expected a name that tells its split, as {names[named]} tells {min(told[named])}, found none: "
            f"{_CURE}",
            options=["split"],
        )
    return [each.pop() for each in told]


def telling_parts(files: Sequence[str | os.PathLike[str]], paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the part of each file that tells its split or field: below a lone path; of several, with their names."""
    texts = [os.fspath(file) for file in files]
    roots = {os.fspath(path).rstrip("/") for path in paths}
    if len(roots) == 1:  # thousands of files are asked about at once
        [root] = roots
        above = f"{root}/"
        return [text[len(above) :] if text.startswith(above) else os.path.basename(text) for text in texts]
    found = []
    for text in texts:
        root = text
        while root not in roots and "/" in root.strip("/"):
            root = root.rpartition("/")[0]
        found.append(text[len(os.path.dirname(root if root in roots else text)) :].lstrip("/"))
    return found


def _splits_in(name: str) -> set[str]:
    if not any(part in name.lower() for part in _PARTS):  # an expression takes ten times as long
        return set()
    return {SPLIT_OF_WORD[word.lower()] for word in _WORD.findall(name)}


def are_splits(folders: Sequence[Path], parent: Path) -> bool:
    """Return whether the names of some folders below another one tell splits: each one, and not all the same."""
    try:
        return len({*named_splits(folders, [parent])}) > 1
    except ArgumentError:
        return False


class SplitFiles(NamedTuple, Generic[AnyPath]):
    """Files of a path, and the split of each: that of its name, "train" where no name tells one."""

    files: list[AnyPath]
    splits: list[str]

    @classmethod
    def at(cls, paths: Sequence[Path], files: Sequence[AnyPath], split: str | None) -> Self:
        """Return the files of a split, of some files at a path or at several.

        Parameters
        ----------
        paths
            Files and folders.
        files
            The files that they stand for.
        split
            The split; None for all files, whatever their names tell; `AUTO_SPLIT` for those for training, or of the
            only split that there is.

        Raises
        ------
        ArgumentError
            If no file is of the split, or the names tell no split for sure.
        """
        if not files:
            return cls([], [])
        wanted = split_named(split)
        if wanted is None:
            return cls(list(files), _splits_if_sure(files, paths))
        told = [each or DEFAULT_SPLIT for each in named_splits(files, paths)]
        named = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {counted(len(paths) - 1, 'more path')}"
        counts = Counter(told)
        is_asked = wanted == DEFAULT_SPLIT and not any(path.is_dir() for path in paths)
        if len(counts) == 1 and (wanted == AUTO_SPLIT or is_asked):
            return cls(list(files), told)
        if wanted == AUTO_SPLIT:
            wanted = DEFAULT_SPLIT
            others = " and ".join(f"{name} ({counted(counts[name], 'file')})" for name in counts if name != wanted)
            if wanted in counts:
                note(f"{named}: only the files of the split {wanted} are read; others: {others}")
        if wanted not in counts:
            raise ArgumentError(
                f"{named}: expected a split that its files have ({', '.join(counts)}), found {wanted!r}: pass "
                f"split={told[0]!r}, or split='all' to read all as one",
                options=["split"],
            )
        return cls([file for file, each in zip(files, told, strict=True) if each == wanted], [wanted] * counts[wanted])


def _splits_if_sure(files: Sequence[AnyPath], paths: Sequence[Path]) -> list[str]:
    """Return the split of each file; of names that tell none for sure "train", as is right where all are read."""
    try:
        told = named_splits(files, paths)
    except ArgumentError:
        told = [""] * len(files)
    return [each or DEFAULT_SPLIT for each in told]


def train_first(splits: Iterable[str]) -> list[str]:
    """Return each of some splits once, that for training first."""
    return sorted(dict.fromkeys(splits), key=lambda split: split != DEFAULT_SPLIT)
