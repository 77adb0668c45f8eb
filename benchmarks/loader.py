"""The loader: what it adds to a bare read, and what it hides of a disk.

Every ratio pairs two ways to get the same tokens, measured in turn in one process. The bars:

- a warm epoch takes at most 15 % longer than the same `read_batch_torch` calls;
- `shuffle="records"` reaches 0.9 of a bare 32-row gather from an `np.memmap`;
- a cold epoch in global order reaches 70 % of the disk's sequential O_DIRECT bandwidth;
- the first batch of a store of 4,400 shards comes within 50 ms, of 100,000 shards within 1 s;
- a loader takes less than 12 MB of memory of its own, whatever the size of the store.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import zb_hdf5.h5read
import zb_hdf5.native  # noqa: F401  (imports are not part of the time to the first batch)
from benchmarks.measure import (
    BATCH_SIZE,
    BATCH_TOKENS,
    MIB,
    SEED,
    SEQ_LEN,
    Bar,
    Spread,
    bar_plot,
    evict,
    machine,
    machine_line,
    markdown_table,
    memory_mib,
    resident_share,
    run_fresh,
    say_progress,
    verdict,
    wait_for_quiet,
    warm,
    write_tokens,
)
from converters.cli import convert
from zb_hdf5 import Loader, ShardIndex, open_reader

PREFETCHES: Final = (0, 2, 8, "auto")
SHARD_COUNTS: Final = {4_400: 0.050, 100_000: 1.0}
LINKS_PER_FILE: Final = 50_000  # ext4 allows 65,000 names of one file
DIRECT_READ_BYTES: Final = 8 * MIB
WARM_BAR, RECORDS_BAR, COLD_BAR, MEMORY_BAR_MIB = 1.15, 0.9, 0.7, 12.0

Epoch = Callable[[], Iterable[Any]]


def measure(folder: Path, *, quick: bool, repeats: int | None) -> dict[str, Any]:
    """Measure everything; sizes in MiB, rates in tokens per second."""
    num_batches = 128 if quick else 4096
    rounds = repeats or (3 if quick else 15)
    write_tokens(folder / "tokens.npy", num_batches * BATCH_SIZE)
    for target, name in (("hdf5", "t.h5"), ("batch", "t.batch")):
        arguments = [f"npy-to-{target}", str(folder / "tokens.npy"), str(folder / name), "--quiet"]
        convert.main(arguments, standalone_mode=False)
        evict(folder / name)  # what a job meets was not written by the same machine a moment ago
        warm(folder / name)
    shard_counts = [100] if quick else list(SHARD_COUNTS)
    return {
        "machine": machine(),
        "machine_line": machine_line(),
        "tokens": num_batches * BATCH_TOKENS,
        "quick": quick,
        "rounds": rounds,
        "warm": _fresh(measure_warm, folder, rounds),
        "records": _fresh(measure_records, folder, rounds),
        "cold": [_fresh(measure_cold, folder) for _ in range(1 if quick else 5)],
        "first_batch": {str(count): _fresh(measure_many_shards, folder, count) for count in shard_counts},
        "memory": {access: _fresh(measure_memory, folder, access) for access in ("mmap", "pread")},
    }


def _fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    wait_for_quiet(3.0)
    result, _ = run_fresh(function, *arguments, preload="benchmarks.loader")
    return result


def _seconds(batches: Iterable[Any]) -> float:
    start_s = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start_s


def _in_turn(epochs: dict[str, Epoch], rounds: int) -> dict[str, list[float]]:
    """Run all epochs in turn, beginning with another one each round; return seconds."""
    for epoch in epochs.values():
        _seconds(epoch())
    names, seconds = list(epochs), {name: [] for name in epochs}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            say_progress(f"{name}, round {number + 1} of {rounds}")
            seconds[name].append(_seconds(epochs[name]()))
    return seconds


# --- warm --------------------------------------------------------------------------------------------------------


def measure_warm(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Compare loaders with the bare reads that they make, in the same order, on warm data."""
    rows = []
    for file in ("t.h5", "t.batch"):
        for access in ("mmap", "pread"):
            reader = open_reader(folder / file, access=access)
            for shuffle in ("block", "global"):
                rows += _warm_rows(reader, f"{file[2:]} {access}", shuffle, rounds)
    return rows


def _warm_rows(reader: Any, name: str, shuffle: str, rounds: int) -> list[dict[str, Any]]:
    options = {"shuffle": shuffle, "seed": SEED, "rank": 0, "world_size": 1}
    plain = Loader(reader, prefetch=0, **options)
    indices = plain.requests_of_steps(np.arange(len(plain)))
    epochs: dict[str, Epoch] = {"bare": lambda: map(reader.read_batch_torch, indices)}
    for prefetch in PREFETCHES:
        loader = Loader(reader, prefetch=prefetch, **options)
        epochs[f"prefetch {prefetch}"] = lambda loader=loader: loader
    narrow = Loader(reader, prefetch=0, dtype=torch.int32, **options)
    epochs["int32"] = lambda: narrow
    seconds = _in_turn(epochs, rounds)
    tokens = len(indices) * BATCH_TOKENS
    return [
        {
            "name": f"{name}, {shuffle}, {way}",
            "tokens_per_s": Spread.of([tokens / s for s in seconds[way]]).as_json(),
            "over_bare": Spread.quartiles(
                [a / b for a, b in zip(seconds[way], seconds["bare"], strict=True)]
            ).as_json(),
        }
        for way in epochs
    ]


def measure_records(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Compare `shuffle="records"` with the shortest gather that numpy has, of the same rows."""
    rows = []
    for file in ("t.h5", "t.batch"):
        loader = Loader(folder / file, access="mmap", shuffle="records", seed=SEED, rank=0, world_size=1, prefetch=0)
        run = loader.reader.extents.runs[0]
        shape = (run.num_batches * BATCH_SIZE, SEQ_LEN)
        memmap = np.memmap(folder / file, loader.reader.dtype, "r", run.base, shape)
        records = loader.requests_of_steps(np.arange(len(loader)))

        def bare(memmap: Any = memmap, records: Any = records) -> Iterable[torch.Tensor]:
            return (torch.from_numpy(memmap[rows].astype(np.int64)) for rows in records)

        seconds = _in_turn({"bare": bare, "records": lambda loader=loader: loader}, rounds)
        ratios = [a / b for a, b in zip(seconds["bare"], seconds["records"], strict=True)]
        rate = Spread.of([len(records) * BATCH_TOKENS / s for s in seconds["records"]])
        rows.append({"name": file[2:], "tokens_per_s": rate.as_json(), "of_memmap": Spread.quartiles(ratios).as_json()})
    return rows


# --- cold --------------------------------------------------------------------------------------------------------


def measure_cold(folder: Path) -> dict[str, Any]:
    """Compare one cold epoch in global order with the disk's own sequential bandwidth, one after the other."""
    path = folder / "t.h5"
    found: dict[str, Any] = {"direct_bytes_per_s": _direct_bandwidth(path)}
    for prefetch in (0, 2, 8, "auto"):
        evict(path)
        cached = resident_share(path)
        loader = Loader(path, shuffle="global", access="pread", prefetch=prefetch, rank=0, world_size=1)
        rate = loader.num_records * SEQ_LEN * loader.reader.dtype.itemsize / _seconds(loader)
        found[f"prefetch {prefetch}"] = {"bytes_per_s": rate, "cached": cached}
        loader.close()
    found["direct_bytes_per_s"] = max(found["direct_bytes_per_s"], _direct_bandwidth(path))
    return found


def _direct_bandwidth(path: Path) -> float:
    """Read the file once from front to back past the page cache, in large blocks; bytes per second."""
    evict(path)
    buffer = mmap.mmap(-1, DIRECT_READ_BYTES)  # page-aligned, as O_DIRECT wants it
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        start_s, total = time.perf_counter(), 0
        while count := os.preadv(fd, [buffer], total):
            total += count
            if count % mmap.PAGESIZE:
                break
        return total / (time.perf_counter() - start_s)
    finally:
        os.close(fd)


# --- large stores ------------------------------------------------------------------------------------------------


def measure_many_shards(folder: Path, count: int) -> dict[str, Any]:
    """Time the first batch of a store of `count` shards: names of a few files, which the loader cannot know."""
    store = folder / f"store-{count}"
    if not store.exists():
        _make_many_shards(folder, store, count)
    start_s = time.perf_counter()
    loader = Loader(store, rank=0, world_size=1)
    next(iter(loader))
    seconds = time.perf_counter() - start_s
    state_bytes = len(json.dumps(loader.state_dict()))
    return {"seconds": seconds, "state_bytes": state_bytes, "batches": loader.reader.num_batches}


def _make_many_shards(folder: Path, store: Path, count: int) -> None:
    arguments = [f"{folder / 'tokens.npy'}", str(store), "--shards", "1", "--quiet"]
    convert.main(["npy-to-hdf5", *arguments], standalone_mode=False)
    index = ShardIndex.load(store)
    (entry,) = index.shards
    entries = [replace(entry, path=f"shard-{number:06}.h5") for number in range(count)]
    for start in range(0, count, LINKS_PER_FILE):
        original = store / entry.path
        if start:
            original = store / f"shard-original-{start}.h5"
            original.write_bytes((store / entry.path).read_bytes())
        for one in entries[start : start + LINKS_PER_FILE]:
            os.link(original, store / one.path)
    replace(index, shards=tuple(entries)).save(store)


def measure_memory(folder: Path, access: str) -> dict[str, float]:
    """Return the growth of the process over an epoch in global order, in MiB."""
    before = memory_mib()
    loader = Loader(folder / "t.h5", access=access, prefetch=8, rank=0, world_size=1)
    _seconds(loader)
    after = memory_mib()
    return {key: after[key] - before[key] for key in ("RssAnon", "RssFile")}


# --- reporting ---------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Return the tables, and whether each bar was met, as markdown."""
    lines = [
        f"## The loader over {result['tokens'] / 1e6:,.1f} M tokens of [32, 512] batches",
        f"{result['machine_line']}. {result['rounds']} rounds in turn; medians, quartiles in brackets.",
        "### Warm page cache: time of an epoch over the bare `read_batch_torch` calls",
        markdown_table(
            ("row", "M tokens/s", "over bare"),
            [
                (row["name"], f"{row['tokens_per_s']['median'] / 1e6:,.0f}", Spread(**row["over_bare"]).text(2))
                for row in result["warm"]
            ],
        ),
        "### Every record shuffled: rate over a bare `np.memmap` gather of 32 rows",
        markdown_table(
            ("row", "M tokens/s", "of memmap"),
            [
                (row["name"], f"{row['tokens_per_s']['median'] / 1e6:,.0f}", Spread(**row["of_memmap"]).text(2))
                for row in result["records"]
            ],
        ),
        "### Cold: an epoch in global order over the disk's sequential O_DIRECT bandwidth",
        markdown_table(
            ("prefetch", "MB/s", "of O_DIRECT"),
            [
                (
                    str(prefetch),
                    f"{Spread.of([run[f'prefetch {prefetch}']['bytes_per_s'] / 1e6 for run in result['cold']]).text()}",
                    Spread.of(_cold_ratios(result, prefetch)).text(2),
                )
                for prefetch in PREFETCHES
            ],
        ),
        "### Large stores and memory",
        markdown_table(
            ("figure", "value"),
            [
                *(
                    (f"first batch of {int(count):,} shards", f"{found['seconds'] * 1e3:,.1f} ms")
                    for count, found in result["first_batch"].items()
                ),
                *(
                    (f"memory of an epoch, {access}", f"{m['RssAnon']:.1f} MiB own, {m['RssFile']:.1f} MiB mapped")
                    for access, m in result["memory"].items()
                ),
                ("state", f"{max(found['state_bytes'] for found in result['first_batch'].values())} bytes"),
            ],
        ),
        *(f"- {text}: {verdict(met, result['quick'])}" for text, met in bars(result)),
    ]
    return "\n\n".join(lines[:-5]) + "\n\n" + "\n".join(lines[-5:])


def _cold_ratios(result: dict[str, Any], prefetch: int | str) -> list[float]:
    return [run[f"prefetch {prefetch}"]["bytes_per_s"] / run["direct_bytes_per_s"] for run in result["cold"]]


def bars(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return what was asked for, with the figure that answers it, and whether it was met."""
    autos = {row["name"]: row["over_bare"]["median"] for row in result["warm"] if row["name"].endswith("auto")}
    worst = max(autos, key=lambda name: autos[name])
    records = min(row["of_memmap"]["median"] for row in result["records"])
    cold = Spread.of(_cold_ratios(result, "auto")).median
    slow = [int(n) for n, found in result["first_batch"].items() if found["seconds"] > SHARD_COUNTS.get(int(n), 0.05)]
    memory = result["memory"]["pread"]["RssAnon"]
    return [
        (f"warm loader at most {WARM_BAR:.2f} of bare reads: {autos[worst]:.2f} ({worst})", autos[worst] <= WARM_BAR),
        (f"records at least {RECORDS_BAR} of a memmap gather: {records:.2f}", records >= RECORDS_BAR),
        (f"cold global order at least {COLD_BAR} of O_DIRECT: {cold:.2f}", cold >= COLD_BAR),
        (f"first batch of large stores in time; too slow: {slow or 'none'}", not slow),
        (f"own memory under {MEMORY_BAR_MIB:.0f} MiB: {memory:.1f}", memory < MEMORY_BAR_MIB),
    ]


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw the warm rates of all loaders."""
    drawn = [
        Bar(row["name"], Spread(**row["tokens_per_s"]), row["name"].split(",")[0])
        for row in result["warm"]
        if "global" in row["name"]
    ]
    bar_plot(
        path, drawn, title="The loader, warm page cache, global order", subtitle=result["machine_line"],
        unit="M tokens/s", scale=1e-6,
    )  # fmt: skip
