"""Arrays of several splits as one source of batches: each split is shuffled by itself, and has batches of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from zb_hdf5.converters.array_file import ArrayFile
from zb_hdf5.converters.array_source import ArraySource
from zb_hdf5.converters.batch_plan import number_of_shards
from zb_hdf5.converters.batch_source import BatchSource, SourceShard, TokenCounts
from zb_hdf5.converters.settings import Settings, Target
from zb_hdf5.errors import ArgumentError, ConvertError
from zb_hdf5.files.field_files import require_one_dtype
from zb_hdf5.files.named_splits import named_splits, train_first
from zb_hdf5.loaders.order import IndexArray, Permutation
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.format_list import batch_format


class SplitOrder(Permutation):
    """The orders of several splits, one after the other; the records that no batch has come last.

    Parameters
    ----------
    orders
        The order of each split.
    stored
        The records of each split that batches have.
    """

    def __init__(self, orders: Sequence[Permutation], stored: Sequence[int]) -> None:
        sizes = [order.n for order in orders]
        self.n = sum(sizes)
        self._orders = list(orders)
        self._stored = np.array(stored, np.int64)
        #: The first record of each split in the source.
        self._bases = np.array([*accumulate(sizes[:-1], initial=0)], np.int64)
        runs = [*stored, *(size - count for size, count in zip(sizes, stored, strict=True))]
        #: The first position of each run: of the batches of each split, and of the rest of each.
        self._runs = np.array([*accumulate(runs[:-1], initial=0)], np.int64)

    def indices(self, positions: npt.NDArray[Any]) -> IndexArray:
        runs = self._runs.searchsorted(positions, side="right") - 1
        splits = runs % len(self._orders)
        within = positions - self._runs[runs] + np.where(runs >= len(self._orders), self._stored[splits], 0)
        return self._mapped(splits, within, lambda order, here: order.indices(here)) + self._bases[splits]

    def positions(self, indices: npt.NDArray[Any]) -> IndexArray:
        splits = self._bases.searchsorted(indices, side="right") - 1
        within = self._mapped(splits, indices - self._bases[splits], lambda order, here: order.positions(here))
        is_rest = within >= self._stored[splits]
        return within + np.where(
            is_rest, self._runs[splits + len(self._orders)] - self._stored[splits], self._runs[splits]
        )

    def _mapped(
        self, splits: IndexArray, values: IndexArray, of: Callable[[Permutation, IndexArray], IndexArray]
    ) -> IndexArray:
        """Return each value as the order of its split maps it."""
        found = np.empty(values.shape, np.int64)
        for number, order in enumerate(self._orders):
            here = splits == number
            if here.any():
                found[here] = of(order, values[here])
        return found


class SplitArrays(BatchSource):
    """Batches of the arrays of several splits, that for training first. See `BatchSource`.

    Parameters
    ----------
    parts
        The arrays of each split, by its name: of one shape and dtype.
    target
        The number or the size of the shards of the first split.
    """

    is_cut = True

    def __init__(self, parts: dict[str, ArraySource], target: Target) -> None:
        self._parts = list(parts.values())
        first = self._parts[0]
        self.paths = [path for part in self._parts for path in part.paths]
        self.shuffle = first.shuffle
        self.reorders = first.reorders
        self.pad_id = first.pad_id
        self.lacks_vocab_size = first.lacks_vocab_size
        self.suspects = first.suspects
        self.reads_alone = all(part.reads_alone for part in self._parts)
        self.description = {**first.description, "files": [str(path) for path in self.paths]}
        self.identity: dict[str, Any] = {}
        self.counts = TokenCounts()
        for part in self._parts:
            self.counts.add(part.counts)
        #: The first batch of each split, and the end; the first record of each in the source.
        self._batches = [*accumulate((part.num_batches for part in self._parts), initial=0)]
        self._records = [*accumulate((part.meta.total_records for part in self._parts), initial=0)]
        self.num_batches = self._batches[-1]
        batch_size = first.meta.batch_size
        stored = [min(part.meta.total_records, part.num_batches * batch_size) for part in self._parts]
        self.meta = replace(first.meta, total_records=sum(stored))
        orders = [part.order for part in self._parts if part.order is not None]
        if orders and not self.counts.padding_rows:  # of rows of padding in the middle there is no order
            self.order = SplitOrder(orders, stored)
        most = -(-first.num_batches // number_of_shards(first.num_batches, first.meta, target))
        self.shards = [
            shard
            for (split, part), records in zip(parts.items(), stored, strict=True)
            for shard in _shards_of(split, part, records, most)
        ]

    def _runs(self, edges: list[int], start: int, count: int) -> Iterator[tuple[ArraySource, int, slice]]:
        """Yield each part that has some of consecutive batches or records, its first one, and their place."""
        for part, first, end in zip(self._parts, edges, edges[1:], strict=False):
            begin = max(start, first)
            stop = min(start + count, end)
            if begin < stop:
                part.cold = self.cold
                yield part, begin - first, slice(begin - start, stop - start)

    def read_into(self, start: int, out: TokenArray) -> None:
        for part, first, place in self._runs(self._batches, start, len(out)):
            part.read_into(first, out[place])

    def read_field_into(self, name: str, start: int, out: TokenArray) -> None:
        for part, first, place in self._runs(self._batches, start, len(out)):
            part.read_field_into(name, first, out[place])

    def read_records(self, first: int, rows: TokenArray, name: str = "") -> None:
        for part, start, place in self._runs(self._records, first, len(rows)):
            part.read_records(start, rows[place], name)

    def probe(self, record: int) -> float | None:
        [(part, first, _)] = self._runs(self._records, record, 1)
        return part.probe(first)

    def check_reads(self) -> None:
        for part in self._parts:
            part.check_reads()


def _shards_of(split: str, part: ArraySource, records: int, most: int) -> list[SourceShard]:
    """Return the shards of a split, of at most so many batches each."""
    count = -(-part.num_batches // most)
    edges = [k * part.num_batches // count for k in range(count + 1)]
    batch_size = part.meta.batch_size
    return [
        SourceShard(stop - start, split, min(records, stop * batch_size) - start * batch_size)
        for start, stop in pairwise(edges)
    ]


def arrays_of_splits(
    files: Sequence[ArrayFile],
    settings: Settings,
    build: Callable[..., ArraySource],
    options: dict[str, Any],
) -> BatchSource:
    """Return the batches of some files, each split that their names tell by itself.

    Parameters
    ----------
    files
        The arrays.
    build
        Makes a source of some of the files, with options.
    options
        Those of an `ArraySource`.
    """
    paths = [file.path for file in files]
    told: list[str] = []
    if not settings.input.is_one_split:
        told = named_splits(paths, settings.paths)
    splits = train_first(told)
    if len(splits) > 1:
        _require_place_for_splits(splits, settings, options["val_fraction"])
    whole = build(files, **options)
    require_one_dtype(zip(paths, whole.dtypes, strict=True), settings.paths)
    if len(splits) < 2:
        return whole
    meta = whole.meta  # the dtype and the shape that fit the files of all splits
    shape = {"batch_size": meta.batch_size, "seq_len": meta.seq_len, "dtype": meta.dtype.name}
    parts = {}
    for split in splits:
        here = [file for file, each in zip(files, told, strict=True) if each == split]
        try:
            parts[split] = build(here, **{**options, **shape})
        except ConvertError as error:
            error.add_note(f"the split {split}, by the names of its files, is a part of its own")
            raise
    return SplitArrays(parts, settings.target)


def _require_place_for_splits(splits: list[str], settings: Settings, val_fraction: float) -> None:
    """Raise `ArgumentError` if a target has no splits, or another one is asked for."""
    target = settings.target
    known = " and ".join(splits)
    if val_fraction:
        raise ArgumentError(
            f"the source has the splits {known} already: leave out val_fraction, or pass split='all'",
            options=["val_fraction", "split"],
        )
    noun = ""
    row = batch_format(target.format)
    if target.live:
        noun = "a live store has"
    elif target.is_one_file:
        noun = "one file has"
    elif row is not None and not row.holds_batches:
        noun = f"{target.format} files have"
    if noun:
        raise ArgumentError(
            f"{settings.paths[0]}: has the splits {known}, and {noun} none: name the files of one, or pass split='all'",
            options=["split"],
        )
