"""What a store consists of: how often each token occurs, how long documents are, and which of them are there twice."""

from __future__ import annotations

import hashlib
import heapq
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import GROUP_BYTES, BatchReader
from zb_hdf5.errors import ArgumentError
from zb_hdf5.opening import open_reader
from zb_hdf5.spec import TokenArray
from zb_hdf5.store.kinds import is_stream
from zb_hdf5.store.tokens import MmapTokenStore

Counts = npt.NDArray[np.int64]

#: Ids from here on are counted together: no tokenizer has them, and a table of them would fill the memory.
MAX_COUNTED_ID: Final = 1 << 24
#: Groups of equal units that are kept, by how many tokens they repeat.
MAX_GROUPS: Final = 10
#: Tokens of a stream that are looked at together; the "batch" of its sample.
STRETCH_TOKENS: Final = 1 << 18
HASH_BYTES: Final = 8
HASHES_AT_ONCE: Final = 1 << 20


class DuplicateGroup(NamedTuple):
    """Units of the same tokens: their numbers, ascending, and the tokens of each of them."""

    units: Counts
    length: int


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


class Statistics(NamedTuple):
    """What was found in a store, or in an even sample of it.

    Attributes
    ----------
    unit
        What duplicates are looked for among: "document" of a stream, "file" of `.npy` files, "record" of batches.
    num_tokens, num_units
        Of the whole store.
    tokens, units
        Those that were looked at.
    counts
        int64: how often each id occurs, up to the largest one.
    uncounted
        Tokens whose id is negative, or `MAX_COUNTED_ID` or more.
    lengths
        int64: tokens of each document, of all of them; None where that is not stored.
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


class _Source(Protocol):
    """Tokens, and the units in them."""

    unit: str
    num_tokens: int
    num_units: int
    lengths: Counts | None

    def cuts(self, sampled: bool) -> Counts:
        """Return the numbers of the units where groups of them begin, and where the last one ends."""

    def bounds(self, first: int, last: int) -> Counts:
        """Return the tokens where the units from `first` begin, and where the one before `last` ends."""

    def read(self, start: int, stop: int) -> TokenArray:
        """Return tokens between two bounds, or of a part of one unit."""


class _Batches:
    def __init__(self, reader: BatchReader) -> None:
        self._reader, self._row = reader, reader.seq_len
        self.unit = "record"
        self.lengths: Counts | None = None
        self.num_units = reader.num_records
        self.num_tokens = self.num_units * self._row

    def cuts(self, sampled: bool) -> Counts:
        batches = 1 if sampled else max(1, GROUP_BYTES // self._reader.meta.batch_bytes)
        return np.append(np.arange(0, self.num_units, batches * self._reader.batch_size), self.num_units)

    def bounds(self, first: int, last: int) -> Counts:
        return np.arange(first, last + 1) * self._row

    def read(self, start: int, stop: int) -> TokenArray:
        shape, size = self._reader.meta.shape, self._reader.meta.batch_tokens
        if start % size or stop % size:
            return self._reader.read_record(start // self._row)
        tokens = np.empty(((stop - start) // size, *shape), self._reader.dtype)
        self._reader.read_batches_into(start // size, tokens)
        return tokens.reshape(-1)


class _Stream:
    def __init__(self, store: MmapTokenStore) -> None:
        self._store, self._offsets = store, store.doc_offsets.view(np.int64)
        if self._offsets[-1] < store.num_tokens:  # a killed writer left tokens behind its last document
            self._offsets = np.append(self._offsets, store.num_tokens)
        self.unit = "file" if store.paths[0].suffix == ".npy" else "document"
        self.lengths: Counts | None = np.diff(self._offsets)
        self.num_units, self.num_tokens = len(self._offsets) - 1, store.num_tokens

    def cuts(self, sampled: bool) -> Counts:
        places = np.searchsorted(self._offsets, np.arange(0, self.num_tokens, STRETCH_TOKENS), side="left")
        return np.unique(np.append(places, self.num_units))

    def bounds(self, first: int, last: int) -> Counts:
        return self._offsets[first : last + 1]

    def read(self, start: int, stop: int) -> TokenArray:
        return self._store.get_slice(start, stop)


def measure(
    path: str | os.PathLike[str],
    *,
    sample_batches: int | None = None,
    progress: Callable[[int, int], None] = lambda tokens, total: None,
) -> Statistics:
    """Count the tokens of a file or store, and find what is in it twice.

    Needs 16 bytes of memory for each record that is looked at, 32 for each document of a stream, and some MiB.
    Duplicates are found by 64-bit hashes, and then compared token by token.

    Parameters
    ----------
    sample_batches
        Look at so many batches only, evenly spread (of a stream: stretches of whole documents, of about 262,144
        tokens). Lengths of documents are always those of all.
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
    path = Path(path)
    if is_stream(path):
        with MmapTokenStore(path) as store:
            _require_tokens(path, store.num_tokens)
            return _measure(_Stream(store), sample_batches, progress)
    with open_reader(path) as reader:
        _require_tokens(path, reader.num_batches)
        return _measure(_Batches(reader), sample_batches, progress)


def _require_tokens(path: Path, count: int) -> None:
    if not count:
        raise ArgumentError(f"{path}: expected tokens to count, found none; wait until its writer has committed some")


def _measure(source: _Source, sample_batches: int | None, progress: Callable[[int, int], None]) -> Statistics:
    cuts = source.cuts(sample_batches is not None)
    groups = np.stack([cuts[:-1], cuts[1:]], axis=1)
    if sample_batches is not None and sample_batches < len(groups):
        groups = groups[np.linspace(0, len(groups) - 1, sample_batches).round().astype(np.int64)]
    sizes = [int(np.diff(source.bounds(int(a), int(b))[[0, -1]])[0]) for a, b in groups]
    counter, hashes = _Counter(), [np.empty(0, "<u8")]
    for (first, last), size in zip(groups.tolist(), sizes, strict=True):
        hashes.append(_scan(source, source.bounds(first, last), counter))
        progress(size, sum(sizes))
    every = np.concatenate(hashes)
    del hashes  # 8 bytes for each unit
    return Statistics(
        source.unit,
        source.num_tokens,
        source.num_units,
        sum(sizes),
        len(every),
        counter.counts,
        counter.uncounted,
        source.lengths,
        _find_duplicates(source, groups, every),
    )


class _Counter:
    """Counts ids."""

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


def _scan(source: _Source, bounds: Counts, counter: _Counter) -> npt.NDArray[np.uint64]:
    """Count the tokens of consecutive units, and return the hash of each unit."""
    start, stop = int(bounds[0]), int(bounds[-1])
    digests = []
    if len(bounds) == 2:  # one unit may be larger than the memory
        digest = hashlib.blake2b(digest_size=HASH_BYTES)
        for tokens in _parts(source, start, stop):
            counter.add(tokens)
            digest.update(memoryview(tokens).cast("B"))
        digests.append(digest.digest())
    else:
        tokens = np.ascontiguousarray(source.read(start, stop))
        counter.add(tokens)
        data = memoryview(tokens).cast("B")
        places = ((bounds - start) * tokens.itemsize).tolist()
        digests = [hashlib.blake2b(data[a:b], digest_size=HASH_BYTES).digest() for a, b in pairwise(places)]
    return np.frombuffer(b"".join(digests), "<u8")


def _parts(source: _Source, start: int, stop: int) -> Iterator[TokenArray]:
    """Yield the tokens of one unit, in parts that fit into memory; a record is never cut."""
    step = stop - start if source.unit == "record" else STRETCH_TOKENS
    for at in range(start, stop, max(1, step)):
        yield np.ascontiguousarray(source.read(at, min(at + step, stop)))


def _find_duplicates(source: _Source, groups: Counts, hashes: npt.NDArray[np.uint64]) -> Duplicates:
    """Compare the units whose hashes are equal."""
    ordered = np.sort(hashes)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    found = [np.empty(0, np.int64)]
    for start in range(0, len(hashes) if len(repeated) else 0, HASHES_AT_ONCE):
        part = hashes[start : start + HASHES_AT_ONCE]
        places = np.minimum(np.searchsorted(repeated, part), len(repeated) - 1)
        found.append(np.flatnonzero(repeated[places] == part) + start)
    positions = np.concatenate(found)
    stops = np.cumsum(groups[:, 1] - groups[:, 0])  # positions count the units that were looked at
    of_group = np.searchsorted(stops, positions, side="right")
    units = groups[of_group, 1] - (stops[of_group] - positions)
    by_hash = np.argsort(hashes[positions], kind="stable")
    alike, ids = units[by_hash], hashes[positions][by_hash]
    begins = np.flatnonzero(ids[1:] != ids[:-1]) + 1
    count = tokens = 0
    best: list[tuple[int, int, DuplicateGroup]] = []
    for candidates in np.split(alike, begins) if len(alike) else []:
        for group in _equal_units(source, candidates):
            copies = len(group.units) - 1
            count, tokens = count + copies, tokens + copies * group.length
            heapq.heappush(best, (copies * group.length, -int(group.units[0]), group))
            if len(best) > MAX_GROUPS:
                heapq.heappop(best)
    return Duplicates(count, tokens, [group for _, _, group in sorted(best, key=lambda item: item[:2], reverse=True)])


def _equal_units(source: _Source, units: Counts) -> Iterator[DuplicateGroup]:
    """Yield the groups of equal units; those of no tokens are none."""
    classes: list[list[Any]] = []
    for unit in units.tolist():
        start, stop = source.bounds(unit, unit + 1).tolist()
        for members in classes:
            if _same(source, members[0], start, stop):
                members.append(unit)
                break
        else:
            classes.append([unit])
    for members in classes:
        start, stop = source.bounds(members[0], members[0] + 1).tolist()
        if len(members) > 1 and stop > start:
            yield DuplicateGroup(np.array(members), stop - start)


def _same(source: _Source, other: int, start: int, stop: int) -> bool:
    """Return whether the unit of these bounds has the tokens of another one."""
    first, last = source.bounds(other, other + 1).tolist()
    pairs = zip(_parts(source, first, last), _parts(source, start, stop), strict=False)
    return last - first == stop - start and all(np.array_equal(a, b) for a, b in pairs)
