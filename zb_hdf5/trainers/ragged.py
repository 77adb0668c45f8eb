"""HDF5 files of documents, of any program: values with offsets, lists of variable length, a dataset for each document.

*Values with offsets*: one dataset of all ids, and one in its group of where each document begins and the last one ends
(N + 1 numbers), of where each one ends (N), or of their lengths (N), where it is named. *Lists*: one dataset of N
lists (`h5py.vlen_dtype`). Other datasets of the same shape in the group are fields. *A dataset for each document*: a
group of 1-D datasets, in the order of the numbers in their names.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ConvertError, FormatError, Remedy, ZbError, counted
from zb_hdf5.files.field_files import ids_at, is_named_as_field
from zb_hdf5.files.identity import require_unreplaced
from zb_hdf5.files.listing import files_at, listed
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import AUTO_SPLIT
from zb_hdf5.files.ranges import LocalFile
from zb_hdf5.files.signatures import is_hdf5
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.foreign import FIELD_NAMES, MAX_DATASETS, MAX_LEVELS, MAX_OBJECTS, TOKEN_NAMES
from zb_hdf5.formats.format import Found, RowsFormat
from zb_hdf5.formats.format_row import HDF5_SUFFIXES
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.h5_tokens import open_stored
from zb_hdf5.formats.id_source import BLOCK_OF_IDS, ColumnSelection, IdFile, IdRows, IdSource, RowBlock
from zb_hdf5.formats.inspection import find_column, is_own_file
from zb_hdf5.hdf5.h5_chunks import register_filters, unreadable
from zb_hdf5.hdf5.h5_dataset import bytes_elsewhere, own_dataset, require_stored
from zb_hdf5.hdf5.h5_file import h5_damage, open_h5_for_reading
from zb_hdf5.hdf5.superblock import note_surplus
from zb_hdf5.hdf5.written_rows import never_written, written_rows
from zb_hdf5.packages import h5py
from zb_hdf5.read_as import FILL, ReadAs
from zb_hdf5.spec import INDEX_NAME, STREAM_LAYOUT
from zb_hdf5.text.lacking_text import IDS_COLUMNS

#: The name of the format.
RAGGED: Final = "ragged"
#: Words in names of datasets that have the ends of documents, and of those that have offsets, which begin with 0.
#: Lengths that are 0 but for the last one are ends, too.
_END_WORDS: Final = frozenset({"end", "ends", "length", "lengths", "lens"})
_OFFSET_WORDS: Final = frozenset(
    (
        *("offset", "offsets", "start", "starts", "begin", "begins", "index", "indices", "idx", "indptr"),
        *("ptr", "ptrs", "pointer", "pointers", "cu", "cum", "cumsum", "cumulative", "seqlens", "splits", "cuts"),
        *("boundary", "boundaries", "bounds", "edges", "limits", "pos", "positions"),
    )
)
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
#: The layouts of documents in a file.
_OFFSETS: Final = "offsets"
_LISTS: Final = "lists"
_DATASETS: Final = "datasets"
#: Offsets that are looked at.
_MAX_OFFSETS_SEEN: Final = 4096
#: Bytes of a group, about, and documents whose offsets are read together.
_GROUP_BYTES: Final = 64 << 20
_BLOCK_DOCUMENTS: Final = 1 << 14
#: Lengths that are added up together, and the largest one that is believed: their sum is not an overflow.
_BLOCK_LENGTHS: Final = 1 << 17
_MAX_LENGTH: Final = 1 << 45
#: Lists that are read together.
_BLOCK_LISTS: Final = 1 << 8
#: Bytes of a list in its dataset: its length and its place.
_LIST_BYTES: Final = 16
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


@contextmanager
def _opened(path: Path, look: Look | None = None) -> Iterator[h5py.File]:
    with h5_damage(path):
        h5 = open_h5_for_reading(path, None if look is None else look.identity, look)
    with h5_damage(path), h5:
        note_surplus(h5, path)
        yield h5


# --- the look ------------------------------------------------------------------------------------------------------


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


def _group_of(name: str) -> str:
    return name.rpartition("/")[0]


def _ascends(stored: h5py.Dataset) -> bool:
    """Return whether numbers ascend from 0 on, or above, as far as they are looked at."""
    first = stored[:_MAX_OFFSETS_SEEN].astype(np.int64)
    return bool(first[0] >= 0 and (first[1:] >= first[:-1]).all())


def _pairs_in(numbers: Mapping[str, h5py.Dataset]) -> list[Layout]:
    """Return the datasets of numbers that ascend to the number of values in one beside them."""
    lasts = {name: int(stored[-1]) for name, stored in numbers.items() if len(stored)}
    return [
        Layout(_OFFSETS, values, offsets)
        for offsets, last in lasts.items()
        for values, stored in numbers.items()
        if offsets != values and last == len(stored) and _group_of(offsets) == _group_of(values)
        if _base(values) not in FIELD_NAMES and _ascends(numbers[offsets])
    ]


def _are_lengths(found: npt.NDArray[np.int64]) -> bool:
    """Return whether numbers may be the lengths of documents."""
    return bool(((found >= 0) & (found <= _MAX_LENGTH)).all())


def layouts_of(h5: h5py.File) -> list[Layout]:
    """Return the layouts that the content of a file fits; several if it is not certain."""
    found = _first_datasets(h5)
    lists = [name for name, stored in found.items() if _is_of_lists(stored) and not is_named_as_field(_base(name))]
    if lists and _has_records(h5, lists):
        return []
    if lists:
        named = [name for name in lists if _base(name) in IDS_COLUMNS]
        chosen = named if len(named) == 1 and len({_group_of(name) for name in lists}) == 1 else lists
        return [Layout(_LISTS, name) for name in chosen]
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
    tokens = (h5[_group_of(name) or "/"].get(ids) for name in lists for ids in TOKEN_NAMES)
    return any(isinstance(each, h5py.Dataset) and each.ndim > 1 for each in tokens)


def _numbered_groups(h5: h5py.File, found: Mapping[str, h5py.Dataset]) -> list[Layout]:
    """Return the one group of datasets whose names differ in a number alone, each of which is a document."""
    groups = {_group_of(name) for name in found}
    if len(found) < 2 or len(groups) > 1:
        return []
    [group] = groups
    prefixes = {_numbered(name)[0] for name in h5[group or "/"]}
    return [Layout(_DATASETS, group or "/")] if len(prefixes) == 1 and None not in prefixes else []


def _are_offsets(path: Path, layout: Layout, count: int) -> bool:
    """Return whether so many numbers from 0 on are offsets; False: they are ends, and the first document is empty.

    Raises
    ------
    ConvertError
        If their name does not tell.
    """
    group, _, name = layout.offsets.rpartition("/")
    words = {word.lower() for word in _WORD.findall(name)}
    if words & _END_WORDS:
        return False
    if words & _OFFSET_WORDS:
        return True
    line = f"h5py.File({os.fspath(path)!r}, 'r+').move({layout.offsets!r}, {f'{group}/offsets'.lstrip('/')!r})"
    raise ConvertError(
        f"{path}: {layout.offsets}: expected a name with the word offsets or ends, since the numbers begin with 0: as "
        f"offsets they have {counted(count - 1, 'document')}, as ends {count:,}, of which the first is empty; rename "
        f"it: {line}"
    )


def _numbered(name: str) -> tuple[str | None, int]:
    """Return the words before the number at the end of a name, and the number; None: it has none."""
    found = _NUMBERED.fullmatch(name)
    return (None, 0) if found is None else (found[1], int(found[2]))


def names_documents(look: Look, name: str) -> bool:
    """Return whether a name in a file, or in the first one of a folder, is that of documents: of lists, or a group."""
    first = files_at([look.path], *HDF5_SUFFIXES)[0]
    with _opened(first, look.of(first)) as h5:
        return _layout_named(h5, look.path, name) is not None


def _layout_named(h5: h5py.File, path: Path, name: str) -> Layout | None:
    """Return the layout that one name stands for; None if it does not suffice."""
    name = name.strip("/")
    if h5.get(name or "/", getclass=True) is h5py.Group:
        return Layout(_DATASETS, name or "/")
    stored = own_dataset(h5, path, name)
    return Layout(_LISTS, name) if stored is not None and _is_of_lists(stored) else None


def _layout(look: Look, dataset: str | None, offsets: str | None) -> Layout:
    """Return the layout of a file, as it is named or found; `ConvertError` if it is not certain."""
    path = look.path
    with _opened(path, look) as h5:
        if dataset is not None and offsets is not None:
            return Layout(_OFFSETS, dataset.strip("/"), offsets.strip("/"))
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


# --- files ---------------------------------------------------------------------------------------------------------


class _DocumentFile(IdFile):
    """An HDF5 file of documents, whose groups are equal shares of them. See `IdFile`.

    Parameters
    ----------
    look
        A look at the file.
    """

    def __init__(self, look: Look) -> None:
        super().__init__(look.path, require_unreplaced(look.path, look.identity))

    def _cut(self, num_documents: int, num_bytes: int) -> None:
        """Cut so many documents, whose ids have so many bytes, about, into groups."""
        self._document_bytes = num_bytes / max(1, num_documents)
        count = max(1, min(num_documents, -(-num_bytes // _GROUP_BYTES)))
        self._cuts = [k * num_documents // count for k in range(count + 1)]
        self.group_bytes = [num_bytes // count] * count

    def _rows(self, number: int) -> Iterator[IdRows]:
        return self._documents(*self._cuts[number : number + 2])

    def _bytes_of(self, num_documents: int) -> int:
        return int(num_documents * self._document_bytes)

    @abstractmethod
    def _documents(self, first: int, stop: int) -> Iterator[IdRows]:
        """Yield documents, numbered from 0, many at a time."""


def _require_ends(path: Path, columns: Sequence[Column]) -> None:
    """Raise `FormatError` for the first column whose end was never written, of those that do not fit together."""
    for column in columns:
        if column.kept is not None:
            with _opened(path) as h5:
                stored = h5[column.name]
                raise never_written(path, stored, column.kept, len(stored), Remedy.FILL)


class OffsetFile(_DocumentFile):
    """A file of values, and of the offsets, the ends or the lengths of the documents in them.

    Parameters
    ----------
    look
        A look at the file.
    layout
        Its layout.
    wanted
        The fields that are asked for.

    Raises
    ------
    FormatError
        If the first offset or the last one does not fit the values, and these are not lengths that add up to them.
    """

    def __init__(self, look: Look, layout: Layout, wanted: ColumnSelection) -> None:
        path = look.path
        super().__init__(look)
        look.require(self.identity)
        #: The look, whose descriptor the first process reads by; None: too many are open.
        self._look = look.kept_open()
        find = partial(find_column, path, None, identity=self.identity, look=look)
        unwritten = FILL if layout.fills else None
        try:
            self._values = find(read_as=ReadAs(layout.name, unwritten=unwritten))
            self._offsets = find(read_as=ReadAs(layout.offsets, unwritten=unwritten))
        except FormatError as error:
            if error.remedy is Remedy.UNWRITTEN:
                error.remedy = Remedy.FILL
            raise
        for column in (self._values, self._offsets):
            if column.meta.layout != STREAM_LAYOUT:
                raise FormatError(f"{path}: {column.name}: expected a dataset of one axis")
        fields = {name: each for name, each in self._values.fields.items() if name != layout.offsets.rpartition("/")[2]}
        kinds: dict[str, np.dtype[Any] | str] = {layout.name: self._values.dtype}
        kinds |= {name: each.dtype for name, each in fields.items()}
        kinds |= dict(self._values.meta.unfit)
        self.columns = wanted.columns(path, kinds)
        self._fields = {name: fields[name] for name in self.columns.lists[1:]}
        first, last = self._ends(look)
        #: The place of the first document of each block of lengths; None: these are offsets or ends.
        self._places: npt.NDArray[np.int64] | None = None
        if last != self._values.num_tokens:
            self._places = self._places_of_lengths(look)
        if self._places is None and (not self._offsets.num_tokens or last != self._values.num_tokens):
            if not layout.fills:
                _require_ends(path, (self._values, self._offsets))
            raise FormatError(
                f"{path}: {layout.offsets}: expected offsets that end with the {self._values.num_tokens:,} values of "
                f"{layout.name}, or lengths that add up to them, found {last:,}"
            )
        has_start = first == 0 and self._places is None and _are_offsets(path, layout, self._offsets.num_tokens)
        self._before = 0 if has_start else 1  # documents that begin before the first number
        num_documents = self._offsets.num_tokens - 1 + self._before
        self._cut(num_documents, self._values.num_tokens * self._values.dtype.itemsize)

    def _places_of_lengths(self, look: Look) -> npt.NDArray[np.int64] | None:
        """Return the place of the first document of each block of lengths; None if they do not add up to the values."""
        places = [0]
        with closing(_by(look, self._offsets)) as lengths:
            for first in range(0, self._offsets.num_tokens, _BLOCK_LENGTHS):
                found = _read(lengths, first, min(_BLOCK_LENGTHS, self._offsets.num_tokens - first)).astype(np.int64)
                if not _are_lengths(found):
                    return None
                places.append(places[-1] + int(found.sum()))
        return np.array(places, np.int64) if places[-1] == self._values.num_tokens else None

    def _ends(self, look: Look) -> tuple[int, int]:
        """Return the first offset and the last one; -1 where there is none."""
        count = self._offsets.num_tokens
        if not count:
            return -1, -1
        with closing(_by(look, self._offsets)) as offsets:
            found = [int(_read(offsets, place, 1)[0]) for place in (0, count - 1)]
        return found[0], found[1]

    def _documents(self, first: int, stop: int) -> Iterator[IdRows]:
        with ExitStack() as stack:
            offsets = stack.enter_context(closing(_by(self._look, self._offsets)))
            columns = {"": self._values, **self._fields}
            opened = {name: stack.enter_context(closing(_column_at(offsets, each))) for name, each in columns.items()}
            read = 0
            for begin in range(first, stop, _BLOCK_DOCUMENTS):
                edges = self._edges(offsets, begin, min(begin + _BLOCK_DOCUMENTS, stop))
                for start, end in _cuts_of(edges):
                    place = int(edges[start])
                    length = int(edges[end]) - place
                    values = {name: _read(each, place, length) for name, each in opened.items()}
                    tokens = values.pop("")
                    read += tokens.nbytes
                    yield IdRows(begin + start + 1, tokens, np.diff(edges[start : end + 1]), values, read=read)

    def _edges(self, offsets: Tokens, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Return where documents begin and the last one ends; `FormatError` unless they ascend inside the values."""
        if self._places is not None:
            return self._edges_of_lengths(offsets, self._places, first, stop)
        begin = max(0, first - self._before)
        found = _read(offsets, begin, stop + 1 - self._before - begin).astype(np.int64)
        if first < self._before:
            found = np.concatenate([np.zeros(1, np.int64), found])
        bad = np.flatnonzero((found[1:] < found[:-1]) | (found[1:] > self._values.num_tokens))
        if len(bad) or found[0] < 0:
            number = int(bad[0]) + 1 if len(bad) else 0
            raise FormatError(
                f"{self.path}: {self._offsets.name}: expected offsets that ascend up to "
                f"{self._values.num_tokens:,}, found {found[number]:,} after {found[max(0, number - 1)]:,}, at "
                f"document {first + number:,}"
            )
        return found

    def _edges_of_lengths(
        self, lengths: Tokens, places: npt.NDArray[np.int64], first: int, stop: int
    ) -> npt.NDArray[np.int64]:
        """Return the same by the lengths: the lengths before the first document in its block are added up again."""
        block = first // _BLOCK_LENGTHS
        begin = block * _BLOCK_LENGTHS
        found = _read(lengths, begin, stop - begin).astype(np.int64)
        edges: npt.NDArray[np.int64] = np.cumsum(np.concatenate([places[block : block + 1], found]))
        if not _are_lengths(found) or edges[-1] > self._values.num_tokens:
            raise FormatError(
                f"{self.path}: {self._offsets.name}: was changed since it was opened: expected lengths that add up to "
                f"{self._values.num_tokens:,}; open it again"
            )
        return edges[first - begin :]


def _by(look: Look | None, column: Column) -> Tokens:
    """Open a column by a copy of the descriptor of a look; None: by the name of its file."""
    with nullcontext() if look is None else look.again() or nullcontext() as again:
        return open_stored(column, "auto", again)


def _column_at(tokens: Tokens, column: Column) -> Tokens:
    """Open another column of the file of some tokens, by a copy of the descriptor of these if they have one."""
    with tokens.file.begin_look() if isinstance(tokens.file, LocalFile) else nullcontext() as look:
        return open_stored(column, "auto", look)


def _read(tokens: Tokens, start: int, count: int) -> npt.NDArray[Any]:
    found = np.empty(count, tokens.dtype)
    if count:
        tokens.read([(start, found)])
    return found


def _cuts_of(edges: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield runs of documents that are read together: about `BLOCK_OF_IDS` ids, or one longer document."""
    limits = np.arange(edges[0] + BLOCK_OF_IDS, edges[-1], BLOCK_OF_IDS)
    cuts = np.searchsorted(edges, limits, side="left")
    yield from pairwise(np.unique([0, *np.minimum(cuts, len(edges) - 1).tolist(), len(edges) - 1]).tolist())


class ListFile(_DocumentFile):
    """A file of lists of ids, of variable length.

    Parameters
    ----------
    look, layout, wanted
        As for `OffsetFile`.
    """

    def __init__(self, look: Look, layout: Layout, wanted: ColumnSelection) -> None:
        path = look.path
        super().__init__(look)
        self._name = layout.name
        group = _group_of(layout.name)
        with _opened(path, look) as h5:
            stored = own_dataset(h5, path, layout.name)
            if stored is None:
                raise FormatError(f"{path}: expected a dataset {layout.name!r}, found none")
            kinds: dict[str, np.dtype[Any] | str] = {layout.name: _base_of(stored)}
            for name in h5[group or "/"]:
                each = None if name == layout.name.rpartition("/")[2] else _dataset_or_none(h5, path, f"{group}/{name}")
                if each is not None and each.shape == stored.shape and h5py.check_vlen_dtype(each.dtype) is not None:
                    kinds[name] = _base_of(each)
            _require_written(path, stored, layout)
            require_stored(len(stored) * _LIST_BYTES, h5, stored, path)
            self.columns = wanted.columns(path, kinds)
            for name in self.columns.lists[1:]:
                _require_written(path, h5[f"{group}/{name}"], layout)
            self._cut(len(stored), self.identity.num_bytes)

    def _documents(self, first: int, stop: int) -> Iterator[IdRows]:
        block = RowBlock(self.path, self.columns, first + 1)
        group = _group_of(self._name)
        columns = self.columns
        more = [*columns.lists[1:], *([columns.lengths] if columns.lengths else [])]
        names = [self._name, *(f"{group}/{name}" for name in more)]
        with _opened(self.path) as h5:
            stored = [h5[name] for name in names]
            for each in stored:
                register_filters(each)
            for begin in range(first, stop, _BLOCK_LISTS):
                lists = [self._lists(each, begin, min(begin + _BLOCK_LISTS, stop)) for each in stored]
                for row in zip(*lists, strict=True):
                    block.add(row[: len(columns.lists)], lengths=row[-1] if columns.lengths else None)
                    if block.is_full:
                        yield from block.take(self._bytes_of(begin - first))
        yield from block.take(self._bytes_of(stop - first))

    def _lists(self, stored: h5py.Dataset, first: int, stop: int) -> list[npt.NDArray[Any]]:
        base = _base_of(stored)
        try:
            return [np.asarray(each, base) for each in stored[first:stop]]
        except (OSError, FormatError) as error:
            raise unreadable(self.path, f"{self._name}: row {first + 1:,}", stored, error) from error


def _require_written(path: Path, stored: h5py.Dataset, layout: Layout) -> None:
    """Raise `FormatError` if rows of a dataset were never written, and are not filled."""
    runs = None if layout.fills else written_rows(stored, len(stored))
    if runs is not None:
        raise never_written(path, stored, runs, len(stored), Remedy.FILL)


def _base_of(stored: h5py.Dataset) -> Any:
    """Return the dtype of the numbers in lists; words for lists of anything else."""
    base = h5py.check_vlen_dtype(stored.dtype)
    return base if isinstance(base, np.dtype) and base.kind in "biuf" else f"lists of {base}"


def _dataset_or_none(h5: h5py.File, path: Path, name: str) -> h5py.Dataset | None:
    """Return a dataset whose bytes are in this file; None for anything else."""
    try:
        return own_dataset(h5, path, name)
    except FormatError:
        return None


class DatasetFile(_DocumentFile):
    """A file with a group of datasets, each a document: in the order of the numbers in their names, or of the names.

    Parameters
    ----------
    look, layout, wanted
        As for `OffsetFile`; there are no fields.
    """

    def __init__(self, look: Look, layout: Layout, wanted: ColumnSelection) -> None:
        path = look.path
        super().__init__(look)
        self._group = layout.name
        self._layout = layout
        with _opened(path, look) as h5:
            names = _names_in(h5[self._group])
            if not names:
                raise FormatError(f"{path}: {self._group}: expected a dataset for each document, found none")
            first = own_dataset(h5, path, f"{self._group}/{names[0]}")
            kinds: Mapping[str, np.dtype[Any] | str] = {} if first is None else {self._group: first.dtype}
            self.columns = wanted.columns(path, kinds)
        self._cut(len(names), self.identity.num_bytes)

    def _documents(self, first: int, stop: int) -> Iterator[IdRows]:
        block = RowBlock(self.path, self.columns, first + 1)
        with _opened(self.path) as h5:
            for done, name in enumerate(_names_in(h5[self._group])[first:stop]):
                block.add([self._document(h5, name)])
                if block.is_full:
                    yield from block.take(self._bytes_of(done))
        yield from block.take(self._bytes_of(stop - first))

    def _document(self, h5: h5py.File, name: str) -> npt.NDArray[Any]:
        stored = own_dataset(h5, self.path, f"{self._group}/{name}")
        expected = self.columns.dtype
        if stored is None or stored.ndim != 1 or stored.dtype != expected:
            raise FormatError(
                f"{self.path}: {self._group}/{name}: expected a dataset of one axis of {expected}, as the first "
                f"document is, found {stored!r}"
            )
        _require_written(self.path, stored, self._layout)
        if not self._layout.fills:
            require_stored(len(stored) * expected.itemsize, h5, stored, self.path)
        register_filters(stored)
        try:
            return np.asarray(stored[:])
        except OSError as error:
            raise unreadable(self.path, f"{self._group}/{name}", stored, error) from error


def _names_in(group: h5py.Group) -> list[str]:
    """Return the names of the documents of a group, in their order."""
    names = sorted(group)
    numbered = [_numbered(name) for name in names]
    if len({words for words, _ in numbered}) > 1 or any(words is None for words, _ in numbered):
        return names
    return [name for _, name in sorted(zip((number for _, number in numbered), names, strict=True))]


#: The file of each layout.
_FILES: Final[dict[str, type[OffsetFile | ListFile | DatasetFile]]] = {
    _OFFSETS: OffsetFile,
    _LISTS: ListFile,
    _DATASETS: DatasetFile,
}


def open_ragged(
    paths: Sequence[Path],
    look: Look | None = None,
    *,
    dataset: str | None = None,
    offsets: str | None = None,
    unwritten: str | None = None,
    field_columns: Sequence[str] | None = None,
    rows: str = "documents",
    dtype: str = "auto",
    vocab_size: int = 0,
    max_document_tokens: int | None = None,
) -> IdSource:
    """Open HDF5 files of documents, and folders of them.

    Parameters
    ----------
    paths
        The files and folders.
    look
        The look by which the first of them was found; None: it is looked at.
    dataset
        The dataset of the values or lists, or the group of the datasets; None: found by the content of each file.
    offsets
        The dataset of the offsets (N + 1), the ends (N) or the lengths (N) of the documents; None: offsets or ends,
        found by their content.
    unwritten
        "fill": values that were never written are the fill value of their dataset; None: they are refused.
    field_columns
        The datasets of values that are aligned with the ids; None: all in the group that have their shape.
    rows, dtype, vocab_size, max_document_tokens
        As for `IdSource`.

    Raises
    ------
    ConvertError
        If the datasets of a file are not certain, and have to be named.
    FormatError
        If the offsets do not fit the values, or a file is damaged.
    """
    if unwritten not in (None, FILL):
        raise ArgumentError(
            f"unwritten={unwritten!r} would move the places of documents in their values; pass 'fill', or write them",
            options=["unwritten"],
        )
    files: list[IdFile] = []
    with Look(paths[0]) if look is None else nullcontext(look) as look:
        for each in look.each(ids_at(files_at(paths, *HDF5_SUFFIXES), paths)):
            with each.keeping_handles():
                layout = _layout(each, dataset, offsets)._replace(fills=unwritten == FILL)
                files.append(_FILES[layout.kind](each, layout, ColumnSelection(layout.name, field_columns)))
    found = IdSource(
        files,
        RAGGED,
        ColumnSelection(),
        rows=rows,
        dtype=dtype,
        vocab_size=vocab_size,
        max_document_tokens=max_document_tokens,
    )
    found.identity |= {"dataset": dataset, "offsets": offsets}
    return found


class RaggedFiles(RowsFormat):
    """HDF5 files of documents, and folders of such files that are not a store."""

    def fits(self, look: Look) -> bool:
        path = look.path
        try:
            if look.is_dir:
                first = next(iter(listed(path, *HDF5_SUFFIXES).files), None)
                return first is not None and not (path / INDEX_NAME).exists() and self.fits(look.of(first))
            if not is_hdf5(look):
                return False
            with h5_damage(path):
                h5 = open_h5_for_reading(path, look=look)
            with h5_damage(path), h5:
                return not is_own_file(h5) and bool(layouts_of(h5))
        except (OSError, ZbError):
            return False  # whoever opens it says so

    def recognise(self, look: Look, backend: str = "auto", split: str | None = AUTO_SPLIT) -> Found | None:
        """See `RowsFormat`; a dataset of ids that is named has records, or a stream, whatever else is in the file."""
        found = super().recognise(look, backend, split)
        dataset = self.read_as.dataset
        return found if found is None or dataset is None or names_documents(look, dataset) else None

    def rows(self, found: Sequence[Found], **options: Any) -> IdSource:
        return open_ragged([each.path for each in found], found[0].look, **options)
