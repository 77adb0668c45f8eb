"""Interleaved comparison: builds in processes of their own, rounds there and back, ratios of one round, tables, bars.

A way is a function that returns figures. Every round runs each way once, in a fresh process, so that noise meets all of
them; a ratio compares two ways of the same round, and its median over the rounds is set against the bar. Two ways that
are compared have read the same tokens, or no figure is shown.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import timeit
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

ROOT: Final = Path(__file__).resolve().parents[1]
SEED: Final = 42
BATCH_SIZE: Final = 32
SEQ_LEN: Final = 512
BATCH_TOKENS: Final = BATCH_SIZE * SEQ_LEN
VOCAB_SIZE: Final = 50_257  # GPT-2's: fits uint16 as well
MIB: Final = 1 << 20
READ_BYTES: Final = 4 * MIB
#: Batches of the tokens of 1 MiB, as uint32.
MIB_BATCHES: Final = MIB // (4 * BATCH_TOKENS)
#: The title of a table that only --old has.
AGAINST_OLD: Final = "Against the older build"
#: A machine on which others use less than this many cores counts as quiet.
QUIET_CORES: Final = 0.15
#: The load before each row is looked at for so long.
LOAD_PATIENCE_S: Final = 0.1

#: Name, with its unit, -> value; less is better.
Figures = dict[str, float]
#: Figures of a batch of `BATCH_TOKENS`.
FIRST: Final = "one pass, µs"
LATER: Final = "later, µs"
P50: Final = "p50, µs"
P99: Final = "p99, µs"
OPEN: Final = "first batch, ms"
OWN: Final = "own MiB"
MAPPED: Final = "mapped MiB"
CPU: Final = "CPU s for 1e9 tokens"
WAITING: Final = "waiting, % of the time"
#: After a first pass of so many seconds there is one later pass.
LONG_PASS_S: Final = 2.0
#: Of these, no ratio is of use.
NOT_COMPARED: Final = (P50, P99, MAPPED, CPU, WAITING)
#: A number that equal tokens have, in any order of their rows. It is not a figure, and shown nowhere.
SEEN: Final = "tokens seen"
#: Rows are hashed by these; a double holds a number of so many bits.
HASH_FACTOR: Final = 0x9E3779B97F4A7C15
SEEN_BITS: Final = 52

#: <sys/prctl.h>: the signal for a process whose parent has ended.
PR_SET_PDEATHSIG: Final = 1
LIBC: Final = ctypes.CDLL(None)

#: Epoch number -> batches.
Epochs = Callable[[int], Iterable[Any]]


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
    return _resident_mib("RssAnon:")


def _resident_mib(kind: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))


def us_of(batches: Iterable[Any]) -> float:
    """Return the microseconds of each step of an iteration; its `iter` is included."""
    return float(step_times_us(batches).mean())


def passes(make: Callable[[], Epochs]) -> Figures:
    """Open some data in a fresh process, and time its passes.

    Parameters
    ----------
    make
        Opens the data. The time to the first batch begins here.

    Returns
    -------
    Microseconds of a batch in the first pass and in the median of three later ones, or in one where that takes long;
    the 50th and 99th percentile of those; milliseconds to the first batch, memory and processor time, and the number of
    the tokens.
    """
    import torch

    torch.from_numpy(np.zeros((BATCH_SIZE, SEQ_LEN), np.uint32).astype(np.int64))  # first use of the libraries
    own = anonymous_mib()
    mapped = _resident_mib("RssFile:")
    start_s = time.perf_counter()
    epochs = make()
    opened_s = time.perf_counter() - start_s
    first_ms: list[float] = []
    start_s = time.perf_counter()
    figures = {FIRST: us_of(_noting_first(epochs(0), first_ms))}
    is_long = time.perf_counter() - start_s > LONG_PASS_S
    busy_s = time.process_time()
    later_us = [step_times_us(epochs(epoch)) for epoch in ((1,) if is_long else (1, 2, 3))]
    busy_s = time.process_time() - busy_s
    all_us = np.concatenate(later_us)
    return figures | {
        LATER: statistics.median(float(times.mean()) for times in later_us),
        P50: float(np.percentile(all_us, 50)),
        P99: float(np.percentile(all_us, 99)),
        OPEN: 1e3 * opened_s + first_ms[0],
        OWN: max(0.0, anonymous_mib() - own),
        MAPPED: max(0.0, _resident_mib("RssFile:") - mapped),
        CPU: 1e9 * busy_s / (all_us.size * BATCH_TOKENS),
        SEEN: tokens_seen(epochs(5)),
    }


def _noting_first(batches: Iterable[Any], first_ms: list[float]) -> Iterator[Any]:
    """Yield batches, and note the milliseconds to the first one."""
    start_s = time.perf_counter()
    steps = iter(batches)
    batch = next(steps)
    first_ms.append(1e3 * (time.perf_counter() - start_s))
    yield batch
    yield from steps


def step_times_us(batches: Iterable[Any]) -> npt.NDArray[np.float64]:
    """Return the microseconds that a loop waits for each step."""
    ends_ns = [time.perf_counter_ns()]
    for _ in batches:
        ends_ns.append(time.perf_counter_ns())
    return np.diff(np.array(ends_ns)) / 1e3


def tokens_seen(batches: Iterable[Any]) -> float:
    """Return a number that the rows of some batches have in any order, and others most likely not."""
    factors = np.random.default_rng(SEED).integers(1, 1 << 62, SEQ_LEN, dtype=np.int64) | 1
    total = 0
    for batch in batches:
        tokens = batch["tokens"] if isinstance(batch, Mapping) else batch
        ids = np.asarray(tokens).astype(np.int64).reshape(-1)
        rows = ids[: ids.size // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN)
        hashes = (rows * factors).sum(axis=1).view(np.uint64)
        hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(HASH_FACTOR)
        total = (total + int((hashes >> np.uint64(20)).sum())) % (1 << SEEN_BITS)
    return float(total)


def _busy_s() -> float:
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle time and waits for disks


def wait_for_quiet(patience_s: float) -> float:
    """Wait until other processes leave the machine alone, but no longer than `patience_s`.

    Return the number of cores that they kept busy in the last tenth of a second.
    """
    end_s = time.monotonic() + patience_s
    busy = 1.0
    while busy > QUIET_CORES and time.monotonic() < end_s:
        before = _busy_s()
        time.sleep(0.1)
        busy = (_busy_s() - before) / 0.1
    return busy


def machine() -> str:
    """Describe the machine and the libraries in one line."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown")
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch", "h5py"))
    return (
        f"{model}, {os.cpu_count()} cores, {gib:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {libraries}, crc32 of 64 KiB in {crc32_us(64 << 10):.1f} µs, "
        f"load {os.getloadavg()[0]:.2f}, {time.strftime('%Y-%m-%d')}"
    )


def crc32_us(num_bytes: int) -> float:
    """Return the time of a crc32 of bytes in the cache of a core: processors differ by a factor of four."""
    from isal import isal_zlib  # the interpreters of other libraries may not have it

    data = bytes(num_bytes)
    seconds = min(timeit.repeat(lambda: isal_zlib.crc32(data), number=100, repeat=20))
    return seconds / 100 * 1e6


# --- builds ------------------------------------------------------------------------------------------------------


class CallError(RuntimeError):
    """A call in another process has failed; its traceback is the message."""


class KilledError(CallError):
    """The process of a call has ended before it had a result.

    Attributes
    ----------
    reason
        How it ended.
    """

    def __init__(self, call: str, exit_code: int) -> None:
        self.reason = _end_of(exit_code)
        super().__init__(f"{call}: {self.reason}")


def _end_of(exit_code: int) -> str:
    """Return how a process has ended, by its exit code, or by the number of a signal below 0."""
    if exit_code >= 0:
        return f"the process ended with exit code {exit_code}, and without a result"
    hint = ", as the kernel does where memory is short" if -exit_code == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-exit_code).name}{hint}"


class Build:
    """A process that has imported a module of benchmarks over a build of the package, and forks for each call.

    Parameters
    ----------
    module
        The module whose functions are called.
    path
        The folder of the build; None: the package is not used.
    python
        The interpreter.
    imported
        Modules that are imported before the first fork.
    """

    def __init__(
        self, module: str, path: Path | None = ROOT, python: str = sys.executable, imported: Sequence[str] = ()
    ) -> None:
        self._environment = {**os.environ, "PYTHONPATH": str(path or ""), "PYTHONSAFEPATH": "1"}
        self._command = [python, __file__, module, *imported]
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command, env=self._environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, function: str, *arguments: Any, patience_s: float = 0.0) -> Any:
        """Call a function of the module in a fork; arguments and result are JSON.

        Raises
        ------
        KilledError
            The fork, or the process that forks, has ended before there was a result. The next call works.
        CallError
            The function has failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wait_for_quiet(patience_s)
        line = json.dumps([function, [str(a) if isinstance(a, Path) else a for a in arguments]])
        with contextlib.suppress(BrokenPipeError):  # then it has ended, and gives no answer
            print(line, file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or "{}")
        if not answer:
            answer = {"exit code": self.close()}
            self._process = self._start()
        if "exit code" in answer:
            raise KilledError(f"{function}{arguments}", answer["exit code"])
        if "error" in answer:
            raise CallError(f"{function}{arguments}: {answer['error']}")
        return answer["result"]

    def close(self) -> int:
        """End the process, and return its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        exit_code = self._process.wait()
        self._process.stdout.close()
        return exit_code


def serve(module: str, *imported: str) -> None:
    """Answer calls, one a line, each in a fork: nothing is mapped or allocated there yet, and imports take no time.

    A module that cannot be imported is an error of each call.
    """
    answers = os.dup(1)
    os.dup2(2, 1)  # some libraries print
    package = ModuleType("benchmarks")  # of this checkout, whichever build PYTHONPATH names
    package.__path__ = [str(ROOT / "benchmarks")]
    sys.modules["benchmarks"] = package
    found = import_module(module)
    with contextlib.suppress(Exception):  # each call imports it again, and says so
        for name in imported:
            import_module(name)
    for line in sys.stdin:
        os.write(answers, _forked(found, *json.loads(line), answers) + b"\n")


def _forked(module: ModuleType, function: str, arguments: list[Any], answers: int) -> bytes:
    """Call a function in a fork, and return its answer; that of a fork that was killed is its exit code."""
    with open(os.memfd_create("answer"), "w+b", buffering=0) as file:  # no reader waits for it, whoever inherits it
        pid = os.fork()
        if pid == 0:
            os.close(answers)  # whoever reads there is to see its end when this process's parent is killed
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                answer = {"result": getattr(module, function)(*arguments)}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            os.write(file.fileno(), json.dumps(answer).encode())
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        file.seek(0)
        answer_bytes = file.read() if status == 0 else b""
    return answer_bytes or json.dumps({"exit code": os.waitstatus_to_exitcode(status)}).encode()


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
    mib
        MiB of uint32 tokens of a source.
    pythons
        The interpreters of other libraries, by the name of their file.
    is_ours
        Whether other libraries are left out.
    """

    folder: Path
    builds: list[Build]
    quick: bool
    rounds: int
    titles: Sequence[str]
    mib: int
    pythons: Mapping[str, str] = {}
    is_ours: bool = False

    @property
    def batches(self) -> int:
        """Return the number of batches of a source."""
        return self.mib * MIB_BATCHES

    @property
    def patience_s(self) -> float:
        """Return how long a row waits for a quiet machine."""
        return 0.0 if self.quick else 1.0


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


class UnequalError(RuntimeError):
    """Two ways that are compared have read other tokens."""


class UnavailableRow(Exception):
    """A row that this machine cannot measure; the message is the reason."""


def spread(values: Sequence[float]) -> list[float]:
    """Return the median, the least and the largest."""
    return [float(statistics.median(values)), min(values), max(values)]


def turns(ways: Sequence[Way], number: int) -> list[Way]:
    """Return the ways in the order of a round: there, and in the next round back."""
    return list(ways if number % 2 == 0 else reversed(ways))


def compare(title: str, ways: Sequence[Way], rounds: int, patience_s: float = 0.0) -> dict[str, Any]:
    """Run all ways in turns and return a table: figures and ratios, each as median, least and largest.

    A way that raises `UnavailableRow`, or whose process is killed, is left out, with the reason. Before each row the
    processes of the one before may take so many seconds to end.
    """
    found: dict[str, list[Figures]] = {way.name: [] for way in ways}
    loads: dict[str, list[float]] = {way.name: [] for way in ways}
    skipped: dict[str, str] = {}
    for number in range(rounds):
        for way in turns(ways, number):
            if way.name in skipped:
                continue
            print(f"{title}: {way.name}, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            loads[way.name].append(wait_for_quiet(max(LOAD_PATIENCE_S, patience_s)))
            try:
                found[way.name].append(way.run())
            except UnavailableRow as error:
                skipped[way.name] = str(error)
            except KilledError as error:
                skipped[way.name] = f"{error.reason} (round {number + 1} of {rounds})"
                print(f"{title}: {way.name}: {skipped[way.name]}", file=sys.stderr, flush=True)
    measured = [way for way in ways if way.name not in skipped]
    _require_equal_tokens(measured, found)
    rows = [_row(way, found) | {"load": spread(loads[way.name])} for way in measured]
    return {"title": title, "rounds": rounds, "rows": rows, "skipped": skipped}


def _require_equal_tokens(ways: Sequence[Way], found: Mapping[str, list[Figures]]) -> None:
    for way in ways:
        for figures, others in zip(found[way.name], found.get(way.baseline, []), strict=False):
            if figures.get(SEEN) != others.get(SEEN) and SEEN in figures and SEEN in others:
                raise UnequalError(f"{way.name}: read other tokens than {way.baseline}")


def _row(way: Way, found: Mapping[str, list[Figures]]) -> dict[str, Any]:
    columns = [column for column in found[way.name][0] if column != SEEN]
    row: dict[str, Any] = {"name": way.name, "baseline": way.baseline, "bars": dict(way.bars)}
    row["figures"] = {c: spread([each[c] for each in found[way.name]]) for c in columns}
    baseline = [] if way.baseline == way.name else found.get(way.baseline, [])
    pairs = list(zip(baseline, found[way.name], strict=False))
    compared = [c for c in columns if c not in NOT_COMPARED and pairs and c in pairs[0][0]]
    row["ratios"] = {c: spread([a[c] / b[c] for a, b in pairs]) for c in compared if all(b[c] for _, b in pairs)}
    return row


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


if __name__ == "__main__":
    serve(*sys.argv[1:])
