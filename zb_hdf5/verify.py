"""Checks every stored batch against every digest that was stored with it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zb_hdf5.digest import batch_crc32s
from zb_hdf5.errors import ChecksumError, FormatError, IncompleteError, ZbError
from zb_hdf5.index import ShardEntry, ShardIndex
from zb_hdf5.native import Face, face_of
from zb_hdf5.reader import GROUP_BYTES, BatchReader
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.store import BACKENDS, detect_backend, is_stream, open_reader
from zb_hdf5.verifystream import ShardReport, verify_stream

Progress = Callable[[int], None]


EntryCheck = Callable[[BatchReader, ShardReport], None]


def verify_store(
    path: str | os.PathLike[str], *, workers: int | None = None, progress: Progress = lambda tokens: None
) -> list[ShardReport]:
    """Check a file, or every shard of a store, several shards at a time.

    Parameters
    ----------
    workers
        Threads; by default one per core. Hashing and reading release the interpreter lock.
    progress
        Called with the number of tokens checked since the last call, from any of the threads.

    Returns
    -------
    list of ShardReport
        One per file, in order. A damaged file is a report with a `problem`, not an exception.

    Raises
    ------
    FormatError
        If `path` is a folder whose `shards.json` cannot be read.
    """
    path = Path(path)
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
    with ThreadPoolExecutor(workers or os.cpu_count() or 1, thread_name_prefix="zb-verify") as pool:
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
    """Compare what no digest covers: the counts in the headers of `.batch` shards."""
    if any(report.backend != "batch" for report in reports):
        return  # HDF5 guards its attributes itself
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
        with BACKENDS[report.backend].reader_class()(path) as reader:
            report.total_records = reader.meta.total_records
            report.num_batches, report.token_count = reader.num_batches, reader.num_batches * reader.meta.batch_tokens
            _check_content(reader, report, progress)
            if reader.sha256 is None and face_of(path) is not Face.NONE:
                _check_face(path, report)
            check_entry(reader, report)
        if not reader.complete:
            raise IncompleteError(f"{path}: its writer has not finished: {reader.num_batches:,} batches are committed")
    except ZbError as error:
        report.problem = error
    except OSError as error:
        report.problem = IncompleteError(f"{path}: {error}")
    return report


def _check_content(reader: BatchReader, report: ShardReport, progress: Progress) -> None:
    """Compare each batch with its crc32, and all of them with the sha256."""
    stored = reader.stored_crc32()
    digest = hashlib.sha256()
    group = np.empty((max(1, GROUP_BYTES // reader.meta.batch_bytes), *reader.meta.shape), reader.dtype)
    for start in range(0, reader.num_batches, len(group)):
        batches = group[: min(len(group), reader.num_batches - start)]
        reader.read_batches_into(start, batches)
        digest.update(batches)
        if stored is not None:
            _compare_crc32(reader.path, start, batch_crc32s(batches), stored)
        progress(batches.size)
    report.sha256 = digest.hexdigest()
    if stored is not None:
        report.checks.append("crc32")
    if reader.sha256 is not None:
        _compare_sha256(reader.path, reader.sha256, report.sha256, "the file")
        report.checks.append("sha256")


def _check_face(path: Path, report: ShardReport) -> None:
    from zb_hdf5.dual import check  # h5py, which a plain .batch does not need

    check(path)
    report.checks.append("face")


def _compare_crc32(path: Path, start: int, found: list[int], stored: npt.NDArray[np.uint32]) -> None:
    bad = np.flatnonzero(np.array(found, dtype=np.uint32) != stored[start : start + len(found)])
    if len(bad):
        number = int(bad[0])
        raise ChecksumError(
            f"{path}: batch {start + number:,} is the first bad one: expected crc32 {int(stored[start + number]):08x}, "
            f"found {found[number]:08x}; restore the shard, or convert it again"
        )


def _compare_sha256(path: Path, expected: str, found: str, where: str) -> None:
    if expected != found:
        raise ChecksumError(f"{path}: {where} says sha256 {expected}, its tokens give {found}; restore it")


def _check_entry(index: ShardIndex, entry: ShardEntry, reader: BatchReader, report: ShardReport) -> None:
    if not entry.complete:
        raise IncompleteError(f"{reader.path}: is growing, or its writer was killed: then run 'zb repair'")
    if entry.num_batches == reader.num_batches:
        _compare_sha256(reader.path, entry.sha256, report.sha256, INDEX_NAME)
    index.require_agreement(reader, entry)
    if reader.backend == "batch" and reader.meta.seed not in (index.meta.seed, 0):
        raise FormatError(f"{reader.path}: {INDEX_NAME} says seed {index.meta.seed}, its header {reader.meta.seed}")
    report.checks.append("index")


def total_tokens(path: str | os.PathLike[str]) -> int:
    """Return how many tokens there are to check, or 0 where that cannot be told without opening a damaged file."""
    path = Path(path)
    try:
        with open_reader(path) as reader:
            return reader.num_batches * reader.meta.batch_tokens
    except (ZbError, OSError):
        return 0
