"""litdata: chunks of `optimize`, read by its `TokensLoader` in blocks of a row and of a whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from benchmarks import measure as m
from benchmarks.peers import source

LIBRARY = "litdata"
PACKAGES = ("litdata", "torch")
#: Rows of an input of `optimize`, so that it has few of them.
PART = 1024


def _part(start: int, folder: Path) -> Any:
    return torch.from_numpy(np.array(source(folder)[start : start + PART].reshape(-1)).view(np.int32))


def prepare(folder: Path) -> None:
    starts = list(range(0, len(source(folder)), PART))
    for name, width in (("rows", m.SEQ_LEN), ("batches", m.BATCH_TOKENS)):
        optimize(
            partial(_part, folder=folder),
            starts,
            str(folder / f"litdata-{name}"),
            chunk_size=width * 1024,
            item_loader=TokensLoader(block_size=width),
            num_workers=1,
            start_method="fork",  # another process has no name for this module
        )


def read(folder: Path, name: str, width: int, batch_size: int) -> m.Epochs:
    path = str(folder / f"litdata-{name}")
    found = StreamingDataset(path, item_loader=TokensLoader(block_size=width), shuffle=True, drop_last=False)
    loader = StreamingDataLoader(found, batch_size=batch_size, num_workers=0)
    return lambda epoch: (batch.long().view(m.BATCH_SIZE, m.SEQ_LEN) for batch in loader)


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {"litdata": lambda f: read(f, "batches", m.BATCH_TOKENS, 1)}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {
    "litdata, a row each": lambda f: read(f, "rows", m.SEQ_LEN, m.BATCH_SIZE)
}
