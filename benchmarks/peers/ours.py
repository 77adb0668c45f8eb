"""zb_hdf5: its loaders over HDF5 and over native `.batch` files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks import measure as m
from zb_hdf5 import Loader, convert

LIBRARY = "zb_hdf5"
PACKAGES = ("zb_hdf5", "h5py", "torch", "numpy")
#: Windows of a step, and the tokens of each: a step has as many tokens as one of records.
WINDOWS = 8
WINDOW_LEN = m.BATCH_TOKENS // WINDOWS
ONE_RANK: Mapping[str, Any] = {"rank": 0, "world_size": 1}


def prepare(folder: Path) -> None:
    shape = {"batch_size": m.BATCH_SIZE, "seq_len": m.SEQ_LEN, "shuffle": False, "dtype": "uint32"}
    for target_format in ("hdf5", "batch"):
        convert(folder / "tokens.npy", target_format, folder / f"ours-{target_format}", **shape)


def stream(folder: Path) -> Path:
    """Return the tokens as a stream, written where it is missing."""
    path = folder / "stream.npy"
    if not path.exists():
        tokens = np.load(folder / "tokens.npy", mmap_mode="r").reshape(-1)
        np.save(path.with_suffix(".part.npy"), tokens)
        path.with_suffix(".part.npy").rename(path)
    return path


def load(path: Path, make: Callable[..., Any] = Loader, **options: Any) -> m.Epochs:
    """Return the epochs of a loader over all tokens."""
    loader = make(path, **ONE_RANK, **options)

    def epoch_of(epoch: int) -> Iterable[Any]:
        loader.set_epoch(epoch)
        return loader

    return epoch_of


def in_data_loader(path: Path, **options: Any) -> m.Epochs:
    """Return the epochs of a `DataLoader` over the data set of a loader."""
    loader = DataLoader(Loader(path, **ONE_RANK, **options).dataset(), batch_size=None, shuffle=True)
    return lambda epoch: loader


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {
    "Loader": lambda f: load(f / "ours-hdf5"),
    'Loader, verify="none"': lambda f: load(f / "ours-hdf5", verify="none"),
    "Loader, .batch": lambda f: load(f / "ours-batch"),
    'Loader, .batch, verify="none"': lambda f: load(f / "ours-batch", verify="none"),
    "Loader, int32": lambda f: load(f / "ours-hdf5", dtype=torch.int32),
    "dataset() in a DataLoader": lambda f: in_data_loader(f / "ours-hdf5"),
    'dataset() in a DataLoader, verify="none"': lambda f: in_data_loader(f / "ours-hdf5", verify="none"),
}
BEYOND: dict[str, Callable[[Path], m.Epochs]] = {
    "Loader": lambda f: load(f / "ours-hdf5"),
    'Loader, access="mmap"': lambda f: load(f / "ours-hdf5", access="mmap"),
    'Loader, access="h5py"': lambda f: load(f / "ours-hdf5", access="h5py"),
    "Loader, .batch": lambda f: load(f / "ours-batch"),
    'Loader, .batch, access="mmap"': lambda f: load(f / "ours-batch", access="mmap"),
    "Loader, rows": lambda f: load(f / "ours-hdf5", shuffle="records"),
    "Loader, .batch, rows": lambda f: load(f / "ours-batch", shuffle="records"),
    "Loader, windows": lambda f: load(stream(f), shuffle="records", batch_size=WINDOWS, seq_len=WINDOW_LEN),
    "Loader, sequential": lambda f: load(f / "ours-hdf5", shuffle="sequential"),
    'Loader, access="mmap", sequential': lambda f: load(f / "ours-hdf5", access="mmap", shuffle="sequential"),
    'Loader, access="h5py", sequential': lambda f: load(f / "ours-hdf5", access="h5py", shuffle="sequential"),
    "Loader, .batch, sequential": lambda f: load(f / "ours-batch", shuffle="sequential"),
}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {
    'Loader, shuffle="records"': lambda f: load(f / "ours-hdf5", shuffle="records"),
    'Loader, .batch, shuffle="records"': lambda f: load(f / "ours-batch", shuffle="records"),
}
