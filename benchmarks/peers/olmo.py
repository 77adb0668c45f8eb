"""OLMo-core: its data set of fixed sequences in its own loader, and in a `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset
from torch.utils.data import DataLoader, Dataset

from benchmarks import measure as m
from benchmarks.peers import source

LIBRARY = "OLMo-core"
PACKAGES = ("ai2-olmo-core", "torch", "numpy")


def prepare(folder: Path) -> None:
    source(folder).tofile(folder / "olmo.npy")  # its files have no header


def opened(folder: Path) -> NumpyFSLDataset:
    return NumpyFSLDataset(
        str(folder / "olmo.npy"),
        sequence_length=m.SEQ_LEN,
        pad_token_id=0,
        eos_token_id=0,
        vocab_size=m.VOCAB_SIZE,
        dtype=np.uint32,
        include_instance_metadata=False,
    )


def own_loader(folder: Path) -> m.Epochs:
    """Return the epochs of the loader that comes with the data set. It writes its order to a file."""
    work = folder / "olmo-work"
    work.mkdir(exist_ok=True)
    samples = opened(folder)
    samples.work_dir = work
    loader = NumpyFSLDataLoader(
        samples,
        global_batch_size=m.BATCH_SIZE * m.SEQ_LEN,
        collator=DataCollator(pad_token_id=0),
        work_dir=work,
        seed=1,
    )

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        loader.reshuffle(epoch=epoch + 1)
        for batch in loader:
            yield batch["input_ids"]
        loader.reset()

    return epoch_of


class Rows(Dataset[torch.Tensor]):
    """The ids of the samples."""

    def __init__(self, folder: Path) -> None:
        self._samples = opened(folder)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._samples[number]["input_ids"]


def rows(folder: Path) -> m.Epochs:
    loader: DataLoader[Any] = DataLoader(Rows(folder), batch_size=m.BATCH_SIZE, shuffle=True)
    return lambda epoch: loader


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {
    "OLMo-core, its loader": own_loader,
    "OLMo-core, its data set in a DataLoader": rows,
}
