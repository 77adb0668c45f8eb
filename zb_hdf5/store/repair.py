"""Saves the good batches or documents of damaged files in new files, and makes lost indexes and `.crc32` files again.

The originals are never touched.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final

from zb_hdf5.documents.document_table import documents_path
from zb_hdf5.documents.pieces import pieces_path
from zb_hdf5.errors import (
    ArgumentError,
    BackendError,
    ExistsError,
    FormatError,
    IncompleteError,
    Remedy,
    ZbError,
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
from zb_hdf5.formats.native import crc32_path, ensure_crc32_file
from zb_hdf5.formats.registry import FORMATS, backend_of_suffix, backends, detect_backend, open_chunks
from zb_hdf5.spec import BATCHES_LAYOUT, INDEX_NAME, NOT_KNOWN, SHARD_PREFIX, STREAM_LAYOUT, StoreMeta
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.salvage import Salvage
from zb_hdf5.store.streams import document_tables, entry_of, index_files
from zb_hdf5.store.table import ShardEntry

REPAIRED = ".repaired"
#: The paths of the files that belong to the tokens of a file.
SIDECARS = (pieces_path, documents_path, crc32_path)


@dataclass
class RepairReport:
    """The outcome of one file.

    Attributes
    ----------
    state
        "whole": nothing was done. "damaged": a dry run, or one that another file of the store stopped. "repaired":
        `output` has the good ones. "lost": it has none, and the index no longer names it.
    unit
        The unit that is kept or dropped as a whole: "batch", or "document" of a stream.
    kept, dropped
        How many are kept, and the numbers of those that are dropped.
    kept_tokens, dropped_tokens
        Tokens of both; those of a document that its writer had not finished are dropped.
    reason
        The damage, and the facts that could not be checked.
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
        """Return the outcome as one line of text."""
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


def repair(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    shape: StoreMeta | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
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
    shape
        For one file only: shape and dtype of a `.batch` whose header was never written.
    overwrite
        Replace an existing output; leave a shard of which nothing can be saved out of the store.
    dry_run
        Report the outcome, and write nothing.

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
    if not path.is_dir():
        return [repair_file(path, output=output, shape=shape, overwrite=overwrite, dry_run=dry_run)]
    if output is not None or shape is not None:
        raise ArgumentError(f"{path}: is a store: an output and a shape are for one file")
    return repair_store(path, overwrite=overwrite, dry_run=dry_run)


# --- one file --------------------------------------------------------------------------------------------------------


def repair_file(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    shape: StoreMeta | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> RepairReport:
    """Write the good batches of a file, or the good documents of a stream, to a new file. See `repair`."""
    path, output = local_path(path), None if output is None else local_path(output)
    is_partial = path.name.endswith(PARTIAL_SUFFIX)
    final = path.with_name(path.name.removesuffix(PARTIAL_SUFFIX))
    with ExitStack() as stack:
        if is_partial:
            stack.enter_context(leftover_of_dead_writer(path))
        broken = FORMATS[backend_of_suffix(final)].open_broken(path, shape)
        reader = stack.enter_context(broken.reader)
        if not reader.complete and not is_partial:
            stack.enter_context(leftover_of_dead_writer(path))
        found = Salvage(broken)
        report = RepairReport(
            str(path), "damaged", None, found.kept, found.dropped, found.reason, found.unit, found.kept_tokens,
            found.dropped_tokens,
        )  # fmt: skip
        if reader.complete and not found.reason and not is_partial:
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
    path = found.reader.path
    if output.resolve() == path.resolve():
        raise ArgumentError(f"{output}: is the file to repair; it stays as it is: choose another output")
    if output.exists() and found.is_in(output):
        return
    if not overwrite:
        refuse_existing(output)
    # where the original is the output's own `.partial`, a writer of that name would replace it
    staged = output if partial_path(output) != path else _repaired(output)
    if staged == output or not (staged.exists() and found.is_in(staged)):
        found.copy(staged, overwrite=overwrite)
    if staged != output:
        if not overwrite:
            refuse_existing(output)
        _move(staged, output)


def _move(staged: Path, output: Path) -> None:
    """Move a file with its sidecars over another one with its own."""
    if output.exists():  # without it, its sidecars are those that a run moved before it was killed
        for sidecar in SIDECARS:
            sidecar(output).unlink(missing_ok=True)
        output.unlink()
    for sidecar in SIDECARS:
        if sidecar(staged).exists():
            os.replace(sidecar(staged), sidecar(output))
    os.replace(staged, output)
    fsync_directory(output.parent)


# --- a store ---------------------------------------------------------------------------------------------------------


def repair_store(
    folder: str | os.PathLike[str], *, overwrite: bool = False, dry_run: bool = False
) -> list[RepairReport]:
    """Repair every shard that needs it, then let `shards.json` name the new ones. See `repair`."""
    folder = local_path(folder)
    index = ShardIndex.load(folder)
    reports, entries = [], []
    for entry in _shards_with_batches(folder, index):
        path = folder / entry.path
        if not path.exists() and partial_path(path).exists():
            path = partial_path(path)
        try:
            report = _repair_shard(path, index, overwrite, dry_run)
        except FormatError as error:
            reports.append(_lost(path, entry, index.meta, error, overwrite or dry_run))
            continue
        reports.append(report)
        entries.append(entry if report.state == "damaged" else _entry_of(report, entry))
    if not entries:
        raise IncompleteError(f"{folder}: no shard can be saved; convert again")
    # where batches were dropped, the state of a loader that read the store live no longer names the same records
    live_id = "" if any(report.dropped for report in reports) else index.live_id
    meta = index.meta
    if meta.layout == STREAM_LAYOUT:
        meta = replace(meta, document_count=sum(entry.document_count for entry in entries))
        if any(report.output for report in reports):
            index = replace(index, documents=document_tables([folder / entry.path for entry in entries], entries))
    repaired = replace(index, meta=meta, shards=tuple(entries), complete=True, live_id=live_id)
    if not dry_run and repaired != index:
        repaired.save(folder)
    return reports


def _lost(path: Path, entry: ShardEntry, meta: StoreMeta, error: FormatError, may_be_lost: bool) -> RepairReport:
    """Return the report of a shard of which nothing can be saved; raise the error if none may be left out."""
    is_stream = meta.layout == STREAM_LAYOUT
    unit, count = ("document", entry.document_count) if is_stream else ("batch", entry.num_batches)
    if not may_be_lost:
        error.remedy, error.at = Remedy.LEAVE_OUT, counted(count, unit)
        raise error
    reason = f"nothing can be saved: {error.facts}"
    return RepairReport(str(path), "lost", None, 0, list(range(count)), reason, unit, 0, entry.token_count)


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


def _entry_of(report: RepairReport, old: ShardEntry) -> ShardEntry:
    """Return the entry of a repaired shard, or of a whole one that agrees with the entry that it has."""
    path = Path(report.output or report.path)
    with open_chunks(path) as reader:
        if old.complete and report.state == "whole":  # a growing one was published, and then its writer was killed
            found = reader.sha256 or reader.token_sha256()
            if found != old.sha256:
                raise FormatError(
                    f"{path}: is whole, but {INDEX_NAME} has sha256 {old.sha256}, found {found}",
                    remedy=Remedy.REBUILD_FORCE,
                    at=path.parent,
                )
            return old
        entry = entry_of(reader, old.split)
        if reader.meta.layout != STREAM_LAYOUT:  # only the index has the number of documents in it
            same = reader.num_batches == old.num_batches
            entry = replace(entry, document_count=old.document_count if same else NOT_KNOWN)
    folder, slash, _ = old.path.rpartition("/")
    return replace(entry, path=folder + slash + path.name)


# --- a lost index, or a lost `.crc32` --------------------------------------------------------------------------------

_NAME: Final = re.compile(
    re.escape(SHARD_PREFIX) + rf"(?P<number>\d+)(-of-(?P<count>\d+))?(?P<repaired>({re.escape(REPAIRED)})*)\.\w+"
)
#: Missing shards that a message names.
MAX_SHOWN: Final = 20
#: The facts of a store that files with a sidecar cannot hold.
ONLY_IN_SOME_FILES: Final = ("vocab_size", "tokenizer")


def rebuild_index(folder: str | os.PathLike[str], *, force: bool = False) -> ShardIndex:
    """Write `shards.json` from the shards of `folder`, and return it.

    A `.repaired` shard replaces its original. For `.batch` files the index alone has the record shuffle, the source,
    the vocabulary, the tokenizer, and the splits if there are no pieces; for any files, the identity of a store written
    live. They are taken from the old index if it can still be read, and else are lost with it.

    Parameters
    ----------
    force
        Replace an index that can be read; accept that shards are missing.

    Raises
    ------
    ArgumentError
        If there is no such folder.
    ExistsError
        If the index is valid.
    IncompleteError
        If shards are missing, by the numbers in their names, or one is not finished.
    FormatError
        If there are no shards, or they disagree.
    """
    folder = local_path(folder)
    if not folder.is_dir():
        raise ArgumentError(f"{folder}: expected the folder of a store, found no folder")
    old = None
    with suppress(ZbError):
        old = ShardIndex.load(folder)
    if old is not None and not force:
        raise ExistsError(f"{folder / INDEX_NAME}: exists already, and is valid")
    paths = _shard_paths(folder, force)
    known = {} if old is None else {_number(shard.path): shard.split for shard in old.shards}
    splits = {path.name: known[_number(path.name)] for path in paths if _number(path.name) in known}
    if old is None:
        index = index_files(paths)
    else:
        index = index_files(paths, splits=splits, shuffle=old.shuffle, source=old.source)
        kept = {name: getattr(index.meta, name) or getattr(old.meta, name) for name in ONLY_IN_SOME_FILES}
        same = known.keys() == {_number(path.name) for path in paths}
        if same and index.meta.layout == BATCHES_LAYOUT:  # several shards may have parts of a document
            kept["document_count"] = old.meta.document_count
        # with other tokens, the state of a loader that read the store live no longer names the same records
        live_id = old.live_id if index.sha256 == old.sha256 else ""
        index = replace(index, meta=replace(index.meta, **kept), live_id=live_id)
    index.save(folder)
    return index


def add_crc32_file(path: Path) -> Path | None:
    """Write the `<path>.crc32` of a file of a format that holds no crc32 rows; None if it has one."""
    name = detect_backend(path) if path.is_file() else ""
    if not name or not FORMATS[name].has_sidecar:
        nouns = " or ".join(row.noun for row in backends().values() if row.has_sidecar)
        raise BackendError(f"{path}: expected {nouns}" + (f", found a {name!r} file" if name else ""))
    with FORMATS[name].open(path) as reader:
        return ensure_crc32_file(reader)


def _number(name: str) -> str:
    match = _NAME.fullmatch(name)
    return match["number"] if match else name


def _shard_paths(folder: Path, force: bool) -> list[Path]:
    """Return the shards in order of their numbers."""
    suffixes = {backend.suffix for backend in backends().values()}
    found: dict[int, Path] = {}
    counts = set()
    for path in sorted(folder.iterdir(), key=lambda path: path.name.count(REPAIRED)):
        match = _NAME.fullmatch(path.name)
        if match is None or path.suffix not in suffixes:
            continue
        number = int(match["number"])
        if number in found and not match["repaired"]:
            raise FormatError(f"{folder}: {found[number].name} and {path.name} have one number; move one away")
        found[number] = path
        counts.add(int(match["count"] or 0))
    unfinished = sorted(path.name for path in folder.glob(f"{SHARD_PREFIX}*{PARTIAL_SUFFIX}"))
    waiting = [name for name in unfinished if not (folder / name.removesuffix(PARTIAL_SUFFIX)).exists()]
    if waiting and not force:
        raise IncompleteError(f"{folder}: {waiting[0]} is not finished", remedy=Remedy.REPAIR, at=folder / waiting[0])
    if not found:
        raise FormatError(f"{folder}: no file is called {SHARD_PREFIX}*: not a store; convert again")
    if len(counts) > 1:
        raise FormatError(f"{folder}: holds shards of stores of {sorted(counts)} shards; move those of others away")
    absent = (number for number in range(counts.pop() or max(found) + 1) if number not in found)
    missing = list(islice(absent, MAX_SHOWN + 1))  # a name with a date makes billions of them
    if missing and not force:
        numbers = ", ".join(map(str, missing[:MAX_SHOWN])) + (", and more" if len(missing) > MAX_SHOWN else "")
        raise IncompleteError(f"{folder}: shards {numbers} are missing", remedy=Remedy.DO_WITHOUT)
    return [found[number] for number in sorted(found)]
