"""Arrays of tokens from one byte of a file on, in C or Fortran order, as a header or a look has found them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.converters.array_source import ArrayFile
from zb_hdf5.errors import ConvertError
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.files.tokens import TokenRun, Tokens, Wrapper, open_extents
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.npy import read_npy_header
from zb_hdf5.spec import TokenArray, require_integers

#: Shape, Fortran order, dtype, and byte offset of the data.
Header: TypeAlias = tuple[tuple[int, ...], bool, np.dtype[Any], int]


class ArrayAt(ArrayFile):
    """An array in C or Fortran order from one byte of a file on, as the header of the file has it.

    Parameters
    ----------
    path
        The file.
    header
        Its header.
    """

    def __init__(self, path: Path, header: Header) -> None:
        shape, fortran, dtype, byte_offset = header
        if len(shape) not in (1, 2):
            raise ConvertError(f"{path}: expected a 1-D stream or 2-D records, found shape {shape}")
        require_integers(np.empty(0, dtype), path)
        super().__init__(path, shape, dtype)
        self.byte_offset = byte_offset
        self._fortran = fortran and len(shape) == 2

    @classmethod
    def of(cls, found: FlatFacts) -> ArrayAt:
        """Return the ids of a flat file as one stream."""
        return cls(found.path, ((found.num_tokens,), False, found.dtype, found.byte_offset))

    def open(self) -> Tokens:
        num_bytes = self.num_tokens * self.dtype.itemsize
        extents = Extents([Run(self.byte_offset, num_bytes, 1)] if num_bytes else [], num_bytes)
        tokens = open_extents(self.path, extents, self.dtype, self.num_tokens, "pread")
        return ByColumns(tokens, self.map("F")) if self._fortran else tokens

    def map(self, order: Any = "C") -> TokenArray:
        """Map the array."""
        if not self.num_tokens:
            return np.empty(self.shape, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.byte_offset, self.shape, order).view(np.ndarray)


class ByColumns(Wrapper):
    """Records in Fortran order: the tokens of one are not beside each other. Whole records are read. See `Tokens`.

    Parameters
    ----------
    tokens
        The tokens in the order of the file.
    records
        A mapping of the same file, shape (records, tokens of each).
    """

    def __init__(self, tokens: Tokens, records: TokenArray) -> None:
        self._wrap(tokens)
        self._records = records

    def read(self, runs: Iterable[TokenRun]) -> None:
        length = self._records.shape[1]
        for start, out in runs:
            out.reshape(-1, length)[...] = self._records[start // length :][: len(out) // length]

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        out[...] = self._records[starts // self._records.shape[1]]


def npy_arrays(files: Sequence[Path]) -> list[ArrayAt]:
    """Return the arrays of `.npy` files."""
    return [ArrayAt(path, read_npy_header(path)) for path in files]
