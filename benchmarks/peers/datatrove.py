"""datatrove: `DatatroveFolderDataset` over one `.ds` file, in windows of a row and of a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datatrove.utils.dataset import DatatroveFolderDataset
from torch.utils.data import DataLoader

from benchmarks import measure as m
from benchmarks.peers import order, source

LIBRARY = "datatrove"
PACKAGES = ("datatrove", "torch")
TOKEN_SIZE = 4


def prepare(folder: Path) -> None:
    tokens = source(folder)
    path = folder / "datatrove"
    path.mkdir()
    tokens.tofile(path / "tokens.ds")
    ends = np.arange(1, len(tokens) + 1, dtype="<u8") * m.SEQ_LEN
    ends.tofile(path / "tokens.ds.index")


def _windows(folder: Path, width: int, shuffle: bool) -> Any:
    """Return windows of one token more than `seq_len`, which is how the library counts."""
    path = str(folder / "datatrove")
    return DatatroveFolderDataset(path, seq_len=width - 1, token_size=TOKEN_SIZE, shuffle=shuffle)


def rows(folder: Path) -> m.Epochs:
    loader: DataLoader[Any] = DataLoader(_windows(folder, m.SEQ_LEN, True), batch_size=m.BATCH_SIZE)
    return lambda epoch: (batch["input_ids"] for batch in loader)


def batches(folder: Path) -> m.Epochs:
    found = _windows(folder, m.BATCH_TOKENS, False)

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        for step in order(len(found), epoch):
            yield found[step]["input_ids"].view(m.BATCH_SIZE, m.SEQ_LEN)

    return epoch_of


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {"datatrove": batches}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {"datatrove, a row each": rows}
