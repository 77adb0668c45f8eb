"""The shards of a conversion: their plan, and the work of one, which any process, on any node, can do by itself."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5 import (
    BatchWriter,
    ChecksumError,
    ConvertError,
    ShardEntry,
    StoreMeta,
)
from zb_hdf5.console import format_bytes
from zb_hdf5.converters.documents import write_pieces
from zb_hdf5.converters.engines import Progress, no_progress
from zb_hdf5.converters.journal import CheckTask, FileState, Finished, Head
from zb_hdf5.converters.source import MAX_TOKEN, Source, SourceShard, read_groups
from zb_hdf5.documents.document import TableInfo
from zb_hdf5.documents.document_writer import write_joined
from zb_hdf5.errors import Remedy
from zb_hdf5.files.checked import TokenDigest
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.publishing import partial_path
from zb_hdf5.formats.batch_reader import GROUP_BYTES
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.spec import CRC32_SUFFIX, DEFAULT_SPLIT, PIECES_SUFFIX, SHARD_PREFIX

#: The word for the files in the journal and in messages.
SHARDS: Final = "shards"
#: Tokens that are committed together: the unit of resume is the shard, and others may read a part of a large one.
COMMIT_BYTES: Final = 1 << 30
DEFAULT_SHARD_BYTES: Final = 1 << 30
PLAN_VERSION: Final = 1
#: The digests of a file: of its frame, and of its tokens.
Digests: TypeAlias = tuple[str, str]


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


def with_largest_token(source: dict[str, Any], tokens: Iterable[int | None]) -> dict[str, Any]:
    """Return the `source` entry of `shards.json` with the largest id, given that of each shard, if all are known."""
    largest = [*tokens]
    known = [token for token in largest if token is not None]
    return {**source, MAX_TOKEN: max(known)} if known and len(known) == len(largest) else source


@dataclass(frozen=True)
class ShardTask:
    """One shard to write. Picklable."""

    source: Source
    target: str
    path: Path
    start: int
    stop: int
    meta: StoreMeta  # that of the source, with the shard's own part of `total_records` and its own documents
    in_store: bool  # whether it is no lone file: then the documents belong to the store
    split: str = DEFAULT_SPLIT
    documents: int | None = None  # how many begin in it; None: not known
    overwrite: bool = False
    files: dict[str, FileState] | None = None  # the source's files must still be like this before it is published

    @property
    def paths(self) -> tuple[Path, ...]:
        return files_of_shard(self.path)

    @property
    def amount(self) -> int:
        return (self.stop - self.start) * self.meta.batch_tokens

    def amount_done(self) -> int:
        """Return how many tokens another process has written, by the size of its file."""
        for path in (self.path, partial_path(self.path)):
            with contextlib.suppress(OSError):
                return min(path.stat().st_size // self.meta.dtype.itemsize, self.amount)
        return 0

    def origin(self) -> dict[str, Any]:
        """Return the origin of the tokens: of a shard as in the index, of a lone copy as its source file has it."""
        if self.source.origin is not None and not self.in_store:
            return self.source.origin
        return {"source": self.source.description, "shuffle": self.source.shuffle, "split": self.split}


def files_of_shard(path: Path) -> tuple[Path, ...]:
    """Return the file of a shard, and its sidecars."""
    return path, *(path.with_name(path.name + suffix) for suffix in (CRC32_SUFFIX, PIECES_SUFFIX))


def is_intact(check: CheckTask, progress: Progress = no_progress) -> bool:
    """Return whether a finished file still has every byte; `ConvertError` if the source has other tokens now."""
    task, finished = check.task, check.finished
    if check.from_source and source_sha256(task) != finished.entry.sha256:
        raise ConvertError(
            f"{task.path}: the source has changed since this shard was written from it; start over with --force"
        )
    try:
        frame, tokens = digests_of(task.paths, task.meta, finished.entry)
    except OSError:
        return False
    return frame == finished.frame_sha256 and tokens in ("", finished.entry.sha256)


def digests_of(paths: Iterable[Path], meta: StoreMeta, entry: ShardEntry, *, frame_only: bool = False) -> Digests:
    """Return the digests of all bytes of a file and its sidecars but the tokens, and of these, if they are placed."""
    (path, *sidecars), end = paths, 0  # of the tokens so far
    frame, tokens = hashlib.sha256(), hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for start, stop in chain(_token_ranges(meta, entry), [(size, size)]):
            if start > end:
                frame.update(f"{end} {start} ".encode())
                _digest_bytes(frame, file, end, start)
            if not frame_only:
                _digest_bytes(tokens, file, start, stop)
            end = stop
    for sidecar in sidecars:
        with contextlib.suppress(FileNotFoundError), open(sidecar, "rb") as file:
            frame.update(hashlib.file_digest(file, "sha256").digest())
    return frame.hexdigest(), "" if frame_only or meta.column not in entry.columns else tokens.hexdigest()


def _token_ranges(meta: StoreMeta, entry: ShardEntry) -> Iterator[tuple[int, int]]:
    """Yield where batches that follow each other begin and end; none are known: all bytes count as the frame."""
    left = entry.token_count * meta.dtype.itemsize
    for first, stride, count in entry.columns.get(meta.column, ()):
        whole = count if stride == meta.batch_bytes else 1
        for start in range(first, first + count * stride, whole * stride):
            size = min(left, whole * meta.batch_bytes)
            yield start, start + size
            left -= size


def _digest_bytes(digest: Any, file: io.FileIO, start: int, stop: int) -> None:
    for piece in range(start, stop, GROUP_BYTES):
        file.seek(piece)
        digest.update(file.read(min(GROUP_BYTES, stop - piece)))


def write_shard(task: ShardTask, progress: Progress = no_progress) -> Finished:
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
            if task.meta.fields:  # no digest of the shard covers them
                source.check_reads()
            for group in read_groups(source, start, stop):
                group.in_use = writer.append(group.tokens, group.fields)
                progress(group.tokens.size)
            _require_intact(source.paths[0], writer, start, sha256, crc32)
            if task.files is not None:
                require_unchanged(source.paths, task.files)
            pieces = _write_beside(task, writer.sha256())
            info = writer.finish()
    entry = replace(ShardEntry.of(info, task.split, task.documents), pieces=pieces)
    frame, _ = digests_of(task.paths, task.meta, entry, frame_only=True)
    return Finished(entry, info.max_token, frame)


def _write_beside(task: ShardTask, tokens_sha256: str) -> TableInfo | None:
    """Write what belongs to the documents of a shard, or of a lone file, before it has its name."""
    source = task.source
    if FORMATS[task.target].tokens_only:
        return None
    if not task.in_store:
        write_joined(source.document_files, task.path, task.split, tokens_sha256)
    return write_pieces(source, task.start, task.stop, task.path, task.split, tokens_sha256)


def source_sha256(task: ShardTask) -> str:
    """Return the digest that the shard's batches have in the source now."""
    digest = TokenDigest()
    try:
        for group in read_groups(task.source, task.start, task.stop):
            pending = digest.submit(group.tokens)
            digest.accept(pending)
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


@dataclass(frozen=True)
class Plan:
    """The shards of a conversion into a folder, and their source files."""

    source: Source
    target: str
    cuts: list[tuple[int, int]]  # (start, stop) of each shard, in batches
    files: dict[str, FileState]  # of every source file, when the plan was made

    def head(self) -> Head:
        """Return the first line of the journal: all that decides the bytes, but for the content of the source files."""
        meta = asdict(self.source.meta) | {"dtype": self.source.meta.dtype.name}
        meta["fields"] = {field.name: field.to_json() for field in self.source.meta.fields}
        identity = {
            "version": PLAN_VERSION,
            "target": self.target,
            "meta": meta,
            "shuffle": self.source.shuffle,
            "source": self.source.description,
            "identity": self.source.identity,
            "cuts": [list(cut) for cut in self.cuts],
            "has_pieces": self.source.has_pieces,
            "documents": [list(part) for part in self.source.document_parts],
        }
        return Head(SHARDS, len(self.cuts), identity, self.files)

    def name(self, shard: int) -> str:
        return f"{SHARD_PREFIX}{shard:05}-of-{len(self.cuts):05}{FORMATS[self.target].suffix}"

    def task(self, shard: int, folder: Path) -> ShardTask:
        """Return the work of one shard."""
        (start, stop), each, meta = self.cuts[shard], self.shards[shard], self.source.meta
        records = each.records  # those of all shards add up to the whole
        if records is None:
            rest = max(0, meta.total_records - start * meta.batch_size)
            records = rest if stop == self.source.num_batches else (stop - start) * meta.batch_size
        meta = replace(meta, total_records=meta.total_records and records, document_count=each.documents or 0)
        in_store = FORMATS[self.target].holds_batches
        path = folder / self.name(shard)
        return ShardTask(self.source, self.target, path, start, stop, meta, in_store, each.split, each.documents)

    @cached_property
    def shards(self) -> Sequence[SourceShard]:
        """Those of the source, or as its batches are cut, which are then of one split."""
        source = self.source
        if self.cuts == source.cuts:
            return source.shards
        split = source.shards[0].split if source.shards else DEFAULT_SPLIT
        return [SourceShard(stop - start, split) for start, stop in self.cuts]

    def shard_bytes(self, shard: int) -> int:
        """Return about how much disk a shard takes."""
        start, stop = self.cuts[shard]
        return FORMATS[self.target].total_bytes(self.source.meta, stop - start)

    def num_inodes(self) -> int:
        """Return how many files and folders the conversion makes."""
        row, source = FORMATS[self.target], self.source
        per_shard = 1 + row.has_sidecar + source.has_pieces
        return per_shard * len(self.cuts) + len(source.document_parts) + 3  # the folder, its index, the journal


def cut_into_shards(source: Source, num_shards: int | None, shard_bytes: int | None) -> list[tuple[int, int]]:
    """Return (start, stop) of each shard, in batches: consecutive, and none empty."""
    total = source.num_batches
    if num_shards is not None or shard_bytes is not None:
        require_one_split(source, "leave out --shards and --shard-size")
    if num_shards is None and shard_bytes is None and source.shards:
        return source.cuts
    if num_shards is None:
        per_shard = max(1, (shard_bytes or DEFAULT_SHARD_BYTES) // source.meta.batch_bytes)
        num_shards = max(1, -(-total // per_shard))
    if num_shards > total:
        raise ConvertError(f"{total:,} batches cannot fill {num_shards:,} shards; pass a smaller --shards")
    return [(k * total // num_shards, (k + 1) * total // num_shards) for k in range(num_shards)]


def require_one_split(source: Source, remedy: str) -> None:
    """Raise `ConvertError` if shards of several splits would be mixed."""
    splits = list(dict.fromkeys(shard.split for shard in source.shards))
    if len(splits) > 1:
        raise ConvertError(f"the source has the splits {', '.join(splits)}, which must not be mixed: {remedy}")


def require_room(folder: Path, needed_bytes: int, num_inodes: int) -> None:
    """Raise `ConvertError` unless the file system of `folder` has space for the bytes that will be written."""
    free = free_room(folder)
    if needed_bytes > free["bytes"]:
        raise ConvertError(
            f"{folder}: needs {format_bytes(needed_bytes)}, free are {format_bytes(free['bytes'])}; free some, or "
            "choose another output"
        )
    if free["inodes"] is not None and num_inodes > free["inodes"]:
        raise ConvertError(f"{folder}: needs {num_inodes:,} inodes, free are {free['inodes']:,}; use fewer shards")


def free_room(folder: Path) -> dict[str, Any]:
    """Return free bytes and inodes for this user; None where the file system does not count inodes."""
    status = os.statvfs(folder)
    return {"bytes": status.f_bavail * status.f_frsize, "inodes": status.f_favail if status.f_files else None}
