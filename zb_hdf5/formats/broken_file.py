"""A damaged or unfinished file as far as it can be read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.formats.corpus import Corpus


class BrokenFile(NamedTuple):
    """A damaged or unfinished file as far as it can be read.

    Attributes
    ----------
    corpus
        The batches that may hold.
    crc32
        The stored crc32 of each batch; None where there are none.
    reason
        The damage that is known already, or "".
    """

    corpus: Corpus
    crc32: npt.NDArray[np.uint32] | None
    reason: str
