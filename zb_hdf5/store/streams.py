"""The index of a store of token streams, made from what its files say."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zb_hdf5.errors import ArgumentError, FormatError, IncompleteError
from zb_hdf5.formats.documents import DocumentPart, DocumentTable
from zb_hdf5.formats.hdf5.stream_reader import StreamInspection, inspect_stream, read_chunk_crc32
from zb_hdf5.spec import CRC32, DEFAULT_SPLIT, STREAM_LAYOUT, TOKENS, StoreMeta
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.table import ShardEntry


def index_streams(
    paths: Sequence[str | os.PathLike[str]],
    *,
    splits: Mapping[str, str] | None = None,
    source: dict[str, Any] | None = None,
) -> ShardIndex:
    """Return the index of HDF5 streams that lie in one folder; `index.save(folder)` makes them a store.

    Parameters
    ----------
    paths
        The files, in the order of their tokens.
    splits
        Name of a file -> its split, of those that are not "train".
    source
        Where the tokens came from; free JSON for people.

    Raises
    ------
    FormatError, IncompleteError
        If a file is no finished stream, or the files are of different dtypes, chunks, vocabularies or tokenizers.
    """
    if not paths:
        raise ArgumentError("expected at least one stream for an index, found none")
    entries: list[ShardEntry] = []
    meta: StoreMeta | None = None
    for path in map(Path, paths):
        found = inspect_stream(path)
        if found.sha256 is None:
            raise IncompleteError(f"{path}: its writer has not finished; make it again")
        here = _meta(found)
        meta = meta or here
        if here != meta:
            raise FormatError(f"{path}: expected a stream like {Path(paths[0]).name}, {meta}, found {here}")
        entries.append(_entry(path, found, (splits or {}).get(path.name, DEFAULT_SPLIT)))
    documents = sum(entry.document_count for entry in entries)
    tables = _tables(list(map(Path, paths)), entries)
    return ShardIndex(replace(meta or here, document_count=documents), entries, source=source or {}, documents=tables)


def _tables(paths: Sequence[Path], entries: Sequence[ShardEntry]) -> tuple[DocumentPart, ...]:
    """Describe the document tables that lie beside streams."""
    found: list[DocumentPart] = []
    places: dict[str, tuple[int, int]] = {}
    for path, entry in zip(paths, entries, strict=True):
        token, document = places.get(entry.split, (0, 0))
        places[entry.split] = token + entry.token_count, document + entry.document_count
        table = DocumentTable.beside(path, entry.sha256)
        if table is not None:
            found.append(table.parts[0]._replace(split=entry.split, first_token=token, first_document=document))
            table.close()
    return tuple(found)


def _meta(found: StreamInspection) -> StoreMeta:
    return StoreMeta(
        1, found.chunk_tokens, found.dtype, vocab_size=found.vocab_size, tokenizer=found.tokenizer,
        boundary_token_id=found.boundary_token_id, layout=STREAM_LAYOUT,
    )  # fmt: skip


def _entry(path: Path, found: StreamInspection, split: str) -> ShardEntry:
    num_chunks = -(-found.token_count // found.chunk_tokens)
    rows = read_chunk_crc32(path, num_chunks, found.identity)
    columns = {} if found.extents is None else {TOKENS: tuple(found.extents.runs)}
    if columns and found.crc32_runs:
        columns[CRC32] = found.crc32_runs
    return ShardEntry(
        path.name, "hdf5", path.stat().st_size, num_chunks, found.token_count, str(found.sha256), zlib.crc32(rows),
        found.document_count, split, columns=columns,
    )  # fmt: skip
