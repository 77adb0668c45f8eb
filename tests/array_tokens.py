"""Arrays in `.npy` files as an open source of batches."""

from zb_hdf5.converters.array_file import ArrayFile
from zb_hdf5.converters.array_source import ArraySource
from zb_hdf5.converters.source_paths import SourcePaths


def npy_source(paths, **options):
    """Return the records of `.npy` files, and of those in and below folders."""
    return ArraySource([*map(ArrayFile, SourcePaths().arrays(paths))], "npy", **options)
