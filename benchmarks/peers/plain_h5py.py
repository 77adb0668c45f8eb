"""h5py: one dataset of chunks of whole batches, and one of rows, as a data set in a `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import measure as m
from benchmarks.peers import order, source

LIBRARY = "h5py"
PACKAGES = ("h5py", "torch", "numpy")


def prepare(folder: Path) -> None:
    tokens = source(folder)
    with h5py.File(folder / "plain.h5", "w") as file:
        file["rows"] = tokens
        shape = (m.BATCH_SIZE, m.SEQ_LEN)
        file.create_dataset("batches", data=tokens.reshape(-1, *shape), chunks=(1, *shape))


class Items(Dataset[torch.Tensor]):
    """The items of a dataset, read by h5py."""

    def __init__(self, path: Path, name: str) -> None:
        self._items = h5py.File(path)[name]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self._items[number].astype(np.int64))


def in_data_loader(folder: Path, name: str, batch_size: int | None) -> m.Epochs:
    loader = DataLoader(Items(folder / "plain.h5", name), batch_size=batch_size, shuffle=True)
    return lambda epoch: loader


def loop(folder: Path) -> m.Epochs:
    batches = h5py.File(folder / "plain.h5")["batches"]

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        for step in order(len(batches), epoch):
            yield torch.from_numpy(batches[step].astype(np.int64))

    return epoch_of


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {
    "h5py in a DataLoader": lambda f: in_data_loader(f, "batches", None),
    "h5py loop": loop,
}
BEYOND: dict[str, Callable[[Path], m.Epochs]] = {"h5py loop": loop}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {
    "h5py in a DataLoader, a row each": lambda f: in_data_loader(f, "rows", m.BATCH_SIZE)
}
