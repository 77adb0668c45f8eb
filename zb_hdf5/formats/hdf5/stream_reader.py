"""Looks into an HDF5 file of a token stream, and reads its chunks, to verify, repair and index it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.checked import Crc32Rows
from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.columns.writer import Columns
from zb_hdf5.errors import (
    ArgumentError,
    ChecksumError,
    FormatError,
)
from zb_hdf5.files.digests import crc32_of
from zb_hdf5.files.identity import Identity
from zb_hdf5.files.paths import RemotePath, any_path
from zb_hdf5.formats.hdf5.fields import HDF5FieldReader, fields_in
from zb_hdf5.formats.hdf5.file import (
    h5_damage,
    h5_identity,
    open_h5_for_reading,
    own_dataset,
    read_crc32_of,
    require_rows,
    require_stored,
    require_version,
    stored_sha256,
    text_of,
)
from zb_hdf5.formats.hdf5.filters import codec_of
from zb_hdf5.formats.hdf5.places import Places, chunk_places, column_runs, compressed_tokens, plain_extents
from zb_hdf5.formats.hdf5.source import crc32_rows_of, open_source
from zb_hdf5.spec import (
    CODE_BY_DTYPE,
    CRC32,
    DOC_OFFSETS,
    NO_CODEC,
    STREAM_FORMAT,
    STREAM_LAYOUT,
    STREAM_ROOT_ATTRIBUTES,
    STREAM_VERSION,
    TOKENS,
    TOKENS_ATTRIBUTES,
    StoreMeta,
)


class StreamInspection(NamedTuple):
    """What one look into a stream file tells.

    Attributes
    ----------
    meta
        One batch is one chunk.
    sha256
        None until its writer has finished.
    places
        Where the chunks lie; None where only HDF5 can read them, or they are still being written.
    identity
        Of the file that was looked into.
    columns
        Where the chunks of the columns lie that a reader may look for without HDF5.
    """

    meta: StoreMeta
    token_count: int
    doc_offsets_crc32: int
    sha256: str | None
    complete: bool
    places: Places | None
    identity: Identity
    columns: Columns

    @property
    def num_chunks(self) -> int:
        return -(-self.token_count // self.meta.chunk_tokens)


def is_stream_file(path: Path) -> bool:
    """Return whether an HDF5 file says that it is a token stream."""
    with h5_damage(path), open_h5_for_reading(path) as h5:
        return text_of(h5.attrs.get("format")) == STREAM_FORMAT


class HDF5StreamReader(BatchReader):
    """Reads an HDF5 stream as its chunks: batches of one record, of which the last may hold fewer tokens.

    This is what is verified, repaired and indexed. `BatchReader` describes its functions; a `WindowReader` cuts
    windows for training.

    Raises
    ------
    FormatError, IncompleteError
        If the file is no stream, or is damaged.
    """

    backend = "hdf5"

    def __init__(self, path: str | os.PathLike[str], identity: Identity | None = None) -> None:
        path = any_path(path)
        found = self._found = inspect_stream(path, identity)
        access = "h5py" if found.places is None else "auto" if isinstance(path, RemotePath) else "pread"
        source = open_source(path, TOKENS, found.meta, found.places, "", access, found.identity)
        super().__init__(path, found.meta, found.num_chunks, source)
        self.complete, self.sha256, self.columns = found.complete, found.sha256, found.columns
        self.extents, self.compressed = plain_extents(found.places), compressed_tokens(found.places)
        self.identity = found.identity
        self._open_field = partial(HDF5FieldReader, path, verify="none")

    @property
    def token_count(self) -> int:
        return self._found.token_count

    def name_of(self, number: int) -> str:
        start, chunk_tokens = number * self.meta.chunk_tokens, self.meta.chunk_tokens
        return f"chunk {number:,} (tokens {start:,} to {min(start + chunk_tokens, self.token_count):,})"

    def stored_crc32(self) -> npt.NDArray[np.uint32]:
        """Return the rows of the dataset `crc32`: one for each chunk, of its tokens alone."""
        return read_crc32_of(self.path, self.identity, self.num_batches)

    def crc32_rows(self) -> Crc32Rows | None:
        return crc32_rows_of(self, CRC32, self.identity) if self.complete else None

    def doc_offsets(self) -> npt.NDArray[np.uint64]:
        """Return where the documents begin and the last one ends, shape (D + 1,): all that are committed.

        Raises
        ------
        ChecksumError
            If they are not those that were written.
        FormatError
            If they do not ascend.
        """
        offsets = read_doc_offsets(self.path, self._found.identity)
        if not self.complete:
            return offsets[offsets <= self.token_count]  # a killed writer may have been ahead with them
        whole = int(offsets[0]) == 0 and int(offsets[-1]) == self.token_count
        if not whole or not self.has_written(offsets):
            raise ChecksumError(
                f"{self.path}: the places of its documents are damaged; restore the shard, or make it again"
            )
        return offsets

    def has_written(self, offsets: npt.NDArray[np.uint64]) -> bool:
        """Return whether these are the offsets of documents whose crc32 the finished file has."""
        return crc32_of(offsets) == self._found.doc_offsets_crc32


def check_documents(reader: BatchReader) -> list[str]:
    """Compare the places of the documents of a finished stream with their crc32; return the names of the checks.

    Raises
    ------
    ChecksumError, FormatError
        If they are not those that were written.
    """
    if not isinstance(reader, HDF5StreamReader) or not reader.complete:
        return []
    reader.doc_offsets()
    return ["documents"]


def inspect_stream(path: Path, identity: Identity | None = None) -> StreamInspection:
    """Look into an HDF5 stream file; if it was open before, then with the identity that it had.

    Raises
    ------
    FormatError, IncompleteError
        If it is no stream of this version, or contradicts itself.
    """
    with h5_damage(path), open_h5_for_reading(path, identity) as h5:
        stored = checked_tokens(h5, path)
        found = {name: stored.attrs[name] for name in TOKENS_ATTRIBUTES}
        token_count, complete = int(found["token_count"]), bool(found["complete"])
        if token_count > len(stored):
            raise FormatError(f"{path}: expected {token_count:,} tokens, found room for {len(stored):,}")
        require_stored(token_count * stored.dtype.itemsize, h5, stored, path)
        chunk_tokens = int(found["chunk_tokens"])
        if chunk_tokens < 1 or (stored.chunks and stored.chunks[0] != chunk_tokens):
            raise FormatError(f"{path}: expected chunks of {chunk_tokens:,} tokens, found {stored.chunks}")
        require_rows(h5, path, DOC_OFFSETS, int(found["document_count"]) + 1)
        sha256 = stored_sha256(found["sha256"], path)
        places, columns = None, {}
        if complete:
            places = _chunk_places(stored, token_count, path)
            columns = column_runs(h5, path, TOKENS, places)
        return StreamInspection(
            _meta(h5, stored, path),
            token_count,
            int(found["doc_offsets_crc32"]),
            sha256 if complete else None,
            complete,
            places,
            h5_identity(h5, growing=not complete),
            columns,
        )


def _meta(h5: h5py.File, stored: h5py.Dataset, path: Path) -> StoreMeta:
    names = ("chunk_tokens", "document_count", "boundary_token_id")
    try:
        chunk_tokens, documents, boundary = (int(stored.attrs[name]) for name in names)
        return StoreMeta(
            1, chunk_tokens, stored.dtype, document_count=documents, vocab_size=int(h5.attrs["vocab_size"]),
            tokenizer=str(text_of(h5.attrs["tokenizer"])), boundary_token_id=boundary, layout=STREAM_LAYOUT,
            fields=fields_in(h5, path, 1), codec=codec_of(stored) or NO_CODEC,
        )  # fmt: skip
    except ArgumentError as error:
        raise FormatError(f"{path}: bad attributes: {error}") from error


def checked_tokens(h5: h5py.File, path: Path) -> h5py.Dataset:
    """Return the dataset of the tokens, of a file that is a stream of this version. Raises `FormatError`."""
    found = text_of(h5.attrs.get("format"))
    if found != STREAM_FORMAT:
        raise FormatError(f"{path}: expected root attribute format={STREAM_FORMAT!r}, found {found!r}")
    require_version(h5, STREAM_VERSION, path)
    stored = own_dataset(h5, path, TOKENS)
    if stored is None or stored.ndim != 1 or stored.dtype not in CODE_BY_DTYPE:
        raise FormatError(f"{path}: expected a 1-D dataset {TOKENS!r} of uint16 or uint32, found {stored!r}")
    missing = [name for name in STREAM_ROOT_ATTRIBUTES if name not in h5.attrs]
    missing += [f"{TOKENS}/{name}" for name in TOKENS_ATTRIBUTES if name not in stored.attrs]
    if missing:
        raise FormatError(f"{path}: attribute {missing[0]!r} is missing")
    return stored


def _chunk_places(stored: h5py.Dataset, token_count: int, path: Path) -> Places | None:
    """Return where the chunks lie, or None where only HDF5 can read them."""
    if not stored.chunks:
        return None
    chunk_tokens = stored.chunks[0]
    return chunk_places(stored, chunk_tokens * stored.dtype.itemsize, -(-token_count // chunk_tokens), path)[0]


def read_doc_offsets(path: Path, identity: Identity | None = None) -> npt.NDArray[np.uint64]:
    """Return where the documents of an HDF5 stream begin and the last one ends, shape (D + 1,)."""
    with h5_damage(path), open_h5_for_reading(path, identity) as h5:
        count = int(checked_tokens(h5, path).attrs["document_count"]) + 1
        offsets = np.asarray(require_rows(h5, path, DOC_OFFSETS, count)[:count], dtype="<u8")
    if np.any(offsets[1:] < offsets[:-1]):
        raise FormatError(f"{path}: {DOC_OFFSETS} do not ascend; restore the file")
    return offsets
