"""Saves the good batches or documents of damaged or unfinished files in new files; the originals are never touched.

A complete file keeps every batch whose crc32 is right; a stream every document that touches no bad chunk. A file whose
writer was killed keeps the batches that were committed up to the first bad one. The rest is dropped: nothing proves
that it was written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from zb_hdf5.errors import (
    ArgumentError,
    FormatError,
    IncompleteError,
    Remedy,
    counted,
)
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import (
    PARTIAL_SUFFIX,
    fsync_directory,
    leftover_of_dead_writer,
    partial_path,
    refuse_existing,
)
from zb_hdf5.files.replaced_files import ReplacedFiles
from zb_hdf5.formats.corpus_file import CorpusFile
from zb_hdf5.signals import deferred_signals
from zb_hdf5.spec import (
    INDEX_NAME,
    NOT_KNOWN,
    STREAM_LAYOUT,
    sidecars_of,
)
from zb_hdf5.store.both_formats import require_one_store
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.rebuild import REPAIRED, document_tables, ensure_rows, entry_of
from zb_hdf5.store.salvage import CountBytes, ReadBytes, RepairReport, Salvage, column_bytes
from zb_hdf5.store.shard_table import ShardEntry
from zb_hdf5.store.unchecked_file import open_chunks, open_damaged


def repair(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: CountBytes = lambda num_bytes: None,
    announce: CountBytes = lambda num_bytes: None,
) -> list[RepairReport]:
    """Write the batches or documents that hold of a file, or of each shard of a store, into new files.

    The originals stay. New shards of a store are in its folder, and the index is replaced last, in one step. A kill
    before that leaves the store as it was, and the next run takes the shards that are finished.

    Parameters
    ----------
    path
        A file, a `.partial`, or the folder of a store.
    output
        For one file only: by default the final name for a `.partial`, and `<stem>.repaired<suffix>` for any other file.
    overwrite
        Replace an existing output; leave a shard that cannot be saved out of the store.
    dry_run
        Report the outcome, and write nothing.
    progress
        Called with the number of bytes read since the last call.
    announce
        Called with the number of bytes that there are to read, each time that more are known.

    Returns
    -------
    list of RepairReport
        One for each file.

    Raises
    ------
    UnavailableError
        If a writer is at work on a file.
    FormatError, IncompleteError
        If nothing can be saved, or `shards.json` cannot be read; the message has the reason.
    ExistsError, ConvertError
        If the output exists, and holds something else.
    """
    path = local_path(path)
    work = ReadBytes(progress, announce)
    if not path.is_dir():
        report = _repair_file(path, None if output is None else local_path(output), overwrite, dry_run, work)
        work.end()
        return [report]
    require_one_store(path, "name the store to repair, or convert it again from the other, which loses no batch")
    if output is not None:
        raise ArgumentError(f"{path}: is a store: an output is for one file")
    reports = _repair_store(path, overwrite, dry_run, work)
    work.end()
    return reports


# --- one file --------------------------------------------------------------------------------------------------------


def repair_file(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> RepairReport:
    """Write the good batches of a file, or the good documents of a stream, to a new file. See `repair`."""
    to = None if output is None else local_path(output)
    return _repair_file(local_path(path), to, overwrite, dry_run, ReadBytes())


def _repair_file(
    path: Path, output: Path | None, overwrite: bool, dry_run: bool, work: ReadBytes, entry: ShardEntry | None = None
) -> RepairReport:
    """Repair a file. The work of one that has an entry in an index is expected already."""
    is_partial = path.name.endswith(PARTIAL_SUFFIX)
    final = path.with_name(path.name.removesuffix(PARTIAL_SUFFIX))
    with ExitStack() as stack:
        if is_partial:
            stack.enter_context(leftover_of_dead_writer(path))
        broken = open_damaged(path, final)
        corpus = stack.enter_context(broken.corpus)
        if not corpus.complete and not is_partial:
            stack.enter_context(leftover_of_dead_writer(path))
        if entry is None:
            work.expect(column_bytes(corpus.num_tokens, corpus.meta))
        found = Salvage(broken, work)
        report = found.report
        if corpus.complete and not report.reason and not is_partial:
            report.state = "whole"
            return report
        if not report.kept_tokens:
            raise IncompleteError(f"{path}: no {report.unit} can be saved: {report.reason}; convert again")
        output = output or (final if is_partial else _repaired(path))
        report.output = str(output)
        if not dry_run:
            _write(found, output, overwrite)
            report.state = "repaired"
        return report


def _repaired(path: Path) -> Path:
    return path.with_name(path.stem + REPAIRED + path.suffix)


def _write(found: Salvage, output: Path, overwrite: bool) -> None:
    """Publish the good part of a file; an output that has it already is left as it is."""
    path = found.corpus.path
    if output.resolve() == path.resolve():
        raise ArgumentError(f"{output}: is the file to repair; it stays as it is: choose another output")
    # where the original is the output's own `.partial`, a writer of that name would replace it
    staged = output if partial_path(output) != path else _repaired(output)
    if staged != output and ReplacedFiles(output, sidecars_of(output)).put_back():
        staged.unlink(missing_ok=True)  # a run that was killed has taken sidecars of it
    if output.exists() and found.is_in(output):
        return
    if not overwrite:
        refuse_existing(output)
    if staged == output or not (staged.exists() and found.is_in(staged)):
        found.copy(staged, overwrite=overwrite)
    if staged != output:
        if not overwrite:
            refuse_existing(output)
        _move(staged, output)


def _move(staged: Path, output: Path) -> None:
    """Move a file with its sidecars over another one with its own."""
    sidecars = sidecars_of(output)
    with deferred_signals(), ReplacedFiles(output, sidecars).aside():
        for made, sidecar in zip(sidecars_of(staged), sidecars, strict=True):
            with suppress(FileNotFoundError):
                os.replace(made, sidecar)
        os.replace(staged, output)
        fsync_directory(output.parent)


# --- a store ---------------------------------------------------------------------------------------------------------


def repair_store(
    folder: str | os.PathLike[str], *, overwrite: bool = False, dry_run: bool = False
) -> list[RepairReport]:
    """Repair every shard that needs it, then let `shards.json` name the new ones. See `repair`."""
    return _repair_store(local_path(folder), overwrite, dry_run, ReadBytes())


def _repair_store(folder: Path, overwrite: bool, dry_run: bool, work: ReadBytes) -> list[RepairReport]:
    index = ShardIndex.load(folder)
    reports: list[RepairReport] = []
    entries: list[ShardEntry] = []
    work.expect(column_bytes(index.token_count, index.meta))
    for file, entry in zip(_files_with_batches(folder, index), index.shards, strict=False):
        path = file.path
        try:
            if not path.exists():
                raise FormatError(f"{path}: {INDEX_NAME} names this shard, found no such file")
            report = _repair_file(path, None, overwrite, dry_run, work, entry)
            found = entry if report.state == "damaged" else _entry_of(report, entry)
        except FormatError as error:
            reports.append(_lost(path, entry, index.meta.layout == STREAM_LAYOUT, error, overwrite or dry_run))
            continue
        if found is None:
            raise FormatError(
                f"{path}: is not damaged, but its sha256 differs from {INDEX_NAME}, which has {entry.sha256}",
                remedy=Remedy.REBUILD_FORCE,
                at=folder,
            )
        reports.append(report)
        entries.append(found)
    if not entries:
        raise IncompleteError(f"{folder}: no shard can be saved; convert again")
    repaired = _repaired_index(folder, index, entries, reports)
    if not dry_run and repaired != index:
        repaired.save(folder)
    return reports


def _repaired_index(
    folder: Path, index: ShardIndex, entries: list[ShardEntry], reports: list[RepairReport]
) -> ShardIndex:
    """Return the index with the entries of the repaired shards."""
    # where batches were dropped, the state of a loader that read the store live no longer names the same records
    live_id = "" if any(report.dropped for report in reports) else index.live_id
    repaired = replace(index, shards=tuple(entries), complete=True, live_id=live_id)
    if index.meta.layout != STREAM_LAYOUT:
        return repaired
    document_count = sum(entry.document_count for entry in entries)
    documents = index.documents
    if any(report.output for report in reports):
        documents = document_tables(repaired.files(folder), entries)
    return replace(repaired, meta=replace(index.meta, document_count=document_count), documents=documents)


def _lost(path: Path, entry: ShardEntry, is_stream: bool, error: FormatError, may_be_lost: bool) -> RepairReport:
    """Return the report of a shard that cannot be saved; raise the error unless it may be lost."""
    unit = "document" if is_stream else "batch"
    count = entry.document_count if is_stream else entry.num_batches
    if not may_be_lost:
        error.args = (error.facts.removesuffix("; restore it, or convert again"),)  # the remedy has it too
        error.remedy = Remedy.LEAVE_OUT
        error.at = counted(count, unit)
        raise error
    return RepairReport(
        path=str(path),
        state="lost",
        dropped=list(range(count)),
        reason=f"nothing can be saved: {error.facts}",
        unit=unit,
        dropped_tokens=entry.token_count,
    )


def _files_with_batches(folder: Path, index: ShardIndex) -> Sequence[CorpusFile]:
    """Return the files of all shards but a growing one, the last, to which its dead writer has committed nothing."""
    files = index.files(folder)
    path = files[-1].path
    if len(files) > 1 and not index.shards[-1].complete and path.exists():
        with suppress(FormatError), leftover_of_dead_writer(path), open_chunks(path) as corpus:
            if corpus.num_units == 0:
                return files[:-1]
    return files


def _entry_of(report: RepairReport, old: ShardEntry) -> ShardEntry | None:
    """Return the index entry of a shard; None if an undamaged file does not match `old`."""
    path = Path(report.output or report.path)
    with open_chunks(path) as corpus:
        if (found := {each.name for each in corpus.meta.fields}) != old.fields.keys():
            raise FormatError(f"{path}: {INDEX_NAME} names the fields {sorted(old.fields)}, found {sorted(found)}")
        if old.complete and report.state == "whole":
            return old if (corpus.sha256 or corpus.digests.tokens_sha256()) == old.sha256 else None
        ensure_rows(corpus)  # also of a growing shard that was published before its writer was killed
        entry = entry_of(corpus, old.split)
        if not corpus.is_stream:  # only the index has the number of documents in it
            same = corpus.num_units == old.num_batches
            entry = replace(entry, document_count=old.document_count if same else NOT_KNOWN)
        return replace(entry, path=str(Path(old.path).with_name(path.name)))
