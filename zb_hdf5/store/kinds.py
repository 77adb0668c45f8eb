"""What lies at a path: batches, or a stream of tokens."""

from __future__ import annotations

import os

from zb_hdf5.files.paths import any_path
from zb_hdf5.formats.registry import BACKENDS, FORMATS, backend_in
from zb_hdf5.spec import STREAM_LAYOUT
from zb_hdf5.store.index import find_index, layout_of


def is_stream(path: str | os.PathLike[str], backend: str = "auto") -> bool:
    """Return whether `path` is a token stream: `.npy`, a folder of `.npy` files, an HDF5 stream, a store of those."""
    return bool(stream_format(path, backend))


def stream_format(path: str | os.PathLike[str], backend: str = "auto") -> str:
    """Return the name of the format of a token stream's files, or "" if `path` is no stream."""
    path = any_path(path)
    index = find_index(path)
    if index is not None and (index.name != path.name or index.exists()):
        streams = [name for name, row in BACKENDS.items() if row.stream]
        return streams[0] if layout_of(index) == STREAM_LAYOUT else ""
    arrays = {row.suffix: name for name, row in FORMATS.items() if not row.indexed}
    if path.is_dir():
        found = [name for suffix, name in arrays.items() if backend == name or any(path.glob(f"*{suffix}"))]
        return found[0] if found else ""
    if path.suffix in arrays or not path.is_file():
        return arrays.get(path.suffix, "")
    name = backend_in(path)
    return name if name and FORMATS[name].holds_stream(path) else ""
