"""Batches: the tokens of a corpus, read by batches, records and windows."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.documents.record_documents import pieces_of_parts
from zb_hdf5.errors import ArgumentError, BackendError, BatchIndexError, IncompleteError
from zb_hdf5.files.forks import cached_per_process
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.row_documents import documents_field, pieces_of_rows
from zb_hdf5.formats.windows import Windows
from zb_hdf5.packages import LaterModule, from_numpy
from zb_hdf5.spec import StoreMeta, TokenArray, signed

if TYPE_CHECKING:
    import torch

    from zb_hdf5.formats.corpus import Corpus
else:
    torch = LaterModule("torch", "torch")

_local = threading.local()


class Batches:
    """The tokens of a corpus, or the values of a field, as `[batch_size, seq_len]` batches.

    Thread-safe, `refresh` too; usable after fork; picklable (a copy reopens the files by their paths). `close` must not
    race with reads. Record r holds the tokens from `r * windows.stride` on. `corpus.batches` makes it.

    Parameters
    ----------
    corpus
        The tokens. `close` closes them.
    windows
        The cut of the tokens into records and batches.
    reads_targets
        Whether a loader with targets reads a token more after each record; else the last token of a record is a target.
    num_context
        Tokens at the beginning of each record but the first one that are context only: their targets are -100.

    Attributes
    ----------
    corpus, windows, reads_targets, num_context
        As they were given.
    """

    def __init__(self, corpus: Corpus, windows: Windows, *, reads_targets: bool = False, num_context: int = 0) -> None:
        self.corpus = corpus
        self.windows = windows
        self.reads_targets = reads_targets
        self.num_context = num_context
        self._counts = (corpus.num_tokens, *windows.cut(corpus.num_tokens))
        #: The shape, dtype and origin of the batches.
        self.meta: StoreMeta = corpus.meta_of(windows, self._counts[1])
        self._fingerprinted: tuple[int, str | None] = (-1, None)  # of so many tokens
        self._is_int32 = self.meta.dtype == np.uint32
        self._fields: dict[str, Batches] = {}

    # --- facts ---------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> Tokens:
        """The tokens by their positions."""
        return self.corpus.tokens

    @property
    def path(self) -> Path:
        """The opened path."""
        return self.corpus.path

    def _counted(self) -> tuple[int, int, int]:
        """Return the tokens that are committed, the whole batches, and the records after them."""
        counts = self._counts
        num_tokens = self.corpus.num_tokens
        if counts[0] != num_tokens:
            counts = (num_tokens, *self.windows.cut(num_tokens))
            self.meta = self.corpus.meta_of(self.windows, counts[1])
            self._counts = counts  # at last: whoever sees them sees the facts of as many batches
        return counts

    @property
    def num_batches(self) -> int:
        """Whole batches that are committed. They never become fewer."""
        return self._counted()[1]

    @property
    def rest(self) -> int:
        """Records after the last whole batch, which do not fill another one."""
        return self._counted()[2]

    @property
    def num_records(self) -> int:
        """Records in all batches, and after the last one."""
        _, num_batches, rest = self._counted()
        return num_batches * self.windows.size + rest

    @property
    def dropped_tokens(self) -> int:
        """Tokens after the last whole batch."""
        num_tokens, num_batches, _ = self._counted()
        return num_tokens - self.windows.overlap - num_batches * self.windows.batch_stride

    @property
    def batch_size(self) -> int:
        return self.windows.size

    @property
    def seq_len(self) -> int:
        return self.windows.length

    @property
    def stride(self) -> int:
        """Tokens from one record to the next."""
        return self.windows.stride

    @property
    def overlap(self) -> int:
        """Tokens at the end of each record that begin the next one: of windows that were asked for with targets."""
        return self.windows.overlap

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.meta.dtype

    @property
    def complete(self) -> bool:
        """False while a writer is still at work; then `refresh` may find more."""
        return self.corpus.complete

    @property
    def verified(self) -> str:
        """The reads that are compared with their crc32. See `Corpus`."""
        return self.corpus.verified

    @property
    def access(self) -> str:
        """The I/O path as asked for. See `Corpus`."""
        return self.corpus.access

    @property
    def fingerprint(self) -> str:
        """Identity of the tokens in batches of this shape, as states have it.

        It is the same in every backend for the same tokens, shape and shards. Without a stored digest (a lone `.batch`,
        an HDF5 file of another program) it covers the shape and a fixed sample of the batches, and begins with
        "sampled:". That of a live store begins with "live:", and that of windows ends with their shape.
        """
        num_tokens = self._counted()[0]
        is_final = self.complete
        covered, known = self._fingerprinted
        if known is None or not is_final or covered != num_tokens:
            known = self.corpus.known_as.in_batches(self)
            self._fingerprinted = (num_tokens, known if is_final else None)
        return known

    def field(self, name: str) -> Batches:
        """Return the values of a field, whose batches and records are aligned with the tokens.

        Its `meta.field` has their dtype and shape: a record has `seq_len * field.size` values. It is opened once, and
        closed with the corpus.

        Raises
        ------
        ArgumentError
            If no such field is stored.
        """
        values = self.corpus.field(name)
        found = self._fields.get(name)
        if found is None or found.corpus is not values:
            field = values.meta.field
            found = Batches(values, self.windows.widened(1 if field is None else field.size))
            self._fields[name] = found
        return found

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

    def rows(self, length: int) -> TokenArray | None:
        """Return all records of `length` tokens as the rows of one read-only mapping, whose file has its size now.

        None: no mapping has them all, its reads are compared, or they may wait for a disk. It is for orders over these
        batches, and lasts until the corpus is closed.
        """
        flat = None if self.windows.overlap else self.tokens.flat()
        return None if flat is None or len(flat) % length else flat.reshape(-1, length)

    def read_batch_int32(self, index: SupportsIndex) -> torch.Tensor:
        """Return one batch as a `torch.int32` tensor, without a copy where uint32 tokens are mapped.

        Clone it before you write into it: a mapped batch keeps your changes for as long as the corpus is open (the file
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
        """Return any records as a new tensor, shape (count, seq_len). For orders over these batches: no check."""
        all_rows = self.rows(seq_len)
        if all_rows is None:
            rows = np.empty((len(records), seq_len), self.dtype)
            if len(records):
                self.tokens.gather(self.windows.starts(records, seq_len), rows)
        else:
            rows = self.tokens.pages.residency.watch_some(all_rows.take, records, 0, None, "clip")
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

    @property
    def has_pieces(self) -> bool:
        """Whether the pieces of documents in the records are stored."""
        return self.corpus.has_pieces

    @property
    def documents_field(self) -> str:
        """The field that tells the documents of packed records apart, where no pieces are stored; "": none does."""
        is_final = self.complete and self.num_batches > 0
        return self._kept_documents_field if is_final else self._find_documents_field()

    @cached_per_process
    def _kept_documents_field(self) -> str:
        return self._find_documents_field()

    def _find_documents_field(self) -> str:
        if self.has_pieces or self.corpus.tokens_only or self.corpus.is_stream or self.meta.field is not None:
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
        return self.has_pieces and not self.corpus.is_stream

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
            raise ArgumentError(f"{self.path}: seq_len must divide the stored {self.seq_len:,}, found {length:,}")
        parts = self.seq_len // length
        numbers = np.asarray(records, np.int64)
        # a negative number is a large one
        if len(numbers) and int(numbers.view(np.uint64).max()) >= self.num_records * parts:
            raise BatchIndexError(
                f"{self.path}: expected records in 0..{self.num_records * parts - 1:,}, found {records}"
            )
        if self.documents_field:
            return pieces_of_parts(self._told_pieces, numbers, parts, length)
        documents = self.corpus.record_documents
        if documents is None or not documents.has_pieces:
            if self.corpus.tokens_only:
                raise BackendError(f"{self.path}: no documents: {self.corpus.tokens_only}")
            raise BackendError(
                f"{self.path}: holds no documents (a store that is written live never has them); convert again from "
                "text, or from a store that has them"
            )
        return documents.read_pieces(self.windows.starts(numbers, length), length)

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
        self.tokens.pages.will_need(first * windows.batch_stride, min(stop, self.tokens.num_tokens))

    def announce_records(self, records: npt.NDArray[np.int64], length: int) -> None:
        """Announce records of some length that will be read some steps later, in any order: see `read_records_into`."""
        starts = self.windows.starts(records, length).tolist()
        self.tokens.pages.announce(starts, [length] * len(starts))

    def are_cached(self, records: npt.NDArray[np.int64], seq_len: int) -> bool:
        """Return whether some records are in memory, as far as the system reports it: later reads go by that."""
        return self.tokens.pages.are_ready(self.windows.starts(records, seq_len).tolist())

    def is_ready(self, index: SupportsIndex) -> bool:
        """Return whether a batch can be read without waiting for a disk, as far as the system reports it.

        The rest after the last whole batch counts as one.
        """
        return self.tokens.pages.ready(self._check_begun(index) * self.windows.batch_stride)

    def refresh(self) -> int:
        """Show the batches that a writer has committed since; return `num_batches`. A published file has none."""
        self.corpus.refresh()
        return self.num_batches

    def resized(self, batch_size: int) -> Batches:
        """Return the same records in batches of another size.

        Raises
        ------
        ArgumentError
            If no corpus may have batches of that size.
        """
        return self.with_windows(self.windows.resized(batch_size))

    def for_targets(self) -> Batches:
        """Return the batches that a loader with targets reads."""
        windows = self.windows
        if not self.reads_targets:
            return self
        return Batches(self.corpus, windows._replace(length=windows.length + 1), num_context=self.num_context)

    def with_windows(self, windows: Windows, corpus: Corpus | None = None) -> Batches:
        """Return batches of other windows, or of another corpus, that are read as these are."""
        return Batches(
            self.corpus if corpus is None else corpus,
            windows,
            reads_targets=self.reads_targets,
            num_context=self.num_context,
        )

    def close(self) -> None:
        """Close the corpus. Views that were returned stay valid."""
        self.corpus.close()

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
        """Fill `out` with consecutive batches."""
        if not self.windows.overlap:
            flat = out.reshape(-1)
            position = start * self.meta.batch_tokens
            left = max(0, self.tokens.num_tokens - position)
            if left < len(flat):
                raise IncompleteError(
                    f"{self.path}: expected {len(flat):,} tokens from {self.meta.noun} {start:,} on, found {left:,}"
                )
            self.tokens.read([(position, flat)])
        else:
            rows = out.reshape(-1, self.seq_len)
            records = np.arange(start * self.batch_size, start * self.batch_size + len(rows))
            self.tokens.gather(records * self.windows.stride, rows)

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

    def __getstate__(self) -> tuple[Any, ...]:
        return self.corpus, self.windows, self.reads_targets, self.num_context, self._fingerprinted

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        corpus, windows, reads_targets, num_context, fingerprinted = state
        Batches.__init__(self, corpus, windows, reads_targets=reads_targets, num_context=num_context)
        self._fingerprinted = fingerprinted

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
