"""The check of one file: it is read as a corpus, and compared with all digests that are known of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from zb_hdf5.errors import IncompleteError, Remedy, UnavailableError, ZbError
from zb_hdf5.files.look import Look
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.corpus_file import CorpusFile
from zb_hdf5.formats.flat import FlatFormat
from zb_hdf5.formats.format import Format
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.store.check_progress import CheckProgress
from zb_hdf5.store.digests import CHUNKS_OF_FLAT_FILES
from zb_hdf5.store.opened_path import OpenTables
from zb_hdf5.store.shard_report import ShardReport
from zb_hdf5.store.unchecked_file import open_unchecked

if TYPE_CHECKING:  # h5py, which `.batch` files do not need
    from zb_hdf5.formats.h5_column import Column

#: Called with the report on a file and an error that it has; raises an error that tells nothing about the file.
TakeError: TypeAlias = Callable[[ShardReport, ZbError], None]


def take_problem(report: ShardReport, error: ZbError) -> None:
    """Keep an error as the problem of a file."""
    report.problem = error


@contextmanager
def recorded(report: ShardReport, take: TakeError = take_problem) -> Iterator[None]:
    """Keep an error of a block in the report on a file.

    A machine that lacks a codec, a server or the right to read tells nothing about the file.

    Parameters
    ----------
    report
        The report.
    take
        Keeps an error in it, or raises it.
    """
    try:
        yield
    except UnavailableError:
        raise
    except ZbError as error:
        take(report, error)
    except PermissionError as error:
        raise UnavailableError(
            f"{report.path}: this user may not read it, so that nothing is known about it: ask for the right to it"
        ) from error
    except FileNotFoundError:
        report.problem = IncompleteError(f"{report.path}: is not there; restore it, or repair the store without it")
    except OSError as error:
        report.problem = IncompleteError(f"{report.path}: {error}")


@dataclass(frozen=True)
class FileCheck:
    """The check of one file, while it is done.

    Attributes
    ----------
    number
        The number of the file among those that are compared together.
    file
        The file.
    look
        A look at it.
    column
        As for `open_unchecked`.
    tables
        The document tables that somebody has open.
    report
        The report on it, which the check fills.
    progress
        Its progress.
    """

    number: int
    file: CorpusFile
    look: Look
    column: Column | None
    tables: OpenTables
    report: ShardReport
    progress: CheckProgress

    def compare_stored(self, code: Format, compare_facts: Callable[[Corpus], None]) -> None:
        """Compare a file that holds digests with these; `compare_facts` compares all but its tokens and fields."""
        report = self.report
        report.backend = code.name
        if not code.row.holds_batches:
            report.token_count, report.missing = code.count(self.look)
            return
        with open_unchecked(code, self.look, self.column) as corpus:
            self.progress.found(corpus.num_tokens)
            self._compare_columns(corpus)
            compare_facts(corpus)
            if not report.checks:
                report.missing = corpus.missing_digests()
            report.checks += [f"field {name}" for name in report.fields]
            if not corpus.complete:
                raise _is_unfinished(corpus.path, report)

    def _compare_columns(self, corpus: Corpus) -> None:
        """Take the facts of a file, and compare its tokens and the values of its fields with their digests."""
        report = self.report
        report.total_records = corpus.meta.total_records
        report.token_count = corpus.num_tokens
        if not corpus.is_stream:
            report.num_batches = corpus.num_units
        for name, progress in self.progress.columns(corpus.meta):
            if name is None:
                report.sha256, report.checks = corpus.digests.compare(progress)
            else:
                report.fields[name], _ = corpus.field(name).digests.compare(progress)

    def found_flat(self, flat: FlatFormat) -> FoundFile:
        """Return a file of another trainer, which holds no digests, by its facts; those of its documents are read."""
        self.report.backend = flat.name
        facts = flat.facts(self.look)
        self.report.token_count = facts.num_tokens
        flat.num_documents(facts)  # which reads them, and refuses those that no reader reads
        return FoundFile(path=facts.path, meta=CHUNKS_OF_FLAT_FILES, known=facts, look=self.look)


def _is_unfinished(path: Path, report: ShardReport) -> IncompleteError:
    committed = f"{report.token_count:,} tokens"
    if report.num_batches:
        committed = f"{report.num_batches:,} batches"
    return IncompleteError(
        f"{path}: its writer has not finished: {committed} are committed", remedy=Remedy.REPAIR, at=path
    )
