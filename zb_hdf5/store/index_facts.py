"""The facts that an index has of a file, compared with those of the file itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zb_hdf5.documents.document_table import DocumentPart
from zb_hdf5.errors import ChecksumError, FormatError, Remedy
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.spec import INDEX_NAME, NOT_KNOWN, STREAM_LAYOUT
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.shard_table import ShardEntry


class IndexFact(NamedTuple):
    """One fact about a file: its values in the index and in the file, and the value of an unknown one."""

    name: str
    in_index: Any
    in_file: Any
    unknown: Any = ()  # never the value of a fact: this one is always known


def facts_of_shard(
    index: ShardIndex, entry: ShardEntry, table: DocumentPart | None, corpus: Corpus, found: ShardEntry
) -> Iterator[IndexFact]:
    """Yield the facts about a shard that `require_agreement` does not compare.

    Parameters
    ----------
    index, entry
        The index, and the entry of the shard in it.
    table
        The document table of the shard, as the index has it; None: it has none.
    corpus
        The shard.
    found
        Its entry as the file gives it.
    """
    names_split = "split" in corpus.origin or found.pieces is not None
    yield IndexFact("bytes", entry.num_bytes, found.num_bytes, 0)
    yield IndexFact("crc32", entry.crc32, found.crc32, NOT_KNOWN)
    yield IndexFact("split", entry.split, found.split if names_split else None, None)
    yield IndexFact("document_count", entry.document_count, found.document_count, NOT_KNOWN)
    yield IndexFact("pieces", entry.pieces, found.pieces)
    yield IndexFact("codecs", entry.compressed, found.compressed, None if entry.compressed is None else ())
    if index.meta.layout == STREAM_LAYOUT:
        yield IndexFact("sha256 of its documents", table.sha256 if table else "", corpus.documents_sha256)
    for column, runs in entry.columns.items():
        yield IndexFact(f"places of {column}", runs, found.columns.get(column))
    for name, digest in entry.fields.items():
        yield IndexFact(f"field {name}", digest, found.fields[name])
    yield IndexFact("fields", index.meta.fields, corpus.meta.fields)
    yield IndexFact("boundary_token_id", index.meta.boundary_token_id, corpus.meta.boundary_token_id)
    for name, unknown in (("seed", 0), ("vocab_size", 0), ("tokenizer", "")):
        yield IndexFact(name, getattr(index.meta, name), getattr(corpus.meta, name), unknown)


def facts_of_table(part: DocumentPart, found: DocumentPart) -> Iterator[IndexFact]:
    """Yield the facts about a document table: `part` is its entry in the index, `found` that which the file gives."""
    yield from map(IndexFact, DocumentPart._fields, part, found)


def compare_facts(folder: Path, path: Path, facts: Iterable[IndexFact]) -> None:
    """Raise `FormatError` at the first fact that differs between the index of a folder and the file at a path."""
    for fact in facts:
        is_known = fact.unknown not in (fact.in_index, fact.in_file)
        if is_known and fact.in_index != fact.in_file:
            raise FormatError(
                f"{path}: {INDEX_NAME} has {fact.name} {fact.in_index!s:.99}, the file has {fact.in_file!s:.99}",
                remedy=Remedy.REBUILD_FORCE,
                at=folder,
            )


def compare_sha256(path: Path, expected: str, found: str) -> None:
    """Raise `ChecksumError` if the bytes of a file give another sha256 than the index has."""
    if expected != found:
        raise ChecksumError(f"{path}: {INDEX_NAME} has sha256 {expected}, its bytes give {found}; restore it")
