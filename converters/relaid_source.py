"""The records of a store in another layout: more or fewer in a batch, or cut into shorter ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5 import ArgumentError, BatchReader, ConvertError
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.source import TokenCounts
from zb_hdf5.converters.store_source import StoreSource
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.formats.batch_reader import require_choice
from zb_hdf5.spec import DEFAULT_SPLIT, TokenArray
from zb_hdf5.store.opening import is_stream

#: The ways to treat records that do not fill the last batch of a split.
REMAINDERS: Final = ("drop", "error")
#: Records of a batch that is cut from a stream.
DEFAULT_BATCH_SIZE: Final = 32


class _Part(NamedTuple):
    """The shards of one split, which follow each other.

    Attributes
    ----------
    first_record
        As they are written, counted over the whole source.
    start, stop
        The batches that are made of them.
    num_shards
        How many shards they were.
    written_records
        How many of the records are not padding.
    """

    split: str
    first_record: int
    start: int
    stop: int
    num_shards: int
    written_records: int


class RelaidSource(StoreSource):
    """The records of a store, split after split in their order, in batches of another shape.

    Parameters
    ----------
    path, backend, dataset, dtype
        As for `StoreSource`.
    batch_size, seq_len
        Shape of the new batches; None: as stored. A `seq_len` must divide the stored one: each record becomes several.
    remainder
        Treatment of the records that do not fill the last batch of a split: "drop" or "error".

    Raises
    ------
    ArgumentError
        If records cannot be cut in this way.
    ConvertError
        If a split does not fill one batch, or records are left over and that is an error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        backend: str,
        dataset: str | None = None,
        dtype: str = "keep",
        *,
        batch_size: int | None = None,
        seq_len: int | None = None,
        remainder: str = "drop",
    ) -> None:
        super().__init__(path, backend, dataset, dtype)
        require_choice("remainder", remainder, REMAINDERS)
        stored = self.meta
        length, size = seq_len or stored.seq_len, batch_size or stored.batch_size
        if stored.seq_len % length:
            raise ArgumentError(f"{path}: seq_len must divide the stored {stored.seq_len:,}, found {length:,}")
        self.token_counts = TokenCounts(self.num_batches * stored.batch_tokens)
        self.meta = replace(stored, batch_size=size, seq_len=length)
        self._remainder = remainder
        self._parts = list(self._lay_out(stored.seq_len // length))
        self.num_batches = self._parts[-1].stop
        self._name_shards()

    def _lay_out(self, parts: int) -> Iterator[_Part]:
        stored, size = self._reader.meta, self.meta.batch_size
        batches, splits = self.shard_batches or [self.num_batches], self.shard_splits or [DEFAULT_SPLIT]
        known = self.shard_records or [count * stored.batch_size for count in batches]
        first = start = 0
        for split, group in groupby(range(len(batches)), key=splits.__getitem__):
            shards = list(group)
            records = sum(batches[k] for k in shards) * stored.batch_size * parts
            count, rest = divmod(records, size)
            if rest and self._remainder == "error":
                raise ConvertError(
                    f"{self._path}: {records:,} records ({split}) are no multiple of batch_size {size:,}: {rest:,} are "
                    "left over; pass --remainder drop"
                )
            if count == 0:
                raise ConvertError(f"{self._path}: {records:,} records ({split}) do not fill one batch of {size:,}")
            self.token_counts.drop("remainder", rest * self.meta.seq_len)
            yield _Part(split, first, start, start + count, len(shards), sum(known[k] for k in shards) * parts)
            first, start = first + records, start + count

    def _name_shards(self) -> None:
        """Cut each split into as many shards as it had, where it has as many batches."""
        padded, total = bool(self.shard_records), self.meta.total_records
        parts = self._reader.seq_len // self.meta.seq_len
        has_shards = bool(self.shard_batches)
        self.shard_batches, self.shard_splits, self.shard_records, self.shard_documents = [], [], [], []
        for part in self._parts:
            batches = part.stop - part.start
            num_shards = min(part.num_shards, batches)
            for start, stop in pairwise(k * batches // num_shards for k in range(num_shards + 1)):
                left = max(0, part.written_records - start * self.meta.batch_size)
                self.shard_batches.append(stop - start)
                self.shard_splits.append(part.split)
                self.shard_records.append(min((stop - start) * self.meta.batch_size, left))
        self.meta = replace(self.meta, total_records=sum(self.shard_records) if padded and total else total * parts)
        if not padded:
            self.shard_records = []
        if not has_shards:
            self.shard_batches, self.shard_splits = [], []

    def _records_from(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield (place in `count`, number of batches, first record) of batches: those of one split at once."""
        done = 0
        for part in self._parts:
            here = start + done
            if done < count and part.start <= here < part.stop:
                take = min(count - done, part.stop - here)
                yield done, take, part.first_record + (here - part.start) * self.meta.batch_size
                done += take

    def read_into(self, start: int, out: TokenArray) -> None:
        """Read consecutive batches. Raises as `StoreSource`."""
        self._cut_into(start, out, self._reader.meta.shape, self.meta.dtype, super().read_into)

    def read_field_into(self, name: str, start: int, out: TokenArray) -> None:
        field = self._reader.field(name)
        self._cut_into(start, out, field.meta.shape, field.dtype, field.read_batches_into)

    def _cut_into(
        self,
        start: int,
        out: TokenArray,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        read: Callable[[int, TokenArray], None],
    ) -> None:
        """Fill `out` from the stored batches that its records lie in, which `read` reads in this shape and dtype."""
        of_token = out.shape[3:]  # the values that a field has for each token
        for done, count, record in self._records_from(start, len(out)):
            first, stop, skipped = self._stored_batches(record, count)
            stored = np.empty((stop - first, *shape), dtype)
            read(first, stored)
            part = out[done : done + count].reshape(-1, *of_token)
            part[...] = stored.reshape(-1, *of_token)[skipped : skipped + len(part)]

    def _stored_batches(self, record: int, count: int) -> tuple[int, int, int]:
        """Return the stored batches that hold new ones, (first, stop), and how many tokens stand before these."""
        token, per_batch = record * self.meta.seq_len, self._reader.meta.batch_tokens
        first, skipped = divmod(token, per_batch)
        return first, -(-(token + count * self.meta.batch_tokens) // per_batch), skipped

    def read_pieces(self, start: int, stop: int) -> Pieces:
        """Return the pieces of consecutive batches of one split. Raises as `StoreSource`."""
        [(_, count, record)] = self._records_from(start, stop - start)
        first, behind, _ = self._stored_batches(record, count)
        self._check_pieces(first, behind)
        records = np.arange(record, record + count * self.meta.batch_size)
        split = next(part.split for part in self._parts if start < part.stop)
        base = self._token_bases.get(split, 0)
        pieces = self._reader.read_pieces(records, self.meta.seq_len)
        return pieces.moved(-base) if base else pieces

    def sha256_of(self, start: int, stop: int) -> str | None:
        """Return nothing: no shard stays as it was."""
        return None

    def shard_of(self, start: int, stop: int) -> BatchReader | None:
        """Return nothing: no shard is copied."""
        return None


def open_stores(paths: list[Path], conversion: Conversion) -> StoreSource:
    """Open the store of a conversion: as it is, or in another layout if one is named. See `RelaidSource`.

    A stream of others, without documents, is cut into records of `seq_len` tokens.

    Raises
    ------
    ArgumentError
        If there is a remainder without a batch size or a sequence length, or a stream without a sequence length.
    """
    path, remainder = paths[0], conversion.remainder
    store = path, conversion.source_format, conversion.dataset, conversion.dtype or "keep"
    batch_size, seq_len = conversion.batch_size, conversion.seq_len
    if is_stream(path, dataset=conversion.dataset):
        if seq_len is None:
            raise ArgumentError(f"{path}: is a token stream: pass seq_len, the tokens of a record")
        source = StoreSource(*store, windows=(batch_size or DEFAULT_BATCH_SIZE, seq_len))
        if remainder == "error" and (dropped := sum(source.token_counts.dropped.values())):
            raise ConvertError(f"{path}: {dropped:,} tokens do not fill a batch; pass --remainder drop")
        return source
    if batch_size or seq_len:
        return RelaidSource(*store, batch_size=batch_size, seq_len=seq_len, remainder=remainder or "drop")
    if remainder is not None:
        raise ArgumentError(f"{path}: remainder: without batch_size or seq_len no record is left over")
    return StoreSource(*store)
