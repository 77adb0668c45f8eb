"""An HDF5 file of lists of ids, of variable length, each of which is a document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import FormatError
from zb_hdf5.files.look import Look
from zb_hdf5.formats.id_source import ColumnSelection, IdRows, RowBlock
from zb_hdf5.hdf5.h5_chunks import register_filters, unreadable
from zb_hdf5.hdf5.h5_dataset import own_dataset, require_stored
from zb_hdf5.packages import h5py
from zb_hdf5.trainers.ragged_file import RaggedFile
from zb_hdf5.trainers.ragged_layout import Layout, group_of, opened

#: Lists that are read together.
_BLOCK_LISTS: Final = 1 << 8
#: Bytes of a list in its dataset: its length and its place.
_LIST_BYTES: Final = 16


class ListFile(RaggedFile):
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
        group = group_of(layout.name)
        with opened(path, look) as h5:
            stored = own_dataset(h5, path, layout.name)
            if stored is None:
                raise FormatError(f"{path}: expected a dataset {layout.name!r}, found none")
            kinds: dict[str, np.dtype[Any] | str] = {layout.name: _base_of(stored)}
            for name in h5[group or "/"]:
                each = None if name == layout.name.rpartition("/")[2] else _dataset_or_none(h5, path, f"{group}/{name}")
                if each is not None and each.shape == stored.shape and h5py.check_vlen_dtype(each.dtype) is not None:
                    kinds[name] = _base_of(each)
            layout.require_written(path, stored)
            require_stored(len(stored) * _LIST_BYTES, h5, stored, path)
            self.columns = wanted.columns(path, kinds)
            for name in self.columns.lists[1:]:
                layout.require_written(path, h5[f"{group}/{name}"])
            self._cut(len(stored), self.identity.num_bytes)

    def _documents(self, first: int, stop: int) -> Iterator[IdRows]:
        block = RowBlock(self.path, self.columns, first + 1)
        group = group_of(self._name)
        columns = self.columns
        more = [*columns.lists[1:], *([columns.lengths] if columns.lengths else [])]
        names = [self._name, *(f"{group}/{name}" for name in more)]
        with opened(self.path) as h5:
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
