"""A source of documents that are ids already, in files of rows: lists of ids, and lists of values aligned with them."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import row_of_source
from zb_hdf5.errors import ArgumentError, ConvertError, ZbError
from zb_hdf5.field import LABELS, LOSS_MASK, Field
from zb_hdf5.files.listing import require_named_once
from zb_hdf5.files.source_file import SourceFile
from zb_hdf5.formats.document_source import DocumentFilter, DocumentGroup, SourceOfFiles, TokenizedDocuments
from zb_hdf5.formats.row_documents import LENGTHS_COLUMN, DocumentsError, RowDocuments, documents_column
from zb_hdf5.notes import note
from zb_hdf5.spec import TokenArray, fitting_dtype, stored_dtype
from zb_hdf5.text.document_file import facts_of_document
from zb_hdf5.text.lacking_text import IDS_COLUMNS

#: Ids that are handed over together, about.
BLOCK_OF_IDS: Final = 1 << 20
#: Rows that are handed over together, at most.
MAX_BLOCK_ROWS: Final = 1 << 14
#: Rows that all have one length; else they are documents.
RECORDS: Final = "records"


class Columns(NamedTuple):
    """The columns of a file that are read.

    Attributes
    ----------
    ids, dtype
        The column of the ids, and their dtype.
    fields
        The columns that are aligned with them.
    id
        The column of the ids of the documents; "": they have none.
    metadata
        The columns of the metadata.
    documents
        The column that tells apart the documents of packed rows; "": a row is one.
    """

    ids: str
    dtype: np.dtype[Any]
    fields: tuple[Field, ...] = ()
    id: str = ""
    metadata: tuple[str, ...] = ()
    documents: str = ""

    @property
    def lists(self) -> list[str]:
        """The columns of lists that are aligned with the ids, that of the ids first."""
        names = [self.ids, *(field.name for field in self.fields)]
        return names if self.documents in ("", LENGTHS_COLUMN, *names) else [*names, self.documents]

    @property
    def lengths(self) -> str:
        """The column that has the lengths of the documents of each row; "": there is none."""
        return self.documents if self.documents == LENGTHS_COLUMN else ""

    @property
    def names(self) -> list[str]:
        """All columns that are read, each once."""
        lengths = [self.lengths] if self.lengths else []
        return list(dict.fromkeys([*self.lists, *lengths, *self.more]))

    @property
    def more(self) -> list[str]:
        """The columns of one value for each row."""
        return [self.id, *self.metadata] if self.id else [*self.metadata]


@dataclass(frozen=True)
class ColumnSelection:
    """The columns that a conversion asks for; "" and None for those that the files decide.

    Parameters
    ----------
    ids_column
        The column of the ids; "": the first of `IDS_COLUMNS` that is there.
    field_columns
        The columns of values that are aligned with them; None: each that has a list of numbers.
    id_column
        The column of the ids of the documents; "": they have none.
    metadata_columns
        The columns of the metadata.
    """

    ids_column: str = ""
    field_columns: Sequence[str] | None = None
    id_column: str = ""
    metadata_columns: Sequence[str] = ()

    def columns(self, path: Path, kinds: Mapping[str, np.dtype[Any] | str]) -> Columns:
        """Find the columns in a file. Raises `ConvertError` if one is missing, or has not the values that it needs.

        Parameters
        ----------
        path
            The file.
        kinds
            For each column the dtype of the numbers in its lists; a text says what it has instead of such lists.
        """
        names = [*self.metadata_columns, *(self.field_columns or ())]
        for name in (self.ids_column, self.id_column, *names):
            if name and name not in kinds:
                raise ConvertError(f"{path}: expected a column {name!r}, found {_listed(kinds)}")
        named = [name for name in IDS_COLUMNS if name in kinds]
        ids = self.ids_column or next((name for name in named if isinstance(kinds[name], np.dtype)), (*named, "")[0])
        if not ids:
            *names, last = map(repr, IDS_COLUMNS)
            expected = f"{', '.join(names)} or {last}"
            raise ConvertError(
                f"{path}: expected a column {expected} of lists of ids, found {_listed(kinds)}; name it in ids_column",
                options=["ids_column"],
            )
        found = kinds[ids]
        if not isinstance(found, np.dtype) or found.kind not in "iu":
            raise ConvertError(f"{path}: column {ids!r}: expected lists of ids, found {_kind_in_words(found)}")
        integers = {name for name, kind in kinds.items() if isinstance(kind, np.dtype) and kind.kind in "iu"}
        return Columns(
            ids,
            found,
            self._fields(path, kinds, ids),
            self.id_column,
            tuple(self.metadata_columns),
            documents_column(integers - {ids, *((LENGTHS_COLUMN,) if LENGTHS_COLUMN in names else ())}),
        )

    def _fields(self, path: Path, kinds: Mapping[str, np.dtype[Any] | str], ids: str) -> tuple[Field, ...]:
        fields = []
        names = kinds if self.field_columns is None else self.field_columns
        taken = {ids, self.id_column, *self.metadata_columns}
        if self.field_columns is None:
            taken.add(LENGTHS_COLUMN)
        for name in sorted(set(names) - taken):
            dtype = kinds[name]
            is_asked = self.field_columns is not None
            if not isinstance(dtype, np.dtype):
                if is_asked:
                    raise ConvertError(f"{path}: column {name!r}: expected lists of numbers, found {dtype}")
                _require_no_targets(path, name, dtype)
                continue
            try:
                fields.append(Field(name, _field_dtype(name, dtype)))
            except ArgumentError as error:
                if is_asked:
                    raise
                warnings.warn(f"{path}: column {name!r} is left out: {error}", stacklevel=2)
        return tuple(fields)


def _require_no_targets(path: Path, name: str, kind: str) -> None:
    """Raise `ConvertError` if a column that is not a field has the name of targets: training would do without them."""
    if name in (LABELS, LOSS_MASK):
        raise ConvertError(
            f"{path}: column {name!r}: expected lists of one number for each id, found {kind}; to convert the ids "
            "without it, name the columns of values in field_columns, or '' for none",
            options=["field_columns"],
        )


def _listed(kinds: Mapping[str, object]) -> str:
    return f"the columns {', '.join(kinds)}" if kinds else "no columns"


def _kind_in_words(kind: np.dtype[Any] | str) -> str:
    return kind if isinstance(kind, str) else f"lists of {kind.name}"


def _field_dtype(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a field: labels are ids or -100, whatever dtype they had."""
    is_wide = name == LABELS and dtype.kind in "iu" and dtype.itemsize > 4
    return np.dtype(np.int32) if is_wide else dtype.newbyteorder("=")


class IdRows(NamedTuple):
    """Consecutive rows of a file: the ids of all, one after the other, and the values that are aligned with them.

    Attributes
    ----------
    first
        The number of the first row in the file, counted from 1.
    tokens, lengths
        The ids of all rows, of any integer dtype, and the number of ids of each.
    fields
        The values of each field, for each of the ids, of any dtype that can be stored as that of the field.
    ids, metadata
        As in `TokenizedDocuments`.
    read
        Bytes of the group that were read so far.
    documents
        The lengths of the documents of all rows, and how many each row has; None: no column has them.
    owners
        The number of the row of each of the `lengths`, of these rows; None: each is of a row of its own.
    """

    first: int
    tokens: TokenArray
    lengths: npt.NDArray[np.int64]
    fields: Mapping[str, npt.NDArray[Any]]
    ids: Sequence[bytes] | None = None
    metadata: Sequence[bytes] | None = None
    read: int = 0
    documents: tuple[npt.NDArray[Any], npt.NDArray[np.int64]] | None = None
    owners: npt.NDArray[np.int64] | None = None

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The number of the row of each of the `lengths` in the file."""
        return self.first + (np.arange(len(self.lengths)) if self.owners is None else self.owners)

    def as_documents(self, path: Path, name: str) -> IdRows:
        """Return the documents of packed rows, each as a row; `ConvertError` if they do not fit the ids.

        Parameters
        ----------
        path
            The file, for messages.
        name
            The column that tells them apart; "": each row is one.
        """
        if not name:
            return self
        values, counts = (self.fields[name], self.lengths) if self.documents is None else self.documents
        try:
            found = RowDocuments.of(name, values, self.lengths, counts)
        except DocumentsError as error:
            where = row_of_source(path, self.first + error.row)
            raise ConvertError(f"{where}: column {name!r}: {error.facts}") from error
        owners = found.rows.tolist()
        numbers = (np.arange(len(owners)) - np.searchsorted(found.rows, found.rows)).tolist()
        return self._replace(
            lengths=found.lengths,
            owners=found.rows,
            ids=self.ids and [_numbered(self.ids[row], number) for row, number in zip(owners, numbers, strict=True)],
            metadata=self.metadata and [self.metadata[row] for row in owners],
        )


def _numbered(id: bytes, number: int) -> bytes:
    """Return the id of a document of a packed row: no two documents have the same."""
    return id if not number else b"%b/%d" % (id, number)


class RowBlock:
    """Rows that are read one at a time, until they are enough for an `IdRows`.

    Parameters
    ----------
    path
        Their file, for messages.
    columns
        Its columns.
    first
        The number of the first row, counted from 1.
    """

    def __init__(self, path: Path, columns: Columns, first: int = 1) -> None:
        self._path = path
        self._columns = columns
        self._next = first
        self._begin()

    def _begin(self) -> None:
        self._first = self._next
        self._num_tokens = 0
        self._lists: list[list[npt.NDArray[Any]]] = [[] for _ in self._columns.lists]
        self._lengths: list[npt.NDArray[Any]] = []
        self._more: list[Sequence[Any]] = []

    @property
    def where(self) -> str:
        """The next row, for messages."""
        return row_of_source(self._path, self._next)

    @property
    def is_full(self) -> bool:
        """Whether the rows are enough to be handed over."""
        return self._num_tokens >= BLOCK_OF_IDS or self._next - self._first >= MAX_BLOCK_ROWS

    def skip(self) -> None:
        """Count a row that is none: a blank line. The rows before it have to be handed over."""
        self._next += 1
        self._first = self._next

    def add(
        self, lists: Sequence[npt.NDArray[Any]], more: Sequence[Any] = (), lengths: npt.NDArray[Any] | None = None
    ) -> None:
        """Add a row: its ids, the values of its fields, of `Columns.more` and of `Columns.lengths`."""
        for name, values in zip(self._columns.lists, lists, strict=True):
            require_aligned(self.where, name, self._columns.ids, len(lists[0]), len(values))
        for kept, values in zip(self._lists, lists, strict=True):
            kept.append(values)
        self._more.append(more)
        if lengths is not None:
            self._lengths.append(lengths)
        self._num_tokens += len(lists[0])
        self._next += 1

    def take(self, read: int) -> Iterator[IdRows]:
        """Yield the rows that were added since the last call, if there are any."""
        if self._more:
            tokens, *values = (np.concatenate(kept) for kept in self._lists)
            lengths = np.array([len(each) for each in self._lists[0]], np.int64)
            names = self._columns.lists[1:]
            fields = dict(zip(names, values, strict=True))
            ids, metadata = facts_of_rows(self._path, self._columns, self._first, self._more)
            documents = None
            if self._lengths:
                counts = np.array([len(each) for each in self._lengths], np.int64)
                documents = np.concatenate(self._lengths), counts
            yield IdRows(self._first, tokens, lengths, fields, ids, metadata, read, documents)
        self._begin()


def require_aligned(where: str, name: str, ids: str, expected: int, found: int) -> None:
    """Raise `ConvertError` if a row has not as many values in a column as it has ids."""
    if found != expected:
        raise ConvertError(
            f"{where}: column {name!r}: expected {expected:,} values, as {ids!r} has, found {found:,}; name the "
            "columns that are aligned with the ids in field_columns",
            options=["field_columns"],
        )


def facts_of_rows(
    path: Path, columns: Columns, first: int, values: Sequence[Sequence[Any]]
) -> tuple[list[bytes] | None, list[bytes] | None]:
    """Return the ids and the metadata of rows, as `TokenizedDocuments` has them.

    Parameters
    ----------
    path
        Their file, for messages.
    columns
        Its columns.
    first
        The number of the first row, counted from 1.
    values
        For each row the values of `Columns.more`.
    """
    ids: list[bytes] = []
    metadata: list[bytes] = []
    for number, more in enumerate(values, first):
        id, described = facts_of_document(columns.id, columns.metadata, more, row_of_source(path, number))
        ids.append(id)
        metadata.append(described)
    return (ids if columns.id else None), (metadata if columns.metadata else None)


class IdFile(SourceFile, ABC):
    """One file of rows, in groups, each of which can be read by itself. See `SourceFile`.

    Attributes
    ----------
    columns
        The columns that are read.
    group_bytes
        The bytes of each group, about.
    """

    columns: Columns
    group_bytes: Sequence[int]

    def rows(self, number: int) -> Iterator[IdRows]:
        """Yield the rows of one group, many at a time.

        Raises
        ------
        FormatError
            If the file is damaged, or another file has its name now.
        ConvertError
            If a row has not the values that its columns need.
        """
        yield from self.unreplaced(self._rows(number))

    @abstractmethod
    def _rows(self, number: int) -> Iterator[IdRows]:
        """Yield the rows of one group, many at a time. Raises as `rows`."""


class IdSource(SourceOfFiles):
    """Files of rows of ids as documents. See `SourceOfFiles`.

    Parameters
    ----------
    files
        The files, in order.
    name
        The name of their format.
    wanted
        The columns that were asked for.
    rows
        "documents": rows of any length; "records": all have one length.
    dtype
        The stored dtype; "auto": the smallest one that the files or the vocabulary size prove to hold all ids.
    vocab_size
        Ids at or above it are refused; 0: those that do not fit the dtype.
    max_document_tokens
        The length at which longer documents are cut; None: none is.
    more_paths
        Files that the documents depend on besides `files`, such as an index.

    Raises
    ------
    ConvertError
        If a file is named twice, or the files have not the same fields.
    """

    tokenizer = ""
    boundary_token_id = None

    def __init__(
        self,
        files: Sequence[IdFile],
        name: str,
        wanted: ColumnSelection,
        *,
        rows: str = "documents",
        dtype: str = "auto",
        vocab_size: int = 0,
        max_document_tokens: int | None = None,
        more_paths: Sequence[Path] = (),
    ) -> None:
        require_named_once((file.path for file in files), "documents")
        _require_same_fields(files)
        self._files: list[IdFile] = list(files)
        self._limit = max_document_tokens
        self.paths = [*(file.path for file in files), *more_paths]
        self.groups = [
            DocumentGroup(number, k, num_bytes, num_bytes)
            for number, file in enumerate(files)
            for k, num_bytes in enumerate(file.group_bytes)
        ]
        self.vocab_size = vocab_size
        fitting = fitting_dtype((file.columns.dtype for file in files), vocab_size)
        self.dtype = fitting if dtype == "auto" else stored_dtype(dtype)
        self.fields = files[0].columns.fields
        self.has_ids = bool(wanted.id_column)
        self.has_metadata = bool(wanted.metadata_columns)
        self.description = {"format": name, "files": [str(path) for path in self.paths]}
        self.record_tokens = self._first_length() if rows == RECORDS else None
        documents = files[0].columns.documents
        self._documents = "" if rows == RECORDS else documents
        self.identity = {
            "dtype": self.dtype.name,
            "vocab_size": vocab_size,
            "ids_column": files[0].columns.ids,
            "fields": {field.name: field.to_json() for field in self.fields},
            "more_columns": [wanted.id_column, *wanted.metadata_columns],
            "max_document_tokens": max_document_tokens,
            "record_tokens": self.record_tokens,
        }
        if self._documents:
            self.identity["documents_column"] = documents
        if documents and self._has_packed_rows(documents):
            end = "" if self._documents else ", which are left out: rows are records"
            note(f"{self.paths[0]}: its rows are packed: column {documents!r} tells their documents apart{end}")
            self.description |= {"documents": documents} if self._documents else {}

    def _has_packed_rows(self, documents: str) -> bool:
        """Return whether one of the first rows has several documents; one that cannot be read is an error later.

        Parameters
        ----------
        documents
            The column that tells them apart.
        """
        with suppress(OSError, ZbError):
            file = self._files[self.groups[0].file_number]
            found = next(iter(file.rows(self.groups[0].number)), None)
            return found is not None and len(found.as_documents(file.path, documents).lengths) > len(found.lengths)
        return False

    def _first_length(self) -> int:
        """Return the ids of the first row; `ConvertError` if it has none, or there is no row."""
        for group in self.groups:
            for rows in self._files[group.file_number].rows(group.number):
                if not rows.lengths[0]:
                    raise ConvertError(f"{row_of_source(self.paths[group.file_number], rows.first)}: a record is empty")
                return int(rows.lengths[0])
        raise ConvertError(f"{self.paths[0]}: expected records, found no rows")

    def read(
        self, group: DocumentGroup, choose: DocumentFilter | None, num_threads: int
    ) -> Iterator[TokenizedDocuments]:
        file = self._files[group.file_number]
        for found in file.rows(group.number):
            self._require_records(file.path, found)
            rows = found.as_documents(file.path, self._documents)
            chosen = np.ones(len(rows.lengths), bool) if choose is None else choose(len(rows.lengths))
            yield self._encoded(file.path, rows, chosen)

    def _require_records(self, path: Path, rows: IdRows) -> None:
        """Raise `ConvertError` unless all rows have the length of the first one, if they are records."""
        if self.record_tokens is None:
            return
        others = np.flatnonzero(rows.lengths != self.record_tokens)
        if len(others):
            raise ConvertError(
                f"{row_of_source(path, rows.first + int(others[0]))}: expected a record of {self.record_tokens:,} ids, "
                f"as the first row has, found {rows.lengths[others[0]]:,}; rows of several lengths are documents",
                options=["rows"],
            )

    def _encoded(self, path: Path, rows: IdRows, chosen: npt.NDArray[np.bool_]) -> TokenizedDocuments:
        """Return the chosen rows, cut to the longest document."""
        lengths = rows.lengths
        kept = lengths if self._limit is None else np.minimum(lengths, self._limit)
        kept = np.where(chosen, kept, 0)
        tokens = rows.tokens
        fields = self._stored_fields(path, rows)
        if int(kept.sum()) < len(tokens):
            columns = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            inside = columns < np.repeat(kept, lengths)
            tokens = tokens[inside]
            fields = {name: values[inside] for name, values in fields.items()}
        numbers = np.flatnonzero(chosen)
        return TokenizedDocuments(
            tokens,
            kept[chosen],
            str(path),
            rows.numbers[numbers].astype(np.uint64),
            None if rows.ids is None else [rows.ids[k] for k in numbers.tolist()],
            None if rows.metadata is None else [rows.metadata[k] for k in numbers.tolist()],
            cut=int(lengths[chosen].sum() - kept[chosen].sum()),
            read=rows.read,
            fields=fields or None,
        )

    def _stored_fields(self, path: Path, rows: IdRows) -> dict[str, npt.NDArray[Any]]:
        """Return the values of the fields as they are stored; `ConvertError` names the row of one that does not fit."""
        found = {}
        for field in self.fields:
            values = rows.fields[field.name]
            try:
                found[field.name] = field.as_stored(values, values.shape, path)
            except ConvertError:
                ends = np.cumsum(rows.lengths)
                for number, end, length in zip(rows.numbers.tolist(), ends, rows.lengths, strict=True):
                    field.as_stored(values[end - length : end], (length,), row_of_source(path, number))
                raise
        return found


def _require_same_fields(files: Sequence[IdFile]) -> None:
    """Raise `ConvertError` if two files have not the same fields: a store has them for all of its tokens."""
    first = files[0]
    for file in files[1:]:
        if file.columns.documents != first.columns.documents:
            raise ConvertError(
                f"{file.path}: expected documents by {first.columns.documents or 'rows'}, as {first.path.name} has "
                f"them, found {file.columns.documents or 'rows'}: convert it by itself"
            )
        if file.columns.fields != first.columns.fields:
            raise ConvertError(
                f"{file.path}: expected the fields of {first.path.name}, {_in_words(first.columns.fields)}, found "
                f"{_in_words(file.columns.fields)}; name the fields of all files in field_columns",
                options=["field_columns"],
            )


def _in_words(fields: Sequence[Field]) -> str:
    return ", ".join(f"{field.name} ({field.dtype})" for field in fields) or "none"
