"""One document table: a file with what is known of consecutive documents, or a stream that only knows their places."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document import Document, Spans
from zb_hdf5.errors import FormatError, Remedy
from zb_hdf5.formats.span_values import Decode, DecodeAll, decoder, first_refused
from zb_hdf5.spec import DEFAULT_SPLIT, DOCUMENTS, DOCUMENTS_SUFFIX, U32_MAX

if TYPE_CHECKING:
    from zb_hdf5.formats.hdf5.document_offsets import DocumentOffsets
    from zb_hdf5.formats.hdf5.tables import TablesFile

Offsets: TypeAlias = npt.NDArray[np.uint64]
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


def no_spans() -> Spans:
    """Return none, in a list of their own: it may become one of a user."""
    return Spans(np.empty(0, np.uint64), np.empty(0, np.uint64), [])


def joined_spans(parts: Sequence[Spans]) -> Spans:
    """Return the spans of all parts, in their order."""
    if len(parts) == 1:
        return parts[0]
    starts, stops, values = zip(no_spans(), *parts, strict=True)
    return Spans(np.concatenate(starts), np.concatenate(stops), list(chain.from_iterable(values)))


class DocumentFile:
    """One document table, or the offsets that a stream knows of its documents. Offsets and numbers are its own.

    Parameters
    ----------
    part
        What an index says of it; None: it is looked at alone.
    verify
        As for `TablesFile`.
    """

    def __init__(self, path: Path, part: DocumentPart | None = None, verify: str = "auto") -> None:
        self.path = path
        self._tables: TablesFile | None = None
        self._stream: DocumentOffsets | None = None
        if part is not None and not part.sha256:
            self._stream = _offsets_of_stream(path, part.token_count, verify)
            num_edges = len(self._stream.rows())
        else:
            self._tables = _open_tables(path, part.sha256 if part else "", verify)
            num_edges = self._tables.num_rows("offsets")
        if num_edges < 1 or (part and num_edges - 1 != part.document_count):
            raise FormatError(
                f"{path}: expected {part.document_count if part else 0:,} documents, found {num_edges - 1:,}; "
                "restore it"
            )

    @property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """Where each document begins and the last one ends."""
        if self._stream is not None:
            return self._stream.rows()
        return np.zeros(1, np.uint64) if self._tables is None else self._tables.column("offsets")

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
        num_edges = self._tables.num_rows("offsets")
        return DocumentPart(
            self.path.name, self._tables.num_bytes, self._tables.sha256, str(self._tables.attributes["split"]),
            0, int(self._tables.read("offsets", num_edges - 1, num_edges)[0]), 0, num_edges - 1,
        )  # fmt: skip

    def number_of(self, offsets: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents of tokens; -1 behind the last whole one."""
        edges = self.offsets
        numbers = edges.searchsorted(offsets, side="right").astype(np.int64) - 1
        return np.where(numbers < len(edges) - 1, numbers, -1)

    def document(self, number: int) -> Document:
        """Return what is known of one document.

        Raises
        ------
        FormatError
            If its id or its metadata are damaged.
        """
        if self._tables is None:
            start, stop = self.offsets[number : number + 2].tolist()
            return Document(number, start, stop - start, None, None, None, {})
        tables = self._tables
        start, stop = tables.read("offsets", number, number + 2).tolist()
        if start > stop:
            raise self._damaged(f"document {number:,}: expected offsets that ascend, found {start:,} and {stop:,}")
        source = int(self._value("source", number, NO_SOURCE))
        names = tables.read_texts("sources", source, source + 1) if source != NO_SOURCE else []
        text, metadata = self._text("ids", number), self._text("metadata", number)
        try:
            identity, known = text.decode("utf-8") or None, json.loads(metadata or b"{}")
            if not isinstance(known, dict):
                raise ValueError(f"{type(known).__name__} {known!r:.80}")
        except (ValueError, RecursionError) as error:
            raise self._damaged(
                f"document {number:,}: expected an id in UTF-8 and a JSON object, found {error}"
            ) from error
        return Document(
            number, start, stop - start, names[0].decode("utf-8", "surrogateescape") if names else None,
            int(self._value("row", number, 0)) or None, identity, known,
        )  # fmt: skip

    def _value(self, name: str, number: int, missing: int) -> int:
        tables = self._tables
        return int(tables.read(name, number, number + 1)[0]) if tables and name in tables else missing

    def _text(self, name: str, number: int) -> bytes:
        tables = self._tables
        return tables.read_texts(name, number, number + 1)[0] if tables and f"{name}_ends" in tables else b""

    def spans(self, starts: Offsets, stops: Offsets, codec: str | Decode | None) -> Spans:
        """Return the spans that have a token in some stretches, which ascend and lie apart.

        Each stretch is two reads of consecutive bytes, whatever the number of its spans. Where the file may not be
        mapped, the first call also reads where all spans of the file begin, and keeps that.
        """
        begins, ends, texts = self.encoded_spans(starts, stops)
        if not texts:
            return no_spans()
        decode = self._decode if codec is None else decoder(self.spans_codec, codec, str(self.path))
        return Spans(begins, ends, self._decoded(decode, texts, begins))

    @cached_property
    def _decode(self) -> DecodeAll:
        return decoder(self.spans_codec, None, str(self.path))

    def encoded_spans(self, starts: Offsets, stops: Offsets) -> Spans:
        """Return the spans that have a token in some stretches, their values as they are stored."""
        tables = self._tables
        if tables is None or "span_starts" not in tables:
            return no_spans()
        places, last = tables.column("span_starts"), self._last_place
        found, low = [], 0
        firsts, lasts = places.searchsorted(starts, "right").tolist(), places.searchsorted(stops).tolist()
        for first, behind in zip(firsts, lasts, strict=True):
            low, high = max(low, first - 1), min(behind, last)
            if low < high:
                edges, data = tables.read_joined_texts("span_values", low, high)
                texts = [data[begin:end] for begin, end in pairwise(edges.tolist()) if begin < end]
                kept = (edges[1:] > edges[:-1]).nonzero()[0]  # a gap has no bytes
                begins, ends = places[low:high], places[low + 1 : high + 1]
                if np.count_nonzero(ends < begins):
                    raise self._damaged_places()
                found.append(Spans(begins[kept], ends[kept], texts))
                low = high  # a span that two stretches share is read once
        spans = joined_spans(found)
        if np.count_nonzero(spans.starts[1:] < spans.stops[:-1]):
            raise self._damaged_places()
        return spans

    @cached_property
    def _last_place(self) -> int:
        """The number of the last place of a span, which ends the last span; -1: there is none."""
        if self._tables is None:
            return -1
        places = self._tables.column("span_starts")
        if len(places) and places[-1] > self.offsets[-1]:
            raise self._damaged_places()
        return len(places) - 1

    def _damaged_places(self) -> FormatError:
        return self._damaged(
            f"expected spans that ascend up to token {int(self.offsets[-1]):,}, found others: it is damaged; restore it"
        )

    def _damaged(self, problem: str) -> FormatError:
        return FormatError(f"{self.path}: {problem}", remedy=Remedy.VERIFY, at=self.path.parent)

    def _decoded(self, decode: DecodeAll, texts: list[bytes], starts: npt.NDArray[np.uint64]) -> list[Any]:
        try:
            return decode(texts)
        except Exception as error:  # whatever a decoder of the user raises
            token = int(starts[first_refused(decode, texts)])
            raise FormatError(
                f"{self.path}: the value of the span at token {token:,} cannot be decoded: {error}; pass "
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
        first, end = tables.read("offsets", start, stop + 1)[[0, -1]]
        spans = self.encoded_spans(np.array([first]), np.array([end]))
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
        for file in (self._tables, self._stream):
            if file is not None:
                file.close()


def part_of(path: Path) -> DocumentPart:
    """Return what an index says of a document table alone."""
    file = DocumentFile(path, verify="none")
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
    file = DocumentFile(path, part, "none")
    try:
        file.check()
    finally:
        file.close()


def _open_tables(path: Path, sha256: str, verify: str) -> TablesFile:
    from zb_hdf5.formats.hdf5.tables import TablesFile  # h5py

    tables = TablesFile(path, DOCUMENTS, sha256, verify)
    if "offsets" not in tables:
        raise FormatError(f"{path}: expected a dataset 'offsets'; restore it")
    return tables


def _offsets_of_stream(path: Path, token_count: int, verify: str) -> DocumentOffsets:
    from zb_hdf5.formats.hdf5.document_offsets import DocumentOffsets  # h5py

    return DocumentOffsets(path, token_count, verify=verify)
