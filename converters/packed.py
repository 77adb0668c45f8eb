"""A batch store of documents: packed into rows, split after split, and shuffled; a source like any other.

The lengths of the documents alone decide which tokens of a stream go where.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, ConvertError, FormatError, StoreMeta
from zb_hdf5.converters.batch_source import (
    BatchSource,
    SourceShard,
    TokenCounts,
    batches_of,
    out_of_range,
    require_pad_id,
)
from zb_hdf5.converters.conversion import WHOLE
from zb_hdf5.converters.flat_source import without_documents
from zb_hdf5.converters.options import RowOptions, Settings, StreamOptions, Target
from zb_hdf5.converters.shard_plan import number_of_shards
from zb_hdf5.documents.document_table import DocumentTableFile, documents_name, join_documents, part_of
from zb_hdf5.documents.pieces import Pieces, concatenate, ends_of, padding, ranges
from zb_hdf5.documents.table_writer import DocumentsWriter
from zb_hdf5.files.foreign_ids import ForeignIds
from zb_hdf5.files.forks import kept_property
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import disk_errors, scratch_directory
from zb_hdf5.files.tokens import Converted, TokenRun, Tokens
from zb_hdf5.formats.flat import Headerless
from zb_hdf5.loaders.order import GlobalOrder, IndexArray, Order, SequentialOrder, write_order
from zb_hdf5.spec import (
    NO_DOCUMENT,
    SHARD_PREFIX,
    STREAM_LAYOUT,
    TokenArray,
    documents_path,
    stored_dtype,
)
from zb_hdf5.store.holders import look
from zb_hdf5.store.index import splits_of
from zb_hdf5.store.opening import open_stream
from zb_hdf5.store.verify import require_digests
from zb_hdf5.store.window_reader import WindowReader
from zb_hdf5.trainers.trainer_formats import flat_format

#: A stream is read as it is stored.
READ_AS_STORED: Final = StreamOptions()
#: Documents that best-fit considers together. Rows are filled to over 99.9 % long before this many; memory is 100 MiB.
BUFFER_DOCUMENTS: Final = 1 << 20


@dataclass(frozen=True)
class Packing:
    """Pieces of a stream of documents, and the rows that they make up.

    Piece k is the `lengths[k]` tokens from `offsets[k]` of the stream on. Row r holds the pieces `first[r]` to
    `first[r + 1]`, one after the other from column 0; the rest of the row is padding.
    """

    offsets: IndexArray
    lengths: IndexArray
    first: IndexArray

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1

    @property
    def tokens_kept(self) -> int:
        return int(self.lengths.sum())

    def documents_begun(self, document_lengths: IndexArray) -> IndexArray:
        """Return how many documents have their first token in each row; one without tokens begins in none."""
        starts = (np.cumsum(document_lengths) - document_lengths)[document_lengths > 0]
        begun = np.searchsorted(starts, self.offsets + self.lengths) - np.searchsorted(starts, self.offsets)
        return np.diff(np.concatenate([[0], np.cumsum(begun)])[self.first])


def packed_pieces(
    offsets: IndexArray, lengths: IndexArray, counts: IndexArray, edges: npt.NDArray[np.uint64], seq_len: int
) -> Pieces:
    """Return the pieces of rows: the packed ones, cut where documents begin, and the padding after them.

    Parameters
    ----------
    offsets, lengths
        The packed pieces, row after row.
    counts
        How many of them each row has.
    edges
        The starts of the documents, and the end of the last one.
    seq_len
        The tokens of a row.
    """
    stops = offsets + lengths
    first = edges.searchsorted(offsets.astype(np.uint64), side="right")
    inside = edges.searchsorted(stops.astype(np.uint64), side="left") - first  # documents that begin inside
    begins = edges[ranges(first, inside)].astype(np.int64)
    packed = np.repeat(np.arange(len(offsets)), inside)
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = np.cumsum(lengths) - lengths
    columns = columns - columns[(np.cumsum(counts) - counts)[rows]] if len(rows) else columns
    used = np.bincount(rows, lengths, len(counts)).astype(np.int64)
    padded = np.flatnonzero(used < seq_len)
    begin_positions = rows[packed] * seq_len + columns[packed] + begins - offsets[packed]
    padding_positions = padded * seq_len + used[padded]
    positions = np.concatenate([rows * seq_len + columns, begin_positions, padding_positions])
    no_documents = np.full(len(padded), NO_DOCUMENT, np.uint64)
    tokens = np.concatenate([offsets.astype(np.uint64), begins.astype(np.uint64), no_documents])
    # of several documents that begin at one position only the last has tokens
    positions, order = np.unique(positions, return_index=True)
    ends = ends_of(np.bincount(positions // seq_len, minlength=len(counts)))
    return Pieces(ends, (positions % seq_len).astype(np.uint32), tokens[order], seq_len)


def concat(document_lengths: IndexArray, seq_len: int) -> Packing:
    """Cut the stream every `seq_len` tokens: rows and documents straddle each other, only the last tokens are lost."""
    first = np.arange(int(document_lengths.sum()) // seq_len + 1)
    return Packing(first[:-1] * seq_len, np.full(len(first) - 1, seq_len), first)


def pad(document_lengths: IndexArray, seq_len: int) -> Packing:
    """Give each document a row: longer ones are cropped, shorter ones are padded, empty ones have no row."""
    kept = np.flatnonzero(document_lengths)
    offsets = (np.cumsum(document_lengths) - document_lengths)[kept]
    return Packing(offsets, np.minimum(document_lengths[kept], seq_len), np.arange(len(kept) + 1))


def best_fit(document_lengths: IndexArray, seq_len: int) -> Packing:
    """Fill rows with whole documents, best fit decreasing; no token is lost, and every row begins where a piece begins.

    Only a document that is longer than a row is split, into full rows and a last piece that is packed like a document.
    See Ding et al. 2024, "Fewer truncations improve language modeling".
    """
    starts = np.cumsum(document_lengths) - document_lengths
    windows = [
        _pack_window(starts[k : k + BUFFER_DOCUMENTS], document_lengths[k : k + BUFFER_DOCUMENTS], seq_len)
        for k in range(0, len(document_lengths), BUFFER_DOCUMENTS)
    ]
    offsets, lengths, sizes = map(np.concatenate, zip((np.empty(0, np.int64),) * 3, *windows, strict=True))
    return Packing(offsets, lengths, np.concatenate([[0], np.cumsum(sizes)]))


PACKINGS: Final[dict[str, Callable[[IndexArray, int], Packing]]] = {"concat": concat, "best-fit": best_fit, "pad": pad}


def _pack_window(starts: IndexArray, lengths: IndexArray, seq_len: int) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Return the pieces' offsets and lengths in row order, and how many pieces each row has."""
    offsets, sizes = _split(starts, lengths, seq_len)
    rows = _fit_rows(sizes, seq_len)
    order = np.lexsort((offsets, -sizes, rows))  # the longest first: every document begins as early as it can
    num_rows = int(rows.max(initial=-1)) + 1
    return offsets[order], sizes[order], np.bincount(rows, minlength=num_rows).astype(np.int64)


def _split(starts: IndexArray, lengths: IndexArray, seq_len: int) -> tuple[IndexArray, IndexArray]:
    """Cut documents into pieces of at most `seq_len` tokens, none of them empty."""
    counts = -(-lengths // seq_len)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.repeat(starts, counts) + number * seq_len
    return offsets, np.minimum(np.repeat(lengths, counts) - number * seq_len, seq_len)


def _fit_rows(sizes: IndexArray, seq_len: int) -> IndexArray:
    """Return the row of each piece: largest first, each into the fullest row that it fits.

    Pieces of one size are alike, and so are rows with the same free columns, so whole groups are placed at once: the
    loop runs a few times per distinct size, whatever the number of pieces.
    """
    rows = np.empty(len(sizes), np.int64)
    by_size = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(sizes, return_counts=True)
    open_rows = _OpenRows(seq_len)
    done = 0
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        pieces = by_size[done : done + count]
        done += count
        while len(pieces):
            free, taken, each = open_rows.take(size, len(pieces))
            placed = np.repeat(taken, each)[: len(pieces)]
            rows[pieces[: len(placed)]] = placed
            short = len(taken) * each - len(placed)  # pieces that the last row could still hold
            open_rows.put(taken[:-1] if short else taken, free - each * size)
            if short:
                open_rows.put(taken[-1:], free - (each - short) * size)
            pieces = pieces[len(placed) :]
    return rows


class _OpenRows:
    """Rows by their free columns."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len
        self._num_rows = 0
        self._by_free: dict[int, list[npt.NDArray[Any]]] = {}
        self._has = np.zeros(seq_len + 1, bool)

    def take(self, size: int, count: int) -> tuple[int, IndexArray, int]:
        """Return a number of free columns, rows with so many, and how many pieces of `size` each of them holds.

        They are the fullest rows that hold one; new ones if there are none. All together hold `count` pieces, or as
        many as they can.
        """
        free = size + int(self._has[size:].argmax())
        if not self._has[free]:
            each = self._seq_len // size
            new = np.arange(self._num_rows, self._num_rows - (-count // each))
            self._num_rows += len(new)
            return self._seq_len, new, each
        each = free // size
        rows = np.concatenate(self._by_free.pop(free))
        self._has[free] = False
        wanted = -(-count // each)
        self.put(rows[wanted:], free)
        return free, rows[:wanted], each

    def put(self, rows: IndexArray, free: int) -> None:
        """Note the free columns of `rows`."""
        if len(rows) and free:
            self._by_free.setdefault(free, []).append(rows)
            self._has[free] = True


class PackedRows:
    """The rows of one split of a stream, read from its documents in any order. Picklable: the plan is in `folder`.

    They are stored in this `order`, in `num_batches` batches from `first_batch` on. `table` is the file of the
    documents, and `documents` are how many of them begin in each row: it stays in this process.

    Parameters
    ----------
    store
        The documents of the split.
    split
        Its name.
    folder
        The folder of the plan and of the table.
    number
        The number of the split.
    meta
        The shape and dtype of the batches.
    options
        The packing and the shuffle.
    pad_id
        The token of padding.
    """

    def __init__(
        self,
        store: WindowReader,
        split: str,
        folder: Path,
        number: int,
        meta: StoreMeta,
        options: RowOptions,
        pad_id: int,
    ) -> None:
        self.split = split
        self.first_batch = 0
        self.num_batches = 0
        self._seq_len = meta.seq_len
        self._batch_size = meta.batch_size
        self._columns = {field.name: (store.field(field.name).tokens, field.size) for field in store.meta.fields}
        self._padding: dict[str, Any] = {field.name: field.padding for field in store.meta.fields} | {"": pad_id}
        tokens = store.tokens
        if meta.vocab_size and meta.vocab_size != store.meta.vocab_size:
            tokens = ForeignIds(tokens, meta)
        elif tokens.dtype != meta.dtype:
            tokens = Converted(tokens, meta.dtype)
        self._columns[""] = tokens, 1
        self._plan_paths = [
            folder / f"{SHARD_PREFIX}plan-{split}-{name}.npy" for name in ("offsets", "lengths", "first")
        ]
        self.table = folder / documents_name(number)
        with DocumentsWriter(self.table) as writer:
            if store.documents is not None:
                join_documents(store.documents.open_files(), writer)
            if writer.token_count != store.num_tokens:
                raise FormatError(
                    f"the split {split!r}: expected documents of {store.num_tokens:,} tokens, found "
                    f"{writer.token_count:,}: tokens belong to no document; write the stream again"
                )
            writer.publish(split=split)
        edges = self._table.offsets.astype(np.int64)
        document_lengths = edges[1:] - edges[:-1]
        packed = PACKINGS[options.packing](document_lengths, meta.seq_len)
        for path, array in zip(self._plan_paths, (packed.offsets, packed.lengths, packed.first), strict=True):
            _save(path, array)
        self.num_rows = packed.num_rows
        self.order: Order
        if options.shuffle:
            self.order = write_order(self.num_rows, options.seed)
        else:
            self.order = SequentialOrder(self.num_rows)
        self.tokens_kept = packed.tokens_kept
        self.tokens_cropped = store.num_tokens - packed.tokens_kept
        self.documents = packed.documents_begun(document_lengths)

    def __getstate__(self) -> dict[str, Any]:
        return {k: value for k, value in self.__dict__.items() if k not in ("documents", "_table", "_packing")}

    @kept_property
    def _table(self) -> DocumentTableFile:
        return DocumentTableFile(self.table)

    @kept_property
    def _packing(self) -> Packing:
        return Packing(*(np.load(path, mmap_mode="r").view(np.ndarray) for path in self._plan_paths))

    def rows_of(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the rows of some batches, by their numbers in the store; none is beyond the last row."""
        first, end = ((batch - self.first_batch) * self._batch_size for batch in (start, stop))
        return self.order.indices(np.arange(first, min(end, self.num_rows)))

    def tokens_in(self, rows: npt.NDArray[np.int64]) -> int:
        """Return how many tokens, padding aside, some rows hold."""
        pieces, _ = self._pieces_of(rows)
        return int(self._packing.lengths[pieces].sum())

    def gather_into(self, name: str, rows: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out`, shape `(n, seq_len, ...)`, with rows in any order, and padding: tokens (""), or a field."""
        plan = self._packing
        seq_len = out.shape[1]
        pieces, counts = self._pieces_of(rows)
        lengths = plan.lengths[pieces]
        before = np.cumsum(lengths) - lengths
        in_row = np.repeat(np.arange(len(rows)), counts)
        columns = before - before[np.cumsum(counts) - counts][in_row]
        if int(lengths.sum()) < len(out) * seq_len:
            out[...] = self._padding[name]
        column, size = self._columns[name]
        starts = (in_row * seq_len + columns) * size
        _copy_runs(column, plan.offsets[pieces] * size, out.reshape(-1), starts, starts + lengths * size)

    def read_pieces(self, rows: npt.NDArray[np.int64]) -> Pieces:
        """Return the parts of documents in some rows: a packed piece is cut where a document begins."""
        plan = self._packing
        packed, counts = self._pieces_of(rows)
        return packed_pieces(plan.offsets[packed], plan.lengths[packed], counts, self._table.offsets, self._seq_len)

    def _pieces_of(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the pieces of some rows, in order, and how many each row has."""
        first = self._packing.first
        begin = first[rows]
        counts = first[rows + 1] - begin
        return ranges(begin, counts), counts


def _copy_runs(column: Tokens, offsets: IndexArray, out: TokenArray, starts: IndexArray, stops: IndexArray) -> None:
    """Copy runs of a column from `offsets` on to `out`, each to its (start, stop) there.

    Documents are short: to read each by itself would take three times as long as to copy it from a mapping.
    """
    firsts = column.starts
    files = np.searchsorted(firsts, offsets, side="right") - 1
    mapped = {file: column.open_file(file, firsts[file]).stored_ids() for file in np.unique(files).tolist()}
    waiting: list[TokenRun] = []
    runs = zip(files.tolist(), offsets.tolist(), starts.tolist(), stops.tolist(), strict=True)
    for file, offset, start, stop in runs:
        stored = mapped[file]
        begin = offset - firsts[file]
        ids = None if stored is None else stored.ids[begin : begin + stop - start]
        if stored is None or ids is None or len(ids) < stop - start or stored.has_others(ids):
            waiting.append((offset, out[start:stop]))
        else:
            out[start:stop] = ids
    column.read(waiting)


def _save(path: Path, array: npt.NDArray[np.int64]) -> None:
    """Write a `.npy` file. On a full disk numpy's own writer names neither the file nor the reason."""
    with disk_errors(path), open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array))


class PackedSource(BatchSource):
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
    stream
        How the stream is read: the stored dtype ("keep": that of the stream), the size of the vocabulary, and the ids
        of files without a header.
    description
        The source of a stream that was written for the conversion; None: the stream is the source.
    paths
        The files of that source.
    counts
        The counts of that source, to which the tokens that packing drops and pads are added.
    """

    order: GlobalOrder | None = None  # of more than one split there is no order of all rows
    has_pieces = is_cut = True

    def __init__(
        self,
        path: Path,
        folder: Path,
        options: RowOptions,
        target: Target,
        stream: StreamOptions = READ_AS_STORED,
        *,
        description: dict[str, Any] | None = None,
        paths: Sequence[Path] = (),
        counts: TokenCounts | None = None,
    ) -> None:
        stores = {split: open_stream(path, split=split, **stream.names) for split in splits_of(path)}
        store = next(iter(stores.values()))
        if not store.has_documents:
            raise _no_documents(path, store)
        self._path = path
        self._checked = counts is not None
        self._has_digests = all(each.index.has_digests for each in stores.values())
        self._options = options
        self.meta = StoreMeta(
            batch_size=options.batch_size,
            seq_len=options.row_tokens,
            dtype=store.dtype if stream.dtype == "keep" else stored_dtype(stream.dtype),
            seed=options.seed if options.shuffle else 0,
            document_count=sum(each.document_count for each in stores.values()),
            vocab_size=stream.vocab_size or store.index.without_max_token().meta.vocab_size,
            tokenizer=store.meta.tokenizer,
            fields=store.meta.fields,
        )
        self._pad_id = max(0, store.index.meta.boundary_token_id) if options.pad_id is None else options.pad_id
        require_pad_id(self._pad_id, self.meta)
        files = [file for each in stores.values() for file in each.paths]
        self.paths = [*paths, *files, *(table for table in map(documents_path, files) if table.exists())]
        self.shuffle = "global" if options.shuffle else "none"
        self.reorders = options.shuffle
        how = {"packing": options.packing, "pad_id": self._pad_id}
        own = {"format": "stream", "files": [str(path)], **stream.described}
        self.description = {**(description or own), **how}
        self._names = stream.names
        self.suspects = stream.suspects
        self.counts = counts or TokenCounts(sum(each.num_tokens for each in stores.values()))
        self.num_batches = 0
        self._splits: list[PackedRows] = []
        for split, each in stores.items():
            self._pack(PackedRows(each, split, folder, len(self._splits), self.meta, options, self._pad_id))
        self.document_files = [part.table for part in self._splits]
        self.document_parts = tuple(part_of(path) for path in self.document_files)
        self.shards = self._cut(target)
        self.meta = replace(self.meta, total_records=sum(shard.records or 0 for shard in self.shards))
        self.identity = {
            **how,
            "splits": {part.split: part.num_batches for part in self._splits},
            "fingerprints": [each.token_fingerprint for each in stores.values()],
        }

    def check_reads(self) -> None:
        """Compare the whole stream with its digests, once: rows are cut from its chunks anywhere."""
        if not self._checked and self._has_digests:
            require_digests(self._path, headerless=Headerless.of(**self._names))
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


def _no_documents(path: Path, store: WindowReader) -> ArgumentError:
    """Return the error for a stream that tells no documents apart."""
    cure = "cut records with hdf5-to-hdf5"
    if flat_format(store.backend) is not None:
        cure = "pass boundary_token_id, the token between them, or source_format='bin' to cut records"
    return ArgumentError(
        f"{path}: expected a stream with documents, found none{without_documents(store)}: {cure}",
        options=["boundary_token_id", "source_format"],
    )


@contextmanager
def open_packed(paths: list[Path], settings: Settings) -> Generator[PackedSource]:
    """Open a `PackedSource` whose plan is in `<destination>.plan.partial/` inside the block; each job has its own."""
    path = local_path(paths[0])
    destination = settings.target.path
    part = settings.work.shard_range
    suffix = ".plan" if part == WHOLE else f".plan-{part.job}"
    stream = settings.of(StreamOptions)
    if look(path, **stream.names).layout != STREAM_LAYOUT:
        raise ArgumentError(f"{path}: expected a token stream of documents, found batches")
    with scratch_directory(destination.with_name(destination.name + suffix)) as folder:
        yield PackedSource(path, folder, settings.of(RowOptions), settings.target, stream)
