"""Conversions against `cp` and a flush to disk, and with --old against the conversions of another build.

Each conversion is a fork of a process that has imported the package, its data in the page cache; its work ends when the
result is on the disk. Figures are seconds, and the peak of resident memory.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure as m
from zb_hdf5.commands.zb import zb

SHAPE = f"--batch-size {m.BATCH_SIZE} --seq-len {m.SEQ_LEN}"
#: Name -> the arguments of `zb convert`; the source and the target are in the folder of the data.
CONVERSIONS = {
    "npy-to-hdf5": f"npy-to-hdf5 tokens.npy OUT {SHAPE}",
    "npy-to-hdf5, order of the source": f"npy-to-hdf5 tokens.npy OUT {SHAPE} --no-shuffle",
    "npy-to-hdf5, two-pass": f"npy-to-hdf5 tokens.npy OUT {SHAPE} --shuffle-method two-pass",
    "npy-to-hdf5, 256 MiB of memory": f"npy-to-hdf5 tokens.npy OUT {SHAPE} --memory 256MiB",
    "npy-to-batch": f"npy-to-batch tokens.npy OUT {SHAPE}",
    "hdf5-to-batch": "hdf5-to-batch store OUT",
    "hdf5-to-hdf5, relaid": "hdf5-to-hdf5 store OUT --batch-size 16 --seq-len 256",
    "hdf5-to-npy": "hdf5-to-npy store OUT",
    "parquet-to-hdf5": f"parquet-to-hdf5 text OUT --tokenizer byte {SHAPE} --packing best-fit",
    "parquet to a stream": "parquet-to-hdf5 text OUT --tokenizer byte --layout stream",
    "stream-to-hdf5": f"stream-to-hdf5 stream OUT {SHAPE} --packing best-fit",
}
TOKENS = tuple(name for name in CONVERSIONS if "parquet" not in name and "stream" not in name)
TEXT = tuple(name for name in CONVERSIONS if name not in TOKENS)
BAR = 0.95
TITLES = ("Conversions of tokens", "Conversions of text and streams")
NOTES = {
    TITLES[0]: (
        "Seconds until the result is on the disk, against `cp` and a flush of the source. `sha256 alone` reads the "
        "source and computes the digest that each conversion notes."
    ),
    TITLES[1]: "Seconds until the result is on the disk. The text is words of random letters, four Parquet files.",
}
#: MiB of the tokens of a source, and of its text for each of them.
MIB = 200
TEXT_SHARE = 1 / 64


def prepare(folder: str, mib: int, text_mib: int) -> m.Figures:
    """Write the sources with the build of this process."""
    import pyarrow
    import pyarrow.parquet

    to = Path(folder)
    to.mkdir(exist_ok=True)
    m.write_tokens(to / "tokens.npy", mib * m.MIB // (4 * m.SEQ_LEN))
    _zb(to, CONVERSIONS["npy-to-hdf5"].replace("OUT", "store"))
    rng = np.random.default_rng(m.SEED)
    words = ["".join(map(chr, rng.integers(97, 123, length))) for length in rng.integers(2, 10, 5000)]
    (to / "text").mkdir()
    for number in range(4):
        picks = (len(words) * rng.random((text_mib * 50, 800)) ** 3).astype(int)
        texts = [" ".join(words[k] for k in row[: 80 + number * 200]) for row in picks.tolist()]
        pyarrow.parquet.write_table(
            pyarrow.table({"text": texts}), to / "text" / f"{number}.parquet", row_group_size=500
        )
    _zb(to, CONVERSIONS["parquet to a stream"].replace("OUT", "stream"))
    return {}


def _zb(folder: Path, line: str) -> None:
    os.chdir(folder)
    zb.main(["convert", *line.split(), "--quiet"], standalone_mode=False)


def conversion(folder: str, name: str) -> m.Figures:
    """Convert, and flush the result to the disk."""
    to = Path(folder) / "out"
    start_s = time.perf_counter()
    _zb(Path(folder), CONVERSIONS[name].replace("OUT", "out"))
    _flush(to)
    seconds = time.perf_counter() - start_s
    shutil.rmtree(to) if to.is_dir() else to.unlink()
    usage = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"s": seconds, "peak MiB": max(usage)}


def _flush(path: Path) -> None:
    for file in m.files_in(path):
        with open(file, "rb", buffering=0) as written:
            os.fsync(written.fileno())


def copy(folder: str) -> m.Figures:
    """Copy the tokens by `cp`, and flush them."""
    source = Path(folder) / "tokens.npy"
    target = Path(folder) / "copy"
    start_s = time.perf_counter()
    subprocess.run(["cp", source, target], check=True)
    _flush(target)
    seconds = time.perf_counter() - start_s
    target.unlink()
    return {"s": seconds}


def sha256(folder: str) -> m.Figures:
    """Compute the digest of the tokens alone."""
    start_s = time.perf_counter()
    digest = hashlib.sha256()
    buffer = bytearray(m.READ_BYTES)
    with open(Path(folder) / "tokens.npy", "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return {"s": time.perf_counter() - start_s}


def _ways(builds: list[m.Build], folder: Path, names: tuple[str, ...], baseline: str) -> list[m.Way]:
    """Return a way for each conversion; with an older build two, whose bar is the rate of the old one."""
    if len(builds) == 1:
        return [m.Way(name, m.way_of(builds[0], "conversion", folder / "0", name), baseline) for name in names]
    ways: list[m.Way] = []
    for name in names:
        ways += m.against_old(builds, name, "conversion", folder, {"s": BAR})
    return ways


def measure(run: m.Run) -> Iterator[dict[str, Any]]:
    """Yield the tables of these titles."""
    folder = run.folder
    builds = run.builds
    mib = run.mib
    text_mib = max(1, round(mib * TEXT_SHARE))
    for number, build in enumerate(builds):
        build.call("prepare", folder / str(number), mib, text_mib)
    floors = [
        m.Way("cp and flush", m.way_of(builds[0], "copy", folder / "0")),
        m.Way("sha256 alone", m.way_of(builds[0], "sha256", folder / "0"), "cp and flush"),
    ]
    found = {
        TITLES[0]: (mib, [*floors, *_ways(builds, folder, TOKENS, "cp and flush")]),
        TITLES[1]: (text_mib, _ways(builds, folder, TEXT, "parquet-to-hdf5")),
    }
    for title in run.titles:
        size, ways = found[title]
        yield m.compare(title, ways, run.rounds, 2 * run.patience_s) | {"mib": size}
