"""Checks every stored batch, and every chunk of a stream, against every digest that was stored with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from zb_hdf5.errors import ChecksumError, FormatError, IncompleteError, Remedy, ZbError
from zb_hdf5.files.paths import RemotePath, any_path
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.registry import FORMATS, format_of, open_chunks
from zb_hdf5.spec import BATCHES_LAYOUT, INDEX_NAME
from zb_hdf5.store.index import ShardIndex, find_index
from zb_hdf5.store.table import ShardEntry
from zb_hdf5.store.token_store import npy_files
from zb_hdf5.store.verify_report import ShardReport
from zb_hdf5.store.verify_tables import check_beside, check_pieces, verify_documents

Count = Callable[[int], None]
EntryCheck = Callable[[BatchReader, ShardReport], None]


def _ignore(count: int) -> None:
    pass


def verify_store(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    workers: int | None = None,
    progress: Count = _ignore,
    announce: Count = _ignore,
) -> list[ShardReport]:
    """Check a file, or every shard of a store, several shards at a time: batches, streams and `.npy` files.

    Parameters
    ----------
    split
        Of a store, check the shards of this split only; None: all of them.
    workers
        Threads; by default one per core that this process may use. Hashing and reading release the interpreter lock.
    progress
        Called with the number of tokens checked since the last call, from any of the threads.
    announce
        Called once with the number of tokens that there are to check, if there are any.

    Returns
    -------
    list of ShardReport
        One per file, in order; those of the document tables come last. A damaged file is a report with a `problem`, and
        one that nothing is stored to compare with is a report of what is `missing`; neither is an exception.

    Raises
    ------
    FormatError
        If `path` is a folder whose `shards.json` cannot be read.
    ArgumentError
        If no shard is of that split.
    """
    path = any_path(path)
    folder = path.parent if path.name == INDEX_NAME else path
    files = [path] if isinstance(path, RemotePath) else npy_files(path)
    index = None
    if find_index(path) or not files:
        index = ShardIndex.load(folder).of_split(split)
        announce(index.token_count)
        jobs: list[tuple[Path, EntryCheck]] = [
            (entry.file(folder), partial(_check_entry, index, entry)) for entry in index.shards
        ]
        announce = _ignore
    else:
        jobs = [(file, check_beside) for file in files]
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), thread_name_prefix="zb-verify") as pool:
        reports = list(pool.map(lambda job: _verify_file(job[0], job[1], progress, announce), jobs))
        tables = list(pool.map(partial(verify_documents, folder), index.documents if index else ()))
    if index is not None and split is None and not any(report.problem for report in reports):
        _check_records(folder, index, reports)
    return reports + tables


def _check_records(folder: Path, index: ShardIndex, reports: list[ShardReport]) -> None:
    """Compare what no digest covers: the counts in the headers of the shards."""
    if any(FORMATS[report.backend].guards_metadata for report in reports):
        return
    found, expected = sum(report.total_records for report in reports), index.meta.total_records
    if found not in (expected, 0):
        where = reports[0]
        where.problem = FormatError(
            f"{where.path}: {INDEX_NAME} says {expected:,} records, the headers of the shards add up to {found:,}: one "
            "of them is damaged; its batches are whole",
            remedy=Remedy.REBUILD_FORCE,
            at=folder,
        )


def _verify_file(path: Path, check_entry: EntryCheck, progress: Count, announce: Count) -> ShardReport:
    report = ShardReport(str(path))
    try:
        row = format_of(path)
        report.backend = row.name
        if not row.holds_batches:
            report.token_count, report.missing = row.look_at(path)
            return report
        with open_chunks(path) as reader:
            announce(reader.token_count)
            _verify_reader(reader, check_entry, report, progress)
    except ZbError as error:
        report.problem = error
    except OSError as error:
        report.problem = IncompleteError(f"{path}: {error}")
    return report


def _verify_reader(reader: BatchReader, check_entry: EntryCheck, report: ShardReport, progress: Count) -> None:
    report.total_records, report.token_count = reader.meta.total_records, reader.token_count
    report.num_batches = reader.num_batches if reader.meta.layout == BATCHES_LAYOUT else 0
    report.sha256, report.checks = reader.compare_digests(progress)
    extra = FORMATS[reader.backend].extra_checks(reader)
    report.checks += extra
    for field in reader.meta.fields:
        report.fields[field.name], _ = reader.field(field.name).compare_digests()
    check_entry(reader, report)
    if report.checks == extra:  # they say nothing of the tokens
        report.missing = reader.missing_digests()
    report.checks += [f"field {name}" for name in report.fields]
    if not reader.complete:
        counted = f"{report.num_batches:,} batches" if report.num_batches else f"{report.token_count:,} tokens"
        raise IncompleteError(
            f"{reader.path}: its writer has not finished: {counted} are committed", remedy=Remedy.REPAIR, at=reader.path
        )


def _check_entry(index: ShardIndex, entry: ShardEntry, reader: BatchReader, report: ShardReport) -> None:
    if not entry.complete:
        raise IncompleteError(
            f"{reader.path}: is growing, or its writer was killed", remedy=Remedy.REPAIR, at=reader.path
        )
    if entry.num_batches == reader.num_batches:
        _compare_sha256(reader.path, entry.sha256, report.sha256)
    if (names := {field.name for field in reader.meta.fields}) != entry.fields.keys():
        raise FormatError(f"{reader.path}: {INDEX_NAME} names the fields {sorted(entry.fields)}, found {sorted(names)}")
    for name, found in report.fields.items():
        _compare_sha256(reader.field(name).path, entry.fields[name].sha256, found)
    if entry.backend != reader.backend:
        raise FormatError(f"{reader.path}: {INDEX_NAME} says backend {entry.backend!r}, found {reader.backend!r}")
    index.require_agreement(reader, entry)
    index.require_extents(reader, entry)
    if not FORMATS[reader.backend].guards_metadata and reader.meta.seed not in (index.meta.seed, 0):
        raise FormatError(f"{reader.path}: {INDEX_NAME} says seed {index.meta.seed}, its header {reader.meta.seed}")
    report.checks.append("index")
    if entry.pieces is not None:
        check_pieces(reader, entry.pieces, report)


def _compare_sha256(path: Path, expected: str, found: str) -> None:
    if expected != found:
        raise ChecksumError(f"{path}: {INDEX_NAME} says sha256 {expected}, its bytes give {found}; restore it")
