"""Arrays in `.npy` files as an open source of batches."""

from zb_hdf5.converters.array_files import npy_arrays
from zb_hdf5.converters.array_source import ArraySource


def npy_source(paths, **options):
    """Return the records of `.npy` files, and of those in and below folders."""
    return ArraySource(npy_arrays(paths), "npy", **options)
