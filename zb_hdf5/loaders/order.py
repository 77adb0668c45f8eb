"""Order is arithmetic: position -> index, from (algorithm, n, seed, epoch) only; and the share of a rank.

Every order maps positions `0..n-1` one to one onto indices `0..n-1`, without a table. The orders are part of the
checkpoint contract: golden vectors in the tests pin their results, which never change under the same name. A
`StepPlan` is an order and a rank: the reads of that rank at each step.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count, repeat
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError, require_positive, whole_number
from zb_hdf5.loaders.splitmix64 import GOLDEN, MASK64, Words, mix, splitmix64

IndexArray = npt.NDArray[np.int64]
SHUFFLES: Final = ("global", "records", "block", "sequential")
#: The batches of a block, unless another number is given.
DEFAULT_BLOCK: Final = 256
FEISTEL_ROUNDS: Final = 6
#: Halves of 1 or 2 bits have so few round functions that permutations of 4 to 16 items come out visibly biased.
MIN_HALF_BITS: Final = 3
#: Permutations of so many items come out biased from halves of 3 bits, which hold up to 64.
WIDENED: Final = range(33, 65)
#: The version of the states of all orders but one.
FIRST_VERSION: Final = 2
#: The version of the states of a `GlobalOrder` of `WIDENED` items, whose halves have 4 bits.
WIDE_VERSION: Final = 3
#: Halves of up to so many bits, and so up to 2**26 items, take their round functions from tables of 384 KiB at most.
TABLE_BITS: Final = 13
#: Networks over up to so many words are tables themselves: few items are fed in again up to 20 times.
TABLE_WORDS: Final = 1 << 10
#: Words that are permuted at once: their arrays stay in the cache of a core.
WORDS_AT_ONCE: Final = 1 << 13
#: The "epoch" of the record shuffle at write time: a value that no training epoch has.
WRITE_EPOCH: Final = 2**64 - 1
#: The variables of a Slurm step, for its tasks only: a batch script is rank 0 of SLURM_NTASKS too, of which no other
#: runs, and the shell of `salloc` can be a step of one task in a job of many.
STEP_VARIABLES: Final = (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("SLURM_PROCID", "SLURM_NTASKS"))
#: Endings of an epoch: the records that do not fill a step of all ranks are left out, or the last step is filled up
#: from the start of the order, has fewer rows, or has rows of padding.
LASTS: Final = ("drop", "fill", "short", "masked")
#: Steps of a reading that are resolved at once at first.
FIRST_BLOCK: Final = 64
#: Steps of a reading that are resolved at once, at most.
LAST_BLOCK: Final = 4096
#: Positions of an epoch whose order is computed as a whole where single steps are asked for: 1 MiB of numbers.
TABLE_POSITIONS: Final = 1 << 17
#: Steps whose records are computed at once where single steps of a longer epoch are asked for.
STEPS_AT_ONCE: Final = 64
#: The reads of a step without padding: a whole stored batch, or the numbers of its records.
StoredRequest: TypeAlias = int | npt.NDArray[np.int64]


class PaddedRecords(NamedTuple):
    """Records, and the rows of a batch, which are filled up with padding."""

    records: npt.NDArray[np.int64]
    batch_size: int


#: The reads of one step.
Request: TypeAlias = StoredRequest | PaddedRecords


class Order(ABC):
    """A bijection of `0..n-1`: position in the epoch -> index in the store. Thread-safe and picklable.

    Attributes
    ----------
    n
        The number of indices.
    version
        The version of the states that have this order.
    """

    n: int
    version: int = FIRST_VERSION

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n={self.n}, version={self.version})"

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
    """ZeroBatch v2's block shuffle: blocks of consecutive batches in random order, sequential inside.

    Seeds that differ in few low bits meet the same orders in other epochs: `seed ^ epoch` is the rule of the format.
    NumPy froze the stream of RandomState.

    Parameters
    ----------
    n
        The number of batches.
    seed, epoch
        The order depends on `seed ^ epoch`.
    block_size
        The batches of a block.
    """

    def __init__(self, n: int, seed: int, epoch: int, block_size: int = DEFAULT_BLOCK) -> None:
        require_positive(block_size=block_size)
        self.n = n
        self.block_size = block_size
        num_blocks = -(-n // block_size)
        self._blocks = np.random.RandomState((seed ^ epoch) & 0xFFFFFFFF).permutation(num_blocks).astype(np.int64)
        self._starts = np.cumsum(np.minimum(block_size, n - self._blocks * block_size)) if n else self._blocks

    def indices(self, positions: npt.NDArray[Any]) -> IndexArray:
        slot = np.searchsorted(self._starts, positions, side="right")
        first = np.where(slot > 0, self._starts[slot - 1], 0)
        return np.asarray(self._blocks[slot] * self.block_size + (positions - first), dtype=np.int64)


class Permutation(Order):
    """An order with its inverse."""

    @abstractmethod
    def positions(self, indices: npt.NDArray[Any]) -> IndexArray:
        """Return the position of each of `indices`: the inverse of `indices`."""


class GlobalOrder(Permutation):
    """A uniform pseudo-random permutation: a Feistel network of six rounds with cycle walking.

    It works on 2h bits, h = max(3, ceil(bits(n - 1) / 2)), or 4 for n = 33 to 64, so its domain is below 8n; a result
    outside 0..n-1 is fed in again (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 4). The
    round function is splitmix64 (Steele, Lea and Flood 2014) of the half block and the key; the keys are a splitmix64
    stream that starts from a hash of seed and epoch. If n is a power of 4 from 256 on, nothing is fed in again, and
    each order is an even permutation: of two orders that differ by one swap, only one comes. No batch is more likely
    at a position, or beside another one, for that.

    Parameters
    ----------
    n
        The number of indices.
    seed, epoch
        The order depends on both.
    version
        `FIRST_VERSION`: h = 3 for n = 33 to 64 too, as states of that version have it, and the records of a store.
    """

    def __init__(self, n: int, seed: int, epoch: int, version: int = WIDE_VERSION) -> None:
        self.n = n
        self.version = version if n in WIDENED else FIRST_VERSION
        half_bits = MIN_HALF_BITS if self.version == FIRST_VERSION else MIN_HALF_BITS + 1
        self._half_bits = max(half_bits, -(-(n - 1).bit_length() // 2))
        state = splitmix64(splitmix64(seed & MASK64) + (epoch & MASK64))
        self._keys = tuple(splitmix64(state + r * GOLDEN) for r in range(FEISTEL_ROUNDS))

    def indices(self, positions: npt.NDArray[Any]) -> IndexArray:
        return self._walk(positions)

    def index(self, position: int) -> int:
        # Python's integers: arrays of one element take 20 times as long
        bits = self._half_bits
        mask = (1 << bits) - 1
        word = position
        tables = _round_tables(self._keys, bits) if bits <= TABLE_BITS else None
        while True:
            left = word >> bits
            right = word & mask
            for number, key in enumerate(self._keys):
                mixed = splitmix64(right ^ key) & mask if tables is None else tables.item(number, right)
                left, right = right, left ^ mixed
            word = left << bits | right
            if word < self.n:
                return word

    def positions(self, indices: npt.NDArray[Any]) -> IndexArray:
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

    def _network(self, words: Words, inverse: bool) -> Words:
        if 1 << 2 * self._half_bits <= TABLE_WORDS:
            return _network_table(self._keys, self._half_bits, inverse).take(words.view(np.int64))
        found = np.empty_like(words)
        for start in range(0, words.size, WORDS_AT_ONCE):
            part = slice(start, start + WORDS_AT_ONCE)
            found[part] = _rounds(words[part], self._keys, self._half_bits, inverse)
        return found


def make_order(
    shuffle: str,
    num_batches: int,
    *,
    seed: int,
    epoch: int,
    block_size: int = DEFAULT_BLOCK,
    records_per_batch: int = 1,
    version: int = WIDE_VERSION,
) -> Order:
    """Return an order by its name: of batches, or, for "records", of all records.

    Parameters
    ----------
    shuffle
        One of `SHUFFLES`.
    num_batches
        The stored batches.
    seed, epoch
        The order depends on both.
    block_size
        The batches of a block, for "block".
    records_per_batch
        The records of a stored batch, for "records".
    version
        As for `GlobalOrder`.
    """
    if shuffle == "records":
        return GlobalOrder(num_batches * records_per_batch, seed, epoch, version)
    if shuffle == "global":
        return GlobalOrder(num_batches, seed, epoch, version)
    if shuffle == "block":
        return BlockOrder(num_batches, seed, epoch, block_size)
    if shuffle == "sequential":
        return SequentialOrder(num_batches)
    raise ArgumentError(f"shuffle must be one of {', '.join(SHUFFLES)}, found {shuffle!r}")


def write_order(n: int, seed: int) -> GlobalOrder:
    """Return the order in which `n` records are stored: output position -> source record."""
    return GlobalOrder(n, whole_seed(seed), WRITE_EPOCH, FIRST_VERSION)  # the bytes of a store never change


def _rounds(words: Words, keys: tuple[int, ...], bits: int, inverse: bool) -> Words:
    """Return the network of some keys over words of two halves of so many bits."""
    order = slice(None, None, -1 if inverse else 1)
    shift = np.uint64(bits)
    mask = np.uint64((1 << bits) - 1)
    # a half of few values has its round function in a table: a fourth of the time
    tables = _round_tables(keys, bits)[order] if bits <= TABLE_BITS else repeat(None)
    left = words >> shift
    right = words & mask
    if inverse:
        left, right = right, left
    mixed = np.empty_like(words)  # one array for all temporaries of a kind
    scratch = np.empty_like(words)
    for key, table in zip(keys[order], tables, strict=False):
        if table is not None:
            table.take(right.view(np.int64), out=mixed, mode="clip")
        else:
            np.bitwise_xor(right, np.uint64(key), out=mixed)
            mix(mixed, scratch)
            mixed &= mask
        left ^= mixed
        left, right = right, left
    if inverse:
        left, right = right, left
    left <<= shift
    left |= right
    return left


@lru_cache(maxsize=8)
def _network_table(keys: tuple[int, ...], half_bits: int, inverse: bool) -> Words:
    """Return the network of some keys over all words of two halves."""
    return _rounds(np.arange(1 << 2 * half_bits, dtype=np.uint64), keys, half_bits, inverse)


@lru_cache(maxsize=8)
def _round_tables(keys: tuple[int, ...], half_bits: int) -> Words:
    """Return the round function of each key for each value of a half, shape (rounds, 2**half_bits)."""
    mixed = np.arange(1 << half_bits, dtype=np.uint64) ^ np.array(keys, np.uint64)[:, np.newaxis]
    mix(mixed, np.empty_like(mixed))
    mixed &= np.uint64((1 << half_bits) - 1)
    return mixed


@dataclass(frozen=True)
class Skip:
    """Ranges (start, stop) of positions that an epoch jumps over. The others are live, and counted from 0."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, triples: Iterable[tuple[int, int, int]], epoch: int, end: int) -> Skip:
        """Return the ranges of one epoch; those that touch or overlap are joined.

        Parameters
        ----------
        triples
            (epoch, start, stop) of all epochs.
        epoch, end
            The epoch, and the number of its positions.
        """
        joined: list[tuple[int, int]] = []
        for start, stop in sorted((start, min(stop, end)) for number, start, stop in triples if number == epoch):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            elif start < stop:
                joined.append((start, stop))
        return cls(tuple(joined))

    def live(self, position: int) -> int:
        """Return how many live positions are before one."""
        return position - sum(min(position, stop) - start for start, stop in self.ranges if start < position)

    def positions_of(self, live: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions of live ones."""
        if not self.ranges:
            return live
        starts, stops = np.array(self.ranges, np.int64).T
        skipped = np.concatenate([[0], np.cumsum(stops - starts)])
        found: npt.NDArray[np.int64] = live + skipped[(starts - skipped[:-1]).searchsorted(live, side="right")]
        return found


@dataclass(frozen=True)
class StepPlan:
    """The steps of one rank in one epoch: a step of all ranks takes the next `batch_size * world_size` positions.

    Attributes
    ----------
    order
        The order of all records if it is scattered, else of the stored batches.
    batch_size
        The records of a step on each rank.
    rank, world_size
        This rank, and the number of ranks.
    last
        The last step of the epoch: one of `LASTS`.
    records_per_batch
        The records of a stored batch.
    scattered
        The order separates the records of a stored batch.
    whole_records
        A record is a stored record, not a part of one.
    skip
        The positions that the epoch jumps over.
    rest
        The records after the last stored batch: they follow the records of the order, in stored order.
    """

    order: Order
    batch_size: int
    rank: int
    world_size: int
    last: str
    records_per_batch: int
    scattered: bool
    whole_records: bool
    skip: Skip = Skip()
    rest: int = 0

    @property
    def step(self) -> int:
        """Positions that one step of all ranks takes."""
        return self.batch_size * self.world_size

    @property
    def num_ordered(self) -> int:
        """Positions of the order."""
        return self.order.n if self.scattered else self.order.n * self.records_per_batch

    @property
    def num_records(self) -> int:
        """Positions of the epoch: of the order, and then of the rest."""
        return self.num_ordered + self.rest

    @property
    def num_live(self) -> int:
        """Live positions of the epoch."""
        return self.skip.live(self.num_records)

    @property
    def num_left_out(self) -> int:
        """Live positions of the epoch that no step takes."""
        return max(0, self.num_live - self.steps_from(0) * self.step)

    def indices(self, live: npt.NDArray[np.int64]) -> IndexArray:
        """Return the record at each of some live positions."""
        positions = self.skip.positions_of(live)
        if not self.rest or positions.max(initial=0) < self.num_ordered:
            return self._ordered(positions)
        found = positions.astype(np.int64)  # a record of the rest has the number of its position
        in_order = positions < self.num_ordered
        found[in_order] = self._ordered(positions[in_order])
        return found

    def _ordered(self, positions: npt.NDArray[np.int64]) -> IndexArray:
        if self.scattered:
            return self.order.indices(positions)
        batches, rows = np.divmod(positions, self.records_per_batch)
        return self.order.indices(batches) * self.records_per_batch + rows

    def steps_from(self, position: int) -> int:
        """Return how many steps there are from `position` to the end of the epoch."""
        complete, left = self._steps_left(position)
        return complete + (left > 0 and self.last != "drop")

    def _steps_left(self, position: int) -> tuple[int, int]:
        """Return how many steps from `position` on are complete on all ranks, and the live positions after them."""
        return divmod(max(0, self.num_live - self.skip.live(position)), self.step)

    def requests_from(self, position: int) -> Iterator[Request]:
        """Yield the reads of this rank from `position` to the end of the epoch."""
        return chain(chain.from_iterable(map(requests_in, self.blocks_from(position))), self.last_from(position))

    def last_from(self, position: int) -> list[Request]:
        """Return the read of this rank in the last step of the epoch, if that step is not complete on all ranks."""
        complete, left = self._steps_left(position)
        if not left or self.last == "drop":
            return []
        return [self._last_at(self.skip.live(position) + complete * self.step)]

    def _last_at(self, live: int) -> Request:
        """Return the read of this rank in a step that begins at a live position, and is not complete."""
        end = self.num_live
        size = self.batch_size
        start = live + self.rank * size
        if self.last == "fill":
            start %= end
        if start + size <= end:
            return requests_in(self._reads_at(np.array([start])))[0]
        positions = np.arange(start, start + size)
        if self.last == "fill":
            return self.indices(positions % end)
        records = self.indices(positions[positions < end])
        return records if self.last == "short" else PaddedRecords(records, size)

    def blocks_from(self, position: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the reads of this rank in the complete steps from `position` on, in growing blocks."""
        steps, _ = self._steps_left(position)
        start = self.skip.live(position)
        most = min(LAST_BLOCK, max(FIRST_BLOCK, TABLE_POSITIONS // self.reads_per_step))
        first = 0
        size = FIRST_BLOCK
        while first < steps:
            yield self._block_at(start + np.arange(first, min(first + size, steps)) * self.step)
            first += size
            size = min(8 * size, most)

    def positions_from(self, position: int) -> Iterator[int]:
        """Yield the position after each step from a position on, without an end."""
        if not self.skip.ranges:
            return count(position + self.step, self.step)
        live = count(self.skip.live(position) + self.step, self.step)
        return (int(self.skip.positions_of(np.array(each))) for each in live)

    def requests_at(self, positions: npt.NDArray[np.int64]) -> list[StoredRequest]:
        """Return the reads of complete steps of one rank that begin at live positions."""
        return requests_in(self._reads_at(positions)) if len(positions) else []

    def requests_of_steps(self, steps: npt.NDArray[np.int64]) -> list[Request]:
        """Return the reads of this rank at steps that are counted from the start of the epoch."""
        is_last = steps >= self._steps_left(0)[0]
        found: list[Request] = [*requests_in(self._block_at(steps[~is_last] * self.step))]
        for place in np.flatnonzero(is_last).tolist():
            found.insert(place, self._last_at(int(steps[place]) * self.step))
        return found

    @property
    def is_whole(self) -> bool:
        """Whether steps that begin at a multiple of `batch_size` are whole stored batches."""
        is_stored = self.whole_records and self.batch_size == self.records_per_batch
        return is_stored and not self.scattered and not self.skip.ranges

    @property
    def reads_per_step(self) -> int:
        """The numbers that name the reads of a step: of one stored batch, or of its records."""
        return 1 if self.is_whole else self.batch_size

    def _block_at(self, live: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the reads of this rank in complete steps, which begin at live positions."""
        return self._reads_at(live + self.rank * self.batch_size)

    def _reads_at(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the reads of batches that begin at live positions: stored ones, 1-D, or the records of each, 2-D."""
        size = self.batch_size
        if self.is_whole and not np.any(starts % size):
            return self.order.indices(starts // size)
        return self.indices(starts[:, np.newaxis] + np.arange(size))


def requests_in(block: npt.NDArray[np.int64]) -> list[StoredRequest]:
    """Return the requests of a block: numbers of stored batches, or an array of records for each step."""
    return block.tolist() if block.ndim == 1 else list(block)


def records_in(request: Request, records_per_batch: int) -> IndexArray:
    """Return the records of a request."""
    if isinstance(request, int):
        return np.arange(request * records_per_batch, (request + 1) * records_per_batch)
    return request.records if isinstance(request, PaddedRecords) else request


def whole_seed(seed: object) -> int:
    """Return a seed as a Python integer; raise `ArgumentError` if it is not a whole number."""
    return whole_number("seed", seed)


def with_companion(name: str, value: Any, default: Any = None) -> tuple[Any, Any]:
    """Return the value of an argument, and the one that may stand beside it, as in `shuffle=("block", 256)`.

    Parameters
    ----------
    name
        The argument, for messages.
    default
        The second value where the first one stands alone.
    """
    if not isinstance(value, tuple | list):
        return value, default
    if len(value) != 2:
        raise ArgumentError(f"{name} must be one value, or a pair such as (value, more), found {value!r}")
    return value[0], value[1]


def block_shuffle(shuffle: Any) -> tuple[str, int]:
    """Return the word of a shuffle, and the batches of a block; only "block" takes a number."""
    word, block_size = with_companion("shuffle", shuffle, DEFAULT_BLOCK)
    if isinstance(shuffle, tuple | list) and word != "block":
        raise ArgumentError(f'shuffle: "block" alone takes a number, the batches of a block, found {shuffle!r}')
    return word, block_size


def checked_skip(skip: Collection[Any]) -> tuple[tuple[int, int, int], ...]:
    """Return triples (epoch, start, stop), ascending; raise `ArgumentError` if one is not such a triple."""
    try:
        found = sorted({(int(epoch), int(start), int(stop)) for epoch, start, stop in skip})
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"skip: expected (epoch, start, stop) of positions, found {skip!r}") from error
    for epoch, start, stop in found:
        if epoch < 0 or not 0 <= start <= stop:
            raise ArgumentError(f"skip: expected epoch >= 0 and 0 <= start <= stop, found {(epoch, start, stop)}")
    return tuple(found)


def resolve_rank(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, as a loader without these arguments finds them.

    Parameters
    ----------
    rank, world_size
        Both are returned as given. None: both come from `torch.distributed`, else from RANK and WORLD_SIZE (torchrun),
        else from the task under `srun`, else they are 0 and 1.

    Raises
    ------
    ArgumentError
        If only one of both is given, or the rank is not below `world_size`.
    """
    if (rank is None) != (world_size is None):
        raise ArgumentError(f"pass both rank and world_size or neither, found rank={rank}, world_size={world_size}")
    if rank is None or world_size is None:
        rank, world_size = _rank_of_job()
    rank, world_size = whole_number("rank", rank), whole_number("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ArgumentError(f"expected 0 <= rank < world_size, found rank {rank} of {world_size}")
    return rank, world_size


def _rank_of_job() -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")  # not loaded means not initialised
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    step = STEP_VARIABLES if "SLURM_STEP_ID" in os.environ else ()
    for rank, world_size in (("RANK", "WORLD_SIZE"), *step):  # torchrun has the first two
        if rank in os.environ and world_size in os.environ:
            try:
                return int(os.environ[rank]), int(os.environ[world_size])
            except ValueError as error:
                raise ArgumentError(
                    f"environment variables {rank} and {world_size}: expected numbers: {error}"
                ) from error
    return 0, 1
