"""What repair works on: a damaged or unfinished file, as far as it can be read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zb_hdf5.columns.reader import BatchReader


class BrokenFile(NamedTuple):
    """A damaged or unfinished file as far as it can be read.

    Attributes
    ----------
    reader
        Of the batches that may hold; `complete` says whether the writer had finished.
    crc32
        The stored crc32 rows, where there are any.
    reason
        What is known to be wrong already; "" if nothing is.
    """

    reader: BatchReader
    crc32: npt.NDArray[np.uint32] | None
    reason: str


def open_unfinished(reader: BatchReader) -> BrokenFile:
    """Take what a reader can open as it is; the reader is closed if its crc32 rows cannot be read."""
    try:
        return BrokenFile(reader, reader.stored_crc32(), "" if reader.complete else "its writer has not finished")
    except BaseException:
        reader.close()
        raise
