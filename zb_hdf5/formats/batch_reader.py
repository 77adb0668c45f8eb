"""A reader: a sequence of equally shaped batches with O(1) random access. The base of every backend's reader."""

from __future__ import annotations

import hashlib
import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.record_documents import pieces_of_parts
from zb_hdf5.errors import (
    ArgumentError,
    BackendError,
    BatchIndexError,
    IncompleteError,
    UnverifiableError,
)
from zb_hdf5.files.checked import GROUP_BYTES, VERIFIED, Crc32Rows, checked
from zb_hdf5.files.codecs import CompressedTokens
from zb_hdf5.files.forks import OwnLock, kept_property
from zb_hdf5.files.ranges import Extents, Run
from zb_hdf5.files.threads import require_wanted
from zb_hdf5.files.tokens import ClosedTokens, Tokens
from zb_hdf5.formats.batch_digests import BatchDigests
from zb_hdf5.formats.row_documents import documents_field, pieces_of_rows
from zb_hdf5.formats.windows import Windows
from zb_hdf5.packages import from_numpy
from zb_hdf5.spec import STREAM_LAYOUT, StoreMeta, TokenArray, content_fingerprint, signed

if TYPE_CHECKING:
    import torch

    from zb_hdf5.documents.document_table import DocumentTable
    from zb_hdf5.documents.pieces import Pieces
    from zb_hdf5.documents.record_documents import RecordDocuments

FINGERPRINT_SAMPLES: Final = 16
_local = threading.local()


class BatchReader:
    """A sequence of `[batch_size, seq_len]` batches with O(1) random access.

    Thread-safe, `refresh` too; usable after fork; picklable (a copy reopens the file by its path). `close` must not
    race with reads. Record r holds the tokens from `r * windows.stride` on.

    Attributes
    ----------
    tokens
        The tokens by their positions.
    windows
        The cut of the tokens into records and batches.
    path
        The opened path.
    meta
        Shape, dtype and origin.
    layout
        How the tokens are stored: "batches", or "stream", whose batches are windows or chunks of it.
    num_batches
        Batches that are committed: of one file, this never becomes less.
    rest
        Records after the last whole batch, which do not fill another one: windows at the end of a stream. Else 0.
    complete
        False while a writer is still at work; then `refresh` may find more.
    sha256
        Digest of the token bytes, or None where none is stored.
    extents
        Extents of the batches in the one file, or None if they are in several or have no plain extents.
    columns
        Ranges of the chunks of each column in the one file, if a reader may look for them without HDF5.
    compressed
        The codec of the tokens of the one file, and the bytes that they take; None: they are not compressed.
    max_token
        The largest id, of a file or store that is complete and has it; None: not known.
    foreign_dataset
        Name of the dataset of another program that holds the tokens; None in files of ours.
    in_front
        Function that puts a cache in front of other readers of the same tokens and fields; None without a cache.
    """

    backend: str
    rest: int = 0
    compressed: CompressedTokens | None = None
    foreign_dataset: str | None = None
    #: The cure of damage that digests find, for its message.
    cure: ClassVar[str] = "restore it, repair it, or convert again"

    def __init__(self, path: Path, meta: StoreMeta, num_batches: int, tokens: Tokens) -> None:
        self.path = path
        self.meta = meta
        self.layout = meta.layout
        self.num_batches = num_batches
        self.tokens = tokens
        self.windows = Windows(meta.batch_size, meta.seq_len, meta.seq_len)
        self.complete = True
        self.sha256: str | None = None
        self.max_token: int | None = None
        self.verify = self._checks = "none"
        self.extents: Extents | None = None
        self.columns: dict[str, tuple[Run, ...]] = {}
        self._fingerprint: str | None = None
        self.record_documents: RecordDocuments | None = None
        self._is_int32 = meta.dtype == np.uint32
        self.origin: dict[str, Any] = {}  # "source", "shuffle" and "split" of the tokens, where a file has them
        self._fields: dict[str, BatchReader] = {}
        self._changing = OwnLock()  # by a refresh, or a field that is opened
        self.in_front: Callable[[BatchReader], None] | None = None

    @property
    def token_count(self) -> int:
        """Tokens in all batches: the last chunk of a stream may hold fewer than the others."""
        whole = self.num_batches * self.meta.batch_tokens
        return whole if self.windows.overlap else min(whole, self.tokens.num_tokens)

    @property
    def stride(self) -> int:
        """Tokens from one record to the next."""
        return self.windows.stride

    @property
    def batch_size(self) -> int:
        return self.meta.batch_size

    @property
    def seq_len(self) -> int:
        return self.meta.seq_len

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.meta.dtype

    @property
    def verified(self) -> str:
        """The reads that are compared with their crc32.

        "whole reads": batches that are read into a buffer, but no views of a mapping, and no records. "all reads".
        "none", also where no crc32 is stored. "store": all digests were compared once, when it was opened.
        """
        return VERIFIED[self._checks]

    @property
    def access(self) -> str:
        """The I/O path as asked for: "auto", "mmap", "pread", "h5py"; "h5py" too where only HDF5 can read it.

        "remote": of objects, by ranges.
        """
        return self.tokens.access

    @property
    def fingerprint(self) -> str:
        """Identity of the content, the same in every backend for the same tokens, shape and shards.

        Without a stored digest (a lone `.batch`, a foreign HDF5 file) it covers the shape and a fixed sample of the
        batches, and begins with "sampled:".
        """
        known = self._fingerprint
        is_final = self.complete
        if known is None or not is_final:
            known = self._compute_fingerprint()
            self._fingerprint = known if is_final else None
        return known

    def _compute_fingerprint(self) -> str:
        return self._sampled_fingerprint() if self.sha256 is None else content_fingerprint([self.sha256], self.meta)

    def _sampled_fingerprint(self) -> str:
        n = self.num_batches
        sample = {i * (n - 1) // (FINGERPRINT_SAMPLES - 1) for i in range(FINGERPRINT_SAMPLES)} if n else set()
        meta = self.meta  # spelled out: this hash is part of every checkpoint
        text = f"{n}:{meta.batch_size}:{meta.seq_len}:{meta.dtype.name}:{meta.seed}:{meta.total_records}"
        digest = hashlib.sha256(text.encode())
        for index in sorted(sample):
            digest.update(self._borrow(index))
        return f"sampled:{digest.hexdigest()}"

    def field(self, name: str) -> BatchReader:
        """Return a reader of the values of a field, whose batches and records are aligned with those of the tokens.

        Its `meta.field` has their dtype and shape: a record has `seq_len * field.size` values. It is opened once, and
        closed with this reader.

        Raises
        ------
        ArgumentError
            If no such field is stored.
        """
        found = self._fields.get(name)
        if found is None:
            with self._changing:
                found = self._fields.get(name) or self._open_field(name)
        return found

    def _open_field(self, name: str) -> BatchReader:
        if self._tokens_only:
            raise ArgumentError(f"{self.path}: expected a field, found {name!r}: {self._tokens_only}")
        try:
            self.meta.of_field(name)  # its error names the fields that are stored
        except ArgumentError as error:
            raise ArgumentError(f"{self.path}: {error}") from None
        found = self._field_reader(name)
        if self.in_front is not None:
            self.in_front(found)
        self._fields[name] = found
        return found

    @property
    def _tokens_only(self) -> str:
        """The reason why no fields and documents are there; "" in formats that hold them."""
        text = "backend 'batch' holds tokens and nothing else: open the HDF5 store of the same tokens, backend='hdf5'"
        return text if self.backend == "batch" else ""

    def _field_reader(self, name: str) -> BatchReader:
        raise ArgumentError(f"{self.path}: cannot be read with its fields")

    @property
    def token_fingerprint(self) -> str:
        """Identity of the tokens, whatever the shape of their batches."""
        return self.fingerprint

    def join_records(self, batch_size: int) -> None:
        """Have each batch hold so many records, where each holds one as it is stored."""
        self.meta = replace(self.meta, batch_size=batch_size)
        self.windows = self.windows.resized(batch_size)
        self.num_batches, self.rest = divmod(self.num_batches, batch_size)

    def compared_tokens(self) -> Tokens | None:
        """Return tokens that compare each unit that is read whole with its crc32; None where none are compared."""
        return self.tokens if self.verified in ("whole reads", "all reads") else None

    def serving(self, fingerprint: object) -> BatchReader:
        """Return the reader of the same content that has this fingerprint, if it can be had; else this one."""
        return self

    def read_batch(self, index: SupportsIndex) -> TokenArray:
        """Return one batch as stored.

        Returns
        -------
        (B, S) array of the stored dtype, read-only. If the file may be mapped ("mmap", or "auto" on a local disk) a
        view without a copy, valid for as long as it is referenced, also after `close`.

        Raises
        ------
        BatchIndexError
            Unless `0 <= index < num_batches`.
        ClosedError
            After `close`.
        IncompleteError
            If the file was cut short since it was opened.
        """
        number = self._check(index)
        batch = self._view(number)
        if batch is None:
            batch = self._filled(number)
            batch.flags.writeable = False
        return batch

    @property
    def num_records(self) -> int:
        """Records in all batches, and after the last one."""
        return self.num_batches * self.meta.batch_size + self.rest

    def read_record(self, index: SupportsIndex) -> TokenArray:
        """Return one record, shape (S,), read-only; record r is row `r % B` of batch `r // B`."""
        number = operator.index(index)
        if not 0 <= number < self.num_records:
            raise BatchIndexError(f"{self.path}: no record {number:,}: expected 0..{self.num_records - 1:,}")
        out = np.empty((1, self.seq_len), self.dtype)
        self.tokens.gather(np.array([number * self.windows.stride]), out)
        out.flags.writeable = False
        return out[0]  # type: ignore[no-any-return]

    def read_records_into(self, records: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(count, L)` of the stored dtype, with any records.

        Parameters
        ----------
        records
            Numbers of records of L tokens, in batch order. L is `out.shape[1]`, a divisor of `seq_len`: each stored
            record then counts as `seq_len / L` records.
        """
        length = out.shape[1] if out.ndim == 2 else 0
        records = np.asarray(records, np.int64)
        fits = length > 0 and self.seq_len % length == 0 and len(out) == len(records)
        if not fits or out.dtype != self.dtype or not _is_fillable(out):
            raise ArgumentError(
                f"read_records_into needs {len(records)} writable rows of {self.dtype}, as long as a divisor of "
                f"{self.seq_len}, found {out.shape} {out.dtype}"
            )
        total = self.num_records * (self.seq_len // length)
        if len(records) and int(records.view(np.uint64).max()) >= total:  # a negative number is a large one
            raise BatchIndexError(f"{self.path}: expected records in 0..{total - 1:,}, found {records}")
        if len(records):
            self.tokens.gather(self.windows.starts(records, length), out)

    def get_slice(self, start: int, stop: int) -> TokenArray:
        """Return tokens `start` to `stop`, counted over all batches: 1-D, read-only where it is a view of a mapping.

        Raises
        ------
        BatchIndexError
            Unless `0 <= start <= stop <= tokens.num_tokens`.
        """
        if not 0 <= start <= stop <= self.tokens.num_tokens:
            raise BatchIndexError(f"{self.path}: no tokens {start:,} to {stop:,}: it has {self.tokens.num_tokens:,}")
        out = self.tokens.view(start, stop - start) if start < stop else None
        if out is None:
            out = np.empty(stop - start, self.dtype)
            self.tokens.read([(start, out)])
        return out

    def read_batch_int32(self, index: SupportsIndex) -> torch.Tensor:
        """Return one batch as a `torch.int32` tensor, without a copy where uint32 tokens are mapped.

        Clone it before you write into it: a mapped batch keeps your changes for as long as the reader is open (the file
        itself never changes). Ids above 2**31 - 1, which no tokenizer has, would come out negative.
        """
        number = self._check(index)
        if self._is_int32:
            narrow = self._view(number, private=True)
            narrow = self._filled(number).view(np.int32) if narrow is None else narrow
        else:
            narrow = self._borrow(number).astype(np.int32)
        return from_numpy()(narrow)

    def read_batch_torch(self, index: SupportsIndex) -> torch.Tensor:
        """Return one batch as a new `torch.int64` tensor, shape (B, S). Raises as `read_batch` does."""
        return from_numpy()(self._borrow(self._check(index)).astype(np.int64))

    def read_records_torch(self, records: npt.NDArray[np.int64], seq_len: int, dtype: npt.DTypeLike) -> torch.Tensor:
        """Return any records as a new tensor, shape (count, seq_len). For orders over this reader: no check."""
        flat = None if self.windows.overlap else self.tokens.flat()
        if flat is None or len(flat) % seq_len:
            rows = np.empty((len(records), seq_len), self.dtype)
            if len(records):
                self.tokens.gather(self.windows.starts(records, seq_len), rows)
        else:
            all_rows = flat.reshape(-1, seq_len)
            rows = self.tokens.residency.watch_some(all_rows.take, records, 0, None, "clip")
        return from_numpy()(rows.astype(dtype))

    def read_into(self, index: SupportsIndex, out: TokenArray) -> None:
        """Fill the caller's buffer with one batch, without an intermediate array where the dtype is the stored one.

        Parameters
        ----------
        out
            C-contiguous, writable, shape (B, S); the stored dtype, the signed dtype of the same size, or int64.

        Raises
        ------
        ArgumentError
            If `out` has another shape, dtype or layout.
        """
        number = self._check(index)
        if out.shape != self.meta.shape or not _is_fillable(out):
            raise ArgumentError(
                f"read_into needs a writable C-contiguous array of shape {self.meta.shape}, found {out.shape}"
            )
        if out.dtype == self.dtype or (self.dtype.kind == "u" and out.dtype == signed(self.dtype)):
            self._fill(number, out.view(self.dtype))
        elif out.dtype == np.int64:
            np.copyto(out, self._borrow(number))
        else:
            raise ArgumentError(f"read_into needs {self.dtype}, its signed twin or int64, found {out.dtype}")

    def read_batches_into(self, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, B, S)` of the stored dtype, with `count` consecutive batches.

        The fewest and largest reads the file allows: made for copying and verifying.
        """
        if len(out) == 0:
            return
        self._check(start)
        self._check(start + len(out) - 1)
        if out.shape[1:] != self.meta.shape or out.dtype != self.dtype or not _is_fillable(out):
            raise ArgumentError(f"read_batches_into needs writable batches of {self.meta.shape} {self.dtype}")
        self._fill(start, out)

    def groups(self) -> Iterator[tuple[int, TokenArray]]:
        """Yield all batches as digests cover them, many at a time, with the number of the first.

        Shape `(count, B, S)`; of a last chunk that holds fewer tokens `(1, 1, tokens)`. The array is used again for the
        next group. In a thread of `Readers` it ends by `Left` between two groups, when nobody wants the result.
        """
        group = np.empty((max(1, GROUP_BYTES // self.meta.batch_bytes), *self.meta.shape), self.tokens.dtype)
        whole, rest = divmod(self.token_count, self.meta.batch_tokens)
        for start in range(0, whole, len(group)):
            require_wanted()
            batches = group[: min(len(group), whole - start)]
            self._fill(start, batches)
            yield start, batches
        if rest:
            self._fill(whole, group[:1])
            yield whole, group[:1, :, :rest]

    @property
    def digests(self) -> BatchDigests:
        """The digests that are stored with this file, and their comparison with its batches."""
        return BatchDigests(self)

    def missing_digests(self) -> str:
        """Return the reason why this file cannot be verified, if it has no digest; else an empty text."""
        return "no digest is stored with it; convert it to a store, which keeps digests from then on"

    def crc32_rows(self) -> Crc32Rows | None:
        """Return the crc32 of each batch as stored with this file, read when they are needed; None where none are."""
        return None

    def other_checks(self) -> list[str]:
        """Check the parts of the file beside its batches and their digests; return the names of the checks."""
        return []

    def check_reads(self, verify: str) -> None:
        """Compare batches with their digests, as `verify` of `open_reader` asks. A reader of a file ends with this.

        Raises
        ------
        ChecksumError
            If `verify="store"` finds other bytes.
        UnverifiableError
            If "batch" or "store" has nothing to compare with.
        """
        self.verify = verify
        if verify == "store":
            self.sha256 = self.digests.require()
            self._fingerprint = None
        elif verify != "none":
            rows = self.crc32_rows()
            if rows is None and verify == "batch":
                raise UnverifiableError(f"{self.path}: cannot be verified: {self.missing_digests()}")
            if rows is not None and verify == "batch" and self.num_batches:
                rows.all()  # damaged ones are an error now
            self.tokens = checked(self.tokens, rows, self.path, self.meta.noun, verify, self.meta.batch_tokens)
            verify = verify if rows is not None else "none"
        self._checks = verify

    @property
    def documents(self) -> DocumentTable | None:
        """The documents of the records, by the offsets of tokens; None where none are stored."""
        return None if self.record_documents is None else self.record_documents.documents()

    @property
    def overlap(self) -> int:
        """Tokens at the end of each record that begin the next one: of windows that were asked for with targets."""
        return self.windows.overlap

    @property
    def has_pieces(self) -> bool:
        """Whether the pieces of documents in the records are stored."""
        return self.record_documents is not None and self.record_documents.has_pieces

    @kept_property
    def documents_field(self) -> str:
        """The field that tells the documents of packed records apart, where no pieces are stored; "": none does."""
        if self.has_pieces or self._tokens_only or self.layout == STREAM_LAYOUT or self.meta.field is not None:
            return ""
        return documents_field(self.meta.fields, self.num_batches, lambda name, number: self.field(name)[number])

    @property
    def tells_documents(self) -> bool:
        """Whether `read_pieces` has the documents of the records: from stored pieces, or from a field."""
        return self.has_pieces or bool(self.documents_field)

    def _told_pieces(self, records: npt.NDArray[np.int64]) -> Pieces:
        """Return the pieces of records as a field tells them."""
        column = self.field(self.documents_field)
        values = np.empty((len(records), self.seq_len), column.dtype)
        column.read_records_into(records, values)
        return pieces_of_rows(self.documents_field, values, records)

    @property
    def has_padding(self) -> bool:
        """Whether the records may have padding, whose place is stored."""
        return self.has_pieces and self.layout != STREAM_LAYOUT

    def read_pieces(self, records: npt.NDArray[np.int64], seq_len: int | None = None) -> Pieces:
        """Return the pieces of documents that are in the given records, as they are stored, or as a field tells them.

        `position_ids` that begin again, or an `attention_mask` of 1, 2, 3, tell the documents of packed records apart.

        Parameters
        ----------
        records
            Numbers of records of `seq_len` tokens, in batch order.
        seq_len
            A divisor of the stored `seq_len`: each stored record then counts as several, and pieces are cut at their
            ends. None: as stored.

        Raises
        ------
        BackendError
            If no documents are stored.
        FormatError
            If the stored pieces are damaged, or belong to other batches.
        """
        length = seq_len or self.seq_len
        if length < 1 or self.seq_len % length:
            raise ArgumentError(f"seq_len must divide the stored {self.seq_len:,}, found {length:,}")
        parts = self.seq_len // length
        numbers = np.asarray(records, np.int64)
        # a negative number is a large one
        if len(numbers) and int(numbers.view(np.uint64).max()) >= self.num_records * parts:
            raise BatchIndexError(
                f"{self.path}: expected records in 0..{self.num_records * parts - 1:,}, found {records}"
            )
        if self.documents_field:
            return pieces_of_parts(self._told_pieces, numbers, parts, length)
        if self.record_documents is None or not self.has_pieces:
            if self._tokens_only:
                raise BackendError(f"{self.path}: no documents: {self._tokens_only}")
            raise BackendError(
                f"{self.path}: holds no documents (a store that is written live never has them); convert again from "
                "text, or from a store that has them"
            )
        if parts == 1:
            return self.record_documents.read_pieces(numbers)
        return self.record_documents.read_parts(numbers, parts, length)

    def read_batch_pieces(self, index: SupportsIndex) -> Pieces:
        """Return the pieces of documents that are in the records of one batch. Raises as `read_pieces` does."""
        number = self._check(index)
        size = self.meta.batch_size
        return self.read_pieces(np.arange(number * size, (number + 1) * size))

    def will_need(self, index: SupportsIndex, count: int = 1) -> None:
        """Announce that `count` batches from `index` on will be read soon; the kernel may begin to fetch them.

        The last one may be the rest after the last whole batch.
        """
        first = self._check_begun(index)
        self._check_begun(first + count - 1)
        windows = self.windows
        stop = (first + count) * windows.batch_stride + windows.overlap
        self.tokens.will_need(first * windows.batch_stride, min(stop, self.tokens.num_tokens))

    def announce_records(self, records: npt.NDArray[np.int64], length: int) -> None:
        """Announce records of some length that will be read some steps later, in any order: see `read_records_into`."""
        starts = self.windows.starts(records, length).tolist()
        self.tokens.announce(starts, [length] * len(starts))

    def are_cached(self, records: npt.NDArray[np.int64], seq_len: int) -> bool:
        """Return whether some records are in memory, as far as the system reports it: later reads go by that."""
        return self.tokens.look(self.windows.starts(records, seq_len).tolist())

    def is_cached(self, index: SupportsIndex) -> bool:
        """Return whether a batch can be read without waiting for a disk, as far as the system reports it.

        The rest after the last whole batch counts as one.
        """
        return self.tokens.ready(self._check_begun(index) * self.windows.batch_stride)

    def refresh(self) -> int:
        """Show the batches that a writer has committed since; return `num_batches`. A published file has none."""
        return self.num_batches

    def close(self) -> None:
        """Release the file, and the files of its fields. Views that were returned stay valid."""
        for reader in self._fields.values():
            reader.close()
        self._fields = {}
        self.tokens.close()
        if self.record_documents is not None:
            self.record_documents.close()
        self.tokens = ClosedTokens(self.tokens)

    def _check(self, index: SupportsIndex) -> int:
        number = operator.index(index)
        if not 0 <= number < self.num_batches:
            raise BatchIndexError(f"{self.path}: no batch {number:,}: expected an index in 0..{self.num_batches - 1:,}")
        return number

    def _check_begun(self, index: SupportsIndex) -> int:
        """Return the number of a batch, or of the rest after the last whole one."""
        number = operator.index(index)
        return number if self.rest and number == self.num_batches else self._check(number)

    def _view(self, number: int, private: bool = False) -> TokenArray | None:
        """Return a batch as a view of a mapping, or None."""
        if self.windows.overlap:
            return None
        size = self.meta.batch_tokens
        tokens = self.tokens.view(number * size, size, private)
        return None if tokens is None else tokens.reshape(self.meta.shape)

    def _fill(self, start: int, out: TokenArray) -> None:
        """Fill `out` with consecutive batches, and with zeros after the last token of a stream."""
        if not self.windows.overlap:
            flat = out.reshape(-1)
            position = start * self.meta.batch_tokens
            left = self.tokens.num_tokens - position
            if left < len(flat):
                flat = self._padded(flat, left, start)
            self.tokens.read([(position, flat)])
        else:
            rows = out.reshape(-1, self.seq_len)
            records = np.arange(start * self.batch_size, start * self.batch_size + len(rows))
            self.tokens.gather(records * self.windows.stride, rows)

    def _padded(self, flat: TokenArray, left: int, start: int) -> TokenArray:
        """Return the first `left` tokens of a run, where a stream ends; fill the others with zeros."""
        if self.meta.layout != STREAM_LAYOUT or left <= len(flat) - self.meta.batch_tokens:
            raise IncompleteError(
                f"{self.path}: expected {len(flat):,} tokens from {self.meta.noun} {start:,} on, found {max(0, left):,}"
            )
        flat[left:] = 0
        return flat[:left]

    def _filled(self, number: int) -> TokenArray:
        """Return a batch in a new array."""
        batch = np.empty(self.meta.shape, self.meta.dtype)
        self._fill(number, batch)
        return batch

    def _borrow(self, number: int) -> TokenArray:
        """Return a batch in a buffer of this thread, which its next call fills again.

        A new array for each costs 24 page faults for 64 KiB: the C library gives its memory back in between.
        """
        shape = self.meta.shape
        dtype = self.meta.dtype
        scratch: TokenArray | None = getattr(_local, "scratch", None)
        if scratch is None or scratch.shape != shape or scratch.dtype != dtype:
            scratch = _local.scratch = np.empty(shape, dtype)
        self._fill(number, scratch)
        return scratch

    def __getstate__(self) -> dict[str, Any]:
        # at one moment: counts of a copy are never ahead of its tokens, which are pickled later
        with self._changing:
            return {**self.__dict__, "_fields": dict(self._fields)}

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: SupportsIndex) -> TokenArray:
        """Return a batch; negative indices count from the end, as in a list."""
        number = operator.index(index)
        return self.read_batch(number + self.num_batches if number < 0 else number)

    def __iter__(self) -> Iterator[TokenArray]:
        return map(self.read_batch, range(self.num_batches))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self.path)!r}, num_batches={self.num_batches}, batch_size={self.batch_size}, "
            f"seq_len={self.seq_len}, dtype={self.dtype.name}, access={self.access!r})"
        )


def _is_fillable(out: TokenArray) -> bool:
    return out.flags.c_contiguous and out.flags.writeable
