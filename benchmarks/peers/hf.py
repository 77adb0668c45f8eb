"""Hugging Face datasets: a folder of `save_to_disk`, of rows and of whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from benchmarks import measure as m
from benchmarks.peers import order, source

LIBRARY = "Hugging Face datasets"
PACKAGES = ("datasets", "pyarrow", "torch")


def prepare(folder: Path) -> None:
    datasets.disable_progress_bars()
    tokens = source(folder).view(np.int32)
    for name, width in (("hf-rows", m.SEQ_LEN), ("hf-batches", m.BATCH_TOKENS)):
        features = datasets.Features(tokens=datasets.List(datasets.Value("int32"), length=width))
        found = datasets.Dataset.from_dict({"tokens": tokens.reshape(-1, width)}, features=features)
        found.save_to_disk(str(folder / name))


def _rows(folder: Path) -> Any:
    return datasets.load_from_disk(str(folder / "hf-rows")).with_format("torch")


def default(folder: Path) -> m.Epochs:
    loader: DataLoader[Any] = DataLoader(_rows(folder), batch_size=m.BATCH_SIZE, shuffle=True)
    return lambda epoch: (batch["tokens"] for batch in loader)


def sampled(folder: Path) -> m.Epochs:
    rows = _rows(folder)
    sampler = BatchSampler(RandomSampler(rows), m.BATCH_SIZE, drop_last=False)
    loader: DataLoader[Any] = DataLoader(rows, sampler=sampler, batch_size=None)
    return lambda epoch: (batch["tokens"] for batch in loader)


def arrow(folder: Path) -> m.Epochs:
    found = datasets.load_from_disk(str(folder / "hf-batches")).with_format("arrow")

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        for step in order(len(found), epoch):
            ids = found[step].column("tokens").combine_chunks().flatten().to_numpy()
            yield torch.from_numpy(ids.astype(np.int64)).view(m.BATCH_SIZE, m.SEQ_LEN)

    return epoch_of


def whole(folder: Path) -> m.Epochs:
    found = datasets.load_from_disk(str(folder / "hf-batches")).with_format("torch")
    loader: DataLoader[Any] = DataLoader(found, batch_size=None, shuffle=True)
    return lambda epoch: (batch["tokens"].view(m.BATCH_SIZE, m.SEQ_LEN) for batch in loader)


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {
    "HF datasets in a DataLoader": whole,
    "HF datasets, Arrow": arrow,
}
BEYOND: dict[str, Callable[[Path], m.Epochs]] = {
    "HF datasets in a DataLoader": whole,
    "HF datasets, Arrow": arrow,
}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {
    "HF datasets in a DataLoader, a row each": default,
    "HF datasets and a BatchSampler": sampled,
}
