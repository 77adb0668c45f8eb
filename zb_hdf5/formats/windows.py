"""Windows: equally long records over tokens, in batches; stored batches are the windows without an overlap."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from zb_hdf5.errors import ArgumentError
from zb_hdf5.spec import TokenArray

#: The end of the fingerprint of windows: records in a batch, tokens from one to the next, shared tokens.
_IN_FINGERPRINT: Final = re.compile(r":([1-9]\d{0,17})x([1-9]\d{0,17})\+(\d{1,18})$")


class Windows(NamedTuple):
    """The cut of tokens into records: record r has the tokens from `r * stride` on.

    Attributes
    ----------
    size
        Records in a batch.
    length
        Tokens of a record.
    stride
        Tokens from one record to the next.
    """

    size: int
    length: int
    stride: int

    @classmethod
    def of(cls, batch_size: int, seq_len: int, overlap: int = 0) -> Self:
        """Return windows whose last `overlap` tokens begin the next one, so that targets miss none.

        Parameters
        ----------
        batch_size
            Records in a batch.
        seq_len
            Tokens from one record to the next: each record has `overlap` more.
        """
        if overlap < 0:
            raise ArgumentError(f"overlap must be at least 0, found {overlap}")
        return cls(batch_size, seq_len + overlap, seq_len)

    @classmethod
    def in_fingerprint(cls, fingerprint: object) -> Self:
        """Return the windows of batches that have this fingerprint; `ArgumentError` if it is of anything else."""
        found = _IN_FINGERPRINT.search(fingerprint) if isinstance(fingerprint, str) else None
        if found is None:
            raise ArgumentError("expected the fingerprint of windows of a token stream, found another one")
        batch_size, seq_len, overlap = map(int, found.groups())
        return cls.of(batch_size, seq_len, overlap)

    @property
    def in_text(self) -> str:
        """The end of the fingerprint of batches: with another batch size a shuffle of batches means other records."""
        return f"{self.size}x{self.stride}+{self.overlap}"

    @property
    def overlap(self) -> int:
        """Tokens at the end of each record that begin the next one."""
        return self.length - self.stride

    @property
    def batch_stride(self) -> int:
        """Tokens from one batch to the next."""
        return self.size * self.stride

    def resized(self, size: int) -> Self:
        """Return the same records in batches of another size."""
        return self._replace(size=size)

    def widened(self, values: int) -> Self:
        """Return the windows of a field that has so many values for each token."""
        return self._replace(length=self.length * values, stride=self.stride * values)

    def cut(self, num_tokens: int) -> tuple[int, int]:
        """Return how many whole batches fit into so many tokens, and how many records after them."""
        if self.size < 1 or self.stride < 1:
            return 0, 0
        records = max(0, num_tokens - self.overlap) // self.stride
        return divmod(records, self.size)

    def starts(self, records: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Return the first tokens of records.

        Parameters
        ----------
        records
            Numbers of records of `length` tokens.
        length
            A divisor of the length of the windows: each of them then counts as several records.

        Raises
        ------
        ArgumentError
            If windows that overlap are to be cut.
        """
        if length in (self.length, self.stride):
            return records * self.stride
        if self.overlap:
            raise ArgumentError(
                "records that overlap cannot be cut into shorter ones; pass another seq_len where they are opened"
            )
        return records * length

    def batches_in(self, flat: TokenArray, num_batches: int) -> npt.NDArray[Any]:
        """Return all batches as one view of the tokens, shape `(num_batches, size, length)`."""
        strides = [count * flat.itemsize for count in (self.batch_stride, self.stride, 1)]
        return np.ndarray((num_batches, self.size, self.length), flat.dtype, flat, 0, strides)
