"""crc32 per batch, sha256 per shard and the largest token, computed in one thread beside the write."""

from __future__ import annotations

import hashlib
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[Any]


class GroupDigest(NamedTuple):
    """What was computed of one group of batches, and the running sha256 that includes it."""

    crc32: list[int]
    max_token: int
    sha256: Any


class TokenDigest:
    """Digests of batches of tokens as stored, in order, without padding.

    `hashlib`, `zlib` and numpy release the interpreter lock, so `submit` overlaps with the caller's writing. Not
    thread-safe: one caller submits a group, leaves it unchanged until its result is there, and accepts it before it
    submits the next.
    """

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zb-digest")

    def submit(self, batches: TokenArray) -> Future[GroupDigest]:
        """Start digesting `batches`, shape `(count, B, S)`, C-contiguous and of the stored dtype."""
        return self._pool.submit(self._digest, batches)

    def _digest(self, batches: TokenArray) -> GroupDigest:
        sha256 = self._sha256.copy()
        sha256.update(batches)
        return GroupDigest(batch_crc32s(batches), int(batches.max(initial=0)), sha256)

    def accept(self, group: GroupDigest) -> None:
        """Take a group into the running sha256: it is on disk. A group that failed to get there is never accepted."""
        self._sha256 = group.sha256

    def sha256(self) -> str:
        """Hexadecimal sha256 of all accepted groups."""
        return self._sha256.hexdigest()

    def close(self) -> None:
        """Wait for the thread and end it."""
        self._pool.shutdown(wait=True)


def batch_crc32s(batches: TokenArray) -> list[int]:
    """Return `zlib.crc32` of each batch's token bytes."""
    return [zlib.crc32(batch) for batch in batches]


def crc32_array(values: list[int]) -> npt.NDArray[np.uint32]:
    """Return crc32 values as they are stored: little-endian uint32."""
    return np.array(values, dtype="<u4")
