"""Map-style `torch.utils.data.Dataset`s over a store, for `DataLoader`, `StatefulDataLoader`, Trainer and Lightning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from zb_hdf5.errors import BatchIndexError
from zb_hdf5.formats.batches import Batches
from zb_hdf5.loaders.order import STEPS_AT_ONCE, TABLE_POSITIONS, Request, StepPlan
from zb_hdf5.loaders.state import require_count, require_fields
from zb_hdf5.loaders.step_values import StepValues, WantedFields
from zb_hdf5.loaders.steps import BatchT
from zb_hdf5.loaders.store_records import POSITION_IDS, RecordValues


class SharedEpoch:
    """The epoch that a loader has chosen, in memory that its copies in other processes share.

    Only the process that made it shares an epoch. A copy made by plain `pickle` shares nothing.
    """

    def __init__(self, epoch: int) -> None:
        self._numbers: torch.Tensor = torch.tensor([epoch, 0]).share_memory_()  # type: ignore[no-untyped-call]
        self._process = os.getpid()
        self._last = epoch

    def share(self, epoch: int) -> None:
        """Make this the epoch of every copy."""
        if os.getpid() == self._process:
            self._numbers[0] = epoch

    def take(self) -> int | None:
        """Return the epoch that was shared last, if this copy has not taken it yet."""
        before = self._last
        self._last = self._numbers.tolist()[0]
        return None if self._last == before else self._last

    def warn_once(self, message: str) -> None:
        """Give a warning, once for all copies."""
        worker = get_worker_info()
        if not self._numbers[1] and (worker is None or worker.id == 0):
            self._numbers[1] = 1
            warnings.warn(message, UserWarning, stacklevel=4)

    def close(self) -> None:
        """Release the shared memory, which has a descriptor."""
        self._numbers = self._numbers.clone()


class StepRequests:
    """The reads of one rank at single steps of a plan, in any order: from a table, unless the epoch is long.

    Parameters
    ----------
    plan
        The steps of the epoch.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.count = plan.steps_from(0)
        self._num_complete = plan.num_live // plan.step
        self._is_table = self.count * plan.reads_per_step <= TABLE_POSITIONS
        self._block = -1
        self._requests = plan.requests_of_steps(np.arange(self.count if self._is_table else 0))

    def __getitem__(self, step: int) -> Request:
        if self._is_table:
            return self._requests[step]
        if not -self.count <= step < self.count:
            raise IndexError(step)
        plan = self.plan
        step %= self.count
        if step >= self._num_complete:
            return plan.requests_of_steps(np.array([step]))[0]
        if plan.is_whole:
            return plan.order.index(step * plan.world_size + plan.rank)
        block, within = divmod(step, STEPS_AT_ONCE)
        if block != self._block:
            first = block * STEPS_AT_ONCE
            steps = np.arange(first, min(first + STEPS_AT_ONCE, self._num_complete))
            self._requests = plan.requests_of_steps(steps)
            self._block = block
        return self._requests[within]


class BatchDataset(Dataset[BatchT]):
    """The batches that one rank gets in one epoch: item i is step i, as the loader yields it.

    Use it with `DataLoader(dataset, batch_size=None)`, with any number of workers and any start method: it is
    picklable, and each process opens the files by itself. Threads (`Loader(prefetch=n)`) are faster than workers.
    `set_epoch`, of the loader too, reaches workers that are kept alive (`persistent_workers=True`).
    `StatefulDataLoader` keeps its state. Trainers that call `set_epoch` on samplers only (Lightning) need
    `sampler=dataset.sampler` too.

    Parameters
    ----------
    loader
        The `Loader` whose steps these are.
    shared_epoch
        The epoch, which the copies in workers share.
    """

    def __init__(self, loader: Any, shared_epoch: SharedEpoch) -> None:
        self._loader = loader
        self._shared_epoch = shared_epoch
        self.path: Path = loader.path
        self._requests: StepRequests | None = None
        self._epoch_is_chosen = False

    @property
    def sampler(self) -> StepSampler:
        """A sampler for `DataLoader(..., batch_size=None, sampler=dataset.sampler)`: all steps of this rank, in order.

        Its `set_epoch` is the method of the dataset.
        """
        return StepSampler(self, num_replicas=1, rank=0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, in the workers too."""
        self._loader.set_epoch(epoch)
        self._epoch_is_chosen = True

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return int(self._loader.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields that must agree for a step number to mean the same records, and the epoch.

        For `StatefulDataLoader`, which counts the steps.
        """
        return {**self._identity(), "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the epoch of the state, unless `set_epoch` has chosen one already.

        Raises `StateError` if it is of other data, another seed or order, or of steps of another size.
        """
        state = require_fields(self.path, state_dict, self._identity_as(state_dict), ("epoch",))
        epoch = require_count(self.path, state, "epoch")
        self._loader.keep_order(state)
        self._shared_epoch.take()  # was shared before this state was loaded
        if not self._epoch_is_chosen:
            self._loader.set_epoch(epoch)

    def _identity(self) -> dict[str, Any]:
        return self._of_steps(self._loader.identity())

    def _identity_as(self, state: Any) -> dict[str, Any]:
        """Return the fields that must agree with a state, which may be anything."""
        return self._of_steps(self._loader.identity_as(state if isinstance(state, Mapping) else {}))

    def _of_steps(self, identity: dict[str, Any]) -> dict[str, Any]:
        plan = self._loader.plan
        return {**identity, "kind": "batches", "batch_size": plan.batch_size, "world_size": plan.world_size}

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, index: int) -> BatchT:
        loader = self._loader
        if (epoch := self._shared_epoch.take()) is not None:
            loader.set_epoch(epoch)
        requests = self._requests
        if requests is None or requests.plan is not loader.plan:
            requests = self._requests = StepRequests(loader.plan)
        try:
            request = requests[index]
        except IndexError:
            raise BatchIndexError(f"{self.path}: no step {index:,}: expected 0..{requests.count - 1:,}") from None
        found: BatchT = loader.steps.read(request)
        return found

    def __getitems__(self, indices: Sequence[int]) -> list[BatchT]:
        """Return several steps, for a `DataLoader` that makes a batch of them, and warn once that they are batches."""
        self._shared_epoch.warn_once(
            f"{self.path}: each item of dataset() is a whole batch, and this DataLoader stacks {len(indices):,} of them"
            "; pass batch_size=None to the DataLoader",
        )
        return [self[index] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_requests": None}

    def __repr__(self) -> str:
        plan = self._loader.plan
        content = f"{plan.steps_from(0)} batches of {plan.batch_size} records"
        where = f"epoch={self.epoch}, rank={plan.rank}, world_size={plan.world_size}"
        return f"{type(self).__name__}({str(self.path)!r}, {content}, {where})"


class StepSampler(DistributedSampler[Any]):
    """The steps of a `BatchDataset`, in order.

    A `DistributedSampler` of one process: the dataset has this rank's share only, and Lightning would replace any other
    sampler by one that shares it out again. `StatefulDataLoader` keeps its position, which ends with its epoch.
    """

    dataset: BatchDataset
    _next = 0
    _resumed = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, for the dataset too."""
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        start = self._next = self._next if self._resumed else 0
        self._resumed = False
        return self._rest(self.dataset.epoch, start)

    def _rest(self, epoch: int, start: int) -> Iterator[Any]:
        for step in range(start if self.dataset.epoch == epoch else 0, len(self)):  # else another was chosen since
            self._next = step + 1
            yield step

    def __len__(self) -> int:
        return len(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state and the next step."""
        return {**self.dataset.state_dict(), "kind": "steps", "step": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the step of the state, unless `set_epoch` has chosen another epoch."""
        known = {**self.dataset._identity_as(state_dict), "kind": "steps"}
        state = {**require_fields(self.dataset.path, state_dict, known, ("epoch", "step")), "kind": "batches"}
        step = require_count(self.dataset.path, state, "step", len(self), "the steps of an epoch")
        del state["step"]
        self.dataset.load_state_dict(state)
        self._next = step if state["epoch"] == self.dataset.epoch else 0
        self._resumed = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r}, next step {self._next})"


class RecordDataset(Dataset[dict[str, torch.Tensor]]):
    """All records of a store, in stored order, as `{"input_ids", "labels"}`: tensors of int64, shape (S,).

    For trainers that shuffle, batch and distribute by themselves, and whose models shift the labels. Labels are the
    tokens, or the fields `labels` and `loss_mask` of the store; padding has -100, in stores that keep which columns are
    padding.

    Parameters
    ----------
    reader
        The store.
    documents
        True: add `position_ids`, which begin at 0 in each document, and give the first token of each the label -100,
        as no token before it is of its document.
    labels, fields
        As for `Loader`; the values of fields are aligned with the input ids.
    """

    def __init__(
        self, reader: Batches, *, documents: bool = False, labels: str | None = None, fields: WantedFields = ()
    ) -> None:
        self._reader = reader
        self._documents = documents
        self._fields = StepValues.of_fields(reader, fields) if fields else None
        self._values = RecordValues(reader, documents=(POSITION_IDS,) if documents else (), labels=labels)

    def __len__(self) -> int:
        return self._reader.num_records

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return several records, gathered at once."""
        records = np.asarray(indices, dtype=np.int64)
        records = np.where(records < 0, records + len(self), records)
        rows = {name: torch.from_numpy(array) for name, array in self._values.of(records).items()}
        if self._fields is not None:
            rows |= self._fields.fields_of(records, len(records))
        return [{name: array[number] for name, array in rows.items()} for number in range(len(records))]

    def __repr__(self) -> str:
        path = str(self._reader.path)
        documents = ", documents=True" if self._documents else ""
        return f"{type(self).__name__}({path!r}, {len(self)} records of {self._reader.seq_len} tokens{documents})"
