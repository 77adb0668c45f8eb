"""Mixtures: batches of several stores in fixed shares. Source and batch follow from the number of a step alone."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from itertools import chain
from math import inf, nan
from operator import add
from typing import Any, Final, Literal, SupportsFloat, TypeAlias, Unpack, overload

import numpy as np

from zb_hdf5.documents.metadata import DecodeValue, WantedSpans
from zb_hdf5.errors import ArgumentError, Remedy, StateError
from zb_hdf5.files.threads import read_ahead
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.loaders.ahead import hint_ahead, hinted_steps
from zb_hdf5.loaders.epoch_runs import EpochRun, runs_of_records
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.loader_options import (
    DocumentName,
    DocumentStep,
    PairBatch,
    SourceOptions,
    TokenBatch,
    WantedDocuments,
)
from zb_hdf5.loaders.order import FIRST_VERSION, IndexArray, Request, resolve_rank
from zb_hdf5.loaders.schedule import EXACT_VERSION, Schedule, Tally, is_periodic, schedule_of
from zb_hdf5.loaders.state import require_count, require_fields, require_kind, short_repr
from zb_hdf5.loaders.step_values import SOURCES, WantedFields
from zb_hdf5.loaders.steps import BatchT
from zb_hdf5.loaders.token_loader import TokenLoader

#: Steps whose order is computed at once: enough to make numpy cheap, little enough to start at once.
ORDER_STEPS: Final = 2048
#: Global batches whose order is computed at once, at most, unless a step of all ranks has more.
ORDER_BATCHES: Final = 1 << 16

#: The value of a step that has the name of its store, where the sources of documents are asked for.
_STORE: Final = "store"
#: A source's name, and the batch to read.
MixedRequest: TypeAlias = tuple[str, Request]


#: Options of a `Loader` that mean nothing in a mixture, or something else in each source.
_UNFIT: Final = frozenset({"device", "drop_last", "last", "skip", "mask_documents"})


class MixedLoader(TokenLoader[BatchT]):
    """Yields batches of several stores in given shares, for ever; each source in its own order and with its own epochs.

    The epochs of a source follow each other without a gap: a batch at the end of one has its last records, and the
    first ones of the next. So each epoch has each record once, whatever the batch size is.

    Parameters
    ----------
    sources
        Name -> path, corpus or batches. All batches must have one shape: pass `batch_size`, `seq_len` where the
        stores differ.
    weights
        Name -> weight: the share of batches, exact; 0 gives none. After any number of batches each source is within one
        batch of its share. `set_weights` changes them; the state remembers.
    rank, world_size
        As for `Loader`.
    prefetch
        Batches to read ahead in background threads. "auto": as many as the `Loader` of one of the sources would.
    options
        Options of each source's `Loader`: `shuffle`, `seed`, `access`, `batch_size`, `dtype`, `targets`, `fields`, ...

    Raises
    ------
    ArgumentError
        If names differ, a weight is not a number >= 0, all are 0, or the sources' batches have different shapes.

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
        sources: Mapping[str, str | os.PathLike[str] | Corpus | Batches],
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
        sources: Mapping[str, str | os.PathLike[str] | Corpus | Batches],
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
        sources: Mapping[str, str | os.PathLike[str] | Corpus | Batches],
        weights: Mapping[str, float],
        *,
        targets: bool = ...,
        fields: WantedFields,
        documents: WantedDocuments = ...,
        spans: WantedSpans = ...,
        **options: Unpack[SourceOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: MixedLoader[DocumentStep],
        sources: Mapping[str, str | os.PathLike[str] | Corpus | Batches],
        weights: Mapping[str, float],
        *,
        targets: bool = ...,
        fields: tuple[()] = ...,
        documents: Literal[True] | Collection[DocumentName],
        spans: WantedSpans = ...,
        **options: Unpack[SourceOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: MixedLoader[DocumentStep],
        sources: Mapping[str, str | os.PathLike[str] | Corpus | Batches],
        weights: Mapping[str, float],
        *,
        targets: bool = ...,
        fields: tuple[()] = ...,
        documents: WantedDocuments = ...,
        spans: Literal[True] | DecodeValue,
        **options: Unpack[SourceOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: MixedLoader[Any],
        sources: Mapping[str, str | os.PathLike[str] | Corpus | Batches],
        weights: Mapping[str, float],
        *,
        targets: bool = ...,
        fields: WantedFields = ...,
        documents: WantedDocuments = ...,
        spans: WantedSpans = ...,
        **options: Unpack[SourceOptions],
    ) -> None: ...

    def __init__(
        self,
        sources: Mapping[str, str | os.PathLike[str] | Corpus | Batches],
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
        self._is_hinted = prefetch == "auto" and not self._depth
        self._most_reads = max(each.plan.reads_per_step for each in self.loaders.values())
        documents = options.get("documents", False)
        self._names_stores = not isinstance(documents, bool) and SOURCES in documents
        self.epoch = 0
        self._position = Tally(0, (0,) * len(self.loaders))
        self._schedules = [self._scheduled(weights)]

    @property
    def sources(self) -> dict[str, list[str]]:
        """The names of the files that the documents of each store came from.

        With `documents=["sources"]` a step has the name of its store as "store", and as "sources" places in its list.
        """
        return {name: loader.sources for name, loader in self.loaders.items()}

    def _ordered(self, weights: Mapping[str, float]) -> tuple[float, ...]:
        if not isinstance(weights, Mapping):
            raise ArgumentError(f"weights must map the names of sources to numbers, found {weights!r:.80}")
        if set(weights) != set(self.loaders):
            raise ArgumentError(f"expected a weight for each of {sorted(self.loaders)}, found {sorted(weights)}")
        return tuple(_weight(name, weights[name]) for name in self.loaders)

    def _scheduled(self, weights: Mapping[str, float]) -> Schedule:
        """Return the schedule of weights that hold from now on."""
        ordered = self._ordered(weights)
        is_first = is_periodic(ordered) and not any(map(_tail_of, self.loaders.values()))
        return schedule_of(ordered, self._position, FIRST_VERSION if is_first else EXACT_VERSION)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the shares from the next step on; 0 switches a source off. Every rank must do so at the same step."""
        schedule = self._scheduled(weights)
        self._schedules = [each for each in self._schedules if each.start.position < self._position.position]
        self._schedules.append(schedule)
        self._stop_reading()

    def __repr__(self) -> str:
        sources = {name: str(loader.path) for name, loader in self.loaders.items()}
        weights = dict(zip(self.loaders, self._schedules[-1].weights, strict=True))
        first = next(iter(self.loaders.values()))
        where = f"position={self._position.position}, rank={self.rank}, world_size={self.world_size}"
        shape = f"batch_size={first.batch_size}, seq_len={first.seq_len}"
        return f"{type(self).__name__}({sources}, {weights}, {shape}, {where})"

    def _start(self, epoch: int) -> Tally:
        raise ArgumentError(f"a mixture makes one endless epoch, 0, found {epoch}; its sources count their own")

    def counts(self) -> dict[str, int]:
        """Return how many batches of each source all ranks together have consumed."""
        return dict(zip(self.loaders, self._position.counts, strict=True))

    def requests(self, positions: IndexArray) -> list[MixedRequest]:
        """Return the reads of the batches at global positions, which follow each other, under one set of weights."""
        first = int(positions[0])
        schedule = next(each for each in reversed(self._schedules) if each.start.position <= first)
        place = self._place_at(schedule, first)
        sources = schedule.sources_from(place, len(positions))
        is_source = sources[:, np.newaxis] == np.arange(len(self.loaders))
        ordinals = (np.cumsum(is_source, axis=0) - 1)[np.arange(len(sources)), sources]
        return self._reads(schedule, place, sources, ordinals)

    def _place_at(self, schedule: Schedule, position: int) -> Tally:
        """Return the place after so many batches, by the nearest place of its schedule that is known."""
        is_near = schedule.start.position <= self._position.position <= position
        return schedule.place_at(position, self._position if is_near else schedule.start)

    def runs(self, first: int, stop: int) -> dict[str, Iterator[EpochRun]]:
        """Return the positions in the epochs of each source that batches take, from one global position to another."""
        found: dict[str, Iterator[EpochRun]] = {name: iter(()) for name in self.loaders}
        ends = [*(each.start.position for each in self._schedules[1:]), stop]
        for schedule, end in zip(self._schedules, ends, strict=True):
            begin = max(first, schedule.start.position)
            if begin >= min(end, stop):
                continue
            place = self._place_at(schedule, begin)
            after = schedule.place_at(min(end, stop), place)
            for number, (name, loader) in enumerate(self.loaders.items()):
                start = self._first_record(number, loader, schedule, place)
                count = (after.counts[number] - place.counts[number]) * loader.batch_size
                more = runs_of_records(start, count, self._records_of_epoch(loader, schedule))
                found[name] = chain(found[name], more)
        return found

    def _reads(self, schedule: Schedule, place: Tally, sources: IndexArray, ordinals: IndexArray) -> list[MixedRequest]:
        """Return the reads of some batches, each of which is that of its source so many batches after a place."""
        requests: list[Any] = [None for _ in sources]
        for number, (name, loader) in enumerate(self.loaders.items()):
            here = np.flatnonzero(sources == number)
            if len(here):
                records = self._records_of_epoch(loader, schedule)
                start = self._first_record(number, loader, schedule, place)
                found = reads_after(loader, start, ordinals[here], records)
                for at, request in zip(here.tolist(), found, strict=True):
                    requests[at] = name, request
        return requests

    @staticmethod
    def _records_of_epoch(loader: Loader, schedule: Schedule) -> int:
        """Return the records of an epoch of a source; in states of the first version, those that fill its batches."""
        return loader.num_records - (_tail_of(loader) if schedule.version == FIRST_VERSION else 0)

    def _first_record(self, number: int, loader: Loader, schedule: Schedule, place: Tally) -> int:
        """Return the records of a source, of all its epochs, before a place."""
        size = loader.batch_size
        records = place.counts[number] * size
        if schedule.version == FIRST_VERSION:
            return records
        # epochs under a state of the first version ended without their last records, which are not read again
        shorter = [each for each in self._schedules if each.version == FIRST_VERSION]
        if not shorter:
            return records
        begun = self._schedules[len(shorter)].start.counts[number] * size
        return records + begun // self._records_of_epoch(loader, shorter[0]) * _tail_of(loader)

    def _read_from(self, position: Tally) -> Generator[tuple[Any, Tally]]:
        steps = {name: each.steps for name, each in self.loaders.items()}  # without the loader, which has threads
        names_stores = self._names_stores

        def read(one: tuple[MixedRequest, Tally]) -> tuple[Any, Tally]:
            (name, request), place = one
            step: Any = steps[name].read(request)
            return (step | {_STORE: name} if names_stores else step), place

        def announce(group: Sequence[tuple[MixedRequest, Tally]]) -> None:
            for name, reader in steps.items():
                if mine := [request for (source, request), _ in group if source == name]:
                    reader.announce(mine)

        requests = self._all_requests(position)
        if not self._is_hinted:
            return read_ahead(read, requests, self._depth, threads=self._threads)
        most_bytes = max(each.steps.step_bytes(each.plan) for each in self.loaders.values())
        return hint_ahead(read, announce, requests, hinted_steps(self._most_reads, most_bytes))

    def _all_requests(self, place: Tally) -> Iterator[tuple[MixedRequest, Tally]]:
        """Yield the reads of this rank after a place, each with the place after its step."""
        schedule = self._schedules[-1]
        steps = max(1, min(ORDER_STEPS, ORDER_BATCHES // self.world_size))
        while True:
            sources = schedule.sources_from(place, steps * self.world_size).reshape(steps, self.world_size)
            is_source = sources[:, :, np.newaxis] == np.arange(len(self.loaders))
            after = np.cumsum(is_source.sum(axis=1), axis=0)
            own = sources[:, self.rank]
            ordinals = (after - is_source[:, self.rank :].sum(axis=1))[np.arange(steps), own]
            places = [
                Tally(place.position + (step + 1) * self.world_size, tuple(map(add, place.counts, counts)))
                for step, counts in enumerate(after.tolist())
            ]
            yield from zip(self._reads(schedule, place, own, ordinals), places, strict=True)
            place = places[-1]

    # --- state ---------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Return the fields of the state of every mixture."""
        return {"version": max(each.version for each in self._schedules), "kind": "mixture"}

    def _place(self) -> dict[str, Any]:
        found = {"sources": self._sources(), "segments": self._segments(self._schedules)}
        position, counts = self._position
        if self.identity()["version"] == FIRST_VERSION:  # its counts follow from its position
            return {**found, "position": position}
        return {**found, "position": position, "counts": [*counts]}

    def _take_over(self, state: dict[str, Any], force: bool) -> None:
        version = EXACT_VERSION if state.get("version") == EXACT_VERSION else FIRST_VERSION
        names = ("sources", "segments", "position", *(["counts"] if version == EXACT_VERSION else []))
        require_fields(self.path, state, {"version": version, "kind": "mixture"}, names)
        position = require_count(self.path, state, "position")
        if not force:
            self._require_sources(state["sources"])
        schedules = self._schedules_of(state["segments"], position, version)
        place = self._place_of(schedules[-1], position, state.get("counts"))
        if version == EXACT_VERSION and [*place.counts] != state["counts"]:
            raise StateError(
                f"{self.path}: state: expected counts {[*place.counts]}, found {short_repr(state['counts'])}"
            )
        self._schedules = schedules
        for number, loader in enumerate(self.loaders.values()):
            epoch = self._epoch_of(number, loader, place)
            loader.keep_order({"version": _version_of(state["sources"], number), "epoch": epoch})
        self._go_to(place)

    def _require_sources(self, sources: Any) -> None:
        """Raise `StateError` unless the sources of a state are these, in this order."""
        if not isinstance(sources, list) or len(sources) != len(self.loaders):
            raise StateError(
                f"{self.path}: state: expected a list of {len(self.loaders)} sources, found {short_repr(sources)}"
            )
        for (name, loader), found in zip(self.loaders.items(), sources, strict=True):
            source = {"name": name, **loader.identity_as(found if isinstance(found, Mapping) else {})}
            source["batch_size"] = loader.batch_size
            require_fields(f"{self.path}: source {name!r}", found, source, (), remedy=Remedy.FORCE)

    def _schedules_of(self, segments: Any, position: int, version: int) -> list[Schedule]:
        """Return the schedules of a state up to its position; `StateError` if it has no such segments."""
        schedules: list[Schedule] = []
        try:
            for segment in segments:
                fields = require_kind(f"{self.path}: segments", segment, None)
                start = require_count(f"{self.path}: segments", fields, "start", position, "the position")
                weights = self._ordered(dict(zip(self.loaders, fields["weights"], strict=True)))
                place = Tally(0, (0,) * len(self.loaders))
                if schedules:
                    place = self._place_of(schedules[-1], start, fields["counts"])
                of_first = version == FIRST_VERSION or fields.get("version") == FIRST_VERSION
                schedules.append(schedule_of(weights, place, FIRST_VERSION if of_first else EXACT_VERSION))
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise StateError(f"{self.path}: state: segments: {error}") from error
        starts = [each.start.position for each in schedules]
        expected = self._segments(schedules)
        if not starts or starts != sorted({0, *starts}) or segments != expected:
            raise StateError(
                f"{self.path}: state: expected segments {short_repr(expected)} from 0 on, found {short_repr(segments)}"
            )
        return schedules

    def _place_of(self, schedule: Schedule, position: int, counts: Any) -> Tally:
        """Return the place of a state, or raise `StateError` if it cannot be."""
        try:
            return schedule.place_of(position, counts)
        except (ValueError, TypeError) as error:
            raise StateError(f"{self.path}: state: counts: {error}") from error

    @staticmethod
    def _segments(schedules: list[Schedule]) -> list[dict[str, Any]]:
        """Return the schedules as a state has them: beside newer ones, a schedule of the first version is named."""
        is_mixed = any(each.version != FIRST_VERSION for each in schedules)
        return [
            {
                "start": each.start.position,
                "weights": [*each.weights],
                "counts": [*each.start.counts],
                **({"version": each.version} if is_mixed and each.version == FIRST_VERSION else {}),
            }
            for each in schedules
        ]

    def _epoch_of(self, number: int, loader: Loader, place: Tally) -> int:
        """Return the epoch of a source at a place."""
        schedule = self._schedules[-1]
        first = self._first_record(number, loader, schedule, place)
        return first // self._records_of_epoch(loader, schedule)

    def _sources(self) -> list[dict[str, Any]]:
        """Return the fields that must agree, in order: the number of a source decides ties of the schedule."""
        found = []
        for number, (name, loader) in enumerate(self.loaders.items()):
            order = loader.plan_of_epoch(self._epoch_of(number, loader, self._position)).order
            fields = {**loader.identity(), "version": order.version, "batch_size": loader.batch_size}
            found.append({"name": name, **fields})
        return found

    def _num_fetched(self) -> int | None:
        found = [loader.stats().fetched for loader in self.loaders.values()]
        return None if None in found else sum(each or 0 for each in found)

    def close(self) -> None:
        """End the reading threads, and close what the loaders have opened."""
        super().close()
        for loader in self.loaders.values():
            loader.close()


def _weight(name: str, value: object) -> float:
    """Return the weight of a source; `ArgumentError` if it is not a number of at least 0."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else nan  # a text is none
    except (TypeError, ValueError, OverflowError):  # an array of several, or a whole number above all floats
        number = nan
    if not 0 <= number < inf:
        raise ArgumentError(f"weights: expected a number of at least 0 for {name!r}, found {short_repr(value)}")
    return number


def _tail_of(loader: Loader) -> int:
    """Return the records of an epoch that do not fill a batch."""
    return loader.num_records % loader.batch_size


def _version_of(sources: Any, number: int) -> Any:
    """Return the version of the order of a source in a state, which may be anything."""
    is_known = isinstance(sources, list) and number < len(sources) and isinstance(sources[number], Mapping)
    return sources[number].get("version") if is_known else None


def reads_after(loader: Loader, start: int, steps: IndexArray, records: int) -> list[Request]:
    """Return the reads of some batches of a loader whose epochs follow each other.

    Parameters
    ----------
    loader
        The loader, of one rank.
    start
        The records of all epochs before batch 0.
    steps
        The numbers of the batches, ascending.
    records
        The records of an epoch.
    """
    size = loader.batch_size
    first_epoch, first = divmod(start + int(steps[0]) * size, records)
    epochs, positions = np.divmod(first + (steps - steps[0]) * size, records)
    requests: list[Any] = [None for _ in steps]
    for epoch in np.unique(epochs).tolist():
        plan = loader.plan_of_epoch(first_epoch + epoch)
        is_whole = (epochs == epoch) & (positions + size <= records)
        for at, request in zip(np.flatnonzero(is_whole), plan.requests_at(positions[is_whole]), strict=True):
            requests[at] = request
        for at in np.flatnonzero((epochs == epoch) & ~is_whole):  # one: it goes on in the next epoch
            last = plan.indices(np.arange(positions[at], records))
            following = loader.plan_of_epoch(first_epoch + epoch + 1)
            requests[at] = np.concatenate([last, following.indices(np.arange(size - len(last)))])
    return requests
