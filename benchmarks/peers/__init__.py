"""Other libraries, and this one, on the same tokens: each has a file, which its own interpreter may run.

A file has `LIBRARY`, the name that people know; `PACKAGES`, whose versions are noted; `prepare`, which writes the
tokens of `tokens.npy` in its own format; and `BATCHES` and `ROWS`: ways to read whole batches, and rows that are
shuffled anew in each epoch, in batches of 32 x 512 to int64. The first of each is the default of the library, and the
last its fastest setting that was found. Some have `BEYOND` as well: ways to read data that are larger than memory.

This module imports nothing but numpy: the interpreters have no zb_hdf5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure as m

OURS = "ours"
MEMMAP = "memmap"
#: The files of the other libraries.
OTHERS = ("pytorch", "plain_h5py", "hf", "mds", "litdata", "grain", "datatrove", "megatron", "olmo")
WHOLE = "Other loaders: whole batches"
ANEW = "Other loaders: rows shuffled anew in each epoch"
TITLES = (WHOLE, ANEW)
NOTES = {
    WHOLE: (
        "One process, no workers. A batch of 32 x 512 is stored as one item, in one file. Rows of this package are "
        "compared with a loop over `np.memmap` in the same kind of order, all others with `Loader`, which compares "
        "each batch with its crc32, while the others compare nothing."
    ),
    ANEW: (
        "One process, no workers. Each epoch has new batches of 32 rows. For each library first its default, then "
        "the fastest setting that was found."
    ),
}
KINDS = {WHOLE: "BATCHES", ANEW: "ROWS"}
#: MiB of the tokens of a source.
MIB = 200
#: Way -> the row that it is compared with, and the least share of its rate.
BARS: Mapping[str, tuple[str, float | None]] = {
    "Loader": ("np.memmap loop", 0.8),
    'Loader, verify="none"': ("np.memmap loop", 0.95),
    "Loader, .batch": ("np.memmap loop", None),
    'Loader, .batch, verify="none"': ("np.memmap loop", None),
    "dataset() in a DataLoader": ("np.memmap in a DataLoader", None),
    'dataset() in a DataLoader, verify="none"': ("np.memmap in a DataLoader", 0.85),
    'Loader, shuffle="records"': ("np.memmap, gather of rows", 0.9),
    "np.memmap loop, crc32": ("np.memmap loop", None),
    "np.memmap loop": ("", None),
    "np.memmap, gather of rows": ("", None),
}
BASELINES = {WHOLE: "Loader", ANEW: 'Loader, shuffle="records"'}


# --- in the interpreter of a library -----------------------------------------------------------------------------


def file_of(name: str) -> Any:
    """Return the module of a library."""
    return import_module(f"benchmarks.peers.{name}")


def describe(name: str) -> dict[str, Any]:
    """Return the facts of a file: the name of the library, its versions and its ways."""
    module = file_of(name)
    return {
        "library": module.LIBRARY,
        "versions": {package: version(package) for package in module.PACKAGES},
        **{title: list(getattr(module, kind)) for title, kind in KINDS.items()},
    }


def prepare(name: str, folder: str) -> dict[str, Any]:
    """Write the data of a library, and bring them into the page cache."""
    file_of(name).prepare(Path(folder))
    m.warm(Path(folder))
    return {}


def row(name: str, folder: str, title: str, way: str) -> m.Figures:
    return m.passes(partial(getattr(file_of(name), KINDS[title])[way], Path(folder)))


def source(folder: Path) -> Any:
    """Return the tokens of the source, shape (records, SEQ_LEN) uint32."""
    return np.load(folder / "tokens.npy", mmap_mode="r").view(np.ndarray)


def order(count: int, epoch: int) -> list[int]:
    """Return some numbers in random order."""
    return np.random.default_rng(epoch).permutation(count).tolist()


# --- in the process that asks ------------------------------------------------------------------------------------


def measure(run: m.Run) -> Iterator[dict[str, Any]]:
    """Yield the tables of these titles, with the facts of each library. One that is missing has a reason instead."""
    m.write_tokens(run.folder / "tokens.npy", run.batches * m.BATCH_SIZE)
    facts: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    builds: dict[str, m.Build] = {}
    names = (OURS, MEMMAP) if run.is_ours else (OURS, MEMMAP, *OTHERS)
    try:
        for name in names:
            builds[name] = build_of(name, run, __name__)
            try:
                facts[name] = builds[name].call("describe", name)
                builds[name].call("prepare", name, run.folder)
            except m.CallError as error:
                reasons[name] = reason_of(error)
        usable = [name for name in names if name not in reasons]
        for title in run.titles:
            ways = [way for name in usable for way in _ways(run, title, name, builds[name], facts[name])]
            table = m.compare(title, ways, run.rounds)
            yield table | {"libraries": facts, "skipped": reasons | table["skipped"]}
    finally:
        for build in builds.values():
            build.close()


def build_of(name: str, run: m.Run, module: str) -> m.Build:
    """Return a process of the interpreter of a library, which calls the functions of a module."""
    python = run.pythons.get(name)
    modules = [f"benchmarks.peers.{name}"]
    if python is None:
        return m.Build(module, imported=modules)
    return m.Build(module, None, python, modules)


def _ways(run: m.Run, title: str, name: str, build: m.Build, facts: Mapping[str, Any]) -> Iterator[m.Way]:
    for way in facts[title]:
        baseline, bar = BARS.get(way, (BASELINES[title], None))
        call = partial(_call, build, (name, run.folder, title, way), run.patience_s)
        yield m.Way(way, call, baseline, {m.LATER: bar} if bar else {})


def _call(build: m.Build, arguments: tuple[Any, ...], patience_s: float) -> m.Figures:
    try:
        figures: m.Figures = build.call("row", *arguments, patience_s=patience_s)
    except m.KilledError:
        raise
    except m.CallError as error:
        raise m.UnavailableRow(reason_of(error)) from error
    return figures


def reason_of(error: Exception) -> str:
    """Return the last line of a traceback."""
    return str(error).strip().splitlines()[-1]
