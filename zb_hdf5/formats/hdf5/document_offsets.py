"""The offsets of the documents of one stream: a view of the rows if they may be mapped, else a copy."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.table_file import Side, Table
from zb_hdf5.errors import ChecksumError, FormatError
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.paths import Identity
from zb_hdf5.files.ranges import Extents
from zb_hdf5.files.tokens import FileTokens, open_extents
from zb_hdf5.formats.hdf5.chunks import chunk_places
from zb_hdf5.formats.hdf5.file import h5_damage, h5_identity, open_h5_for_reading, require_rows, text_of
from zb_hdf5.formats.hdf5.inspection import checked_tokens
from zb_hdf5.spec import DOC_OFFSETS, DOCUMENTS_SHA256, STREAM_FORMAT


def table_sha256(path: Path) -> str:
    """Return the digest of the table of documents that a stream has; "": it has none."""
    if path.suffix == ".npy":
        return ""
    with h5_damage(path), open_h5_for_reading(path) as h5:
        return str(text_of(h5.attrs.get(DOCUMENTS_SHA256, "")))


class DocumentOffsets(Table):
    """The column `offsets` of a file of tokens: the starts of its documents, and the end of the last. Not picklable.

    A mapped view takes no memory of the process: rows of a trillion tokens would take gigabytes in each of its ranks.
    Compressed files of other tools, unfinished ones, objects and files on network file systems are read at once, and a
    1-D `.npy` file or a stream of others is one document. Rows of a finished stream are compared with their crc32,
    unless `verify` is "none".
    """

    def __init__(self, path: Path, num_tokens: int, identity: Identity | None = None, verify: str = "auto") -> None:
        self._file: FileTokens | None = None
        self.path, self._count = path, 2
        if path.suffix == ".npy":
            self._rows = np.array([0, num_tokens], np.uint64)
            return
        with h5_damage(path), open_h5_for_reading(path, identity) as h5:
            if text_of(h5.attrs.get("format")) != STREAM_FORMAT:
                self._rows = np.array([0, num_tokens], np.uint64)
                return
            tokens = checked_tokens(h5, path)
            self._count, complete = int(tokens.attrs["document_count"]) + 1, bool(tokens.attrs["complete"])
            crc32 = int(tokens.attrs["doc_offsets_crc32"])
            stored = require_rows(h5, path, DOC_OFFSETS, self._count)
            extents = None
            if complete and stored.chunks and stored.dtype == np.dtype("<u8"):
                num_chunks = -(-self._count // stored.chunks[0])
                extents = chunk_places(stored, stored.chunks[0] * stored.dtype.itemsize, num_chunks, path)[0]
            if isinstance(extents, Extents):
                found = h5_identity(h5, growing=False)
            else:
                rows = np.asarray(stored[: self._count], dtype="<u8")
        if isinstance(extents, Extents):  # without the lock that all of HDF5 has: on a network this takes a while
            file = open_extents(path, extents, np.dtype("<u8"), self._count, "auto", found)
            if file.flat() is not None:
                self._file = file
            else:
                rows = np.empty(self._count, "<u8")
                with closing(file):
                    file.read([(0, rows)])
        if self._file is None:
            self._rows = rows if complete else rows[rows <= num_tokens]  # a killed writer may have been ahead
        known = self.rows()
        ends = known[[0, -1]].tolist() if len(known) else []
        if not ends or ends[0] or (complete and ends[1] != num_tokens) or np.any(known[1:] < known[:-1]):
            self.close()
            others = f"others, from {ends[0]:,} to {ends[1]:,}" if ends else "none"
            raise FormatError(
                f"{path}: expected {DOC_OFFSETS} that ascend from 0 to {num_tokens:,}, found {others}; restore the file"
            )
        if complete and verify != "none" and crc32_of(known) != crc32:
            self.close()
            raise ChecksumError(f"{path}: the crc32 of its {DOC_OFFSETS} differs: they are damaged; restore the file")

    def rows(self) -> npt.NDArray[np.uint64]:
        """Return all rows, uint64, shape (D + 1,), read-only. Not to be kept: ask again, and a cut file is noticed."""
        mapped = None if self._file is None else self._file.flat()
        return self._rows if mapped is None else mapped[: self._count]

    def __contains__(self, name: str) -> bool:
        return name == "offsets"

    def num_rows(self, name: str) -> int:
        return len(self.rows()) if name in self else 0

    def read(self, name: str, start: int, stop: int) -> npt.NDArray[np.uint64]:
        return self.rows()[start:stop]

    def search(self, name: str, values: npt.NDArray[np.uint64], side: Side) -> npt.NDArray[np.int64]:
        return self.rows().searchsorted(values, side)

    def check(self) -> None:
        """Do nothing: the rows are compared when the file is opened."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
