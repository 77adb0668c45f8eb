"""numpy: loops over a memory map, and data sets over it in a `DataLoader`.

One of the loops computes a crc32 of each batch, as whoever checks batches would: a limit for a loader that does.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib
from torch.utils.data import DataLoader, Dataset

from benchmarks import measure as m
from benchmarks.peers import order, source

LIBRARY = "np.memmap"
PACKAGES = ("numpy", "torch", "isal")
#: The tokens of a window, of which eight are a step.
WINDOW_LEN = m.BATCH_TOKENS // 8


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


def gather(folder: Path, length: int = m.SEQ_LEN) -> m.Epochs:
    tokens = source(folder).reshape(-1, length)

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        for rows in _steps(len(tokens), length, epoch):
            yield torch.from_numpy(tokens[rows].astype(np.int64))

    return epoch_of


def _steps(num_rows: int, length: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(epoch).permutation(num_rows).reshape(-1, m.BATCH_TOKENS // length)


def by_position(folder: Path, length: int, threads: int) -> m.Epochs:
    """Return the epochs of a loop whose steps are read row by row, each step in one of many threads."""
    tokens = source(folder)
    fd = os.open(folder / "tokens.npy", os.O_RDONLY)
    base = os.path.getsize(folder / "tokens.npy") - tokens.nbytes

    def read(rows: npt.NDArray[np.int64]) -> torch.Tensor:
        step = np.empty((len(rows), length), np.uint32)
        for row, offset in zip(step, (rows * step.itemsize * length + base).tolist(), strict=True):
            os.preadv(fd, (row,), offset)
        return torch.from_numpy(step.astype(np.int64))

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        with ThreadPoolExecutor(threads) as pool:
            coming: deque[Future[torch.Tensor]] = deque()
            for rows in _steps(tokens.size // length, length, epoch):
                coming.append(pool.submit(read, rows))
                if len(coming) > 2 * threads:
                    yield coming.popleft().result()
            yield from (step.result() for step in coming)

    return epoch_of


BATCHES: dict[str, Callable[[Path], m.Epochs]] = {
    "np.memmap in a DataLoader": lambda f: repeated(DataLoader(MemmapBatches(f), batch_size=None, shuffle=True)),
    "np.memmap loop, crc32": loop_with_crc32,
    "np.memmap loop": loop,
}
BEYOND: dict[str, Callable[[Path], m.Epochs]] = {
    "np.memmap loop": loop,
    "np.memmap loop, sequential": in_sequence,
    "np.memmap loop, rows": gather,
    "np.memmap loop, windows": lambda f: gather(f, WINDOW_LEN),
    "preadv in 64 threads, rows": lambda f: by_position(f, m.SEQ_LEN, 64),
    "preadv in 64 threads, windows": lambda f: by_position(f, WINDOW_LEN, 64),
}
ROWS: dict[str, Callable[[Path], m.Epochs]] = {
    "np.memmap in a DataLoader, a row each": lambda f: repeated(
        DataLoader(MemmapRows(f), batch_size=m.BATCH_SIZE, shuffle=True)
    ),
    "np.memmap, gather of rows": gather,
}
