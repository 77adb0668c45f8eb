"""Batches as a source of documents: each record is one, or several that a field tells apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.converters.batch_source import BatchSource, SourceShard
from zb_hdf5.converters.stream_source import GROUP_TOKENS, READ_TOKENS
from zb_hdf5.field import Field
from zb_hdf5.formats.document_source import DocumentFilter, DocumentGroup, DocumentSource, TokenizedDocuments
from zb_hdf5.formats.row_documents import RowDocuments, documents_field
from zb_hdf5.notes import note


class RecordSource(DocumentSource):
    """The records of batches, in their order, without records of padding.

    Parameters
    ----------
    batches
        The batches.
    fields
        Those of their fields that are given.
    """

    boundary_token_id = None
    has_ids = False

    def __init__(self, batches: BatchSource, fields: Sequence[Field]) -> None:
        batches.check_reads()
        meta = batches.meta
        self._batches = batches
        #: The field that tells the documents of a record apart; "": a record is one.
        self._told_by = documents_told(batches)
        self.has_documents = bool(self._told_by)
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
        self.fields = fields
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
        if self._told_by:
            note(f"{batches.paths[0]}: its records are packed: field {self._told_by!r} tells their documents apart")
            self.description = {**self.description, "documents": self._told_by}
            self.identity["documents_field"] = self._told_by

    def read(
        self, group: DocumentGroup, choose: DocumentFilter | None, num_threads: int
    ) -> Iterator[TokenizedDocuments]:
        meta = self._batches.meta
        first, stop = self._ranges[group.file_number][group.number]
        step = max(1, READ_TOKENS // meta.batch_tokens) * meta.batch_size
        begin = first
        while begin < stop:
            end = min(begin // step * step + step, stop)
            block = self._block(begin, end)._replace(read=(end - first) * meta.seq_len * meta.dtype.itemsize)
            yield block if choose is None else block.only(choose(len(block.lengths)))
            begin = end

    def _block(self, first: int, stop: int) -> TokenizedDocuments:
        """Return consecutive records, of whole batches that are read."""
        meta = self._batches.meta
        start = first // meta.batch_size
        count = -(-stop // meta.batch_size) - start
        rows = slice(first - start * meta.batch_size, stop - start * meta.batch_size)
        tokens = np.empty((count, *meta.shape), meta.dtype)
        self._batches.read_into(start, tokens)
        fields = {}
        for field in meta.fields:
            if field in self.fields or field.name == self._told_by:
                values = np.empty((count, *meta.shape, *field.shape), field.dtype)
                self._batches.read_field_into(field.name, start, values)
                fields[field.name] = values.reshape(-1, meta.seq_len, *field.shape)[rows].reshape(-1, *field.shape)
        lengths = np.full(stop - first, meta.seq_len)
        documents = RowDocuments(lengths, np.arange(stop - first))
        if self._told_by:
            documents = RowDocuments.of(self._told_by, fields[self._told_by], lengths, lengths)
        return TokenizedDocuments(
            tokens.reshape(-1, meta.seq_len)[rows].reshape(-1),
            documents.lengths,
            str(self.paths[0]),
            (first + 1 + documents.rows).astype(np.uint64),
            fields={field.name: fields[field.name] for field in self.fields} or None,
        )


def documents_told(batches: BatchSource) -> str:
    """Return the field that tells the documents of the records of batches apart; "": none does."""

    def values_of(name: str, number: int) -> npt.NDArray[Any]:
        values = np.empty((1, *batches.meta.shape), batches.meta.of_field(name).dtype)
        batches.read_field_into(name, number, values)
        return values

    return documents_field(batches.meta.fields, batches.num_batches, values_of)


def _records_of(shards: list[SourceShard], batches: BatchSource) -> list[int]:
    """Return how many records of each shard are not padding."""
    meta = batches.meta
    left = meta.total_records or batches.num_batches * meta.batch_size
    found = []
    for shard in shards:
        held = shard.num_batches * meta.batch_size
        found.append(min(left, held if shard.records is None else shard.records))
        left -= found[-1]
    return found
