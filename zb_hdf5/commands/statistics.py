"""The contents of a store in numbers: counts of tokens, lengths of documents, packing, sources and duplicates."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import blake2b
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.commands.rows import scan_pieces
from zb_hdf5.documents.document_table import DocumentTable
from zb_hdf5.errors import ArgumentError
from zb_hdf5.files.paths import any_path
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.opening import is_stream, open_reader
from zb_hdf5.store.shards import StoreReader, open_tokens

Counts = npt.NDArray[np.int64]

#: Ids from here on are counted together: no tokenizer has them, and a table of them would fill the memory.
MAX_COUNTED_ID: Final = 1 << 24
#: Groups of equal units that are kept, by how many tokens they repeat, and tokens that are kept of each.
MAX_GROUPS: Final = 10
BEGINNING_TOKENS: Final = 48
#: Bytes of batches, and tokens of a stream, that are read together.
GROUP_BYTES: Final = 1 << 20
STREAM_TOKENS: Final = 1 << 18
#: Odd factors of the hash. The hash of a unit is a sum, so its pieces may come in any order.
_MIXERS: Final = np.array([0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9], np.uint64)


class Packing(NamedTuple):
    """Tokens of padding; documents in several pieces, held in part, and absent from a batch store; tokens not in it."""

    padding: int
    split: int
    cropped: int
    absent: int
    lost: int


class DuplicateGroup(NamedTuple):
    """Units of the same tokens: their numbers, ascending, their length, and their first tokens."""

    units: Counts
    length: int
    beginning: TokenArray

    @property
    def repeated(self) -> int:
        return (len(self.units) - 1) * self.length


class Duplicates(NamedTuple):
    """Units that repeat an earlier one, their tokens, and the `MAX_GROUPS` groups that repeat most tokens."""

    units: int
    tokens: int
    groups: list[DuplicateGroup]


class SourceCount(NamedTuple):
    """Documents and tokens of one source; `name` is "" if it is not known."""

    name: str
    documents: int
    tokens: int


class Statistics(NamedTuple):
    """The numbers of a store; all but `num_tokens`, `num_units`, `lengths` and `packing` may be those of a sample."""

    unit: str  # "document" where documents are stored, "file" of `.npy` files, else "record"
    num_tokens: int
    num_units: int
    tokens: int
    units: int
    counts: Counts  # of each id, without padding
    uncounted: int  # ids of `MAX_COUNTED_ID` and above
    lengths: Counts | None
    duplicates: Duplicates
    packing: Packing | None
    sources: list[SourceCount]


class Part(NamedTuple):
    """Tokens and the runs that they consist of: the start of each, its unit (-1: none), and its offset in the unit."""

    tokens: TokenArray
    starts: Counts
    units: Counts
    within: Counts

    @property
    def lengths(self) -> Counts:
        return np.diff(self.starts, append=len(self.tokens))


class Units:
    """Tokens as they are stored, and the units in them: documents, `.npy` files, or records of batches.

    They are runs of one unit each: the start of a run, its unit (-1: padding), and its offset in the unit. `sizes` are
    the tokens of the units, and `cuts` the positions where groups of whole units begin and end.
    """

    def __init__(self, opened: BatchReader, sampled: bool) -> None:
        self._tokens, meta = opened.tokens, opened.meta
        self.table: DocumentTable | None = None
        self.packing: Packing | None = None
        if isinstance(opened, StoreReader) and opened.backend == "stream":
            is_npy = opened.paths[0].suffix == ".npy"
            self.unit, self.table = ("file", None) if is_npy else ("document", opened.documents)
            edges, self.step = opened.doc_offsets.view(np.int64), STREAM_TOKENS
            if edges[-1] < opened.num_tokens:  # a killed writer left tokens behind its last document
                edges = np.append(edges, opened.num_tokens)
        else:
            self.unit, edges = "record", np.arange(opened.num_records + 1) * opened.seq_len
            self.step = meta.batch_tokens * (1 if sampled else max(1, GROUP_BYTES // meta.batch_bytes))
        self.sizes, self.num_tokens = np.diff(edges), int(edges[-1])
        begins = edges[np.searchsorted(edges, np.arange(0, self.num_tokens, self.step))]
        self.cuts = np.unique(np.append(begins, self.num_tokens))
        self.units = np.flatnonzero(self.sizes)
        self.starts, self.within = edges[self.units], np.zeros_like(self.units)
        if opened.has_padding and opened.documents is not None:
            self._use_documents(opened, opened.documents)

    def _use_documents(self, reader: BatchReader, table: DocumentTable) -> None:
        """Make each document of batches a unit, whichever records hold its pieces."""
        self.unit, self.table, begins = "document", table, table.offsets.view(np.int64)
        offsets, self.starts, lengths = np.concatenate([*scan_pieces(reader)], axis=1)
        self.units, self.sizes = table.number_of(offsets.view(np.uint64)), np.diff(begins)
        is_text = self.units >= 0
        self.within = np.where(is_text, offsets - begins[self.units], 0)
        units, count = self.units[is_text], len(self.sizes)
        held = np.bincount(units, lengths[is_text], count).astype(np.int64)
        missing = np.maximum(self.sizes - held, 0)
        absent = int(np.count_nonzero((held == 0) & (missing > 0)))
        split, cropped = int(np.count_nonzero(np.bincount(units) > 1)), int(np.count_nonzero(missing)) - absent
        self.packing = Packing(int(lengths[~is_text].sum()), split, cropped, absent, int(missing.sum()))

    def read(self, start: int, stop: int) -> Iterator[TokenArray]:
        """Yield the tokens of a range, in arrays that fit into memory."""
        for at in range(start, stop, self.step):
            tokens = np.empty(min(self.step, stop - at), self._tokens.dtype)
            self._tokens.read([(at, tokens)])
            yield tokens

    def part(self, tokens: TokenArray, at: int) -> Part:
        """Return tokens from `at` on with their runs."""
        first, last = self.starts.searchsorted(at, side="right") - 1, self.starts.searchsorted(at + len(tokens))
        starts = self.starts[first:last] - at
        within = self.within[first:last] - np.minimum(starts, 0)
        return Part(tokens, np.maximum(starts, 0), self.units[first:last], within)


def measure(
    path: str | os.PathLike[str],
    *,
    sample_batches: int | None = None,
    progress: Callable[[int, int], None] = lambda tokens, total: None,
) -> Statistics:
    """Count the tokens of a file or store, or of evenly spread batches, and find repeated units."""
    # memory: 40 bytes for each unit, 24 for each run of one, and 300 for each unit that may be repeated
    path = any_path(path)
    with open_tokens(path) if is_stream(path) else open_reader(path) as opened:
        if not opened.num_batches:
            raise ArgumentError(f"{path}: expected tokens to count, found none; wait until its writer has committed")
        return _measure(Units(opened, sample_batches is not None), sample_batches, progress)


def _measure(source: Units, sample_batches: int | None, progress: Callable[[int, int], None]) -> Statistics:
    groups = np.stack([source.cuts[:-1], source.cuts[1:]], axis=1)
    if sample_batches is not None and sample_batches < len(groups):
        groups = groups[np.linspace(0, len(groups) - 1, sample_batches).round().astype(np.int64)]
    total = int((groups[:, 1] - groups[:, 0]).sum())
    hashes, seen = np.zeros(len(source.sizes), np.uint64), np.zeros(len(source.sizes), np.int64)
    counts = np.zeros(0, np.int64)
    for at, stop in groups.tolist():
        for tokens in source.read(at, stop):
            part = source.part(tokens, at)
            is_text, lengths = part.units >= 0, part.lengths
            counts = _count(counts, tokens if is_text.all() else tokens[is_text.repeat(lengths)])
            np.add.at(hashes, part.units[is_text], _hashes(part)[is_text])
            np.add.at(seen, part.units[is_text], lengths[is_text])
            progress(len(tokens), total)
            at += len(tokens)
    whole = seen == source.sizes
    return Statistics(
        unit=source.unit,
        num_tokens=source.num_tokens,
        num_units=len(source.sizes),
        tokens=total,
        units=int(np.count_nonzero(whole)),
        counts=counts,
        uncounted=int(seen.sum() - counts.sum()),
        lengths=None if source.unit == "record" else source.sizes,
        duplicates=_find_duplicates(source, np.flatnonzero(whole & (source.sizes > 0)), hashes),
        packing=source.packing,
        sources=_sources(source.table),
    )


def _count(counts: Counts, tokens: TokenArray) -> Counts:
    """Return the counts of ids with those of `tokens` added."""
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= MAX_COUNTED_ID):
        tokens = tokens[(tokens >= 0) & (tokens < MAX_COUNTED_ID)]
    found = np.bincount(tokens.astype(np.int64), minlength=len(counts))
    found[: len(counts)] += counts
    return found


def _hashes(part: Part) -> npt.NDArray[np.uint64]:
    """Return a number for each run. The hash of a unit is the sum of those of its runs, in any order."""
    positions = np.arange(len(part.tokens)) - (part.starts - part.within).repeat(part.lengths)
    mixed = positions.view(np.uint64)
    mixed *= _MIXERS[0]
    mixed += part.tokens.astype(np.uint64) * _MIXERS[1]
    mixed ^= mixed >> np.uint64(31)
    mixed *= _MIXERS[2]
    mixed ^= mixed >> np.uint64(29)
    return np.add.reduceat(mixed, part.starts)


def _find_duplicates(source: Units, units: Counts, hashes: npt.NDArray[np.uint64]) -> Duplicates:
    """Compare those of some units whose hashes are equal, by the digests of their tokens."""
    _, numbers, counts = np.unique(hashes[units], return_inverse=True, return_counts=True)
    suspected = np.zeros(len(hashes) + 1, bool)  # padding is the last one
    suspected[units[counts[numbers] > 1]] = True
    runs = np.flatnonzero(suspected[source.units])
    runs = runs[np.lexsort((source.within[runs], source.units[runs]))]
    stops = np.append(source.starts[1:], source.num_tokens)
    found = dict[bytes, tuple[TokenArray, list[int]]]()
    for unit, of_unit in groupby(runs.tolist(), lambda run: int(source.units[run])):
        digest, beginning = blake2b(digest_size=16), np.empty(0, np.int64)
        for run in of_unit:
            for tokens in source.read(int(source.starts[run]), int(stops[run])):
                digest.update(tokens)
                beginning = np.append(beginning, tokens[: BEGINNING_TOKENS - len(beginning)])
        found.setdefault(digest.digest(), (beginning, []))[1].append(unit)
    groups = [
        DuplicateGroup(np.array(group), int(source.sizes[group[0]]), beginning)
        for beginning, group in found.values()
        if len(group) > 1
    ]
    copies, repeated = sum(len(each.units) - 1 for each in groups), sum(each.repeated for each in groups)
    return Duplicates(
        copies, repeated, heapq.nsmallest(MAX_GROUPS, groups, lambda each: (-each.repeated, each.units[0]))
    )


def _sources(table: DocumentTable | None) -> list[SourceCount]:
    """Count the documents of each source, and their tokens."""
    documents, tokens = Counter[str](), Counter[str]()
    for file in table.open_files() if table else []:
        with closing(file):
            names, lengths = [*file.sources, ""], np.diff(file.offsets.view(np.int64))
            numbers = np.minimum(file.sources_of(0, len(lengths)), len(names) - 1)
            for counter, weights in ((documents, None), (tokens, lengths)):
                sums = np.bincount(numbers, weights, len(names)).astype(np.int64).tolist()
                counter.update(dict(zip(names, sums, strict=True)))
    found = [SourceCount(name, count, tokens[name]) for name, count in documents.items() if count]
    named = any(source.name for source in found)
    return sorted(found, key=lambda source: (-source.tokens, source.name)) if named else []
