"""Field sets against bare reads and writes of the same values: in memory, larger than memory, and their writing.

A token has 64 ids and 64 log-probabilities, 384 bytes; a step has 32 records of 512 tokens, 6 MiB of values. The set is
one part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32

from benchmarks import measure as m
from benchmarks import memory_cap
from benchmarks.beyond import PASS_S, QUICK_PASS_S, SHARE, capped, enter, of_a_while
from benchmarks.peers.ours import load
from benchmarks.read import make_store
from zb_hdf5 import open_field_set

NAME: Final = "teacher"
FIELDS: Final[dict[str, Any]] = {"ids": ("i4", (64,)), "logprobs": ("f2", (64,))}
RECORD_BYTES: Final = m.SEQ_LEN * (4 + 2) * 64
STEP_BYTES: Final = m.BATCH_SIZE * RECORD_BYTES
#: MiB of values, and the least of them; where memory is capped, the process needs some for itself.
MIB = 2048
LEAST_MIB = 64
LEAST_CAPPED_MIB = 512
#: Records that are written, and flushed to the disk, by one call: few bytes, or those of 8 records of 4,096 tokens.
FEW, MANY = 8, 8 * 4096 // m.SEQ_LEN
TITLES = ("Field sets in memory", "Writing a field set", "Field sets larger than memory")
NOTES = {
    TITLES[0]: (
        "Steps of 32 records with 64 ids and 64 log-probabilities for each of 512 tokens, 6 MiB, whole batches or "
        "records in a shuffled order, against copies of the same values from a memory map. The loops with a crc32 of "
        "each record are the limit of a checked loader."
    ),
    TITLES[1]: (
        "Seconds for one part, flushed to the disk after some records, against `cp` and one flush. 64 records have as "
        "many bytes as 8 records of 4,096 tokens. `pwrite and fdatasync` is the limit: the same writes into a file "
        "whose space is reserved."
    ),
    TITLES[2]: (
        "Each process may use memory for a quarter of the values, page cache included, none of which are there before. "
        "A pass that is not at its end after 5 seconds is left there."
    ),
}
MEMMAP, TAKE = "np.memmap loop", "np.take"
COPY, PWRITE, SET = "cp and flush", "pwrite and fdatasync", "Field set"
READERS: Final = 32
THREADS = f"preadv in {READERS} threads"


# --- ways ---------------------------------------------------------------------------------------------------------


class Values:
    """The values of each field in the one part of the set, mapped, and the crc32 of each record."""

    def __init__(self, folder: Path) -> None:
        [self.path] = (folder / "store" / "fields").rglob("*.values")
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r").view(np.ndarray)
        self.offsets: dict[str, int] = {}
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.crc32: dict[str, list[int]] = {}
        with h5py.File(self.path) as h5:
            for name in FIELDS:
                stored = h5[f"values/{name}"]
                self.offsets[name] = stored.id.get_offset()
                mapped = np.memmap(self.path, stored.dtype, "r", self.offsets[name], stored.shape)
                self.arrays[name] = mapped.view(np.ndarray)
                self.crc32[name] = h5[f"crc32/{name}"][:].tolist()

    def batches(self, epoch: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the numbers of the records of whole batches, in a shuffled order."""
        for number in np.random.default_rng(epoch).permutation(len(self.tokens) // m.BATCH_SIZE).tolist():
            yield np.arange(number * m.BATCH_SIZE, (number + 1) * m.BATCH_SIZE)

    def rows(self, epoch: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the numbers of shuffled records, as many as a batch has."""
        records = np.random.default_rng(epoch).permutation(len(self.tokens))
        yield from records[: len(records) // m.BATCH_SIZE * m.BATCH_SIZE].reshape(-1, m.BATCH_SIZE)

    def step(self, records: npt.NDArray[np.int64], **values: npt.NDArray[Any]) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.tokens[records].astype(np.int64))
        return {"tokens": tokens} | {name: torch.from_numpy(each) for name, each in values.items()}


def loop(folder: Path) -> m.Epochs:
    """Copy whole batches from memory maps."""
    found = Values(folder)

    def copied(records: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        first, stop = records[0], records[-1] + 1
        return found.step(records, **{name: each[first:stop].copy() for name, each in found.arrays.items()})

    return lambda epoch: map(copied, found.batches(epoch))


def take(folder: Path) -> m.Epochs:
    """Take shuffled records from memory maps."""
    found = Values(folder)

    def taken(records: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        return found.step(records, **{name: each.take(records, axis=0) for name, each in found.arrays.items()})

    return lambda epoch: map(taken, found.rows(epoch))


def compared(folder: Path, is_shuffled: bool) -> m.Epochs:
    """Copy records from memory maps, and compare each with its crc32 while it is in the cache of a core."""
    found = Values(folder)

    def copied(records: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        values = {name: np.empty((len(records), *each.shape[1:]), each.dtype) for name, each in found.arrays.items()}
        for name, out in values.items():
            source, expected = found.arrays[name], found.crc32[name]
            for row, record in enumerate(records.tolist()):
                out[row] = source[record]
                if crc32(out[row]) != expected[record]:
                    raise AssertionError((name, record))
        return found.step(records, **values)

    return lambda epoch: map(copied, found.rows(epoch) if is_shuffled else found.batches(epoch))


def read_set(folder: Path, **options: Any) -> m.Epochs:
    return load(folder / "store", fields=[f"{NAME}/{name}" for name in FIELDS], **options)


ROWS: dict[str, tuple[Callable[[Path], m.Epochs], str, float | None]] = {
    MEMMAP: (loop, "", None),
    f"{MEMMAP}, crc32": (lambda f: compared(f, is_shuffled=False), MEMMAP, None),
    "Loader": (read_set, MEMMAP, 0.75),
    'Loader, verify="none"': (lambda f: read_set(f, verify="none"), MEMMAP, 0.9),
    TAKE: (take, "", None),
    f"{TAKE}, crc32": (lambda f: compared(f, is_shuffled=True), TAKE, None),
    "Loader, rows": (lambda f: read_set(f, shuffle="records"), TAKE, 0.7),
    'Loader, rows, verify="none"': (lambda f: read_set(f, shuffle="records", verify="none"), TAKE, 0.9),
}


def row(folder: str, name: str) -> m.Figures:
    return m.passes(partial(ROWS[name][0], Path(folder)))


# --- writing ------------------------------------------------------------------------------------------------------


def noise() -> dict[str, npt.NDArray[Any]]:
    """Return values of some records, which are written again and again."""
    generator = np.random.default_rng(m.SEED)
    shape = (MANY, m.SEQ_LEN, 64)
    logprobs = -8 * generator.random(shape, np.float32)
    return {"ids": generator.integers(0, m.VOCAB_SIZE, shape, np.int32), "logprobs": logprobs.astype(np.float16)}


def write_set(store: Path, path: Path | None = None, together: int = MANY) -> float:
    """Write a set of one part for all records; return the seconds of it."""
    values = noise()
    start_s = time.perf_counter()
    with open_field_set(store, NAME, FIELDS, path=path, part_bytes=1 << 40) as found:
        for step in found.missing(together, quiet=True):
            records = step["records"]
            found.write(records, **{name: each[: len(records)] for name, each in values.items()})
        found.finish()
    return time.perf_counter() - start_s


def writing(folder: str, name: str, together: int) -> m.Figures:
    """Return the seconds that one part takes until it is on the disk."""
    to = Path(folder)
    written = to / "written"
    if name == SET:
        seconds = write_set(to / "store", written, together)
    else:
        written.mkdir()
        seconds = _by_copy(to, written) if name == COPY else _by_pwrite(to, written, together)
    shutil.rmtree(written)
    return {"s": seconds}


def _by_copy(folder: Path, target: Path) -> float:
    start_s = time.perf_counter()
    subprocess.run(["cp", Values(folder).path, target / "copy"], check=True)
    with (target / "copy").open("rb") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - start_s


def _by_pwrite(folder: Path, target: Path, together: int) -> float:
    """Write the values of some records of each field to their places, and flush them, again and again."""
    found = Values(folder)
    values = noise()
    start_s = time.perf_counter()
    with (target / "bare").open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, found.path.stat().st_size)
        for first in range(0, len(found.tokens), together):
            for name, offset in found.offsets.items():
                part = values[name][: min(together, len(found.tokens) - first)]
                os.pwrite(file.fileno(), part, offset + first * part[0].nbytes)
            os.fdatasync(file.fileno())
    return time.perf_counter() - start_s


# --- larger than memory -------------------------------------------------------------------------------------------


BEYOND: dict[str, tuple[str, float | None]] = {
    THREADS: ("", None),
    "Loader": (THREADS, 0.7),
    f"{THREADS}, rows": ("", None),
    "Loader, rows": (f"{THREADS}, rows", 0.7),
}


def beyond(entrance: str, pass_s: float, folder: str, name: str) -> m.Figures:
    """Enter a control group, and time a pass of a way, none of whose data are in the page cache."""
    is_shuffled = name.endswith(", rows")
    m.evict(Path(folder) / "store")
    enter(entrance)
    if name.startswith(THREADS):
        return {m.LATER: _in_threads(Values(Path(folder)), is_shuffled, pass_s)}
    options = {"shuffle": "records"} if is_shuffled else {}
    return {m.LATER: m.us_of(of_a_while(read_set(Path(folder), **options)(0), pass_s))}


def _in_threads(found: Values, is_shuffled: bool, pass_s: float) -> float:
    """Return the microseconds of a step: each thread reads records by position, into one buffer of each field."""
    records = np.concatenate([*(found.rows(0) if is_shuffled else found.batches(0))])
    with found.path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no more is read than is asked for

        def read(some: npt.NDArray[np.int64]) -> int:
            buffers = {name: np.empty(each.shape[1:], each.dtype) for name, each in found.arrays.items()}
            num_bytes = 0
            for record in of_a_while(some.tolist(), pass_s):
                for name, buffer in buffers.items():
                    num_bytes += os.preadv(file.fileno(), [buffer], found.offsets[name] + record * buffer.nbytes)
            return num_bytes

        start_s = time.perf_counter()
        with ThreadPoolExecutor(READERS) as pool:
            num_bytes = sum(pool.map(read, np.array_split(records, READERS)))
        return 1e6 * (time.perf_counter() - start_s) * STEP_BYTES / num_bytes


# --- the tables ---------------------------------------------------------------------------------------------------


def prepare(folder: str, num_batches: int) -> m.Figures:
    """Write the tokens, a store, and the set of one part beside it, with the build of this process."""
    to = Path(folder)
    m.write_tokens(to / "tokens.npy", num_batches * m.BATCH_SIZE)
    make_store(to / "tokens.npy", to / "store", dtype="uint16")
    write_set(to / "store")
    m.evict(to)
    m.warm(to)
    return {}


def measure(run: m.Run) -> Iterator[dict[str, Any]]:
    """Yield the tables of these titles.

    Raises
    ------
    UnavailableRow
        This machine cannot cap the memory of a process.
    """
    build = run.builds[0]
    least = LEAST_CAPPED_MIB if TITLES[2] in run.titles else LEAST_MIB
    num_batches = max(run.mib, least) * m.MIB // STEP_BYTES
    mib = num_batches * STEP_BYTES // m.MIB
    build.call("prepare", run.folder, num_batches)
    for title in run.titles:
        yield m.compare(title, [*_ways(run, build, title, num_batches * STEP_BYTES)], run.rounds) | {"mib": mib}


def _ways(run: m.Run, build: m.Build, title: str, num_bytes: int) -> Iterator[m.Way]:
    if title == TITLES[0]:
        for name, (_, baseline, bar) in ROWS.items():
            bars = dict.fromkeys((m.FIRST, m.LATER), bar) if bar else {}
            yield m.Way(name, m.way_of(build, "row", run.folder, name, patience_s=run.patience_s), baseline, bars)
    elif title == TITLES[1]:
        yield m.Way(COPY, m.way_of(build, "writing", run.folder, COPY, 0))
        for together in (FEW, MANY):
            for name in (PWRITE, SET):
                timed = m.way_of(build, "writing", run.folder, name, together)
                bars = {"s": 0.5} if (name, together) == (SET, MANY) else {}
                yield m.Way(f"{name}, {together} records", timed, COPY, bars)
    else:
        try:
            place = memory_cap.usable_place(num_bytes // SHARE)
        except memory_cap.NoCapError as error:
            raise m.UnavailableRow(str(error)) from error
        pass_s = QUICK_PASS_S if run.quick else PASS_S
        for name, (baseline, bar) in BEYOND.items():
            timed = partial(capped, place, num_bytes // SHARE, build, "beyond", pass_s, run.folder, name)
            yield m.Way(name, timed, baseline, {m.LATER: bar} if bar else {})
