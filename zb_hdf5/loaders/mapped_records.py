"""Steps of records in any order, taken from one mapping of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.tokens import StoredIds
from zb_hdf5.formats.batches import Batches
from zb_hdf5.packages import from_numpy

if TYPE_CHECKING:
    import torch

#: Reads records by their numbers.
ReadRecords: TypeAlias = "Callable[[npt.NDArray[np.int64]], torch.Tensor]"


class MappedRecords:
    """Takes the records of a step into one array, which is widened then. The sizes of files are asked for once a block.

    Parameters
    ----------
    batches
        The records.
    seq_len
        Tokens of a record.
    dtype
        The dtype of the tensors.
    """

    def __init__(self, batches: Batches, seq_len: int, dtype: np.dtype[Any]) -> None:
        self._batches = batches
        self._seq_len = seq_len
        self._dtype = dtype

    def read_all(self, block: npt.NDArray[np.int64], read: ReadRecords) -> Iterator[torch.Tensor]:
        """Yield each step of a block, in order. They are in the page cache.

        Parameters
        ----------
        read
            Reads records by their numbers: those that no mapping holds, or whose ids are none. It raises the error.
        """
        stored = None if self._batches.overlap else self._batches.tokens.stored_ids()
        if stored is None or len(stored.ids) % self._seq_len:
            return map(read, block)
        return self._from_one(stored, block, read)

    def _from_one(self, stored: StoredIds, block: npt.NDArray[np.int64], read: ReadRecords) -> Iterator[torch.Tensor]:
        """Yield steps from all tokens: at 4 records of 1,024 tokens in half of the time that single reads take."""
        ids, limit = stored
        take = ids.reshape(-1, self._seq_len).take
        scratch = np.empty((block.shape[1], self._seq_len), ids.dtype)
        for rows in block:
            take(rows, axis=0, out=scratch, mode="clip")  # "clip": numpy fills `scratch` without a buffer of its own
            if limit is not None and scratch.max() > limit:
                yield read(rows)  # raises the error
                continue
            yield from_numpy()(scratch.astype(self._dtype))
