"""Interleaved comparison: builds in processes of their own, rounds in turns, ratios of neighbours, tables, bars.

A way is a function that returns figures. Every round runs each way once, in a fresh process, so that noise meets all of
them; a ratio compares two ways of the same round, and its median over the rounds is set against the bar.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[1]
SEED: Final = 42
BATCH_SIZE: Final = 32
SEQ_LEN: Final = 512
BATCH_TOKENS: Final = BATCH_SIZE * SEQ_LEN
VOCAB_SIZE: Final = 50_257  # GPT-2's: fits uint16 as well
MIB: Final = 1 << 20
READ_BYTES: Final = 4 * MIB
#: The title of a table that only --old has.
AGAINST_OLD: Final = "Against the older build"
#: A machine on which others use less than this many cores counts as quiet.
QUIET_CORES: Final = 0.15

#: Name, with its unit, -> value; less is better.
Figures = dict[str, float]
#: Figures of a batch of `BATCH_TOKENS`.
FIRST: Final = "one pass, µs"
LATER: Final = "later, µs"


# --- data and the page cache -------------------------------------------------------------------------------------


def write_tokens(path: Path, num_records: int) -> None:
    """Write token ids, small ones more often, shape (num_records, SEQ_LEN) uint32, as `.npy`."""
    generator = np.random.default_rng(SEED)
    tokens = np.lib.format.open_memmap(path, "w+", dtype=np.uint32, shape=(num_records, SEQ_LEN))
    rows = READ_BYTES // (SEQ_LEN * 4)
    for start in range(0, num_records, rows):
        part = tokens[start : start + rows]
        part[:] = VOCAB_SIZE * generator.random(part.shape, np.float32) ** 4
    tokens.flush()


def files_in(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def warm(path: Path) -> None:
    """Read each file of a folder once, into the page cache."""
    buffer = bytearray(READ_BYTES)
    for file_path in files_in(path):
        with open(file_path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(path: Path) -> None:
    """Drop each file of a folder from the page cache. The cache of a virtual machine's host stays."""
    for file_path in files_in(path):
        with open(file_path, "rb", buffering=0) as file:
            os.fsync(file.fileno())  # dirty pages are not dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def direct_bytes_per_s(path: Path) -> float:
    """Read a file once from front to back past the page cache, in blocks of 4 MiB."""
    evict(path)
    buffer = mmap.mmap(-1, READ_BYTES)  # page-aligned for O_DIRECT
    with open(os.open(path, os.O_RDONLY | os.O_DIRECT), "rb", buffering=0) as file:
        start_s = time.perf_counter()
        total = 0
        while count := os.preadv(file.fileno(), [buffer], total):
            total += count
            if count % mmap.PAGESIZE:
                break
        return total / (time.perf_counter() - start_s)


# --- this process and this machine -------------------------------------------------------------------------------


def anonymous_mib() -> float:
    """Return the anonymous resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def us_of(batches: Iterable[Any]) -> float:
    """Return the microseconds of each step of an iteration; its `iter` is included."""
    start_s = time.perf_counter()
    count = 0
    for count, _ in enumerate(batches, start=1):  # noqa: B007
        pass
    return 1e6 * (time.perf_counter() - start_s) / count


def _busy_s() -> float:
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle time and waits for disks


def wait_for_quiet(patience_s: float) -> None:
    """Wait until other processes leave the machine alone, but no longer than `patience_s`."""
    end_s = time.monotonic() + patience_s
    busy = 1.0
    while busy > QUIET_CORES and time.monotonic() < end_s:
        before = _busy_s()
        time.sleep(0.1)
        busy = (_busy_s() - before) / 0.1


def machine() -> str:
    """Describe the machine and the libraries in one line."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown")
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch", "h5py"))
    return (
        f"{model}, {os.cpu_count()} cores, {gib:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {libraries}, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}"
    )


# --- builds ------------------------------------------------------------------------------------------------------


class Build:
    """A process that has imported a module of benchmarks over a build of the package, and forks for each call."""

    def __init__(self, module: str, path: Path = ROOT) -> None:
        environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, __file__, module]
        self._process = subprocess.Popen(
            command, env=environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, function: str, *arguments: Any, patience_s: float = 0.0) -> Any:
        """Call a function of the module in a fork; arguments and result are JSON."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wait_for_quiet(patience_s)
        line = json.dumps([function, [str(a) if isinstance(a, Path) else a for a in arguments]])
        print(line, file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process ended"}')
        if "error" in answer:
            raise RuntimeError(f"{function}{arguments}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(module: str) -> None:
    """Answer calls, one a line, each in a fork: nothing is mapped or allocated there yet, and imports take no time."""
    package = ModuleType("benchmarks")  # of this checkout, whichever build PYTHONPATH names
    package.__path__ = [str(ROOT / "benchmarks")]
    sys.modules["benchmarks"] = package
    found = import_module(module)
    for line in sys.stdin:
        function, arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                answer = {"result": getattr(found, function)(*arguments)}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            os.write(1, json.dumps(answer).encode() + b"\n")
            os._exit(0)
        os.waitpid(pid, 0)


class Run(NamedTuple):
    """A run of a benchmark.

    Attributes
    ----------
    folder
        The folder of the data.
    builds
        The builds that are compared, this one first.
    quick
        Whether little data is used, and no bar is judged.
    rounds
        Rounds of every row.
    titles
        The tables that are asked for.
    """

    folder: Path
    builds: list[Build]
    quick: bool
    rounds: int
    titles: Sequence[str]


# --- comparison --------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """One row of a table.

    Attributes
    ----------
    name
        The name of the row.
    run
        Returns figures; less is better.
    baseline
        The row that it is compared with; "": none.
    bars
        Figure -> the least share of the rate of the baseline.
    """

    name: str
    run: Callable[[], Figures]
    baseline: str = ""
    bars: Mapping[str, float] = {}


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the median, the first and the third quartile."""
    return np.percentile(values, [50, 25, 75]).tolist()


def compare(title: str, ways: Sequence[Way], rounds: int) -> dict[str, Any]:
    """Run all ways in turns and return a table: figures and ratios, each as median and quartiles."""
    found: dict[str, list[Figures]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            print(f"{title}: {way.name}, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            found[way.name].append(way.run())
    rows = []
    for way in ways:
        columns = list(found[way.name][0])
        row: dict[str, Any] = {"name": way.name, "baseline": way.baseline, "bars": dict(way.bars)}
        row["figures"] = {c: quartiles([each[c] for each in found[way.name]]) for c in columns}
        pairs = list(zip(found.get(way.baseline, []), found[way.name], strict=False))
        row["ratios"] = {c: quartiles([a[c] / b[c] for a, b in pairs]) for c in columns if pairs and c in pairs[0][0]}
        rows.append(row)
    return {"title": title, "rounds": rounds, "rows": rows}


def way_of(build: Build, function: str, *arguments: Any, patience_s: float = 0.0) -> Callable[[], Figures]:
    """Return a function that calls one of the module in a fork of a build."""
    return partial(build.call, function, *arguments, patience_s=patience_s)


def against_old(
    builds: Sequence[Build], name: str, function: str, folder: Path, bars: Mapping[str, float]
) -> list[Way]:
    """Return the ways of one row in this build and in the older one, which is its baseline.

    Parameters
    ----------
    builds
        Both builds, this one first.
    name
        The name of the row, which the function takes.
    function
        The function of the module.
    folder
        The folder that has the data of each build, by its number.
    bars
        The least shares of the rate of the older build.
    """
    old = f"{name}, old"
    return [
        Way(name, way_of(builds[0], function, folder / "0", name), old, bars),
        Way(old, way_of(builds[1], function, folder / "1", name)),
    ]


# --- reports -----------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Return the tables as markdown, with a verdict for each bar; a --quick run is not judged."""
    quick = result["quick"]
    bars = "; a bar is the least ratio of a full run"
    if quick:
        bars += ", --quick judges none"
    lines = [f"{result['machine']}. Rounds in turns; medians, quartiles of ratios in brackets{bars}."]
    for table in result["tables"]:
        rounds = f"{table['rounds']} {'round' if table['rounds'] == 1 else 'rounds'}"
        lines.append(f"\n### {table['title']} ({rounds})\n")
        lines += _table_lines(table["rows"], quick)
    return "\n".join(lines)


def _table_lines(rows: Sequence[dict[str, Any]], quick: bool) -> list[str]:
    """Return the header and the rows of a table; where batches are timed, the last column has tokens a second."""
    columns = list(dict.fromkeys(column for row in rows for column in row["figures"]))
    headers = ["row", *columns, *(f"{column.partition(',')[0]}, ratio" for column in columns)]
    if LATER in columns:
        headers.append("M tokens/s")
    lines = [_line(headers), _line(["---"] * len(headers))]
    for row in rows:
        figures = {column: median for column, (median, _, _) in row["figures"].items()}
        cells = [row["name"]]
        cells += [f"{figures[column]:,.2f}" if column in figures else "" for column in columns]
        cells += [_ratio(row, column, quick) for column in columns]
        if LATER in columns:
            cells.append(f"{BATCH_TOKENS / figures[LATER]:,.0f}" if LATER in figures else "")
        lines.append(_line(cells))
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ratio(row: dict[str, Any], column: str, quick: bool) -> str:
    if column not in row["ratios"]:
        return ""
    median, low, high = row["ratios"][column]
    ratio = f"{median:.2f} ({low:.2f}..{high:.2f}) of {row['baseline']}"
    bar = row["bars"].get(column)
    if bar is None:
        return ratio
    if quick:
        verdict = "not judged"
    else:
        verdict = "met" if median >= bar else "NOT met"
    return f"{ratio}, bar {bar}: {verdict}"


if __name__ == "__main__":
    serve(sys.argv[1])
