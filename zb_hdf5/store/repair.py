"""Saves the good batches or documents of damaged or unfinished files in new files. The originals are never touched."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from zb_hdf5.documents.document_table import documents_path
from zb_hdf5.documents.pieces_file import pieces_path
from zb_hdf5.errors import ArgumentError, FormatError, IncompleteError, Remedy
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import (
    PARTIAL_SUFFIX,
    fsync_directory,
    leftover_of_dead_writer,
    partial_path,
    refuse_existing,
)
from zb_hdf5.files.sizes import counted
from zb_hdf5.formats.registry import BACKENDS, backend_of_suffix, open_chunks
from zb_hdf5.formats.sidecar import crc32_path
from zb_hdf5.spec import INDEX_NAME, NOT_KNOWN, STREAM_LAYOUT, StoreMeta
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.salvage import Salvage, salvage
from zb_hdf5.store.streams import document_tables, entry_of
from zb_hdf5.store.table import ShardEntry

REPAIRED = ".repaired"
#: Where the neighbours of a file lie, which belong to its tokens.
BESIDE = (pieces_path, documents_path, crc32_path)


@dataclass
class RepairReport:
    """The outcome of one file.

    Attributes
    ----------
    state
        "whole": nothing was done. "damaged": a dry run, or one that another file of the store stopped. "repaired":
        `output` has the good ones. "lost": it has none, and the index no longer names it.
    unit
        What is kept or dropped as a whole: "batch", or "document" of a stream.
    kept, dropped
        How many are kept, and the numbers of those that are dropped.
    kept_tokens, dropped_tokens
        Tokens of both; those of a document that its writer had not finished are dropped.
    reason
        What is wrong, and what could not be checked.
    """

    path: str
    state: str = "whole"
    output: str | None = None
    kept: int = 0
    dropped: list[int] = field(default_factory=list)
    reason: str = ""
    unit: str = "batch"
    kept_tokens: int = 0
    dropped_tokens: int = 0

    def line(self) -> str:
        kept = counted(self.kept, self.unit)
        if self.state == "whole":
            return f"whole: {kept}, none bad; nothing to do"
        if self.state == "lost":
            return f"{self.reason}: left out with its {counted(len(self.dropped), self.unit)}"
        verb = "kept" if self.state == "repaired" else "would keep"
        shown = ", ".join(map(str, self.dropped[:20])) + (", ..." if len(self.dropped) > 20 else "")
        dropped = f"dropped {len(self.dropped):,} ({shown})" if self.dropped else "dropped none"
        if self.dropped_tokens:
            dropped += f": {counted(self.dropped_tokens, 'token')} of {self.kept_tokens + self.dropped_tokens:,}"
        return f"{self.reason}: {verb} {kept} in {self.output}, {dropped}"


def repair_file(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    shape: StoreMeta | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> RepairReport:
    """Write the good batches of `path`, or the good documents of a stream, to a new file.

    Parameters
    ----------
    output
        By default the final name for a `.partial`, and `<stem>.repaired<suffix>` for any other file.
    shape
        Shape and dtype of a `.batch` whose header was never written.
    overwrite
        Replace an existing output.
    dry_run
        Say what would be done, and write nothing.

    Raises
    ------
    UnavailableError
        If a writer is at work on the file.
    ConvertError
        If the output exists and holds something else.
    IncompleteError, FormatError
        If nothing can be saved; the message says why.
    """
    path, output = local_path(path), None if output is None else local_path(output)
    with ExitStack() as stack:
        if path.name.endswith(PARTIAL_SUFFIX):
            stack.enter_context(leftover_of_dead_writer(path))
        row = BACKENDS[backend_of_suffix(path.with_name(path.name.removesuffix(PARTIAL_SUFFIX)))]
        broken = row.open_broken(path, shape)
        reader = stack.enter_context(broken.reader)
        if not reader.complete and not path.name.endswith(PARTIAL_SUFFIX):
            stack.enter_context(leftover_of_dead_writer(path))
        found = salvage(broken)
        report = RepairReport(
            str(path), "damaged", None, found.kept, found.dropped, found.reason, found.unit, found.kept_tokens,
            found.dropped_tokens,
        )  # fmt: skip
        if reader.complete and not found.reason and not path.name.endswith(PARTIAL_SUFFIX):
            report.state = "whole"
            return report
        if not report.kept_tokens:
            raise IncompleteError(f"{path}: no {report.unit} can be saved: {report.reason}; convert again")
        output = _default_output(path) if output is None else output
        report.output = str(output)
        if not dry_run:
            _write(found, output, overwrite)
            report.state = "repaired"
        return report


def _default_output(path: Path) -> Path:
    if path.name.endswith(PARTIAL_SUFFIX):
        return path.with_name(path.name.removesuffix(PARTIAL_SUFFIX))
    return path.with_name(path.stem + REPAIRED + path.suffix)


def _write(found: Salvage, output: Path, overwrite: bool) -> None:
    """Publish what is good; an output that has it already is left as it is."""
    path = found.reader.path
    if output.resolve() == path.resolve():
        raise ArgumentError(f"{output}: is the file to repair; it stays as it is: choose another output")
    if output.exists() and found.is_in(output):
        return
    if not overwrite:
        refuse_existing(output)
    # where the original is the output's own `.partial`, a writer of that name would replace it
    staged = output if partial_path(output) != path else output.with_name(output.stem + REPAIRED + output.suffix)
    if staged == output or not (staged.exists() and found.is_in(staged)):
        found.copy(staged, overwrite=overwrite)
    if staged != output:
        if not overwrite:
            refuse_existing(output)
        _move(staged, output)


def _move(staged: Path, output: Path) -> None:
    """Move a file with its neighbours over another one with its own."""
    if output.exists():  # without it, its neighbours are those that a run moved before it was killed
        for beside in BESIDE:
            beside(output).unlink(missing_ok=True)
        output.unlink()
    for beside in BESIDE:
        if beside(staged).exists():
            os.replace(beside(staged), beside(output))
    os.replace(staged, output)
    fsync_directory(output.parent)


def repair_store(
    folder: str | os.PathLike[str], *, overwrite: bool = False, dry_run: bool = False
) -> list[RepairReport]:
    """Repair every shard that needs it, then let `shards.json` name the new ones.

    A shard of which nothing can be saved, or that is missing, is an error; with `overwrite` it is left out of the
    index, and the report says so.

    Each new shard lies beside its original, which stays; the index is replaced last, in one step. A kill before that
    leaves the store as it was, and the next run takes the shards that are finished.

    Raises
    ------
    FormatError
        If `shards.json` cannot be read, or a shard is missing or belongs to another store.
    """
    folder = local_path(folder)
    index = ShardIndex.load(folder)
    is_stream = index.meta.layout == STREAM_LAYOUT
    unit = "document" if is_stream else "batch"
    reports, entries = [], []
    for entry in _shards_with_batches(folder, index):
        path = folder / entry.path
        if not path.exists() and partial_path(path).exists():
            path = partial_path(path)
        try:
            report = _repair_shard(path, index, overwrite, dry_run)
        except FormatError as error:
            count = entry.document_count if is_stream else entry.num_batches
            if not (overwrite or dry_run):
                error.remedy, error.at = Remedy.LEAVE_OUT, counted(count, unit)
                raise
            reason, lost = f"nothing can be saved: {error.facts}", list(range(count))
            reports.append(RepairReport(str(path), "lost", None, 0, lost, reason, unit, 0, entry.token_count))
            continue
        if report.state == "repaired" and report.output is not None:
            entry = _entry_of(Path(report.output), entry)
        elif report.state == "whole":
            entry = _entry_of_whole(path, entry)
        reports.append(report)
        entries.append(entry)
    if not entries:
        raise IncompleteError(f"{folder}: no shard can be saved; convert again")
    # where batches were dropped, the state of a loader that read the store live no longer names the same records
    live_id = "" if any(report.dropped for report in reports) else index.live_id
    meta = index.meta
    if is_stream:
        meta = replace(meta, document_count=sum(entry.document_count for entry in entries))
        tables = document_tables([folder / entry.path for entry in entries], entries)
        index = replace(index, documents=tables if any(report.output for report in reports) else index.documents)
    repaired = replace(index, meta=meta, shards=tuple(entries), complete=True, live_id=live_id)
    if not dry_run and repaired != index:
        repaired.save(folder)
    return reports


def _repair_shard(path: Path, index: ShardIndex, overwrite: bool, dry_run: bool) -> RepairReport:
    """Repair one shard. Raises `FormatError` also if it is not there, or lacks the fields of its store."""
    if not path.exists():
        raise FormatError(f"{path}: {INDEX_NAME} names this shard, found no such file")
    report = repair_file(path, overwrite=overwrite, dry_run=dry_run)
    if report.state != "damaged":
        with open_chunks(Path(report.output or path)) as reader:
            found, expected = ([field.name for field in meta.fields] for meta in (reader.meta, index.meta))
        if found != expected:
            raise FormatError(f"{path}: {INDEX_NAME} names the fields {expected}, found {found}")
    return report


def _shards_with_batches(folder: Path, index: ShardIndex) -> tuple[ShardEntry, ...]:
    """Return all shards but a growing one to which its dead writer has committed nothing."""
    last = index.shards[-1]
    path = last.file(folder)
    if len(index.shards) > 1 and not last.complete and path.exists():
        with suppress(FormatError), leftover_of_dead_writer(path), open_chunks(path) as reader:
            if reader.num_batches == 0:
                return tuple(index.shards[:-1])
    return tuple(index.shards)


def _entry_of(path: Path, old: ShardEntry) -> ShardEntry:
    with open_chunks(path) as reader:
        entry = entry_of(reader, old.split)
        if reader.meta.layout != STREAM_LAYOUT:  # which documents are in it, only the index knows
            same = reader.num_batches == old.num_batches
            entry = replace(entry, document_count=old.document_count if same else NOT_KNOWN)
    folder, slash, _ = old.path.rpartition("/")
    return replace(entry, path=folder + slash + path.name)


def _entry_of_whole(path: Path, entry: ShardEntry) -> ShardEntry:
    """Return the entry if the shard agrees with it. A growing one was published, and then its writer was killed."""
    if not entry.complete:
        return _entry_of(path, entry)
    with open_chunks(path) as reader:
        found = reader.sha256 or reader.token_sha256()
    if found != entry.sha256:
        raise FormatError(
            f"{path}: is whole, but {INDEX_NAME} says sha256 {entry.sha256}, found {found}",
            remedy=Remedy.REBUILD_FORCE,
            at=path.parent,
        )
    return entry


def repair(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    shape: StoreMeta | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> list[RepairReport]:
    """Write the batches or documents that hold of a file, or of each shard of a store, into new files.

    The originals stay.

    Parameters
    ----------
    path
        A file, a `.partial`, or the folder of a store.
    output, shape
        Of one file only. See `repair_file`.
    overwrite
        Replace an existing output; leave a shard of which nothing can be saved out of the store.
    dry_run
        Say what would be done, and write nothing.

    Returns
    -------
    list of RepairReport
        One for each file.

    Raises
    ------
    FormatError, IncompleteError
        If nothing can be saved; the message says why.
    ExistsError, ConvertError
        If the output exists.
    """
    path = local_path(path)
    if not path.is_dir():
        return [repair_file(path, output=output, shape=shape, overwrite=overwrite, dry_run=dry_run)]
    if output is not None or shape is not None:
        raise ArgumentError(f"{path}: is a store: an output and a shape are for one file")
    return repair_store(path, overwrite=overwrite, dry_run=dry_run)
