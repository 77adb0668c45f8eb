"""The memory of the values of steps: that of a step that nobody has any more is filled again."""

from __future__ import annotations

from collections import deque
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zb_hdf5.files.large_array import large_array

#: Fewer bytes are left to the C library, which soon keeps them for the next step; more than 32 MiB it never keeps.
LEAST_BYTES: Final = 4 << 20
#: Arrays without an owner that are kept, at most. A loop has the values of one step while the next step is read.
MOST_KEPT: Final = 4
_BYTES: Final = np.dtype(np.uint8)


class StepMemory:
    """Memory for the values of a field in one step after the other. Thread-safe, usable after fork; a copy has none.

    New memory costs a page fault for each page, which takes longer than the copy of values that it is for.
    """

    def __init__(self) -> None:
        self._kept: deque[npt.NDArray[np.uint8]] = deque(maxlen=MOST_KEPT)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array with any values in it. No view, tensor or array elsewhere uses a part of it."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < LEAST_BYTES:
            return np.empty(shape, dtype)
        lent = _Lent(self._memory(num_bytes), num_bytes, self._kept)
        return np.asarray(lent).view(dtype).reshape(shape)

    def _memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the memory that came back last, or new memory if that has too few bytes."""
        try:
            kept = self._kept.pop()
        except IndexError:  # another thread may have taken the last one
            kept = np.empty(0, np.uint8)
        return kept if len(kept) >= num_bytes else large_array((num_bytes,), _BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        return StepMemory, ()


class _Lent:
    """Memory until the last array over it is gone, which then gives it back. NumPy makes arrays of it.

    Parameters
    ----------
    memory
        The memory.
    num_bytes
        The bytes of it that the arrays have.
    kept
        The place that it comes back to.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], num_bytes: int, kept: deque[npt.NDArray[np.uint8]]) -> None:
        self._memory = memory
        self._kept = kept
        self.__array_interface__ = memory[:num_bytes].__array_interface__

    def __del__(self) -> None:
        self._kept.append(self._memory)
