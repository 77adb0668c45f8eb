"""The `.npy` DatasetLoader under its own name and arguments: a folder of token arrays, batch after batch, for ever."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.loaders.loader import Loader
from zb_hdf5.store.tokens import npy_files

if TYPE_CHECKING:
    import torch

    Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class DatasetLoader:
    """Gives `(x, y)` for ever: consecutive tokens of a folder's `.npy` files, and the same shifted by one.

    A `Loader` over the folder as one stream: row r + 1 of x continues row r, ranks take turns batch by batch, and
    every rank goes from one file to the next at the same step. Only the tokens at the very end that do not fill a step
    of all ranks are left out of an epoch.

    Parameters
    ----------
    batch, seq_len
        Shape of x and y.
    process_rank, num_processes
        Which share of the batches this process takes.
    dataset_dir
        Folder of 1-D `.npy` files of any integer dtype, taken in the order of their names.
    device
        Where the tensors go.

    Attributes
    ----------
    filepaths
        The files, in order.
    file_idx, tok_idx
        Where the next batch of this process begins: the number of the file, and the token in it.
    file_data
        The tokens of that file, as a memory map.

    Raises
    ------
    ArgumentError
        If there are too few tokens for one batch of each process.
    """

    def __init__(
        self,
        batch: int,
        seq_len: int,
        process_rank: int,
        num_processes: int,
        dataset_dir: str | os.PathLike[str],
        device: str | torch.device = "cpu",
    ) -> None:
        self.batch, self.seq_len, self.device = batch, seq_len, device
        self.process_rank, self.num_processes = process_rank, num_processes
        self._loader = Loader(
            dataset_dir,
            backend="npy",
            batch_size=batch,
            seq_len=seq_len,
            shuffle="sequential",
            targets=True,
            rank=process_rank,
            world_size=num_processes,
            device=device,
        )
        paths = npy_files(self._loader.reader.path)
        self.filepaths = [str(path) for path in paths]
        self._ends = list(accumulate(len(np.load(path, mmap_mode="r")) for path in paths))

    @property
    def file_idx(self) -> int:
        return self._next_token()[0]

    @property
    def tok_idx(self) -> int:
        return self._next_token()[1]

    @property
    def file_data(self) -> npt.NDArray[Any]:
        tokens: npt.NDArray[Any] = np.load(self.filepaths[self.file_idx], mmap_mode="r")
        return tokens

    def _next_token(self) -> tuple[int, int]:
        """Return the file and the place in it where the next batch begins."""
        step = self.batch * self.num_processes
        position = int(self._loader.state_dict()["position"])
        if position + step > len(self) * step:  # the next batch is the first one of the next epoch
            position = 0
        token = (position + self.process_rank * self.batch) * self.seq_len
        number = bisect_right(self._ends, token)
        return number, token - (self._ends[number - 1] if number else 0)

    def get_batch(self) -> Pair:
        """Return the next `(x, y)`, each torch.int64 of shape (batch, seq_len)."""
        x, y = self._loader.get_batch()
        return x, y

    def __next__(self) -> Pair:
        """Return the next `(x, y)`, for ever, as `get_batch` does."""
        return self.get_batch()

    def __iter__(self) -> Iterator[Pair]:
        """Yield one epoch."""
        return iter(self._loader)

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. A position in this epoch is kept. See `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands. See `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], *, force: bool = False) -> None:
        """Continue exactly there, on any number of processes. See `Loader.load_state_dict`."""
        self._loader.load_state_dict(state_dict, force=force)

    def close(self) -> None:
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
