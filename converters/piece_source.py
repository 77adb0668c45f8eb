"""Token streams that tell no documents apart as a source of documents: pieces of their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from zb_hdf5.converters.stream_source import GROUP_TOKENS, StreamFile, StreamSource
from zb_hdf5.documents.document_table import DocumentTableFile
from zb_hdf5.formats.document_source import DocumentFilter, DocumentGroup, TokenizedDocuments
from zb_hdf5.store.store_corpus import StoreCorpus

#: The least pieces of a file.
LEAST_PIECES: Final = 1000


class PieceSource(StreamSource):
    """Pieces of the files of token streams, each of which is chosen, or held out, as one document is.

    They are for targets that do not tell documents apart either. See `StreamSource`.
    """

    has_documents = False

    @property
    def _tables(self) -> list[DocumentTableFile]:
        return []

    def _cuts(self, stream: StoreCorpus, number: int, path: Path) -> list[int]:
        start, stop = stream.tokens.files.starts[number : number + 2]
        num_tokens = stop - start
        length = min(GROUP_TOKENS, num_tokens // LEAST_PIECES + 1)  # short ones: each file of a result has some
        return sorted({*range(0, num_tokens, length), 0, num_tokens})

    def _ends(self, file: StreamFile) -> list[int]:
        return file.cuts

    def read(
        self, group: DocumentGroup, choose: DocumentFilter | None, num_threads: int
    ) -> Iterator[TokenizedDocuments]:
        if choose is not None and not choose(1).all():
            return
        file = self._files[group.file_number]
        first, stop = file.cuts[group.number : group.number + 2]
        for begin in range(first, stop, self._read_tokens):
            end = min(begin + self._read_tokens, stop)
            tokens = file.read_tokens(begin, end)
            lengths = np.array([len(tokens)])
            read = (end - first) * tokens.itemsize
            yield TokenizedDocuments(tokens, lengths, str(file.path), np.ones(1, np.uint64), read=read)
