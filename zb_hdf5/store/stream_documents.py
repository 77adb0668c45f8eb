"""A token stream with its documents, and its windows: records that are cut from it when they are read."""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_table import DocumentPart, DocumentTable
from zb_hdf5.documents.pieces import Pieces, padding
from zb_hdf5.documents.segments import pieces_of_windows
from zb_hdf5.errors import ArgumentError, BatchIndexError, UnverifiableError, ZbError
from zb_hdf5.files.paths import Identity, OpenFiles, RemotePath, finding
from zb_hdf5.files.tokens import Converted, Tokens
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.formats.hdf5.h5_reader import DocumentOffsets, table_sha256
from zb_hdf5.spec import DOCUMENTS_SUFFIX, DTYPE_BY_NAME, StoreMeta, TokenArray
from zb_hdf5.store.token_store import TokenStore
from zb_hdf5.store.verify import verify_store

#: So many are kept in memory, 8 MiB of them: one search in all is faster than one in each file.
FEW_DOCUMENTS: Final = 1 << 20
#: So many files are looked into at once; of more than these each is when it is needed: a thousand take seconds.
FEW_FILES: Final = 64
#: Objects that are looked into at the same time.
FAR_THREADS: Final = 32


class DocumentEdges:
    """The starts and ends of documents in the tokens of all files, at least one. Thread-safe; picklable.

    `starts` are the first token of each file and the end of the last one, `identities` those of files that were open
    before, by their numbers, and `count` is the documents of all.
    """

    def __init__(
        self, paths: Sequence[Path], starts: Sequence[int], identities: Mapping[int, Identity], count: int,
        verify: str = "auto",
    ) -> None:  # fmt: skip
        self._paths, self._starts, self._identities, self._verify = paths, starts, identities, verify
        self._keeps = count <= FEW_DOCUMENTS and not isinstance(paths[0], RemotePath)  # each object takes a while
        self._files: OpenFiles[DocumentOffsets] = OpenFiles("auto", far=isinstance(paths[0], RemotePath))
        self._forget()

    def _forget(self) -> None:
        self._all: npt.NDArray[np.uint64] | None = None
        self._kept: dict[int, npt.NDArray[np.uint64]] = {}  # of few documents, until there are all

    def all(self) -> npt.NDArray[np.uint64]:
        """Return where each document begins and the last one ends, shape (D + 1,), and keep it: 8 bytes for each."""
        if self._all is None:
            with finding(self):
                if self._all is None:
                    with ThreadPoolExecutor(FAR_THREADS, thread_name_prefix="zb-edges") as pool:
                        look = pool.map if isinstance(self._paths[0], RemotePath) else map
                        ends = list(look(self._ends_of, range(len(self._paths))))
                    self._all = np.concatenate([np.zeros(1, np.uint64), *ends])
                    self._kept = {}
        return self._all

    def _ends_of(self, number: int) -> npt.NDArray[np.uint64]:
        return self._read(number)[1:] + np.uint64(self._starts[number])

    def _read(self, number: int) -> npt.NDArray[np.uint64]:
        """Return the rows of a file, of which nothing stays open."""
        kept = self._kept.get(number)
        if kept is not None:
            return kept
        with closing(self.open(number)) as file:
            return file.rows().copy()

    def near(self, starts: npt.NDArray[np.int64], length: int) -> tuple[npt.NDArray[np.uint64], int]:
        """Return the part of `all()` that `pieces_of_windows` needs, and where the last document ends.

        `starts` are the first token of each window, in any order, and `length` the tokens of each. The end is behind
        all tokens where no window reaches the last file.
        """
        if self._all is not None or (self._keeps and len(self._paths) - len(self._kept) <= FEW_FILES):
            edges = self.all()
            return edges, int(edges[-1])
        ordered = np.sort(starts)
        stops = ordered + length
        if not (ordered[1:] > stops[:-1]).any():  # they follow each other
            ordered, stops = ordered[:1], stops[-1:]
        found: list[npt.NDArray[np.uint64]] = []
        done: dict[int, int] = {}  # rows of each file that were taken: what two windows need is there once
        for start, stop in zip(ordered.tolist(), stops.tolist(), strict=True):
            first = bisect_right(self._starts, start, hi=len(self._paths)) - 1
            last = bisect_left(self._starts, stop, hi=len(self._paths)) - 1
            for here in range(first, last + 1):
                rows, base = self._rows(here), self._starts[here]
                edges = np.array([max(0, start - base) + 1, stop - base], np.uint64)
                low, high = rows.searchsorted(edges).tolist()
                low = max(low - 1, done.get(here, 0))
                found.append(rows[low:high] + np.uint64(base))
                done[here] = max(low, high)
        return np.concatenate(found), self._end(max(done))

    def _end(self, number: int) -> int:
        """Return where the last document ends; behind all tokens where a file behind this one holds it."""
        last = len(self._paths) - 1
        return self._starts[last] + int(self._rows(last)[-1]) if number == last else self._starts[-1]

    def _rows(self, number: int) -> npt.NDArray[np.uint64]:
        if self._keeps:
            return self._kept.setdefault(number, self._read(number))
        return self._files.get(number, self.open).rows()

    def open(self, number: int) -> DocumentOffsets:
        """Open the offsets of one file; the caller closes them."""
        num_tokens = self._starts[number + 1] - self._starts[number]
        return DocumentOffsets(self._paths[number], num_tokens, self._identities.get(number), self._verify)

    def close(self) -> None:
        self._files.close()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_all", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


class MmapTokenStore(TokenStore):
    """A `TokenStore` with its documents, whose arguments it takes. As thread-safe, usable after fork, picklable."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(path, **options)
        if not self.complete:  # a killed writer may have been ahead with documents
            with closing(DocumentOffsets(self.paths[0], self.num_tokens, self._identities[0])) as offsets:
                self.document_count = len(offsets.rows()) - 1
        self.edges = DocumentEdges(self.paths, self._starts, self._identities, self.document_count, self._verify)
        self._documents: DocumentTable | None = None

    @property
    def doc_offsets(self) -> npt.NDArray[np.uint64]:
        """The start of each document and the end of the last one, in tokens of the whole store, shape (D + 1,).

        Read from all files at the first call, and kept: 8 bytes for each. `.npy` files have no documents: each counts
        as one.
        """
        return self.edges.all()

    @property
    def documents(self) -> DocumentTable:
        """The documents with all that is stored of them; of a file that has no table, their offsets.

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
        names = [path.name for path in self.paths]
        if self._index is not None:
            known = {part.path.removesuffix(DOCUMENTS_SUFFIX): part for part in self._index.documents}
            names = self._index.table.values["path"]
            counts = [1 if count < 0 else count for count in self._index.table.values["document_count"].tolist()]
        elif self.path.is_file():
            sha256 = table_sha256(self.path) if self.complete else ""
            table = DocumentTable.of_file(self.path, "".join(self._sha256), self._verify, sha256)
            known = {} if table is None else {self.path.name: table.parts[0]}
            counts = [self.document_count]
        else:
            known, counts = {}, [1] * len(names)
        parts, first = [], 0
        for name, count, start, stop in zip(names, counts, self._starts, self._starts[1:], strict=False):
            part = known.get(name, DocumentPart(name, 0, ""))
            part = part._replace(first_token=start, token_count=stop - start)
            parts.append(part._replace(first_document=first, document_count=count))
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


#: The end of the fingerprint of a `WindowReader`: records in a batch, tokens from one to the next, shared tokens.
_WINDOWS: Final = re.compile(r":([1-9]\d{0,17})x([1-9]\d{0,17})\+(\d{1,18})$")


class WindowReader(BatchReader):
    """Batches of consecutive windows of a stream. `BatchReader` describes its functions."""

    # a record begins each `seq_len` tokens; with overlap=1 its last token is the first one of the next, so that targets
    # miss none; "auto" compares nothing, since a window is less than a chunk; "batch" reads whole chunks

    backend = "stream"

    def __init__(
        self, store: MmapTokenStore, batch_size: int, seq_len: int, overlap: int = 0, verify: str = "auto"
    ) -> None:
        if overlap < 0:
            raise ArgumentError(f"overlap must be at least 0, found {overlap}")
        self.store = store
        small = store.dtype.kind == "u" and store.dtype.itemsize <= 2
        dtype = DTYPE_BY_NAME["uint16" if small else "uint32"]
        num_batches = max(0, store.num_tokens - overlap) // seq_len // batch_size if batch_size * seq_len > 0 else 0
        meta = StoreMeta(
            batch_size, seq_len + overlap, dtype, total_records=num_batches * batch_size, vocab_size=store.vocab_size,
            tokenizer=store.tokenizer, fields=store.fields,
        )  # fmt: skip
        if num_batches == 0:
            raise ArgumentError(
                f"{store.path}: {store.num_tokens:,} tokens do not fill one batch of {batch_size:,} x {seq_len:,}"
                + (f" and {overlap} more" if overlap else "")
            )
        _ = store.access  # opens the first file, whose error names what cannot be read
        super().__init__(store.path, meta, num_batches, _as_windows(store.tokens, meta), seq_len)
        self.record_documents = WindowDocuments(store, meta.seq_len, seq_len)
        self.dropped_tokens = store.num_tokens - overlap - num_batches * batch_size * seq_len
        self.verify = verify

    @property
    def token_fingerprint(self) -> str:
        return self.store.fingerprint

    def compared_tokens(self) -> Tokens | None:
        tokens = self.store.compared_tokens() if self.verify in ("auto", "batch") else None
        return None if tokens is None else _as_windows(tokens, self.meta)

    @property
    def verified(self) -> str:
        return self.verify if self.verify == "store" else self.store.verified

    @property
    def overlap(self) -> int:
        return self.seq_len - self.stride

    @property
    def has_padding(self) -> bool:
        return False

    def _field_reader(self, name: str) -> BatchReader:
        meta = self.meta.of_field(name)
        stride = self.stride * meta.seq_len // self.meta.seq_len
        return BatchReader(self.path, meta, self.num_batches, self.store.field(name).tokens, stride)

    def _compute_fingerprint(self) -> str:
        # the batch size too: a shuffle of batches means other records with another one
        return f"{self.store.fingerprint}:{self.meta.batch_size}x{self.stride}+{self.meta.seq_len - self.stride}"

    def serving(self, fingerprint: object) -> WindowReader:
        """Return a reader of the same windows in batches of another size, if the fingerprint is of such."""
        try:
            batch_size = windows_of(fingerprint)[0]
            other = WindowReader(self.store, batch_size, self.stride, self.overlap, self.verify)
        except ZbError:  # the stream has no batch of that size
            return self
        if not other.fingerprint == fingerprint != self.fingerprint:
            return self
        if self.in_front is not None:
            self.in_front(other)
        return other

    def first_token(self, record: int, seq_len: int) -> int:
        """Return where a record of `seq_len` tokens, a divisor of those of a window, begins in the stream."""
        window, part = divmod(record, self.seq_len // seq_len)
        return window * self.stride + part * seq_len


def _as_windows(tokens: Tokens, meta: StoreMeta) -> Tokens:
    return tokens if tokens.dtype == meta.dtype else Converted(tokens, meta.dtype, meta)


def windows_of(fingerprint: object) -> tuple[int, int, int]:
    """Return batch size, sequence length and overlap of the reader that has this fingerprint."""
    found = _WINDOWS.search(fingerprint) if isinstance(fingerprint, str) else None
    if found is None:
        raise ArgumentError(f"expected the fingerprint of windows of a token stream, found {fingerprint!r}")
    batch_size, seq_len, overlap = map(int, found.groups())
    return batch_size, seq_len, overlap


def require_digests(path: Path, split: str | None = None) -> None:
    """Compare a stream with its digests."""
    for report in verify_store(path, split=split):
        if report.problem:
            raise report.problem
        if report.missing:
            raise UnverifiableError(f"{report.path}: cannot be verified: {report.missing}")
