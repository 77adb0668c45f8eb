"""Order is arithmetic: position -> index, from (algorithm, n, seed, epoch) only.

Every order maps positions `0..n-1` one to one onto indices `0..n-1`, without a table. The orders are part of the
checkpoint contract: golden vectors in the tests pin their results, which never change under the same name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError

IndexArray = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

SHUFFLES: Final = ("global", "records", "block", "sequential")
FEISTEL_ROUNDS: Final = 6
#: Halves of 1 or 2 bits have so few round functions that permutations of 4 to 16 items come out visibly biased.
MIN_HALF_BITS: Final = 3
#: Halves of up to so many bits, and so up to 2**26 items, take their round functions from tables of 384 KiB at most.
TABLE_BITS: Final = 13
#: The "epoch" of the record shuffle at write time: a value that no training epoch has.
WRITE_EPOCH: Final = 2**64 - 1
#: The batches of a bucket are shuffled as in an "epoch" that no epoch of documents is.
BUCKET_EPOCH: Final = 2**32

_MASK64: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX1: Final = 0xBF58476D1CE4E5B9
_MIX2: Final = 0x94D049BB133111EB


class Order(ABC):
    """A bijection of `0..n-1`: position in the epoch -> index in the store. Thread-safe and picklable."""

    n: int

    @abstractmethod
    def indices(self, positions: npt.NDArray[Any]) -> IndexArray:
        """Return the index at each of `positions` (integers in `0..n-1`, any shape)."""

    def index(self, position: int) -> int:
        """Return the index at one position, in `0..n-1`."""
        return int(self.indices(np.array([position]))[0])


class SequentialOrder(Order):
    """Position i is index i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def indices(self, positions: npt.NDArray[Any]) -> IndexArray:
        return positions.astype(np.int64)


class BlockOrder(Order):
    """ZeroBatch v2's block shuffle: blocks of consecutive batches in random order, sequential inside."""

    # Seeds that differ in few low bits meet the same orders in other epochs: `seed ^ epoch` is the rule of the format.
    # NumPy froze the stream of RandomState.

    def __init__(self, n: int, seed: int, epoch: int, block_size: int = 256) -> None:
        if block_size < 1:
            raise ArgumentError(f"block_size must be at least 1, found {block_size}")
        self.n, self.block_size = n, block_size
        num_blocks = -(-n // block_size)
        self._blocks = np.random.RandomState((seed ^ epoch) & 0xFFFFFFFF).permutation(num_blocks).astype(np.int64)
        self._starts = np.cumsum(np.minimum(block_size, n - self._blocks * block_size)) if n else self._blocks

    def indices(self, positions: npt.NDArray[Any]) -> IndexArray:
        slot = np.searchsorted(self._starts, positions, side="right")
        first = np.where(slot > 0, self._starts[slot - 1], 0)
        return np.asarray(self._blocks[slot] * self.block_size + (positions - first), dtype=np.int64)


class GlobalOrder(Order):
    """A uniform pseudo-random permutation: a Feistel network of six rounds with cycle walking."""

    # It works on 2h bits, h = max(3, ceil(bits(n - 1) / 2)), so its domain is below 4n; a result outside 0..n-1 is fed
    # in again (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 4). The round function is
    # splitmix64 (Steele, Lea and Flood 2014) of the half block and the key; the keys are a splitmix64 stream that
    # starts from a hash of seed and epoch.

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        self._half_bits = max(MIN_HALF_BITS, -(-(n - 1).bit_length() // 2))
        state = _splitmix64(_splitmix64(seed & _MASK64) + (epoch & _MASK64))
        self._keys = tuple(_splitmix64(state + r * _GOLDEN) for r in range(FEISTEL_ROUNDS))

    def indices(self, positions: npt.NDArray[Any]) -> IndexArray:
        return self._walk(positions)

    def index(self, position: int) -> int:
        # Python's integers: arrays of one element take 20 times as long
        bits, mask, word = self._half_bits, (1 << self._half_bits) - 1, position
        tables = _round_tables(self._keys, bits) if bits <= TABLE_BITS else None
        while True:
            left, right = word >> bits, word & mask
            for number, key in enumerate(self._keys):
                mixed = _splitmix64(right ^ key) & mask if tables is None else tables.item(number, right)
                left, right = right, left ^ mixed
            word = left << bits | right
            if word < self.n:
                return word

    def positions(self, indices: npt.NDArray[Any]) -> IndexArray:
        """Return the position of each of `indices`: the inverse of `indices`."""
        return self._walk(indices, inverse=True)

    def _walk(self, values: npt.NDArray[Any], inverse: bool = False) -> IndexArray:
        words = values.astype(np.int64).reshape(-1).view(np.uint64)
        if words.size and int(words.max()) >= self.n:  # a negative number is a large one
            raise ArgumentError(f"expected numbers in 0..{self.n - 1:,}, found {values}")  # it would walk for ever
        words = self._network(words, inverse)
        outside = np.flatnonzero(words >= self.n)
        while outside.size:
            words[outside] = self._network(words[outside], inverse)
            outside = outside[words[outside] >= self.n]
        return words.view(np.int64).reshape(values.shape)

    def _network(self, words: _Words, inverse: bool) -> _Words:
        bits, order = self._half_bits, slice(None, None, -1 if inverse else 1)
        shift, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
        # a half of few values has its round function in a table: a fourth of the time
        tables = _round_tables(self._keys, bits)[order] if bits <= TABLE_BITS else repeat(None)
        left, right = words >> shift, words & mask
        if inverse:
            left, right = right, left
        mixed, scratch = np.empty_like(words), np.empty_like(words)  # one array for all temporaries of a kind
        for key, table in zip(self._keys[order], tables, strict=False):
            if table is not None:
                table.take(right.view(np.int64), out=mixed, mode="clip")
            else:
                np.bitwise_xor(right, np.uint64(key), out=mixed)
                _mix(mixed, scratch)
                mixed &= mask
            left ^= mixed
            left, right = right, left
        if inverse:
            left, right = right, left
        left <<= shift
        left |= right
        return left


class RowOrder(Order):
    """An order of batches as an order of their records: the records of a batch stay together, in their order."""

    def __init__(self, batches: Order, records_per_batch: int) -> None:
        self.n = batches.n * records_per_batch
        self._batches, self._records_per_batch = batches, records_per_batch

    def indices(self, positions: npt.NDArray[Any]) -> IndexArray:
        batches, rows = np.divmod(positions, self._records_per_batch)
        return np.asarray(self._batches.indices(batches) * self._records_per_batch + rows, dtype=np.int64)

    def index(self, position: int) -> int:
        batch, row = divmod(position, self._records_per_batch)
        return self._batches.index(batch) * self._records_per_batch + row


class Documents:
    """The documents of a stream that are read, numbered from 0: none is empty, or longer than `max_tokens`."""

    def __init__(self, doc_offsets: npt.NDArray[np.uint64], max_tokens: int | None, too_long: str) -> None:
        self._offsets, self._max_tokens = doc_offsets, max_tokens
        lengths = np.diff(doc_offsets)
        is_long = lengths > np.uint64(max_tokens) if max_tokens else np.zeros(len(lengths), np.bool_)
        if too_long == "refuse" and is_long.any():
            raise ArgumentError(
                f"expected documents of at most max_tokens={max_tokens:,} tokens, found {int(is_long.sum()):,} longer "
                f"ones, up to {int(lengths.max()):,}; pass a larger max_tokens, or too_long='truncate' or 'drop'"
            )
        self.dropped_documents = int(is_long.sum()) if too_long == "drop" else 0
        self.truncated_documents = int(is_long.sum()) - self.dropped_documents
        self.truncated_tokens = 0
        if self.truncated_documents and max_tokens:
            self.truncated_tokens = int((lengths[is_long] - np.uint64(max_tokens)).sum())
        read = (lengths > 0) & ~is_long if too_long == "drop" else lengths > 0
        self._numbers = None if read.all() else np.flatnonzero(read)
        self.count = len(lengths) if self._numbers is None else len(self._numbers)

    def numbers(self, documents: IndexArray) -> IndexArray:
        """Return their numbers in the stream."""
        return documents if self._numbers is None else self._numbers[documents]

    def starts(self, documents: IndexArray) -> npt.NDArray[np.uint64]:
        """Return the offset of the first token of each."""
        return self._offsets[self.numbers(documents)]

    def whole_lengths(self, documents: IndexArray) -> npt.NDArray[np.int64]:
        """Return how many tokens each has in the stream."""
        numbers = self.numbers(documents)
        return (self._offsets[numbers + 1] - self._offsets[numbers]).astype(np.int64)

    def lengths(self, documents: IndexArray) -> npt.NDArray[np.int64]:
        """Return how many tokens of each are read."""
        lengths = self.whole_lengths(documents)
        return lengths if self._max_tokens is None else np.minimum(lengths, self._max_tokens)


class LengthOrder(Order):
    """A uniform permutation in which each bucket of batches is sorted by length, and its batches are shuffled."""

    # Documents that do not fill a batch stay at the end of their bucket: a position follows from its bucket alone.

    def __init__(self, documents: Documents, batch_size: int, bucket_batches: int, *, seed: int, epoch: int) -> None:
        self.n = documents.count
        self._documents, self._batch_size, self._seed, self._epoch = documents, batch_size, seed, epoch
        self._bucket_size = batch_size * bucket_batches
        self._order = GlobalOrder(self.n, seed, epoch)

    def indices(self, positions: npt.NDArray[Any]) -> IndexArray:
        found = np.empty(positions.shape, np.int64)
        buckets, places = np.divmod(positions, self._bucket_size)
        for bucket in np.unique(buckets).tolist():
            here = buckets == bucket
            found[here] = self._bucket(bucket)[places[here]]
        return found

    def _bucket(self, number: int) -> IndexArray:
        first = number * self._bucket_size
        documents = self._order.indices(np.arange(first, min(first + self._bucket_size, self.n)))
        documents = documents[np.argsort(self._documents.whole_lengths(documents), kind="stable")]
        whole = len(documents) // self._batch_size
        shuffled = GlobalOrder(whole, self._seed, (self._epoch + 1) * BUCKET_EPOCH + number).indices(np.arange(whole))
        full = documents[: whole * self._batch_size]
        full[...] = full.reshape(whole, self._batch_size)[shuffled].reshape(-1)
        return documents


def make_order(
    shuffle: str, num_batches: int, *, seed: int, epoch: int, block_size: int = 256, records_per_batch: int = 1
) -> Order:
    """Return the order called `shuffle` over the records of batches: only "records" parts those of a batch."""
    if shuffle == "records":
        return GlobalOrder(num_batches * records_per_batch, seed, epoch)
    if shuffle == "global":
        return RowOrder(GlobalOrder(num_batches, seed, epoch), records_per_batch)
    if shuffle == "block":
        return RowOrder(BlockOrder(num_batches, seed, epoch, block_size), records_per_batch)
    if shuffle == "sequential":
        return SequentialOrder(num_batches * records_per_batch)
    raise ArgumentError(f"shuffle must be one of {', '.join(SHUFFLES)}, found {shuffle!r}")


def write_order(n: int, seed: int) -> GlobalOrder:
    """Return the order in which `n` records are stored: output position -> source record."""
    return GlobalOrder(n, seed, WRITE_EPOCH)


@lru_cache(maxsize=8)
def _round_tables(keys: tuple[int, ...], half_bits: int) -> _Words:
    """Return the round function of each key for each value of a half, shape (rounds, 2**half_bits)."""
    mixed = np.arange(1 << half_bits, dtype=np.uint64) ^ np.array(keys, np.uint64)[:, np.newaxis]
    _mix(mixed, np.empty_like(mixed))
    mixed &= np.uint64((1 << half_bits) - 1)
    return mixed


def _splitmix64(x: int) -> int:
    z = (x + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK64
    return z ^ (z >> 31)


def _mix(words: _Words, scratch: _Words) -> None:
    """splitmix64 of each word, in place; uint64 arithmetic wraps as the algorithm needs it."""
    words += np.uint64(_GOLDEN)
    for bits, factor in ((30, _MIX1), (27, _MIX2)):
        np.right_shift(words, np.uint64(bits), out=scratch)
        words ^= scratch
        words *= np.uint64(factor)
    np.right_shift(words, np.uint64(31), out=scratch)
    words ^= scratch
