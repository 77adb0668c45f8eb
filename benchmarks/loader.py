"""The loader: what it adds to a bare read, and what it hides of a disk.

Every ratio pairs two ways to get the same tokens. One pass over a store comes first, page cache warm, each way in a
fresh process; later epochs are measured in turn in one process. The bars:

- one pass in global order, as int64, reaches 0.9 of widening the same batches from memory;
- one pass of int32 takes at most twice the time of bare views of a private mapping;
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
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

import zb_hdf5.formats.hdf5.reader
import zb_hdf5.formats.native
import zb_hdf5.store.shards  # noqa: F401  (imports are not part of the time to the first batch)
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
    seconds_of,
    verdict,
    wait_for_quiet,
    warm,
    write_tokens,
)
from zb_hdf5 import Loader, ShardIndex, open_reader
from zb_hdf5.converters.cli import convert
from zb_hdf5.loaders.order import GlobalOrder
from zb_hdf5.spec import HEADER_BYTES

PREFETCHES: Final = (0, 2, 8, "auto")
SHARD_COUNTS: Final = {4_400: 0.050, 100_000: 1.0}
LINKS_PER_FILE: Final = 50_000  # ext4 allows 65,000 names of one file
DIRECT_READ_BYTES: Final = 8 * MIB
WARM_BAR, RECORDS_BAR, COLD_BAR, MEMORY_BAR_MIB = 1.15, 0.9, 0.7, 12.0
#: Rows of one pass beside their floors; the bar is the least rate, of the floor's.
ONE_PASS: Final = {
    "int64": ("memory", 0.9),
    "int64 uint16": ("memory uint16", 0.9),
    "int64 mmap": ("memory", None),
    "preadv loop": ("memory", None),
    "np.memmap loop": ("memory", None),
    "int32": ("int32 view", 0.5),
}

Epoch = Callable[[], Iterable[Any]]


def measure(folder: Path, *, quick: bool, repeats: int | None) -> dict[str, Any]:
    """Measure everything; sizes in MiB, rates in tokens per second."""
    num_batches = 128 if quick else 4096
    rounds = repeats or (3 if quick else 15)
    write_tokens(folder / "tokens.npy", num_batches * BATCH_SIZE)
    for target, name, *options in (
        ("hdf5", "t.h5"),
        ("batch", "t.batch"),
        ("hdf5", "store-h5", "--shards", "4"),
        ("hdf5", "store-h5-uint16", "--shards", "4", "--dtype", "uint16"),
        ("batch", "store-batch", "--shards", "4"),
    ):
        arguments = [f"npy-to-{target}", str(folder / "tokens.npy"), str(folder / name), "--quiet", *options]
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
        "one_pass": measure_one_pass(folder, num_batches, min(rounds, 9)),
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


def _in_turn(epochs: dict[str, Epoch], rounds: int) -> dict[str, list[float]]:
    """Run all epochs in turn, beginning with another one each round; return seconds."""
    for epoch in epochs.values():
        seconds_of(epoch())
    names, seconds = list(epochs), {name: [] for name in epochs}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            say_progress(f"{name}, round {number + 1} of {rounds}")
            seconds[name].append(seconds_of(epochs[name]()))
    return seconds


# --- one pass ----------------------------------------------------------------------------------------------------


def measure_one_pass(folder: Path, num_batches: int, rounds: int) -> list[dict[str, Any]]:
    """Read each batch once in global order, each way in a fresh process, in turn; rates and ratios to the floors."""
    names = [*dict.fromkeys([*ONE_PASS, *(floor for floor, _ in ONE_PASS.values())])]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            rates[name].append(num_batches * BATCH_TOKENS / _fresh(_seconds_of_one_pass, folder, name))
    rows = []
    for name in names:
        floor, bar = ONE_PASS.get(name, (name, None))
        ratios = [a / b for a, b in zip(rates[name], rates[floor], strict=True)]
        row = {"name": name, "floor": floor, "bar": bar, "tokens_per_s": Spread.of(rates[name]).as_json()}
        rows.append({**row, "of_floor": Spread.quartiles(ratios).as_json()})
    return rows


def _seconds_of_one_pass(folder: Path, name: str) -> float:
    torch.from_numpy(np.zeros((BATCH_SIZE, SEQ_LEN), np.uint32).astype(np.int64))  # first use of the libraries
    return seconds_of(_ONE_PASS_OPENERS[name](folder))


def _open_store(folder: Path, name: str, **options: Any) -> Iterable[torch.Tensor]:
    return Loader(folder / name, shuffle="global", seed=SEED, rank=0, world_size=1, **options)


def _global_order(num_batches: int) -> list[int]:
    return GlobalOrder(num_batches, SEED, 0).indices(np.arange(num_batches)).tolist()


def _from_memory(folder: Path, dtype: str) -> Iterable[torch.Tensor]:
    tokens = np.load(folder / "tokens.npy").astype(dtype, copy=False).reshape(-1, BATCH_SIZE, SEQ_LEN)
    return (torch.from_numpy(tokens[i].astype(np.int64)) for i in _global_order(len(tokens)))


def _from_memmap(folder: Path) -> Iterable[torch.Tensor]:
    tokens = _memmap(folder, "r")
    return (torch.from_numpy(tokens[i].astype(np.int64)) for i in _global_order(len(tokens)))


def _int32_views(folder: Path) -> Iterable[torch.Tensor]:
    tokens = _memmap(folder, "c").view(np.int32)
    return (torch.from_numpy(tokens[i]) for i in _global_order(len(tokens)))


def _memmap(folder: Path, mode: str) -> npt.NDArray[np.uint32]:
    tokens = np.memmap(folder / "t.batch", np.uint32, mode, HEADER_BYTES)
    return tokens.view(np.ndarray).reshape(-1, BATCH_SIZE, SEQ_LEN)


def _by_preadv(folder: Path) -> Iterable[torch.Tensor]:
    fd = os.open(folder / "t.batch", os.O_RDONLY)
    buffer = np.empty((BATCH_SIZE, SEQ_LEN), np.uint32)
    for i in _global_order((os.fstat(fd).st_size - HEADER_BYTES) // buffer.nbytes):
        os.preadv(fd, (buffer,), HEADER_BYTES + i * buffer.nbytes)
        yield torch.from_numpy(buffer.astype(np.int64))


_ONE_PASS_OPENERS: Final[dict[str, Callable[[Path], Iterable[torch.Tensor]]]] = {
    "int64": partial(_open_store, name="store-h5"),
    "int64 uint16": partial(_open_store, name="store-h5-uint16"),
    "int64 mmap": partial(_open_store, name="store-h5", access="mmap"),
    "int32": partial(_open_store, name="store-h5", dtype=torch.int32),
    "memory": partial(_from_memory, dtype="uint32"),
    "memory uint16": partial(_from_memory, dtype="uint16"),
    "int32 view": _int32_views,
    "preadv loop": _by_preadv,
    "np.memmap loop": _from_memmap,
}


# --- warm --------------------------------------------------------------------------------------------------------


def measure_warm(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Compare loaders with the bare reads that they make, in the same order, on warm data."""
    rows = []
    for store in ("store-h5", "store-batch"):
        for access in ("auto", "mmap"):
            reader = open_reader(folder / store, access=access)
            for shuffle in ("block", "global"):
                rows += _warm_rows(reader, f"{store[6:]} {access}", shuffle, rounds)
    return rows


def _warm_rows(reader: Any, name: str, shuffle: str, rounds: int) -> list[dict[str, Any]]:
    options = {"shuffle": shuffle, "seed": SEED, "rank": 0, "world_size": 1}
    plain = Loader(reader, prefetch=0, **options)
    indices = plain.plan.requests_of_steps(np.arange(len(plain)))
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
        records = loader.plan.requests_of_steps(np.arange(len(loader)))

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
        rate = loader.num_records * SEQ_LEN * loader.reader.dtype.itemsize / seconds_of(loader)
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
    seconds_of(loader)
    after = memory_mib()
    return {key: after[key] - before[key] for key in ("RssAnon", "RssFile")}


# --- reporting ---------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Return the tables, and whether each bar was met, as markdown."""
    lines = [
        f"## The loader over {result['tokens'] / 1e6:,.1f} M tokens of [32, 512] batches",
        f"{result['machine_line']}. {result['rounds']} rounds in turn; medians, quartiles in brackets.",
        "### One pass in global order: a fresh process, page cache warm, 4 shards",
        markdown_table(
            ("row", "M tokens/s", "of its floor"),
            [
                (
                    row["name"],
                    f"{row['tokens_per_s']['median'] / 1e6:,.0f}",
                    "a floor" if row["floor"] == row["name"] else f"{Spread(**row['of_floor']).text(2)} {row['floor']}",
                )
                for row in result["one_pass"]
            ],
        ),
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
    ]
    verdicts = [f"- {text}: {verdict(met, result['quick'])}" for text, met in bars(result)]
    return "\n\n".join([*lines, "\n".join(verdicts)])


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
    one_pass = [(row["name"], row["floor"], row["bar"], row["of_floor"]["median"]) for row in result["one_pass"]]
    return [
        *(
            (f"one pass, {name}: at least {bar} of {floor}: {found:.2f}", found >= bar)
            for name, floor, bar, found in one_pass
            if bar is not None
        ),
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
