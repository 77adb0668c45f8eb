"""The paths that users take: a `DataLoader`, shuffled records, a cold epoch in each order, a store of many shards.

Every ratio pairs two ways to get the same tokens, measured in turn in one process. The bars:

- `DataLoader(loader.dataset(), batch_size=None)` reaches 0.9 of the same `DataLoader` over an `np.memmap`;
- `shuffle="records"` over 1 and over 4 shards reaches 0.9 of `torch.from_numpy(memmap[rows].astype(np.int64))`;
- whole batches by pread with `verify="auto"` reach 0.85 of those with `verify="none"`;
- a cold epoch in each order reaches 0.9 of the disk's sequential O_DIRECT bandwidth;
- a second epoch from a cache reaches 0.9 of the store itself, on the same disk;
- later batches of 4,400 shards take at most 1.5 times those of one; opening takes 50 ms, of 50,000 shards 0.5 s and
  12 MiB.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import zb_hdf5.formats.hdf5.reader
import zb_hdf5.formats.native  # noqa: F401  (imports are not part of the time to the first batch)
from benchmarks.loader import _direct_bandwidth, _fresh, _in_turn, _make_many_shards
from benchmarks.measure import (
    BATCH_SIZE,
    BATCH_TOKENS,
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
    seconds_of,
    write_tokens,
)
from zb_hdf5 import Loader, open_reader
from zb_hdf5.converters.cli import convert

SHARDS: Final = (1, 4)
SHARD_COUNTS: Final = (1, 4_400, 50_000)
COLD_BATCHES: Final = 24_576  # 1.5 GiB
SHARD_BATCHES: Final = 15
COLD_ORDERS: Final = ("sequential", "block", "global")
ONE_RANK: Final[dict[str, Any]] = {"rank": 0, "world_size": 1, "seed": SEED}


class MemmapBatches(Dataset[torch.Tensor]):
    """The plainest data set of the same batches."""

    def __init__(self, path: Path) -> None:
        self._batches = np.load(path, mmap_mode="r").reshape(-1, BATCH_SIZE, SEQ_LEN)
        self._order = np.random.default_rng(SEED).permutation(len(self._batches))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, step: int) -> torch.Tensor:
        return torch.from_numpy(self._batches[self._order[step]].astype(np.int64))


def measure(folder: Path, *, quick: bool, repeats: int | None) -> dict[str, Any]:
    """Measure everything; rates in tokens or bytes per second."""
    rounds = repeats or (3 if quick else 15)
    write_tokens(folder / "tokens.npy", (128 if quick else 2048) * BATCH_SIZE)
    for count in SHARDS:
        _convert(folder / "tokens.npy", folder / f"store-of-{count}", "--shards", str(count))
    (folder / "few").mkdir()
    write_tokens(folder / "few" / "tokens.npy", SHARD_BATCHES * BATCH_SIZE)
    counts = (1, 100) if quick else SHARD_COUNTS
    for count in counts:
        _make_many_shards(folder / "few", folder / f"many-{count}", count)
    return {
        "machine": machine(),
        "machine_line": machine_line(),
        "rounds": rounds,
        "warm": [
            _fresh(measure_dataset, folder, rounds),
            *_fresh(measure_records, folder, rounds),
            *_fresh(measure_checks, folder, rounds),
        ],
        "cached": _fresh(measure_cached, folder, rounds),
        "cold": _fresh(measure_cold, folder, 256 if quick else COLD_BATCHES, 1 if quick else 5),
        "many_shards": [_fresh(measure_shards, folder, count) for count in counts],
    }


def _convert(source: Path, target: Path, *options: str) -> None:
    convert.main(["npy-to-hdf5", str(source), str(target), "--quiet", *options], standalone_mode=False)


def _compared(name: str, ours: Callable[[], Iterable[Any]], theirs: Callable[[], Iterable[Any]], rounds: int) -> Any:
    seconds = _in_turn({"ours": ours, "theirs": theirs}, rounds)
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    return {
        "name": name,
        "seconds": statistics.median(seconds["ours"]),
        "of_memmap": Spread.quartiles(ratios).as_json(),
    }


def measure_dataset(folder: Path, rounds: int) -> dict[str, Any]:
    """Compare `loader.dataset()` with a data set over an `np.memmap`, both in a `DataLoader` without workers."""
    ours = Loader(folder / "store-of-1", **ONE_RANK).dataset()
    theirs = MemmapBatches(folder / "tokens.npy")
    name = "DataLoader(loader.dataset())"
    found = _compared(
        name, lambda: DataLoader(ours, batch_size=None), lambda: DataLoader(theirs, batch_size=None), rounds
    )
    return found | {"tokens": len(ours) * BATCH_TOKENS}


def measure_records(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Compare `shuffle="records"` with a bare gather of the same number of rows from an `np.memmap`."""
    memmap, rows = np.load(folder / "tokens.npy", mmap_mode="r"), []
    for count in SHARDS:
        loader = Loader(folder / f"store-of-{count}", shuffle="records", prefetch=0, **ONE_RANK)
        records = loader.plan.requests_of_steps(np.arange(len(loader)))

        def bare(records: Any = records) -> Iterable[torch.Tensor]:
            return (torch.from_numpy(memmap[rows].astype(np.int64)) for rows in records)

        found = _compared(f"records, {count} shards", lambda loader=loader: loader, bare, rounds)
        rows.append(found | {"tokens": len(records) * BATCH_TOKENS})
    return rows


def measure_cached(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Compare epochs from a cache that was filled in the first one with those of the store, on the same disk."""
    rows: list[dict[str, Any]] = []
    ways = {"global": {}, "records": {"shuffle": "records"}, "global, int32": {"dtype": torch.int32}}
    for name, options in ways.items():
        plain, cached = (
            Loader(folder / "store-of-4", prefetch=0, cache=cache, **options, **ONE_RANK)
            for cache in (None, folder / "cache")
        )
        list(cached)
        found = _compared(name, lambda loader=cached: loader, lambda loader=plain: loader, rounds)
        rows.append({"name": name, "of_store": found["of_memmap"]})
    return rows


def measure_checks(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Compare whole batches by pread, with and without a look at their crc32, with a loop over an `np.memmap`."""
    theirs, rows = MemmapBatches(folder / "tokens.npy"), []
    for verify in ("none", "auto"):
        loader = Loader(folder / f"store-of-{SHARDS[-1]}", access="pread", verify=verify, prefetch=0, **ONE_RANK)
        name = f'pread, verify="{verify}"'
        found = _compared(
            name, lambda loader=loader: loader, lambda: map(theirs.__getitem__, range(len(theirs))), rounds
        )
        rows.append(found | {"tokens": len(theirs) * BATCH_TOKENS})
    return rows


def measure_cold(folder: Path, num_batches: int, rounds: int) -> list[dict[str, Any]]:
    """Compare a cold epoch in each order with the disk's sequential O_DIRECT bandwidth, in turn."""
    write_tokens(folder / "cold.npy", num_batches * BATCH_SIZE)
    _convert(folder / "cold.npy", folder / "cold.h5")
    path, rates = folder / "cold.h5", {order: [] for order in ("O_DIRECT", *COLD_ORDERS)}
    for _ in range(rounds):
        rates["O_DIRECT"].append(_direct_bandwidth(path))
        for order in COLD_ORDERS:
            evict(path)
            with Loader(path, shuffle=order, **ONE_RANK) as loader:
                rates[order].append(num_batches * BATCH_TOKENS * 4 / seconds_of(loader))
    return [
        {
            "name": order,
            "bytes_per_s": Spread.of(found).as_json(),
            "of_direct": Spread.quartiles([a / b for a, b in zip(found, rates["O_DIRECT"], strict=True)]).as_json(),
        }
        for order, found in rates.items()
    ]


def measure_shards(folder: Path, count: int) -> dict[str, Any]:
    """Open a store of `count` shards, and read all shards once before later batches are timed."""
    path = folder / f"many-{count}"
    before, start_s = memory_mib()["RssAnon"], time.perf_counter()
    reader = open_reader(path)
    opening_s, anonymous_mib = time.perf_counter() - start_s, memory_mib()["RssAnon"] - before
    for first in range(0, reader.num_batches, SHARD_BATCHES):
        reader.read_batch_torch(first)
    loader = Loader(reader, prefetch=0, **ONE_RANK)
    later = []
    for _ in range(5):
        start_s = time.perf_counter()
        batches = sum(1 for _ in islice(iter(loader), 4096))
        later.append((time.perf_counter() - start_s) / batches)
    return {"shards": count, "opening_s": opening_s, "anonymous_mib": anonymous_mib, "later_s": min(later)}


def report(result: dict[str, Any]) -> str:
    """Return the tables as markdown."""
    warm = [
        (row["name"], f"{row['tokens'] / row['seconds'] / 1e6:,.0f}", Spread(**row["of_memmap"]).text(2))
        for row in result["warm"]
    ]
    cold = [
        (row["name"], Spread(**{k: v / 1e6 for k, v in row["bytes_per_s"].items()}).text(), _text(row["of_direct"]))
        for row in result["cold"]
    ]
    many = [
        (f"{row['shards']:,}", f"{row['opening_s'] * 1e3:.1f}", f"{row['anonymous_mib']:.1f}",
         f"{row['later_s'] * 1e6:.1f}")
        for row in result["many_shards"]
    ]  # fmt: skip
    lines = [
        "## The paths that users take",
        f"{result['machine_line']}. {result['rounds']} rounds in turn; medians, quartiles in brackets.",
        "### Warm, beside the same over an `np.memmap`",
        markdown_table(("row", "M tokens/s", "of memmap"), warm),
        "### From a cache, beside the store itself",
        markdown_table(("order", "of the store"), [(row["name"], _text(row["of_store"])) for row in result["cached"]]),
        "### Cold, beside the disk's sequential O_DIRECT bandwidth",
        markdown_table(("order", "MB/s", "of O_DIRECT"), cold),
        "### Many shards",
        markdown_table(("shards", "opening, ms", "anonymous, MiB", "a later batch, µs"), many),
    ]
    return "\n\n".join(lines)


def _text(spread: dict[str, float]) -> str:
    return Spread(**spread).text(2)


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw the ratios of the warm rows and of the cold orders."""
    bars = [Bar(row["name"], Spread(**row["of_memmap"]), "of np.memmap") for row in result["warm"]]
    bars += [Bar(row["name"], Spread(**row["of_direct"]), "of O_DIRECT") for row in result["cold"]]
    bar_plot(path, bars, title="The paths that users take", subtitle=result["machine_line"], unit="ratio", digits=2)
