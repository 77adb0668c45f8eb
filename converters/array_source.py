"""Arrays of tokens as a source of batches, whatever files hold them: their records, split by split, shuffled or not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.converters.array_file import ArrayFile
from zb_hdf5.converters.batch_plan import number_of_shards
from zb_hdf5.converters.batch_source import (
    BatchSource,
    SourceShard,
    TokenCounts,
    batches_of,
    out_of_range,
    require_pad_id,
)
from zb_hdf5.converters.record_places import RecordPlaces
from zb_hdf5.converters.routes import TRAIN, VAL
from zb_hdf5.converters.settings import Settings, Target
from zb_hdf5.converters.split_order import SplitOrder
from zb_hdf5.errors import ArgumentError, ConvertError, Remedy, counted
from zb_hdf5.field import Field
from zb_hdf5.files.paths import OpenFiles
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.loaders.order import Permutation, write_order
from zb_hdf5.spec import (
    StoreMeta,
    TokenArray,
    bad_token_message,
    find_bad_token,
    fitting_dtype,
    stored_dtype,
    token_limit,
)
from zb_hdf5.store.format_list import FORMATS, batch_format

#: Tokens of a record, where neither the caller nor an array of records gives a number.
DEFAULT_SEQ_LEN: Final = 512
#: No more entries of a source.
NOTHING_MORE: Final[Mapping[str, Any]] = {}


def _stored_length(files: Sequence[ArrayFile]) -> int:
    """Return the length of the records of the first array of records, or the default if there is none."""
    for file in files:
        if len(file.shape) == 2 and file.shape[1]:
            return file.shape[1]
    return DEFAULT_SEQ_LEN


def _fields_of(files: Sequence[ArrayFile]) -> tuple[Field, ...]:
    """Return the fields that all files have; `ConvertError` for one that lacks some, or has them in another dtype."""
    first = files[0].fields
    for file in files[1:]:
        if file.fields != first:
            raise ConvertError(
                f"{file.path}: expected the fields {_in_words(first)} of {files[0].path}, found "
                f"{_in_words(file.fields)}",
                remedy=Remedy.ONE_KIND,
            )
    return first


def _in_words(fields: Sequence[Field]) -> str:
    return ", ".join(f"{field.name} {field.dtype}" for field in fields) or "none"


@dataclass(frozen=True)
class _Split:
    """The records of one split, and their batches: both follow those of the split before it."""

    name: str
    first_record: int
    num_records: int
    first_batch: int
    num_batches: int
    order: Permutation | None  # stored record -> source record, both counted in the split


class ArraySource(BatchSource):
    """Batches of records from arrays, with their fields, shuffled or not. Those of a split for validation come last.

    Each split that is told is shuffled by itself, and has batches of its own.

    Parameters
    ----------
    files
        The arrays, in order.
    name
        Their format.
    batch_size
        Records of a batch.
    seq_len
        Tokens of a record; None: the length of the first array of records, or 512 if there is none.
    seed
        Decides the order of shuffled records.
    shuffle
        Whether the records are shuffled.
    dtype
        The stored dtype; "auto": the smallest one that the arrays or the vocabulary size prove to hold all ids, and
        that holds the padding.
    vocab_size
        Ids at or above it are refused; 0: those that do not fit the dtype.
    remainder
        "drop" or "pad" for records that do not fill the last batch; "error" refuses them.
    pad_id
        The token of padding.
    val_fraction
        The share of the records that is held out as the split "val": of the shuffled ones the last.
    target
        The number or the size of the shards of the first split, where there are several, or records are held out.
    described
        More entries of the source in `shards.json`.
    suspects
        The options that an id outside of the range proves wrong.
    told
        The split of each file, the files of a split after each other; (): all are of one.

    Attributes
    ----------
    dtypes
        The dtype of each file.
    """

    def __init__(
        self,
        files: Sequence[ArrayFile],
        name: str,
        *,
        batch_size: int,
        seq_len: int | None = None,
        seed: int,
        shuffle: bool = True,
        dtype: str = "auto",
        vocab_size: int = 0,
        remainder: str = "drop",
        pad_id: int = 0,
        val_fraction: float = 0.0,
        target: Target | None = None,
        described: Mapping[str, Any] = NOTHING_MORE,
        suspects: tuple[str, ...] = (),
        told: Sequence[str] = (),
    ) -> None:
        self.paths = [file.path for file in files]
        self.dtypes = [file.dtype for file in files]
        self._files = list(files)
        if not seq_len:
            seq_len = _stored_length(files)
        for file in files:
            file.require_length(seq_len)
        firsts = [next(group)[0] for _, group in groupby(enumerate(told), key=lambda each: each[1])] or [0]
        self._places = RecordPlaces([file.shape for file in files], seq_len, firsts)
        total = self._places.total
        stored = fitting_dtype(self.dtypes, vocab_size, pad_id + 1) if dtype == "auto" else stored_dtype(dtype)
        fields = _fields_of(files)
        self.lacks_vocab_size = dtype == "auto" and stored == np.uint32 and not vocab_size
        seed_of_store = seed if shuffle else 0
        self.meta = StoreMeta(batch_size, seq_len, stored, seed_of_store, total, vocab_size=vocab_size, fields=fields)
        require_pad_id(pad_id, self.meta)
        self.shuffle = "global" if shuffle else "none"
        self.reorders = shuffle
        self.reads_alone = all(file.reads_alone for file in files)
        self.description = {
            "format": name,
            "files": [str(path) for path in self.paths],
            "remainder": remainder,
            "pad_id": pad_id,
        }
        is_cut_across = self._places.cuts_files and len(firsts) == 1  # several splits were always cut so
        self.identity: dict[str, Any] = {"cut": "across files"} if is_cut_across else {}
        self.pad_id = pad_id
        self._open_files: OpenFiles[Tokens] = OpenFiles("pread")  # touched pages of a mapping count as own memory
        self.counts = TokenCounts(sum(file.num_tokens for file in files))
        self.counts.drop("file tail", self._places.num_left_over)
        self.num_batches = 0
        self._splits: list[_Split] = []
        edges = [*map(self._places.first_record, firsts), total]
        for number, (first, end) in zip(firsts, pairwise(edges), strict=True):
            order = write_order(end - first, seed) if shuffle else None
            try:
                self._add_split(told[number] if told else "", first, end - first, order, remainder)
            except ConvertError as error:
                if len(firsts) > 1:
                    error.add_note(f"the split {told[number]}, by the names of its files, is a part of its own")
                raise
        self.order = self._splits[0].order
        if len(self._splits) > 1:
            self._cut_by_split(target)
        self.suspects = suspects
        if val_fraction:
            self._hold_out(val_fraction, target)
        self.description |= described
        self._is_compared = False

    def _add_split(self, name: str, first: int, count: int, order: Permutation | None, remainder: str) -> None:
        """Decide which of the records of a split, from the first one on, are stored, and count the others."""
        meta = self.meta
        num_batches, rest = batches_of(count, meta, remainder)
        if rest and remainder == "pad":
            self.counts.padding_rows += meta.batch_size - rest
            self.counts.padded += (meta.batch_size - rest) * meta.seq_len
        else:
            self.counts.drop("remainder", rest * meta.seq_len)
        self._splits.append(_Split(name, first, count, self.num_batches, num_batches, order))
        self.num_batches += num_batches

    def _cut_by_split(self, target: Target | None) -> None:
        """Cut each of several splits into shards: none has two. Their order is that of each, one after the other."""
        batch_size = self.meta.batch_size
        stored = [min(each.num_records, each.num_batches * batch_size) for each in self._splits]
        orders = [each.order for each in self._splits if each.order is not None]
        # of rows of padding in the middle there is no order
        self.order = SplitOrder(orders, stored) if orders and not self.counts.padding_rows else None
        train = self._splits[0].num_batches
        largest = -(-train // (1 if target is None else number_of_shards(train, self.meta, target)))
        shards = []
        for each, records in zip(self._splits, stored, strict=True):
            count = -(-each.num_batches // largest)
            for start, stop in pairwise(k * each.num_batches // count for k in range(count + 1)):
                held = min(records, stop * batch_size) - start * batch_size
                shards.append(SourceShard(stop - start, each.name, held))
        self.shards = shards
        self.is_cut = True
        self.meta = replace(self.meta, total_records=sum(stored))

    def _hold_out(self, val_fraction: float, target: Target | None) -> None:
        """Cut the last batches into the shards of the split "val", and those before them into the shards of "train".

        The split for training has whole batches, so that no row of padding is in the middle.
        """
        meta = self.meta
        total = meta.total_records
        if not 0 <= val_fraction < 1:
            raise ArgumentError(
                f"val_fraction must be at least 0 and below 1, found {val_fraction}", options=["val_fraction"]
            )
        if target is not None and not FORMATS[target.format].holds_batches:
            raise ArgumentError(f"val_fraction: {target.format} files have no splits", options=["val_fraction"])
        if target is not None and target.live:
            raise ArgumentError("val_fraction: a live store has no splits", options=["val_fraction"])
        held_out = round(total * val_fraction)
        train = (total - held_out) // meta.batch_size
        if not 0 < train < self.num_batches:
            lacking = f"train needs at least {counted(meta.batch_size, 'record')}, and gets {total - held_out:,}"
            if train:
                needed = total - self.num_batches * meta.batch_size + 1
                lacking = f"val needs at least {counted(needed, 'record')} for a batch, and gets {held_out:,}"
            raise ConvertError(
                f"{self.paths[0]}: val_fraction {val_fraction} of {total:,} records in batches of {meta.batch_size} "
                f"leaves {train:,} of {self.num_batches:,} batches to train on: {lacking}: pass another one, or a "
                "smaller batch_size",
                options=["val_fraction", "batch_size"],
            )
        self.description = {**self.description, "val_fraction": val_fraction}
        num_shards = 1 if target is None else number_of_shards(train, meta, target)
        largest = -(-train // num_shards)
        self.shards = [
            *self._shards_of(TRAIN, 0, train, num_shards),
            *self._shards_of(VAL, train, self.num_batches, -(-(self.num_batches - train) // largest)),
        ]
        self.is_cut = True

    def _shards_of(self, split: str, first: int, end: int, count: int) -> list[SourceShard]:
        """Return the shards of a split, whose batches are `first` to `end`."""
        cuts = pairwise(first + k * (end - first) // count for k in range(count + 1))
        return [SourceShard(stop - start, split) for start, stop in cuts]

    def read_into(self, start: int, out: TokenArray) -> None:
        self._read_column("", start, out, self.pad_id)

    def read_field_into(self, name: str, start: int, out: TokenArray) -> None:
        padding = next(field.padding for field in self.meta.fields if field.name == name)
        self._read_column(name, start, out, padding)

    def _read_column(self, name: str, start: int, out: TokenArray, padding: Any) -> None:
        """Fill `out` with consecutive batches of the tokens (""), or of a field."""
        for split in self._splits:
            begin = max(start, split.first_batch)
            stop = min(start + len(out), split.first_batch + split.num_batches)
            if begin < stop:
                rows = out[begin - start : stop - start].reshape(-1, self.meta.seq_len)
                first = (begin - split.first_batch) * self.meta.batch_size
                count = min(len(rows), split.num_records - first)
                positions = np.arange(first, first + count)
                records = positions if split.order is None else split.order.indices(positions)
                self._gather(name, records + split.first_record, rows[:count])
                rows[count:] = padding

    def read_records(self, first: int, rows: TokenArray, name: str = "") -> None:
        self._gather(name, np.arange(first, first + len(rows)), rows)

    def probe(self, record: int) -> float | None:
        [start] = self._places.starts(np.array([record])).tolist()
        number, first, inside = next(self._places.parts(start))
        tokens = self._open("", number)
        count = inside.stop - inside.start
        if tokens.pages.ready(first) and tokens.pages.ready(first + count - 1):
            return None
        start_s = time.perf_counter()
        tokens.read([(first, np.empty(count, tokens.dtype))])
        return time.perf_counter() - start_s

    def check_reads(self) -> None:
        """Compare the files that have a digest with it, once: records are read from anywhere in them."""
        if not self._is_compared:
            for file in self._files:
                file.compare_digests()
        self._is_compared = True

    def _open(self, name: str, number: int) -> Tokens:
        """Open a column of a file: its tokens (""), or a field."""
        columns = ["", *(field.name for field in self.meta.fields)]
        first = number * len(columns)
        key = first + columns.index(name)
        return self._open_files.get(key, partial(self._open_column, name, first))

    def _open_column(self, name: str, first: int, key: int) -> Tokens:
        """Open a column of a file, whose open columns have keys from `first` on."""
        known = self._open_files.known
        num_columns = 1 + len(self.meta.fields)
        opened = next((known[each] for each in range(first, first + num_columns) if each in known), None)
        return self._files[first // num_columns].open(name, opened)

    def _gather(self, name: str, records: npt.NDArray[np.int64], rows: TokenArray) -> None:
        starts = self._places.starts(records)
        files, inside = self._places.files(starts)
        is_whole = self._places.are_whole(starts)
        for number in np.flatnonzero(np.bincount(files[is_whole])).tolist():
            here = np.flatnonzero((files == number) & is_whole)
            self._gather_from(name, number, inside[here], rows, here)
        for row in np.flatnonzero(~is_whole).tolist():
            self._join(name, int(starts[row]), rows[row])

    def _join(self, name: str, start: int, row: TokenArray) -> None:
        """Fill the row of a record whose tokens lie in several files; they are checked."""
        for number, first, inside in self._places.parts(start):
            values = np.empty(inside.stop - inside.start, self._files[number].dtype_of(name))
            self._open(name, number).read([(first, values)])
            if not name:
                self._require_ids(self._files[number], np.array([first]), values.reshape(1, -1))
            row[inside] = values

    def _gather_from(
        self, name: str, number: int, starts: npt.NDArray[np.int64], rows: TokenArray, here: npt.NDArray[np.int64]
    ) -> None:
        """Copy the records that begin at these tokens of a file to the output rows `here`; tokens are checked."""
        file = self._files[number]
        dtype = file.dtype_of(name)
        seq_len = self.meta.seq_len
        together = len(here) == int(here[-1] - here[0]) + 1
        target = slice(int(here[0]), int(here[-1]) + 1) if together else here
        direct = together and dtype == rows.dtype
        tokens = rows[target] if direct else np.empty((len(here), seq_len), dtype)
        self._take(name, number, starts, tokens)
        if not name:
            self._require_ids(file, starts, tokens)
        if not direct:
            rows[target] = tokens

    def _require_ids(self, file: ArrayFile, starts: npt.NDArray[np.int64], tokens: TokenArray) -> None:
        """Raise `ConvertError` for the first token of some rows of a file that cannot be stored."""
        bad = find_bad_token(tokens, token_limit(self.meta.dtype, self.meta.vocab_size))
        if bad is None:
            return
        row, column = divmod(bad, tokens.shape[1])
        index = file.position(int(starts[row]) + column)
        message = bad_token_message(file.path, f"index {index}", tokens[row, column], self.meta)
        raise out_of_range(message, self.suspects)

    def _take(self, name: str, number: int, starts: npt.NDArray[np.int64], out: TokenArray) -> None:
        """Fill `out` with the records of a column of one file that begin at these tokens."""
        tokens = self._open(name, number)
        seq_len = self.meta.seq_len
        if bool(np.all(np.diff(starts) == seq_len)):  # they follow each other
            tokens.read([(int(starts[0]), out.reshape(-1))])
            return
        if self.cold:
            for start in starts.tolist():
                tokens.pages.will_need(start, start + seq_len)
        tokens.gather(starts, out)


def array_options(settings: Settings) -> dict[str, Any]:
    """Return the options of an `ArraySource` as a conversion asks for them; its target decides the dtype of "auto".

    For a target of documents each record is a batch: each becomes a document, in order.
    """
    layout = settings.layout
    dtype = settings.target.dtype
    row = batch_format(settings.target.format)
    of_all = {
        "seq_len": layout.seq_len,
        "seed": layout.seed,
        "vocab_size": settings.input.vocab_size,
        "target": settings.target,
    }
    if row is None:
        return {**of_all, "dtype": dtype, "batch_size": 1, "shuffle": False, "val_fraction": 0.0}
    return {
        **of_all,
        "batch_size": layout.batch_size,
        "shuffle": layout.shuffle,
        "dtype": row.default_dtype if dtype == "auto" else dtype,
        "remainder": layout.remainder,
        "pad_id": layout.pad_id,
        "val_fraction": layout.val_fraction,
    }
