"""Data that are larger than the memory that a process may use, page cache included: loaders, loops, other libraries.

Each row runs in a control group with memory for a quarter of the data, none of which is in the page cache at first. A
pass that takes long is not gone through to its end: a fault of a mapped page may read megabytes. So the tokens of the
rows are compared before, and without a cap.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure as m
from benchmarks import memory_cap
from benchmarks.peers import MEMMAP, OURS, build_of, file_of, reason_of

TITLES = ("Larger than memory",)
NOTES = {
    TITLES[0]: (
        "Each process may use memory for a quarter of the data, and the pages that it reads count: a control group "
        "holds it to that. `peak` is the most that it had. The code of libraries was in memory before. Rows are "
        "shuffled, or else named sequential. A pass that is not at its end after 5 seconds is left there."
    )
}
#: MiB of the tokens of a source, and the least of them: the process needs some memory for itself.
MIB = 4096
LEAST_MIB = 256
#: A pass of a row ends after this time.
PASS_S = 5
QUICK_PASS_S = 0.3
#: The share of the data for which there is memory.
SHARE = 4
PEAK = "peak MiB"
LIMIT = "O_DIRECT, sequential"
#: The limits of shuffled reads: of whole batches, and with the ending of a row of rows or of windows.
DIRECT_READERS = 16
BATCHES_LIMIT = f"O_DIRECT in {DIRECT_READERS} threads"
READERS = 64
THREADS = f"preadv in {READERS} threads"
ENDINGS = (", rows", ", windows")
#: The least shares of the rates of these limits.
BARS = {BATCHES_LIMIT: 0.9} | {f"{THREADS}{ending}": 0.7 for ending in ENDINGS}
LOOP = "np.memmap loop"
#: The files of `benchmarks/peers` that have ways for this.
FILES = (OURS, MEMMAP, "plain_h5py", "pytorch", "hf")


# --- in the interpreter of a library -----------------------------------------------------------------------------


def prepare(name: str, folder: str) -> list[str]:
    """Write the data of a library, and return its ways. The page cache is left to others."""
    module = file_of(name)
    module.prepare(Path(folder))
    m.evict(Path(folder))
    return list(module.BEYOND)


def seen(name: str, folder: str, way: str) -> float:
    """Return the number of the tokens of a way, which reads all of them without a cap."""
    return m.tokens_seen(file_of(name).BEYOND[way](Path(folder))(0))


def row(entrance: str, pass_s: float, name: str, folder: str, way: str) -> m.Figures:
    """Enter a control group, and time two passes of a way, none of whose data are in the page cache."""
    m.evict(Path(folder))
    enter(entrance)
    own = m.anonymous_mib()
    start_s = time.perf_counter()
    epochs = file_of(name).BEYOND[way](Path(folder))
    opened_s = time.perf_counter() - start_s
    first_us = m.step_times_us(of_a_while(epochs(0), pass_s))
    busy_s = time.process_time()
    later_us = m.step_times_us(of_a_while(epochs(1), pass_s))
    busy_s = time.process_time() - busy_s
    return {
        m.FIRST: float(first_us.mean()),
        m.LATER: float(later_us.mean()),
        m.P50: float(np.percentile(later_us, 50)),
        m.P99: float(np.percentile(later_us, 99)),
        m.OPEN: 1e3 * opened_s + first_us[0] / 1e3,
        m.OWN: max(0.0, m.anonymous_mib() - own),
        m.CPU: 1e9 * busy_s / (later_us.size * m.BATCH_TOKENS),
    }


def direct(entrance: str, folder: str) -> m.Figures:
    """Return the limit: the data once from front to back past the page cache."""
    enter(entrance)
    us = 4e6 * m.BATCH_TOKENS / m.direct_bytes_per_s(Path(folder) / "tokens.npy")
    return {m.LATER: us}


def direct_in_threads(entrance: str, folder: str, pass_s: float) -> m.Figures:
    """Return the limit of whole batches in any order: past the page cache, in threads."""
    enter(entrance)
    path = Path(folder) / "tokens.npy"
    batches = os.path.getsize(path) // (4 * m.BATCH_TOKENS) - 1
    with open(os.open(path, os.O_RDONLY | os.O_DIRECT), "rb", buffering=0) as file:

        def read(numbers: Any) -> int:
            buffer = mmap.mmap(-1, 4 * m.BATCH_TOKENS)  # page-aligned for O_DIRECT
            places = (int(number) * len(buffer) for number in numbers)
            return sum(os.preadv(file.fileno(), [buffer], place) for place in of_a_while(places, pass_s))

        parts = np.array_split(np.random.default_rng(m.SEED).permutation(batches), DIRECT_READERS)
        start_s = time.perf_counter()
        with ThreadPoolExecutor(DIRECT_READERS) as pool:
            num_bytes = sum(pool.map(read, parts))
        us = 1e6 * (time.perf_counter() - start_s) * 4 * m.BATCH_TOKENS / num_bytes
    return {m.FIRST: us, m.LATER: us}


def enter(entrance: str) -> None:
    """Have this process enter a control group."""
    Path(entrance).write_text(f"{os.getpid()}")


def of_a_while(batches: Iterable[Any], pass_s: float) -> Iterator[Any]:
    """Yield batches until some seconds have passed."""
    end_s = time.monotonic() + pass_s
    for batch in batches:
        yield batch
        if time.monotonic() > end_s:
            return


# --- in the process that asks ------------------------------------------------------------------------------------


def measure(run: m.Run) -> Iterator[dict[str, Any]]:
    """Yield the one table.

    Raises
    ------
    UnavailableRow
        This machine cannot cap the memory of a process.
    """
    mib = max(run.mib, LEAST_MIB)
    num_bytes = mib * m.MIB // SHARE
    try:
        place = memory_cap.usable_place(num_bytes)
    except memory_cap.NoCapError as error:
        raise m.UnavailableRow(str(error)) from error
    m.write_tokens(run.folder / "tokens.npy", mib * m.MIB_BATCHES * m.BATCH_SIZE)
    in_group = partial(capped, place, num_bytes)
    pass_s = QUICK_PASS_S if run.quick else PASS_S
    builds: dict[str, m.Build] = {}
    skipped: dict[str, str] = {}
    ways: list[m.Way] = []
    try:
        for name in FILES:
            builds[name] = build_of(name, run, __name__)
            try:
                found = builds[name].call("prepare", name, run.folder)
            except m.CallError as error:
                skipped[name] = reason_of(error)
                continue
            for way in found:
                check = partial(builds[name].call, "seen", name, run.folder, way)
                time_it = partial(in_group, builds[name], "row", pass_s, name, run.folder, way)
                baseline = _baseline(way)
                bar = BARS.get(baseline) if way.startswith("Loader") and "access" not in way else None
                bars = {} if bar is None else {m.FIRST: bar, m.LATER: bar}
                ways.append(m.Way(way, _Checked(check, time_it), baseline, bars))
        ways.append(m.Way(LIMIT, partial(in_group, builds[OURS], "direct", run.folder)))
        ways.append(m.Way(BATCHES_LIMIT, partial(in_group, builds[OURS], "direct_in_threads", run.folder, pass_s)))
        table = m.compare(run.titles[0], ways, run.rounds)
    finally:
        for build in builds.values():
            build.close()
    table["skipped"] = skipped | table["skipped"]
    note = f"{NOTES[run.titles[0]]} Its disk reads ahead {_read_ahead_kib(run.folder)} KiB."
    yield table | {"mib": mib, "note": note, "conclusion": conclusion(table, mib)}


def _read_ahead_kib(folder: Path) -> str:
    """Return how much the kernel reads at once where a mapped file is touched."""
    device = folder.stat().st_dev
    try:
        return f"{int(Path(f'/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb').read_text()):,}"
    except OSError:
        return "an unknown number of"


class _Checked:
    """A row whose tokens are counted once, without a cap, before it is timed."""

    def __init__(self, check: Callable[[], float], time_it: Callable[[], m.Figures]) -> None:
        self._check = check
        self._time_it = time_it
        self._seen: float | None = None

    def __call__(self) -> m.Figures:
        if self._seen is None:
            self._seen = self._check()
        return self._time_it() | {m.SEEN: self._seen}


def _baseline(way: str) -> str:
    for ending in ENDINGS:
        if way.endswith(ending):
            return "" if way.startswith(THREADS) else f"{THREADS}{ending}"
    if way in ("Loader", "Loader, .batch"):
        return BATCHES_LIMIT
    if way.startswith(LOOP):
        return LIMIT if way.endswith("sequential") else ""
    return f"{LOOP}, sequential" if way.endswith("sequential") else LOOP


def capped(place: memory_cap.Place, num_bytes: int, build: m.Build, function: str, *arguments: Any) -> m.Figures:
    """Call a function of a build, which enters a control group first; return its figures, and the most memory."""
    with memory_cap.group(place, num_bytes) as group:
        figures: m.Figures = build.call(function, group.entrance, *arguments)
        return figures | {PEAK: group.peak_mib()}


def conclusion(table: Mapping[str, Any], mib: int) -> str:
    """Return one sentence of the rates and ratios that the table shows: the default loader, and whatever was killed."""
    rows = {row["name"]: row for row in table["rows"]}
    parts = []
    for name, order in (("Loader", "shuffled"), ("Loader, sequential", "in sequence")):
        if name in rows:
            row = rows[name]
            median, low, high = (m.BATCH_TOKENS / us for us in (row["figures"][m.LATER][k] for k in (0, 2, 1)))
            rate = f"`{name}` reads {median:,.0f} ({low:,.0f} to {high:,.0f}) M tokens/s {order}"
            ratios = [row["ratios"][m.LATER]] if m.LATER in row["ratios"] else []
            times = [f"{at:.2f} ({least:.2f} to {most:.2f}) of `{row['baseline']}`" for at, least, most in ratios]
            parts.append(", ".join([rate, *times]))
    parts += [f"`{name}` is killed" for name, reason in table["skipped"].items() if reason.startswith("killed")]
    return f"With {mib // SHARE:,} MiB of memory for {mib:,} MiB of data, {'; '.join(parts)}." if parts else ""
