"""Writes one shard: the unit of work that any process, on any node, can do by itself."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5 import BatchReader, BatchWriter, ChecksumError, ConvertError, ShardEntry, StoreMeta, ZbError, verify_store
from zb_hdf5.converters.document_parts import write_pieces
from zb_hdf5.converters.journal import CheckTask, FileState
from zb_hdf5.converters.source import MAX_TOKEN, Source
from zb_hdf5.converters.task import Progress, no_progress, tokens_written
from zb_hdf5.documents.document_writer import write_joined
from zb_hdf5.documents.pieces import pieces_path
from zb_hdf5.errors import Remedy
from zb_hdf5.files.digests import TokenDigest
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.formats.batch_reader import GROUP_BYTES
from zb_hdf5.formats.native import crc32_path
from zb_hdf5.formats.registry import BACKENDS, FORMATS
from zb_hdf5.loaders.prefetch import read_ahead
from zb_hdf5.spec import BATCHES, DEFAULT_SPLIT
from zb_hdf5.store.table import PiecesInfo

#: What the shards are called in the journal and in messages.
SHARDS: Final = "shards"
#: Tokens that are committed together: the unit of resume is the shard, and others may read a part of a large one.
COMMIT_BYTES: Final = 1 << 30
#: What is copied from file to file between two reports of progress.
COPY_BYTES: Final = 64 << 20
#: But no more reports than this: the target looks at all its batches for each.
COPIES: Final = 64
#: Groups of batches on their way: one is read, one is written, and the sha256 of one is still to come.
GROUPS: Final = 3


def file_states(paths: Iterable[Path]) -> dict[str, FileState]:
    """Return (size in bytes, mtime in ns) of every file; a folder counts with the files in it."""
    states = {}
    for path in paths:
        if isinstance(path, RemotePath):
            continue  # its reader looks at the ETag
        for file in [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file()):
            status = file.stat()
            states[str(file)] = (status.st_size, status.st_mtime_ns)
    return states


def require_unchanged(paths: Iterable[Path], before: dict[str, FileState]) -> None:
    """Raise `ConvertError` if a file has changed."""
    for path, found in file_states(paths).items():
        if found != before.get(path):
            raise ConvertError(
                f"{path}: changed while it was converted: expected (size, mtime_ns) {before.get(path)}, found "
                f"{found}; convert again"
            )


@dataclass(frozen=True)
class FinishedShard:
    """A shard under its final name.

    Attributes
    ----------
    entry
        Its row of the index.
    max_token
        For the report; None: not known.
    frame_sha256
        Digest of all its bytes that are no tokens, and of the files beside it. See the function of this name.
    """

    entry: ShardEntry
    max_token: int | None
    frame_sha256: str = ""

    @property
    def token_count(self) -> int:
        return self.entry.token_count

    def to_json(self) -> dict[str, Any]:
        return {"entry": self.entry.to_json(), "max_token": self.max_token, "frame_sha256": self.frame_sha256}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        # the format may be one that `shards.json` does not know
        return cls(ShardEntry.from_json(value["entry"]), int(value["max_token"]), str(value["frame_sha256"]))


def with_largest_token(source: dict[str, Any], tokens: Iterable[int | None]) -> dict[str, Any]:
    """Return the `source` entry of `shards.json` with the largest id, given that of each shard, if all are known."""
    largest = [*tokens]
    known = [token for token in largest if token is not None]
    return {**source, MAX_TOKEN: max(known)} if known and len(known) == len(largest) else source


@dataclass(frozen=True)
class ShardTask:
    """One shard to write. Picklable.

    Attributes
    ----------
    target
        A name in `FORMATS`.
    path
        The shard's final name.
    start, stop
        Its batches.
    meta
        As for the source, with the shard's own part of `total_records` and its own documents.
    in_store
        Whether it is a shard of a store, and no lone file: then the documents belong to the store.
    split
        Which split of the store it belongs to.
    documents
        How many documents begin in it; None if that is not known.
    files
        If given, the source's files must still be like this before the file is published.
    """

    source: Source
    target: str
    path: Path
    start: int
    stop: int
    meta: StoreMeta
    in_store: bool
    split: str = DEFAULT_SPLIT
    documents: int | None = None
    overwrite: bool = False
    files: dict[str, FileState] | None = None

    def amount_done(self) -> int:
        """Return how many tokens another process has written, by the size of its file."""
        return min(tokens_written(self.path, self.meta.dtype), self.amount)

    def origin(self) -> dict[str, Any]:
        """Return the origin of the tokens: of a shard as in the index, of a lone copy as its source file has it."""
        if self.source.origin is not None and not self.in_store:
            return self.source.origin
        return {"source": self.source.description, "shuffle": self.source.shuffle, "split": self.split}

    @property
    def paths(self) -> tuple[Path, ...]:
        return files_of_shard(self.path)

    @property
    def amount(self) -> int:
        return (self.stop - self.start) * self.meta.batch_tokens


def files_of_shard(path: Path) -> tuple[Path, ...]:
    """Return the file of a shard, and those that it may have beside it."""
    return path, crc32_path(path), pieces_path(path)


def is_intact(check: CheckTask[ShardTask, FinishedShard], progress: Progress = no_progress) -> bool:
    """Return whether a finished shard still has every byte that it was finished with.

    Raises
    ------
    ConvertError
        If the source has other tokens now.
    """
    task, entry = check.task, check.finished.entry
    path = task.path
    if check.from_source and source_sha256(task) != entry.sha256:
        raise ConvertError(
            f"{path}: the source has changed since this shard was written from it; start over with --force"
        )
    try:
        if frame_sha256(task, entry) != check.finished.frame_sha256:
            return False
        if entry.backend in BACKENDS:
            [report] = verify_store(path, workers=1)
            return report.problem is None and report.sha256 == entry.sha256
        return token_sha256(task, entry) == entry.sha256
    except (ZbError, OSError):
        return False


def frame_sha256(task: ShardTask, entry: ShardEntry) -> str:
    """Return the digest of all bytes of a finished shard but its tokens: header, padding, what lies behind, sidecar."""
    digest = hashlib.sha256()
    with open(task.path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        end = 0  # of the tokens so far
        for start, stop in chain(_token_places(task, entry), [(size, size)]):
            if start > end:
                digest.update(f"{end} {start} ".encode())
                _digest_bytes(digest, file, end, start)
            end = stop
    if FORMATS[task.target].has_sidecar:
        digest.update(crc32_path(task.path).read_bytes())
    if entry.pieces:
        with open(pieces_path(task.path), "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def token_sha256(task: ShardTask, entry: ShardEntry) -> str:
    """Return the digest that the tokens of a finished shard have now."""
    digest = hashlib.sha256()
    with open(task.path, "rb", buffering=0) as file:
        for start, stop in _token_places(task, entry):
            _digest_bytes(digest, file, start, stop)
    return digest.hexdigest()


def _token_places(task: ShardTask, entry: ShardEntry) -> Iterator[tuple[int, int]]:
    """Yield where batches that follow each other begin and end."""
    batch_bytes = task.meta.batch_bytes
    for first, stride, count in entry.columns.get(BATCHES, ()):  # none are known: all bytes count as the frame
        whole = count if stride == batch_bytes else 1
        for start in range(first, first + count * stride, whole * stride):
            yield start, start + whole * batch_bytes


def _digest_bytes(digest: Any, file: io.FileIO, start: int, stop: int) -> None:
    for piece in range(start, stop, GROUP_BYTES):
        file.seek(piece)
        digest.update(file.read(min(GROUP_BYTES, stop - piece)))


def write_shard(task: ShardTask, progress: Progress = no_progress) -> FinishedShard:
    """Read the batches of one shard from the source, write them, and publish the file."""
    source, start, stop = task.source, task.start, task.stop
    sha256, original = source.sha256_of(start, stop), source.shard_of(start, stop)
    with contextlib.nullcontext() if original is None else original:
        crc32 = None if original is None else original.stored_crc32()
        # a copy whose every batch has the crc32 of the original has its sha256 too: hashing is what takes longest
        known = None if crc32 is None else sha256
        writer = FORMATS[task.target].begin(
            task.path, task.meta, expected_batches=stop - start, overwrite=task.overwrite, known_sha256=known,
            origin=task.origin(), commit_bytes=COMMIT_BYTES,
        )  # fmt: skip
        with writer:
            if original is not None and known is not None:
                _copy(original, writer, progress)
            if task.meta.fields:  # no digest of the shard covers them
                source.check_reads()
            for group in read_groups(source, start + writer.num_batches, stop):
                group.in_use = writer.append(group.tokens, group.fields)
                progress(group.tokens.size)
            _require_intact(source.paths[0], writer, start, sha256, crc32)
            if task.files is not None:
                require_unchanged(source.paths, task.files)
            pieces = _write_beside(task, writer.sha256())
            info = writer.finish()
    entry = replace(ShardEntry.of(info, task.split, task.documents), pieces=pieces)
    return FinishedShard(entry, info.max_token, frame_sha256(task, entry))


def _write_beside(task: ShardTask, tokens_sha256: str) -> PiecesInfo | None:
    """Write what belongs to the documents of a shard, or of a lone file, before it has its name."""
    source = task.source
    if FORMATS[task.target].tokens_only:
        return None
    if not task.in_store:
        write_joined(source.document_files, task.path, task.split, tokens_sha256)
    return write_pieces(source, task.start, task.stop, task.path, task.split, tokens_sha256)


def _copy(original: BatchReader, writer: BatchWriter, progress: Progress) -> None:
    """Append batches by a copy in the kernel: all of them, or as many as it copies."""
    step = max(1, COPY_BYTES // original.meta.batch_bytes, -(-original.num_batches // COPIES))
    for start in range(0, original.num_batches, step):
        count = min(step, original.num_batches - start)
        copied = writer.write_from(original, start, count)
        progress(copied * original.meta.batch_tokens)
        if copied < count:
            return


def source_sha256(task: ShardTask) -> str:
    """Return the digest that the shard's batches have in the source now."""
    digest = TokenDigest()
    try:
        for group in read_groups(task.source, task.start, task.stop):
            pending = digest.submit(group.tokens)
            digest.accept(pending.result())
            group.in_use = pending.wait
    finally:
        digest.close()
    return digest.sha256()


def _require_intact(
    source: Path, writer: BatchWriter, start: int, sha256: str | None, crc32: npt.NDArray[np.uint32] | None
) -> None:
    """Raise `ChecksumError` if the tokens do not have the digest that the source states."""
    if crc32 is not None:
        found = writer.crc32()
        for bad in np.flatnonzero(found != crc32)[:1].tolist():
            raise ChecksumError(
                f"batch {start + bad:,} of the source: expected crc32 {crc32[bad]:08x}, found {found[bad]:08x}; "
                "copying would hide the damage",
                remedy=Remedy.VERIFY,
                at=source,
            )
    if sha256 not in (None, writer.sha256()):
        raise ChecksumError(
            f"batches {start:,} to {start + writer.num_batches - 1:,} of the source: expected sha256 {sha256}, "
            f"found {writer.sha256()}; copying would hide the damage",
            remedy=Remedy.VERIFY,
            at=source,
        )


class Group:
    """Consecutive batches and the values of their fields, in buffers that are filled again and again.

    Attributes
    ----------
    tokens, fields
        Valid until the next group is asked for, and until `in_use` has returned.
    in_use
        Waits for those who still read the buffers; whoever passes them on sets it.
    """

    def __init__(self, meta: StoreMeta, num_batches: int) -> None:
        shape = (num_batches, *meta.shape)
        self._tokens = self.tokens = np.empty(shape, meta.dtype)
        self._fields = {f.name: np.empty((*shape, *f.shape), f.dtype) for f in meta.fields}
        self.fields = self._fields
        self.in_use: Callable[[], None] = lambda: None

    def read(self, source: Source, first: int, count: int) -> Self:
        """Fill the buffers with the batches from `first` on."""
        self.in_use()
        self.tokens = self._tokens[:count]
        self.fields = {name: values[:count] for name, values in self._fields.items()}
        source.read_into(first, self.tokens)
        for name, values in self.fields.items():
            source.read_field_into(name, first, values)
        return self


def read_groups(source: Source, start: int, stop: int) -> Iterator[Group]:
    """Yield groups of batches: while one is written, those before it are hashed, and the next is read."""
    size = max(1, GROUP_BYTES // source.meta.batch_bytes)
    groups = [Group(source.meta, min(size, stop - start)) for _ in range(GROUPS)]

    def read(number: int) -> Group:
        first = start + number * size
        return groups[number % GROUPS].read(source, first, min(size, stop - first))

    yield from read_ahead(read, iter(range(-(-(stop - start) // size))), 1)
