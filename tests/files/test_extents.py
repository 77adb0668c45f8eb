"""Offsets of tokens in a file."""

import numpy as np
import pytest

from zb_hdf5.errors import BatchIndexError
from zb_hdf5.files.ranges import Extents, Run


@pytest.mark.parametrize("runs", [[Run(64, 32, 9)], [Run(64, 32, 4), Run(512, 64, 5)]])
@pytest.mark.parametrize("start", [71, 72, 200])
def test_tokens_behind_the_last_extent_are_an_error(runs, start):
    extents = Extents(runs, 32)
    with pytest.raises(BatchIndexError, match="after the last one"):
        list(extents.places_of_tokens(start, np.empty(2, "<u4")))
    assert [offset for offset, _ in extents.places_of_tokens(71, np.empty(1, "<u4"))] == [
        runs[-1].base + (runs[-1].num_batches - 1) * runs[-1].stride + 28
    ]
