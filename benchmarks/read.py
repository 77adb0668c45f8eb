"""Reading without a loader: bare reads of a store's bytes, every backend and access, codecs, windows of a stream.

Batches of 32 x 512 tokens to int64, in global order, page cache warm. Bare reads have the offsets of all batches; some
compare each batch with its crc32.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from isal.isal_zlib import crc32

from benchmarks import measure as m
from zb_hdf5 import HDF5ShardWriter, MmapTokenStore, convert, open_reader

#: The codecs whose package is installed.
CODECS = ("none", "zstd:1", "zstd:3", "gzip:1") if find_spec("zstandard") else ("none", "gzip:1")
WINDOW = 2048
WINDOWS = f"Windows of {WINDOW} tokens of a stream"
TITLES = ("Backends and accesses", "Codecs", WINDOWS)
NOTES = {
    TITLES[0]: (
        "`open_reader` over one store, as HDF5 and as native `.batch` files. The limits: tokens in memory, widened "
        "to int64, and bare reads of the same bytes without a check."
    ),
    TITLES[1]: "uint16 tokens, compressed batch by batch. `bytes a token` is the size on disk.",
    TITLES[2]: "Any 2,048 tokens of one HDF5 file, by h5py and by the mapped extents.",
}
#: MiB of the tokens of a source.
MIB = 200


class Store:
    """The bytes of a store of HDF5 shards: for each batch its file and offset, and its crc32, by h5py."""

    def __init__(self, folder: Path) -> None:
        self.files = [path.open("rb") for path in sorted(folder.glob("shard-*.h5"))]
        self.offsets: list[list[int]] = []
        self.rows: list[list[int]] = []
        self.views: list[np.ndarray[Any, Any]] = []
        for file in self.files:
            found: list[int] = []
            with h5py.File(file.name) as h5:
                self.dtype = h5["batches"].dtype
                h5["batches"].id.chunk_iter(lambda chunk, found=found: found.append(chunk.byte_offset))
                self.rows.append(h5["crc32"][:].tolist())
            self.offsets.append(found)
            mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            stride = found[1] - found[0]
            assert found == list(range(found[0], found[0] + stride * len(found), stride))
            shape = (len(found), m.BATCH_SIZE, m.SEQ_LEN)
            item = self.dtype.itemsize
            strides = (stride, m.SEQ_LEN * item, item)
            self.views.append(np.ndarray(shape, self.dtype, mapping, found[0], strides))
        self.places = [(shard, k) for shard, found in enumerate(self.offsets) for k in range(len(found))]

    def order(self, epoch: int) -> list[tuple[int, int]]:
        """Return (shard, batch) in random order."""
        return [self.places[number] for number in np.random.default_rng(epoch).permutation(len(self.places)).tolist()]


def bare(folder: Path, how: str, check: bool = False) -> m.Epochs:
    """Return bare reads of a store: read, compare with the crc32 rows if asked to, and widen.

    Parameters
    ----------
    folder
        The store.
    how
        "map", "preadv", or "int32": views of a private copy, which are not widened.
    check
        Whether each batch is compared with its crc32.
    """
    store = Store(folder)
    if how == "int32":
        views = [np.array(view).view(np.int32) for view in store.views]
        return lambda epoch: (torch.from_numpy(views[shard][k]) for shard, k in store.order(epoch))
    if how == "map":

        def mapped(epoch: int) -> Iterator[torch.Tensor]:
            for shard, k in store.order(epoch):
                batch = store.views[shard][k]
                if check and crc32(batch) != store.rows[shard][k]:
                    raise AssertionError((shard, k))
                yield torch.from_numpy(batch.astype(np.int64))

        return mapped
    buffer = np.empty((m.BATCH_SIZE, m.SEQ_LEN), store.dtype)
    fds = [file.fileno() for file in store.files]

    def positioned(epoch: int) -> Iterator[torch.Tensor]:
        for shard, k in store.order(epoch):
            os.preadv(fds[shard], (buffer,), store.offsets[shard][k])
            if check and crc32(buffer) != store.rows[shard][k]:
                raise AssertionError((shard, k))
            yield torch.from_numpy(buffer.astype(np.int64))

    return positioned


def from_memory(folder: Path) -> m.Epochs:
    """Widen batches that are in memory: the limit of the machine."""
    store = Store(folder)
    views = [view.copy() for view in store.views]
    return lambda epoch: (torch.from_numpy(views[shard][k].astype(np.int64)) for shard, k in store.order(epoch))


def by_reader(folder: Path, **options: Any) -> m.Epochs:
    reader = open_reader(folder, **options)

    def batches(epoch: int) -> Iterator[torch.Tensor]:
        return map(reader.read_batch_torch, np.random.default_rng(epoch).permutation(reader.num_batches).tolist())

    return batches


def make_store(source: Path, target: Path, target_format: str = "hdf5", **options: Any) -> None:
    options = {"batch_size": m.BATCH_SIZE, "seq_len": m.SEQ_LEN, "shuffle": False, "dtype": "uint32"} | options
    convert(source, target_format, target, **options)
    m.evict(target)
    m.warm(target)


# --- ways ---------------------------------------------------------------------------------------------------------


def _rows() -> dict[str, Callable[[Path], m.Epochs]]:
    """Return name -> a function from the folder of the data to the batches of the row."""
    rows: dict[str, Callable[[Path], m.Epochs]] = {
        "memory": lambda folder: from_memory(folder / "hdf5"),
        "bare map": lambda folder: bare(folder / "hdf5", "map"),
        "bare preadv": lambda folder: bare(folder / "hdf5", "preadv"),
    }
    for access in ("auto", "mmap", "pread", "h5py"):
        rows[f'hdf5, "{access}"'] = partial(_in_folder, "hdf5", access=access)
        rows[f'hdf5, "{access}", unchecked'] = partial(_in_folder, "hdf5", access=access, verify="none")
    for access in ("auto", "mmap", "pread"):
        rows[f'batch, "{access}"'] = partial(_in_folder, "batch", access=access)
    return rows


def _in_folder(store: str, folder: Path, **options: Any) -> m.Epochs:
    return by_reader(folder / store, **options)


ROWS = _rows()


def row(folder: str, name: str) -> m.Figures:
    return m.passes(partial(ROWS[name], Path(folder)))


def codec_row(folder: str, codec: str) -> m.Figures:
    path = Path(folder) / codec
    size = sum(file.stat().st_size for file in m.files_in(path) if file.suffix == ".h5")
    return m.passes(partial(by_reader, path)) | {"bytes a token": size / open_reader(path).corpus.num_tokens}


def window_row(folder: str, by: str) -> m.Figures:
    path = next((Path(folder) / "stream").glob("*.h5"))
    tokens: Any = h5py.File(path)["tokens"]
    starts = np.random.default_rng(m.SEED).integers(0, len(tokens) - WINDOW, 2000).tolist()
    store = MmapTokenStore(path)
    ways = {
        "h5py": lambda at: tokens[at : at + WINDOW],
        "extents": lambda at: np.array(store.get_slice(at, at + WINDOW)),
    }
    m.us_of(map(ways[by], starts))
    return {"a window, µs": m.us_of(map(ways[by], starts))}


def prepare(folder: Path, num_batches: int) -> None:
    source = folder / "tokens.npy"
    m.write_tokens(source, num_batches * m.BATCH_SIZE)
    make_store(source, folder / "hdf5", shards=4)
    make_store(source, folder / "batch", "batch", shards=4)
    for codec in CODECS:
        make_store(source, folder / codec, codec=None if codec == "none" else codec, dtype="uint16")
    (folder / "stream").mkdir()
    with HDF5ShardWriter(folder / "stream" / "stream.h5", dtype="uint16") as writer:
        for start in range(0, num_batches * m.BATCH_SIZE, 64):
            writer.write_document(np.load(source, mmap_mode="r")[start : start + 64].reshape(-1))


def measure(run: m.Run) -> Iterator[dict[str, Any]]:
    """Yield the tables of these titles; another build has no rows here."""
    prepare(run.folder, run.batches)
    rows: dict[str, tuple[str, Iterable[str], Callable[[str], str]]] = {
        TITLES[0]: ("row", ROWS, _baseline_of),
        TITLES[1]: ("codec_row", CODECS, lambda name: "none"),
        TITLES[2]: ("window_row", ("h5py", "extents"), lambda name: "h5py"),
    }
    if "Codecs" in run.titles and "zstd:1" not in CODECS:
        print("Codecs: the rows of zstd are left out; they need pip install 'zb_hdf5[codecs]'", file=sys.stderr)
    for title in run.titles:
        function, names, baseline_of = rows[title]
        ways = [m.Way(name, m.way_of(run.builds[0], function, run.folder, name), baseline_of(name)) for name in names]
        yield m.compare(title, ways, run.rounds)


def _baseline_of(name: str) -> str:
    """Return the row to compare one with: that of HDF5 with the same access for `.batch`."""
    return name.replace("batch", "hdf5") if name.startswith("batch") else "memory"
