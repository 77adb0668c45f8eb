"""The offsets of the documents of a token stream, which are in the file of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.table_file import Side, TableFile
from zb_hdf5.errors import ChecksumError, FormatError
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import on_failure
from zb_hdf5.files.ranges import Extents
from zb_hdf5.files.tokens import Tokens, open_extents
from zb_hdf5.hdf5.h5_attributes import attribute, read_marker, text_attribute, text_of
from zb_hdf5.hdf5.h5_chunks import chunk_extents
from zb_hdf5.hdf5.h5_dataset import our_tokens, require_rows
from zb_hdf5.hdf5.h5_file import h5_damage, h5_identity, look_by_h5, open_h5_for_reading
from zb_hdf5.packages import h5py
from zb_hdf5.spec import DOC_OFFSETS, DOCUMENTS_SHA256, STREAM_FORMAT, STREAM_LAYOUT


def table_sha256(path: Path) -> str:
    """Return the digest of the table of documents that an HDF5 stream has; "": it has none."""
    with h5_damage(path), open_h5_for_reading(path) as h5:
        return text_attribute(h5, DOCUMENTS_SHA256)


class StoredOffsets(NamedTuple):
    """The place of the offsets of documents in a finished stream.

    Attributes
    ----------
    extents
        The extents of their chunks.
    num_rows
        Offsets: one more than documents.
    crc32
        Their crc32.
    """

    extents: Extents
    num_rows: int
    crc32: int


def stored_offsets(stored: h5py.Dataset, marker: Mapping[str, Any], path: Path) -> StoredOffsets | None:
    """Return the place of the offsets of documents; None: the stream is not finished, or only HDF5 reads them.

    Parameters
    ----------
    stored
        The offsets: one more than the documents, or more.
    marker
        The attributes of the tokens, as `read_marker` returns them.
    """
    if not marker["complete"]:
        return None
    count = marker["document_count"] + 1
    if not stored.chunks or stored.dtype != np.dtype("<u8"):
        return None
    extents, _ = chunk_extents(stored, stored.chunks[0] * 8, -(-count // stored.chunks[0]), path)
    return StoredOffsets(extents, count, marker["doc_offsets_crc32"]) if isinstance(extents, Extents) else None


class KnownOffsets(TableFile):
    """The column `offsets` of a file of tokens, in memory. Not picklable.

    Parameters
    ----------
    path
        The file of the tokens.
    rows
        The starts of its documents and the end of the last one, uint64, shape (D + 1,).
    """

    def __init__(self, path: Path, rows: npt.NDArray[np.uint64]) -> None:
        self.path = path
        self.attributes = {}
        self.sha256 = ""
        self.num_bytes = 0
        self._rows = rows

    def rows(self) -> npt.NDArray[np.uint64]:
        """Return all rows, uint64, shape (D + 1,), read-only. Not to be kept: ask again, and a cut file is noticed."""
        return self._rows

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
        """Do nothing: no file is open."""


class DocumentOffsets(KnownOffsets):
    """The column `offsets` of an HDF5 stream: the starts of its documents, and the end of the last. Not picklable.

    A stream of another program is one document. The rows of a large finished stream are a view
    of the mapped file, which takes no memory of the process: the rows of a trillion tokens would take gigabytes in each
    of its ranks. They are read into memory where nothing may be mapped.

    Parameters
    ----------
    path
        The file of the tokens.
    num_tokens
        Tokens of the file that are committed: the last document ends there.
    identity
        The identity that the file had before; another file of this name is refused. None: any file.
    verify
        "none": the crc32 of the rows is not compared. Only a finished stream has one.
    access
        The way to read a local file, as `open_reader` has it.
    stored
        The place of the rows, as a look into the file of this identity has found it; None: look now.
    look
        The look at the file, whose open descriptor is taken; None: the file is opened.
    """

    def __init__(
        self,
        path: Path,
        num_tokens: int,
        identity: Identity | None = None,
        verify: str = "auto",
        access: str = "auto",
        stored: StoredOffsets | None = None,
        look: Look | None = None,
    ) -> None:
        super().__init__(path, np.array([0, num_tokens], np.uint64))
        self._offsets: Tokens | None = None
        self._count = 2
        if stored is None or identity is None:
            with h5_damage(path), open_h5_for_reading(path, identity) as h5:
                if text_of(attribute(h5, "format")) != STREAM_FORMAT:
                    return
                marker = read_marker(our_tokens(h5, path, STREAM_LAYOUT), path)
                self._count = marker["document_count"] + 1
                rows = require_rows(h5, path, DOC_OFFSETS, self._count)
                stored = stored_offsets(rows, marker, path)
                if stored is None:
                    self._read_by_library(rows, marker, num_tokens, verify)
                    return
                identity = h5_identity(h5, growing=False)
                look = look_by_h5(h5, path)
        self._count = stored.num_rows
        self._open_rows(stored.extents, access, identity, look)  # without the lock that all of HDF5 has
        with on_failure(self.close):
            self._require_offsets(num_tokens, complete=True)
            if verify != "none":
                self._require_crc32(stored.crc32)

    def _read_by_library(self, stored: h5py.Dataset, marker: Mapping[str, Any], num_tokens: int, verify: str) -> None:
        """Read the rows of a file that grows, or whose chunks only HDF5 reads."""
        complete = bool(marker["complete"])
        rows = np.asarray(stored[: self._count], dtype="<u8")
        self._rows = rows if complete else rows[rows <= num_tokens]  # a killed writer may have been ahead
        self._require_offsets(num_tokens, complete=complete)
        if complete and verify != "none":
            self._require_crc32(marker["doc_offsets_crc32"])

    def _open_rows(self, extents: Extents, access: str, identity: Identity, look: Look | None) -> None:
        """Map the rows, or read them into memory where they cannot be mapped; `look` has an open descriptor."""
        self._offsets = open_extents(self.path, extents, np.dtype("<u8"), self._count, access, identity, look=look)
        if self._offsets.view(0, self._count) is None:
            self._rows = np.empty(self._count, "<u8")
            self._offsets.read([(0, self._rows)])
            self.close()

    def _require_offsets(self, num_tokens: int, *, complete: bool) -> None:
        known = self.rows()
        ends = known[[0, -1]].tolist() if len(known) else []
        if not ends or ends[0] or (complete and ends[1] != num_tokens) or np.any(known[1:] < known[:-1]):
            others = f"others, from {ends[0]:,} to {ends[1]:,}" if ends else "none"
            raise FormatError(
                f"{self.path}: expected {DOC_OFFSETS} that ascend from 0 to {num_tokens:,}, found {others}; restore "
                "the file"
            )

    def _require_crc32(self, crc32: int) -> None:
        if crc32_of(self.rows()) != crc32:
            raise ChecksumError(
                f"{self.path}: the offsets of its documents are damaged: their crc32 differs; restore it"
            )

    def rows(self) -> npt.NDArray[np.uint64]:
        """Return all rows, uint64, shape (D + 1,), read-only. Not to be kept: ask again, and a cut file is noticed."""
        mapped = None if self._offsets is None else self._offsets.view(0, self._count)
        return self._rows if mapped is None else mapped

    def close(self) -> None:
        if self._offsets is not None:
            self._offsets.close()
            self._offsets = None
