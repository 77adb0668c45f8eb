"""Batches as a source for files of other trainers: each record is one of their documents."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from zb_hdf5.converters.batch_source import BatchSource, SourceShard
from zb_hdf5.converters.stream_source import GROUP_TOKENS, READ_TOKENS
from zb_hdf5.formats.document_source import Choose, DocumentGroup, DocumentSource, Encoded


class RecordSource(DocumentSource):
    """The records of batches, in their order, without those of padding.

    Parameters
    ----------
    batches
        The batches.
    """

    boundary_token_id = None
    has_ids = False
    has_documents = False

    def __init__(self, batches: BatchSource) -> None:
        batches.check_reads()
        meta = batches.meta
        self._batches = batches
        shards = list(batches.shards) or [SourceShard(batches.num_batches)]
        firsts = list(accumulate((shard.num_batches for shard in shards[:-1]), initial=0))
        counts = _records_of(shards, batches)
        step = max(1, GROUP_TOKENS // meta.seq_len)
        #: The first record and the end of each group of each shard.
        self._ranges = [
            [(start, min(start + step, first * meta.batch_size + count)) for start in starts]
            for first, count in zip(firsts, counts, strict=True)
            for starts in [range(first * meta.batch_size, first * meta.batch_size + count, step)]
        ]
        self.paths = batches.paths
        self.splits = [shard.split for shard in shards]
        self.dtype = meta.dtype
        self.vocab_size = meta.vocab_size
        self.tokenizer = meta.tokenizer
        self.fields = meta.fields
        self.num_tokens = sum(counts) * meta.seq_len
        self.left_out = "the places of documents in the records" if batches.has_pieces else ""
        row_bytes = meta.seq_len * meta.dtype.itemsize
        self.groups = [
            DocumentGroup(shard, number, (stop - start) * row_bytes, (stop - start) * row_bytes)
            for shard, ranges in enumerate(self._ranges)
            for number, (start, stop) in enumerate(ranges)
        ]
        self.description = batches.description
        self.identity: dict[str, Any] = {"batches": batches.identity, "dtype": meta.dtype.name}

    def read(self, group: DocumentGroup, choose: Choose | None, num_threads: int) -> Iterator[Encoded]:
        meta = self._batches.meta
        first, stop = self._ranges[group.file_number][group.number]
        step = max(1, READ_TOKENS // meta.batch_tokens) * meta.batch_size
        begin = first
        while begin < stop:
            end = min(begin // step * step + step, stop)
            block = self._block(begin, end)._replace(read=(end - first) * meta.seq_len * meta.dtype.itemsize)
            yield block if choose is None else block.only(choose(end - begin))
            begin = end

    def _block(self, first: int, stop: int) -> Encoded:
        """Return consecutive records, of whole batches that are read."""
        meta = self._batches.meta
        start = first // meta.batch_size
        count = -(-stop // meta.batch_size) - start
        rows = slice(first - start * meta.batch_size, stop - start * meta.batch_size)
        tokens = np.empty((count, *meta.shape), meta.dtype)
        self._batches.read_into(start, tokens)
        fields = {}
        for field in meta.fields:
            values = np.empty((count, *meta.shape, *field.shape), field.dtype)
            self._batches.read_field_into(field.name, start, values)
            fields[field.name] = values.reshape(-1, meta.seq_len, *field.shape)[rows].reshape(-1, *field.shape)
        return Encoded(
            tokens.reshape(-1, meta.seq_len)[rows].reshape(-1),
            np.full(stop - first, meta.seq_len),
            str(self.paths[0]),
            np.arange(first + 1, stop + 1, dtype=np.uint64),
            fields=fields or None,
        )


def _records_of(shards: list[SourceShard], batches: BatchSource) -> list[int]:
    """Return how many records of each shard are no padding."""
    meta = batches.meta
    left = meta.total_records or batches.num_batches * meta.batch_size
    found = []
    for shard in shards:
        held = shard.num_batches * meta.batch_size
        found.append(min(left, held if shard.records is None else shard.records))
        left -= found[-1]
    return found
