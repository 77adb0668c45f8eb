"""Files that are compared together: the shards of one store, or the files at a path that are in none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from zb_hdf5.errors import ZbError
from zb_hdf5.files.threads import ReadPool
from zb_hdf5.formats.corpus_file import CorpusFile
from zb_hdf5.store.file_check import FileCheck, take_problem
from zb_hdf5.store.opened_path import OpenTables
from zb_hdf5.store.shard_report import ShardReport


@dataclass(frozen=True)
class ComparedFiles(ABC):
    """Files that are compared together, and all that they are compared with. None is open before its own check.

    Attributes
    ----------
    files
        The files.
    """

    files: Sequence[CorpusFile]

    @abstractmethod
    def compare(self, check: FileCheck) -> None:
        """Compare one of the files, and fill its report. It is called from any of the threads."""

    def take_error(self, report: ShardReport, error: ZbError) -> None:
        """Keep an error of a file in its report, or raise it. See `recorded`."""
        take_problem(report, error)

    @abstractmethod
    def others(self, readers: ReadPool, reports: Sequence[ShardReport], tables: OpenTables) -> list[ShardReport]:
        """Return the reports on all else that belongs to the files, whose `reports` are done.

        Parameters
        ----------
        readers
            The threads.
        reports
            Those on the files, which may get a problem that shows in all of them together.
        tables
            The document tables that somebody has open.
        """
