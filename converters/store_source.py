"""Batch stores as a source: unchanged, in another dtype, or with their records in another layout."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, ConvertError, IncompleteError, open_corpus
from zb_hdf5.converters.batch_source import BatchSource, SourceShard, TokenCounts, batches_of
from zb_hdf5.converters.conversion import DEFAULT_BATCH_SIZE
from zb_hdf5.converters.least_dtype import at_least, larger_dtype
from zb_hdf5.converters.settings import Settings
from zb_hdf5.documents.document_table import documents_name, part_of
from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.errors import Remedy
from zb_hdf5.files.checked import Checked
from zb_hdf5.files.look import Look
from zb_hdf5.files.paths import RemotePath, any_path, on_failure
from zb_hdf5.files.ranges import look_by
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.format import Found
from zb_hdf5.read_as import AS_STORED, ReadAs
from zb_hdf5.spec import NO_CODEC, STREAM_LAYOUT, TokenArray, documents_path, find_bad_token, stored_dtype
from zb_hdf5.store.format_list import FORMATS, load_format
from zb_hdf5.store.found_corpus import corpus_of
from zb_hdf5.store.found_path import found_at
from zb_hdf5.store.opened_path import OpenedPath
from zb_hdf5.store.opening import shaped_batches
from zb_hdf5.store.store_corpus import StoreCorpus
from zb_hdf5.store.store_documents import StoreDocuments
from zb_hdf5.store.verify import require_digests

#: Records of a batch that is cut from a stream.


class _Range(NamedTuple):
    """The batches of one split, `start` to `stop`, which follow each other."""

    split: str
    token: int  # the first one that is stored
    start: int
    stop: int
    base: int  # the offset of its documents among the documents of all splits


class StoreSource(BatchSource):
    """The batches of a store, in their order: unchanged, or in another dtype or shape.

    A token stream without documents is cut into records.

    Parameters
    ----------
    path
        A store, or a lone file.
    backend
        The format of its files, or "auto".
    read_as
        The dataset of an HDF5 file of another program.
    dtype
        The dtype of the batches; "keep": the stored one.
    fit
        Returns the dtype to store for that of the store, where it is kept.
    windows
        Batch size and sequence length, of a stream without documents.
    found
        The path as it was found; None: look at it now.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        backend: str,
        read_as: ReadAs = AS_STORED,
        dtype: str = "keep",
        windows: tuple[int, int] | None = None,
        found: Found | None = None,
        fit: Callable[[np.dtype[Any]], np.dtype[Any]] = larger_dtype,
    ) -> None:
        path = any_path(path)
        self.paths = [path]
        self._path = path
        self._backend = backend
        self._found = found or found_at(path, backend=backend, split=None, read_as=read_as)
        batches = _opened(self._found, windows)
        corpus = batches.corpus
        self._batches = batches
        stored = fit(batches.meta.dtype) if dtype == "keep" else stored_dtype(dtype)
        self.meta = replace(batches.meta, codec=NO_CODEC, dtype=stored)  # the target has a codec of its own, or none
        self._is_same = self.meta.dtype == batches.dtype  # whether shards are copied byte for byte
        self.num_batches = batches.num_batches
        dropped = batches.dropped_tokens if corpus.is_stream else 0
        self.counts = TokenCounts(self.num_batches * self.meta.batch_tokens + dropped)
        self.counts.drop("remainder", dropped)
        self.description = {"format": backend, "path": str(path)}
        self._dataset = read_as.dataset
        self.identity = {"fingerprint": batches.fingerprint, "dataset": read_as.dataset or corpus.foreign_dataset}
        is_own = not (corpus.foreign_dataset or windows)
        self.keeps_records = is_own
        # the file and the digest of batches that are one
        self._files = {(0, self.num_batches): (corpus.path, corpus.sha256)} if is_own else {}
        self._bases: dict[str, int] = {}  # the first token of each split, in the offsets of pieces
        self._checked: set[tuple[int, int]] = set()  # whose pieces were compared with their digests
        self.has_pieces = batches.has_pieces and is_own
        if isinstance(corpus, StoreCorpus) and not corpus.is_stream:
            self._describe_shards(corpus)
        elif is_own:
            self._describe_file(corpus)
        self.document_parts = tuple(
            part._replace(path=documents_name(number)) for number, part in enumerate(self.document_parts)
        )
        self._ranges = [each for _, each in self._splits()]

    def _describe_file(self, corpus: Corpus) -> None:
        """Take the origin of a lone file, and the documents beside it."""
        self.origin = corpus.origin
        documents = documents_path(self._path)
        if documents.exists():
            self.document_files = [documents]
            self.document_parts = (part_of(documents),)

    def _describe_shards(self, corpus: StoreCorpus) -> None:
        """Take the shards and the origin of a store, and its documents."""
        index = corpus.index.without_max_token()  # the copy finds it again
        self.shuffle = index.shuffle
        self.description = index.source
        self.meta = replace(self.meta, vocab_size=index.meta.vocab_size)
        self.shards = shards = [
            SourceShard(each.num_batches, each.split, None, each.document_count if each.document_count >= 0 else None)
            for each in index.shards
        ]
        files = [(file.path, file.sha256) for file in corpus.files]
        self._files = dict(zip(self.cuts, files, strict=True))
        padding = self.num_batches * self.meta.batch_size - self.meta.total_records
        several = len({shard.split for shard in self.shards}) > 1
        if several and 0 < padding < self.num_batches * self.meta.batch_size:  # it ends each split, not the store
            for number, (path, _) in enumerate(files):
                code = load_format(FORMATS[index.shards[number].backend])
                with Look(path) as look:
                    shards[number] = shards[number]._replace(records=code.total_records(look))
        self._bases = index.document_parts()[1]
        self.document_files = [corpus.path / part.path for part in index.documents]
        self.document_parts = index.documents

    def lay_out(self, batch_size: int | None, seq_len: int | None, remainder: str) -> None:
        """Put the records, split after split in their order, into batches of another shape."""
        stored = self.meta
        length = seq_len or stored.seq_len
        size = batch_size or stored.batch_size
        if stored.seq_len % length:
            raise ArgumentError(f"{self._path}: seq_len must divide the stored {stored.seq_len:,}, found {length:,}")
        self.meta = replace(stored, batch_size=size, seq_len=length)
        self.keeps_records = self.keeps_records and length == stored.seq_len
        self._is_same = False
        parts = stored.seq_len // length
        padded = any(shard.records is not None for shard in self.shards)
        shards: list[SourceShard] = []
        ranges: list[_Range] = []
        num_batches = 0
        for old, each in self._splits():
            records = (each.stop - each.start) * stored.batch_size * parts
            count, rest = batches_of(records, self.meta, remainder, f"records of {self._path} ({each.split})")
            self.counts.drop("remainder", rest * length)
            self.keeps_records = self.keeps_records and not rest
            ranges.append(each._replace(start=num_batches, stop=num_batches + count))
            num_batches += count
            written = sum(shard.records or 0 for shard in old) * parts
            num_shards = min(len(old), count)  # as many as there were
            for start, stop in pairwise(k * count // num_shards for k in range(num_shards + 1)):
                left = min((stop - start) * size, max(0, written - start * size)) if padded else None
                shards.append(SourceShard(stop - start, each.split, left))
        self._ranges = ranges
        self.num_batches = num_batches
        counted = padded and stored.total_records
        total = sum(shard.records or 0 for shard in shards) if counted else stored.total_records * parts
        self.meta = replace(self.meta, total_records=total)
        if self.shards:
            self.shards = shards

    def _splits(self) -> Iterator[tuple[list[SourceShard], _Range]]:
        """Yield the shards of each split, which follow each other, and their range."""
        batch_tokens = self._batches.meta.batch_tokens
        start = 0
        for split, group in groupby(self.shards or [SourceShard(self.num_batches)], key=attrgetter("split")):
            shards = list(group)
            stop = start + sum(shard.num_batches for shard in shards)
            yield shards, _Range(split, start * batch_tokens, start, stop, self._bases.get(split, 0))
            start = stop

    def _places(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in `count`, number of batches, first stored token) of batches: all of one split at once."""
        done = 0
        for each in self._ranges:
            here = start + done
            if done < count and each.start <= here < each.stop:
                take = min(count - done, each.stop - here)
                yield done, take, each.token + (here - each.start) * self.meta.batch_tokens
                done += take

    def read_into(self, start: int, out: TokenArray) -> None:
        """Read consecutive batches; `ConvertError` if a token does not fit the dtype."""
        batches = self._batches
        for done, count, token in self._places(start, len(out)):
            part = out[done : done + count].reshape(-1)
            stored = part if part.dtype == batches.dtype else np.empty(part.shape, batches.dtype)
            batches.tokens.read([(token, stored)])
            if stored is part:
                continue
            bad = find_bad_token(stored, int(np.iinfo(part.dtype).max))
            if bad is not None:
                number, index = divmod(token + bad, batches.meta.batch_tokens)
                raise ConvertError(
                    f"{self._path}: token id {stored[bad]} at index {index:,} of batch {number:,} does not fit "
                    f"{part.dtype.name}",
                    remedy=Remedy.KEEP_DTYPE,
                )
            part[...] = stored

    def read_field_into(self, name: str, start: int, out: TokenArray) -> None:
        values = self._batches.field(name).tokens
        size = math.prod(out.shape[3:])
        for done, count, token in self._places(start, len(out)):
            values.read([(token * size, out[done : done + count].reshape(-1))])

    def read_pieces(self, start: int, stop: int) -> Pieces:
        """Return the pieces of batches of one split, whose offsets count in that split alone. Damage is found."""
        [(_, count, token)] = self._places(start, stop - start)
        per_batch = self._batches.meta.batch_tokens
        seq_len = self.meta.seq_len
        self._check_pieces(token // per_batch, -(-(token + count * self.meta.batch_tokens) // per_batch))
        first = token // seq_len
        pieces = self._batches.read_pieces(np.arange(first, first + count * self.meta.batch_size), seq_len)
        return pieces.moved(-next(each.base for each in self._ranges if each.start <= start < each.stop))

    def _check_pieces(self, start: int, stop: int) -> None:
        """Compare the pieces of stored batches with their digests, once: copying would hide damage."""
        documents = self._batches.corpus.record_documents
        for number, cut in enumerate(self._files):
            if isinstance(documents, StoreDocuments) and cut[0] < stop and start < cut[1] and cut not in self._checked:
                documents.check_pieces(number)
                self._checked.add(cut)

    def file_of(self, start: int, stop: int) -> tuple[Path | None, str | None]:
        return self._files.get((start, stop), (None, None)) if self._is_same else (None, None)

    def crc32_of(self, start: int, stop: int) -> npt.NDArray[np.uint32] | None:
        path, _ = self.file_of(start, stop)
        if path is None or isinstance(path, RemotePath):
            return None
        corpus = self._batches.corpus
        if path == corpus.path:
            return corpus.digests.crc32()
        number = [*self._files].index((start, stop))
        files = corpus.tokens.files
        file = files.open(number, files.starts[number])
        if isinstance(file, Checked):  # it is open, to be read
            return file.rows.all()
        with open_corpus(path, verify="none") as original:
            return original.digests.crc32()

    def check_reads(self) -> None:
        """Read with `verify="batch"`. A lone `.batch` and a foreign dataset have nothing to compare with."""
        if self._batches.corpus.is_stream:
            # a stream is compared once, where it has digests: rows are cut from it anywhere
            corpus = self._batches.corpus
            if isinstance(corpus, StoreCorpus) and corpus.index.has_digests:
                how = ReadAs(self._dataset)
                require_digests(self._path, self._found.split, how, OpenedPath.of(self._found, [corpus]))
        elif self._batches.corpus.sha256 is not None:
            with look_by(self._batches.corpus.tokens.file) as look:
                self._batches.close()
                self._batches = corpus_of(replace(self._found, verify="batch"), look).batches()


def _opened(found: Found, windows: tuple[int, int] | None) -> Batches:
    """Open a source; raise an error for a stream of documents, and for one that is not finished or has no batch."""
    path = found.path
    batch_size, seq_len = windows or (None, None)
    corpus = corpus_of(found)
    with on_failure(corpus.close):
        batches = shaped_batches(corpus, batch_size, seq_len, read_as=found.read_as)
    if isinstance(corpus, StoreCorpus) and corpus.is_stream and corpus.has_documents:
        raise ArgumentError(f"{path}: is a stream of documents, which stream-to-hdf5 and stream-to-batch pack")
    if not batches.complete:
        raise IncompleteError(f"{path}: its writer has not finished: {batches.num_batches:,} batches are committed")
    if batches.num_batches == 0:
        raise ConvertError(f"{path}: holds no batches")
    return batches


def open_stores(paths: list[Path], settings: Settings) -> StoreSource:
    """Open the store of a conversion: as it is, in another layout if one is named, or a foreign stream, cut."""
    path = paths[0]
    options = settings.layout
    read_as = settings.input.read_as
    is_relaid = options.batch_size is not None or options.seq_len is not None
    windows = None
    found = settings.looks.at(path, backend=settings.source_format, read_as=read_as)
    if found.layout == STREAM_LAYOUT:
        if options.seq_len is None:
            raise ArgumentError(f"{path}: is a token stream: pass seq_len, the tokens of a record", options=["seq_len"])
        windows = (options.batch_size or DEFAULT_BATCH_SIZE, options.seq_len)
    source = StoreSource(
        path,
        settings.source_format,
        read_as=read_as,
        dtype=settings.target.dtype,
        windows=windows,
        found=found,
        fit=partial(at_least, settings=settings),
    )
    if windows is not None:
        dropped = sum(source.counts.dropped.values())
        if dropped and options.remainder == "error":
            raise ConvertError(f"{path}: {dropped:,} tokens do not fill a batch", remedy=Remedy.DROP_REMAINDER)
    elif is_relaid:
        source.lay_out(options.batch_size, options.seq_len, options.remainder or "drop")
    elif options.remainder:
        raise ArgumentError(
            f"{path}: remainder: without batch_size or seq_len no record is left over",
            options=["remainder", "batch_size", "seq_len"],
        )
    return source
