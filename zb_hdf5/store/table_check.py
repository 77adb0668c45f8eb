"""The check of the documents of files: the tables of a store, and the pieces and documents beside one file."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path

from zb_hdf5.documents.document_table import DocumentPart, DocumentTable, DocumentTableFile, in_order
from zb_hdf5.documents.metadata import TableInfo
from zb_hdf5.documents.table_file import PiecesFile
from zb_hdf5.errors import FormatError
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.spec import INDEX_NAME, STREAM_LAYOUT, documents_path, pieces_path
from zb_hdf5.store.file_check import recorded
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.index_facts import compare_facts, facts_of_table
from zb_hdf5.store.opened_path import OpenTables
from zb_hdf5.store.rebuild import PiecesFacts
from zb_hdf5.store.shard_report import ShardReport
from zb_hdf5.store.shard_table import ShardEntry


def check_pieces(corpus: Corpus, expected: TableInfo | None, report: ShardReport) -> PiecesFacts:
    """Check the pieces of a file of batches, and return their facts.

    Parameters
    ----------
    corpus
        The file.
    expected
        The pieces as the index has them; None: the file is in no store.
    report
        The report of the file; the check is added to it.
    """
    file = PiecesFile(
        corpus.path,
        corpus.num_units * corpus.meta.batch_size,
        corpus.meta.seq_len,
        sha256=expected.sha256 if expected else "",
        tokens_sha256=report.sha256,
    )
    with closing(file):
        if expected is not None and expected.num_bytes != file.num_bytes:
            raise FormatError(f"{file.path}: {INDEX_NAME} has {expected.num_bytes:,} bytes, found {file.num_bytes:,}")
        file.check()
        facts = PiecesFacts.of(file)
    report.checks.append("pieces")
    return facts


def check_sidecars(tables: OpenTables, report: ShardReport, corpus: Corpus) -> None:
    """Check the sidecars of a lone file. Raises as `check_pieces` does.

    Parameters
    ----------
    tables
        The document tables that somebody has open.
    """
    if pieces_path(corpus.path).exists():
        check_pieces(corpus, None, report)
    opened = tables.get(documents_path(corpus.path))
    if opened is not None:
        opened().check()
    else:
        table = DocumentTable.of_file(corpus.path, report.sha256, sha256=corpus.documents_sha256)
        if table is None:
            return
        with closing(table):
            table.file(0).check()
    if "documents" not in report.checks:
        report.checks.append("documents")


def report_on_table(folder: Path, tables: OpenTables, part: DocumentPart, place: DocumentPart | None) -> ShardReport:
    """Check one document table of a store, and its entry in the index.

    Parameters
    ----------
    folder
        The folder of the store.
    tables
        The tables that somebody has open.
    part
        The entry.
    place
        The entry as its neighbours give it; None: it belongs to no shard.
    """
    path = folder / part.path
    report = ShardReport(str(path), backend="hdf5", document_count=part.document_count)
    with recorded(report):
        with nullcontext(tables[path]()) if path in tables else closing(DocumentTableFile(path, part)) as table:
            table.check()
            found = table.part()._replace(path=part.path)
        if place is None:
            raise FormatError(f"{path}: {INDEX_NAME} has it among the documents, and no shard that it belongs to")
        found = found._replace(first_token=place.first_token, first_document=place.first_document)
        if place.num_bytes == 0:  # of a stream: the table of its documents names no split
            found = found._replace(split=place.split)
        compare_facts(folder, path, facts_of_table(part, found))
        report.sha256 = part.sha256
        report.checks = ["documents"]
    return report


def places_of_tables(index: ShardIndex) -> list[DocumentPart | None]:
    """Return for each document table the entry that its neighbours give: the split, the first token and document."""
    if index.meta.layout != STREAM_LAYOUT:
        return list(in_order(index.documents))
    shards = in_order(
        DocumentPart(table_path(entry), 0, "", entry.split, 0, entry.token_count, 0, entry.document_count)
        for entry in index.shards
    )
    places = {shard.path: shard for shard in shards}
    return [places.get(part.path) for part in index.documents]


def table_path(entry: ShardEntry) -> str:
    """Return the path of the documents of a stream, as the index has it."""
    return documents_path(Path(entry.path)).as_posix()
