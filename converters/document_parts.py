"""Pieces and document tables of the converted tokens: they go along, or the report names the loss."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Final

from zb_hdf5 import ConvertError
from zb_hdf5.converters.source import Source
from zb_hdf5.documents.document_table import check_documents
from zb_hdf5.documents.pieces import pieces_path
from zb_hdf5.documents.pieces_file import PiecesWriter
from zb_hdf5.documents.table_file import copy_table
from zb_hdf5.errors import Remedy
from zb_hdf5.formats.registry import FORMATS
from zb_hdf5.store.table import PiecesInfo

#: Records whose pieces are moved at once.
BLOCK_RECORDS: Final = 1 << 15


def write_pieces(
    source: Source, start: int, stop: int, path: Path, split: str, tokens_sha256: str
) -> PiecesInfo | None:
    """Write the pieces of some batches to the sidecar of their file, if there are any; remove the leftover of others.

    They are whole before the file of the batches has its name.
    """
    if not source.has_pieces:
        pieces_path(path).unlink(missing_ok=True)
        return None
    step = max(1, BLOCK_RECORDS // source.meta.batch_size)
    with PiecesWriter(path) as writer:
        for first in range(start, stop, step):
            writer.append_pieces(source.read_pieces(first, min(first + step, stop)))
        info = writer.publish(seq_len=source.meta.seq_len, split=split, tokens_sha256=tokens_sha256)
    return PiecesInfo(info.num_bytes, info.sha256)


def copy_documents(source: Source, folder: Path) -> None:
    """Copy the document tables of a source into the folder of a store, and compare the copies with their digests."""
    for path, part in zip(source.document_files, source.document_parts, strict=True):
        copy_table(path, folder / part.path)
        check_documents(folder / part.path, part)


def fitted(source: Source, target: str, codec: str, tokens_only: bool = False) -> Source:
    """Return a source as a target stores it: with its codec, and without fields and documents where it has none.

    `ConvertError` if a store of tokens only would lose them, and `tokens_only` does not allow it.
    """
    row, other = FORMATS[target], copy(source)
    if row.tokens_only:
        lost = left_behind(source, keeps_fields=False, keeps_documents=False)
        if lost and row.holds_batches and not tokens_only:
            raise ConvertError(
                f"{source.paths[0]}: {row.name} files hold tokens and nothing else: the conversion {lost}",
                remedy=Remedy.TOKENS_ONLY,
            )
        other.has_pieces, other.document_files, other.document_parts = False, (), ()
    other.meta = replace(source.meta, fields=() if row.tokens_only else source.meta.fields, codec=codec)
    return other


def left_behind(source: Source, *, keeps_fields: bool, keeps_documents: bool) -> str:
    """Return the words for all that a source has and a target cannot hold, or ""."""
    names = [field.name for field in source.meta.fields]
    parts = {
        f"the field{'s' * (len(names) > 1)} {', '.join(names)}": bool(names) and not keeps_fields,
        "which documents lie in which records": source.has_pieces and not keeps_documents,
        "the document table": bool(source.document_files) and not keeps_documents,
    }
    lost = [what for what, there in parts.items() if there]
    return f"leaves behind {' and '.join(lost)}" if lost else ""
