"""A step of a conversion: the documents of a stream, packed into rows, split after split, and shuffled."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from zb_hdf5 import ArgumentError, ConvertError, StoreMeta
from zb_hdf5.converters.batch_plan import number_of_shards
from zb_hdf5.converters.batch_source import (
    BatchSource,
    SourceShard,
    TokenCounts,
    batches_of,
    out_of_range,
    require_pad_id,
)
from zb_hdf5.converters.conversion import WHOLE, InputOptions, LayoutOptions
from zb_hdf5.converters.document_memory import DocumentMemory
from zb_hdf5.converters.least_dtype import at_least, larger_dtype
from zb_hdf5.converters.packed_rows import PackedRows
from zb_hdf5.converters.settings import Settings, Target
from zb_hdf5.converters.source_paths import stream_of
from zb_hdf5.converters.stream_source import sidecars_at, without_documents
from zb_hdf5.documents.document_table import part_of
from zb_hdf5.documents.pieces import Pieces, concatenate, padding
from zb_hdf5.errors import conversion_call
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import scratch_directory
from zb_hdf5.formats.format import Found
from zb_hdf5.loaders.order import Permutation
from zb_hdf5.read_as import ReadAs
from zb_hdf5.spec import DEFAULT_SPLIT, STREAM_LAYOUT, TokenArray, stored_dtype
from zb_hdf5.store.format_list import flat_format
from zb_hdf5.store.found_path import found_at
from zb_hdf5.store.opened_path import OpenedPath
from zb_hdf5.store.store_corpus import StoreCorpus
from zb_hdf5.store.verify import require_digests

#: A stream is read as it is stored.
READ_AS_STORED: Final = InputOptions()


class PackedBatches(BatchSource):
    """Batches of the packed documents of a stream, the split for training first: each split in its own order.

    The shards of the first split are those that were asked for. A stream that was written for the conversion is not
    compared with its digests.

    Parameters
    ----------
    path
        The stream.
    folder
        The folder of plans and document tables.
    options
        The packing, the shape and the shuffle.
    target
        The number or the size of the shards.
    read
        How the stream is read: the size of the vocabulary, and the ids of files without a header.
    dtype
        The stored dtype; "keep": that of the stream.
    fit
        Returns the dtype to store for that of the stream, where it is kept.
    found
        The path as it was found; None: look at it now.
    description
        The source of a stream that was written for the conversion; None: the stream is the source.
    paths
        The files of that source.
    counts
        The counts of that source, to which the tokens that packing drops and pads are added.
    require_memory
        Raises an error before the documents are packed, if they take more memory than they may.
    """

    order: Permutation | None = None  # of more than one split there is no order of all rows
    has_pieces = is_cut = True

    def __init__(
        self,
        path: Path,
        folder: Path,
        options: LayoutOptions,
        target: Target,
        read: InputOptions = READ_AS_STORED,
        dtype: str = "keep",
        *,
        fit: Callable[[np.dtype[Any]], np.dtype[Any]] = larger_dtype,
        found: Found | None = None,
        description: dict[str, Any] | None = None,
        paths: Sequence[Path] = (),
        counts: TokenCounts | None = None,
        require_memory: Callable[[PackedBatches], None] = lambda source: None,
    ) -> None:
        found = found or found_at(path, split=None, read_as=read.read_as)
        splits = [None] if read.is_one_split else found.splits_there()
        stores = {split or DEFAULT_SPLIT: stream_of(found, split) for split in splits}
        store = next(iter(stores.values()))
        if not store.has_documents:
            raise _no_documents(path, store, read.read_as)
        self._path = path
        self._found = found
        self._checked = counts is not None
        self._corpora = [*stores.values()]  # until they are compared with their digests
        self._has_digests = all(each.index.has_digests for each in stores.values())
        self._options = options
        document_count = sum(each.document_count for each in stores.values())
        stored = fit(store.dtype) if dtype == "keep" else stored_dtype(dtype)
        self.meta = _meta_of(store, document_count, options, read.vocab_size, stored)
        pad_id = options.pad_id
        if pad_id is None:
            pad_id = max(0, store.index.meta.boundary_token_id)
        require_pad_id(pad_id, self.meta)
        files = [(each, file.path) for each in stores.values() for file in each.files]
        sidecars = [other for each, file in files for other in sidecars_at(each.backend, file)]
        self.paths = [*paths, *(file for _, file in files), *sidecars]
        self.shuffle = "global" if options.shuffle else "none"
        self.reorders = options.shuffle
        how = {"packing": options.packing, "pad_id": pad_id}
        if description is None:
            description = {"format": "stream", "files": [str(path)], **read.headerless}
        self.description = {**description, **how}
        self._read_as = read.read_as
        self.suspects = read.suspects
        self.counts = counts or TokenCounts(sum(each.num_tokens for each in stores.values()))
        self.num_batches = 0
        require_memory(self)
        self._splits: list[PackedRows] = []
        for split, each in stores.items():
            self._pack(PackedRows(each, split, folder, len(self._splits), self.meta, options, pad_id))
        self.document_files = [part.table for part in self._splits]
        self.document_parts = tuple(part_of(path) for path in self.document_files)
        self.shards = self._cut(target)
        self.meta = replace(self.meta, total_records=sum(shard.records or 0 for shard in self.shards))
        self.identity = {
            **how,
            "splits": {part.split: part.num_batches for part in self._splits},
            "fingerprints": [each.fingerprint for each in stores.values()],
        }

    @property
    def memory(self) -> DocumentMemory:
        """The memory in which its documents are packed."""
        tokens = self.counts.tokens_in
        return DocumentMemory.of_rows(self.meta.document_count, tokens, self.meta, self._options.packing)

    def check_reads(self) -> None:
        """Compare the whole stream with its digests, once: rows are cut from its chunks anywhere."""
        if not self._checked and self._has_digests:
            opened = OpenedPath.of(self._found, self._corpora)
            require_digests(self._path, self._found.split, self._read_as, opened)
        self._corpora = []
        self._checked = True

    def _pack(self, rows: PackedRows) -> None:
        """Add the rows of a split, and count the tokens that are in none."""
        meta = self.meta
        remainder = self._options.remainder
        self.counts.drop("cropped by packing", rows.tokens_cropped)
        num_batches, rest = batches_of(rows.num_rows, meta, remainder, f"packed rows ({rows.split})")
        left_out = 0
        if rest and remainder == "pad":
            self.counts.padding_rows += meta.batch_size - rest
        elif rest:
            left_out = rows.tokens_in(rows.order.indices(np.arange(rows.num_rows - rest, rows.num_rows)))
            self.counts.drop("remainder", left_out)
        self.counts.padded += num_batches * meta.batch_tokens - (rows.tokens_kept - left_out)
        rows.first_batch = self.num_batches
        rows.num_batches = num_batches
        self.num_batches += num_batches
        self._splits.append(rows)

    def _cut(self, target: Target) -> list[SourceShard]:
        """Cut each split into shards: none has two."""
        train = self._splits[0].num_batches
        num_shards = number_of_shards(train, self.meta, target)
        largest = -(-train // num_shards)
        shards = []
        for part in self._splits:
            count = num_shards if part is self._splits[0] else -(-part.num_batches // largest)
            for start, stop in pairwise(part.first_batch + k * part.num_batches // count for k in range(count + 1)):
                rows = part.rows_of(start, stop)
                shards.append(SourceShard(stop - start, part.split, len(rows), int(part.documents[rows].sum())))
        return shards

    def read_into(self, start: int, out: TokenArray) -> None:
        self.read_field_into("", start, out)

    def read_field_into(self, name: str, start: int, out: TokenArray) -> None:
        """Gather the tokens (""), or the values of a field, with `Field.padding`."""
        for part in self._splits:
            first = max(start, part.first_batch)
            stop = min(start + len(out), part.first_batch + part.num_batches)
            if first < stop:
                rows = out[first - start : stop - start].reshape(-1, *out.shape[2:])
                try:
                    part.gather_into(name, part.rows_of(first, stop), rows)
                except ConvertError as error:  # of ids that another program has stored
                    raise out_of_range(error.facts, self.suspects) from error

    def read_pieces(self, start: int, stop: int) -> Pieces:
        """Return the pieces of the rows of batches of one split; rows after its last one are padding."""
        part = next(part for part in self._splits if start < part.first_batch + part.num_batches)
        rows = part.rows_of(start, stop)
        found = part.read_pieces(rows)
        missing = (stop - start) * self.meta.batch_size - len(rows)
        return concatenate([found, padding(missing, self.meta.seq_len)]) if missing else found


def _meta_of(
    store: StoreCorpus, document_count: int, options: LayoutOptions, vocab_size: int, dtype: np.dtype[Any]
) -> StoreMeta:
    """Return the shape, the dtype and the origin of the batches that are packed from the splits of a stream."""
    return StoreMeta(
        batch_size=options.batch_rows,
        seq_len=options.row_tokens,
        dtype=dtype,
        seed=options.seed if options.shuffle else 0,
        document_count=document_count,
        vocab_size=vocab_size or store.index.without_max_token().meta.vocab_size,
        tokenizer=store.meta.tokenizer,
        fields=store.meta.fields,
    )


def _no_documents(path: Path, store: StoreCorpus, read_as: ReadAs) -> ArgumentError:
    """Return the error for a stream that tells no documents apart."""
    cure = "cut records with hdf5-to-hdf5"
    if flat_format(store.backend) is not None and store.meta.fields:  # which cut records have no place for
        named = {"source_format": store.backend, **read_as.given}
        cure = f"take each file as one document: {conversion_call(path, STREAM_LAYOUT, **named, tokens_only=True)}"
    elif flat_format(store.backend) is not None:
        cut_as = "npy" if store.backend == "npy" else "bin"  # which alone has a header
        call = conversion_call(path, "hdf5", source_format=cut_as, **read_as.given)
        cure = f"pass boundary_token_id, the token between them, or cut records: {call}"
    return ArgumentError(
        f"{path}: expected a stream with documents, found none{without_documents(store)}: {cure}",
        options=["boundary_token_id"],
    )


@contextmanager
def open_packed(paths: list[Path], settings: Settings) -> Generator[PackedBatches]:
    """Open a `PackedBatches` whose plan is in `<destination>.plan.partial/` inside the block; each job has its own."""
    path = local_path(paths[0])
    destination = settings.target.path
    part = settings.work.shard_range
    suffix = ".plan" if part == WHOLE else f".plan-{part.job}"
    found = settings.looks.at(path, read_as=settings.input.read_as)
    if found.layout != STREAM_LAYOUT:
        raise ArgumentError(f"{path}: expected a token stream of documents, found batches")
    with scratch_directory(destination.with_name(destination.name + suffix)) as folder:
        yield PackedBatches(
            path,
            folder,
            settings.layout,
            settings.target,
            settings.input,
            settings.target.dtype,
            fit=partial(at_least, settings=settings),
            found=found,
            require_memory=partial(_require, settings),
        )


def _require(settings: Settings, source: PackedBatches) -> None:
    """Raise `ArgumentError` if a source takes more memory than a conversion may."""
    bound = settings.bound_bytes
    if bound is not None:
        source.memory.require(bound, settings.work.workers or 1)
