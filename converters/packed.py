"""A batch store of documents: packed into rows, split after split, and shuffled; a source like any other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ConvertError, FormatError, StoreMeta
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.packing import PACKINGS, Packing, pieces_of
from zb_hdf5.converters.shard import DEFAULT_SHARD_BYTES
from zb_hdf5.converters.source import Source, TokenCounts, batches_of
from zb_hdf5.documents.document_table import DocumentFile, documents_name, part_of
from zb_hdf5.documents.document_writer import DocumentsWriter, join_documents
from zb_hdf5.documents.pieces import Pieces, concatenate, padding, ranges
from zb_hdf5.errors import Remedy
from zb_hdf5.files.publishing import disk_errors
from zb_hdf5.loaders.order import GlobalOrder, Order, SequentialOrder, write_order
from zb_hdf5.spec import SHARD_PREFIX, TokenArray


class DocumentStream(Protocol):
    """The `num_tokens` tokens of the documents of one split, one after the other. Picklable."""

    split: str
    num_tokens: int

    def documents(self) -> Iterable[DocumentFile]:
        """Open the tables of the documents, one after the other."""

    def read_into(self, name: str, start: int, out: TokenArray) -> None:
        """Fill `out`, shape `(count, ...)`, from token `start` on: with tokens (""), or with the values of a field."""


class PackedRows:
    """The rows of one split, read from its documents in any order. Picklable: the plan lies in `folder`.

    `table` is that of the documents, `documents` how many of them begin in each row; it stays in this process.
    """

    def __init__(
        self, stream: DocumentStream, folder: Path, number: int, packing: str, seq_len: int, pad_id: int
    ) -> None:
        self._stream, self._pad_id, self._seq_len = stream, pad_id, seq_len
        self._table: DocumentFile | None = None
        self._prefix = folder / f"{SHARD_PREFIX}plan-{stream.split}"
        with DocumentsWriter(folder / documents_name(number)) as writer:
            join_documents(stream.documents(), writer)
            if writer.token_count != stream.num_tokens:
                raise FormatError(
                    f"the split {stream.split!r}: expected documents of {stream.num_tokens:,} tokens, found "
                    f"{writer.token_count:,}: tokens belong to no document; write the stream again"
                )
            self.table = writer.publish(stream.split)
        edges = self._edges().astype(np.int64)
        document_lengths = edges[1:] - edges[:-1]
        packed = PACKINGS[packing](document_lengths, seq_len)
        for name in ("offsets", "lengths", "first"):
            _save(self._plan_path(name), getattr(packed, name))
        self.num_rows, self.num_documents = packed.num_rows, len(document_lengths)
        self.tokens_kept, self.tokens_cropped = packed.tokens_kept, packed.tokens_cropped
        self.documents = packed.documents_begun(document_lengths)
        self._plan: Packing | None = None

    def _plan_path(self, name: str) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}-{name}.npy")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "documents": None, "_plan": None, "_table": None}

    def _edges(self) -> npt.NDArray[np.uint64]:
        """Return where each document begins in the stream, and the last one ends."""
        if self._table is None:
            self._table = DocumentFile(self.table.path)
        return self._table.offsets

    def tokens_in(self, rows: npt.NDArray[np.int64]) -> int:
        """Return how many tokens, padding aside, some rows hold."""
        pieces, _ = self._pieces_of(rows)
        return int(self._packing().lengths[pieces].sum())

    def gather_into(self, name: str, rows: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(len(rows), seq_len, ...)`, with rows in any order: tokens (""), or values of a field."""
        plan, seq_len = self._packing(), out.shape[1]
        pieces, counts = self._pieces_of(rows)
        lengths = plan.lengths[pieces]
        before = np.cumsum(lengths) - lengths
        in_row = np.repeat(np.arange(len(rows)), counts)
        columns = before - before[np.cumsum(counts) - counts][in_row]
        if int(lengths.sum()) < len(rows) * seq_len:
            self.fill(name, out)
        flat = out.reshape(-1, *out.shape[2:])
        targets = (in_row * seq_len + columns).tolist()
        for offset, length, start in zip(plan.offsets[pieces].tolist(), lengths.tolist(), targets, strict=True):
            self._stream.read_into(name, offset, flat[start : start + length])

    def fill(self, name: str, out: TokenArray) -> None:
        """Fill `out` with padding; the values of a field are 0 there."""
        out[...] = np.zeros((), out.dtype) if name else self._pad_id

    def read_pieces(self, rows: npt.NDArray[np.int64]) -> Pieces:
        """Return which parts of documents lie in some rows: what was packed is cut where a document begins."""
        plan = self._packing()
        packed, counts = self._pieces_of(rows)
        return pieces_of(plan.offsets[packed], plan.lengths[packed], counts, self._edges(), self._seq_len)

    def _pieces_of(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the pieces of some rows, in order, and how many each row has."""
        first = self._packing().first
        begin, counts = first[rows], first[rows + 1] - first[rows]
        return ranges(begin, counts), counts

    def _packing(self) -> Packing:
        if self._plan is None:
            arrays = [np.load(self._plan_path(name), mmap_mode="r") for name in ("offsets", "lengths", "first")]
            offsets, lengths, first = (array.view(np.ndarray) for array in arrays)
            self._plan = Packing(offsets, lengths, first, 0)
        return self._plan


def _save(path: Path, array: npt.NDArray[np.int64]) -> None:
    """Write a `.npy` file. On a full disk numpy's own writer names neither the file nor the reason."""
    with disk_errors(path), open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array))


class SplitRows(NamedTuple):
    """One split of a store: its rows, in the order in which they are stored, and how many batches they fill."""

    split: str
    rows: PackedRows
    order: Order
    num_batches: int


class PackedSource(Source):
    """Batches of packed rows of documents, split after split, each in its own order.

    The shards of the first split are those that were asked for. Plans and document tables are kept in `folder`; the
    tokens that packing drops and pads are added to `token_counts`.
    """

    order: GlobalOrder | None = None  # of more than one split there is no order of all rows
    has_pieces = True

    def __init__(
        self,
        streams: Sequence[DocumentStream],
        folder: Path,
        meta: StoreMeta,
        options: Conversion,
        pad_id: int,
        *,
        description: dict[str, Any],
        paths: list[Path],
        token_counts: TokenCounts,
    ) -> None:
        self.paths = paths
        self.shuffle, self.reorders = "global" if options.shuffle else "none", bool(options.shuffle)
        self.description = description
        self._options = replace(options, source=None, progress=None, engine=None)  # picklable
        self.token_counts = token_counts
        self._splits = [self._pack(k, stream, folder, meta, pad_id) for k, stream in enumerate(streams)]
        self.document_files = [part.rows.table.path for part in self._splits]
        self.document_parts = tuple(part_of(path) for path in self.document_files)
        self.num_batches = sum(part.num_batches for part in self._splits)
        self.meta = meta
        self.shard_batches, self.shard_splits = self._cut()
        self.shard_records, self.shard_documents = self._count()
        self.meta = replace(meta, total_records=sum(self.shard_records))
        self.identity = {"packing": options.packing, "pad_id": pad_id, "splits": self.batches_of_split}

    @property
    def batches_of_split(self) -> dict[str, int]:
        """The number of batches of each split."""
        return {part.split: part.num_batches for part in self._splits}

    def _pack(self, number: int, stream: DocumentStream, folder: Path, meta: StoreMeta, pad_id: int) -> SplitRows:
        """Pack the documents of a split into rows, and count the tokens that are in none."""
        options, split = self._options, stream.split
        rows = PackedRows(stream, folder, number, options.packing or "concat", meta.seq_len, pad_id)
        order = write_order(rows.num_rows, options.seed or 0) if options.shuffle else SequentialOrder(rows.num_rows)
        self.token_counts.drop("cropped by packing", rows.tokens_cropped)
        num_batches, rest = batches_of(rows.num_rows, meta, options.remainder or "pad", f"packed rows ({split})")
        left_out = 0
        if rest and options.remainder == "pad":
            self.token_counts.padding_rows += meta.batch_size - rest
        elif rest:
            last = order.indices(np.arange(rows.num_rows - rest, rows.num_rows))
            left_out = rows.tokens_in(last)
            self.token_counts.drop("remainder", left_out)
        self.token_counts.padded += num_batches * meta.batch_tokens - (rows.tokens_kept - left_out)
        return SplitRows(split, rows, order, num_batches)

    def _cut(self) -> tuple[list[int], list[str]]:
        """Return the batches and the split of each shard: none has two splits."""
        train = self._splits[0].num_batches
        per_shard = max(1, (self._options.shard_bytes or DEFAULT_SHARD_BYTES) // self.meta.batch_bytes)
        num_shards = self._options.num_shards or -(-train // per_shard)
        if num_shards > train:
            raise ConvertError(f"{train:,} batches cannot fill {num_shards:,} shards", remedy=Remedy.FILL_THE_SHARDS)
        largest = -(-train // num_shards)
        batches, splits = [], []
        for part in self._splits:
            count = num_shards if part is self._splits[0] else -(-part.num_batches // largest)
            stops = [(k + 1) * part.num_batches // count for k in range(count)]
            batches += np.diff([0, *stops]).tolist()
            splits += [part.split] * count
        return batches, splits

    def _count(self) -> tuple[list[int], list[int | None]]:
        """Return the rows that hold a token and the documents that begin, of each shard."""
        size = self.meta.batch_size
        records: list[int] = []
        documents: list[int | None] = []
        for part in self._splits:
            batches = [
                count for count, split in zip(self.shard_batches, self.shard_splits, strict=True) if split == part.split
            ]
            for start, stop in pairwise([0, *np.cumsum(batches).tolist()]):
                rows = part.order.indices(np.arange(start * size, min(stop * size, part.rows.num_rows)))
                records.append(len(rows))
                documents.append(int(part.rows.documents[rows].sum()))
        return records, documents

    def read_into(self, start: int, out: TokenArray) -> None:
        """Gather the rows of consecutive batches."""
        self._read("", start, out)

    def read_field_into(self, name: str, start: int, out: TokenArray) -> None:
        """Gather the values of a field as the tokens are; those of padding are 0."""
        self._read(name, start, out)

    def _read(self, name: str, start: int, out: TokenArray) -> None:
        done = 0
        first = 0
        for part in self._splits:
            here = start + done - first
            if done < len(out) and here < part.num_batches:
                count = min(len(out) - done, part.num_batches - here)
                self._read_split(name, part, here, out[done : done + count])
                done += count
            first += part.num_batches

    def read_pieces(self, start: int, stop: int) -> Pieces:
        """Return the pieces of the rows of batches of one split; rows behind its last one are padding."""
        first, size = 0, self.meta.batch_size
        for part in self._splits:
            if start < first + part.num_batches:
                break
            first += part.num_batches
        rows = np.arange((start - first) * size, min((stop - first) * size, part.rows.num_rows))
        found = part.rows.read_pieces(part.order.indices(rows))
        missing = (stop - start) * size - len(rows)
        return concatenate([found, padding(missing, self.meta.seq_len)]) if missing else found

    def _read_split(self, name: str, part: SplitRows, start: int, out: TokenArray) -> None:
        rows = out.reshape(-1, *out.shape[2:])
        first = start * self.meta.batch_size
        count = min(len(rows), part.rows.num_rows - first)
        part.rows.gather_into(name, part.order.indices(np.arange(first, first + count)), rows[:count])
        part.rows.fill(name, rows[count:])
