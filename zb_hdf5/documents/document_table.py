"""Tables of documents: one file with the facts of consecutive documents, and all files of a store or a stream.

The document stream of a split is its documents joined in the order of their source, before packing and shuffling. The
offset of a token in it names the token and its document, whatever was shuffled later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import (
    NO_SOURCE,
    TEXT_COLUMNS,
    DecodeValue,
    Document,
    DocumentRows,
    Spans,
    WantedSpans,
    first_refused,
    value_decoder,
)
from zb_hdf5.documents.pieces import ranges
from zb_hdf5.errors import BatchIndexError, FormatError, IncompleteError, counted
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.files.paths import OpenFiles, RemotePath, any_path
from zb_hdf5.files.publishing import PartialFile
from zb_hdf5.spec import (
    DEFAULT_SPLIT,
    DOCUMENTS,
    DOCUMENTS_PREFIX,
    DOCUMENTS_STORE_SUFFIX,
    NO_DOCUMENT,
    documents_path,
)

if TYPE_CHECKING:  # h5py, which a store without documents does not need
    from zb_hdf5.documents.table_file import TableFile
    from zb_hdf5.documents.table_writer import DocumentsWriter

Offsets: TypeAlias = npt.NDArray[np.uint64]
#: Documents that are moved from table to table at once.
JOINED_AT_ONCE: Final = 1 << 14
#: Bytes of their ids, or of their metadata, unless one document has more.
TEXTS_AT_ONCE: Final = 8 << 20


def documents_name(number: int) -> str:
    """Return the name of the documents of a split in the folder of a store."""
    return f"{DOCUMENTS_PREFIX}{number:05}{DOCUMENTS_STORE_SUFFIX}"


class DocumentPart(NamedTuple):
    """One document table of a store, and its range of the document stream of its split.

    Attributes
    ----------
    path
        Relative to the folder.
    sha256
        The digest of the table; "": it is a stream, which has the offsets only.
    first_token, token_count
        Its range of the document stream.
    first_document, document_count
        The number of its first document in the split, and how many it has.
    """

    path: str
    num_bytes: int
    sha256: str
    split: str = DEFAULT_SPLIT
    first_token: int = 0
    token_count: int = 0
    first_document: int = 0
    document_count: int = 0


def in_order(parts: Iterable[DocumentPart]) -> list[DocumentPart]:
    """Return document tables one after the other, in each split from token and document 0 on."""
    found: list[DocumentPart] = []
    ends: dict[str, tuple[int, int]] = {}
    for part in parts:
        token, document = ends.get(part.split, (0, 0))
        found.append(part._replace(first_token=token, first_document=document))
        ends[part.split] = token + part.token_count, document + part.document_count
    return found


def joined_spans(parts: Sequence[Spans]) -> Spans:
    """Return the spans of all parts, in their order."""
    if len(parts) == 1:
        return parts[0]
    starts, stops, values = zip(Spans(np.empty(0, np.uint64), np.empty(0, np.uint64), []), *parts, strict=True)
    return Spans(np.concatenate(starts), np.concatenate(stops), list(chain.from_iterable(values)))


class DocumentTableFile:
    """One document table. Offsets and numbers count from its first document.

    Parameters
    ----------
    path
        The file.
    part
        Its description in an index; None: there is none.
    verify, access
        As for `open_reader`.
    offsets
        The offsets of a stream that has no document table: they are its one column, which others close. None: the file
        is a table.

    Attributes
    ----------
    count
        Its documents.
    tokens_sha256
        The sha256 of the tokens that it belongs to; "" in a store.
    split
        The split of the documents.
    spans_codec
        The stored name of the encoding of the values of spans.
    """

    def __init__(
        self,
        path: Path,
        part: DocumentPart | None = None,
        verify: str = "auto",
        offsets: TableFile | None = None,
        access: str = "auto",
    ) -> None:
        self.path = path
        self._is_table = offsets is None
        if offsets is None:
            from zb_hdf5.documents.table_file import TableFile

            offsets = TableFile(path, DOCUMENTS, part.sha256 if part else "", verify, access)
        self._table = offsets
        self.count = self._table.num_rows("offsets") - 1
        if self.count < 0 or (part and self.count != part.document_count):
            self.close()
            expected = part.document_count if part else 0
            raise FormatError(f"{path}: expected {expected:,} documents, found {self.count:,}; restore it")
        known = self._table.attributes
        self.tokens_sha256 = str(known.get("tokens_sha256", ""))
        self.spans_codec = str(known.get("spans_codec", ""))
        self.split = str(known.get("split", DEFAULT_SPLIT))
        self.has_spans = "span_starts" in self._table

    @property
    def offsets(self) -> Offsets:
        """The start of each document and the end of the last one."""
        return self._table.read("offsets", 0, self.count + 1)

    @property
    def has_ids(self) -> bool:
        """Whether its documents have ids."""
        return "ids_ends" in self._table

    @property
    def has_metadata(self) -> bool:
        """Whether its documents have metadata."""
        return "metadata_ends" in self._table

    def edges(self, start: int, stop: int) -> Offsets:
        """Return the starts of some documents and the end of the last one, shape (stop - start + 1,)."""
        return self._table.read("offsets", start, stop + 1)

    def edge(self, number: int) -> int:
        """Return the start of a document; the end of the last one has the number `count`."""
        return int(self.edges(number, number)[0])

    def part(self) -> DocumentPart:
        """Return the description of this file alone, for an index."""
        return DocumentPart(
            path=self.path.name,
            num_bytes=self._table.num_bytes,
            sha256=self._table.sha256,
            split=self.split,
            token_count=self._end,
            document_count=self.count,
        )

    def number_of(self, offsets: Offsets) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents of tokens; -1 after the last whole document."""
        numbers = self._table.search("offsets", offsets, "right") - 1
        return np.where(numbers < self.count, numbers, -1)

    def document(self, number: int) -> Document:
        """Return the facts of one document; `FormatError` if they are damaged."""
        start, stop = self._table.read("offsets", number, number + 2).tolist()
        if start > stop:
            raise self._table.damaged(f"document {number:,}: expected offsets that ascend, found {start:,}, {stop:,}")
        rows = self.rows(number, number + 1, spans=False)
        source = NO_SOURCE if rows.sources is None else int(rows.sources[0])
        names = self._table.read_texts("sources", source, source + 1) if source != NO_SOURCE else []
        try:
            identity = rows.ids[0].decode("utf-8") or None if rows.ids else None
            metadata = json.loads(rows.metadata[0] or b"{}") if rows.metadata else {}
            if not isinstance(metadata, dict):
                raise ValueError(f"{type(metadata).__name__} {metadata!r:.80}")
        except (ValueError, RecursionError) as error:
            problem = f"document {number:,}: expected an id in UTF-8 and a JSON object, found {error}"
            raise self._table.damaged(problem) from error
        row = 0 if rows.rows is None else int(rows.rows[0])
        return Document(
            number=number,
            offset=start,
            length=stop - start,
            source=names[0].decode("utf-8", "surrogateescape") if names else None,
            row=row or None,
            id=identity,
            metadata=metadata,
        )

    def rows(self, start: int, stop: int, *, spans: bool = True) -> DocumentRows:
        """Return the facts of some documents; without `spans` no names of sources either."""
        table = self._table
        sources, rows = (table.read(name, start, stop) if name in table else None for name in ("source", "row"))
        ids, metadata = (
            table.read_texts(name, start, stop) if f"{name}_ends" in table else None for name in TEXT_COLUMNS
        )
        found = None
        if spans and self.has_spans:
            first, end = table.read("offsets", start, stop + 1)[[0, -1]]
            found = self.encoded_spans(np.array([first]), np.array([end]))
            found = found._replace(starts=found.starts - first, stops=found.stops - first)
        names = self.sources if spans else ()
        return DocumentRows(names=names, sources=sources, rows=rows, ids=ids, metadata=metadata, spans=found)

    def within_texts(self, start: int, stop: int) -> int:
        """Return the end of the first documents of a range whose ids and metadata are read at once; one at least."""
        for name in (f"{text}_ends" for text in TEXT_COLUMNS):
            if name in self._table:
                before = self._table.read(name, start - 1, start)[0] if start else np.uint64(0)
                ends = self._table.read(name, start, stop)
                stop = start + max(1, int(ends.searchsorted(before + np.uint64(TEXTS_AT_ONCE), side="right")))
        return stop

    @cached_per_process
    def sources(self) -> list[str]:
        """Names of the source files."""
        count = self._table.num_rows("sources_ends")
        names = self._table.read_texts("sources", 0, count) if count else []
        return [name.decode("utf-8", "surrogateescape") for name in names]

    def sources_of(self, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """Return which of the `sources` some documents are from; `NO_SOURCE` where that is not known."""
        if "source" in self._table:
            return self._table.read("source", start, stop)
        return np.full(stop - start, NO_SOURCE, np.uint32)

    def sources_at(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Return which of the `sources` the documents of some numbers are from, as `sources_of`."""
        if "source" in self._table:
            return self._table.gather(["source"], numbers)[0]
        return np.full(len(numbers), NO_SOURCE, np.uint32)

    def spans(self, starts: Offsets, stops: Offsets, codec: WantedSpans | None) -> Spans:
        """Return the spans that have a token in some ranges, which ascend and do not overlap: three reads a range."""
        begins, ends, texts = self.encoded_spans(starts, stops)
        if not texts:
            return Spans(begins, ends, [])
        decode = value_decoder(self.spans_codec, codec, str(self.path))
        try:
            return Spans(begins, ends, decode(texts))
        except Exception as error:  # whatever a decoder of the user raises
            token = int(begins[first_refused(decode, texts)])
            raise self._table.damaged(
                f"the value of the span at token {token:,} cannot be decoded: {error}; pass the codec that it was "
                "written with"
            ) from error

    def encoded_spans(self, starts: Offsets, stops: Offsets) -> Spans:
        """Return the spans that have a token in some ranges, with encoded values."""
        if not self.has_spans:
            return joined_spans([])
        table = self._table
        found: list[Spans] = []
        firsts = table.search("span_starts", starts, "right").tolist()
        ends = np.minimum(table.search("span_starts", stops, "left"), table.num_rows("span_starts") - 1).tolist()
        low = 0
        for first, high in zip(firsts, ends, strict=True):
            low = max(low, first - 1)
            if low < high:
                edges, data = table.read_joined_texts("span_values", low, high)
                texts = [data[begin:end] for begin, end in pairwise(edges.tolist()) if begin < end]
                kept = (edges[1:] > edges[:-1]).nonzero()[0]  # a gap has no bytes
                edges = table.read("span_starts", low, high + 1)
                found.append(Spans(edges[:-1][kept], edges[1:][kept], texts))
                low = high  # a span that two ranges share is read once
        spans = joined_spans(found)
        ascend = not (spans.starts > spans.stops).any() and not (spans.starts[1:] < spans.stops[:-1]).any()
        if len(spans.stops) and not (ascend and spans.stops[-1] <= self._end):
            raise table.damaged(f"expected spans that ascend up to token {self._end:,}, found others")
        return spans

    @cached_per_process
    def _end(self) -> int:
        """Tokens of all documents."""
        return self.edge(self.count)

    def check(self) -> None:
        """Compare the whole table with its digests; `ChecksumError` if one differs."""
        self._table.check()

    def close(self) -> None:
        if self._is_table:
            self._table.close()


def part_of(path: Path) -> DocumentPart:
    """Return the description of a document table alone, for an index."""
    with closing(DocumentTableFile(path)) as file:
        return file.part()


def check_documents(path: Path, part: DocumentPart | None = None) -> None:
    """Compare a document table with its digests, and with the part of an index that describes it."""
    with closing(DocumentTableFile(path, part)) as file:
        file.check()


def write_joined(tables: Sequence[Path], file: PartialFile, split: str, tokens_sha256: str) -> None:
    """Make one table of several, for the one file that has their tokens.

    Parameters
    ----------
    tables
        The tables.
    file
        The file of the new table.
    split
        The split of the documents.
    tokens_sha256
        The sha256 of the tokens.
    """
    from zb_hdf5.documents.table_writer import DocumentsWriter

    with DocumentsWriter(file.path) as writer:
        for table in tables:
            with closing(DocumentTableFile(table)) as one:
                join_documents([one], writer)
        writer.write_to(file, split=split, tokens_sha256=tokens_sha256)


def join_documents(files: Iterable[DocumentTableFile], writer: DocumentsWriter) -> None:
    """Append the documents of several tables with all their facts."""
    for file in files:
        edges = file.offsets.astype(np.int64)
        stop = 0
        while stop < file.count:
            start = stop
            stop = file.within_texts(start, min(start + JOINED_AT_ONCE, file.count))
            rows = file.rows(start, stop)  # with encoded values of spans
            if rows.spans and rows.spans.values:
                writer.take_codec(file.spans_codec, file.path)
            writer.append_documents(np.diff(edges[start : stop + 1]), rows)


def _by_table(
    firsts: npt.NDArray[np.uint64] | npt.NDArray[np.int64], asked: npt.NDArray[Any]
) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Yield each table that has some of the tokens or documents, by the first one of each, and which it has."""
    indices = firsts.searchsorted(asked, side="right") - 1
    for index in np.unique(indices).tolist():
        yield index, indices == index


class DocumentTable:
    """The documents of a store, a split of it, a stream or a lone file, by their numbers and by the offsets of tokens.

    Thread-safe, usable after fork, picklable; a file is opened when it is needed, and as many are open as the process
    may have. Numbers and offsets count over all files: where several splits are read together, over the one split
    and then the next.

    Parameters
    ----------
    folder
        The folder that the paths of `parts` are relative to.
    parts
        The tables, ascending by their first token.
    verify, access
        As for `open_reader`.
    open_offsets
        Opens the offsets of the stream of a part, by its index; for parts that have no table.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parts: Sequence[DocumentPart],
        verify: str = "auto",
        open_offsets: Callable[[int], TableFile] | None = None,
        access: str = "auto",
    ) -> None:
        self._folder = any_path(folder)
        self.parts = tuple(parts)
        self._verify = verify
        self._access = access
        self._open_offsets = open_offsets
        self._first_tokens = np.array([part.first_token for part in self.parts], np.uint64)
        self._first_documents = np.array([part.first_document for part in self.parts], np.int64)
        self._files: OpenFiles[DocumentTableFile] = OpenFiles(access, far=isinstance(self._folder, RemotePath))

    @classmethod
    def of_file(
        cls,
        path: Path,
        tokens_sha256: str | None = None,
        verify: str = "auto",
        sha256: str = "",
        access: str = "auto",
    ) -> Self | None:
        """Return the table of a lone file or a stream; None: there is none.

        Parameters
        ----------
        path
            The file that has the tokens.
        tokens_sha256
            The sha256 of its tokens; None or "": not known.
        verify, access
            As for `open_reader`.
        sha256
            The digest of the table, as the stream has it; "": the stream has none.

        Raises
        ------
        FormatError
            If the table belongs to other tokens.
        IncompleteError
            If the stream has a digest, and the table is not there.
        """
        if not documents_path(path).exists():
            if sha256:
                raise IncompleteError(
                    f"{documents_path(path)}: is not there, and holds the ids, metadata and spans of {path.name}: "
                    "restore it, or convert again"
                )
            return None
        file = DocumentTableFile(documents_path(path), verify=verify, access=access)
        known = file.tokens_sha256
        if (tokens_sha256 and known != tokens_sha256) or sha256 not in ("", file.part().sha256):
            file.close()
            raise FormatError(
                f"{documents_path(path)}: belongs to another file: expected sha256 of the tokens {tokens_sha256}, "
                f"found {known or 'none'}; restore it"
            )
        table = cls(path.parent, [file.part()], verify, access=access)
        table._files.open(0, lambda number: file)
        return table

    def __len__(self) -> int:
        """Return the number of documents."""
        return self.parts[-1].first_document + self.parts[-1].document_count if self.parts else 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._folder)!r}, {counted(len(self), 'document')})"

    @property
    def token_count(self) -> int:
        """Tokens of the document stream."""
        return self.parts[-1].first_token + self.parts[-1].token_count if self.parts else 0

    @property
    def offsets(self) -> Offsets:
        """The start of each document and the end of the last one, of all files: shape (D + 1,)."""
        found = np.zeros(len(self) + 1, np.uint64)
        for number, part in enumerate(self.parts):
            first = part.first_document + 1
            here = found[first : first + part.document_count]
            np.add(self.file(number).offsets[1:], np.uint64(part.first_token), out=here)
        return found

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
        found = np.empty(len(asked), np.int64)
        for index, here in _by_table(self._first_tokens, asked):
            part = self.parts[index]
            local = self.file(index).number_of(asked[here] - np.uint64(part.first_token))
            found[here] = np.where(local < 0, local, local + part.first_document)
        numbers[real] = found
        return numbers

    @property
    def sources(self) -> list[str]:
        """The names of the files that the documents came from, each once. The first call opens every table."""
        return [*self._numbered_sources[0]]

    @cached_per_process
    def _numbered_sources(self) -> tuple[list[str], list[npt.NDArray[np.int64]]]:
        """The names of all tables, and for each table the place in them of each of its own names; -1 follows these."""
        places: dict[str, int] = {}
        of_tables = []
        for index in range(len(self.parts)):
            own = [places.setdefault(name, len(places)) for name in self.file(index).sources]
            of_tables.append(np.array([*own, -1], np.int64))
        return [*places], of_tables

    def source_of(self, numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return which of the `sources` documents are from; -1: it is not known, or the number is -1, as of padding.

        Parameters
        ----------
        numbers
            The numbers of documents, of any shape, as `number_of` returns them.

        Raises
        ------
        BatchIndexError
            If no document has such a number.
        """
        wanted = np.asarray(numbers, np.int64)
        found = np.full(wanted.shape, -1, np.int64)
        real = wanted != -1
        asked = wanted[real]
        outside = asked[(asked < 0) | (asked >= len(self))]
        if len(outside):
            raise self._no_document(int(outside[0]))
        places = np.empty(len(asked), np.int64)
        for index, here in _by_table(self._first_documents, asked):
            known = self._numbered_sources[1][index]
            local = self.file(index).sources_at(asked[here] - self.parts[index].first_document)
            places[here] = known[np.minimum(local, len(known) - 1)]
        found[real] = places
        return found

    def document(self, number: int) -> Document:
        """Return the facts of one document.

        Raises
        ------
        BatchIndexError
            If no document has this number.
        """
        if not 0 <= number < len(self):
            raise self._no_document(number)
        index = int(self._first_documents.searchsorted(number, side="right")) - 1
        part = self.parts[index]
        found = self.file(index).document(number - part.first_document)
        return found._replace(number=number, offset=found.offset + part.first_token)

    def _no_document(self, number: int) -> BatchIndexError:
        return BatchIndexError(f"{self._folder}: no document {number:,}: it has {len(self):,}, counted from 0")

    def spans(self, start: int, stop: int, codec: DecodeValue | None = None) -> Spans:
        """Return the spans that have a token in `start` to `stop` of the document stream: whole, and in order.

        Parameters
        ----------
        codec
            Decodes the bytes of a value; None: values are JSON.

        Raises
        ------
        BackendError
            If the values cannot be decoded without `codec`.
        FormatError
            If a value cannot be decoded.
        """
        start = max(start, 0)
        stop = min(stop, self.token_count)
        if start >= stop:
            return joined_spans([])
        return self.spans_of(np.array([start], np.uint64), np.array([stop], np.uint64), codec)

    def spans_of(self, starts: Offsets, stops: Offsets, codec: WantedSpans | None = None) -> Spans:
        """Return the spans that have a token in some ranges, as `spans` does: each once, and in order.

        Parameters
        ----------
        starts, stops
            The ranges, uint64: none is empty, they ascend, and no two share a token.

        Raises
        ------
        BackendError, FormatError
            As `spans`, and if the spans do not ascend.
        """
        if len(self.parts) == 1 and not self.parts[0].first_token:
            return self.file(0).spans(starts, stops, codec)
        firsts = np.maximum(self._first_tokens.searchsorted(starts, side="right") - 1, 0)
        ends = self._first_tokens.searchsorted(stops)
        found = []
        for index in np.unique(ranges(firsts, ends - firsts)).tolist():
            base = np.uint64(self.parts[index].first_token)
            first = int(ends.searchsorted(index, side="right"))
            end = int(firsts.searchsorted(index, side="right"))
            begins = np.maximum(starts[first:end], base) - base
            here = self.file(index).spans(begins, stops[first:end] - base, codec)
            found.append(Spans(here.starts + base, here.stops + base, here.values))
        return joined_spans(found)

    def file(self, index: int) -> DocumentTableFile:
        """Return the file of one part."""
        return self._files.get(index, self._open)

    def with_parts(self, parts: Iterable[DocumentPart]) -> Self:
        """Return this table with other places of its files in the stream; those that are open are taken along."""
        other = type(self)(self._folder, [*parts], self._verify, self._open_offsets, self._access)
        for number, file in self._files.known.items():
            if file.count == other.parts[number].document_count:
                other._files.open(number, {number: file}.__getitem__)
        return other

    def _open(self, index: int) -> DocumentTableFile:
        part = self.parts[index]
        offsets = self._open_offsets(index) if self._open_offsets and not part.sha256 else None
        return DocumentTableFile(self._folder / part.path, part, self._verify, offsets, self._access)

    @property
    def files(self) -> dict[Path, Callable[[], DocumentTableFile]]:
        """The functions that return the file of each part that is a table, by its path."""
        return {
            self._folder / part.path: partial(self.file, index) for index, part in enumerate(self.parts) if part.sha256
        }

    def each_file(self) -> Iterator[DocumentTableFile]:
        """Yield the files one after the other: one that is not open yet is closed before the next one."""
        for index in range(len(self.parts)):
            known = self._files.known.get(index)
            if known is not None:
                yield known
            else:
                with closing(self._open(index)) as file:
                    yield file

    def close(self) -> None:
        self._files.close()
