"""A writer: takes batches in order and publishes one whole file. What every backend's writer has in common."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.digest import TokenDigest, crc32_array
from zb_hdf5.errors import ArgumentError, ClosedError
from zb_hdf5.extents import Extents, Run
from zb_hdf5.publish import PartialFile
from zb_hdf5.reader import GROUP_BYTES, BatchReader
from zb_hdf5.spec import StoreMeta, TokenArray, as_stored

if TYPE_CHECKING:
    from zb_hdf5.digest import GroupDigest, PendingDigest


#: How much is written before the disk is told to begin with it.
WRITE_BACK_BYTES: Final = 32 << 20


class ShardInfo(NamedTuple):
    """What a writer knows of the file it has finished."""

    path: Path
    backend: str
    num_batches: int
    token_count: int
    max_token: int
    sha256: str
    crc32: npt.NDArray[np.uint32]
    runs: tuple[Run, ...] = ()  # where the batches lie, if that is no arithmetic


class BatchWriter(ABC):
    """Takes batches in order and publishes one file: `x.partial` until `finish`, then `x`.

    A context manager: leaving the block normally calls `finish`, an exception calls `abort`. Not thread-safe.

    Parameters
    ----------
    path
        The file to publish.
    meta
        Shape, dtype and origin of the batches.
    expected_batches
        How many will come, where known: lets a backend reserve room. Not a limit.
    overwrite
        Replace an existing file (at the end, by rename); otherwise it is an error.
    durable
        Also flush to disk at each commit, so that committed batches outlive a power loss.
    known_sha256
        For exact copies: the digest that the original has stored. The caller compares `crc32()` with the original's.
    """

    backend: ClassVar[str]
    _file_class: ClassVar[type[PartialFile]] = PartialFile

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: StoreMeta,
        *,
        expected_batches: int = 0,
        overwrite: bool = False,
        durable: bool = False,
        known_sha256: str | None = None,
    ) -> None:
        self.meta = meta
        self.num_batches = 0
        self.token_count = 0
        self.max_token = 0
        self._durable = durable
        self._expected_batches = expected_batches
        self._crc32: list[int] = []
        self._unsent_bytes = 0
        self._open = True
        self._file = self._file_class(path, overwrite=overwrite)
        self._digest = TokenDigest(known_sha256)
        try:
            self._begin()
        except BaseException:
            self.abort()
            raise

    def write(self, batches: npt.ArrayLike) -> None:
        """Append one batch `(B, S)` or several `(count, B, S)` of any integer dtype; they are committed on return.

        Raises
        ------
        ConvertError
            If an id is negative, too large for the stored dtype, or at or above `vocab_size`.
        ArgumentError
            If the shape is another one.
        OSError
            If the disk is full or fails; what was committed before stays committed.
        """
        self._require_open()
        tokens = as_batches(batches, self.meta, self._file.path)
        group = max(1, GROUP_BYTES // self.meta.batch_bytes)
        for start in range(0, len(tokens), group):
            stored = as_stored(
                tokens[start : start + group], self.meta, f"{self._file.path} (batch {self.num_batches:,})"
            )
            digest = self._digest.submit(stored)
            try:
                self._append(stored, digest)
            finally:
                digest.result()  # also after a failure: the caller may then change or free the batches

    def write_from(self, reader: BatchReader, start: int, count: int) -> int:
        """Append consecutive batches of a reader without passing their bytes through this process, if that can be.

        Returns how many were appended and are committed: fewer than `count`, and none in most formats, where the file
        systems do not copy from file to file. `write` the rest. What is digested is what lies in this file: a bit that
        flipped in the original, or on the way, is in `crc32()`.

        Raises
        ------
        ConvertError, OSError
            As `write`.
        ArgumentError
            If the reader has other batches, or fewer.
        """
        self._require_open()
        if (reader.meta.shape, reader.dtype) != (self.meta.shape, self.meta.dtype):
            raise ArgumentError(f"{self._file.path}: expected batches of {self.meta.shape}, found {reader!r}")
        if not 0 <= start <= start + count <= reader.num_batches:
            raise ArgumentError(f"{reader.path}: expected {start + count:,} batches, found {reader.num_batches:,}")
        return 0 if reader.extents is None else self._append_from(reader.path, reader.extents, start, count)

    def _append_from(self, path: Path, extents: Extents, start: int, count: int) -> int:
        """Copy, commit and `_count` batches that lie in another file; return how many."""
        return 0

    def sha256(self) -> str:
        """Hexadecimal sha256 of all token bytes written so far."""
        return self._digest.sha256()

    def crc32(self) -> npt.NDArray[np.uint32]:
        """Return the crc32 of each batch written so far."""
        return crc32_array(self._crc32)

    def finish(self) -> ShardInfo:
        """Complete the file and publish it under its final name."""
        self._require_open()
        self._open = False
        try:
            self._digest.close()
            info = ShardInfo(
                self._file.path, self.backend, self.num_batches, self.token_count, self.max_token,
                self._digest.sha256(), self.crc32(),
            )  # fmt: skip
            info = info._replace(runs=self._complete(info))
        except BaseException:
            self._release()
            self._file.discard()
            raise
        self._file.publish()
        return info

    def abort(self) -> None:
        """Remove the unfinished file. What had the final name before is untouched."""
        if self._open:
            self._open = False
            self._digest.close()
            self._release()
            self._file.discard()

    def _require_open(self) -> None:
        if not self._open:
            raise ClosedError(f"{self._file.path}: this writer was closed")

    def _count(self, batches: TokenArray, digest: GroupDigest) -> None:
        """Take a group that is on disk into the totals."""
        self.num_batches += len(batches)
        self.token_count += batches.size
        self.max_token = max(self.max_token, digest.max_token)
        self._crc32 += digest.crc32
        self._digest.accept(digest)
        self._unsent_bytes += batches.nbytes
        if self._unsent_bytes >= WRITE_BACK_BYTES:
            self._file.start_write_back()
            self._unsent_bytes = 0

    @abstractmethod
    def _begin(self) -> None:
        """Prepare the partial file."""

    @abstractmethod
    def _append(self, batches: TokenArray, digest: PendingDigest) -> None:
        """Write and commit a group, and `_count` it."""

    @abstractmethod
    def _complete(self, info: ShardInfo) -> tuple[Run, ...]:
        """Write what marks the file as whole, and close what is open but the partial's descriptor.

        Returns where the batches lie, if that is no arithmetic.
        """

    @abstractmethod
    def _release(self) -> None:
        """Close what is open but the partial's descriptor, without completing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.finish()


def as_batches(batches: npt.ArrayLike, meta: StoreMeta, path: Path) -> npt.NDArray[Any]:
    """Return one batch `(B, S)` or several `(count, B, S)` as an array of several.

    Raises
    ------
    ArgumentError
        If the shape is another one.
    """
    tokens = np.asarray(batches)
    if tokens.shape == meta.shape:
        tokens = tokens[np.newaxis]
    if tokens.ndim != 3 or tokens.shape[1:] != meta.shape:
        raise ArgumentError(f"{path}: expected batches of shape {meta.shape}, found {tokens.shape}")
    return tokens
