"""Batches as a target: the file of each shard, its sidecars, and the index of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np
import numpy.typing as npt

from zb_hdf5 import BatchWriter, ChecksumError, ShardEntry, ShardIndex
from zb_hdf5.converters.batch_source import BatchSource, read_groups
from zb_hdf5.converters.engines import CountedWork
from zb_hdf5.converters.journal import Finished, digests_of, meta_from_json, require_unchanged
from zb_hdf5.converters.plan import COMMIT_BYTES, BatchRange, TargetFiles, Task
from zb_hdf5.documents.document_table import DocumentPart, check_documents, write_joined
from zb_hdf5.documents.metadata import TableInfo
from zb_hdf5.documents.table_writer import PiecesWriter
from zb_hdf5.errors import Remedy
from zb_hdf5.files.publishing import copy_published, flush_in_parts, partial_path
from zb_hdf5.formats.batch_writer import FileWriter
from zb_hdf5.signals import deliver_signals
from zb_hdf5.spec import CRC32_SUFFIX, PIECES_SUFFIX, documents_path, pieces_path
from zb_hdf5.store.format_list import FORMATS, load_format

#: The word for the files in the journal and in messages.
SHARDS: Final = "shards"
#: The share of the work on a shard that is done when its tokens are written, and not yet on the disk.
WRITTEN_SHARE: Final = 2 / 3
#: Records whose pieces are moved at once, and the most tokens of them.
BLOCK_RECORDS: Final = 1 << 15
MOVED_TOKENS: Final = 1 << 22


@dataclass(frozen=True)
class BatchFiles(TargetFiles):
    """Files of batches, or of records. See `TargetFiles`.

    Parameters
    ----------
    format
        The name of their format.
    """

    unit: ClassVar[str] = SHARDS
    format: str

    @property
    def is_store(self) -> bool:
        return FORMATS[self.format].holds_batches

    def files(self, path: Path) -> tuple[Path, ...]:
        return path, *(path.with_name(path.name + suffix) for suffix in (CRC32_SUFFIX, PIECES_SUFFIX))

    def write(self, task: Task, work: CountedWork) -> Finished:
        source: BatchSource = task.source
        batches = cast(BatchRange, task.part)
        _, sha256 = source.file_of(batches.start, batches.stop)
        crc32 = source.crc32_of(batches.start, batches.stop)
        writer: FileWriter = load_format(FORMATS[self.format]).write(
            task.path,
            task.meta,
            expected_batches=batches.stop - batches.start,
            overwrite=task.overwrite,
            # a copy whose every batch has the crc32 of the original has its sha256 too: hashing is what takes longest
            known_sha256=None if crc32 is None else sha256,
            origin=_origin(task),
            commit_bytes=COMMIT_BYTES,
        )
        written = 0
        with writer:
            if task.meta.fields:  # no digest of the shard covers them
                source.check_reads()
            for group in read_groups(source, batches.start, batches.stop):
                group.in_use = writer.append(group.tokens, group.fields)
                written += group.tokens.size
                work.reach(WRITTEN_SHARE * written / task.amount)
            _require_intact(source.paths[0], writer, batches.start, sha256, crc32)
            if task.files is not None:
                require_unchanged(source.paths, task.files)
            pieces = self._write_documents(task, writer)
            for share in flush_in_parts(partial_path(task.path)):
                deliver_signals()
                work.reach(WRITTEN_SHARE + (1 - WRITTEN_SHARE) * share)
            work.reach(1.0)
            info = writer.finish()
        entry = replace(ShardEntry.of(info, batches.split, batches.documents), pieces=pieces)
        frame, _ = digests_of(task, entry, frame_only=True)
        return Finished(entry, info.max_token, frame)

    def _write_documents(self, task: Task, writer: FileWriter) -> TableInfo | None:
        """Write the pieces of a file beside it, and the documents of a lone one; they get their names with it."""
        source: BatchSource = task.source
        batches = cast(BatchRange, task.part)
        path = task.path
        if FORMATS[self.format].tokens_only:
            return None
        tokens_sha256 = writer.sha256()
        if source.document_files and task.is_lone:
            write_joined(
                source.document_files, writer.begin_sidecar(documents_path(path)), batches.split, tokens_sha256
            )
        if not source.has_pieces:
            return None
        step = max(1, min(BLOCK_RECORDS // source.meta.batch_size, MOVED_TOKENS // source.meta.batch_tokens))
        with PiecesWriter(path) as pieces:
            for first in range(batches.start, batches.stop, step):
                deliver_signals()
                pieces.append_pieces(source.read_pieces(first, min(first + step, batches.stop)))
            file = writer.begin_sidecar(pieces_path(path))
            return pieces.write_to(file, seq_len=source.meta.seq_len, split=batches.split, tokens_sha256=tokens_sha256)

    def add_tables(self, folder: Path, source: BatchSource) -> None:
        if FORMATS[self.format].tokens_only:
            return
        for path, table in zip(source.document_files, source.document_parts, strict=True):
            copy_published(path, folder / table.path)
            check_documents(folder / table.path, table)

    def index(self, folder: Path, facts: Mapping[str, Any], finished: Sequence[Finished]) -> ShardIndex:
        return ShardIndex(
            meta_from_json(facts["meta"]),
            tuple(done.entry for done in finished),
            facts["shuffle"],
            facts["source"],
            documents=tuple(DocumentPart(*part) for part in facts["documents"]) if self.is_store else (),
        ).with_max_token(done.max_token for done in finished)


def _origin(task: Task) -> dict[str, Any]:
    """Return the origin of the tokens: of a shard as in the index, of a lone copy as its source file has it."""
    source: BatchSource = task.source
    if source.origin is not None and task.is_lone:
        return source.origin
    return {"source": source.description, "shuffle": source.shuffle, "split": task.part.split}


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
