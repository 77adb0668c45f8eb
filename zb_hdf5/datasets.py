"""Map-style `torch.utils.data.Dataset`s over a store, for `DataLoader`, `StatefulDataLoader`, Trainer and Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from zb_hdf5.errors import BatchIndexError
from zb_hdf5.reader import BatchReader


class Steps(Protocol):
    """What a dataset of batches needs of a loader."""

    reader: BatchReader

    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    def requests_of_steps(self, steps: npt.NDArray[np.int64]) -> list[Any]: ...
    def read(self, request: Any) -> torch.Tensor: ...


class BatchDataset(Dataset[torch.Tensor]):
    """The batches that one rank gets in one epoch: item i is step i.

    Use it with `DataLoader(dataset, batch_size=None)`, with any number of workers and any start method: it is
    picklable, and each process opens the files by itself. Threads (`Loader(prefetch=n)`) are faster than workers.
    """

    def __init__(self, loader: Steps) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. Workers that are kept alive (`persistent_workers`) do not hear of it."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return several batches: the order of all of them is computed at once."""
        loader = self._loader
        steps = np.asarray(indices, dtype=np.int64)
        if len(steps) and not -len(self) <= int(steps.min()) <= int(steps.max()) < len(self):
            raise BatchIndexError(f"{loader.reader.path}: no step {indices}: expected 0..{len(self) - 1:,}")
        steps = np.where(steps < 0, steps + len(self), steps)
        return [loader.read(request) for request in loader.requests_of_steps(steps)]


class RecordDataset(Dataset[dict[str, torch.Tensor]]):
    """All records of a store, in stored order, as `{"input_ids", "labels"}`: equal tensors of int64, shape (S,).

    For trainers that shuffle, batch and distribute by themselves, and whose models shift the labels.
    """

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return self._reader.num_records

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return several records, gathered at once."""
        records = np.asarray(indices, dtype=np.int64)
        tokens = np.empty((len(records), self._reader.seq_len), self._reader.dtype)
        self._reader.read_records_into(np.where(records < 0, records + len(self), records), tokens)
        rows = torch.from_numpy(tokens.astype(np.int64))
        return [{"input_ids": row, "labels": row.clone()} for row in rows]
