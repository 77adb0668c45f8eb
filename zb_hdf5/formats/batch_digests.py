"""The digests that are stored with the batches of a file, and their comparison with these."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ChecksumError, UnverifiableError
from zb_hdf5.files.checked import Crc32Rows, crc32_of
from zb_hdf5.spec import StoreMeta, TokenArray


class Digested(Protocol):
    """Batches with the digests that are stored with them. A `Corpus` has these members."""

    path: Path
    meta: StoreMeta
    sha256: str | None

    @property
    def cure(self) -> str: ...

    def groups(self) -> Iterator[tuple[int, TokenArray]]: ...

    def crc32_rows(self) -> Crc32Rows | None: ...

    def missing_digests(self) -> str: ...

    def other_checks(self) -> list[str]: ...


class BatchDigests:
    """The digests of one file: a sha256 of all batches, a crc32 of each, both, or none.

    Parameters
    ----------
    batches
        The batches as stored, and their digests.
    """

    def __init__(self, batches: Digested) -> None:
        self._batches = batches

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._batches.path)!r})"

    def crc32(self) -> npt.NDArray[np.uint32] | None:
        """Return the crc32 of each batch as stored, or None where none are."""
        rows = self._batches.crc32_rows()
        return None if rows is None else rows.all().copy()  # not a view, which would keep the file open

    def tokens_sha256(self) -> str:
        """Read every batch and return the sha256 of all token bytes, as stored, in batch order."""
        digest = hashlib.sha256()
        for _, batches in self._batches.groups():
            digest.update(batches)
        return digest.hexdigest()

    def compare(self, progress: Callable[[int], None] = lambda tokens: None) -> tuple[str, list[str]]:
        """Read every batch and compare it with all digests that are stored.

        Parameters
        ----------
        progress
            Called with the number of tokens that were just read.

        Returns
        -------
        (sha256, checks)
            The sha256 of the token bytes just read, and the kinds of digest that they were compared with: "crc32",
            "sha256", or none; then the checks of `other_checks`.

        Raises
        ------
        ChecksumError
            If one differs; the message names the first bad batch.
        """
        stored = self.crc32()
        digest = hashlib.sha256()
        for start, batches in self._batches.groups():
            digest.update(batches)
            if stored is not None:
                self._compare_crc32(start, batches, stored[start : start + len(batches)])
            progress(batches.size)
        expected = self._batches.sha256
        found = digest.hexdigest()
        if expected not in (None, found):
            raise ChecksumError(
                f"{self._batches.path}: the file has sha256 {expected}, its tokens give {found}; restore it"
            )
        checks = []
        if stored is not None:
            checks.append("crc32")
        if expected is not None:
            checks.append("sha256")
        return found, checks + self._batches.other_checks()

    def _compare_crc32(self, start: int, batches: TokenArray, expected: npt.NDArray[np.uint32]) -> None:
        """Raise `ChecksumError` if a crc32 differs, of batches that are numbered from `start` on."""
        found = np.array([*map(crc32_of, batches)], np.uint32)
        bad = np.flatnonzero(found != expected)
        if len(bad):
            first = int(bad[0])
            raise ChecksumError(
                f"{self._batches.path}: {self._batches.meta.noun} {start + first:,} is the first bad one: expected "
                f"crc32 {expected[first]:08x}, found {found[first]:08x}; {self._batches.cure}"
            )

    def require(self) -> str:
        """Compare every batch with the stored digests, and return the sha256 just computed.

        Raises
        ------
        ChecksumError
            If one differs.
        UnverifiableError
            If there is nothing to compare with.
        """
        found, checks = self.compare()
        if not checks:
            raise UnverifiableError(f"{self._batches.path}: cannot be verified: {self._batches.missing_digests()}")
        return found
