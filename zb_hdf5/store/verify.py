"""Checks every stored batch against every digest that was stored with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.core.paths import local_path
from zb_hdf5.errors import ChecksumError, FormatError, IncompleteError, ZbError
from zb_hdf5.formats.registry import FORMATS, detect_backend
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.kinds import is_stream
from zb_hdf5.store.report import ShardReport
from zb_hdf5.store.table import ShardEntry
from zb_hdf5.store.verify_stream import verify_stream

Progress = Callable[[int], None]


EntryCheck = Callable[[BatchReader, ShardReport], None]


def verify_store(
    path: str | os.PathLike[str], *, workers: int | None = None, progress: Progress = lambda tokens: None
) -> list[ShardReport]:
    """Check a file, or every shard of a store, several shards at a time.

    Parameters
    ----------
    workers
        Threads; by default one per core that this process may use. Hashing and reading release the interpreter lock.
    progress
        Called with the number of tokens checked since the last call, from any of the threads.

    Returns
    -------
    list of ShardReport
        One per file, in order. A damaged file is a report with a `problem`, and one that nothing is stored to compare
        with is a report of what is `missing`; neither is an exception.

    Raises
    ------
    FormatError
        If `path` is a folder whose `shards.json` cannot be read.
    """
    path = local_path(path)
    if _is_stream(path):
        return verify_stream(path, workers=workers, progress=progress)
    index = None
    if path.is_dir() or path.name == INDEX_NAME:
        folder = path if path.is_dir() else path.parent
        index = ShardIndex.load(path)
        jobs: list[tuple[Path, EntryCheck]] = [
            (entry.file(folder), partial(_check_entry, index, entry)) for entry in index.shards
        ]
    else:
        jobs = [(path, lambda reader, report: None)]
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), thread_name_prefix="zb-verify") as pool:
        reports = list(pool.map(lambda job: _verify_file(job[0], job[1], progress), jobs))
    if index is not None and not any(report.problem for report in reports):
        _check_records(index, reports)
    return reports


def _is_stream(path: Path) -> bool:
    """Return whether there are tokens instead of batches; what is too damaged to say is no stream."""
    try:
        return is_stream(path)
    except (ZbError, OSError):
        return False


def _check_records(index: ShardIndex, reports: list[ShardReport]) -> None:
    """Compare what no digest covers: the counts in the headers of the shards."""
    if any(FORMATS[report.backend].guards_metadata for report in reports):
        return
    found, expected = sum(report.total_records for report in reports), index.meta.total_records
    if found not in (expected, 0):
        where = reports[0]
        where.problem = FormatError(
            f"{where.path}: {INDEX_NAME} says {expected:,} records, the headers of the shards add up to {found:,}: one "
            "of them is damaged; its batches are whole: run 'zb index rebuild' or convert again"
        )


def _verify_file(path: Path, check_entry: EntryCheck, progress: Progress) -> ShardReport:
    report = ShardReport(str(path))
    try:
        report.backend = detect_backend(path)
        row = FORMATS[report.backend]
        with row.open(path) as reader:
            report.total_records = reader.meta.total_records
            report.num_batches, report.token_count = reader.num_batches, reader.num_batches * reader.meta.batch_tokens
            report.sha256, report.checks = reader.compare_digests(progress)
            extra = row.extra_checks(reader)
            report.checks += extra
            check_entry(reader, report)
            if report.checks == extra:  # they say nothing of the tokens
                report.missing = reader.missing_digests()
        if not reader.complete:
            raise IncompleteError(f"{path}: its writer has not finished: {reader.num_batches:,} batches are committed")
    except ZbError as error:
        report.problem = error
    except OSError as error:
        report.problem = IncompleteError(f"{path}: {error}")
    return report


def _check_entry(index: ShardIndex, entry: ShardEntry, reader: BatchReader, report: ShardReport) -> None:
    if not entry.complete:
        raise IncompleteError(f"{reader.path}: is growing, or its writer was killed: then run 'zb repair'")
    if entry.num_batches == reader.num_batches:
        _compare_sha256(reader.path, entry.sha256, report.sha256)
    if entry.backend != reader.backend:
        raise FormatError(f"{reader.path}: {INDEX_NAME} says backend {entry.backend!r}, found {reader.backend!r}")
    index.require_agreement(reader, entry)
    index.require_extents(reader, entry)
    if not FORMATS[reader.backend].guards_metadata and reader.meta.seed not in (index.meta.seed, 0):
        raise FormatError(f"{reader.path}: {INDEX_NAME} says seed {index.meta.seed}, its header {reader.meta.seed}")
    report.checks.append("index")


def _compare_sha256(path: Path, expected: str, found: str) -> None:
    if expected != found:
        raise ChecksumError(f"{path}: {INDEX_NAME} says sha256 {expected}, its tokens give {found}; restore it")
