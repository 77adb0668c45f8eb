"""crc32 per batch, sha256 per shard and the largest token, computed in two threads during the write.

A commit needs the crc32 of its batches, and not the sha256, which takes ten times as long: that of one group is
computed while the next ones are written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.spec import TokenArray

try:  # by the processor's carry-less multiplication: 64 KiB in 1.4 µs, where zlib takes 19
    from isal.isal_zlib import crc32
except ImportError:  # it has no wheel for this processor
    from zlib import crc32

#: `zlib.crc32`: of any C-contiguous buffer, from a start value on. It releases the interpreter lock above 5 KiB.
crc32_of: Final[Callable[..., int]] = crc32


#: Bytes that fit into the cache of one processor core.
CACHED_BYTES: Final = 512 << 10


class GroupDigest(NamedTuple):
    """The digests of one group of batches, and the running sha256 that will include it."""

    crc32: list[int]
    max_token: int
    sha256: Future[Any]


class PendingDigest:
    """The digest of a group, on its way in two threads."""

    def __init__(self, sha256: Future[Any], rest: Future[tuple[list[int], int]]) -> None:
        self._sha256, self._rest = sha256, rest

    def result(self) -> GroupDigest:
        """Wait for crc32 and largest token: what a commit needs."""
        crc32, max_token = self._rest.result()
        return GroupDigest(crc32, max_token, self._sha256)

    def wait(self) -> None:
        """Wait for both threads; from then on the group may change."""
        wait((self._rest, self._sha256))


class TokenDigest:
    """Digests of batches of tokens as stored, in order, without padding."""

    # one caller submits a group, leaves it unchanged until `wait` returns, and accepts it before it submits the next;
    # known_sha256 is for copies, whose every crc32 is compared: it is not computed then

    def __init__(self, known_sha256: str | None = None) -> None:
        self._known_sha256 = known_sha256
        self._sha256: Future[Any] = Future()
        self._sha256.set_result(hashlib.sha256())
        self._hashing, self._rest = (ThreadPoolExecutor(1, thread_name_prefix="zb-digest") for _ in range(2))

    def submit(self, batches: TokenArray) -> PendingDigest:
        """Start digesting `batches`, shape `(count, B, S)`, C-contiguous and of the stored dtype."""
        sha256 = self._sha256
        if self._known_sha256 is None:
            sha256 = self._hashing.submit(_hash, sha256, batches)
        return PendingDigest(sha256, self._rest.submit(_crc32s_and_max, batches))

    def accept(self, group: GroupDigest) -> None:
        """Add a group that is on disk to the running sha256. A group whose write failed is never accepted."""
        self._sha256 = group.sha256

    def sha256(self) -> str:
        """Hexadecimal sha256 of all accepted groups."""
        return self._known_sha256 or self._sha256.result().hexdigest()

    def close(self) -> None:
        """Wait for the threads and end them."""
        self._hashing.shutdown(wait=True)
        self._rest.shutdown(wait=True)


def _hash(before: Future[Any], batches: TokenArray) -> Any:
    sha256 = before.result().copy()
    sha256.update(batches)
    return sha256


def _crc32s_and_max(batches: TokenArray) -> tuple[list[int], int]:
    found: list[int] = []
    max_token = 0
    step = max(1, CACHED_BYTES // max(1, batches[:1].nbytes))
    for start in range(0, len(batches), step):  # twice over what is in the cache, not twice over the memory
        part = batches[start : start + step]
        found += batch_crc32s(part)
        max_token = max(max_token, int(part.max(initial=0)))
    return found, max_token


def batch_crc32s(batches: TokenArray) -> list[int]:
    """Return the crc32 of each batch's token bytes."""
    return [crc32_of(batch) for batch in batches]


def crc32_array(values: list[int]) -> npt.NDArray[np.uint32]:
    """Return crc32 values as they are stored: little-endian uint32."""
    return np.array(values, dtype="<u4")
