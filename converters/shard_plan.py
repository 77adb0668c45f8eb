"""The shards of a conversion: their plan, and the work of one, which any process, on any node, can do by itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5 import BatchWriter, ChecksumError, ConvertError, ShardEntry, StoreMeta, open_reader
from zb_hdf5.console import format_bytes
from zb_hdf5.converters.batch_source import BatchSource, SourceShard, read_groups
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.engines import Advance, CountedWork, no_progress, noted_work
from zb_hdf5.converters.journal import (
    PLANNED,
    FileState,
    Finished,
    Planned,
    Record,
    digests_of,
    require_unchanged,
)
from zb_hdf5.documents.document_table import write_joined
from zb_hdf5.documents.metadata import TableInfo
from zb_hdf5.documents.table_writer import PiecesWriter
from zb_hdf5.errors import Remedy
from zb_hdf5.files.forks import kept_property
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.publishing import flush_in_parts, partial_path
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.signals import deliver_signals
from zb_hdf5.spec import CRC32_SUFFIX, DEFAULT_SPLIT, NOT_KNOWN, PIECES_SUFFIX, SHARD_PREFIX, pieces_path

#: The word for the files in the journal and in messages.
SHARDS: Final = "shards"
#: Tokens that are committed together: the unit of resume is the shard, and others may read a part of a large one.
COMMIT_BYTES: Final = 1 << 30
DEFAULT_SHARD_BYTES: Final = 1 << 30
#: Of the first line of a journal: a plan of another version is that of another conversion.
PLAN_VERSION: Final = 2
#: The share of the work on a shard that is done when its tokens are written, and not yet on the disk.
WRITTEN_SHARE: Final = 2 / 3
#: Records whose pieces are moved at once.
BLOCK_RECORDS: Final = 1 << 15


@dataclass(frozen=True)
class ShardTask:
    """One shard to write. Picklable."""

    source: BatchSource
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
    finished: Finished | None = None  # the facts with which the file is compared once more

    @property
    def paths(self) -> tuple[Path, ...]:
        return files_of_shard(self.path)

    @property
    def amount(self) -> int:
        return (self.stop - self.start) * self.meta.batch_tokens

    def amount_done(self) -> int:
        """Return how many tokens another process has written, by the note that it leaves."""
        return 0 if self.note is None else noted_work(self.note)

    @property
    def note(self) -> Path | None:
        """The file that tells other processes how far this one is; a lone file is written by the one that waits."""
        return self.path.with_name(self.path.name + ".progress") if self.in_store else None

    def origin(self) -> dict[str, Any]:
        """Return the origin of the tokens: of a shard as in the index, of a lone copy as its source file has it."""
        if self.source.origin is not None and not self.in_store:
            return self.source.origin
        return {"source": self.source.description, "shuffle": self.source.shuffle, "split": self.split}


def files_of_shard(path: Path) -> tuple[Path, ...]:
    """Return the file of a shard, and its sidecars."""
    return path, *(path.with_name(path.name + suffix) for suffix in (CRC32_SUFFIX, PIECES_SUFFIX))


def write_shard(task: ShardTask, progress: Advance = no_progress) -> Finished:
    """Read the batches of one shard from the source, write them, and publish the file."""
    try:
        return _write_shard(task, CountedWork(task.amount, progress, task.note))
    finally:
        if task.note is not None:
            task.note.unlink(missing_ok=True)


def _write_shard(task: ShardTask, work: CountedWork) -> Finished:
    source, start, stop = task.source, task.start, task.stop
    path, sha256 = source.file_of(start, stop)
    crc32 = None
    if path is not None and not isinstance(path, RemotePath):
        with open_reader(path, verify="none") as original:
            crc32 = original.stored_crc32()
    writer = FORMATS[task.target].begin(
        task.path, task.meta, expected_batches=stop - start, overwrite=task.overwrite,
        # a copy whose every batch has the crc32 of the original has its sha256 too: hashing is what takes longest
        known_sha256=None if crc32 is None else sha256, origin=task.origin(), commit_bytes=COMMIT_BYTES,
    )  # fmt: skip
    written = 0
    with writer:
        if task.meta.fields:  # no digest of the shard covers them
            source.check_reads()
        for group in read_groups(source, start, stop):
            group.in_use = writer.append(group.tokens, group.fields)
            written += group.tokens.size
            work.reach(WRITTEN_SHARE * written / task.amount)
        _require_intact(source.paths[0], writer, start, sha256, crc32)
        if task.files is not None:
            require_unchanged(source.paths, task.files)
        pieces = _write_documents(task, writer.sha256())
        for share in flush_in_parts(partial_path(task.path)):
            deliver_signals()
            work.reach(WRITTEN_SHARE + (1 - WRITTEN_SHARE) * share)
        work.reach(1.0)
        info = writer.finish()
    entry = replace(ShardEntry.of(info, task.split, task.documents), pieces=pieces)
    frame, _ = digests_of(task, entry, frame_only=True)
    return Finished(entry, info.max_token, frame)


def _write_documents(task: ShardTask, tokens_sha256: str) -> TableInfo | None:
    """Write the pieces of a shard to its sidecar, and the documents of a lone file, before it has its name."""
    source, path = task.source, task.path
    if FORMATS[task.target].tokens_only:
        return None
    if not task.in_store:
        write_joined(source.document_files, path, task.split, tokens_sha256)
    if not source.has_pieces:
        pieces_path(path).unlink(missing_ok=True)  # the leftover of others
        return None
    step = max(1, BLOCK_RECORDS // source.meta.batch_size)
    with PiecesWriter(path) as writer:
        for first in range(task.start, task.stop, step):
            deliver_signals()
            writer.append_pieces(source.read_pieces(first, min(first + step, task.stop)))
        return writer.publish(seq_len=source.meta.seq_len, split=task.split, tokens_sha256=tokens_sha256)


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
class ShardPlan:
    """The shards of a conversion into a folder, and their source files."""

    source: BatchSource
    target: str
    cuts: list[tuple[int, int]]  # (start, stop) of each shard, in batches
    files: dict[str, FileState]  # of every source file, when the plan was made

    def head(self) -> Record:
        """Return the first line of the journal: all that decides the bytes; a file stands for its content."""
        meta, fields = self.source.meta, {field.name: field.to_json() for field in self.source.meta.fields}
        planned = [
            Planned(self.name(shard), each.split, stop - start, (stop - start) * self.source.meta.batch_tokens,
                    NOT_KNOWN if each.documents is None else each.documents)
            for shard, (each, (start, stop)) in enumerate(zip(self.shards, self.cuts, strict=True))
        ]  # fmt: skip
        return Record(SHARDS, {
            "version": PLAN_VERSION,
            "target": self.target,
            "meta": asdict(meta) | {"dtype": meta.dtype.name, "fields": fields},
            "shuffle": self.source.shuffle,
            "source": self.source.description,
            "identity": self.source.identity,
            "cuts": [list(cut) for cut in self.cuts],
            "has_pieces": self.source.has_pieces,
            "documents": [list(part) for part in self.source.document_parts],
            "files": self.files,
            PLANNED: planned,
        })  # fmt: skip

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
        return ShardTask(
            self.source, self.target, folder / self.name(shard), start, stop, meta,
            FORMATS[self.target].holds_batches, each.split, each.documents,
        )  # fmt: skip

    @kept_property
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


def cut_into_shards(source: BatchSource, conversion: Conversion) -> list[tuple[int, int]]:
    """Return (start, stop) of each shard, in batches: consecutive, and none empty."""
    is_asked = conversion.num_shards is not None or conversion.shard_bytes is not None
    if source.is_cut or (source.shards and not is_asked):
        return source.cuts
    if is_asked:
        require_one_split(source, "leave out --shards and --shard-size")
    total = source.num_batches
    count = number_of_shards(total, source.meta, conversion)
    return [(k * total // count, (k + 1) * total // count) for k in range(count)]


def number_of_shards(num_batches: int, meta: StoreMeta, conversion: Conversion) -> int:
    """Return the number of shards that was asked for, or that their size gives."""
    per_shard = max(1, (conversion.shard_bytes or DEFAULT_SHARD_BYTES) // meta.batch_bytes)
    count = conversion.num_shards or -(-num_batches // per_shard)
    if count > num_batches:
        raise ConvertError(f"{num_batches:,} batches cannot fill {count:,} shards", remedy=Remedy.FILL_THE_SHARDS)
    return count


def require_one_split(source: BatchSource, remedy: str) -> None:
    """Raise `ConvertError` if shards of several splits would be mixed."""
    splits = list(dict.fromkeys(shard.split for shard in source.shards))
    if len(splits) > 1:
        raise ConvertError(f"the source has the splits {', '.join(splits)}, which must not be mixed: {remedy}")


def require_room(folder: Path, needed_bytes: int, num_inodes: int) -> None:
    """Raise `ConvertError` unless the file system of `folder` has space for the bytes that will be written."""
    free = free_room(folder)
    if needed_bytes > free["bytes"]:
        raise ConvertError(
            f"{folder}: needs {format_bytes(needed_bytes)}, only {format_bytes(free['bytes'])} are free; free some, or "
            "choose another output"
        )
    if free["inodes"] is not None and num_inodes > free["inodes"]:
        raise ConvertError(f"{folder}: needs {num_inodes:,} inodes, only {free['inodes']:,} are free; use fewer shards")


def free_room(folder: Path) -> dict[str, Any]:
    """Return free bytes and inodes for this user; None where the file system does not count inodes."""
    status = os.statvfs(folder)
    return {"bytes": status.f_bavail * status.f_frsize, "inodes": status.f_favail if status.f_files else None}
