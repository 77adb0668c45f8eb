"""The interface of every writer of batches, and the facts that a writer returns about a finished file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.codecs import CompressedTokens
from zb_hdf5.files.extents import Run
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.spec import NO_SHA256, NOT_KNOWN, StoreMeta

#: The values of fields: an array for each name, or one structured array.
FieldArrays: TypeAlias = Mapping[str, npt.ArrayLike] | npt.NDArray[Any]
#: Name of a column -> where its chunks lie.
Columns: TypeAlias = dict[str, tuple[Run, ...]]


class FieldDigest(NamedTuple):
    """What tells the column of a field: the size of its file, the sha256 of its values, the crc32 of its crc32 rows.

    Without arguments: that of a shard that still grows.
    """

    num_bytes: int = 0
    sha256: str = NO_SHA256
    crc32: int = NOT_KNOWN


class ShardInfo(NamedTuple):
    """The facts about a file, or a store, that a writer has finished."""

    path: Path
    backend: str
    num_batches: int
    token_count: int
    max_token: int
    sha256: str
    crc32: npt.NDArray[np.uint32]
    columns: Columns = {}  # noqa: RUF012 - nobody changes it
    document_count: int | None = None
    fields: dict[str, FieldDigest] = {}  # noqa: RUF012 - nobody changes it
    compressed: CompressedTokens | None = None


class BatchWriter(ABC):
    """Takes batches in order and commits them: the functions of every writer, of one file or of a live store.

    A context manager: leaving the block normally calls `close`, an exception calls `abort`. Not thread-safe.

    Attributes
    ----------
    meta
        Shape, dtype and origin of the batches.
    num_batches, token_count, max_token
        Of the committed batches.
    """

    backend: ClassVar[str]
    meta: StoreMeta
    _open: bool

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """Batches that are committed."""

    @property
    @abstractmethod
    def token_count(self) -> int:
        """Tokens that are committed."""

    @property
    @abstractmethod
    def max_token(self) -> int:
        """The largest id among them, 0 if there is none."""

    @abstractmethod
    def write(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> None:
        """Append one batch `(B, S)` or several `(count, B, S)` of any integer dtype; they are committed on return.

        Parameters
        ----------
        fields
            The values of exactly the fields in `meta.fields`: a dict of arrays, or a structured array. Each has the
            shape of the batches, and behind it that of the values of one token.

        Raises
        ------
        ConvertError
            If an id is negative, too large for the stored dtype, or at or above `vocab_size`.
        ArgumentError
            If a shape is another one, or the fields are not those of the store.
        OSError
            If the disk is full or fails; committed batches stay committed.
        """

    def append(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> Callable[[], None]:
        """Append batches as `write` does, and return before all of them are digested.

        They are committed on return, and must stay unchanged until the function that is returned has been called: it
        waits for the digests. So one group is hashed while the next is written.
        """
        self.write(batches, fields)
        return nothing_to_wait_for

    @abstractmethod
    def write_from(self, reader: BatchReader, start: int, count: int) -> int:
        """Append consecutive batches of a reader without passing their bytes through this process, if that can be.

        Returns how many were appended and are committed: fewer than `count` where the file systems do not copy from
        file to file, or the format has no place for them in a row. `write` the rest. What is digested is what lies in
        this file: a bit that flipped in the original, or on the way, is in `crc32()`. Batches that have fields are
        not copied in this way.

        Raises
        ------
        ConvertError, OSError
            As `write`.
        ArgumentError
            If the reader has other batches, or fewer.
        """

    @abstractmethod
    def sha256(self) -> str:
        """Hexadecimal digest of all batches so far: over all token bytes; of a store over its shards' digests."""

    @abstractmethod
    def crc32(self) -> npt.NDArray[np.uint32]:
        """Return the crc32 of each batch written so far."""

    @abstractmethod
    def finish(self) -> ShardInfo:
        """Complete the file or store, and give it its final name if it does not have it yet."""

    @abstractmethod
    def abort(self) -> None:
        """End without completing; nothing to do where the writer has ended."""

    def close(self) -> None:
        """Finish; nothing to do where the writer has ended."""
        if self._open:
            self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        else:
            self.close()


def nothing_to_wait_for() -> None:
    """Return at once: all is digested."""
