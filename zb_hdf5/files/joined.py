"""Several files as one array: their mappings lie side by side in one range of addresses.

A gather of records that lie in many files is then one call of numpy, as if they lay in one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from os import SEEK_END, lseek
from typing import Any

import numpy as np

from zb_hdf5.files.extent_file import ExtentFile
from zb_hdf5.files.mapping import Place, map_side_by_side
from zb_hdf5.spec import TokenArray


class JoinedFiles:
    """The tokens of several files, in the order of the files. Thread-safe; usable after fork; not to be pickled.

    The files stay open for as long as this lives, the mapping for as long as an array of it does.
    """

    def __init__(self, files: Sequence[ExtentFile], places: Sequence[list[Place]], tokens: TokenArray) -> None:
        self._rows = tokens.reshape(1, -1)
        self._ends = [(file, own[0][0], file.extents.end) for file, own in zip(files, places, strict=True)]

    def rows(self, length: int) -> TokenArray:
        """Return all tokens as rows of `length`, read-only.

        Raises
        ------
        IncompleteError
            If a file was cut short since: to touch its mapping would be a bus error.
        """
        for file, fd, end in self._ends:
            if lseek(fd, 0, SEEK_END) < end:
                file.flat()  # says so
        rows = self._rows
        if rows.shape[1] != length:
            rows = self._rows = rows.reshape(-1, length)
        return rows


def join(files: Sequence[ExtentFile], dtype: np.dtype[Any]) -> JoinedFiles | None:
    """Map files side by side; None where one may not be mapped, or does not lie in whole pages."""
    places = [file.flat_places for file in files]
    if not all(places):
        return None
    tokens = map_side_by_side(list(chain.from_iterable(places)))
    return None if tokens is None else JoinedFiles(files, places, tokens.view(dtype))
