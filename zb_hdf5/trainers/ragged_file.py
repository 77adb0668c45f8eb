"""One HDF5 file of documents, in groups that are equal shares of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Final

from zb_hdf5.files.identity import require_unreplaced
from zb_hdf5.files.look import Look
from zb_hdf5.formats.id_source import IdFile, IdRows

#: Bytes of a group, about.
_GROUP_BYTES: Final = 64 << 20


class RaggedFile(IdFile):
    """An HDF5 file of documents, whose groups are equal shares of them. See `IdFile`.

    Parameters
    ----------
    look
        A look at the file.
    """

    def __init__(self, look: Look) -> None:
        super().__init__(look.path, require_unreplaced(look.path, look.identity))

    def _cut(self, num_documents: int, num_bytes: int) -> None:
        """Cut so many documents, whose ids have so many bytes, about, into groups."""
        self._document_bytes = num_bytes / max(1, num_documents)
        count = max(1, min(num_documents, -(-num_bytes // _GROUP_BYTES)))
        self._cuts = [k * num_documents // count for k in range(count + 1)]
        self.group_bytes = [num_bytes // count] * count

    def _rows(self, number: int) -> Iterator[IdRows]:
        return self._documents(*self._cuts[number : number + 2])

    def _bytes_of(self, num_documents: int) -> int:
        return int(num_documents * self._document_bytes)

    @abstractmethod
    def _documents(self, first: int, stop: int) -> Iterator[IdRows]:
        """Yield documents, numbered from 0, many at a time."""
