"""Windows of a token stream: what the size of the HDF5 chunks costs, through h5py and by extents, cold and warm.

Random windows of `WINDOW + 1` tokens, as a training loop reads them. Each row is the same stream with other chunks.
Cold: the file is dropped from the page cache first; the bytes that came in are compared with those asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np

from benchmarks.measure import Bar, Spread, bar_plot, evict, machine, machine_line, markdown_table, resident_share, warm
from zb_hdf5 import HDF5ShardWriter, MmapTokenStore
from zb_hdf5.spec import TOKENS

WINDOW: Final = 2048
#: Chunk of a row -> how it relates to a window.
CHUNKS: Final = {"half a window": 0.5, "one window": 1.0, "two windows": 2.0, "16 windows": 16.0, "the default": 128.0}
NUM_TOKENS: Final = 64 << 20
QUICK_TOKENS: Final = 1 << 20
READS: Final = 2000
QUICK_READS: Final = 50
REPEATS: Final = 5
Read = Callable[[int], object]


def measure(folder: Path, *, quick: bool, repeats: int | None) -> dict[str, Any]:
    """Time all ways over all chunk sizes, interleaved."""
    repeats = repeats or (1 if quick else REPEATS)
    num_tokens, reads = (QUICK_TOKENS, QUICK_READS) if quick else (NUM_TOKENS, READS)
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, 50_257, num_tokens).astype("<u2")
    starts = generator.integers(0, num_tokens - WINDOW - 1, reads).tolist()
    paths = {}
    for name, windows in CHUNKS.items():
        paths[name] = folder / f"{windows}.h5"
        with HDF5ShardWriter(paths[name], chunk_tokens=int(windows * WINDOW)) as writer:
            writer.write_documents(tokens, [num_tokens])
    figures: dict[tuple[str, str], dict[str, list[float]]] = {}
    for _ in range(repeats):
        for name, path in paths.items():
            for way in WAYS:
                found = figures.setdefault((name, way), {"cold": [], "warm": [], "read_share": []})
                for key, value in _measure_way(path, way, tokens, starts).items():
                    found[key].append(value)
    rows = [
        {"name": f"{way}, chunk of {name}", "chunk": name, "way": way}
        | {f"{key}_us": Spread.of(found[key]).as_json() for key in ("warm", "cold")}
        | {"read_amplification": Spread.of(found["read_share"]).as_json()}
        for (name, way), found in figures.items()
    ]
    about = {"machine": machine(), "machine_line": machine_line()}
    return {"benchmark": "window", **about, "quick": quick, "repeats": repeats, "reads": reads, "rows": rows}


def _measure_way(path: Path, way: str, tokens: np.ndarray[Any, Any], starts: list[int]) -> dict[str, float]:
    """Return microseconds per window, cold and warm, and bytes brought into the page cache per byte asked for."""
    size = path.stat().st_size
    evict(path)
    before = resident_share(path)
    cold = _timed(path, way, tokens, starts)
    asked = len(starts) * (WINDOW + 1) * tokens.itemsize
    brought = (resident_share(path) - before) * size
    warm(path)
    return {"cold": cold, "warm": _timed(path, way, tokens, starts), "read_share": max(brought / asked, 1e-9)}


def _timed(path: Path, way: str, tokens: np.ndarray[Any, Any], starts: list[int]) -> float:
    with WAYS[way](path) as source:
        read = source.read
        read(0)  # opens the file
        start_s = time.perf_counter()
        for start in starts:
            found = read(start)
        seconds = time.perf_counter() - start_s
        if not np.array_equal(found, tokens[starts[-1] : starts[-1] + WINDOW + 1]):
            raise RuntimeError(f"{path}: wrong tokens through {way}")
    return seconds / len(starts) * 1e6


class _Extents:
    def __init__(self, path: Path, access: str) -> None:
        self._store = MmapTokenStore(path, access=access)
        self._out = np.empty(WINDOW + 1, self._store.dtype)

    def read(self, start: int) -> object:
        self._store.read_into(start, self._out)
        return self._out

    def __enter__(self) -> _Extents:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()


class _H5py:
    def __init__(self, path: Path) -> None:
        self._h5 = h5py.File(path)
        self._tokens = self._h5[TOKENS]

    def read(self, start: int) -> object:
        return self._tokens[start : start + WINDOW + 1]

    def __enter__(self) -> _H5py:
        return self

    def __exit__(self, *_: object) -> None:
        self._h5.close()


WAYS: Final[dict[str, Callable[[Path], Any]]] = {
    "h5py": _H5py,
    "mmap": lambda path: _Extents(path, "mmap"),
    "pread": lambda path: _Extents(path, "pread"),
}


def report(result: dict[str, Any]) -> str:
    """Return the table, as markdown."""
    table = [
        [
            row["chunk"],
            row["way"],
            Spread(**row["warm_us"]).text(1),
            Spread(**row["cold_us"]).text(1),
            f"{row['read_amplification']['median']:.2f}",
        ]
        for row in result["rows"]
    ]
    lines = [
        f"## Random windows of {WINDOW:,} uint16 tokens, {result['reads']:,} reads",
        f"{result['machine_line']}. {result['repeats']} interleaved repeats; median (min..max) in microseconds per "
        "window, opening apart. Read: bytes that came into the page cache per byte that was asked for, cold.",
        "",
        markdown_table(("chunk", "way", "warm µs", "cold µs", "read"), table),
    ]
    if result["quick"]:
        lines.append("(A --quick run: too little data to mean anything.)")
    return "\n".join(lines)


def _rate(microseconds: Spread) -> Spread:
    return Spread(*(1e6 / value for value in (microseconds.median, microseconds.high, microseconds.low)))


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw the warm rates of all rows."""
    bars = [Bar(row["name"], _rate(Spread(**row["warm_us"])), row["way"]) for row in result["rows"]]
    about = result["machine"]
    subtitle = f"{WINDOW:,} uint16 tokens, page cache warm, {about['cores']} cores ({about['cpu']})"
    bar_plot(path, bars, title="Random windows of a token stream", subtitle=subtitle, unit="windows per second")
