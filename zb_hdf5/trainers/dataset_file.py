"""An HDF5 file with a group of datasets, each of which is a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError
from zb_hdf5.files.look import Look
from zb_hdf5.formats.id_source import ColumnSelection, IdRows, RowBlock
from zb_hdf5.hdf5.h5_chunks import register_filters, unreadable
from zb_hdf5.hdf5.h5_dataset import own_dataset, require_stored
from zb_hdf5.packages import h5py
from zb_hdf5.trainers.ragged_file import RaggedFile
from zb_hdf5.trainers.ragged_layout import Layout, numbered, opened


class DatasetFile(RaggedFile):
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
        with opened(path, look) as h5:
            names = _names_in(h5[self._group])
            if not names:
                raise FormatError(f"{path}: {self._group}: expected a dataset for each document, found none")
            first = own_dataset(h5, path, f"{self._group}/{names[0]}")
            kinds: Mapping[str, np.dtype[Any] | str] = {} if first is None else {self._group: first.dtype}
            self.columns = wanted.columns(path, kinds)
        self._cut(len(names), self.identity.num_bytes)

    def _documents(self, first: int, stop: int) -> Iterator[IdRows]:
        block = RowBlock(self.path, self.columns, first + 1)
        with opened(self.path) as h5:
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
        self._layout.require_written(self.path, stored)
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
    parts = [numbered(name) for name in names]
    if len({words for words, _ in parts}) > 1 or any(words is None for words, _ in parts):
        return names
    return [name for _, name in sorted(zip((number for _, number in parts), names, strict=True))]
