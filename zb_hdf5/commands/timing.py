"""Times of training steps from the user's own data: each setting in turns, of equal tokens, against a bare mapping."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from zb_hdf5.errors import ArgumentError, ChecksumError, ZbError, counted
from zb_hdf5.files.paths import RemotePath
from zb_hdf5.files.tokens import Wait
from zb_hdf5.formats.batches import Batches
from zb_hdf5.loaders.loader import Loader
from zb_hdf5.loaders.order import make_order
from zb_hdf5.loaders.steps import may_overflow
from zb_hdf5.store.opening import open_reader

#: Bytes of the tokens of a timed pass, of a local store and of one at a URL: all batches of a smaller store.
PASS_BYTES: Final = {False: 128 << 20, True: 16 << 20}
#: Batches of each setting that are compared with the batches of another way to read them, before anything is timed.
COMPARED: Final = 4
#: Rounds at least, and at most, of all settings.
LEAST_ROUNDS: Final = 3
MOST_ROUNDS: Final = 9
#: A setting is named as the better one if it is faster by this factor.
WORTH_NAMING: Final = 1.1
#: No setting is judged if the fastest round of one took less than the slowest by this factor, or if more processes for
#: each core ran before: such rows are noise.
MOST_SPREAD: Final = 1.5
MOST_LOAD: Final = 0.5
DEFAULT: Final = "Loader(path)"
SEED: Final = 42


class Way(NamedTuple):
    """A way to read batches.

    Attributes
    ----------
    name
        It, as a user writes it.
    batches
        Opens the data, and returns an iterator of batches and a function that closes all.
    is_checked
        Whether each batch is compared with its crc32.
    kind
        "setting" of a loader that gives int64 in the default order, "other" values or order, or the "limit".
    """

    name: str
    batches: Callable[[], tuple[Iterator[Any], Callable[[], None]]]
    is_checked: bool
    kind: str = "setting"


@dataclass
class WayTimes:
    """The times of a way, of all rounds.

    Attributes
    ----------
    way
        The way.
    first_s
        Seconds from opening to the first batch, of each round.
    step_s
        Seconds of each later step, of each round.
    """

    way: Way
    first_s: list[float] = field(default_factory=list)
    step_s: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def rates(self, batch_tokens: int) -> list[float]:
        """Return the tokens a second of each round."""
        return [batch_tokens * len(steps) / float(steps.sum()) for steps in self.step_s]

    def to_json(self, batch_tokens: int) -> dict[str, Any]:
        """Return the figures: medians of the rounds, with the least and the largest of the rate."""
        rates = self.rates(batch_tokens)
        p50, p99 = np.percentile(np.concatenate(self.step_s), [50, 99])
        return {
            "way": self.way.name,
            "is_checked": self.way.is_checked,
            "kind": self.way.kind,
            "tokens_per_s": median(rates),
            "tokens_per_s_min": min(rates),
            "tokens_per_s_max": max(rates),
            "first_batch_ms": 1e3 * median(self.first_s),
            "step_us_p50": 1e6 * float(p50),
            "step_us_p99": 1e6 * float(p99),
            "rounds": len(rates),
        }


def ways_of(path: Path, batches: Batches, options: dict[str, Any]) -> list[Way]:
    """Return the ways that fit a path: the default first, the limit last.

    Parameters
    ----------
    path
        The data.
    batches
        They, opened: for its format.
    options
        The options of `Loader` that shape and choose the data.
    """
    is_checked = batches.verified != "none"

    def way(name: str, checked: bool = is_checked, kind: str = "setting", **more: Any) -> Way:
        return Way(name, partial(_open_loader, path, {**options, **more}), checked, kind)

    ways = [way(DEFAULT)]
    if is_checked:
        ways.append(way('verify="none"', checked=False, verify="none"))
    is_narrow = _fits_int32(path, batches, options)
    if isinstance(path, RemotePath):
        ways.append(way("prefetch=16", prefetch=16))
        return [*ways, way("int32", kind="other", dtype=torch.int32)] if is_narrow else ways
    has_extents = batches.tokens.wait is Wait.LOCAL and batches.access != "h5py"
    if has_extents:
        ways += [way(f'access="{name}"', access=name) for name in ("mmap", "pread")]
    ways.append(way("prefetch=4", prefetch=4))
    workers = min(2, len(os.sched_getaffinity(0)))
    ways.append(Way(f"DataLoader, {workers} workers", partial(_data_loader, path, options, workers), is_checked))
    if is_narrow:
        ways.append(way("dtype=torch.int32", checked=False, kind="other", dtype=torch.int32))
    ways.append(way('shuffle="records"', checked=False, kind="other", shuffle="records"))
    if has_extents and not _joins_records(path, batches, options):
        ways.append(Way("bare mapping", partial(_bare, path, options), False, "limit"))
    return ways


def _fits_int32(path: Path, batches: Batches, options: dict[str, Any]) -> bool:
    """Return whether int32 holds the ids of a pass: by the facts of the data, else by reading one."""
    if not may_overflow(batches, np.dtype(np.int32)):
        return True
    steps, close = _open_loader(path, {**options, "dtype": torch.int32})
    try:
        for _ in islice(steps, steps_of(path, batches)):
            pass
    except ArgumentError:
        return False
    finally:
        close()
    return True


def _joins_records(path: Path, batches: Batches, options: dict[str, Any]) -> bool:
    """Return whether batches are joined of stored records: a loader shuffles these, and a mapping has no such order."""
    try:
        with open_reader(path, **{**options, "batch_size": None, "seq_len": None}) as stored:
            return stored.batch_size != batches.batch_size
    except ArgumentError:  # a token stream, whose windows need a shape
        return False


def _open_loader(path: Path, options: dict[str, Any]) -> tuple[Iterator[Any], Callable[[], None]]:
    loader: Loader = Loader(path, seed=SEED, rank=0, world_size=1, **options)
    return iter(loader), loader.close


def _data_loader(path: Path, options: dict[str, Any], workers: int) -> tuple[Iterator[Any], Callable[[], None]]:
    loader: Loader = Loader(path, seed=SEED, rank=0, world_size=1, **options)
    return iter(DataLoader(loader.dataset(), batch_size=None, num_workers=workers)), loader.close


def _bare(path: Path, options: dict[str, Any]) -> tuple[Iterator[Any], Callable[[], None]]:
    """Widen views of a mapping in the order of the default loader, without a check, and without a loader."""
    batches = open_reader(path, **{**options, "access": "mmap", "verify": "none"})
    order = make_order("global", batches.num_batches, seed=SEED, epoch=0, records_per_batch=batches.batch_size)
    numbers = order.indices(np.arange(batches.num_batches)).tolist()
    size = batches.batch_size * batches.seq_len
    shape = (batches.batch_size, batches.seq_len)
    flat = batches.tokens.flat()
    if flat is None:  # several files
        return (torch.from_numpy(batches.read_batch(number).astype(np.int64)) for number in numbers), batches.close
    views = (flat[number * size : (number + 1) * size].reshape(shape) for number in numbers)
    return (torch.from_numpy(view.astype(np.int64)) for view in views), batches.close


def require_equal(ways: Sequence[Way], path: Path) -> None:
    """Compare the first batches of all ways of one order with the default; `ChecksumError` if they differ."""
    expected = _first_batches(ways[0])
    for way in ways[1:]:
        if way.name == 'shuffle="records"':
            continue  # another order, a uniform one of records
        found = _first_batches(way)
        if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
            raise ChecksumError(
                f"{path}: {way.name}: expected the batches of {DEFAULT}, found others; please report this"
            )


def _first_batches(way: Way) -> list[torch.Tensor]:
    batches, close = way.batches()
    try:
        return [batch.to(torch.int32) for batch in islice(batches, COMPARED)]  # whose 32 bits are the bits of the id
    finally:
        del batches
        close()


def measured(ways: Sequence[Way], steps: int, seconds: float, progress: Callable[[float], None]) -> list[WayTimes]:
    """Time all ways in turns, A B C and then C B A, until the time is over.

    Parameters
    ----------
    ways
        The ways.
    steps
        Steps of a pass, the first one included.
    seconds
        The time that all rounds together may take; three rounds are made in any case.
    progress
        Called after each pass, with the share of all passes that are done, as far as it is known.
    """
    times = [WayTimes(way) for way in ways]
    begin_s = time.monotonic()
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.monotonic() > begin_s + seconds:
            break
        for place, each in enumerate(times if number % 2 == 0 else reversed(times), 1):
            _pass(each, steps)
            rounds = number + place / len(times)
            progress(rounds / _expected_rounds(rounds, (time.monotonic() - begin_s) / seconds))
    return times


def _expected_rounds(rounds: float, share_of_time: float) -> int:
    """Return how many rounds will be made, after some of them in a share of the time."""
    by_time = MOST_ROUNDS if share_of_time <= rounds / MOST_ROUNDS else math.ceil(rounds / share_of_time)
    return max(LEAST_ROUNDS, math.ceil(rounds), by_time)


def _pass(times: WayTimes, steps: int) -> None:
    """Read the first steps of an epoch by one way, and keep their times."""
    clock = time.perf_counter
    taken = np.zeros(steps)
    begun_s = clock()
    batches, close = times.way.batches()
    try:
        count = 0
        before_s = begun_s
        for _ in islice(batches, steps):
            now_s = clock()
            taken[count] = now_s - before_s
            count += 1
            before_s = now_s
    finally:
        del batches
        close()
    times.first_s.append(float(taken[0]))
    times.step_s.append(taken[1:count])


def noise(found: Sequence[dict[str, Any]], load: float) -> str:
    """Return why the figures are noise and no setting is judged by them; "": they are not.

    Parameters
    ----------
    found
        The figures of all ways.
    load
        The processes that ran on this machine before the first round.
    """
    cores = len(os.sched_getaffinity(0))
    if load > MOST_LOAD * cores:
        return f"a load of {load:.1f} on {counted(cores, 'core')} before the first round"
    for row in found:
        least, most = row["tokens_per_s_min"] / 1e6, row["tokens_per_s_max"] / 1e6
        if row["kind"] == "setting" and most > MOST_SPREAD * least:
            return f"{row['way']} had {least:,.0f} to {most:,.0f} M tokens/s from round to round"
    return ""


def advice(found: Sequence[dict[str, Any]]) -> str:
    """Return one sentence: the setting to choose, by the figures of all of them."""
    default = next(row for row in found if row["way"] == DEFAULT)
    alike = [row for row in found if row["kind"] == "setting" and row["is_checked"] == default["is_checked"]]
    best = max(alike, key=lambda row: float(row["tokens_per_s"]))
    factor = best["tokens_per_s"] / default["tokens_per_s"]
    as_safe = ", and checks as much" if default["is_checked"] else ""
    if factor > WORTH_NAMING:
        return f"{best['way']} is {factor:.1f} times as fast as the default here{as_safe}"
    return f"the defaults: no other setting{' that checks as much' if as_safe else ''} is faster by a tenth"


def machine() -> str:
    """Return the processor, the cores of this process and the system, in one line."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next(
            (line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown processor"
        )
    cores = len(os.sched_getaffinity(0))
    return (
        f"{model}, {cores} cores, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"
    )


def steps_of(path: Path, batches: Batches) -> int:
    """Return the steps of a timed pass; an error for data of one batch, which have no later step."""
    if batches.num_batches < 2:
        raise ZbError(
            f"{path}: expected at least 2 batches to time, found {batches.num_batches:,}; pass a smaller batch_size"
        )
    batch_bytes = batches.meta.batch_bytes
    return max(2, min(batches.num_batches, PASS_BYTES[isinstance(path, RemotePath)] // batch_bytes))
