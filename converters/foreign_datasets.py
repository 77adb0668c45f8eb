"""The fields of datasets of HDF5 files of other programs, as a conversion takes them, and their description."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from zb_hdf5.converters.stream_source import require_no_unfit
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.read_as import ReadAs


def with_fields(column: Column, names: Collection[str]) -> Column:
    """Return a column with the fields that are named, and no other."""
    fields = {name: each for name, each in column.fields.items() if name in names}
    meta = replace(column.meta, fields=tuple(field for field in column.meta.fields if field.name in fields))
    return column._replace(meta=meta, fields=fields)


def require_all_fields(columns: Sequence[Column]) -> None:
    """Refuse values that have the name of targets and are no targets; warn of datasets that cannot be fields."""
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
