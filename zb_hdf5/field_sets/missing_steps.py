"""The records of a field set that are missing, as requests; and the reader of their tokens, as steps of a loader."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.file_systems import is_on_network
from zb_hdf5.formats.batches import Batches
from zb_hdf5.formats.corpus import Corpus
from zb_hdf5.formats.windows import Windows
from zb_hdf5.loaders.ahead import cuda_device, depth_of, read_to, require_prefetch
from zb_hdf5.loaders.step_values import WantedFields
from zb_hdf5.loaders.steps import StepReader
from zb_hdf5.packages import from_numpy
from zb_hdf5.store.set_facts import SetFacts

if TYPE_CHECKING:
    import torch


class StepOptions(TypedDict, total=False):
    """The values of a step, and the way that it is read: as for `Loader`."""

    documents: bool | Collection[Any]
    fields: WantedFields
    spans: Any
    dtype: torch.dtype | None
    device: str | torch.device | None
    prefetch: int | str


class WantedRecords(NamedTuple):
    """Records, or windows of a stream, that are read as one step.

    Attributes
    ----------
    numbers
        Their numbers, which ascend.
    is_tail
        Whether it is the window at the end of a stream, which has fewer tokens than others.
    """

    numbers: npt.NDArray[np.int64]
    is_tail: bool = False


def windows_of(facts: SetFacts, records: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the windows of a stream that have some records as their new ones; of stored records, these."""
    if not facts.seq_len:
        return records
    return np.unique(np.maximum(records - facts.context_records, 0))


def whole_windows(facts: SetFacts) -> int:
    """Return how many windows of a stream are whole; one more has the rest of the tokens, if there is a rest."""
    stride = facts.record_tokens
    return max(0, facts.num_tokens - (facts.seq_len - stride)) // stride


def wanted_steps(facts: SetFacts, records: npt.NDArray[np.int64], batch_size: int) -> Iterator[WantedRecords]:
    """Yield the steps that have some missing records."""
    numbers = windows_of(facts, records)
    whole = whole_windows(facts) if facts.seq_len else facts.num_records
    for start in range(0, int(np.searchsorted(numbers, whole)), batch_size):
        some = numbers[start : start + batch_size]
        yield WantedRecords(some[some < whole])
    if len(numbers) and numbers[-1] >= whole:
        yield WantedRecords(numbers[-1:], is_tail=True)


class MissingReader:
    """Reads steps of missing records: a dictionary as of a `Loader`, with their numbers as "records".

    Parameters
    ----------
    corpus, facts
        The tokens, and the field set.
    batch_size
        Records of a step.
    options
        As for `Loader`.
    """

    def __init__(self, corpus: Corpus, facts: SetFacts, batch_size: int, options: StepOptions) -> None:
        self._corpus = corpus
        self._options = options
        prefetch = options.get("prefetch", "auto")
        require_prefetch(prefetch)
        self._device = cuda_device(options.get("device"))
        if facts.seq_len:
            batches = corpus.batches(batch_size, facts.seq_len, facts.record_tokens)
        else:
            batches = corpus.batches()
        self._reader = self._reader_of(batches)
        self._tail_start = whole_windows(facts) * facts.record_tokens
        self._tail_tokens = facts.num_tokens - self._tail_start
        step_bytes = batch_size * batches.seq_len * batches.dtype.itemsize
        on_network = partial(is_on_network, corpus.path)
        self._depth = depth_of(prefetch, corpus.tokens, on_network, self._device, step_bytes, batch_size)

    def _reader_of(self, batches: Batches) -> StepReader:
        options = self._options
        return StepReader(
            batches,
            batches.seq_len,
            targets=False,
            mask_documents=(),
            prefetch=0,
            device=None,
            dtype=options.get("dtype"),
            fields=options.get("fields", ()),
            documents=options.get("documents", False),
            spans=options.get("spans", False),
        )

    def read_all(self, wanted: Iterator[WantedRecords]) -> Iterator[dict[str, Any]]:
        """Yield a step for each request, with later ones read ahead where a read may wait."""
        return read_to(self._device, self._read, wanted, self._depth.steps, self._depth.threads)

    def _read(self, wanted: WantedRecords) -> dict[str, Any]:
        if wanted.is_tail:
            tail = Batches(self._corpus, Windows(1, self._tail_tokens, 1))
            step = self._reader_of(tail).read(np.array([self._tail_start]))
        else:
            step = self._reader.read(wanted.numbers)
        found: dict[str, Any] = dict(step) if isinstance(step, dict) else {"tokens": step}
        found["records"] = from_numpy()(wanted.numbers.copy())
        return found
