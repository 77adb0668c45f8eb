"""Writes the HDF5 token stream: whole chunks, which `token_count` commits; zeros fill up the last one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.metadata import DocumentRows, EncodeValue, id_bytes, metadata_bytes
from zb_hdf5.documents.table_writer import DocumentsWriter, encoded_spans, value_encoder
from zb_hdf5.errors import ArgumentError, ConvertError
from zb_hdf5.field import Fields, parse_fields
from zb_hdf5.files.checked import GroupDigest
from zb_hdf5.files.publishing import disk_errors
from zb_hdf5.formats.batch_writer import FieldArrays, ShardInfo, split_tokens, stored_fields
from zb_hdf5.formats.h5_writer import GrowingDataset, HDF5Writer
from zb_hdf5.spec import (
    DEFAULT_CHUNK_TOKENS,
    DOCUMENTS_SHA256,
    NO_BOUNDARY,
    STREAM_LAYOUT,
    TOKENS_ATTRIBUTES,
    StoreMeta,
    as_stored,
    codec_named,
    documents_path,
    stored_dtype,
)


class HDF5ShardWriter(HDF5Writer):
    """Writes documents into one stream file: `x.partial` until `finish`, then `x`.

    A context manager: leaving the block normally calls `close`, an exception calls `abort`. Not thread-safe. Whole
    chunks are committed as soon as they are full: a kill of this process loses less than one chunk of the tokens
    written (`durable=True`: so does a power loss).

    Parameters
    ----------
    path
        The file to publish.
    dtype
        "uint16", "uint32" or "uint8".
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
    fields
        Values that are aligned with the tokens: name -> dtype, or a structured dtype.
    spans_codec
        How the values of spans become bytes: "json", or a function that returns bytes.
    codec
        "zstd" or "gzip", with a level after a colon, to compress tokens and fields; None: they are not compressed.
    origin
        The origin of the tokens, kept in the file for people: "source" (JSON), "split".
    commit_bytes
        Commit when at least so many bytes of tokens were written since; 0: each chunk.

    Attributes
    ----------
    token_count, document_count
        Tokens and documents taken so far; whole chunks of the tokens are committed.

    Examples
    --------
    >>> with HDF5ShardWriter("shard-00000.h5", boundary_token_id=50256) as writer:  # doctest: +SKIP
    ...     for document in documents:
    ...         writer.write_document(document)
    """

    _attributes = TOKENS_ATTRIBUTES
    document_count = 0
    _offsets: GrowingDataset

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
        fields: Fields | None = None,
        spans_codec: str | EncodeValue = "json",
        codec: str | None = None,
        origin: Mapping[str, Any] | None = None,
        commit_bytes: int = 0,
    ) -> None:
        self._spans_codec, self._encode_spans = value_encoder(spans_codec)
        meta = StoreMeta(
            1,  # one chunk has the limits of one batch
            chunk_tokens,
            stored_dtype(dtype),
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            boundary_token_id=boundary_token_id,
            layout=STREAM_LAYOUT,
            fields=parse_fields(fields),
            codec=codec_named(codec),
        )
        self._boundary = np.array([] if boundary_token_id < 0 else [boundary_token_id], dtype=np.int64)
        if boundary_token_id < NO_BOUNDARY:
            raise ArgumentError(f"boundary_token_id must be at least -1, found {boundary_token_id}")
        as_stored(self._boundary, meta, "boundary_token_id")
        self._buffers = {"": np.zeros(chunk_tokens, meta.dtype)}  # of the tokens, and of each field
        for field in meta.fields:
            self._buffers[field.name] = np.zeros((chunk_tokens, *field.shape), field.dtype)
        self._buffered = 0  # tokens in the buffers
        self._ends: list[npt.NDArray[np.uint64]] = []  # of documents that are not committed
        self._ids = set[bytes]()
        self._has_ids = False
        super().__init__(path, meta, overwrite=overwrite, durable=durable, origin=origin, commit_bytes=commit_bytes)

    def _begin(self) -> None:
        self._documents = DocumentsWriter(documents_path(self._file.path), self._spans_codec)
        super()._begin()

    def write_document(
        self,
        tokens: npt.ArrayLike,
        fields: FieldArrays | None = None,
        *,
        spans: Sequence[tuple[int, int, object]] = (),
        id: str | int | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Append one document, and the boundary token after it where there is one. Raises as `write_documents`.

        The field values of the boundary token are 0. Ids, metadata and spans go into `<path>.documents`, which is
        published with the stream.

        Parameters
        ----------
        fields
            As for `write_documents`.
        spans
            (start, stop, value) of runs of its tokens: they ascend and do not overlap; a value may be a list.
        id
            Its name, kept as text: another one for each document. All documents of a stream have one, or none has.
        metadata
            More that is kept, as JSON.
        """
        document, fields = split_tokens(tokens, fields)
        if document.ndim != 1:
            raise ArgumentError(f"{self._file.path}: expected a 1-D document, found shape {document.shape}")
        if document.size == 0:
            document = document.astype(self.meta.dtype)  # an empty list is an array of floats
        stored = as_stored(document, self.meta, f"{self._file.path} (token {self.token_count:,})")
        values = stored_fields(fields, self.meta, stored.shape, self._file.path)
        where = f"{self._file.path}: document {self.document_count:,}"
        encoded = encoded_spans(spans, len(stored), self._encode_spans, where) if spans else None
        text = b"" if id is None else id_bytes(id, where)
        more = metadata_bytes(metadata, where) if metadata else b""
        self._require_id(text, where)
        stored = np.append(stored, self._boundary.astype(stored.dtype))
        padded: dict[str, npt.NDArray[Any]] = {}
        for name, each in values.items():
            boundary = np.zeros((len(self._boundary), *each.shape[1:]), each.dtype)
            padded[name] = np.concatenate([each, boundary])
        self._write(stored, np.array([len(stored)]), padded)
        self._documents.add(len(stored), text, more, encoded)
        self._has_ids = bool(text)
        if text:
            self._ids.add(text)

    def _require_id(self, text: bytes, where: str) -> None:
        """Raise `ConvertError` if an id was there before, or only some documents have one."""
        if self.document_count and bool(text) != self._has_ids:
            before, this = ("have ids", "none") if self._has_ids else ("have no ids", repr(text.decode()))
            raise ConvertError(f"{where}: the documents before it {before}, found {this}: give ids to all, or to none")
        if text in self._ids:
            raise ConvertError(f"{where}: the id {text.decode()!r} was there before: each document needs its own")

    def write_documents(
        self,
        tokens: npt.ArrayLike,
        lengths: npt.ArrayLike,
        fields: FieldArrays | None = None,
        *,
        documents: DocumentRows | None = None,
    ) -> None:
        """Append many documents at once.

        Parameters
        ----------
        tokens
            1-D, of any integer dtype: the documents one after the other, boundary tokens already inside.
        lengths
            Tokens of each document, its boundary token included.
        fields
            The values of exactly the fields of the stream, for each of the tokens.
        documents
            Sources, rows, ids, metadata and spans of the documents, as far as they are known.

        Raises
        ------
        ConvertError
            If an id is negative, too large for the stored dtype, or at or above `vocab_size`; nothing was written.
        ArgumentError
            If the lengths do not sum to the tokens; nothing was written.
        OSError
            If the disk is full or fails. Committed chunks stay in the partial file, and this writer is done.
        """
        stored, fields = split_tokens(tokens, fields)
        sizes = np.asarray(lengths, dtype=np.int64)
        if stored.ndim != 1 or sizes.ndim != 1 or (sizes < 0).any() or int(sizes.sum()) != len(stored):
            raise ArgumentError(
                f"{self._file.path}: expected 1-D tokens and the lengths of their documents, found tokens of shape "
                f"{stored.shape} and {sizes.size:,} lengths that sum to {int(sizes.sum()):,}"
            )
        stored = as_stored(stored, self.meta, f"{self._file.path} (token {self.token_count:,})")
        self._write(stored, sizes, stored_fields(fields, self.meta, stored.shape, self._file.path))
        self._documents.append_documents(sizes, documents)
        if len(sizes):
            self._has_ids = documents is not None and documents.ids is not None

    def _write(
        self, stored: npt.NDArray[Any], sizes: npt.NDArray[np.int64], values: dict[str, npt.NDArray[Any]]
    ) -> None:
        """Take whole documents into the buffers, which are committed each time they are full."""
        self._require_open()
        self.document_count += len(sizes)
        if len(sizes):
            self._ends.append((self.token_count + np.cumsum(sizes)).astype("<u8"))
        taken = {"": stored, **values}
        done = 0
        try:
            while done < len(stored):
                count = min(len(stored) - done, self.meta.chunk_tokens - self._buffered)
                for name, buffer in self._buffers.items():
                    buffer[self._buffered : self._buffered + count] = taken[name][done : done + count]
                self._buffered += count
                self.token_count += count
                done += count
                if self._buffered == self.meta.chunk_tokens:
                    self._commit_buffers()
        except BaseException as error:
            self._failure = error  # a part of it may be in the buffers
            raise

    def _commit_buffers(self) -> None:
        """Extend the datasets by the content of the buffers: a whole chunk, or at the end the rest."""
        for buffer in self._buffers.values():
            buffer[self._buffered :] = np.zeros((), buffer.dtype)
        pending = self._digest.submit(self._buffers[""][np.newaxis, : self._buffered])
        try:
            with disk_errors(self._file.partial_path):
                self._append(pending)
        finally:
            pending.wait()  # also after a failure: the buffer may then change
        self._digest.accept(pending)

    def _append(self, pending: GroupDigest) -> None:
        number = len(self._crc32)
        stop = self.token_count
        ends = np.concatenate([*self._ends, np.empty(0, "<u8")])
        whole = int(np.searchsorted(ends, stop, side="right"))
        self._allocate_up_to(-(-stop // self.meta.chunk_tokens), self._offsets.count + whole)
        crc32 = list[int]()
        if self._buffered:
            if self._encode is not None and stop % self.meta.chunk_tokens:
                self._cut_columns(stop)
            tokens, *fields = (buffer[np.newaxis] for buffer in self._buffers.values())
            self._write_chunks(number, tokens, dict(zip(self._fields, fields, strict=True)))
            for column, values in zip(self._fields.values(), fields, strict=True):
                column.digest(values[:, : self._buffered])
            crc32 = pending.crc32
            self.max_token = max(self.max_token, pending.max_token)
            self._main.waiting += crc32
        with self._hdf5():
            self._offsets.append(ends[:whole])
        marker = {"document_count": self._offsets.count - 1, "max_token": self.max_token, "token_count": stop}
        self._commit_chunks(self._buffers[""].nbytes, marker)
        self._crc32.extend(crc32)
        self._buffered = 0
        self._ends = [ends[whole:]]

    def _cut_columns(self, stop: int) -> None:
        """Cut the columns before their last chunk is written: cut later, HDF5 would unpack it, and pack it again."""
        for column in self._columns:
            with self._hdf5():
                column.stored.resize(stop, axis=0)

    def _write_rest(self) -> None:
        if self._buffered or self._ends:
            self._commit_buffers()

    def _complete(self, info: ShardInfo) -> ShardInfo:
        """Write the table of the documents, if it has more than their offsets, and then complete the file."""
        sha256 = ""
        if self._documents.has_more:
            file = self.begin_sidecar(self._documents.path)
            sha256 = self._documents.write_to(file, tokens_sha256=info.sha256).sha256
        with self._hdf5():
            self._h5.attrs.modify(DOCUMENTS_SHA256, np.bytes_(sha256))
        return super()._complete(info)

    def _release(self) -> None:
        super()._release()
        self._documents.close()
