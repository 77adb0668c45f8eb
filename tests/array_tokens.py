"""Arrays in `.npy` files as an open source of batches."""

from zb_hdf5.converters.array_files import npy_arrays
from zb_hdf5.converters.array_source import ArraySource
from zb_hdf5.files.listing import files_at


def npy_source(paths, **options):
    """Return the records of `.npy` files, and of those in and below folders."""
    return ArraySource(npy_arrays(files_at(paths, ".npy")), "npy", **options)
