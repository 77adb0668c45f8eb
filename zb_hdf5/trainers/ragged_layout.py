"""The layout of the documents in an HDF5 file of any program, as it is named, or found by its content.

*Values with offsets*: one dataset of all ids, and one in its group of where each document begins and the last one ends
(N + 1 numbers), of where each one ends (N), or of their lengths (N), where it is named. *Lists*: one dataset of N
lists (`h5py.vlen_dtype`). Other datasets of the same shape in the group are fields. *A dataset for each document*: a
group of 1-D datasets, in the order of the numbers in their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5.errors import ConvertError, Remedy
from zb_hdf5.files.field_files import is_named_as_field
from zb_hdf5.files.listing import files_at
from zb_hdf5.files.look import Look
from zb_hdf5.formats.foreign import FIELD_NAMES, MAX_DATASETS, MAX_LEVELS, MAX_OBJECTS, TOKEN_NAMES
from zb_hdf5.formats.format_row import HDF5_SUFFIXES
from zb_hdf5.hdf5.h5_dataset import bytes_elsewhere, own_dataset
from zb_hdf5.hdf5.h5_file import h5_damage, open_h5_for_reading
from zb_hdf5.hdf5.superblock import note_surplus
from zb_hdf5.hdf5.written_rows import never_written, written_rows
from zb_hdf5.packages import h5py
from zb_hdf5.text.lacking_text import IDS_COLUMNS

#: The layouts of documents in a file.
OFFSETS: Final = "offsets"
LISTS: Final = "lists"
DATASETS: Final = "datasets"
#: Offsets that are looked at.
_MAX_OFFSETS_SEEN: Final = 4096
#: The name of a dataset that is one of many.
_NUMBERED: Final = re.compile(r"(.*?)(\d+)")


class Layout(NamedTuple):
    """The documents that a look has found in a file.

    Attributes
    ----------
    kind
        "offsets", "lists" or "datasets".
    name
        The dataset of the values or lists, or the group of the datasets.
    offsets
        The dataset of the offsets or lengths of values.
    fills
        Values that were never written are read as the fill value of their dataset; else they are refused.
    """

    kind: str
    name: str
    offsets: str = ""
    fills: bool = False

    @property
    def in_words(self) -> str:
        """The arguments that choose it."""
        chosen = f"dataset={self.name!r}"
        return f"{chosen}, offsets={self.offsets!r}" if self.offsets else chosen

    def require_written(self, path: Path, stored: h5py.Dataset) -> None:
        """Raise `FormatError` if rows of a dataset were never written, and are not filled."""
        runs = None if self.fills else written_rows(stored, len(stored))
        if runs is not None:
            raise never_written(path, stored, runs, len(stored), Remedy.FILL)


@contextmanager
def opened(path: Path, look: Look | None = None) -> Iterator[h5py.File]:
    """Open a file of documents inside the block; a note tells of bytes behind its end."""
    with h5_damage(path):
        h5 = open_h5_for_reading(path, None if look is None else look.identity, look)
    with h5_damage(path), h5:
        note_surplus(h5, path)
        yield h5


def _first_datasets(h5: h5py.File) -> dict[str, h5py.Dataset]:
    """Return the first datasets of one axis whose bytes are in this file, by their names: of more, each is a document.

    A file whose datasets have more axes is not visited to its end.
    """
    found: dict[str, h5py.Dataset] = {}
    num_objects = 0

    def visit(name: str, item: Any) -> bool | None:
        nonlocal num_objects
        num_objects += 1
        if name.count("/") == MAX_LEVELS:
            return True
        if isinstance(item, h5py.Dataset) and item.ndim == 1 and not bytes_elsewhere(item):
            found[name] = item
        return True if len(found) == MAX_DATASETS or num_objects == MAX_OBJECTS else None

    h5.visititems(visit)
    return found


def _is_of_lists(stored: h5py.Dataset) -> bool:
    base = h5py.check_vlen_dtype(stored.dtype)
    return isinstance(base, np.dtype) and base.kind in "iu"


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def group_of(name: str) -> str:
    """Return the group of a dataset, by its name; "": the root."""
    return name.rpartition("/")[0]


def _ascends(stored: h5py.Dataset) -> bool:
    """Return whether numbers ascend from 0 on, or above, as far as they are looked at."""
    first = stored[:_MAX_OFFSETS_SEEN].astype(np.int64)
    return bool(first[0] >= 0 and (first[1:] >= first[:-1]).all())


def _pairs_in(numbers: Mapping[str, h5py.Dataset]) -> list[Layout]:
    """Return the datasets of numbers that ascend to the number of values in one beside them."""
    lasts = {name: int(stored[-1]) for name, stored in numbers.items() if len(stored)}
    return [
        Layout(OFFSETS, values, offsets)
        for offsets, last in lasts.items()
        for values, stored in numbers.items()
        if offsets != values and last == len(stored) and group_of(offsets) == group_of(values)
        if _base(values) not in FIELD_NAMES and _ascends(numbers[offsets])
    ]


def layouts_of(h5: h5py.File) -> list[Layout]:
    """Return the layouts that the content of a file fits; several if it is not certain."""
    found = _first_datasets(h5)
    lists = [name for name, stored in found.items() if _is_of_lists(stored) and not is_named_as_field(_base(name))]
    if lists and _has_records(h5, lists):
        return []
    if lists:
        named = [name for name in lists if _base(name) in IDS_COLUMNS]
        chosen = named if len(named) == 1 and len({group_of(name) for name in lists}) == 1 else lists
        return [Layout(LISTS, name) for name in chosen]
    numbers = {name: stored for name, stored in found.items() if stored.dtype.kind in "iu"}
    pairs = _pairs_in(numbers)
    named_pairs = [pair for pair in pairs if _base(pair.name) in IDS_COLUMNS]
    if len(named_pairs) == 1:
        return named_pairs
    return pairs + (_numbered_groups(h5, found) if len(numbers) == len(found) else [])


def _has_records(h5: h5py.File, lists: Sequence[str]) -> bool:
    """Return whether records of ids lie beside lists: then the lists are facts of the records."""
    if {_base(name) for name in lists} & {*IDS_COLUMNS}:
        return False
    tokens = (h5[group_of(name) or "/"].get(ids) for name in lists for ids in TOKEN_NAMES)
    return any(isinstance(each, h5py.Dataset) and each.ndim > 1 for each in tokens)


def _numbered_groups(h5: h5py.File, found: Mapping[str, h5py.Dataset]) -> list[Layout]:
    """Return the one group of datasets whose names differ in a number alone, each of which is a document."""
    groups = {group_of(name) for name in found}
    if len(found) < 2 or len(groups) > 1:
        return []
    [group] = groups
    prefixes = {numbered(name)[0] for name in h5[group or "/"]}
    return [Layout(DATASETS, group or "/")] if len(prefixes) == 1 and None not in prefixes else []


def numbered(name: str) -> tuple[str | None, int]:
    """Return the words before the number at the end of a name, and the number; None: it has none."""
    found = _NUMBERED.fullmatch(name)
    return (None, 0) if found is None else (found[1], int(found[2]))


def names_documents(look: Look, name: str) -> bool:
    """Return whether a name in a file, or in the first one of a folder, is that of documents: of lists, or a group."""
    first = files_at([look], *HDF5_SUFFIXES)[0]
    with opened(first, look.of(first)) as h5:
        return _layout_named(h5, look.path, name) is not None


def _layout_named(h5: h5py.File, path: Path, name: str) -> Layout | None:
    """Return the layout that one name stands for; None if it does not suffice."""
    name = name.strip("/")
    if h5.get(name or "/", getclass=True) is h5py.Group:
        return Layout(DATASETS, name or "/")
    stored = own_dataset(h5, path, name)
    return Layout(LISTS, name) if stored is not None and _is_of_lists(stored) else None


def layout_at(look: Look, dataset: str | None, offsets: str | None) -> Layout:
    """Return the layout of a file, as it is named or found; `ConvertError` if it is not certain."""
    path = look.path
    with opened(path, look) as h5:
        if dataset is not None and offsets is not None:
            return Layout(OFFSETS, dataset.strip("/"), offsets.strip("/"))
        named = None if dataset is None else _layout_named(h5, path, dataset)
        if named is not None:
            return named
        found = layouts_of(h5)
    fitting = [
        each
        for each in found
        if (dataset is None or each.name == dataset.strip("/"))
        and (offsets is None or each.offsets == offsets.strip("/"))
    ]
    if len(fitting) == 1:
        return fitting[0]
    shown = "; ".join(each.in_words for each in found) or "none of these"
    raise ConvertError(
        f"{path}: expected documents as values with their ends, as lists, or as a group of datasets, found {shown}: "
        "name the values, the lists or the group by dataset, and the ends or lengths by offsets",
        options=["dataset", "offsets"],
    )
