"""Staging: the batches that the ranks of a node will read in an epoch are copied to the cache of their loaders."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.console import Progress
from zb_hdf5.errors import ArgumentError
from zb_hdf5.field import SET_MARK
from zb_hdf5.files.checked import GROUP_BYTES
from zb_hdf5.files.threads import read_ahead
from zb_hdf5.files.tokens import Tokens
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.order import records_in
from zb_hdf5.store.cache import Cache, column_of
from zb_hdf5.store.found_set import found_set

#: Reads of the store at the same time: enough to hide the time that a server needs to answer.
THREADS: Final = 8


def stage_batches(
    loader: Loader,
    cache: Cache,
    fields: Iterable[str],
    ranks: list[int],
    world_size: int,
    progress: Progress,
    sets: Iterable[str] = (),
) -> dict[str, Any]:
    """Copy the batches that some ranks will read in the rest of an epoch, and close the loader.

    Parameters
    ----------
    loader
        A loader of one rank, at the position from which the ranks go on; at the end of its epoch the next one is
        staged.
    fields
        Names of the fields that are copied with the tokens.
    sets
        Names of the field sets whose fields are all copied.

    Returns
    -------
    dict
        The noun for a "unit", and the numbers of `stage_units`; with `sets` these of each under "field_sets".
    """
    with loader, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a full cache, which the report names
        batches = loader.batches.with_windows(loader.batches.windows, cache.over(loader.batches))
        columns = [batches, *map(batches.field, fields)]
        needed = batches_of_ranks(loader, ranks, world_size)
        if not needed.size:  # the state is at the end of its epoch
            loader.set_epoch(loader.epoch + 1)
            needed = batches_of_ranks(loader, ranks, world_size)
        of_sets = {name: [*map(batches.field, _fields_of_set(batches.corpus, name))] for name in sets}
        report: dict[str, Any] = {"unit": unit_of(batches.corpus), **stage_units(columns, needed, progress)}
        if of_sets:
            report["field_sets"] = {name: stage_units(each, needed, progress) for name, each in of_sets.items()}
        return report


def _fields_of_set(corpus: Corpus, name: str) -> list[str]:
    """Return the names of the fields of a field set, as loaders take them."""
    facts = found_set(corpus, name).facts
    if facts.is_of_documents:
        raise ArgumentError(f"{corpus.path}: the field set {name} has values of documents, which no cache keeps")
    return [f"{name}{SET_MARK}{field.name}" for field in facts.fields]


def unit_of(corpus: Corpus) -> str:
    """Return the noun for what a cache keeps of a corpus as a whole."""
    return "chunk" if corpus.is_stream else "batch"


def batches_of_ranks(loader: Loader, ranks: Iterable[int], world_size: int) -> npt.NDArray[np.int64]:
    """Return the stored batches that some ranks read from the loader's position to the end of its epoch, ascending.

    The rest after the last whole batch counts as one.
    """
    position = loader.state_dict()["position"]
    needed = np.zeros(loader.batches.num_batches + 1, bool)
    for rank in ranks:
        plan = replace(loader.plan, rank=rank, world_size=world_size)
        for request in plan.requests_from(position):
            needed[records_in(request, plan.records_per_batch) // plan.records_per_batch] = True
    return np.flatnonzero(needed)


def stage_units(columns: list[Batches], needed: npt.NDArray[np.int64], progress: Progress) -> dict[str, int]:
    """Copy the units of batches, or chunks of a stream, to the caches of their columns, until these are full.

    Returns how many "units" and "num_bytes" the ranks will read, and how many units were "present" and are "copied".
    """
    report = dict.fromkeys(("units", "num_bytes", "present", "copied"), 0)
    todo = []
    for batches in columns:
        column = column_of(batches.corpus)
        units = units_of(batches, needed)
        absent = units[[not column.has(number) for number in units.tolist()]]
        present = len(units) - len(absent)
        unit_bytes = batches.tokens.unit * batches.dtype.itemsize
        report["units"] += len(units)
        report["num_bytes"] += len(units) * unit_bytes
        report["present"] += present
        progress.advance(0, report["num_bytes"])
        progress.keep(present * unit_bytes)
        todo.append((batches.tokens, column, absent, unit_bytes))
    for tokens, column, absent, unit_bytes in todo:
        read = partial(_copy, tokens, unit_bytes, progress)
        for _ in read_ahead(read, runs_of(absent, unit_bytes), 2 * THREADS, threads=THREADS):
            if column.full:
                break
        report["copied"] += sum(column.has(number) for number in absent.tolist())
    if report["present"] + report["copied"] < report["units"]:
        progress.finish()
    return report


def units_of(batches: Batches, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the units of the tokens that lie in some batches, ascending."""
    size = 1 if batches.meta.field is None else batches.meta.field.size  # windows of a field are as much wider
    unit = batches.corpus.tokens_of_unit * size
    batch_tokens = batches.batch_size * batches.stride
    firsts = numbers * batch_tokens // unit
    num_units = -(-batches.tokens.num_tokens // batches.tokens.unit)
    stops = np.minimum((numbers + 1) * batch_tokens + batches.overlap, num_units * unit)
    lasts = (stops - 1) // unit
    most = int((lasts - firsts).max(initial=0)) + 1
    return np.unique(np.minimum(firsts[:, np.newaxis] + np.arange(most), lasts[:, np.newaxis]))


def runs_of(units: npt.NDArray[np.int64], unit_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the count of units that follow each other, as many as are moved at once."""
    most = max(1, GROUP_BYTES // unit_bytes)
    edges = (np.flatnonzero(np.diff(units) != 1) + 1).tolist()
    for start, stop in pairwise([0, *edges, len(units)]):
        for first in range(start, stop, most):
            yield int(units[first]), min(most, stop - first)


def _copy(tokens: Tokens, unit_bytes: int, progress: Progress, run: tuple[int, int]) -> None:
    """Read a run of units, which leaves them in the cache."""
    start = run[0] * tokens.unit
    out = np.empty(min(run[1] * tokens.unit, tokens.num_tokens - start), tokens.dtype)
    tokens.read([(start, out)])
    progress.advance(run[1] * unit_bytes)
