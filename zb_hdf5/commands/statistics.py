"""What a store consists of: how often each token occurs, how long documents are, and which of them are there twice."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.commands.units import Counts, Packed, Packing, Part, Records, Stream, Units
from zb_hdf5.errors import ArgumentError
from zb_hdf5.files.paths import any_path
from zb_hdf5.formats.documents import DocumentTable
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.kinds import is_stream
from zb_hdf5.store.opening import open_reader
from zb_hdf5.store.tokens import MmapTokenStore

#: Ids from here on are counted together: no tokenizer has them, and a table of them would fill the memory.
MAX_COUNTED_ID: Final = 1 << 24
#: Groups of equal units that are kept, by how many tokens they repeat.
MAX_GROUPS: Final = 10
HASHES_AT_ONCE: Final = 1 << 20
#: Tokens that are kept of units that are there twice.
BEGINNING_TOKENS: Final = 48
#: Tokens whose hashes are taken together: they stay in the cache of the processor.
HASHED_TOKENS: Final = 1 << 14
#: Odd factors of the hash. The hash of a unit is a sum, so its pieces may come in any order.
_MIXERS: Final = np.array([0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9], np.uint64)


class DuplicateGroup(NamedTuple):
    """Units of the same tokens: their numbers, ascending, the tokens of each of them, and the first ones of these."""

    units: Counts
    length: int
    beginning: TokenArray


class Duplicates(NamedTuple):
    """Units that repeat an earlier one.

    Attributes
    ----------
    units, tokens
        How many repeat an earlier unit, and their tokens.
    groups
        The groups that repeat most tokens, those first; `MAX_GROUPS` at most.
    """

    units: int
    tokens: int
    groups: list[DuplicateGroup]


class SourceCount(NamedTuple):
    """What came from one source; `name` is "" where it is not known."""

    name: str
    documents: int
    tokens: int


class Statistics(NamedTuple):
    """What was found in a store, or in an even sample of it.

    Attributes
    ----------
    unit
        What duplicates are looked for among: "document" where documents are stored, "file" of `.npy` files, else
        "record".
    num_tokens, num_units
        Of the whole store.
    tokens, units
        Tokens that were looked at, and units that were looked at whole.
    counts
        int64: how often each id occurs, up to the largest one. Padding is not counted where it is known.
    uncounted
        Tokens whose id is negative, or `MAX_COUNTED_ID` or more.
    lengths
        int64: tokens of each document, of all of them; None where that is not stored.
    duplicates
        Among the units that were looked at.
    packing
        Of batches with documents; None of others.
    sources
        What all documents came from, those of most tokens first; empty where that is not stored.
    """

    unit: str
    num_tokens: int
    num_units: int
    tokens: int
    units: int
    counts: Counts
    uncounted: int
    lengths: Counts | None
    duplicates: Duplicates
    packing: Packing | None
    sources: list[SourceCount]


def measure(
    path: str | os.PathLike[str],
    *,
    sample_batches: int | None = None,
    progress: Callable[[int, int], None] = lambda tokens, total: None,
) -> Statistics:
    """Count the tokens of a file or store, and find what is in it twice.

    Needs 40 bytes of memory for each record, or each document where documents are stored, and some MiB; of batches with
    documents 40 more for each piece of those that may be there twice. Duplicates are found by 64-bit hashes, and then
    compared token by token.

    Parameters
    ----------
    sample_batches
        Look at so many batches only, evenly spread (of a stream: stretches of whole documents, of about 262,144
        tokens). Lengths of documents, sources and packing are always those of all.
    progress
        Called with the tokens just read, and how many there are to read.

    Raises
    ------
    ArgumentError
        If `sample_batches` is not positive, or there are no tokens.
    FormatError, IncompleteError
        If the store cannot be opened.
    """
    if sample_batches is not None and sample_batches < 1:
        raise ArgumentError(f"sample_batches must be at least 1, found {sample_batches}")
    path = any_path(path)
    if is_stream(path):
        with MmapTokenStore(path) as store:
            _require_tokens(path, store.num_tokens)
            return _measure(Stream(store), sample_batches, progress)
    with open_reader(path) as reader:
        _require_tokens(path, reader.num_batches)
        table = reader.documents
        if reader.has_pieces and isinstance(table, DocumentTable):
            return _measure(Packed(reader, table), sample_batches, progress)
        return _measure(Records(reader), sample_batches, progress)


def _require_tokens(path: Path, count: int) -> None:
    if not count:
        raise ArgumentError(f"{path}: expected tokens to count, found none; wait until its writer has committed some")


def _measure(source: Units, sample_batches: int | None, progress: Callable[[int, int], None]) -> Statistics:
    cuts = source.groups(sample_batches is not None)
    groups = np.stack([cuts[:-1], cuts[1:]], axis=1)
    if sample_batches is not None and sample_batches < len(groups):
        groups = groups[np.linspace(0, len(groups) - 1, sample_batches).round().astype(np.int64)]
    total = int((groups[:, 1] - groups[:, 0]).sum())
    hashes, seen, counter = np.zeros(len(source.sizes), np.uint64), np.zeros(len(source.sizes), np.int64), _Counter()
    for start, stop in groups.tolist():
        for part in source.read(start, stop):
            is_text, lengths = part.units >= 0, part.lengths
            counter.add(part.tokens if is_text.all() else part.tokens[is_text.repeat(lengths)])
            np.add.at(hashes, part.units[is_text], _hashes(part)[is_text])
            np.add.at(seen, part.units[is_text], lengths[is_text])
            progress(len(part.tokens), total)
    whole = seen == source.sizes
    del seen  # 8 bytes for each unit
    return Statistics(
        source.unit,
        source.num_tokens,
        len(source.sizes),
        total,
        int(np.count_nonzero(whole)),
        counter.counts,
        counter.uncounted,
        source.lengths,
        _find_duplicates(source, whole & (source.sizes > 0), hashes),
        source.packing,
        _sources(source.table),
    )


class _Counter:
    def __init__(self) -> None:
        self.counts, self.uncounted = np.zeros(0, np.int64), 0

    def add(self, tokens: TokenArray) -> None:
        if not len(tokens):
            return
        if tokens.min() < 0 or tokens.max() >= MAX_COUNTED_ID:
            countable = (tokens >= 0) & (tokens < MAX_COUNTED_ID)
            self.uncounted += len(tokens) - int(np.count_nonzero(countable))
            tokens = tokens[countable]
        found = np.bincount(tokens.astype(np.int64), minlength=len(self.counts))
        found[: len(self.counts)] += self.counts
        self.counts = found


def _hashes(part: Part) -> npt.NDArray[np.uint64]:
    """Return a number for each run. Those of all runs of a unit, in any order, add up to the hash of the unit."""
    sums, bases = np.zeros(len(part.starts), np.uint64), part.starts - part.within
    for at in range(0, len(part.tokens), HASHED_TOKENS):
        tokens = part.tokens[at : at + HASHED_TOKENS].astype(np.uint64)
        first, last = np.searchsorted(part.starts, [at + 1, at + len(tokens)]).tolist()
        starts = np.maximum(part.starts[first - 1 : last] - at, 0)
        places = np.arange(at, at + len(tokens)) - bases[first - 1 : last].repeat(np.diff(starts, append=len(tokens)))
        mixed = places.view(np.uint64)
        mixed *= _MIXERS[0]
        tokens *= _MIXERS[1]
        mixed += tokens
        mixed ^= np.right_shift(mixed, 31, out=tokens)
        mixed *= _MIXERS[2]
        mixed ^= np.right_shift(mixed, 29, out=tokens)
        sums[first - 1 : last] += np.add.reduceat(mixed, starts)
    return sums


def _find_duplicates(source: Units, whole: npt.NDArray[np.bool_], hashes: npt.NDArray[np.uint64]) -> Duplicates:
    """Compare those units of `whole` whose hashes are equal."""
    ordered = np.sort(hashes[whole])
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    found = [np.empty(0, np.int64)]
    for start in range(0, len(hashes) if len(repeated) else 0, HASHES_AT_ONCE):
        part = hashes[start : start + HASHES_AT_ONCE]
        places = np.minimum(np.searchsorted(repeated, part), len(repeated) - 1)
        found.append(np.flatnonzero((repeated[places] == part) & whole[start : start + len(part)]) + start)
    units = np.concatenate(found)
    by_hash = np.argsort(hashes[units], kind="stable")
    alike, ids = units[by_hash], hashes[units[by_hash]]
    count = tokens = 0
    best: list[tuple[int, int, Counts]] = []
    if len(units):
        source.find(units)
    for candidates in np.split(alike, np.flatnonzero(ids[1:] != ids[:-1]) + 1) if len(alike) else []:
        for group in _equal_units(source, candidates):
            repeated_tokens = (len(group) - 1) * int(source.sizes[group[0]])
            count, tokens = count + len(group) - 1, tokens + repeated_tokens
            heapq.heappush(best, (repeated_tokens, -int(group[0]), group))
            if len(best) > MAX_GROUPS:
                heapq.heappop(best)
    groups = []
    for _, _, group in sorted(best, key=lambda item: item[:2], reverse=True):
        beginning = next(source.tokens_of(int(group[0])))[:BEGINNING_TOKENS].copy()
        groups.append(DuplicateGroup(group, int(source.sizes[group[0]]), beginning))
    return Duplicates(count, tokens, groups)


def _equal_units(source: Units, units: Counts) -> Iterator[Counts]:
    classes: list[list[int]] = []
    for unit in units.tolist():
        for members in classes:
            if _same(source, members[0], unit):
                members.append(unit)
                break
        else:
            classes.append([unit])
    yield from (np.array(members) for members in classes if len(members) > 1)


def _same(source: Units, one: int, other: int) -> bool:
    pairs = zip(source.tokens_of(one), source.tokens_of(other), strict=False)
    return bool(source.sizes[one] == source.sizes[other]) and all(np.array_equal(a, b) for a, b in pairs)


def _sources(table: DocumentTable | None) -> list[SourceCount]:
    """Count the documents of each source, and their tokens."""
    documents, tokens = Counter[str](), Counter[str]()
    for file in table.open_files() if table else []:
        with closing(file):
            names = [*file.sources, ""]
            for start in range(0, len(file.offsets) - 1, HASHES_AT_ONCE):
                offsets = file.offsets[start : start + HASHES_AT_ONCE + 1].astype(np.int64)
                numbers = np.minimum(file.sources_of(start, start + len(offsets) - 1), len(names) - 1)
                counts = np.bincount(numbers, minlength=len(names))
                sums = np.bincount(numbers, np.diff(offsets), len(names)).astype(np.int64)
                documents.update(dict(zip(names, counts.tolist(), strict=True)))
                tokens.update(dict(zip(names, sums.tolist(), strict=True)))
    found = [SourceCount(name, documents[name], tokens[name]) for name in documents if documents[name]]
    if not any(source.name for source in found):
        return []
    return sorted(found, key=lambda source: (-source.tokens, source.name))
