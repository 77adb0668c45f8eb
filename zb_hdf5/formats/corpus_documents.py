"""The documents of a corpus, by their numbers: their facts, and their tokens where these lie together."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import DecodeValue, Document, Spans
from zb_hdf5.errors import ArgumentError, BackendError, BatchIndexError, counted
from zb_hdf5.field import UNITS
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.spec import STREAM_LAYOUT, StoreMeta, TokenArray

if TYPE_CHECKING:
    from zb_hdf5.documents.document_table import DocumentTable, Offsets


class Documented(Protocol):
    """Tokens and fields that have documents. A `Corpus` has these members."""

    path: Path
    meta: StoreMeta
    tokens: Tokens

    @property
    def source(self) -> Mapping[str, Any]: ...

    @property
    def is_stream(self) -> bool: ...

    def field(self, name: str) -> Documented: ...

    def require_documents(self) -> DocumentTable: ...


class CorpusDocument:
    """One document of a corpus. Thread-safe; picklable (a copy reopens the files by their paths).

    Two documents are equal if they have the same number in the same corpus. As for corpora, another one that was
    opened by the same path is not the same: compare `Corpus.same_as` and the numbers.

    Parameters
    ----------
    corpus
        The corpus.
    facts
        The facts of the document.

    Attributes
    ----------
    facts
        As they were given; the attributes below are from there. See `Document`.
    """

    def __init__(self, corpus: Documented, facts: Document) -> None:
        self._corpus = corpus
        self.facts = facts

    @property
    def number(self) -> int:
        """Its number in the corpus, from 0."""
        return self.facts.number

    @property
    def offset(self) -> int:
        """Its first token in the document stream."""
        return self.facts.offset

    @property
    def length(self) -> int:
        """Its tokens, the boundary token included."""
        return self.facts.length

    @property
    def id(self) -> str | None:
        """Its id as given, as text; None: it has none."""
        return self.facts.id

    @property
    def metadata(self) -> dict[str, Any]:
        """Its metadata as given; empty where there is none."""
        return self.facts.metadata

    @property
    def source(self) -> str | None:
        """The name of the file that it came from; None: not known."""
        return self.facts.source

    @property
    def row(self) -> int | None:
        """Its line or row in that file, from 1; None: not known."""
        return self.facts.row

    @property
    def ids(self) -> TokenArray:
        """Its tokens, the boundary token included: 1-D, of the stored dtype, read-only where they are mapped.

        Raises
        ------
        BackendError
            If its tokens were packed into rows, and lie in pieces.
        """
        return self._values(self._corpus, 1)

    def field(self, name: str) -> npt.NDArray[Any]:
        """Return the values of a field for its tokens, shape (tokens, ...). Raises as `ids` and `Corpus.field`."""
        values = self._corpus.field(name)
        field = values.meta.field
        if field is None:
            return self._values(values, 1)
        if field.unit != UNITS[0]:
            raise ArgumentError(f"{self._corpus.path}: {name} has a value for each {field.unit}, and none for a token")
        return self._values(values, field.size).reshape(self.facts.length, *field.shape)

    def spans(self, codec: DecodeValue | None = None) -> Spans:
        """Return its spans, counted from its first token.

        Parameters
        ----------
        codec
            Decodes the bytes of a value; None: values are JSON.
        """
        start = self.facts.offset
        found = self._corpus.require_documents().spans(start, start + self.facts.length, codec)
        return found._replace(starts=found.starts - np.uint64(start), stops=found.stops - np.uint64(start))

    def _values(self, column: Documented, size: int) -> npt.NDArray[Any]:
        if not self._corpus.is_stream:
            raise BackendError(
                f"{self._corpus.path}: document {self.number:,} was packed into rows, where its tokens lie in pieces: "
                f"open {_stream_of(self._corpus)}"
            )
        start = self.facts.offset * size
        return column.tokens[start : start + self.facts.length * size]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CorpusDocument):
            return NotImplemented
        return self._corpus is other._corpus and self.number == other.number

    def __hash__(self) -> int:
        return hash((self._corpus, self.number))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._corpus.path)!r}, {self.facts!r})"


def _stream_of(corpus: Documented) -> str:
    """Return the words for the stream that the rows of a corpus were packed from; text, for one, is none."""
    source = corpus.source
    files = source.get("files") if source.get("format") == STREAM_LAYOUT else None
    return str(files[0]) if files and isinstance(files, list) else "a token stream of the same documents"


class CorpusDocuments(Sequence[CorpusDocument]):
    """The documents of a corpus, in the order of the source. Thread-safe, usable after fork, picklable.

    A document is read when it is asked for. Numbers and offsets count over all files: where several splits are read
    together, over the one split and then the next.

    Parameters
    ----------
    corpus
        The corpus.
    table
        Its table of documents.
    """

    def __init__(self, corpus: Documented, table: DocumentTable) -> None:
        self._corpus = corpus
        self._table = table

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._table)

    @overload
    def __getitem__(self, number: SupportsIndex) -> CorpusDocument: ...

    @overload
    def __getitem__(self, number: slice) -> list[CorpusDocument]: ...

    def __getitem__(self, number: SupportsIndex | slice) -> CorpusDocument | list[CorpusDocument]:
        """Return a document, or some in a list; negative numbers count from the end.

        Raises
        ------
        BatchIndexError
            If no document has this number.
        """
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = operator.index(number)
        wanted = number + len(self) if number < 0 else number
        if not 0 <= wanted < len(self):
            raise BatchIndexError(f"{self._corpus.path}: no document {number:,}: it has {len(self):,}, counted from 0")
        return CorpusDocument(self._corpus, self._table.document(wanted))

    @property
    def offsets(self) -> Offsets:
        """The start of each document and the end of the last one in the document stream, shape (D + 1,)."""
        return self._table.offsets

    def number_of(self, offsets: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents of tokens. See `DocumentTable.number_of`."""
        return self._table.number_of(offsets)

    @property
    def sources(self) -> list[str]:
        """The names of the files that the documents came from. See `DocumentTable.sources`."""
        return self._table.sources

    def source_of(self, numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return which of the `sources` documents are from, by their numbers. See `DocumentTable.source_of`."""
        return self._table.source_of(numbers)

    def spans(self, start: int, stop: int, codec: DecodeValue | None = None) -> Spans:
        """Return the spans that have a token in a range of the document stream. See `DocumentTable.spans`."""
        return self._table.spans(start, stop, codec)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._corpus.path)!r}, {counted(len(self), 'document')})"
