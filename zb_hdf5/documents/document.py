"""What is known of documents and of the spans in them, wherever it is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from zb_hdf5.errors import ConvertError

if TYPE_CHECKING:  # the command line names kinds of text files without numpy
    import numpy as np
    import numpy.typing as npt

    from zb_hdf5.documents.pieces import Pieces


class Document(NamedTuple):
    """What is known of one document.

    Attributes
    ----------
    number
        Of the document in the store, from 0.
    offset, length
        Its first token in the document stream, and its tokens, the boundary token included.
    source, row
        Name of the file that it came from, and the line or row there, counted from 1; None where they are not known.
    id
        As given, as text; None: it has none.
    metadata
        As given; empty where there is none.
    """

    number: int
    offset: int
    length: int
    source: str | None
    row: int | None
    id: str | None
    metadata: dict[str, Any]


class Spans(NamedTuple):
    """Runs of tokens that have a value, ascending: uint64 offsets in the document stream, and the decoded values."""

    starts: npt.NDArray[np.uint64]
    stops: npt.NDArray[np.uint64]
    values: list[Any]


class Documents(Protocol):
    """The documents of a document stream. Thread-safe."""

    def __len__(self) -> int:
        """Return how many there are."""

    @property
    def token_count(self) -> int:
        """Tokens of the document stream."""

    def number_of(self, offsets: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents of tokens; -1 for padding."""

    def document(self, number: int) -> Document:
        """Return what is known of one document."""

    def spans(self, start: int, stop: int, codec: Any = None) -> Spans:
        """Return the spans that have a token in a stretch of the document stream."""

    def spans_of(self, starts: npt.NDArray[np.uint64], stops: npt.NDArray[np.uint64], codec: Any = None) -> Spans:
        """Return the spans that have a token in some stretches, which ascend and lie apart."""


class RecordDocuments(Protocol):
    """What is stored of the documents in the records of a reader. Thread-safe, picklable.

    Attributes
    ----------
    has_pieces
        Whether the pieces of every record are there.
    """

    @property
    def has_pieces(self) -> bool: ...

    def read_pieces(self, records: npt.NDArray[np.int64]) -> Pieces:
        """Return the pieces of records that exist."""

    def read_run(self, start: int, stop: int) -> Pieces:
        """Return the pieces of consecutive records that exist."""

    def documents(self) -> Documents | None:
        """Return the table of the documents, where there is one."""

    def close(self) -> None:
        """Close the files."""


def id_bytes(value: object, where: str) -> bytes:
    """Return an id as it is stored.

    Raises
    ------
    ConvertError
        If it is no text and no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, (str, Integral)) or value == "":
        raise ConvertError(f"{where}: expected an id, a text or a whole number, found {value!r}")
    try:
        return str(value).encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can name
        raise ConvertError(f"{where}: the id {value!r} is no Unicode text") from error


def metadata_bytes(value: Mapping[str, Any], where: str) -> bytes:
    """Return metadata as they are stored: the text of a JSON object. What JSON does not know becomes its text.

    Raises
    ------
    ConvertError
        If they cannot be a JSON object.
    """
    try:
        return json.dumps(dict(value), separators=(",", ":"), default=str).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ConvertError(f"{where}: expected metadata that JSON can hold, found {value!r}: {error}") from error
