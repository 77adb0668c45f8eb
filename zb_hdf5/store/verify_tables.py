"""Checks the pieces of shards and the document tables against every digest that was stored of them."""

from __future__ import annotations

from pathlib import Path

from zb_hdf5.documents.document_table import DocumentPart, DocumentTable, check_documents
from zb_hdf5.documents.pieces import pieces_path
from zb_hdf5.documents.pieces_file import PiecesFile
from zb_hdf5.errors import FormatError, IncompleteError, ZbError
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.hdf5.document_offsets import table_sha256
from zb_hdf5.spec import INDEX_NAME, STREAM_LAYOUT
from zb_hdf5.store.table import PiecesInfo
from zb_hdf5.store.verify_report import ShardReport


def check_pieces(reader: BatchReader, expected: PiecesInfo | None, report: ShardReport) -> None:
    """Check the pieces of a file of batches."""
    file = PiecesFile(
        reader.path, reader.num_records, reader.seq_len, sha256=expected.sha256 if expected else "",
        tokens_sha256=report.sha256,
    )  # fmt: skip
    try:
        if expected is not None and expected.num_bytes != file.num_bytes:
            raise FormatError(
                f"{pieces_path(reader.path)}: {INDEX_NAME} says {expected.num_bytes:,} bytes, found {file.num_bytes:,}"
            )
        file.check()
    finally:
        file.close()
    report.checks.append("pieces")


def check_beside(reader: BatchReader, report: ShardReport) -> None:
    """Check what lies beside a lone file. Raises as `check_pieces` does."""
    if pieces_path(reader.path).exists():
        check_pieces(reader, None, report)
    sha256 = table_sha256(reader.path) if reader.meta.layout == STREAM_LAYOUT else ""
    table = DocumentTable.of_file(reader.path, report.sha256, sha256=sha256)
    if table is not None:
        try:
            table.file(0).check()
        finally:
            table.close()
        if "documents" not in report.checks:
            report.checks.append("documents")


def verify_documents(folder: Path, part: DocumentPart) -> ShardReport:
    """Check one document table of a store."""
    report = ShardReport(str(folder / part.path), backend="hdf5", document_count=part.document_count)
    try:
        check_documents(folder / part.path, part)
        report.sha256, report.checks = part.sha256, ["documents"]
    except ZbError as error:
        report.problem = error
    except OSError as error:
        report.problem = IncompleteError(f"{report.path}: {error}")
    return report
