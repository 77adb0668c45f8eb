"""What lies at a path: batches, or a stream of tokens."""

from __future__ import annotations

import os
from pathlib import Path

from zb_hdf5.core.files import regular
from zb_hdf5.spec import HDF5_MAGIC, INDEX_NAME, STREAM_LAYOUT
from zb_hdf5.store.index import layout_of


def is_stream(path: str | os.PathLike[str], backend: str = "auto") -> bool:
    """Return whether `path` is a token stream: `.npy`, a folder of `.npy` files, an HDF5 stream, a store of those."""
    path = Path(path)
    index = path if path.name == INDEX_NAME else path / INDEX_NAME
    if index.exists():
        return layout_of(index) == STREAM_LAYOUT
    if path.is_dir():
        return backend == "npy" or any(path.glob("*.npy"))
    if path.suffix == ".npy" or not path.is_file():
        return path.suffix == ".npy"
    with open(path, "rb", opener=regular) as file:
        is_hdf5 = file.read(len(HDF5_MAGIC)) == HDF5_MAGIC
    if not is_hdf5:
        return False
    from zb_hdf5.formats.hdf5.stream_reader import is_stream_file  # h5py, which a .batch does not need

    return is_stream_file(path)
