"""PyTorch: a saved tensor in a `TensorDataset`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks import measure as m
from benchmarks.peers import source

LIBRARY = "PyTorch tensor"
PACKAGES = ("torch",)


def prepare(folder: Path) -> None:
    torch.save(torch.from_numpy(source(folder).astype(np.int64)), folder / "tokens.pt")


def _unpacked(loader: DataLoader[tuple[torch.Tensor, ...]]) -> m.Epochs:
    return lambda epoch: (batch for (batch,) in loader)


def rows(folder: Path) -> m.Epochs:
    """Return the epochs of the default: rows one by one, and the collate function of the `DataLoader`."""
    tokens = torch.load(folder / "tokens.pt")
    return _unpacked(DataLoader(TensorDataset(tokens), batch_size=m.BATCH_SIZE, shuffle=True))


def sampled(folder: Path) -> m.Epochs:
    """Return the epochs of a sampler of batches: one index of 32 rows."""
    dataset = TensorDataset(torch.load(folder / "tokens.pt"))
    sampler = BatchSampler(RandomSampler(dataset), m.BATCH_SIZE, drop_last=False)
    return _unpacked(DataLoader(dataset, sampler=sampler, batch_size=None))


def batches(folder: Path) -> m.Epochs:
    tokens = torch.load(folder / "tokens.pt").view(-1, m.BATCH_SIZE, m.SEQ_LEN)
    return _unpacked(DataLoader(TensorDataset(tokens), batch_size=None, shuffle=True))


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {"torch.load, int64 batches in memory, in a DataLoader": batches}
BEYOND: dict[str, Callable[[Path], m.Epochs]] = {"torch.load, int64 batches in memory, in a DataLoader": batches}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {
    "torch.load, TensorDataset in a DataLoader": rows,
    "torch.load, TensorDataset and a BatchSampler": sampled,
}
