"""Compressed stores: bytes per token, writing and reading with each codec, and on slow storage.

The tokens are those of real text: of Parquet files that are named, else of the Python standard library's sources; a
tokenizer is trained on it first. Slow storage is simulated: a file whose ranges come at so many bytes per second.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Final

import h5py
import hdf5plugin  # noqa: F401 - has HDF5 know the filter
import numpy as np
import numpy.typing as npt

from benchmarks.measure import MIB, Bar, Spread, bar_plot, machine, machine_line, markdown_table, verdict, warm
from zb_hdf5 import open_reader, open_writer
from zb_hdf5.columns.decoded import CodedChunks, DecodedSource
from zb_hdf5.files.extent_file import ExtentFile
from zb_hdf5.files.extents import Extents
from zb_hdf5.formats.hdf5.places import chunk_table
from zb_hdf5.loaders.prefetch import read_ahead
from zb_hdf5.spec import BATCHES, NO_CODEC
from zb_hdf5.text.corpus import open_documents
from zb_hdf5.text.tokenizers import load_tokenizer
from zb_hdf5.text.training import train_tokenizer

CODECS: Final = (NO_CODEC, "zstd:1", "zstd:3", "zstd:9", "zstd:19", "gzip:1", "gzip:6")
#: The codec whose reads are also measured through h5py, and on slow storage.
CHOSEN: Final = "zstd:3"
SHAPE: Final = (64, 1024)
VOCAB_SIZE: Final = 32_768
REPEATS: Final = 5
QUICK_FILES: Final = 40
THREADS: Final = 2
SLOW_BYTES_PER_S: Final = 200e6
#: Reads under way on slow storage, and the threads that do them: those of the loader.
DEPTH: Final = 8
#: Ours against h5py; and what of the ratio of compression arrives as speed on slow storage.
H5PY_BAR: Final = 2.0
SLOW_BAR: Final = 0.8


class SlowFile(ExtentFile):
    """A file whose bytes come one after the other, at so many a second."""

    def __init__(self, path: Path, bytes_per_s: float) -> None:
        super().__init__(path, Extents([], 1), (1, 1), np.dtype("u1"), "pread")
        self._bytes_per_s, self._lock, self._free_s = bytes_per_s, threading.Lock(), 0.0

    def read_ranges(self, ranges: Sequence[tuple[int, npt.NDArray[Any]]]) -> None:
        with self._lock:
            begin_s = max(time.perf_counter(), self._free_s)
            end_s = self._free_s = begin_s + sum(out.nbytes for _, out in ranges) / self._bytes_per_s
        super().read_ranges(ranges)
        time.sleep(max(0.0, end_s - time.perf_counter()))


def measure(folder: Path, *, quick: bool, repeats: int | None, text: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Write a file with each codec, and read all of them in turns."""
    repeats = repeats or (1 if quick else REPEATS)
    tokens = _tokens(folder, quick, text)
    rows, paths = [], {codec: folder / f"{codec.replace(':', '-')}.h5" for codec in CODECS}
    for codec, path in paths.items():
        start_s = time.perf_counter()
        with open_writer(path, batch_size=SHAPE[0], seq_len=SHAPE[1], dtype="uint16", codec=codec) as writer:
            writer.write(tokens)
            info = writer.finish()
        stored = tokens.nbytes if info.compressed is None else info.compressed.num_bytes
        write_s = time.perf_counter() - start_s
        rows.append({"name": codec, "ratio": tokens.nbytes / stored, "bits_per_token": 8 * stored / tokens.size,
                     "write_tokens_per_s": tokens.size / write_s})  # fmt: skip
        warm(path)
    ways: dict[str, Callable[[], float]] = {}
    for codec, path in paths.items():
        ways[codec, "1"] = lambda path=path: _read(path, 1)
        ways[codec, "2"] = lambda path=path: _read(path, THREADS)
    ways[CHOSEN, "h5py"] = lambda: _read_h5py(paths[CHOSEN])
    for codec in (NO_CODEC, CHOSEN):
        ways[codec, "slow"] = lambda path=paths[codec]: _read_slow(path)
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, read in ways.items():
            seconds[way].append(read())
    for row in rows:
        for key, name in (("1", "read_tokens_per_s"), ("2", "read_2_tokens_per_s"), ("h5py", "h5py_tokens_per_s"),
                          ("slow", "slow_tokens_per_s")):  # fmt: skip
            if found := seconds.get((row["name"], key)):
                row[name] = Spread.of([tokens.size / each for each in found]).as_json()
    chosen = next(row for row in rows if row["name"] == CHOSEN)
    bars = {
        "h5py": median(a / b for a, b in zip(seconds[CHOSEN, "h5py"], seconds[CHOSEN, "2"], strict=True)),
        "slow": median(a / b for a, b in zip(seconds[NO_CODEC, "slow"], seconds[CHOSEN, "slow"], strict=True)),
    }
    return {
        "benchmark": "codecs", "machine": machine(), "machine_line": machine_line(), "quick": quick,
        "repeats": repeats, "tokens": tokens.size, "batch_bytes": tokens[0].nbytes, "ratio": chosen["ratio"],
        **bars, "rows": rows,
    }  # fmt: skip


def _tokens(folder: Path, quick: bool, text: tuple[Path, ...]) -> npt.NDArray[Any]:
    """Return real tokens as batches."""
    sources = sorted(Path(os.__file__).parent.glob("**/*.py"))[: QUICK_FILES if quick else None]
    files = open_documents(text, "parquet") if text else open_documents(sources, "text")
    trained = train_tokenizer(files, folder / "tok.json", 512 if quick else VOCAB_SIZE)
    tokenizer = load_tokenizer(f"tiktoken:{trained.ranks_path}")
    texts = (text for file in files for block in file.blocks() for text in block.texts)
    flat = np.concatenate([tokenizer.encode([text])[0] for text in texts]).astype("<u2")
    count = max(1, len(flat) // (SHAPE[0] * SHAPE[1]))
    return np.resize(flat, (count, *SHAPE))


def _read(path: Path, threads: int) -> float:
    """Return the seconds that it takes to read every batch once, each thread its share."""
    with open_reader(path, access="pread") as reader:
        return _seconds(threads, reader.num_batches, lambda number, out: reader.read_into(number, out))


def _read_h5py(path: Path) -> float:
    with h5py.File(path, rdcc_nbytes=0) as h5:
        stored = h5[BATCHES]
        return _seconds(THREADS, len(stored), lambda number, out: stored.read_direct(out, np.s_[number]))


def _seconds(threads: int, count: int, read: Callable[[int, npt.NDArray[Any]], None]) -> float:
    def share(thread: int) -> None:
        out = np.empty(SHAPE, "<u2")
        for number in range(thread, count, threads):
            read(number, out)

    with ThreadPoolExecutor(threads) as pool:
        start_s = time.perf_counter()
        list(pool.map(share, range(threads)))
        return time.perf_counter() - start_s


def _read_slow(path: Path) -> float:
    """Return the seconds of one pass over a file on slow storage, read ahead as the loader does."""
    with open_reader(path) as reader, h5py.File(path) as h5:
        table = chunk_table(h5[BATCHES], reader.num_batches)[:, :2].copy()
        meta, extents = reader.meta, reader.extents
    file = SlowFile(path, SLOW_BYTES_PER_S)
    packed = DecodedSource(file, CodedChunks(meta.codec, table), meta, "pread") if extents is None else None

    def read(number: int) -> object:
        if packed is not None:
            return packed.read(number)
        out = np.empty(meta.shape, meta.dtype)
        file.read_ranges([(int(table[number, 0]), out)])
        return out

    start_s = time.perf_counter()
    for _ in read_ahead(read, iter(range(len(table))), DEPTH):
        pass
    seconds = time.perf_counter() - start_s
    file.close()
    return seconds


def report(result: dict[str, Any]) -> str:
    """Return the tables, as markdown."""

    def rate(row: dict[str, Any], name: str) -> str:
        return Spread(*(value / 1e6 for value in row[name].values())).text() if name in row else ""

    table = [
        [row["name"], f"{row['bits_per_token']:.2f}", f"{row['ratio']:.2f}", f"{row['write_tokens_per_s'] / 1e6:,.0f}"]
        + [rate(row, name) for name in ("read_tokens_per_s", "read_2_tokens_per_s", "h5py_tokens_per_s")]
        + [rate(row, "slow_tokens_per_s")]
        for row in result["rows"]
    ]
    heads = ("codec", "bits a token", "ratio", "write", "read, 1 thread", f"{THREADS} threads",
             f"h5py, {THREADS} threads", f"at {SLOW_BYTES_PER_S / 1e6:.0f} MB/s")  # fmt: skip
    quick, ratio = result["quick"], result["ratio"]
    lines = [
        f"## Codecs, {result['tokens'] / 1e6:.1f} M uint16 tokens in batches of {result['batch_bytes'] / MIB:.3f} MiB",
        f"{result['machine_line']}. {result['repeats']} interleaved repeats; median (min..max), M tokens/s.",
        "",
        markdown_table(heads, table),
        "",
        f"- {CHOSEN} against h5py on the same file, {THREADS} threads: {result['h5py']:.2f} (bar {H5PY_BAR}: "
        f"{verdict(result['h5py'] >= H5PY_BAR, quick)})",
        f"- {CHOSEN} against none at {SLOW_BYTES_PER_S / 1e6:.0f} MB/s: {result['slow']:.2f} times, the ratio is "
        f"{ratio:.2f} (bar {SLOW_BAR} of it: {verdict(result['slow'] >= SLOW_BAR * ratio, quick)})",
    ]
    if quick:
        lines.append("(A --quick run: too little data to mean anything.)")
    return "\n".join(lines)


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw how fast each codec is read."""
    bars = [
        Bar(f"{row['name']}, {row['bits_per_token']:.1f} bits a token", Spread(**row["read_2_tokens_per_s"]), "zb_hdf5")
        for row in result["rows"]
    ]
    chosen = next(row for row in result["rows"] if "h5py_tokens_per_s" in row)
    bars.append(Bar(f"{chosen['name']} through h5py", Spread(**chosen["h5py_tokens_per_s"]), "h5py"))
    subtitle = f"{result['tokens'] / 1e6:.0f} M tokens, {THREADS} threads, median of {result['repeats']}"
    bar_plot(path, bars, title="Reading compressed stores", subtitle=subtitle, unit="M tokens per second", scale=1e-6)
