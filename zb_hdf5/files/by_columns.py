"""Records in Fortran order, which lie in a file by columns."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.tokens import TokenRun, Tokens, Wrapper
from zb_hdf5.spec import TokenArray


class ByColumns(Wrapper):
    """Records in Fortran order: the tokens of one are not beside each other. Whole records are read. See `Tokens`.

    Parameters
    ----------
    tokens
        The tokens in the order of the file.
    path, byte_offset
        The file, which is mapped, and the place of the first token.
    record_tokens
        The tokens of a record.
    """

    def __init__(self, tokens: Tokens, path: Path, byte_offset: int, record_tokens: int) -> None:
        self._wrap(tokens)
        shape = (tokens.num_tokens // record_tokens, record_tokens)
        self._records = np.memmap(path, tokens.dtype, "r", byte_offset, shape, "F").view(np.ndarray)

    def read(self, runs: Iterable[TokenRun]) -> None:
        length = self._records.shape[1]
        for start, out in runs:
            out.reshape(-1, length)[...] = self._records[start // length :][: len(out) // length]

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        out[...] = self._records[starts // self._records.shape[1]]
