"""The shards of a store, compared with their own digests and with its index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from zb_hdf5.documents.document_table import DocumentPart
from zb_hdf5.errors import FormatError, IncompleteError, Remedy
from zb_hdf5.files.threads import ReadPool
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.spec import INDEX_NAME, NOT_KNOWN
from zb_hdf5.store.agreement import require_agreement
from zb_hdf5.store.both_formats import require_same_tokens
from zb_hdf5.store.compared_files import ComparedFiles
from zb_hdf5.store.file_check import FileCheck, recorded
from zb_hdf5.store.format_list import FORMATS, load_format
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.index_facts import compare_facts, compare_sha256, facts_of_shard
from zb_hdf5.store.opened_path import OpenTables
from zb_hdf5.store.rebuild import entry_of
from zb_hdf5.store.recognition import format_of
from zb_hdf5.store.shard_report import ShardReport
from zb_hdf5.store.shard_table import ShardEntry
from zb_hdf5.store.table_check import check_pieces, places_of_tables, report_on_table, table_path


def compared_in_stores(
    path: Path, stores: Mapping[str, Path], split: str | None, index: ShardIndex | None
) -> tuple[list[ShardReport], list[ComparedFiles]]:
    """Return reports on what is wrong with the indexes of several stores, and the shards of each store.

    Parameters
    ----------
    path
        The path that has the stores.
    stores
        The stores by their formats, as `stores_at` returns them.
    split
        The split whose shards are compared; None: all of them.
    index
        The index of a store that is alone, which somebody has read; None: each is read.

    Raises
    ------
    FormatError
        If the index of a store that is alone cannot be read.
    ArgumentError
        If no shard is of that split.
    """
    found: dict[str, ShardIndex] = {}
    reports = []
    for name, store in stores.items():
        report = ShardReport(str(store))
        with recorded(report) if name else nullcontext():
            found[name] = ShardIndex.load(store) if index is None or name else index
        reports.append(report)
    compared = ShardReport(reports[-1].path)
    with recorded(compared):
        require_same_tokens(path, found)
    shards: list[ComparedFiles] = [ComparedShards.at(stores[name], index, split) for name, index in found.items()]
    return [report for report in (*reports, compared) if report.problem], shards


@dataclass(frozen=True)
class ComparedShards(ComparedFiles):
    """The shards of a store, and the index with which they are compared.

    Attributes
    ----------
    folder
        The folder of the store.
    index
        The index of the shards.
    tables
        Its document tables, by their paths.
    is_whole
        Whether these are the shards of all splits.
    """

    folder: Path
    index: ShardIndex
    tables: Mapping[str, DocumentPart]
    is_whole: bool

    @classmethod
    def at(cls, store: Path, index: ShardIndex, split: str | None) -> Self:
        """Return the shards of one split of a store, which is its folder or its `shards.json`; None: of all."""
        folder = store.parent if store.name == INDEX_NAME else store
        part = index.of_split(split, store)
        tables = {table.path: table for table in part.documents}
        return cls(part.files(folder), folder, part, tables, split is None)

    def compare(self, check: FileCheck) -> None:
        check.compare_stored(load_format(format_of(check.look)), partial(self._compare_with_index, check))

    def _compare_with_index(self, check: FileCheck, corpus: Corpus) -> None:
        entry = self.index.shards[check.number]
        self._compare_entry(entry, corpus, check.report)
        if entry.crc32 != NOT_KNOWN and "crc32" not in check.report.checks:  # no reader opens it without the rows
            check.report.missing = corpus.missing_digests()

    def _compare_entry(self, entry: ShardEntry, corpus: Corpus, report: ShardReport) -> None:
        """Compare a shard with its entry in the index."""
        path = corpus.path
        if not entry.complete:
            raise IncompleteError(f"{path}: is growing, or its writer was killed", remedy=Remedy.REPAIR, at=path.parent)
        if entry.num_batches == corpus.num_units:
            compare_sha256(path, entry.sha256, report.sha256)
        if (names := {field.name for field in corpus.meta.fields}) != entry.fields.keys():
            raise FormatError(f"{path}: {INDEX_NAME} names the fields {sorted(entry.fields)}, found {sorted(names)}")
        for name, found in report.fields.items():
            compare_sha256(corpus.field(name).path, entry.fields[name].sha256, found)
        if entry.backend != corpus.backend:
            raise FormatError(f"{path}: {INDEX_NAME} has backend {entry.backend!r}, found {corpus.backend!r}")
        require_agreement(self.index, entry, corpus)
        pieces = None if entry.pieces is None else check_pieces(corpus, entry.pieces, report)
        of_file = entry_of(corpus, corpus.origin.get("split"), sha256=report.sha256, pieces=pieces)
        table = self.tables.get(table_path(entry))
        compare_facts(self.folder, path, facts_of_shard(self.index, entry, table, corpus, of_file))
        report.checks.append("index")

    def others(self, readers: ReadPool, reports: Sequence[ShardReport], tables: OpenTables) -> list[ShardReport]:
        """Return the reports on the document tables, and compare the counts of all shards if none of these is bad."""
        check = partial(report_on_table, self.folder, tables)
        found = readers.map(check, self.index.documents, places_of_tables(self.index))
        if self.is_whole and not any(report.problem for report in reports):
            self._compare_records(reports)
        return found

    def _compare_records(self, reports: Sequence[ShardReport]) -> None:
        """Compare the counts in the headers of the shards, which no digest covers."""
        if not all(FORMATS[report.backend].tokens_only for report in reports):
            return
        found = sum(report.total_records for report in reports)
        expected = self.index.meta.total_records
        if found not in (expected, 0):
            where = reports[0]
            where.problem = FormatError(
                f"{where.path}: {INDEX_NAME} has {expected:,} records, the headers of the shards add up to {found:,}: "
                "one of them is damaged; its batches are whole",
                remedy=Remedy.REBUILD_FORCE,
                at=self.folder,
            )
