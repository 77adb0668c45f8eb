"""Saves the good batches of a damaged or unfinished file in a new file. The original is never touched.

A complete file keeps every batch whose crc32 is right. A file whose writer was killed keeps its committed batches up to
the first bad one: behind that, nothing says in which order the rest reached the disk.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import GROUP_BYTES, BatchReader
from zb_hdf5.core.digests import batch_crc32s
from zb_hdf5.core.publishing import (
    PARTIAL_SUFFIX,
    fsync_directory,
    leftover_of_dead_writer,
    partial_path,
    refuse_existing,
)
from zb_hdf5.errors import ArgumentError, FormatError, IncompleteError, ZbError
from zb_hdf5.formats.registry import BACKENDS, FORMATS, backend_of_suffix
from zb_hdf5.formats.sidecar import ensure_crc32_file
from zb_hdf5.opening import open_reader
from zb_hdf5.spec import (
    INDEX_NAME,
    NOT_KNOWN,
    StoreMeta,
    TokenArray,
)
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.table import ShardEntry

REPAIRED = ".repaired"


@dataclass
class RepairReport:
    """The outcome of one file.

    Attributes
    ----------
    state
        "whole": nothing was done. "damaged": a dry run, or one that another file of the store stopped. "repaired":
        `output` has the good batches. "lost": it has none, and the index no longer names it.
    dropped
        Numbers of the bad batches.
    reason
        What is wrong, and what could not be checked.
    """

    path: str
    state: str = "whole"
    output: str | None = None
    kept: int = 0
    dropped: list[int] = field(default_factory=list)
    reason: str = ""

    def line(self) -> str:
        """Return the outcome as one line."""
        if self.state == "whole":
            return f"whole: {_batches(self.kept)}, none bad; nothing to do"
        if self.state == "lost":
            return f"{self.reason}: left out with its {_batches(len(self.dropped))}"
        verb = "kept" if self.state == "repaired" else "would keep"
        shown = ", ".join(map(str, self.dropped[:20])) + (", ..." if len(self.dropped) > 20 else "")
        dropped = f"dropped {len(self.dropped):,} ({shown})" if self.dropped else "dropped none"
        return f"{self.reason}: {verb} {_batches(self.kept)} in {self.output}, {dropped}"


def _batches(count: int) -> str:
    return f"{count:,} {'batch' if count == 1 else 'batches'}"


@dataclass
class _Findings:
    """The good and the bad batches of a file."""

    num_batches: int
    bad: list[int]
    kept_sha256: str
    reason: str

    @property
    def kept(self) -> list[tuple[int, int]]:
        """Ranges (start, stop) of the good batches."""
        edges = [-1, *self.bad, self.num_batches]
        return [(low + 1, high) for low, high in pairwise(edges) if low + 1 < high]


def repair_file(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    shape: StoreMeta | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> RepairReport:
    """Write the good batches of `path` to a new file.

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
        If no batch can be saved; the message says why.
    """
    path = Path(path)
    with ExitStack() as stack:
        if path.name.endswith(PARTIAL_SUFFIX):
            stack.enter_context(leftover_of_dead_writer(path))
        row = BACKENDS[backend_of_suffix(path.with_name(path.name.removesuffix(PARTIAL_SUFFIX)))]
        reader, stored, reason = row.open_broken(path, shape)
        stack.enter_context(reader)
        if not reader.complete and not path.name.endswith(PARTIAL_SUFFIX):
            stack.enter_context(leftover_of_dead_writer(path))
        findings = _examine(reader, stored, reason)
        report = RepairReport(str(path), "damaged", None, findings.num_batches - len(findings.bad), findings.bad)
        report.reason = findings.reason
        if reader.complete and not findings.reason and not path.name.endswith(PARTIAL_SUFFIX):
            report.state = "whole"
            return report
        if not report.kept:
            raise IncompleteError(f"{path}: no batch can be saved: {report.reason}; convert again")
        output = _default_output(path) if output is None else Path(output)
        report.output = str(output)
        if not dry_run:
            _write(reader, findings, output, overwrite)
            report.state = "repaired"
        return report


def _default_output(path: Path) -> Path:
    if path.name.endswith(PARTIAL_SUFFIX):
        return path.with_name(path.name.removesuffix(PARTIAL_SUFFIX))
    return path.with_name(path.stem + REPAIRED + path.suffix)


def _examine(reader: BatchReader, stored: npt.NDArray[np.uint32] | None, reason: str) -> _Findings:
    """Compare each batch with its crc32; if the crc32 rows are damaged, the sha256 of the whole decides."""
    whole, kept, bad = hashlib.sha256(), hashlib.sha256(), []
    for number, batch in _batches_or_none(reader):
        if batch is not None:
            whole.update(batch)
        if batch is None or (stored is not None and batch_crc32s(batch[np.newaxis])[0] != stored[number]):
            if not reader.complete:
                lost = f"batch {number:,} is bad, and {reader.num_batches - number:,} are lost with it"
                tail = list(range(number, reader.num_batches))
                return _Findings(reader.num_batches, tail, kept.hexdigest(), f"{reason}; {lost}")
            bad.append(number)
        else:
            kept.update(batch)
    if reader.sha256 is not None and whole.hexdigest() == reader.sha256 and bad:
        return _Findings(reader.num_batches, [], reader.sha256, f"{len(bad):,} stored crc32 are bad, no token is")
    reasons = [reason] if reason else []
    if bad:
        reasons.append(f"{len(bad):,} batches do not have the tokens that were written")
    elif reader.sha256 not in (None, whole.hexdigest()):
        reasons.append("its sha256 is not that of its tokens, though each crc32 is right")
    return _Findings(reader.num_batches, bad, kept.hexdigest(), "; ".join(reasons))


def _batches_or_none(reader: BatchReader) -> Iterator[tuple[int, TokenArray | None]]:
    """Yield each batch, or None for one that cannot be read; the array is reused."""
    batch = np.empty(reader.meta.shape, reader.dtype)
    for number in range(reader.num_batches):
        try:
            reader.read_into(number, batch)
        except FormatError:
            yield number, None
        else:
            yield number, batch


def _write(reader: BatchReader, findings: _Findings, output: Path, overwrite: bool) -> None:
    """Publish the good batches; an output that has them already is left as it is."""
    if output.resolve() == reader.path.resolve():
        raise ArgumentError(f"{output}: is the file to repair; it stays as it is: choose another output")
    if output.exists() and _holds(output, findings.kept_sha256):
        return
    if not overwrite:
        refuse_existing(output)
    # where the original is the output's own `.partial`, a writer of that name would replace it
    staged = output if partial_path(output) != reader.path else output.with_name(output.stem + REPAIRED + output.suffix)
    if staged == output or not (staged.exists() and _holds(staged, findings.kept_sha256)):
        _copy(reader, findings, staged, overwrite)
    if staged != output:
        if not overwrite:
            refuse_existing(output)
        os.replace(staged, output)
        fsync_directory(output.parent)


def _copy(reader: BatchReader, findings: _Findings, path: Path, overwrite: bool) -> None:
    expected = findings.num_batches - len(findings.bad)
    writer_class = BACKENDS[backend_of_suffix(path)].begin
    with writer_class(path, reader.meta, expected_batches=expected, overwrite=overwrite) as writer:
        group = np.empty((max(1, GROUP_BYTES // reader.meta.batch_bytes), *reader.meta.shape), reader.dtype)
        for start, stop in findings.kept:
            for first in range(start, stop, len(group)):
                batches = group[: min(len(group), stop - first)]
                reader.read_batches_into(first, batches)
                writer.write(batches)
        if writer.sha256() != findings.kept_sha256:
            raise FormatError(f"{reader.path}: changed while it was read; run it again")


def _holds(path: Path, sha256: str) -> bool:
    """Return whether a whole file has exactly these tokens."""
    try:
        with open_reader(path) as reader:
            return reader.complete and reader.token_sha256() == sha256
    except (ZbError, OSError):
        return False


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
    folder = Path(folder)
    index = ShardIndex.load(folder)
    reports, entries = [], []
    for entry in _shards_with_batches(folder, index):
        path = folder / entry.path
        if not path.exists() and partial_path(path).exists():
            path = partial_path(path)
        try:
            report = repair_file(path, overwrite=overwrite, dry_run=dry_run)
        except (FormatError, IncompleteError, FileNotFoundError) as error:
            if not (overwrite or dry_run):
                error.add_note(
                    f"Restore it, or pass --force to leave its {entry.num_batches:,} batches out of the store."
                )
                raise
            lost = list(range(entry.num_batches))
            reports.append(RepairReport(str(path), "lost", None, 0, lost, f"nothing can be saved: {error}"))
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
    repaired = replace(index, shards=tuple(entries), complete=True, live_id=live_id)
    if not dry_run and repaired != index:
        repaired.save(folder)
    return reports


def _shards_with_batches(folder: Path, index: ShardIndex) -> tuple[ShardEntry, ...]:
    """Return all shards but a growing one to which its dead writer has committed nothing."""
    last = index.shards[-1]
    path = last.file(folder)
    if len(index.shards) > 1 and not last.complete and path.exists():
        with suppress(FormatError), leftover_of_dead_writer(path), open_reader(path) as reader:
            if reader.num_batches == 0:
                return tuple(index.shards[:-1])
    return tuple(index.shards)


def _entry_of(path: Path, old: ShardEntry) -> ShardEntry:
    """Describe a repaired shard; its crc32 rows are written first where the format needs that."""
    with open_reader(path) as reader:
        if FORMATS[reader.backend].has_sidecar:
            ensure_crc32_file(reader)
        crc32 = reader.stored_crc32()
        return replace(
            old,
            path=old.path.rpartition("/")[0] + "/" * ("/" in old.path) + path.name,
            num_bytes=path.stat().st_size,
            num_batches=reader.num_batches,
            token_count=reader.num_batches * reader.meta.batch_tokens,
            sha256=reader.token_sha256(),
            crc32=NOT_KNOWN if crc32 is None else zlib.crc32(crc32),
            complete=True,
            columns=reader.columns,
            document_count=old.document_count if reader.num_batches == old.num_batches else NOT_KNOWN,
        )


def _entry_of_whole(path: Path, entry: ShardEntry) -> ShardEntry:
    """Return the entry if the shard agrees with it. A growing one was published, and then its writer was killed."""
    if not entry.complete:
        return _entry_of(path, entry)
    with open_reader(path) as reader:
        found = reader.sha256 or reader.token_sha256()
    if found != entry.sha256:
        raise FormatError(
            f"{path}: is whole, but {INDEX_NAME} says sha256 {entry.sha256}, found {found}; "
            f"if the shard is the right one, run 'zb index rebuild --force {path.parent}'"
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
    """Write the batches that hold of a file, or of each shard of a store, into new files; the originals stay.

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
    path = Path(path)
    if not path.is_dir():
        return [repair_file(path, output=output, shape=shape, overwrite=overwrite, dry_run=dry_run)]
    if output is not None or shape is not None:
        raise ArgumentError(f"{path}: is a store: an output and a shape are for one file")
    return repair_store(path, overwrite=overwrite, dry_run=dry_run)
