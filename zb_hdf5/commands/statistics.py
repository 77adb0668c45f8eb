"""The contents of a store in numbers: counts of tokens, lengths of documents, packing, sources and duplicates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.commands.rows import scan_pieces
from zb_hdf5.documents.document_table import DocumentTable
from zb_hdf5.errors import ArgumentError
from zb_hdf5.formats.batches import Batches
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.store_corpus import StoreCorpus

Counts = npt.NDArray[np.int64]

#: Ids from here on are counted together: no tokenizer has them, and a table of them would fill the memory.
MAX_COUNTED_ID: Final = 1 << 24
#: Groups of equal units that are kept, by how many tokens they repeat, and tokens that are kept of each.
MAX_GROUPS: Final = 10
BEGINNING_TOKENS: Final = 48
#: Bytes of batches, and tokens of a stream, that are read together.
READ_BYTES: Final = 1 << 20
STREAM_TOKENS: Final = 1 << 18
#: Odd factors of the hash. The hash of a unit is a sum, so its pieces may come in any order.
_MIXERS: Final = np.array([0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9], np.uint64)


class DuplicateGroup(NamedTuple):
    """Units of the same tokens."""

    units: list[int]  # their numbers, ascending
    length: int
    beginning: TokenArray  # their first tokens

    @property
    def repeated(self) -> int:
        return (len(self.units) - 1) * self.length


class SplitStatistics(NamedTuple):
    """The numbers of one of several splits; all but `tokens`, `lengths` and `padding` may be numbers of a sample."""

    name: str
    tokens: int
    counts: Counts  # of each id, without padding
    lengths: Counts | None  # of the documents that begin in it
    padding: int  # tokens of padding


class Statistics(NamedTuple):
    """The numbers of a store; all but `num_tokens`, `num_units`, `lengths` and `packing` may be numbers of a sample."""

    unit: str  # "document" where documents are stored, "file" of `.npy` files, else "record"
    num_tokens: int
    num_units: int
    tokens: int
    units: int
    counts: Counts  # of each id, without padding
    uncounted: int  # ids of `MAX_COUNTED_ID` and above
    lengths: Counts | None
    packing: dict[str, int] | None  # see `Units`
    sources: list[dict[str, Any]]  # "name" ("": not known), "documents" and "tokens" of each
    duplicates: int  # units that repeat an earlier one, and their tokens
    duplicate_tokens: int
    duplicate_groups: list[DuplicateGroup]  # the `MAX_GROUPS` that repeat most tokens
    compared: bool  # whether what was read was compared with its crc32
    splits: list[SplitStatistics]  # of several; none of a lone one


class Units:
    """The tokens of a store as runs of units: documents, `.npy` files, or records of batches.

    Attributes
    ----------
    unit
        "document", "file" or "record".
    starts, units, within
        The position of each run, its unit (-1: padding), and its offset in the unit.
    sizes
        Tokens of each unit.
    cuts
        Positions where groups of whole units begin and end.
    packing
        The counts of packed documents: tokens of "padding"; documents in several pieces ("split"), held in part
        ("cropped") and "absent"; tokens "lost".
    step
        Tokens that are read at once.
    compared
        Whether they are compared with their crc32.
    splits
        Positions where the tokens of a split begin, and its name; of one split, or of a lone file, none.
    """

    def __init__(self, opened: Batches, sampled: bool) -> None:
        corpus = opened.corpus
        found = corpus.compared_tokens()
        self._tokens = opened.tokens if found is None else found
        self._owned = None if found is opened.tokens else found
        self.compared = found is not None
        self.splits = _splits_of(opened)
        self.packing: dict[str, int] | None = None
        if isinstance(corpus, StoreCorpus) and corpus.is_stream:
            self.unit = "document" if corpus.has_documents or corpus.backend == "hdf5" else "file"
            self.step = STREAM_TOKENS
            edges = corpus.doc_offsets.view(np.int64)
            if edges[-1] < corpus.num_tokens:  # a killed writer left tokens after its last document
                edges = np.append(edges, corpus.num_tokens)
        else:
            self.unit = "record"
            together = 1 if sampled else max(1, READ_BYTES // opened.meta.batch_bytes)
            self.step = opened.meta.batch_tokens * together
            edges = np.arange(opened.num_records + 1) * opened.seq_len
        self.sizes = np.diff(edges)
        self.num_tokens = int(edges[-1])
        begins = edges[np.searchsorted(edges, np.arange(0, self.num_tokens, self.step))]
        self.cuts = np.unique(np.append(begins, self.num_tokens))
        self.units = np.flatnonzero(self.sizes)
        self.starts = edges[self.units]
        self.within = np.zeros_like(self.units)
        if opened.has_padding and corpus.document_table is not None:
            self._use_documents(opened, corpus.document_table)

    def _use_documents(self, batches: Batches, table: DocumentTable) -> None:
        """Make each document of batches a unit, whichever records hold its pieces."""
        self.unit = "document"
        begins = table.offsets.view(np.int64)
        offsets, self.starts, lengths = np.concatenate([*scan_pieces(batches)], axis=1)
        self.units = table.number_of(offsets.view(np.uint64))
        self.sizes = np.diff(begins)
        is_text = self.units >= 0
        self.within = np.where(is_text, offsets - begins[self.units], 0)
        units = self.units[is_text]
        held = np.bincount(units, lengths[is_text], len(self.sizes)).astype(np.int64)
        missing = np.maximum(self.sizes - held, 0)
        self.packing = {
            "padding": int(lengths[~is_text].sum()),
            "split": int(np.count_nonzero(np.bincount(units) > 1)),
            "cropped": int(np.count_nonzero((held > 0) & (missing > 0))),
            "absent": int(np.count_nonzero((held == 0) & (missing > 0))),
            "lost": int(missing.sum()),
        }

    def close(self) -> None:
        """Close what this has opened, and not the batches."""
        if self._owned is not None:
            self._owned.close()

    def splits_in(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """Yield the number of each split that has tokens of a range, and their place in the range."""
        begins = np.array([begin for begin, _ in self.splits], np.int64)
        first = int(begins.searchsorted(start, side="right")) - 1
        edges = [start, *(begin for begin, _ in self.splits if start < begin < stop), stop]
        for number, (at, end) in enumerate(pairwise(edges), first):
            yield number, slice(at - start, end - start)

    def split_parts(self) -> list[tuple[str, int, Counts | None, int]]:
        """Return the name of each split, its tokens, the lengths of the documents that begin in it, and its padding."""
        if not self.splits:
            return []
        begins = np.array([begin for begin, _ in self.splits], np.int64)
        sizes = np.diff(begins, append=self.num_tokens)
        of_run = begins.searchsorted(self.starts, side="right") - 1
        lengths = np.diff(self.starts, append=self.num_tokens)
        units, first_runs = np.unique(self.units, return_index=True)
        parts = []
        for number, (_, name) in enumerate(self.splits):
            here = units[(of_run[first_runs] == number) & (units >= 0)]
            padding = int(lengths[(of_run == number) & (self.units < 0)].sum())
            parts.append((name, int(sizes[number]), None if self.unit == "record" else self.sizes[here], padding))
        return parts

    def read(self, start: int, stop: int) -> Iterator[TokenArray]:
        """Yield the tokens of a range, in arrays that fit into memory."""
        for at in range(start, stop, self.step):
            tokens = np.empty(min(self.step, stop - at), self._tokens.dtype)
            self._tokens.read([(at, tokens)])  # compared with the stored crc32
            yield tokens

    def runs(self, start: int, stop: int) -> tuple[Counts, Counts, Counts]:
        """Return the runs of a range, cut at its ends: their lengths, units, and offsets in these."""
        first = self.starts.searchsorted(start, side="right") - 1
        last = self.starts.searchsorted(stop)
        starts = np.maximum(self.starts[first:last], start)
        within = self.within[first:last] + starts - self.starts[first:last]
        return np.diff(starts, append=stop), self.units[first:last], within


def _splits_of(opened: Batches) -> list[tuple[int, str]]:
    """Return where the tokens of each split begin, and its name; [] of one split, or of a file without any."""
    corpus = opened.corpus
    names = corpus.file_splits
    found = [
        (begin, name)
        for number, (begin, name) in enumerate(zip(corpus.file_edges[:-1], names, strict=True))
        if not number or name != names[number - 1]
    ]
    return found if len(found) > 1 and len({name for _, name in found}) == len(found) else []


def measure(opened: Batches, sample_batches: int | None, progress: Callable[[int, int], None]) -> Statistics:
    """Count the tokens of a file or store, or of evenly spread batches, and find repeated units.

    It takes 40 bytes of memory for each unit, 24 for each run of one, and 300 for each unit that may be repeated.
    """
    if not opened.num_batches:
        raise ArgumentError(f"{opened.path}: expected tokens to count, found none; wait until its writer has committed")
    with closing(Units(opened, sample_batches is not None)) as source:
        return _measured(opened, source, sample_batches, progress)


def _measured(
    opened: Batches, source: Units, sample_batches: int | None, progress: Callable[[int, int], None]
) -> Statistics:
    """Return the numbers of `measure`."""
    groups = _sampled(source.cuts, sample_batches)
    total = int(np.diff(groups).sum())
    tally = _Tally(source)
    for at, stop in groups.tolist():
        for tokens in source.read(at, stop):
            tally.add(at, tokens)
            progress(len(tokens), total)
            at += len(tokens)
    whole = tally.seen == source.sizes
    compared = np.flatnonzero(whole & (source.sizes > 0))
    duplicates = _find_duplicates(source, compared, tally.hashes, lambda count, again: progress(count, total + again))
    return Statistics(
        unit=source.unit,
        num_tokens=source.num_tokens,
        num_units=len(source.sizes),
        tokens=total,
        units=int(np.count_nonzero(whole)),
        counts=tally.counts,
        uncounted=int(tally.seen.sum() - tally.counts.sum()),
        lengths=None if source.unit == "record" else source.sizes,
        packing=source.packing,
        sources=_sources(opened.corpus.document_table if source.unit == "document" else None),
        duplicates=sum(len(group.units) - 1 for group in duplicates),
        duplicate_tokens=sum(group.repeated for group in duplicates),
        duplicate_groups=duplicates[:MAX_GROUPS],
        compared=source.compared,
        splits=[
            SplitStatistics(name, size, counted, lengths, padding)
            for counted, (name, size, lengths, padding) in zip(tally.of_splits, source.split_parts(), strict=True)
        ],
    )


def _sampled(cuts: Counts, sample_batches: int | None) -> Counts:
    """Return the first and the last position of each group between two cuts, shape (groups, 2), or of some of them."""
    groups = np.stack([cuts[:-1], cuts[1:]], axis=1)
    count = min(sample_batches or len(groups), len(groups))
    return groups[np.linspace(0, len(groups) - 1, count).round().astype(np.int64)]


class _Tally:
    """Counts of the tokens that were read.

    Attributes
    ----------
    counts
        The number of each id, padding and very large ids aside.
    of_splits
        The same for each split.
    hashes, seen
        The hash of each unit, and the number of its tokens, as far as they were read.
    """

    def __init__(self, source: Units) -> None:
        self._source = source
        self.counts = np.zeros(0, np.int64)
        self.of_splits = [self.counts for _ in source.splits]
        self.hashes = np.zeros(len(source.sizes), np.uint64)
        self.seen = np.zeros(len(source.sizes), np.int64)

    def add(self, at: int, tokens: TokenArray) -> None:
        """Count the tokens from a position on."""
        source = self._source
        stop = at + len(tokens)
        lengths, units, within = source.runs(at, stop)
        is_text = units >= 0
        is_counted = is_text.repeat(lengths) & (tokens >= 0) & (tokens < MAX_COUNTED_ID)
        self.counts = _with(self.counts, tokens[is_counted])
        if source.splits:
            for number, place in source.splits_in(at, stop):
                self.of_splits[number] = _with(self.of_splits[number], tokens[place][is_counted[place]])
        np.add.at(self.hashes, units[is_text], _hashes(tokens, lengths, within)[is_text])
        np.add.at(self.seen, units[is_text], lengths[is_text])


def _with(counts: Counts, tokens: TokenArray) -> Counts:
    """Return counts of ids with the counts of more tokens."""
    sums = np.bincount(tokens.astype(np.int64), minlength=len(counts))
    sums[: len(counts)] += counts
    return sums


def _hashes(tokens: TokenArray, lengths: Counts, within: Counts) -> npt.NDArray[np.uint64]:
    """Return a number for each run. The hash of a unit is the sum of the hashes of its runs, in any order."""
    starts = np.cumsum(lengths) - lengths
    mixed = (np.arange(len(tokens)) - (starts - within).repeat(lengths)).view(np.uint64)
    mixed *= _MIXERS[0]
    mixed += tokens.astype(np.uint64) * _MIXERS[1]
    mixed ^= mixed >> np.uint64(31)
    mixed *= _MIXERS[2]
    mixed ^= mixed >> np.uint64(29)
    return np.add.reduceat(mixed, starts)


def _find_duplicates(
    source: Units, units: Counts, hashes: npt.NDArray[np.uint64], progress: Callable[[int, int], None]
) -> list[DuplicateGroup]:
    """Return groups of equal ones of some units: of those whose hashes are equal, the tokens are compared by digest.

    `progress` is called with the tokens that are read for it since the last call, and with all of these.
    """
    _, numbers, counts = np.unique(hashes[units], return_inverse=True, return_counts=True)
    runs = np.flatnonzero(np.isin(source.units, units[counts[numbers] > 1]))
    runs = runs[np.lexsort((source.within[runs], source.units[runs]))]
    stops = np.append(source.starts[1:], source.num_tokens)
    total = int((stops[runs] - source.starts[runs]).sum())
    found = dict[bytes, DuplicateGroup]()
    for unit, of_unit in groupby(runs.tolist(), lambda run: int(source.units[run])):
        digest = blake2b(digest_size=16)
        beginning = np.empty(0, np.int64)
        for run in of_unit:
            for tokens in source.read(int(source.starts[run]), int(stops[run])):
                progress(len(tokens), total)
                digest.update(tokens)
                beginning = np.append(beginning, tokens[: BEGINNING_TOKENS - len(beginning)])
        group = DuplicateGroup([], int(source.sizes[unit]), beginning)
        found.setdefault(digest.digest(), group).units.append(unit)
    groups = [group for group in found.values() if len(group.units) > 1]
    return sorted(groups, key=lambda group: (-group.repeated, group.units[0]))


def _sources(table: DocumentTable | None) -> list[dict[str, Any]]:
    """Count the documents of each source, and their tokens; none if no source has a name."""
    if table is None:
        return []
    totals = defaultdict[str, Counts](lambda: np.zeros(2, np.int64))
    for file in table.each_file():
        names = [*file.sources, ""]
        lengths = np.diff(file.offsets.view(np.int64))
        numbers = np.minimum(file.sources_of(0, len(lengths)), len(names) - 1)
        sums = [np.bincount(numbers, weights, len(names)) for weights in (None, lengths)]
        for name, documents, tokens in zip(names, *sums, strict=True):
            totals[name] += np.array([documents, tokens], np.int64)
    found = [{"name": name, "documents": int(n), "tokens": int(size)} for name, (n, size) in totals.items() if n]
    is_known = any(each["name"] for each in found)
    return sorted(found, key=lambda each: (-each["tokens"], each["name"])) if is_known else []
