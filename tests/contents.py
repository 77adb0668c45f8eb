"""What files and stores hold, to compare it."""

import numpy as np

from zb_hdf5 import open_reader


def files_in(folder):
    """Return everything below a folder, byte for byte."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def batches_of(path, **options):
    with open_reader(path, **options) as reader:
        return np.array(list(reader))
