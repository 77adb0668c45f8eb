"""Map-style `torch.utils.data.Dataset`s over a store, for `DataLoader`, `StatefulDataLoader`, Trainer and Lightning."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from zb_hdf5.errors import BatchIndexError
from zb_hdf5.order import ORDER_STEPS
from zb_hdf5.reader import BatchReader


class Steps(Protocol):
    """What a dataset of batches needs of a loader."""

    reader: BatchReader
    epoch: int
    batch_size: int

    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    def requests_of_steps(self, steps: npt.NDArray[np.int64]) -> list[Any]: ...
    def read(self, request: Any) -> torch.Tensor: ...


class KnownSteps(NamedTuple):
    """What to read at the steps `first`, `first + stride`, ...

    Attributes
    ----------
    course
        Epoch and batch size for which this holds.
    """

    course: tuple[int, int]
    first: int
    stride: int
    requests: list[Any]


NOTHING_KNOWN: Final = KnownSteps((-1, 0), 0, 1, [])


class BatchDataset(Dataset[torch.Tensor]):
    """The batches that one rank gets in one epoch: item i is step i.

    Use it with `DataLoader(dataset, batch_size=None)`, with any number of workers and any start method: it is
    picklable, and each process opens the files by itself. Threads (`Loader(prefetch=n)`) are faster than workers.
    """

    def __init__(self, loader: Steps) -> None:
        self._loader, self._known = loader, NOTHING_KNOWN

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. Workers that are kept alive (`persistent_workers`) do not hear of it."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, index: int) -> torch.Tensor:
        loader, step, count = self._loader, operator.index(index), len(self)
        if not -count <= step < count:
            raise BatchIndexError(f"{loader.reader.path}: no step {step:,}: expected 0..{count - 1:,}")
        return loader.read(self._request(step if step >= 0 else step + count))

    def _request(self, step: int) -> Any:
        """Return what to read at one step: as cheap as at many at once, if the steps come evenly spaced."""
        known, loader = self._known, self._loader
        number, rest = divmod(step - known.first, known.stride)
        current = known.course == (loader.epoch, loader.batch_size)
        if not current or rest or not 0 <= number < len(known.requests):
            known = self._known = self._look_ahead(step, known if current else NOTHING_KNOWN)
            number = 0
        return known.requests[number]

    def _look_ahead(self, step: int, before: KnownSteps) -> KnownSteps:
        """Compute the order of the steps that probably come: of more each time this turns out to be right.

        The order of one step costs as much as that of some hundred. Evenly spaced steps are those of a plain sampler,
        or of one worker of several; a sampler that shuffles costs two steps each time, never a block.
        """
        loader, stride, count = self._loader, before.stride, min(4 * len(before.requests), ORDER_STEPS)
        if not count or step != before.first + len(before.requests) * stride:
            stride, count = max(1, step - before.first) if before.requests else 1, 2
        steps = np.arange(step, min(step + count * stride, len(self)), stride)
        return KnownSteps((loader.epoch, loader.batch_size), step, stride, loader.requests_of_steps(steps))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": NOTHING_KNOWN}

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
