"""The files at a path that somebody has open or has looked at, for whoever compares them with their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeAlias

from zb_hdf5.documents.document_table import DocumentTableFile
from zb_hdf5.files.look import Look
from zb_hdf5.formats.format import Found
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.store.found_store import FoundStore
from zb_hdf5.store.index import ShardIndex
from zb_hdf5.store.store_corpus import StoreCorpus

#: Functions that return document tables that somebody has open, by their paths.
OpenTables: TypeAlias = Mapping[Path, Callable[[], DocumentTableFile]]


@dataclass(frozen=True)
class OpenedPath:
    """The files at a path that somebody has open: none of them is opened again.

    Attributes
    ----------
    files
        The functions that begin a file, by their paths: it is read by a copy of its descriptor, and with the facts
        known.
    tables
        The document tables.
    index
        The index of a store, with all splits; None: it is read.
    look
        The look by which the path was found: its listing and its open file go on. None: another one is begun.
    """

    files: Mapping[Path, Callable[[], FoundFile]] = field(default_factory=dict)
    tables: OpenTables = field(default_factory=dict)
    index: ShardIndex | None = None
    look: Look | None = None

    @classmethod
    def of(cls, found: Found, corpora: Iterable[StoreCorpus]) -> Self:
        """Return what is open of a path that was found, by the corpora of it."""
        files: dict[Path, Callable[[], FoundFile]] = {}
        tables: dict[Path, Callable[[], DocumentTableFile]] = {}
        for corpus in corpora:
            files |= corpus.opened_files
            if corpus.document_table is not None:
                tables |= corpus.document_table.files
        return cls(files, tables, found.index if isinstance(found, FoundStore) else None)
