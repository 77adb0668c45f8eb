"""The progress of the check of one file: the tokens that there are to compare, and those that are compared."""

from __future__ import annotations

from functools import partial

from zb_hdf5.spec import NOT_KNOWN, StoreMeta
from zb_hdf5.store.digests import Count


class CheckProgress:
    """The tokens of one file that are checked: one counts when the values of its fields are, too.

    Parameters
    ----------
    progress, announce
        As for `verify_store`.
    num_tokens
        The tokens that were announced; -1: they are not known before the file is open.
    """

    def __init__(self, progress: Count, announce: Count, num_tokens: int) -> None:
        self._progress = progress
        self._announce = announce
        self._num_tokens = num_tokens
        self._token_bytes = 1
        self._num_bytes = 0
        self._told = 0

    def found(self, num_tokens: int) -> None:
        """Announce the tokens of the file that is open now, unless they are announced already."""
        if self._num_tokens == NOT_KNOWN:
            self._num_tokens = num_tokens
            self._announce(num_tokens)

    def columns(self, meta: StoreMeta) -> list[tuple[str | None, Count]]:
        """Return each column, None for the tokens, and its progress, which is called with the values that were read."""
        sizes: list[tuple[str | None, int]] = [(None, meta.dtype.itemsize)]
        sizes += [(each.name, each.dtype.itemsize) for each in meta.fields]
        self._token_bytes = meta.dtype.itemsize + sum(each.dtype.itemsize * each.size for each in meta.fields)
        return [(name, partial(self._read, size)) for name, size in sizes]

    def _read(self, value_bytes: int, num_values: int) -> None:
        self._num_bytes += num_values * value_bytes
        self._reach(self._num_bytes // self._token_bytes)

    def end(self) -> None:
        """Count all tokens as checked, with those that are skipped after a bad one."""
        self._reach(self._num_tokens)

    def _reach(self, num_tokens: int) -> None:
        if num_tokens > self._told:
            self._progress(num_tokens - self._told)
            self._told = num_tokens
