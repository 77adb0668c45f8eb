"""Document tables: which documents a document stream is made of, where they came from, and the spans in them.

The document stream of a split is its documents one after the other, in the order of their source, before packing and
shuffling. The offset of a token in it names the token and its document, whatever was shuffled later.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.core.documents import Document, Spans
from zb_hdf5.core.paths import any_path
from zb_hdf5.core.pieces import Pieces
from zb_hdf5.errors import BatchIndexError, FormatError, Remedy
from zb_hdf5.formats.codecs import Decode, DecodeAll, decoder
from zb_hdf5.formats.pieces import PiecesFile, pieces_path
from zb_hdf5.spec import DEFAULT_SPLIT, DOCUMENTS, DOCUMENTS_SUFFIX, NO_DOCUMENT, U32_MAX

if TYPE_CHECKING:
    from zb_hdf5.formats.hdf5.tables import TablesFile

#: The source of a document of which none is known.
NO_SOURCE: Final = U32_MAX
#: The columns of texts that a document may have.
TEXT_COLUMNS: Final = ("ids", "metadata")


def documents_path(path: Path) -> Path:
    """Return where the documents of a lone file or a stream are."""
    return path.with_name(path.name + DOCUMENTS_SUFFIX)


class DocumentPart(NamedTuple):
    """One document table among those of a store.

    Attributes
    ----------
    path
        Relative to the folder.
    num_bytes, sha256
        Size of the file and digest of its tables. No digest: `path` is a stream, which knows the offsets only.
    first_token, token_count, first_document, document_count
        What it covers of the document stream of its split.
    """

    path: str
    num_bytes: int
    sha256: str
    split: str = DEFAULT_SPLIT
    first_token: int = 0
    token_count: int = 0
    first_document: int = 0
    document_count: int = 0

    def changed(self, **facts: Any) -> DocumentPart:
        """Return the same part but for some facts."""
        return self._replace(**facts)


class DocumentRows(NamedTuple):
    """What is known of consecutive documents, for a `DocumentsWriter`.

    Attributes
    ----------
    names, sources, rows
        Names of files, which of them each document is from (`NO_SOURCE`: not known), and its row there, counted from 1.
    ids, metadata
        UTF-8 of each id, and the text of a JSON object for each; None: they have none.
    spans
        Of all of them, counted from the first token of the first one; values as they are stored.
    """

    names: Sequence[str] = ()
    sources: npt.NDArray[np.uint32] | None = None
    rows: npt.NDArray[np.uint64] | None = None
    ids: Sequence[bytes] | None = None
    metadata: Sequence[bytes] | None = None
    spans: Spans | None = None


class DocumentTable:
    """The documents of a store, a split of it, a stream or a lone file, by their numbers and by the offsets of tokens.

    Thread-safe, usable after fork, picklable; a file is opened when it is first needed. Numbers and offsets count over
    all files: where several splits are read together, over the one split and then the next.

    Parameters
    ----------
    folder
        Where the files are.
    parts
        The files, ascending by their first token.
    """

    def __init__(self, folder: str | os.PathLike[str], parts: Sequence[DocumentPart]) -> None:
        self._folder, self.parts = any_path(folder), tuple(parts)
        self._first_tokens = np.array([part.first_token for part in self.parts], np.uint64)
        self._first_documents = np.array([part.first_document for part in self.parts], np.int64)
        self._files: dict[int, DocumentFile] = {}

    @classmethod
    def beside(cls, path: Path, tokens_sha256: str | None = None) -> Self | None:
        """Return the table of a lone file or a stream, if one lies beside it.

        Raises
        ------
        FormatError
            If it is damaged, or belongs to other tokens.
        """
        if not documents_path(path).exists():
            return None
        file = DocumentFile(documents_path(path))
        known = file.tokens_sha256
        if tokens_sha256 and known and known != tokens_sha256:
            file.close()
            raise FormatError(
                f"{documents_path(path)}: belongs to another file: expected sha256 of the tokens {tokens_sha256}, "
                f"found {known}; restore it"
            )
        table = cls(path.parent, [file.part()])
        table._files[0] = file
        return table

    def __len__(self) -> int:
        """Return how many documents there are."""
        return self.parts[-1].first_document + self.parts[-1].document_count if self.parts else 0

    @property
    def token_count(self) -> int:
        """Tokens of the document stream."""
        return self.parts[-1].first_token + self.parts[-1].token_count if self.parts else 0

    @property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """Where each document begins and the last one ends, of all files: shape (D + 1,)."""
        ends = [self.file(k).offsets[1:] + np.uint64(part.first_token) for k, part in enumerate(self.parts)]
        return np.concatenate([np.zeros(1, np.uint64), *ends])

    def number_of(self, offsets: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents of tokens, of any shape; -1 for `NO_DOCUMENT`.

        Raises
        ------
        BatchIndexError
            If there is no such token.
        """
        wanted = np.asarray(offsets, np.uint64)
        numbers = np.full(wanted.shape, -1, np.int64)
        real = wanted != np.uint64(NO_DOCUMENT)
        asked = wanted[real]
        if len(asked) and int(asked.max()) >= self.token_count:
            raise BatchIndexError(
                f"{self._folder}: no token {int(asked.max()):,}: its documents have {self.token_count:,}"
            )
        places = self._first_tokens.searchsorted(asked, side="right") - 1
        found = np.empty(len(asked), np.int64)
        for place in np.unique(places).tolist():
            here, part = places == place, self.parts[place]
            local = self.file(place).number_of(asked[here] - np.uint64(part.first_token))
            found[here] = np.where(local < 0, local, local + part.first_document)
        numbers[real] = found
        return numbers

    def document(self, number: int) -> Document:
        """Return what is known of one document.

        Raises
        ------
        BatchIndexError
            If there is none of this number.
        """
        if not 0 <= number < len(self):
            raise BatchIndexError(f"{self._folder}: no document {number:,}: it has {len(self):,}")
        place = int(self._first_documents.searchsorted(number, side="right")) - 1
        part = self.parts[place]
        found = self.file(place).document(number - part.first_document)
        return found._replace(number=number, offset=found.offset + part.first_token)

    def spans(self, start: int, stop: int, codec: str | Decode | None = None) -> Spans:
        """Return the spans that have a token in `start` to `stop` of the document stream: whole, and in order.

        Parameters
        ----------
        codec
            What decodes the values: None: as stored. "pickle" must be named, and a function given for values that one
            has encoded.

        Raises
        ------
        BackendError
            If the values cannot be decoded without `codec`.
        FormatError
            If a value cannot be decoded.
        """
        first = max(0, int(self._first_tokens.searchsorted(start, side="right")) - 1)
        if len(self.parts) == 1 and not self.parts[0].first_token:
            return self.file(0).spans(start, stop, codec)
        starts, stops, values = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], list[Any]()
        for place in range(first, len(self.parts)):
            base = self.parts[place].first_token
            if base >= stop:
                break
            found = self.file(place).spans(max(0, start - base), stop - base, codec)
            starts.append(found.starts + np.uint64(base))
            stops.append(found.stops + np.uint64(base))
            values += found.values
        return Spans(np.concatenate(starts), np.concatenate(stops), values)

    def file(self, place: int) -> DocumentFile:
        """Return the file of one part."""
        file = self._files.get(place)
        if file is None:
            part = self.parts[place]
            file = self._files.setdefault(place, DocumentFile(self._folder / part.path, part))
        return file

    def open_files(self) -> Iterator[DocumentFile]:
        """Open the files one after the other, for who closes each of them."""
        return (DocumentFile(self._folder / part.path, part) for part in self.parts)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}


class DocumentFile:
    """One document table, or the offsets that a stream knows of its documents. Offsets and numbers are its own.

    Parameters
    ----------
    part
        What an index says of it; None: it is looked at alone.
    """

    def __init__(self, path: Path, part: DocumentPart | None = None) -> None:
        self.path = path
        self._tables: TablesFile | None = None
        self._known: npt.NDArray[np.uint64] | None = None
        if part is not None and not part.sha256:
            self._known = _offsets_of_stream(path, part.token_count)
        else:
            self._tables = _open_tables(path, part.sha256 if part else "")
        if len(self.offsets) < 1 or (part and (len(self.offsets) - 1 != part.document_count)):
            raise FormatError(
                f"{path}: expected {part.document_count if part else 0:,} documents, found {len(self.offsets) - 1:,}; "
                "restore it"
            )

    @property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """Where each document begins and the last one ends."""
        if self._known is not None or self._tables is None:
            return np.zeros(1, np.uint64) if self._known is None else self._known
        return self._tables.column("offsets")

    @property
    def tokens_sha256(self) -> str:
        """Digest of the tokens of the one file that it belongs to, "" if it belongs to a store."""
        return str(self._tables.attributes["tokens_sha256"]) if self._tables else ""

    @property
    def has_spans(self) -> bool:
        """Whether a document has one."""
        return self._tables is not None and "span_starts" in self._tables

    @property
    def spans_codec(self) -> str:
        """Name of what encoded the values of spans."""
        return str(self._tables.attributes["spans_codec"]) if self._tables else ""

    def part(self) -> DocumentPart:
        """Return what an index says of this file alone."""
        if self._tables is None:
            return DocumentPart(self.path.name, 0, "")
        offsets = self.offsets
        return DocumentPart(
            self.path.name, self._tables.num_bytes, self._tables.sha256,
            str(self._tables.attributes["split"]), 0, int(offsets[-1]), 0, len(offsets) - 1,
        )  # fmt: skip

    def number_of(self, offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents of tokens; -1 behind the last whole one."""
        edges = self.offsets
        numbers = edges.searchsorted(offsets, side="right").astype(np.int64) - 1
        return np.where(numbers < len(edges) - 1, numbers, -1)

    def document(self, number: int) -> Document:
        """Return what is known of one document."""
        if self._tables is None:
            start, stop = self.offsets[number : number + 2].tolist()
            return Document(number, start, stop - start, None, None, None, {})
        tables = self._tables
        start, stop = tables.read("offsets", number, number + 2).tolist()
        source = int(self._value("source", number, NO_SOURCE))
        names = tables.read_texts("sources", source, source + 1) if source != NO_SOURCE else []
        text, metadata = self._text("ids", number), self._text("metadata", number)
        return Document(
            number, start, stop - start, names[0].decode("utf-8", "surrogateescape") if names else None,
            int(self._value("row", number, 0)) or None, text.decode("utf-8") if text else None,
            json.loads(metadata) if metadata else {},
        )  # fmt: skip

    def _value(self, name: str, number: int, missing: int) -> int:
        tables = self._tables
        return int(tables.read(name, number, number + 1)[0]) if tables and name in tables else missing

    def _text(self, name: str, number: int) -> bytes:
        tables = self._tables
        return tables.read_texts(name, number, number + 1)[0] if tables and f"{name}_ends" in tables else b""

    def spans(self, start: int, stop: int, codec: str | Decode | None) -> Spans:
        """Return the spans that have a token in a stretch: two reads of consecutive bytes, whatever their number."""
        starts, stops, texts = self.encoded_spans(start, stop)
        if not texts or self._tables is None:
            return Spans(starts, stops, [])
        return Spans(starts, stops, self._decoded(decoder(self.spans_codec, codec), texts, starts))

    def encoded_spans(self, start: int, stop: int) -> Spans:
        """Return the spans that have a token in a stretch, their values as they are stored."""
        tables, empty = self._tables, np.empty(0, np.uint64)
        if tables is None or "span_starts" not in tables or start >= stop:
            return Spans(empty, empty, [])
        places = tables.column("span_starts")
        low, high = places.searchsorted(np.array([start + 1, stop], np.uint64)).tolist()
        low, high = max(0, low - 1), min(high, len(places) - 1)  # the last place ends the last span
        texts = tables.read_texts("span_values", low, high)
        starts, stops = places[low:high], places[low + 1 : high + 1]
        if all(texts):
            return Spans(starts, stops, texts)
        kept = np.array(list(map(bool, texts)))
        return Spans(starts[kept], stops[kept], list(filter(None, texts)))

    def _decoded(self, decode: DecodeAll, texts: list[bytes], starts: npt.NDArray[np.uint64]) -> list[Any]:
        try:
            return decode(texts)
        except Exception as error:  # whatever a decoder of the user raises
            place = 0
            with contextlib.suppress(Exception):
                for place, text in enumerate(texts):  # noqa: B007 - the one that cannot be decoded
                    decode([text])
            raise FormatError(
                f"{self.path}: the value of the span at token {int(starts[place]):,} cannot be decoded: {error}; pass "
                "the codec that it was written with",
                remedy=Remedy.VERIFY,
                at=self.path.parent,
            ) from error

    def rows(self, start: int, stop: int) -> DocumentRows:
        """Return what is known of some documents."""
        if self._tables is None:
            return DocumentRows()
        tables = self._tables
        numbers = {name: tables.read(name, start, stop) if name in tables else None for name in ("source", "row")}
        texts = {
            name: tables.read_texts(name, start, stop) if f"{name}_ends" in tables else None for name in TEXT_COLUMNS
        }
        first, end = self.offsets[start], self.offsets[stop]
        spans = self.encoded_spans(int(first), int(end))
        spans = spans._replace(starts=spans.starts - first, stops=spans.stops - first)
        return DocumentRows(self.sources, numbers["source"], numbers["row"], texts["ids"], texts["metadata"], spans)

    @cached_property
    def sources(self) -> list[str]:
        """Names of the source files."""
        tables = self._tables
        count = tables.num_rows("sources_ends") if tables else 0
        names = tables.read_texts("sources", 0, count) if tables and count else []
        return [name.decode("utf-8", "surrogateescape") for name in names]

    def sources_of(self, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """Return which of the `sources` some documents are from; `NO_SOURCE` where that is not known."""
        if self._tables is None or "source" not in self._tables:
            return np.full(stop - start, NO_SOURCE, np.uint32)
        return self._tables.read("source", start, stop).astype(np.uint32, copy=False)

    def check(self) -> None:
        """Compare all that it says with its digests. Raises `ChecksumError`."""
        if self._tables is not None:
            self._tables.check()

    def close(self) -> None:
        """Close the file."""
        if self._tables is not None:
            self._tables.close()


def part_of(path: Path) -> DocumentPart:
    """Return what an index says of a document table alone."""
    file = DocumentFile(path)
    try:
        return file.part()
    finally:
        file.close()


def check_documents(path: Path, part: DocumentPart | None = None) -> None:
    """Compare a document table with its digests, and with what an index says of it.

    Raises
    ------
    FormatError, ChecksumError
        If something is not as it was written.
    """
    file = DocumentFile(path, part)
    try:
        file.check()
    finally:
        file.close()


class DocumentsBeside:
    """What lies beside a lone file of batches: its pieces, and its documents. See `RecordDocuments`."""

    def __init__(self, path: Path, num_records: int, seq_len: int, tokens_sha256: str | None) -> None:
        self._path, self._facts, self._sha256 = path, (num_records, seq_len), tokens_sha256
        self._pieces: PiecesFile | None = None
        self._documents: DocumentTable | None = None

    @property
    def has_pieces(self) -> bool:
        return pieces_path(self._path).exists()

    def read_pieces(self, records: npt.NDArray[np.int64]) -> Pieces:
        if self._pieces is None:
            self._pieces = PiecesFile(self._path, *self._facts, tokens_sha256=self._sha256)
        return self._pieces.read(records)

    def read_run(self, start: int, stop: int) -> Pieces:
        if self._pieces is None:
            return self.read_pieces(np.arange(start, stop))
        return self._pieces.read_run(start, stop)

    def documents(self) -> DocumentTable | None:
        if self._documents is None:
            self._documents = DocumentTable.beside(self._path, self._sha256)
        return self._documents

    def close(self) -> None:
        for file in (self._pieces, self._documents):
            if file is not None:
                file.close()
        self._pieces = self._documents = None


def _open_tables(path: Path, sha256: str) -> TablesFile:
    from zb_hdf5.formats.hdf5.tables import TablesFile  # h5py

    try:
        tables = TablesFile(path, DOCUMENTS, sha256)
    except FileNotFoundError as error:
        raise FormatError(f"{path}: is not there; restore it, or convert again") from error
    if "offsets" not in tables:
        raise FormatError(f"{path}: expected a dataset 'offsets'; restore it")
    return tables


def _offsets_of_stream(path: Path, token_count: int) -> npt.NDArray[np.uint64]:
    from zb_hdf5.formats.hdf5.stream_reader import read_doc_offsets  # h5py

    if path.suffix == ".npy":
        return np.array([0, token_count], np.uint64)
    return read_doc_offsets(path)
