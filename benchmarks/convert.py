"""Converting: every command beside `cp` of the same bytes, and what its stages cost one by one.

Each conversion is the real command in a process of its own. Right before each of them its source is copied by `cp`
and the copy is flushed to disk: the converters flush before they publish, so `cp + fsync` does the same work.
Sources are in the page cache; every output is removed before the next one is written, and the memory for the next one
is handed out beforehand (`hand_out_memory`): without that, `cp` itself varies tenfold on a virtual machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.measure import (
    BATCH_SIZE,
    MIB,
    READ_BYTES,
    SEED,
    SEQ_LEN,
    Bar,
    Spread,
    Watch,
    bar_plot,
    hand_out_memory,
    machine,
    machine_line,
    markdown_table,
    memory_mib,
    say_progress,
    verdict,
    wait_for_quiet,
    warm,
    write_tokens,
)

SIZES_MIB: Final = (256, 1024, 4096)
#: From this size on only rows from `.npy`: three sources and their copies would not fit in the page cache.
NPY_ONLY_MIB: Final = 4096
QUICK_SIZES_MIB: Final = (16, 32)
REPEATS: Final = 5
PATIENCE_S: Final = 5.0
POLL_S: Final = 0.01
SPARE_MIB: Final = 128
#: A shuffle in two passes writes its temporary files and the result.
PASSES: Final = 2
#: Shares of `cp` and a flush that some rows are to reach.
BAR_SHARES: Final = {
    "npy-to-hdf5 --no-shuffle": 0.8, "npy-to-hdf5": 0.5, "npy-to-hdf5 two-pass": 0.4, "hdf5-to-batch": 0.8,
}  # fmt: skip
WORKERS_BAR: Final = 1.6
#: What the rows in two passes may take, and how far above it they may come.
MEMORY_MIB: Final = 256
MEMORY_BAR: Final = 1.1
SHARDED: Final = ("npy-to-hdf5", "--shards", "8", "--workers")
#: Memory counts as flat if the peak grows by less than this from the smallest input to the largest.
FLAT_MIB: Final = 16.0
ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """One command.

    Attributes
    ----------
    suffix
        Of the output; ".d" is a folder of shards.
    arguments
        Between the command's name and its paths; None: this is no converter but a digest of the source.
    """

    name: str
    source: str
    suffix: str
    arguments: tuple[str, ...] | None


ROWS: Final = (
    Row("sha256", "tokens.npy", "", None),
    Row("npy-to-hdf5 --no-shuffle", "tokens.npy", ".h5", ("npy-to-hdf5", "--no-shuffle")),
    Row("npy-to-hdf5", "tokens.npy", ".h5", ("npy-to-hdf5", "--memory", f"{MEMORY_MIB}MiB")),
    Row(
        "npy-to-hdf5 two-pass",
        "tokens.npy",
        ".h5",
        ("npy-to-hdf5", "--shuffle-method", "two-pass", "--memory", f"{MEMORY_MIB}MiB"),
    ),
    Row("npy-to-hdf5, 1 worker", "tokens.npy", ".d", (*SHARDED, "1")),
    Row("npy-to-hdf5, 2 workers", "tokens.npy", ".d", (*SHARDED, "2")),
    Row("npy-to-batch", "tokens.npy", ".batch", ("npy-to-batch",)),
    Row("hdf5-to-batch", "tokens.h5", ".batch", ("hdf5-to-batch",)),
    Row("batch-to-hdf5", "tokens.batch", ".h5", ("batch-to-hdf5",)),
    Row("hdf5-to-npy", "tokens.h5", ".npy", ("hdf5-to-npy",)),
)


# --- the child: one command, measured from inside ------------------------------------------------------------------


def run_child(arguments: list[str]) -> None:
    """Run one command in this process, and print seconds of work and the peak memory in MiB as JSON."""
    work = _digest_file if arguments[0] == "sha256" else _convert
    if work is _convert:
        _import_everything()
    before = memory_mib()
    start_s = time.perf_counter()
    work(arguments)
    seconds = time.perf_counter() - start_s
    print(json.dumps({"work_s": seconds, "peak_mib": memory_mib()["VmHWM"], "anon_before_mib": before["RssAnon"]}))


def _import_everything() -> None:
    """Import what the commands import when they run, so that the work is timed without it."""
    for name in ("converters.cli", "converters.npy_source", "converters.store_source", "converters.run"):
        import_module(f"zb_hdf5.{name}")
    for name in ("formats.hdf5.reader", "formats.hdf5.writer", "formats.native", "store.shards"):
        import_module(f"zb_hdf5.{name}")


def _convert(arguments: list[str]) -> None:
    from zb_hdf5.converters.cli import convert

    code = convert.main(arguments, standalone_mode=False)
    if code:
        raise SystemExit(code)


def _digest_file(arguments: list[str]) -> None:
    buffer = bytearray(READ_BYTES)
    digest = hashlib.sha256()
    with open(arguments[1], "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])


# --- the parent ----------------------------------------------------------------------------------------------------


def measure(folder: Path, *, quick: bool, repeats: int | None) -> dict[str, Any]:
    """Run all rows interleaved at every size and return every figure."""
    sizes = QUICK_SIZES_MIB if quick else SIZES_MIB
    repeats = repeats or (2 if quick else REPEATS)
    patience_s = 0.0 if quick else PATIENCE_S
    results = [_measure_size(folder / f"{mib}MiB", mib, repeats, patience_s) for mib in sizes]
    return {
        "benchmark": "convert",
        "machine": machine(),
        "machine_line": machine_line(),
        "quick": quick,
        "repeats": repeats,
        "sizes": results,
        "bars": _bars(results),
    }


def _measure_size(folder: Path, mib: int, repeats: int, patience_s: float) -> dict[str, Any]:
    folder.mkdir()
    write_sources(folder, mib)
    rows = [row for row in ROWS if row.source == "tokens.npy" or mib < NPY_ONLY_MIB]
    runs: dict[str, list[dict[str, float]]] = {row.name: [] for row in rows}
    for repeat in range(repeats + 1):
        for row in rows:
            say_progress(f"{row.name} at {mib:,} MiB, round {repeat} of {repeats}")
            wait_for_quiet(patience_s)
            found = _measure_pair(folder, row)
            if repeat:  # the first round only makes the machine hand out the memory once
                runs[row.name].append(found)
    shutil.rmtree(folder)
    pairs = [run for row in rows for run in runs[row.name]]
    copies = {key: Spread.of([mib / pair[f"{key}_s"] for pair in pairs]).as_json() for key in ("cp", "cp_fsync")}
    foreign = Spread.of([pair["foreign_cores"] for pair in pairs]).as_json()
    return {
        "mib": mib,
        "foreign_cores": foreign,
        "copies_mib_per_s": copies,
        "rows": [_summary(row.name, mib, runs[row.name]) for row in rows],
    }


def write_sources(folder: Path, mib: int) -> None:
    """Write tokens as `.npy`, `.h5` and `.batch`, all in the page cache."""
    npy = folder / "tokens.npy"
    write_tokens(npy, mib * MIB // (SEQ_LEN * 4))
    stores = (("npy-to-hdf5", "tokens.h5"), ("npy-to-batch", "tokens.batch")) if mib < NPY_ONLY_MIB else ()
    for command, target in stores:
        _run_process([command, "--no-shuffle", "--quiet", str(npy), str(folder / target)])
    for path in (npy, *(folder / target for _, target in stores)):
        warm(path)


def _measure_pair(folder: Path, row: Row) -> dict[str, float]:
    """Copy the row's source, then run the row: seconds of both."""
    source, copy, output = folder / row.source, folder / "copy", folder / f"output{row.suffix}"
    hand_out_memory(source.stat().st_size / MIB + SPARE_MIB)
    start_s = time.perf_counter()
    subprocess.run(["cp", str(source), str(copy)], check=True)
    cp_s = time.perf_counter() - start_s
    fsync(copy)
    cp_fsync_s = time.perf_counter() - start_s
    copy.unlink()
    hand_out_memory(PASSES * source.stat().st_size / MIB + SPARE_MIB)
    arguments = ["sha256"] if row.arguments is None else [*row.arguments, "--quiet"]
    found = _run_process([*arguments, str(source), *([str(output)] if row.suffix else [])])
    shutil.rmtree(output) if output.is_dir() else output.unlink(missing_ok=not row.suffix)
    return {"cp_s": cp_s, "cp_fsync_s": cp_fsync_s, **found}


def _run_process(arguments: list[str]) -> dict[str, float]:
    """Run one command in a new interpreter; poll its anonymous memory while it works."""
    watch, cpu_before_s = Watch(), _children_cpu_s()
    start_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.convert", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    anon = 0.0
    while process.poll() is None:
        anon = max(anon, memory_mib(process.pid).get("RssAnon", 0.0))
        time.sleep(POLL_S)
    process_s = time.perf_counter() - start_s
    output = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise RuntimeError(f"convert {' '.join(arguments)} exited with {process.returncode}")
    cpu_s = _children_cpu_s() - cpu_before_s
    foreign = watch.foreign_cores(cpu_s)
    return {"process_s": process_s, "cpu_s": cpu_s, "foreign_cores": foreign, "anon_mib": anon, **json.loads(output)}


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def fsync(path: Path) -> None:
    """Flush a file to disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _summary(name: str, mib: int, runs: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "name": name,
        "work_mib_per_s": Spread.of([mib / run["work_s"] for run in runs]).as_json(),
        "process_mib_per_s": Spread.of([mib / run["process_s"] for run in runs]).as_json(),
        "cpu_s_per_gib": Spread.of([run["cpu_s"] * 1024 / mib for run in runs]).as_json(),
        "share_of_cp": Spread.of([run["cp_s"] / run["work_s"] for run in runs]).as_json(),
        "share_of_cp_fsync": Spread.of([run["cp_fsync_s"] / run["work_s"] for run in runs]).as_json(),
        "peak_rss_mib": Spread.of([run["peak_mib"] for run in runs]).as_json(),
        "peak_anon_mib": Spread.of([run["anon_mib"] for run in runs]).as_json(),
    }


def _bars(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the largest size that has all rows with the bars, and memory between the smallest and the largest."""
    full = next(size for size in reversed(results) if len(size["rows"]) == len(ROWS))
    largest = {row["name"]: row for row in full["rows"]}
    workers = [largest[f"npy-to-hdf5, {n}"]["work_mib_per_s"]["median"] for n in ("1 worker", "2 workers")]
    found = [
        _at_least(f"{name} / (cp + fsync), the same work", largest[name]["share_of_cp_fsync"]["median"], share)
        for name, share in BAR_SHARES.items()
    ]
    found.append(_at_least("2 workers / 1 worker", workers[1] / workers[0], WORKERS_BAR))
    for size in results:
        for row in size["rows"]:
            if row["name"] in ("npy-to-hdf5", "npy-to-hdf5 two-pass"):
                peak, bar = row["peak_rss_mib"]["median"], MEMORY_MIB * MEMORY_BAR
                name = f"{row['name']} with --memory {MEMORY_MIB}MiB, {size['mib']:,} MiB: peak RSS, MiB"
                found.append(_bar(name, peak, bar, peak < bar))
    for key, label in (("peak_anon_mib", "anonymous memory"), ("peak_rss_mib", "all memory, mapped source included")):
        for name in (row.name for row in ROWS if row.arguments is not None and row.suffix != ".d"):
            last = {r["name"]: r for size in results for r in size["rows"]}[name]
            grown = last[key]["median"] - {r["name"]: r for r in results[0]["rows"]}[name][key]["median"]
            found.append(_bar(f"{name}: growth of {label}, MiB", grown, FLAT_MIB, grown < FLAT_MIB))
    return found


def _bar(name: str, found: float, bar: float, met: bool) -> dict[str, Any]:
    return {"name": name, "found": found, "bar": bar, "met": met}


def _at_least(name: str, found: float, bar: float) -> dict[str, Any]:
    return _bar(name, found, bar, found >= bar)


# --- reporting -----------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Return the tables and what the bars say, as markdown."""
    lines = [
        f"## Converting records of {SEQ_LEN} uint32 tokens, batches of {BATCH_SIZE}",
        f"{result['machine_line']}. {result['repeats']} interleaved repeats, each the real command in a new process, "
        "source in the page cache; median (min..max). Shares are medians of pairs: cp ran right before. Process: with "
        "the start of Python and all imports. RSS: with the mapped source.",
    ]
    for size in result["sizes"]:
        foreign = Spread(**size["foreign_cores"]).text(2)
        lines += [
            "",
            f"### {size['mib']:,} MiB (others used {foreign} cores meanwhile)",
            "",
            markdown_table(_HEADERS, _table(size)),
        ]
    lines += ["", *_bar_lines(result["bars"], result["quick"])]
    if result["quick"]:
        lines.append("(A --quick run: too little data to mean anything.)")
    return "\n".join(lines)


_HEADERS: Final = (
    "row", "MiB/s", "process MiB/s", "CPU s per GiB", "of cp", "of cp + fsync", "peak anon MiB", "peak RSS MiB",
)  # fmt: skip


def _table(size: dict[str, Any]) -> list[list[str]]:
    copies = size["copies_mib_per_s"]
    lines = [
        ["cp", Spread(**copies["cp"]).text(), "", "", "", "", "", ""],
        ["cp + fsync", Spread(**copies["cp_fsync"]).text(), "", "", "", "", "", ""],
    ]
    for row in size["rows"]:
        lines.append(
            [
                row["name"],
                Spread(**row["work_mib_per_s"]).text(),
                f"{row['process_mib_per_s']['median']:,.0f}",
                f"{row['cpu_s_per_gib']['median']:.2f}",
                f"{row['share_of_cp']['median']:.2f}",
                f"{row['share_of_cp_fsync']['median']:.2f}",
                f"{row['peak_anon_mib']['median']:.0f}",
                f"{row['peak_rss_mib']['median']:.0f}",
            ]
        )
    return lines


def _bar_lines(bars: list[dict[str, Any]], quick: bool) -> list[str]:
    cells = []
    for bar in bars:
        memory = bar["name"].endswith("MiB")
        digits = 0 if memory or bar["bar"] > 10 else 2
        sign = "<" if memory else ">="
        found, asked = f"{bar['found']:,.{digits}f}", f"{sign} {bar['bar']:,.{digits}f}"
        cells.append([bar["name"], found, asked, verdict(bar["met"], quick)])
    return [markdown_table(("bar, at the largest size", "found", "bar", ""), cells)]


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw the speed of every row at the largest size, or the stages of a profile."""
    about = result["machine"]
    on = f"{about['cores']} cores ({about['cpu']})"
    if result["benchmark"] == "convert stages":
        bars = [Bar(s["name"], Spread(**s["mib_per_s"]), s["kind"]) for s in result["stages"]]
        title, subtitle = "Stages of a conversion, each alone", f"{result['mib']:,} MiB of uint32 tokens, {on}"
    else:
        size = result["sizes"][-1]
        copies = {"cp": "cp", "cp + fsync": "cp_fsync"}
        bars = [Bar(label, Spread(**size["copies_mib_per_s"][key]), "reference") for label, key in copies.items()]
        for row in size["rows"]:
            group = "reference" if row["name"] == "sha256" else "convert"
            bars.append(Bar(row["name"], Spread(**row["work_mib_per_s"]), group))
        title = "Conversion speed beside cp of the same file"
        subtitle = f"{size['mib']:,} MiB of uint32 tokens, page cache warm, {on}; median of {result['repeats']}"
    bar_plot(path, bars, title=title, subtitle=subtitle, unit="MiB per second (more is better)")


# --- the stages, one by one ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stages:
    """What the stages work on."""

    folder: Path
    mib: int

    @property
    def groups(self) -> int:
        """Number of groups of `READ_BYTES` in the source."""
        return self.mib * MIB // READ_BYTES

    def group(self) -> np.ndarray[Any, Any]:
        """Return a filled group of batches, shape (count, B, S)."""
        shape = (READ_BYTES // (BATCH_SIZE * SEQ_LEN * 4), BATCH_SIZE, SEQ_LEN)
        return np.random.default_rng(SEED).integers(0, 50_257, shape, dtype=np.uint32)


def measure_stages(folder: Path, *, quick: bool, repeats: int | None) -> dict[str, Any]:
    """Measure what a conversion is made of, each stage alone, interleaved; nothing overlaps here."""
    mib = QUICK_SIZES_MIB[0] if quick else SIZES_MIB[-1]
    repeats = repeats or (2 if quick else REPEATS)
    write_sources(folder, mib)
    stages = Stages(folder, mib)
    seconds: dict[str, list[float]] = {}
    kinds: dict[str, str] = {}
    for repeat in range(repeats + 1):
        for kind, function in _STAGES:
            hand_out_memory(mib + SPARE_MIB)
            for name, taken_s in function(stages):
                kinds[name] = kind
                if repeat:
                    seconds.setdefault(name, []).append(taken_s)
    rows = [
        {"name": name, "kind": kinds[name], "mib_per_s": Spread.of([mib / s for s in taken]).as_json()}
        for name, taken in seconds.items()
    ]
    about = {"machine": machine(), "machine_line": machine_line()}
    return {"benchmark": "convert stages", **about, "quick": quick, "repeats": repeats, "mib": mib, "stages": rows}


def report_stages(result: dict[str, Any]) -> str:
    """Return the table of stages, as markdown."""
    cells = []
    for stage in result["stages"]:
        spread = Spread(**stage["mib_per_s"])
        cells.append([stage["name"], stage["kind"], spread.text(), f"{1024 / spread.median:.3f}"])
    table = markdown_table(("stage", "thread", "MiB/s", "s per GiB"), cells)
    return f"## Stages of a conversion, each alone, {result['mib']:,} MiB\n{result['machine_line']}.\n\n{table}"


def _timed(name: str, work: Callable[[], Any]) -> tuple[str, float]:
    start_s = time.perf_counter()
    work()
    return name, time.perf_counter() - start_s


def _stage_reads(stages: Stages) -> Iterator[tuple[str, float]]:
    """Sequential copies out of a mapping, the same by positioned reads, and the gather of a shuffle."""
    group = stages.group()
    rows = group.reshape(-1, SEQ_LEN)

    def copy_mapped() -> None:
        tokens = np.load(stages.folder / "tokens.npy", mmap_mode="r").view(np.ndarray)
        for start in range(0, len(tokens), len(rows)):
            rows[:] = tokens[start : start + len(rows)]

    def read() -> None:
        with open(stages.folder / "tokens.npy", "rb", buffering=0) as file:
            for number in range(stages.groups):
                os.preadv(file.fileno(), (group,), 128 + number * READ_BYTES)

    def gather() -> None:
        tokens = np.load(stages.folder / "tokens.npy", mmap_mode="r").view(np.ndarray)
        order = np.random.default_rng(SEED).permutation(len(tokens))
        for start in range(0, len(tokens), len(rows)):
            rows[:] = tokens[order[start : start + len(rows)]]

    yield _timed("read: copy out of a mapping", copy_mapped)
    yield _timed("read: preadv", read)
    yield _timed("read: gather shuffled records", gather)


def _stage_digests(stages: Stages) -> Iterator[tuple[str, float]]:
    from zb_hdf5.files.digests import batch_crc32s

    group = stages.group()
    digest = hashlib.sha256()
    repeated = range(stages.groups)
    yield _timed("digest: sha256", lambda: [digest.update(group) for _ in repeated])
    yield _timed("digest: crc32 per batch", lambda: [batch_crc32s(group) for _ in repeated])
    yield _timed("digest: largest token", lambda: [group.max() for _ in repeated])


def _stage_native_write(stages: Stages) -> Iterator[tuple[str, float]]:
    group, path = stages.group(), stages.folder / "output"

    def write(fd: int) -> None:
        for number in range(stages.groups):
            os.pwrite(fd, group, number * READ_BYTES)

    for reserve in (False, True):
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        if reserve:
            yield _timed("write: posix_fallocate", lambda: os.posix_fallocate(fd, 0, stages.mib * MIB))  # noqa: B023
        suffix = " into reserved space" if reserve else ""
        yield _timed(f"write: pwrite{suffix}", lambda: write(fd))  # noqa: B023
        yield _timed(f"write: fsync{suffix}", lambda: os.fsync(fd))  # noqa: B023
        os.close(fd)
        path.unlink()


def _stage_hdf5_write(stages: Stages) -> Iterator[tuple[str, float]]:
    import h5py

    group, path = stages.group(), stages.folder / "output.h5"
    count = stages.groups * len(group)
    with h5py.File(path, "w", libver=("v110", "v110"), meta_block_size=1 << 20) as h5:
        batches = h5.create_dataset("batches", (count, *group.shape[1:]), "<u4", chunks=(1, *group.shape[1:]))

        def write() -> None:
            for index in range(count):
                batches.id.write_direct_chunk((index, 0, 0), group[index % len(group)])

        yield _timed("write: HDF5 write_direct_chunk", write)
    yield _timed("write: fsync after HDF5", lambda: fsync(path))
    path.unlink()


_STAGES: Final = (
    ("reader", _stage_reads),
    ("digest", _stage_digests),
    ("writer", _stage_native_write),
    ("writer", _stage_hdf5_write),
)

if __name__ == "__main__":
    run_child(sys.argv[1:])
