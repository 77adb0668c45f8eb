"""A folder of `.npy` files as one endless loader."""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from zb_hdf5.loaders.loader import Loader
from zb_hdf5.packages import LaterModule

if TYPE_CHECKING:
    import torch
else:
    torch = LaterModule("torch", "torch")


class DatasetLoader(Loader["tuple[torch.Tensor, torch.Tensor]"]):
    """Gives `(x, y)` for ever: consecutive tokens of a folder's `.npy` files, and the same shifted by one.

    x and y are torch.int64 of shape (batch, seq_len). Row r + 1 of x continues row r, the ranks take turns batch by
    batch, and every rank goes from one file to the next, by name, at the same step. Only tokens at the very end that do
    not fill a step of all ranks are left out of an epoch; fewer than one step are an `ArgumentError`.

    Parameters
    ----------
    batch, seq_len
        Rows of a batch, and tokens of a row.
    process_rank, num_processes
        The rank of this process, and the number of ranks.
    dataset_dir
        A folder of 1-D `.npy` files.
    device
        The device of the batches.

    Attributes
    ----------
    filepaths
        The files, in order.
    file_idx, tok_idx
        The next batch of this process begins at token `tok_idx` of the file `filepaths[file_idx]`.
    file_data
        That file, mapped.
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
        super().__init__(
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
        self.batch = batch
        self.process_rank = process_rank
        self.num_processes = num_processes
        self.device = device
        self.filepaths = [str(file.path) for file in self.batches.corpus.files]
        self._starts = self.batches.tokens.files.starts

    seq_len = property(lambda self: self.batches.stride)
    file_idx = property(lambda self: self._next_token()[0])
    tok_idx = property(lambda self: self._next_token()[1])
    file_data = property(lambda self: np.load(self.filepaths[self.file_idx], mmap_mode="r"))

    def _next_token(self) -> tuple[int, int]:
        """Return the file, and the offset in it, at which the next batch begins."""
        is_within = self.plan.steps_from(self._position) > 0
        position = self._position if is_within else 0  # of the next epoch
        token = (position + self.rank * self.batch_size) * self.seq_len
        number = bisect_right(self._starts, token) - 1
        return number, token - self._starts[number]
