"""One field in the steps of a loader: its values of the tokens, the records or the documents of each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.documents.pieces import Pieces
from zb_hdf5.errors import ArgumentError
from zb_hdf5.field import BFLOAT16, UNITS
from zb_hdf5.formats.batches import Batches
from zb_hdf5.loaders.order import StoredRequest, records_in, requests_in
from zb_hdf5.loaders.step_memory import StepMemory
from zb_hdf5.packages import from_numpy, require_package
from zb_hdf5.spec import ABOUT, TokenArray

if TYPE_CHECKING:
    import torch

OF_TOKENS, OF_RECORDS, OF_DOCUMENTS = UNITS
#: Bytes of an unsigned dtype that torch lacks -> the dtype of its tensors; 8 bytes hold values up to 2**63 - 1.
_SIGNED: Final = {2: np.int32, 4: np.int64, 8: np.int64}


def value_shape(values: Batches) -> tuple[int, ...]:
    """Return the shape of the values of one token: of a field, or () of tokens."""
    return () if values.meta.field is None else values.meta.field.shape


def value_count(values: Batches) -> int:
    """Return the number of the values of one token."""
    return prod(value_shape(values))


def as_tensor(values: npt.NDArray[Any], kind: str = "") -> torch.Tensor | npt.NDArray[Any]:
    """Return a tensor; the array itself if torch has no such dtype (structured values, bytes).

    Parameters
    ----------
    values
        The values as they are stored.
    kind
        As `Field` has it.
    """
    if kind == BFLOAT16:
        return from_numpy()(values.view(np.int16)).view(require_package("torch", "torch").bfloat16)
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(_SIGNED[values.dtype.itemsize])
    return from_numpy()(values) if values.dtype.kind in "biufc" else values


class StepField:
    """The values of a field in each step of a loader. As thread-safe as the batches.

    Parameters
    ----------
    batches
        The batches of the tokens.
    name
        The name of the field in the store.
    seq_len
        Tokens of a record, as the loader gives it.
    num_inputs
        Tokens of a record that are inputs: the first ones.
    has_targets
        The loader gives targets: a value that is about a token belongs to the target that this token is.

    Attributes
    ----------
    name
        As it was given.
    unit
        The thing that has a value each. See `Field`.
    padding
        The value where the field has none, shape ().
    fill
        The value in rows and places of padding, which no loss counts: that of the field, else 0.
    kind
        As `Field` has it.

    Raises
    ------
    ArgumentError
        If no such field is stored.
    """

    def __init__(self, batches: Batches, name: str, seq_len: int, num_inputs: int, *, has_targets: bool) -> None:
        self.name = name
        self._batches = batches
        self._seq_len = seq_len
        self._num_inputs = num_inputs
        values = batches.corpus.field(name)
        field = values.meta.field
        self.unit = OF_TOKENS if field is None else field.unit
        self.padding = np.zeros((), np.int64) if field is None else field.padding
        self.fill: Any = 0 if field is None or field.fill is None else field.padding
        self._shape = () if field is None else field.shape
        self._size = prod(self._shape)
        self._dtype = values.dtype
        self.kind = "" if field is None else field.kind
        self._is_of_targets = has_targets and values.about == ABOUT[1]
        self._memory = StepMemory()

    def require_fit(self) -> None:
        """Raise `ArgumentError` if the records of a stream are other windows than those that it has values of."""
        made = self._batches.corpus.field(self.name).windows_of_set
        windows = self._batches.windows
        inputs = windows.length - (1 if self._num_inputs < self._seq_len else 0)
        if made is not None and (inputs, windows.stride) != (made.length, made.stride):
            raise ArgumentError(
                f"{self._batches.path}: {self.name} has a value for each window of {made.length:,} tokens every "
                f"{made.stride:,}, found windows of {inputs:,} every {windows.stride:,}"
            )

    # --- values of tokens or records -----------------------------------------------------------------------------

    def read(self, request: StoredRequest, num_rows: int) -> torch.Tensor | npt.NDArray[Any]:
        """Return the values of the tokens or records of a request, `num_rows` in all: rows after it are padding."""
        if self.unit == OF_RECORDS:
            return as_tensor(self.of_records(request, num_rows), self.kind)
        return self._of_inputs(self.of_all(request, num_rows))

    def read_all(self, block: npt.NDArray[np.int64]) -> Iterator[torch.Tensor | npt.NDArray[Any]]:
        """Yield the values of each step of a block, in order. They are in the page cache."""
        num_rows = self._batches.batch_size if block.ndim == 1 else block.shape[1]
        requests: Iterable[StoredRequest] = requests_in(block)
        if self.unit == OF_TOKENS:
            values = self._batches.field(self.name)
            length = self._seq_len * self._size
            rows = values.rows(length)
            if rows is not None:
                return self._from_one(rows, requests, num_rows)
            if block.ndim == 1 and values.tokens.unit == length:  # its records are compared one by one anyway
                requests = (records_in(request, num_rows) for request in requests)
        return map(self.read, requests, repeat(num_rows))

    def _from_one(
        self, rows: TokenArray, requests: Iterable[StoredRequest], num_rows: int
    ) -> Iterator[torch.Tensor | npt.NDArray[Any]]:
        """Yield the values of requests of so many records from the values of all records.

        The values of a step may be so many that they displace from the caches of the processor all that Python needs
        for its calls: there are few.
        """
        for request in requests:
            out = self._memory.array((num_rows, rows.shape[1]), self._dtype)
            if isinstance(request, int):
                out[...] = rows[request * num_rows : (request + 1) * num_rows]
            else:
                rows.take(request, 0, out, "clip")  # "clip": numpy fills `out` without a buffer of its own
            yield self._of_inputs(out.reshape(num_rows, self._seq_len, *self._shape))

    def of_all(self, request: StoredRequest, num_rows: int) -> npt.NDArray[Any]:
        """Return the values of all tokens of the records of a request, shape (num_rows, seq_len, ...)."""
        values = self._batches.field(self.name)
        out = self._memory.array((num_rows, self._seq_len * self._size), self._dtype)
        if isinstance(request, int):
            values.read_into(request, out)
        else:
            out[len(request) :] = self.fill
            values.read_records_into(request, out[: len(request)])
        return out.reshape(num_rows, self._seq_len, *self._shape)

    def _of_inputs(self, values: npt.NDArray[Any]) -> torch.Tensor | npt.NDArray[Any]:
        """Return the values of the inputs of records, or those about their targets, of the values of all tokens."""
        num_inputs = self._num_inputs
        if self._is_of_targets:
            values = values[:, 1 : num_inputs + 1]
            if lacking := num_inputs - values.shape[1]:
                ends = np.broadcast_to(self.padding, (len(values), lacking, *self._shape))
                values = np.concatenate([values, ends], axis=1)
        elif num_inputs < self._seq_len:
            values = values[:, :num_inputs]
        return as_tensor(values, self.kind)

    def of_records(self, request: StoredRequest, num_rows: int) -> npt.NDArray[Any]:
        """Return a value for each record of a request, shape (num_rows, ...)."""
        batches = self._batches
        parts = 1 if isinstance(request, int) else batches.seq_len // self._seq_len
        made = batches.corpus.field(self.name).windows_of_set
        num_context = 0 if made is None else made.length // made.stride - 1  # records that are context of a window
        found = self.of_numbers(records_in(request, batches.batch_size) // parts + num_context)
        lacking = np.broadcast_to(self.padding, (num_rows - len(found), *found.shape[1:]))
        return np.concatenate([found, lacking]) if len(lacking) else found

    def in_documents(self, values: npt.NDArray[Any], pieces: Pieces) -> npt.NDArray[Any]:
        """Return the values of the tokens in pieces, or those about their targets, of the values of all these tokens.

        Parameters
        ----------
        values
            Shape (records, tokens of a record, ...). They are not changed.
        pieces
            The parts of documents in the records: the last token of each has no target.
        """
        if not self._is_of_targets:
            return values
        found = np.empty_like(values)
        flat = found.reshape(-1, *self._shape)
        flat[:-1] = values.reshape(-1, *self._shape)[1:]
        flat[pieces.starts.astype(np.int64) + pieces.lengths.astype(np.int64) - 1] = self.fill
        return found

    # --- values by the numbers of records or documents -----------------------------------------------------------

    def of_documents(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor | npt.NDArray[Any]:
        """Return the values of documents by their numbers, and padding for those below 0."""
        return as_tensor(self.of_numbers(numbers), self.kind)

    def of_numbers(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the values of records or documents by their numbers, as they are stored, and padding below 0."""
        values = self._batches.corpus.field(self.name)
        out = np.empty((len(numbers), self._size), self._dtype)
        known = np.flatnonzero(numbers >= 0)
        if len(known) == len(numbers):
            values.tokens.gather(numbers * self._size, out)
        else:
            out[...] = self.padding
            if len(known):
                rows = np.empty((len(known), self._size), self._dtype)
                values.tokens.gather(numbers[known] * self._size, rows)
                out[known] = rows
        return out.reshape(len(numbers), *self._shape)
