"""Reading: every way to get the same batches of int64 tokens, side by side.

Stores are measured as users open them, folders of shards. One pass comes first: training reads each batch once, so a
fresh process reads one epoch from a warm page cache; then later epochs. Three floors stand in the same run: memory to
int64, a bare `preadv` into one buffer, a bare `np.memmap`.

All rows yield batches of 32 x 512 over the same tokens, `torch.int64` unless they say otherwise. The rows of this
package and the floors yield the same batches in the same block-shuffled order; PyTorch's own samplers shuffle single
records, so their batches are others, of the same records. Both facts are checked before anything is printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import zb_hdf5.formats.hdf5.reader
import zb_hdf5.formats.native
import zb_hdf5.store.shards  # noqa: F401  (imports are not part of the time to the first batch)
from benchmarks.measure import (
    BATCH_SIZE,
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
    seconds_of,
    verdict,
    wait_for_quiet,
    warm,
    write_tokens,
)
from benchmarks.rows import BY_NAME, HDF5, HDF5_16, NATIVE, NPY, ONE, ROWS, TENSOR, Epoch, Row, Setup
from zb_hdf5.converters.cli import convert
from zb_hdf5.files.digests import crc32_of

CHECK_EPOCH: Final = 1000
WARM_SECONDS: Final = 0.25
MAX_WARM_EPOCHS: Final = 8
PATIENCE_S: Final = 3.0
HDF5_BAR: Final = 0.97
#: Of memory to int64: one pass, and later epochs with access="mmap".
ONE_PASS_BAR: Final = 0.9
MMAP_BAR: Final = 0.95
#: Later epochs beside those of a bare memmap: reading by position shall not cost what the first pass gains.
LATER_BAR: Final = 1.0
#: Of the rate of a bare int32 view: at most twice its time.
INT32_BAR: Final = 0.5
#: (what, beside what, bar): one pass, in fresh processes one after the other.
ONE_PASS_RATIOS: Final = (
    ("loader hdf5", "limit", ONE_PASS_BAR),
    ("loader hdf5 uint16", "limit uint16", ONE_PASS_BAR),
    ("loader native", "limit", ONE_PASS_BAR),
    ("preadv loop", "limit", None),
    ("np.memmap loop", "limit", None),
    ("loader hdf5 mmap", "limit", None),
    ("loader hdf5 int32", "int32 view", INT32_BAR),
)
#: The same of later epochs, measured in turn in one process.
RATIOS: Final = (
    ("hdf5 auto", "native auto", HDF5_BAR),
    ("hdf5 mmap", "native mmap", HDF5_BAR),
    ("loader hdf5", "loader native", HDF5_BAR),
    ("loader hdf5", "np.memmap loop", LATER_BAR),
    ("loader hdf5", "limit", None),
    ("preadv loop", "limit", None),
    ("np.memmap loop", "limit", None),
    ("loader hdf5 mmap", "limit", MMAP_BAR),
    ("loader hdf5 uint16 mmap", "limit uint16", MMAP_BAR),
    ("loader hdf5 int32", "int32 view", INT32_BAR),
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
    one_passes = {name: [run["one_pass_tokens_per_s"] for run in runs] for name, runs in warm_runs.items()}
    return {
        "benchmark": "read",
        "machine": machine(),
        "machine_line": machine_line(),
        "quick": quick,
        "repeats": repeats,
        "foreign_cores": Spread.of(runner.foreign_cores).as_json(),
        "tokens": setup.tokens,
        "rows": [_summary(row, warm_runs[row.name], cold_runs[row.name]) for row in ROWS],
        "one_pass_ratios": [_ratio(one_passes, *pair) for pair in ONE_PASS_RATIOS],
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
    source = setup.folder / NPY
    write_tokens(source, setup.num_batches * BATCH_SIZE)
    torch.save(torch.from_numpy(np.load(source).view(np.int32)), setup.folder / TENSOR)
    for command, target, *options in (
        ("npy-to-batch", ONE),
        ("npy-to-batch", NATIVE, "--shards", "4"),
        ("npy-to-hdf5", HDF5, "--shards", "4"),
        ("npy-to-hdf5", HDF5_16, "--shards", "4", "--dtype", "uint16"),
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
        rates.append(setup.tokens / seconds_of(epoch_of(len(rates) + 1)))
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
    return figures | (_checksums(epoch_of(CHECK_EPOCH), row.yields) if check else {})


def measure_first_epoch(setup: Setup, name: str) -> dict[str, Any]:
    """Open and read one epoch: what a job meets whose data no one has read before."""
    return _open_and_read(setup, BY_NAME[name])[0]


def _open_and_read(setup: Setup, row: Row) -> tuple[dict[str, Any], Epoch]:
    torch.from_numpy(np.zeros(setup.order(0)[:1], np.uint32).astype(np.int64))  # first use of the libraries themselves
    start_s = time.perf_counter()
    epoch_of = row.open(setup, row.file)
    opened_s = time.perf_counter()
    batches = iter(epoch_of(0))
    next(batches)
    first_s = time.perf_counter()
    for _ in batches:
        pass
    end_s = time.perf_counter()
    figures = {
        "first_batch_ms": 1e3 * (first_s - start_s),
        "first_epoch_tokens_per_s": setup.tokens / (end_s - start_s),
        "one_pass_tokens_per_s": setup.tokens / (end_s - opened_s),  # opening is a matter of the first batch
    }
    return figures, epoch_of


def _latencies_us(batches: Iterable[Any]) -> list[float]:
    ticks = [time.perf_counter_ns()]
    for _ in batches:
        ticks.append(time.perf_counter_ns())
    return [(after - before) / 1e3 for before, after in pairwise(ticks)]


def _checksums(batches: Iterable[Any], dtype: str) -> dict[str, Any]:
    """Digest what came out: the batches in their order, and the set of records without any order."""
    ordered, records, count = 0, 0, 0
    for batch in batches:
        found = batch.numpy() if isinstance(batch, torch.Tensor) else batch
        if found.shape != (BATCH_SIZE, SEQ_LEN) or found.dtype != dtype:
            raise AssertionError(f"expected {dtype} {(BATCH_SIZE, SEQ_LEN)}, found {found.dtype} {found.shape}")
        tokens = found.astype(np.int64, copy=False)
        ordered = crc32_of(tokens, ordered)
        records = (records + checksum_records(tokens)) % 2**64
        count += 1
    return {"ordered": ordered, "records": records, "batches": count}


def measure_in_turn(setup: Setup, rounds: int) -> dict[str, list[float]]:
    """Run warm epochs of all contestants in turn in one process; return tokens/s of each, one value a round."""
    epochs = {name: BY_NAME[name].open(setup, BY_NAME[name].file) for name in CONTESTANTS}
    for epoch_of in epochs.values():
        seconds_of(epoch_of(0))
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        first = number % len(CONTESTANTS)
        for name in CONTESTANTS[first:] + CONTESTANTS[:first]:  # nobody always follows the same neighbour's noise
            rates[name].append(setup.tokens / seconds_of(epochs[name](number + 1)))
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
        "one_pass_tokens_per_s", "warm_tokens_per_s", "second_epoch_tokens_per_s", "first_epoch_tokens_per_s",
        "first_batch_ms", "rss_anon_mib", "rss_mapped_mib", "rss_total_mib",
    )  # fmt: skip
    return {
        "name": row.name,
        "group": row.group,
        "yields": row.yields,
        **{key: spread(key) for key in keys},
        "latency_us": latencies,
        "cold_tokens_per_s": spread("first_epoch_tokens_per_s", cold_runs),
        "cold_first_batch_ms": spread("first_batch_ms", cold_runs),
        "cold_share_cached": max(run["cached"] for run in cold_runs),
    }


def _ratio(rounds: dict[str, list[float]], name: str, beside: str, bar: float | None) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(rounds[name], rounds[beside], strict=True)]
    spread = Spread.quartiles(ratios)
    found = {"name": name, "beside": beside, "pairs": len(ratios), **spread.as_json(), "bar": bar}
    return {**found, "met": bar is None or spread.median >= bar}


# --- reporting ---------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Return the tables and what the bars say, as markdown."""
    mib = result["tokens"] * 4 / 2**20
    lines = [
        f"## Reading {result['tokens'] / 1e6:,.1f} M tokens ({mib:,.0f} MiB of uint32) as [32, 512] int64 batches",
        f"{result['machine_line']}. {result['repeats']} interleaved repeats, each row in a fresh process; all rows "
        "yielded the same tokens. One pass: the first epoch of a process, page cache warm, without opening. Later: "
        "epochs after it; median (min..max). Cold: first epoch after eviction from the page cache, with opening (a "
        "virtual machine's host may still cache). Memory: growth over the imported process, and the resident part of "
        f"mapped data files. Other processes used {Spread(**result['foreign_cores']).text(2)} cores meanwhile.",
        "",
        markdown_table(_HEADERS, [_cells(row) for row in result["rows"]]),
        "",
        "Ratios: median of pairs (first..third quartile); one pass in fresh processes one after the other, later "
        "epochs in turn in one process.",
        "",
        markdown_table(
            ("ratio", "epochs", "median (quartiles)", "bar", ""),
            [
                _ratio_cells(ratio, epochs, result["quick"])
                for epochs, ratios in (("one pass", result["one_pass_ratios"]), ("later", result["ratios"]))
                for ratio in ratios
            ],
        ),
        "",
        summary(result),
    ]
    return "\n".join(lines)


_HEADERS: Final = (
    "row", "one pass, Mtok/s", "later epochs", "cold", "p50 µs", "p95 µs", "p99 µs", "first batch ms", "cold ms",
    "anon MiB", "mapped MiB",
)  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    latency = row["latency_us"]
    one_pass, later = (
        Spread(**{key: value / 1e6 for key, value in row[name].items()})
        for name in ("one_pass_tokens_per_s", "warm_tokens_per_s")
    )
    return [
        row["name"] + (" *" if row["yields"] != "int64" else ""),
        one_pass.text(),
        later.text(),
        f"{row['cold_tokens_per_s']['median'] / 1e6:,.0f}",
        *(f"{latency[p]:.1f}" for p in ("p50", "p95", "p99")),
        f"{row['first_batch_ms']['median']:.1f}",
        f"{row['cold_first_batch_ms']['median']:.1f}",
        f"{row['rss_anon_mib']['median']:.0f}",
        f"{row['rss_mapped_mib']['median']:.0f}",
    ]


def _ratio_cells(ratio: dict[str, Any], epochs: str, quick: bool) -> list[str]:
    spread = Spread(ratio["median"], ratio["low"], ratio["high"])
    bar = "" if ratio["bar"] is None else f">= {ratio['bar']}"
    met = "" if ratio["bar"] is None else verdict(ratio["met"], quick)
    return [f"{ratio['name']} / {ratio['beside']}", epochs, spread.text(3), bar, met]


def summary(result: dict[str, Any]) -> str:
    """Say in one paragraph which bars this run missed."""
    views = "\n\\* views of the stored tokens: nothing is widened."
    if result["quick"]:
        return f"(A --quick run: too little data to mean anything.){views}"
    missed = [
        f"{ratio['name']} / {ratio['beside']}, {epochs}: {ratio['median']:.3f} of {ratio['bar']}"
        for epochs, ratios in (("one pass", result["one_pass_ratios"]), ("later epochs", result["ratios"]))
        for ratio in ratios
        if not ratio["met"]
    ]
    return "Bars: " + (f"NOT met by {'; '.join(missed)}." if missed else "all met.") + views


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw tokens per second of one pass of all rows that yield int64."""
    rows = [row for row in result["rows"] if row["yields"] == "int64"]
    bars = [Bar(row["name"], Spread(**row["one_pass_tokens_per_s"]), row["group"]) for row in rows]
    about = result["machine"]
    bar_plot(
        path,
        bars,
        title="One pass over batches of 32 × 512 int64 tokens, page cache warm",
        subtitle=f"{result['tokens'] / 1e6:,.0f} M tokens, uint32 unless a row says uint16 (limit: of uint32); "
        f"{about['cores']} cores ({about['cpu']}); one process per row and repeat, median of {result['repeats']} "
        "with min and max",
        unit="million tokens per second (more is better)",
        scale=1e-6,
    )
