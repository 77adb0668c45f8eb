"""A column of an HDF5 file: a dataset of tokens or of a field, with its facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zb_hdf5.documents.document_offsets import StoredOffsets
from zb_hdf5.files.codecs import CodedChunks, CompressedTokens
from zb_hdf5.files.identity import Identity
from zb_hdf5.formats.row_documents import stream_field
from zb_hdf5.hdf5.h5_chunks import ChunkExtents
from zb_hdf5.hdf5.written_rows import RowRuns
from zb_hdf5.spec import STREAM_LAYOUT, StoreMeta


class Column(NamedTuple):
    """One dataset of an HDF5 file, as a look into the file has found it: see `find_column`.

    Attributes
    ----------
    path, name
        The file, and the name of the dataset.
    meta
        Shape and dtype of a unit, which is a batch or a chunk of a stream, and the origin of the tokens.
    num_tokens
        Values that are committed.
    identity
        The identity of the file: another file of its name is refused.
    complete
        False while its writer is at work, or after it was killed.
    sha256, max_token
        The digest of the values, and the largest id. None until the writer has finished, and where none is stored.
    extents
        The extents of the units; None: only HDF5 can read them.
    obstacle
        The reason why there are no plain extents, or no digests.
    columns
        The runs of the chunks of each column, by its name. Nobody changes it.
    marker
        The dataset whose attributes are the commit marker; a dataset of another program has none.
    has_crc32
        Whether each unit has a crc32.
    origin
        The origin of the tokens: see `create_root`. Nobody changes it.
    stored_dtype
        The dtype of a dataset of another program, which may be any of integers; None: that of `meta`.
    channel
        The entry of the second of three axes that has the values; None: all have.
    kept
        The rows along the first axis that have the values, where some were never written; None: all rows have.
    num_rows
        The rows of a dataset of batches of ours, committed or not; None: of any other.
    documents_sha256
        The digest of the table of documents beside a stream of ours; "": it has none.
    fields
        The columns of the fields of tokens, by their names; {}: they are looked for, as `column_with_fields` does.
        Nobody changes it.
    offsets
        The place of the offsets of the documents of a stream of ours; None: of another file, or only HDF5 reads them.
    left_out
        The datasets beside it with a value for each token that are not fields.
    """

    path: Path
    name: str
    meta: StoreMeta
    num_tokens: int
    identity: Identity
    complete: bool = True
    sha256: str | None = None
    max_token: int | None = None
    extents: ChunkExtents | None = None
    obstacle: str = ""
    columns: dict[str, Any] = {}  # noqa: RUF012
    marker: str = ""
    has_crc32: bool = False
    origin: dict[str, Any] = {}  # noqa: RUF012
    stored_dtype: np.dtype[Any] | None = None
    channel: int | None = None
    kept: RowRuns | None = None
    num_rows: int | None = None
    documents_sha256: str = ""
    fields: dict[str, Column] = {}  # noqa: RUF012
    offsets: StoredOffsets | None = None
    left_out: tuple[str, ...] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values in the file."""
        return self.meta.dtype if self.stored_dtype is None else self.stored_dtype

    @property
    def is_foreign(self) -> bool:
        """Whether another program has written the dataset."""
        return not self.marker

    @property
    def told_by(self) -> str:
        """The field that tells the documents of a stream of another program apart; "": none does."""
        return stream_field(self.meta.fields) if self.is_foreign and self.meta.layout == STREAM_LAYOUT else ""

    @property
    def num_units(self) -> int:
        """Batches, or chunks of a stream."""
        return -(-self.num_tokens // self.meta.batch_tokens)

    @property
    def compressed(self) -> CompressedTokens | None:
        """The codec of compressed units, and their bytes."""
        found = self.extents
        return CompressedTokens(found.codec, int(found.table[:, 1].sum())) if isinstance(found, CodedChunks) else None
