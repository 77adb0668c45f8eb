"""The shards of a conversion: their plan, and the work of one, which any process, on any node, can do by itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5 import BatchWriter, ChecksumError, ConvertError, ShardEntry, StoreMeta, open_reader
from zb_hdf5.console import format_bytes
from zb_hdf5.converters.batch_source import BatchSource, SourceShard, read_groups
from zb_hdf5.converters.engines import CountedWork, OnProgress, no_progress, noted_work
from zb_hdf5.converters.journal import (
    PLANNED,
    FileState,
    Finished,
    Planned,
    Record,
    digests_of,
    meta_to_json,
    require_unchanged,
)
from zb_hdf5.converters.options import MOST_SHARDS, Settings, Target
from zb_hdf5.documents.document_table import write_joined
from zb_hdf5.documents.metadata import TableInfo
from zb_hdf5.documents.table_writer import PiecesWriter
from zb_hdf5.errors import Remedy
from zb_hdf5.files.forks import kept_property
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.publishing import flush_in_parts, partial_path
from zb_hdf5.formats.batch_writer import FileWriter
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.signals import deliver_signals
from zb_hdf5.spec import (
    CRC32_SUFFIX,
    DEFAULT_SPLIT,
    NOT_KNOWN,
    PIECES_SUFFIX,
    SHARD_PREFIX,
    documents_path,
    pieces_path,
)

#: The word for the files in the journal and in messages.
SHARDS: Final = "shards"
#: Tokens that are committed together: the unit of resume is the shard, and others may read a part of a large one.
COMMIT_BYTES: Final = 1 << 30
#: Of the first line of a journal: a plan of another version is that of another conversion.
PLAN_VERSION: Final = 2
#: The share of the work on a shard that is done when its tokens are written, and not yet on the disk.
WRITTEN_SHARE: Final = 2 / 3
#: Records whose pieces are moved at once, and the most tokens of them.
BLOCK_RECORDS: Final = 1 << 15
MOVED_TOKENS: Final = 1 << 22


@dataclass(frozen=True)
class ShardTask:
    """One shard to write. Picklable.

    Parameters
    ----------
    source
        The batches of all shards.
    target
        The name of its file format.
    path
        The file to write.
    start, stop
        Its batches.
    meta
        That of the source, with the shard's own part of `total_records` and its own documents.
    in_store
        Whether it belongs to a store, which has the documents; else it is a lone file.
    split
        The split of its batches.
    documents
        How many documents begin in it; None: not known.
    overwrite
        Whether an existing file is replaced.
    files
        The files of the source must still be like this before the shard is published; None: they are looked at later.
    finished
        The facts with which the file is compared once more.
    """

    source: BatchSource
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
    finished: Finished | None = None

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


def write_shard(task: ShardTask, progress: OnProgress = no_progress) -> Finished:
    """Read the batches of one shard from the source, write them, and publish the file."""
    try:
        return _write_shard(task, CountedWork(task.amount, progress, task.note))
    finally:
        if task.note is not None:
            task.note.unlink(missing_ok=True)


def _write_shard(task: ShardTask, work: CountedWork) -> Finished:
    source = task.source
    path, sha256 = source.file_of(task.start, task.stop)
    crc32 = None
    if path is not None and not isinstance(path, RemotePath):
        with open_reader(path, verify="none") as original:
            crc32 = original.digests.crc32()
    writer = FORMATS[task.target].begin(
        task.path,
        task.meta,
        expected_batches=task.stop - task.start,
        overwrite=task.overwrite,
        # a copy whose every batch has the crc32 of the original has its sha256 too: hashing is what takes longest
        known_sha256=None if crc32 is None else sha256,
        origin=task.origin(),
        commit_bytes=COMMIT_BYTES,
    )
    written = 0
    with writer:
        if task.meta.fields:  # no digest of the shard covers them
            source.check_reads()
        for group in read_groups(source, task.start, task.stop):
            group.in_use = writer.append(group.tokens, group.fields)
            written += group.tokens.size
            work.reach(WRITTEN_SHARE * written / task.amount)
        _require_intact(source.paths[0], writer, task.start, sha256, crc32)
        if task.files is not None:
            require_unchanged(source.paths, task.files)
        pieces = _write_documents(task, writer)
        for share in flush_in_parts(partial_path(task.path)):
            deliver_signals()
            work.reach(WRITTEN_SHARE + (1 - WRITTEN_SHARE) * share)
        work.reach(1.0)
        info = writer.finish()
    entry = replace(ShardEntry.of(info, task.split, task.documents), pieces=pieces)
    frame, _ = digests_of(task, entry, frame_only=True)
    return Finished(entry, info.max_token, frame)


def _write_documents(task: ShardTask, writer: FileWriter) -> TableInfo | None:
    """Write the pieces of a shard to its sidecar, and the documents of a lone file; they get their names with it."""
    source = task.source
    path = task.path
    if FORMATS[task.target].tokens_only:
        return None
    tokens_sha256 = writer.sha256()
    if source.document_files and not task.in_store:
        write_joined(source.document_files, writer.begin_beside(documents_path(path)), task.split, tokens_sha256)
    if not source.has_pieces:
        return None
    step = max(1, min(BLOCK_RECORDS // source.meta.batch_size, MOVED_TOKENS // source.meta.batch_tokens))
    with PiecesWriter(path) as pieces:
        for first in range(task.start, task.stop, step):
            deliver_signals()
            pieces.append_pieces(source.read_pieces(first, min(first + step, task.stop)))
        file = writer.begin_beside(pieces_path(path))
        return pieces.write_to(file, seq_len=source.meta.seq_len, split=task.split, tokens_sha256=tokens_sha256)


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
    """The shards of a conversion, and their source files.

    Parameters
    ----------
    source
        The batches, as the target stores them.
    target
        The name of the file format of the shards.
    cuts
        The batches of each shard, (start, stop).
    files
        The state of every source file when the plan was made.
    left_behind
        The words for all that the source has and the target does not hold; "": it holds everything.
    """

    source: BatchSource
    target: str
    cuts: list[tuple[int, int]]
    files: dict[str, FileState]
    left_behind: str = ""

    def head(self) -> Record:
        """Return the first line of the journal: all that decides the bytes; a file stands for its content."""
        meta = self.source.meta
        plan = {
            "version": PLAN_VERSION,
            "target": self.target,
            "meta": meta_to_json(meta),
            "shuffle": self.source.shuffle,
            "source": self.source.description,
            "identity": self.source.identity,
            "cuts": [list(cut) for cut in self.cuts],
            "has_pieces": self.source.has_pieces,
            "documents": [list(part) for part in self.source.document_parts],
            "files": self.files,
            PLANNED: [self._planned(shard) for shard in range(len(self.cuts))],
        }
        return Record(SHARDS, plan)

    def _planned(self, shard: int) -> Planned:
        """Return the facts of a shard that a journal must not change."""
        start, stop = self.cuts[shard]
        each = self.shards[shard]
        return Planned(
            path=self.name(shard),
            split=each.split,
            num_batches=stop - start,
            token_count=(stop - start) * self.source.meta.batch_tokens,
            document_count=NOT_KNOWN if each.documents is None else each.documents,
        )

    def name(self, shard: int) -> str:
        return f"{SHARD_PREFIX}{shard:05}-of-{len(self.cuts):05}{FORMATS[self.target].suffix}"

    def task(self, shard: int, folder: Path) -> ShardTask:
        """Return the work of one shard."""
        start, stop = self.cuts[shard]
        each = self.shards[shard]
        meta = self.source.meta
        records = each.records  # those of all shards add up to the whole
        if records is None:
            rest = max(0, meta.total_records - start * meta.batch_size)
            records = rest if stop == self.source.num_batches else (stop - start) * meta.batch_size
        meta = replace(meta, total_records=meta.total_records and records, document_count=each.documents or 0)
        return ShardTask(
            source=self.source,
            target=self.target,
            path=folder / self.name(shard),
            start=start,
            stop=stop,
            meta=meta,
            in_store=FORMATS[self.target].holds_batches,
            split=each.split,
            documents=each.documents,
        )

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
        source = self.source
        per_shard = 1 + FORMATS[self.target].has_sidecar + source.has_pieces
        return per_shard * len(self.cuts) + len(source.document_parts) + 3  # the folder, its index, the journal


def cut_into_shards(source: BatchSource, target: Target) -> list[tuple[int, int]]:
    """Return (start, stop) of each shard, in batches: consecutive, and none empty."""
    if source.is_cut or (source.shards and not target.is_cut):
        return source.cuts
    if target.is_cut:
        require_one_split(source, "leave out shards and shard_size", options=["shards", "shard_size"])
    total = source.num_batches
    count = number_of_shards(total, source.meta, target)
    return [(k * total // count, (k + 1) * total // count) for k in range(count)]


def number_of_shards(num_batches: int, meta: StoreMeta, target: Target) -> int:
    """Return the number of shards that was asked for, or that their size gives: by default at most `MOST_SHARDS`."""
    per_shard = max(1, target.shard_size // meta.batch_bytes)
    by_size = -(-num_batches // per_shard)
    count = target.shards or (by_size if target.is_cut else min(by_size, MOST_SHARDS))
    if count > num_batches:
        raise ConvertError(f"{num_batches:,} batches cannot fill {count:,} shards", remedy=Remedy.FILL_THE_SHARDS)
    return count


def require_one_split(source: BatchSource, cure: str, options: Sequence[str] = ()) -> None:
    """Raise `ConvertError` if shards of several splits would be mixed.

    Parameters
    ----------
    source
        The batches that become one sequence.
    cure
        What the caller can do about it.
    options
        The names of options in the cure.
    """
    splits = list(dict.fromkeys(shard.split for shard in source.shards))
    if len(splits) > 1:
        raise ConvertError(
            f"the source has the splits {', '.join(splits)}, which must not be mixed: {cure}", options=options
        )


def require_room(folder: Path, needed_bytes: int, num_inodes: int) -> None:
    """Raise `ConvertError` unless the file system of `folder` has space for the bytes that will be written."""
    if lack := lack_of_room(folder, free_room(folder), needed_bytes, num_inodes):
        raise ConvertError(lack)


def lack_of_room(folder: Path, free: dict[str, Any], needed_bytes: int, num_inodes: int) -> str:
    """Return the message for a file system that is too small for the files of a conversion; "": it has room."""
    if needed_bytes > free["bytes"]:
        return (
            f"{folder}: needs {format_bytes(needed_bytes)}, only {format_bytes(free['bytes'])} are free; free some, or "
            "choose another output"
        )
    if free["inodes"] is not None and num_inodes > free["inodes"]:
        return f"{folder}: needs {num_inodes:,} inodes, only {free['inodes']:,} are free; use fewer shards"
    return ""


def kept_of(settings: Settings) -> int:
    """Return the bytes on the disk that an interrupted conversion has written, which `resume` keeps."""
    partial = partial_path(settings.target.path)
    if not settings.work.resume or not partial.is_dir():
        return 0
    return sum(file.stat().st_blocks * 512 for file in partial.iterdir())


def free_room(folder: Path) -> dict[str, Any]:
    """Return free bytes and inodes for this user; None where the file system does not count inodes."""
    status = os.statvfs(folder)
    return {"bytes": status.f_bavail * status.f_frsize, "inodes": status.f_favail if status.f_files else None}
