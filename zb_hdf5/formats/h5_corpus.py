"""HDF5 files as corpora: read by extents outside the HDF5 library where the layout allows, through h5py where not.

A published file is opened once, its extents are listed with one `chunk_iter`, and HDF5 is closed again. Compressed
chunks of ours are decoded outside of it. Files that grow (SWMR), and filtered datasets of another origin, are read
through h5py.
"""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_offsets import DocumentOffsets
from zb_hdf5.errors import IncompleteError, Remedy, UnverifiableError, require_choice
from zb_hdf5.files.checked import Crc32Rows, stored_crc32
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import any_path
from zb_hdf5.files.ranges import Extents, look_by
from zb_hdf5.formats.access import ACCESSES
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.foreign import NO_DIGESTS
from zb_hdf5.formats.h5_column import Column
from zb_hdf5.formats.h5_tokens import H5pyTokens, open_column
from zb_hdf5.formats.inspection import GROWS, column_with_fields, find_column
from zb_hdf5.hdf5.h5_dataset import require_rows
from zb_hdf5.hdf5.h5_file import h5_damage, open_h5_for_reading
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import BATCHES_LAYOUT, STREAM_LAYOUT, crc32_column


class HDF5Corpus(Corpus):
    """A column of an HDF5 file: batches, or the chunks of a stream. See `Corpus`.

    Parameters
    ----------
    path, access
        As for `open_reader`.
    layout
        "batches" or "stream": a file of the other layout is refused. None: any.
    field
        The field whose values are read; "": the tokens.
    read_as
        The dataset of a file of another program, and the sense of its axes.
    identity
        The identity that the file had before; another file of this name is refused. None: any file.
    column
        The column as a look into the file has found it; None: look now.
    look
        The look at the file, whose open descriptor is taken; None: the file is opened.
    """

    backend = "hdf5"

    def __init__(
        self,
        path: str | os.PathLike[str],
        access: str = "auto",
        layout: str | None = BATCHES_LAYOUT,
        *,
        field: str = "",
        read_as: ReadAs = AS_STORED,
        identity: Identity | None = None,
        column: Column | None = None,
        look: Look | None = None,
    ) -> None:
        require_choice("access", access, ACCESSES)
        if column is None:
            column = find_column(any_path(path), layout, field=field, read_as=read_as, identity=identity)
        self._column = column
        tokens = open_column(column, access, look)
        committed = min(column.num_units * column.meta.batch_tokens, tokens.num_tokens)
        super().__init__(column.path, column.meta, tokens, committed, complete=column.complete)
        self.sha256 = column.sha256
        self.columns = column.columns
        self.max_token = column.max_token
        self.extents = column.extents if isinstance(column.extents, Extents) else None
        self.compressed = column.compressed
        self.origin = column.origin
        self.foreign_dataset = column.name if column.is_foreign else None
        self.documents_sha256 = column.documents_sha256
        self._access = access
        if not self.complete:
            self.refresh()  # opens the file now: once it is published, its partial's name is gone

    def with_verify(self, verify: str) -> Self:
        """See `Corpus`; of a file that grows, no read is compared."""
        column = self._column
        if verify in ("batch", "store") and (column.is_foreign or not column.complete):
            self.close()
            facts = f"{column.path}: {column.name} cannot be verified"
            if not column.complete:
                raise UnverifiableError(f"{facts}: {GROWS}")
            raise UnverifiableError(f"{facts}: {NO_DIGESTS}", remedy=Remedy.DIGESTS, at=column.path)
        return super().with_verify(verify) if self.complete else self._with(verify=verify)

    def crc32_rows(self) -> Crc32Rows | None:
        has_none = self.complete and not self._column.has_crc32 and (self.sha256 is None or self.verify == "auto")
        if self._column.is_foreign or has_none:
            return None
        name = crc32_column(self.meta.column)
        file = self.tokens.file
        runs = self.columns.get(name)
        if runs and file is not None:
            return stored_crc32(file, runs, self.num_units)
        return Crc32Rows(partial(_rows_by_library, self.path, self._column.identity, name, self.num_units))

    def missing_digests(self) -> str:
        if self._column.is_foreign:
            return f"{NO_DIGESTS}; {Remedy.DIGESTS.about(str(self.path))}"
        return super().missing_digests() if self.complete else GROWS

    def refresh(self) -> int:
        """Show the batches that a live writer has committed since; return `num_tokens`. A stream stays as it is."""
        with self._changing:
            if not self.complete and isinstance(self.tokens, H5pyTokens):
                self._follow(self.tokens)
        return self.num_tokens

    def _follow(self, tokens: H5pyTokens) -> None:
        tokens.dataset()
        state = tokens.refresh() if self.meta.layout == BATCHES_LAYOUT else None
        # after the tokens, to have as many values, and before others see their number
        for field in self._fields.values():
            field.refresh()
        if state is not None:
            self.sha256 = state["sha256"] if self.meta.field is None else self.sha256
            self.num_tokens = state["num_batches"] * self.meta.batch_tokens
            self.complete = bool(state["complete"])  # at last: whoever sees it sees all batches

    def _field_corpus(self, name: str) -> HDF5Corpus:
        self._column = column_with_fields(self._column)
        column = self._column.fields.get(name)
        field = "" if column is not None else name
        with look_by(self.tokens.file) as look:  # None: only HDF5 reads it, or it is an object
            found = HDF5Corpus(self.path, self._access, self.layout, field=field, column=column, look=look)
        return found.with_verify("none" if self.verify == "store" else self.verify)

    @property
    def doc_offsets(self) -> npt.NDArray[np.uint64]:
        """The start of each document of a stream and the end of the last one, shape (D + 1,), as committed."""
        with look_by(self.tokens.file) as look:
            offsets = DocumentOffsets(
                self.path,
                self.num_tokens,
                self._column.identity,
                access=self._access,
                stored=self._column.offsets,
                look=look,
            )
        with closing(offsets):
            return offsets.rows().copy()

    def other_checks(self) -> list[str]:
        if not self.complete or self._column.is_foreign:
            return []
        if self.meta.layout == STREAM_LAYOUT and self.meta.field is None:
            _ = self.doc_offsets  # its errors are errors of the check
            return ["documents"]
        if self.meta.layout == BATCHES_LAYOUT:
            self._require_all_rows()
        return []

    def _require_all_rows(self) -> None:
        """Raise `IncompleteError` if the dataset has other rows than the batches that are committed."""
        rows = self._column.num_rows
        if rows is not None and rows != self.num_units:
            raise IncompleteError(f"{self.path}: expected {rows:,} batches, found {self.num_units:,}")


def _rows_by_library(path: Path, identity: Identity, name: str, num_rows: int) -> npt.NDArray[np.uint32]:
    with h5_damage(path), open_h5_for_reading(path, identity) as h5:
        return np.asarray(require_rows(h5, path, name, num_rows)[:num_rows], "<u4")
