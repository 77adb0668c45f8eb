"""The good part of a damaged or unfinished file: the batches or documents that hold, and their copy to a new file.

A complete file keeps every batch whose crc32 is right; a stream every document that touches no bad chunk. A file whose
writer was killed keeps what was committed up to the first bad batch. The rest is dropped: nothing proves that it
was written.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.document_table import DocumentFile, documents_path
from zb_hdf5.documents.document_writer import write_joined
from zb_hdf5.documents.pieces import pieces_path
from zb_hdf5.documents.pieces_file import PiecesFile, PiecesWriter
from zb_hdf5.errors import ArgumentError, ChecksumError, ConvertError, FormatError, IncompleteError, ZbError, counted
from zb_hdf5.files.checked import crc32_of
from zb_hdf5.formats.batch_reader import GROUP_BYTES, BatchReader, BrokenFile
from zb_hdf5.formats.hdf5.h5_reader import HDF5StreamReader
from zb_hdf5.formats.registry import FORMATS, backend_of_suffix, open_chunks
from zb_hdf5.spec import DEFAULT_SPLIT, NO_BOUNDARY, TokenArray


class Salvage:
    """The good part of one file, by the attributes of `RepairReport`; `IncompleteError` if its documents are lost."""

    def __init__(self, broken: BrokenFile) -> None:
        self.reader, stored, self.reason = broken
        self._stream = self.reader if isinstance(self.reader, HDF5StreamReader) else None
        self.unit = "batch" if self._stream is None else "document"
        self._crc32: list[int] = []  # of each chunk as it was found
        self._chunk_tokens = self.reader.meta.batch_tokens
        bad = np.array(self._examine(stored), np.int64)
        if self._stream is None:
            self._offsets = np.arange(self.reader.num_batches + 1) * self._chunk_tokens
        else:
            self._offsets, trouble = _offsets_of(self._stream, bool(len(bad)))
            self.reason = _joined(self.reason, trouble)
        starts, ends = self._offsets[:-1], self._offsets[1:]
        first_bad = bad.searchsorted(starts // self._chunk_tokens)  # of the bad chunks that a unit touches
        whole = (first_bad == bad.searchsorted((ends - 1) // self._chunk_tokens, side="right")) | (starts == ends)
        if not self.reader.complete and len(bad):
            whole &= ends <= bad[0] * self._chunk_tokens
        self.dropped: list[int] = np.flatnonzero(~whole).tolist()
        self.kept = int(whole.sum())
        self._lengths = (ends - starts)[whole]
        self.kept_tokens = int(self._lengths.sum())
        self.dropped_tokens = self.reader.token_count - self.kept_tokens

    def _examine(self, stored: npt.NDArray[np.uint32] | None) -> list[int]:
        """Return the chunks that differ from their crc32; if the crc32 rows are damaged, the sha256 of all decides."""
        reader, bad, total = self.reader, list[int](), self.reader.num_batches
        whole, bad_values = hashlib.sha256(), _bad_values(reader)
        for number, chunk in _chunks_or_none(reader):
            self._crc32.append(-1 if chunk is None else crc32_of(_tokens_of(reader, number, chunk)))
            if chunk is not None:
                whole.update(_tokens_of(reader, number, chunk))
            if chunk is None or number in bad_values or (stored is not None and self._crc32[-1] != stored[number]):
                if not reader.complete:
                    self.reason += f"; {reader.name_of(number)} is bad, and {total - number:,} are lost with it"
                    return list(range(number, total))
                bad.append(number)
        same = reader.sha256 == whole.hexdigest()
        if bad and same and not bad_values:
            self.reason = f"{len(bad):,} stored crc32 are bad, no token is"
            return []
        if bad:
            found = counted(len(bad), "batch" if self._stream is None else "chunk")
            self.reason = _joined(self.reason, f"the tokens of {found} are not those that were written")
        elif reader.sha256 is not None and not same:
            self.reason = _joined(self.reason, "its sha256 is not that of its tokens, though each crc32 is right")
        return bad

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

    def _has_units(self, other: BatchReader) -> bool:
        """Return whether another file, of the same tokens, has batches of this shape, or the kept documents."""
        if self._stream is None:
            return other.meta.shape == self.reader.meta.shape
        return isinstance(other, HDF5StreamReader) and np.array_equal(other.doc_offsets()[1:], self._lengths.cumsum())

    def _sha256(self) -> dict[str, str]:
        """Return the digest of the kept values of each field, and under no name that of the kept tokens."""
        digests = {name: hashlib.sha256() for name in ("", *(field.name for field in self.reader.meta.fields))}
        for _, tokens, fields in self._parts():
            for name, values in {"": tokens, **fields}.items():
                digests[name].update(np.ascontiguousarray(values))
        return {name: digest.hexdigest() for name, digest in digests.items()}

    def copy(self, path: Path, *, overwrite: bool) -> None:
        """Write the kept batches or documents to a new file."""
        if self._stream is None:
            self._copy_batches(path, overwrite)
        else:
            self._copy_documents(path, overwrite)

    def _copy_batches(self, path: Path, overwrite: bool) -> None:
        row, meta = FORMATS[backend_of_suffix(path)], self.reader.meta
        options = {"expected_batches": self.kept, "overwrite": overwrite, "origin": self.reader.origin}
        with row.begin(path, meta, **options) as writer:
            for _, tokens, values in self._parts():
                batches = tokens.reshape(-1, *meta.shape)
                fields = {f.name: values[f.name].reshape(*batches.shape, *f.shape) for f in meta.fields}
                writer.write(batches, fields)
            self._copy_pieces(path, writer.sha256())

    def _copy_pieces(self, path: Path, tokens_sha256: str) -> None:
        """Write the sidecars of the new file: the pieces of the kept batches, and the documents of a lone file."""
        reader, size = self.reader, self.reader.meta.batch_size
        table = documents_path(reader.path)
        write_joined([table] if table.exists() else [], path, DEFAULT_SPLIT, tokens_sha256)
        if not pieces_path(reader.path).exists():
            pieces_path(path).unlink(missing_ok=True)
            return
        stored, writer = PiecesFile(reader.path, None, reader.seq_len, verify="none"), PiecesWriter(path)
        try:
            stored.check()
            for first, stop in self._groups():
                writer.append_pieces(stored.read_run(first * size, stop * size))
            writer.publish(seq_len=reader.seq_len, split=stored.split, tokens_sha256=tokens_sha256)
        except ZbError as error:
            error.add_note(f"Restore it, or remove it to repair {reader.path} without its pieces.")
            raise
        finally:
            stored.close()
            writer.close()

    def _copy_documents(self, path: Path, overwrite: bool) -> None:
        writer_class = FORMATS[backend_of_suffix(path)].stream_writer_class()
        if writer_class is None:
            raise ArgumentError(f"{path}: expected the name of a file that can hold a token stream: one in .h5")
        meta, documents = self.reader.meta, documents_path(self.reader.path)
        table = DocumentFile(documents) if documents.exists() else None
        spans = {"spans_codec": table.spans_codec} if table else {}
        with closing(table) if table else nullcontext(), writer_class(
            path, dtype=meta.dtype.name, chunk_tokens=meta.chunk_tokens, boundary_token_id=meta.boundary_token_id,
            vocab_size=meta.vocab_size, tokenizer=meta.tokenizer, overwrite=overwrite, fields=meta.fields,
            codec=meta.codec, origin=self.reader.origin, **spans,
        ) as writer:  # fmt: skip
            for (first, stop), tokens, fields in self._parts():
                rows = None if table is None else table.rows(first, stop)
                writer.write_documents(tokens, np.diff(self._offsets[first : stop + 1]), fields, documents=rows)

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Yield (first, stop) of kept units that follow each other: many small ones at once, or one large one."""
        first, size = 0, GROUP_BYTES // self.reader.dtype.itemsize
        for end in [*self.dropped, len(self._offsets) - 1]:
            while first < end:
                stop = int(self._offsets.searchsorted(self._offsets[first] + size, side="right")) - 1
                stop = min(max(stop, first + 1), end)
                yield first, stop
                first = stop
            first = end + 1

    def _parts(self) -> Iterator[tuple[tuple[int, int], TokenArray, dict[str, TokenArray]]]:
        """Yield (first, stop) of kept units, their tokens, and the values of their fields."""
        for first, stop in self._groups():
            start, end = self._offsets[[first, stop]].tolist()
            chunk = start // self._chunk_tokens
            behind = -(-end // self._chunk_tokens) if start < end else chunk
            here = slice(start - chunk * self._chunk_tokens, end - chunk * self._chunk_tokens)
            fields = {f.name: self._read_field(f.name, chunk, behind)[here] for f in self.reader.meta.fields}
            yield (first, stop), self._read(chunk, behind).reshape(-1)[here], fields

    def _read(self, start: int, stop: int) -> TokenArray:
        """Return good chunks; `FormatError` if one is not as it was found at first."""
        chunks = _chunks(self.reader, start, stop)
        found = [crc32_of(_tokens_of(self.reader, number, chunk)) for number, chunk in enumerate(chunks, start)]
        if found != self._crc32[start:stop]:
            raise FormatError(f"{self.reader.path}: changed while it was read; run it again")
        return chunks

    def _read_field(self, name: str, start: int, stop: int) -> TokenArray:
        """Return the values of good chunks, one row for each token."""
        reader = self.reader.field(name)
        return _chunks(reader, start, stop).reshape(-1, *(reader.meta.field.shape if reader.meta.field else ()))


def _chunks(reader: BatchReader, start: int, stop: int) -> TokenArray:
    chunks = np.empty((stop - start, *reader.meta.shape), reader.dtype)
    reader.read_batches_into(start, chunks)
    return chunks


def _tokens_of(reader: BatchReader, number: int, chunk: TokenArray) -> TokenArray:
    """Return the tokens of a chunk, without the zeros at the end of the last one of a stream."""
    return chunk.reshape(-1)[: reader.token_count - number * reader.meta.batch_tokens]


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _bad_values(reader: BatchReader) -> set[int]:
    """Return the chunks in which the values of a field are not those that were written."""
    bad = set[int]()
    for field in reader.meta.fields:
        values = reader.field(field.name)
        stored = values.stored_crc32()
        for number, chunk in _chunks_or_none(values):
            if chunk is None or stored is None or crc32_of(_tokens_of(values, number, chunk)) != stored[number]:
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
            if error.errno != errno.EIO:  # that is a bad sector; any other is not of this chunk alone
                raise
            yield number, None
        else:
            yield number, chunk


def _offsets_of(reader: HDF5StreamReader, is_bad: bool) -> tuple[npt.NDArray[np.int64], str]:
    """Return the offsets of the documents, and the trouble with them.

    Damaged ones are found again by the boundary tokens, if their crc32 proves it: nothing is guessed.
    """
    try:
        return reader.doc_offsets().astype(np.int64), ""
    except (FormatError, ChecksumError) as error:
        boundary = reader.meta.boundary_token_id
        if reader.complete and not is_bad and boundary != NO_BOUNDARY:
            size, found = reader.meta.chunk_tokens, [np.empty(0, np.int64)]
            found += [number * size + np.flatnonzero(tokens == boundary) for number, tokens in reader.groups()]
            edges = np.concatenate(found)
            for rows in (np.append(0, edges + 1), np.append(edges, reader.token_count)):  # it ends or begins one
                if reader.has_written(rows.astype("<u8")):
                    return rows, "the offsets of its documents are damaged: its boundary tokens gave them back"
        raise IncompleteError(
            f"{reader.path}: no document can be saved: the offsets of its documents are damaged; make it again"
        ) from error
