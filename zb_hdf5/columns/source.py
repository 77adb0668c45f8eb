"""Sources give a reader its bytes: their common functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ClosedError
from zb_hdf5.spec import StoreMeta, TokenArray
from zb_hdf5.token_values import signed


class BatchSource(Protocol):
    """Gives a reader its bytes: from extents of a file, or through h5py."""

    access: str
    wants_threads: bool  # whether reading in several threads is faster also where nothing waits for a disk

    @property
    def in_flight(self) -> tuple[int, int] | None:
        """Bytes and reads to keep under way, of what comes from a server; None: of a disk."""

    def read(self, index: int) -> TokenArray:
        """Return batch `index`, read-only."""

    def read_into(self, index: int, out: TokenArray) -> None:
        """Fill `out`, of the stored shape and dtype."""

    def read_range_into(self, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, B, S)`, with consecutive batches."""

    def gather_into(self, records: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(count, L)`, with records of L tokens (a divisor of S), numbered in batch order."""

    def read_private(self, index: int) -> npt.NDArray[Any]:
        """Return batch `index`, writable, of the signed dtype of the same size; the file never changes.

        Where there is a mapping, without a copy.
        """

    def is_cached(self, index: int) -> bool:
        """Return whether batch `index` can be read without waiting for a disk."""

    def will_need(self, index: int, count: int = 1) -> None:
        """Have `count` batches from `index` on read into the page cache, without waiting for them."""

    def close(self) -> None:
        """Close files and mappings."""


class CopyingSource(ABC):
    """A source that maps nothing: whatever is read is a fresh copy. See `BatchSource` for the rest of its functions."""

    _meta: StoreMeta
    wants_threads = False
    in_flight: tuple[int, int] | None = None

    @abstractmethod
    def read_range_into(self, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, B, S)`, with consecutive batches."""

    def read_into(self, index: int, out: TokenArray) -> None:
        self.read_range_into(index, out[np.newaxis])

    def _read(self, index: int) -> TokenArray:
        tokens = np.empty(self._meta.shape, self._meta.dtype)
        self.read_into(index, tokens)
        return tokens

    def read(self, index: int) -> TokenArray:
        tokens = self._read(index)
        tokens.flags.writeable = False
        return tokens

    def read_private(self, index: int) -> npt.NDArray[Any]:
        tokens = self._read(index)
        return tokens.view(signed(tokens.dtype))


class ClosedSource:
    """The source of a closed reader: every use is an error, and open readers pay nothing for the check."""

    def __init__(self, path: Path, access: str) -> None:
        self._path, self.access, self.wants_threads, self.in_flight = path, access, False, None

    def _refuse(self, *_: object) -> Any:
        raise ClosedError(f"{self._path}: this reader was closed")

    read = read_into = read_range_into = gather_into = read_private = is_cached = will_need = _refuse

    def close(self) -> None:
        pass


def gather_from_batches(
    read: Callable[[int], TokenArray], meta: StoreMeta, records: npt.NDArray[np.int64], out: TokenArray
) -> None:
    """Gather records by whole batches, each read once: for sources that cannot read less."""
    per_batch = meta.batch_tokens // out.shape[1]
    batches = records // per_batch
    for number in np.unique(batches).tolist():
        here = np.flatnonzero(batches == number)
        out[here] = read(number).reshape(per_batch, -1)[records[here] % per_batch]
