"""Ids as another program has stored them: integers of any dtype, each of which must be an id of ours."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ConvertError
from zb_hdf5.files.tokens import StoredIds, TokenRun, Tokens, Wrapper
from zb_hdf5.spec import StoreMeta, TokenArray, token_limit

#: Bytes that are read at once where ids become narrower: the array is kept for the next read.
PIECE_BYTES: Final = 1 << 18
_local = threading.local()


class ForeignIds(Wrapper):
    """Ids of any integer dtype, read as our ids: each that is read is compared with the range. See `Tokens`.

    Ids of the same size are read into place. All are compared as unsigned integers: a negative id is a large
    one: the maximum of what was read is enough, and nothing is copied for it.

    Parameters
    ----------
    tokens
        The ids as they are stored.
    meta
        The dtype of the ids as they are read, and the size of the vocabulary, if it is known.
    name
        Their name in messages; "": that of the tokens.
    """

    def __init__(self, tokens: Tokens, meta: StoreMeta, name: str = "") -> None:
        self._wrap(tokens)
        self.name = name or tokens.name
        stored = tokens.dtype
        self.dtype = meta.dtype
        self._meta = meta
        self._unsigned = np.dtype(f"{stored.byteorder}u{stored.itemsize}")
        self._limit = min(int(np.iinfo(stored).max), token_limit(meta.dtype, meta.vocab_size))
        self._is_limited = self._limit < int(np.iinfo(self._unsigned).max)
        # the order of the bytes must be the same, too
        self._is_in_place = stored.itemsize == meta.dtype.itemsize and stored.newbyteorder("=") == stored

    def read(self, runs: Iterable[TokenRun]) -> None:
        if not self._is_in_place:
            for start, out in runs:
                self._read_narrowed(start, out)
            return
        stored = [(start, out.view(self.tokens.dtype)) for start, out in runs]
        self.tokens.read(stored)
        for start, ids in stored:
            self._require_ids(ids, start)

    def _read_narrowed(self, start: int, out: TokenArray) -> None:
        step = PIECE_BYTES // self.tokens.dtype.itemsize
        for begin in range(0, len(out), step):
            part = out[begin : begin + step]
            ids = self._scratch(len(part))
            self.tokens.read([(start + begin, ids)])
            self._require_ids(ids, start + begin)
            part[...] = ids

    def _scratch(self, count: int) -> TokenArray:
        """Return an array of this thread, which the next call fills again."""
        kept: npt.NDArray[np.uint8] | None = getattr(_local, "scratch", None)
        if kept is None:
            kept = _local.scratch = np.empty(PIECE_BYTES, np.uint8)
        return kept[: count * self.tokens.dtype.itemsize].view(self.tokens.dtype)

    def gather(self, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        ids = out.view(self.tokens.dtype) if self._is_in_place else np.empty(out.shape, self.tokens.dtype)
        self.tokens.gather(starts, ids)
        if self._is_outside(ids):
            for start, row in zip(starts.tolist(), ids, strict=True):
                self._require_ids(row, start)
        if not self._is_in_place:
            out[...] = ids

    def view(self, start: int, count: int, private: bool = False) -> TokenArray | None:
        """Return consecutive ids as a view, as `Tokens.view` does; all are compared, so their pages are read."""
        ids = self.tokens.view(start, count) if self._is_in_place else None
        if ids is None:
            return None
        self._require_ids(ids, start)  # as the file has them: the values of a private view may have been changed
        return self.tokens.view(start, count, private=True) if private else ids.view(self.dtype)

    def flat(self) -> TokenArray | None:
        """Return None: all ids would be compared."""
        return None

    def stored_ids(self) -> StoredIds | None:
        ids = self.tokens.flat()
        if ids is None:
            return None
        return StoredIds(ids.view(self._unsigned), self._limit if self._is_limited else None)

    def _is_outside(self, ids: TokenArray) -> bool:
        return self._is_limited and int(np.maximum.reduce(ids.view(self._unsigned), None, initial=0)) > self._limit

    def _require_ids(self, ids: TokenArray, start: int) -> None:
        """Raise `ConvertError` for the first of consecutive values that is not an id."""
        if self._is_outside(ids):
            bad = int((ids.view(self._unsigned) > self._limit).argmax())
            raise ConvertError(
                f"{self.name}: expected token ids in 0..{self._limit:,}, found {ids[bad]:,} at index {start + bad:,}"
            )
