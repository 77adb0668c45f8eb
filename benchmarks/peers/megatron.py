"""Megatron-core: its indexed data set, one sequence for each row, and its `GPTDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from torch.utils.data import DataLoader, Dataset

from benchmarks import measure as m
from benchmarks.peers import order, source

LIBRARY = "Megatron-core"
PACKAGES = ("megatron-core", "torch", "numpy")


def prepare(folder: Path) -> None:
    tokens = source(folder).view(np.int32)
    builder = IndexedDatasetBuilder(str(folder / "megatron.bin"), dtype=np.int32)
    for row in tokens:
        builder.add_document(torch.from_numpy(row.copy()), [m.SEQ_LEN])
    builder.finalize(str(folder / "megatron.idx"))


class Rows(Dataset[torch.Tensor]):
    """The sequences of an indexed data set."""

    def __init__(self, folder: Path) -> None:
        self._sequences = IndexedDataset(str(folder / "megatron"))

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self._sequences[int(number)].astype(np.int64))


def rows(folder: Path) -> m.Epochs:
    loader: DataLoader[Any] = DataLoader(Rows(folder), batch_size=m.BATCH_SIZE, shuffle=True)
    return lambda epoch: loader


def slices(folder: Path) -> m.Epochs:
    sequences = IndexedDataset(str(folder / "megatron"))

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        for step in order(len(sequences) // m.BATCH_SIZE, epoch):
            found = sequences[step * m.BATCH_SIZE : (step + 1) * m.BATCH_SIZE]
            yield torch.from_numpy(np.stack(found).astype(np.int64))

    return epoch_of


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {"Megatron IndexedDataset, a slice for each batch": slices}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {"Megatron IndexedDataset, a row each": rows}
