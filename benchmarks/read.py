"""Reading: every way to get the same batches of int64 tokens, side by side.

All rows yield `torch.int64` batches of 32 x 512 over the same tokens. The rows of this package, the limit and the
memmap loop yield the same batches in the same block-shuffled order; PyTorch's own samplers shuffle single records, so
their batches are others, of the same records. Both facts are checked before anything is printed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import zb_hdf5.h5read
import zb_hdf5.native
import zb_hdf5.shards  # noqa: F401  (imports are not part of the time to the first batch)
from benchmarks.measure import (
    BATCH_SIZE,
    BATCH_TOKENS,
    SEED,
    SEQ_LEN,
    Bar,
    Spread,
    bar_plot,
    checksum_records,
    evict,
    machine,
    machine_line,
    mapped_mib,
    markdown_table,
    memory_mib,
    resident_share,
    run_fresh,
    verdict,
    wait_for_quiet,
    warm,
    write_tokens,
)
from converters.cli import convert
from zb_hdf5 import Loader, open_reader
from zb_hdf5.order import BlockOrder

CHECK_EPOCH: Final = 1000
WARM_SECONDS: Final = 0.25
MAX_WARM_EPOCHS: Final = 8
PATIENCE_S: Final = 3.0
HDF5_BAR: Final = 0.97
LIMIT_BAR: Final = 0.85

Epoch = Callable[[int], Iterable[Any]]


@dataclass(frozen=True)
class Setup:
    """Where the data lies, and how much there is."""

    folder: Path
    num_batches: int
    block_size: int

    def order(self, epoch: int) -> list[int]:
        """Return the batch numbers of an epoch, block-shuffled."""
        order = BlockOrder(self.num_batches, SEED, epoch, self.block_size)
        return order.indices(np.arange(self.num_batches)).tolist()

    @property
    def tokens(self) -> int:
        """Tokens in one epoch."""
        return self.num_batches * BATCH_TOKENS


@dataclass(frozen=True)
class Row:
    """One way to read.

    Attributes
    ----------
    group
        Colour in the picture.
    file
        What it reads, inside the folder.
    open
        Setup -> (epoch number -> batches).
    ordered
        Whether its batches come in the order of `Setup.order`.
    """

    name: str
    group: str
    file: str
    open: Callable[[Setup, str], Epoch]
    ordered: bool = True


# --- the rows ----------------------------------------------------------------------------------------------------


def _open_limit(setup: Setup, file: str) -> Epoch:
    """Nothing but the widening: tokens in memory to fresh int64 tensors."""
    tokens = np.load(setup.folder / file).reshape(-1, BATCH_SIZE, SEQ_LEN)
    return lambda epoch: (torch.from_numpy(tokens[i].astype(np.int64)) for i in setup.order(epoch))


def _open_reader(setup: Setup, file: str, *, access: str) -> Epoch:
    reader = open_reader(setup.folder / file, access=access)
    return lambda epoch: map(reader.read_batch_torch, setup.order(epoch))


def _open_view(setup: Setup, file: str) -> Epoch:
    """The batch as stored, not read, not widened: what a consumer of uint32 has to pay."""
    reader = open_reader(setup.folder / file, access="mmap")
    return lambda epoch: map(reader.read_batch, setup.order(epoch))


def _open_loader(setup: Setup, file: str) -> Epoch:
    path = setup.folder / file
    loader = Loader(path, shuffle="block", block_size=setup.block_size, seed=SEED, rank=0, world_size=1)

    def epoch_of(epoch: int) -> Loader:
        loader.set_epoch(epoch)
        return loader

    return epoch_of


def _open_memmap_loop(setup: Setup, file: str) -> Epoch:
    """Four lines without any library."""
    tokens = np.load(setup.folder / file, mmap_mode="r").reshape(-1, BATCH_SIZE, SEQ_LEN)
    return lambda epoch: (torch.from_numpy(tokens[i].astype(np.int64)) for i in setup.order(epoch))


def _open_tensor(setup: Setup, file: str) -> Epoch:
    """`torch.load`, then 32 shuffled records per batch by one fancy index."""
    tokens = torch.load(setup.folder / file)

    def batches(epoch: int) -> Iterator[torch.Tensor]:
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(epoch))
        return (tokens[records].long() for records in order.split(BATCH_SIZE))

    return batches


def _open_tensor_dataset(setup: Setup, file: str) -> Epoch:
    """PyTorch's defaults: a TensorDataset of int64, collated record by record."""
    dataset = TensorDataset(torch.load(setup.folder / file).long())
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    return lambda epoch: (batch for (batch,) in loader)


class _Records(Dataset[torch.Tensor]):
    """Records of a memory-mapped array that answers a whole batch of indices at once."""

    def __init__(self, path: Path) -> None:
        self._tokens = np.load(path, mmap_mode="r").view(np.ndarray)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.from_numpy(self._tokens[indices].astype(np.int64))


def _keep(batch: torch.Tensor) -> torch.Tensor:
    return batch


def _open_getitems(setup: Setup, file: str) -> Epoch:
    loader = DataLoader(_Records(setup.folder / file), batch_size=BATCH_SIZE, shuffle=True, collate_fn=_keep)
    return lambda epoch: loader


_OURS, _TORCH = "zb_hdf5", "PyTorch and numpy"
_MMAP, _PREAD, _H5PY = (partial(_open_reader, access=access) for access in ("mmap", "pread", "h5py"))
_NPY, _NATIVE, _HDF5, _HDF5_16, _SHARDS, _TENSOR = (
    "tokens.npy", "tokens.batch", "tokens.h5", "tokens-uint16.h5", "tokens-x4", "tokens.pt",
)  # fmt: skip
ROWS: Final = (
    Row("limit", "limit: RAM to int64", _NPY, _open_limit),
    Row("native mmap", _OURS, _NATIVE, _MMAP),
    Row("native pread", _OURS, _NATIVE, _PREAD),
    Row("hdf5 mmap", _OURS, _HDF5, _MMAP),
    Row("hdf5 pread", _OURS, _HDF5, _PREAD),
    Row("hdf5 h5py", _OURS, _HDF5, _H5PY),
    Row("hdf5 uint16 mmap", _OURS, _HDF5_16, _MMAP),
    Row("hdf5 uint16 pread", _OURS, _HDF5_16, _PREAD),
    Row("loader native", _OURS, _NATIVE, _open_loader),
    Row("loader hdf5", _OURS, _HDF5, _open_loader),
    Row("loader hdf5 sharded x4", _OURS, _SHARDS, _open_loader),
    Row("np.memmap loop", _TORCH, _NPY, _open_memmap_loop),
    Row("torch.load, fancy index", _TORCH, _TENSOR, _open_tensor, ordered=False),
    Row("DataLoader memmap __getitems__", _TORCH, _NPY, _open_getitems, ordered=False),
    Row("DataLoader TensorDataset", _TORCH, _TENSOR, _open_tensor_dataset, ordered=False),
    Row("hdf5 mmap view (uint32)", "view", _HDF5, _open_view),
)
BY_NAME: Final = {row.name: row for row in ROWS}
#: (what, beside what, bar): measured in turn in one process.
RATIOS: Final = (
    ("hdf5 mmap", "native mmap", HDF5_BAR),
    ("hdf5 pread", "native pread", HDF5_BAR),
    ("loader hdf5", "loader native", HDF5_BAR),
    ("native mmap", "limit", LIMIT_BAR),
    ("native pread", "limit", LIMIT_BAR),
    ("loader native", "limit", LIMIT_BAR),
    ("hdf5 mmap", "limit", LIMIT_BAR),
    ("hdf5 pread", "limit", LIMIT_BAR),
    ("loader hdf5", "limit", LIMIT_BAR),
)
CONTESTANTS: Final = tuple(dict.fromkeys(name for pair in RATIOS for name in pair[:2]))


# --- measuring ---------------------------------------------------------------------------------------------------


def measure(folder: Path, *, quick: bool, repeats: int | None) -> dict[str, Any]:
    """Write the data once, run all rows interleaved, check that they read the same, and return every figure."""
    setup = Setup(folder, 128, 16) if quick else Setup(folder, 3200, 256)
    repeats = repeats or (2 if quick else 9)
    runner = _Runner(0.0 if quick else PATIENCE_S)
    write_data(setup)
    warm_runs: dict[str, list[dict[str, Any]]] = {row.name: [] for row in ROWS}
    cold_runs: dict[str, list[dict[str, Any]]] = {row.name: [] for row in ROWS}
    rounds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for repeat in range(repeats):
        for row in ROWS:
            warm(setup.folder / row.file)
            warm_runs[row.name].append(runner.run(measure_row, setup, row.name, repeat == 0))
        for name, rates in runner.run(measure_in_turn, setup, 3 if quick else 15).items():
            rounds[name] += rates
    for _ in range(1 if quick else 3):
        for row in ROWS:
            evict(setup.folder / row.file)
            cached = resident_share(setup.folder / row.file)
            cold_runs[row.name].append({**runner.run(measure_first_epoch, setup, row.name), "cached": cached})
    check_same_batches({name: runs[0] for name, runs in warm_runs.items()})
    return {
        "benchmark": "read",
        "machine": machine(),
        "machine_line": machine_line(),
        "quick": quick,
        "repeats": repeats,
        "foreign_cores": Spread.of(runner.foreign_cores).as_json(),
        "tokens": setup.tokens,
        "rows": [_summary(row, warm_runs[row.name], cold_runs[row.name]) for row in ROWS],
        "ratios": [_ratio(rounds, *pair) for pair in RATIOS],
    }


class _Runner:
    """Runs measurements in fresh processes, at quiet moments where there are any; keeps what others did meanwhile."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.foreign_cores: list[float] = []

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        wait_for_quiet(self._patience_s)
        result, foreign = run_fresh(function, *args, preload="benchmarks.read")
        self.foreign_cores.append(foreign)
        return result


def write_data(setup: Setup) -> None:
    """Write the tokens once and convert them with the real commands, then read every file into the page cache."""
    source = setup.folder / _NPY
    write_tokens(source, setup.num_batches * BATCH_SIZE)
    torch.save(torch.from_numpy(np.load(source).view(np.int32)), setup.folder / _TENSOR)
    for command, target, *options in (
        ("npy-to-batch", _NATIVE),
        ("npy-to-hdf5", _HDF5),
        ("npy-to-hdf5", _HDF5_16, "--dtype", "uint16"),
        ("npy-to-hdf5", _SHARDS, "--shards", "4"),
    ):
        arguments = [command, str(source), str(setup.folder / target), "--no-shuffle", "--quiet", *options]
        if convert.main(arguments, standalone_mode=False):
            raise RuntimeError(f"convert {' '.join(arguments)} failed")
    evict(setup.folder)  # as read back from disk, not as each writer happened to leave the page cache
    warm(setup.folder)


def measure_row(setup: Setup, name: str, check: bool) -> dict[str, Any]:
    """Run one row: the first epoch, warm epochs, one epoch for latencies; with `check`, one for checksums."""
    row = BY_NAME[name]
    anon_before = memory_mib()["RssAnon"]
    figures, epoch_of = _open_and_read(setup, row)
    anon, mapped = [memory_mib()["RssAnon"]], [mapped_mib(setup.folder)]
    rates: list[float] = []
    start_s = time.perf_counter()
    while len(rates) < MAX_WARM_EPOCHS and (not rates or time.perf_counter() - start_s < WARM_SECONDS):
        rates.append(setup.tokens / _seconds(epoch_of(len(rates) + 1)))
    latencies_us = _latencies_us(epoch_of(MAX_WARM_EPOCHS + 1))
    anon.append(memory_mib()["RssAnon"])
    mapped.append(mapped_mib(setup.folder))
    figures |= {
        "warm_tokens_per_s": Spread.of(rates).median,
        "second_epoch_tokens_per_s": rates[0],
        "latency_us": dict(zip(("p50", "p95", "p99"), np.percentile(latencies_us, [50, 95, 99]).tolist(), strict=True)),
        "rss_anon_mib": max(anon) - anon_before,
        "rss_mapped_mib": max(mapped),
        "rss_total_mib": memory_mib()["VmHWM"],
    }
    return figures | (_checksums(epoch_of(CHECK_EPOCH)) if check else {})


def measure_first_epoch(setup: Setup, name: str) -> dict[str, Any]:
    """Open and read one epoch: what a job meets whose data no one has read before."""
    return _open_and_read(setup, BY_NAME[name])[0]


def _open_and_read(setup: Setup, row: Row) -> tuple[dict[str, Any], Epoch]:
    torch.from_numpy(np.zeros(setup.order(0)[:1], np.uint32).astype(np.int64))  # first use of the libraries themselves
    start_s = time.perf_counter()
    epoch_of = row.open(setup, row.file)
    batches = iter(epoch_of(0))
    next(batches)
    first_s = time.perf_counter() - start_s
    for _ in batches:
        pass
    rate = setup.tokens / (time.perf_counter() - start_s)
    return {"first_batch_ms": 1e3 * first_s, "first_epoch_tokens_per_s": rate}, epoch_of


def _seconds(batches: Iterable[Any]) -> float:
    start_s = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start_s


def _latencies_us(batches: Iterable[Any]) -> list[float]:
    ticks = [time.perf_counter_ns()]
    for _ in batches:
        ticks.append(time.perf_counter_ns())
    return [(after - before) / 1e3 for before, after in pairwise(ticks)]


def _checksums(batches: Iterable[Any]) -> dict[str, Any]:
    """Digest what came out: the batches in their order, and the set of records without any order."""
    ordered, records, count = 0, 0, 0
    for batch in batches:
        tokens = batch.numpy() if isinstance(batch, torch.Tensor) else batch.astype(np.int64)
        if tokens.shape != (BATCH_SIZE, SEQ_LEN) or tokens.dtype != np.int64:
            raise AssertionError(f"expected int64 {(BATCH_SIZE, SEQ_LEN)}, found {tokens.dtype} {tokens.shape}")
        ordered = zlib.crc32(tokens, ordered)
        records = (records + checksum_records(tokens)) % 2**64
        count += 1
    return {"ordered": ordered, "records": records, "batches": count}


def measure_in_turn(setup: Setup, rounds: int) -> dict[str, list[float]]:
    """Run warm epochs of all contestants in turn in one process; return tokens/s of each, one value a round."""
    epochs = {name: BY_NAME[name].open(setup, BY_NAME[name].file) for name in CONTESTANTS}
    for epoch_of in epochs.values():
        _seconds(epoch_of(0))
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        first = number % len(CONTESTANTS)
        for name in CONTESTANTS[first:] + CONTESTANTS[:first]:  # nobody always follows the same neighbour's noise
            rates[name].append(setup.tokens / _seconds(epochs[name](number + 1)))
    return rates


def check_same_batches(runs: dict[str, dict[str, Any]]) -> None:
    """Raise `AssertionError` unless all rows yielded the same records, and the ordered ones the same batches."""
    limit = runs["limit"]
    for name, run in runs.items():
        keys = ("batches", "records", "ordered") if BY_NAME[name].ordered else ("batches", "records")
        for key in keys:
            if run[key] != limit[key]:
                raise AssertionError(f"{name}: its {key} differ from the limit's: {run[key]} and {limit[key]}")


def _summary(row: Row, warm_runs: list[dict[str, Any]], cold_runs: list[dict[str, Any]]) -> dict[str, Any]:
    def spread(key: str, runs: list[dict[str, Any]] = warm_runs) -> dict[str, float]:
        return Spread.of([run[key] for run in runs]).as_json()

    latencies = {p: Spread.of([run["latency_us"][p] for run in warm_runs]).median for p in ("p50", "p95", "p99")}
    keys = (
        "warm_tokens_per_s", "second_epoch_tokens_per_s", "first_epoch_tokens_per_s", "first_batch_ms", "rss_anon_mib",
        "rss_mapped_mib", "rss_total_mib",
    )  # fmt: skip
    return {
        "name": row.name,
        "group": row.group,
        "yields": "uint32 view" if row.group == "view" else "int64",
        **{key: spread(key) for key in keys},
        "latency_us": latencies,
        "cold_tokens_per_s": spread("first_epoch_tokens_per_s", cold_runs),
        "cold_first_batch_ms": spread("first_batch_ms", cold_runs),
        "cold_share_cached": max(run["cached"] for run in cold_runs),
    }


def _ratio(rounds: dict[str, list[float]], name: str, beside: str, bar: float) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(rounds[name], rounds[beside], strict=True)]
    spread = Spread.quartiles(ratios)
    found = {"name": name, "beside": beside, "pairs": len(ratios), **spread.as_json(), "bar": bar}
    return {**found, "met": spread.median >= bar}


# --- reporting ---------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Return the tables and what the bars say, as markdown."""
    mib = result["tokens"] * 4 / 2**20
    lines = [
        f"## Reading {result['tokens'] / 1e6:,.1f} M tokens ({mib:,.0f} MiB of uint32) as [32, 512] int64 batches",
        f"{result['machine_line']}. {result['repeats']} interleaved repeats, each row in a fresh process; all rows "
        "yielded the same tokens. Warm: epochs after the first, page cache warm; median (min..max). First epoch: with "
        "opening. Cold: first epoch after eviction from the page cache (a virtual machine's host may still cache). "
        "Memory: growth over the imported process, and the resident part of mapped data files. Other processes used "
        f"{Spread(**result['foreign_cores']).text(2)} cores meanwhile.",
        "",
        markdown_table(_HEADERS, [_cells(row) for row in result["rows"]]),
        "",
        f"Ratios of warm epochs, measured in turn in one process: median of {result['ratios'][0]['pairs']} pairs "
        "(first..third quartile). Bars: HDF5 within 3 % of native, both within 15 % of the limit.",
        "",
        markdown_table(
            ("ratio", "median (quartiles)", "bar", ""),
            [_ratio_cells(ratio, result["quick"]) for ratio in result["ratios"]],
        ),
        "",
        summary(result),
    ]
    return "\n".join(lines)


_HEADERS: Final = (
    "row", "warm Mtok/s", "first epoch", "cold", "p50 µs", "p95 µs", "p99 µs", "first batch ms", "cold ms",
    "anon MiB", "mapped MiB",
)  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    latency = row["latency_us"]
    warm_rate = Spread(**{key: value / 1e6 for key, value in row["warm_tokens_per_s"].items()})
    return [
        row["name"] + (" *" if row["yields"] != "int64" else ""),
        warm_rate.text(),
        f"{row['first_epoch_tokens_per_s']['median'] / 1e6:,.0f}",
        f"{row['cold_tokens_per_s']['median'] / 1e6:,.0f}",
        *(f"{latency[p]:.1f}" for p in ("p50", "p95", "p99")),
        f"{row['first_batch_ms']['median']:.1f}",
        f"{row['cold_first_batch_ms']['median']:.1f}",
        f"{row['rss_anon_mib']['median']:.0f}",
        f"{row['rss_mapped_mib']['median']:.0f}",
    ]


def _ratio_cells(ratio: dict[str, Any], quick: bool) -> list[str]:
    spread = Spread(ratio["median"], ratio["low"], ratio["high"])
    return [f"{ratio['name']} / {ratio['beside']}", spread.text(3), f">= {ratio['bar']}", verdict(ratio["met"], quick)]


def summary(result: dict[str, Any]) -> str:
    """Say in one paragraph which bars this run met."""
    views = "\n\\* no int64: a view of the stored uint32; nothing is read or widened."
    if result["quick"]:
        return f"(A --quick run: too little data to mean anything.){views}"
    parts = []
    for bar, text in ((HDF5_BAR, "HDF5 within 3 % of native"), (LIMIT_BAR, "both within 15 % of the limit")):
        ratios = [ratio for ratio in result["ratios"] if ratio["bar"] == bar]
        missed = [f"{r['name']} / {r['beside']} {r['median']:.3f}" for r in ratios if not r["met"]]
        parts.append(f"{text}: " + (f"NOT met by {', '.join(missed)}" if missed else "met by every access"))
    return ". ".join(parts) + f".{views}"


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw warm tokens per second of all rows that yield int64."""
    rows = [row for row in result["rows"] if row["yields"] == "int64"]
    bars = [Bar(row["name"], Spread(**row["warm_tokens_per_s"]), row["group"]) for row in rows]
    about = result["machine"]
    bar_plot(
        path,
        bars,
        title="Batches of 32 × 512 int64 tokens, page cache warm",
        subtitle=f"{result['tokens'] / 1e6:,.0f} M tokens, uint32 unless a row says uint16 (limit: of uint32); "
        f"{about['cores']} cores ({about['cpu']}); one process per row and repeat, median of {result['repeats']} "
        "with min and max",
        unit="million tokens per second (more is better)",
        scale=1e-6,
    )
