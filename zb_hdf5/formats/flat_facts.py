"""The facts of a file of ids, and their comparison with the facts of the other files of its folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from zb_hdf5.errors import FormatError, Remedy
from zb_hdf5.field import Field
from zb_hdf5.files.field_files import require_one_dtype
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import any_path, on_failure
from zb_hdf5.read_as import is_a_stream
from zb_hdf5.spec import BATCHES_LAYOUT, STREAM_LAYOUT

if TYPE_CHECKING:  # h5py, which no other format needs
    from zb_hdf5.formats.h5_column import Column

#: Ids of a row that is not a record, unless the user says so: one of a column, or an id and its mask.
SHORT_ROWS: Final = range(1, 3)


class FlatFacts(NamedTuple):
    """The facts of one flat file, as its headers and sizes have them: no look at it reads an id or a document.

    Attributes
    ----------
    text
        The path of the file of the ids, as text: a folder has thousands of them. `path` is made when it is asked for.
    num_tokens
        Its ids.
    dtype
        The dtype of an id in the file: any integer.
    byte_offset
        The first byte of the first id.
    num_documents
        Documents whose ends are stored; None: none are, and the file counts as one document. `NOT_COUNTED`: their ends
        are stored, and `FlatFormat.num_documents` reads all of them.
    fields
        The fields whose values are stored beside the ids, each in a file of its own.
    record_tokens
        The ids of a record, of a file that holds records; None: it is a stream.
    identity
        The identity that the file had: another file of its name is refused when it is opened. None: any file.
    documents_identity
        That of the file of documents beside it, which is compared in the same way. None: there is none.
    documents
        The look at that file, which is open for whoever reads them. None: it is opened again.
    column
        The ids of an HDF5 file, as the look has found them; None: of another file.
    by_columns
        Whether the ids of a record do not follow each other, as in Fortran order: no such file is read in place.
    """

    text: str
    num_tokens: int
    dtype: np.dtype[Any]
    byte_offset: int = 0
    num_documents: int | None = None
    fields: tuple[Field, ...] = ()
    record_tokens: int | None = None
    identity: Identity | None = None
    documents_identity: Identity | None = None
    documents: Look | None = None
    column: Column | None = None
    by_columns: bool = False

    @classmethod
    def of(cls, column: Column) -> Self:
        """Return the facts of an HDF5 file, by the dataset of its tokens."""
        facts = cls(os.fspath(column.path), column.num_tokens, column.dtype, fields=column.meta.fields)
        return facts._replace(identity=column.identity, column=column)

    @property
    def path(self) -> Path:
        """The file of the ids."""
        return any_path(self.text)

    def look_at_documents(self, path: str | Path) -> AbstractContextManager[Look]:
        """Return a look at the file of documents, which is opened if it is not: another file is refused."""
        if self.documents is not None and self.documents.is_open:
            return nullcontext(self.documents)
        look = Look(path)
        with on_failure(look.close):
            look.require(self.documents_identity)
        return look

    def __reduce__(self) -> tuple[Any, ...]:
        return FlatFacts, tuple(self._replace(documents=None))

    def as_known(self, documents: Identity | None) -> FlatFacts:
        """Return the facts of a file that is looked at again: another file of its documents is refused. None: any."""
        return self if documents is None else self._replace(documents_identity=documents)

    @property
    def layout(self) -> str:
        """The layout of the file: that of batches if it has records, of a stream else."""
        if self.column is not None:
            return self.column.meta.layout
        return STREAM_LAYOUT if self.record_tokens is None else BATCHES_LAYOUT

    @property
    def record_shape(self) -> tuple[int, int]:
        """The records that are stored together, and the ids of each, of a file that holds records."""
        if self.column is not None:
            return self.column.meta.shape
        return 1, self.record_tokens or 0

    @property
    def shape(self) -> tuple[int, ...]:
        """(tokens,) of a stream, (records, tokens of each) of records."""
        if self.layout == STREAM_LAYOUT:
            return (self.num_tokens,)
        length = self.record_shape[1]
        return self.num_tokens // max(1, length), length

    def require_axes(self, axes: str | None) -> None:
        """Refuse axes of a stream, and rows that are too short for records unless their axes are told.

        Raises
        ------
        ArgumentError
            If axes are told of a stream.
        FormatError
            If a row has one id or two: it may be one of a column, or an id and its mask.
        """
        if axes is not None and self.record_tokens is None:
            raise is_a_stream(self.path, axes)
        if axes is None and self.record_tokens in SHORT_ROWS:
            raise FormatError(
                f"{self.text}: expected records of at least {SHORT_ROWS.stop} tokens, found rows of "
                f"{self.record_tokens}",
                remedy=Remedy.RECORD_AXES,
            )


def require_alike(found: Sequence[FlatFacts]) -> None:
    """Raise `FormatError` if the files of a folder differ: files of another corpus would be read unseen."""
    require_one_dtype((each.text, each.dtype) for each in found)
    first = found[0]
    for each in found:
        if each.record_tokens != first.record_tokens:
            raise FormatError(
                f"{each.text}: expected {_kind_of(first)}, as {first.path.name} has, found {_kind_of(each)}: move the "
                "others to another folder, or convert each kind by itself"
            )
        if each.fields != first.fields:
            expected = " and ".join(field.name for field in first.fields) or "no field"
            names = " and ".join(field.name for field in each.fields) or "none"
            raise FormatError(
                f"{each.text}: expected {expected}, as {first.path.name} has it, found {names}; restore what is "
                "missing, or move the others to another folder"
            )


def _kind_of(found: FlatFacts) -> str:
    return "a stream" if found.record_tokens is None else f"records of {found.record_tokens:,}"
