"""The file formats that hold batches: a row of facts for each, and the code that serves it.

A new format is one file with a reader and a writer, and one row in `BACKENDS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from zb_hdf5.columns.reader import BatchReader
from zb_hdf5.columns.writer import FileWriter
from zb_hdf5.core.files import regular
from zb_hdf5.errors import ConvertError, FormatError
from zb_hdf5.spec import BATCH_MAGIC, HDF5_MAGIC, INDEX_NAME


@dataclass(frozen=True)
class Backend:
    """A row of the registry: a file format and the code that serves it.

    Attributes
    ----------
    suffix
        Of the files it writes.
    magic, magic_offsets
        The bytes that tell its files, and where they may stand.
    reader, writer
        "module:class", imported when first needed.
    """

    suffix: str
    magic: bytes
    magic_offsets: tuple[int, ...]
    reader: str
    writer: str

    def reader_class(self) -> Callable[..., BatchReader]:
        return cast(Callable[..., BatchReader], _load(self.reader))

    def writer_class(self) -> type[FileWriter]:
        return cast(type[FileWriter], _load(self.writer))


BACKENDS: Final = {
    "batch": Backend(
        ".batch", BATCH_MAGIC, (0,), "zb_hdf5.formats.native:BatchFileReader", "zb_hdf5.formats.native:BatchFileWriter"
    ),
    "hdf5": Backend(
        ".h5",
        HDF5_MAGIC,
        (0, 512, 1024, 2048),  # behind a user block HDF5 doubles the offset; nobody uses more
        "zb_hdf5.formats.hdf5.reader:HDF5BatchReader",
        "zb_hdf5.formats.hdf5.writer:HDF5BatchWriter",
    ),
}


def detect_backend(path: str | os.PathLike[str]) -> str:
    """Return the name of the backend that serves a file unless another one is asked for. Raises as below."""
    return detect_backends(path)[0]


def detect_backends(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the backends whose magic bytes the file carries: both for a stamped `.batch`.

    Raises
    ------
    FormatError
        If no backend knows the file.
    """
    path = Path(path)
    with open(path, "rb", opener=regular) as file:
        head = file.read(4096)
    found = [
        name
        for name, backend in BACKENDS.items()
        if any(head.startswith(backend.magic, offset) for offset in backend.magic_offsets)
    ]
    if found:
        return found
    raise FormatError(
        f"{path}: no known file: expected a .batch file (magic {BATCH_MAGIC!r}), an HDF5 file or a {INDEX_NAME}, "
        f"found {head[:8]!r}"
    )


def backend_of_suffix(path: str | os.PathLike[str]) -> str:
    """Return the backend that writes files with the suffix of `path`.

    Raises
    ------
    ConvertError
        If none does.
    """
    path = Path(path)
    for name, backend in BACKENDS.items():
        if path.suffix == backend.suffix:
            return name
    suffixes = " or ".join(backend.suffix for backend in BACKENDS.values())
    raise ConvertError(f"{path}: expected a name that ends in {suffixes}, or backend=")


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
