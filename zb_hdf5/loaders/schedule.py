"""The schedule of a mixture: the source of each batch, so that shares hold after any number of batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf, lcm
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5.errors import ArgumentError
from zb_hdf5.loaders.order import FIRST_VERSION, IndexArray

#: The schedules of states of the first version have shares of a period of at most this many batches.
MAX_PERIOD: Final = 1 << 14
#: A float stands for the fraction with at most this denominator that it is the nearest float of, if there is one.
MAX_DENOMINATOR: Final = 10**6
#: The version of the states of schedules whose weights are exact, and whose sources are read to their ends.
EXACT_VERSION: Final = 3
#: Batches that an exact schedule goes through at once.
WALKED_AT_ONCE: Final = 1 << 16
#: Batches that it goes through, at most, to a place that no state has.
MAX_WALK: Final = 1 << 28


class Tally(NamedTuple):
    """A place in a mixture: the batches of all ranks that are before it, and the batches of each source."""

    position: int
    counts: tuple[int, ...]


class Schedule(ABC):
    """The source of each batch from a place on.

    Some sources may take the next batch without running ahead of their share: the one whose deadline is first takes it.
    That is Tijdeman's rule for the chairman assignment problem (1980): after any number of batches, each of k sources
    is within 1 - 1 / (2k - 2) batches of its share.

    Attributes
    ----------
    weights
        The weight of each source.
    start
        The place from which on it holds.
    version
        The version of the states that have it. The first one leaves out the records of a source that do not fill a
        batch, at the end of each of its epochs.
    """

    def __init__(self, weights: tuple[float, ...], start: Tally, version: int) -> None:
        self.weights = weights
        self.start = start
        self.version = version

    @abstractmethod
    def sources_from(self, place: Tally, count: int) -> IndexArray:
        """Return the source of each of the next batches after a place."""

    @abstractmethod
    def place_at(self, position: int, near: Tally) -> Tally:
        """Return the place after so many batches; `near` is a known place of this schedule."""

    @abstractmethod
    def place_of(self, position: int, counts: Any) -> Tally:
        """Return the place that a state has; `ValueError` if its counts, which may be anything, cannot be."""


class PeriodicSchedule(Schedule):
    """A schedule that repeats itself: any place is found by arithmetic. Weights are rounded to shares of its period.

    Parameters
    ----------
    weights, start, version
        As for `Schedule`.

    Attributes
    ----------
    shares
        The batches of each source in a period.
    period
        Their sum.
    """

    def __init__(self, weights: tuple[float, ...], start: Tally, version: int = FIRST_VERSION) -> None:
        super().__init__(weights, start, version)
        self.shares = _shares(weights)
        self.period = sum(self.shares)
        self._sources = _period(self.shares)
        taken = self._sources[:, np.newaxis] == np.arange(len(weights))
        self._taken = np.vstack([np.zeros(len(weights), np.int64), np.cumsum(taken, axis=0)])

    def sources_from(self, place: Tally, count: int) -> IndexArray:
        within = (place.position - self.start.position) % self.period
        return self._sources[(within + np.arange(count)) % self.period]

    def place_at(self, position: int, near: Tally) -> Tally:
        periods, rest = divmod(position - self.start.position, self.period)
        taken = zip(self.start.counts, self.shares, self._taken[rest].tolist(), strict=True)
        return Tally(position, tuple(before + periods * share + within for before, share, within in taken))

    def place_of(self, position: int, counts: Any) -> Tally:
        return self.place_at(position, self.start)


class ExactSchedule(Schedule):
    """A schedule of exact weights: a place follows from the one before it.

    Parameters
    ----------
    weights, start
        As for `Schedule`. A source of weight 0 gives no batch.
    """

    def __init__(self, weights: tuple[float, ...], start: Tally) -> None:
        super().__init__(weights, start, EXACT_VERSION)
        exact = exact_weights(weights)
        if sum(exact) <= 0:
            raise ArgumentError(f"weights must not all be 0, found {[*weights]}")
        common = lcm(*(weight.denominator for weight in exact))
        self._parts = [int(weight * common) for weight in exact]
        self._total = sum(self._parts)

    def sources_from(self, place: Tally, count: int) -> IndexArray:
        return np.fromiter(islice(self._walk(place), count), np.int64, count)

    def place_at(self, position: int, near: Tally) -> Tally:
        left = position - near.position
        if left > MAX_WALK:
            raise ArgumentError(
                f"batch {position:,} of the mixture is {left:,} batches after the nearest one that is known, more than "
                f"{MAX_WALK:,}; take a state nearer to it"
            )
        counts = np.array(near.counts)
        walk = self._walk(near)
        while left > 0:
            sources = np.fromiter(islice(walk, WALKED_AT_ONCE if left > WALKED_AT_ONCE else left), np.int64)
            counts += np.bincount(sources, minlength=len(counts))
            left -= len(sources)
        return Tally(position, tuple(counts.tolist()))

    def place_of(self, position: int, counts: Any) -> Tally:
        batches = position - self.start.position
        found = [count - before for count, before in zip(counts, self.start.counts, strict=True)]
        if any(type(count) is not int for count in counts) or sum(found) != batches:
            raise ValueError(f"expected counts of {position:,} batches, found {counts!r:.120}")
        for part, count in zip(self._parts, found, strict=True):
            if abs(count * self._total - batches * part) >= self._total:
                raise ValueError(f"expected counts within one batch of each share, found {counts!r:.120}")
        return Tally(position, tuple(counts))

    def _walk(self, place: Tally) -> Iterator[int]:
        """Yield the source of each batch after a place, without an end.

        A source may take the n-th batch if scale * (part * n - taken * total) >= total, and its deadline is
        (scale * (taken + 1) - 1) / part. Both are multiplied by the least common multiple of the parts, `same`:
        the sums of whole numbers that are left need no division, and no two differ by mistake.
        """
        is_read = [(source, part) for source, part in enumerate(self._parts) if part]
        scale = max(1, 2 * len(is_read) - 2)  # 1 / scale is the slack of the rule
        same = lcm(*(part for _, part in is_read))
        steps = [scale * (same // part) if part else 0 for part in self._parts]
        taken = [count - before for count, before in zip(place.counts, self.start.counts, strict=True)]
        now = scale * same * (place.position - self.start.position)
        waiting = [(self._total * (taken[source] * steps[source] + same // part), source) for source, part in is_read]
        deadlines = {source: (taken[source] + 1) * steps[source] - same // part for source, part in is_read}
        ready: list[tuple[int, int]] = []
        heapify(waiting)
        releases = {source: release for release, source in waiting}
        while True:
            now += scale * same
            while waiting and waiting[0][0] <= now:
                source = heappop(waiting)[1]
                heappush(ready, (deadlines[source], source))
            source = heappop(ready or waiting)[1]
            yield source
            deadlines[source] += steps[source]
            releases[source] += self._total * steps[source]
            heappush(waiting, (releases[source], source))


def exact_weights(weights: tuple[float, ...]) -> tuple[Fraction, ...]:
    """Return the fractions that weights stand for: 0.7 is 7 / 10. Raises `ArgumentError` if one is not a weight."""
    if not weights or any(not 0 <= weight < inf for weight in weights):
        raise ArgumentError(f"weights must be numbers of at least 0, found {[*weights]}")
    short = [Fraction(weight).limit_denominator(MAX_DENOMINATOR) for weight in weights]
    return tuple(
        each if float(each) == weight else Fraction(weight) for each, weight in zip(short, weights, strict=True)
    )


def is_periodic(weights: tuple[float, ...]) -> bool:
    """Return whether a `PeriodicSchedule` has the exact weights."""
    exact = exact_weights(weights)
    if not all(exact) or any(each.denominator > MAX_DENOMINATOR for each in exact):
        return False
    shares = _shares(weights)
    return all(share * sum(exact) == each * sum(shares) for share, each in zip(shares, exact, strict=True))


def schedule_of(weights: tuple[float, ...], start: Tally, version: int) -> Schedule:
    """Return the schedule of some weights that states of a version have."""
    if version == FIRST_VERSION or is_periodic(weights):
        return PeriodicSchedule(weights, start, version)
    return ExactSchedule(weights, start)


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the ratio of the weights, rounded to a period of at most `MAX_PERIOD`."""
    if not weights or any(not 0 < weight < inf for weight in weights):
        raise ArgumentError(f"weights must be positive numbers, found {[*weights]}")
    exact = [Fraction(weight).limit_denominator(MAX_DENOMINATOR) for weight in weights]
    total = sum(exact)
    if not total:
        raise ArgumentError(f"weights must not all be below 1e-6, found {[*weights]}")
    common = lcm(*((weight / total).denominator for weight in exact))
    period = min(common, MAX_PERIOD)
    floors = [max(1, int(weight / total * period)) for weight in exact]
    remainders = sorted(range(len(exact)), key=lambda i: floors[i] - exact[i] / total * period)
    for i in remainders[: max(0, period - sum(floors))]:
        floors[i] += 1
    return tuple(floors)


@lru_cache(maxsize=16)
def _period(shares: tuple[int, ...]) -> IndexArray:
    """Return the source of each batch of one period."""
    period = sum(shares)
    k = len(shares)
    scale = max(1, 2 * k - 2)  # 1 / scale is the slack of the rule; everything below is multiplied by it
    taken = [0 for _ in shares]
    sources = np.empty(period, dtype=np.int64)
    for n in range(period):
        allowed = [i for i in range(k) if scale * (shares[i] * (n + 1) - taken[i] * period) >= period] or range(k)
        # small integers: their quotients are exact enough in floating point to never tie by mistake
        chosen = min(allowed, key=lambda i: ((scale * (taken[i] + 1) - 1) / shares[i], i))
        sources[n] = chosen
        taken[chosen] += 1
    return sources
