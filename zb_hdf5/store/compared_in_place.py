"""The files at a path that are in no store, compared with their own digests, or with those that were made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zb_hdf5.errors import ArgumentError, Remedy, UnverifiableError, ZbError
from zb_hdf5.files.look import Look
from zb_hdf5.files.named_splits import SplitFiles
from zb_hdf5.files.paths import any_path
from zb_hdf5.files.threads import ReadPool
from zb_hdf5.formats.corpus_file import CorpusFile
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.format import Format
from zb_hdf5.read_as import ReadAs
from zb_hdf5.store.compared_files import ComparedFiles
from zb_hdf5.store.digests import Digests, files_without_digests, needs_no_digests
from zb_hdf5.store.file_check import FileCheck, recorded, take_problem
from zb_hdf5.store.lost_index import no_index
from zb_hdf5.store.opened_path import OpenTables
from zb_hdf5.store.recognition import files_in_place, no_known_file
from zb_hdf5.store.shard_report import ShardReport
from zb_hdf5.store.table_check import check_sidecars
from zb_hdf5.store.way_in import not_in_place


def compared_in_place(look: Look, read_as: ReadAs, split: str | None) -> tuple[list[ShardReport], list[ComparedFiles]]:
    """Return the files at a path that are in no store; where none are known, a report on that.

    Raises
    ------
    FormatError, BackendError
        If they are not read in place, or have digests of their own, or others than those that were made.
    """
    digests = None if read_as.digests is None else Digests.load(read_as.digests)
    compared: ComparedFiles | None
    if digests is None:
        compared = _with_own_digests(look, read_as, split)
    else:
        compared = _with_made_digests(look, read_as, split, digests)
    return ([_unknown(look, digests)], []) if compared is None else ([], [compared])


def _with_own_digests(look: Look, read_as: ReadAs, split: str | None) -> LoneFiles | None:
    """Return the files at a path, which hold digests or are known to lack them; None: it has others."""
    found = files_in_place(look, read_as)
    if found is None:
        return None
    files = SplitFiles.at([look.path], found.files, split).files
    return LoneFiles([CorpusFile.at(look.path, any_path(file), {}) for file in files], found.code, read_as)


def _with_made_digests(look: Look, read_as: ReadAs, split: str | None, digests: Digests) -> DigestedFiles | None:
    """Return the files at a path that hold no digests, and those that were made; None: it has others."""
    found = files_without_digests(look, read_as)
    if found is None:
        return None
    flat, at_path = found
    files = SplitFiles.at([look.path], at_path, split).files
    known = [CorpusFile.at(look.path, any_path(file), digests.files) for file in files]
    return DigestedFiles(known, digests.as_digested(flat), look.path, digests)


def _unknown(look: Look, digests: Digests | None) -> ShardReport:
    """Return the report of a file that no format has, and that has a name of ours; raise the error of another path."""
    path = look.path
    if problem := not_in_place(look):
        raise problem
    if digests is not None:
        raise needs_no_digests(path, digests.path)
    if look.is_dir:
        raise no_index(path)
    report = ShardReport(str(path))
    with recorded(report, _take_error_of_lone):
        raise no_known_file(look)
    return report


def _take_error_of_lone(report: ShardReport, error: ZbError) -> None:
    """Keep an error of a file in no store, which may be one of another program, without digests of ours.

    An error that tells what the call lacks is raised: it tells nothing about the file.
    """
    is_of_call = isinstance(error, ArgumentError) and bool(error.options)
    if is_of_call or error.remedy in (Remedy.CONVERT, Remedy.CHANNELS):
        raise error
    if error.remedy is Remedy.DATASET:
        report.missing = f"no digest is stored: {error.facts}"
    elif isinstance(error, UnverifiableError):
        report.missing = str(error).removeprefix(f"{report.path}: ")
    else:
        take_problem(report, error)


@dataclass(frozen=True)
class LoneFiles(ComparedFiles):
    """Files that are compared with the digests that they hold; those of another trainer hold none.

    Attributes
    ----------
    code
        Their format.
    read_as
        As for `verify_store`.
    """

    code: Format
    read_as: ReadAs

    def compare(self, check: FileCheck) -> None:
        code = self.code
        if isinstance(code, FlatFormat) and not code.row.takes_batches:
            found = check.found_flat(code)
            code.open(found).close()  # which refuses what no reader reads
            check.report.missing = f"{code.row.noun} hold no digests; {Remedy.DIGESTS.about(str(found.path))}"
        else:
            check.compare_stored(code, partial(check_sidecars, check.tables, check.report))

    def take_error(self, report: ShardReport, error: ZbError) -> None:
        """Keep an error, unless the user names a dataset, and it is the wrong one."""
        if error.remedy is Remedy.DATASET and self.read_as.dataset is not None:
            raise error
        _take_error_of_lone(report, error)

    def others(self, readers: ReadPool, reports: Sequence[ShardReport], tables: OpenTables) -> list[ShardReport]:
        return []


@dataclass(frozen=True)
class DigestedFiles(ComparedFiles):
    """Files that hold no digests, and are compared with those that were made of them.

    Attributes
    ----------
    flat
        Their format, which reads them as they were digested.
    path
        The path that was digested.
    digests
        The digests.
    """

    flat: FlatFormat
    path: Path
    digests: Digests

    def compare(self, check: FileCheck) -> None:
        flat = self.flat
        report = check.report
        found = check.found_flat(flat)
        if check.file.made is None:
            report.missing = f"{self.digests.path} has no digests of it"
            return
        facts, _ = found.of_stream
        made = self.digests.require(facts, check.file.name)
        with flat.open(replace(found, digest=made)) as corpus:
            report.sha256, report.checks = corpus.digests.compare(check.progress.columns(corpus.meta)[0][1])
        if made.documents_sha256:
            made.require_documents(found.path, flat.document_offsets(facts))
            report.checks.append("documents")

    def take_error(self, report: ShardReport, error: ZbError) -> None:
        _take_error_of_lone(report, error)

    def others(self, readers: ReadPool, reports: Sequence[ShardReport], tables: OpenTables) -> list[ShardReport]:
        """Return a report on each file that was digested and is not there."""
        if not self.path.is_dir():
            return []
        missing = self.digests.missing(self.path, [file.name for file in self.files])
        return [ShardReport(path, backend=self.flat.name, problem=error) for path, error in missing.items()]
