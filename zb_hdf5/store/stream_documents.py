"""A token stream with its documents: their offsets, and the tables of what is stored about them."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_table import DocumentPart, DocumentTable
from zb_hdf5.documents.pieces import Pieces, padding
from zb_hdf5.documents.segments import pieces_of_windows
from zb_hdf5.errors import BatchIndexError
from zb_hdf5.files.open_files import finding
from zb_hdf5.formats.hdf5.document_offsets import DocumentOffsets, table_sha256
from zb_hdf5.spec import DOCUMENTS_SUFFIX, TokenArray
from zb_hdf5.store.document_edges import DocumentEdges
from zb_hdf5.store.token_store import TokenStore


class MmapTokenStore(TokenStore):
    """A `TokenStore` with its documents. As thread-safe, usable after fork, picklable.

    Parameters
    ----------
    path, options
        As for `TokenStore`.

    Attributes
    ----------
    edges
        Where documents begin and end.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(path, **options)
        if not self.complete:  # a killed writer may have been ahead with documents
            with closing(DocumentOffsets(self.paths[0], self.num_tokens, self._identities[0])) as offsets:
                self.document_count = len(offsets.rows()) - 1
        self.edges = DocumentEdges(self.paths, self._starts, self._identities, self.document_count, self._verify)
        self._documents: DocumentTable | None = None

    @property
    def doc_offsets(self) -> npt.NDArray[np.uint64]:
        """Where each document begins and the last one ends, in tokens of the whole store, shape (D + 1,).

        Read from all files at the first call, and kept: 8 bytes for each. `.npy` files know no documents: each counts
        as one.
        """
        return self.edges.all()

    @property
    def documents(self) -> DocumentTable:
        """The documents with all that is stored of them; of a file that has no table, their places.

        Offsets are those of the tokens of this store.
        """
        if self._documents is None:
            with finding(self):
                if self._documents is None:
                    self._documents = DocumentTable(
                        self.paths[0].parent, self._document_parts(), self._verify, self.edges.open
                    )
        return self._documents

    def _document_parts(self) -> list[DocumentPart]:
        parts: list[DocumentPart] = []
        if self._index is None:
            beside = None
            if self.path.is_file():
                sha256 = table_sha256(self.path) if self.complete else ""
                beside = DocumentTable.of_file(self.path, "".join(self._sha256), self._verify, sha256)
            known = {} if beside is None else {self.path.name: beside.parts[0]}
            counts = (
                [self.document_count] if self.path.suffix != ".npy" and self.path.is_file() else [1] * len(self.paths)
            )
        else:
            known = {part.path.removesuffix(DOCUMENTS_SUFFIX): part for part in self._index.documents}
            counts = self._index.table.values["document_count"].tolist()
        first = 0
        for number, (path, count) in enumerate(zip(self.paths, counts, strict=True)):
            start, stop = self._starts[number : number + 2]
            name = path.name if self._index is None else self._index.table.values["path"][number]
            part = known.get(name, DocumentPart(name, 0, ""))
            parts.append(
                part._replace(first_token=start, token_count=stop - start, first_document=first, document_count=count)
            )
            first += count
        return parts

    def document(self, number: int) -> TokenArray:
        """Return the tokens of one document, its boundary token included."""
        if not 0 <= number < len(self.doc_offsets) - 1:
            raise BatchIndexError(f"{self.path}: no document {number:,}: it has {self.document_count:,}")
        start, stop = self.doc_offsets[number : number + 2].tolist()
        return self.get_slice(start, stop)

    def close(self) -> None:
        """Close the files. Views that were returned stay valid."""
        super().close()
        self.edges.close()
        if self._documents is not None:
            self._documents.close()


class WindowDocuments:
    """The documents of a stream by its windows. See `RecordDocuments`."""

    has_pieces = True

    def __init__(self, store: MmapTokenStore, seq_len: int, stride: int) -> None:
        self._store, self._seq_len, self._stride = store, seq_len, stride

    def read_pieces(self, records: npt.NDArray[np.int64]) -> Pieces:
        starts = records * self._stride
        if not len(starts):
            return padding(0, self._seq_len)
        edges, end = self._store.edges.near(starts, self._seq_len)
        return pieces_of_windows(edges, starts, self._seq_len, end)

    def read_run(self, start: int, stop: int) -> Pieces:
        return self.read_pieces(np.arange(start, stop))

    def documents(self) -> DocumentTable:
        return self._store.documents

    def close(self) -> None:
        """Do nothing: the store closes its files."""
