"""The formats, and what their sources offer. A new one is a file in this folder and a row in `FORMATS`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Final, cast

from zb_hdf5.columns.writer import FileWriter


@dataclass(frozen=True)
class Format:
    """A row of the registry.

    Attributes
    ----------
    suffix
        Of one file.
    writer
        "module:class" of its `FileWriter`.
    indexed
        Whether a folder of such files is a store with a `shards.json`.
    """

    suffix: str
    writer: str
    indexed: bool

    def writer_class(self) -> type[FileWriter]:
        module, _, name = self.writer.partition(":")
        return cast(type[FileWriter], getattr(import_module(module), name))


FORMATS: Final = {
    "npy": Format(".npy", "zb_hdf5.converters.sources.npy:NpyWriter", indexed=False),
    "hdf5": Format(".h5", "zb_hdf5:HDF5BatchWriter", indexed=True),
    "batch": Format(".batch", "zb_hdf5:BatchFileWriter", indexed=True),
    "dual": Format(".batch", "zb_hdf5.formats.dual:DualFileWriter", indexed=True),
}
