"""Large arrays begin at a place of a page that no processor copies to slowly."""

import mmap

import numpy as np
import pytest

from zb_hdf5.files.large_array import AFTER_PAGE, large_array


@pytest.mark.parametrize("shape", [(0,), (3,), (4, 32, 512), (1 << 22,)])
@pytest.mark.parametrize("dtype", ["u1", "f2", "i8", "S3", [("a", "u1"), ("b", "f4")]])
def test_an_array_is_memory_of_its_own(shape, dtype):
    dtype = np.dtype(dtype)
    array, other = large_array(shape, dtype), large_array(shape, dtype)
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert not array.size or array.ctypes.data % mmap.PAGESIZE == AFTER_PAGE
    array[...] = np.zeros((), dtype)
    other.view(np.uint8)[...] = 255
    assert not array.view(np.uint8).any()
