"""One file of tokens as records, whose tokens may be parts of records: it is opened as that of a corpus is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from zb_hdf5.errors import ConvertError, Remedy
from zb_hdf5.field import Field
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.ranges import look_by
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.flat import open_ids
from zb_hdf5.formats.flat_facts import FlatFacts
from zb_hdf5.formats.found_file import FoundFile
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.h5_tokens import open_column, open_stored
from zb_hdf5.read_as import ReadAs
from zb_hdf5.store.opened_path import OpenedPath
from zb_hdf5.store.verify import require_digests


class ArrayFile:
    """The tokens of one file, and its fields: a stream, or records. Picklable: other processes open it themselves.

    Parameters
    ----------
    facts
        The file as a look has found it.
    look
        The look at it, whose open descriptor is taken by the first column that is opened; None: the file is opened.

    Attributes
    ----------
    path
        The file.
    shape
        (tokens,) of a stream, (records, tokens of each) of records.
    dtype
        The dtype of a token in the file: any integer.
    fields
        The fields of the tokens, of one value for each: those in an HDF5 file.
    """

    def __init__(self, facts: FlatFacts, look: Look | None = None) -> None:
        self._facts = facts
        self._look = look
        self.path: Path = facts.path
        self.dtype: np.dtype[Any] = facts.dtype
        self.num_tokens = facts.num_tokens
        self.shape = facts.shape
        self.fields: tuple[Field, ...] = () if facts.column is None else facts.fields

    def _column(self, name: str) -> Column | None:
        """Return the dataset of the tokens (""), or of a field; None: the file is not HDF5."""
        column = self._facts.column
        return column.fields[name] if column is not None and name else column

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Return the dtype that the tokens (""), or the values of a field, have when they are read."""
        return next((field.dtype for field in self.fields if field.name == name), self.dtype)

    @property
    def reads_alone(self) -> bool:
        """Whether a record is read without others, such as the records of its compressed chunk."""
        columns = [self._column(name) for name in ("", *(field.name for field in self.fields))]
        return all(column is None or column.extents is not None for column in columns)

    def compare_digests(self) -> None:
        """Compare the file with the digest that it holds, if it holds one. Raises as `require_digests`."""
        column = self._facts.column
        if column is not None and column.sha256 is not None:
            opened = OpenedPath({self.path: self._found_file})
            require_digests(self.path, read_as=ReadAs(column.name), opened=opened)

    def _found_file(self) -> FoundFile:
        return FoundFile(
            path=self.path, known=self._column(""), look=None if self._look is None else self._look.again()
        )

    def open(self, name: str = "", opened: Tokens | None = None) -> Tokens:
        """Open the tokens (""), of the dtype that they have in the file, or the values of a field.

        Records follow each other. Plain files are read by position.

        Parameters
        ----------
        opened
            A column of this file that is open: the file is not opened again. None: none is.
        """
        column = self._column(name)
        with self._begin_look(opened) as look:
            if column is None:
                return open_ids(self._facts.path, self._facts, "pread", look=look)
            is_plain = column.extents is not None and not isinstance(self.path, RemotePath)
            return (open_column if name else open_stored)(column, "pread" if is_plain else "auto", look)

    def _begin_look(self, opened: Tokens | None) -> AbstractContextManager[Look | None]:
        """Return a look at the file by a descriptor that is open; None: it is opened."""
        return nullcontext(self._look) if opened is None else look_by(opened.file)

    def require_length(self, seq_len: int) -> None:
        """Raise `ConvertError` if it has records of another length."""
        if len(self.shape) == 2 and self.shape[1] != seq_len:
            raise ConvertError(
                f"{self.path}: expected records of {seq_len} tokens, found {self.shape[1]}",
                remedy=Remedy.RECORD_LENGTH,
                at=self.shape[1],
            )

    def position(self, token: int) -> str:
        """Return the index of a token in the array, in words."""
        if len(self.shape) == 1:
            return f"{token:,}"
        record, column = divmod(token, self.shape[1])
        return f"[{record:,}, {column:,}]"
