"""The writers of batches: their interface, and the writer of one file, which is digested and published whole."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ClosedError
from zb_hdf5.field import TOKEN
from zb_hdf5.files.checked import GROUP_BYTES, GroupDigest, TokenDigest
from zb_hdf5.files.codecs import CompressedTokens
from zb_hdf5.files.forks import generation
from zb_hdf5.files.paths import local_path, on_failure
from zb_hdf5.files.publishing import PartialFile, disk_errors
from zb_hdf5.files.ranges import Run
from zb_hdf5.signals import deferred_signals
from zb_hdf5.spec import NO_SHA256, NOT_KNOWN, StoreMeta, TokenArray, as_stored, sidecars_of

#: The values of fields: an array for each name, or one structured array.
FieldArrays: TypeAlias = Mapping[str, npt.ArrayLike] | npt.NDArray[Any]
#: Bytes that are written before the disk has to begin with them.
WRITE_BACK_BYTES: Final = 32 << 20
#: Groups that are committed while their sha256 is still to come.
GROUPS_BEHIND: Final = 3


class FieldDigest(NamedTuple):
    """Size of the file of a field, sha256 of its values, crc32 of its crc32 rows; by default of a shard that grows."""

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
    columns: dict[str, tuple[Run, ...]] = {}  # noqa: RUF012 - the runs of the chunks of each; nobody changes it
    document_count: int | None = None
    fields: dict[str, FieldDigest] = {}  # noqa: RUF012 - nobody changes it
    compressed: CompressedTokens | None = None


class Writer(ABC):
    """The end of every writer. A context manager: leaving the block normally calls `close`, an exception `abort`.

    It belongs to the process that has made it. The child of a fork gets a `ClosedError` for every use, and an exception
    that leaves the block there passes as it is: the file is the parent's.
    """

    meta: StoreMeta
    token_count = max_token = 0
    _open = True
    _crc32: MutableSequence[int]  # of the committed batches or chunks, 4 bytes each

    def __init__(self) -> None:
        self._generation = generation()

    def _require_own_process(self, path: Path) -> None:
        """Raise `ClosedError` in the child of a fork, which has none of the threads that compute digests."""
        if self._generation != generation():
            raise ClosedError(
                f"{path}: this writer belongs to the process that has made it, and not to its child: write there, or "
                "make another writer in the child"
            )

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
        if kind is None:
            self.close()
        elif self._generation == generation():
            self.abort()


class BatchWriter(Writer):
    """Takes batches in order and commits them: the functions of every writer, of one file or of a live store.

    A context manager: leaving the block normally calls `close`, an exception calls `abort`. Not thread-safe.

    Attributes
    ----------
    meta
        Shape, dtype and origin of the batches.
    num_batches, token_count, max_token
        Counts of the committed batches, and the largest id among them, 0 if there is none.
    """

    backend: ClassVar[str]
    num_batches = 0

    @abstractmethod
    def write(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> None:
        """Append one batch `(B, S)` or several `(count, B, S)` of any integer dtype; they are committed on return.

        Parameters
        ----------
        fields
            The values of exactly the fields in `meta.fields`: a dict of arrays, or a structured array. Each has the
            shape of the batches, followed by that of the values of one token.

        Raises
        ------
        ConvertError
            If an id is negative, too large for the stored dtype, or at or above `vocab_size`.
        ArgumentError
            If a shape is another one, or the store has other fields.
        OSError
            If the disk is full or fails; committed batches stay committed.
        """

    def append(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> Callable[[], None]:
        """Append batches as `write` does, and return before all of them are digested.

        They are committed on return, and must stay unchanged until the function that is returned has been called: it
        waits for the digests. So one group is hashed while the next is written.
        """
        self.write(batches, fields)
        return lambda: None

    @abstractmethod
    def sha256(self) -> str:
        """Hexadecimal digest of all batches so far: over all token bytes; of a store over its shards' digests."""

    def crc32(self) -> npt.NDArray[np.uint32]:
        """Return the crc32 of each batch written so far."""
        return np.array(self._crc32, "<u4")


class TokenWriter(Writer):
    """Publishes one file of tokens: `x.partial` until `finish`, then `x`. The base of the writers of all formats.

    Parameters
    ----------
    path
        The file to publish.
    meta
        Shape, dtype and origin of the tokens.
    overwrite
        Replace an existing file at the end, by rename; otherwise it is an error.
    durable
        Flush each commit to the disk.
    known_sha256
        The digest of the original of an exact copy, whose crc32 rows the caller compares; None: it is computed.
    origin
        "source", "shuffle" and "split" as in `shards.json`, for a format that keeps them.
    commit_bytes
        Commit when at least so many bytes of tokens were written since; 0: in each call.
    """

    backend: ClassVar[str]
    _expected_batches = 0
    _keeps_partial = False  # of a file that is not finished

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: StoreMeta,
        *,
        overwrite: bool = False,
        durable: bool = False,
        known_sha256: str | None = None,
        origin: Mapping[str, Any] | None = None,
        commit_bytes: int = 0,
    ) -> None:
        super().__init__()
        self.meta = meta
        self._durable = durable
        self._origin = origin or {}
        self._commit_bytes = commit_bytes
        self._crc32 = array("I")
        with ExitStack() as undo, deferred_signals():  # a signal is met when `abort` would remove the file
            self._file = PartialFile(path, overwrite=overwrite, sidecars=sidecars_of(local_path(path)))
            self._sidecars: list[PartialFile] = []
            self._digest = TokenDigest(known_sha256)
            undo.enter_context(on_failure(self.abort))
            with disk_errors(self._file.partial_path):
                self._begin()

    def __repr__(self) -> str:
        state = "open" if self._open else "ended"
        facts = f"dtype={self.meta.dtype.name}, token_count={self.token_count}"
        return f"{type(self).__name__}({str(self._file.path)!r}, {facts}, {state})"

    def finish(self) -> ShardInfo:
        """Complete the file and publish it under its final name."""
        self._require_open()
        self._open = False
        with on_failure(self._end_unpublished):
            self._write_rest()
            self._digest.close()
            info = ShardInfo(
                self._file.path,
                self.backend,
                len(self._crc32),
                self.token_count,
                self.max_token,
                self._digest.sha256(),
                np.array(self._crc32, "<u4"),
            )
            with disk_errors(self._file.partial_path):
                info = self._complete(info)
            self._file.publish(self._sidecars)
        return info

    def begin_sidecar(self, path: Path) -> PartialFile:
        """Begin a sidecar of this file, which gets its name together with it, and is removed if this writer fails.

        Parameters
        ----------
        path
            One of `sidecars_of` the file. It may exist, and is replaced.
        """
        with deferred_signals():
            self._sidecars.append(PartialFile(path, overwrite=True))
        return self._sidecars[-1]

    def abort(self) -> None:
        """Remove the unfinished file. A file with the final name is untouched."""
        self._require_own_process(self._file.path)
        if self._open:
            self._open = False
            self._end_unpublished()

    def _end_unpublished(self) -> None:
        self._digest.close()
        self._release()
        for file in self._sidecars:
            file.discard()
        if self._keeps_partial:
            self._file.keep()
        else:
            self._file.discard()

    def _require_open(self) -> None:
        self._require_own_process(self._file.path)
        if not self._open:
            raise ClosedError(f"{self._file.path}: this writer was closed")

    @abstractmethod
    def _begin(self) -> None:
        """Prepare the partial file."""

    def _write_rest(self) -> None:
        """Write and commit the content of buffers, before the file is completed."""

    @abstractmethod
    def _complete(self, info: ShardInfo) -> ShardInfo:
        """Mark the file as whole, close everything but the partial's descriptor, and complete the facts about it."""

    def _release(self) -> None:
        """Close everything but the partial's descriptor, without completing."""


class FileWriter(TokenWriter, BatchWriter):
    """Writes the batches of one file.

    Parameters
    ----------
    path, meta, overwrite, durable, known_sha256, origin, commit_bytes
        As for `TokenWriter`.
    expected_batches
        Batches that are allocated together; more or fewer may follow.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: StoreMeta,
        *,
        expected_batches: int = 0,
        overwrite: bool = False,
        durable: bool = False,
        known_sha256: str | None = None,
        origin: Mapping[str, Any] | None = None,
        commit_bytes: int = 0,
    ) -> None:
        if not 0 <= expected_batches < 2**48:
            raise ArgumentError(f"{path}: expected_batches must be a count of batches, found {expected_batches}")
        self._expected_batches = expected_batches
        self._unsent_bytes = 0  # written, and not yet given to the disk
        self._behind: deque[GroupDigest] = deque()  # groups whose digests are still computed
        super().__init__(
            path,
            meta,
            overwrite=overwrite,
            durable=durable,
            known_sha256=known_sha256,
            origin=origin,
            commit_bytes=commit_bytes,
        )

    def write(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> None:
        """Append batches. See `BatchWriter.write`."""
        self.append(batches, fields)()

    def append(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> Callable[[], None]:
        """Append batches before they are digested. See `BatchWriter.append`."""
        path = self._file.path
        group = max(1, GROUP_BYTES // self.meta.batch_bytes)
        self._require_open()
        with on_failure(lambda: self._wait_for_digests(0)):  # then the caller may change or free the batches
            tokens, values = as_batches(batches, fields, self.meta, path)
            for start in range(0, len(tokens), group):
                stored = as_stored(tokens[start : start + group], self.meta, f"{path} (batch {self.num_batches:,})")
                digest = self._digest.submit(stored)
                self._behind.append(digest)
                with disk_errors(self._file.partial_path):
                    self._append(stored, {name: each[start : start + group] for name, each in values.items()})
                    self._commit(stored, digest)
                self._wait_for_digests(GROUPS_BEHIND)
        return self._behind[-1].wait if self._behind else lambda: None

    def _wait_for_digests(self, most: int) -> None:
        """Wait until no more groups than this are still to be digested."""
        while len(self._behind) > most:
            self._behind.popleft().wait()

    def sha256(self) -> str:
        """Hexadecimal sha256 of all token bytes written so far."""
        self._require_own_process(self._file.path)
        return self._digest.sha256()

    def _count(self, batches: TokenArray, digest: GroupDigest) -> None:
        """Add a group that is on disk to the totals."""
        self.num_batches += len(batches)
        self.token_count += batches.size
        self.max_token = max(self.max_token, digest.max_token)
        self._crc32.extend(digest.crc32)
        self._digest.accept(digest)
        self._unsent_bytes += batches.nbytes
        if self._unsent_bytes >= WRITE_BACK_BYTES:
            self._file.start_write_back()
            self._unsent_bytes = 0

    @staticmethod
    def stored_bytes(meta: StoreMeta, num_batches: int) -> int:
        """Return about how many bytes a file of these batches has, and its sidecar."""
        return num_batches * meta.batch_bytes

    @abstractmethod
    def _append(self, batches: TokenArray, fields: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write a group; `fields` are empty for a format that holds none."""

    def _commit(self, batches: TokenArray, group: GroupDigest) -> None:
        """Make a group whose bytes are written part of the file, and `_count` it."""
        if self._durable:
            os.fdatasync(self._file.fd)
        self._count(batches, group)


def as_batches(
    batches: npt.ArrayLike, fields: FieldArrays | None, meta: StoreMeta, path: Path
) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
    """Return tokens as `(count, B, S)`, also one batch `(B, S)`, and the values of each field likewise."""
    tokens, fields = split_tokens(batches, fields)
    if tokens.shape != meta.shape and (tokens.ndim != 3 or tokens.shape[1:] != meta.shape):
        raise ArgumentError(f"{path}: expected batches of shape {meta.shape}, found {tokens.shape}")
    values = stored_fields(fields, meta, tokens.shape, path)
    if tokens.ndim == 2:
        tokens = tokens[np.newaxis]
        values = {name: array[np.newaxis] for name, array in values.items()}
    return tokens, values


def stored_fields(
    fields: FieldArrays | None, meta: StoreMeta, shape: tuple[int, ...], path: Path
) -> dict[str, npt.NDArray[Any]]:
    """Return the values of each field of a store in its stored dtype, for tokens of this shape."""
    found: dict[str, npt.ArrayLike] = {}
    if isinstance(fields, np.ndarray) and fields.dtype.names:
        found = {name: fields[name] for name in fields.dtype.names}
    elif isinstance(fields, Mapping):
        found = dict(fields)
    elif fields is not None:
        raise ArgumentError(f"{path}: expected a dict of arrays or a structured array, found {type(fields).__name__}")
    expected = [field.name for field in meta.fields]
    if set(found) != set(expected):
        raise ArgumentError(f"{path}: expected the fields {expected or 'none'}, found {sorted(found) or 'none'}")
    return {field.name: field.as_stored(found[field.name], shape, path) for field in meta.fields}


def split_tokens(tokens: npt.ArrayLike, fields: FieldArrays | None) -> tuple[npt.NDArray[Any], FieldArrays | None]:
    """Return tokens and fields; a structured array with a field "token" has both."""
    found = np.asarray(tokens)
    if fields is not None or TOKEN not in (found.dtype.names or ()):
        return found, fields
    return found[TOKEN], {name: found[name] for name in found.dtype.names or () if name != TOKEN}
