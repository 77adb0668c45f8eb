"""Large arrays that files are read into: they begin at a place of a page that no processor copies to slowly."""

from __future__ import annotations

import mmap
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

#: Arrays begin so many bytes after a page. Files are read and mapped from the beginning of one, and some processors
#: copy to an address 1 to 31 bytes further on at a fifth of the rate; arrays of the C library are 16 bytes further on.
AFTER_PAGE: Final = 64


def large_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a new array with any values in it."""
    num_bytes = prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + mmap.PAGESIZE + AFTER_PAGE, np.uint8)
    start = -memory.ctypes.data % mmap.PAGESIZE + AFTER_PAGE
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
