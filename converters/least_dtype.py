"""The dtype of ids of one byte that nobody names: a larger one for the ids beside them, or for the target."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

import numpy as np

from zb_hdf5.converters.settings import Settings
from zb_hdf5.notes import note
from zb_hdf5.spec import DTYPE_BY_NAME, dtype_of_ids
from zb_hdf5.store.format_list import batch_format, document_targets

#: The words for a dtype that the source decides.
NOT_NAMED: Final = ("auto", "keep")


def larger_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """Return the one of some dtypes of tokens that holds the ids of all."""
    return max(dtypes, key=attrgetter("itemsize"))


def at_least(dtype: np.dtype[Any], settings: Settings) -> np.dtype[Any]:
    """Return the dtype of a source; of one byte a larger one where the ids beside those of the source need it.

    The padding and the boundary token may be beside them. A target without ids of one byte gets two, and so does one
    of another trainer where one byte is not asked for.
    """
    if dtype.itemsize > 1 or settings.target.dtype not in NOT_NAMED:
        return dtype
    added = [settings.layout.pad_id or 0, settings.input.boundary_token_id or 0]
    found = dtype_of_ids(max(added) + 1)
    if found.itemsize > 1:
        return found
    target = settings.target.format
    row = batch_format(target)
    if row is not None and not row.holds_uint8:
        note(f"{settings.target.destination}: ids of one byte become uint16: {row.name} files have no smaller ones")
        return DTYPE_BY_NAME["uint16"]
    return DTYPE_BY_NAME["uint16"] if target in document_targets() else found
