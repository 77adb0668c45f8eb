"""Map-style `torch.utils.data.Dataset`s over a store, for `DataLoader`, `StatefulDataLoader`, Trainer and Lightning."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.documents.pieces import ranges
from zb_hdf5.documents.segments import IGNORED_TARGET, position_ids
from zb_hdf5.errors import BatchIndexError
from zb_hdf5.loaders.order import ORDER_STEPS
from zb_hdf5.loaders.states import require_count, require_fields, require_kind, require_same
from zb_hdf5.loaders.step_reader import Step
from zb_hdf5.loaders.steps import Request, StepPlan

#: What to add to the message about a state that differs.
REMEDIES: Final = dict.fromkeys(
    ("world_size", "batch_size"), "; steps are counted here: the state of a Loader itself fits any number of ranks"
)


class Steps(Protocol):
    """The part of a loader that a data set of batches needs."""

    reader: BatchReader
    epoch: int
    plan: StepPlan

    def __len__(self) -> int: ...
    def identity(self) -> dict[str, Any]: ...
    def set_epoch(self, epoch: int) -> None: ...
    def read(self, request: Request) -> Step: ...


class KnownSteps(NamedTuple):
    """The requests of the steps `first`, `first + stride`, ...

    Attributes
    ----------
    plan
        For which this holds.
    """

    plan: StepPlan | None
    first: int
    stride: int
    requests: list[Request]


NOTHING_KNOWN: Final = KnownSteps(None, 0, 1, [])


class BatchDataset(Dataset[Step]):
    """The batches that one rank gets in one epoch: item i is step i, as the loader yields it.

    Use it with `DataLoader(dataset, batch_size=None)`, with any number of workers and any start method: it is
    picklable, and each process opens the files by itself. Threads (`Loader(prefetch=n)`) are faster than workers.
    `StatefulDataLoader` keeps its state. Trainers that call `set_epoch` on samplers only (Lightning) need
    `sampler=dataset.sampler` too.
    """

    def __init__(self, loader: Steps) -> None:
        self._loader, self._known = loader, NOTHING_KNOWN
        self._epoch_is_chosen = False

    @property
    def sampler(self) -> StepSampler:
        """A sampler for `DataLoader(..., batch_size=None, sampler=dataset.sampler)`: all steps of this rank, in order.

        Its `set_epoch` reaches the workers too, those that are kept alive (`persistent_workers`) included.
        """
        return StepSampler(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. Workers that are kept alive hear of it through `sampler` only."""
        self._loader.set_epoch(epoch)
        self._epoch_is_chosen = True

    @property
    def path(self) -> Path:
        return self._loader.reader.path

    @property
    def epoch(self) -> int:
        """The epoch whose steps these are."""
        return self._loader.epoch

    @property
    def chosen_epoch(self) -> int | None:
        """The epoch of the last call of `set_epoch`."""
        return self._loader.epoch if self._epoch_is_chosen else None

    def state_dict(self) -> dict[str, Any]:
        """Return the fields that must agree for a step number to mean the same records, and the epoch.

        For `StatefulDataLoader`, which counts the steps.
        """
        return {**self._identity(), "epoch": self._loader.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the epoch of the state, unless `set_epoch` has chosen one already.

        Raises
        ------
        StateError
            If the state is of other data, another seed or order, or of steps of another size.
        """
        identity = self._identity()
        require_kind(self.path, state_dict, "batches")
        state = require_fields(self.path, state_dict, [*identity, "epoch"])
        require_same(self.path, state, identity, REMEDIES)
        epoch = require_count(self.path, state, "epoch")
        if not self._epoch_is_chosen:
            self._loader.set_epoch(epoch)

    def _identity(self) -> dict[str, Any]:
        plan = self._loader.plan
        steps = {"kind": "batches", "batch_size": plan.batch_size, "world_size": plan.world_size}
        return {**self._loader.identity(), **steps}

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, index: int | tuple[int, int]) -> Step:
        if isinstance(index, tuple):  # of `sampler`: with its epoch
            epoch, index = index
            self._loader.set_epoch(epoch)
        loader, step, count = self._loader, operator.index(index), len(self)
        if not -count <= step < count:
            raise BatchIndexError(f"{loader.reader.path}: no step {step:,}: expected 0..{count - 1:,}")
        return loader.read(self._request(step if step >= 0 else step + count))

    def _request(self, step: int) -> Request:
        """Return what to read at one step: as cheap as at many at once, if the steps come evenly spaced."""
        known = self._known
        number, rest = divmod(step - known.first, known.stride)
        current = known.plan is self._loader.plan
        if not current or rest or not 0 <= number < len(known.requests):
            known = self._known = self._look_ahead(step, known if current else NOTHING_KNOWN)
            number = 0
        return known.requests[number]

    def _look_ahead(self, step: int, before: KnownSteps) -> KnownSteps:
        """Compute the order of the steps that probably come: of more each time this turns out to be right.

        The order of one step costs as much as that of some hundred. Evenly spaced steps are those of a plain sampler,
        or of one worker of several; a sampler that shuffles costs two steps each time, never a block.
        """
        plan, stride, count = self._loader.plan, before.stride, min(4 * len(before.requests), ORDER_STEPS)
        if not count or step != before.first + len(before.requests) * stride:
            stride, count = max(1, step - before.first) if before.requests else 1, 2
        steps = np.arange(step, min(step + count * stride, len(self)), stride)
        return KnownSteps(plan, step, stride, plan.requests_of_steps(steps))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": NOTHING_KNOWN}

    def __getitems__(self, indices: Sequence[int]) -> list[Step]:
        """Return several batches: the order of all of them is computed at once."""
        loader = self._loader
        steps = np.asarray(indices, dtype=np.int64)
        if steps.ndim == 2:  # of `sampler`: each with its epoch
            loader.set_epoch(int(steps[0, 0]))
            steps = steps[:, 1]
        if len(steps) and not -len(self) <= int(steps.min()) <= int(steps.max()) < len(self):
            raise BatchIndexError(f"{loader.reader.path}: no step {indices}: expected 0..{len(self) - 1:,}")
        steps = np.where(steps < 0, steps + len(self), steps)
        return [loader.read(request) for request in loader.plan.requests_of_steps(steps)]


class StepSampler(DistributedSampler[Any]):
    """The steps of a `BatchDataset`, each with the epoch once `set_epoch` has chosen one.

    A `DistributedSampler` of one process: the dataset has this rank's share only, and Lightning would replace any other
    sampler by one that shares it out again. Keeps its place for `StatefulDataLoader`, and gives it up in another epoch.
    """

    def __init__(self, dataset: BatchDataset) -> None:
        super().__init__(dataset, num_replicas=1, rank=0, shuffle=False)
        self._steps = dataset
        self._next = 0
        self._resumed = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, for the dataset too."""
        self._steps.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        start = self._next = self._next if self._resumed else 0
        self._resumed = False
        return self._rest(self._steps.epoch, start)

    def _rest(self, epoch: int, start: int) -> Iterator[Any]:
        if self._steps.epoch != epoch:  # chosen since
            start = 0
        chosen = self._steps.chosen_epoch
        for step in range(start, len(self)):
            self._next = step + 1
            yield step if chosen is None else (chosen, step)

    def __len__(self) -> int:
        return len(self._steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state and the next step."""
        return {**self._steps.state_dict(), "kind": "steps", "step": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the step of the state, unless `set_epoch` has chosen another epoch than that of the state.

        Raises
        ------
        StateError
            As `BatchDataset.load_state_dict` does.
        """
        where = self._steps.path
        require_kind(where, state_dict, "steps")
        fields = dict(require_fields(where, state_dict, [*self._steps.state_dict(), "step"]))
        step = require_count(where, fields, "step", len(self), "the steps of an epoch")
        fields.pop("step")
        self._steps.load_state_dict({**fields, "kind": "batches"})
        self._next = step if self._steps.epoch == fields["epoch"] else 0
        self._resumed = True


class RecordDataset(Dataset[dict[str, torch.Tensor]]):
    """All records of a store, in stored order, as `{"input_ids", "labels"}`: tensors of int64, shape (S,).

    For trainers that shuffle, batch and distribute by themselves, and whose models shift the labels. Labels are the
    tokens; padding has -100, where it is stored what is padding.

    Parameters
    ----------
    documents
        True: add `position_ids`, which begin anew with each document, and give the first token of each the label -100,
        as no token before it is of its document.
    """

    def __init__(self, reader: BatchReader, *, documents: bool = False) -> None:
        self._reader, self._documents = reader, documents
        if documents:
            reader.read_pieces(np.empty(0, np.int64))  # says what is missing

    def __len__(self) -> int:
        return self._reader.num_records

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return several records, gathered at once."""
        records = np.asarray(indices, dtype=np.int64)
        records = np.where(records < 0, records + len(self), records)
        stored = np.empty((len(records), self._reader.seq_len), self._reader.dtype)
        self._reader.read_records_into(records, stored)
        tokens = stored.astype(np.int64)
        values = {"input_ids": tokens, "labels": tokens.copy()}
        if self._documents or self._reader.has_padding:
            pieces = self._reader.read_pieces(records)
            flat, padding = values["labels"].reshape(-1), pieces.is_padding
            flat[ranges(pieces.starts[padding], pieces.lengths[padding])] = IGNORED_TARGET
            if self._documents:
                flat[pieces.starts] = IGNORED_TARGET
                values["position_ids"] = position_ids(pieces).astype(np.int64)
        rows = {name: torch.from_numpy(array) for name, array in values.items()}
        return [{name: array[number] for name, array in rows.items()} for number in range(len(records))]
