"""The documents of the tokens of a corpus: the pieces in its records, and the table of all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.files.paths import OpenFiles, RemotePath
from zb_hdf5.files.turns import compute_once

if TYPE_CHECKING:
    from zb_hdf5.documents.document_table import DocumentTable


def pieces_of_parts(
    read: Callable[[npt.NDArray[np.int64]], Pieces], numbers: npt.NDArray[np.int64], parts: int, length: int
) -> Pieces:
    """Return the pieces of parts of records, cut at the ends of the parts.

    Parameters
    ----------
    read
        Returns the pieces of whole records.
    numbers
        Numbers of parts: part p is part `p % parts` of record `p // parts`.
    parts, length
        The number of parts of a record, and the tokens of each.
    """
    records, places = np.unique(numbers // parts, return_inverse=True)
    return read(records).cut(length).take(places * parts + numbers % parts)


class RecordDocuments(ABC):
    """The documents of the tokens of a corpus, from files that are opened by their numbers. Thread-safe, picklable.

    Parameters
    ----------
    path
        The path of the corpus.
    access
        The access of the corpus: with "pread" nothing is mapped.
    """

    def __init__(self, path: Path, access: str) -> None:
        self._access = access
        self._of = str(path)
        self._files: OpenFiles[Any] = OpenFiles(access, far=isinstance(path, RemotePath))
        self._table: DocumentTable | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._of!r})"

    @property
    @abstractmethod
    def has_pieces(self) -> bool:
        """Whether the pieces of every record are stored."""

    @abstractmethod
    def open(self, number: int) -> Any:
        """Open a file; the caller closes it."""

    @abstractmethod
    def read_pieces(self, starts: npt.NDArray[np.int64], length: int) -> Pieces:
        """Return the pieces of runs of tokens that exist, each of which is one row of the pieces.

        Parameters
        ----------
        starts
            The first token of each run, in the order of the tokens. Stored records have runs that divide them.
        length
            The tokens of each run.
        """

    def documents(self) -> DocumentTable | None:
        """Return the table of all documents, where one is stored."""
        if self._table is None:
            with compute_once(self):
                self._table = self._table or self._open_table()
        return self._table

    @abstractmethod
    def _open_table(self) -> DocumentTable | None:
        """Open the table."""

    def close(self) -> None:
        """Close the files."""
        self._files.close()
        if self._table is not None:
            self._table.close()
