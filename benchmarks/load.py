"""Loaders against the bare reads that they make, and against an older build: bars of the paths that users take.

Each figure is of a fresh process, page cache warm unless called cold. The bare reads are those of benchmarks/read.py,
of the same files in the same kind of order.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch

from benchmarks import measure as m
from benchmarks.peers.ours import ONE_RANK, load
from benchmarks.read import bare, from_memory, make_store
from zb_hdf5 import DocumentLoader, HDF5ShardWriter, Loader, ReadAs, ShardIndex, convert

#: MiB of the tokens of a source.
MIB = 200
SHARD_BATCHES = 4096
WINDOWS = {"batch_size": 4, "seq_len": 4096}
#: Tokens of a document.
DOCUMENT = 500
#: Spans of each document.
SPANS = 3
BOTH = (m.FIRST, m.LATER)
BAR_AGAINST_OLD = 0.95
PLUS_1 = "int32 view + 1 µs"
WINDOWS_OF_MEMMAP = "np.memmap of .bin"


# --- ways ---------------------------------------------------------------------------------------------------------


def from_cache(path: Path, **options: Any) -> m.Epochs:
    epochs = load(path, cache=path.parent / "cache", **options)
    m.us_of(epochs(9))  # fills it
    return epochs


def write_spans(folder: Path, values: list[tuple[int, int, dict[str, int]]], tokens: Any) -> None:
    """Write the tokens, the values of spans as JSON, and where they begin and end: the files of a loop of one's own."""
    texts = [json.dumps(value).encode() for _, _, value in values]
    ends = np.cumsum([len(text) for text in texts])
    np.save(folder / "spans.npy", np.array([(start, stop) for start, stop, _ in values]))
    np.save(folder / "spans-ends.npy", ends)
    (folder / "spans.json").write_bytes(b"".join(texts))
    tokens.astype(np.uint16).tofile(folder / "spans.bin")


def windows_of_memmap(path: Path) -> m.Epochs:
    """Return windows of the ids of a file without a header."""
    tokens = np.memmap(path, np.uint16, "r").view(np.ndarray)
    windows = tokens[: tokens.size // m.BATCH_TOKENS * m.BATCH_TOKENS].reshape(-1, *WINDOWS.values())

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        for number in np.random.default_rng(epoch).permutation(len(windows)).tolist():
            yield torch.from_numpy(windows[number].astype(np.int64))

    return epoch_of


def sought(folder: Path) -> m.Epochs:
    """Return windows of a memory map, each with the values of its spans: a seek and a read for each of them."""
    spans = np.load(folder / "spans.npy")
    ends = [0, *np.load(folder / "spans-ends.npy").tolist()]
    tokens = np.memmap(folder / "spans.bin", np.uint16, "r").view(np.ndarray)
    file = (folder / "spans.json").open("rb", buffering=0)
    count = len(tokens) // m.BATCH_TOKENS

    def epoch_of(epoch: int) -> Iterator[dict[str, Any]]:
        for number in np.random.default_rng(epoch).permutation(count).tolist():
            start = number * m.BATCH_TOKENS
            first = int(np.searchsorted(spans[:, 1], start, "right"))
            last = int(np.searchsorted(spans[:, 0], start + m.BATCH_TOKENS))
            values = []
            for span in range(first, last):
                file.seek(ends[span])
                values.append(json.loads(file.read(ends[span + 1] - ends[span])))
            batch = tokens[start : start + m.BATCH_TOKENS].astype(np.int64).reshape(WINDOWS["batch_size"], -1)
            yield {"tokens": torch.from_numpy(batch), "spans": values}

    return epoch_of


class Row(NamedTuple):
    """A row of a table.

    Attributes
    ----------
    epochs
        Returns its batches, given the folder of the data.
    baseline
        The row that it is compared with.
    bar
        The least share of the rate of that row, in one pass and later; None: there is no bar.
    """

    epochs: Callable[[Path], m.Epochs]
    baseline: str = ""
    bar: float | None = None


TABLES = {
    "Whole batches": {
        "memory": Row(lambda f: from_memory(f / "four")),
        "bare map, crc32": Row(lambda f: bare(f / "four", "map", check=True), "memory"),
        "bare preadv, crc32": Row(lambda f: bare(f / "four", "preadv", check=True), "memory"),
        "bare map": Row(lambda f: bare(f / "four", "map"), "memory"),
        "bare preadv": Row(lambda f: bare(f / "four", "preadv"), "memory"),
        "bare map, uint16": Row(lambda f: bare(f / "narrow", "map"), "memory"),
        "bare map, uint16, crc32": Row(lambda f: bare(f / "narrow", "map", check=True), "memory"),
        "Loader": Row(lambda f: load(f / "four"), "bare map, crc32", 0.9),
        'Loader, verify="none"': Row(lambda f: load(f / "four", verify="none"), "bare map", 0.85),
        "Loader, one shard": Row(lambda f: load(f / "one"), "bare map, crc32"),
        'Loader, access="pread"': Row(lambda f: load(f / "four", access="pread"), "bare preadv, crc32"),
        "Loader, uint16": Row(lambda f: load(f / "narrow"), "bare map, uint16, crc32", 0.85),
        'Loader, uint16, verify="none"': Row(lambda f: load(f / "narrow", verify="none"), "bare map, uint16", 0.8),
        PLUS_1: Row(lambda f: bare(f / "four", "int32")),
        "Loader, int32": Row(lambda f: load(f / "four", dtype=torch.int32), PLUS_1, 1.0),
        "Loader, cache": Row(lambda f: from_cache(f / "four"), "Loader", 0.9),
    },
    "Documents, fields and spans": {
        "packed": Row(lambda f: load(f / "packed")),
        "packed, cu_seqlens": Row(lambda f: load(f / "packed", documents=True), "packed", 0.6),
        "packed, document_ids": Row(
            lambda f: load(f / "packed", documents=("document_ids", "position_ids")), "packed", 0.2
        ),
        "packed, a field": Row(lambda f: load(f / "packed", fields=("mask",)), "packed", 0.45),
        "windows": Row(lambda f: load(f / "stream.h5", **WINDOWS)),
        "windows, 98 spans a batch": Row(lambda f: load(f / "stream.h5", spans=True, **WINDOWS), "windows"),
        "windows, a seek for each span": Row(lambda f: sought(f), "windows, 98 spans a batch"),
        "DocumentLoader": Row(
            lambda f: load(f / "stream.h5", DocumentLoader, collate="pack", max_tokens=m.BATCH_TOKENS)
        ),
    },
    "Files of other trainers, in place": {
        WINDOWS_OF_MEMMAP: Row(lambda f: windows_of_memmap(f / "raw.bin")),
        "nanoGPT .bin": Row(
            lambda f: load(f / "raw.bin", read_as=ReadAs(source_dtype="uint16"), **WINDOWS), WINDOWS_OF_MEMMAP
        ),
        "llm.c .bin": Row(lambda f: load(f / "llmc.bin", **WINDOWS), WINDOWS_OF_MEMMAP),
        "Megatron .idx": Row(lambda f: load(f / "megatron.idx", **WINDOWS), WINDOWS_OF_MEMMAP),
        "datatrove .ds": Row(lambda f: load(f / "datatrove.ds", **WINDOWS), WINDOWS_OF_MEMMAP),
        "HDF5 of another program, contiguous": Row(
            lambda f: load(f / "foreign.h5", read_as=ReadAs(dataset="ids"), **WINDOWS), WINDOWS_OF_MEMMAP
        ),
        "our stream": Row(lambda f: load(f / "stream.h5", **WINDOWS), WINDOWS_OF_MEMMAP),
    },
}
NOTES = {
    "Whole batches": "A store of 4 shards, against bare reads of the same bytes in the same kind of order.",
    "Documents, fields and spans": (
        "Rows of a packed store, and windows of 4 x 4,096 tokens of a stream, with their documents, fields and spans."
    ),
    "Files of other trainers, in place": "Windows of 4 x 4,096 tokens of the same stream, uint16, in a shuffled order.",
    m.AGAINST_OLD: "The same rows by both builds.",
    "Many shards": "A store of many shards, which are links to one file, against one shard.",
    "A cold disk": "Pages dropped before each row, against one reader of the file past the page cache.",
}
TITLES = (*TABLES, m.AGAINST_OLD, "Many shards", "A cold disk")
#: Rows that are measured in both builds with --old.
AGAINST = (
    "Loader",
    "packed, cu_seqlens",
    "windows",
    "windows, 98 spans a batch",
    "DocumentLoader",
)


def row(folder: str, name: str) -> m.Figures:
    [epochs] = [rows[name].epochs for rows in TABLES.values() if name in rows]
    figures = m.passes(partial(epochs, Path(folder)))
    return figures | {column: figures[column] + (name == PLUS_1) for column in BOTH}


# --- data ---------------------------------------------------------------------------------------------------------


def prepare(folder: str, count: int) -> m.Figures:
    """Write all data with the build of this process."""
    to = Path(folder)
    to.mkdir(exist_ok=True)
    source = to / "tokens.npy"
    m.write_tokens(source, count * m.BATCH_SIZE)
    make_store(source, to / "one")
    make_store(source, to / "four", shards=4)
    make_store(source, to / "narrow", shards=4, dtype="uint16")
    _write_stream(to, np.load(source, mmap_mode="r").reshape(-1))
    formats = {"bin": "raw.bin", "llmc": "llmc.bin", "megatron": "megatron.bin", "datatrove": "datatrove.ds"}
    for target_format, name in formats.items():
        convert(to / "stream.h5", target_format, to / name, source_format="stream", tokens_only=True)
    with h5py.File(to / "foreign.h5", "w") as file:
        file["ids"] = np.fromfile(to / "raw.bin", np.uint16)
    shape = {"batch_size": m.BATCH_SIZE, "seq_len": m.SEQ_LEN}
    convert(to / "stream.h5", "hdf5", to / "packed", source_format="stream", packing="best-fit", shards=4, **shape)
    m.evict(to)  # the page cache then holds all files in pages of the same sizes, however they were written
    m.warm(to)
    return {}


def _write_stream(to: Path, tokens: Any) -> None:
    """Write a quarter of the tokens as documents with a field and spans, and the same for a loop of one's own."""
    written = tokens[: tokens.size // 4 // DOCUMENT * DOCUMENT]
    all_spans = []
    with HDF5ShardWriter(to / "stream.h5", dtype="uint16", fields={"mask": "u1"}) as writer:
        for number, start in enumerate(range(0, written.size, DOCUMENT)):
            document = written[start : start + DOCUMENT]
            edges = np.linspace(0, len(document), 2 * SPANS + 1).astype(int).tolist()
            spans = [(a, b, {"n": number}) for a, b in zip(edges[:-1:2], edges[1::2], strict=True)]
            writer.write_document(document, {"mask": (document % 2).astype("u1")}, id=f"{number}", spans=spans)
            all_spans += [(start + a, start + b, value) for a, b, value in spans]
    write_spans(to, all_spans, written)


def make_many(folder: str, count: int, batches: int) -> m.Figures:
    """Write a store of `count` shards that are links to one file."""
    to = Path(folder) / f"many-{count}"
    m.write_tokens(Path(folder) / "few.npy", batches * m.BATCH_SIZE)
    make_store(Path(folder) / "few.npy", to, shards=1, dtype="uint16")
    index = ShardIndex.load(to)
    (entry,) = index.shards
    entries = [replace(entry, path=f"shard-{number:06}.h5") for number in range(count)]
    for other in entries:
        os.link(to / entry.path, to / other.path)
    records = index.meta.total_records
    meta = replace(index.meta, total_records=records * count) if records else index.meta
    replace(index, shards=tuple(entries), meta=meta).save(to)
    return {}


def many_shards(folder: str, count: int, steps: int) -> m.Figures:
    """Open a store of many shards, meet them all, and time later batches."""
    before = m.anonymous_mib()
    start_s = time.perf_counter()
    loader = Loader(Path(folder) / f"many-{count}", **ONE_RANK)
    next(loader)
    first_ms = 1e3 * (time.perf_counter() - start_s)
    for _ in islice(loader, steps):
        pass
    later = statistics.median(m.us_of(islice(loader, steps // 10)) for _ in range(5))
    return {"first batch, ms": first_ms, m.LATER: later, "own MiB": m.anonymous_mib() - before}


def cold(folder: str, order: str) -> m.Figures:
    path = Path(folder) / "one"
    shard = next(path.glob("*.h5"))
    if order == "O_DIRECT":
        return {"cold, µs": 4e6 * m.BATCH_TOKENS / m.direct_bytes_per_s(shard)}
    m.evict(path)
    with Loader(path, shuffle=order, **ONE_RANK) as loader:
        return {"cold, µs": m.us_of(loader)}


# --- the tables ---------------------------------------------------------------------------------------------------


def tables(run: m.Run) -> Iterator[tuple[str, list[m.Way]]]:
    """Yield titles and ways; the first build is the current one."""
    build = run.builds[0]
    data = run.folder / "0"
    for title, rows in TABLES.items():
        yield title, [_way(build, data, name, row, run.patience_s) for name, row in rows.items()]
    if len(run.builds) > 1:
        ways: list[m.Way] = []
        for name in AGAINST:
            ways += m.against_old(run.builds, name, "row", run.folder, dict.fromkeys(BOTH, BAR_AGAINST_OLD))
        yield m.AGAINST_OLD, ways
    yield "Many shards", _many_shards(build, data, run.quick)
    yield "A cold disk", _cold_disk(build, data)


def _way(build: m.Build, data: Path, name: str, row: Row, patience_s: float) -> m.Way:
    run = m.way_of(build, "row", data, name, patience_s=patience_s)
    return m.Way(name, run, row.baseline, dict.fromkeys(BOTH, row.bar) if row.bar else {})


def _many_shards(build: m.Build, data: Path, quick: bool) -> list[m.Way]:
    shards = 20 if quick else 4400
    steps = 400 if quick else 40_000
    one = m.way_of(build, "many_shards", data, 1, steps)
    many = m.way_of(build, "many_shards", data, shards, steps)
    limit = m.Way("the limit of memory", lambda: {"own MiB": 14.0})
    return [
        m.Way("1 shard", one),
        limit,
        m.Way(f"{shards:,} shards", many, "1 shard", {m.LATER: 1 / 1.6}),
        m.Way(f"{shards:,} shards, memory", lambda: {"own MiB": many()["own MiB"]}, limit.name, {"own MiB": 1.0}),
    ]


def _cold_disk(build: m.Build, data: Path) -> list[m.Way]:
    orders = ("sequential", "block", "global")
    return [
        m.Way("O_DIRECT", m.way_of(build, "cold", data, "O_DIRECT")),
        *(m.Way(order, m.way_of(build, "cold", data, order), "O_DIRECT", {"cold, µs": 0.9}) for order in orders),
    ]


def measure(run: m.Run) -> Iterator[dict[str, Any]]:
    """Yield the tables of these titles."""
    for number, build in enumerate(run.builds):
        build.call("prepare", run.folder / str(number), run.batches)
    if "Many shards" in run.titles:
        for shards in (1, 20) if run.quick else (1, 4400):
            run.builds[0].call("make_many", run.folder / "0", shards, 64 if run.quick else SHARD_BATCHES)
    for title, ways in tables(run):
        if title in run.titles:
            yield m.compare(title, ways, run.rounds)
