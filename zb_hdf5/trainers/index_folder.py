"""A folder whose `index.json` has its files, as MosaicML streaming and litdata write it: nothing in it is believed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple

from zb_hdf5.errors import ConvertError, FormatError, IncompleteError
from zb_hdf5.files.identity import FileIdentity, require_unreplaced
from zb_hdf5.files.listing import listed, name_below
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import are_splits
from zb_hdf5.files.publishing import require_present
from zb_hdf5.spec import is_file_name

FOLDER_INDEX: Final = "index.json"
#: Bytes of the numbers in the header of a file, and the bytes that they can count.
NUMBER_BYTES: Final = 4
MAX_FILE_BYTES: Final = (1 << 32) - 1
#: The only codec of files that is read.
ZSTD: Final = "zstd"


class Entry(NamedTuple):
    """A part of an index, for which values are looked up.

    Attributes
    ----------
    folder
        The folder of the index.
    where
        Its place in the index, for messages.
    values
        The values of its keys.
    """

    folder: Path
    where: str
    values: Mapping[str, Any]

    def number(self, key: str) -> int:
        """Return a number of things; `FormatError` for anything else."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise FormatError(f"{self.where}: expected a number in {key}, found {value!r:.40}")
        return value

    def file(self, key: str) -> Path:
        """Return a file in or below the folder; `FormatError` for a path elsewhere."""
        name = self.values.get(key)
        is_name = isinstance(name, str) and is_file_name(name) and bool(name)
        if not is_name or Path(str(name)).is_absolute() or ".." in Path(str(name)).parts:
            raise FormatError(f"{self.where}: expected a file below the folder in {key}, found {name!r:.80}")
        return self.folder / str(name)

    def part(self, key: str) -> Entry:
        """Return a part of it; one that is not a JSON object has no keys."""
        value = self.values.get(key)
        return self._replace(values=value if isinstance(value, dict) else {})

    def parts(self, key: str, noun: str) -> list[Entry]:
        """Return the parts of a list in it, at least one; `FormatError` for anything else."""
        rows = self.values.get(key)
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise FormatError(f"{self.where}: expected {key} in a list, found {rows!r:.40}")
        return [Entry(self.folder, f"{self.where}: {noun} {number}", row) for number, row in enumerate(rows)]


def folders_of(look: Look) -> list[Path]:
    """Return the folders of a data set: the path itself, or the folders of its splits, if their names tell them."""
    path = look.path
    if (path / FOLDER_INDEX).is_file():
        return [path]
    inside = _inside(look)
    return inside if are_splits(inside, path) else [path]


def _inside(folder: Look) -> list[Path]:
    """Return the folders below one that have an index."""
    if not folder.is_dir:
        return []
    return [file.parent for file in listed(folder, FOLDER_INDEX).files if file.name == FOLDER_INDEX]


def indexes_of(paths: Sequence[Path], look: Look) -> Iterator[Entry]:
    """Yield the index of each folder of some data sets. Raises as `read_index`.

    Parameters
    ----------
    paths
        The paths of the data sets.
    look
        The look by which the first path was found: an index that it has read is not opened again.
    """
    for path in paths:
        for folder in folders_of(look.of(path)):
            yield read_index(folder, look)


def read_index(folder: Path, look: Look) -> Entry:
    """Read the index of a folder, by a look at that folder or another one.

    Raises
    ------
    ConvertError
        If a folder has no index, but its folders have: they are named.
    FormatError
        If the index is not a JSON object.
    """
    require_present(folder)
    path = folder / FOLDER_INDEX
    if not path.is_file():
        inside = [name_below(folder, each) for each in _inside(look.of(folder))]
        if inside:
            raise ConvertError(f"{folder}: has the data sets {', '.join(inside)}: name the folders of those to read")
        raise ConvertError(f"{folder}: expected a folder with {FOLDER_INDEX}, found none")
    return Entry(folder, str(path), json_object(path, look.of(path)))


def json_object(path: Path, look: Look | None = None) -> dict[str, Any]:
    """Return the JSON object that a file holds; `FormatError` if it is none.

    Parameters
    ----------
    look
        A look at the file; None: it is opened.
    """
    with Look(path) if look is None else nullcontext(look) as look:
        data = look.whole()
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def require_present_file(path: Path) -> FileIdentity:
    """Return the identity of a file that an index names; `IncompleteError` if it is missing."""
    try:
        return require_unreplaced(path, None)
    except FileNotFoundError as error:
        raise IncompleteError(f"{path}: expected a file, as {FOLDER_INDEX} has it, found none") from error


def require_files_once(entries: Sequence[Entry], *keys: str) -> None:
    """Raise `FormatError` if an index names a file twice, as one that was merged wrongly does.

    Parameters
    ----------
    entries
        The entries of its files.
    keys
        The keys, one in the other, of the name of a file.
    """
    counts = Counter(_value_at(entry, keys) for entry in entries)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise FormatError(
            f"{entries[0].folder / FOLDER_INDEX}: names the file {name!r} {count} times: its documents would be stored "
            "as often; merge the indexes of its parts again"
        )


def _value_at(entry: Entry, keys: Sequence[str]) -> str:
    *outer, last = keys
    for key in outer:
        entry = entry.part(key)
    return str(entry.values.get(last))


def require_codec_of(where: str, codec: str) -> None:
    """Raise `FormatError` for files in a codec that is not read; "": they are as they are."""
    if codec.partition(":")[0] not in ("", ZSTD):
        raise FormatError(f"{where}: expected files as they are, or by {ZSTD}, found {codec!r}")
