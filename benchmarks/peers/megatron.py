"""Megatron-core: its indexed data set, one sequence for each row, and its `GPTDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
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


class EndOfDocument:
    """The members of a tokenizer that a `GPTDataset` asks for."""

    eod = 0
    vocab_size = m.VOCAB_SIZE
    unique_identifiers = ("none",)


def gpt_samples(folder: Path) -> m.Epochs:
    """Return the epochs of samples in the order that the data set has computed; a sample has labels and masks too."""
    prefix = str(folder / "megatron")
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=m.SEQ_LEN,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(folder / "megatron-cache"),
        tokenizer=EndOfDocument(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        add_extra_token_to_sequence=False,
    )
    count = len(IndexedDataset(prefix))
    samples, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [count, None, None], lambda: True, config).build()
    loader: DataLoader[Any] = DataLoader(samples, batch_size=m.BATCH_SIZE)
    return lambda epoch: loader


def slices(folder: Path) -> m.Epochs:
    sequences = IndexedDataset(str(folder / "megatron"))

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        for step in order(len(sequences) // m.BATCH_SIZE, epoch):
            found = sequences[step * m.BATCH_SIZE : (step + 1) * m.BATCH_SIZE]
            yield torch.from_numpy(np.stack(found).astype(np.int64))

    return epoch_of


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {"Megatron IndexedDataset, a slice for each batch": slices}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {
    "Megatron GPTDataset": gpt_samples,
    "Megatron IndexedDataset, a row each": rows,
}
