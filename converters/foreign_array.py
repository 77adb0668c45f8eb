"""Datasets of HDF5 files of other programs as arrays of tokens: batches, records or streams."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zb_hdf5.converters.array_source import ArrayFile
from zb_hdf5.converters.stream_source import require_no_unfit
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.h5_tokens import open_stored
from zb_hdf5.formats.inspection import find_foreign_column
from zb_hdf5.read_as import ReadAs
from zb_hdf5.spec import STREAM_LAYOUT
from zb_hdf5.store.verify import require_digests


class ForeignArray(ArrayFile):
    """A dataset of another program as one array of tokens.

    Parameters
    ----------
    column
        The dataset, as a look into its file has found it.
    """

    def __init__(self, column: Column) -> None:
        meta = column.meta
        is_stream = meta.layout == STREAM_LAYOUT
        shape = (column.num_tokens,) if is_stream else (column.num_tokens // meta.seq_len, meta.seq_len)
        fields = {name: ForeignArray(each) for name, each in column.fields.items()}
        super().__init__(column.path, shape, column.dtype, fields)
        self._column = column

    @property
    def reads_alone(self) -> bool:
        return self._column.extents is not None

    def open(self) -> Tokens:
        is_plain = self._column.extents is not None and not isinstance(self.path, RemotePath)
        return open_stored(self._column, "pread" if is_plain else "auto")

    def compare_digests(self) -> None:
        if self._column.sha256 is not None:
            require_digests(self.path, read_as=ReadAs(self._column.name))


def datasets_of(files: Sequence[Path], read_as: ReadAs, known: Mapping[Path, Column]) -> list[Column]:
    """Return the dataset of each file: all have the name of the first one.

    Parameters
    ----------
    known
        The datasets that were found already.
    """
    columns: list[Column] = []
    for file in files:
        columns.append(known.get(file) or find_foreign_column(file, read_as))
        read_as = replace(read_as, dataset=columns[0].name)
    return columns


def with_fields(column: Column, names: Collection[str]) -> Column:
    """Return a column with the fields that are named, and no other."""
    fields = {name: each for name, each in column.fields.items() if name in names}
    meta = replace(column.meta, fields=tuple(field for field in column.meta.fields if field.name in fields))
    return column._replace(meta=meta, fields=fields)


def require_all_fields(columns: Sequence[Column]) -> None:
    """Refuse values named as targets that are none, and warn of others that cannot be fields."""
    for column in columns:
        require_no_unfit(column.path, column.meta)
    if left_out := sorted({name for column in columns for name in column.left_out}):
        warnings.warn(f"{columns[0].path}: left out, as they cannot be fields: {', '.join(left_out)}", stacklevel=2)


def description_of(column: Column, read_as: ReadAs) -> dict[str, Any]:
    """Return the entries of a source in `shards.json` that name the dataset, and how it was read."""
    found: dict[str, Any] = {"dataset": column.name}
    if read_as.channel is not None:
        found |= {"channel": read_as.channel, "field_channels": read_as.field_channels}
    if read_as.unwritten is not None:
        found |= {"unwritten": read_as.unwritten}
    return found
