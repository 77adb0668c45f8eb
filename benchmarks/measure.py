"""What both benchmarks share: data, fresh processes, page cache, memory, statistics, tables and pictures.

Noise is met in one way everywhere: rows are interleaved in one run, every figure is a median with its range, and what
is compared is compared in pairs that were measured next to each other.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from zb_hdf5.files.digests import TokenArray

SEED: Final = 42
BATCH_SIZE: Final = 32
SEQ_LEN: Final = 512
BATCH_TOKENS: Final = BATCH_SIZE * SEQ_LEN
VOCAB_SIZE: Final = 50_257  # GPT-2's: fits uint16 as well
MIB: Final = 1 << 20
READ_BYTES: Final = 4 * MIB
#: A machine on which others use less than this many cores counts as quiet.
QUIET_CORES: Final = 0.15
#: Time between two lines of progress.
SAY_S: Final = 10.0

# --- data --------------------------------------------------------------------------------------------------------


def write_tokens(path: Path, num_records: int) -> None:
    """Write random token ids, shape (num_records, SEQ_LEN) uint32, as `.npy`: seeded, in bounded memory, on disk."""
    generator = np.random.default_rng(SEED)
    tokens = np.lib.format.open_memmap(path, "w+", dtype=np.uint32, shape=(num_records, SEQ_LEN))
    rows = READ_BYTES // (SEQ_LEN * 4)
    for start in range(0, num_records, rows):
        part = tokens[start : start + rows]
        part[:] = generator.integers(0, VOCAB_SIZE, part.shape, dtype=np.uint32)
    tokens.flush()


# --- the page cache ----------------------------------------------------------------------------------------------


def warm(path: Path) -> None:
    """Bring a file, or every file of a folder, into the page cache by reading it once from front to back."""
    buffer = bytearray(READ_BYTES)
    for file_path in _files(path):
        with open(file_path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(path: Path) -> None:
    """Drop a file, or every file of a folder, from the page cache. The host's cache, if there is one, stays."""
    for file_path in _files(path):
        fd = os.open(file_path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages are not dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident_share(path: Path) -> float:
    """Return how much of a file, or of a folder's files, is in the page cache: 0.0 to 1.0, by mincore(2)."""
    found = total = 0
    for file_path in _files(path):
        with open(file_path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            pages = -(-len(mapping) // mmap.PAGESIZE)
            states = (ctypes.c_ubyte * pages)()
            if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), len(mapping), states):
                raise OSError(ctypes.get_errno(), "mincore", str(file_path))
            found, total = found + int((np.frombuffer(states, np.uint8) & 1).sum()), total + pages
    return found / total if total else 0.0


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


# --- memory ------------------------------------------------------------------------------------------------------


def memory_mib(pid: int | str = "self") -> dict[str, float]:
    """Return RssAnon, RssFile and VmHWM (the peak of both together) of a process in MiB; empty once it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = (line.split() for line in text.splitlines())
    return {f[0][:-1]: int(f[1]) / 1024 for f in fields if f[0] in ("RssAnon:", "RssFile:", "VmHWM:")}


def hand_out_memory(mib: float) -> None:
    """Make the system hand out memory once and free it again, so that what runs next finds it at hand.

    A virtual machine gives free memory back to its host after seconds, and page by page asks for it again: then `cp`
    of one GiB takes 0.3 s or 3 s, and no two runs can be compared.
    """
    np.empty(int(mib * MIB), dtype=np.uint8)[:: mmap.PAGESIZE] = 1


def mapped_mib(folder: Path) -> float:
    """Return how much of the files inside `folder` is resident in this process's mappings, in MiB."""
    total, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                inside = len(words) > 5 and words[5].startswith(str(folder))
            elif inside and words[0] == "Rss:":
                total += int(words[1])
    return total / 1024


# --- other work on this machine ------------------------------------------------------------------------------------


def busy_cpu_s() -> float:
    """Return the seconds that all processors together have worked since the system started."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting for disks


def wait_for_quiet(patience_s: float) -> None:
    """Wait until other processes leave the machine alone, but no longer than `patience_s`."""
    end_s = time.monotonic() + patience_s
    busy = 1.0
    while busy > QUIET_CORES and time.monotonic() < end_s:
        before = busy_cpu_s()
        time.sleep(0.1)
        busy = (busy_cpu_s() - before) / 0.1


def seconds_of(batches: Iterable[Any]) -> float:
    """Return how long it takes to go through them."""
    start_s = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start_s


class Watch:
    """Measures how many cores others keep busy, from its making until `foreign_cores`."""

    def __init__(self) -> None:
        self._start_s, self._busy_s = time.perf_counter(), busy_cpu_s()

    def foreign_cores(self, own_cpu_s: float) -> float:
        """Return the mean number of cores that worked for somebody else, given the processor time that was ours."""
        busy_s = busy_cpu_s() - self._busy_s - own_cpu_s
        return max(0.0, busy_s / (time.perf_counter() - self._start_s))


# --- fresh processes ---------------------------------------------------------------------------------------------


def run_fresh(function: Callable[..., Any], *args: Any, preload: str) -> tuple[Any, float]:
    """Call a module-level function in a process of its own; return its result and the cores that others used meanwhile.

    The process is forked from a server that has imported `preload` and done nothing else: nothing is mapped, nothing
    is allocated, and imports cost no time.
    """
    say_progress(" ".join([function.__name__, *(arg for arg in args if isinstance(arg, str))]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    receiver, sender = context.Pipe(duplex=False)
    watch = Watch()
    process = context.Process(target=_call, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        result, cpu_s, error = receiver.recv()
    except EOFError:
        result, cpu_s, error = None, 0.0, "it died"
    foreign = watch.foreign_cores(cpu_s)
    process.join()
    if error is not None:
        raise RuntimeError(f"{function.__name__}{args} in a fresh process: {error}")
    return result, foreign


def _call(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        sender.send((function(*args), time.process_time(), None))
    except BaseException:
        sender.send((None, 0.0, traceback.format_exc()))


_said_s = time.monotonic()


def say_progress(what: str) -> None:
    """Print what is measured now, on stderr and at most every `SAY_S` seconds: a long run is not silent."""
    global _said_s
    if time.monotonic() - _said_s >= SAY_S:
        _said_s = time.monotonic()
        print(f"measuring {what}", file=sys.stderr, flush=True)


# --- statistics --------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """A median and its range, in the unit of the values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def quartiles(cls, values: Sequence[float]) -> Spread:
        """Return the median with the first and third quartile."""
        low, median, high = np.percentile(values, [25, 50, 75]).tolist()
        return cls(median, low, high)

    def text(self, digits: int = 0) -> str:
        """Return "median (low..high)"."""
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}..{self.high:,.{digits}f})"

    def as_json(self) -> dict[str, float]:
        return self._asdict()


def verdict(met: bool, quick: bool) -> str:
    """Say whether a bar was met; a --quick run has too little data to judge by."""
    if quick:
        return "not judged"
    return "met" if met else "NOT met"


def machine() -> dict[str, Any]:
    """Describe what the figures were measured on."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown")
    packages = {name: version(name) for name in ("numpy", "h5py", "torch")}
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **packages,
    }


def machine_line() -> str:
    """Return `machine()` as one line."""
    about = machine()
    packages = ", ".join(f"{name} {about[name]}" for name in ("python", "numpy", "h5py", "torch"))
    return f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}, {packages}"


# --- tables, files and pictures ----------------------------------------------------------------------------------


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned markdown table: first column left, the others right."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(headers), line(rule), *map(line, rows)])


class Bar(NamedTuple):
    """One bar of a picture: a value with its range, and the group that gives it its colour."""

    label: str
    value: Spread
    group: str


def bar_plot(
    path: Path, bars: Sequence[Bar], *, title: str, subtitle: str, unit: str, scale: float = 1.0, digits: int = 0
) -> None:
    """Draw horizontal bars, longest meaning best, with value labels and ranges.

    Parameters
    ----------
    unit
        What a value times `scale` is in; names the axis.
    digits
        Decimal places of the value labels.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    palette = ("#9aa0a6", "#0b6e99", "#e08a2c", "#7a5ba6", "#4c9a6a")
    groups = list(dict.fromkeys(bar.group for bar in bars))
    colours = dict(zip(groups, palette, strict=False))
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.38 * len(bars)), layout="constrained")
    places = range(len(bars))
    values = [bar.value.median * scale for bar in bars]
    ranges = [(v - bar.value.low * scale, bar.value.high * scale - v) for bar, v in zip(bars, values, strict=True)]
    axes.barh(places, values, height=0.68, color=[colours[bar.group] for bar in bars])
    style = {"fmt": "none", "ecolor": "#333333", "elinewidth": 1.1, "capsize": 2.5, "alpha": 0.75}
    axes.errorbar(values, places, xerr=np.transpose(ranges), **style)
    right = max(bar.value.high for bar in bars) * scale
    for place, bar, value in zip(places, bars, values, strict=True):
        x = max(value, bar.value.high * scale) + 0.012 * right
        axes.text(x, place, f"{value:,.{digits}f}", va="center", fontsize=9.5, color="#222222")
    axes.set_yticks(places, [bar.label for bar in bars], fontsize=10)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, right * 1.1)
    axes.set_xlabel(unit, fontsize=10)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.xaxis.grid(True, color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    axes.set_title(subtitle, loc="left", fontsize=9.5, color="#555555", x=0.0)
    axes.legend(
        handles=[Patch(color=colours[group], label=group) for group in groups], loc="lower right", frameon=False
    )
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def checksum_records(batch: TokenArray) -> int:
    """Return a sum over the records of a batch that does not depend on their order, but on each whole record."""
    weights = np.arange(1, batch.shape[-1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashes = batch.astype(np.uint64) @ weights
    hashes ^= hashes >> np.uint64(29)
    return int((hashes * np.uint64(0xBF58476D1CE4E5B9)).sum(dtype=np.uint64))
