"""A batch store of documents: packed into rows, split after split, and shuffled; a source like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from zb_hdf5 import ConvertError, StoreMeta
from zb_hdf5.converters.options import Conversion
from zb_hdf5.converters.packed_rows import DocumentStream, PackedRows, SplitRows
from zb_hdf5.converters.plan import DEFAULT_SHARD_BYTES
from zb_hdf5.converters.source import Source, TokenCounts
from zb_hdf5.documents.document_table import part_of
from zb_hdf5.documents.pieces import Pieces, concatenate, padding
from zb_hdf5.errors import Remedy
from zb_hdf5.loaders.order import GlobalOrder, SequentialOrder, write_order
from zb_hdf5.spec import TokenArray


class PackedSource(Source):
    """Batches of packed rows of documents, split after split, each in its own order.

    Parameters
    ----------
    streams
        The documents of each split; the shards of the first one are those that were asked for.
    folder
        Where the plans and the document tables are kept while the source is read.
    token_counts
        Of the streams; what packing drops and pads is added.
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
        """Pack the documents of a split into rows, and count the tokens that get no place in one."""
        options, split = self._options, stream.split
        rows = PackedRows(stream, folder, number, options.packing or "concat", meta.seq_len, pad_id)
        order = write_order(rows.num_rows, options.seed or 0) if options.shuffle else SequentialOrder(rows.num_rows)
        self.token_counts.drop("cropped by packing", rows.tokens_cropped)
        num_batches, rest = divmod(rows.num_rows, meta.batch_size)
        left_out = 0
        if rest and options.remainder == "error":
            raise ConvertError(
                f"{rows.num_rows:,} packed rows ({split}) are no multiple of batch_size {meta.batch_size}: {rest} are "
                "left over",
                remedy=Remedy.REMAINDER,
            )
        if rest and options.remainder == "pad":
            num_batches += 1
            self.token_counts.padding_rows += meta.batch_size - rest
        elif rest:
            last = order.indices(np.arange(rows.num_rows - rest, rows.num_rows))
            left_out = rows.tokens_in(last)
            self.token_counts.drop("remainder", left_out)
        if num_batches == 0:
            raise ConvertError(
                f"{rows.num_rows:,} rows of {meta.seq_len} tokens ({split}) do not fill one batch of {meta.batch_size}",
                remedy=Remedy.FILL_A_BATCH,
            )
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
