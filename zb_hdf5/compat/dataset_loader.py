"""The `.npy` DatasetLoader under its own name and arguments: a folder of token arrays, batch after batch, for ever."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from zb_hdf5.loaders.loader import Loader

if TYPE_CHECKING:
    import torch


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

    def get_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next `(x, y)`, each torch.int64 of shape (batch, seq_len)."""
        x, y = self._loader.get_batch()
        return x, y

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands. See `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly there, on any number of processes."""
        self._loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Release the files."""
        self._loader.close()
