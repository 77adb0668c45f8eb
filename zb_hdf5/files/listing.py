"""The files that paths stand for: folders are searched, and none is named twice."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from zb_hdf5.errors import ConvertError
from zb_hdf5.files.paths import any_path, is_url
from zb_hdf5.files.publishing import PARTIAL_SUFFIX
from zb_hdf5.spec import INDEX_NAME

#: Suffixes of files that a conversion of their folder may be meant to read.
SUFFIXES_OF_TOKENS: Final = frozenset((".npy", ".h5", ".hdf5", ".batch", ".bin", ".ds", ".parquet", ".jsonl", ".mds"))


def files_at(paths: Sequence[str | os.PathLike[str]], *suffixes: str) -> list[Path]:
    """Replace folders by the files in and below them, by path; `ConvertError` for none, or one named twice.

    Parameters
    ----------
    paths
        Files, and folders of them.
    suffixes
        The endings of the files in folders.
    """
    files: list[Path] = []
    for path in map(any_path, paths):
        if path.is_dir():
            found = [
                file
                for file in sorted(path.rglob("*"))
                if file.name.endswith(suffixes)
                and not file.is_dir()
                and PARTIAL_SUFFIX not in {parent.suffix for parent in file.relative_to(path).parents}
            ]
            if not found:
                raise ConvertError(f"{path}: no {suffixes[0]} files in this folder, nor below it")
            files += found
        elif path.is_file():
            files.append(path)
        else:  # a FIFO would block for ever
            expected = "expected a file or folder, found neither" if path.exists() else "no such file or folder"
            raise ConvertError(f"{path}: {expected}")
    require_named_once(files)
    return files


def files_left_out(folder: Path, read: Sequence[Path]) -> list[Path]:
    """Return the files in a folder that are named as tokens or text are, and are not read; of a store none.

    Parameters
    ----------
    folder
        The folder, or a file, which has none.
    read
        The files that are read.
    """
    if is_url(folder) or not folder.is_dir() or (folder / INDEX_NAME).exists():
        return []
    named = set(map(os.fspath, read))
    others = (file for file in folder.iterdir() if os.fspath(file) not in named)
    found = [file for file in others if file.suffix in SUFFIXES_OF_TOKENS and file.is_file()]
    if not found:  # the usual case: thousands of files are looked at by their names alone
        return []
    known = {file.resolve() for file in read}
    return sorted(file for file in found if file.resolve() not in known)


def require_named_once(files: Iterable[Path], values: str = "tokens") -> None:
    """Raise `ConvertError` for a file that is named twice, also by another name of it: a link, or its folder.

    Parameters
    ----------
    files
        The files.
    values
        The values in them, for the message.
    """
    for path, count in Counter(file if is_url(file) else file.resolve() for file in files).items():
        if count > 1:
            raise ConvertError(f"{path}: is named {count} times; its {values} would be stored as often: name it once")
