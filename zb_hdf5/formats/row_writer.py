"""The writer of rows for another trainer: each document is a row, with its ids, its fields, its id and its metadata."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import DocumentRows
from zb_hdf5.errors import ConvertError
from zb_hdf5.files.paths import on_failure
from zb_hdf5.formats.batch_writer import ShardInfo
from zb_hdf5.formats.document_writer import AppendedFile, DocumentWriter
from zb_hdf5.signals import deferred_signals
from zb_hdf5.spec import DEFAULT_CHUNK_TOKENS, StoreMeta, TokenArray, find_bad_token, require_integers

#: Ids, and rows, that are written together; a longer document is written alone.
BLOCK_IDS_WRITTEN: Final = 1 << 20
BLOCK_ROWS_WRITTEN: Final = 1 << 14
#: The columns of the ids and the metadata of documents.
ID_COLUMN: Final = "id"
METADATA_COLUMN: Final = "metadata"


class WrittenRows(NamedTuple):
    """Rows that are written together.

    Attributes
    ----------
    tokens, lengths
        The ids of all rows, one after the other, and the number of ids of each.
    fields
        The values of each field, for each of the ids.
    texts
        The UTF-8 of the id, and of the metadata as JSON, of each row: by the names of their columns.
    """

    tokens: TokenArray
    lengths: npt.NDArray[np.int64]
    fields: Mapping[str, npt.NDArray[Any]]
    texts: Mapping[str, Sequence[bytes]]


class RowWriter(DocumentWriter):
    """Writes a file of rows. See `DocumentWriter`.

    Attributes
    ----------
    ids_column
        The column of the ids.
    """

    ids_column: ClassVar[str]

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: StoreMeta,
        *,
        overwrite: bool = False,
        facts: Collection[str] = (),
    ) -> None:
        super().__init__(path, meta, overwrite=overwrite, facts=facts)
        self._digest = hashlib.sha256()
        self._waiting: list[WrittenRows] = []
        self._waiting_ids = 0
        self._waiting_rows = 0
        columns = self.columns_of(meta, facts)
        if len(set(columns)) < len(columns):
            raise ConvertError(f"{self.path}: expected columns of different names, found {', '.join(columns)}")
        with ExitStack() as undo, deferred_signals():  # a signal is met when `abort` would remove the file
            self._file = AppendedFile(self.path, overwrite=overwrite)
            undo.enter_context(on_failure(self.abort))
            self._begin()

    @classmethod
    def columns_of(cls, meta: StoreMeta, facts: Collection[str]) -> list[str]:
        """Return the names of the columns: of the ids, the fields, and the facts of documents."""
        return [cls.ids_column, *(field.name for field in meta.fields), *text_columns(facts).values()]

    def write_documents(
        self,
        tokens: TokenArray,
        lengths: npt.NDArray[np.int64],
        fields: Mapping[str, npt.NDArray[Any]] | None = None,
        documents: DocumentRows | None = None,
    ) -> None:
        self._require_open()
        require_integers(tokens, self.path)
        bad = find_bad_token(tokens, self._limit)
        if bad is not None:
            ends = np.cumsum(lengths)
            row = int(np.searchsorted(ends, bad, side="right"))
            place = bad - int(ends[row] - lengths[row])
            raise self._out_of_range(tokens[bad], f"index {place:,} of row {self.document_count + row + 1:,}")
        stored = np.ascontiguousarray(tokens, self.dtype)
        self._digest.update(stored)
        self.max_token = max(self.max_token, int(stored.max(initial=0)))
        self.token_count += len(stored)
        self.document_count += len(lengths)
        columns = text_columns(self.facts)
        texts = {column: getattr(documents, fact, None) or [b""] * len(lengths) for fact, column in columns.items()}
        self._waiting.append(WrittenRows(stored, lengths, fields or {}, texts))
        self._waiting_ids += len(stored)
        self._waiting_rows += len(lengths)
        if self._waiting_ids >= BLOCK_IDS_WRITTEN or self._waiting_rows >= BLOCK_ROWS_WRITTEN:
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write the rows that were taken since the last call, some at a time."""
        if not self._waiting:
            return
        rows = _joined(self._waiting)
        self._waiting = []
        self._waiting_ids = 0
        self._waiting_rows = 0
        ends = np.cumsum(rows.lengths)
        first = 0
        while first < len(ends):
            start = int(ends[first] - rows.lengths[first])
            stop = int(np.searchsorted(ends, start + BLOCK_IDS_WRITTEN, side="right"))
            stop = min(max(stop, first + 1), first + BLOCK_ROWS_WRITTEN)
            self._write_rows(_part(rows, first, stop, start, int(ends[stop - 1])))
            first = stop

    def finish(self) -> ShardInfo:
        """Complete the file, and give it its name."""
        self._require_open()
        self._open = False
        with on_failure(self._remove):
            self._write_waiting()
            self._complete()
            self._file.file.publish()
        return ShardInfo(
            self.path,
            self.backend,
            -(-self.token_count // DEFAULT_CHUNK_TOKENS),
            self.token_count,
            self.max_token,
            self._digest.hexdigest(),
            np.zeros(0, "<u4"),
            document_count=self.document_count,
        )

    def _remove(self) -> None:
        self._discard()
        self._file.file.discard()

    @abstractmethod
    def _begin(self) -> None:
        """Write what comes before the rows."""

    @abstractmethod
    def _write_rows(self, rows: WrittenRows) -> None:
        """Write some rows: at least one, and of several at most `BLOCK_IDS_WRITTEN` ids."""

    @abstractmethod
    def _complete(self) -> None:
        """Write what comes after the rows."""

    def _discard(self) -> None:
        """Release all but the file."""


def text_columns(facts: Collection[str]) -> dict[str, str]:
    """Return the columns of the facts of documents, by the names of these in `DocumentRows`."""
    names = {"ids": ID_COLUMN, "metadata": METADATA_COLUMN}
    return {fact: column for fact, column in names.items() if fact in facts}


def _joined(parts: Sequence[WrittenRows]) -> WrittenRows:
    return WrittenRows(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        {name: np.concatenate([part.fields[name] for part in parts]) for name in parts[0].fields},
        {name: [text for part in parts for text in part.texts[name]] for name in parts[0].texts},
    )


def _part(rows: WrittenRows, first: int, stop: int, start: int, end: int) -> WrittenRows:
    return WrittenRows(
        rows.tokens[start:end],
        rows.lengths[first:stop],
        {name: values[start:end] for name, values in rows.fields.items()},
        {name: texts[first:stop] for name, texts in rows.texts.items()},
    )
