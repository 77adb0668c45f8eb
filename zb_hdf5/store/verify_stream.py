"""Checks the tokens of streams against every digest that was stored with them."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from zb_hdf5.errors import ChecksumError, IncompleteError, ZbError
from zb_hdf5.formats.hdf5.stream_reader import (
    StreamInspection,
    inspect_stream,
    open_token_file,
    read_chunk_crc32,
    read_doc_offsets,
)
from zb_hdf5.formats.npy import read_npy_header
from zb_hdf5.spec import INDEX_NAME
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.report import ShardReport
from zb_hdf5.store.table import ShardEntry
from zb_hdf5.store.tokens import npy_files

Progress = Callable[[int], None]


#: What a `.npy` file would need to be verified.
NPY_MISSING: Final = (
    ".npy files hold no digests; convert them to a store, which keeps digests from then on, or keep their sha256sum"
)


def verify_stream(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    workers: int | None = None,
    progress: Progress = lambda tokens: None,
) -> list[ShardReport]:
    """Check an HDF5 stream, a store of them or one split of it, or `.npy` files. See `verify_store`."""
    path = Path(path)
    folder = path.parent if path.name == INDEX_NAME else path
    jobs: list[tuple[Path, ShardEntry | None]]
    if (folder / INDEX_NAME).exists():
        jobs = [(folder / entry.path, entry) for entry in ShardIndex.load(folder).of_split(split).shards]
    else:
        jobs = [(file, None) for file in npy_files(path)]
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), thread_name_prefix="zb-verify") as pool:
        return list(pool.map(lambda job: verify_stream_file(job[0], job[1], progress), jobs))


def verify_stream_file(
    path: Path, entry: ShardEntry | None = None, progress: Progress = lambda tokens: None
) -> ShardReport:
    """Check one file, and what its index says of it. See `verify_stream`."""
    report = ShardReport(str(path), backend="npy" if path.suffix == ".npy" else "hdf5")
    try:
        if report.backend == "npy":
            report.token_count = _count_npy_tokens(path)
            report.missing = NPY_MISSING
        else:
            _check_content(path, inspect_stream(path), entry, report, progress)
    except ZbError as error:
        report.problem = error
    except OSError as error:
        report.problem = IncompleteError(f"{path}: {error}")
    return report


def _count_npy_tokens(path: Path) -> int:
    """Return how many tokens a `.npy` file of any shape has: it holds as many bytes as its header says, or is bad."""
    shape, _, dtype, byte_offset = read_npy_header(path)
    expected, found = byte_offset + prod(shape) * dtype.itemsize, path.stat().st_size
    if found < expected:
        raise IncompleteError(f"{path}: expected {expected:,} bytes, found {found:,}; copy the file again")
    return prod(shape)


def _check_content(
    path: Path, found: StreamInspection, entry: ShardEntry | None, report: ShardReport, progress: Progress
) -> None:
    report.token_count = found.token_count
    chunks = range(0, found.token_count, found.chunk_tokens)
    stored, digest = read_chunk_crc32(path, len(chunks), found.identity), hashlib.sha256()
    chunk = np.empty(found.chunk_tokens, found.dtype)
    file = open_token_file(path, identity=found.identity)
    try:
        for number, start in enumerate(chunks):
            tokens = chunk[: min(found.chunk_tokens, found.token_count - start)]
            file.read_into(start, tokens)
            digest.update(tokens)
            if zlib.crc32(tokens) != int(stored[number]):
                raise ChecksumError(
                    f"{path}: chunk {number:,} (tokens {start:,} to {start + len(tokens):,}) is the first bad one; "
                    "restore the shard, or make it again"
                )
            progress(len(tokens))
    finally:
        file.close()
    report.sha256 = digest.hexdigest()
    report.checks.append("crc32")
    if not found.complete:
        raise IncompleteError(f"{path}: its writer has not finished: {found.token_count:,} tokens are committed")
    expected = {"the file": found.sha256} | ({} if entry is None else {INDEX_NAME: entry.sha256})
    for where, sha256 in expected.items():
        if sha256 != report.sha256:
            raise ChecksumError(f"{path}: {where} says sha256 {sha256}, its tokens give {report.sha256}; restore it")
        report.checks.append("sha256" if where == "the file" else "index")
    _check_documents(path, found, entry)
    report.checks.append("documents")


def _check_documents(path: Path, found: StreamInspection, entry: ShardEntry | None) -> None:
    offsets = read_doc_offsets(path, found.identity)
    if zlib.crc32(offsets) != found.doc_offsets_crc32 or int(offsets[0]) != 0 or int(offsets[-1]) != found.token_count:
        raise ChecksumError(f"{path}: the places of its documents are damaged; restore the shard, or make it again")
    if entry is not None and (entry.token_count, entry.document_count) != (found.token_count, found.document_count):
        raise ChecksumError(
            f"{path}: {INDEX_NAME} says {entry.token_count:,} tokens in {entry.document_count:,} documents, the shard "
            f"{found.token_count:,} in {found.document_count:,}"
        )
