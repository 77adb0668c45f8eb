"""numpy: loops over a memory map, and data sets over it in a `DataLoader`.

One of the loops computes a crc32 of each batch, as whoever checks batches would: a limit for a loader that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isal import isal_zlib
from torch.utils.data import DataLoader, Dataset

from benchmarks import measure as m
from benchmarks.peers import order, source

LIBRARY = "np.memmap"
PACKAGES = ("numpy", "torch", "isal")


def prepare(folder: Path) -> None:
    """Do nothing: the source is read as it lies."""


class MemmapBatches(Dataset[torch.Tensor]):
    """Whole batches of a memory map: the shortest data set that there is."""

    def __init__(self, folder: Path) -> None:
        self._batches = source(folder).reshape(-1, m.BATCH_SIZE, m.SEQ_LEN)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, step: int) -> torch.Tensor:
        return torch.from_numpy(self._batches[step].astype(np.int64))


class MemmapRows(Dataset[torch.Tensor]):
    """Rows of a memory map, as data sets are written."""

    def __init__(self, folder: Path) -> None:
        self._rows = source(folder)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self._rows[row].astype(np.int64))


def repeated(loader: DataLoader[Any]) -> m.Epochs:
    """Return the epochs of a `DataLoader`, which shuffles by itself."""
    return lambda epoch: loader


def loop(folder: Path) -> m.Epochs:
    batches = source(folder).reshape(-1, m.BATCH_SIZE, m.SEQ_LEN)

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        for step in order(len(batches), epoch):
            yield torch.from_numpy(batches[step].astype(np.int64))

    return epoch_of


def loop_with_crc32(folder: Path) -> m.Epochs:
    batches = source(folder).reshape(-1, m.BATCH_SIZE, m.SEQ_LEN)

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        for step in order(len(batches), epoch):
            isal_zlib.crc32(batches[step])
            yield torch.from_numpy(batches[step].astype(np.int64))

    return epoch_of


def in_sequence(folder: Path) -> m.Epochs:
    batches = source(folder).reshape(-1, m.BATCH_SIZE, m.SEQ_LEN)
    return lambda epoch: (torch.from_numpy(batch.astype(np.int64)) for batch in batches)


def gather(folder: Path) -> m.Epochs:
    tokens = source(folder)

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        for rows in np.random.default_rng(epoch).permutation(len(tokens)).reshape(-1, m.BATCH_SIZE):
            yield torch.from_numpy(tokens[rows].astype(np.int64))

    return epoch_of


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {
    "np.memmap in a DataLoader": lambda f: repeated(DataLoader(MemmapBatches(f), batch_size=None, shuffle=True)),
    "np.memmap loop, crc32": loop_with_crc32,
    "np.memmap loop": loop,
}
BEYOND: dict[str, Callable[[Path], m.Epochs]] = {
    "np.memmap loop": loop,
    "np.memmap loop, sequential": in_sequence,
}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {
    "np.memmap in a DataLoader, a row each": lambda f: repeated(
        DataLoader(MemmapRows(f), batch_size=m.BATCH_SIZE, shuffle=True)
    ),
    "np.memmap, gather of rows": gather,
}
