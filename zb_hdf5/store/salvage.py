"""The good part of a damaged or unfinished file: which batches or documents hold, and copying them to a new file.

A complete file keeps every batch whose crc32 is right; a stream every document that touches no bad chunk. A file whose
writer was killed keeps what was committed up to the first bad batch. What follows it is dropped: nothing proves that it
was written. Of a stream whole documents are kept.
"""

from __future__ import annotations

import errno
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_table import DocumentFile, documents_path
from zb_hdf5.documents.document_writer import write_joined
from zb_hdf5.documents.pieces_file import PiecesFile, PiecesWriter, pieces_path
from zb_hdf5.errors import ArgumentError, ChecksumError, ConvertError, FormatError, IncompleteError, ZbError
from zb_hdf5.files.digests import crc32_of
from zb_hdf5.files.sizes import counted
from zb_hdf5.formats.batch_reader import GROUP_BYTES, BatchReader, BrokenFile
from zb_hdf5.formats.hdf5.h5_reader import HDF5StreamReader
from zb_hdf5.formats.registry import BACKENDS, backend_of_suffix, open_chunks
from zb_hdf5.spec import DEFAULT_SPLIT, NO_BOUNDARY, TokenArray


@dataclass
class _Chunks:
    """The chunks of a file, each a batch or a part of a stream, and which of them do not hold.

    Attributes
    ----------
    crc32
        Of each chunk as it was found; up to the first bad one where its writer had not finished.
    bad
        Their numbers, ascending.
    """

    reader: BatchReader
    crc32: list[int]
    bad: list[int]
    reason: str

    def good_runs(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the good ones."""
        edges = [-1, *self.bad, self.reader.num_batches]
        return ((low + 1, high) for low, high in pairwise(edges) if low + 1 < high)

    def read(self, start: int, stop: int) -> TokenArray:
        """Return good chunks, shape `(count, B, S)`.

        Raises
        ------
        FormatError
            If one is not as it was found at first.
        """
        chunks = np.empty((stop - start, *self.reader.meta.shape), self.reader.dtype)
        self.reader.read_batches_into(start, chunks)
        if [_crc32(self.reader, number, chunk) for number, chunk in enumerate(chunks, start)] != self.crc32[start:stop]:
            raise FormatError(f"{self.reader.path}: changed while it was read; run it again")
        return chunks

    def read_fields(self, start: int, stop: int) -> dict[str, TokenArray]:
        """Return the values of good chunks: of each field, shape `(count * B * S, ...)`."""
        found = {}
        for field in self.reader.meta.fields:
            reader = self.reader.field(field.name)
            values = np.empty((stop - start, *reader.meta.shape), reader.dtype)
            reader.read_batches_into(start, values)
            found[field.name] = values.reshape(-1, *field.shape)
        return found


def _crc32(reader: BatchReader, number: int, chunk: TokenArray) -> int:
    """Return the crc32 of a chunk: of its tokens, without what fills up the last one of a stream."""
    return crc32_of(_tokens_of(reader, number, chunk))


def _tokens_of(reader: BatchReader, number: int, chunk: TokenArray) -> TokenArray:
    return chunk.reshape(-1)[: reader.token_count - number * reader.meta.batch_tokens]


def _examine(broken: BrokenFile) -> _Chunks:
    """Compare each chunk with its crc32; if the crc32 rows are damaged, the sha256 of the whole decides."""
    reader, stored, reason = broken
    found = _Chunks(reader, [], [], reason)
    whole, total = hashlib.sha256(), reader.num_batches
    bad_values = _bad_values(reader)
    for number, chunk in _chunks_or_none(reader):
        found.crc32.append(-1 if chunk is None else _crc32(reader, number, chunk))
        if chunk is not None:
            whole.update(_tokens_of(reader, number, chunk))
        if chunk is None or number in bad_values or (stored is not None and found.crc32[-1] != stored[number]):
            if not reader.complete:
                found.bad = list(range(number, total))
                found.reason += f"; {reader.name_of(number)} is bad, and {total - number:,} are lost with it"
                return found
            found.bad.append(number)
    bad = len(found.bad)
    same = reader.sha256 == whole.hexdigest()
    if bad and same and not bad_values:
        found.bad, found.reason = [], f"{bad:,} stored crc32 are bad, no token is"
    elif bad:
        unit = "chunk" if isinstance(reader, HDF5StreamReader) else "batch"
        found.reason = _joined(reason, f"the tokens of {counted(bad, unit)} are not those that were written")
    elif reader.sha256 is not None and not same:
        found.reason = _joined(reason, "its sha256 is not that of its tokens, though each crc32 is right")
    return found


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _bad_values(reader: BatchReader) -> set[int]:
    """Return the chunks in which the values of a field are not those that were written."""
    bad = set[int]()
    for field in reader.meta.fields:
        values = reader.field(field.name)
        stored = values.stored_crc32()
        for number, chunk in _chunks_or_none(values):
            if chunk is None or stored is None or _crc32(values, number, chunk) != stored[number]:
                bad.add(number)
    return bad


def _chunks_or_none(reader: BatchReader) -> Iterator[tuple[int, TokenArray | None]]:
    """Yield each chunk, or None for one that cannot be read; the array is reused."""
    chunk = np.empty(reader.meta.shape, reader.dtype)
    for number in range(reader.num_batches):
        try:
            reader.read_into(number, chunk)
        except (FormatError, ConvertError, ChecksumError):  # the last one: it does not unpack
            yield number, None
        except OSError as error:
            if error.errno != errno.EIO:  # that is a bad sector; any other says nothing of this chunk alone
                raise
            yield number, None
        else:
            yield number, chunk


class Salvage(ABC):
    """What can be saved of one file.

    Attributes
    ----------
    unit
        "batch" or "document": what is kept or dropped as a whole.
    kept, dropped
        How many are kept, and the numbers of those that are dropped.
    kept_tokens, dropped_tokens
        Tokens of both; those of a document that its writer had not finished are dropped.
    reason
        What is wrong; "" if nothing is.
    """

    unit: ClassVar[str]
    kept: int
    dropped: list[int]
    kept_tokens: int

    def __init__(self, chunks: _Chunks) -> None:
        self.reader, self.reason, self._chunks = chunks.reader, chunks.reason, chunks

    @property
    def dropped_tokens(self) -> int:
        return self.reader.token_count - self.kept_tokens

    def is_in(self, path: Path) -> bool:
        """Return whether a whole file has exactly the kept batches or documents."""
        try:
            with open_chunks(path) as other:
                if not (other.complete and self._has_units(other) and other.meta.fields == self.reader.meta.fields):
                    return False
                found = {field.name: other.field(field.name).token_sha256() for field in other.meta.fields}
                return found | {"": other.token_sha256()} == self._sha256()
        except (ZbError, OSError):
            return False

    def _sha256(self) -> dict[str, str]:
        """Return the digest of the kept values of each field, and under no name that of the kept tokens."""
        digests = {name: hashlib.sha256() for name in ("", *(field.name for field in self.reader.meta.fields))}
        for tokens, fields in self._parts():
            for name, values in {"": tokens, **fields}.items():
                digests[name].update(np.ascontiguousarray(values))
        return {name: digest.hexdigest() for name, digest in digests.items()}

    @abstractmethod
    def copy(self, path: Path, *, overwrite: bool) -> None:
        """Write the kept ones to a new file."""

    @abstractmethod
    def _has_units(self, other: BatchReader) -> bool:
        """Return whether another file, of the same tokens, has the kept batches or documents."""

    @abstractmethod
    def _parts(self) -> Iterator[tuple[TokenArray, dict[str, TokenArray]]]:
        """Yield the kept tokens and the values of their fields, in parts that fit into memory."""


class _Batches(Salvage):
    unit = "batch"

    def __init__(self, chunks: _Chunks) -> None:
        super().__init__(chunks)
        self.dropped = chunks.bad
        self.kept = self.reader.num_batches - len(chunks.bad)
        self.kept_tokens = self.kept * self.reader.meta.batch_tokens

    def copy(self, path: Path, *, overwrite: bool) -> None:
        row, meta = BACKENDS[backend_of_suffix(path)], self.reader.meta
        options = {"expected_batches": self.kept, "overwrite": overwrite, "origin": self.reader.origin}
        with row.begin(path, meta, **options) as writer:
            for batches, values in self._parts():
                fields = {f.name: values[f.name].reshape(*batches.shape, *f.shape) for f in meta.fields}
                writer.write(batches, fields)
            self._copy_documents(path, writer.sha256())

    def _copy_documents(self, path: Path, tokens_sha256: str) -> None:
        """Write the pieces of the kept batches, and the documents of a lone file, beside it."""
        reader, size = self.reader, self.reader.meta.batch_size
        table = documents_path(reader.path)
        write_joined([table] if table.exists() else [], path, DEFAULT_SPLIT, tokens_sha256)
        if not pieces_path(reader.path).exists():
            pieces_path(path).unlink(missing_ok=True)
            return
        stored, writer = PiecesFile(reader.path, None, reader.seq_len, verify="none"), PiecesWriter(path)
        try:
            stored.check()
            for start, stop in self._chunks.good_runs():
                writer.append(stored.read(np.arange(start * size, stop * size)))
            writer.publish(reader.seq_len, stored.split, tokens_sha256)
        except ZbError as error:
            error.add_note(f"Restore it, or remove it to repair {reader.path} without its pieces.")
            raise
        finally:
            stored.close()
            writer.close()

    def _has_units(self, other: BatchReader) -> bool:
        return other.meta.shape == self.reader.meta.shape

    def _parts(self) -> Iterator[tuple[TokenArray, dict[str, TokenArray]]]:
        step = max(1, GROUP_BYTES // self.reader.meta.batch_bytes)
        for start, stop in self._chunks.good_runs():
            for first in range(start, stop, step):
                part = first, min(first + step, stop)
                yield self._chunks.read(*part), self._chunks.read_fields(*part)


class _Documents(Salvage):
    unit = "document"

    def __init__(self, chunks: _Chunks, reader: HDF5StreamReader) -> None:
        super().__init__(chunks)
        self._offsets, trouble = _offsets_of(reader, chunks)
        self.reason = _joined(self.reason, trouble)
        starts, ends = self._offsets[:-1], self._offsets[1:]
        chunk_tokens, bad = reader.meta.chunk_tokens, np.array(chunks.bad, np.int64)
        first_bad = bad.searchsorted(starts // chunk_tokens)  # the bad chunks that a document touches
        whole = (first_bad == bad.searchsorted((ends - 1) // chunk_tokens, side="right")) | (starts == ends)
        if not reader.complete and chunks.bad:
            whole &= ends <= chunks.bad[0] * chunk_tokens
        self.dropped = np.flatnonzero(~whole).tolist()
        self.kept = int(whole.sum())
        self._lengths = (ends - starts)[whole]
        self.kept_tokens = int(self._lengths.sum())

    def copy(self, path: Path, *, overwrite: bool) -> None:
        writer_class = BACKENDS[backend_of_suffix(path)].stream_writer_class()
        if writer_class is None:
            raise ArgumentError(f"{path}: expected the name of a file that can hold a token stream: one in .h5")
        meta, done = self.reader.meta, 0
        place = documents_path(self.reader.path)
        table = DocumentFile(place) if place.exists() else None
        spans = {"spans_codec": table.spans_codec} if table else {}
        with closing(table) if table else nullcontext(), writer_class(
            path, dtype=meta.dtype.name, chunk_tokens=meta.chunk_tokens, boundary_token_id=meta.boundary_token_id,
            vocab_size=meta.vocab_size, tokenizer=meta.tokenizer, overwrite=overwrite, fields=meta.fields,
            codec=meta.codec, **spans,
        ) as writer:  # fmt: skip
            for (first, stop), (tokens, fields) in zip(self._groups(), self._parts(), strict=True):
                rows = None if table is None else table.rows(first, stop)
                writer.write_documents(tokens, self._lengths[done : done + stop - first], fields, documents=rows)
                done += stop - first

    def _has_units(self, other: BatchReader) -> bool:
        ends = np.cumsum(self._lengths)
        return isinstance(other, HDF5StreamReader) and np.array_equal(other.doc_offsets()[1:], ends)

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Yield (first, stop) of kept documents that follow each other: many small ones at once, or one large one."""
        edges = [-1, *self.dropped, len(self._offsets) - 1]
        for low, high in pairwise(edges):
            first = low + 1
            while first < high:
                limit = self._offsets[first] + GROUP_BYTES // self.reader.dtype.itemsize
                stop = int(self._offsets.searchsorted(limit, side="right")) - 1
                stop = min(max(stop, first + 1), high)
                yield first, stop
                first = stop

    def _parts(self) -> Iterator[tuple[TokenArray, dict[str, TokenArray]]]:
        for first, stop in self._groups():
            chunks, here = self._place(first, stop)
            fields = {name: values[here] for name, values in self._chunks.read_fields(*chunks).items()}
            yield self._chunks.read(*chunks).reshape(-1)[here], fields

    def _place(self, first: int, stop: int) -> tuple[tuple[int, int], slice]:
        """Return the chunks that documents lie in, and which of their tokens these are."""
        chunk_tokens = self.reader.meta.chunk_tokens
        start, end = self._offsets[[first, stop]].tolist()
        chunk = start // chunk_tokens
        behind = -(-end // chunk_tokens) if start < end else chunk
        return (chunk, behind), slice(start - chunk * chunk_tokens, end - chunk * chunk_tokens)


def _offsets_of(reader: HDF5StreamReader, chunks: _Chunks) -> tuple[npt.NDArray[np.int64], str]:
    """Return the places of the documents, and what was wrong with them.

    Damaged ones are found again by the boundary tokens, if their crc32 proves it: nothing is guessed.
    """
    try:
        return reader.doc_offsets().astype(np.int64), ""
    except (FormatError, ChecksumError) as error:
        boundary = reader.meta.boundary_token_id
        if reader.complete and not chunks.bad and boundary != NO_BOUNDARY:
            size, found = reader.meta.chunk_tokens, [np.empty(0, np.int64)]
            found += [number * size + np.flatnonzero(tokens == boundary) for number, tokens in reader.groups()]
            places = np.concatenate(found)
            for edges in (np.append(0, places + 1), np.append(places, reader.token_count)):  # it ends or begins one
                if reader.has_written(edges.astype("<u8")):
                    return edges, "the places of its documents are damaged: its boundary tokens gave them back"
        raise IncompleteError(
            f"{reader.path}: no document can be saved: the places of its documents are damaged; make it again"
        ) from error


def salvage(broken: BrokenFile) -> Salvage:
    """Find out what holds of a damaged or unfinished file.

    Raises
    ------
    IncompleteError
        If it is a stream whose documents cannot be told apart.
    """
    chunks = _examine(broken)
    return _Documents(chunks, broken.reader) if isinstance(broken.reader, HDF5StreamReader) else _Batches(chunks)
