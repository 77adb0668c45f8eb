"""A batch store of documents: packed into rows, split after split, and shuffled; a source like any other."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5 import ArgumentError, ConvertError, FormatError, ShardIndex, StoreMeta
from zb_hdf5.converters.batch_target import is_one_file, refuse_bad_destination
from zb_hdf5.converters.batch_target import part_of as job_of
from zb_hdf5.converters.conversion import Conversion
from zb_hdf5.converters.journal import WHOLE
from zb_hdf5.converters.packing import PACKINGS, Packing, pieces_of
from zb_hdf5.converters.shard import DEFAULT_SHARD_BYTES
from zb_hdf5.converters.source import Source, TokenCounts, batches_of, require_pad_id
from zb_hdf5.documents.document_table import DocumentFile, documents_name, documents_path, part_of
from zb_hdf5.documents.document_writer import DocumentsWriter, join_documents
from zb_hdf5.documents.pieces import Pieces, concatenate, padding, ranges
from zb_hdf5.errors import Remedy
from zb_hdf5.files.paths import local_path
from zb_hdf5.files.publishing import disk_errors, scratch_directory
from zb_hdf5.files.tokens import Converted
from zb_hdf5.loaders.order import GlobalOrder, Order, SequentialOrder, write_order
from zb_hdf5.spec import DEFAULT_SPLIT, INDEX_NAME, SHARD_PREFIX, TokenArray, stored_dtype
from zb_hdf5.store.opening import open_tokens, stream_format
from zb_hdf5.store.shards import StoreReader
from zb_hdf5.store.verify import require_digests


class PackedRows:
    """The rows of one split of a stream, read from its documents in any order. Picklable: the plan lies in `folder`.

    `table` is that of the documents, `documents` how many of them begin in each row; it stays in this process.
    """

    def __init__(
        self, store: StoreReader, split: str, folder: Path, number: int, meta: StoreMeta, packing: str, pad_id: int
    ) -> None:
        self._pad_id, self._seq_len = pad_id, meta.seq_len
        self._columns = {field.name: (store.field(field.name).tokens, field.size) for field in store.meta.fields}
        tokens = store.tokens
        self._columns[""] = (tokens if tokens.dtype == meta.dtype else Converted(tokens, meta.dtype)), 1
        self._table: DocumentFile | None = None
        self._prefix = folder / f"{SHARD_PREFIX}plan-{split}"
        with DocumentsWriter(folder / documents_name(number)) as writer:
            if store.documents is not None:
                join_documents(store.documents.open_files(), writer)
            if writer.token_count != store.num_tokens:
                raise FormatError(
                    f"the split {split!r}: expected documents of {store.num_tokens:,} tokens, found "
                    f"{writer.token_count:,}: tokens belong to no document; write the stream again"
                )
            self.table = writer.publish(split)
        edges = self._edges().astype(np.int64)
        document_lengths = edges[1:] - edges[:-1]
        packed = PACKINGS[packing](document_lengths, meta.seq_len)
        for name in ("offsets", "lengths", "first"):
            _save(self._plan_path(name), getattr(packed, name))
        self.num_rows = packed.num_rows
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
        column, size = self._columns[name]
        flat, starts = out.reshape(-1), (in_row * seq_len + columns) * size
        offsets, stops = plan.offsets[pieces] * size, starts + lengths * size
        runs = zip(offsets.tolist(), starts.tolist(), stops.tolist(), strict=True)
        column.read([(offset, flat[start:stop]) for offset, start, stop in runs])

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
    """Batches of the packed documents of an HDF5 stream, or of a store of streams: each split in its own order.

    The shards of the first split are those that were asked for. Plans and document tables are kept in `folder`. A
    stream that was written for the conversion has the `description` and the `paths` of its source, and `token_counts`,
    to which the tokens that packing drops and pads are added; it is not compared with its digests.
    """

    order: GlobalOrder | None = None  # of more than one split there is no order of all rows
    has_pieces = True

    def __init__(
        self,
        path: Path,
        folder: Path,
        options: Conversion,
        *,
        description: dict[str, Any] | None = None,
        paths: Sequence[Path] = (),
        token_counts: TokenCounts | None = None,
    ) -> None:
        dtype = options.dtype or "keep"
        if stream_format(path) != "hdf5":
            raise ArgumentError(f"{path}: expected a token stream of documents in HDF5, found none")
        stores = {split: open_tokens(path, split=split) for split in _splits(path)}
        store = next(iter(stores.values()))
        if not store.has_documents:
            raise ArgumentError(f"{path}: expected a stream with documents, found none: cut records with hdf5-to-hdf5")
        self._path, self._checked = path, token_counts is not None
        self.meta = StoreMeta(
            options.batch_size or 0, options.seq_len or 0, store.dtype if dtype == "keep" else stored_dtype(dtype),
            (options.seed or 0) if options.shuffle else 0, 0, sum(each.document_count for each in stores.values()),
            store.meta.vocab_size, store.meta.tokenizer, fields=store.meta.fields,
        )  # fmt: skip
        self._pad_id = max(0, store.index.meta.boundary_token_id) if options.pad_id is None else options.pad_id
        require_pad_id(self._pad_id, self.meta)
        files = [file for each in stores.values() for file in each.paths]
        self.paths = [*paths, *files, *(table for table in map(documents_path, files) if table.exists())]
        self.shuffle, self.reorders = "global" if options.shuffle else "none", bool(options.shuffle)
        how = {"packing": options.packing, "pad_id": self._pad_id}
        self.description = description or {"format": "stream", "files": [str(path)], **how}
        self._options = replace(options, source=None, progress=None, engine=None)  # picklable
        self.token_counts = token_counts or TokenCounts(sum(each.num_tokens for each in stores.values()))
        self._splits = [self._pack(number, split, folder, stores[split]) for number, split in enumerate(stores)]
        self.document_files = [part.rows.table.path for part in self._splits]
        self.document_parts = tuple(part_of(path) for path in self.document_files)
        self.num_batches = sum(part.num_batches for part in self._splits)
        self.shard_batches, self.shard_splits = self._cut()
        self.shard_records, self.shard_documents = self._count()
        self.meta = replace(self.meta, total_records=sum(self.shard_records))
        fingerprints = [each.token_fingerprint for each in stores.values()]
        self.identity = {**how, "splits": self.batches_of_split, "fingerprints": fingerprints}

    def check_reads(self) -> None:
        """Compare the whole stream with its digests, once: rows are cut from its chunks anywhere."""
        if not self._checked:
            require_digests(self._path)
        self._checked = True

    @property
    def batches_of_split(self) -> dict[str, int]:
        """The number of batches of each split."""
        return {part.split: part.num_batches for part in self._splits}

    def _pack(self, number: int, split: str, folder: Path, store: StoreReader) -> SplitRows:
        """Pack the documents of a split into rows, and count the tokens that are in none."""
        options, meta = self._options, self.meta
        rows = PackedRows(store, split, folder, number, meta, options.packing or "concat", self._pad_id)
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


@contextmanager
def open_stream(paths: list[Path], conversion: Conversion) -> Generator[PackedSource]:
    """Open a `PackedSource` whose plan lies in `<destination>.plan.partial/` inside the block; each job has its own."""
    [path], part = paths, job_of(conversion)
    destination = local_path(conversion.destination)  # the plan of the rows lies in the same folder
    refuse_bad_destination([local_path(path)], destination)
    several = bool(conversion.num_shards or conversion.shard_bytes) or part != WHOLE
    is_one_file(conversion.target, destination, several=several)
    plan = destination.with_name(destination.name + (".plan" if part == WHOLE else f".plan-{part.job}"))
    with scratch_directory(plan) as folder:
        yield PackedSource(local_path(path), folder, conversion)


def _splits(path: Path) -> list[str]:
    """Return the splits of a stream, that for training first."""
    folder = path.parent if path.name == INDEX_NAME else path
    if not (folder / INDEX_NAME).exists():
        return [DEFAULT_SPLIT]
    found = dict.fromkeys(shard.split for shard in ShardIndex.load(folder).shards)
    return sorted(found, key=lambda split: split != DEFAULT_SPLIT)
