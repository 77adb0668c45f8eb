"""Mixtures: batches of several stores in fixed shares. Source and batch follow from the number of a step alone."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, Unpack, overload

import numpy as np

from zb_hdf5.documents.metadata import DecodeValue, WantedSpans
from zb_hdf5.errors import ArgumentError, Remedy, StateError
from zb_hdf5.files.threads import read_ahead
from zb_hdf5.formats.batch_reader import BatchReader
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.order import IndexArray, Request, resolve_rank
from zb_hdf5.loaders.state import STATE_VERSION, require_count, require_fields, require_kind, shown
from zb_hdf5.loaders.steps import BatchT
from zb_hdf5.loaders.token_loader import TokenLoader, with_positions

if TYPE_CHECKING:
    from zb_hdf5.loaders.loader_options import DocumentValue, PairBatch, SourceOptions, TokenBatch

#: Steps whose order is computed at once: enough to make numpy cheap, little enough to start at once.
ORDER_STEPS: Final = 2048
#: Weights are rounded to shares of a period of at most this many batches.
MAX_PERIOD: Final = 1 << 14

#: A source's name, and the batch to read.
MixedRequest: TypeAlias = tuple[str, Request]


class Schedule:
    """The source of each batch: after any n batches, each source is within one batch of its share.

    Parameters
    ----------
    weights
        The weight of each source.
    start
        The global batch from which on it holds.
    before
        The batches that each source has given before; by default none.
    """

    def __init__(self, weights: tuple[float, ...], start: int = 0, before: Sequence[int] = ()) -> None:
        self.weights = weights
        self.start = start
        self.before = np.array(before) if before else np.zeros(len(weights), np.int64)
        shares = _shares(weights)
        self.shares = np.array(shares)
        self.period = sum(shares)
        self._sources = _period(shares)
        taken = self._sources[:, np.newaxis] == np.arange(len(weights))
        self._taken = np.vstack([np.zeros(len(weights), np.int64), np.cumsum(taken, axis=0)])

    def counts(self, position: int) -> list[int]:
        """Return the batches that each source has given before a global batch."""
        periods, rest = divmod(position - self.start, self.period)
        return [*(self.before + periods * self.shares + self._taken[rest]).tolist()]

    def sources_of(self, batches: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the source of each global batch, and its number among the batches of that source."""
        periods, rest = np.divmod(batches - self.start, self.period)
        sources = self._sources[rest]
        return sources, self.before[sources] + periods * self.shares[sources] + self._taken[rest, sources]


def _shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the smallest integers in the ratio of the weights, rounded to a period of at most `MAX_PERIOD`."""
    if not weights or any(not 0 < weight < float("inf") for weight in weights):
        raise ArgumentError(f"weights must be positive numbers, found {list(weights)}")
    exact = [Fraction(weight).limit_denominator(10**6) for weight in weights]
    total = sum(exact)
    if not total:
        raise ArgumentError(f"weights must not all be below 1e-6, found {list(weights)}")
    common = np.lcm.reduce([(weight / total).denominator for weight in exact], dtype=object)
    period = min(int(common), MAX_PERIOD)
    floors = [max(1, int(weight / total * period)) for weight in exact]
    remainders = sorted(range(len(exact)), key=lambda i: floors[i] - exact[i] / total * period)
    for i in remainders[: max(0, period - sum(floors))]:
        floors[i] += 1
    return tuple(floors)


@lru_cache(maxsize=16)
def _period(shares: tuple[int, ...]) -> IndexArray:
    """Return the source of each batch of one period, by Tijdeman's rule for the chairman assignment problem (1980).

    Some sources may take the next batch without running ahead of their share: the one whose deadline is first takes it.
    """
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


#: Options of a `Loader` that mean nothing in a mixture, or something else in each source.
_UNFIT: Final = frozenset({"device", "epoch", "drop_last", "last", "skip", "mask_documents"})


class MixedLoader(TokenLoader[BatchT]):
    """Yields batches of several stores in given shares, for ever; each source in its own order and with its own epochs.

    Parameters
    ----------
    sources
        Name -> path or reader. All batches must have one shape: pass `batch_size`, `seq_len` where the stores differ.
    weights
        Name -> weight: the share of batches. `set_weights` changes them; the state remembers.
    rank, world_size
        As for `Loader`.
    prefetch
        Batches to read ahead in background threads. "auto": as many as the `Loader` of one of the sources would.
    options
        Options of each source's `Loader`: `shuffle`, `seed`, `access`, `batch_size`, `dtype`, `targets`, `fields`, ...

    Raises
    ------
    ArgumentError
        If names differ, a weight is not positive, or the sources' batches have different shapes.

    Notes
    -----
    Endless: it has no length, and each iteration goes on where the last batch was given. A state has the weights, and
    fits any number of ranks; it is refused if the sources are not the same data in the same order, unless it is forced
    upon as many of them. Not thread-safe.

    Examples
    --------
    >>> loader = MixedLoader({"web": "data/web", "code": "data/code"}, {"web": 0.7, "code": 0.3})  # doctest: +SKIP
    >>> for step, batch in zip(range(1000), loader):                                              # doctest: +SKIP
    ...     train(batch)
    """

    path = "mixture"  # in messages
    _endless = True

    @overload
    def __init__(
        self: MixedLoader[TokenBatch],
        sources: Mapping[str, str | os.PathLike[str] | BatchReader],
        weights: Mapping[str, float],
        *,
        targets: Literal[False] = ...,
        fields: tuple[()] = ...,
        documents: Literal[False] = ...,
        spans: Literal[False] = ...,
        **options: Unpack[SourceOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: MixedLoader[PairBatch],
        sources: Mapping[str, str | os.PathLike[str] | BatchReader],
        weights: Mapping[str, float],
        *,
        targets: Literal[True],
        fields: tuple[()] = ...,
        documents: Literal[False] = ...,
        spans: Literal[False] = ...,
        **options: Unpack[SourceOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: MixedLoader[dict[str, Any]],
        sources: Mapping[str, str | os.PathLike[str] | BatchReader],
        weights: Mapping[str, float],
        *,
        targets: bool = ...,
        fields: Sequence[str],
        documents: bool | Collection[DocumentValue] = ...,
        spans: WantedSpans = ...,
        **options: Unpack[SourceOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: MixedLoader[dict[str, Any]],
        sources: Mapping[str, str | os.PathLike[str] | BatchReader],
        weights: Mapping[str, float],
        *,
        targets: bool = ...,
        fields: Sequence[str] = ...,
        documents: Literal[True] | Collection[DocumentValue],
        spans: WantedSpans = ...,
        **options: Unpack[SourceOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: MixedLoader[dict[str, Any]],
        sources: Mapping[str, str | os.PathLike[str] | BatchReader],
        weights: Mapping[str, float],
        *,
        targets: bool = ...,
        fields: Sequence[str] = ...,
        documents: bool | Collection[DocumentValue] = ...,
        spans: Literal[True] | DecodeValue,
        **options: Unpack[SourceOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: MixedLoader[Any],
        sources: Mapping[str, str | os.PathLike[str] | BatchReader],
        weights: Mapping[str, float],
        *,
        targets: bool = ...,
        fields: Sequence[str] = ...,
        documents: bool | Collection[DocumentValue] = ...,
        spans: WantedSpans = ...,
        **options: Unpack[SourceOptions],
    ) -> None: ...

    def __init__(
        self,
        sources: Mapping[str, str | os.PathLike[str] | BatchReader],
        weights: Mapping[str, float],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch: int | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        self.rank, self.world_size = resolve_rank(rank, world_size)
        if not isinstance(sources, Mapping):
            raise ArgumentError(f"sources must map names to stores, found {sources!r:.80}")
        if unfit := sorted(_UNFIT & set(options)):
            raise ArgumentError(f"a mixture has no {', '.join(unfit)}: it reads its sources batch by batch, for ever")
        self.loaders: dict[str, Loader] = {
            name: Loader(path, rank=0, world_size=1, prefetch=prefetch, **options) for name, path in sources.items()
        }
        shapes = {(loader.batch_size, loader.seq_len) for loader in self.loaders.values()}
        if len(shapes) != 1:
            raise ArgumentError(f"sources need one batch shape, found {sorted(shapes)}; pass batch_size and seq_len")
        self._depth, self._threads = max(each.steps.depth(each.plan) for each in self.loaders.values())
        self._position = self.epoch = 0
        self._schedules = [Schedule(self._ordered(weights))]

    def _ordered(self, weights: Mapping[str, float]) -> tuple[float, ...]:
        if set(weights) != set(self.loaders):
            raise ArgumentError(f"expected a weight for each of {sorted(self.loaders)}, found {sorted(weights)}")
        return tuple(float(weights[name]) for name in self.loaders)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the shares from the next step on. Every rank must do so at the same step."""
        schedule = Schedule(self._ordered(weights), self._position, [*self.counts().values()])
        self._schedules = [s for s in self._schedules if s.start < self._position] + [schedule]
        self._stop_reading()

    def __repr__(self) -> str:
        sources = {name: str(loader.path) for name, loader in self.loaders.items()}
        weights = dict(zip(self.loaders, self._schedules[-1].weights, strict=True))
        first = next(iter(self.loaders.values()))
        where = f"position={self._position}, rank={self.rank}, world_size={self.world_size}"
        shape = f"batch_size={first.batch_size}, seq_len={first.seq_len}"
        return f"{type(self).__name__}({sources}, {weights}, {shape}, {where})"

    def _start(self, epoch: int) -> int:
        raise ArgumentError(f"a mixture makes one endless epoch, 0, found {epoch}; its sources count their own")

    def counts(self) -> dict[str, int]:
        """Return how many batches of each source all ranks together have consumed."""
        return dict(zip(self.loaders, self._schedules[-1].counts(self._position), strict=True))

    def requests(self, positions: IndexArray) -> list[MixedRequest]:
        """Return the reads of the batches at global positions, all under one set of weights."""
        sources, ordinals = [s for s in self._schedules if s.start <= positions[0]][-1].sources_of(positions)
        requests: list[Any] = [None for _ in positions]
        for number, (name, loader) in enumerate(self.loaders.items()):
            epochs, steps = np.divmod(ordinals, len(loader))
            for epoch in np.unique(epochs[sources == number]).tolist():
                here = np.flatnonzero((sources == number) & (epochs == epoch))
                found = loader.plan_of_epoch(epoch).requests_of_steps(steps[here])
                for place, request in zip(here.tolist(), found, strict=True):
                    requests[place] = (name, request)
        return requests

    def _read_from(self, position: int) -> Generator[tuple[Any, int]]:
        reads = {name: each.steps.read for name, each in self.loaders.items()}  # without the loader, which has threads
        requests = self._all_requests(position)
        batches = read_ahead(lambda one: reads[one[0]](one[1]), requests, self._depth, threads=self._threads)
        return with_positions(batches, count(position + self.world_size, self.world_size))

    def _all_requests(self, position: int) -> Iterator[MixedRequest]:
        for first in count(position + self.rank, ORDER_STEPS * self.world_size):
            yield from self.requests(first + np.arange(ORDER_STEPS) * self.world_size)

    def identity(self) -> dict[str, Any]:
        """Return the fields of the state of every mixture."""
        return {"version": STATE_VERSION, "kind": "mixture"}

    def _place(self) -> dict[str, Any]:
        return {"sources": self._sources(), "segments": self._segments(self._schedules), "position": self._position}

    def _take_over(self, state: dict[str, Any], force: bool) -> None:
        require_fields(self.path, state, self.identity(), ("sources", "segments", "position"))
        position = require_count(self.path, state, "position")
        if not force:
            self._require_sources(state["sources"])
        self._schedules = self._schedules_of(state["segments"], position)
        self._go_to(position)

    def _require_sources(self, sources: Any) -> None:
        """Raise `StateError` unless the sources of a state are these, in this order."""
        own = self._sources()
        if not isinstance(sources, list) or len(sources) != len(own):
            raise StateError(f"{self.path}: state: expected a list of {len(own)} sources, found {shown(sources)}")
        for source, found in zip(own, sources, strict=True):
            require_fields(f"{self.path}: source {source['name']!r}", found, source, (), remedy=Remedy.FORCE)

    def _schedules_of(self, segments: Any, position: int) -> list[Schedule]:
        """Return the schedules of a state up to its position; `StateError` if it has no such segments."""
        schedules: list[Schedule] = []
        try:
            for segment in segments:
                fields = require_kind(f"{self.path}: segments", segment, None)
                start = require_count(f"{self.path}: segments", fields, "start", position, "the position")
                weights = self._ordered(dict(zip(self.loaders, fields["weights"], strict=True)))
                schedules.append(Schedule(weights, start, schedules[-1].counts(start) if schedules else ()))
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise StateError(f"{self.path}: state: segments: {error}") from error
        starts = [each.start for each in schedules]
        expected = self._segments(schedules)
        if not starts or starts != sorted({0, *starts}) or segments != expected:
            raise StateError(
                f"{self.path}: state: expected segments {shown(expected)} from 0 on, found {shown(segments)}"
            )
        return schedules

    @staticmethod
    def _segments(schedules: list[Schedule]) -> list[dict[str, Any]]:
        return [{"start": s.start, "weights": [*s.weights], "counts": s.before.tolist()} for s in schedules]

    def _sources(self) -> list[dict[str, Any]]:
        """Return the fields that must agree, in order: the number of a source decides ties of the schedule."""
        return [
            {"name": name, **loader.identity(), "batch_size": loader.batch_size}
            for name, loader in self.loaders.items()
        ]

    def _num_fetched(self) -> int | None:
        found = [loader.stats().fetched for loader in self.loaders.values()]
        return None if None in found else sum(each or 0 for each in found)

    def close(self) -> None:
        """End the reading threads, and close all readers."""
        super().close()
        for loader in self.loaders.values():
            loader.close()
