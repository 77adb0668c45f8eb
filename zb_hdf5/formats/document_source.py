"""The interface of a source of documents, in groups that any process can read by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import Spans
from zb_hdf5.field import Field
from zb_hdf5.files.source_file import SourceFile
from zb_hdf5.spec import TokenArray
from zb_hdf5.text.dropped import Dropped

#: Given a number of documents, returns which of the next ones are wanted.
DocumentFilter: TypeAlias = Callable[[int], npt.NDArray[np.bool_]]


class TokenizedDocuments(NamedTuple):
    """Consecutive documents as tokens, one after the other, each with its boundary token.

    Attributes
    ----------
    tokens, lengths
        The tokens of all documents, and the number of tokens of each.
    source
        The file of the documents.
    rows
        The row of each document in the file, counted from 1.
    ids
        The UTF-8 of the id of each; None: they have none.
    metadata
        The text of a JSON object for each; None: they have none.
    cut
        Tokens that were beyond the limit of a document.
    dropped
        Rows that were not documents.
    read
        Bytes of the group that were read so far, of its `num_bytes`.
    fields
        The values of each field of the source, for each of the tokens: shape `(tokens, ...)`.
    spans
        Spans of the documents, counted from the first of the tokens, with encoded values; None: they have none.
    refused
        Documents that the tokenizer refuses.
    lossy, lost
        The documents in which the tokenizer has lost characters, and these characters.
    """

    tokens: TokenArray
    lengths: npt.NDArray[np.int64]
    source: str
    rows: npt.NDArray[np.uint64]
    ids: Sequence[bytes] | None = None
    metadata: Sequence[bytes] | None = None
    cut: int = 0
    dropped: Dropped | None = None
    read: int = 0
    fields: Mapping[str, npt.NDArray[Any]] | None = None
    spans: Spans | None = None
    refused: Dropped | None = None
    lossy: int = 0
    lost: int = 0

    def only(self, wanted: npt.NDArray[np.bool_]) -> TokenizedDocuments:
        """Return some of the documents, as a mask of shape (documents,) names them."""
        inside = np.repeat(wanted, self.lengths)
        numbers = np.flatnonzero(wanted).tolist()
        return self._replace(
            tokens=self.tokens[inside],
            lengths=self.lengths[wanted],
            rows=self.rows[wanted],
            ids=None if self.ids is None else [self.ids[number] for number in numbers],
            metadata=None if self.metadata is None else [self.metadata[number] for number in numbers],
            fields=None if self.fields is None else {name: each[inside] for name, each in self.fields.items()},
            spans=None if self.spans is None else _spans_inside(self.spans, inside),
        )


def _spans_inside(spans: Spans, inside: npt.NDArray[np.bool_]) -> Spans:
    """Return the spans of the documents that are kept, counted from the first of their tokens.

    Parameters
    ----------
    spans
        Each in one document.
    inside
        A mask of all tokens, true for the documents that are kept.
    """
    kept = inside[spans.starts.astype(np.int64)]
    removed = np.concatenate([[0], np.cumsum(~inside)]).astype(np.uint64)
    starts = spans.starts[kept]
    moved = removed[starts.astype(np.int64)]
    values = [value for value, is_kept in zip(spans.values, kept.tolist(), strict=True) if is_kept]
    return Spans(starts - moved, spans.stops[kept] - moved, values)


class DocumentGroup(NamedTuple):
    """A part of a file of documents. All of it goes to one shard.

    Attributes
    ----------
    file_number
        The number of the file in the conversion.
    number
        The number of the group in the file.
    weight
        Its share of the work, by which groups are dealt to shards.
    num_bytes
        The bytes that are read, about, for progress.
    """

    file_number: int
    number: int
    weight: float
    num_bytes: int


@runtime_checkable
class DocumentSource(Protocol):
    """Documents to convert, in order. Picklable: other processes read their groups themselves.

    Any object that has the members without a default is one; a subclass has the others by their defaults.

    Attributes
    ----------
    paths
        The files that are read.
    groups
        The parts of the files, in order.
    dtype
        The dtype of the tokens.
    vocab_size
        Ids at or above it are refused; 0: not known.
    tokenizer
        JSON that describes the tokenizer; "": the source has tokens.
    encoder
        The file that makes the tokens of text in place of the tokenizer; "": the tokenizer itself.
    boundary_token_id
        The token at the end of each document; None: there is none.
    has_ids
        Whether the documents have ids: no two are the same.
    description
        The `source` entry of `shards.json`.
    identity
        JSON of all that decides the tokens, besides the bytes of `paths`.
    fields
        Values that are aligned with the tokens, such as labels or a loss mask.
    suspects
        The options that an id outside of the range proves wrong.
    has_documents
        Whether it tells documents apart; else they are pieces of files.
    has_metadata
        Whether the documents have metadata.
    spans_codec
        The stored name of the encoding of spans; "": there are none.
    splits
        The split of each of the files that groups name; (): all are for training.
    num_tokens
        The tokens of all documents; None: known when they are read.
    record_tokens
        The tokens of each document, if all are records, which become rows as they are; None: they are documents.
    max_token
        The largest id of all; None: known when they are read.
    left_out
        The content of its files that it leaves out, in words; "": none.
    max_dropped
        The share of the rows that may be dropped.
    has_shards
        Its files are the shards of stores, whose number somebody has chosen.
    """

    paths: list[Path]
    groups: list[DocumentGroup]
    dtype: np.dtype[Any]
    vocab_size: int
    tokenizer: str
    encoder: str = ""
    boundary_token_id: int | None
    has_ids: bool
    description: dict[str, Any]
    identity: dict[str, Any]
    fields: Sequence[Field] = ()
    suspects: tuple[str, ...] = ()
    has_documents: bool = True
    has_metadata: bool = False
    spans_codec: str = ""
    splits: Sequence[str] = ()
    num_tokens: int | None = None
    record_tokens: int | None = None
    max_token: int | None = None
    left_out: str = ""
    max_dropped: float = 1.0
    has_shards: bool = False

    def read(
        self, group: DocumentGroup, choose: DocumentFilter | None, num_threads: int
    ) -> Iterator[TokenizedDocuments]:
        """Yield the documents of a group, or those that are chosen, some at a time."""


class SourceOfFiles(DocumentSource):
    """A source of documents in files of rows or text, which stay open from one group to the next, until it is left."""

    _files: Sequence[SourceFile]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()


#: The members of a source that have no default.
REQUIRED: Final = (*(name for name in DocumentSource.__annotations__ if not hasattr(DocumentSource, name)), "read")


def missing_members(source: object) -> list[str]:
    """Return the members without a default that an object lacks: one that has them all is a source of documents."""
    return [name for name in REQUIRED if not hasattr(source, name)]


class CompletedSource:
    """Any object that has the members without a default: a `DocumentSource`, whose others have their defaults.

    Picklable, as the object is. A member that is set is that of the completed source alone.

    Parameters
    ----------
    source
        The object.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name not in DocumentSource.__annotations__:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        try:
            return getattr(self._source, name)
        except AttributeError:
            return getattr(DocumentSource, name)

    def read(
        self, group: DocumentGroup, choose: DocumentFilter | None, num_threads: int
    ) -> Iterator[TokenizedDocuments]:
        """Yield documents as `DocumentSource.read` does."""
        yield from self._source.read(group, choose, num_threads)
