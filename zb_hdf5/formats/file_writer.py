"""A writer of one file: takes batches in order, digests them beside the writes, and publishes the file whole."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, ClosedError
from zb_hdf5.field import field_values, split_tokens
from zb_hdf5.files.codecs import CompressedTokens
from zb_hdf5.files.digests import TokenDigest, crc32_array
from zb_hdf5.files.extents import Extents
from zb_hdf5.files.identity import regular
from zb_hdf5.files.publishing import PartialFile, disk_errors
from zb_hdf5.files.ranges import copy_range, read_fully
from zb_hdf5.formats.batch_reader import GROUP_BYTES, BatchReader
from zb_hdf5.formats.batch_writer import BatchWriter, Columns, FieldArrays, FieldDigest, ShardInfo, nothing_to_wait_for
from zb_hdf5.spec import StoreMeta, TokenArray
from zb_hdf5.token_values import as_stored

if TYPE_CHECKING:
    from zb_hdf5.files.digests import GroupDigest, PendingDigest

#: How much is written before the disk is told to begin with it.
WRITE_BACK_BYTES: Final = 32 << 20
#: Groups that are committed while their sha256 is still to come.
GROUPS_BEHIND: Final = 3


class FileWriter(BatchWriter):
    """Publishes one file: `x.partial` until `finish`, then `x`. The base of the writers of all backends.

    Parameters
    ----------
    path
        The file to publish.
    meta
        Shape, dtype and origin of the batches.
    expected_batches
        Number of batches to come, where known: they are allocated together. More or fewer may follow.
    overwrite
        Replace an existing file (at the end, by rename); otherwise it is an error.
    durable
        Also flush to disk at each commit, so that committed batches outlive a power loss.
    known_sha256
        For exact copies: the digest that the original has stored. The caller compares `crc32()` with the original's.
    origin
        Where the tokens came from, for a format that keeps it: "source" (JSON), "shuffle" and "split", as in
        `shards.json`.
    commit_bytes
        Commit when at least so many bytes of tokens were written since, and at the end; 0: each call. A format whose
        files cannot be read before they are finished has no use for it.
    """

    num_batches = 0
    token_count = 0
    max_token = 0

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
        self.meta = meta
        self._durable, self._origin, self._commit_bytes = durable, origin or {}, commit_bytes
        self._expected_batches = expected_batches
        self._crc32: list[int] = []
        self._unsent_bytes = 0
        self._open = True
        self._file = PartialFile(path, overwrite=overwrite)
        self._digest = TokenDigest(known_sha256)
        self._behind: deque[PendingDigest] = deque()
        try:
            self._begin()
        except BaseException:
            self.abort()
            raise

    def write(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> None:
        """Append batches. See `BatchWriter.write`."""
        self.append(batches, fields)()

    def append(self, batches: npt.ArrayLike, fields: FieldArrays | None = None) -> Callable[[], None]:
        """Append batches before they are digested. See `BatchWriter.append`."""
        try:
            self._append_groups(batches, fields)
        except BaseException:
            self._wait_for_digests(0)  # the caller may now change or free the batches
            raise
        return self._behind[-1].wait if self._behind else nothing_to_wait_for

    def _append_groups(self, batches: npt.ArrayLike, fields: FieldArrays | None) -> None:
        self._require_open()
        path = self._file.path
        tokens, values = as_batches(batches, fields, self.meta, path)
        group = max(1, GROUP_BYTES // self.meta.batch_bytes)
        for start in range(0, len(tokens), group):
            stored = as_stored(tokens[start : start + group], self.meta, f"{path} (batch {self.num_batches:,})")
            digest = self._digest.submit(stored)
            self._behind.append(digest)
            with disk_errors(self._file.partial_path):
                if values:
                    self._write_fields({name: v[start : start + group] for name, v in values.items()}, len(stored))
                self._append(stored, digest)
            self._wait_for_digests(GROUPS_BEHIND)

    def _wait_for_digests(self, behind: int) -> None:
        """Wait until no more groups than this are still to be digested."""
        while len(self._behind) > behind:
            self._behind.popleft().wait()

    def write_from(self, reader: BatchReader, start: int, count: int) -> int:
        """Append batches of a reader, copied by the kernel. See `BatchWriter.write_from`."""
        self._require_open()
        require_batches(reader, start, count, self.meta, self._file.path)
        before = self.num_batches
        if count == 0 or reader.extents is None or self.meta.fields:
            return 0
        with disk_errors(self._file.partial_path):
            offset = self._room_for(before, count)
            if offset is None:
                return 0
            self._copy_from(reader.path, reader.extents, start, count, offset)
        return self.num_batches - before

    def _copy_from(self, path: Path, extents: Extents, start: int, count: int, offset: int) -> None:
        """Copy batches to the slots from `offset` on, as far as the file systems do; one is digested beside it."""
        group, slot_bytes = max(1, GROUP_BYTES // self.meta.batch_bytes), self.meta.padded_batch_bytes
        buffers = [np.empty((min(group, count), slot_bytes), np.uint8) for _ in range(2)]
        before = self.num_batches
        pending: tuple[TokenArray, PendingDigest] | None = None
        with open(path, "rb", buffering=0, opener=regular) as original:
            try:
                for number, done in enumerate(range(0, count, group)):
                    slots = buffers[number % 2][: min(group, count - done)]
                    place = offset + done * slot_bytes
                    if not self._copy_group(original.fileno(), extents, start + done, len(slots), place):
                        break
                    read_fully(self._file.fd, slots, place)
                    tokens = slots[:, : self.meta.batch_bytes].view(self.meta.dtype)
                    what = f"{self._file.path} (batch {before + done:,})"
                    stored = as_stored(tokens.reshape(len(slots), *self.meta.shape), self.meta, what)
                    if pending:  # while one group is digested, the next is copied
                        digested, pending = pending, None
                        self._commit(digested[0], digested[1].result())
                        digested[1].wait()  # before its buffer is filled again
                    pending = stored, self._digest.submit(stored)
            finally:
                if pending:
                    self._commit(pending[0], pending[1].result())

    def _copy_group(self, source_fd: int, extents: Extents, start: int, count: int, offset: int) -> bool:
        """Copy batches into the slots from `offset` on; return whether all of them were. Padding stays a hole."""
        done = 0
        while done < count:
            number, within = extents.locate(start + done)
            base, stride, num_batches = extents.runs[number]
            packed = stride == extents.batch_bytes == self.meta.padded_batch_bytes
            take = min(count - done, num_batches - within) if packed else 1
            slot, num_bytes = offset + done * self.meta.padded_batch_bytes, take * extents.batch_bytes
            if not copy_range(source_fd, self._file.fd, num_bytes, base + within * stride, slot):
                return False
            done += take
        return True

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
            with disk_errors(self._file.partial_path):
                info = info._replace(columns=self._complete(info), fields=self._field_digests())
                info = info._replace(compressed=self._compressed())
        except BaseException:
            self._release()
            self._end_unpublished()
            raise
        try:
            self._file.publish()
        except BaseException:
            self._end_unpublished()
            raise
        return info

    def abort(self) -> None:
        """Remove the unfinished file. A file with the final name is untouched."""
        if self._open:
            self._open = False
            self._digest.close()
            self._release()
            self._end_unpublished()

    def _end_unpublished(self) -> None:
        """Remove the partial of a file that is not finished, or keep it."""
        self._file.discard()

    def _require_open(self) -> None:
        if not self._open:
            raise ClosedError(f"{self._file.path}: this writer was closed")

    def _count(self, batches: TokenArray, digest: GroupDigest) -> None:
        """Add a group that is on disk to the totals."""
        self.num_batches += len(batches)
        self.token_count += batches.size
        self.max_token = max(self.max_token, digest.max_token)
        self._crc32 += digest.crc32
        self._digest.accept(digest)
        self._unsent_bytes += batches.nbytes
        if self._unsent_bytes >= WRITE_BACK_BYTES:
            self._file.start_write_back()
            self._unsent_bytes = 0

    @staticmethod
    def stored_bytes(meta: StoreMeta, num_batches: int) -> int:
        """Return about how many bytes a file of these batches has, and its sidecar."""
        return num_batches * meta.padded_batch_bytes

    @abstractmethod
    def _begin(self) -> None:
        """Prepare the partial file."""

    def _write_fields(self, fields: Mapping[str, npt.NDArray[Any]], count: int) -> None:
        """Write the values of `count` batches to their places, before `_append`, which commits them."""
        raise NotImplementedError  # of a format that holds no fields

    def _field_digests(self) -> dict[str, FieldDigest]:
        """Return the digests of the fields of a complete file."""
        return {}

    def _compressed(self) -> CompressedTokens | None:
        """Return the codec and the bytes of the tokens of a complete file; None: they are stored as they are."""
        return None

    @abstractmethod
    def _append(self, batches: TokenArray, digest: PendingDigest) -> None:
        """Write and commit a group."""

    def _room_for(self, first: int, count: int) -> int | None:
        """Return the offset of batch `first`, if it and those behind it have slots of `padded_batch_bytes` in a row.

        None where batches are not copied into this format.
        """
        return None

    def _commit(self, batches: TokenArray, group: GroupDigest) -> None:
        """Make a group whose bytes are written part of the file, and `_count` it."""
        if self._durable:
            os.fdatasync(self._file.fd)
        self._count(batches, group)

    @abstractmethod
    def _complete(self, info: ShardInfo) -> Columns:
        """Mark the file as whole, and close everything but the partial's descriptor.

        Returns where the chunks of its columns lie, where a reader may look for them by itself.
        """

    @abstractmethod
    def _release(self) -> None:
        """Close everything but the partial's descriptor, without completing."""


def as_batches(
    batches: npt.ArrayLike, fields: FieldArrays | None, meta: StoreMeta, path: Path
) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
    """Return one batch `(B, S)` or several `(count, B, S)`, and the values of each field, as arrays of several.

    Raises
    ------
    ArgumentError, ConvertError
        If the shape is another one; as `stored_fields`.
    """
    tokens, fields = split_tokens(batches, fields)
    if tokens.shape != meta.shape and (tokens.ndim != 3 or tokens.shape[1:] != meta.shape):
        raise ArgumentError(f"{path}: expected batches of shape {meta.shape}, found {tokens.shape}")
    values = stored_fields(fields, meta, tokens.shape, path)
    if tokens.ndim == 2:
        tokens, values = tokens[np.newaxis], {name: array[np.newaxis] for name, array in values.items()}
    return tokens, values


def stored_fields(
    fields: FieldArrays | None, meta: StoreMeta, shape: tuple[int, ...], path: Path
) -> dict[str, npt.NDArray[Any]]:
    """Return the values of each field of a store, as they are stored, of tokens of this shape.

    Raises
    ------
    ArgumentError
        If a field is missing or unknown, or has another shape.
    ConvertError
        If a value does not fit its dtype.
    """
    found = field_values(fields, meta.fields, path)
    return {field.name: field.as_stored(found[field.name], shape, path) for field in meta.fields}


def require_batches(reader: BatchReader, start: int, count: int, meta: StoreMeta, path: Path) -> None:
    """Raise `ArgumentError` unless a reader has these batches, of the shape and dtype that `path` has."""
    if (reader.meta.shape, reader.dtype) != (meta.shape, meta.dtype):
        raise ArgumentError(f"{path}: expected batches of {meta.shape} {meta.dtype.name}, found {reader!r}")
    if not 0 <= start <= start + count <= reader.num_batches:
        raise ArgumentError(f"{reader.path}: expected {start + count:,} batches, found {reader.num_batches:,}")
