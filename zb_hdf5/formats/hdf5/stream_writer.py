"""Writes the HDF5 token stream: one chunk per extension, committed in the order of the batch store's writer.

Tokens are buffered up to a whole chunk; each chunk extends the dataset by exactly its length and is committed by
`token_count`. The last range is shorter than its chunk, and `token_count` says where it ends.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.writer import Columns, ShardInfo
from zb_hdf5.core.digests import TokenDigest, crc32_array
from zb_hdf5.core.documents import id_bytes, metadata_bytes
from zb_hdf5.core.publishing import PartialFile, disk_errors
from zb_hdf5.errors import ArgumentError, ClosedError, ConvertError
from zb_hdf5.formats.codecs import Encode, encoder
from zb_hdf5.formats.document_writer import DocumentsWriter, encoded_spans
from zb_hdf5.formats.documents import DocumentRows, documents_path
from zb_hdf5.formats.hdf5.file import CREATOR, chunk_runs, create_for_swmr, create_texts
from zb_hdf5.formats.hdf5.room import Room, early_allocation, hdf5_writes
from zb_hdf5.spec import (
    CRC32,
    CRC32_CHUNK_ROWS,
    DEFAULT_CHUNK_TOKENS,
    DOC_OFFSETS,
    DOC_OFFSETS_CHUNK_ROWS,
    NO_BOUNDARY,
    NO_SHA256,
    STREAM_CHUNKS_AHEAD,
    STREAM_FORMAT,
    STREAM_VERSION,
    TOKENS,
    TOKENS_ATTRIBUTES,
    StoreMeta,
    TokenArray,
    as_stored,
    meta_block_bytes,
    stored_dtype,
)


class HDF5ShardWriter:
    """Writes documents into one stream file: `x.partial` until `finish`, then `x`.

    A context manager: leaving the block normally calls `finish`, an exception calls `abort`. Not thread-safe. Whole
    chunks are committed as soon as they are full: a kill of this process loses less than one chunk of what was
    written (`durable=True`: so does a power loss).

    Parameters
    ----------
    path
        The file to publish.
    dtype
        "uint16" or "uint32".
    chunk_tokens
        Tokens per chunk: a multiple of the windows that will be read.
    boundary_token_id
        The token between documents; -1: none.
    vocab_size
        If known (not 0), larger ids are refused.
    tokenizer
        JSON text that describes the tokenizer.
    overwrite
        Replace an existing file (at the end, by rename); otherwise it is an error.
    durable
        Also flush to disk at each commit.
    spans_codec
        How the values of spans become bytes: "json", "str", "numpy", "msgpack" (if it is installed), "pickle", or a
        function that returns bytes.

    Examples
    --------
    >>> with HDF5ShardWriter("shard-00000.h5", boundary_token_id=50256) as writer:  # doctest: +SKIP
    ...     for document in documents:
    ...         writer.write_document(document)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: str = "uint16",
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        boundary_token_id: int = NO_BOUNDARY,
        vocab_size: int = 0,
        tokenizer: str = "",
        overwrite: bool = False,
        durable: bool = False,
        spans_codec: str | Encode = "json",
    ) -> None:
        codec, self._encode = encoder(spans_codec)
        # one chunk has the limits of one batch
        self._meta = StoreMeta(1, chunk_tokens, stored_dtype(dtype), vocab_size=vocab_size, tokenizer=tokenizer)
        self.boundary_token_id = boundary_token_id
        self._boundary = np.array([] if boundary_token_id < 0 else [boundary_token_id], dtype=np.int64)
        if boundary_token_id < NO_BOUNDARY:
            raise ArgumentError(f"boundary_token_id must be at least -1, found {boundary_token_id}")
        as_stored(self._boundary, self._meta, "boundary_token_id")
        self._durable = durable
        self._max_token = 0
        self._crc32: list[int] = []  # of the committed chunks
        self._buffer = np.zeros(chunk_tokens, self._meta.dtype)
        self._buffered = 0
        self._committed = 0
        self._ends: list[npt.NDArray[np.uint64]] = []  # of documents that are not committed
        self._open, self._failed = True, False
        self._h5: Any = None
        self._file = PartialFile(path, overwrite=overwrite)
        self._documents = DocumentsWriter(documents_path(self._file.path), codec)
        self._digest = TokenDigest()
        try:
            self._begin()
        except BaseException:
            self.abort()
            raise

    @property
    def token_count(self) -> int:
        """Tokens taken so far; whole chunks of them are committed."""
        return self._committed + self._buffered

    @property
    def document_count(self) -> int:
        """Documents taken so far."""
        return self._offsets.count - 1 + sum(map(len, self._ends))

    def write_document(
        self,
        tokens: npt.ArrayLike,
        *,
        spans: Sequence[tuple[int, int, object]] = (),
        id: str | int | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Append one document, and the boundary token behind it where there is one. Raises as `write_documents`.

        What is said of documents lies in `<path>.documents.h5`, which is published before the stream.

        Parameters
        ----------
        spans
            (start, stop, value) of runs of its tokens: they ascend and do not overlap; a value may be a list.
        id
            Its name, kept as text.
        metadata
            More that is kept, as JSON.
        """
        document = np.asarray(tokens)
        if document.ndim != 1:
            raise ArgumentError(f"{self._file.path}: expected a 1-D document, found shape {document.shape}")
        if document.size == 0:
            document = document.astype(self._meta.dtype)  # an empty list is an array of floats
        stored = as_stored(document, self._meta, f"{self._file.path} (token {self.token_count:,})")
        where = f"{self._file.path}: document {self.document_count:,}"
        encoded = encoded_spans(spans, len(stored), self._encode, where) if spans else None
        text = b"" if id is None else id_bytes(id, where)
        more = metadata_bytes(metadata, where) if metadata else b""
        stored = np.append(stored, self._boundary.astype(stored.dtype))
        self._write(stored, np.array([len(stored)]))
        self._documents.add(len(stored), text, more, encoded)

    def write_documents(
        self, tokens: npt.ArrayLike, lengths: npt.ArrayLike, documents: DocumentRows | None = None
    ) -> None:
        """Append many documents at once.

        Parameters
        ----------
        tokens
            1-D, of any integer dtype: the documents one after the other, boundary tokens already inside.
        lengths
            Tokens of each document, its boundary token included.
        documents
            What is known of them.

        Raises
        ------
        ConvertError
            If an id is negative, too large for the stored dtype, or at or above `vocab_size`; nothing was written.
        ArgumentError
            If the lengths are not those of the tokens; nothing was written.
        OSError
            If the disk is full or fails. What was committed stays committed in the partial file, this writer is done.
        """
        self._require_open()
        stored = np.asarray(tokens)
        sizes = np.asarray(lengths, dtype=np.int64)
        if stored.ndim != 1 or sizes.ndim != 1 or (sizes < 0).any() or int(sizes.sum()) != len(stored):
            raise ArgumentError(
                f"{self._file.path}: expected 1-D tokens and the lengths of their documents, found tokens of shape "
                f"{stored.shape} and {sizes.size:,} lengths that sum to {int(sizes.sum()):,}"
            )
        stored = as_stored(stored, self._meta, f"{self._file.path} (token {self.token_count:,})")
        self._write(stored, sizes)
        self._documents.append(sizes, documents)

    def _write(self, stored: TokenArray, sizes: npt.NDArray[np.int64]) -> None:
        """Take whole documents."""
        self._require_open()
        if len(sizes):
            self._ends.append((self.token_count + np.cumsum(sizes)).astype("<u8"))
        try:
            self._take(stored)
        except BaseException:
            self._failed = True
            raise

    def finish(self) -> ShardInfo:
        """Complete the file and publish it under its final name."""
        self._require_open()
        self._open = False
        try:
            if self._buffered or self._ends:
                self._commit_buffer()
            self._digest.close()
            info = ShardInfo(
                self._file.path, "hdf5", len(self._crc32), self._committed, self._max_token, self._digest.sha256(),
                crc32_array(self._crc32), document_count=self._offsets.count - 1,
            )  # fmt: skip
            with disk_errors(self._file.partial_path):
                info = info._replace(columns=self._complete(info))
            if self._documents.says_more:
                self._documents.publish(tokens_sha256=info.sha256)
            else:
                self._documents.close()
                self._documents.path.unlink(missing_ok=True)  # of the stream that this one replaces
            self._file.publish()
        except BaseException:
            self._release()
            raise
        return info

    def abort(self) -> None:
        """Remove the unfinished file. What had the final name before is untouched."""
        if self._open:
            self._open = False
            self._release()

    def _require_open(self) -> None:
        if not self._open:
            raise ClosedError(f"{self._file.path}: this writer was closed")
        if self._failed:
            raise ConvertError(f"{self._file.path}: an earlier write failed; write the shard again")

    def _begin(self) -> None:
        self._file.unlock()
        with hdf5_writes(self._file.partial_path):
            self._h5 = create_for_swmr(self._file.own_path, meta_block_bytes(0))
            self._create_objects(self._h5)
            self._room = Room(self._h5, self._tokens, self._file.fd)
            self._extend(0, 1)
            self._offsets.append(np.zeros(1, "<u8"))
            self._h5.flush()
            self._h5.swmr_mode = True
        self._file.share_lock()  # from here on HDF5 holds no lock: a second "w" would truncate the live file

    def _create_objects(self, h5: h5py.File) -> None:
        meta = self._meta
        create_texts(h5, format=STREAM_FORMAT, creator=CREATOR, tokenizer=meta.tokenizer)
        h5.attrs.create("format_version", STREAM_VERSION, dtype="<u4")
        h5.attrs.create("vocab_size", meta.vocab_size, dtype="<u8")
        self._tokens = _create_growing(h5, TOKENS, meta.dtype, meta.seq_len)
        first = {
            "sha256": NO_SHA256.encode(),
            "boundary_token_id": self.boundary_token_id,
            "chunk_tokens": meta.seq_len,
        }
        for name, dtype in TOKENS_ATTRIBUTES.items():
            self._tokens.attrs.create(name, first.get(name, 0), dtype=dtype)
        self._crc = _Rows(h5, CRC32, "<u4", CRC32_CHUNK_ROWS)
        self._offsets = _Rows(h5, DOC_OFFSETS, "<u8", DOC_OFFSETS_CHUNK_ROWS)

    def _extend(self, num_chunks: int, num_offsets: int) -> None:
        """Make room for whole chunks and their crc32, and for the places of documents, in front of them."""
        rows = {self._offsets: num_offsets, self._crc: num_chunks}
        lengths = {dataset.stored: dataset.whole_chunks(count) for dataset, count in rows.items()}
        self._room.extend(lengths | {self._tokens: num_chunks * self._meta.seq_len})

    def _make_room(self, num_chunks: int, num_offsets: int) -> None:
        there = self._room.num_chunks
        if num_chunks > there or num_offsets > len(self._offsets.stored):
            self._room.require_metadata_space()
            ahead = there if num_chunks <= there else there + STREAM_CHUNKS_AHEAD
            with hdf5_writes(self._file.partial_path):
                self._extend(ahead, max(num_offsets, self._offsets.count))

    def _take(self, tokens: TokenArray) -> None:
        """Move tokens into the buffer, and commit it each time it is full."""
        while len(tokens):
            taken = tokens[: len(self._buffer) - self._buffered]
            self._buffer[self._buffered : self._buffered + len(taken)] = taken
            self._buffered += len(taken)
            tokens = tokens[len(taken) :]
            if self._buffered == len(self._buffer):
                self._commit_buffer()

    def _commit_buffer(self) -> None:
        """Extend the dataset by what is in the buffer: a whole chunk, or at the end the rest."""
        self._buffer[self._buffered :] = 0
        pending = self._digest.submit(self._buffer[np.newaxis, : self._buffered])
        try:
            with disk_errors(self._file.partial_path):
                self._append(np.concatenate([*self._ends, np.empty(0, "<u8")]), pending.result)
        finally:
            group = pending.result()  # also after a failure: the buffer may then change
        self._digest.accept(group)

    def _append(self, ends: npt.NDArray[np.uint64], digest: Any) -> None:
        stop = self._committed + self._buffered
        num_chunks = -(-stop // self._meta.seq_len)
        whole = int(np.searchsorted(ends, stop, side="right"))
        self._make_room(num_chunks, self._offsets.count + whole)
        self._room.reserve(num_chunks)
        with hdf5_writes(self._file.partial_path):
            if self._buffered:
                self._tokens.id.write_direct_chunk((self._committed,), self._buffer)
                group = digest()
                self._crc.append(crc32_array(group.crc32))
                self._crc32 += group.crc32
                self._max_token = max(self._max_token, group.max_token)
            self._offsets.append(ends[:whole])
        if self._durable:
            os.fdatasync(self._file.fd)
        self._modify(document_count=self._offsets.count - 1, max_token=self._max_token, token_count=stop)
        self._committed, self._buffered = stop, 0
        self._ends = [ends[whole:]]

    def _modify(self, **attributes: int | bytes) -> None:
        with hdf5_writes(self._file.partial_path):
            for name, value in attributes.items():
                self._tokens.attrs.modify(name, np.array(value, dtype=TOKENS_ATTRIBUTES[name]))
            self._h5.flush()
        if self._durable:
            os.fdatasync(self._file.fd)

    def _complete(self, info: ShardInfo) -> Columns:
        with hdf5_writes(self._file.partial_path):
            self._tokens.resize(self._committed, axis=0)
            for rows in (self._crc, self._offsets):
                rows.stored.resize(rows.count, axis=0)
            self._h5.flush()  # before the file says that it is complete
            self._modify(doc_offsets_crc32=self._offsets.crc32, sha256=info.sha256.encode(), complete=1)
            columns = {TOKENS: chunk_runs(self._tokens), CRC32: chunk_runs(self._crc.stored)}
            self._h5.close()
        self._room.cut_off(-(-self._committed // self._meta.seq_len))
        return columns

    def _release(self) -> None:
        self._digest.close()
        self._documents.close()
        if self._h5 is not None:
            with contextlib.suppress(OSError, RuntimeError):  # HDF5 after a failed write; the file goes anyway
                self._h5.close()
        self._file.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            try:
                self.finish()
            finally:
                self.abort()  # after a write whose error was swallowed


def _create_growing(h5: h5py.File, name: str, dtype: npt.DTypeLike, chunk_rows: int) -> h5py.Dataset:
    return h5.create_dataset(
        name, (0,), dtype, maxshape=(None,), chunks=(chunk_rows,), fill_time="never", dcpl=early_allocation()
    )


class _Rows:
    """A 1-D dataset that is written in whole chunks past HDF5's chunk cache; the last one is written again."""

    def __init__(self, h5: h5py.File, name: str, dtype: str, chunk_rows: int) -> None:
        self.count = self.crc32 = 0
        self._tail = np.zeros(chunk_rows, dtype)
        self.stored = _create_growing(h5, name, dtype, chunk_rows)

    def whole_chunks(self, count: int) -> int:
        """Return how many rows the chunks of `count` rows have room for."""
        return -(-count // len(self._tail)) * len(self._tail)

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Write `rows` behind those that are there; there is room for them."""
        chunk_rows = len(self._tail)
        self.crc32 = zlib.crc32(np.ascontiguousarray(rows, self._tail.dtype), self.crc32)
        while len(rows):
            within = self.count % chunk_rows
            taken = rows[: chunk_rows - within]
            self._tail[within : within + len(taken)] = taken
            self._tail[within + len(taken) :] = 0
            self.count += len(taken)
            self.stored.id.write_direct_chunk((self.count - len(taken) - within,), self._tail)
            rows = rows[len(taken) :]
