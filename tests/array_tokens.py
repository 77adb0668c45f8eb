"""Arrays in `.npy` files as an open source of batches."""

from zb_hdf5.converters.array_file import ArrayFile
from zb_hdf5.converters.array_source import ArraySource
from zb_hdf5.converters.source_paths import SourcePaths
from zb_hdf5.read_as import AS_STORED


def npy_source(paths, **options):
    """Return the records of `.npy` files, and of those in and below folders."""
    return ArraySource([*map(ArrayFile, SourcePaths().flat(paths, "npy", AS_STORED)[1])], "npy", **options)
