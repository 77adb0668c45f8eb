"""An HDF5 file of values, and of the offsets, the ends or the lengths of the documents in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ConvertError, FormatError, Remedy, counted
from zb_hdf5.files.look import Look
from zb_hdf5.files.ranges import LocalFile
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.h5_tokens import open_stored
from zb_hdf5.formats.id_source import BLOCK_OF_IDS, ColumnSelection, IdRows
from zb_hdf5.formats.inspection import find_column
from zb_hdf5.hdf5.written_rows import never_written
from zb_hdf5.read_as import FILL, ReadAs
from zb_hdf5.spec import STREAM_LAYOUT
from zb_hdf5.trainers.ragged_file import RaggedFile
from zb_hdf5.trainers.ragged_layout import Layout, opened

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
#: Documents whose offsets are read together.
_BLOCK_DOCUMENTS: Final = 1 << 14
#: Lengths that are added up together, and the largest one that is believed: their sum is not an overflow.
_BLOCK_LENGTHS: Final = 1 << 17
_MAX_LENGTH: Final = 1 << 45


class OffsetFile(RaggedFile):
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


def _are_lengths(found: npt.NDArray[np.int64]) -> bool:
    """Return whether numbers may be the lengths of documents."""
    return bool(((found >= 0) & (found <= _MAX_LENGTH)).all())


def _require_ends(path: Path, columns: Sequence[Column]) -> None:
    """Raise `FormatError` for the first column whose end was never written, of those that do not fit together."""
    for column in columns:
        if column.kept is not None:
            with opened(path) as h5:
                stored = h5[column.name]
                raise never_written(path, stored, column.kept, len(stored), Remedy.FILL)


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
