"""Saves the good batches or documents of damaged or unfinished files in new files; the originals are never touched.

A complete file keeps every batch whose crc32 is right; a stream every document that touches no bad chunk. A file whose
writer was killed keeps the batches that were committed up to the first bad one. The rest is dropped: nothing proves
that it was written.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_table import DocumentTableFile, write_joined
from zb_hdf5.documents.table_file import PiecesFile
from zb_hdf5.documents.table_writer import PiecesWriter
from zb_hdf5.errors import (
    ArgumentError,
    ChecksumError,
    ConvertError,
    FormatError,
    IncompleteError,
    Remedy,
    ZbError,
    counted,
)
from zb_hdf5.files.checked import Crc32Rows, checked, crc32_of
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import (
    PARTIAL_SUFFIX,
    fsync_directory,
    leftover_of_dead_writer,
    partial_path,
    refuse_existing,
)
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.batch_reader import GROUP_BYTES, BatchReader, BrokenFile
from zb_hdf5.formats.h5_reader import HDF5Reader
from zb_hdf5.formats.registry import FORMATS, backend_of_suffix, open_chunks
from zb_hdf5.formats.stream_writer import HDF5ShardWriter
from zb_hdf5.spec import (
    DEFAULT_SPLIT,
    INDEX_NAME,
    NOT_KNOWN,
    STREAM_LAYOUT,
    TokenArray,
    crc32_path,
    documents_path,
    pieces_path,
)
from zb_hdf5.store.both_formats import require_one_store
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.rebuild import REPAIRED, document_tables, ensure_rows, entry_of
from zb_hdf5.store.shard_table import ShardEntry

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
        return [repair_file(path, output=output, overwrite=overwrite, dry_run=dry_run)]
    require_one_store(path, "name the one to repair, or convert it again from the other one, which loses no batch")
    if output is not None:
        raise ArgumentError(f"{path}: is a store: an output is for one file")
    return repair_store(path, overwrite=overwrite, dry_run=dry_run)


# --- one file --------------------------------------------------------------------------------------------------------


def repair_file(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
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
        broken = FORMATS[backend_of_suffix(final)].open_broken(path)
        reader = stack.enter_context(broken.reader)
        if not reader.complete and not is_partial:
            stack.enter_context(leftover_of_dead_writer(path))
        found = Salvage(broken)
        report = found.report
        if reader.complete and not report.reason and not is_partial:
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


# --- the good part of a file ------------------------------------------------------------------------------------------


class Salvage:
    """The good part of one file, and the report of it; `IncompleteError` if its documents are lost."""

    def __init__(self, broken: BrokenFile) -> None:
        self.reader, stored, reason = broken
        self._is_stream = self.reader.meta.layout == STREAM_LAYOUT
        self._reasons = [reason] if reason else []
        self._chunk_tokens = self.reader.meta.batch_tokens
        bad = np.array(self._examine(stored), np.int64)
        self._offsets = np.arange(self.reader.num_batches + 1) * self._chunk_tokens
        if isinstance(self.reader, HDF5Reader) and self._is_stream:
            try:
                self._offsets = self.reader.doc_offsets().astype(np.int64)
            except (FormatError, ChecksumError) as error:
                raise IncompleteError(
                    f"{self.reader.path}: no document can be saved: the offsets of its documents are damaged; make it "
                    "again"
                ) from error
        starts, ends = self._offsets[:-1], self._offsets[1:]
        first_bad = bad.searchsorted(starts // self._chunk_tokens)  # of the bad chunks that a unit touches
        whole = (first_bad == bad.searchsorted((ends - 1) // self._chunk_tokens, side="right")) | (starts == ends)
        if not self.reader.complete and len(bad):
            whole &= ends <= bad[0] * self._chunk_tokens
        self._lengths = (ends - starts)[whole]
        kept_tokens = int(self._lengths.sum())
        self.report = RepairReport(
            str(self.reader.path), "damaged", None, len(self._lengths), np.flatnonzero(~whole).tolist(),
            "; ".join(self._reasons), "document" if self._is_stream else "batch", kept_tokens,
            self.reader.token_count - kept_tokens,
        )  # fmt: skip

    def _examine(self, stored: npt.NDArray[np.uint32] | None) -> list[int]:
        """Return the chunks that differ from their crc32; if the crc32 rows are damaged, the sha256 of all decides."""
        reader, total = self.reader, self.reader.num_batches
        crc32, bad, sha256 = _examined(reader, stored)
        rows = np.array(crc32, "<u4")  # a chunk that is read again is as it was found
        self._tokens = checked(reader.tokens, Crc32Rows(lambda: rows), reader.path, reader.meta.noun, "batch")
        bad_values = set[int]()
        for each in reader.meta.fields:
            values = reader.field(each.name)
            known = values.stored_crc32()
            bad_values |= set(range(total)) if known is None else _examined(values, known)[1]
        if bad and reader.sha256 == sha256 and not bad_values and reader.complete:
            self._reasons = [f"{len(bad):,} stored crc32 are bad, no token is"]
            return []
        bad |= bad_values
        if bad and not reader.complete:
            first = min(bad)
            self._reasons.append(f"{reader.meta.noun} {first:,} is bad, and {total - first:,} are lost with it")
            return list(range(first, total))
        if bad:
            self._reasons.append(f"the tokens of {counted(len(bad), reader.meta.noun)} are not those that were written")
        elif reader.sha256 not in (None, sha256):
            self._reasons.append("its sha256 is not that of its tokens, though each crc32 is right")
        return sorted(bad)

    def is_in(self, path: Path) -> bool:
        """Return whether a whole file has exactly the kept batches or documents."""
        try:
            with open_chunks(path) as reader:
                other = Salvage(BrokenFile(reader, reader.stored_crc32(), ""))
                expected, found = ((m.shape, m.layout, m.fields) for m in (self.reader.meta, reader.meta))
                same = expected == found and np.array_equal(other._lengths, self._lengths)
                return same and reader.complete and not other._reasons and other._sha256() == self._sha256()
        except (ZbError, OSError):
            return False

    def _sha256(self) -> dict[str, str]:
        """Return the digest of the kept values of each field, and under no name that of the kept tokens."""
        digests = {name: hashlib.sha256() for name in ("", *(field.name for field in self.reader.meta.fields))}
        for _, tokens, fields in self._parts():
            for name, values in {"": tokens, **fields}.items():
                digests[name].update(np.ascontiguousarray(values))
        return {name: digest.hexdigest() for name, digest in digests.items()}

    def copy(self, path: Path, *, overwrite: bool) -> None:
        """Write the kept batches or documents to a new file."""
        if self._is_stream:
            self._copy_documents(path, overwrite)
            return
        row, meta = FORMATS[backend_of_suffix(path)], self.reader.meta
        options = {"expected_batches": self.report.kept, "overwrite": overwrite, "origin": self.reader.origin}
        with row.begin(path, meta, **options) as writer:
            for _, tokens, values in self._parts():
                batches = tokens.reshape(-1, *meta.shape)
                fields = {f.name: values[f.name].reshape(*batches.shape, *f.shape) for f in meta.fields}
                writer.write(batches, fields)
            self._copy_pieces(path, writer.sha256())

    def _copy_pieces(self, path: Path, tokens_sha256: str) -> None:
        """Write the sidecars of the new file: the pieces of the kept batches, and the documents of a lone file."""
        reader, size = self.reader, self.reader.meta.batch_size
        table = documents_path(reader.path)
        write_joined([table] if table.exists() else [], path, DEFAULT_SPLIT, tokens_sha256)
        if not pieces_path(reader.path).exists():
            pieces_path(path).unlink(missing_ok=True)
            return
        stored = PiecesFile(reader.path, None, reader.seq_len, verify="none")
        with closing(stored), closing(PiecesWriter(path)) as writer:
            try:
                stored.check()
                for first, stop in self._groups():
                    writer.append_pieces(stored.read_run(first * size, stop * size))
                writer.publish(seq_len=reader.seq_len, split=stored.split, tokens_sha256=tokens_sha256)
            except ZbError as error:
                error.add_note(f"Restore it, or remove it to repair {reader.path} without its pieces.")
                raise

    def _copy_documents(self, path: Path, overwrite: bool) -> None:
        if FORMATS[backend_of_suffix(path)].tokens_only:
            raise ArgumentError(f"{path}: expected the name of a file that can hold a token stream: one in .h5")
        meta, documents = self.reader.meta, documents_path(self.reader.path)
        table = DocumentTableFile(documents) if documents.exists() else None
        spans: dict[str, Any] = {"spans_codec": table.spans_codec} if table else {}
        with closing(table) if table else nullcontext(), HDF5ShardWriter(
            path, dtype=meta.dtype.name, chunk_tokens=meta.chunk_tokens, boundary_token_id=meta.boundary_token_id,
            vocab_size=meta.vocab_size, tokenizer=meta.tokenizer, overwrite=overwrite, fields=meta.fields,
            codec=meta.codec, origin=self.reader.origin, **spans,
        ) as writer:  # fmt: skip
            for (first, stop), tokens, fields in self._parts():
                rows = None if table is None else table.rows(first, stop)
                writer.write_documents(tokens, np.diff(self._offsets[first : stop + 1]), fields, documents=rows)

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Yield (first, stop) of kept units that follow each other: many small ones at once, or one large one."""
        first, size = 0, GROUP_BYTES // self.reader.dtype.itemsize
        for end in [*self.report.dropped, len(self._offsets) - 1]:
            while first < end:
                stop = int(self._offsets.searchsorted(self._offsets[first] + size, side="right")) - 1
                stop = min(max(stop, first + 1), end)
                yield first, stop
                first = stop
            first = end + 1

    def _parts(self) -> Iterator[tuple[tuple[int, int], TokenArray, dict[str, TokenArray]]]:
        """Yield (first, stop) of kept units, their tokens, and the values of their fields."""
        for first, stop in self._groups():
            start, end = self._offsets[[first, stop]].tolist()
            values = {f: self.reader.field(f.name).tokens for f in self.reader.meta.fields}
            fields = {
                f.name: _values(tokens, start * f.size, end * f.size).reshape(-1, *f.shape)
                for f, tokens in values.items()
            }
            yield (first, stop), _values(self._tokens, start, end), fields


def _values(tokens: Tokens, start: int, stop: int) -> TokenArray:
    out = np.empty(stop - start, tokens.dtype)
    tokens.read([(start, out)])
    return out


def _examined(reader: BatchReader, stored: npt.NDArray[np.uint32] | None) -> tuple[list[int], set[int], str]:
    """Return the crc32 of each chunk, those that are bad or cannot be read, and the sha256 of all that was readable."""
    crc32, bad, sha256, size = list[int](), set[int](), hashlib.sha256(), reader.meta.batch_tokens
    for number in range(reader.num_batches):
        try:
            tokens = _values(reader.tokens, number * size, min((number + 1) * size, reader.token_count))
        except (FormatError, ConvertError, ChecksumError, OSError) as error:  # the third one: it does not unpack
            if isinstance(error, OSError) and error.errno != errno.EIO:  # that is a bad sector, of this chunk alone
                raise
            crc32.append(0)
            bad.add(number)
        else:
            crc32.append(crc32_of(tokens))
            sha256.update(tokens)
            if stored is not None and stored[number] != crc32[number]:
                bad.add(number)
    return crc32, bad, sha256.hexdigest()


# --- a store ---------------------------------------------------------------------------------------------------------


def repair_store(
    folder: str | os.PathLike[str], *, overwrite: bool = False, dry_run: bool = False
) -> list[RepairReport]:
    """Repair every shard that needs it, then let `shards.json` name the new ones. See `repair`."""
    folder = local_path(folder)
    index = ShardIndex.load(folder)
    reports, entries = [], []
    for entry in _shards_with_batches(folder, index):
        path = entry.file(folder)
        try:
            if not path.exists():
                raise FormatError(f"{path}: {INDEX_NAME} names this shard, found no such file")
            report = repair_file(path, overwrite=overwrite, dry_run=dry_run)
            found = entry if report.state == "damaged" else _entry_of(report, entry)
        except FormatError as error:
            reports.append(_lost(path, entry, index.holds_stream, error, overwrite or dry_run))
            continue
        if found is None:
            raise FormatError(
                f"{path}: is whole, but its sha256 is not that of {INDEX_NAME}, {entry.sha256}",
                remedy=Remedy.REBUILD_FORCE,
                at=folder,
            )
        reports.append(report)
        entries.append(found)
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


def _lost(path: Path, entry: ShardEntry, is_stream: bool, error: FormatError, may_be_lost: bool) -> RepairReport:
    """Return the report of a shard of which nothing can be saved; raise the error if none may be left out."""
    unit, count = ("document", entry.document_count) if is_stream else ("batch", entry.num_batches)
    if not may_be_lost:
        error.remedy, error.at = Remedy.LEAVE_OUT, counted(count, unit)
        raise error
    reason = f"nothing can be saved: {error.facts}"
    return RepairReport(str(path), "lost", None, 0, list(range(count)), reason, unit, 0, entry.token_count)


def _shards_with_batches(folder: Path, index: ShardIndex) -> tuple[ShardEntry, ...]:
    """Return all shards but a growing one to which its dead writer has committed nothing."""
    last = index.shards[-1]
    path = last.file(folder)
    if len(index.shards) > 1 and not last.complete and path.exists():
        with suppress(FormatError), leftover_of_dead_writer(path), open_chunks(path) as reader:
            if reader.num_batches == 0:
                return tuple(index.shards[:-1])
    return tuple(index.shards)


def _entry_of(report: RepairReport, old: ShardEntry) -> ShardEntry | None:
    """Return the entry of a repaired shard, or of a whole one; None if that is not the shard of its entry."""
    path = Path(report.output or report.path)
    with open_chunks(path) as reader:
        if (found := {each.name for each in reader.meta.fields}) != old.fields.keys():
            raise FormatError(f"{path}: {INDEX_NAME} names the fields {sorted(old.fields)}, found {sorted(found)}")
        if not old.complete or report.state != "whole":  # a growing one was published, and its writer was killed
            ensure_rows(reader)
            entry = entry_of(reader, old.split)
            if reader.meta.layout != STREAM_LAYOUT:  # only the index has the number of documents in it
                same = reader.num_batches == old.num_batches
                entry = replace(entry, document_count=old.document_count if same else NOT_KNOWN)
            return replace(entry, path=str(Path(old.path).with_name(path.name)))
        return old if (reader.sha256 or reader.token_sha256()) == old.sha256 else None
